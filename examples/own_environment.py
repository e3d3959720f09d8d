"""An environment of your own, with two model turns.

The model answers a sum. When it is wrong the environment says so and it may try once more; a right
second answer earns half. Run it with

    headway run examples/demo.yaml --run.dir runs/own \\
        --envs '[{id: examples/own_environment.py:create, name: second_chance}]'

The three things to write: tasks, the episode, the reward. What may go wrong in them is counted as
this environment's fault, not the policy's: an exception fails the rollout (after a bounded number
of retries), while a wrong, empty or cut-off answer is data and earns the reward that `score` gives.
"""

import random

from headway.core.rollout import Completion, Task
from headway.envs.text import TextCodec
from headway.ports import Score, Transcript


class Sums:
    """Task `n` is drawn from `n` alone, so any position can be restored."""

    def __init__(self, env: str, seed: int, split: str, largest: int) -> None:
        self.env, self.seed, self.split, self.largest = env, seed, split, largest
        self.position = 0

    async def next_task(self) -> Task:
        """The next sum. Sums divisible by 5 are for evaluation, the others for training."""
        position = self.position
        self.position += 1
        rng = random.Random(f"{self.seed}/{self.split}/{position}")
        while True:
            left, right = rng.randint(0, self.largest), rng.randint(0, self.largest)
            if ((left + right) % 5 == 0) == (self.split == "eval"):
                break
        return Task(
            env=self.env,
            key=f"{self.env}/{self.split}/{position}",
            position=position,
            data={"prompt": f"{left}+{right}=", "answer": str(left + right)},
        )

    def restore(self, position: int) -> None:
        """Make `position` the next one."""
        self.position = position


class SecondChance:
    """Answer, hear whether it was wrong, answer again."""

    def __init__(self, name: str, tokenizer: TextCodec) -> None:
        self.name = name
        self.tokenizer = tokenizer

    async def run(self, transcript: Transcript) -> None:
        """One episode: what is observed is not trained on, what the model samples is."""
        prompt = transcript.task.data["prompt"]
        transcript.observe(self.tokenizer.encode(prompt))
        if not self._is_right(transcript.task, await transcript.act()):
            transcript.observe(self.tokenizer.encode(f"\nwrong, try again\n{prompt}"))
            await transcript.act()

    def score(self, task: Task, completions: list[Completion]) -> Score:
        """1 for the first answer, 0.5 for the second, 0 for none."""
        right = self._is_right(task, completions[-1])
        reward = 1.0 / len(completions) if right else 0.0
        return Score(reward=reward, metrics={"second_try": float(len(completions) == 2)})

    def _is_right(self, task: Task, completion: Completion) -> bool:
        text = self.tokenizer.decode(completion.token_ids.tolist())
        return bool(text.rpartition("=")[2].strip() == task.data["answer"])


def create(
    *, name: str, tokenizer: TextCodec, seed: int, split: str, largest: int = 9
) -> tuple[SecondChance, Sums]:
    """What `envs: [{id: examples/own_environment.py:create, args: {largest: 9}}]` calls."""
    return SecondChance(name, tokenizer), Sums(name, seed, split, largest)
