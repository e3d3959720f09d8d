"""The pool in virtual time: routing, updates, ejection and return, and whose weights it was."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway.config import UpdateMode
from headway.core.rollout import Completion, FinishReason
from headway.core.versions import VersionRuns
from headway.engines.capabilities import Capabilities, Logprobs
from headway.engines.contract import Contract
from headway.engines.pool import EnginePool
from headway.errors import EngineError, EngineRefusal, TransportError, UnusableAnswer, WrongVersion
from headway.ports import EngineStatistics, GenerateRequest, PublishedWeights
from headway.sim.clock import run_virtual
from headway.sim.engine import SimulatedEngine
from headway.sim.workload import Turn

TOKEN_SECONDS = 0.1


def weights(version: int) -> PublishedWeights:
    return PublishedWeights(version=version, path=Path(f"weights/v{version:06d}"))


def request(number: int = 0, turn: int = 0, max_tokens: int = 10) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"t{number:09d}-0000-00-{turn:04d}", token_ids=[1], max_tokens=max_tokens
    )


class Events(list[str]):
    """What a pool told."""

    def __call__(self, level: str, text: str) -> None:
        assert level in ("info", "warning", "error")
        self.append(text)


class Server:
    """An engine on a server that never was: its tokens say which weights sampled them.

    Everything that can go wrong is a switch. A process that is restarted has version 0 again.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.serves = self.told = 0
        self.is_up = True
        self.is_frozen = False
        self.update_seconds = 1.0
        self.errors: list[EngineError] = []
        self.load_error: EngineError | None = None
        self.can = Capabilities(engine="vllm 1")
        self.is_connected = False
        self.is_updating = False
        self.num_served: dict[int, int] = {}
        self.crashed = asyncio.Event()

    @property
    def capabilities(self) -> Capabilities | None:
        return self.can if self.is_connected else None

    @property
    def pause_seconds(self) -> float:
        return 0.5

    def kill(self) -> None:
        self.is_up = False
        self.crashed.set()
        self.crashed = asyncio.Event()

    def restart(self) -> None:
        self.is_up, self.is_frozen, self.serves = True, False, 0

    async def reach(self) -> None:
        if not self.is_up:
            raise TransportError(f"engine {self.name} refused the connection")
        while self.is_frozen:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def connect(self, version: int | None) -> Capabilities:
        await self.reach()
        if version is not None and self.serves != version:
            raise EngineError(f"engine {self.name} serves version {self.serves}")
        self.is_connected = True
        return self.can

    async def is_healthy(self) -> bool:
        assert not self.is_updating, "asked for its health during an update"
        try:
            await self.reach()
        except EngineError:
            return False
        return True

    async def lag(self) -> str | None:
        assert not self.is_updating
        await self.reach()
        return None if self.serves == self.told else f"it serves {self.serves}"

    async def generate(self, request: GenerateRequest) -> Completion:
        await self.reach()
        if self.errors:
            raise self.errors.pop(0)
        self.num_served[self.serves] = self.num_served.get(self.serves, 0) + 1
        versions: list[int] = []
        crashed = self.crashed
        while len(versions) < request.max_tokens:
            await asyncio.sleep(TOKEN_SECONDS)
            if crashed.is_set():
                raise TransportError(f"engine {self.name} broke off {request.request_id}")
            if not self.is_frozen:
                versions.append(self.serves)
        return Completion(
            token_ids=np.array(versions, np.int32),
            logprobs=np.zeros(len(versions), np.float32),
            version_runs=VersionRuns.from_versions(versions),
            finish_reason=FinishReason.LENGTH,
        )

    async def update_weights(self, weights: PublishedWeights) -> None:
        self.is_updating = True
        try:
            await self.reach()
            if self.load_error is not None:
                raise self.load_error
            await asyncio.sleep(self.update_seconds)
            await self.reach()
            self.serves = self.told = weights.version
        finally:
            self.is_updating = False

    async def statistics(self) -> Mapping[str, EngineStatistics]:
        await self.reach()
        return {self.name: EngineStatistics(num_running=1, pause_seconds=0.5)}

    async def aclose(self) -> None:
        self.is_connected = False


def make_pool(servers: list[Any], events: Events | None = None, **options: Any) -> EnginePool:
    defaults: dict[str, Any] = {
        "update_seconds": 10,
        "health_seconds": 2,
        "health_deadline_seconds": 3,
        "live_seconds": 60,
        "slow_start_seconds": 0,
    }
    return EnginePool(
        servers, **{**defaults, **options}, on_event=Events() if events is None else events
    )


def with_pool(
    scenario: Callable[[EnginePool, list[Server], Events], Any], count: int = 2, **options: Any
) -> None:
    """In virtual time, connected and running."""

    async def main() -> None:
        servers = [Server(name) for name in "abcdefgh"[:count]]
        events = Events()
        pool = make_pool(servers, events, **options)
        await pool.connect()
        running = asyncio.create_task(pool.run())
        try:
            await scenario(pool, servers, events)
            assert not running.done() or running.exception() is None
        finally:
            running.cancel()
            await asyncio.wait({running})

    run_virtual(main())


class Plain(SimulatedEngine):
    """A simulated engine whose requests take one second."""

    def __init__(self, name: str) -> None:
        super().__init__(turn=lambda _: Turn(work=1.0, num_tokens=10), name=name)


def test_the_pool_sends_to_the_least_busy() -> None:
    async def scenario() -> None:
        pool = make_pool([Plain("a"), Plain("b")])
        tasks = [asyncio.create_task(pool.generate(request(i))) for i in range(5)]
        await asyncio.sleep(0.5)
        assert pool.in_flight == {"a": 3, "b": 2}
        statistics = await pool.statistics()
        assert {name: each.num_running for name, each in statistics.items()} == pool.in_flight
        await asyncio.gather(*tasks)
        cancelled = asyncio.create_task(pool.generate(request(9)))
        await asyncio.sleep(0.25)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        assert pool.in_flight == {"a": 0, "b": 0}

    run_virtual(scenario())


def test_the_turns_of_a_rollout_stay_together_unless_their_engine_is_out() -> None:
    async def scenario(pool: EnginePool, servers: list[Server], events: Events) -> None:
        async def rollout(number: int, turns: range) -> None:
            for turn in turns:
                await pool.generate(request(number, turn))

        busy = [asyncio.create_task(rollout(9, range(4))) for _ in range(1)]
        await asyncio.sleep(0)
        await rollout(1, range(3))  # began on b, since a was busy; later turns find both idle
        await asyncio.gather(*busy)
        assert servers[0].num_served == {0: 4} and servers[1].num_served == {0: 3}
        pool.eject("b", "testing")
        await rollout(1, range(3, 5))
        assert servers[0].num_served == {0: 6}

    with_pool(scenario)


def test_an_update_goes_to_all_at_once_and_succeeds_with_those_that_are_left() -> None:
    async def scenario(pool: EnginePool, servers: list[Server], events: Events) -> None:
        now = asyncio.get_running_loop().time
        started_at = now()
        await pool.update_weights(weights(1))
        assert now() - started_at == pytest.approx(1) and pool.version == 1
        servers[0].update_seconds = 60
        servers[1].load_error = EngineError("engine b: out of memory")
        await pool.update_weights(weights(2))
        assert now() - started_at == pytest.approx(11)
        assert pool.live == ("c",) and pool.version == 2
        assert any("a ejected: engine a did not load version 2 within 10 s" in e for e in events)
        assert any("b ejected: engine b: out of memory" in e for e in events)
        completion = await pool.generate(request())
        assert completion.version_runs == VersionRuns(((2, 10),))

    with_pool(scenario, count=3)


def test_what_all_engines_refuse_is_an_error_and_leaves_them_as_they_were() -> None:
    async def scenario(pool: EnginePool, servers: list[Server], events: Events) -> None:
        for server in servers:
            server.load_error = EngineRefusal("no such folder", status=500)
        with pytest.raises(EngineError, match="no such folder"):
            await pool.update_weights(weights(1))
        assert pool.live == ("a", "b") and pool.version == 0
        assert (await pool.generate(request())).version_runs == VersionRuns(((0, 10),))

    with_pool(scenario)


def test_a_dead_engines_requests_move_on_and_it_returns_with_current_weights_only() -> None:
    async def scenario(pool: EnginePool, servers: list[Server], events: Events) -> None:
        tasks = [asyncio.create_task(pool.generate(request(i, 0, 100))) for i in range(6)]
        await asyncio.sleep(1)
        assert pool.in_flight == {"a": 3, "b": 3}
        servers[0].kill()
        await asyncio.sleep(3)
        assert list(pool.live) == ["b"] and pool.in_flight == {"a": 0, "b": 6}
        await pool.update_weights(weights(1))
        await pool.update_weights(weights(2))
        servers[0].restart()
        servers[0].num_served.clear()
        await asyncio.gather(*tasks)
        assert list(pool.live) == ["a", "b"]
        await asyncio.gather(*(pool.generate(request(i)) for i in range(100, 110)))
        assert set(servers[0].num_served) == {2}
        assert any("engine a ejected" in event for event in events)
        assert any("engine a is back after" in e and "at version 2" in e for e in events)
        statistics = await pool.statistics()
        assert [(one.is_live, one.version) for one in statistics.values()] == [(True, 2)] * 2

    with_pool(scenario)


def test_a_frozen_engine_is_out_within_its_deadlines_and_comes_back() -> None:
    async def scenario(pool: EnginePool, servers: list[Server], events: Events) -> None:
        now = asyncio.get_running_loop().time
        servers[0].is_frozen = True
        started_at = now()
        completion = await pool.generate(request(0, 0, 5))
        assert now() - started_at < 2 + 3 + 1  # health_seconds, its deadline, five tokens
        assert completion.version_runs == VersionRuns(((0, 5),))
        assert any("a ejected: it did not answer a health check within 3 s" in e for e in events)
        await pool.update_weights(weights(1))  # does not wait for it
        servers[0].is_frozen = False
        await asyncio.sleep(20)
        assert pool.live == ("a", "b") and servers[0].serves == 1

    with_pool(scenario)


def test_with_no_engine_live_requests_wait_and_then_fail_with_all_reasons() -> None:
    async def scenario(pool: EnginePool, servers: list[Server], events: Events) -> None:
        now = asyncio.get_running_loop().time
        for server in servers:
            server.kill()
            pool.eject(server.name, f"process of {server.name} died")
        waiting = asyncio.create_task(pool.generate(request()))
        await asyncio.sleep(30)
        assert not waiting.done()
        servers[1].restart()
        assert (await waiting).version_runs == VersionRuns(((0, 10),))
        servers[1].kill()
        started_at = now()
        with pytest.raises(EngineError, match=r"no engine is live\. a: .*; b: "):
            await pool.generate(request(1))
        assert 60 <= now() - started_at < 65
        with pytest.raises(EngineError, match="no engine is live"):
            await pool.update_weights(weights(1))

    with_pool(scenario)


def test_an_update_with_nobody_live_waits_for_one_that_returns() -> None:
    async def scenario(pool: EnginePool, servers: list[Server], events: Events) -> None:
        servers[0].kill()
        update = asyncio.create_task(pool.update_weights(weights(1)))
        await asyncio.sleep(2)
        servers[0].restart()
        await update
        assert servers[0].serves == 1 and pool.live == ("a",)

    with_pool(scenario, count=1)


@pytest.mark.parametrize(
    ("error", "is_retried"),
    [
        (TransportError("reset"), True),
        (EngineRefusal("broke", status=500), True),
        (EngineRefusal("busy", status=503, retry_after_seconds=1), True),
        (EngineRefusal("too long", status=400), False),
        (UnusableAnswer("half a JSON"), False),
        (WrongVersion("stamped 0"), False),
    ],
)
def test_only_what_was_not_answered_is_sent_to_another(
    error: EngineError, is_retried: bool
) -> None:
    async def scenario(pool: EnginePool, servers: list[Server], events: Events) -> None:
        servers[0].errors = [error]
        if is_retried:
            assert len((await pool.generate(request())).token_ids) == 10
            assert servers[1].num_served == {0: 1}
        else:
            with pytest.raises(type(error), match=str(error)):
                await pool.generate(request())
            assert not servers[1].num_served
        assert (pool.live == ("b",)) == isinstance(error, WrongVersion)

    with_pool(scenario)


def test_retries_are_bounded_and_a_busy_engine_is_left_alone() -> None:
    async def scenario(pool: EnginePool, servers: list[Server], events: Events) -> None:
        now = asyncio.get_running_loop().time
        busy = EngineRefusal("busy", status=503, retry_after_seconds=4)
        servers[0].errors = [busy]
        started_at = now()
        await pool.generate(request(0, 0, 1))  # the only engine: again once its time is up
        assert now() - started_at == pytest.approx(4 + TOKEN_SECONDS)
        servers[0].errors = [busy] * 3
        with pytest.raises(EngineRefusal, match="busy"):
            await pool.generate(request(1))
        assert servers[0].errors == [] and pool.live == ("a",)

    with_pool(scenario, count=1)


def test_three_failures_in_a_row_eject_and_one_success_forgives() -> None:
    async def scenario(pool: EnginePool, servers: list[Server], events: Events) -> None:
        for number_of_failures in (2, 2, 3):
            servers[0].errors = [UnusableAnswer("garbage")] * number_of_failures
            for number in range(number_of_failures):
                with pytest.raises(UnusableAnswer):
                    await pool.generate(request(number))
            assert pool.live == (() if number_of_failures == 3 else ("a",))
            if number_of_failures < 3:
                await pool.generate(request(7))

    with_pool(scenario, count=1)


def test_engines_join_and_leave_during_a_run() -> None:
    async def scenario(pool: EnginePool, servers: list[Server], events: Events) -> None:
        await pool.update_weights(weights(1))
        joining = Server("z")
        pool.add(joining)
        assert list(pool.live) == ["a"]
        tasks = [asyncio.create_task(pool.generate(request(i, 0, 200))) for i in range(4)]
        await asyncio.sleep(3)
        assert list(pool.live) == ["a", "z"] and joining.serves == 1
        assert any("engine z joined after" in event for event in events)
        await pool.remove("a")
        await asyncio.sleep(0.1)
        assert list(pool.live) == ["z"] and pool.in_flight == {"z": 4}
        for task in tasks:
            assert (await task).version_runs == VersionRuns(((1, 200),))
        with pytest.raises(ValueError, match="has an engine z already"):
            pool.add(Server("z"))

    with_pool(scenario, count=1)


def test_an_engine_that_comes_in_starts_slowly() -> None:
    async def scenario(pool: EnginePool, servers: list[Server], events: Events) -> None:
        pool.eject("a", "testing")
        tasks = [asyncio.create_task(pool.generate(request(i, 0, 1000))) for i in range(8)]
        while "a" not in pool.live:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        tasks += [asyncio.create_task(pool.generate(request(i, 0, 1000))) for i in range(8, 12)]
        await asyncio.sleep(0.1)
        early = pool.in_flight["a"]
        assert early <= 1  # although the other one has eight
        await asyncio.sleep(20)
        tasks += [asyncio.create_task(pool.generate(request(i, 0, 1000))) for i in range(12, 18)]
        await asyncio.sleep(0.1)
        assert pool.in_flight["a"] == early + 6
        await asyncio.gather(*tasks)

    with_pool(scenario, slow_start_seconds=10)


def test_engines_that_do_not_fit_are_refused_with_both_sides() -> None:
    async def scenario() -> None:
        odd = Server("b")
        odd.can = Capabilities(engine="vllm 2", contract=Contract(engine="vllm 2"))
        first = Server("a")
        first.can = Capabilities(engine="vllm 1", contract=Contract(engine="vllm 1"))
        pool = make_pool([first, odd])
        with pytest.raises(EngineError, match=r"differs from .: engine: vllm . against vllm ."):
            await pool.connect()

        raw = Server("r")
        raw.can = Capabilities(
            engine="vllm 1", logprobs=Logprobs.RAW, logprobs_remedy="start it with --that"
        )
        pool = make_pool(
            [raw], against=lambda can: can.against_training(UpdateMode.KEEP, temperature=0.5)
        )
        with pytest.raises(EngineError, match=r"r \(vllm 1\) cannot be used here: .*--that"):
            await pool.connect()
        await make_pool(
            [raw], against=lambda can: can.against_training(UpdateMode.KEEP, temperature=1.0)
        ).connect()

    run_virtual(scenario())


def test_a_pool_needs_engines_with_unique_names() -> None:
    async def scenario() -> None:
        for engines in ([], [Plain("a"), Plain("a")]):
            with pytest.raises(ValueError, match="unique names"):
                EnginePool(engines, update_seconds=1)

    run_virtual(scenario())


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["kill", "restart", "freeze", "thaw", "update", "eject", "fail", "wait"]),
        st.integers(0, 2),
        st.floats(0.05, 4.0),
    ),
    max_size=25,
)


@settings(max_examples=120, deadline=None)
@given(actions=ACTIONS)
@example(actions=[("kill", 0, 1.0), ("kill", 2, 1.0), ("eject", 1, 1.0)])
@example(actions=[("update", 0, 0.8125), ("kill", 2, 0.0625)])
def test_no_failover_ever_gives_a_token_the_wrong_version(
    actions: list[tuple[str, int, float]],
) -> None:
    """Whatever dies, hangs, restarts and updates: the tokens of every completion say themselves
    which weights sampled them, and its version runs say the same; no request is served by an
    engine that has not yet loaded what was newest when it was admitted; every request ends."""

    async def scenario(pool: EnginePool, servers: list[Server], events: Events) -> None:
        version = 0
        tasks: list[asyncio.Task[Completion]] = []
        for number, (action, which, seconds) in enumerate(actions):
            server = servers[which]
            tasks += [
                asyncio.create_task(pool.generate(request(10 * number + i, 0, 5 + 10 * i)))
                for i in range(3)
            ]
            match action:
                case "kill":
                    server.kill()
                case "restart" if not server.is_up:
                    server.restart()
                    server.num_served.clear()
                case "freeze":
                    server.is_frozen = True
                case "thaw":
                    server.is_frozen = False
                case "eject":
                    pool.eject(server.name, "testing")
                case "fail":
                    server.errors.append(TransportError("reset"))
                case "update":
                    version += 1
                    try:
                        await pool.update_weights(weights(version))
                    except EngineError:
                        assert not pool.live
            await asyncio.sleep(seconds)
        for server in servers:
            if not server.is_up:
                server.restart()
            server.is_frozen = False
        async with asyncio.timeout(1000):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                assert isinstance(result, EngineError), result
                continue
            assert result.token_ids.tolist() == result.version_runs.expand().tolist()
        await asyncio.sleep(60)
        assert pool.live == ("a", "b", "c")
        assert {server.serves for server in servers} == {version}

    with_pool(scenario, count=3)
