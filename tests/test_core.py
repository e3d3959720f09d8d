"""Properties of the pure core: version runs, ages, advantages, filters, guards."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.advantages import Baseline, group_advantages
from headway.core.ages import Ages
from headway.core.filters import EMPTY_COMPLETION, FilterName, rejection
from headway.core.guards import EmptyBatchGuard, FailureGuard
from headway.core.rollout import FinishReason, Source
from headway.core.versions import VersionRuns
from headway.errors import EmptyBatchesError, EngineError, EnvironmentFailure
from rollouts import group, rollout

versions_lists = st.lists(st.integers(0, 6), max_size=40)


@given(versions_lists, versions_lists)
def test_version_runs_encode_exactly(left: list[int], right: list[int]) -> None:
    runs = VersionRuns.from_versions(left)
    assert runs.expand().tolist() == left
    assert runs.num_tokens == len(left)
    assert runs == VersionRuns.of((version, 1) for version in left)
    assert (runs + VersionRuns.from_versions(right)).expand().tolist() == left + right
    if left:
        assert (runs.head, runs.tail) == (min(left), max(left))
    assert all(a != b for (a, _), (b, _) in zip(runs.runs, runs.runs[1:], strict=False))


@pytest.mark.parametrize("runs", [((-1, 2),), ((0, 0),), ((3, 1), (3, 2))])
def test_impossible_version_runs_are_refused(runs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="invalid version runs"):
        VersionRuns(runs)


def test_a_rollout_whose_runs_miss_a_token_is_refused() -> None:
    whole = rollout(versions=(1, 1, 2))
    fields = msgspec.structs.asdict(whole)
    with pytest.raises(ValueError, match="3 tokens in the loss mask"):
        type(whole)(**{**fields, "version_runs": VersionRuns(((1, 2),))})
    with pytest.raises(ValueError, match="equally long"):
        type(whole)(**{**fields, "logprobs": whole.logprobs[1:]})


@given(
    st.lists(st.tuples(versions_lists, st.sampled_from(Source)), max_size=12),
    st.integers(6, 20),
)
def test_ages_equal_a_naive_recomputation(
    trained: list[tuple[list[int], Source]], step: int
) -> None:
    rollouts = [rollout(versions=versions, source=source) for versions, source in trained]
    live = [versions for versions, source in trained if source is Source.LIVE and versions]
    tokens = sorted(step - version for versions in live for version in versions)
    heads = [step - min(versions) for versions in live]
    summary = Ages.of_batch(step, rollouts).summary()
    if not live:
        assert all(value is None for value in summary.values())
        return
    assert summary["max"] == max(tokens)
    assert summary["mean"] == pytest.approx(np.mean(tokens))
    assert summary["p99"] == tokens[int(np.ceil(0.99 * len(tokens))) - 1]
    assert summary["head_max"] == max(heads)
    assert summary["head_mean"] == pytest.approx(np.mean(heads))


def test_merged_ages_equal_those_of_the_union() -> None:
    parts = [[rollout(versions=(1, 2, 2))], [rollout(versions=(0,)), rollout(versions=(5,))]]
    merged = Ages()
    for rollouts in parts:
        merged.merge(Ages.of_batch(7, rollouts))
    assert merged == Ages.of_batch(7, [one for part in parts for one in part])


rewards_lists = st.lists(st.floats(-5, 5), min_size=1, max_size=16)


@given(rewards_lists, st.sampled_from([Baseline.GRPO, Baseline.GRPO_NO_STD, Baseline.RLOO]))
def test_group_relative_advantages_sum_to_zero(rewards: list[float], baseline: Baseline) -> None:
    advantages = group_advantages(np.array(rewards), baseline)
    assert advantages.dtype == np.float32 and advantages.shape == (len(rewards),)
    assert abs(float(advantages.sum())) < 1e-3
    if len(set(rewards)) == 1:
        assert not advantages.any()


@given(rewards_lists)
def test_advantages_follow_their_formulas(rewards: list[float]) -> None:
    values = np.array(rewards)
    grpo = group_advantages(values, Baseline.GRPO)
    if len(set(rewards)) > 1:
        expected = (values - values.mean()) / (values.std() + 1e-6)
        np.testing.assert_allclose(grpo, expected, rtol=1e-4, atol=1e-5)
        others = [np.mean(np.delete(values, i)) for i in range(len(values))]
        rloo = group_advantages(values, Baseline.RLOO)
        np.testing.assert_allclose(rloo, values - others, rtol=1e-4, atol=1e-4)
    mean = group_advantages(values, Baseline.MEAN, running_mean=0.25)
    np.testing.assert_allclose(mean, values - 0.25, rtol=1e-6, atol=1e-6)


def reason(rewards: Sequence[float], *filters: FilterName, **rollout_args: object) -> str | None:
    finished = group(0, rewards, **rollout_args)
    return rejection(finished, group_advantages(finished.rewards, Baseline.GRPO), filters)


def test_filters_name_their_reason() -> None:
    assert reason([0, 1], FilterName.ZERO_ADVANTAGE) is None
    assert reason([1, 1], FilterName.ZERO_ADVANTAGE) == "zero_advantage"
    assert reason([1, 1]) is None
    length = FinishReason.LENGTH
    assert reason([0, 1], FilterName.TRUNCATED, finish_reason=length) == "truncated"
    assert reason([0, 1], finish_reason=length) is None
    assert reason([0, 1], versions=()) == EMPTY_COMPLETION


def test_the_empty_batch_guard_counts_only_consecutive_batches_and_names_the_cause() -> None:
    guard = EmptyBatchGuard(batch_size=4, limit=2)
    for _ in range(7):
        guard.rejected(group(rewards=[0, 0]), "zero_advantage")
    assert guard.num_empty == 1
    guard.accepted()
    for _ in range(7):
        guard.rejected(group(rewards=[0, 0]), "zero_advantage")
    with pytest.raises(EmptyBatchesError, match=r"8 x zero_advantage.*every reward was 0.*test"):
        guard.rejected(group(rewards=[0, 0]), "zero_advantage")


def test_the_failure_guard_raises_the_last_error_s_own_class() -> None:
    guard = FailureGuard(limit=2)
    guard.failed(EngineError("a"))
    guard.finished()
    guard.failed(EngineError("b"))
    with pytest.raises(EnvironmentFailure, match="2 samples failed in a row; the last one: c"):
        guard.failed(EnvironmentFailure("c"))
