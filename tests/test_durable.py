"""A run that is killed and resumed, in virtual time: nothing is lost, nothing is trained twice."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from durable import Life, live
from headway.config import Config, EvalConfig
from headway.core.ages import Ages
from headway.core.ledger import SampleState
from headway.core.records import Lost, Record
from headway.core.rollout import Batch
from headway.loop.summary import summarize
from headway.store.audit import audit
from headway.store.batches import batch_path, read_batch
from headway.store.database import RunDatabase
from headway.store.recovery import read_state
from simulated import sim_config
from simulated_disk import SimulatedDisk, full_disk

POLICIES: dict[str, dict[str, Any]] = {
    "recommended": {
        "order": "oldest_first",
        "over_bound": "trim",
        "pacing": "just_in_time",
    },
    "wait": {"order": "oldest_first", "over_bound": "wait"},
    "drop": {"order": "completion", "over_bound": "drop"},
    "window": {"order": "window", "window": 12, "over_bound": "admit"},
    "ship": {"enforcement": "ship", "order": "completion", "over_bound": "drop"},
}


def durable_config(policy: str, steps: int, seed: int = 0, **rollout: Any) -> Config:
    return sim_config(
        run={"steps": steps, "seed": seed},
        rollout={
            **POLICIES[policy],
            "filters": ["zero_advantage"],
            "group_size": 2,
            "max_concurrent_rollouts": 40,
            **rollout,
        },
        actor={"advantage": "grpo"},
        simulate={"reward_probability": 0.5},
    )


def assert_sound(config: Config, folder: Path, last: Life) -> None:
    """What must hold of a completed run, however often it was killed on the way."""
    assert last.outcome is not None and last.outcome.exit_reason == "completed", last.outcome
    assert not audit(config, folder, config.run.steps)
    last.orchestrator.ledger.check()
    assert_goes_on_in_order(last)
    database = RunDatabase(folder / "ledger.db")
    counts = {str(state): count for state, count in last.counts.items() if count}
    lives = database.rows("SELECT state, count(*) FROM lives GROUP BY state")
    on_disk = {"interrupted" if state == "running" else state: count for state, count in lives}
    assert on_disk == counts
    database.close()
    steps = range(config.run.steps)
    assert_totals(last, [read_batch(batch_path(folder, step)) for step in steps])


def assert_totals(last: Life, batches: list[Batch]) -> None:
    """What the summary counts is what the batches hold, whoever trained them."""
    log, ages = last.orchestrator.log, Ages()
    for batch in batches:
        ages.merge(Ages.of_batch(batch.step, batch.rollouts))
    assert log.num_trained == len(log.rewards) == len(batches)
    assert log.num_tokens_trained == sum(batch.num_trainable for batch in batches)
    assert log.num_tokens_trimmed == sum(batch.num_trimmed for batch in batches)
    assert (log.ages.tokens.counts, log.ages.heads.counts) == (
        ages.tokens.counts,
        ages.heads.counts,
    )
    bias, ledger = last.orchestrator.train_sink.bias.summary(), last.orchestrator.ledger
    rollouts = [rollout for batch in batches for rollout in batch.rollouts]
    group_size = len(batches[0].groups[0].group.rollouts)
    assert bias["rollouts"] == {
        "trained": sum(rollout.num_trainable > 0 for rollout in rollouts),
        "emptied": sum(rollout.num_trainable == 0 for rollout in rollouts),
        "dropped": group_size * ledger.reasons[SampleState.DROPPED]["over_bound"],
        "rejected": group_size * ledger.counts[SampleState.REJECTED],
    }
    lengths = [one.num_trainable + one.num_trimmed for one in rollouts if one.num_trainable]
    assert bias["tokens_mean"]["trained"] == pytest.approx(np.mean(lengths))
    assert last.orchestrator.engine.num_tokens >= sum(lengths)


def assert_goes_on_in_order(life: Life) -> None:
    """What was running is issued first, under its old number; then prompts of dropped samples."""
    if life.state is None:
        return
    admitted = [row for row in life.trace if row["e"] == "admitted"]
    numbers = [one for one, _ in life.state.interrupted]
    assert [row["id"] for row in admitted[: len(numbers)]] == numbers[: len(admitted)]
    again = {task.position for task in life.state.requeued}
    soon = admitted[len(numbers) : len(numbers) + 100]
    assert len(soon) < 100 or again <= {row["position"] for row in soon}


def killed_often(config: Config, folder: Path, rng: np.random.Generator, kills: int) -> Life:
    """Kill the run at random moments, and resume it at a checkpoint that may be old; the last life
    runs to the end."""
    life = live(config, folder, killed_at=rng.uniform(1, 30))
    oldest = 0
    for _ in range(kills):
        before = {path: path.read_bytes() for path in (folder / "batches").iterdir()}
        behind = int(rng.choice([0, 0, 1, 3]))
        oldest = max(oldest, life.published - behind) if life.outcome is None else oldest
        life = live(config, folder, version=oldest, killed_at=rng.uniform(1, 60))
        assert all(path.read_bytes() == content for path, content in before.items())
        if life.outcome is not None:
            return life
    return live(config, folder, version=life.published)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_is_killed_and_resumed_loses_nothing(
    policy: str, seed: int, tmp_path: Path
) -> None:
    config = durable_config(policy, 40, seed)
    last = killed_often(config, tmp_path, np.random.default_rng(seed), 6)
    assert_sound(config, tmp_path, last)


@pytest.mark.parametrize(("policy", "steps"), [("recommended", 1000), ("wait", 200)])
def test_a_long_run_resumed_twenty_times_ends_as_if_it_had_never_been_killed(
    policy: str, steps: int, tmp_path: Path
) -> None:
    """All samples finish well before the last version, so that the counts are a property of the
    run and not of the instant when it ended."""
    kills, between = 20, 4.0 * steps / 20
    config = durable_config(policy, steps)
    stated = {
        "rollout_seconds": {"kind": "uniform", "low": 0.5, "high": 3.0},
        "train_seconds": 4.0,
        "reward_probability": 0.5,
    }
    config = config.model_copy(
        update={"simulate": type(config.simulate).model_validate(stated)},
    )
    whole = live(config, tmp_path / "whole")
    assert_sound(config, tmp_path / "whole", whole)
    folder, rng = tmp_path / "killed", np.random.default_rng(0)
    life = live(config, folder, killed_at=0.7 * between)
    for number in range(1, kills + 1):
        assert life.outcome is None, "it was to be killed"
        version = max(life.published - int(rng.choice([0, 1, 3])), 0)
        last = number == kills
        killed_at = None if last else rng.uniform(0.5, 1.2) * between
        life = live(config, folder, version=version, killed_at=killed_at)
    assert_sound(config, folder, life)
    assert life.counts == whole.counts
    assert life.orchestrator.ledger.reasons == whole.orchestrator.ledger.reasons
    first, second = (summary_of(config, one) for one in (whole, life))
    for key in ("steps", "samples", "exit_reason"):
        assert first[key] == second[key]
    assert first["bias"]["rollouts"] == second["bias"]["rollouts"]
    assert first["price"]["samples_dropped"] == second["price"]["samples_dropped"]
    assert len(life.orchestrator.log.step_seconds) > 0.9 * steps


def summary_of(config: Config, life: Life) -> dict[str, Any]:
    assert life.outcome is not None
    return summarize(
        config, life.orchestrator, life.outcome, wall_seconds=0, loop_seconds=0, versions_of={}
    )


@pytest.mark.parametrize(
    ("changes", "state", "limit", "reason"),
    [
        (
            {"simulate": {"faults": {"environment_failure_probability": 1.0}}},
            SampleState.FAILED,
            60,
            "environment_failed",
        ),
        ({"simulate": {"reward_probability": 0.0}}, SampleState.REJECTED, 64, "empty_batches"),
    ],
)
def test_the_guards_count_on_through_kills_and_start_anew_once_they_have_ended_a_run(
    changes: dict[str, Any], state: SampleState, limit: int, reason: str, tmp_path: Path
) -> None:
    """Batches of 8 samples: eight of them with nothing to train on are 64 samples."""
    stated = durable_config("recommended", 20, max_failed_samples=limit).model_dump(mode="json")
    # Short rollouts: a long one would be cut off in every life.
    stated["simulate"] |= {"rollout_seconds": {"kind": "uniform", "low": 0.5, "high": 1.5}}
    stated["simulate"] |= changes["simulate"]
    stated["run"]["max_empty_batches"] = limit // 8
    config = Config.model_validate(stated)
    rng, lives = np.random.default_rng(0), 0
    for end in (1, 2):
        life, version = None, 0 if lives else None
        while life is None or life.outcome is None:
            assert lives < 40
            life = live(config, tmp_path, version=version, killed_at=rng.uniform(1.8, 3.5))
            lives, version = lives + 1, 0
        assert life.outcome.exit_reason == reason
        assert life.counts[state] == end * limit
    assert lives > 4


MOMENTS = ("journal", "journal written", "batch", "batch written")


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_around_every_write_leaves_a_run_that_goes_on(moment: str, tmp_path: Path) -> None:
    config = durable_config("recommended", 12)
    life, version, kills = None, None, 0
    written: dict[Path, bytes] = {}
    while life is None or life.outcome is None:
        seen = 0

        def kill_at_third(what: str, disk: SimulatedDisk) -> None:
            nonlocal seen
            seen += what == moment
            if seen == 3:
                disk.kill()

        life = live(
            config, tmp_path, version=version, at_write=kill_at_third if kills < 4 else None
        )
        version, kills = life.published, kills + 1
        assert all(path.read_bytes() == content for path, content in written.items())
        written = {path: path.read_bytes() for path in (tmp_path / "batches").glob("*.parquet")}
    assert kills == 5
    assert_sound(config, tmp_path, life)


@pytest.mark.parametrize("what", ["journal", "batch"])
def test_a_full_disk_ends_the_run_and_what_is_safe_can_be_resumed(
    what: str, tmp_path: Path
) -> None:
    config = durable_config("recommended", 10)

    def fail_after_step_3(moment: str, disk: SimulatedDisk) -> None:
        if moment == what and batch_path(tmp_path, 3).exists():
            full_disk(what)

    life = live(config, tmp_path, at_write=fail_after_step_3)
    assert life.outcome is not None and life.outcome.exit_reason == "store_failed"
    assert life.outcome.exit_code == 1 and "no space left" in str(life.outcome.message)
    assert life.counts[SampleState.DROPPED] == 0
    assert_sound(config, tmp_path, live(config, tmp_path, version=life.published))


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    config = durable_config("recommended", 20)
    life = live(config, tmp_path, stopped_at=25.0)
    assert life.outcome is not None and life.outcome.exit_reason == "interrupted"
    again = live(config, tmp_path, version=life.published)
    assert again.state is not None
    waiting = life.counts[SampleState.ACCEPTED], life.counts[SampleState.INTERRUPTED]
    assert (len(again.state.accepted), len(again.state.interrupted)) == waiting
    assert_sound(config, tmp_path, again)


def test_batches_are_shipped_again_no_faster_than_engines_take_their_versions(
    tmp_path: Path,
) -> None:
    stated = {
        "rollout_seconds": {"kind": "constant", "value": 1.0},
        "train_seconds": 0.5,
        "weight_sync_seconds": 0.1,
    }
    quick = durable_config("recommended", 60).model_dump(mode="json")
    quick["simulate"] |= stated
    life = live(Config.model_validate(quick), tmp_path, killed_at=25.0)
    assert life.published > 20
    slow = {**quick, "simulate": {**quick["simulate"], "weight_sync_seconds": 5.0}}
    config = Config.model_validate(slow)
    again = live(config, tmp_path, version=0)
    announced = [row["version"] for row in again.trace if row["e"] == "announced"]
    # All at once, the trainer would publish, and delete, dozens while engines load the first.
    assert announced == list(range(1, 61))
    assert_sound(config, tmp_path, again)


def test_what_was_running_is_issued_again_first_under_its_old_number(tmp_path: Path) -> None:
    config = durable_config("recommended", 20)
    life = live(config, tmp_path, killed_at=20.0)
    again = live(config, tmp_path, version=life.published, killed_at=1e-3)
    assert again.state is not None and again.state.interrupted
    database = RunDatabase(tmp_path / "ledger.db")
    later = read_state(database, life.published)
    known = {group_id for group_id, _ in again.state.interrupted}
    first = {group_id for group_id, _ in later.interrupted}
    assert known <= first and min(first - known, default=10**9) >= again.state.num_admitted
    tasks = dict(again.state.interrupted)
    assert all(dict(later.interrupted)[one] == tasks[one] for one in known)


def test_prompts_of_dropped_samples_are_not_forgotten(tmp_path: Path) -> None:
    """The run is killed as soon as a drop is on disk, while all places are taken."""
    config = durable_config("ship", 30, max_head_offpolicyness=1, max_concurrent_rollouts=24)
    num_waiting, version = 0, None
    for _ in range(6):
        dropped: list[Record] = []

        def see(record: Record, dropped: list[Record] = dropped) -> None:
            if isinstance(record, Lost) and record.is_requeued:
                dropped.append(record)

        def kill(what: str, disk: SimulatedDisk, dropped: list[Record] = dropped) -> None:
            if what == "journal written" and dropped:
                disk.kill()

        life = live(config, tmp_path, version=version, at_write=kill, on_record=see)
        if life.outcome is not None:
            break
        version = life.published
        assert_goes_on_in_order(life)
        num_waiting += len(life.state.requeued) if life.state else 0
    assert num_waiting
    if life.outcome is None:
        life = live(config, tmp_path, version=version)
    assert_sound(config, tmp_path, life)


def test_evaluations_go_on_where_they_were(tmp_path: Path) -> None:
    config = durable_config("recommended", 20).model_copy(
        update={"eval": EvalConfig(every=4, num_tasks=3)}
    )
    life = live(config, tmp_path, killed_at=20.0)
    assert life.orchestrator.eval_sink.results
    last = live(config, tmp_path, version=life.published)
    versions = [one.version for one in last.orchestrator.eval_sink.results]
    assert len(versions) == len(set(versions)) and {0, 20} <= set(versions)
    assert {one.version for one in life.orchestrator.eval_sink.results} <= set(versions)


def test_admission_pauses_while_the_disk_is_too_far_behind(tmp_path: Path) -> None:
    config = durable_config("recommended", 6)
    run = live(config, tmp_path, seconds=lambda: 40.0, max_records=20)
    ordered = [one for one in run.pauses if one in ("pause", "resume")]
    assert ordered[:2] == ["pause", "resume"]
    assert_sound(config, tmp_path, run)
