"""The stated workload: what every rollout of a simulated run is like, drawn when it is asked for.

Every draw is a function of the seed and of what it is for (task, issue, episode, attempt, turn),
not of when it is asked for. So two policies, or two numbers of engines, are compared on the same
rollouts: the difference between them is theirs and not chance's.

The parts need no side channel for that. A prompt begins with a token that names its task, and what
the model samples begins with a token that names the rollout, its key: the environment takes from it
how many turns there are, how long the tools take and what the reward is.
"""

import math
from collections.abc import Callable
from enum import IntEnum
from statistics import NormalDist
from typing import Any, NamedTuple

from headway.config import Config
from headway.core.rollout import Task
from headway.ports import GenerateRequest
from headway.sim.distributions import Inverse, beta_inverse, inverse_of

_MASK = (1 << 64) - 1
_KEY_MASK = (1 << 31) - 1
"""Keys travel as token ids, which are int32."""
_NORMAL = NormalDist()
_LEAST = 2.0**-53
"""Uniform numbers stay this far from 0 and 1."""


def mix(value: int) -> int:
    """64 bits that look random and depend on every bit of `value` (SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Stream(IntEnum):
    """What a number is drawn for: one independent stream each."""

    ROLLOUT = 1
    LENGTH = 2
    TURNS = 3
    TOOL = 4
    REWARD = 5
    DIFFICULTY = 6
    TRAIN = 7
    REQUEST_FAILURE = 8
    ENVIRONMENT_FAILURE = 9
    HANG = 10
    PART = 11
    PROMPT = 12


class Turn(NamedTuple):
    """One engine request: how much work it is, in units of the engine's own, and what comes out."""

    work: float
    num_tokens: int
    key: int = 0
    """First of the sampled tokens."""
    fails: bool = False
    """The engine breaks off once the work is done."""
    hangs: bool = False
    """The request is never answered."""


class EnvWorkload:
    """What the rollouts of one environment are like."""

    def __init__(self, config: Config, env: str) -> None:
        stated = config.simulate
        own = stated.by_env.get(env)

        def of(name: str) -> Any:
            value = getattr(own, name, None)
            return getattr(stated, name) if value is None else value

        self.is_in_tokens = stated.rollout_tokens is not None
        length = "rollout_tokens" if self.is_in_tokens else "rollout_seconds"
        self.length: Inverse = inverse_of(of(length))
        turns = of("turns")
        self.turns: Inverse = inverse_of(turns)
        self.has_one_turn = turns.kind == "constant" and turns.value <= 1
        """The usual case, for which nothing needs to be drawn."""
        self.tools: Inverse = inverse_of(of("tool_seconds"))
        self.difficulty: Inverse = beta_inverse(of("reward_probability"), stated.difficulty_spread)


class Workload:
    """Draws everything that a simulated run needs, from `config.simulate` and `config.run.seed`.

    Args:
        latency: draws the seconds of an engine request instead, in the order of the calls.

    Raises:
        ConfigError: a file of values cannot be used.
    """

    def __init__(self, config: Config, *, latency: Callable[[], float] | None = None) -> None:
        stated = config.simulate
        self.labels = tuple(env.label for env in config.envs)
        self._envs = tuple(EnvWorkload(config, label) for label in self.labels)
        self._seed = mix(config.run.seed)
        self._latency = latency
        self._tokens_per_second = stated.tokens_per_second
        self._padding = [0] * (stated.prompt_tokens - 1)
        self._length_correlation = stated.length_correlation
        self._train_seconds = inverse_of(stated.train_seconds)
        self._faults = stated.faults
        self._issues: dict[tuple[str, int], tuple[str, int]] = {}

    def uniform(self, key: int, stream: Stream, index: int = 0) -> float:
        """A number in (0, 1): always the same one for the same arguments."""
        bits = mix(self._seed ^ (key << 32) ^ (stream << 24) ^ index)
        return ((bits >> 12) + 0.5) * 2.0**-52

    # --- prompts ------------------------------------------------------------------------------

    def prompt(self, task: Task) -> list[int]:
        """Token ids; the first one names the task and its environment."""
        name = task.position * len(self.labels) + self.labels.index(task.env)
        return [name & _KEY_MASK, *self._padding]

    # --- the engine's side --------------------------------------------------------------------

    def turn(self, request: GenerateRequest) -> Turn:
        """What an engine request comes to."""
        name = request.token_ids[0]
        head, episode, attempt, turn = request.request_id.split("-")[:4]  # a pool may add more
        index = int(turn)
        key = self._key(name, head, int(episode), int(attempt))
        env = self._envs[name % len(self._envs)]
        work, num_tokens = self._amount(env, name, key, index)
        faults = self._faults
        if faults.hang_probability and self._happens(
            faults.hang_probability, key, Stream.HANG, index
        ):
            return Turn(work, num_tokens, key, hangs=True)
        if faults.request_failure_probability and self._happens(
            faults.request_failure_probability, key, Stream.REQUEST_FAILURE, index
        ):
            work *= self.uniform(key, Stream.PART, index)
            return Turn(work, num_tokens, key, fails=True)
        return Turn(work, num_tokens, key)

    def _amount(self, env: EnvWorkload, name: int, key: int, index: int) -> tuple[float, int]:
        """Work and tokens of a turn."""
        if self._latency is not None:
            seconds = self._latency()
            return seconds, max(round(seconds * self._tokens_per_second), 1)
        num_turns = self.num_turns(env, key)
        whole = env.length(self._length_quantile(name, key))
        if not env.is_in_tokens:
            seconds = whole / num_turns
            return seconds, max(round(seconds * self._tokens_per_second), 1)
        total = max(round(whole), num_turns)
        num_tokens = total * (index + 1) // num_turns - total * index // num_turns
        num_tokens = max(num_tokens, 1)
        return float(num_tokens), num_tokens

    def _length_quantile(self, name: int, key: int) -> float:
        """Where a rollout's length lies in its distribution. Rollouts of one prompt share a part of
        it (a Gaussian copula), so that the distribution of all lengths stays what is stated."""
        own = self.uniform(key, Stream.LENGTH)
        shared = self._length_correlation
        if not shared:
            return own
        prompts = _NORMAL.inv_cdf(self.uniform(name, Stream.PROMPT))
        score = math.sqrt(shared) * prompts + math.sqrt(1 - shared) * _NORMAL.inv_cdf(own)
        return min(max(_NORMAL.cdf(score), _LEAST), 1 - _LEAST)

    def _key(self, name: int, head: str, episode: int, attempt: int) -> int:
        """Names a rollout. A prompt that is issued again, as a new sample, is a new draw."""
        kind = head[0]
        sample, issue = self._issues.get((kind, name), (head, 0))
        if sample != head:
            issue += 1
        self._issues[kind, name] = (head, issue)
        what = (issue << 40) ^ (episode << 16) ^ (attempt << 8) ^ ord(kind)
        return mix(mix(self._seed ^ (name << 8) ^ Stream.ROLLOUT) ^ what) & _KEY_MASK

    def _happens(self, probability: float, key: int, stream: Stream, index: int = 0) -> bool:
        return self.uniform(key, stream, index) < probability

    # --- the environment's side ---------------------------------------------------------------

    def env(self, label: str) -> EnvWorkload:
        """What the rollouts of an environment are like."""
        return self._envs[self.labels.index(label)]

    def num_turns(self, env: EnvWorkload, key: int) -> int:
        """Model turns of a rollout."""
        if env.has_one_turn:
            return 1
        return max(round(env.turns(self.uniform(key, Stream.TURNS))), 1)

    def tool_seconds(self, env: EnvWorkload, key: int, turn: int) -> float:
        """How long the tool call after a turn takes."""
        return env.tools(self.uniform(key, Stream.TOOL, turn))

    def failing_turn(self, key: int, num_turns: int) -> int | None:
        """The turn after which the environment fails, if it does."""
        probability = self._faults.environment_failure_probability
        if not probability or not self._happens(probability, key, Stream.ENVIRONMENT_FAILURE):
            return None
        return int(self.uniform(key, Stream.PART) * num_turns)

    def reward(self, env: EnvWorkload, position: int, key: int) -> float:
        """1 or 0; how often 1 depends on the task's difficulty."""
        solvable = env.difficulty(self.uniform(position, Stream.DIFFICULTY))
        return float(self.uniform(key, Stream.REWARD) < solvable)

    # --- the trainer's side -------------------------------------------------------------------

    def train_seconds(self, step: int) -> float:
        """How long the update of a batch takes."""
        return self._train_seconds(self.uniform(step, Stream.TRAIN))
