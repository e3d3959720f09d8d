"""What the journal and the batch files cost: CPU per instant rollout, stalls of the loop, bytes.

The whole orchestrator runs on the wall clock, with nothing kept, with the journal, and with the
journal and batch files: over an engine that answers at once with short completions, and over one
that answers `LONG_PER_SECOND` times a second with long ones, which is when a stall can be told from
work that is due. *Loop* is the CPU time of the event loop's own thread; *all* adds the threads that
write, which share the interpreter with it. *Kept* is what lies on disk at the end, and *written* is
all that was written to get there, per token of the batches; *amplification* is the latter over the
bytes of a token (id, log-probability, mask bit). A *stall* includes what other programs on the same
cores cause; *own* is without the time in which the loop's thread waited for a core.

    python -m benchmarks.durability [--json]
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.control_loop import InstantEngine, config_for
from headway.collector import share_interpreter, tame_collector
from headway.core.rollout import Batch, Completion, FinishReason
from headway.core.versions import VersionRuns
from headway.loop.orchestrator import Orchestrator
from headway.ports import GenerateRequest
from headway.sim.run import build_simulation
from headway.store.database import RunDatabase
from headway.store.journal import GroupedJournal
from headway.store.run_store import ParquetRunStore

KEPT = ("nothing", "journal", "journal and batches")
SHORT, LONG = 16, 8192
"""Sampled tokens of a rollout."""
IN_FLIGHT = 256
NUM_SHORT, NUM_LONG = 20_000, 2_000
LONG_PER_SECOND = 200
"""Of 8,192 tokens each: 1.6 million tokens a second."""
NUM_ANSWERS = 512
"""That differ: more than a batch file holds, whose compression would find repetitions."""
PROBE_SECONDS = 0.001
TOKEN_BYTES = 4 + 4 + 1 / 8
"""Of a token in the spool: id, log-probability, mask bit."""


class TokenEngine(InstantEngine):
    """Answers with a number of random tokens."""

    def __init__(self, in_flight: int, num_tokens: int) -> None:
        super().__init__(in_flight)
        rng = np.random.default_rng(0)
        self._rng = rng
        self._tokens = rng.integers(0, 150_000, NUM_ANSWERS * num_tokens, np.int32)
        self._probabilities = np.log(rng.random(len(self._tokens), np.float32) + 1e-6)
        self._num_tokens = num_tokens
        self._num_answers = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        """Wait for a turn."""
        if self._num_tokens == SHORT:
            await super().generate(request)
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(self._rng.uniform(0.5, 1.5) * IN_FLIGHT / LONG_PER_SECOND)
        start = self._num_answers % NUM_ANSWERS * self._num_tokens
        self._num_answers += 1
        span = slice(start, start + self._num_tokens)
        return Completion(
            token_ids=self._tokens[span],
            logprobs=self._probabilities[span].astype(np.float32),
            version_runs=VersionRuns(((self._version, self._num_tokens),)),
            finish_reason=FinishReason.STOP,
        )


class CountingStore:
    """Counts tokens, and keeps batches or forgets them."""

    def __init__(self, inner: ParquetRunStore | None) -> None:
        self._inner = inner
        self.num_tokens = 0

    async def write_batch(self, batch: Batch) -> None:
        """Persist, or not."""
        self.num_tokens += sum(one.num_tokens for one in batch.rollouts)
        if self._inner is not None:
            await self._inner.write_batch(batch)

    async def write_leftovers(self, groups: Any) -> None:
        """Nobody wants them."""

    async def read_batch(self, step: int) -> Batch:
        """Not needed."""
        raise NotImplementedError


async def _probe(late: list[float], own: list[float]) -> None:
    """How late a timer fires; `own` without the time in which the loop's thread waited for a core
    (Linux; elsewhere all of it), so that it can be told on a busy machine."""
    loop = asyncio.get_running_loop()
    while True:
        before, queued = loop.time(), _queued_seconds()
        await asyncio.sleep(PROBE_SECONDS)
        late.append(max(loop.time() - before - PROBE_SECONDS, 0.0))
        own.append(max(late[-1] - (_queued_seconds() - queued), 0.0))


def _queued_seconds() -> float:
    """How long this thread has been ready to run without a core."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0


async def measure(kept: str, num_tokens: int, folder: Path) -> dict[str, Any]:
    """Time the rollouts after the first turn."""
    tame_collector()
    share_interpreter()
    (folder / "batches").mkdir()
    database = RunDatabase(folder / "ledger.db")
    journal = GroupedJournal(lambda records: asyncio.to_thread(database.apply, records))
    store = CountingStore(ParquetRunStore(folder, {}) if kept == KEPT[2] else None)
    orchestrator = build_simulation(
        config_for(IN_FLIGHT),
        store=store,
        replaced={
            "engine": TokenEngine(IN_FLIGHT, num_tokens),
            "journal": None if kept == KEPT[0] else journal,
        },
    )
    running = asyncio.ensure_future(orchestrator.run())
    await _until_admitted(orchestrator, 2 * IN_FLIGHT)
    late: list[float] = []
    own_late: list[float] = []
    probe = asyncio.ensure_future(_probe(late, own_late))
    begun = orchestrator.dispatcher.admissions
    tokens, cpu, own, wall = (
        store.num_tokens,
        time.process_time(),
        time.thread_time(),
        time.monotonic(),
    )
    count = NUM_SHORT if num_tokens == SHORT else NUM_LONG
    await _until_admitted(orchestrator, begun + count)
    done = orchestrator.dispatcher.admissions - begun
    own, cpu, wall = (
        time.thread_time() - own,
        time.process_time() - cpu,
        time.monotonic() - wall,
    )
    probe.cancel()
    tokens = store.num_tokens - tokens
    orchestrator.stop()
    orchestrator.stop()
    await running
    database.close()
    return {
        "kept": kept,
        "tokens": num_tokens,
        "rollouts": done,
        "loop_us_per_rollout": own / done * 1e6,
        "all_us_per_rollout": cpu / done * 1e6,
        "stall_p999_ms": float(np.quantile(late, 0.999)) * 1e3,
        "own_stall_p999_ms": float(np.quantile(own_late, 0.999)) * 1e3,
        "wall_seconds": wall,
        "num_transactions": journal.num_transactions,
        "kept_bytes_per_token": _bytes_of(folder) / store.num_tokens,
        "written_bytes_per_token": _written() / store.num_tokens,
        "write_amplification": _written() / store.num_tokens / TOKEN_BYTES,
    }


def _written() -> int:
    """Bytes that this process has written to files (Linux; elsewhere 0)."""
    counters = getattr(psutil.Process(), "io_counters", lambda: None)()
    return getattr(counters, "write_chars", 0)


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


async def _until_admitted(orchestrator: Orchestrator, admissions: int) -> None:
    while orchestrator.dispatcher.admissions < admissions:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def main() -> None:
    """One process per case."""
    if sys.argv[1:2] == ["--one"]:
        with tempfile.TemporaryDirectory() as folder:
            case = measure(sys.argv[2], int(sys.argv[3]), Path(folder))
            print(json.dumps(asyncio.run(case)))
        return
    rows = []
    for num_tokens in (SHORT, LONG):
        for kept in KEPT:
            words = ["-m", "benchmarks.durability", "--one", kept, str(num_tokens)]
            done = subprocess.run([sys.executable, *words], check=True, capture_output=True)
            rows.append(json.loads(done.stdout))
    if "--json" in sys.argv:
        print(json.dumps(rows))
        return
    print("Durability (wall clock, instant engine)")
    print(
        f"{'kept':<20} {'tokens':>7} {'loop us':>8} {'all us':>8} {'stall p99.9 ms':>15} "
        f"{'own ms':>7} "
        f"{'kept B/token':>13} {'written B/token':>16} {'amplification':>14}"
    )
    for row in rows:
        print(
            f"{row['kept']:<20} {row['tokens']:>7,} {row['loop_us_per_rollout']:>8.1f} "
            f"{row['all_us_per_rollout']:>8.1f} {row['stall_p999_ms']:>15.2f} "
            f"{row['own_stall_p999_ms']:>7.2f} "
            f"{row['kept_bytes_per_token']:>13.2f} {row['written_bytes_per_token']:>16.2f} "
            f"{row['write_amplification']:>14.2f}"
        )
    _print_added(rows)


def _print_added(rows: list[dict[str, Any]]) -> None:
    """What all of it adds to keeping nothing."""
    by_case = {(row["tokens"], row["kept"]): row for row in rows}
    for num_tokens, name, unit, key in (
        (SHORT, "the loop, per instant rollout", "us", "loop_us_per_rollout"),
        (LONG, "its stalls (p99.9)", "ms", "stall_p999_ms"),
        (LONG, "its own stalls (p99.9)", "ms", "own_stall_p999_ms"),
    ):
        added = by_case[num_tokens, KEPT[2]][key] - by_case[num_tokens, KEPT[0]][key]
        print(f"added to {name}: {added:.1f} {unit}")


if __name__ == "__main__":
    main()
