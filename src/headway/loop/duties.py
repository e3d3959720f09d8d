"""Who owes what in a run, and within which limit: the watchdog of a run."""

import asyncio
from collections.abc import Callable
from functools import partial

from headway.config import Config, LivenessConfig, OnStall
from headway.core.ledger import Ledger
from headway.errors import EngineError
from headway.loop.dispatcher import Dispatcher
from headway.loop.engine_meter import EngineMeter
from headway.loop.eval_sink import EvalSink
from headway.loop.policy import PolicyHandle
from headway.loop.rollout_runner import RolloutRunner
from headway.loop.ship_gate import ShipGate
from headway.loop.signal import WaitBoard
from headway.loop.watchdog import Duty, Watchdog
from headway.ports import Journal

MAX_OLDEST = 5
"""Rollouts that a stall names."""
ANSWER_SECONDS = 5.0
"""How long engines may take to say what they do, when a stall is told."""


def watchdog_of(
    config: Config,
    *,
    ledger: Ledger,
    waits: WaitBoard,
    dispatcher: Dispatcher,
    engine: EngineMeter,
    eval_sink: EvalSink,
    journal: Journal,
    policy: PolicyHandle,
    runner: RolloutRunner,
    ship_gate: ShipGate,
    on_event: Callable[[str, str], None],
) -> Watchdog:
    """The watchdog over these parts, as section `liveness` has it."""
    return Watchdog(
        ledger=ledger,
        waits=waits,
        duties=_duties(
            config.liveness,
            dispatcher=dispatcher,
            eval_sink=eval_sink,
            journal=journal,
            policy=policy,
            runner=runner,
            ship_gate=ship_gate,
        ),
        stall_seconds=config.run.stall_seconds,
        stops=config.liveness.on_stall is OnStall.STOP,
        describe=partial(_describe, runner, engine),
        on_event=on_event,
    )


def _duties(
    liveness: LivenessConfig,
    *,
    dispatcher: Dispatcher,
    eval_sink: EvalSink,
    journal: Journal,
    policy: PolicyHandle,
    runner: RolloutRunner,
    ship_gate: ShipGate,
) -> list[Duty]:
    def served() -> str | None:
        is_late = policy.announced > policy.version
        return f"version {policy.announced} to be served" if is_late else None

    def ended() -> str | None:
        return f"the end of {runner.num_running} rollouts" if runner.num_running else None

    return [
        Duty(
            part="the trainer",
            limit="liveness.trainer_seconds",
            seconds=liveness.trainer_seconds,
            owes=ship_gate.trainer_owes,
        ),
        *(
            Duty(
                part="the disk",
                limit="liveness.disk_seconds",
                seconds=liveness.disk_seconds,
                owes=owes,
            )
            for owes in (ship_gate.disk_owes, journal.owes)
        ),
        Duty(
            part="the task source",
            limit="liveness.tasks_seconds",
            seconds=liveness.tasks_seconds,
            owes=dispatcher.tasks_owe,
        ),
        Duty(
            part="an environment",
            limit="liveness.rollout_seconds",
            seconds=liveness.rollout_seconds,
            owes=runner.overdue,
        ),
        Duty(
            part="the evaluation",
            limit="liveness.eval_seconds",
            seconds=liveness.eval_seconds,
            owes=eval_sink.owes,
        ),
        # These have deadlines of their own, whose errors name the engine or the environment.
        Duty(part="the engines", limit="engine.update_seconds", seconds=None, owes=served),
        Duty(part="rollouts", limit="rollout.deadline_seconds", seconds=None, owes=ended),
    ]


async def _describe(runner: RolloutRunner, engine: EngineMeter) -> str:
    """The oldest rollouts, and what every engine does: for whoever looks for a stall's cause."""
    oldest = runner.oldest(MAX_OLDEST)
    parts = [f"oldest rollouts: {', '.join(oldest)}"] if oldest else []
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            engines = await engine.statistics()
    except (TimeoutError, EngineError) as error:
        parts.append(f"{engine.name} does not say what it does ({error!r})")
    else:
        parts += [
            f"{name}: {one.num_running} requests run, {one.num_waiting} wait"
            + ("" if one.is_live else ", and it takes no more")
            for name, one in engines.items()
        ]
    return ". ".join(parts)
