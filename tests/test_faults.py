"""Runs that are broken on purpose: some seeds of `make test-faults`, and what it promises."""

import json
from collections import Counter
from pathlib import Path

import pytest

from headway.cli import main
from headway.errors import ConfigError
from headway.loop.dispatcher import Dispatcher
from headway.ports import Transcript
from headway.sim.environment import SimulatedEnvironment
from headway.sim.faults.draw import draw
from headway.sim.faults.invariants import UNEXPECTED
from headway.sim.faults.run import Report, run_schedule, shrink
from headway.sim.faults.schedule import Fault, FaultKind, Schedule
from headway.sim.faults.truth import MAY_END
from headway.views.faults import failure_lines, report_lines

NUM_SEEDS = 60


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    """The first seeds, run."""
    return [run_schedule(draw(seed)) for seed in range(NUM_SEEDS)]


def test_whatever_breaks_every_invariant_holds(reports: list[Report]) -> None:
    for report in reports:
        told = "\n".join(report_lines(report))
        assert report.has_passed, "\n".join([told, *failure_lines(report)])
        assert report.lives[-1].how == "completed" or "nothing is left" in report.lives[-1].how


def test_the_seeds_break_a_lot(reports: list[Report]) -> None:
    fired = Counter(fault.kind for one in reports for life in one.lives for fault in life.fired)
    assert len(fired) >= 15 and fired[FaultKind.KILL] >= 20, fired
    ends = Counter(life.how for one in reports for life in one.lives)
    assert len(ends) >= 5, ends


def test_the_same_seed_gives_the_same_events(reports: list[Report]) -> None:
    for report in reports[:12]:
        again = run_schedule(draw(report.schedule.seed))
        assert again.digest == report.digest
        assert [life.how for life in again.lives] == [life.how for life in report.lives]
    assert len({report.digest for report in reports}) == NUM_SEEDS


def test_a_schedule_is_data(tmp_path: Path) -> None:
    schedule = draw(7)
    assert Schedule.from_json(schedule.to_json()) == schedule
    with pytest.raises(ConfigError, match="no schedule of faults"):
        Schedule.from_json('{"seed": 1}')
    assert set(MAY_END) <= set(FaultKind)


def test_a_failing_seed_is_told_and_shrunk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A resume that forgets the prompts that were running, told as a user sees it."""
    seed = 1
    monkeypatch.setattr(Dispatcher, "restore", lambda self, state: None)
    code = main(["simulate", "--faults", str(seed)])
    said = capsys.readouterr().out
    assert code == 1
    assert "FAILED: " in said and f"replay: headway simulate --faults {seed}\n" in said
    short = Schedule.from_json(said.partition("as a file for --faults: ")[2])
    assert 0 < len(short.faults) <= len(draw(seed).faults)
    (tmp_path / "short.json").write_text(short.to_json())
    assert main(["simulate", "--faults", str(tmp_path / "short.json")]) == 1
    monkeypatch.undo()
    assert main(["simulate", "--faults", str(tmp_path / "short.json")]) == 0


def test_what_a_simulated_part_raises_by_itself_is_no_fault_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run(self: SimulatedEnvironment, transcript: Transcript) -> None:
        raise TypeError("a bug of the simulation")

    monkeypatch.setattr(SimulatedEnvironment, "run", run)
    violation = run_schedule(draw(0).with_faults(())).violation
    assert violation is not None and violation.invariant == UNEXPECTED
    assert "a bug of the simulation" in violation.operands


def test_shrinking_keeps_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dispatcher, "restore", lambda self, state: None)
    report = run_schedule(draw(1))
    assert report.violation is not None
    short = shrink(report)
    assert short.violation is not None
    assert short.violation.invariant == report.violation.invariant
    assert set(short.schedule.faults) <= set(report.schedule.faults)


def test_a_range_and_a_workload_from_the_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "w.yaml").write_text(
        "run: {steps: 6}\n"
        "rollout: {consumer_batch_size: 4, max_concurrent_rollouts: 12, group_size: 2}\n"
        "eval: {every: 0}\nsimulate: {rollout_seconds: 2, train_seconds: 3}\n"
    )
    code = main(["simulate", str(tmp_path / "w.yaml"), "--faults", "0-5", "--json", "--quiet"])
    told = json.loads(capsys.readouterr().out)
    assert code == 0
    assert told["seeds"] == 6 and not told["failed"] and told["lives"]["completed"] >= 5
    assert main(["simulate", "--faults", "9-3"]) == 2
    assert main(["simulate", "--faults", "none.json"]) == 2
    assert "give a seed (7), a range (0-199)" in capsys.readouterr().err


def test_a_run_without_faults_is_one_life() -> None:
    report = run_schedule(draw(0).with_faults(()))
    assert report.has_passed and [life.how for life in report.lives] == ["completed"]


@pytest.mark.parametrize("callback", range(0, 700, 13))
def test_a_kill_before_any_callback_loses_nothing(callback: int) -> None:
    """Every thirteenth callback of one run, from the first on."""
    kill = Fault(kind=FaultKind.KILL, at=float(callback), which=callback)
    report = run_schedule(draw(2).with_faults((kill,)))
    assert report.has_passed, "\n".join(failure_lines(report))
    assert report.lives[0].outcome is None
