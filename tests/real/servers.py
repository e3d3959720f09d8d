"""Two real servers, started as `headway run` starts them, and weights to swap on them."""

import asyncio
import os
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from transformers import Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from headway.builtin_model import ensure_model
from headway.config import EngineConfig, ModelConfig, UpdateMode
from headway.engines.contract import Contract
from headway.engines.launch import Fleet, start_engines
from headway.engines.server_engine import ServerEngine
from headway.engines.sglang import SglangEngine
from headway.engines.vllm import VllmEngine
from headway.ports import PublishedWeights
from headway.weights.folder import publish

transformers_logging.disable_progress_bar()

T = TypeVar("T")

ROOT = Path(__file__).parent.parent.parent
MODEL = ensure_model(
    ModelConfig(cache_dir=str(ROOT / ".cache" / "headway")), seed=0, progress=print
)
KIND = os.environ.get("HEADWAY_REAL_KIND", "local")
MAX_MODEL_LEN = 1024
START_SECONDS = 300.0
DEADLINE_SECONDS = 120.0


def engine_settings(count: int = 2) -> dict[str, Any]:
    """Section `engine` of a run on servers of this kind, on the CPU."""
    settings: dict[str, Any] = {
        "kind": KIND,
        "count": count,
        "device": "cpu",
        "max_model_len": MAX_MODEL_LEN,
    }
    python = os.environ.get("HEADWAY_REAL_PYTHON")
    if KIND == "vllm":
        settings |= {"python": str(ROOT / str(python)), "args": ["--max-num-seqs", "64"]}
    if KIND == "sglang":
        launcher = ROOT / "tests" / "sglang_cpu" / "server.py"
        settings |= {
            "command": [str(ROOT / str(python)), str(launcher)],
            "args": ["--max-total-tokens", "32768", "--mem-fraction-static", "0.3"],
        }
    return settings


def random_weights(seed: int) -> Any:
    """A model of the servers' shape that says anything, and the end of a sequence rarely."""
    model = Qwen3ForCausalLM.from_pretrained(MODEL).float().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.12)
        elif "norm" in name:
            parameter.fill_(1.0)
    model.model.embed_tokens.weight[model.config.eos_token_id] = 0.0
    return model


@dataclass(slots=True)
class Servers:
    """The servers, clients for them, and two models: odd versions are the first, even the second.

    What the servers serve outlives a client, so versions only ever rise.
    """

    runner: asyncio.Runner
    fleet: Fleet
    models: tuple[Any, Any]
    paths: tuple[Path, Path]
    version: int = 0
    num_requests: int = 0

    @classmethod
    @contextmanager
    def running(cls, folder: Path) -> Iterator[Self]:
        """Start them, and end them whatever happens."""
        models = (random_weights(1), random_weights(2))
        paths = []
        for number, model in enumerate(models):
            path = publish(folder / f"weights-{number}", 1, model, source=MODEL).path
            assert path is not None
            paths.append(path)
        with asyncio.Runner() as runner:
            fleet = runner.run(
                start_engines(
                    EngineConfig(**engine_settings()),
                    model_dir=MODEL,
                    logs_dir=folder / "logs",
                    start_seconds=START_SECONDS,
                    seed=3,
                )
            )
            try:
                yield cls(runner, fleet, models, (paths[0], paths[1]))
            finally:
                runner.run(fleet.stop(30))

    def run(self, scenario: Coroutine[Any, Any, T]) -> T:
        """To its end, within a deadline."""

        async def with_deadline() -> T:
            async with asyncio.timeout(DEADLINE_SECONDS):
                return await scenario

        return self.runner.run(with_deadline())

    @property
    def by_version(self) -> Mapping[int, Any]:
        """The models of all versions that were ever served, but 0."""
        return {number: self.models[1 - number % 2] for number in range(1, self.version + 1)}

    async def client(self, index: int, mode: UpdateMode, *, clear_cache: bool) -> ServerEngine:
        """A client of one server, connected to what it serves."""
        client = (SglangEngine if KIND == "sglang" else VllmEngine)(
            name=f"engine-{index}",
            url=self.fleet.urls[index],
            update_mode=mode,
            clear_cache=clear_cache,
            contract=Contract.of_folder(MODEL),
        )
        await client.connect(None)
        return client

    def next_weights(self) -> PublishedWeights:
        """The next version, which is always the other model."""
        self.version += 1
        return PublishedWeights(version=self.version, path=self.paths[1 - self.version % 2])
