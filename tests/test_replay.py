"""A recorded run comes out the same through the real loop, and the first difference is found."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.config import Config
from headway.errors import RunDirError
from headway.loop.orchestrator import Orchestrator
from headway.loop.trace import DECISIONS, digest_of
from headway.sim.app import simulate
from headway.sim.replay import read_trace, replay, replay_rows
from headway.sim.trainer import RowList
from simulated import SimulatedRun, sim_config, simulate_in_memory

Script = Callable[[Orchestrator], Any]


def recorded(
    config: Config, script: Script | None = None
) -> tuple[SimulatedRun, list[dict[str, Any]]]:
    """A run and its trace, as it would be read from disk."""
    trace = RowList()
    run = simulate_in_memory(config, script=script, ports={"trace": trace})
    return run, msgspec.json.decode(msgspec.json.encode(trace.rows))


def assert_reproduced(config: Config, script: Script | None = None) -> SimulatedRun:
    run, rows = recorded(config, script)
    result = replay_rows(config, rows, run.orchestrator.trace.digest)
    assert result.difference is None and result.is_same
    assert result.replayed_hash == result.recorded_hash == run.orchestrator.trace.digest
    assert result.num_decisions == run.orchestrator.trace.num_decisions > 100
    assert result.num_inputs == run.orchestrator.trace.num_inputs
    return run


SETTINGS: dict[str, dict[str, Any]] = {
    "recommended": {"rollout": {"over_bound": "trim", "pacing": "just_in_time"}},
    "admission": {"rollout": {"order": "oldest_first"}},
    "synchronous": {"rollout": {"max_head_offpolicyness": 0}},
    "ship_drop": {"rollout": {"enforcement": "ship", "over_bound": "drop"}},
    "both_trim": {"rollout": {"enforcement": "both", "over_bound": "trim"}},
    "drop": {"rollout": {"over_bound": "drop", "max_head_offpolicyness": 1}},
    "window": {"rollout": {"order": "window", "window": 12}},
    "wait": {"rollout": {"over_bound": "wait", "order": "oldest_first"}},
    "wait_then_trim": {
        "rollout": {"over_bound": "wait", "wait_seconds": 1.5, "max_head_offpolicyness": 1}
    },
    "wait_then_drop": {
        "rollout": {"over_bound": "wait", "wait_seconds": 1.5, "after_wait": "drop"},
        "simulate": {"rollout_seconds": {"kind": "long_tail", "median": 5.0, "alpha": 1.2}},
    },
    "ahead": {"rollout": {"max_batches_ahead": 2, "over_bound": "trim"}},
    "groups_and_filters": {
        "rollout": {"group_size": 4, "filters": ["zero_advantage"]},
        "actor": {"advantage": "grpo"},
        "simulate": {"reward_probability": 0.2},
    },
    "evals": {"eval": {"every": 3, "num_tasks": 9, "max_concurrent": 2}},
    "narrow": {"rollout": {"max_concurrent_rollouts": 5, "queue_size": 8}},
    "failures": {
        "rollout": {"max_environment_retries": 0, "max_infrastructure_retries": 0},
        "simulate": {
            "faults": {
                "request_failure_probability": 0.1,
                "environment_failure_probability": 0.1,
            }
        },
    },
    "retries": {"simulate": {"faults": {"request_failure_probability": 0.2}}},
    "same_instants": {
        "simulate": {
            "rollout_seconds": {"kind": "empirical", "values": [1.0, 2.0, 3.0]},
            "train_seconds": 1.0,
            "weight_sync_seconds": 0.0,
        }
    },
    "instant": {"simulate": {"rollout_seconds": 0, "train_seconds": 0, "weight_sync_seconds": 0}},
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SETTINGS)
def test_a_simulated_run_is_reproduced(name: str, seed: int) -> None:
    config = sim_config(run={"seed": seed, "steps": 15}, **SETTINGS[name])
    run = assert_reproduced(config)
    assert run.outcome.exit_reason == "completed"


def test_several_environments_are_reproduced() -> None:
    assert_reproduced(
        sim_config(
            rollout={"over_bound": "wait"},
            envs=[{"id": "one"}, {"id": "two", "over_bound": "drop"}, {"id": "three"}],
        )
    )


@pytest.mark.parametrize("pacing", ["fill", "just_in_time"])
def test_what_was_said_from_outside_is_reproduced(pacing: str) -> None:
    async def script(orchestrator: Orchestrator) -> None:
        for pause in (3.0, 0.7, 20.0, 0.0):
            await asyncio.sleep(pause)
            orchestrator.dispatcher.pause()
            await asyncio.sleep(pause / 2)
            orchestrator.dispatcher.resume()
        await asyncio.sleep(10.0)
        orchestrator.stop()

    config = sim_config(
        run={"steps": 1000, "shutdown_seconds": 100},
        rollout={"over_bound": "trim", "pacing": pacing},
    )
    run = assert_reproduced(config, script)
    assert run.outcome.exit_reason == "interrupted"


def test_a_run_that_broke_off_is_reproduced_as_far_as_it_got() -> None:
    config = sim_config()
    _, rows = recorded(config)
    for num_rows in (1, 50, 51, 52, 200):
        result = replay_rows(config, rows[:num_rows])
        # The loop decides at once; what it had decided and not yet written is no difference.
        assert result.difference is None or "one decision too many" in result.difference


# --- differences --------------------------------------------------------------------------------


def decisions(rows: list[dict[str, Any]], kind: str) -> list[int]:
    return [index for index, row in enumerate(rows) if row["e"] == kind]


def test_one_decision_that_was_tampered_with_is_the_first_difference() -> None:
    config = sim_config()
    _, rows = recorded(config)
    of_all = [index for index, row in enumerate(rows) if row["e"] in DECISIONS]
    for number in (0, 1, len(of_all) // 2, len(of_all) - 1):
        changed = [dict(row) for row in rows]
        row = changed[of_all[number]]
        key = "step" if row["e"] == "batch" else "id"
        row[key] += 1_000_000
        result = replay_rows(config, changed)
        assert not result.is_same and result.difference is not None
        assert result.difference.startswith(f"decision {number + 1} at {row['t']:.3f} s: recorded")
        assert str(row[key]) in result.difference


def test_a_decision_that_is_missing_or_one_too_many_is_found() -> None:
    config = sim_config()
    _, rows = recorded(config)
    last = [index for index, row in enumerate(rows) if row["e"] in DECISIONS][-1]
    kept = rows[:last] + rows[last + 1 :]
    whole = digest_of([row for row in kept if row["e"] in DECISIONS])
    fewer = replay_rows(config, kept, whole)
    assert fewer.difference is not None and "one decision too many" in fewer.difference
    more = replay_rows(config, [*rows, {**rows[last], "id": 999_999}])
    assert more.difference is not None and "is missing" in more.difference


def test_a_reordered_input_is_found() -> None:
    config = sim_config(rollout={"order": "completion"})
    _, rows = recorded(config)
    first, second = decisions(rows, "ended")[40:42]
    swapped = [dict(row) for row in rows]
    swapped[first], swapped[second] = (
        {**rows[second], "t": rows[first]["t"]},
        {**rows[first], "t": rows[second]["t"]},
    )
    difference = replay_rows(config, swapped).difference
    assert difference is not None and "judged" in difference


def test_a_sample_that_was_never_admitted_is_found() -> None:
    config = sim_config()
    _, rows = recorded(config)
    ended = decisions(rows, "ended")[10]
    changed = [*rows[:ended], {**rows[ended], "id": 123_456}, *rows[ended + 1 :]]
    difference = replay_rows(config, changed).difference
    assert difference is not None and "123456" in difference


@pytest.mark.parametrize(
    "rollout",
    [
        {"order": "oldest_first"},
        {"max_head_offpolicyness": 3},
        {"consumer_batch_size": 7},
        {"over_bound": "drop"},
        {"enforcement": "ship"},
        {"max_concurrent_rollouts": 9},
        {"max_batches_ahead": 1},
        {"pacing": "just_in_time"},
    ],
    ids=str,
)
def test_another_configuration_gives_another_run(rollout: dict[str, Any]) -> None:
    original: dict[str, Any] = {
        "order": "completion",
        "max_head_offpolicyness": 5 if "pacing" in rollout else 2,
    }
    config = sim_config(rollout=original, simulate={"train_seconds": 4.0})
    _, rows = recorded(config)
    assert replay_rows(config, rows).is_same
    other = sim_config(rollout={**original, **rollout}, simulate={"train_seconds": 4.0})
    result = replay_rows(other, rows)
    assert not result.is_same and result.difference


# --- the files of a run ---------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of `headway simulate`."""
    path = tmp_path / "run"
    config = sim_config(
        run={"dir": str(path), "steps": 12}, rollout={"over_bound": "drop"}, eval={"every": 5}
    )
    assert simulate(config)["exit_reason"] == "completed"
    return path


def test_the_files_of_a_simulated_run_are_enough(run_dir: Path) -> None:
    result = replay(run_dir)
    assert result.is_same and result.recorded_hash == result.replayed_hash
    (run_dir / "summary.json").unlink()  # the run was killed
    assert replay(run_dir).is_same and replay(run_dir).recorded_hash is None


def test_a_last_line_that_a_kill_cut_off_is_left_out(run_dir: Path) -> None:
    trace = run_dir / "trace.jsonl"
    whole = read_trace(run_dir)
    trace.write_bytes(trace.read_bytes()[:-9])
    assert read_trace(run_dir) == whole[:-1]


def test_a_trace_that_a_kill_cut_off_anywhere_is_reproduced(run_dir: Path) -> None:
    (run_dir / "summary.json").unlink()
    lines = (run_dir / "trace.jsonl").read_bytes().splitlines(keepends=True)
    for count in range(1, len(lines), 7):
        (run_dir / "trace.jsonl").write_bytes(b"".join(lines[:count]))
        assert replay(run_dir).difference is None, lines[count - 1]


def test_a_broken_line_in_the_middle_is_refused(run_dir: Path) -> None:
    trace = run_dir / "trace.jsonl"
    lines = trace.read_bytes().split(b"\n")
    lines[4] = lines[4][:-3]
    trace.write_bytes(b"\n".join(lines))
    with pytest.raises(RunDirError, match=r"trace\.jsonl, line 5"):
        replay(run_dir)


def test_a_folder_without_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="holds no trace of a run"):
        replay(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.4, 0.9])
def test_a_trace_that_lost_rows_is_not_the_same_run(run_dir: Path, share: float) -> None:
    lines = (run_dir / "trace.jsonl").read_bytes().splitlines(keepends=True)
    (run_dir / "trace.jsonl").write_bytes(b"".join(lines[: round(share * len(lines))]))
    if not share:
        with pytest.raises(RunDirError, match="is empty"):
            replay(run_dir)
        return
    result = replay(run_dir)
    assert not result.is_same and "rows were lost or changed" in str(result.difference)
    assert result.recorded_hash != result.replayed_hash


@pytest.mark.parametrize("line", [b"[1, 2]", b'{"t": 1.0}', b'{"e": "ended"}', b'"text"'])
def test_a_line_that_is_no_row_is_refused(run_dir: Path, line: bytes) -> None:
    lines = (run_dir / "trace.jsonl").read_bytes().splitlines()
    (run_dir / "trace.jsonl").write_bytes(b"\n".join([*lines[:5], line, *lines[5:]]) + b"\n")
    with pytest.raises(RunDirError, match="line 6"):
        replay(run_dir)


@pytest.mark.parametrize("text", ["{bad", "[]", ""])
def test_a_summary_that_cannot_be_read_is_named(run_dir: Path, text: str) -> None:
    (run_dir / "summary.json").write_text(text, encoding="utf-8")
    with pytest.raises(RunDirError, match=r"summary\.json cannot be read"):
        replay(run_dir)
