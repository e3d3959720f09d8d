"""The vLLM client, call by call, against a server that misbehaves on purpose."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from headway.config import EngineConfig, UpdateMode
from headway.core.rollout import FinishReason
from headway.core.versions import VersionRuns
from headway.engines.launch import choose_ports, engine_command
from headway.engines.vllm import VllmEngine
from headway.errors import EngineError, TransportError
from headway.ports import GenerateRequest, PublishedWeights

Answer = Callable[[dict[str, Any]], Awaitable[web.StreamResponse]]
WEIGHTS = PublishedWeights(version=4, path=Path("weights/v000004"))


def request(max_tokens: int = 4, **options: Any) -> GenerateRequest:
    return GenerateRequest(request_id="r-1", token_ids=[7, 8], max_tokens=max_tokens, **options)


def choice(
    tokens: list[int], *, version: str = "3", finish_reason: str = "length", **changes: Any
) -> dict[str, Any]:
    """A correct answer, with `changes`."""
    content = [{"token_id": t, "logprob": -0.5 * t, "rank": 1} for t in tokens]
    spans = [{"version": version, "start": 0, "end": len(tokens)}] if tokens else []
    return {
        "index": 0,
        "token_ids": tokens,
        "finish_reason": finish_reason,
        "logprobs": {"content": content},
        "weight_versions": spans,
        **changes,
    }


def reply(answer: dict[str, Any]) -> web.Response:
    return web.json_response({"choices": [answer]})


@dataclass
class Server:
    """Records calls; `generate` and the answers by path can be replaced."""

    calls: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    generate: Answer | None = None
    failing: dict[str, web.Response | None] = field(default_factory=dict)
    """By path: what it answers instead; None: it hangs."""
    metrics: str = ""

    async def handle(self, message: web.Request) -> web.StreamResponse:
        path = message.path_qs
        self.calls.append(path)
        if message.path in self.failing:
            answer = self.failing[message.path]
            if answer is None:
                await asyncio.sleep(600)
                raise AssertionError("unreachable")
            return answer
        if path == "/inference/v1/generate":
            body = await message.json()
            self.bodies.append(body)
            assert self.generate is not None
            return await self.generate(body)
        if path == "/metrics":
            return web.Response(text=self.metrics)
        return web.json_response({})


def with_server(
    scenario: Callable[[Server, VllmEngine], Coroutine[Any, Any, None]], **options: Any
) -> None:
    """Run against a real HTTP server in the same loop."""

    async def main() -> None:
        server = Server()
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", server.handle)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        engine = VllmEngine(name="left", url=site_url(runner), **options)
        try:
            async with asyncio.timeout(30):
                await scenario(server, engine)
        finally:
            await engine.aclose()
            await runner.cleanup()

    asyncio.run(main())


def site_url(runner: web.AppRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"http://{host}:{port}"


def always(answer: dict[str, Any]) -> Answer:
    async def generate(body: dict[str, Any]) -> web.StreamResponse:
        return reply(answer)

    return generate


def test_a_request_is_sent_and_its_answer_read() -> None:
    async def scenario(server: Server, engine: VllmEngine) -> None:
        spans = [
            {"version": "3", "start": 0, "end": 1},
            {"version": "4", "start": 1, "end": 3},
        ]
        server.generate = always(choice([5, 6, 1], finish_reason="stop", weight_versions=spans))
        completion = await engine.generate(request(temperature=0.5, stop_token_ids=(1, 2)))
        assert server.bodies == [
            {
                "model": "policy",
                "request_id": "r-1-0",
                "token_ids": [7, 8],
                "sampling_params": {
                    "max_tokens": 4,
                    "temperature": 0.5,
                    "logprobs": 0,
                    "stop_token_ids": [1, 2],
                },
            }
        ]
        assert completion.token_ids.tolist() == [5, 6, 1]
        assert completion.logprobs.tolist() == [-2.5, -3.0, -0.5]
        assert completion.version_runs == VersionRuns(((3, 1), (4, 2)))
        assert completion.finish_reason is FinishReason.STOP

    with_server(scenario)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"logprobs": None}, "0 log-probabilities do not belong to 2 tokens"),
        ({"logprobs": {"content": [{"token_id": 5, "logprob": -1}]}}, "1 log-probabilities"),
        (
            {"logprobs": {"content": [{"token_id": t, "logprob": -1} for t in (6, 5)]}},
            "do not belong",
        ),
        (
            {"logprobs": {"content": [{"token_id": t, "logprob": None} for t in (5, 6)]}},
            "2 of 2 log-probabilities not finite",
        ),
        ({"weight_versions": None}, "cover 0 of 2 tokens"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 1}]}, "cover 1 of 2"),
        ({"weight_versions": [{"version": "3", "start": 1, "end": 2}]}, "1:2 does not follow 0"),
        (
            {"weight_versions": [{"version": "3", "start": 0, "end": 9}]},
            "cover 9 of 2 tokens",
        ),
        (
            {"weight_versions": [{"version": "default", "start": 0, "end": 2}]},
            "'default' is not a number",
        ),
        ({"weight_versions": [{"version": 3, "start": 0, "end": 2}]}, "Expected `str`"),
        ({"finish_reason": "tired"}, "Invalid enum value 'tired'"),
        ({"token_ids": None}, "Expected `array`"),
    ],
)
def test_an_answer_that_cannot_be_data_is_an_error(answer: dict[str, Any], message: str) -> None:
    async def scenario(server: Server, engine: VllmEngine) -> None:
        server.generate = always(choice([5, 6], **answer))
        with pytest.raises(EngineError, match=f"engine left gave an unusable.*r-1: .*{message}"):
            await engine.generate(request())

    with_server(scenario)


def test_a_refusal_carries_the_servers_own_words() -> None:
    async def scenario(server: Server, engine: VllmEngine) -> None:
        for body, words in (
            ('{"error": {"message": "too long", "code": 400}}', "too long"),
            ('{"detail": "not enabled"}', "not enabled"),
            ("<html>Bad</html>", "<html>Bad</html>"),
        ):
            server.failing["/inference/v1/generate"] = web.Response(status=400, text=body)
            with pytest.raises(EngineError, match=f"engine left answered .* with 400: {words}"):
                await engine.generate(request())
        assert len(server.calls) == 3  # a refusal is an answer: no second try

    with_server(scenario)


def test_it_tries_again_only_before_the_first_byte() -> None:
    """Connections that break unanswered are tried three times; a broken answer is not."""

    async def main() -> None:
        num_connections = 0
        partial_answer = False

        async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_connections
            num_connections += 1
            await reader.readuntil(b"\r\n\r\n")
            if partial_answer:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
                await writer.drain()
            writer.close()

        server = await asyncio.start_server(break_off, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        engine = VllmEngine(name="left", url=f"http://127.0.0.1:{port}")
        async with server:
            with pytest.raises(TransportError, match=r"engine left at .* broke off /inference"):
                await engine.generate(request())
            assert num_connections == 3
            partial_answer = True
            with pytest.raises(TransportError, match="engine left"):
                await engine.generate(request())
            assert num_connections == 4
        with pytest.raises(TransportError, match=f"left at http://127.0.0.1:{port}"):
            await engine.generate(request())  # nobody listens any more
        with pytest.raises(
            EngineError, match=r"left at .* was not ready within 0\.2 s: .*broke off"
        ):
            await engine.wait_ready(0.2)
        await engine.aclose()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("mode", "pause", "reset"),
    [
        (UpdateMode.KEEP, "/pause?mode=keep&clear_cache=true", []),
        (UpdateMode.INTERRUPT, "/pause?mode=abort", ["/reset_prefix_cache"]),
        (UpdateMode.FINISH, "/pause?mode=wait", ["/reset_prefix_cache"]),
    ],
)
def test_an_update_labels_between_loading_and_resuming(
    mode: UpdateMode, pause: str, reset: list[str]
) -> None:
    async def scenario(server: Server, engine: VllmEngine) -> None:
        await engine.update_weights(WEIGHTS)
        load = ["/collective_rpc", "/update_weight_version"]
        assert server.calls == [pause, *load, *reset, "/resume"]

    with_server(scenario, update_mode=mode)


def test_an_interrupted_request_is_sent_again_with_what_it_had() -> None:
    async def scenario(server: Server, engine: VllmEngine) -> None:
        aborted = asyncio.Event()
        parts = [
            choice([], finish_reason="abort"),
            choice([5, 6], finish_reason="abort", version="4"),
            choice([1], finish_reason="stop", version="5"),
        ]

        async def generate(body: dict[str, Any]) -> web.StreamResponse:
            number = len(server.bodies) - 1
            if number < 2:
                await aborted.wait()
                aborted.clear()
            return reply(parts[number])

        server.generate = generate
        task = asyncio.create_task(engine.generate(request(max_tokens=10)))
        for number in range(2):
            await until(lambda: len(server.bodies) == number + 1)  # noqa: B023 - awaited here
            aborted.set()
            await engine.update_weights(PublishedWeights(version=4 + number, path=Path("weights")))
        completion = await task
        assert [body["token_ids"] for body in server.bodies] == [[7, 8], [7, 8], [7, 8, 5, 6]]
        budgets = [body["sampling_params"]["max_tokens"] for body in server.bodies]
        assert budgets == [10, 10, 8]
        assert len({body["request_id"] for body in server.bodies}) == 3
        assert completion.token_ids.tolist() == [5, 6, 1]
        assert completion.logprobs.tolist() == [-2.5, -3.0, -0.5]
        assert completion.version_runs == VersionRuns(((4, 2), (5, 1)))
        assert completion.finish_reason is FinishReason.STOP

    with_server(scenario, update_mode=UpdateMode.INTERRUPT)


def test_a_refused_load_resumes_and_goes_on_with_the_old_weights() -> None:
    async def scenario(server: Server, engine: VllmEngine) -> None:
        server.generate = always(choice([5, 6]))
        server.failing["/collective_rpc"] = web.Response(status=500, text="no such folder")
        with pytest.raises(EngineError, match="left answered /collective_rpc with 500: no such"):
            await engine.update_weights(WEIGHTS)
        assert server.calls[-2:] == ["/collective_rpc", "/resume"]
        assert (await engine.generate(request())).version_runs == VersionRuns(((3, 2),))

    with_server(scenario)


@pytest.mark.parametrize("path", ["/collective_rpc", "/update_weight_version"])
def test_after_an_update_that_broke_off_no_answer_is_trusted(path: str) -> None:
    async def scenario(server: Server, engine: VllmEngine) -> None:
        release = asyncio.Event()

        async def generate(body: dict[str, Any]) -> web.StreamResponse:
            await release.wait()
            return reply(choice([5, 6]))

        server.generate = generate
        running = asyncio.create_task(engine.generate(request()))
        await until(lambda: len(server.bodies) == 1)
        server.failing[path] = None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await engine.update_weights(WEIGHTS)
        assert server.calls[-1] == "/resume"
        release.set()
        with pytest.raises(EngineError, match="left is out of use: loading version 4 was cut off"):
            await running
        with pytest.raises(EngineError, match="out of use"):
            await engine.generate(request())

    with_server(scenario)


def test_statistics_are_summed_over_labels_and_tokens_become_a_rate() -> None:
    text = """# HELP vllm:num_requests_running x
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="a b"}} 3.0
vllm:num_requests_running{{engine="1",model_name="a b"}} 2.0
vllm:num_requests_waiting{{engine="0"}} 7
vllm:num_requests_waiting_by_reason{{engine="0"}} 100
vllm:generation_tokens_total {}
"""

    async def scenario(server: Server, engine: VllmEngine) -> None:
        server.metrics = text.format("1e2")
        first = (await engine.statistics())["left"]
        assert (first.num_running, first.num_waiting, first.tokens_per_second) == (5, 7, 0.0)
        server.metrics = text.format("1.5e2")
        assert (await engine.statistics())["left"].tokens_per_second > 0
        server.failing["/metrics"] = web.Response(status=404, text="off")
        with pytest.raises(EngineError, match="left answered /metrics with 404: off"):
            await engine.statistics()

    with_server(scenario)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the scenario's own deadline bounds it
        await asyncio.sleep(0.001)


def test_ports_are_free_distinct_or_refused() -> None:
    assert choose_ports("127.0.0.1", 9000, 3) == [9000, 9001, 9002]
    free = choose_ports("127.0.0.1", 0, 4)
    assert len(set(free)) == 4
    for port in free:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
    with pytest.raises(EngineError, match=r"engine\.port 65535 leaves no room for 2"):
        choose_ports("127.0.0.1", 65_535, 2)
    with pytest.raises(EngineError, match=r"engine\.host '203\.0\.113\.1' cannot be bound"):
        choose_ports("203.0.113.1", 0, 1)


def test_the_command_line_says_everything_that_is_configured(tmp_path: Path) -> None:
    config = EngineConfig(num_blocks=7, page_size=8, max_model_len=33)
    command = engine_command(config, model_dir=tmp_path, port=1234, version=5, seed=6)
    options = dict(zip(command[3::2], command[4::2], strict=True))
    assert options == {
        "--model": str(tmp_path),
        "--host": "127.0.0.1",
        "--port": "1234",
        "--served-model-name": "policy",
        "--logprobs-mode": "processed_logprobs",
        "--dtype": "float32",
        "--device": "auto",
        "--num-threads": "1",
        "--num-blocks": "7",
        "--page-size": "8",
        "--max-batch-tokens": "1024",
        "--max-model-len": "33",
        "--weight-version": "5",
        "--seed": "6",
    }
