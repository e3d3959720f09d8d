"""All staleness policies on the reference workload, in virtual time, through the real loop.

Batches of 32 samples, 10 s to train one, rollouts whose length is lognormal with a median of 20 s
and sigma 1, weights updated in flight, concurrency never the limit. Prints one table, and checks
what the recommended setting has to keep at `S` = 8; exits with 1 when it does not.

    python -m benchmarks.policies [--json] [--steps 300] [--seeds 3]
"""

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.collector import tame_collector
from headway.config import Config
from headway.core.bias import Fate
from headway.core.ledger import SampleState
from headway.loop.train_sink import TOO_OLD
from headway.sim.clock import run_virtual
from headway.sim.run import build_simulation

BATCH = 32
AGES = (4, 8)

POLICIES: Mapping[str, Mapping[str, Any]] = {
    "admission only": {"preset": "admission"},
    "admission only, completion": {"preset": "admission", "order": "completion"},
    "admission only, just in time": {"preset": "admission", "pacing": "just_in_time"},
    "window of one batch": {"preset": "admission", "order": "window", "window": BATCH},
    "drop": {"preset": "admission", "order": "completion", "over_bound": "drop"},
    "ship gate, drop": {"preset": "ship_drop"},
    "wait for the oldest": {"preset": "wait_oldest"},
    "wait 2 s, then trim": {"preset": "wait_oldest", "wait_seconds": 2.0, "after_wait": "trim"},
    "trim, fill": {"preset": "recommended", "pacing": "fill"},
    "recommended": {"preset": "recommended"},
}
"""By name: fields of section `rollout`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run. Ages in versions, shares between 0 and 1."""

    policy: str
    max_age: int
    """`S`."""
    seed: int
    guaranteed: int | None
    step_seconds: float
    trainer_idle: float
    head_mean: float
    head_p99: int
    head_max: int
    token_max: int
    token_mean: float
    num_dropped: int
    dropped_share: float
    """Of all samples whose fate is decided, those discarded for their age."""
    trimmed_share: float
    """Of all tokens in batches, those that were trimmed."""
    held_seconds: float
    """Per step."""
    longest_trained: float
    token_ages: Mapping[int, int]
    """How many tokens were trained at each age."""


def reference_config(policy: Mapping[str, Any], *, max_age: int, steps: int, seed: int) -> Config:
    """The reference workload under a policy."""
    # The formula lets (S + 1) * B samples in; a ship gate alone gets as many places.
    places = (max_age + 1) * BATCH
    return Config.model_validate(
        {
            "run": {
                "steps": steps,
                "seed": seed,
                "stall_seconds": 1e6,
                "metrics_interval_seconds": 1e3,
            },
            "rollout": {
                "max_head_offpolicyness": max_age,
                "consumer_batch_size": BATCH,
                "group_size": 1,
                "filters": [],
                "max_concurrent_rollouts": places,
                "queue_size": 4096,
                "deadline_seconds": 1e5,
                **policy,
            },
            "actor": {"advantage": "mean"},
            "eval": {"every": 0},
            "simulate": {
                "rollout_seconds": {"kind": "lognormal", "median": 20.0, "sigma": 1.0},
                "tokens_per_second": 10,
                "train_seconds": 10.0,
                "weight_sync_seconds": 0.2,
            },
        }
    )


def measure(name: str, *, max_age: int, steps: int, seed: int) -> Measured:
    """Run a policy. Raises RuntimeError when the run does not reach its step target."""
    config = reference_config(POLICIES[name], max_age=max_age, steps=steps, seed=seed)

    async def main() -> Measured:
        run = build_simulation(config)
        outcome = await run.run()
        if outcome.exit_code:
            raise RuntimeError(f"{name}, S = {max_age}, seed {seed}: {outcome.message}")
        log, ledger, bias = run.log, run.ledger, run.train_sink.bias.summary()
        heads, tokens = log.ages.heads, log.ages.tokens
        num_dropped = ledger.reasons[SampleState.DROPPED][TOO_OLD]
        num_trained = ledger.counts[SampleState.TRAINED]
        in_batches = log.num_tokens_trained + log.num_tokens_trimmed
        assert bias["rollouts"][Fate.DROPPED.name.lower()] == num_dropped
        return Measured(
            policy=name,
            max_age=max_age,
            seed=seed,
            guaranteed=run.bound.guaranteed_age,
            step_seconds=float(np.mean(log.step_seconds)),
            trainer_idle=log.trainer_idle_share or 0.0,
            head_mean=heads.mean or 0.0,
            head_p99=heads.quantile(0.99) or 0,
            head_max=heads.max or 0,
            token_max=tokens.max or 0,
            token_mean=tokens.mean or 0.0,
            num_dropped=num_dropped,
            dropped_share=num_dropped / (num_dropped + num_trained),
            trimmed_share=log.num_tokens_trimmed / in_batches,
            held_seconds=log.held_seconds / steps,
            longest_trained=bias["longest_5pct_trained_share"],
            token_ages=dict(Counter(tokens.counts)),
        )

    return run_virtual(main())


def measure_all(
    names: Iterable[str], *, ages: Sequence[int], steps: int, seeds: Sequence[int]
) -> list[Measured]:
    """Every policy at every `S` with every seed; progress goes to standard error."""
    tame_collector()
    rows = []
    for max_age in ages:
        for name in names:
            for seed in seeds:
                _progress(f"{name}, S = {max_age}, seed {seed}")
                rows.append(measure(name, max_age=max_age, steps=steps, seed=seed))
    _progress("")
    return rows


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def mean(rows: Iterable[Measured], name: str) -> float:
    """Of one number over these runs."""
    return float(np.mean([getattr(row, name) for row in rows]))


def of(rows: Iterable[Measured], policy: str, max_age: int) -> list[Measured]:
    """The runs of one policy at one `S`, by seed."""
    return [row for row in rows if row.policy == policy and row.max_age == max_age]


def requirements(rows: Sequence[Measured], max_age: int) -> list[tuple[bool, str]]:
    """Whether the recommended setting keeps what it has to keep, and the number in words."""
    ours = of(rows, "recommended", max_age)
    oldest = max(row.token_max for row in ours)
    dropped = sum(row.num_dropped for row in ours)
    longest = min(row.longest_trained for row in ours)
    admission = mean(of(rows, "admission only", max_age), "step_seconds")
    slower = mean(ours, "step_seconds") / admission - 1
    younger = mean(ours, "head_mean") / mean(of(rows, "trim, fill", max_age), "head_mean")
    return [
        (oldest <= max_age, f"oldest contributing token over all seeds: {oldest} <= {max_age}"),
        (dropped == 0, f"samples discarded: {dropped}"),
        (longest >= 0.95, f"longest 5 % that is trained, worst seed: {longest:.3f} >= 0.95"),
        (slower <= 0.015, f"step time against admission only: {slower:+.2%} <= +1.50%"),
        (younger <= 0.6, f"mean head age against pacing: fill: {younger:.3f} <= 0.6"),
    ]


def print_table(rows: Sequence[Measured], ages: Sequence[int]) -> None:
    """Means over the seeds; maxima are over all of them."""
    print(
        f"{'':30}{'step':>7}{'trainer':>9}{'head age':>19}{'':>7}{'samples':>9}{'tokens':>9}"
        f"{'held':>8}{'longest 5%':>12}\n"
        f"{'policy':30}{'s':>7}{'idle':>9}{'mean':>7}{'p99':>6}{'max':>6}{'claim':>7}"
        f"{'dropped':>9}{'trimmed':>9}{'s/step':>8}{'trained':>12}"
    )
    for max_age in ages:
        print(f"S = {max_age}")
        for name in dict.fromkeys(row.policy for row in rows):
            some = of(rows, name, max_age)
            claim = some[0].guaranteed
            print(
                f"  {name:28}{mean(some, 'step_seconds'):>7.2f}{mean(some, 'trainer_idle'):>9.1%}"
                f"{mean(some, 'head_mean'):>7.2f}{mean(some, 'head_p99'):>6.0f}"
                f"{max(row.head_max for row in some):>6}{'none' if claim is None else claim:>7}"
                f"{mean(some, 'dropped_share'):>9.1%}{mean(some, 'trimmed_share'):>9.1%}"
                f"{mean(some, 'held_seconds'):>8.2f}{mean(some, 'longest_trained'):>12.3f}"
            )


def main() -> None:
    """Measure, print, check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="rows and checks as JSON")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    args = parser.parse_args()
    rows = measure_all(POLICIES, ages=AGES, steps=args.steps, seeds=range(args.seeds))
    checks = requirements(rows, 8)
    if args.json:
        result = {
            "rows": [dataclasses.asdict(row) for row in rows],
            "checks": [{"passed": passed, "what": what} for passed, what in checks],
        }
        print(json.dumps(result))
    else:
        print(
            f"B = {BATCH}, train 10 s, rollouts lognormal (median 20 s, sigma 1), weights updated "
            f"in flight;\n{args.steps} steps, {args.seeds} seeds, virtual time\n"
        )
        print_table(rows, AGES)
        print("\nrecommended, S = 8:")
        for passed, what in checks:
            print(f"  {'PASS' if passed else 'FAIL'}  {what}")
    sys.exit(0 if all(passed for passed, _ in checks) else 1)


if __name__ == "__main__":
    main()
