"""What a run begins with: every engine is asked for it before the first rollout."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fake_engines import FakeEngine, FakeSglang, FakeVllm, serving, truth_token, weights_folder
from headway.config import EngineConfig
from headway.engines.launch import Fleet, start_engines
from headway.errors import EngineError
from headway.ports import GenerateRequest
from headway.trainer.canary import make_canary
from headway.weights.canary import CANARY
from recompute import MAX_POSITIONS, random_model, save

KINDS: dict[type[FakeEngine], str] = {FakeVllm: "vllm", FakeSglang: "sglang"}
FAKES = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A run that connects to one fake: `start` has the weights it begins with, and their canary."""

    fake: FakeEngine
    start: Path
    events: list[str]
    connect: Callable[[], Coroutine[Any, Any, Fleet]]

    async def until_told(self, words: str) -> None:
        """Until an event has these words."""
        while not any(words in event for event in self.events):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def sample(self, fleet: Fleet, number: int = 0) -> tuple[int, int]:
        """Stamp and truth of a token."""
        completion = await fleet.pool.generate(
            GenerateRequest(request_id=f"r{number:06d}", token_ids=[3, 4], max_tokens=3)
        )
        ((version, _),) = completion.version_runs.runs
        return version, int(completion.token_ids[0]) - truth_token(0)


def with_guest(
    fake: FakeEngine,
    folder: Path,
    scenario: Callable[[Guest], Coroutine[Any, Any, None]],
    *,
    version: int = 0,
    **settings: Any,
) -> None:
    """Run a scenario of a run that begins at `version`."""
    start = weights_folder(folder, version)
    (start / "config.json").write_text('{"model_type": "fake", "vocab_size": 48}')
    events: list[str] = []

    async def main() -> None:
        async with serving(fake.application()) as url, contextlib.AsyncExitStack() as stack:

            async def connect() -> Fleet:
                config = {"kind": KINDS[type(fake)], "urls": [url], **settings}
                fleet = await start_engines(
                    EngineConfig.model_validate(config),
                    model_dir=start,
                    logs_dir=folder,
                    start_seconds=10,
                    version=version,
                    on_event=lambda level, text: events.append(f"{level}: {text}"),
                )
                stack.push_async_callback(fleet.stop, 1)
                return fleet

            async with asyncio.timeout(30):
                await scenario(Guest(fake=fake, start=start, events=events, connect=connect))

    asyncio.run(main())


@FAKES
@pytest.mark.parametrize("action", ["stop", "warn", "off"])
@pytest.mark.parametrize("weights", [0, 7], ids=["its own", "others"])
def test_a_server_on_another_model_is_refused_before_anything_is_sampled(
    kind: type[FakeEngine], action: str, weights: int, tmp_path: Path
) -> None:
    async def scenario(guest: Guest) -> None:
        fleet = await guest.connect()
        guest.events.clear()
        message = "engine-0 does not serve the initial weights of model.path"
        if weights and action == "stop":
            with pytest.raises(EngineError, match=message):
                await fleet.pool.check_start(guest.start)
            return
        await fleet.pool.check_start(guest.start)
        told = [event for event in guest.events if message in event]
        assert len(told) == (weights > 0 and action == "warn")
        assert await guest.sample(fleet) == (0, weights)

    with_guest(kind(weights=weights, label="0"), tmp_path, scenario, canary=action)


@FAKES
def test_a_trainer_that_made_no_canary_is_believed(kind: type[FakeEngine], tmp_path: Path) -> None:
    async def scenario(guest: Guest) -> None:
        fleet = await guest.connect()
        num_calls = len(guest.fake.calls)
        (guest.start / CANARY).unlink()
        await fleet.pool.check_start(guest.start)
        assert len(guest.fake.calls) == num_calls

    with_guest(kind(weights=7, label="0"), tmp_path, scenario)


@FAKES
def test_a_server_restarted_on_another_model_before_the_first_update_stays_out(
    kind: type[FakeEngine], tmp_path: Path
) -> None:
    async def scenario(guest: Guest) -> None:
        fleet = await guest.connect()
        await fleet.pool.check_start(guest.start)
        keeper = asyncio.create_task(fleet.pool.run())
        guest.fake.restart()
        guest.fake.weights = 7
        fleet.pool.eject("engine-0", "it was restarted")
        await guest.until_told("engine-0 is still out: engine engine-0 does not serve the initial")
        assert not fleet.pool.live
        guest.fake.restart()
        await guest.until_told("engine-0 is back")
        assert await guest.sample(fleet) == (0, 0)
        keeper.cancel()
        await asyncio.wait({keeper})

    with_guest(kind(), tmp_path, scenario)


def test_an_embedded_engine_on_another_model_of_the_same_shape_is_refused(tmp_path: Path) -> None:
    folders = [save(random_model(seed), tmp_path / str(seed)) for seed in (1, 2)]
    (tmp_path / CANARY).write_text(make_canary(random_model(1), 0).to_json())

    async def fleet_on(folder: Path, **settings: Any) -> Fleet:
        config = {"max_model_len": MAX_POSITIONS, "count": 1, **settings}
        return await start_engines(
            EngineConfig.model_validate(config),
            model_dir=folder,
            logs_dir=tmp_path,
            start_seconds=60,
        )

    async def scenario() -> None:
        own = await fleet_on(folders[0])
        try:
            await own.pool.check_start(tmp_path)
        finally:
            await own.stop(5)
        other = await fleet_on(folders[1])
        try:
            guest = await fleet_on(folders[0], urls=other.urls)
            with pytest.raises(EngineError, match="engine-0 does not serve the initial weights"):
                await guest.pool.check_start(tmp_path)
            await guest.stop(1)
        finally:
            await other.stop(5)

    asyncio.run(scenario())
