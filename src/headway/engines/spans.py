"""From an engine's answer to a Completion: only what is whole and consistent gets through."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from headway.core.rollout import Completion, FinishReason
from headway.core.versions import VersionRuns


class Span(msgspec.Struct):
    """Output tokens `start` to `end` (exclusive) were sampled under this label, always a string."""

    version: str
    start: int
    end: int


def completion_of(
    token_ids: list[int],
    logprobs: Sequence[float | None],
    version_runs: VersionRuns,
    finish_reason: FinishReason,
) -> Completion:
    """Check and build. Raises ValueError with what is wrong."""
    num_tokens = len(token_ids)
    if len(logprobs) != num_tokens:
        raise ValueError(f"{len(logprobs)} log-probabilities do not belong to {num_tokens} tokens")
    finite = [value for value in logprobs if value is not None and math.isfinite(value)]
    if len(finite) != num_tokens:
        # What an engine answers whose weights are not finite.
        raise ValueError(f"{num_tokens - len(finite)} of {num_tokens} log-probabilities not finite")
    if version_runs.num_tokens != num_tokens:
        raise ValueError(f"version spans cover {version_runs.num_tokens} of {num_tokens} tokens")
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.array(finite, np.float32),
        version_runs=version_runs,
        finish_reason=finish_reason,
    )


def version_runs(spans: Sequence[Span], num_tokens: int) -> VersionRuns:
    """The runs that spans over `num_tokens` say. Raises ValueError when they do not cover them one
    after the other, or a label is no version."""
    position = 0
    runs = []
    for span in spans:
        if not span.version.isdecimal():
            raise ValueError(f"weight version {span.version!r} is not a number: label the weights")
        if span.start != position or span.end < span.start:
            raise ValueError(f"version span {span.start}:{span.end} does not follow {position}")
        runs.append((int(span.version), span.end - span.start))
        position = span.end
    if position != num_tokens:
        raise ValueError(f"version spans cover {position} of {num_tokens} tokens")
    return VersionRuns.of(runs)


def shift_starts(runs: VersionRuns) -> VersionRuns:
    """The runs with every one but the first beginning a token later.

    For an engine that schedules a pass ahead: the first token that it stamps with new weights was
    still sampled from the pass before them. A run that loses its only token is gone.

    Example:
        >>> shift_starts(VersionRuns(((3, 4), (4, 2))))
        VersionRuns(runs=((3, 5), (4, 1)))
    """
    shifted: list[tuple[int, int]] = []
    for number, (version, count) in enumerate(runs):
        if number == 0:
            shifted.append((version, count))
            continue
        before, before_count = shifted[-1]
        shifted[-1] = (before, before_count + 1)
        # The token taken here is given back by the next boundary, if there is one.
        shifted.append((version, count - 1))
    return VersionRuns.of(shifted)


def join(parts: Sequence[Completion], finish_reason: FinishReason) -> Completion:
    """One completion out of the parts that interruptions left of it."""
    if len(parts) == 1 and parts[0].finish_reason is finish_reason:
        return parts[0]
    return Completion(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        version_runs=sum((part.version_runs for part in parts), VersionRuns()),
        finish_reason=finish_reason,
    )
