"""The embedded engine as a real process, driven through the real client."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.config import EngineConfig, UpdateMode
from headway.core.rollout import Completion, FinishReason
from headway.core.versions import VersionRuns
from headway.engines.launch import Fleet, start_engines
from headway.engines.vllm import VllmEngine
from headway.errors import EngineError
from headway.ports import GenerateRequest, PublishedWeights
from headway.weights.folder import publish
from recompute import (
    MAX_POSITIONS,
    TOLERANCE,
    VOCABULARY,
    Recompute,
    largest_error,
    random_model,
    recompute_carried,
    recompute_plain,
    save,
    shift_stamps,
)

T = TypeVar("T")
DEADLINE_SECONDS = 60.0
LONG = 300

torch.set_num_threads(1)


@dataclass
class Bench:
    """One engine process for the whole module, two sets of weights, and how to use them."""

    runner: asyncio.Runner
    engines: Fleet
    url: str
    folder: Path
    weights: tuple[Path, Path]
    models: tuple[Any, Any]
    version: int = 0
    num_requests: int = 0

    def run(self, scenario: Coroutine[Any, Any, T]) -> T:
        async def with_deadline() -> T:
            async with asyncio.timeout(DEADLINE_SECONDS):
                return await scenario

        return self.runner.run(with_deadline())

    @property
    def by_version(self) -> Mapping[int, Any]:
        """Even versions are the first model, odd ones the second."""
        return {version: self.models[version % 2] for version in range(self.version + 1)}

    def client(self, mode: UpdateMode = UpdateMode.KEEP, **options: Any) -> VllmEngine:
        return VllmEngine(name="engine-0", url=self.url, update_mode=mode, **options)

    async def update(self, engine: VllmEngine) -> None:
        """The next version, which is always the other model."""
        self.version += 1
        path = self.weights[self.version % 2]
        await engine.update_weights(PublishedWeights(version=self.version, path=path))

    def request(self, max_tokens: int = LONG, **options: Any) -> GenerateRequest:
        self.num_requests += 1
        rng = np.random.default_rng(self.num_requests)
        prompt = rng.integers(0, VOCABULARY, 5 + self.num_requests % 7).tolist()
        return GenerateRequest(
            request_id=f"r{self.num_requests:06d}",
            token_ids=options.pop("token_ids", prompt),
            max_tokens=max_tokens,
            **options,
        )

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + path, json=body) as response,
        ):
            return response.status, await response.json()

    async def get(self, path: str) -> str:
        async with (
            aiohttp.ClientSession() as session,
            session.get(self.url + path) as response,
        ):
            assert response.status == 200
            return await response.text()

    async def metric(self, name: str) -> float:
        for line in (await self.get("/metrics")).splitlines():
            if line.startswith(name + "{"):
                return float(line.split()[-1])
        raise AssertionError(f"no metric {name}")

    async def after_tokens(self, count: int) -> None:
        """Until the engine has sampled this many more tokens."""
        start = await self.metric("vllm:generation_tokens_total")

        async def sampled() -> bool:
            return await self.metric("vllm:generation_tokens_total") >= start + count

        await until(sampled)

    async def idle(self) -> bool:
        return (
            await self.metric("vllm:num_requests_running")
            + await self.metric("vllm:num_requests_waiting")
        ) == 0


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await condition():  # noqa: ASYNC110 - another process sets no event
            await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("engine")
    models = (random_model(1), random_model(2))
    # The first as transformers saves it (no output head in the file), the second as published.
    first = save(models[0], folder / "first")
    second = publish(folder / "published", 1, models[1], source=first).path
    assert second is not None
    config = EngineConfig(max_model_len=MAX_POSITIONS, num_blocks=512)
    with asyncio.Runner() as runner:
        engines = runner.run(
            start_engines(
                config, model_dir=first, logs_dir=folder, start_seconds=60, version=0, seed=3
            )
        )
        try:
            (process,) = engines.processes
            # The port is in the log: the system chose it.
            port = process.log_path.read_text().rpartition(":")[2].split()[0]
            url = f"http://127.0.0.1:{port}"
            yield Bench(runner, engines, url, folder, (first, second), models)
        finally:
            runner.run(engines.stop(10))


async def with_updates(
    bench: Bench, engine: VllmEngine, *, num_requests: int = 6, num_updates: int = 3
) -> list[tuple[GenerateRequest, Completion]]:
    """Long completions during which the weights change several times."""
    requests = [bench.request() for _ in range(num_requests)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(request)) for request in requests]
        for _ in range(num_updates):
            await bench.after_tokens(num_requests * LONG // (num_updates + 2))
            await bench.update(engine)
    await engine.aclose()
    return [(request, task.result()) for request, task in zip(requests, tasks, strict=True)]


def assert_exact(
    bench: Bench, rollouts: list[tuple[GenerateRequest, Completion]], recompute: Recompute
) -> None:
    """Every stamp is right, and the same check notices stamps that are one token off."""
    for request, completion in rollouts:
        arguments = (recompute, bench.by_version, request.token_ids, completion)
        assert len(completion.token_ids) == request.max_tokens
        assert completion.finish_reason is FinishReason.LENGTH
        assert len(completion.version_runs.runs) >= 2
        assert largest_error(*arguments) < TOLERANCE
        for by in (-1, 1):
            shifted = shift_stamps(completion.version_runs, by)
            assert largest_error(*arguments, shifted) > 10 * TOLERANCE


def test_stamps_are_exact_when_keys_and_values_are_recomputed(bench: Bench) -> None:
    rollouts = bench.run(with_updates(bench, bench.client(UpdateMode.KEEP)))
    assert_exact(bench, rollouts, recompute_plain)


def test_stamps_are_exact_when_keys_and_values_are_kept(bench: Bench) -> None:
    engine = bench.client(UpdateMode.KEEP, clear_cache=False)
    rollouts = bench.run(with_updates(bench, engine))
    assert_exact(bench, rollouts, recompute_carried)
    # They were truly kept: no version's plain pass gives these tokens.
    request, completion = rollouts[0]
    error = largest_error(recompute_plain, bench.by_version, request.token_ids, completion)
    assert error > 10 * TOLERANCE


def test_stamps_are_exact_when_requests_are_interrupted(bench: Bench) -> None:
    rollouts = bench.run(with_updates(bench, bench.client(UpdateMode.INTERRUPT)))
    assert_exact(bench, rollouts, recompute_plain)


def test_finish_lets_running_requests_end_and_holds_new_ones(bench: Bench) -> None:
    async def scenario() -> tuple[list[tuple[GenerateRequest, Completion]], int]:
        engine = bench.client(UpdateMode.FINISH)
        before = bench.version
        running = [bench.request() for _ in range(4)]
        late = bench.request(max_tokens=20)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.generate(request)) for request in running]
            await bench.after_tokens(100)
            update = group.create_task(bench.update(engine))

            async def is_paused() -> bool:
                return "true" in await bench.get("/is_paused")

            await until(is_paused)
            tasks.append(group.create_task(engine.generate(late)))
            await update
        await engine.aclose()
        pairs = zip([*running, late], tasks, strict=True)
        return [(request, task.result()) for request, task in pairs], before

    rollouts, before = bench.run(scenario())
    for request, completion in rollouts[:-1]:
        assert completion.version_runs == VersionRuns(((before, request.max_tokens),))
    assert rollouts[-1][1].version_runs == VersionRuns(((before + 1, 20),))
    for request, completion in rollouts:
        error = largest_error(recompute_plain, bench.by_version, request.token_ids, completion)
        assert error < TOLERANCE


def test_a_request_that_arrives_during_a_pause_waits_and_bears_the_new_version(
    bench: Bench,
) -> None:
    async def scenario() -> tuple[GenerateRequest, Completion]:
        engine = bench.client()
        assert (await bench.post("/pause?mode=keep"))[0] == 200
        request = bench.request(max_tokens=30)
        task = asyncio.create_task(engine.generate(request))

        async def is_held() -> bool:
            return await bench.metric("vllm:num_requests_waiting") == 1

        await until(is_held)
        await bench.update(engine)  # pausing twice is pausing once; it resumes
        completion = await task
        await engine.aclose()
        return request, completion

    request, completion = bench.run(scenario())
    assert completion.version_runs == VersionRuns(((bench.version, 30),))
    error = largest_error(recompute_plain, bench.by_version, request.token_ids, completion)
    assert error < TOLERANCE


def test_temperature_is_per_request_and_logprobs_are_after_it(bench: Bench) -> None:
    async def scenario() -> list[tuple[GenerateRequest, Completion]]:
        engine = bench.client()
        requests = [
            bench.request(max_tokens=100, temperature=temperature, token_ids=[1, 2, 3])
            for temperature in (0.0, 0.3, 1.0, 3.0)
            for _ in range(4)
        ]
        completions = await asyncio.gather(*(engine.generate(request) for request in requests))
        await engine.aclose()
        return list(zip(requests, completions, strict=True))

    rollouts = bench.run(scenario())
    model = bench.by_version[bench.version]
    raw_means = []
    for request, completion in rollouts:
        tokens = torch.tensor([[*request.token_ids, *completion.token_ids.tolist()]])
        logits = model(tokens).logits[0, len(request.token_ids) - 1 : -1]
        chosen = torch.tensor(completion.token_ids, dtype=torch.int64).unsqueeze(-1)
        # Greedy requests report the model's own log-probabilities, the others those at their
        # temperature: of the distribution that was sampled from.
        scale = request.temperature or 1.0
        expected = torch.log_softmax(logits / scale, -1).gather(-1, chosen).squeeze(-1)
        assert np.abs(expected.numpy() - completion.logprobs).max() < TOLERANCE
        raw = torch.log_softmax(logits, -1).gather(-1, chosen)
        raw_means.append(float(raw.mean()))
        if request.temperature == 0:
            assert logits.argmax(-1).tolist() == completion.token_ids.tolist()
    by_temperature = np.array(raw_means).reshape(4, 4).mean(axis=1)
    assert (np.diff(by_temperature) < -0.1).all()
    assert len({tuple(completion.token_ids) for _, completion in rollouts}) == 13


def test_sampling_follows_the_distribution(bench: Bench) -> None:
    async def scenario() -> list[Completion]:
        engine = bench.client()
        requests = [bench.request(max_tokens=1, token_ids=[4, 5, 6]) for _ in range(1500)]
        completions = await asyncio.gather(*(engine.generate(request) for request in requests))
        await engine.aclose()
        return completions

    completions = bench.run(scenario())
    logits = bench.by_version[bench.version](torch.tensor([[4, 5, 6]])).logits[0, -1]
    expected = torch.softmax(logits, -1).numpy()
    counts = np.bincount([int(c.token_ids[0]) for c in completions], minlength=VOCABULARY)
    # Total variation of 1,500 draws from 48 outcomes is about 0.06; a wrong sampler's is far more.
    assert np.abs(counts / len(completions) - expected).sum() / 2 < 0.12


def test_stop_tokens_end_a_completion_and_belong_to_it(bench: Bench) -> None:
    async def scenario() -> list[Completion]:
        engine = bench.client()
        stop = tuple(range(0, VOCABULARY, 4))
        requests = [bench.request(max_tokens=200, stop_token_ids=stop) for _ in range(8)]
        completions = await asyncio.gather(*(engine.generate(request) for request in requests))
        await engine.aclose()
        return completions

    for completion in bench.run(scenario()):
        assert completion.finish_reason is FinishReason.STOP
        is_stop = completion.token_ids % 4 == 0
        assert is_stop[-1] and not is_stop[:-1].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [1, VOCABULARY]}, "token id 48 is outside the vocabulary of 48"),
        ({"token_ids": [-1]}, "token id -1 is outside"),
        ({"token_ids": []}, "token_ids is empty"),
        ({"token_ids": [1] * 1000}, r"prompt \(1000 tokens\) plus max_tokens \(30\) is longer"),
        ({"model": "other"}, "'other' is not served, 'policy' is"),
        ({"stream": True}, "stream is not implemented"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens 0"),
        ({"sampling_params": {"temperature": -1}}, "temperature -1"),
        ({"sampling_params": {"logprobs": 5}}, "logprobs must be 0"),
        ({"sampling_params": {"top_p": 0.5}}, "unknown field `top_p`"),
        ({"token_ids": "text"}, "Expected `array`"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(
    bench: Bench, change: dict[str, Any], message: str
) -> None:
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 30}, **change}
    status, answer = bench.run(bench.post("/inference/v1/generate", body))
    assert status == (404 if "model" in change else 400)
    assert re.search(message, answer["error"]["message"])


def test_other_bad_calls_are_refused_with_the_reason(bench: Bench) -> None:
    async def scenario() -> None:
        for path, body, message in (
            ("/pause?mode=later", None, "mode 'later' is none of"),
            ("/pause?mode=keep&clear_cache=1", None, "clear_cache must be true or false"),
            ("/collective_rpc", {"method": "x", "kwargs": {"weights_path": ""}}, "only reload"),
            ("/collective_rpc", {"method": "reload_weights"}, "missing required field `kwargs`"),
            ("/update_weight_version", {"new_version": 7}, "Expected `str`"),
            ("/weight_checker", {"action": "compare"}, "only checksum"),
        ):
            status, answer = await bench.post(path, body)
            assert status == 400 and message in answer["error"]["message"]
        assert (await bench.post("/nowhere"))[0] == 404
        assert "false" in await bench.get("/is_paused")

    bench.run(scenario())


def damage(bench: Bench, kind: str) -> Path:
    """A copy of the second checkpoint with one thing wrong."""
    folder = bench.folder / f"damaged-{kind}"
    if kind == "absent":
        return folder
    folder.mkdir()
    source = bench.weights[1]
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    file = folder / "model.safetensors"
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    match kind:
        case "empty":
            return folder
        case "missing":
            del tensors[name]
        case "unknown":
            tensors["model.extra.weight"] = torch.zeros(2)
        case "shape":
            tensors[name] = tensors[name][:-1].clone()
        case "nan":
            tensors[name][0, 0] = float("nan")
        case "untied":
            tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    save_file(tensors, file, metadata={"format": "pt"})
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    return folder


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("absent", "is not a folder"),
        ("empty", r"holds no \*\.safetensors"),
        ("truncated", "cannot be read"),
        ("missing", "missing tensors: model.layers.1.mlp.up_proj.weight"),
        ("unknown", "the model does not have: model.extra.weight"),
        ("shape", r"up_proj.weight has shape \(127, 64\), the model wants \(128, 64\)"),
        ("nan", "up_proj.weight holds values that are not finite"),
        ("untied", "lm_head.weight differs from model.embed_tokens.weight"),
    ],
)
def test_bad_weights_are_refused_and_the_old_ones_stay(
    bench: Bench, kind: str, message: str
) -> None:
    async def scenario() -> None:
        engine = bench.client()
        check = {"action": "checksum"}
        before = await bench.post("/weight_checker", check)
        request = bench.request()
        running = asyncio.create_task(engine.generate(request))
        await bench.after_tokens(20)
        bad = PublishedWeights(version=bench.version + 1, path=damage(bench, kind))
        with pytest.raises(EngineError, match=f"engine-0.*500.*{message}.*old weights stay"):
            await engine.update_weights(bad)
        assert await bench.post("/weight_checker", check) == before
        completion = await running  # it was resumed, and its stamps are still true
        assert completion.version_runs == VersionRuns(((bench.version, request.max_tokens),))
        error = largest_error(recompute_plain, bench.by_version, request.token_ids, completion)
        assert error < TOLERANCE
        await engine.aclose()

    bench.run(scenario())


def test_checksums_tell_the_weights_apart_and_name_both_ends_of_a_tie(bench: Bench) -> None:
    async def scenario() -> list[dict[str, str]]:
        engine = bench.client()
        sums = []
        for _ in range(3):
            sums.append((await bench.post("/weight_checker", {"action": "checksum"}))[1])
            await bench.update(engine)
        await engine.aclose()
        return [answer["checksums"] for answer in sums]

    first, second, third = bench.run(scenario())
    assert first == third and first.keys() == second.keys()
    assert first["lm_head.weight"] == first["model.embed_tokens.weight"]
    assert first["lm_head.weight"] != second["lm_head.weight"]


def test_a_cancelled_request_is_freed(bench: Bench) -> None:
    async def scenario() -> None:
        engine = bench.client()
        tasks = [asyncio.create_task(engine.generate(bench.request(900))) for _ in range(5)]
        await bench.after_tokens(50)
        assert await bench.metric("vllm:num_requests_running") == 5
        for task in tasks:
            task.cancel()
        await until(bench.idle)
        # One that a pause holds back is forgotten too.
        await bench.post("/pause?mode=keep")
        held = asyncio.create_task(engine.generate(bench.request(900)))

        async def is_held() -> bool:
            return not await bench.idle()

        await until(is_held)
        held.cancel()
        await until(bench.idle)
        await bench.post("/resume")
        await engine.aclose()

    bench.run(scenario())


def test_requests_are_aborted_by_their_exact_name(bench: Bench) -> None:
    async def generate(name: str) -> Any:
        body = {
            "request_id": name,
            "token_ids": [1],
            "sampling_params": {"max_tokens": 400, "logprobs": 0},
        }
        return (await bench.post("/inference/v1/generate", body))[1]["choices"][0]

    async def scenario() -> None:
        names = ("ab-1", "ab-10", "ab-2")
        first, tenth, second = (asyncio.create_task(generate(name)) for name in names)
        await bench.after_tokens(30)
        assert (await bench.post("/abort_requests", {"request_ids": ["ab-1", "no"]}))[1] == {
            "num_aborted": 1
        }
        choice = await first
        num_tokens = len(choice["token_ids"])
        assert choice["finish_reason"] == "abort" and 0 < num_tokens < 400
        assert len(choice["logprobs"]["content"]) == num_tokens
        assert choice["weight_versions"] == [
            {"version": str(bench.version), "start": 0, "end": num_tokens}
        ]
        assert not tenth.done() and not second.done()
        assert (await bench.post("/abort_requests"))[1] == {"num_aborted": 2}
        for task in (tenth, second):
            assert (await task)["finish_reason"] == "abort"

    bench.run(scenario())


def test_an_abort_by_a_stranger_is_an_error_not_a_short_rollout(bench: Bench) -> None:
    async def scenario() -> None:
        for mode in UpdateMode:
            engine = bench.client(mode)
            task = asyncio.create_task(engine.generate(bench.request()))
            await bench.after_tokens(10)
            await bench.post("/abort_requests")
            with pytest.raises(EngineError, match="somebody else aborts"):
                await task
            await engine.aclose()

    bench.run(scenario())


def test_a_resume_ends_a_pause_that_waits(bench: Bench) -> None:
    async def scenario() -> None:
        engine = bench.client()
        request = asyncio.create_task(engine.generate(bench.request(600)))
        await bench.after_tokens(10)
        pause = asyncio.create_task(bench.post("/pause?mode=wait"))

        async def is_paused() -> bool:
            return "true" in await bench.get("/is_paused")

        await until(is_paused)
        await bench.post("/resume")
        status, answer = await pause
        assert status == 409 and "resumed" in answer["error"]["message"]
        assert len((await request).token_ids) == 600
        await engine.aclose()

    bench.run(scenario())


def test_statistics_come_from_the_server(bench: Bench) -> None:
    async def scenario() -> None:
        engine = bench.client()
        await engine.statistics()
        tasks = [asyncio.create_task(engine.generate(bench.request())) for _ in range(3)]
        await bench.after_tokens(100)
        statistics = (await engine.statistics())["engine-0"]
        assert statistics.num_running + statistics.num_waiting > 0
        assert statistics.tokens_per_second > 0
        await asyncio.gather(*tasks)
        await engine.aclose()

    bench.run(scenario())


def start(bench: Bench, name: str, **options: Any) -> Fleet:
    return bench.run(
        start_engines(
            EngineConfig(**options),
            model_dir=bench.weights[0],
            logs_dir=bench.folder / name,
            start_seconds=60,
        )
    )


def test_a_killed_engine_is_reported_by_name_and_fails_its_requests(bench: Bench) -> None:
    engines = start(bench, "killed")

    async def scenario() -> None:
        (process,) = engines.processes
        watch = asyncio.create_task(process.watch())
        request = asyncio.create_task(engines.pool.generate(bench.request(900)))

        async def is_running() -> bool:
            return (await engines.pool.statistics())["engine-0"].num_running > 0

        await until(is_running)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"engine-0 \(pid \d+\) was killed by SIGKILL"):
            await watch
        with pytest.raises(EngineError, match="engine-0"):
            await request
        with pytest.raises(EngineError, match="engine-0"):
            await engines.pool.generate(bench.request())
        with pytest.raises(EngineError, match="engine-0"):
            await engines.pool.update_weights(PublishedWeights(version=1, path=bench.weights[1]))
        await engines.stop(1)

    bench.run(scenario())


def test_sigterm_ends_it_although_requests_run_and_wait(bench: Bench) -> None:
    engines = start(bench, "stopped", count=1)

    async def scenario() -> None:
        (process,) = engines.processes
        tasks = [asyncio.create_task(engines.pool.generate(bench.request(900))) for _ in range(3)]

        async def is_running() -> bool:
            return (await engines.pool.statistics())["engine-0"].num_running == 3

        await until(is_running)
        process.expect_exit()
        os.kill(process.pid, signal.SIGTERM)
        await process.watch()  # raises if the code is not 0
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            # Cut off, or whole if it fitted into the moment that closing takes: never a part.
            if not isinstance(result, EngineError):
                assert isinstance(result, Completion) and len(result.token_ids) == 900
        await engines.stop(1)

    bench.run(scenario())


def test_what_cannot_start_says_why_and_exits_with_2(bench: Bench, tmp_path: Path) -> None:
    def attempt(*options: str) -> str:
        command = [sys.executable, "-m", "headway.engines.local", *options]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr
        return result.stderr

    model = str(bench.weights[0])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"port {port} of 127.0.0.1 cannot be used" in attempt(
            "--model", model, "--port", port
        )
    assert "has no config.json" in attempt("--model", str(tmp_path / "absent"), "--port", "0")
    (tmp_path / "config.json").write_text("{}")
    assert "cannot be loaded" in attempt("--model", str(tmp_path), "--port", "0")
    assert "raise the former or lower the latter" in attempt(
        "--model", model, "--port", "0", "--num-blocks", "4"
    )
