"""`headway simulate --faults`: one seed, a range of them, or a schedule from a file."""

import json
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.config import Config
from headway.errors import ConfigError
from headway.sim.faults.draw import draw
from headway.sim.faults.many import Tally, measured, run_seeds
from headway.sim.faults.run import Report, run_schedule, shrink
from headway.sim.faults.schedule import Schedule
from headway.views.faults import as_dict, failure_lines, report_lines, tally_lines

_MOST_NAMED = 20
_TELL_SECONDS = 10.0
"""Between two lines of progress, where no line can be written over."""
_MAX_SHRUNK = 3
"""Failing seeds of a range that are told in full."""


def simulate_faults(
    given: str, *, config: Config | None, workload_words: str, as_json: bool, is_quiet: bool
) -> int:
    """Run what is given and print what became of it. Returns the exit code: 0, or 1 when something
    did not hold.

    Args:
        given: `SEED`, `FIRST-LAST`, or the path of a schedule as JSON.
        config: of the run that is broken; None: one is drawn for each seed.
        workload_words: how `config` was given on the command line, to be repeated for a replay.

    Raises:
        ConfigError: it is none of these.
    """
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", given)
    if config is not None and not is_quiet:
        print("the workload, once without faults, to see how long it takes", file=sys.stderr)
    workload = None if config is None else measured(_sections(config))
    if found is None:
        return _one(_schedule_of_file(Path(given)), given, as_json)
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise ConfigError(f"--faults {given}: the range ends before it begins")
    if first == last:
        return _one(draw(first, workload), f"{given}{workload_words}", as_json)
    tally = run_seeds(
        range(first, last + 1), workload=workload, progress=_silent if is_quiet else _Progress()
    )
    reports = [run_schedule(draw(seed, workload)) for seed in tally.failed[:_MAX_SHRUNK]]
    if as_json:
        print(json.dumps(_tally_dict(tally, reports), indent=2))
        return 1 if tally.failed else 0
    print(*tally_lines(tally), sep="\n")
    for report in reports:
        _tell_failure(report, f"{report.schedule.seed}{workload_words}")
    if len(tally.failed) > len(reports):
        print(f"\nfailed: {', '.join(map(str, tally.failed))}")
    return 1 if tally.failed else 0


def _sections(config: Config) -> Mapping[str, Any]:
    sections: Mapping[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    return {**sections, "run": {**sections.get("run", {}), "steps": config.run.steps}}


def _schedule_of_file(path: Path) -> Schedule:
    try:
        return Schedule.from_json(path.read_bytes())
    except ConfigError as error:
        raise ConfigError(f"--faults {path}: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"--faults {path}: give a seed (7), a range (0-199), or the path of a schedule "
            f"({error.strerror})"
        ) from error


def _one(schedule: Schedule, words: str, as_json: bool) -> int:
    report = run_schedule(schedule)
    if as_json:
        print(json.dumps(as_dict(report), indent=2))
    else:
        print(*report_lines(report), sep="\n")
        if not report.has_passed:
            _tell_failure(report, words)
    return 0 if report.has_passed else 1


def _tell_failure(report: Report, words: str) -> None:
    print(f"\nseed {report.schedule.seed}")
    print(*failure_lines(report), sep="\n")
    short = shrink(report)
    print(f"replay: headway simulate --faults {words}")
    print("what is left of it when all is taken away that it fails without:")
    print(*report_lines(short), sep="\n")
    print(f"as a file for --faults: {short.schedule.to_json()}")


def _tally_dict(tally: Tally, reports: list[Report]) -> Mapping[str, Any]:
    return {
        "seeds": tally.num_seeds,
        "failed": tally.failed,
        "lives": dict(tally.ends),
        "faults": dict(tally.fired),
        "reports": [as_dict(report) for report in reports],
    }


def _silent(_: Tally) -> None:
    return


class _Progress:
    """One line that is written over where that can be done, else one every few seconds."""

    def __init__(self) -> None:
        self._said_at = time.monotonic()

    def __call__(self, tally: Tally) -> None:
        failed = f": {', '.join(map(str, tally.failed[:_MOST_NAMED]))}" if tally.failed else ""
        line = f"{tally.num_seeds:,} seeds, {len(tally.failed)} failed{failed}"
        if sys.stderr.isatty():
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() > self._said_at + _TELL_SECONDS:
            self._said_at = time.monotonic()
            print(line, file=sys.stderr, flush=True)
