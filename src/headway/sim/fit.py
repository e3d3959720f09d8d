"""A workload from a recorded run, real or simulated: what `headway plan` tries settings on.

Everything is read off the trace: lengths of all finished rollouts (rejected ones, too), turns, tool
time, how often a group is rejected, how long an update takes, and the engine's speed under load
(`sim/speed.py`). docs/plan.md says what such a workload leaves out.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.config import Config, UpdateMode
from headway.config.file import load_config
from headway.core.filters import FilterName
from headway.errors import RunDirError
from headway.sim.replay import read_trace
from headway.sim.speed import Requests, fit_speed
from headway.store.run_dir import RunDir

MIN_STEPS = 5
"""Fewer trained batches say nothing about the steady state."""

MAX_VALUES = 256
"""Measured values that an empirical distribution lists; more are condensed to quantiles."""

WARM_UP_FACTOR = 2.0
"""A first update that took this many medians of the others is left out: it compiled, allocated or
loaded something."""

UNEVEN = 0.1
"""A speed curve that is off by more than this share is said to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A workload, and how far it can be trusted."""

    config: Config
    """The run's configuration with the fitted section `simulate`."""
    num_steps: int
    """Trained batches that it was fitted on."""
    step_seconds: float
    """Mean of the run between its first version and its last."""
    head_age_mean: float
    """Mean age of the oldest trained token of a rollout, in the run."""
    loads: tuple[float, float]
    """Requests that one engine ran at once, from about the fewest to the most: outside, its speed
    is a guess (constant above)."""
    speed_error: float
    """What the speed curve is off, as a share (root mean square over stretches of the run)."""
    notes: tuple[str, ...]
    """What was left out or assumed, in words."""


def fit_run(run_dir: Path) -> Fit:
    """Read a run directory, of a finished run or not, and fit a workload to it.

    Raises:
        RunDirError: there is no run, or its trace holds fewer than `MIN_STEPS` trained batches.
        ConfigError: its configuration cannot be read.
    """
    where = RunDir(run_dir)
    for file in (where.config, where.trace):
        if not file.exists():
            raise RunDirError(
                f"{run_dir} holds no run to plan on: there is no {file.name} in it; give the "
                "folder that `run.dir` of a run names, or a YAML file that states a workload"
            )
    rows = read_trace(run_dir)
    config = load_config(where.config)
    record = _Record.of(rows)
    if config.engine.update_mode is UpdateMode.FINISH:
        record.leave_drains_out()
    num_steps = max(record.served, default=0) - min(record.served, default=1) + 1
    if num_steps < MIN_STEPS or not record.rollouts:
        raise RunDirError(
            f"{run_dir} holds {num_steps} trained batches in its trace, and a plan needs at least "
            f"{MIN_STEPS}; let the run get further, or state the workload in a YAML file (section "
            "simulate) and plan on that"
        )
    notes: list[str] = []
    # Engines that drain make requests wait whatever their slots.
    slots = None if record.held else _slots(run_dir)
    speed = fit_speed(record.requests(), num_engines=config.engine.count, slots=slots)
    if speed.error > UNEVEN:
        notes.append(
            f"the engines' speed changed during the run by more than the load explains "
            f"({100 * speed.error:.0f} %): a busy machine, or cost that grows with training"
        )
    rewards, filters = _rewards(record, config)
    simulate = {
        "rollout_tokens": empirical(one.num_tokens for one in record.rollouts),
        "engine": {
            # Without a queue at the engines nobody knows where one begins: far above what was seen.
            "slots": slots or max(int(8 * speed.max_load), 1),
            "throughput": speed.points,
        },
        "length_correlation": _length_correlation(record.groups.values()),
        "turns": empirical(one.turns for one in record.rollouts),
        "tool_seconds": empirical(_tool_seconds(record.rollouts)),
        "prompt_tokens": max(round(float(np.mean([one.prompt for one in record.rollouts]))), 1),
        "train_seconds": empirical(record.train_seconds(config, notes)),
        "weight_sync_seconds": float(np.mean(record.sync_seconds)),
        **rewards,
    }
    if record.num_failed:
        notes.append(f"samples that failed in the run ({record.num_failed}) are left out")
    content = config.model_dump(mode="json")
    content["simulate"] = simulate
    content["rollout"]["filters"] = filters
    return Fit(
        config=Config.model_validate(content),
        num_steps=num_steps,
        step_seconds=(max(record.served.values()) - min(record.served.values())) / (num_steps - 1),
        head_age_mean=record.head_age_mean(config),
        loads=(speed.min_load, speed.max_load),
        speed_error=speed.error,
        notes=tuple(notes),
    )


def empirical(values: Iterable[float]) -> dict[str, Any]:
    """A distribution, as the configuration has it, of measured values: all of them when they are
    few, else quantiles that are dense towards the tail."""
    found = np.sort(np.fromiter(values, float))
    if not len(found) or found[0] == found[-1]:
        return {"kind": "constant", "value": float(found[0]) if len(found) else 0.0}
    if len(found) <= MAX_VALUES:
        return {"kind": "empirical", "values": found.tolist()}
    tail = 1 - np.geomspace(0.02, 0.5 / len(found), 24)
    at = np.unique(np.concatenate([np.linspace(0, 0.98, 99), tail, [1.0]]))
    points = zip(at.tolist(), np.quantile(found, at).tolist(), strict=True)
    return {"kind": "empirical", "quantiles": [list(point) for point in points]}


@dataclass(frozen=True, slots=True)
class _Played:
    """One finished rollout of the trace; seconds and instants on the run's clock."""

    env: str
    started_at: float
    seconds: float
    environment: float
    num_tokens: int
    prompt: int
    turns: int
    reward: float


@dataclass(slots=True)
class _Record:
    """What the trace says, sorted by what is fitted to it."""

    rollouts: list[_Played] = field(default_factory=list)
    groups: dict[int, list[_Played]] = field(default_factory=dict)
    heads: dict[int, list[list[int]]] = field(default_factory=dict)
    """Versions of the runs of every rollout, by sample."""
    rejected: set[int] = field(default_factory=set)
    num_judged: int = 0
    num_failed: int = 0
    taken: dict[int, tuple[float, list[int]]] = field(default_factory=dict)
    announced: dict[int, tuple[float, Mapping[str, float]]] = field(default_factory=dict)
    served: dict[int, float] = field(default_factory=dict)
    """By version; one that a newer one overtook is missing."""
    frozen: list[tuple[float, float]] = field(default_factory=list)
    held: list[tuple[float, float]] = field(default_factory=list)
    """Spans in which new requests waited at engines that drained."""

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> "_Record":
        record = cls()
        admitted: dict[int, tuple[float, str]] = {}
        for row in rows:
            match row["e"]:
                case "admitted":
                    admitted[row["id"]] = row["t"], row["env"]
                case "ended" if "failed" in row:
                    record.num_failed += 1
                case "ended":
                    record._ended(row, *admitted[row["id"]])
                case "judged":
                    record.num_judged += 1
                    if row["rejected"] is not None:
                        record.rejected.add(row["id"])
                case "batch":
                    record.taken[row["step"]] = row["t"], row["ids"]
                case "announced":
                    record.announced[row["version"]] = row["t"], row.get("stats", {})
                case "served":
                    record.served[row["version"]] = row["t"]
                    record.frozen.append((record.announced[row["version"]][0], row["t"]))
        return record

    def _ended(self, row: Mapping[str, Any], admitted_at: float, env: str) -> None:
        group = [
            _Played(
                env=env,
                started_at=admitted_at,
                seconds=one["seconds"],
                environment=one["environment"],
                num_tokens=sum(count for _, count in one["runs"]),
                prompt=one["prompt"],
                turns=one["turns"],
                reward=one["reward"],
            )
            for one in row["rollouts"]
        ]
        self.rollouts += group
        self.groups[row["id"]] = group
        self.heads[row["id"]] = [[version for version, _ in one["runs"]] for one in row["rollouts"]]

    def leave_drains_out(self) -> None:
        """Begin every update where the last rollout before it ended: with `finish` the engines go
        on sampling from the announcement until then, and a simulation drains by itself."""
        ends = np.sort([one.started_at + one.seconds for one in self.rollouts])
        for index, (announced_at, served_at) in enumerate(self.frozen):
            before = int(np.searchsorted(ends, served_at + 1e-6))  # an end can free the update
            drained_at = float(ends[before - 1]) if before else announced_at
            self.frozen[index] = max(announced_at, drained_at), served_at
            self.held.append((announced_at, served_at))

    @property
    def sync_seconds(self) -> list[float]:
        """From announced to served, of every version; without the drain before it."""
        return [end - start for start, end in self.frozen]

    def requests(self) -> Requests:
        """One entry per rollout. Tool time is put at its end: the trace has only its sum."""
        start = np.array([one.started_at for one in self.rollouts])
        seconds = np.array([one.seconds - one.environment for one in self.rollouts])
        end = start + np.maximum(seconds, 1e-9)
        for held_from, held_to in self.held:
            start[(start >= held_from) & (start < held_to) & (end > held_to)] = held_to
        return Requests(
            started_at=start,
            ended_at=end,
            num_tokens=np.array([one.num_tokens for one in self.rollouts], float),
            frozen=self.frozen,
        )

    def train_seconds(self, config: Config, notes: list[str]) -> list[float]:
        """From a batch put together to its version announced: writing, training, publishing, and
        the time it takes each side to notice."""
        found = []
        for step, (taken_at, _) in sorted(self.taken.items()):
            if step + 1 not in self.announced:
                continue
            at, stats = self.announced[step + 1]
            before = self.announced.get(step, (taken_at, {}))[0]
            if config.rollout.max_batches_ahead and "train_seconds" in stats:
                found.append(stats["train_seconds"] + stats.get("publish_seconds", 0.0))
            else:
                found.append(at - max(taken_at, before))
        if len(found) > 1 and found[0] > WARM_UP_FACTOR * float(np.median(found[1:])):
            notes.append(f"the first update ({found[0]:.2f} s) is left out as warm-up")
            del found[0]
        return found

    def head_age_mean(self, config: Config) -> float:
        """Over the rollouts of all batches; trimmed tokens do not count."""
        ages = []
        for step, (_, ids) in self.taken.items():
            oldest = step - config.bound.max_age if config.bound.trims else 0
            for group_id in ids:
                for versions in self.heads.get(group_id, ()):
                    live = [version for version in versions if version >= oldest]
                    ages += [step - min(live)] if live else []
        return float(np.mean(ages)) if ages else 0.0


def _slots(run_dir: Path) -> int | None:
    """Requests that an engine runs at most, if the run shows it: some waited at the engine."""
    try:
        lines = RunDir(run_dir).metrics.read_bytes().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        if not line.startswith(b'{"time"') and b'"interval"' not in line:
            continue
        try:
            row = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue  # a kill cut the last line off
        if row.get("kind") != "interval":
            continue
        for one in row.get("engines", {}).values():
            if one.get("num_waiting"):
                limits.append(one["num_running"])
    return max(limits, default=None) or None


def _tool_seconds(rollouts: Sequence[_Played]) -> Iterable[float]:
    """Per gap between two turns."""
    return (one.environment / (one.turns - 1) for one in rollouts if one.turns > 1)


def _length_correlation(groups: Iterable[Sequence[_Played]]) -> float:
    """Between the lengths of two rollouts of one prompt, so that the longest of a group is as long
    as in the run.

    Of `n` normal numbers with correlation `r` the greatest is on average `sqrt(1 - r)` times what
    it is of independent ones; so the normal scores of the lengths tell `r`.
    """
    by_env: dict[str, list[list[int]]] = defaultdict(list)
    for group in groups:
        by_env[group[0].env].append([one.num_tokens for one in group])
    longest = independent = 0.0
    for lengths in map(np.array, by_env.values()):
        scores = _normal_scores(lengths)
        ranks = np.arange(scores.size + 1) / scores.size
        longest += float(scores.max(axis=1).sum())
        independent += len(scores) * float(
            np.sort(scores, axis=None) @ np.diff(ranks ** scores.shape[1])
        )
    if independent <= 0:
        return 0.0
    return 1 - min(max(longest / independent, 0.0), 1.0) ** 2


def _normal_scores(values: NDArray[Any]) -> NDArray[np.float64]:
    """The normal quantile of each value's rank among all; equal values get their middle rank."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - counts / 2) / values.size
    scores = np.array([NormalDist().inv_cdf(rank) for rank in ranks])
    return scores[index.reshape(values.shape)]


def _rewards(record: _Record, config: Config) -> tuple[dict[str, Any], list[str]]:
    """Rewards that reject as many groups as the run did; and the filters that do so.

    Whatever the reason of a rejection was, it is simulated as a group without an advantage: rewards
    of 0 and 1, with each environment's share above the middle of its range, and tasks that differ
    in difficulty as much as that takes.
    """
    labels = [one.label for one in config.envs]
    by_env: dict[str, list[_Played]] = defaultdict(list)
    for one in record.rollouts:
        by_env[one.env].append(one)
    shares = {env: _share_solved([one.reward for one in found]) for env, found in by_env.items()}
    weights = {env: len(found) / len(record.rollouts) for env, found in by_env.items()}
    rejected = len(record.rejected) / max(record.num_judged, 1)
    probability, spread = _fit_difficulty(shares, weights, rejected, config.rollout.group_size)
    overrides = {}
    for env in labels if len(labels) > 1 else ():
        if found := by_env.get(env):
            overrides[env] = {
                "rollout_tokens": empirical(one.num_tokens for one in found),
                "turns": empirical(one.turns for one in found),
                "tool_seconds": empirical(_tool_seconds(found)),
                "reward_probability": probability[env],
            }
    mean = sum(weights[env] * probability[env] for env in weights)
    stated: dict[str, Any] = {"reward_probability": mean, "difficulty_spread": spread}
    if overrides:
        stated["by_env"] = overrides
    return stated, [FilterName.ZERO_ADVANTAGE.value] if rejected else []


def _share_solved(rewards: Sequence[float]) -> float:
    low, high = min(rewards), max(rewards)
    return float(np.mean(np.array(rewards) > (low + high) / 2)) if high > low else 1.0


def _fit_difficulty(
    shares: Mapping[str, float], weights: Mapping[str, float], rejected: float, group_size: int
) -> tuple[dict[str, float], float]:
    """Reward probability by environment, and the difficulty spread, so that this share of the
    groups has all rewards alike."""

    def alike(spread: float) -> float:
        return sum(weights[env] * _alike(shares[env], spread, group_size) for env in shares)

    if group_size == 1 or not rejected:
        return dict(shares), 0.0
    if alike(0.0) >= rejected:
        # The run rejected less than coins would: no spread helps, even odds come nearest.
        return {
            env: _bisect(lambda p: -_alike(p, 0.0, group_size), -rejected, 1e-6, 0.5)
            for env in shares
        }, 0.0
    return dict(shares), _bisect(alike, rejected, 0.0, 0.99)


def _alike(probability: float, spread: float, group_size: int) -> float:
    """How often all of a group's rewards are the same, when its task's probability of reward is
    Beta-distributed with this mean and this share of the largest variance."""
    if spread <= 0:
        return probability**group_size + (1 - probability) ** group_size
    total = 1 / spread - 1
    solved, failed = probability * total, (1 - probability) * total
    every = none = 1.0
    for index in range(group_size):
        every *= (solved + index) / (total + index)
        none *= (failed + index) / (total + index)
    return every + none


def _bisect(rising: Any, wanted: float, low: float, high: float) -> float:
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return (low + high) / 2
