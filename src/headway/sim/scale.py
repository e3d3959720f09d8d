"""A workload with fewer tokens, which is cheaper to simulate and behaves the same.

What a token costs in memory and time is real even in a simulation, and nothing depends on how many
there are: only on how long they take. So lengths and engine speed are divided by the same factor.
"""

from typing import Any

import numpy as np

from headway.config import Config, DistributionConfig
from headway.sim.distributions import inverse_of

MEAN_TOKENS = 100
"""Mean length of a rollout after scaling: enough for ages and trimming by the token."""

_AMOUNTS = ("value", "low", "high", "median", "second_median", "max")


def lighter(config: Config) -> Config:
    """The same workload with rollouts of `MEAN_TOKENS` on average, if they are longer.

    Raises:
        ConfigError: a file of values that the workload names cannot be used.
    """
    stated = config.simulate
    length = stated.rollout_tokens or stated.rollout_seconds
    assert length is not None  # the configuration refuses neither
    mean = mean_of(length) * (1.0 if stated.rollout_tokens else stated.tokens_per_second)
    if mean <= MEAN_TOKENS or length.file:
        return config
    factor = MEAN_TOKENS / mean
    content = stated.model_dump(mode="json", exclude_unset=True)
    content["prompt_tokens"] = 1
    if stated.rollout_tokens is None:
        content["tokens_per_second"] = stated.tokens_per_second * factor
    else:
        if any(own.rollout_tokens and own.rollout_tokens.file for own in stated.by_env.values()):
            return config
        curve = stated.engine.throughput
        content["engine"] = {
            **stated.engine.model_dump(mode="json"),
            "throughput": [[load, rate * factor] for load, rate in curve],
        }
        content["rollout_tokens"] = _scaled(content["rollout_tokens"], factor)
        for own in content.get("by_env", {}).values():
            if own.get("rollout_tokens"):
                own["rollout_tokens"] = _scaled(own["rollout_tokens"], factor)
    return config.model_copy(update={"simulate": type(stated).model_validate(content)})


def mean_of(config: DistributionConfig) -> float:
    """Mean of a distribution without its outermost 0.1 %, so that it is finite."""
    inverse = inverse_of(config)
    return float(np.mean([inverse((index + 0.5) / 1000) for index in range(1000)]))


def _scaled(given: dict[str, Any], factor: float) -> dict[str, Any]:
    scaled = dict(given)
    for name in _AMOUNTS:
        if scaled.get(name) is not None:
            scaled[name] *= factor
    scaled["values"] = [one * factor for one in given.get("values", ())]
    scaled["quantiles"] = [[at, one * factor] for at, one in given.get("quantiles", ())]
    return scaled
