"""Local engines as processes: their command lines, their start, and the pool over them."""

import asyncio
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.config import EngineConfig
from headway.engines.pool import EnginePool
from headway.engines.vllm import VllmEngine
from headway.errors import EngineError
from headway.processes import ManagedProcess

MODEL_NAME = "policy"


def engine_command(
    config: EngineConfig, *, model_dir: Path, port: int, version: int = 0, seed: int | None = None
) -> list[str]:
    """Command line of one local engine."""
    options: Mapping[str, object] = {
        "model": model_dir.resolve(),
        "host": config.host,
        "port": port,
        "served-model-name": MODEL_NAME,
        "dtype": config.dtype,
        "device": config.device,
        "num-threads": config.num_threads,
        "num-blocks": config.num_blocks,
        "page-size": config.page_size,
        "max-batch-tokens": config.max_batch_tokens,
        "max-model-len": config.max_model_len,
        "weight-version": version,
        "logprobs-mode": "processed_logprobs",  # of what was sampled from, as the trainer does
    }
    command = [sys.executable, "-m", "headway.engines.local"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    return command if seed is None else [*command, "--seed", str(seed)]


def choose_ports(host: str, first: int, count: int) -> list[int]:
    """`first` and those after it; with `first` 0, free ones, each asked of the system.

    Raises EngineError when the host is none of this machine's, or the ports end before 65536.
    """
    if first:
        if first + count - 1 > 65_535:
            raise EngineError(f"engine.port {first} leaves no room for {count} engines")
        return list(range(first, first + count))
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):  # all held at once, so that none is given twice
            listener = socket.socket()
            sockets.append(listener)
            listener.bind((host, 0))
        return [int(listener.getsockname()[1]) for listener in sockets]
    except OSError as error:
        raise EngineError(f"engine.host {host!r} cannot be bound: {error}") from error
    finally:
        for listener in sockets:
            listener.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngines:
    """Running engine processes and the pool that talks to them.

    Whoever started them runs `process.watch()` of each in its task group, and calls `stop`.
    """

    pool: EnginePool
    processes: tuple[ManagedProcess, ...]

    async def stop(self, window_seconds: float) -> None:
        """Close connections and end all processes at the same time, killing after the window."""
        try:
            await self.pool.aclose()
        finally:
            await _stop(self.processes, window_seconds)


async def start_local_engines(
    config: EngineConfig,
    *,
    model_dir: Path,
    logs_dir: Path,
    start_seconds: float,
    version: int = 0,
    seed: int | None = None,
    clear_cache: bool = True,
) -> LocalEngines:
    """Start `config.count` engines on the weights in `model_dir`, and wait until all are ready.

    `seed` of the first engine's sampling, the next ones count up. `clear_cache` as in
    `VllmEngine`: off, an update in mode keep costs no recomputation. Logs go to
    `logs_dir/engine-0.log` and so on. Raises EngineError with the log's last lines when one dies
    or is late; then none is left running.
    """
    processes: list[ManagedProcess] = []
    engines: list[VllmEngine] = []
    for index, port in enumerate(choose_ports(config.host, config.port, config.count)):
        name = f"engine-{index}"
        engine_seed = None if seed is None else seed + index
        processes.append(
            ManagedProcess(
                name=name,
                command=engine_command(
                    config, model_dir=model_dir, port=port, version=version, seed=engine_seed
                ),
                log_path=logs_dir / f"{name}.log",
            )
        )
        engines.append(
            VllmEngine(
                name=name,
                url=f"http://{config.host}:{port}",
                model=MODEL_NAME,
                update_mode=config.update_mode,
                clear_cache=clear_cache,
            )
        )
    pool = EnginePool(engines, update_seconds=config.update_seconds, version=version)
    try:
        for process in processes:
            await process.start()
        async with asyncio.TaskGroup() as group:
            for process, engine in zip(processes, engines, strict=True):
                group.create_task(process.wait_ready(engine.is_ready, start_seconds))
    except BaseException as error:  # an interrupt, too, must leave no engine behind; re-raised
        await pool.aclose()
        await _stop(processes, window_seconds=2.0)
        if isinstance(error, ExceptionGroup):
            raise error.exceptions[0] from None
        raise
    return LocalEngines(pool=pool, processes=tuple(processes))


async def _stop(
    processes: tuple[ManagedProcess, ...] | list[ManagedProcess], window_seconds: float
) -> None:
    async with asyncio.TaskGroup() as group:
        for process in processes:
            group.create_task(process.stop(window_seconds))
