"""The built-in model: built once, cached, safe when several build at once; folders are checked."""

import random
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.builtin_model import check_model_folder, ensure_model
from headway.config import ModelConfig
from headway.envs.characters import EOS_ID, VOCABULARY
from headway.errors import ConfigError, HeadwayError
from headway.trainer.warm_start import demonstration

STEPS = 2


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder shared by the tests of this module."""
    return tmp_path_factory.mktemp("cache")


def config(cache: Path, steps: int = STEPS) -> ModelConfig:
    """The built-in model after a very short warm start."""
    return ModelConfig(cache_dir=str(cache), warm_start_steps=steps)


@pytest.fixture(scope="module")
def folder(cache: Path) -> Path:
    """The built model."""
    return ensure_model(config(cache), seed=0)


def test_it_is_an_ordinary_model_folder(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_model_folder(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert model.config.vocab_size == len(tokenizer) == len(VOCABULARY)
    assert model.generation_config.eos_token_id == EOS_ID
    assert 3e5 < sum(p.numel() for p in model.parameters()) < 1e6


def test_a_second_use_builds_nothing(cache: Path, folder: Path) -> None:
    said: list[str] = []
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert ensure_model(config(cache), seed=0, progress=said.append) == folder
    assert said == []
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_several_at_once_build_once(cache: Path, folder: Path) -> None:
    from safetensors.numpy import load_file

    said: list[str] = []
    folders: list[Path] = []

    def build() -> None:
        folders.append(ensure_model(config(cache), seed=1, progress=said.append))

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 3 and len(set(folders)) == 1
    other = folders[0]
    check_model_folder(other)
    assert sum(line.startswith("building") for line in said) == 1
    assert any(re.search(r"step 2 of 2, loss \d", line) for line in said)
    assert [path for path in cache.iterdir() if path.suffix == ".tmp"] == []
    # The seed makes another model, under another name.
    assert other != folder
    first, second = (load_file(one / "model.safetensors") for one in (folder, other))
    assert any((first[name] != second[name]).any() for name in first)


def test_the_control_process_does_not_load_torch(cache: Path, folder: Path) -> None:
    code = (
        "import sys; from headway.builtin_model import ensure_model\n"
        "from headway.config import ModelConfig\n"
        "from headway.envs.text import load_tokenizer\n"
        f"model = ModelConfig(cache_dir={str(cache)!r}, warm_start_steps={STEPS})\n"
        "load_tokenizer(ensure_model(model, seed=0)).encode('1+1=')\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text("raise RuntimeError('broken on purpose')")
    cache = tmp_path / "cache"
    with pytest.raises(HeadwayError, match=r"status 1.*\n[\s\S]*broken on purpose"):
        ensure_model(config(cache), seed=0)
    assert [path.name for path in cache.iterdir() if path.suffix != ".lock"] == []


def test_folders_that_lack_something(tmp_path: Path) -> None:
    def said(path: Path) -> str:
        with pytest.raises(ConfigError, match=r"model\.path") as raised:
            ensure_model(ModelConfig(path=str(path)), seed=0)
        return str(raised.value)

    assert "does not exist" in said(tmp_path / "nothing")
    (tmp_path / "file").touch()
    assert "is a file" in said(tmp_path / "file")
    folder = tmp_path / "model"
    folder.mkdir()
    assert "lacks config.json and weights (*.safetensors) and a tokenizer" in said(folder)
    (folder / "config.json").touch()
    assert "lacks weights (*.safetensors) and a tokenizer" in said(folder)
    (folder / "model.safetensors").touch()
    assert "lacks a tokenizer (tokenizer.json)" in said(folder)
    (folder / "tokenizer.json").touch()
    assert ensure_model(ModelConfig(path=str(folder)), seed=0) == folder


def test_unknown_built_in_models_and_unusable_caches(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'builtin:arithmetic'"):
        ensure_model(ModelConfig(path="builtin:arithmetics"), seed=0)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"model\.cache_dir"):
        ensure_model(ModelConfig(cache_dir=str(tmp_path / "file")), seed=0)


TERMS = st.lists(st.integers(0, 9), min_size=2, max_size=5)


@given(terms=TERMS, signs=st.lists(st.sampled_from("+-"), min_size=5), seed=st.integers(0, 99))
def test_demonstrations(terms: list[int], signs: list[str], seed: int) -> None:
    pairs = zip(signs, terms[1:], strict=False)
    expression = str(terms[0]) + "".join(f"{sign}{term}" for sign, term in pairs)
    right = str(eval(expression))
    rng = random.Random(seed)
    assert demonstration(expression, rng, direct=1.0, slip=0.0) == right
    for slip in (0.0, 1.0):
        steps = demonstration(expression, rng, direct=0.0, slip=slip).split(",")
        assert len(steps) == len(terms) - 1
        carried = str(terms[0])
        for step, sign, term in zip(steps, signs, terms[1:], strict=False):
            work, _, result = step.partition("=")
            assert work == f"{carried}{sign}{term}"
            assert (int(result) == eval(work)) == (slip == 0.0)
            carried = result
    assert demonstration(expression, rng, direct=0.0, slip=0.0).endswith(f"={right}")
