"""Child processes: real ones, killed, failing, stubborn and orphaned."""

import asyncio
import os
import signal
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
