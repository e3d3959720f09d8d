"""The ledger and the spool as one SQLite file, `RUN/ledger.db`: any tool can read it.

| table    | a row is                                                                              |
|----------|---------------------------------------------------------------------------------------|
| samples  | one sample: prompt, version of its (last) admission, state, reason, step of its       |
|          | batch, and `[tokens, in the loss, turns]` of its rollouts, once its fate is decided   |
| rollouts | the spool: one rollout of a finished sample that is in no batch file yet              |
| batches  | one batch that is on disk; its samples bear its step since the same transaction. What |
|          | the summary counts of it, and of its step once that is trained                        |
| requeued | the prompt of a dropped sample, until it is issued again                              |
| evals    | one evaluation of one environment                                                     |
| state    | what there is one of: version served, running reward totals, pacing, and how many     |
|          | samples failed or were rejected in a row                                              |

A trained sample is one whose step is below the version served: the view `lives` says so. Vectors
are little-endian blobs: `token_ids` int32, `logprobs` float32, `loss_mask` bits (`numpy.packbits`).

Everything here is synchronous; whoever must not block calls it in a thread.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, assert_never

import msgspec
import numpy as np

from headway.core.ledger import SampleState
from headway.core.records import (
    Accepted,
    Admitted,
    Batched,
    Evaluated,
    Lost,
    Record,
    RewardTotals,
    Served,
    Trained,
)
from headway.core.rollout import FinishReason, GroupId, Rollout, Source, Timings, TrainableGroup
from headway.core.totals import InARow
from headway.core.versions import VersionRuns
from headway.errors import StoreError

FORMAT = 2
"""Of the file, in its `user_version`; another one is refused."""

_SCHEMA = """
CREATE TABLE samples (
    id INTEGER PRIMARY KEY, env TEXT NOT NULL, key TEXT NOT NULL, position INTEGER NOT NULL,
    data TEXT NOT NULL, version INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT, step INTEGER,
    lengths TEXT
);
CREATE TABLE rollouts (
    sample INTEGER NOT NULL, episode INTEGER NOT NULL, env TEXT NOT NULL, reward REAL NOT NULL,
    advantage REAL NOT NULL, num_turns INTEGER NOT NULL, finish_reason TEXT NOT NULL,
    source TEXT NOT NULL, num_trimmed INTEGER NOT NULL, version_runs TEXT NOT NULL,
    timings TEXT NOT NULL, metrics TEXT NOT NULL, token_ids BLOB NOT NULL, loss_mask BLOB NOT NULL,
    logprobs BLOB NOT NULL
);
CREATE INDEX rollouts_of_sample ON rollouts (sample);
CREATE TABLE batches (step INTEGER PRIMARY KEY, totals TEXT, trained TEXT);
CREATE TABLE requeued (position INTEGER PRIMARY KEY, sample INTEGER NOT NULL);
CREATE TABLE evals (version INTEGER NOT NULL, result TEXT NOT NULL);
CREATE TABLE state (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE VIEW lives AS SELECT id, env, key, position, version, step, reason,
    CASE WHEN step < (SELECT CAST(value AS INTEGER) FROM state WHERE name = 'served')
    THEN 'trained' ELSE state END AS state FROM samples;
"""

_ADMIT = """
INSERT INTO samples (id, env, key, position, data, version, state)
VALUES (?, ?, ?, ?, ?, ?, 'running')
ON CONFLICT (id) DO UPDATE SET version = excluded.version, state = 'running'
"""
_SPOOL = f"INSERT INTO rollouts VALUES ({', '.join('?' * 15)})"
_MOVE = "UPDATE samples SET state = ?, reason = ?, step = ?, lengths = ? WHERE id = ?"
_REQUEUE = "INSERT INTO requeued SELECT position, id FROM samples WHERE id = ?"


class RunDatabase:
    """The ledger of a run, made when it does not exist.

    Args:
        path: the file; its journal files lie beside it.
        is_safe: whether a transaction survives a crash of the machine (an fsync each), or only one
            of the process.

    Raises:
        StoreError: it cannot be opened, or is of another format.
    """

    def __init__(self, path: Path, *, is_safe: bool = True) -> None:
        self.path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute(f"PRAGMA synchronous = {'FULL' if is_safe else 'OFF'}")
            (found,) = self._db.execute("PRAGMA user_version").fetchone()
            if found == 0:
                self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT")
            elif found != FORMAT:
                raise StoreError(
                    f"{path} has format {found}, not {FORMAT}: read it with the Headway that "
                    "wrote it"
                )
            self._has_requeued = True  # until it is known
            self._in_a_row = InARow(**(self.state("in_a_row") or {}))
        except sqlite3.Error as error:
            raise StoreError(f"cannot open {path}: {error}") from error

    def apply(self, records: Sequence[Record]) -> None:
        """Write records in one transaction. Raises StoreError; then none of them is written."""
        try:
            changes = _Changes(records, self._in_a_row)
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._write(changes)
                self._db.execute("COMMIT")
                self._in_a_row = changes.in_a_row
            except BaseException:  # an interrupt, too, must leave no half of it; re-raised
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        except (sqlite3.Error, TypeError, ValueError, OverflowError) as error:
            raise StoreError(
                f"cannot write {len(records)} records to {self.path}: {error}; what was recorded "
                "before is safe, and the run can be resumed"
            ) from error

    def _write(self, changes: "_Changes") -> None:
        many = self._db.executemany
        many(_ADMIT, changes.admitted)
        many(_SPOOL, changes.spooled())
        many(_MOVE, changes.moved)
        many("DELETE FROM rollouts WHERE sample = ?", changes.unspooled)
        many("INSERT INTO batches (step, totals) VALUES (?, ?)", changes.batches)
        many("UPDATE batches SET trained = ? WHERE step = ?", changes.trained)
        many("INSERT INTO evals VALUES (?, ?)", changes.evals)
        many("INSERT OR REPLACE INTO state VALUES (?, ?)", list(changes.state.items()))
        if self._has_requeued or changes.has_requeued:
            for statement, value in changes.requeue:
                self._db.execute(statement, (value,))
            self._has_requeued = bool(self.rows("SELECT 1 FROM requeued LIMIT 1"))

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Rows of a query. Raises StoreError."""
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"cannot read {self.path}: {error}") from error

    def each(self, query: str) -> Iterator[tuple[Any, ...]]:
        """Rows of a query, one after the other. Raises StoreError."""
        try:
            yield from self._db.execute(query)
        except sqlite3.Error as error:
            raise StoreError(f"cannot read {self.path}: {error}") from error

    def state(self, name: str) -> Any:
        """What there is one of, or None."""
        found = self.rows("SELECT value FROM state WHERE name = ?", name)
        return json.loads(found[0][0]) if found else None

    def close(self) -> None:
        """Close the file. Raises StoreError."""
        try:
            self._db.close()
        except sqlite3.Error as error:
            raise StoreError(f"cannot close {self.path}: {error}") from error


class _Changes:
    """What a group of records comes to, by table: one statement for many rows costs a fifth of many
    statements, and a sample that finished and was batched since needs no row in the spool."""

    def __init__(self, records: Iterable[Record], in_a_row: InARow) -> None:
        self.admitted: list[tuple[Any, ...]] = []
        self.moved: list[tuple[str, str | None, int | None, str | None, int]] = []
        self.unspooled: list[tuple[int]] = []
        self.batches: list[tuple[int, str]] = []
        self.trained: list[tuple[str, int]] = []
        self.evals: list[tuple[int, str]] = []
        self.state: dict[str, str] = {}
        self.requeue: list[tuple[str, int]] = []
        self.has_requeued = False
        self._accepted: dict[GroupId, TrainableGroup] = {}
        self._failed, self._rejected = in_a_row.failed, dict(in_a_row.rejected)
        for record in records:
            self._add(record)
        self.in_a_row = InARow(failed=self._failed, rejected=self._rejected)
        if self.in_a_row != in_a_row:
            self.state["in_a_row"] = to_json(self.in_a_row)

    def spooled(self) -> Iterator[tuple[Any, ...]]:
        """Rows of the spool."""
        for trainable in self._accepted.values():
            rollouts, advantages = trainable.group.rollouts, trainable.advantages.tolist()
            yield from map(_row, rollouts, advantages)

    def _add(self, record: Record) -> None:
        match record:
            case Admitted(group_id=group_id, task=task, version=version):
                data = _DATA(task.data if type(task.data) is dict else dict(task.data))
                row = (group_id, task.env, task.key, task.position, data, version)
                self.admitted.append(row)
                self.requeue.append(("DELETE FROM requeued WHERE position = ?", task.position))
            case Accepted(trainable=trainable, rewards=rewards):
                group_id = trainable.group.group_id
                self._accepted[group_id] = trainable
                self.moved.append((SampleState.ACCEPTED.value, None, None, None, group_id))
                self._failed = 0
                self._rejected.clear()
                self._count(rewards)
            case Lost(group_id=group_id, state=state, reason=reason, lengths=lengths):
                self.moved.append((state.value, reason, None, to_json(lengths), group_id))
                self._count_lost(state, reason)
                self._unspool(group_id)
                if record.is_requeued:
                    self.requeue.append((_REQUEUE, group_id))
                    self.has_requeued = True
                if record.rewards is not None:
                    self._count(record.rewards)
            case Batched(step=step, group_ids=group_ids, pacing=pacing, totals=totals):
                lengths_of = record.lengths or ((),) * len(group_ids)
                for group_id, lengths in zip(group_ids, lengths_of, strict=True):
                    known = to_json(lengths)
                    self.moved.append((SampleState.BATCHED.value, None, step, known, group_id))
                    self._unspool(group_id)
                self.batches.append((step, to_json(totals)))
                self.state["pacing"] = to_json(pacing.needs)
            case Trained(step=step, totals=totals):
                self.trained.append((to_json(totals), step))
            case Served(version=version):
                self.state["served"] = str(version)
            case Evaluated(result=result):
                self.evals.append((result["version"], to_json(dict(result))))
            case _:
                assert_never(record)

    def _count_lost(self, state: SampleState, reason: str) -> None:
        if state is SampleState.FAILED:
            self._failed += 1
        elif state is SampleState.REJECTED:
            self._failed = 0
            self._rejected[reason] = self._rejected.get(reason, 0) + 1

    def _unspool(self, group_id: GroupId) -> None:
        if self._accepted.pop(group_id, None) is None:
            self.unspooled.append((group_id,))

    def _count(self, rewards: RewardTotals) -> None:
        self.state["rewards"] = f"[{rewards.total!r}, {rewards.count}]"


def to_json(value: Any) -> str:
    """Plain values and numpy's scalars as JSON. Raises TypeError."""
    return msgspec.json.encode(value, enc_hook=_plain).decode()


def _plain(value: object) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} {value!r} is not JSON; keep plain values in it")


_DATA = json.JSONEncoder(default=_plain).encode
"""As the batch files have it."""


def _row(rollout: Rollout, advantage: float) -> tuple[Any, ...]:
    timings = rollout.timings
    return (
        rollout.group_id,
        rollout.episode,
        rollout.env,
        float(rollout.reward),
        advantage,
        rollout.num_turns,
        rollout.finish_reason.value,
        rollout.source.value,
        rollout.num_trimmed,
        to_json(rollout.version_runs.runs),
        to_json([getattr(timings, name) for name in Timings.__struct_fields__]),
        to_json(dict(rollout.metrics)),
        np.ascontiguousarray(rollout.token_ids, "<i4").data,
        np.packbits(rollout.loss_mask).data,
        np.ascontiguousarray(rollout.logprobs, "<f4").data,
    )


def rollout_of(row: Sequence[Any]) -> tuple[Rollout, float]:
    """A rollout and its advantage from a row of the spool, bit for bit. Raises ValueError."""
    token_ids = np.frombuffer(row[12], "<i4").astype(np.int32)
    runs = tuple((version, count) for version, count in json.loads(row[9]))
    rollout = Rollout(
        group_id=GroupId(row[0]),
        episode=row[1],
        env=row[2],
        token_ids=token_ids,
        loss_mask=np.unpackbits(np.frombuffer(row[13], np.uint8), count=len(token_ids)).view(
            np.bool_
        ),
        logprobs=np.frombuffer(row[14], "<f4").astype(np.float32),
        version_runs=VersionRuns(runs),
        reward=row[3],
        num_turns=row[5],
        finish_reason=FinishReason(row[6]),
        timings=Timings(**dict(zip(Timings.__struct_fields__, json.loads(row[10]), strict=True))),
        source=Source(row[7]),
        metrics=json.loads(row[11]),
        num_trimmed=row[8],
    )
    return rollout, row[4]
