"""The bias report: how what was trained differs from what was dispatched.

Every policy that discards, trims or delays chooses among rollouts, and what takes long to generate
is what it chooses against. Length is in sampled tokens of a rollout, before trimming.
"""

from array import array
from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from headway.core.rollout import Group


class Fate(IntEnum):
    """What became of a finished rollout."""

    TRAINED = 0
    """It is in a batch, with at least one token in the loss mask."""
    EMPTIED = 1
    """It is in a batch, and all of its tokens were trimmed."""
    DROPPED = 2
    """Its sample was too old for every batch to come."""
    REJECTED = 3
    """A filter named its sample."""


@dataclass(slots=True)
class Bias:
    """Length, turns, environment and fate of every rollout whose fate is decided."""

    _tokens: "array[int]" = field(default_factory=lambda: array("L"))
    _turns: "array[int]" = field(default_factory=lambda: array("L"))
    _fates: "array[int]" = field(default_factory=lambda: array("B"))
    _envs: Counter[tuple[str, bool]] = field(default_factory=Counter)

    def add(self, group: Group, fate: Fate) -> None:
        """Count the rollouts of a group; a trained one with an empty loss mask is `EMPTIED`."""
        for rollout in group.rollouts:
            num_tokens = rollout.num_trainable + rollout.num_trimmed
            of_this = fate
            if fate is Fate.TRAINED and not rollout.num_trainable and num_tokens:
                of_this = Fate.EMPTIED
            self._tokens.append(num_tokens)
            self._turns.append(rollout.num_turns)
            self._fates.append(of_this)
            self._envs[rollout.env, of_this is Fate.TRAINED] += 1

    @property
    def longest_trained_share(self) -> float | None:
        """Of the longest 5 % of the rollouts that passed the filters, the share trained."""
        fates = np.asarray(self._fates)
        passed = fates != Fate.REJECTED
        if not passed.any():
            return None
        tokens, trained = np.asarray(self._tokens)[passed], fates[passed] == Fate.TRAINED
        num_longest = max(round(0.05 * len(tokens)), 1)
        # Ties at the border are all in: which of them were drawn would be arbitrary.
        border = np.partition(tokens, len(tokens) - num_longest)[len(tokens) - num_longest]
        return float(trained[tokens >= border].mean())

    def summary(self) -> dict[str, Any]:
        """As `summary.json` has it; `docs/metrics.md` names the keys."""
        fates = np.asarray(self._fates)
        trained = fates == Fate.TRAINED
        envs = sorted({env for env, _ in self._envs})
        total, num_trained = len(fates), int(trained.sum())
        return {
            "rollouts": {fate.name.lower(): int((fates == fate).sum()) for fate in Fate},
            "tokens_mean": _means(self._tokens, trained),
            "turns_mean": _means(self._turns, trained),
            "env_share": {
                "dispatched": {
                    env: (self._envs[env, True] + self._envs[env, False]) / total for env in envs
                },
                "trained": {env: self._envs[env, True] / max(num_trained, 1) for env in envs},
            },
            "longest_5pct_trained_share": self.longest_trained_share,
        }


def _means(values: "array[int]", trained: Any) -> dict[str, float | None]:
    of_all = np.asarray(values)
    return {
        "dispatched": float(of_all.mean()) if len(of_all) else None,
        "trained": float(of_all[trained].mean()) if trained.any() else None,
    }
