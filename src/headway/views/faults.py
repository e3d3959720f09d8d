"""What a broken run looked like, in plain lines."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from headway.sim.faults.many import Tally
from headway.sim.faults.run import Report


def report_lines(report: Report) -> Iterator[str]:
    """The run, what went wrong with it, how each of its lives ended, and the verdict."""
    schedule = report.schedule
    config = schedule.resolved()
    rollout = config.rollout
    yield (
        f"seed {schedule.seed}: {config.run.steps} steps, S = {rollout.max_head_offpolicyness}, "
        f"B = {rollout.consumer_batch_size}, {rollout.max_concurrent} in flight, "
        f"{config.engine.count} engines; enforcement {rollout.enforcement}, order {rollout.order}, "
        f"over_bound {rollout.over_bound}, pacing {rollout.pacing}"
    )
    fired = {fault for life in report.lives for fault in life.fired}
    for fault in schedule.faults:
        yield f"  {'*' if fault in fired else ' '} {fault}"
    if schedule.faults:
        yield "    (* had an effect; kills count callbacks of the event loop)"
    for life in report.lives:
        yield f"life {life.life} {life.how} after {life.seconds:.1f} s"
        if life.outcome is not None and life.outcome.message:
            yield f"       {life.outcome.message}"
    if report.has_passed:
        yield f"passed: every invariant held after every event; hash {report.digest}"


def failure_lines(report: Report) -> Iterator[str]:
    """What did not hold, with its operands and the events before it."""
    broken = report.violation
    assert broken is not None
    yield f"FAILED: {broken.invariant}"
    for line in broken.operands.splitlines():
        yield f"  {line}"
    yield f"  in life {broken.life}, {broken.at:.3f} s after its start; the last events before:"
    for event in broken.events:
        yield f"    {event}"


def tally_lines(tally: Tally) -> Iterator[str]:
    """Counts over many seeds."""
    yield f"{tally.num_seeds:,} seeds, {len(tally.failed)} failed"
    yield f"{'lives':<10}{_counts(tally.ends)}"
    yield f"{'faults':<10}{_counts(tally.fired)}"


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common())


def as_dict(report: Report) -> Mapping[str, Any]:
    """For `--json`."""
    return {
        "schedule": dataclasses.asdict(report.schedule),
        "lives": [
            {"ended": life.how, "seconds": life.seconds, "callbacks": life.num_callbacks}
            for life in report.lives
        ],
        "violation": dataclasses.asdict(report.violation) if report.violation else None,
        "hash": report.digest,
    }
