"""Python's own settings for a process with very many live objects and threads that write."""

import gc
import sys

SWITCH_SECONDS = 0.0005
"""How long a thread may go on with Python code when another one wants to."""


def tame_collector() -> None:
    """Collect rarely, and never look again at what start-up made.

    With 20,000 rollouts in flight the default thresholds spend as much time walking live objects
    as the whole control loop takes (70 us more per rollout). The loop's objects are freed by their
    reference counts; the collector remains for the cycles that exceptions make.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def share_interpreter() -> None:
    """Let the event loop have the interpreter soon when it wakes up and a writing thread has it:
    Python's default lets that thread go on for 5 ms each time."""
    sys.setswitchinterval(SWITCH_SECONDS)
