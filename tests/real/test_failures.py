"""Servers that are killed, frozen, started again and thawed in the middle of a run."""

import os
import signal
from collections.abc import Callable

from runs import TOLERANCE, Run, check_conserved, check_log_probabilities
from servers import KIND, engine_settings


def test_a_run_goes_on_while_servers_die_freeze_and_return(start: Callable[..., Run]) -> None:
    engine = engine_settings() | {"health_seconds": 1.0, "health_deadline_seconds": 5.0}
    # Hardly any learning: a policy that answers all would leave little to train on.
    run = start(engine, run={"steps": 2000}, actor={"optimizer": {"lr": 1e-6, "warmup_steps": 0}})
    run.until(lambda: run.is_past(2))

    os.kill(run.server(0), signal.SIGKILL)
    run.until(lambda: run.has_event("engine-0 ejected"))
    died_at = len(run.rows("step"))
    run.until(lambda: run.is_past(died_at + 2))  # on the other one alone
    run.until(lambda: run.has_event("engine-0", "back after"))

    frozen = run.group(1)
    os.killpg(frozen, signal.SIGSTOP)
    run.until(lambda: run.has_event("engine-1 ejected"))
    frozen_at = len(run.rows("step"))
    run.until(lambda: run.is_past(frozen_at + 2))
    os.killpg(frozen, signal.SIGCONT)
    run.until(lambda: run.has_event("engine-1", "back after"))
    run.until(lambda: all(one > 0 for one in run.running()))  # both are used again
    returned_at = len(run.rows("step"))
    run.until(lambda: run.is_past(returned_at + 2))

    run.process.send_signal(signal.SIGINT)
    summary = run.end(exit_code=130)
    num_steps = len(run.rows("step"))
    for row in run.rows("event"):
        print(f"{row['time']:7.1f} {row['level']} {row['text'][:160]}")
    num_tokens, _, worst = check_log_probabilities(run, num_steps)
    print(f"{KIND}: {num_steps} steps, {num_tokens} tokens, largest difference {worst:.1e} nats")
    assert worst < TOLERANCE
    assert summary["age"]["max"] <= 2 + 1
    check_conserved(run, summary, num_steps)
