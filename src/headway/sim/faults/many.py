"""Many seeds over all cores."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from typing import Any

from headway.collector import tame_collector
from headway.sim.faults.draw import Workload, draw
from headway.sim.faults.run import Report, run_schedule
from headway.sim.faults.schedule import Schedule

_CHUNK = 20
"""Seeds that a process runs before it reports, at most."""


def measured(config: Mapping[str, Any]) -> Workload:
    """A run, once without faults, to see how long it takes."""
    (life,) = run_schedule(Schedule(seed=0, config=config)).lives
    return Workload(config=config, seconds=life.seconds, num_callbacks=life.num_callbacks)


@dataclass(slots=True)
class Tally:
    """What became of many seeds."""

    num_seeds: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    """Of their lives, by exit reason, `killed` or `refused`."""
    fired: Counter[str] = field(default_factory=Counter)
    """Faults that had an effect, by kind."""
    failed: list[int] = field(default_factory=list)
    """Seeds in which something did not hold."""

    def add(self, report: Report) -> None:
        """Count one run."""
        self.num_seeds += 1
        for life in report.lives:
            self.ends[life.how.partition(":")[0]] += 1
            self.fired.update(str(fault.kind) for fault in life.fired)
        if not report.has_passed:
            self.failed.append(report.schedule.seed)

    def merge(self, other: "Tally") -> None:
        """Count what another process has counted."""
        self.num_seeds += other.num_seeds
        self.ends.update(other.ends)
        self.fired.update(other.fired)
        self.failed += other.failed


def run_seeds(
    seeds: range,
    *,
    workload: Workload | None = None,
    jobs: int = 0,
    progress: Callable[[Tally], None] = lambda _: None,
) -> Tally:
    """Run many seeds.

    Args:
        workload: instead of drawn runs.
        jobs: processes; 0: one per CPU core.
        progress: is told the counts so far, now and then.
    """
    tally = Tally()
    jobs = min(jobs or os.cpu_count() or 1, len(seeds))
    size = max(min(len(seeds) // (4 * jobs), _CHUNK), 1)
    chunks = (seeds[start : start + size] for start in range(0, len(seeds), size))
    with ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=tame_collector
    ) as pool:
        running = {pool.submit(_run_chunk, one, workload) for one in islice(chunks, 2 * jobs)}
        try:
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                running |= {
                    pool.submit(_run_chunk, one, workload) for one in islice(chunks, len(done))
                }
                for one in done:
                    tally.merge(one.result())
                progress(tally)
        except BaseException:  # Ctrl-C, too: what has not begun never will; re-raised
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    tally.failed.sort()
    return tally


def _run_chunk(seeds: Sequence[int], workload: Workload | None) -> Tally:
    tally = Tally()
    for seed in seeds:
        tally.add(run_schedule(draw(seed, workload)))
    return tally
