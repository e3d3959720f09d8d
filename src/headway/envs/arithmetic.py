"""Verifiable arithmetic from `reasoning-gym`: one prompt, one model turn, right or wrong.

By default sums of 2 to 5 one-digit numbers, in the notation that the built-in model reads:
`"4-1-7="`, to be answered by, say, `"4-1=3,3-7=-4"`. What stands after the last `=` is the answer,
work shown before it is welcome and earns nothing, and `reasoning-gym` itself scores the answer.

**Held-out problems**: the eval split is the first `held_out` distinct questions under a seed of its
own, the same in every run. The training split leaves out every question of that set by its text,
whatever the seed, so no problem is ever both trained and evaluated. The warm start of the built-in
model leaves them out as well.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from headway.core.rollout import Completion, FinishReason, Task
from headway.envs.text import TextCodec, did_you_mean
from headway.errors import ConfigError
from headway.ports import Score, Transcript

DATASET = "chain_sum"
PARAMETERS: Mapping[str, Any] = {
    "min_terms": 2,
    "max_terms": 5,
    "min_digits": 1,
    "max_digits": 1,
}
"""What the built-in model was warmed up on. They hold while `dataset` is the default one."""

HELD_OUT = 128
ANSWER_AFTER = "="
DATASET_SIZE = 2**40
"""Problems are made from their index when asked for, so the size costs nothing."""
ATTEMPT_STRIDE = 2**24
"""A held-out question at index `i` is replaced by the one at `i + stride`, and so on. Hence the
`n`-th training task is always position `n`, and any position can be restored without a replay."""
MAX_ATTEMPTS = 1000
RESERVED = ("size", "seed")


class Problems:
    """Random access to the training or eval problems of one dataset.

    Args:
        dataset: name of a `reasoning-gym` dataset.
        parameters: its parameters; for the default dataset, added to `PARAMETERS`.
        seed: of the training split; the eval split ignores it.
        split: `"train"`, `"eval"`, or any other name for training-like problems of a separate seed.
        held_out: how many questions the eval split has.

    Raises:
        ConfigError: naming the argument that cannot work.
    """

    def __init__(
        self,
        *,
        dataset: str = DATASET,
        parameters: Mapping[str, Any] | None = None,
        seed: int,
        split: str,
        held_out: int = HELD_OUT,
    ) -> None:
        if parameters is not None and not isinstance(parameters, Mapping):
            raise ConfigError(f"args.parameters: a mapping of names to values, not {parameters!r}")
        if dataset == DATASET:
            parameters = {**PARAMETERS, **(parameters or {})}
        self.name = dataset
        self._held_out: dict[str, int] = {}
        self._split = split
        self._made = _create(dataset, parameters or {}, _seed(0, "eval"))
        self._collect_held_out(held_out)
        self._eval_indices = tuple(self._held_out.values())
        if split != "eval":
            self._made = _create(dataset, parameters or {}, _seed(seed, split))

    def __getitem__(self, position: int) -> Mapping[str, Any]:
        """The problem at this position: `question`, `answer` and `metadata`.

        Raises:
            IndexError: past the end of the eval split.
            ConfigError: when every question tried was a held-out one.
        """
        if self._split == "eval":
            return self._make(self._eval_indices[position])
        for attempt in range(MAX_ATTEMPTS):
            problem = self._make(position + attempt * ATTEMPT_STRIDE)
            if problem["question"] not in self._held_out:
                return problem
        raise ConfigError(
            f"args.held_out: dataset {self.name!r} has too few different questions: "
            f"{len(self._held_out)} are held out for evaluation, and so were {MAX_ATTEMPTS} in a "
            f"row at position {position}; lower held_out or widen args.parameters"
        )

    def has(self, position: int) -> bool:
        """Whether there is a problem at this position; training problems never end."""
        return self._split != "eval" or position < len(self._held_out)

    def score(self, answer: str, problem: Mapping[str, Any]) -> float:
        """The dataset's own score, 0 to 1."""
        return float(self._made.score_answer(answer, problem))

    def _make(self, index: int) -> Mapping[str, Any]:
        problem: Mapping[str, Any] = self._made[index]
        return problem

    def _collect_held_out(self, number: int) -> None:
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ConfigError(f"args.held_out: a whole number of at least 1, not {number!r}")
        index = 0
        last_new = 0
        while len(self._held_out) < number:
            question = self._make(index)["question"]
            if self._held_out.setdefault(question, index) == index:
                last_new = index
            elif index - last_new > MAX_ATTEMPTS:
                raise ConfigError(
                    f"args.held_out: {number} different questions were asked for, but dataset "
                    f"{self.name!r} gives only {len(self._held_out)}; lower held_out or widen "
                    "args.parameters"
                )
            index += 1


class ArithmeticTasks:
    """The problems of one split as a task source; position `n` is the `n`-th problem."""

    def __init__(self, env: str, problems: Problems, *, split: str, prompt: str) -> None:
        self._env = env
        self._problems = problems
        self._split = split
        self._prompt = prompt
        self._position = 0

    async def next_task(self) -> Task | None:
        """The next problem; None past the end of the eval split."""
        position = self._position
        if not self._problems.has(position):
            return None
        problem = self._problems[position]
        self._position += 1
        return Task(
            env=self._env,
            key=f"{self._env}/{self._split}/{position}",
            position=position,
            data={"prompt": prompt_text(problem, self._prompt), "problem": problem},
        )

    def restore(self, position: int) -> None:
        """Make `position` the next one."""
        self._position = position


class ArithmeticEnvironment:
    """One turn. Reward 1 when `reasoning-gym` gives the answer full marks, else 0.

    A completion that was cut off before it ended has given no final answer: reward 0. With
    `partial_credit` the dataset's own score is the reward, whatever lies between 0 and 1.
    """

    def __init__(
        self,
        name: str,
        problems: Problems,
        tokenizer: TextCodec,
        *,
        answer_after: str,
        partial_credit: bool,
    ) -> None:
        self._name = name
        self._problems = problems
        self._tokenizer = tokenizer
        self._answer_after = answer_after
        self._partial_credit = partial_credit

    @property
    def name(self) -> str:
        """Stamped on every rollout."""
        return self._name

    async def run(self, transcript: Transcript) -> None:
        """Ask, and let the model answer."""
        transcript.observe(self._tokenizer.encode(transcript.task.data["prompt"]))
        await transcript.act()

    def score(self, task: Task, completions: list[Completion]) -> Score:
        """Metrics: `finished` (not cut off) and `shows_work` (text before the answer), 0 or 1."""
        last = completions[-1]
        finished = last.finish_reason is FinishReason.STOP
        work, answer = split_answer(
            self._tokenizer.decode(last.token_ids.tolist()), self._answer_after
        )
        score = self._problems.score(answer, task.data["problem"]) if finished else 0.0
        if not self._partial_credit:
            score = float(score >= 1.0)
        return Score(
            reward=score,
            metrics={"finished": float(finished), "shows_work": float(bool(work))},
        )


def split_answer(text: str, answer_after: str) -> tuple[str, str]:
    """Work and answer: what stands before and after the last mark. Without a mark, all is answer.

    Example:
        >>> split_answer("4-1=3,3-7=-4", "=")
        ('4-1=3,3-7', '-4')
    """
    if not answer_after:
        return "", text.strip()
    work, _, answer = text.rpartition(answer_after)
    return work, answer.strip()


def prompt_text(problem: Mapping[str, Any], prompt: str) -> str:
    """What the model reads: the whole question, or the expression alone without spaces."""
    if prompt == "question":
        return str(problem["question"])
    return str(problem["metadata"]["expression"]).replace(" ", "") + "="


def create_arithmetic(
    *,
    name: str,
    tokenizer: TextCodec,
    seed: int,
    split: str,
    dataset: str = DATASET,
    parameters: Mapping[str, Any] | None = None,
    prompt: str = "expression",
    answer_after: str = ANSWER_AFTER,
    held_out: int = HELD_OUT,
    partial_credit: bool = False,
) -> tuple[ArithmeticEnvironment, ArithmeticTasks]:
    """The built-in environment `arithmetic`; the keywords from `dataset` on are its `args`.

    Args:
        name: stamped on rollouts.
        tokenizer: of the policy.
        seed: of the training problems.
        split: `"train"` or `"eval"`.
        dataset: any single-turn dataset of `reasoning-gym`.
        parameters: of the dataset, without `size` and `seed`.
        prompt: `"expression"` (short, for datasets that have one) or `"question"` (as worded).
        answer_after: the answer is what follows the last occurrence; empty: the whole text.
        held_out: number of questions kept for evaluation and out of training.
        partial_credit: reward as scored, instead of full marks or nothing.

    Raises:
        ConfigError: naming the argument.
    """
    if prompt not in ("expression", "question"):
        raise ConfigError(f"args.prompt: 'expression' or 'question', not {prompt!r}")
    if not isinstance(answer_after, str):
        raise ConfigError(f"args.answer_after: a text, not {answer_after!r}")
    if not isinstance(partial_credit, bool):
        raise ConfigError(f"args.partial_credit: true or false, not {partial_credit!r}")
    problems = Problems(
        dataset=dataset, parameters=parameters, seed=seed, split=split, held_out=held_out
    )
    if prompt == "expression" and "expression" not in problems[0]["metadata"]:
        raise ConfigError(
            f"args.prompt: dataset {dataset!r} has no bare expression; set prompt: question"
        )
    environment = ArithmeticEnvironment(
        name, problems, tokenizer, answer_after=answer_after, partial_credit=partial_credit
    )
    return environment, ArithmeticTasks(name, problems, split=split, prompt=prompt)


def _seed(seed: int, split: str) -> int:
    """Problem `i` of `reasoning-gym` is drawn from `seed + i`, so seeds that lie close together
    give the same problems shifted; these lie far apart, and small enough for numpy's generators.
    """
    digest = hashlib.sha256(f"{seed}/{split}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 2


def _create(dataset: str, parameters: Mapping[str, Any], seed: int) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset  # 2 to 4 seconds: only if used
    except ImportError as error:
        raise ConfigError(
            f"environment 'arithmetic' needs the package reasoning-gym: pip install "
            f"'headway-rl[tasks]' ({error})"
        ) from error
    if not isinstance(dataset, str) or dataset not in DATASETS:
        hint = did_you_mean(str(dataset), DATASETS)
        raise ConfigError(f"args.dataset: reasoning-gym has no dataset {dataset!r}{hint}")
    known = {field.name for field in dataclasses.fields(DATASETS[dataset][1])} - {*RESERVED}
    for key in parameters:
        if key in RESERVED:
            raise ConfigError(f"args.parameters.{key}: set by the run; leave it out")
        if key not in known:
            hint = did_you_mean(str(key), known) or f"; it has {', '.join(sorted(known))}"
            raise ConfigError(f"args.parameters.{key}: unknown for dataset {dataset!r}{hint}")
    try:
        made = create_dataset(dataset, size=DATASET_SIZE, seed=seed, **parameters)
        made[0]
    except Exception as error:  # datasets check themselves by assert, TypeError, ValueError, ...
        raise ConfigError(
            f"args.parameters: dataset {dataset!r} refuses {dict(parameters)}: {error}"
        ) from error
    return made
