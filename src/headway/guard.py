"""`python -m headway.guard COMMAND...`: runs a command and leaves nothing of it behind.

Inference servers start workers of their own, and some of these outlive a server that is killed. The
guard ends them all when the command ends, and also when its own parent is gone, however that died:
its standard input is a pipe whose other end the parent holds, so the end of that file is the end of
the parent. It exits as the command did.

It must lead a process group of its own. SIGTERM to the group is left to the command.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_PIPE_BYTES = 4096
_POLL_SECONDS = 0.01
EXIT_CANNOT_START = 127


def main(command: Sequence[str]) -> int:
    """Run it to its end, or to the end of the parent. Returns the exit code; dies of the signal
    that killed the command."""
    if _LIBC is not None:  # orphans of the command become children of the guard, and can be found
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the command would inherit
    ended, child_exit = os.pipe()
    os.set_blocking(child_exit, False)
    signal.set_wakeup_fd(child_exit)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, preexec_fn=die_with(os.getpid())
        )
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    code = None
    while code is None:
        # No deadline: a server lives as long as the run, and both its end and the run's wake this.
        readable, _, _ = select.select([0, ended], [], [])
        if 0 in readable and not os.read(0, _PIPE_BYTES):
            kill_descendants(os.getpid())
            os.killpg(0, signal.SIGKILL)  # nobody is left to tell
        if ended in readable:
            os.read(ended, _PIPE_BYTES)
        code = child.poll()
    kill_descendants(os.getpid())
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def die_with(parent_pid: int) -> Callable[[], None] | None:
    """What a child runs between fork and exec so that it dies with its parent (Linux only)."""
    libc = _LIBC
    if libc is None:
        return None

    def ask_the_kernel() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # the parent died before the kernel was asked
            os._exit(1)

    return ask_the_kernel


def kill_descendants(pid: int) -> None:
    """SIGKILL to everything below a process, until nothing is left (Linux only)."""
    while found := _descendants(pid):  # no deadline: the kernel does not refuse SIGKILL
        for one in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _descendants(pid: int) -> list[int]:
    """Process ids of all living descendants, from `/proc`."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it ended meanwhile
        if state != "Z":
            children.setdefault(int(parent), []).append(int(path.parent.name))
    found, pending = [], [pid]
    while pending:
        pending += (below := children.get(pending.pop(), []))
        found += below
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
