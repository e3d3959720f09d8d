"""The canary, on servers that do not mind a checkpoint without some of its tensors."""

import asyncio
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from servers import KIND, MODEL, Servers

from headway.config import UpdateMode
from headway.engines.canary import EngineCanary
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

    async def problems(weights: PublishedWeights) -> list[str | None]:
        async def problem(index: int) -> str | None:
            engine = await servers.client(index, UpdateMode.KEEP, clear_cache=True)
            try:
                await engine.update_weights(weights)
                return await EngineCanary().check(engine, weights)
            except EngineError as error:  # the embedded engine refuses what is incomplete
                assert KIND == "local"
                return str(error)
            finally:
                await engine.aclose()

        return await asyncio.gather(*map(problem, range(len(servers.fleet.urls))))

    async def scenario() -> None:
        assert not any(await problems(next_weights(servers, tmp_path, lacks=None)))
        found = await problems(next_weights(servers, tmp_path, lacks=lacks))
        assert all(found), found
        print(f"{KIND} without {lacks}: {found[0]}")
        assert not any(await problems(next_weights(servers, tmp_path, lacks=None)))

    servers.run(scenario())
