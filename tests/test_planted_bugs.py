"""Bugs planted one by one: the simulated faults must find each of them, within a few seeds.

Run as a program, it prints for each bug the first seeds that find it.
"""

import asyncio
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from headway.core import bound
from headway.core.ages import Ages
from headway.core.ledger import Ledger, SampleState
from headway.core.records import RunState
from headway.core.rollout import Batch, Group, Rollout
from headway.engines.keeper import Keeper
from headway.errors import HeadwayError
from headway.loop.dispatcher import Dispatcher
from headway.loop.policy import PolicyHandle
from headway.loop.rollout_runner import RolloutRunner, SampleRequest
from headway.loop.ship_gate import ShipGate
from headway.loop.train_sink import TrainSink
from headway.loop.weight_watcher import VersionServed, WeightWatcher
from headway.sim.faults.draw import draw
from headway.sim.faults.invariants import UNEXPECTED
from headway.sim.faults.run import run_schedule
from headway.store import database, recovery
from headway.store.batches import batch_path, read_batch, write_batch
from headway.store.journal import GroupedJournal
from headway.store.run_store import ParquetRunStore
from headway.trainer.link import FolderTrainerLink

Patch = Callable[[pytest.MonkeyPatch], None]
MOST_SEEDS = 200
"""When the seeds that are known to find a bug do not any more."""
BUGS: dict[str, tuple[Patch, tuple[int, ...]]] = {}


def planted(*seeds: int) -> Callable[[Patch], Patch]:
    """A bug, and seeds that find it."""

    def register(patch: Patch) -> Patch:
        BUGS[patch.__name__] = (patch, seeds)
        return patch

    return register


@planted(5, 9)
def skip_the_counter_restore(m: pytest.MonkeyPatch) -> None:
    """And every check of Headway's own that would say so."""
    m.setattr(RunState, "num_trained", lambda self, batch_size: 0)
    m.setattr(RunState, "check", lambda self, batch_size: None)
    m.setattr("headway.loop.orchestrator.check_start", lambda *_: None)
    m.setattr("headway.loop.orchestrator.check_first_step", lambda *_: None)


@planted(0, 1)
def ship_before_persist(m: pytest.MonkeyPatch) -> None:
    async def write_later(self: Any, batch: Batch) -> None:
        path = batch_path(self._run_dir, batch.step)
        asyncio.get_running_loop().call_later(0.5, write_batch, path, batch)

    m.setattr(ParquetRunStore, "write_batch", write_later)


@planted(18, 29)
def forget_a_requeue(m: pytest.MonkeyPatch) -> None:
    m.setattr(Dispatcher, "requeue", lambda self, tasks: None)


@planted(156, 184)
def forget_a_requeue_on_disk(m: pytest.MonkeyPatch) -> None:
    m.setattr("headway.store.database._REQUEUE", "SELECT ?")


@planted(168)
def swallow_a_watcher_error(m: pytest.MonkeyPatch) -> None:
    real = WeightWatcher._apply

    async def apply(self: WeightWatcher) -> None:
        try:
            await real(self)
        except HeadwayError:
            await asyncio.get_running_loop().create_future()

    m.setattr(WeightWatcher, "_apply", apply)


@planted(0, 1)
def double_count_an_accepted_sample(m: pytest.MonkeyPatch) -> None:
    real = Ledger.move

    def move(self: Ledger, group_id: Any, to: SampleState, reason: str | None = None) -> None:
        real(self, group_id, to, reason)
        self.counts[to] += to is SampleState.ACCEPTED

    m.setattr(Ledger, "move", move)


@planted(0, 1)
def miss_a_wake_up(m: pytest.MonkeyPatch) -> None:
    """Nobody who waits for a version hears of it."""

    def advance(self: PolicyHandle, version: int) -> None:
        self._version = version

    m.setattr(PolicyHandle, "advance", advance)


@planted(1, 4)
def restore_the_task_source_one_too_far(m: pytest.MonkeyPatch) -> None:
    real = recovery.read_state

    def read_state(*words: Any) -> RunState:
        state = real(*words)
        return dataclasses.replace(state, next_position=state.next_position + 1)

    m.setattr("headway.resume.read_state", read_state)


@planted(1, 4)
def forget_interrupted_prompts(m: pytest.MonkeyPatch) -> None:
    real = Dispatcher.restore

    def restore(self: Dispatcher, state: RunState) -> None:
        real(self, dataclasses.replace(state, interrupted=()))

    m.setattr(Dispatcher, "restore", restore)


@planted(32, 39)
def trim_off_by_one(m: pytest.MonkeyPatch) -> None:
    """And Headway's own assertion of the bound is gone."""

    def trimmed(rollout: Rollout, oldest: int) -> Rollout:
        return bound.trimmed(rollout, oldest - 1)

    m.setattr("headway.loop.train_sink.trimmed", trimmed)
    m.setattr(ShipGate, "_checked_ages", lambda _, batch: Ages.of_batch(batch.step, batch.rollouts))


@planted(0, 1)
def take_a_sample_twice(m: pytest.MonkeyPatch) -> None:
    """It stays in the buffer, and the ledger says nothing."""
    real, move = TrainSink._take, Ledger.move

    def take(self: Any, step: int, selection: Any) -> Batch:
        first = min(selection.taken)
        entry = self._buffer[first]
        batch = real(self, step, selection)
        self._buffer[first] = entry
        return batch

    def moved(self: Any, group_id: Any, to: SampleState, reason: str | None = None) -> None:
        if self._states.get(group_id) is not SampleState.BATCHED or to is SampleState.TRAINED:
            move(self, group_id, to, reason)

    m.setattr(TrainSink, "_take", take)
    m.setattr(Ledger, "move", moved)


@planted(1, 7)
def accept_a_corrupt_checkpoint(m: pytest.MonkeyPatch) -> None:
    m.setattr("headway.trainer.checkpoints._damage", lambda version, path: None)


@planted(0, 1)
def bump_the_version_before_the_load(m: pytest.MonkeyPatch) -> None:
    async def apply(self: Any) -> None:
        while True:
            await self._seen.until(lambda: self._policy.announced > self._policy.version)
            weights = self._newest
            self._policy.advance(weights.version)
            self._on_served(VersionServed(weights, 0.0))
            await self._engine.update_weights(weights)

    m.setattr(WeightWatcher, "_apply", apply)


@planted(0, 1)
def acknowledge_before_the_journal_is_written(m: pytest.MonkeyPatch) -> None:
    async def flush(self: GroupedJournal) -> None:
        return None

    m.setattr(GroupedJournal, "flush", flush)


@planted(0, 1)
def leak_a_task(m: pytest.MonkeyPatch) -> None:
    real = RolloutRunner.run
    leaked: set[asyncio.Task[None]] = set()

    async def run(self: RolloutRunner, request: SampleRequest) -> Group:
        if request.group_id == 3:
            leaked.add(asyncio.create_task(asyncio.sleep(1e6)))
        return await real(self, request)

    m.setattr(RolloutRunner, "run", run)


@planted(1, 5)
def rebuild_a_batch_that_is_shipped_again(m: pytest.MonkeyPatch) -> None:
    async def read_again(self: Any, step: int) -> Batch:
        path = batch_path(self._run_dir, step)
        batch = read_batch(path)
        again = msgspec.structs.replace(batch, groups=batch.groups[::-1])
        write_batch(path, again)
        return again

    m.setattr(ParquetRunStore, "read_batch", read_again)


@planted(0, 1)
def forget_to_tell_the_trainer_of_the_end(m: pytest.MonkeyPatch) -> None:
    async def finish(self: FolderTrainerLink, num_steps: int) -> None:
        return None

    m.setattr(FolderTrainerLink, "finish", finish)


@planted(5, 50)
def let_an_engine_return_with_old_weights(m: pytest.MonkeyPatch) -> None:
    async def bring_up(self: Any, member: Any, target: Any) -> None:
        await self.connect(member, None)

    m.setattr(Keeper, "_bring_up", bring_up)


@planted(1, 5)
def keep_what_was_published_after_the_checkpoint(m: pytest.MonkeyPatch) -> None:
    m.setattr("headway.resume.published_versions", lambda directory: [])


@planted(1, 5)
def lose_the_spool(m: pytest.MonkeyPatch) -> None:
    """And the sum that would tell."""
    m.setattr("headway.store.recovery._accepted", lambda database: [])
    m.setattr(RunState, "check", lambda self, batch_size: None)


@planted(0, 1)
def write_a_transaction_in_part(m: pytest.MonkeyPatch) -> None:
    """The states of some samples are lost."""
    m.setattr("headway.store.database._MOVE", f"{database._MOVE} AND id % 7")


def finds(seed: int) -> str | None:
    """The invariant that does not hold."""
    report = run_schedule(draw(seed))
    if report.violation is None:
        return None
    assert report.violation.invariant != UNEXPECTED, report.violation.operands
    return report.violation.invariant


@pytest.mark.parametrize("name", BUGS)
def test_every_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, known = BUGS[name]
    with monkeypatch.context() as m:
        patch(m)
        found = next((seed for seed in (*known, *range(MOST_SEEDS)) if finds(seed)), None)
    assert found is not None, f"{name} was not found within {MOST_SEEDS} seeds"
    assert finds(found) is None, f"without the bug, seed {found} is to pass"


def search(names: Sequence[str], num_seeds: int) -> None:
    """Print which seeds find which bug."""
    for name in names or [*BUGS]:
        found = {}
        with pytest.MonkeyPatch.context() as m:
            BUGS[name][0](m)
            for seed in range(num_seeds):
                if (invariant := finds(seed)) is not None:
                    found[seed] = invariant
                if len(found) == 3:
                    break
        print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    search(sys.argv[1:], MOST_SEEDS)
