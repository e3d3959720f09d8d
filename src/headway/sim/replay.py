"""`headway replay`: the recorded inputs of a run through the real loop, in virtual time.

A driver takes the inputs one by one, lets each happen at its recorded instant, and lets the loop
come to rest before the next. Engine, trainer, weight channel and store are nothing but the points
where an input enters. If the decisions that come out are those that were recorded, the run was
decided by its inputs alone: no race, no hidden state, no chance.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway.config import Config
from headway.config.file import load_config
from headway.core.rollout import (
    Batch,
    FinishReason,
    Group,
    GroupId,
    Rollout,
    Source,
    Task,
    Timings,
    TrainableGroup,
)
from headway.core.versions import VersionRuns
from headway.errors import EngineError, EnvironmentFailure, FailureClass, RunDirError, StoreError
from headway.loop.orchestrator import Orchestrator
from headway.loop.rollout_runner import SampleRequest
from headway.loop.signal import Signal
from headway.loop.trace import DECISIONS, digest_of
from headway.ports import Ports, PublishedWeights
from headway.sim.clock import run_virtual
from headway.sim.trainer import RowList
from headway.store.run_dir import RunDir

Row = Mapping[str, Any]

RESUMED = "resumed"
"""Kind of the row from which on a trace goes on after a kill: what ran then, began elsewhere."""

SETTLE_TURNS = 1000
"""Turns of the event loop within which an input must have been taken: a handful are needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """What came out; `difference` is None when every decision is the recorded one."""

    num_inputs: int
    num_decisions: int
    recorded_hash: str | None
    """As the run's summary has it; None when the run left none."""
    replayed_hash: str
    difference: str | None

    @property
    def is_same(self) -> bool:
        """Whether the run was reproduced, decision by decision."""
        return self.difference is None


def replay(run_dir: Path) -> ReplayResult:
    """Replay a run, real or simulated, finished or not.

    Raises:
        RunDirError: there is no trace.
        ConfigError: its configuration cannot be read.
    """
    paths = RunDir(run_dir)
    rows = read_trace(run_dir)
    config = load_config(paths.config, [])
    # A resumed run's summary covers what its trace begins with, and more.
    is_whole = b'"e":"resumed"' not in paths.trace.read_bytes()
    return replay_rows(config, rows, _recorded_hash(paths.summary) if is_whole else None)


def _recorded_hash(summary: Path) -> str | None:
    if not summary.exists():
        return None
    try:
        return msgspec.json.decode(summary.read_bytes(), type=dict[str, Any]).get("trace_hash")
    except msgspec.DecodeError as error:
        raise RunDirError(f"{summary} cannot be read: {error}; replay without it") from error


def read_trace(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of `trace.jsonl`, to the first resume; a last line that a kill cut off is left out.

    Raises:
        RunDirError: there is none, it is empty, or a line in the middle is broken.
    """
    path = RunDir(run_dir).trace
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RunDirError(
            f"{run_dir} holds no trace of a run ({path.name}: {error.strerror}); give the folder "
            "that `run.dir` names"
        ) from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = msgspec.json.decode(line, type=dict[str, Any])
            if not isinstance(row.get("t"), float | int) or not isinstance(row.get("e"), str):
                raise msgspec.ValidationError("a row needs the keys t and e")
            if row["e"] == RESUMED:
                break
            rows.append(row)
        except msgspec.DecodeError as error:
            if number == len(lines):
                break
            raise RunDirError(f"{path}, line {number}: {error}") from error
    if not rows:
        raise RunDirError(f"{path} is empty: the run recorded nothing, or its trace was lost")
    return rows


def replay_rows(
    config: Config, rows: Sequence[Row], recorded_hash: str | None = None
) -> ReplayResult:
    """Replay the rows of a trace under the configuration that they were recorded with."""
    config = config.without_limits()
    run = config.run.model_copy(update={"metrics_interval_seconds": 3600.0})
    quiet = config.model_copy(update={"run": run})
    replayed = RowList()

    async def main() -> tuple[str | None, str]:
        driver = _Driver(quiet, rows, replayed)
        return await driver.run()

    stuck, replayed_hash = run_virtual(main())
    is_whole = recorded_hash is not None
    found = (_damage(rows, recorded_hash), _first_difference(rows, replayed.rows, is_whole), stuck)
    return ReplayResult(
        num_inputs=sum(1 for row in rows if row["e"] not in DECISIONS),
        num_decisions=sum(1 for row in rows if row["e"] in DECISIONS),
        recorded_hash=recorded_hash,
        replayed_hash=replayed_hash,
        difference="; ".join(text for text in found if text) or None,
    )


class _Driver:
    """Everything around the loop: it says when each recorded input happens."""

    name = "recorded engine"

    def __init__(self, config: Config, rows: Sequence[Row], trace: RowList) -> None:
        self._inputs = [row for row in rows if row["e"] not in DECISIONS]
        self._tasks = _tasks(rows)
        self._changed = Signal()
        self._announced: PublishedWeights | None = None
        self._served = self._written = -1
        self._samples: dict[GroupId, asyncio.Future[Row]] = {}
        self._loop = asyncio.get_running_loop()
        ports = Ports(
            engine=self,
            environments={},
            source=self,
            trainer=self,
            channel=self,
            store=self,
            metrics=RowList(),
            trace=trace,
            # An evaluation that never ends: in the run, the last one may have kept the loop alive.
            eval_tasks=[Task(env="eval", key="0", position=0, data={})],
        )
        self._orchestrator = Orchestrator(
            config, ports, check_first_step=False, run_sample=self._run_sample
        )

    async def run(self) -> tuple[str | None, str]:
        """What the loop got stuck on, or None; and the hash of its decisions."""
        running = asyncio.create_task(self._orchestrator.run())
        await self._settle(0)
        stuck = None
        for index, row in enumerate(self._inputs):
            await asyncio.sleep(max(row["t"] - self._loop.time(), 0))
            if self._orchestrator.trace.num_inputs > index:
                continue  # a consequence of the input before: the loop closed admission itself
            stuck = self._happen(row)
            if stuck is None and not await self._settle(index + 1):
                stuck = "the loop did not take it"
            if stuck is not None:
                stuck = f"input {index + 1} at {row['t']:.3f} s ({_text(row)}): {stuck}"
                break
        digest = self._orchestrator.trace.digest
        self._orchestrator.stop()
        self._orchestrator.stop()
        running.cancel()
        await asyncio.wait({running})
        return stuck, digest

    async def _settle(self, num_inputs: int) -> bool:
        """Let the loop take the input, and come to rest; false when it does not take it."""
        for _ in range(SETTLE_TURNS):
            if self._orchestrator.trace.num_inputs >= num_inputs:
                break
            await asyncio.sleep(0)
        else:
            return False
        await asyncio.sleep(1e-9)  # whatever is ready now runs before the clock moves
        return True

    def _happen(self, row: Row) -> str | None:
        match row["e"]:
            case "ended":
                waiting = self._samples.pop(row["id"], None)
                if waiting is None:
                    return "the replay has not admitted this sample"
                if waiting.done():
                    return "the replay has ended already"
                waiting.set_result(row)
            case "announced":
                stats = row.get("stats", {})
                self._announced = PublishedWeights(version=row["version"], path=None, stats=stats)
            case "served":
                self._served = row["version"]
            case "shipped":
                self._written = row["step"]
            case "gave_up":
                self._orchestrator.ship_gate.give_up()
            case "ordered":
                getattr(self._orchestrator.dispatcher, row["what"])()
            case other:
                return f"unknown kind of input {other!r}"
        self._changed.notify()
        return None

    # --- the ports ----------------------------------------------------------------------------

    async def _run_sample(self, request: SampleRequest) -> Group:
        waiting: asyncio.Future[Row] = self._loop.create_future()
        if not request.is_eval:
            self._samples[request.group_id] = waiting
        row = await waiting
        if "failed" in row:
            if row["failed"] == FailureClass.INFRASTRUCTURE:
                raise EngineError("as recorded")
            raise EnvironmentFailure("as recorded")
        return group_of(request, row)

    async def next_task(self) -> Task | None:
        """The recorded prompts in the order of their first admission; then nothing, for ever."""
        task = next(self._tasks, None)
        if task is None:
            await self._loop.create_future()
        return task

    def restore(self, position: int) -> None:
        """A replay begins where its run began."""

    async def wait_newer(self, version: int) -> PublishedWeights:
        """The next recorded announcement."""
        await self._changed.until(
            lambda: self._announced is not None and self._announced.version > version
        )
        assert self._announced is not None
        return self._announced

    async def update_weights(self, weights: PublishedWeights) -> None:
        """Until the engines served it."""
        await self._changed.until(lambda: self._served >= weights.version)

    async def write_batch(self, batch: Batch) -> None:
        """Until it was on disk."""
        await self._changed.until(lambda: self._written >= batch.step)

    async def write_leftovers(self, groups: Sequence[TrainableGroup]) -> None:
        """They were written by the run."""

    async def read_batch(self, step: int) -> Batch:
        """A replay begins where its run began."""
        raise StoreError(f"batch {step} is not in a trace")

    async def ship(self, batch: Batch) -> None:
        """The trainer has it."""

    async def finish(self, num_steps: int) -> None:
        """Nothing to save."""

    async def generate(self, request: Any) -> Any:
        """Samples are not generated again."""
        raise EngineError("a replay generates nothing")

    async def statistics(self) -> Mapping[str, Any]:
        """There is no engine."""
        return {}

    async def aclose(self) -> None:
        """There is nothing to release."""


def group_of(request: SampleRequest, row: Row) -> Group:
    """The recorded group: rewards, lengths and version runs as they were; tokens are all 0."""
    rollouts = []
    for episode, one in enumerate(row["rollouts"]):
        runs = VersionRuns(tuple((version, count) for version, count in one["runs"]))
        num_tokens = one["prompt"] + runs.num_tokens
        loss_mask = np.zeros(num_tokens, np.bool_)
        loss_mask[one["prompt"] :] = True
        rollouts.append(
            Rollout(
                group_id=request.group_id,
                episode=episode,
                env=request.task.env,
                token_ids=np.zeros(num_tokens, np.int32),
                loss_mask=loss_mask,
                logprobs=np.zeros(num_tokens, np.float32),
                version_runs=runs,
                reward=one["reward"],
                num_turns=one["turns"],
                finish_reason=FinishReason(one["finish"]),
                timings=Timings(
                    started_at=row["t"] - one["seconds"],
                    finished_at=row["t"],
                    generation_seconds=one["generation"],
                    environment_seconds=one["environment"],
                ),
                source=Source(one["source"]),
            )
        )
    return Group(group_id=request.group_id, task=request.task, rollouts=tuple(rollouts))


def _tasks(rows: Sequence[Row]) -> Iterator[Task]:
    """Prompts as the source gave them: requeued ones, which come again, are left out."""
    seen: set[int] = set()
    for row in rows:
        if row["e"] == "admitted" and row["position"] not in seen:
            seen.add(row["position"])
            yield Task(env=row["env"], key=row["key"], position=row["position"], data={})


def _damage(rows: Sequence[Row], recorded_hash: str | None) -> str | None:
    """What is wrong with a trace that does not hold the decisions of the run's own summary."""
    if recorded_hash is None:
        return None
    decisions = [row for row in rows if row["e"] in DECISIONS]
    if digest_of(decisions) == recorded_hash:
        return None
    return (
        f"the trace is not that of the summary: rows were lost or changed (it holds "
        f"{len(decisions):,} decisions, to {rows[-1]['t']:.3f} s)"
    )


def _first_difference(
    recorded: Sequence[Row], replayed: Sequence[Row], is_whole: bool
) -> str | None:
    """The first decision that is not the same, in words; None when the recorded ones all are. A
    trace that is not whole may have been cut off between an input and the decisions that it made.
    """
    wanted = (row for row in recorded if row["e"] in DECISIONS)
    got = (row for row in replayed if row["e"] in DECISIONS)
    for number, want in enumerate(wanted, start=1):
        have = next(got, None)
        if have is None:
            return f"decision {number} at {want['t']:.3f} s is missing: {_text(want)}"
        if _plain(want) != _plain(have):
            return (
                f"decision {number} at {want['t']:.3f} s: recorded {_text(want)}; "
                f"replayed {_text(have)} at {have['t']:.3f} s"
            )
    extra = next(got, None)
    return f"one decision too many: {_text(extra)}" if extra and is_whole else None


def _plain(row: Row) -> dict[str, Any]:
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in row.items()
        if key != "t"
    }


def _text(row: Row) -> str:
    values = {key: value for key, value in row.items() if key not in ("t", "e", "rollouts")}
    return f"{row['e']} " + ", ".join(f"{key} {value}" for key, value in values.items())
