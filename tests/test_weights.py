"""Publishing weights, and finding the newest sound version among whatever lies there."""

import asyncio
import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headway.errors import WeightsError
from headway.ports import PublishedWeights
from headway.sim.faults.clock import FaultLoop
from headway.sim.faults.disk import Disk
from headway.weights.folder import (
    COMPLETE,
    MANIFEST,
    WEIGHTS_FILE,
    FolderWeightChannel,
    publish,
    read_manifest,
    verify,
    version_name,
)
from tiny_policy import make_model, save_model

SMALL = {"a.weight": torch.arange(6.0).reshape(2, 3)}


def make_source(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "small", **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("old weights")
    return folder


def newest(directory: Path, version: int = 0) -> PublishedWeights | None:
    """What a watcher gets within a moment of virtual time, or None."""

    async def ask() -> PublishedWeights | None:
        try:
            async with asyncio.timeout(0.05):
                return await FolderWeightChannel(directory, 0.005).wait_newer(version)
        except TimeoutError:
            return None

    loop = FaultLoop(Disk((), lambda: 0.0, 0))
    try:
        return loop.run_until_complete(ask())
    finally:
        loop.close()


@pytest.mark.parametrize("tied", [True, False])
def test_published_folder_loads_as_the_same_model_with_an_explicit_head(
    tmp_path: Path, tied: bool
) -> None:
    source = save_model(tmp_path / "initial", tied=tied)
    model = make_model(seed=1, tied=tied)
    published = publish(tmp_path / "weights", 1, model, source=source, stats={"loss": 0.5})
    assert published.path == tmp_path / "weights" / "v000001"
    tensors = load_file(published.path / WEIGHTS_FILE)
    assert torch.equal(tensors["lm_head.weight"], model.lm_head.weight)
    loaded = AutoModelForCausalLM.from_pretrained(published.path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert published.stats["loss"] == 0.5
    assert published.stats["publish_seconds"] > 0
    verify(published.path)


def test_a_state_dict_without_the_tied_head_gets_one(tmp_path: Path) -> None:
    source = save_model(tmp_path / "initial")
    state = make_model().state_dict()
    del state["lm_head.weight"]
    path = publish(tmp_path / "w", 1, state, source=source).path
    assert path is not None
    tensors = load_file(path / WEIGHTS_FILE)
    assert torch.equal(tensors["lm_head.weight"], state["model.embed_tokens.weight"])
    with pytest.raises(WeightsError, match=r"lm_head\.weight"):
        publish(tmp_path / "w", 2, SMALL, source=source)
    assert [entry.name for entry in (tmp_path / "w").iterdir()] == ["v000001"]


def test_contract_names_what_fits(tmp_path: Path) -> None:
    source = make_source(tmp_path / "initial")

    def contract(version: int, tensors: dict[str, torch.Tensor]) -> str:
        path = publish(tmp_path / "w", version, tensors, source=source).path
        assert path is not None
        return read_manifest(path).contract

    first = contract(1, SMALL)
    assert contract(2, {"a.weight": torch.ones(2, 3)}) == first
    assert contract(3, {"a.weight": torch.ones(3, 2)}) != first
    assert contract(4, {"b.weight": torch.ones(2, 3)}) != first
    assert contract(5, {"a.weight": torch.ones(2, 3).half()}) != first
    with pytest.raises(WeightsError, match="contract"):
        publish(tmp_path / "w", 6, {"b": torch.ones(1)}, source=source, contract=first)
    assert not (tmp_path / "w" / version_name(6)).exists()


def test_publishing_copies_the_tokenizer_prunes_and_replaces(tmp_path: Path) -> None:
    source = make_source(tmp_path / "initial")
    directory = tmp_path / "w"
    for version in range(1, 6):
        publish(directory, version, SMALL, source=source, keep_last=3)
    (directory / ".v000009.1.tmp").mkdir()
    path = publish(directory, 4, {"a.weight": torch.ones(2, 3)}, source=source, keep_last=3).path
    assert path is not None
    assert sorted(os.listdir(directory)) == ["v000003", "v000004", "v000005"]
    assert torch.equal(load_file(path / WEIGHTS_FILE)["a.weight"], torch.ones(2, 3))
    assert sorted(os.listdir(path)) == [
        COMPLETE,
        "config.json",
        MANIFEST,
        WEIGHTS_FILE,
        "tokenizer.json",
    ]


def test_bad_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no config\.json"):
        publish(tmp_path / "w", 1, SMALL, source=tmp_path)
    source = make_source(tmp_path / "initial")
    with pytest.raises(WeightsError, match="at least 1"):
        publish(tmp_path / "w", 0, SMALL, source=source)
    (source / "config.json").write_text("{")
    with pytest.raises(WeightsError, match="cannot write the weights"):
        publish(tmp_path / "w", 1, SMALL, source=source)
    assert os.listdir(tmp_path / "w") == []


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no marker": lambda path: (path / COMPLETE).unlink(),
    "no manifest": lambda path: (path / MANIFEST).unlink(),
    "manifest is not JSON": lambda path: (path / MANIFEST).write_text('{"version": 1'),
    "manifest is a list": lambda path: (path / MANIFEST).write_text("[1]"),
    "manifest is of another version": lambda path: (path / MANIFEST).write_text(
        (path / MANIFEST).read_text().replace('"version": ', '"version": 1')
    ),
    "weights truncated": lambda path: os.truncate(path / WEIGHTS_FILE, 20),
    "weights missing": lambda path: (path / WEIGHTS_FILE).unlink(),
    "another name": lambda path: path.rename(path.with_name("v7")),
    "temporary name": lambda path: path.rename(path.with_name("." + path.name)),
    "a file": lambda path: (path.rename(path.with_name(".x")), path.write_text("?")),
}
"""What can be wrong with a version; each of them must be passed over."""


@settings(max_examples=40, deadline=None)
@given(
    damages=st.dictionaries(st.integers(1, 4), st.sampled_from(sorted(DAMAGE)), max_size=4),
    above=st.integers(0, 4),
)
def test_the_newest_sound_version_is_found_whatever_lies_there(
    damages: dict[int, str], above: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = make_source(Path(folder) / "initial")
        directory = Path(folder) / "w"
        for version in range(1, 5):
            publish(directory, version, SMALL, source=source)
        for version, kind in damages.items():
            if kind in ("another name", "a file") and list(damages.values()).count(kind) > 1:
                kind = "no marker"  # two of these would take the same name
            DAMAGE[kind](directory / version_name(version))
        (directory / "notes.txt").write_text("a stray file")
        (directory / "v000099").write_text("")
        (directory / "v000098").mkdir()
        sound = [v for v in range(1, 5) if v not in damages and v > above]
        found = newest(directory, above)
        assert (found.version if found else None) == max(sound, default=None)


def test_watching_starts_before_the_directory_and_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_source(tmp_path / "initial")
    directory = tmp_path / "w"

    async def watch() -> list[int]:
        channel = FolderWeightChannel(directory, 0.001)
        seen = []
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            for version in (1, 3):
                waiting = group.create_task(channel.wait_newer(version - 1))
                await asyncio.sleep(0.02)
                assert not waiting.done()
                await asyncio.to_thread(publish, directory, version, SMALL, source=source)
                seen.append((await waiting).version)
                (directory / "stray").mkdir(exist_ok=True)
        return seen

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(watch()) == [1, 3]
    assert sum("stray" in record.getMessage() for record in caplog.records) == 1


def test_readers_never_see_half_a_version(tmp_path: Path) -> None:
    """Publish in a thread as fast as it goes while polling: every version returned is sound."""
    source = make_source(tmp_path / "initial")
    directory = tmp_path / "w"

    async def race() -> None:
        channel = FolderWeightChannel(directory, 0.0001)
        stop = 30

        def work() -> None:
            for version in range(1, stop + 1):
                publish(directory, version, SMALL, source=source, keep_last=3)

        writer = asyncio.create_task(asyncio.to_thread(work))
        version = 0
        async with asyncio.timeout(60):
            while version < stop:
                found = await channel.wait_newer(version)
                assert found.version > version
                version = found.version
            await writer

    asyncio.run(race())


def test_a_path_that_is_no_directory_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_text("")
    with pytest.raises(WeightsError, match="cannot list"):
        newest(path)


def test_verify_finds_a_flipped_bit(tmp_path: Path) -> None:
    path = publish(tmp_path / "w", 1, SMALL, source=make_source(tmp_path / "initial")).path
    assert path is not None
    content = bytearray((path / WEIGHTS_FILE).read_bytes())
    content[-1] ^= 1
    (path / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(WeightsError, match="checksum"):
        verify(path)


def test_watching_needs_no_torch() -> None:
    """The orchestrator's side imports neither torch nor safetensors."""
    import subprocess
    import sys

    code = (
        "import sys, headway.weights.folder, headway.trainer.client, headway.trainer.link;"
        "print([m for m in ('torch', 'safetensors', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
