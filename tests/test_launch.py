"""Command lines of every kind of engine, and fleets of real processes that die and come back."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headway.config import EngineConfig
from headway.engines.launch import Fleet, engine_command, engine_environment, start_engines
from headway.engines.launch.command import check_installed
from headway.errors import EngineError
from headway.ports import GenerateRequest, PublishedWeights
from headway.weights.folder import publish
from recompute import MAX_POSITIONS, TOLERANCE, largest_error, random_model, recompute_plain, save

torch.set_num_threads(1)


def options(command: list[str]) -> dict[str, str]:
    """Flags and their values; a flag alone has none. The last of a flag wins."""
    found: dict[str, str] = {}
    for position, word in enumerate(command):
        if word.startswith("--"):
            following = command[position + 1 : position + 2]
            found[word] = following[0] if following and not following[0].startswith("--") else ""
    return found


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_is_not_installed_is_told_before_anything_waits(kind: str) -> None:
    with pytest.raises(EngineError, match=rf"{kind} is not installed .* set engine.python"):
        check_installed(EngineConfig.model_validate({"kind": kind}))
    for other in ({"python": "/opt/server/bin/python"}, {"command": ["server"]}):
        check_installed(EngineConfig.model_validate({"kind": kind, **other}))
    check_installed(EngineConfig())


@pytest.mark.parametrize("kind", ["local", "vllm", "sglang"])
def test_the_last_word_is_the_users(kind: str, tmp_path: Path) -> None:
    config = EngineConfig.model_validate(
        {
            "kind": kind,
            "command": ["wrapper", "server"],
            "args": ["--host", "::1", "--extra"],
            "env": {"HF_HUB_OFFLINE": "0", "MINE": "1"},
        }
    )
    command = engine_command(config, model_dir=tmp_path, port=1234)
    assert command[:2] == ["wrapper", "server"]
    found = options(command)
    assert found["--host"] == "::1" and found["--port"] == "1234" and found["--extra"] == ""
    environment = engine_environment(config, 0)
    assert environment["HF_HUB_OFFLINE"] == "0" and environment["MINE"] == "1"


def test_vllm_is_started_with_what_training_needs(tmp_path: Path) -> None:
    config = EngineConfig(kind="vllm", python="/opt/vllm/bin/python", device="cpu", num_threads=3)
    command = engine_command(config, model_dir=tmp_path, port=8000, seed=5)
    assert command[:3] == ["/opt/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    found = options(command)
    assert found["--model"] == str(tmp_path) and found["--served-model-name"] == "policy"
    assert found["--logprobs-mode"] == "processed_logprobs"
    assert found["--enable-scale-out"] == found["--enforce-eager"] == ""
    assert found["--seed"] == "5" and "--tensor-parallel-size" not in found
    environment = engine_environment(config, 1)
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in environment


def test_sglang_is_started_with_what_training_needs(tmp_path: Path) -> None:
    config = EngineConfig(kind="sglang", device="cpu")
    command = engine_command(config, model_dir=tmp_path, port=8000, version=4)
    assert command[:3] == [sys.executable, "-m", "sglang.launch_server"]
    found = options(command)
    assert found["--weight-version"] == "4" and found["--enable-metrics"] == ""
    assert found["--device"] == "cpu" and found["--attention-backend"] == "torch_native"
    on_gpu = options(
        engine_command(
            EngineConfig(kind="sglang", device="cuda", gpus_per_engine=2),
            model_dir=tmp_path,
            port=8000,
        )
    )
    assert on_gpu["--tp-size"] == "2" and "--attention-backend" not in on_gpu


def test_every_engine_has_gpus_of_its_own() -> None:
    config = EngineConfig(kind="vllm", gpus_per_engine=2)
    devices = [engine_environment(config, index)["CUDA_VISIBLE_DEVICES"] for index in range(3)]
    assert devices == ["0,1", "2,3", "4,5"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"urls": ["10.0.0.5:8000"]}, "urls"),
        ({"urls": ["http://a:1", "http://a:1"]}, "given twice"),
        ({"gpus_per_engine": 1, "device": "cpu"}, "gpus_per_engine"),
        ({"gpus_per_engine": 2}, "one GPU"),
    ],
)
def test_what_cannot_be_started_is_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EngineConfig.model_validate(settings)


def test_settings_without_effect_are_told() -> None:
    told = [*EngineConfig(urls=("http://a:1",), count=2, kind="vllm", num_blocks=9).warnings]
    assert len(told) == 2 and "engine.count" in told[0] and "engine.num_blocks" in told[1]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Two versions of a model: that to start with, and a published one."""
    folder = tmp_path_factory.mktemp("weights")
    first = save(random_model(1), folder / "first")
    second = publish(folder / "published", 1, random_model(2), source=first).path
    assert second is not None
    yield first, second


async def start(folder: Path, model: Path, events: list[str], **settings: object) -> Fleet:
    config = EngineConfig.model_validate(
        {
            "max_model_len": MAX_POSITIONS,
            "health_seconds": 0.2,
            "slow_start_seconds": 0,
            "canary": "off",
            **settings,
        }
    )
    return await start_engines(
        config,
        model_dir=model,
        logs_dir=folder,
        start_seconds=60,
        seed=1,
        on_event=lambda level, text: events.append(f"{level}: {text}"),
    )


def request(number: int) -> GenerateRequest:
    return GenerateRequest(request_id=f"r{number:06d}", token_ids=[3, number % 48], max_tokens=30)


async def until_told(events: list[str], *words: str) -> None:
    async with asyncio.timeout(60):
        while not any(all(word in event for word in words) for event in events):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def test_an_engine_that_dies_is_started_again_and_serves_only_the_newest_weights(
    tmp_path: Path, weights: tuple[Path, Path]
) -> None:
    events: list[str] = []
    models = {0: random_model(1), 1: random_model(2)}

    async def scenario() -> None:
        fleet = await start(tmp_path, weights[0], events, count=2, restarts=1)
        first, second = fleet.processes
        tasks = [asyncio.create_task(fleet.watch()), asyncio.create_task(fleet.pool.run())]
        try:
            await fleet.pool.update_weights(PublishedWeights(version=1, path=weights[1]))
            killed = first.pid
            running = [asyncio.create_task(fleet.pool.generate(request(i))) for i in range(20)]
            os.kill(killed, signal.SIGKILL)
            await until_told(events, "engine-0 ejected", "SIGKILL")
            await until_told(events, "engine-0 is started again (1 of 1)")
            assert fleet.pool.live == ("engine-1",)
            await until_told(events, "engine-0 is back", "version 1")
            assert first.pid != killed
            running += [asyncio.create_task(fleet.pool.generate(request(i))) for i in range(20)]
            for number, task in enumerate(running):
                completion = await task
                assert completion.version_runs.runs[0][0] == 1
                prompt = request(number % 20).token_ids
                assert largest_error(recompute_plain, models, prompt, completion) < TOLERANCE

            os.kill(first.pid, signal.SIGKILL)  # it has no restart left
            await until_told(events, "engine-0 stays down")
            await fleet.pool.generate(request(50))
            assert not tasks[0].done()
            os.kill(second.pid, signal.SIGKILL)  # the last one: nothing to go on with
            with pytest.raises(EngineError, match=r"engine-1 \(pid \d+\) was killed by SIGKILL"):
                async with asyncio.timeout(20):
                    await tasks[0]
        finally:
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await fleet.stop(2)

    asyncio.run(scenario())


def test_servers_that_run_already_are_used_and_left_alone(
    tmp_path: Path, weights: tuple[Path, Path]
) -> None:
    async def scenario() -> None:
        owner = await start(tmp_path / "owner", weights[0], [], count=1)
        try:
            guest = await start(tmp_path / "guest", weights[0], [], urls=owner.urls)
            assert guest.processes == () and guest.urls == owner.urls
            assert (await guest.pool.generate(request(1))).version_runs.runs == ((0, 30),)
            await guest.stop(1)
            assert owner.processes[0].returncode is None
        finally:
            await owner.stop(2)

    asyncio.run(scenario())


def test_one_that_cannot_start_takes_the_others_with_it(
    tmp_path: Path, weights: tuple[Path, Path]
) -> None:
    async def scenario() -> None:
        command = [sys.executable, "-c", "raise SystemExit('out of luck')"]
        with pytest.raises(EngineError, match=r"exit code 1[\s\S]*out of luck"):
            await start(tmp_path, weights[0], [], count=2, kind="sglang", command=command)

    asyncio.run(scenario())
