"""Shared by tests: lives of one run, in virtual time, on a real disk."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config import Config
from headway.core.ledger import SampleState
from headway.core.records import Record, RunState, Served
from headway.loop.orchestrator import Orchestrator
from headway.loop.outcome import Outcome
from headway.ports import Journal
from headway.sim.clock import run_virtual
from headway.sim.run import build_simulation
from headway.sim.trainer import RowList
from headway.store.journal import MAX_RECORDS
from headway.store.recovery import adopt_batch, read_state
from simulated_disk import SimulatedDisk


@dataclass(frozen=True)
class Life:
    """What one process did of a run; `outcome` is None for one that was killed."""

    orchestrator: Orchestrator
    outcome: Outcome | None
    state: RunState | None
    """What it began from."""
    rows: list[dict[str, Any]]
    trace: list[dict[str, Any]]

    @property
    def pauses(self) -> list[str]:
        """What was ordered of admission."""
        return [row["what"] for row in self.trace if row["e"] == "ordered"]

    @property
    def published(self) -> int:
        """The newest version that its trainer published."""
        return self.orchestrator.policy.announced

    @property
    def counts(self) -> dict[SampleState, int]:
        """Of the ledger."""
        return self.orchestrator.ledger.counts


class Tapped:
    """A journal that shows every record to somebody first."""

    def __init__(self, journal: Journal, on_record: Callable[[Record], None]) -> None:
        self._journal = journal
        self._on_record = on_record
        self.flush = journal.flush
        self.run = journal.run
        self.owes = journal.owes

    def record(self, record: Record) -> None:
        """Show it, and pass it on."""
        self._on_record(record)
        self._journal.record(record)


def live(
    config: Config,
    folder: Path,
    *,
    version: int | None = None,
    killed_at: float | None = None,
    stopped_at: float | None = None,
    at_write: Callable[[str, SimulatedDisk], None] | None = None,
    seconds: Callable[[], float] = lambda: 0.0,
    max_records: int = MAX_RECORDS,
    on_record: Callable[[Record], None] | None = None,
) -> Life:
    """One life: the first of a run, or, with the version of a checkpoint, one that resumes it.

    It ends by itself, is killed at `killed_at` virtual seconds, or when `at_write` kills it.
    """

    async def main() -> Life:
        def hook(what: str) -> None:
            if at_write is not None:
                at_write(what, disk)

        disk = SimulatedDisk(folder, seconds=seconds, at_write=hook, max_records=max_records)
        state = None
        if version is not None:
            adopt_batch(disk.database, folder)
            state = read_state(disk.database, version)
            disk.database.apply([Served(version=version)])
        journal = disk.journal if on_record is None else Tapped(disk.journal, on_record)
        rows, trace = RowList(), RowList()
        orchestrator = build_simulation(
            config,
            metrics=rows,
            store=disk,
            resume=state,
            replaced={"journal": journal, "trace": trace},
        )
        loop = asyncio.get_running_loop()
        if killed_at is not None:
            loop.call_later(killed_at, disk.kill)
        if stopped_at is not None:
            loop.call_later(stopped_at, orchestrator.stop)
        running = asyncio.create_task(orchestrator.run())
        either: set[asyncio.Future[Any]] = {running, disk.killed}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        outcome = running.result() if running.done() else None
        running.cancel()
        disk.kill()
        disk.database.close()
        return Life(orchestrator, outcome, state, rows.rows, trace.rows)

    return run_virtual(main())
