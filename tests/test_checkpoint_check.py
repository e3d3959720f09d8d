"""Checkpoints that no engine may be told of, the contract, and the canary beside the weights."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from headway.engines.checkpoint_check import CheckpointChecker
from headway.engines.contract import Contract
from headway.engines.tensors import is_finite, read_tensors
from headway.errors import WeightsError
from headway.ports import PublishedWeights
from headway.trainer.canary import make_canary
from headway.weights.canary import LENGTHS, NUM_TOP, Canary, read_canary
from headway.weights.folder import MANIFEST, WEIGHTS_FILE, publish
from recompute import VOCABULARY, random_model, save

Tensors = dict[str, Any]
NORM = "model.norm.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(1), tmp_path_factory.mktemp("model"))


@pytest.fixture
def version(model_dir: Path, tmp_path: Path) -> PublishedWeights:
    model = random_model(2)
    canary = make_canary(model, 1)
    return publish(tmp_path / "weights", 1, model, source=model_dir, canary=canary)


def check(checker: CheckpointChecker, weights: PublishedWeights) -> None:
    asyncio.run(checker.check(weights))


def rewrite(weights: PublishedWeights, change: Callable[[Tensors], None]) -> None:
    """Change tensors as a trainer would that publishes without a manifest."""
    assert weights.path is not None
    (weights.path / MANIFEST).unlink(missing_ok=True)
    tensors = load_file(weights.path / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, weights.path / WEIGHTS_FILE)


def test_a_sound_version_passes_and_a_second_one_too(
    model_dir: Path, version: PublishedWeights, tmp_path: Path
) -> None:
    checker = CheckpointChecker(model_dir)
    check(checker, version)
    check(checker, publish(tmp_path / "weights", 2, random_model(3), source=model_dir))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), f"missing tensors: {NORM}"),
        (lambda tensors: tensors.update(stray=torch.ones(1)), "does not have: stray"),
        (
            lambda tensors: tensors.update({NORM: torch.ones(63)}),
            rf"tensor {NORM} has shape \(63,\), in the initial model \(64,\)",
        ),
        (
            lambda tensors: tensors[GATE].index_put_((torch.tensor(3),), torch.tensor(torch.nan)),
            f"tensor {GATE} holds values that are not finite",
        ),
        (
            lambda tensors: tensors.update({GATE: (tensors[GATE] * 1e39).bfloat16()}),
            f"tensor {GATE} holds values that are not finite",
        ),
    ],
    ids=["missing", "unknown", "shape", "nan", "infinite bfloat16"],
)
def test_a_version_that_engines_would_choke_on_is_refused_by_name(
    change: Callable[[Tensors], None], message: str, model_dir: Path, version: PublishedWeights
) -> None:
    rewrite(version, change)
    with pytest.raises(
        WeightsError, match=f"version 1 in .* no engine was told of it: .*{message}"
    ):
        check(CheckpointChecker(model_dir), version)


def test_damage_is_seen_and_shapes_only_does_not_read_the_bytes(
    model_dir: Path, version: PublishedWeights
) -> None:
    assert version.path is not None
    file = version.path / WEIGHTS_FILE
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(WeightsError, match="does not have the checksum"):
        check(CheckpointChecker(model_dir), version)
    check(CheckpointChecker(model_dir, level="shapes"), version)
    file.write_bytes(content[: len(content) // 2])
    (version.path / MANIFEST).unlink()
    with pytest.raises(WeightsError, match="it was cut off"):
        check(CheckpointChecker(model_dir, level="shapes"), version)


def test_what_changes_between_versions_is_refused(
    model_dir: Path, version: PublishedWeights, tmp_path: Path
) -> None:
    checker = CheckpointChecker(model_dir, level="shapes")
    check(checker, version)
    second = publish(tmp_path / "weights", 2, random_model(3), source=model_dir)
    rewrite(second, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(WeightsError, match=r"missing tensors, version 1 had them: lm_head\.weight"):
        check(checker, second)
    third = publish(tmp_path / "weights", 3, random_model(3).bfloat16(), source=model_dir)
    with pytest.raises(WeightsError, match="is BF16, in version 1 F32"):
        check(checker, third)
    check(checker, publish(tmp_path / "weights", 4, random_model(3), source=model_dir))


def test_another_tokenizer_or_architecture_breaks_the_contract(
    model_dir: Path, version: PublishedWeights, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(model_dir, source)
    (source / "tokenizer.json").write_text("{}")
    contract = Contract.of_folder(source, dtype="float32", engine="vllm 1")
    assert contract.model == "qwen3 Qwen3ForCausalLM"
    assert contract.vocabulary_size == VOCABULARY and contract.weight_format == "safetensors"
    assert contract.differences(contract) == []
    assert contract.id == Contract.of_folder(source, dtype="bfloat16").id
    # What one side does not know is not compared; a head written out changes nothing.
    assert version.path is not None
    assert contract.differences(Contract.of_folder(version.path)) == []

    other = publish(tmp_path / "weights", 2, random_model(2), source=source)
    assert other.path is not None
    (other.path / MANIFEST).unlink()
    (other.path / "tokenizer.json").write_text('{"other": 1}')
    with pytest.raises(WeightsError, match=r"contract \w+ against \w+ .*: tokenizer: \w+ against"):
        check(CheckpointChecker(source), other)
    config = json.loads((other.path / "config.json").read_text())
    config["vocab_size"] = 50
    (other.path / "config.json").write_text(json.dumps(config))
    differences = contract.differences(Contract.of_folder(other.path, dtype="bfloat16"))
    assert [one.split(":")[0] for one in differences] == ["vocabulary_size", "tokenizer", "dtype"]


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=200))
def test_a_damaged_file_is_a_weights_error_whatever_is_in_it(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(WeightsError):
        read_tensors(folder)


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    position=st.integers(0, 99),
    value=st.sampled_from([0.0, -1.5, float("nan"), float("inf"), float("-inf")]),
)
def test_finite_is_what_torch_says(
    dtype: torch.dtype, position: int, value: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("finite")
    tensor = torch.linspace(-3, 3, 100).to(dtype)
    tensor[position] = value
    save_file({"a": torch.ones(3).to(dtype), "b": tensor}, folder / "model.safetensors")
    tensors = read_tensors(folder)
    assert is_finite(tensors["a"])
    assert is_finite(tensors["b"]) == bool(torch.isfinite(tensor).all())


def test_a_canary_is_what_a_forward_pass_of_each_prompt_gives(version: PublishedWeights) -> None:
    assert version.path is not None
    canary = read_canary(version.path)
    assert canary is not None and canary.version == 1
    assert sorted({len(probe.token_ids) for probe in canary.probes}) == [*LENGTHS]
    model = random_model(2)
    for probe in canary.probes:
        with torch.no_grad():
            logits = model(torch.tensor([probe.token_ids])).logits[0, -1]
        logprobs = torch.log_softmax(logits, -1)
        assert len(probe.top) == NUM_TOP
        assert max(probe.top, key=probe.top.__getitem__) == int(logprobs.argmax())
        for token, logprob in probe.top.items():
            assert logprob == pytest.approx(float(logprobs[token]), abs=1e-4)
    assert Canary.from_json(json.loads(canary.to_json())) == canary
    assert read_canary(version.path.parent) is None
    (version.path / "canary.json").write_text("{}")
    with pytest.raises(WeightsError, match="cannot be used"):
        read_canary(version.path)
