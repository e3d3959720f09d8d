"""Every part has its own limit: a fault that stops one of them is told by its name alone."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headway.config import Config
from headway.core.records import Record
from headway.core.rollout import Batch, Completion, Task
from headway.loop.outcome import Outcome
from headway.ports import PublishedWeights, Score, Transcript
from headway.sim.clock import run_virtual
from headway.sim.engine import SimulatedEngine
from headway.sim.run import build_simulation
from headway.sim.trainer import MemoryStore, RowList, SimulatedTrainer
from headway.sim.workload import Turn
from headway.store.journal import GroupedJournal
from simulated import SimulatedRun, sim_config, simulate_in_memory

LIMITS = {
    "the trainer": "trainer_seconds",
    "the disk": "disk_seconds",
    "the task source": "tasks_seconds",
    "an environment": "rollout_seconds",
    "the evaluation": "eval_seconds",
}
LIMIT = 400.0
FOR_EVER = 1e7


def config_for(on_stall: str, **sections: Any) -> Config:
    """Short limits for all, and rollouts that last a few seconds."""
    liveness = dict.fromkeys(LIMITS.values(), LIMIT) | {"on_stall": on_stall}
    return sim_config(liveness=liveness, **sections)


class Once:
    """Waits for `seconds` the `number`-th time that it is asked to, and never else."""

    def __init__(self, number: int, seconds: float) -> None:
        self._left, self._seconds = number, seconds

    async def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            await asyncio.sleep(self._seconds)


class SlowStore(MemoryStore):
    def __init__(self, pause: Once) -> None:
        super().__init__()
        self._pause = pause

    async def write_batch(self, batch: Batch) -> None:
        await self._pause()
        await super().write_batch(batch)


class SlowTasks:
    def __init__(self, pause: Once) -> None:
        self._pause, self._position = pause, 0

    async def next_task(self) -> Task:
        await self._pause()
        self._position += 1
        return Task(env="arithmetic", key=str(self._position), position=self._position - 1, data={})

    def restore(self, position: int) -> None:
        self._position = position


class StubbornEnvironment:
    """One of its episodes does not end when it is cancelled; eval episodes may be slow."""

    name = "arithmetic"

    def __init__(self, pause: Once | None = None, eval_pause: Once | None = None) -> None:
        self._pause, self._eval_pause = pause, eval_pause

    async def run(self, transcript: Transcript) -> None:
        transcript.observe([1])
        is_eval = transcript.task.key.startswith("eval")
        if is_eval and self._eval_pause is not None:
            await self._eval_pause()
        elif not is_eval and self._pause is not None:
            await _shielded(self._pause())
        await transcript.act()

    def score(self, task: Task, completions: list[Completion]) -> Score:
        return Score(reward=float(completions[-1].token_ids.sum() % 2))


async def _shielded(wait: Any) -> None:
    """What code does that does not know of cancellation."""
    inner = asyncio.ensure_future(wait)
    cancelled = False
    while not inner.done():
        try:
            await asyncio.shield(inner)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


def slow_trainer(seconds: float, config: Config) -> SimulatedRun:
    def train(step: int) -> float:
        return seconds if step == 3 else 2.0

    async def main() -> SimulatedRun:
        rows, trainer = RowList(), SimulatedTrainer(train_seconds=train)
        ports = {"trainer": trainer, "channel": trainer, "watched": {"trainer": trainer.run}}
        orchestrator = build_simulation(config, metrics=rows, replaced=ports)
        outcome = await orchestrator.run()
        now = asyncio.get_running_loop().time()
        return SimulatedRun(orchestrator, outcome, rows.rows, MemoryStore(), now)

    return run_virtual(main())


def slow_batch(seconds: float, config: Config) -> SimulatedRun:
    return simulate_in_memory(config, ports={"store": SlowStore(Once(3, seconds))})


def slow_journal(seconds: float, config: Config) -> SimulatedRun:
    pause = Once(10, seconds)

    async def apply(records: Sequence[Record]) -> None:
        await pause()

    # Built outside the loop, which it needs only once it runs.
    return simulate_in_memory(config, ports={"journal": GroupedJournal(apply)})


def slow_tasks(seconds: float, config: Config) -> SimulatedRun:
    return simulate_in_memory(config, ports={"source": SlowTasks(Once(60, seconds))})


def stubborn_environment(seconds: float, config: Config) -> SimulatedRun:
    rollout = config.rollout.model_copy(update={"deadline_seconds": 300.0})
    run = config.run.model_copy(update={"steps": 1200})  # which goes on without that rollout
    config = config.model_copy(update={"rollout": rollout, "run": run})
    environment = StubbornEnvironment(pause=Once(20, seconds))
    return simulate_in_memory(config, ports={"environments": {"arithmetic": environment}})


def slow_evaluation(seconds: float, config: Config) -> SimulatedRun:
    rollout = config.rollout.model_copy(update={"deadline_seconds": FOR_EVER})
    evaluation = config.eval.model_copy(update={"every": 5, "num_tasks": 3})
    config = config.model_copy(update={"rollout": rollout, "eval": evaluation})
    environment = StubbornEnvironment(eval_pause=Once(5, seconds))
    return simulate_in_memory(config, ports={"environments": {"arithmetic": environment}})


Fault = Callable[[float, Config], SimulatedRun]
FAULTS: list[tuple[Fault, str, tuple[str, ...]]] = [
    (slow_trainer, "the trainer", ("version 4", "batch 3", "ship waits for")),
    (slow_batch, "the disk", ("batch 2 to be written",)),
    (slow_journal, "the disk", ("to be written",)),
    (slow_tasks, "the task source", ("a prompt (it gave 59 so far)", "submission waits for")),
    (stubborn_environment, "an environment", ("environment 'arithmetic'", "oldest rollouts: task")),
    (slow_evaluation, "the evaluation", ("the evaluation of version 5", "task 'eval-")),
]


def told(run: SimulatedRun, words: str) -> list[str]:
    return [row["text"] for row in run.of_kind("event") if words in row["text"]]


@pytest.mark.parametrize(("fault", "part", "words"), FAULTS)
def test_a_part_that_stands_still_ends_the_run_by_its_name(
    fault: Fault, part: str, words: tuple[str, ...]
) -> None:
    run = fault(FOR_EVER, config_for("stop"))
    message = str(run.outcome.message)
    assert (run.outcome.exit_reason, run.outcome.exit_code) == ("stalled", 1)
    assert message.startswith(f"{part} made no progress for ")
    assert f"(liveness.{LIMITS[part]} = {LIMIT:g})" in message
    for said in (*words, "simulated engine: "):
        assert said in message, message
    assert sum(limit in message for limit in LIMITS.values()) == 1, message
    assert LIMIT <= float(message.split(" made no progress for ")[1].split(" s ")[0]) < 1.2 * LIMIT
    run.orchestrator.ledger.check()


@pytest.mark.parametrize(("fault", "part", "words"), FAULTS)
def test_a_warning_is_told_once_and_the_run_goes_on(
    fault: Fault, part: str, words: tuple[str, ...]
) -> None:
    run = fault(5 * LIMIT, config_for("warn"))
    assert run.outcome.exit_reason == "completed", run.outcome
    stalls, moved = told(run, "made no progress"), told(run, "moved again")
    assert len(stalls) == len(moved) == 1, (stalls, moved)
    assert stalls[0].startswith(part) and moved[0].startswith(f"{part} moved again, after ")
    levels = {row["text"]: row["level"] for row in run.of_kind("event")}
    assert (levels[stalls[0]], levels[moved[0]]) == ("warning", "info")


@pytest.mark.parametrize(("fault", "part", "words"), FAULTS)
def test_slow_is_not_stalled(fault: Fault, part: str, words: tuple[str, ...]) -> None:
    run = fault(0.9 * LIMIT, config_for("stop", run={"stall_seconds": 50.0}))
    assert run.outcome.exit_reason == "completed", run.outcome
    assert not told(run, "made no progress") and not told(run, "nothing finished")


@pytest.mark.parametrize("seed", range(10))
def test_a_run_in_health_is_never_said_to_stall(seed: int) -> None:
    """Tight limits, which are still above what each part needs."""
    config = sim_config(
        run={"seed": seed, "steps": 30, "stall_seconds": 1.0},
        liveness={
            "on_stall": "warn",
            "trainer_seconds": 3.0,
            "disk_seconds": 1.0,
            "tasks_seconds": 1.0,
            "rollout_seconds": 1.0,
        },
    )
    run = simulate_in_memory(config)
    assert run.outcome.exit_reason == "completed"
    assert not told(run, "made no progress") and not told(run, "nothing finished")


@pytest.mark.parametrize("on_stall", ["stop", "warn"])
def test_what_nobody_accounts_for_is_a_stall_of_the_run(on_stall: str) -> None:
    async def pause_for_a_while(orchestrator: Any) -> None:
        await asyncio.sleep(20)
        orchestrator.dispatcher.pause()
        await asyncio.sleep(2000)
        orchestrator.dispatcher.resume()

    config = config_for(on_stall, run={"stall_seconds": 300})
    run = simulate_in_memory(config, script=pause_for_a_while)
    if on_stall == "stop":
        assert run.outcome.exit_reason == "stalled"
        message = str(run.outcome.message)
        assert "run.stall_seconds = 300" in message and "submission waits for resume()" in message
    else:
        assert run.outcome.exit_reason == "completed"
        assert len(told(run, "run.stall_seconds")) == len(told(run, "the run moves again")) == 1


def test_engines_that_load_for_too_long_are_named_by_their_own_deadline() -> None:
    class StuckEngine(SimulatedEngine):
        async def update_weights(self, weights: PublishedWeights) -> None:
            await asyncio.sleep(FOR_EVER)

    async def main() -> Outcome:
        engine = StuckEngine(turn=lambda _: Turn(2.0, 10), name="stuck engine")
        return await build_simulation(config_for("stop"), replaced={"engine": engine}).run()

    outcome = run_virtual(main())
    assert outcome.exit_reason == "engine_failed"
    assert "stuck engine did not load version 1 within" in str(outcome.message)


def test_a_disk_that_takes_no_last_write_cannot_hold_up_the_end() -> None:
    async def apply(records: Sequence[Record]) -> None:
        if asyncio.get_running_loop().time() > 20:
            await asyncio.sleep(FOR_EVER)

    async def stop_soon(orchestrator: Any) -> None:
        await asyncio.sleep(21)
        orchestrator.stop()

    config = config_for("warn")
    run = simulate_in_memory(config, script=stop_soon, ports={"journal": GroupedJournal(apply)})
    assert run.outcome.exit_reason == "store_failed"
    assert "liveness.disk_seconds" in str(run.outcome.message)
    assert run.virtual_seconds < 21 + config.run.shutdown_seconds + LIMIT + 1
