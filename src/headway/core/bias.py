"""The bias report: how what was trained differs from what was dispatched.

Every policy that discards, trims or delays chooses among rollouts, and what takes long to generate
is what it chooses against. Lengths are in sampled tokens of a rollout, before trimming, unless they
are said to be in the loss.
"""

from array import array
from collections.abc import Iterable
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.totals import Length
from headway.errors import InvariantError


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


class Bias:
    """Length, turns, environment and fate of every rollout whose fate is decided; 15 B each."""

    def __init__(self) -> None:
        self._tokens = array("I")
        self._in_loss = array("I")
        self._turns = array("I")
        self._fates = array("B")
        self._envs = array("H")
        self._names: dict[str, int] = {}
        self._last = 0

    def add(self, env: str, fate: Fate, lengths: Iterable[Length]) -> None:
        """Count the rollouts of a sample; a trained one with an empty loss mask is `EMPTIED`."""
        number = self._names.setdefault(env, len(self._names))
        for tokens, in_loss, turns in lengths:
            is_emptied = fate is Fate.TRAINED and tokens and not in_loss
            self._tokens.append(tokens)
            self._in_loss.append(in_loss)
            self._turns.append(turns)
            self._fates.append(Fate.EMPTIED if is_emptied else fate)
            self._envs.append(number)

    def restore(self, before: "Bias") -> None:
        """Begin with what was counted before."""
        if self._fates:
            raise InvariantError(f"{len(self._fates)} rollouts were counted before the restore")
        self._tokens.extend(before._tokens)
        self._in_loss.extend(before._in_loss)
        self._turns.extend(before._turns)
        self._fates.extend(before._fates)
        self._envs.extend(before._envs)
        self._names.update(before._names)
        self._last = len(self._fates)

    @property
    def longest_trained_share(self) -> float | None:
        """The first of `longest_shares`."""
        return self.longest_shares[0]

    def since_last(self) -> dict[str, Any]:
        """Means and environments of the rollouts decided since the last call."""
        start, self._last = self._last, len(self._fates)
        return self._means(start)

    def summary(self) -> dict[str, Any]:
        """Of all rollouts, as `summary.json` has it; `docs/metrics.md` names the keys."""
        fates = np.asarray(self._fates)
        rollouts, tokens = self.longest_shares
        return {
            "rollouts": {fate.name.lower(): int((fates == fate).sum()) for fate in Fate},
            **self._means(0),
            "longest_5pct_trained_share": rollouts,
            "longest_5pct_trained_token_share": tokens,
        }

    @property
    def longest_shares(self) -> tuple[float | None, float | None]:
        """Of the longest 5 % of the rollouts that passed the filters: the share that was trained,
        and the share of their tokens that is in the loss."""
        fates = np.asarray(self._fates)
        passed = fates != Fate.REJECTED
        if not passed.any():
            return None, None
        tokens, in_loss = (np.asarray(one)[passed] for one in (self._tokens, self._in_loss))
        num_longest = max(round(0.05 * len(tokens)), 1)
        # Ties at the border are all in: which of them were drawn would be arbitrary.
        longest = tokens >= np.partition(tokens, len(tokens) - num_longest)[-num_longest]
        trained = (fates[passed] == Fate.TRAINED)[longest]
        return float(trained.mean()), float(in_loss[longest].sum() / max(tokens[longest].sum(), 1))

    def _means(self, start: int) -> dict[str, Any]:
        tokens, in_loss, turns, fates, envs = (
            np.asarray(one[start:])
            for one in (self._tokens, self._in_loss, self._turns, self._fates, self._envs)
        )
        trained = fates == Fate.TRAINED
        return {
            "tokens_mean": {
                "dispatched": _mean(tokens),
                "trained": _mean(tokens[trained]),
                "in_loss": _mean(in_loss[trained]),
            },
            "turns_mean": {"dispatched": _mean(turns), "trained": _mean(turns[trained])},
            "env_share": {
                "dispatched": {name: _mean(envs == number) for name, number in self._names.items()},
                "trained": {
                    name: _mean(envs[trained] == number) for name, number in self._names.items()
                },
            },
        }


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None
