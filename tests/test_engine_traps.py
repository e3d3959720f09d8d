"""The clients against fakes whose tokens say which weights sampled them: every trap that a real
server was seen to set."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_engines import (
    FIRST_TOKEN,
    VOCABULARY,
    FakeEngine,
    FakeSglang,
    FakeVllm,
    Fault,
    FaultProxy,
    serving,
    truth_token,
    weights_folder,
)
from headway.config import UpdateMode
from headway.core.rollout import Completion
from headway.core.versions import VersionRuns
from headway.engines.canary import EngineCanary
from headway.engines.capabilities import Capabilities, Logprobs
from headway.engines.contract import Contract
from headway.engines.openai import OpenAiEngine
from headway.engines.pool import EnginePool
from headway.engines.server_engine import ServerEngine
from headway.engines.sglang import SglangEngine
from headway.engines.spans import shift_starts
from headway.engines.vllm import VllmEngine
from headway.errors import EngineError
from headway.ports import GenerateRequest, PublishedWeights
from headway.weights.canary import Canary, Probe

CONTRACT = Contract(vocabulary_size=VOCABULARY)
CLIENTS: dict[type[FakeEngine], type[ServerEngine]] = {
    FakeVllm: VllmEngine,
    FakeSglang: SglangEngine,
}
FAKES = pytest.mark.parametrize("kind", CLIENTS, ids=lambda kind: kind.__name__)


def request(number: int = 0, max_tokens: int = 60, **options: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"t{number:09d}-0000-00-0000",
        token_ids=options.pop("token_ids", [3, 4]),
        max_tokens=max_tokens,
        **options,
    )


def weights(directory: Path, version: int, **options: Any) -> PublishedWeights:
    return PublishedWeights(version=version, path=weights_folder(directory, version, **options))


def with_fake(
    fake: FakeEngine,
    scenario: Callable[[ServerEngine], Coroutine[Any, Any, None]],
    *,
    connect: bool = True,
    **options: Any,
) -> None:
    async def main() -> None:
        async with serving(fake.application()) as url:
            client = CLIENTS[type(fake)]
            engine = client(name="left", url=url, **{"contract": CONTRACT, **options})
            try:
                async with asyncio.timeout(30):
                    if connect:
                        await engine.connect(0)
                    await scenario(engine)
            finally:
                await engine.aclose()

    asyncio.run(main())


def truth(completion: Completion) -> VersionRuns:
    """Version runs that the tokens themselves tell."""
    return VersionRuns.from_versions((completion.token_ids - FIRST_TOKEN).tolist())


@FAKES
@pytest.mark.parametrize("told", ["bfloat16", None], ids=["told", "not told"])
def test_the_contract_names_what_a_server_computes_in(
    kind: type[FakeEngine], told: str | None
) -> None:
    fake = kind()
    fake.dtype = told

    async def scenario(engine: ServerEngine) -> None:
        assert engine.capabilities is not None
        mine = engine.capabilities.contract
        assert mine.dtype == (told or "")
        differences = mine.differences(replace(mine, dtype="float32"))
        assert differences == (["dtype: bfloat16 against float32"] if told else [])

    with_fake(fake, scenario)


def test_a_vllm_server_that_does_not_describe_itself_is_used_all_the_same() -> None:
    fake = FakeVllm()
    fake.disabled = ("/server_info",)

    async def scenario(engine: ServerEngine) -> None:
        assert engine.capabilities is not None and not engine.capabilities.contract.dtype

    with_fake(fake, scenario)


async def run_with_updates(
    fake: FakeEngine, engine: ServerEngine, directory: Path, *, num_updates: int = 3
) -> list[Completion]:
    """Requests of various lengths, some of which come during updates."""
    tasks = [asyncio.create_task(engine.generate(request(i, 20 + 9 * i))) for i in range(6)]
    for version in range(1, num_updates + 1):
        while fake.num_sampled < 80 * version:  # noqa: ASYNC110 - it sets no event
            await asyncio.sleep(0.001)
        update = asyncio.create_task(engine.update_weights(weights(directory, version)))
        tasks += [
            asyncio.create_task(engine.generate(request(10 * version + i, 40))) for i in range(3)
        ]
        await update
    return [await task for task in tasks]


@FAKES
@pytest.mark.parametrize("stamps", [True, False], ids=["stamped", "derived"])
@pytest.mark.parametrize(
    ("mode", "clear_cache"),
    [
        (UpdateMode.KEEP, True),
        (UpdateMode.KEEP, False),
        (UpdateMode.INTERRUPT, True),
        (UpdateMode.FINISH, True),
    ],
    ids=["keep", "keep-in-place", "interrupt", "finish"],
)
def test_every_token_bears_the_version_of_the_weights_that_sampled_it(
    kind: type[FakeEngine], mode: UpdateMode, clear_cache: bool, stamps: bool, tmp_path: Path
) -> None:
    """Also where the server stamps nothing, by what the client ordered; only mode keep is out."""
    fake = kind(stamps=stamps)

    async def scenario(engine: ServerEngine) -> None:
        assert engine.capabilities is not None
        reasons = engine.capabilities.against_training(mode)
        assert bool(reasons) == (mode is UpdateMode.KEEP and not stamps)
        if reasons:
            return
        completions = await run_with_updates(fake, engine, tmp_path)
        for completion in completions:
            assert completion.version_runs == truth(completion)
        spans = [len(completion.version_runs.runs) for completion in completions]
        assert (max(spans) > 1) == (mode is not UpdateMode.FINISH)
        assert engine.version == 3

    with_fake(fake, scenario, update_mode=mode, clear_cache=clear_cache)


def test_a_boundary_moves_by_one_token_for_an_engine_that_runs_ahead() -> None:
    assert shift_starts(VersionRuns(((3, 4), (4, 2), (5, 3)))).runs == ((3, 5), (4, 2), (5, 2))
    assert shift_starts(VersionRuns(((3, 4), (4, 1)))).runs == ((3, 5),)
    assert shift_starts(VersionRuns(((3, 4),))).runs == ((3, 4),)
    assert shift_starts(VersionRuns()).runs == ()


def test_sglang_without_overlap_is_not_shifted(tmp_path: Path) -> None:
    fake = FakeSglang()
    fake.overlaps = False

    async def scenario(engine: ServerEngine) -> None:
        for completion in await run_with_updates(fake, engine, tmp_path):
            assert completion.version_runs == truth(completion)

    with_fake(fake, scenario, clear_cache=False)


def test_a_refusal_that_did_replace_the_weights_is_none(tmp_path: Path) -> None:
    """SGLang answers 400 when it could not flush, and tells the old label on."""
    fake = FakeSglang()

    async def scenario(engine: ServerEngine) -> None:
        assert isinstance(engine, SglangEngine)
        running = asyncio.create_task(engine.generate(request(0, 100)))
        await asyncio.sleep(0.05)
        # Force the combination that a configured client never orders.
        engine._clear_cache = True
        post = engine._http.call

        async def in_place(method: str, path: str, body: Any = None, **options: Any) -> bytes:
            if path == "/pause_generation":
                body = {"mode": "in_place"}
            return await post(method, path, body, **options)

        engine._http.call = in_place  # type: ignore[method-assign]
        await engine.update_weights(weights(tmp_path, 1))
        assert fake.told_label == "1" and engine.version == 1
        await running
        await engine.generate(request(1))
        assert fake.bodies[-1]["extra_key"] == "1"  # kept apart from what was not flushed

    with_fake(fake, scenario)


def test_sglang_is_never_sent_a_token_that_would_end_it() -> None:
    fake = FakeSglang()

    async def scenario(engine: ServerEngine) -> None:
        for token in (VOCABULARY, -1):
            with pytest.raises(EngineError, match=f"token id {token}, outside the vocabulary"):
                await engine.generate(request(token_ids=[1, token]))
        await engine.generate(request(max_tokens=2))
        assert not fake.is_dead

    with_fake(fake, scenario)

    async def without_vocabulary(engine: ServerEngine) -> None:
        with pytest.raises(EngineError, match="size of the vocabulary is not known"):
            await engine.connect(0)

    with_fake(FakeSglang(), without_vocabulary, connect=False, contract=Contract())


def test_a_cancelled_request_is_aborted_alone() -> None:
    """By its exact id, which is the beginning of no other: SGLang aborts by prefix."""
    fake = FakeSglang()

    async def scenario(engine: ServerEngine) -> None:
        tasks = [asyncio.create_task(engine.generate(request(i, 60))) for i in (1, 10, 100)]
        while len(fake.running) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        tasks[0].cancel()
        await asyncio.wait({tasks[0]})
        rest = await asyncio.gather(*tasks[1:])
        assert [len(one.token_ids) for one in rest] == [60, 60]
        assert fake.calls.count("/abort_request") == 1

    with_fake(fake, scenario)


def test_sglang_is_not_probed_during_a_pause_and_once_after_it() -> None:
    fake = FakeSglang()

    async def scenario(engine: ServerEngine) -> None:
        assert await engine.is_healthy() and "/health" not in fake.calls
        fake.is_unhealthy = True  # somebody else probed it during a pause
        assert not await engine.is_ready()
        assert await engine.is_healthy() and fake.calls.count("/health") == 1
        assert await engine.is_ready()

    with_fake(fake, scenario)


@FAKES
def test_weights_without_a_label_get_one_and_those_of_another_run_are_refused(
    kind: type[FakeEngine],
) -> None:
    fake = kind()

    async def scenario(engine: ServerEngine) -> None:
        await engine.connect(5)
        assert fake.label == "5"
        with pytest.raises(EngineError, match=r"serves version '5', but this run begins at .* 0"):
            await engine.connect(0)
        await engine.connect(None)

    with_fake(fake, scenario, connect=False)


@FAKES
def test_log_probabilities_before_temperature_are_detected(kind: type[FakeEngine]) -> None:
    async def scenario(engine: ServerEngine) -> None:
        can = await engine.connect(0)
        assert can.logprobs is Logprobs.RAW
        reasons = can.against_training(UpdateMode.KEEP, temperature=0.7)
        flag = "processed_logprobs" if kind is FakeVllm else "SGLANG_RETURN_ORIGINAL_LOGPROB"
        assert len(reasons) == 1 and flag in reasons[0]
        assert "log-probabilities are raw" in can.statement()

    with_fake(kind(raw_logprobs=True), scenario, connect=False)

    async def processed(engine: ServerEngine) -> None:
        can = await engine.connect(0)
        assert can.logprobs is Logprobs.PROCESSED
        assert can.statement().endswith("it has all that is needed")
        assert can.max_model_len == 1024

    with_fake(kind(), processed, connect=False)


@FAKES
def test_after_a_load_that_was_refused_no_token_comes_from_what_may_be_left(
    kind: type[FakeEngine], tmp_path: Path
) -> None:
    """SGLang is on its old weights then; vLLM has none, and would die of the first token."""
    fake = kind()

    async def scenario(engine: ServerEngine) -> None:
        running = asyncio.create_task(engine.generate(request(1, 60)))
        await asyncio.sleep(0.03)
        lost = PublishedWeights(version=1, path=tmp_path / "v000001")
        with pytest.raises(EngineError, match=r"with (400|500)"):
            await engine.update_weights(lost)
        if kind is FakeVllm:
            with pytest.raises(EngineError, match="out of use: loading version 1"):
                await engine.generate(request(2))
            running.cancel()  # as the pool does with what an ejected engine runs
            await engine.connect(None)
            await engine.update_weights(weights(tmp_path, 2))
        else:
            assert (await running).version_runs.runs == ((0, 60),)
            assert (await engine.generate(request(2, 5))).version_runs.runs == ((0, 5),)
            await engine.update_weights(weights(tmp_path, 2))
        completion = await engine.generate(request(3, 5))
        assert completion.version_runs == truth(completion) == VersionRuns(((2, 5),))

    with_fake(fake, scenario)


@pytest.mark.parametrize(
    ("path", "flag"),
    [
        ("/inference/v1/generate", "--enable-scale-out"),
        ("/resume", "VLLM_SERVER_DEV_MODE=1"),
        ("/weight_info", "VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_a_vllm_server_started_without_a_flag_is_told_which(path: str, flag: str) -> None:
    fake = FakeVllm()
    fake.disabled = (path,)

    async def scenario(engine: ServerEngine) -> None:
        with pytest.raises(EngineError, match=f"does not offer .*: start it with {flag}"):
            await engine.connect(0)

    with_fake(fake, scenario, connect=False)


def test_a_vllm_server_of_another_name_is_told_both() -> None:
    async def scenario(engine: ServerEngine) -> None:
        with pytest.raises(EngineError, match=r"serves \['policy'\], not 'other'.*model_name"):
            await engine.connect(0)

    with_fake(FakeVllm(), scenario, connect=False, model="other")


@FAKES
@pytest.mark.parametrize("label", ["default", "0"])
def test_a_restarted_engine_that_serves_the_initial_weights_is_never_data(
    kind: type[FakeEngine], label: str, tmp_path: Path
) -> None:
    """Whoever restarts a server behind our back brings it back at version 0."""
    fake = kind(token_seconds=0.001)

    async def scenario(engine: ServerEngine) -> None:
        pool = EnginePool([engine], update_seconds=5, health_seconds=60, live_seconds=10)
        keeper = asyncio.create_task(pool.run())
        await pool.update_weights(weights(tmp_path, 1))
        fake.restart()
        fake.label = label
        with pytest.raises(EngineError, match=r"is not a number|but it served version 1"):
            await pool.generate(request(1, 5))
        completion = await pool.generate(request(2, 5))
        assert completion.version_runs.runs == ((1, 5),) and truth(completion).head == 1
        keeper.cancel()
        await asyncio.wait({keeper})

    with_fake(fake, scenario)


@FAKES
@pytest.mark.parametrize(
    ("broken", "options", "message"),
    [
        ({"keeps_weights": True}, {}, f"it samples {truth_token(0)}, which is not among"),
        ({"stale_cache": True}, {}, f"it samples {truth_token(1)}, which is not among"),
        ({}, {"canary_of": 9}, "which is not among"),
        ({}, {}, None),
    ],
    ids=["weights not loaded", "stale prefix cache", "mislabelled", "healthy"],
)
@pytest.mark.parametrize("action", ["warn", "stop"])
def test_the_canary_sees_what_no_label_shows(
    kind: type[FakeEngine],
    broken: dict[str, bool],
    options: dict[str, Any],
    message: str | None,
    action: Any,
    tmp_path: Path,
) -> None:
    fake = kind(token_seconds=0.001)
    events: list[str] = []

    async def scenario(engine: ServerEngine) -> None:
        pool = EnginePool(
            [engine],
            update_seconds=5,
            canary=EngineCanary(action=action),
            on_event=lambda level, text: events.append(text),
        )
        await pool.update_weights(weights(tmp_path, 1))
        for name, value in broken.items():
            setattr(fake, name, value)
        if "keeps_weights" in broken:
            fake.weights = 0
        newest = weights(tmp_path, 2, **options)
        if message is None or action == "warn":
            await pool.update_weights(newest)
            assert any(message in event for event in events) if message else not events
        else:
            with pytest.raises(EngineError, match=f"does not serve version 2: .*{message}"):
                await pool.update_weights(newest)

    with_fake(fake, scenario)


class Answering:
    """An engine that answers every prompt with one token, at a set log-probability."""

    name = "left"

    def __init__(self) -> None:
        self.logprob = -1.0
        self.version = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        assert request.temperature == 0 and request.max_tokens == 1
        return Completion(
            token_ids=np.array([7], np.int32),
            logprobs=np.array([self.logprob], np.float32),
            version_runs=VersionRuns(((self.version, 1),)),
            finish_reason="length",  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(
    ("engine_moves", "tolerance", "message"),
    [
        (0.01, 0.1, None),
        (0.0101, 0.1, None),
        (0.0, 0.1, "moved by 0.01 nats, its own by 0% of that"),
        (0.003, 0.1, "its own by 30% of that"),
        (0.2, 0.1, "0.19 nats from that of the published weights"),
        (0.03, 0.01, "0.02 nats from that"),
    ],
)
def test_the_canary_sees_an_engine_that_does_not_move_within_any_tolerance(
    engine_moves: float, tolerance: float, message: str | None, tmp_path: Path
) -> None:
    canary = EngineCanary(tolerance=tolerance)
    engine: Any = Answering()

    async def check(version: int, logprob: float) -> str | None:
        probes = (Probe(token_ids=(1, 2, 3), top={7: logprob, 8: -3.0}),)
        folder = tmp_path / f"v{version:06d}"
        folder.mkdir()
        (folder / "canary.json").write_text(Canary(version=version, probes=probes).to_json())
        engine.version = version
        return await canary.check(engine, PublishedWeights(version=version, path=folder))

    async def scenario() -> None:
        assert await check(1, -1.0) is None
        engine.logprob = -1.0 + engine_moves
        problem = await check(2, -1.0 + 0.01)
        assert (problem is None) == (message is None)
        assert message is None or (problem is not None and message in problem)

    asyncio.run(scenario())


def test_an_openai_server_is_for_evaluation_only() -> None:
    async def answer(message: Any) -> Any:
        from aiohttp import web

        if message.path == "/v1/models":
            return web.json_response({"data": [{"id": "frozen", "max_model_len": 99}]})
        body = await message.json()
        assert body["prompt"] == [3, 4]
        return web.json_response({"choices": [{"text": "abc", "finish_reason": "stop"}]})

    async def main() -> None:
        from aiohttp import web

        application = web.Application()
        application.router.add_route("*", "/{path:.*}", answer)
        async with serving(application) as url:
            engine = OpenAiEngine(
                name="judge", url=url, model="frozen", encode=lambda text: [*map(ord, text)]
            )
            can = await engine.connect(None)
            assert isinstance(can, Capabilities) and "evaluation only" in can.statement()
            reasons = can.against_training(UpdateMode.FINISH)
            assert "need not be what the model sampled" in reasons[0]
            completion = await engine.generate(request())
            assert completion.token_ids.tolist() == [97, 98, 99]
            with pytest.raises(EngineError, match="keeps its weights"):
                await engine.update_weights(PublishedWeights(version=1, path=None))
            assert await engine.is_healthy()
            await engine.aclose()

    asyncio.run(main())


@FAKES
@pytest.mark.parametrize("mode", list(UpdateMode))
@pytest.mark.parametrize("seed", [1])
def test_failovers_on_sockets_never_give_a_token_the_wrong_version(
    kind: type[FakeEngine], mode: UpdateMode, seed: int, tmp_path: Path
) -> None:
    """Two engines that lose connections, hang, restart on the initial weights and refuse, under
    updates: every completion that comes out is what the tokens say, or there is a named error."""
    rng = np.random.default_rng(seed)

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            fakes = [kind(token_seconds=0.002) for _ in range(2)]
            proxies, engines = [], []
            for name, fake in zip(("left", "right"), fakes, strict=True):
                target = await stack.enter_async_context(serving(fake.application()))
                proxy = FaultProxy(target)
                url = await stack.enter_async_context(serving(proxy.application()))
                proxies.append(proxy)
                engines.append(
                    CLIENTS[kind](name=name, url=url, update_mode=mode, contract=CONTRACT)
                )
            pool = EnginePool(
                engines,
                update_seconds=1.0,
                health_seconds=0.05,
                health_deadline_seconds=1.0,
                live_seconds=10,
                slow_start_seconds=0,
            )
            await pool.connect()
            keeper = asyncio.create_task(pool.run())
            tasks: list[asyncio.Task[Completion]] = []
            for version in range(1, 7):
                tasks += [
                    asyncio.create_task(pool.generate(request(100 * version + i, 10 + 20 * i)))
                    for i in range(4)
                ]
                await asyncio.sleep(0.05)
                break_one(proxies, fakes, rng)
                with contextlib.suppress(EngineError):
                    await pool.update_weights(weights(tmp_path, version))
            for proxy in proxies:
                proxy.clear()
            async with asyncio.timeout(20):
                results = await asyncio.gather(*tasks, return_exceptions=True)
            completions = [one for one in results if isinstance(one, Completion)]
            others = [one for one in results if not isinstance(one, Completion)]
            assert all(isinstance(one, EngineError) for one in others), others
            assert completions
            for completion in completions:
                assert completion.version_runs == truth(completion)
            keeper.cancel()
            await asyncio.wait({keeper})
            await pool.aclose()

    asyncio.run(main())


def break_one(proxies: list[FaultProxy], fakes: list[FakeEngine], rng: np.random.Generator) -> None:
    which = int(rng.integers(2))
    proxy, fake = proxies[which], fakes[which]
    proxy.clear()
    proxies[1 - which].clear()
    path = "/inference/v1/generate" if isinstance(fake, FakeVllm) else "/generate"
    match rng.choice(["reset", "cut", "hang", "status", "restart", "update", "nothing"]):
        case "restart":
            fake.restart()
        case "update":
            for load in ("/collective_rpc", "/update_weights_from_disk"):
                proxy.script[load].append(Fault(kind="cut"))
        case "hang":
            proxy.always[path] = Fault(kind="reset", delay=1.5)
            for one in ("/health", "/ready"):
                proxy.always[one] = Fault(kind="hang")
        case "nothing":
            return
        case fault:
            proxy.script[path].extend([Fault(kind=str(fault), status=503)] * 3)


@FAKES
def test_a_restart_that_nobody_saw_is_noticed_by_its_label(
    kind: type[FakeEngine], tmp_path: Path
) -> None:
    fake = kind()
    events: list[str] = []

    async def scenario(engine: ServerEngine) -> None:
        pool = EnginePool(
            [engine],
            update_seconds=5,
            health_seconds=0.02,
            on_event=lambda level, text: events.append(text),
        )
        keeper = asyncio.create_task(pool.run())
        await pool.update_weights(weights(tmp_path, 1))
        fake.restart()
        await engine._set_label(0)
        while len(events) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert "left ejected: it serves version 0 instead of 1: it was restarted" in events[0]
        assert "is back after" in events[2] and fake.weights == 1
        keeper.cancel()
        await asyncio.wait({keeper})

    with_fake(fake, scenario)
