"""The canary, on servers that do not mind a checkpoint without some of its tensors."""

import asyncio
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from servers import KIND, MODEL, Servers

from headway.config import UpdateMode
from headway.engines.canary import EngineCanary
from headway.engines.server_engine import ServerEngine
from headway.errors import EngineError
from headway.ports import PublishedWeights
from headway.trainer.canary import make_canary
from headway.weights.folder import WEIGHTS_FILE, publish

TENSORS = [
    pytest.param(
        "lm_head.weight",
        marks=pytest.mark.skipif(KIND != "vllm", reason="others take a tied head's embeddings"),
    ),
    "model.layers.1.mlp.down_proj.weight",
]


def next_weights(servers: Servers, directory: Path, *, lacks: str | None) -> PublishedWeights:
    """The next version with its canary, and then without one of its tensors."""
    servers.version += 1
    model = servers.by_version[servers.version]
    canary = make_canary(model, servers.version)
    weights = publish(directory, servers.version, model, source=MODEL, canary=canary)
    if lacks is not None:
        assert weights.path is not None
        file = weights.path / WEIGHTS_FILE
        tensors = load_file(file)
        del tensors[lacks]
        save_file(tensors, file, metadata={"format": "pt"})
    return weights


@pytest.mark.parametrize("lacks", TENSORS)
def test_a_tensor_that_a_server_kept_of_older_weights_is_found(
    servers: Servers, tmp_path: Path, lacks: str
) -> None:
    """The checkpoint's own check would have refused it: here it goes to the servers as it is."""

    async def problem(engine: ServerEngine, weights: PublishedWeights) -> str | None:
        try:
            await engine.update_weights(weights)
        except EngineError as error:
            assert KIND == "local"  # it refuses what is incomplete
            return str(error)
        return await EngineCanary().check(engine, weights)

    async def scenario() -> None:
        engines = [
            await servers.client(index, UpdateMode.KEEP, clear_cache=True)
            for index in range(len(servers.fleet.urls))
        ]
        found = []
        for one in (None, lacks, None):
            weights = next_weights(servers, tmp_path, lacks=one)
            found.append(await asyncio.gather(*(problem(engine, weights) for engine in engines)))
        print(f"{KIND} without {lacks}: {found[1][0]}")
        assert [[one is not None for one in two] for two in found] == [
            [is_damaged] * len(engines) for is_damaged in (False, True, False)
        ]
        for engine in engines:
            await engine.aclose()

    servers.run(scenario())
