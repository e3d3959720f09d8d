"""A simulated environment and its tasks: turns, tool calls and rewards as the workload states."""

import asyncio

from headway.core.rollout import Completion, Task
from headway.errors import EnvironmentFailure
from headway.ports import Score, Transcript
from headway.sim.workload import Workload


class SimulatedEnvironment:
    """Lets the model act, takes the tools' time between two turns, and rewards with 1 or 0.

    All that it does follows from the key that each completion begins with (`sim/workload.py`).
    """

    def __init__(self, name: str, workload: Workload) -> None:
        self._name = name
        self._workload = workload
        self._env = workload.env(name)

    @property
    def name(self) -> str:
        """Stamped on rollouts."""
        return self._name

    async def run(self, transcript: Transcript) -> None:
        """Prompt, then turns and tool calls in turn. Raises EnvironmentFailure as stated."""
        workload, env = self._workload, self._env
        transcript.observe(workload.prompt(transcript.task))
        key = _key(await transcript.act())
        num_turns = workload.num_turns(env, key)
        failing = workload.failing_turn(key, num_turns)
        for turn in range(num_turns):
            if turn:
                if seconds := workload.tool_seconds(env, key, turn):
                    await asyncio.sleep(seconds)
                await transcript.act()
            if turn == failing:
                raise EnvironmentFailure(
                    f"environment {self._name!r} failed after turn {turn + 1} of task "
                    f"{transcript.task.key!r}, as simulate.faults states"
                )

    def score(self, task: Task, completions: list[Completion]) -> Score:
        """A coin, biased by the task's difficulty."""
        key = _key(completions[0])
        return Score(reward=self._workload.reward(self._env, task.position, key))


def _key(completion: Completion) -> int:
    """0 for an engine that samples nothing."""
    return int(completion.token_ids[0]) if len(completion.token_ids) else 0


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
