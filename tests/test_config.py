"""Configuration files: what loads, what is refused and how it is told, and what is written."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config import Config
from headway.config.file import dump_config, load_config
from headway.config.reference import reference
from headway.errors import ConfigError

AREAL_BLOCK = """
rollout:
  max_head_offpolicyness: 4
  consumer_batch_size: 8
  max_concurrent_rollouts: 64
  queue_size: 1024
actor:
  use_decoupled_loss: true
  recompute_logprobs: true
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`load(text, *overrides)`: the configuration of a file `c.yaml`."""
    monkeypatch.chdir(tmp_path)

    def call(text: str, *overrides: str) -> Config:
        path = Path("c.yaml")
        path.write_text(text, encoding="utf-8")
        return load_config(path, overrides)

    return call


def test_a_block_of_another_system_loads_as_it_is(load: Any) -> None:
    config = load(AREAL_BLOCK)
    rollout = config.rollout
    assert (rollout.max_head_offpolicyness, rollout.consumer_batch_size) == (4, 8)
    assert (rollout.max_concurrent, rollout.queue_size) == (64, 1024)
    assert config.actor.use_decoupled_loss and config.actor.recompute_logprobs
    assert config.envs == Config().envs


@pytest.mark.parametrize("text", ["", "# nothing\n", "rollout:\nactor:\n  optimizer:\n"])
def test_what_is_left_out_has_its_default(load: Any, text: str) -> None:
    assert load(text) == Config() == load_config(None)


PROBLEMS = [
    (
        "rollout:\n  max_head_offpolicynes: 4\n",
        "c.yaml:2: rollout.max_head_offpolicynes: unknown key; "
        "did you mean rollout.max_head_offpolicyness?",
    ),
    ("engin: {}\n", "c.yaml:1: engin: unknown key; did you mean engine?"),
    ("queue_size: 8\n", "c.yaml:1: queue_size: unknown key; did you mean rollout.queue_size?"),
    ("weights: {zzz: 8}\n", "unknown key; known here: keep_last, poll_seconds"),
    ("actor: {recompute_logprb: true}\n", "did you mean actor.recompute_logprob"),
    ('run: {steps: "4"}\n', 'run.steps: a whole number is needed, not "4"; remove the quotes'),
    ("run: {steps: 4.0}\n", "run.steps: a whole number is needed, not 4.0"),
    ("run: {steps: true}\n", "run.steps: a whole number is needed, not true"),
    ("run: {dir: 5}\n", "run.dir: text is needed, not 5; put it in quotes"),
    ("run: {steps:}\n", "run.steps: a whole number is needed, not empty"),
    ("run: {stall_seconds: .inf}\n", "run.stall_seconds: a finite number is needed"),
    ("run: {stall_seconds: 2026-01-01}\n", 'a number is needed, not "2026-01-01"'),
    ("actor: {use_decoupled_loss: 1}\n", "true or false is needed, not 1"),
    ("rollout: 5\n", "c.yaml:1: rollout: a section is needed, not 5"),
    ("envs: {id: arithmetic}\n", "c.yaml:1: envs: a list is needed"),
    ("envs: []\n", "envs: must have at least 1 entry"),
    ("envs:\n- id: a\n- id: 5\n", "c.yaml:3: envs.1.id: text is needed, not 5"),
    ("envs: [{id: a}, {id: a}]\n", "envs: the name 'a' is used twice"),
    ("engine: {kind: vlm}\n", "or 'sglang', not \"vlm\"; did you mean vllm?"),
    ("actor: {advantage: rlo}\n", "did you mean rloo?"),
    ("rollout: {filters: [zero_advantag]}\n", "rollout.filters.0: must be"),
    ("rollout: {max_head_offpolicyness: -1}\n", "must be at least 0, not -1"),
    ("actor: {optimizer: {lr: 0}}\n", "actor.optimizer.lr: must be above 0, not 0"),
    ("actor: {eps_clip: 1}\n", "actor.eps_clip: must be below 1, not 1"),
    ("rollout: {queue_size: 4}\n", "rollout.queue_size: 4 is smaller than consumer_batch_size"),
    ("rollout: {group_size: 1}\n", "rollout.group_size: a lone rollout has no siblings"),
    ("actor: {recompute_logprob: false}\n", "actor.use_decoupled_loss: needs recompute_logprobs"),
    ("actor: {recompute_logprob: false, recompute_logprobs: true}\n", "they differ"),
    ("engine: {max_model_len: 64}\n", "rollout.max_new_tokens: 64 tokens leave no room"),
    ("engine: {num_blocks: 4}\n", "engine.num_blocks: 4 blocks of 16 tokens hold 64"),
    ("engine: {port: 65535, count: 2}\n", "engine.port: 2 engines from port 65535 on pass 65535"),
    ("actor: {ppo_n_minibatches: 129}\n", "cannot be made of the 128 rollouts"),
    ("simulate: {rollout_seconds: {kind: uniform, low: 3}}\n", "high: 2 is below low (3)"),
    ("run:\n  dir: a\n  dir: b\n", "c.yaml:3: run.dir: is given twice (on line 2, too)"),
    ("run: &a\n  dir: *a\n", "run.dir: refers to itself"),
    ("run: {5: 1}\n", "run.5: a key must be text"),
    ("run: {dir: !!python/object:x.y {}}\n", "has no meaning here; remove it"),
    ("run:\n\tdir: a\n", "cannot start any token (indent with spaces)"),
    ("a: 1\n---\nb: 2\n", "not valid YAML"),
    ("- a\n", "c.yaml: sections (`rollout:` and lines below it) are needed"),
    ("\x07", "c.yaml: not valid YAML"),
]


@pytest.mark.parametrize("case", PROBLEMS, ids=lambda case: repr(case[0])[:40])
def test_a_problem_names_place_key_and_reason(load: Any, case: tuple[str, str]) -> None:
    text, told = case
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert told in str(caught.value)


def test_all_problems_are_told_at_once_in_the_order_of_the_file(load: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load(
            "run: {stepz: 1}\nrollout:\n  group_size: x\n  group_size: 2\neval: {every: -1}\n",
            "--engine.cont=2",
            "--weights.keep_last",
            "1",
        )
    lines = str(caught.value).splitlines()
    assert lines[0] == "6 problems in the configuration"
    places = [line.split(": ")[0].strip() for line in lines[1:]]
    assert places == ["c.yaml:1", "c.yaml:3", "c.yaml:4", "c.yaml:5", *2 * ["command line"]]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--rollout.queue_size"], "--rollout.queue_size: needs a value"),
        (["--rollout.queue_size", "--run.steps", "4"], "--rollout.queue_size: needs a value"),
        (["queue_size"], "'queue_size' is no override"),
        (["--rollout.queue_size", "a: ["], "is not valid YAML"),
        (["--rollout.queue_size", '"99"'], "remove the quotes"),
        (["--steps", "4"], "--steps: unknown key; did you mean run.steps?"),
        (["--rollout.max_head_offpolicyness", "-1"], "must be at least 0, not -1"),
        (["--envs.1.id", "x"], "envs has 1 entry, numbered from 0"),
        (["--run.dir.x", "1"], "run.dir is 'runs/r' and has nothing below it"),
        (["--run", "{dir: a, dir: b}"], "--run.dir: is given twice"),
        (["--rolout.queue_size=9"], "--rolout: unknown key; did you mean rollout?"),
    ],
)
def test_overrides_are_refused_like_a_file(load: Any, words: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match="command line") as caught:
        load("run: {dir: runs/r}\n", *words)
    assert reason in str(caught.value)


def test_overrides_beat_the_file_and_the_last_one_counts(load: Any) -> None:
    config = load(
        AREAL_BLOCK,
        "--rollout.max_head_offpolicyness",
        "1",
        "--rollout.max_head_offpolicyness=2",
        "--actor.optimizer.lr=1e-4",
        "--actor.use_decoupled_loss",
        "false",
        "--actor.recompute_logprob=false",
        "--envs.0.args.size",
        "100",
        "--rollout.filters",
        "[truncated]",
    )
    assert config.rollout.max_head_offpolicyness == 2
    assert config.actor.optimizer.lr == 1e-4
    assert not config.actor.recompute_logprobs
    assert config.envs[0].id == "arithmetic" and config.envs[0].args == {"size": 100}
    assert config.rollout.filters == ("truncated",)


@pytest.mark.parametrize(
    ("text", "value"),
    {
        "1e-3": 1e-3,
        ".5": 0.5,
        "010": 10,
        "+3": 3,
        "1_000": 1000,
        "yes": True,
        "~": None,
        "12:30": "12:30",
        "2026-01-01": "2026-01-01",
        "0x10": "0x10",
        "<<": "<<",
    }.items(),
)
def test_scalars_mean_what_they_look_like(load: Any, text: str, value: Any) -> None:
    assert load(f"envs: [{{args: {{x: {text}}}}}]\n").envs[0].args == {"x": value}


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    huge = tmp_path / "huge"
    huge.write_bytes(b"#" * (1 << 21))
    cases = {
        tmp_path / "none.yaml": "there is no configuration file",
        tmp_path: "is a folder",
        binary: "is not a text file",
        huge: "that is no configuration file",
    }
    for path, reason in cases.items():
        with pytest.raises(ConfigError, match=reason) as caught:
            load_config(path)
        assert str(path) in str(caught.value)


# A text of lone surrogates cannot be written to a file at all.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | texts
    | st.sampled_from(["1e-3", "010", "yes", "null", "~", "<<", "=", "1_0", ".inf", "12:30", "#"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)  # parsing is slow on a busy machine
@given(
    args=st.dictionaries(texts, values, max_size=4),
    name=texts.filter(bool),
    lr=st.floats(min_value=1e-12, max_value=1.0),
    staleness=st.integers(0, 10**9),
    group_size=st.integers(1, 3),
    tokens=st.integers(1, 1023),
)
def test_what_is_written_loads_back_equal(
    tmp_path_factory: pytest.TempPathFactory,
    args: dict[str, Any],
    name: str,
    lr: float,
    staleness: int,
    group_size: int,
    tokens: int,
) -> None:
    config = Config.model_validate(
        {
            "run": {"dir": name},
            "rollout": {
                "max_head_offpolicyness": staleness,
                "group_size": group_size,
                "max_new_tokens": tokens,
            },
            "actor": {"advantage": "mean", "optimizer": {"lr": lr}},
            "envs": [{"args": args}, {"name": name + "2"}],
        }
    )
    path = tmp_path_factory.getbasetemp() / "written.yaml"
    text = dump_config(config)
    path.write_text(text, encoding="utf-8", newline="")
    assert load_config(path) == config
    assert dump_config(load_config(path)) == text


def test_the_configuration_page_is_current() -> None:
    page = Path(__file__).parent.parent / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == reference(), (
        "docs/configuration.md is out of date: run `make docs`"
    )
    undocumented = [line for line in reference().splitlines() if line.endswith("|  |")]
    assert not undocumented, "give these fields a docstring in config.py"
