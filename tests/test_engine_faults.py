"""Faults on sockets, the same for all engines: each ends in a named outcome within its deadline,
none hangs, and none becomes data.

The engines are the fake vLLM and the fake SGLang (`fake_engines`) and the embedded engine as a real
process; `FaultProxy` in front of each does the breaking.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fake_engines import VOCABULARY, FakeEngine, FakeSglang, FakeVllm, Fault, FaultProxy, serving
from headway.config import EngineConfig, UpdateMode
from headway.engines.canary import EngineCanary
from headway.engines.contract import Contract
from headway.engines.launch import choose_ports, engine_command
from headway.engines.pool import EnginePool
from headway.engines.server_engine import ServerEngine
from headway.engines.sglang import SglangEngine
from headway.engines.vllm import VllmEngine
from headway.errors import EngineError, EngineRefusal, TransportError, UnusableAnswer, WrongVersion
from headway.ports import GenerateRequest, PublishedWeights
from headway.processes import ManagedProcess
from headway.trainer.canary import make_canary
from headway.weights.canary import CANARY
from headway.weights.folder import publish
from recompute import random_model, save

KINDS = ("vllm", "sglang", "local")
DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class Words:
    """What the same thing is called by each engine."""

    generate: str
    pause: str
    load: str
    client: type[ServerEngine]


VLLM = Words("/inference/v1/generate", "/pause", "/collective_rpc", VllmEngine)
SGLANG = Words("/generate", "/pause_generation", "/update_weights_from_disk", SglangEngine)


@dataclass
class Bench:
    """One engine behind a proxy."""

    kind: str
    words: Words
    proxy: FaultProxy
    url: str
    folders: list[Path]
    fake: FakeEngine | None
    version: int = 0
    num_requests: int = 0

    def client(self, **options: Any) -> ServerEngine:
        contract = Contract(vocabulary_size=VOCABULARY)
        return self.words.client(name="left", url=self.url, contract=contract, **options)

    def request(self, max_tokens: int = 8) -> GenerateRequest:
        self.num_requests += 1
        return GenerateRequest(
            request_id=f"t{self.num_requests:09d}-0000-00-0000",
            token_ids=[7, 8],
            max_tokens=max_tokens,
        )

    def next_weights(self) -> PublishedWeights:
        self.version += 1
        path = self.folders[self.version % len(self.folders)]
        return PublishedWeights(version=self.version, path=path)

    def answer(self, content: dict[str, Any]) -> dict[str, Any]:
        """The part of an answer that holds the spans."""
        part: dict[str, Any] = (
            content["meta_info"] if self.words is SGLANG else content["choices"][0]
        )
        return part

    def lose_a_logprob(self, content: dict[str, Any]) -> None:
        part = self.answer(content)
        (
            part["output_token_logprobs"] if self.words is SGLANG else part["logprobs"]["content"]
        ).pop()

    def spoil_a_logprob(self, content: dict[str, Any]) -> None:
        part = self.answer(content)
        if self.words is SGLANG:
            part["output_token_logprobs"][0][0] = None
        else:
            part["logprobs"]["content"][0]["logprob"] = None

    def age_the_label(self, content: dict[str, Any]) -> None:
        for span in self.answer(content)["weight_versions"]:
            span["version"] = "0"


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(1), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=KINDS)
def bench(
    request: pytest.FixtureRequest,
    loop: asyncio.Runner,
    model_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Bench]:
    folders = [
        publish(tmp_path_factory.mktemp("w"), 1, random_model(seed), source=model_dir).path
        for seed in (1, 2)
    ]
    stack = contextlib.AsyncExitStack()
    fake: FakeEngine | None = None

    async def start() -> str:
        nonlocal fake
        if request.param == "local":
            return await stack.enter_async_context(
                embedded(model_dir, tmp_path_factory.mktemp("logs"))
            )
        fake = FakeVllm() if request.param == "vllm" else FakeSglang()
        return await stack.enter_async_context(serving(fake.application()))

    target = loop.run(start())
    proxy = FaultProxy(target)
    url = loop.run(stack.enter_async_context(serving(proxy.application())))
    words = SGLANG if request.param == "sglang" else VLLM
    paths = [folder for folder in folders if folder is not None]
    try:
        yield Bench(request.param, words, proxy, url, paths, fake)
    finally:
        loop.run(stack.aclose())


@contextlib.asynccontextmanager
async def embedded(model_dir: Path, logs: Path) -> AsyncIterator[str]:
    config = EngineConfig(num_blocks=128, max_model_len=256)
    port = choose_ports(config.host, 0, 1)[0]
    process = ManagedProcess(
        name="left",
        command=engine_command(config, model_dir=model_dir, port=port),
        log_path=logs / "left.log",
    )
    client = VllmEngine(name="left", url=f"http://{config.host}:{port}")
    try:
        await process.start()
        await process.wait_ready(client.is_ready, DEADLINE_SECONDS)
        yield f"http://{config.host}:{port}"
    finally:
        await client.aclose()
        await process.stop(2.0)


Scenario = Callable[[ServerEngine], Coroutine[Any, Any, None]]


def run(loop: asyncio.Runner, bench: Bench, scenario: Scenario, **options: Any) -> None:
    """Against a connected client at a known version, all faults cleared."""

    async def main() -> None:
        bench.proxy.clear()
        engine = bench.client(**options)
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                await engine.connect(None)
                await engine.update_weights(bench.next_weights())
                bench.proxy.calls.clear()
                await scenario(engine)
        finally:
            await engine.aclose()

    loop.run(main())


def test_a_healthy_engine_answers_through_the_proxy(loop: asyncio.Runner, bench: Bench) -> None:
    async def scenario(engine: ServerEngine) -> None:
        completion = await engine.generate(bench.request())
        assert completion.version_runs.runs == ((bench.version, 8),)
        statistics = await engine.statistics()
        assert statistics["left"].version == bench.version
        assert engine.pause_seconds > 0
        assert await engine.is_healthy()

    run(loop, bench, scenario)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (Fault(kind="reset"), TransportError, "broke off"),
        (Fault(kind="cut"), TransportError, "broke off"),
        (Fault(kind="status", status=500), EngineRefusal, "with 500: injected"),
        (Fault(kind="status", status=429), EngineRefusal, "with 429"),
        (Fault(kind="status", status=503), EngineRefusal, "with 503"),
        (Fault(kind="garbage"), UnusableAnswer, "unusable answer to request t"),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else None,
)
def test_a_broken_answer_is_a_named_error(
    loop: asyncio.Runner, bench: Bench, fault: Fault, error: type[EngineError], message: str
) -> None:
    async def scenario(engine: ServerEngine) -> None:
        bench.proxy.always[bench.words.generate] = fault
        with pytest.raises(error, match=f"engine left .*{message}"):
            await engine.generate(bench.request())
        # Asked again only where nothing was answered.
        assert len(bench.proxy.calls) == (3 if fault.kind == "reset" else 1)
        bench.proxy.clear()
        assert len((await engine.generate(bench.request())).token_ids) == 8

    run(loop, bench, scenario)


def test_an_answer_that_contradicts_itself_is_no_data(loop: asyncio.Runner, bench: Bench) -> None:
    async def scenario(engine: ServerEngine) -> None:
        script = bench.proxy.script[bench.words.generate]
        script.append(Fault(kind="change", change=bench.lose_a_logprob))
        with pytest.raises(UnusableAnswer, match="7 log-probabilities do not belong to 8 tokens"):
            await engine.generate(bench.request())
        script.append(Fault(kind="change", change=bench.spoil_a_logprob))
        with pytest.raises(UnusableAnswer, match="1 of 8 log-probabilities not finite"):
            await engine.generate(bench.request())
        script.append(Fault(kind="change", change=bench.age_the_label))
        with pytest.raises(WrongVersion, match=r"versions \[0\], but it served version"):
            await engine.generate(bench.request())

    run(loop, bench, scenario)


@pytest.mark.parametrize("call", ["pause", "load"])
@pytest.mark.parametrize("kind", ["hang", "reset", "cut", "status"])
def test_an_update_that_goes_wrong_ends_within_its_deadline_and_no_token_is_kept(
    loop: asyncio.Runner, bench: Bench, call: str, kind: str
) -> None:
    """The pool ejects the engine, what it runs fails as an engine error, and it comes back with
    the newest weights."""

    async def scenario(engine: ServerEngine) -> None:
        pool = EnginePool(
            [engine], update_seconds=1.5, health_seconds=0.2, live_seconds=20, version=bench.version
        )
        keeper = asyncio.create_task(pool.run())
        try:
            path = bench.words.pause if call == "pause" else bench.words.load
            fault = Fault(kind=kind)
            bench.proxy.always[path] = fault
            running = asyncio.create_task(pool.generate(bench.request(100)))
            await asyncio.sleep(0.02)
            first = bench.version
            newest = bench.next_weights()
            with pytest.raises(EngineError, match="left"):
                await pool.update_weights(newest)
            bench.proxy.clear()
            with contextlib.suppress(EngineError):  # nobody knows what sampled it: an outcome too
                completion = await running
                assert set(completion.version_runs.expand()) <= {first, newest.version}
            newest = bench.next_weights()
            await pool.update_weights(newest)
            completion = await pool.generate(bench.request())
            assert completion.version_runs.runs == ((newest.version, 8),)
        finally:
            keeper.cancel()
            await asyncio.wait({keeper})

    run(loop, bench, scenario)


def test_a_hanging_engine_is_ejected_and_its_requests_fail_over(
    loop: asyncio.Runner, bench: Bench
) -> None:
    """Two clients of the same server stand for two engines; one of them hangs."""

    async def scenario(engine: ServerEngine) -> None:
        other = bench.client()
        other._name = "right"  # a second way to the same server, past the proxy
        other._http.url = bench.proxy.target
        await other.connect(bench.version)
        events: list[str] = []
        pool = EnginePool(
            [engine, other],
            update_seconds=5,
            version=bench.version,
            health_seconds=0.1,
            health_deadline_seconds=0.3,
            on_event=lambda level, text: events.append(text),
        )
        keeper = asyncio.create_task(pool.run())
        try:
            for path in (bench.words.generate, "/health", "/ready"):
                bench.proxy.always[path] = Fault(kind="hang")
            completions = await asyncio.gather(*(pool.generate(bench.request(4)) for _ in range(6)))
            assert all(one.version_runs.runs == ((bench.version, 4),) for one in completions)
            assert pool.live == ("right",)
            assert any("left ejected: it did not answer a health check" in one for one in events)
            statistics = await pool.statistics()
            assert [one.is_live for one in statistics.values()] == [False, True]
        finally:
            keeper.cancel()
            await asyncio.wait({keeper})
            await other.aclose()

    run(loop, bench, scenario)


def test_a_slow_engine_is_no_broken_one(loop: asyncio.Runner, bench: Bench) -> None:
    async def scenario(engine: ServerEngine) -> None:
        bench.proxy.always[bench.words.generate] = Fault(delay=0.3)
        assert len((await engine.generate(bench.request())).token_ids) == 8

    run(loop, bench, scenario)


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_updates_under_load_keep_every_stamp_in_order(
    loop: asyncio.Runner, bench: Bench, mode: UpdateMode
) -> None:
    """Long requests through three updates; a fake's tokens say which weights sampled them."""

    async def scenario(engine: ServerEngine) -> None:
        first = bench.version
        tasks = [asyncio.create_task(engine.generate(bench.request(120))) for _ in range(6)]
        for _ in range(3):
            await asyncio.sleep(0.05)
            await engine.update_weights(bench.next_weights())
        completions = await asyncio.gather(*tasks)
        for completion in completions:
            versions = completion.version_runs.expand().tolist()
            assert len(versions) == 120 and versions == sorted(versions)
            assert first <= versions[0] and versions[-1] <= bench.version

    run(loop, bench, scenario, update_mode=mode)


def test_the_canary_of_the_trainer_agrees_with_the_embedded_engine(
    loop: asyncio.Runner, bench: Bench, tmp_path: Path
) -> None:
    """A real model: every update passes to a thousandth of a nat, and weights that are not those
    of the canary fail, be it because they were never loaded or because they are others."""
    if bench.fake is not None:
        pytest.skip("a fake has no model")
    canary = EngineCanary(tolerance=1e-3)

    async def scenario(engine: ServerEngine) -> None:
        for _ in range(4):
            weights = bench.next_weights()
            assert weights.path is not None
            seed = 1 + weights.version % len(bench.folders)
            right = make_canary(random_model(seed), weights.version)
            wrong = make_canary(random_model(3 - seed), weights.version)
            folder = tmp_path / f"{weights.version}"
            folder.mkdir()
            judged = dataclasses.replace(weights, path=folder)
            (folder / CANARY).write_text(right.to_json())
            with pytest.raises(WrongVersion, match="answers under version"):
                await canary.check(engine, judged, max_model_len=256)
            await engine.update_weights(weights)
            assert await canary.check(engine, judged, max_model_len=256) is None
            (folder / CANARY).write_text(wrong.to_json())
            problem = await canary.check(engine, judged, max_model_len=256)
            assert problem is not None and "does not serve version" in problem

    run(loop, bench, scenario)
