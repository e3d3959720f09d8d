"""All lives of a broken run, whether it came out right, and the shortest way to see it go wrong."""

import contextlib
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headway.sim.faults.invariants import Invariants, Violation
from headway.sim.faults.life import LifeReport, live
from headway.sim.faults.schedule import Schedule
from headway.sim.faults.state import INITIAL, write_model
from headway.sim.faults.truth import check_end
from headway.store.run_dir import RunDir

_MEMORY = Path("/dev/shm")
_MIN_FREE_BYTES = 256 << 20
_MORE_LIVES = 2
"""Lives without faults in which the run has to complete: one, and one that was over already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of a schedule."""

    schedule: Schedule
    lives: tuple[LifeReport, ...]
    violation: Violation | None
    digest: str
    """Hash over all events."""

    @property
    def has_passed(self) -> bool:
        """Whether everything held that must."""
        return self.violation is None


def run_schedule(schedule: Schedule) -> Report:
    """Run it, life after life, until the run has completed or something does not hold."""
    config = schedule.resolved()
    lives: list[LifeReport] = []
    with _folder() as folder, _quiet():
        (folder / "model").mkdir()
        write_model(folder / "model", INITIAL)
        run_dir = RunDir(folder / "run")
        invariants = Invariants(config, run_dir.path)
        for life in range(schedule.num_broken_lives + _MORE_LIVES):
            try:
                report = live(schedule, life, run_dir, invariants)
                lives.append(report)
                invariants.event(f"life {life}: {report.how}")
                check_end(report, config, run_dir, invariants)
            except Exception as error:  # wherever it comes from, it is a failure of this seed
                invariants.unexpected(error)
                break
            is_over = "nothing is left" in report.how or report.how == "completed"
            if invariants.violation or is_over:
                break
        else:
            invariants.broken("once nothing is broken any more, the run completes", report.how)
    return Report(
        schedule=schedule,
        lives=tuple(lives),
        violation=invariants.violation,
        digest=invariants.digest,
    )


def shrink(report: Report, *, tries: int = 60) -> Report:
    """A failing schedule without whatever it fails without: faults one by one, then steps."""
    best, num_left = report, tries
    again = True
    assert best.violation is not None
    while again and num_left > 0:
        again = False
        for candidate in _smaller(best.schedule):
            if num_left == 0:
                break
            num_left -= 1
            tried = run_schedule(candidate)
            found = tried.violation
            if found is not None and found.invariant == best.violation.invariant:
                best, again = tried, True
                break
    return best


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    for fault in schedule.faults:
        yield schedule.with_faults(tuple(one for one in schedule.faults if one != fault))
    steps = int(schedule.config["run"]["steps"])
    if steps > 2:
        yield schedule.with_steps(steps // 2)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A temporary folder, in memory where there is such a file system: a flush costs nothing."""
    where = None
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _MIN_FREE_BYTES:
        where = str(_MEMORY)
    with tempfile.TemporaryDirectory(prefix="headway-faults-", dir=where) as name:
        yield Path(name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nobody wants a warning for every file that was planted."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            # Of coroutines that a killed process had not begun.
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            yield
    finally:
        logging.disable(before)
