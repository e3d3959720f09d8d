"""Child processes: real ones, killed, failing, stubborn and orphaned."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.errors import EngineError, TrainerError
from headway.processes import ManagedProcess

SLEEP = "import time; time.sleep(600)"
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
PARENT = """
import asyncio, sys
from pathlib import Path
from headway.processes import ManagedProcess

async def main():
    child = ManagedProcess(
        name="grandchild",
        command=[sys.executable, "-c", "import time; time.sleep(600)"],
        log_path=Path(sys.argv[1]),
    )
    await child.start()
    print(child.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def python(
    code: str, folder: Path, *arguments: str, error: type[EngineError | TrainerError] = EngineError
) -> ManagedProcess:
    return ManagedProcess(
        name="engine-7",
        command=[sys.executable, "-c", code, *arguments],
        log_path=folder / "logs" / "engine-7.log",
        error=error,
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - other processes set no event
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def printed_pid(process: ManagedProcess) -> int | None:
    text = process.log_path.read_text()
    return int(text) if text.endswith("\n") else None


def test_death_is_reported_with_name_code_and_the_end_of_the_log(tmp_path: Path) -> None:
    async def scenario() -> None:
        process = python(
            "import sys\nfor i in range(50): print('line', i)\nsys.exit(3)",
            tmp_path,
            error=TrainerError,
        )
        await process.start()
        with pytest.raises(TrainerError, match="engine-7") as caught:
            await process.watch()
        message = str(caught.value)
        assert "exit code 3" in message
        assert "line 49" in message and "line 40" in message and "line 39" not in message
        await process.stop(1)

    asyncio.run(scenario())


def test_a_signal_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        process = python(SLEEP, tmp_path)
        await process.start()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"engine-7.*killed by SIGKILL"):
            await process.watch()

    asyncio.run(scenario())


def test_an_announced_exit_is_no_failure_but_a_bad_code_still_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        good, bad, early = (python(f"raise SystemExit({c})", tmp_path) for c in (0, 1, 0))
        for process in (good, bad, early):
            await process.start()
        good.expect_exit()
        bad.expect_exit()
        await good.watch()
        with pytest.raises(EngineError, match="exit code 1"):
            await bad.watch()
        with pytest.raises(EngineError, match="exit code 0 although"):
            await early.watch()

    asyncio.run(scenario())


def test_waiting_for_readiness_ends_when_the_process_dies_or_is_late(tmp_path: Path) -> None:
    async def never() -> bool:
        await asyncio.sleep(600)
        return True

    async def not_yet() -> bool:
        return False

    async def scenario() -> None:
        dying = python("print('out of memory'); raise SystemExit(9)", tmp_path)
        await dying.start()
        with pytest.raises(EngineError, match=r"exit code 9.*\n.*out of memory"):
            await dying.wait_ready(never, deadline_seconds=60)
        late = python(SLEEP, tmp_path / "late")
        await late.start()
        with pytest.raises(EngineError, match=r"engine-7 was not ready within 0\.2 s"):
            await late.wait_ready(not_yet, deadline_seconds=0.2)
        flag = tmp_path / "flag"
        quick = python(f"open({str(flag)!r}, 'w'); {SLEEP}", tmp_path / "quick")
        await quick.start()

        async def is_there() -> bool:
            return flag.exists()

        await quick.wait_ready(is_there, deadline_seconds=60)
        for process in (late, quick):
            await process.stop(5)
            await process.watch()  # a stopped process is no failure
            assert process.returncode == -signal.SIGTERM

    asyncio.run(scenario())


def test_stop_ends_a_stubborn_process_and_its_children(tmp_path: Path) -> None:
    async def scenario() -> None:
        process = python(STUBBORN, tmp_path)
        await process.start()
        await until(lambda: printed_pid(process) is not None)
        child = printed_pid(process)
        assert child is not None and is_alive(child)
        await process.stop(0.1)
        assert process.returncode == -signal.SIGKILL
        await until(lambda: not is_alive(child))
        await process.stop(0.1)  # again: harmless

    asyncio.run(scenario())


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_process_does_not_outlive_its_parent(tmp_path: Path) -> None:
    async def scenario() -> None:
        parent = python(PARENT, tmp_path, str(tmp_path / "grandchild.log"))
        await parent.start()
        await until(lambda: printed_pid(parent) is not None)
        grandchild = printed_pid(parent)
        assert grandchild is not None and is_alive(grandchild)
        os.kill(parent.pid, signal.SIGKILL)  # the parent alone: no chance to clean up
        await until(lambda: not is_alive(grandchild))
        await parent.stop(1)

    asyncio.run(scenario())


def test_a_missing_program_is_a_clear_error(tmp_path: Path) -> None:
    process = ManagedProcess(
        name="engine-7", command=["./no-such-program"], log_path=tmp_path / "log"
    )
    with pytest.raises(EngineError, match=r"engine-7 could not be started \(./no-such-program\)"):
        asyncio.run(process.start())


LEAVES_A_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
)
print(child.pid, flush=True)
{then}
"""
GUARDED_PARENT = """
import asyncio, sys
from pathlib import Path
from headway.processes import ManagedProcess

async def main():
    server = ManagedProcess(
        name="server",
        command=[sys.executable, "-c", sys.argv[2]],
        log_path=Path(sys.argv[1]),
        has_children=True,
    )
    await server.start()
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("then", "ending"),
    [
        ("sys.exit(3)", "ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
    ],
)
def test_a_server_that_dies_leaves_no_worker_behind(tmp_path: Path, then: str, ending: str) -> None:
    async def scenario() -> None:
        process = ManagedProcess(
            name="engine-7",
            command=[sys.executable, "-c", LEAVES_A_CHILD.format(then=then)],
            log_path=tmp_path / "engine-7.log",
            has_children=True,
        )
        await process.start()
        with pytest.raises(EngineError, match=ending):
            await process.watch()
        worker = printed_pid(process)
        assert worker is not None and not is_alive(worker)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_stubborn", [False, True])
def test_stopping_a_server_ends_its_workers_in_sessions_of_their_own(
    tmp_path: Path, is_stubborn: bool
) -> None:
    refuse = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " * is_stubborn

    async def scenario() -> None:
        process = ManagedProcess(
            name="engine-7",
            command=[
                sys.executable,
                "-c",
                refuse + LEAVES_A_CHILD.strip().format(then="time.sleep(600)"),
            ],
            log_path=tmp_path / "engine-7.log",
            has_children=True,
        )
        await process.start()
        await until(lambda: process.log_path.exists() and printed_pid(process) is not None)
        await process.stop(0.2 if is_stubborn else 5)
        await process.watch()
        worker = printed_pid(process)
        assert worker is not None and not is_alive(worker)
        ending = signal.SIGKILL if is_stubborn else signal.SIGTERM
        assert process.returncode == -ending

    asyncio.run(scenario())


def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = LEAVES_A_CHILD.format(then="time.sleep(600)")
    parent = subprocess.Popen([sys.executable, "-c", GUARDED_PARENT, str(log), server])

    async def scenario() -> None:
        await until(lambda: log.exists() and log.read_text().endswith("\n"))
        parent.kill()
        parent.wait()
        await until(lambda: not is_alive(int(log.read_text())))

    try:
        asyncio.run(scenario())
    finally:
        parent.kill()


def test_a_process_that_ended_can_be_started_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        process = python(SLEEP, tmp_path)
        await process.start()
        first = process.pid
        os.kill(first, signal.SIGKILL)
        with pytest.raises(EngineError, match="SIGKILL"):
            await process.watch()
        await process.start()
        assert process.pid != first and process.returncode is None
        await process.stop(5)
        await process.watch()  # stopped, not dead

    asyncio.run(scenario())
