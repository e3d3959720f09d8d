"""Ages of trained tokens: exact integer histograms.

The age of a token trained in batch `k` and sampled under version `u` is `k - u`. The head age of
a rollout is the age of its oldest contributing token. Only `live` rollouts count: a replayed or
external one carries no meaningful version.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from headway.core.rollout import Rollout, Source


@dataclass(slots=True)
class AgeHistogram:
    """How often each age occurred."""

    counts: Counter[int] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Number of entries."""
        return self.counts.total()

    @property
    def max(self) -> int | None:
        """Largest age; None when empty."""
        return max(self.counts, default=None)

    @property
    def mean(self) -> float | None:
        """Mean age; None when empty."""
        total = self.total
        return sum(age * count for age, count in self.counts.items()) / total if total else None

    def quantile(self, q: float) -> int | None:
        """Nearest rank: the smallest age that at least a share `q` of the entries do not exceed."""
        total = self.total
        seen = 0
        for age in sorted(self.counts):
            seen += self.counts[age]
            if seen >= q * total:
                return age
        return None


@dataclass(slots=True)
class Ages:
    """Token ages and head ages of what was trained."""

    tokens: AgeHistogram = field(default_factory=AgeHistogram)
    heads: AgeHistogram = field(default_factory=AgeHistogram)

    @classmethod
    def of_batch(cls, step: int, rollouts: Iterable[Rollout]) -> "Ages":
        """Ages of these rollouts when trained in batch `step`."""
        ages = cls()
        tokens, heads = ages.tokens.counts, ages.heads.counts
        for rollout in rollouts:
            if rollout.source is not Source.LIVE or not rollout.version_runs:
                continue
            for version, count in rollout.version_runs.runs:
                tokens[step - version] += count
            heads[step - rollout.version_runs.head] += 1
        return ages

    def merge(self, other: "Ages") -> None:
        """Count the other's entries too."""
        self.tokens.counts.update(other.tokens.counts)
        self.heads.counts.update(other.heads.counts)

    def summary(self) -> dict[str, float | None]:
        """`max`, `p99` and `mean` over tokens, `head_max` and `head_mean` over rollouts."""
        return {
            "max": self.tokens.max,
            "p99": self.tokens.quantile(0.99),
            "mean": self.tokens.mean,
            "head_max": self.heads.max,
            "head_mean": self.heads.mean,
        }
