"""The engines of a run: started here, or running already, with the pool over them."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config import EngineConfig
from headway.engines.canary import EngineCanary
from headway.engines.checkpoint_check import CheckpointChecker
from headway.engines.contract import HEAD, Contract
from headway.engines.launch.command import check_installed, engine_command, engine_environment
from headway.engines.launch.ports import choose_ports
from headway.engines.pool import EnginePool
from headway.engines.server_engine import ServerEngine
from headway.engines.sglang import SglangEngine
from headway.engines.tensors import read_tensors
from headway.engines.vllm import VllmEngine
from headway.errors import EngineError
from headway.processes import ManagedProcess

OnEvent = Callable[[str, str], None]
"""Takes level (`info`, `warning`, `error`) and text."""

_KILL_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One engine; `process` is None when somebody else runs it."""

    client: ServerEngine
    url: str
    process: ManagedProcess | None


class Fleet:
    """All engines of a run.

    Whoever holds it runs `watch()` and `pool.run()` in a task group, and calls `stop` at the end.

    Args:
        members: with or without processes.
        pool: over their clients.
        restarts: how often each process is started again.
        start_seconds: deadline for a process that was started again to become ready.
        on_event: is told of deaths and restarts.
    """

    def __init__(
        self,
        members: Iterable[Member],
        pool: EnginePool,
        *,
        restarts: int,
        start_seconds: float,
        on_event: OnEvent,
    ) -> None:
        self._members = tuple(members)
        self._pool = pool
        self._restarts = restarts
        self._start_seconds = start_seconds
        self._on_event = on_event

    @property
    def pool(self) -> EnginePool:
        """All of them as one engine."""
        return self._pool

    @property
    def names(self) -> list[str]:
        """Of all engines."""
        return [member.client.name for member in self._members]

    @property
    def urls(self) -> list[str]:
        """Where they answer."""
        return [member.url for member in self._members]

    @property
    def processes(self) -> tuple[ManagedProcess, ...]:
        """Those that are this run's own."""
        return tuple(one.process for one in self._members if one.process is not None)

    async def start(self) -> None:
        """Start the processes, wait until all servers are ready, and connect the pool.

        Raises EngineError, with the log's last lines when one died or is late; then none of the
        processes is left.
        """
        try:
            for process in self.processes:
                await process.start()
            await _together(self._ready(member) for member in self._members)
            await self._pool.connect()
        except BaseException:  # an interrupt, too, must leave no engine behind; re-raised
            await self.stop(_KILL_SECONDS)
            raise

    async def watch(self) -> None:
        """Start engine processes again when they die, for as long as others live; the pool takes
        them back by itself once they serve the current weights.

        There is no deadline: they live as long as the run. Raises EngineError when the last one
        dies. Without processes it waits for ever, which is the pool's to watch then.
        """
        if not self.processes:
            await asyncio.Event().wait()  # no deadline: cancelled at the end of the run
        await _together(
            self._keep_alive(member.client, member.process)
            for member in self._members
            if member.process is not None
        )

    async def stop(self, window_seconds: float) -> None:
        """Close connections and end all processes at the same time, killing after the window."""
        try:
            await self._pool.aclose()
        finally:
            async with asyncio.TaskGroup() as group:
                for process in self.processes:
                    group.create_task(process.stop(window_seconds))

    async def _ready(self, member: Member) -> None:
        if member.process is None:
            await member.client.wait_ready(self._start_seconds)
        else:
            await member.process.wait_ready(member.client.is_ready, self._start_seconds)

    async def _keep_alive(self, client: ServerEngine, process: ManagedProcess) -> None:
        for num_restarts in range(self._restarts + 1):
            try:
                if num_restarts:
                    await process.start()
                    await process.wait_ready(client.is_ready, self._start_seconds)
                await process.watch()
            except EngineError as error:
                await process.stop(0)  # one that is late is as good as dead
                # At once, by name: it could be back, with old weights, before a health check.
                self._pool.eject(client.name, str(error))
                if all(other.returncode is not None for other in self.processes):
                    raise
                if num_restarts < self._restarts:
                    number = f"{num_restarts + 1} of {self._restarts}"
                    cause = str(error).partition(". ")[0]  # without the end of its log
                    self._on_event(
                        "warning", f"engine {client.name} is started again ({number}): {cause}"
                    )
            else:
                return  # it was stopped
        self._on_event("error", f"engine {client.name} stays down: it was started often enough")


async def start_engines(
    config: EngineConfig,
    *,
    model_dir: Path,
    logs_dir: Path,
    start_seconds: float,
    version: int = 0,
    seed: int | None = None,
    temperature: float = 1.0,
    on_event: OnEvent | None = None,
) -> Fleet:
    """Start `config.count` engines, or connect to those at `config.urls`; return when all serve.

    Args:
        config: section `engine`.
        model_dir: the weights that they start with, and what their contract is read from. Those
            that run already load them unless their label is `version` (or absent, at version 0).
        logs_dir: gets `engine-0.log` and so on.
        start_seconds: deadline for all to be ready.
        version: what they start with.
        seed: of the first engine's sampling, the next ones count up.
        temperature: that rollouts are sampled at; some engines can only be trained from at 1.
        on_event: told of what happens to engines while the run goes on.

    Raises EngineError; then no process is left running.
    """
    say = on_event or _silent
    if not config.urls:
        check_installed(config)
    contract = await asyncio.to_thread(Contract.of_folder, model_dir)
    start = await asyncio.to_thread(_start_of_others, config, model_dir)
    members = []
    for index, (url, port) in enumerate(_addresses(config)):
        name = f"engine-{index}"
        process = None
        if port is not None:
            process = ManagedProcess(
                name=name,
                command=engine_command(
                    config,
                    model_dir=model_dir,
                    port=port,
                    version=version,
                    seed=None if seed is None else seed + index,
                ),
                env=engine_environment(config, index),
                log_path=logs_dir / f"{name}.log",
                has_children=config.kind != "local",
            )
        client = (SglangEngine if config.kind == "sglang" else VllmEngine)(
            name=name,
            url=url,
            model=config.model_name,
            update_mode=config.update_mode,
            clear_cache=config.clear_cache,
            version=version,
            contract=contract,
            start=start,
        )
        members.append(Member(client=client, url=url, process=process))
    pool = _pool(
        config,
        members,
        model_dir=model_dir,
        version=version,
        temperature=temperature,
        on_event=say,
    )
    fleet = Fleet(
        members, pool, restarts=config.restarts, start_seconds=start_seconds, on_event=say
    )
    await fleet.start()
    _tell_dtypes(config, members, say)
    return fleet


def _addresses(config: EngineConfig) -> list[tuple[str, int | None]]:
    """`(url, port)` of each engine; no port for those that run already."""
    if config.urls:
        return [(url, None) for url in config.urls]
    ports = choose_ports(config.host, config.port, config.count)
    host = f"[{config.host}]" if ":" in config.host else config.host
    return [(f"http://{host}:{port}", port) for port in ports]


def _start_of_others(config: EngineConfig, model_dir: Path) -> Path | None:
    """What servers that run already can be told to load; None: there are none, or it would not be
    these weights: vLLM keeps the output head that it has when the folder of a tied model lacks one.
    """
    if not config.urls:
        return None
    if config.kind != "vllm" or not any(model_dir.glob("*.safetensors")):
        return model_dir
    return model_dir if HEAD in read_tensors(model_dir) else None


def _tell_dtypes(config: EngineConfig, members: Iterable[Member], say: OnEvent) -> None:
    """Say which servers that somebody else started compute in something else than was asked for."""
    for member in members:
        found = member.client.capabilities
        dtype = found.contract.dtype if found is not None else ""
        if member.process is None and dtype not in ("", config.dtype):
            say(
                "warning",
                f"engine {member.client.name} computes in {dtype}, but engine.dtype is "
                f"{config.dtype}: start it with --dtype {config.dtype}, or set engine.dtype",
            )


def _pool(
    config: EngineConfig,
    members: Iterable[Member],
    *,
    model_dir: Path,
    version: int,
    temperature: float,
    on_event: OnEvent,
) -> EnginePool:
    checker = canary = None
    if config.check_weights != "off":
        checker = CheckpointChecker(model_dir, level=config.check_weights)
    if config.canary != "off":
        canary = EngineCanary(action=config.canary, tolerance=config.canary_tolerance)
    return EnginePool(
        [member.client for member in members],
        update_seconds=config.update_seconds,
        version=version,
        max_retries=config.max_retries,
        health_seconds=config.health_seconds,
        health_deadline_seconds=config.health_deadline_seconds,
        live_seconds=config.live_seconds,
        slow_start_seconds=config.slow_start_seconds,
        checker=checker,
        canary=canary,
        against=lambda found: found.against_training(config.update_mode, temperature=temperature),
        on_event=on_event,
    )


async def _together(parts: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All at once; the first failure ends the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(part)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _silent(level: str, text: str) -> None:
    """Says nothing."""
