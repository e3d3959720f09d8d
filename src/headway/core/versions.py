"""Version runs: which policy version sampled each token, run-length encoded."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import NewType

import numpy as np
from numpy.typing import NDArray

Version = NewType("Version", int)
"""Number of policy updates applied; the initial weights are version 0."""

Step = NewType("Step", int)
"""Number of a batch. Batch `k` is trained at version `k` and produces version `k + 1`."""


@dataclass(frozen=True, slots=True)
class VersionRuns:
    """Run-length encoding `((version, count), ...)` of every sampled token's version, in order.

    Only tokens in the loss mask are covered: prompts and environment replies have no version.
    Equal neighbours are merged, so two encodings of the same tokens compare equal. Versions may
    go down again (a later turn may be served by an engine that lags), so head and tail are the
    minimum and maximum, not the ends.

    Example:
        >>> VersionRuns.of([(3, 2), (3, 1), (5, 4)])
        VersionRuns(runs=((3, 3), (5, 4)))
    """

    runs: tuple[tuple[int, int], ...] = ()
    num_tokens: int = field(init=False, compare=False, repr=False)
    """How many tokens the runs cover."""

    def __post_init__(self) -> None:
        previous = None
        total = 0
        for version, count in self.runs:
            if version < 0 or count < 1 or version == previous:
                raise ValueError(
                    f"invalid version runs {self.runs}: versions must be at least 0, counts at "
                    "least 1, and neighbours different (VersionRuns.of merges them)"
                )
            previous = version
            total += count
        object.__setattr__(self, "num_tokens", total)

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int]]) -> "VersionRuns":
        """Build from `(version, count)` pairs, merging equal neighbours, leaving out empty runs."""
        pairs = list(runs)
        if len(pairs) == 1 and pairs[0][1] > 0:  # nearly all completions
            return cls((pairs[0],))
        merged: list[tuple[int, int]] = []
        for version, count in pairs:
            if count == 0:
                continue
            if merged and merged[-1][0] == version:
                merged[-1] = (version, merged[-1][1] + count)
            else:
                merged.append((version, count))
        return cls(tuple(merged))

    @classmethod
    def from_versions(cls, versions: Iterable[int]) -> "VersionRuns":
        """Encode one version per token."""
        return cls(tuple((int(v), sum(1 for _ in same)) for v, same in groupby(versions)))

    @property
    def head(self) -> int:
        """The oldest contributing version. Raises ValueError when there is no token."""
        return min(self.runs)[0]

    @property
    def tail(self) -> int:
        """The newest contributing version. Raises ValueError when there is no token."""
        return max(self.runs)[0]

    def expand(self) -> NDArray[np.int32]:
        """One version per token, shape `(num_tokens,)`."""
        if not self.runs:
            return np.zeros(0, np.int32)
        versions, counts = zip(*self.runs, strict=True)
        return np.repeat(np.array(versions, np.int32), counts)

    def __add__(self, other: "VersionRuns") -> "VersionRuns":
        """The runs of these tokens followed by the other's."""
        return VersionRuns.of((*self.runs, *other.runs))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.runs)

    def __bool__(self) -> bool:
        return bool(self.runs)
