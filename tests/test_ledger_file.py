"""The ledger's file: any prefix of the records is a run, however they are grouped; bit for bit."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from durable import live
from headway.core.advantages import Baseline, group_advantages
from headway.core.ledger import LOST, SampleState
from headway.core.records import Accepted, Admitted, Lost, Record, RewardTotals, Served
from headway.core.rollout import Group, GroupId, Task, TrainableGroup
from headway.errors import StoreError
from headway.store.database import RunDatabase
from headway.store.journal import GroupedJournal
from headway.store.recovery import read_state
from rollouts import rollout
from test_durable import durable_config

TABLES = ("samples", "batches", "requeued", "evals", "state")


def contents(database: RunDatabase) -> dict[str, Any]:
    found = {name: database.rows(f"SELECT * FROM {name} ORDER BY 1") for name in TABLES}
    return {**found, "rollouts": database.rows("SELECT * FROM rollouts ORDER BY rowid")}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """Of a run that drops, rejects and batches."""
    folder = tmp_path_factory.mktemp("recorded")
    taken: list[Record] = []
    config = durable_config("drop", 15, max_head_offpolicyness=1)
    live(config, folder, on_record=taken.append)
    kinds = {type(one) for one in taken}
    assert {Admitted, Accepted, Served} <= kinds
    assert any(isinstance(one, Lost) and one.is_requeued for one in taken)
    return taken


def test_grouping_does_not_matter(records: list[Record], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    found = []
    for number in range(6):
        database = RunDatabase(tmp_path / f"{number}.db", is_safe=False)
        cuts = sorted(rng.integers(0, len(records), 1 if number == 0 else 5**number % 900))
        for start, end in zip([0, *cuts], [*cuts, len(records)], strict=True):
            database.apply(records[start:end])
        found.append(contents(database))
        database.close()
    assert all(one == found[0] for one in found)


def test_every_prefix_is_a_run_that_adds_up(records: list[Record], tmp_path: Path) -> None:
    database = RunDatabase(tmp_path / "ledger.db", is_safe=False)
    served = 0
    for number, record in enumerate(records):
        database.apply([record])
        if isinstance(record, Served):
            served = record.version
        if number % 7 == 0:
            state = read_state(database, served)
            state.check(8)
            state.ledger(8).check()
            waiting = {one.group.group_id for _, one in state.accepted}
            assert not waiting & {group_id for group_id, _ in state.interrupted}


def test_a_group_comes_back_bit_for_bit(tmp_path: Path) -> None:
    versions: list[Sequence[int]] = [(0, 0, 1), (), (5, 4, 4, 5)]
    rollouts = tuple(
        msgspec.structs.replace(
            rollout(7, episode, versions=one, reward=0.1 + episode, prompt_tokens=episode),
            metrics={"solved": 0.1 * episode},
        )
        for episode, one in enumerate(versions)
    )
    task = Task(env="test", key="k", position=3, data={"question": "1+1", "n": np.int64(2)})
    group = Group(group_id=GroupId(7), task=task, rollouts=rollouts)
    advantages = group_advantages(group.rewards, Baseline.GRPO)
    totals = RewardTotals(total=1 / 3, count=9)
    database = RunDatabase(tmp_path / "ledger.db")
    database.apply([Admitted(group_id=group.group_id, task=task, version=2)])
    trainable = TrainableGroup(group=group, advantages=advantages)
    database.apply([Accepted(trainable=trainable, rewards=totals)])
    state = read_state(database, 0)
    ((admission, back),) = state.accepted
    assert admission.version == 2 and state.rewards == totals
    assert back.group.task.data == {"question": "1+1", "n": 2}
    assert back.advantages.tobytes() == advantages.tobytes()
    for one, again in zip(rollouts, back.group.rollouts, strict=True):
        for name in ("token_ids", "loss_mask", "logprobs"):
            before, after = getattr(one, name), getattr(again, name)
            assert before.dtype == after.dtype and before.tobytes() == after.tobytes()
        for name in one.__struct_fields__:
            if name not in ("token_ids", "loss_mask", "logprobs"):
                assert getattr(one, name) == getattr(again, name)


def test_a_failed_transaction_writes_nothing_and_nothing_follows_it(tmp_path: Path) -> None:
    database = RunDatabase(tmp_path / "ledger.db")
    good = Admitted(group_id=GroupId(0), task=_task({}), version=0)
    bad = msgspec.structs.replace(good, group_id=GroupId(1), task=_task({"what": object()}))

    async def main() -> None:
        async def apply(records: Sequence[Record]) -> None:
            await asyncio.to_thread(database.apply, records)

        journal = GroupedJournal(apply)
        journal.record(good)
        await journal.flush()
        journal.record(msgspec.structs.replace(good, group_id=GroupId(2)))
        journal.record(bad)
        for _ in range(2):
            with pytest.raises(StoreError, match="can be resumed"):
                await journal.flush()
        with pytest.raises(StoreError, match="is not JSON"):
            await journal.run(lambda: None, lambda: None)

    asyncio.run(main())
    assert database.rows("SELECT id FROM samples") == [(0,)]


def test_a_write_that_has_begun_is_finished_when_its_waiter_is_cancelled() -> None:
    written: list[Record] = []

    async def main() -> None:
        begun, may_end = asyncio.Event(), asyncio.Event()

        async def apply(records: Sequence[Record]) -> None:
            begun.set()
            await may_end.wait()
            written.extend(records)

        journal = GroupedJournal(apply)
        journal.record(Served(version=1))
        first = asyncio.create_task(journal.flush())
        await begun.wait()
        first.cancel()
        await asyncio.wait({first})
        journal.record(Served(version=2))
        second = asyncio.create_task(journal.flush())
        await asyncio.sleep(0)
        may_end.set()
        await second

    asyncio.run(main())
    assert written == [Served(version=1), Served(version=2)]


def test_the_states_of_a_file_are_the_ledgers(records: list[Record], tmp_path: Path) -> None:
    """A sample in the file bears the state that its last record gives it."""
    fates: dict[GroupId, str] = {}
    for record in records:
        match record:
            case Admitted(group_id=group_id):
                fates[group_id] = SampleState.RUNNING
            case Lost(group_id=group_id, state=state):
                assert state in LOST
                fates[group_id] = state
            case Accepted(trainable=trainable):
                fates[trainable.group.group_id] = SampleState.ACCEPTED
            case _:
                fates.update(dict.fromkeys(getattr(record, "group_ids", ()), SampleState.BATCHED))
    database = RunDatabase(tmp_path / "ledger.db", is_safe=False)
    database.apply(records)
    assert dict(database.rows("SELECT id, state FROM samples")) == fates


def _task(data: dict[str, Any]) -> Task:
    return Task(env="t", key="0", position=0, data=data)
