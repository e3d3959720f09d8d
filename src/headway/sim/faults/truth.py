"""Whether a life ended as it may, said so truthfully, and left what it should."""

from collections.abc import Iterable, Mapping

from headway.config import Config
from headway.core.ledger import SampleState
from headway.errors import RunDirError
from headway.sim.faults.invariants import Invariants
from headway.sim.faults.life import LifeReport
from headway.sim.faults.schedule import Fault, FaultKind
from headway.store.audit import audit
from headway.store.database import RunDatabase
from headway.store.run_dir import RunDir
from headway.trainer.checkpoints import latest_checkpoint

_ENGINES = frozenset(
    {
        FaultKind.ENGINE_CRASH,
        FaultKind.ENGINE_HANG,
        FaultKind.SLOW_START,
        FaultKind.WRONG_ANSWERS,
        FaultKind.UPDATE_FAILS,
        FaultKind.UPDATE_REFUSED,
        FaultKind.UPDATE_HANGS,
        FaultKind.LATE_ANSWERS,
    }
)
MAY_END: Mapping[FaultKind, frozenset[str]] = {
    # With no engine live, what comes first: requests that were retried in vain, or the watchdog.
    **dict.fromkeys(_ENGINES, frozenset({"engine_failed", "stalled"})),
    FaultKind.ENV_ERROR: frozenset({"environment_failed"}),
    FaultKind.ENV_HANG: frozenset({"environment_failed"}),
    FaultKind.TRAINER_CRASH: frozenset({"trainer_failed"}),
    FaultKind.TRAINER_HANG: frozenset({"trainer_failed", "stalled"}),
    FaultKind.BAD_WEIGHTS: frozenset({"trainer_failed"}),
    FaultKind.FULL_DISK: frozenset({"store_failed", "trainer_failed"}),
    FaultKind.CLOCK_JUMP: frozenset({"engine_failed", "trainer_failed", "stalled"}),
    FaultKind.STOP: frozenset({"interrupted", "trainer_failed"}),
}
"""Exit reasons of a run that a fault may end; a run with none of these completes."""

ERRORS = frozenset({"trainer_failed", "engine_failed", "store_failed", "stalled"})


def reasons_allowed(
    fired: Iterable[Fault], config: Config, *, has_started: bool = True
) -> frozenset[str]:
    """Exit reasons that are true of a life with these faults, beside `completed`.

    `has_started`: the loop began; before that, every engine must be there.
    """
    faults = list(fired)
    allowed: set[str] = set()
    hit = {one.which % config.engine.count for one in faults if one.kind in _ENGINES}
    for fault in faults:
        if fault.kind in _ENGINES and has_started and len(hit) < config.engine.count:
            continue  # there is an engine that nothing happened to
        allowed |= MAY_END.get(fault.kind, frozenset())
    return frozenset(allowed)


def check_end(report: LifeReport, config: Config, run_dir: RunDir, invariants: Invariants) -> None:
    """Whatever must hold of a life that has ended, by itself or not."""
    require = invariants.require
    require(not report.endless, "every life ends", lambda: report.endless)
    if report.refusal is not None:
        _check_refusal(report, config, invariants)
        return
    if report.outcome is None:
        return
    outcome, reason = report.outcome, report.outcome.exit_reason
    has_started = report.orchestrator is not None
    allowed = reasons_allowed(report.fired, config, has_started=has_started)
    require(
        reason == "completed" or reason in allowed,
        "a run ends early only for what was broken",
        lambda: f"{reason}: {outcome.message} {outcome.error!r}; allowed are {sorted(allowed)}",
    )
    crashed = any(fault.kind is FaultKind.TRAINER_CRASH for fault in report.fired)
    require(
        not crashed or reason in ERRORS,
        "a run whose trainer died does not say that all is well",
        lambda: reason,
    )
    require(
        report.is_abandoned or not report.left_over,
        "no task is left without an owner",
        lambda: "; ".join(report.left_over),
    )
    late = any(fault.kind is FaultKind.LATE_ANSWERS for fault in report.fired)
    require(not report.is_abandoned or late, "whatever is cancelled ends", lambda: "abandoned")
    require(
        (reason == "completed") == (outcome.exit_code == 0),
        "the exit code says whether the run completed",
        lambda: f"{reason} with exit code {outcome.exit_code}",
    )
    touched = {fault.kind for fault in report.fired} & {*_ENGINES, FaultKind.CLOCK_JUMP}
    ejected = [text for _, text in report.events if "ejected" in text]
    is_well = reason == "completed" and not touched  # a stop cuts loads off
    require(not (is_well and ejected), "healthy engines stay", lambda: f"{ejected}")
    is_full = any(fault.kind is FaultKind.FULL_DISK for fault in report.fired)
    if not report.is_abandoned and (reason == "completed" or not is_full):
        _check_ledger(report, config, run_dir, invariants)
    if reason in ("completed", "interrupted") and not invariants.violation:
        _check_saved(report, config, run_dir, invariants)


def _check_refusal(report: LifeReport, config: Config, invariants: Invariants) -> None:
    kinds = {fault.kind for fault in report.fired}
    is_over = isinstance(report.refusal, RunDirError) and "nothing is left" in str(report.refusal)
    invariants.require(
        FaultKind.FULL_DISK in kinds
        or (is_over and max(invariants.sound_checkpoints) >= config.run.steps),
        "what is on disk can be resumed",
        lambda: f"{report.refusal!r}",
    )


def _check_ledger(
    report: LifeReport, config: Config, run_dir: RunDir, invariants: Invariants
) -> None:
    """The ledger on disk is the one in memory."""
    if report.orchestrator is None:
        return
    counts = dict(report.orchestrator.ledger.counts)
    gate = report.orchestrator.ship_gate
    # A batch that was put together and never written is in nobody's hands: it is not on record.
    num_unwritten = (gate.num_taken - gate.num_shipped) * config.rollout.consumer_batch_size
    counts[SampleState.BATCHED] -= num_unwritten
    counts[SampleState.ACCEPTED] += num_unwritten
    mine = {str(state): count for state, count in counts.items() if count}
    database = RunDatabase(run_dir.ledger)
    try:
        rows = database.rows("SELECT state, count(*) FROM lives GROUP BY state")
        for difference in invariants.shadow.differences(database):
            invariants.broken("the ledger on disk is what was recorded", difference)
    finally:
        database.close()
    running = SampleState.INTERRUPTED.value
    found = {running if state == "running" else state: count for state, count in rows}
    invariants.require(
        found == mine,
        "the ledger on disk is the one in memory",
        lambda: f"on disk {found}, in memory {mine}",
    )


def _check_saved(
    report: LifeReport, config: Config, run_dir: RunDir, invariants: Invariants
) -> None:
    """What a run that ended well leaves: all steps, each once, and a checkpoint of the last."""
    orchestrator, require = report.orchestrator, invariants.require
    assert orchestrator is not None and report.outcome is not None
    version, steps = orchestrator.policy.version, config.run.steps
    num_batches = len(invariants.shadow.batches)
    if report.outcome.exit_reason == "completed":
        require(
            version == num_batches == steps,
            "a completed run has trained all its steps",
            lambda: f"version {version}, {num_batches} batches of {steps}",
        )
        evals = {one.version for one in orchestrator.eval_sink.results}
        require(
            not config.eval.every or steps in evals,
            "the last version is evaluated",
            lambda: f"{sorted(evals)}",
        )
    require(
        report.trainer_version == orchestrator.ship_gate.num_shipped,
        "a trainer that ends has trained whatever was handed over",
        lambda: f"{report.trainer_version} of {orchestrator.ship_gate.num_shipped}",
    )
    saved = latest_checkpoint(run_dir.path)
    newest = saved[0] if saved else 0
    require(
        newest == report.trainer_version == max(invariants.sound_checkpoints),
        "the trainer saves what it has trained when it ends",
        lambda: (
            f"saved {newest}, trained {report.trainer_version}, "
            f"sound {sorted(invariants.sound_checkpoints)}"
        ),
    )
    for problem in audit(config, run_dir.path, num_batches):
        invariants.broken("what is on disk is in order", problem)
