"""Built-in arithmetic, the tokenizer, the registry and the mixture, with real datasets."""

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config import Config
from headway.core.rollout import Completion, FinishReason, GroupId, Rollout, Task
from headway.core.versions import VersionRuns
from headway.envs.arithmetic import HELD_OUT, Problems, create_arithmetic, split_answer
from headway.envs.characters import ALPHABET, EOS_ID, VOCABULARY, save_tokenizer
from headway.envs.mixture import MixedTasks
from headway.envs.registry import Tasks, load_tasks
from headway.envs.text import TextCodec, load_tokenizer
from headway.errors import ConfigError
from headway.loop.transcript import RecordedTranscript
from headway.ports import Environment, GenerateRequest, Score, TaskSource

EXAMPLE = str(Path(__file__).parent.parent / "examples" / "own_environment.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the character tokenizer."""
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def codec(folder: Path) -> TextCodec:
    """The character tokenizer as environments get it."""
    return load_tokenizer(folder)


def take(source: TaskSource, number: int) -> list[Task | None]:
    """The next tasks of a source."""

    async def main() -> list[Task | None]:
        return [await source.next_task() for _ in range(number)]

    return asyncio.run(main())


def play(environment: Environment, task: Task, codec: TextCodec, answers: list[str]) -> Rollout:
    """Run and score one episode with a policy that says these answers, one per turn.

    An answer that ends in `...` is cut off; an empty one has no token at all.
    """
    turns = iter(answers)

    async def generate(request: GenerateRequest) -> Completion:
        text = next(turns)
        ids = codec.encode(text.removesuffix("..."))
        if text and not text.endswith("..."):
            ids = [*ids, EOS_ID]
        return Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            version_runs=VersionRuns.of([(0, len(ids))]),
            finish_reason=FinishReason.LENGTH if text.endswith("...") else FinishReason.STOP,
        )

    async def main() -> Rollout:
        transcript = RecordedTranscript(
            task=task, request_id="t", generate=generate, max_tokens=99, temperature=1.0
        )
        await environment.run(transcript)
        score = environment.score(task, transcript.completions)
        return transcript.finish(group_id=GroupId(0), episode=0, score=score, reward_seconds=0.0)

    return asyncio.run(main())


def load(folder: Path, *envs: dict[str, Any], **evaluation: Any) -> Tasks:
    """Load a configuration with these environments."""
    config = Config.model_validate({"envs": envs, "eval": {"num_tasks": 4, **evaluation}})
    return load_tasks(config, folder)


@given(text=st.text(alphabet=ALPHABET))
def test_characters_round_trip(codec: TextCodec, text: str) -> None:
    if any(special in text for special in ("<pad>", "<eos>", "<unk>")):
        return
    ids = codec.encode(text)
    assert ids == [VOCABULARY[character] for character in text]
    assert codec.decode([*ids, EOS_ID]) == text


def test_transformers_reads_the_same_tokenizer(folder: Path, codec: TextCodec) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "12 + 7\n= 19,é"
    assert tokenizer.encode(text) == codec.encode(text)
    assert tokenizer.eos_token_id == EOS_ID
    assert len(tokenizer) == len(VOCABULARY)


def test_no_eval_question_is_ever_trained() -> None:
    held_out = Problems(seed=5, split="eval")
    questions = {held_out[position]["question"] for position in range(HELD_OUT)}
    assert len(questions) == HELD_OUT
    for seed, split in ((0, "train"), (1, "train"), (0, "warm-start")):
        problems = Problems(seed=seed, split=split)
        seen = [problems[position]["question"] for position in range(3000)]
        assert not questions.intersection(seen)
        assert len(set(seen)) > 1000


def test_seeds_differ_and_eval_does_not() -> None:
    def first(seed: int, split: str) -> list[str]:
        problems = Problems(seed=seed, split=split)
        return [problems[position]["question"] for position in range(50)]

    assert first(0, "train") == first(0, "train")
    assert first(0, "train") != first(1, "train")
    assert first(0, "train") != first(0, "warm-start")
    assert first(0, "eval") == first(1, "eval")


@settings(deadline=None, max_examples=20)
@given(position=st.integers(0, 10**6))
def test_restore_makes_the_same_task_again(codec: TextCodec, position: int) -> None:
    _, source = create_arithmetic(name="sums", tokenizer=codec, seed=3, split="train")
    source.restore(position)
    first, second = take(source, 2)
    assert first is not None and second is not None
    assert (first.position, second.position) == (position, position + 1)
    source.restore(position + 1)
    assert take(source, 1) == [second]
    source.restore(position)
    assert take(source, 1) == [first]


def test_eval_tasks_end(codec: TextCodec) -> None:
    _, source = create_arithmetic(name="sums", tokenizer=codec, seed=3, split="eval", held_out=3)
    assert [task is None for task in take(source, 5)] == [False, False, False, True, True]


def test_reward_is_the_datasets_own_on_the_final_answer(codec: TextCodec) -> None:
    environment, source = create_arithmetic(name="sums", tokenizer=codec, seed=0, split="train")
    for task in take(source, 30):
        assert task is not None
        prompt, right = task.data["prompt"], task.data["problem"]["answer"]
        assert re.fullmatch(r"\d([+-]\d){1,4}=", prompt)
        assert eval(prompt[:-1]) == int(right)
        for answer, reward, work in (
            (right, 1.0, 0.0),
            (f"1+1=2,2-2={right}", 1.0, 1.0),
            (f" {right} ", 1.0, 0.0),
            (f"{right}7", 0.0, 0.0),
            (f"{right}=", 0.0, 1.0),
            (f"{right}...", 0.0, 0.0),
            ("", 0.0, 0.0),
        ):
            rollout = play(environment, task, codec, [answer])
            assert rollout.reward == reward, (prompt, answer)
            assert rollout.metrics["shows_work"] == work
            assert rollout.metrics["finished"] == float(not answer.endswith("..."))
            assert codec.decode(rollout.token_ids[~rollout.loss_mask].tolist()) == prompt


def test_partial_credit_and_whole_questions(codec: TextCodec) -> None:
    environment, source = create_arithmetic(
        name="products",
        tokenizer=codec,
        seed=0,
        split="train",
        dataset="products",
        parameters={"max_digits": 2},
        prompt="question",
        partial_credit=True,
    )
    (task,) = take(source, 1)
    assert task is not None and task.data["prompt"].startswith("Solve")
    right = task.data["problem"]["answer"]
    assert play(environment, task, codec, [right]).reward == 1.0
    assert 0.0 < play(environment, task, codec, [f"it is {right}"]).reward < 1.0


def test_split_answer() -> None:
    assert split_answer("a=1,b= 2", "=") == ("a=1,b", "2")
    assert split_answer(" 2", "=") == ("", "2")
    assert split_answer("a=2 ", "") == ("", "a=2")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"dataset": "chain_sun"}, "args.dataset.*did you mean 'chain_sum'"),
        ({"datasets": "gcd"}, "args.datasets is unknown; did you mean 'dataset'"),
        ({"parameters": {"max_term": 3}}, "args.parameters.max_term.*did you mean 'max_terms'"),
        ({"parameters": {"seed": 3}}, "args.parameters.seed: set by the run"),
        ({"parameters": {"min_terms": 9}}, "args.parameters: dataset 'chain_sum' refuses"),
        ({"parameters": {"min_terms": "two"}}, "args.parameters: dataset 'chain_sum' refuses"),
        ({"parameters": 3}, "args.parameters: a mapping"),
        ({"prompt": "short"}, "args.prompt: 'expression' or 'question'"),
        ({"dataset": "gcd"}, "args.prompt: dataset 'gcd' has no bare expression"),
        ({"answer_after": 3}, "args.answer_after: a text"),
        ({"partial_credit": 1}, "args.partial_credit: true or false"),
        ({"held_out": 0}, "args.held_out: a whole number"),
        ({"held_out": 999, "parameters": {"max_terms": 2}}, "args.held_out: 999 different"),
        ({"held_out": 200, "parameters": {"max_terms": 2}}, "args.held_out: .* too few different"),
        ({"held_out": 3}, "eval.num_tasks: .* has only 3 held-out tasks, not 4"),
        ({"name": "x"}, "args.name is set by the run"),
    ],
)
def test_bad_args_are_named(folder: Path, args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        load(folder, {"id": "arithmetic", "args": args})
    assert "envs[0] (arithmetic)" in str(raised.value)


@pytest.mark.parametrize(
    ("identifier", "said"),
    [
        ("arithmetics", "did you mean 'arithmetic'"),
        ("no_such_module:create", "no module 'no_such_module' on the Python path"),
        ("headway.config:Confg", "'Confg' does not exist.*did you mean 'Config'"),
        ("headway.config:BUILTIN_MODEL", "'BUILTIN_MODEL' is not callable"),
        ("nowhere/file.py:create", "there is no file nowhere/file.py"),
        (":create", "not of the form"),
        ("builtins:dict", "must return|does not take"),
    ],
)
def test_unknown_ids_are_explained(folder: Path, identifier: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(folder, {"id": identifier})


BROKEN = """
def raises(*, name, tokenizer, seed, split):
    raise OSError("disk is gone")

def forgets(*, name, tokenizer, seed, split):
    return None

def lacks(*, name, tokenizer, seed, split):
    return object(), object()

def needs(*, name, tokenizer, seed, split, path):
    return None

class Named:
    name = "other"
    async def run(self, transcript): ...
    def score(self, task, completions): ...
    async def next_task(self): ...

def misnamed(*, name, tokenizer, seed, split):
    return Named(), Named()
"""


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("raises", "creating it failed: OSError: disk is gone"),
        ("forgets", "must return .environment, task source., not None"),
        ("lacks", "object lacks name, run, score"),
        ("needs", "args.path is missing"),
        ("misnamed", "name='mine', but the environment calls itself 'other'"),
        ("raise", "did you mean 'raises'"),
    ],
)
def test_broken_factories_are_explained(
    folder: Path, tmp_path: Path, factory: str, said: str
) -> None:
    module = tmp_path / "broken.py"
    module.write_text(BROKEN)
    with pytest.raises(ConfigError, match=said):
        load(folder, {"id": f"{module}:{factory}", "name": "mine"})


def test_a_module_that_fails_to_import_says_why(folder: Path, tmp_path: Path) -> None:
    module = tmp_path / "failing.py"
    module.write_text("import no_such_library\n")
    with pytest.raises(ConfigError, match=r"importing .*failing.py failed.*no_such_library"):
        load(folder, {"id": f"{module}:create"})


def test_the_example_runs(folder: Path, codec: TextCodec) -> None:
    tasks = load(folder, {"id": f"{EXAMPLE}:create", "name": "second", "args": {"largest": 20}})
    environment = tasks.environments["second"]
    (task,) = take(tasks.source, 1)
    assert task is not None
    right = task.data["answer"]
    first = play(environment, task, codec, [right])
    second = play(environment, task, codec, ["-1", f"1+1={right}"])
    never = play(environment, task, codec, ["-1", ""])
    assert [r.reward for r in (first, second, never)] == [1.0, 0.5, 0.0]
    assert [r.num_turns for r in (first, second, never)] == [1, 2, 2]
    assert "wrong, try again" in codec.decode(second.token_ids.tolist())
    assert "wrong" not in codec.decode(second.token_ids[second.loss_mask].tolist())
    trained = {task.data["prompt"] for task in take(tasks.source, 200) if task}
    assert not trained.intersection(task.data["prompt"] for task in tasks.eval_tasks)


def test_tasks_of_several_environments(folder: Path) -> None:
    tasks = load(
        folder,
        {
            "id": "arithmetic",
            "name": "short",
            "weight": 3,
            "args": {"parameters": {"max_terms": 3}},
        },
        {"id": "arithmetic", "name": "long", "args": {"parameters": {"min_terms": 5}}},
    )
    assert [task.env for task in tasks.eval_tasks] == ["short"] * 4 + ["long"] * 4
    taken = [task for task in take(tasks.source, 40) if task]
    assert [task.position for task in taken] == list(range(40))
    assert [task.env for task in taken].count("short") == 30
    assert len({task.key for task in taken}) == 40
    assert load(folder, {"id": "arithmetic"}, every=0).eval_tasks == ()


class Counting:
    """Tasks 0, 1, 2, ..., up to `end`."""

    def __init__(self, env: str, end: int = 10**9) -> None:
        self.env, self.end, self.position = env, end, 0

    async def next_task(self) -> Task | None:
        """The next number."""
        if self.position == self.end:
            return None
        self.position += 1
        number = self.position - 1
        return Task(env=self.env, key=f"{self.env}/{number}", position=number, data={})

    def restore(self, position: int) -> None:
        """Start there."""
        self.position = position


@given(
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=4),
    position=st.integers(0, 200),
)
def test_a_mixture_restores_and_keeps_its_shares(weights: list[float], position: int) -> None:
    def mixture() -> MixedTasks:
        names = [str(index) for index in range(len(weights))]
        return MixedTasks({name: Counting(name) for name in names}, weights)

    whole = [task for task in take(mixture(), 220) if task]
    restored = mixture()
    take(restored, 7)
    restored.restore(position)
    assert take(restored, 20) == whole[position : position + 20]
    for number in range(1, 221):
        for index, weight in enumerate(weights):
            count = sum(task.env == str(index) for task in whole[:number])
            assert abs(count - number * weight / sum(weights)) < len(weights)


def test_a_mixture_ends_with_its_first_source_that_ends() -> None:
    mixture = MixedTasks({"a": Counting("a", 2), "b": Counting("b")}, [1.0, 1.0])
    assert [task and task.key for task in take(mixture, 6)] == [
        "a/0", "b/0", "a/1", "b/1", None, None,
    ]  # fmt: skip


def test_a_mixture_refuses_tasks_of_another_name() -> None:
    mixture = MixedTasks({"a": Counting("b")}, [1.0])
    with pytest.raises(ConfigError, match="environment 'a' made a task for 'b'"):
        take(mixture, 1)


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="not a readable tokenizer"):
        load_tokenizer(tmp_path)


def test_a_score_without_metrics_is_enough() -> None:
    assert Score(reward=1.0).metrics == {}
