"""The simulator: distributions, processor sharing, update modes, faults, equal draws for all."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config import DistributionConfig, UpdateMode
from headway.config.file import load_config
from headway.core.ledger import SampleState
from headway.core.rollout import Completion
from headway.errors import ConfigError
from headway.ports import GenerateRequest, PublishedWeights
from headway.sim.clock import run_virtual
from headway.sim.distributions import beta_inverse, curve_of, inverse_of
from headway.sim.engine import SimulatedEngine
from headway.sim.work_clock import Job, WorkClock
from headway.sim.workload import Stream, Turn, Workload
from simulated import SimulatedRun, sim_config, simulate_in_memory

EVEN = [(index + 0.5) / 20_000 for index in range(20_000)]
"""Uniform numbers without chance."""

CURVE = [(1.0, 60.0), (8.0, 400.0), (64.0, 2400.0)]


# --- distributions --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "median", "mean"),
    [
        ({"kind": "constant", "value": 3}, 3, 3),
        ({"kind": "uniform", "low": 2, "high": 6}, 4, 4),
        ({"median": 20, "sigma": 1}, 20, 20 * np.exp(0.5)),
        ({"kind": "long_tail", "median": 8, "alpha": 3}, 8, 1.5 * 8 * 0.5 ** (1 / 3)),
        ({"kind": "bimodal", "median": 2, "sigma": 0, "second_median": 30, "share": 0.1}, 2, 4.8),
        ({"kind": "empirical", "values": [5, 1, 3]}, 3, 3),
        ({"kind": "empirical", "quantiles": [[0, 0], [0.5, 10], [1, 30]]}, 10, 12.5),
        ({"kind": "uniform", "low": 0, "high": 10, "max": 5}, 5, 3.75),
    ],
)
def test_a_distribution_has_the_median_and_the_mean_of_its_definition(
    stated: dict[str, Any], median: float, mean: float
) -> None:
    inverse = inverse_of(DistributionConfig.model_validate(stated))
    values = [inverse(uniform) for uniform in EVEN]
    assert np.median(values) == pytest.approx(median, rel=1e-3)
    assert np.mean(values) == pytest.approx(mean, rel=0.01)
    assert all(low <= high for low, high in pairwise(values))


def test_values_come_from_a_file_and_a_broken_one_is_told(tmp_path: Path) -> None:
    file = tmp_path / "seconds.txt"
    file.write_text("# measured\n3\n1.5\n\n2 # slow\n", encoding="utf-8")
    stated = DistributionConfig(kind="empirical", file=str(file))
    assert [inverse_of(stated)(uniform) for uniform in (0.1, 0.5, 0.9)] == [1.5, 2, 3]
    file.write_text("3\nfast\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"seconds\.txt:2: 'fast' is no number"):
        inverse_of(stated)
    file.write_text("# nothing\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no values"):
        inverse_of(stated)
    file.unlink()
    with pytest.raises(ConfigError, match="cannot read the values"):
        inverse_of(stated)


@pytest.mark.parametrize("spread", [0, 0.1, 0.5, 0.95])
@pytest.mark.parametrize("mean", [0.05, 0.5, 0.9])
def test_the_difficulty_has_its_mean_and_its_share_of_the_variance(
    mean: float, spread: float
) -> None:
    inverse = beta_inverse(mean, spread)
    values = [inverse(uniform) for uniform in EVEN]
    assert np.mean(values) == pytest.approx(mean, abs=0.01)
    assert np.var(values) == pytest.approx(spread * mean * (1 - mean), abs=0.01)


@given(st.integers(0, 2**31 - 1), st.integers(0, 10_000))
def test_draws_depend_on_what_they_are_for_alone(key: int, index: int) -> None:
    workload = Workload(sim_config())
    first = workload.uniform(key, Stream.LENGTH, index)
    workload.uniform(key, Stream.TOOL, index)
    assert 0 < first < 1
    assert first == workload.uniform(key, Stream.LENGTH, index)
    assert first != workload.uniform(key, Stream.TURNS, index)
    assert first != workload.uniform(key, Stream.LENGTH, index + 1)


def test_draws_are_uniform_and_independent_between_keys_and_streams() -> None:
    workload = Workload(sim_config())
    draws = np.array(
        [[workload.uniform(key, stream) for stream in Stream] for key in range(20_000)]
    )
    assert np.abs(draws.mean(axis=0) - 0.5).max() < 0.01
    assert np.abs(draws.var(axis=0) - 1 / 12).max() < 0.002
    together = np.vstack([draws.T, np.roll(draws[:, 0], 1)])
    assert np.abs(np.corrcoef(together) - np.eye(len(together))).max() < 0.03


@pytest.mark.parametrize("correlation", [0.0, 0.4, 0.9, 1.0])
def test_rollouts_of_a_prompt_are_as_alike_as_stated_and_all_of_them_as_before(
    correlation: float,
) -> None:
    stated = {"length_correlation": correlation, "rollout_seconds": {"median": 20, "sigma": 0.5}}
    workload = Workload(sim_config(simulate=stated))
    lengths = np.array(
        [
            [workload.turn(request(f"t{name}-{episode}-0-0", name)).work for episode in range(2)]
            for name in range(5_000)
        ]
    )
    scores = np.log(lengths / 20) / 0.5
    assert scores.mean() == pytest.approx(0, abs=0.05)
    assert scores.std() == pytest.approx(1, abs=0.03)
    assert np.asarray(np.corrcoef(scores.T))[0, 1] == pytest.approx(correlation, abs=0.05)


# --- processor sharing ----------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0, 50), st.integers(1, 4000)), min_size=1, max_size=40),
    st.integers(1, 12),
)
def test_processor_sharing_conserves_work(arrivals: list[tuple[float, int]], slots: int) -> None:
    """What was sampled is the throughput over time, by how many ran."""
    curve = curve_of(CURVE)
    ends: list[float] = []

    async def one(clock: WorkClock, at: float, tokens: int) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(at)
        await clock.run(Job(Turn(float(tokens), tokens), 0))
        ends.append(loop.time())

    async def main() -> None:
        clock = WorkClock(speed=lambda num: curve(num) / num, slots=slots)
        await asyncio.gather(*(one(clock, at, tokens) for at, tokens in arrivals))
        assert clock.num_running == clock.num_waiting == 0

    run_virtual(main())
    changes = sorted([(at, 1) for at, _ in arrivals] + [(end, -1) for end in ends])
    num_inside, sampled = 0, 0.0
    for (at, change), (until, _) in pairwise([*changes, (changes[-1][0], 0)]):
        num_inside += change
        sampled += (until - at) * curve(min(num_inside, slots))
    assert sampled == pytest.approx(sum(tokens for _, tokens in arrivals), rel=1e-6)


def test_requests_beyond_the_slots_wait_first_in_first_out_and_a_cancelled_one_makes_room() -> None:
    order: list[int] = []

    async def one(clock: WorkClock, number: int) -> None:
        await clock.run(Job(Turn(2.0, 2), 0))
        order.append(number)

    async def main() -> None:
        clock = WorkClock(speed=lambda _: 1.0, slots=2)
        tasks = [asyncio.create_task(one(clock, number)) for number in range(8)]
        await asyncio.sleep(1)
        assert (clock.num_running, clock.num_waiting) == (2, 6)
        tasks[0].cancel()
        tasks[3].cancel()
        await asyncio.sleep(0)
        assert (clock.num_running, clock.num_waiting) == (2, 4)
        await asyncio.wait(tasks)
        assert asyncio.get_running_loop().time() == pytest.approx(7)
        assert clock.num_running == clock.num_waiting == 0

    run_virtual(main())
    assert order == [1, 2, 4, 5, 6, 7]


def test_the_curve_is_linear_between_its_points_and_constant_beyond_the_last() -> None:
    curve = curve_of(CURVE)
    assert [curve(1), curve(8), curve(64), curve(1000)] == [60, 400, 2400, 2400]
    assert curve(36) == pytest.approx(1400)
    assert curve_of([(4, 100)])(1) == 25


# --- update modes ---------------------------------------------------------------------------


def tokens(number: int) -> Turn:
    return Turn(work=float(number), num_tokens=number)


def request(request_id: str = "t0-0-0-0", name: int = 0) -> GenerateRequest:
    return GenerateRequest(request_id=request_id, token_ids=[name], max_tokens=1)


def on_engine(
    scenario: Callable[[SimulatedEngine], Awaitable[None]], seconds: int = 10, **options: Any
) -> None:
    """Requests take 10 s and sample 10 tokens; an update takes 1 s."""

    async def main() -> None:
        await scenario(SimulatedEngine(turn=lambda _: tokens(seconds), sync_seconds=1.0, **options))

    run_virtual(main())


async def asked(engine: SimulatedEngine, at: float) -> tuple[Completion, float]:
    """The completion of a request asked for at an instant, and when it came."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(at - loop.time())
    return await engine.generate(request()), loop.time()


@pytest.mark.parametrize(
    ("options", "running", "later"),
    [
        ({"update_mode": UpdateMode.KEEP}, ([(0, 4), (1, 6)], 11), ([(1, 10)], 15)),
        (
            {"update_mode": UpdateMode.INTERRUPT, "recompute_seconds": 2.0},
            ([(0, 4), (1, 6)], 13),
            ([(1, 10)], 15),
        ),
        ({"update_mode": UpdateMode.FINISH}, ([(0, 10)], 10), ([(1, 10)], 21)),
        ({"stamps_tokens": False}, ([(0, 10)], 11), ([(0, 10)], 15)),
    ],
)
def test_what_an_update_does_to_running_and_to_later_requests(
    options: dict[str, Any],
    running: tuple[list[tuple[int, int]], float],
    later: tuple[list[tuple[int, int]], float],
) -> None:
    """One runs for 4 s when new weights come, the other is asked for during the update."""

    async def scenario(engine: SimulatedEngine) -> None:
        tasks = [asyncio.create_task(asked(engine, at)) for at in (0, 4.5)]
        await asyncio.sleep(4)
        await engine.update_weights(PublishedWeights(version=1, path=None))
        for (completion, at), (runs, expected_at) in zip(
            await asyncio.gather(*tasks), (running, later), strict=True
        ):
            assert list(completion.version_runs) == runs
            assert at == pytest.approx(expected_at)

    on_engine(scenario, **options)


@pytest.mark.parametrize("mode", [UpdateMode.KEEP, UpdateMode.INTERRUPT])
@given(
    st.lists(st.floats(0.1, 30), min_size=1, max_size=6),
    st.lists(st.floats(0, 60), min_size=1, max_size=8),
)
@settings(deadline=None, max_examples=40)
def test_stamps_are_the_versions_served_and_cover_every_token(
    mode: UpdateMode, pauses: list[float], starts: list[float]
) -> None:
    async def scenario(engine: SimulatedEngine) -> None:
        tasks = [asyncio.create_task(asked(engine, at)) for at in starts]
        for version, pause in enumerate(pauses, start=1):
            await asyncio.sleep(pause)
            await engine.update_weights(PublishedWeights(version=version, path=None))
        for completion, _ in await asyncio.gather(*tasks):
            versions = completion.version_runs.expand().tolist()
            assert len(versions) == 20 and versions == sorted(versions)

    on_engine(scenario, seconds=20, update_mode=mode, recompute_seconds=0.7)


# --- whole runs -----------------------------------------------------------------------------

MIXED: dict[str, dict[str, Any]] = {
    "rollout": {"group_size": 2, "filters": ["zero_advantage"], "deadline_seconds": 200},
    "actor": {"advantage": "grpo"},
    "engine": {"count": 2},
    "simulate": {
        "rollout_seconds": None,
        "rollout_tokens": {"median": 300, "sigma": 1, "max": 4000},
        "engine": {"slots": 24, "throughput": [[1, 60], [24, 900]]},
        "turns": {"kind": "uniform", "low": 0.5, "high": 3.5},
        "tool_seconds": {"kind": "long_tail", "median": 2, "alpha": 2},
        "by_env": {"long": {"rollout_tokens": {"median": 900, "sigma": 0.5}, "turns": 1}},
        "difficulty_spread": 0.3,
        "train_seconds": {"median": 3, "sigma": 0.2},
        "faults": {
            "request_failure_probability": 0.02,
            "environment_failure_probability": 0.02,
            "hang_probability": 0.005,
        },
    },
}


def mixed_run(seed: int = 0, keep_batches: int | None = None, **rollout: Any) -> SimulatedRun:
    sections = {**MIXED, "rollout": {**MIXED["rollout"], **rollout}, "run": {"seed": seed}}
    envs: Any = [{"id": "short", "weight": 3}, {"id": "long", "weight": 1}]
    return simulate_in_memory(sim_config(**sections, envs=envs), keep_batches=keep_batches)


def rows(run: SimulatedRun) -> list[dict[str, Any]]:
    return [{key: row[key] for key in row if key != "rss_mb"} for row in run.rows]


def test_a_run_with_everything_stated_completes_and_the_same_seed_gives_the_same_rows() -> None:
    first, second, other = mixed_run(), mixed_run(), mixed_run(seed=1)
    assert first.outcome.exit_reason == "completed", first.outcome
    assert rows(first) == rows(second) != rows(other)
    rollouts = [rollout for batch in first.store.batches for rollout in batch.rollouts]
    short = [rollout for rollout in rollouts if rollout.env == "short"]
    long = [rollout for rollout in rollouts if rollout.env == "long"]
    assert 0.1 < len(long) / len(rollouts) < 0.4
    assert {rollout.num_turns for rollout in long} == {1}
    assert {rollout.num_turns for rollout in short} == {1, 2, 3}
    assert np.median([rollout.version_runs.num_tokens for rollout in long]) > 600
    assert first.orchestrator.runner.num_retries > 10


def test_two_policies_are_compared_on_the_same_rollouts() -> None:
    """Each prompt's first issue has the same length, turns and reward, whatever the policy."""
    drawn: list[dict[tuple[str, int, int], Any]] = []
    for policy in ({"pacing": "fill"}, {"max_head_offpolicyness": 0}, {"max_batches_ahead": 1}):
        config = sim_config(
            rollout={**policy, "group_size": 2},
            actor={"advantage": "grpo"},
            simulate={
                "rollout_seconds": None,
                "rollout_tokens": {"median": 300},
                "turns": {"median": 2},
            },
        )
        run = simulate_in_memory(config, keep_batches=None)
        drawn.append(
            {
                (one.group.task.env, one.group.task.position, rollout.episode): (
                    rollout.version_runs.num_tokens,
                    rollout.num_turns,
                    rollout.reward,
                )
                for batch in run.store.batches
                for one in batch.groups
                for rollout in one.group.rollouts
            }
        )
    for one, other in pairwise(drawn):
        both = one.keys() & other.keys()
        assert len(both) > 100
        assert all(one[key] == other[key] for key in both)


def test_a_prompt_that_is_issued_again_is_a_new_draw() -> None:
    workload = Workload(sim_config())

    def drawn(request_id: str) -> Turn:
        return workload.turn(GenerateRequest(request_id=request_id, token_ids=[7], max_tokens=1))

    first = drawn("t000000001-0000-00-0000")
    assert drawn("t000000001-0000-00-0000") == first
    assert drawn("t000000001-0000-00-0000-r01") == first  # moved to another engine
    again = {
        drawn(f"t{group:09d}-{episode:04d}-{attempt:02d}-0000").key
        for group, episode, attempt in [(1, 1, 0), (1, 0, 1), (9, 0, 0), (12, 0, 0)]
    }
    assert len(again | {first.key}) == 5


def test_a_request_that_is_never_answered_ends_by_the_deadline() -> None:
    config = sim_config(
        rollout={"deadline_seconds": 60, "max_infrastructure_retries": 10},
        simulate={"rollout_seconds": 5, "faults": {"hang_probability": 0.1}},
    )
    run = simulate_in_memory(config, keep_batches=None)
    assert run.outcome.exit_reason == "completed"
    assert run.orchestrator.runner.num_retries > 5
    seconds = [
        rollout.timings.generation_seconds
        for batch in run.store.batches
        for rollout in batch.rollouts
    ]
    assert max(seconds) < 60


def test_the_finish_mode_ends_a_version_before_the_next_one() -> None:
    config = sim_config(
        engine={"update_mode": "finish", "update_seconds": 1000, "count": 2},
        rollout={"max_concurrent_rollouts": 16},
    )
    run = simulate_in_memory(config, keep_batches=None)
    assert run.outcome.exit_reason == "completed"
    for batch in run.store.batches:
        assert all(len(rollout.version_runs.runs) == 1 for rollout in batch.rollouts)


def test_tasks_that_differ_in_difficulty_are_rejected_more_often() -> None:
    shares = []
    for spread in (0.0, 0.4, 0.8):
        config = sim_config(
            run={"max_empty_batches": 1000},
            rollout={"group_size": 4, "filters": ["zero_advantage"]},
            actor={"advantage": "grpo"},
            simulate={"difficulty_spread": spread},
        )
        run = simulate_in_memory(config)
        counts = run.orchestrator.ledger.counts
        rejected = counts[SampleState.REJECTED]
        shares.append(rejected / (rejected + counts[SampleState.TRAINED]))
    # With p = 1/2 for all, 1/8 of the groups of four agree; with a Beta it is 2 E[p^4].
    assert shares[0] == pytest.approx(1 / 8, abs=0.06)
    assert shares[0] < shares[1] < shares[2]
    assert shares[2] == pytest.approx(0.705, abs=0.1)


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ("rollout_seconds: 3\n  rollout_tokens: 5", "rollout_seconds: state one of"),
        ("rollout_seconds: null", "both are empty"),
        ("rollout_seconds: fast", "a number or a distribution"),
        ("turns: {kind: empirical}", "turns.kind: empirical needs one of values, file and"),
        ("turns: {kind: empirical, values: [1], file: x}", "not values and file"),
        ("turns: {kind: empirical, values: [1, -2]}", "turns.values.1: must be at least 0"),
        ("turns: {kind: empirical, quantiles: [[0.5, 1], [0.5, 2]]}", "probabilities must rise"),
        ("turns: {kind: empirical, quantiles: [[0, 1], [2, 2]]}", "between 0 and 1"),
        ("tool_seconds: {kind: longtail}", "did you mean long_tail?"),
        ("engine: {throughput: []}", "engine.throughput: needs points"),
        ("engine: {throughput: [[4, 100], [2, 50]]}", "rise from 1 up"),
        ("engine: {throughput: [[1, 0]]}", "samples nothing never ends"),
        ("engine: {slot: 3}", "did you mean simulate.engine.slots?"),
        ("by_env: {nobody: {turns: 2}}", "by_env.nobody: there is no such environment"),
        ("by_env: {arithmetic: {turn: 2}}", "did you mean simulate.by_env.arithmetic.turns?"),
        ("by_env: {arithmetic: {rollout_tokens: 2}}", "needs simulate.rollout_tokens for all"),
        ("faults: {hang_probability: 2}", "faults.hang_probability: must be at most 1"),
    ],
)
def test_an_impossible_workload_is_refused_with_the_reason(
    tmp_path: Path, stated: str, message: str
) -> None:
    file = tmp_path / "w.yaml"
    file.write_text(f"simulate:\n  {stated}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert message in str(caught.value)
