"""From the run on disk to the state that a resume begins from."""

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from headway.core.bias import Bias, Fate
from headway.core.ledger import LOST, Admission, SampleState
from headway.core.pacing import PacingState
from headway.core.records import RewardTotals, RunState, batched
from headway.core.rollout import Group, GroupId, Task, TrainableGroup
from headway.core.totals import BatchTotals, InARow, Length, StepTotals
from headway.errors import StoreError
from headway.store.batches import batch_path, read_batch
from headway.store.database import RunDatabase, rollout_of

T = TypeVar("T")

_TASK = "id, env, key, position, data"
_UNBATCHED = "('running', 'accepted')"


def adopt_batch(database: RunDatabase, run_dir: Path) -> bool:
    """Put a batch on record that was written and not recorded before the run was cut off.

    It has not been shipped, but it is whole, and its samples are finished on record. Returns
    whether there was one; a file that is none is deleted, and the batch will be made again. Raises
    StoreError.
    """
    step = num_batches(database)
    path = batch_path(run_dir, step)
    if not path.exists():
        return False
    try:
        batch = read_batch(path)
    except StoreError:
        path.unlink()
        return False
    group_ids = [one.group.group_id for one in batch.groups]
    marks = ", ".join("?" * len(group_ids))
    query = f"SELECT count(*) FROM samples WHERE state = 'accepted' AND id IN ({marks})"
    if database.rows(query, *group_ids) != [(len(group_ids),)]:
        path.unlink()
        return False
    pacing = PacingState(needs=tuple(database.state("pacing") or ()))
    database.apply([batched(batch, BatchTotals.of(batch), pacing)])
    return True


def num_batches(database: RunDatabase) -> int:
    """Batches on record. Raises StoreError when one between them is missing."""
    ((count, newest),) = database.rows("SELECT count(*), max(step) FROM batches")
    if count and newest != count - 1:
        raise StoreError(f"{database.path} holds {count} batches, but the newest is {newest}")
    return int(count)


def read_state(database: RunDatabase, version: int) -> RunState:
    """The run at `version` of its trainer. Raises StoreError when the file contradicts itself."""
    rows = database.rows
    lost: dict[SampleState, dict[str, int]] = defaultdict(dict)
    for state, reason, count in rows(
        "SELECT state, reason, count(*) FROM samples GROUP BY state, reason"
    ):
        if SampleState(state) in LOST:
            lost[SampleState(state)][reason] = count
    ((num_admitted, position),) = rows("SELECT count(*), max(position) FROM samples")
    running = rows(f"SELECT {_TASK} FROM samples WHERE state = 'running' ORDER BY id")
    requeued = rows(
        f"SELECT {_TASK} FROM samples WHERE id IN (SELECT sample FROM requeued) ORDER BY id"
    )
    batched = rows("SELECT id, step FROM samples WHERE step >= ? ORDER BY step, id", version)
    overtaking = rows(
        "SELECT id FROM samples WHERE step IS NOT NULL AND id > "
        f"(SELECT min(id) FROM samples WHERE state IN {_UNBATCHED})"
    )
    evals = rows("SELECT result FROM evals WHERE version <= ? ORDER BY rowid", version)
    total, count = database.state("rewards") or (0.0, 0)
    return RunState(
        version=version,
        num_batches=num_batches(database),
        batched={GroupId(one): step for one, step in batched},
        accepted=tuple(_accepted(database)),
        interrupted=tuple((GroupId(row[0]), _task(row)) for row in running),
        requeued=tuple(_task(row) for row in requeued),
        num_admitted=num_admitted,
        lost=dict(lost),
        next_position=0 if position is None else position + 1,
        overtaking=tuple(GroupId(one) for (one,) in overtaking),
        rewards=RewardTotals(total=total, count=count),
        pacing=PacingState(needs=tuple(database.state("pacing") or ())),
        evals=tuple(json.loads(result) for (result,) in evals),
        batches=_totals(database, "totals", BatchTotals),
        steps=_totals(database, "trained", StepTotals),
        bias=_bias(database),
        in_a_row=InARow(**(database.state("in_a_row") or {})),
    )


def _totals(database: RunDatabase, column: str, kind: type[T]) -> dict[int, T]:
    """By step, where there are some."""
    found = database.rows(f"SELECT step, {column} FROM batches WHERE {column} IS NOT NULL")
    decode = msgspec.json.Decoder(kind | None).decode
    return {step: totals for step, text in found if (totals := decode(text)) is not None}


def _bias(database: RunDatabase) -> Bias:
    """All rollouts whose fate is decided."""
    bias = Bias()
    fates = {
        SampleState.BATCHED.value: Fate.TRAINED,
        SampleState.DROPPED.value: Fate.DROPPED,
        SampleState.REJECTED.value: Fate.REJECTED,
    }
    query = "SELECT env, state, lengths FROM samples WHERE lengths IS NOT NULL ORDER BY id"
    for env, state, lengths in database.each(query):
        if state in fates:
            bias.add(env, fates[state], (Length(*one) for one in json.loads(lengths)))
    return bias


def _task(row: Sequence[Any]) -> Task:
    _, env, key, position, data = row
    return Task(env=env, key=key, position=position, data=json.loads(data))


def _accepted(database: RunDatabase) -> list[tuple[Admission, TrainableGroup]]:
    """In the order in which they finished, which is that of the rows."""
    tasks = {
        row[0]: (row[5], _task(row[:5]))
        for row in database.rows(f"SELECT {_TASK}, version FROM samples WHERE state = 'accepted'")
    }
    found = []
    spool = database.rows("SELECT * FROM rollouts ORDER BY rowid")
    for group_id, rows in groupby(spool, key=lambda row: row[0]):
        version, task = tasks.pop(group_id)
        try:
            rollouts, advantages = zip(*map(rollout_of, rows), strict=True)
        except (ValueError, TypeError) as error:
            raise StoreError(f"{database.path}: sample {group_id} is damaged: {error}") from error
        group = Group(group_id=GroupId(group_id), task=task, rollouts=rollouts)
        trainable = TrainableGroup(group=group, advantages=np.array(advantages, np.float32))
        found.append((Admission(version, task.env), trainable))
    if tasks:
        raise StoreError(f"{database.path}: samples {sorted(tasks)} were accepted and are gone")
    return found
