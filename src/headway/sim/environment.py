"""A simulated task: fixed prompts, one turn, a reward that succeeds with a given probability."""

import numpy as np

from headway.core.rollout import Completion, Task
from headway.ports import Score, Transcript


class SimulatedEnvironment:
    """One model turn, then a reward of 1 with `reward_probability`, else 0."""

    def __init__(
        self, name: str, *, prompt_tokens: int, reward_probability: float, rng: np.random.Generator
    ) -> None:
        self._name = name
        self._prompt = [0] * prompt_tokens
        self._probability = reward_probability
        self._rng = rng

    @property
    def name(self) -> str:
        """Stamped on rollouts."""
        return self._name

    async def run(self, transcript: Transcript) -> None:
        """Prompt, one turn."""
        transcript.observe(self._prompt)
        await transcript.act()

    def score(self, task: Task, completions: list[Completion]) -> Score:
        """A coin."""
        return Score(reward=float(self._rng.random() < self._probability))


class CountingTasks:
    """An endless task source; the key is the position."""

    def __init__(self, env: str) -> None:
        self._env = env
        self._position = 0

    async def next_task(self) -> Task:
        """The next number."""
        position = self._position
        self._position += 1
        return Task(env=self._env, key=str(position), position=position, data={})

    def restore(self, position: int) -> None:
        """Start there."""
        self._position = position
