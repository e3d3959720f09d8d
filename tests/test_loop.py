"""Properties of the whole loop in virtual time: the orchestrator is the real one."""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.ledger import SampleState
from headway.core.rollout import Batch, Completion, FinishReason, Task
from headway.core.versions import VersionRuns
from headway.errors import EngineError, StoreError, TrainerError
from headway.loop.orchestrator import Orchestrator
from headway.ports import (
    EngineStatistics,
    GenerateRequest,
    PublishedWeights,
    Score,
    Transcript,
)
from headway.sim.trainer import MemoryStore
from simulated import SimulatedRun, sim_config, simulate_in_memory

NO_SECONDS = {"train_seconds": 0, "weight_sync_seconds": 0}


class ScriptedEnvironment:
    """One turn; what happens then is up to the subclass."""

    name = "arithmetic"

    async def run(self, transcript: Transcript) -> None:
        transcript.observe([1, 2])
        await transcript.act()

    def score(self, task: Task, completions: list[Completion]) -> Score:
        return Score(reward=float(task.position % 2))


def assert_conserved(run: SimulatedRun) -> None:
    run.orchestrator.ledger.check()
    counts = run.orchestrator.ledger.counts
    assert counts[SampleState.RUNNING] == counts[SampleState.FINISHED] == 0
    assert counts[SampleState.ACCEPTED] == len(run.store.leftovers)


workloads = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**16),
        "staleness": st.integers(0, 6),
        "batch": st.integers(1, 12),
        "concurrent": st.integers(1, 80),
        "group": st.integers(1, 4),
        "sigma": st.sampled_from([0.0, 0.5, 1.5]),
        "train": st.sampled_from([0.0, 1.0, 20.0]),
        "ahead": st.integers(0, 2),
        "reward": st.sampled_from([0.3, 0.8]),
        "queue": st.integers(12, 40),
        "eval_every": st.sampled_from([0, 3]),
    }
)


@settings(max_examples=60, deadline=None)
@given(workloads)
def test_every_run_conserves_samples_drains_and_reports_true_ages(w: dict[str, Any]) -> None:
    steps = 12
    config = sim_config(
        run={"steps": steps, "seed": w["seed"], "max_empty_batches": 1000},
        rollout={
            "max_head_offpolicyness": w["staleness"],
            "consumer_batch_size": w["batch"],
            "max_concurrent_rollouts": w["concurrent"],
            "group_size": w["group"],
            "max_batches_ahead": w["ahead"],
            "filters": ["zero_advantage"],
            "queue_size": w["queue"],
        },
        actor={"advantage": "mean" if w["group"] == 1 else "grpo"},
        eval={"every": w["eval_every"], "num_tasks": 5, "max_concurrent": 2},
        simulate={
            "rollout_seconds": {"kind": "lognormal", "median": 5.0, "sigma": w["sigma"]},
            "train_seconds": w["train"],
            "reward_probability": w["reward"],
        },
    )
    run = simulate_in_memory(config, keep_batches=None)
    assert run.outcome.exit_reason == "completed", run.outcome
    assert_conserved(run)
    counts = run.orchestrator.ledger.counts
    # Near the step target admission closes by itself, with one batch to spare.
    assert counts[SampleState.TRAINED] == steps * w["batch"]
    spare = counts[SampleState.ACCEPTED] + counts[SampleState.DROPPED]
    assert spare <= w["batch"] and not (w["staleness"] == 0 and spare)
    assert (
        counts[SampleState.TRAINED] + counts[SampleState.REJECTED] + spare
        == run.orchestrator.ledger.num_admitted
    )
    assert [batch.step for batch in run.store.batches] == list(range(steps))
    ids = [t.group.group_id for batch in run.store.batches for t in batch.groups]
    assert len(set(ids)) == len(ids) == steps * w["batch"]
    ages = [
        batch.step - version
        for batch in run.store.batches
        for rollout in batch.rollouts
        for version in rollout.version_runs.expand().tolist()
    ]
    summary = run.orchestrator.log.ages.summary()
    assert summary["max"] == max(ages) and summary["mean"] == pytest.approx(np.mean(ages))
    assert min(ages) >= 0
    if w["staleness"] == 0:
        assert max(ages) == 0
    if w["eval_every"]:
        assert {result.version for result in run.orchestrator.eval_sink.results} >= {0, steps}
    limit = (w["staleness"] + 1) * w["batch"]
    rejected = run.of_kind("step")[0]["rejected"].get("zero_advantage", 0)
    assert run.orchestrator.log.admissions[0] <= limit + rejected


def test_the_same_seed_gives_the_same_run() -> None:
    def rows(run: SimulatedRun) -> list[dict[str, Any]]:
        return [{key: row[key] for key in row if key != "rss_mb"} for row in run.rows]

    first, second = (simulate_in_memory(sim_config(run={"seed": 7})) for _ in range(2))
    assert rows(first) == rows(second) and first.virtual_seconds == second.virtual_seconds
    other = simulate_in_memory(sim_config(run={"seed": 8}))
    assert rows(other) != rows(first)


def test_fast_rollouts_run_ahead_as_far_as_the_gate_allows() -> None:
    config = sim_config(
        rollout={"max_head_offpolicyness": 4, "max_concurrent_rollouts": 1000},
        simulate={
            "rollout_seconds": {"kind": "constant", "value": 0.001},
            "train_seconds": 100.0,
        },
    )

    async def script(orchestrator: Orchestrator) -> None:
        await asyncio.sleep(1.0)
        seen.append(orchestrator.dispatcher.admissions)

    seen: list[int] = []
    simulate_in_memory(config, script=script)
    assert seen == [(4 + 1) * 8]


def test_pause_stops_admission_and_resume_restarts_it_at_once() -> None:
    seen: dict[str, int] = {}

    async def script(orchestrator: Orchestrator) -> None:
        dispatcher = orchestrator.dispatcher
        await asyncio.sleep(3)
        dispatcher.pause()
        seen["paused"] = dispatcher.admissions
        await asyncio.sleep(500)
        seen["still"] = dispatcher.admissions
        seen["running"] = dispatcher.statistics().num_running
        seen["out_queue"] = dispatcher.statistics().out_queue
        dispatcher.resume()
        await asyncio.sleep(0.001)
        seen["resumed"] = dispatcher.admissions

    run = simulate_in_memory(sim_config(), script=script)
    assert run.outcome.exit_code == 0
    assert seen["still"] == seen["paused"] < seen["resumed"]
    assert seen["running"] == seen["out_queue"] == 0  # finished rollouts are visible meanwhile


@pytest.mark.parametrize("calls", [1, 2])
def test_stop_drains_within_the_window_and_saves_what_is_left(calls: int) -> None:
    config = sim_config(run={"steps": 10**6, "shutdown_seconds": 1000})

    async def script(orchestrator: Orchestrator) -> None:
        await asyncio.sleep(40)
        for _ in range(calls):
            orchestrator.stop()
            await asyncio.sleep(0)

    run = simulate_in_memory(config, script=script, keep_batches=None)
    assert (run.outcome.exit_reason, run.outcome.exit_code) == ("interrupted", 130)
    assert_conserved(run)
    dropped = run.orchestrator.ledger.counts[SampleState.DROPPED]
    assert dropped == 0 if calls == 1 else dropped > 0
    assert len(run.store.leftovers) < 8
    if calls == 1:
        assert run.orchestrator.ledger.counts[SampleState.BATCHED] == 0
    else:
        assert run.virtual_seconds < 41


class FlakyEngine:
    """Answers after one second; every `period`-th call fails."""

    name = "flaky engine"

    def __init__(self, period: int, hang: bool = False) -> None:
        self.calls = 0
        self.period = period
        self.hang = hang
        self.version = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        self.calls += 1
        await asyncio.sleep(1.0)
        if self.calls % self.period == 0:
            if self.hang:
                await asyncio.sleep(10**9)
            raise EngineError("flaky engine: connection reset")
        return Completion(
            token_ids=np.array([5, 6], np.int32),
            logprobs=np.array([-1, -1], np.float32),
            version_runs=VersionRuns(((self.version, 2),)),
            finish_reason=FinishReason.STOP,
        )

    async def update_weights(self, weights: PublishedWeights) -> None:
        self.version = weights.version

    async def statistics(self) -> Mapping[str, EngineStatistics]:
        return {self.name: EngineStatistics()}

    async def aclose(self) -> None: ...


@pytest.mark.parametrize("hang", [False, True])
def test_a_flaky_engine_costs_retries_and_nothing_is_trained_as_a_zero(hang: bool) -> None:
    run = simulate_in_memory(
        sim_config(rollout={"deadline_seconds": 30}),
        ports={
            "engine": FlakyEngine(7, hang),
            "environments": {"arithmetic": ScriptedEnvironment()},
        },
        keep_batches=None,
    )
    assert run.outcome.exit_code == 0, run.outcome
    assert run.orchestrator.runner.num_retries > 10
    assert_conserved(run)
    trained = [t.group for batch in run.store.batches for t in batch.groups]
    assert all(group.rollouts[0].reward == group.task.position % 2 for group in trained)


def test_a_dead_engine_ends_the_run_and_is_named() -> None:
    run = simulate_in_memory(sim_config(), ports={"engine": FlakyEngine(1)}, keep_batches=None)
    assert (run.outcome.exit_reason, run.outcome.exit_code) == ("engine_failed", 1)
    assert "64 samples failed in a row" in str(run.outcome.message)
    assert "flaky engine: connection reset" in str(run.outcome.message)
    assert_conserved(run)
    assert run.orchestrator.ledger.reasons[SampleState.FAILED]["infrastructure"] >= 64


class BrokenReward(ScriptedEnvironment):
    def score(self, task: Task, completions: list[Completion]) -> Score:
        raise KeyError("answer")


class WrongReward(ScriptedEnvironment):
    def score(self, task: Task, completions: list[Completion]) -> Score:
        return Score(reward=float("nan"))


class BrokenEnvironment(ScriptedEnvironment):
    async def run(self, transcript: Transcript) -> None:
        raise RuntimeError("sandbox image not found")


class Silent(ScriptedEnvironment):
    async def run(self, transcript: Transcript) -> None:
        transcript.observe([1])


class Endless(ScriptedEnvironment):
    async def run(self, transcript: Transcript) -> None:
        transcript.observe([1])
        await asyncio.sleep(10**9)


class NoScore(ScriptedEnvironment):
    def score(self, task: Task, completions: list[Completion]) -> Score:
        return None  # type: ignore[return-value]


class WrongMetric(ScriptedEnvironment):
    def score(self, task: Task, completions: list[Completion]) -> Score:
        return Score(reward=1.0, metrics={"length": "long"})  # type: ignore[dict-item]


class Exits(ScriptedEnvironment):
    async def run(self, transcript: Transcript) -> None:
        raise SystemExit(0)


class Cancels(ScriptedEnvironment):
    async def run(self, transcript: Transcript) -> None:
        raise asyncio.CancelledError


class Swallowing(ScriptedEnvironment):
    """An environment that catches everything must not turn an engine's failure into a zero."""

    async def run(self, transcript: Transcript) -> None:
        transcript.observe([1])
        await transcript.act()
        try:
            await transcript.act()
        except Exception:
            return


@pytest.mark.parametrize(
    ("environment", "engine", "said", "reason"),
    [
        (BrokenReward(), 10**9, "the reward of environment 'arithmetic' raised KeyError", None),
        (WrongReward(), 10**9, "gave reward nan", None),
        (BrokenEnvironment(), 10**9, "raised RuntimeError: sandbox image not found", None),
        (Silent(), 10**9, "without act()", None),
        (NoScore(), 10**9, "score() must return a Score", None),
        (WrongMetric(), 10**9, "gave metric length = 'long'", None),
        (Exits(), 10**9, "raised SystemExit: 0", None),
        (Cancels(), 10**9, "raised CancelledError", None),
        (Endless(), 10**9, "did not end task", None),
        (Swallowing(), 2, "connection reset", "engine_failed"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_broken_environment_ends_the_run_with_its_cause(
    environment: ScriptedEnvironment, engine: int, said: str, reason: str | None
) -> None:
    run = simulate_in_memory(
        sim_config(rollout={"deadline_seconds": 20, "max_infrastructure_retries": 0}),
        ports={"environments": {"arithmetic": environment}, "engine": FlakyEngine(engine)},
    )
    assert run.outcome.exit_reason == (reason or "environment_failed")
    assert run.outcome.exit_code == 1
    assert said in str(run.outcome.message)
    assert run.orchestrator.ledger.counts[SampleState.TRAINED] == 0
    assert_conserved(run)


@pytest.mark.parametrize("group_size", [1, 4])
def test_a_constant_reward_ends_the_run_after_a_few_empty_batches(group_size: int) -> None:
    baseline = "grpo" if group_size > 1 else "mean"
    run = simulate_in_memory(
        sim_config(
            run={"max_empty_batches": 3, "steps": 5},
            rollout={"group_size": group_size, "filters": ["zero_advantage"]},
            actor={"advantage": baseline},
            simulate={"reward_probability": 0.0},
        )
    )
    assert (run.outcome.exit_reason, run.outcome.exit_code) == ("empty_batches", 1)
    assert "3 empty batches in a row: 24 samples" in str(run.outcome.message)
    assert "zero_advantage" in str(run.outcome.message)
    assert "every reward was 0" in str(run.outcome.message)
    assert_conserved(run)


class Stubborn(ScriptedEnvironment):
    """Ignores every cancellation for an hour."""

    async def run(self, transcript: Transcript) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < 3600:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue


@pytest.mark.parametrize("part_dies", [False, True])
def test_code_that_ignores_its_cancellation_cannot_hold_up_the_end(part_dies: bool) -> None:
    async def script(orchestrator: Orchestrator) -> None:
        await asyncio.sleep(40)
        orchestrator.stop()

    async def dies() -> None:
        await asyncio.sleep(40)
        raise TrainerError("the trainer died")

    run = simulate_in_memory(
        sim_config(run={"shutdown_seconds": 10, "stall_seconds": 10**6}),
        script=None if part_dies else script,
        ports={
            "environments": {"arithmetic": Stubborn()},
            **({"watched": {"trainer": dies}} if part_dies else {}),
        },
    )
    assert run.outcome.exit_reason == ("trainer_failed" if part_dies else "interrupted")
    assert run.orchestrator.is_abandoned
    assert run.virtual_seconds == pytest.approx(50 if part_dies else 60)
    dropped = run.orchestrator.ledger.counts[SampleState.DROPPED]
    assert dropped == run.orchestrator.ledger.num_admitted == (2 + 1) * 8
    assert "24 samples did not end" in run.of_kind("event")[-1]["text"]
    assert_conserved(run)


class MuteEngine(FlakyEngine):
    async def generate(self, request: GenerateRequest) -> Completion:
        await asyncio.sleep(1)
        return Completion(
            token_ids=np.zeros(0, np.int32),
            logprobs=np.zeros(0, np.float32),
            version_runs=VersionRuns(),
            finish_reason=FinishReason.STOP,
        )


def test_zero_length_completions_are_rejected_by_name() -> None:
    run = simulate_in_memory(sim_config(), ports={"engine": MuteEngine(10**9)})
    assert run.outcome.exit_reason == "empty_batches"
    assert "empty_completion" in str(run.outcome.message)


class FiniteTasks:
    def __init__(self, num_tasks: int) -> None:
        self.left = num_tasks

    async def next_task(self) -> Task | None:
        self.left -= 1
        if self.left < 0:
            return None
        return Task(env="arithmetic", key="k", position=self.left, data={})

    def restore(self, position: int) -> None: ...


def test_a_source_that_ends_early_ends_the_run_and_one_that_suffices_does_not() -> None:
    short = simulate_in_memory(sim_config(), ports={"source": FiniteTasks(50)})
    assert short.outcome.exit_reason == "tasks_exhausted"
    assert "after 50 samples" in str(short.outcome.message)
    assert short.orchestrator.ledger.counts[SampleState.TRAINED] <= 48
    assert_conserved(short)
    enough = simulate_in_memory(sim_config(), ports={"source": FiniteTasks(160)})
    assert enough.outcome.exit_code == 0


def test_a_part_that_dies_or_ends_is_named() -> None:
    async def dies() -> None:
        await asyncio.sleep(30)
        raise TrainerError("the trainer died with signal 9; last lines of its log: ...")

    async def ends() -> None:
        await asyncio.sleep(30)

    for watch, reason, said in (
        (dies, "trainer_failed", "died with signal 9"),
        (ends, "part_ended", "watch trainer ended"),
    ):
        run = simulate_in_memory(sim_config(), ports={"watched": {"trainer": watch}})
        assert (run.outcome.exit_reason, run.outcome.exit_code) == (reason, 1)
        assert said in str(run.outcome.message)
        assert run.virtual_seconds == pytest.approx(30)
        assert_conserved(run)


def test_a_trainer_that_never_publishes_is_a_stall_that_names_every_wait() -> None:
    async def lives() -> None:
        await asyncio.sleep(10**9)

    run = simulate_in_memory(
        sim_config(liveness={"trainer_seconds": 300}), ports={"watched": {"trainer": lives}}
    )
    assert run.outcome.exit_reason == "stalled"
    message = str(run.outcome.message)
    for said in ("watcher waits for version 1", "submission waits for version", "ship waits for"):
        assert said in message
    assert run.orchestrator.ledger.counts[SampleState.BATCHED] > 0
    assert_conserved(run)


@pytest.mark.parametrize("max_seconds", [12.0, 30.0, 47.3])
def test_a_deadline_drains_the_run_before_it_passes(max_seconds: float) -> None:
    config = sim_config(run={"steps": 100, "max_seconds": max_seconds, "shutdown_seconds": 10.0})
    run = simulate_in_memory(config)
    assert (run.outcome.exit_reason, run.outcome.exit_code) == ("preempted", 75)
    assert run.virtual_seconds <= max_seconds + 0.1
    assert run.orchestrator.dispatcher.statistics().capacity == 0
    assert any("run.max_seconds" in row["text"] for row in run.of_kind("event"))
    assert_conserved(run)


def test_a_deadline_does_not_cut_off_a_drain_and_has_no_say_in_a_run_that_completes() -> None:
    async def stop_early(orchestrator: Orchestrator) -> None:
        await asyncio.sleep(15)
        orchestrator.stop()

    config = sim_config(
        run={"steps": 100, "max_seconds": 40.0, "shutdown_seconds": 20.0},
        simulate={"rollout_seconds": {"kind": "constant", "value": 18.0}},
    )
    run = simulate_in_memory(config, script=stop_early)
    assert (run.outcome.exit_reason, run.outcome.exit_code) == ("interrupted", 130)
    assert run.orchestrator.ledger.counts[SampleState.DROPPED] == 0
    assert run.virtual_seconds > 20
    completed = simulate_in_memory(sim_config(run={"max_seconds": 1000.0}))
    assert completed.outcome.exit_reason == "completed"


class RushingChannel:
    async def wait_newer(self, version: int) -> PublishedWeights:
        await asyncio.sleep(0.5)
        return PublishedWeights(version=version + 3, path=None)


def test_a_version_without_a_shipped_batch_is_refused() -> None:
    run = simulate_in_memory(sim_config(), ports={"channel": RushingChannel()})
    assert run.outcome.exit_reason == "trainer_failed"
    assert "was never shipped" in str(run.outcome.message)


class SlowUpdateEngine(FlakyEngine):
    async def update_weights(self, weights: PublishedWeights) -> None:
        await asyncio.sleep(10**6)


def test_an_engine_that_never_loads_a_version_is_named_within_the_deadline() -> None:
    run = simulate_in_memory(
        sim_config(engine={"update_seconds": 5}), ports={"engine": SlowUpdateEngine(10**9)}
    )
    assert run.outcome.exit_reason == "engine_failed"
    assert "flaky engine did not load version 1 within 20 s" in str(run.outcome.message)


def test_engines_that_load_slowly_do_not_keep_the_trainer_waiting() -> None:
    def idle(sync_seconds: float) -> float:
        config = sim_config(
            run={"steps": 40},
            rollout={"max_head_offpolicyness": 8, "pacing": "just_in_time", "over_bound": "trim"},
            simulate={
                "rollout_seconds": {"kind": "constant", "value": 1.0},
                "train_seconds": 2.0,
                "weight_sync_seconds": sync_seconds,
            },
        )
        run = simulate_in_memory(config)
        assert run.outcome.exit_code == 0, run.outcome
        versions = [row["step"] for row in run.of_kind("step")]
        assert versions == list(range(40)), "every batch has its row, also where versions jump"
        return run.orchestrator.log.trainer_idle_seconds

    assert idle(0.1) < 4
    # Three quarters of the time the engines stand still, and the trainer hardly notices.
    assert idle(1.5) < 10
    # They load for longer than the trainer trains, so versions are passed over.
    assert idle(4.0) > 0


@pytest.mark.parametrize("keep_last", [3, 4, 7])
def test_the_trainer_never_publishes_past_what_engines_are_loading(keep_last: int) -> None:
    config = sim_config(
        run={"steps": 40},
        rollout={"max_head_offpolicyness": 20, "max_concurrent_rollouts": 200},
        weights={"keep_last": keep_last},
        simulate={
            "rollout_seconds": {"kind": "constant", "value": 1.0},
            "train_seconds": 0.5,
            "weight_sync_seconds": 5.0,
        },
    )
    most = 0

    async def watch(orchestrator: Orchestrator) -> None:
        nonlocal most
        while True:
            # What the trainer may have published by now: it has every batch that was shipped.
            published = orchestrator.ship_gate.num_shipped
            most = max(most, published - orchestrator.policy.version)
            await asyncio.sleep(0.1)

    run = simulate_in_memory(config, script=watch)
    assert run.outcome.exit_code == 0, run.outcome
    # The one that is being loaded is the oldest but one of those that are kept.
    assert most == keep_last - 1


class FullDisk(MemoryStore):
    async def write_batch(self, batch: Batch) -> None:
        if batch.step == 3:
            raise StoreError("batch 3: no space left on device")
        await super().write_batch(batch)


def test_a_store_that_fails_ends_the_run_before_the_batch_is_shipped() -> None:
    run = simulate_in_memory(sim_config(), ports={"store": FullDisk()})
    assert run.outcome.exit_reason == "store_failed"
    assert run.orchestrator.ship_gate.num_shipped == 3
    assert_conserved(run)


def test_an_unknown_exception_in_a_part_is_an_error_with_its_name() -> None:
    class BuggySource(FiniteTasks):
        async def next_task(self) -> Task | None:
            raise ZeroDivisionError("bug")

    run = simulate_in_memory(sim_config(), ports={"source": BuggySource(1)})
    assert (run.outcome.exit_reason, run.outcome.exit_code) == ("error", 1)
    assert run.outcome.message == "ZeroDivisionError: bug"


def test_a_slow_trainer_holds_generation_back_and_queues_stay_within_their_sizes() -> None:
    highest = 0

    async def script(orchestrator: Orchestrator) -> None:
        nonlocal highest
        while True:
            await asyncio.sleep(0.5)
            one = orchestrator.dispatcher.statistics()
            highest = max(highest, one.in_queue, one.out_queue, len(orchestrator.train_sink))

    config = sim_config(
        rollout={
            "max_head_offpolicyness": 100,
            "max_concurrent_rollouts": 500,
            "queue_size": 20,
        },
        simulate={
            "rollout_seconds": {"kind": "constant", "value": 0.1},
            "train_seconds": 50.0,
        },
    )
    run = simulate_in_memory(config, script=script)
    assert run.outcome.exit_code == 0
    assert highest == 20


class CancelledIntoAnError:
    """An engine whose client takes its cancellation for a broken connection."""

    name = "stubborn"

    async def generate(self, request: GenerateRequest) -> Completion:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            raise EngineError("broken off") from None
        raise AssertionError("the run is over by then")

    async def statistics(self) -> Mapping[str, EngineStatistics]:
        return {}


@pytest.mark.parametrize("group_size", [1, 2])
def test_samples_that_turn_their_cancellation_into_a_failure_do_not_outlive_the_run(
    group_size: int,
) -> None:
    """Nobody fetches any more, and there are more of them than the output queue has room for."""
    rollout = {
        "group_size": group_size,
        "queue_size": 8,
        "max_concurrent_rollouts": 24,
        "max_infrastructure_retries": 0,
    }

    async def stop_at_once(orchestrator: Orchestrator) -> None:
        await asyncio.sleep(5)
        orchestrator.stop()
        orchestrator.stop()

    run = simulate_in_memory(
        sim_config(rollout=rollout), script=stop_at_once, ports={"engine": CancelledIntoAnError()}
    )
    assert run.outcome.exit_reason == "interrupted"
    assert not run.orchestrator.is_abandoned


class LacksLogprobs:
    """An engine whose first answers have parts of different lengths."""

    name = "short"

    def __init__(self) -> None:
        self.num_wrong = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        await asyncio.sleep(1)
        is_wrong = self.num_wrong < 3
        self.num_wrong += is_wrong
        return Completion(
            token_ids=np.zeros(4, np.int32),
            logprobs=np.zeros(3 if is_wrong else 4, np.float32),
            version_runs=VersionRuns(((0, 4),)),
            finish_reason=FinishReason.STOP,
        )

    async def update_weights(self, weights: PublishedWeights) -> None:
        return

    async def statistics(self) -> Mapping[str, EngineStatistics]:
        return {}


def test_an_answer_whose_parts_do_not_belong_together_is_the_engines_fault() -> None:
    rollout = {"over_bound": "admit", "max_head_offpolicyness": 8}
    run = simulate_in_memory(
        sim_config(run={"steps": 2}, rollout=rollout), ports={"engine": LacksLogprobs()}
    )
    assert run.outcome.exit_reason == "completed", run.outcome
    assert run.orchestrator.runner.num_retries == 3


@pytest.mark.parametrize("turns", range(6))
def test_a_second_stop_in_the_instant_when_the_window_ends_is_harmless(turns: int) -> None:
    stopped: list[int] = []

    async def stop_again(orchestrator: Orchestrator) -> None:
        await asyncio.sleep(5)
        orchestrator.stop()
        await asyncio.sleep(3)
        for _ in range(turns):
            await asyncio.sleep(0)
        orchestrator.stop()
        stopped.append(turns)

    config = sim_config(
        run={"shutdown_seconds": 3}, simulate={"rollout_seconds": {"kind": "constant", "value": 99}}
    )
    run = simulate_in_memory(config, script=stop_again)
    assert run.outcome.exit_reason == "interrupted"
    assert stopped or turns > 1, "stop() raised, or the run had ended"


def test_an_evaluation_that_falls_due_as_the_run_ends_is_not_started() -> None:
    """Its tasks would belong to a TaskGroup that is shutting down, which raises."""
    running: list[int] = []

    async def end_and_evaluate(orchestrator: Orchestrator) -> None:
        await asyncio.sleep(5)
        dispatcher = orchestrator.dispatcher
        dispatcher.abandon()
        assert orchestrator.eval_sink.start(7)
        running.append(dispatcher.statistics().num_eval_running)
        orchestrator.stop()
        orchestrator.stop()

    simulate_in_memory(
        sim_config(eval={"every": 1000, "num_tasks": 2}, simulate={"rollout_seconds": 2}),
        script=end_and_evaluate,
    )
    assert running == [0]
