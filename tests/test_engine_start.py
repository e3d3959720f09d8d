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
from headway.engines.vllm import VllmEngine
from headway.errors import EngineError
from headway.ports import GenerateRequest, PublishedWeights
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
@pytest.mark.parametrize(
    ("served", "wanted"), [("bfloat16", "float32"), ("float16", "float16"), (None, "bfloat16")]
)
def test_a_server_that_computes_in_something_else_is_told(
    kind: type[FakeEngine], served: str | None, wanted: str, tmp_path: Path
) -> None:
    async def scenario(guest: Guest) -> None:
        await guest.connect()
        told = [event for event in guest.events if event.startswith("warning")]
        assert len(told) == (served == "bfloat16")
        assert not told or "computes in bfloat16, but engine.dtype is float32" in told[0]
        assert not told or "--dtype float32" in told[0]

    with_guest(kind(dtype=served), tmp_path, scenario, dtype=wanted)


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


@FAKES
@pytest.mark.parametrize("mode", ["keep", "interrupt", "finish", "in place"])
@pytest.mark.parametrize(
    ("label", "version"),
    [("20", 14), ("20", 0), ("0", 14), ("default", 14)],
    ids=["resumed", "second run", "restarted", "restarted without a label"],
)
def test_a_server_that_serves_something_else_loads_what_the_run_begins_with(
    kind: type[FakeEngine], mode: str, label: str, version: int, tmp_path: Path
) -> None:
    weights = 0 if label == "default" else int(label)
    fake = kind(weights=weights, label=label)
    if isinstance(fake, FakeSglang):
        fake.told_label = label

    async def scenario(guest: Guest) -> None:
        fleet = await guest.connect()
        (told,) = guest.events
        served = "weights without a label" if label == "default" else f"version '{label}'"
        assert f"it served {served}, and was told to load those that this run begins with" in told
        await fleet.pool.check_start(guest.start)
        assert await guest.sample(fleet) == (version, version)
        following = weights_folder(tmp_path, version + 1)
        await fleet.pool.update_weights(PublishedWeights(version=version + 1, path=following))
        assert await guest.sample(fleet, 1) == (version + 1, version + 1)

    settings: dict[str, Any] = {"update_mode": mode, "check_weights": "off"}
    if mode == "in place":
        settings |= {"update_mode": "keep", "clear_cache": False}
    with_guest(fake, tmp_path, scenario, version=version, **settings)


@FAKES
def test_keys_and_values_of_another_run_are_dropped_whatever_the_update_mode(
    kind: type[FakeEngine], tmp_path: Path
) -> None:
    """Two runs that keep their caches call different weights version 1."""
    fake = kind()
    settings: dict[str, Any] = {"clear_cache": False, "check_weights": "off", "canary": "off"}
    first = PublishedWeights(version=1, path=weights_folder(tmp_path, 5))
    second = PublishedWeights(version=1, path=weights_folder(tmp_path, 6))

    async def scenario(guest: Guest) -> None:
        for weights, truth in ((first, 5), (second, 6)):
            fleet = await guest.connect()
            assert await guest.sample(fleet) == (0, 0)
            await fleet.pool.update_weights(weights)
            assert await guest.sample(fleet, 1) == (1, truth)

    with_guest(fake, tmp_path, scenario, **settings)


@FAKES
def test_a_server_that_keeps_its_weights_is_refused(kind: type[FakeEngine], tmp_path: Path) -> None:
    fake = kind(weights=20, label="20", keeps_weights=True)
    if isinstance(fake, FakeSglang):
        fake.told_label = "20"

    async def scenario(guest: Guest) -> None:
        fleet = await guest.connect()
        with pytest.raises(EngineError, match=r"does not serve version 14, which .*restart it on"):
            await fleet.pool.check_start(guest.start)

    with_guest(fake, tmp_path, scenario, version=14)


@FAKES
def test_a_server_that_does_not_find_the_folder_is_refused(
    kind: type[FakeEngine], tmp_path: Path
) -> None:
    fake = kind(weights=20, label="20")
    if isinstance(fake, FakeSglang):
        fake.told_label = "20"
    fake.load = lambda folder: False  # type: ignore[method-assign]

    async def scenario(guest: Guest) -> None:
        message = r"serves version '20', but .*begins at version 14.*told to load .*v000014"
        with pytest.raises(EngineError, match=message):
            await guest.connect()

    with_guest(fake, tmp_path, scenario, version=14)


def test_a_server_left_half_loaded_at_the_start_samples_nothing_before_a_load_went_through(
    tmp_path: Path,
) -> None:
    fake = FakeVllm(weights=20, label="20")
    start = weights_folder(tmp_path, 14)

    async def scenario() -> None:
        async with serving(fake.application()) as url:
            engine = VllmEngine(name="left", url=url, version=14, start=start)
            load, fake.load = fake.load, lambda folder: False  # type: ignore[method-assign]
            for _ in range(2):
                with pytest.raises(EngineError, match="nobody knows which weights it serves"):
                    await engine.connect(14)
            num_sampled = fake.num_sampled
            fake.load = load  # type: ignore[method-assign]
            await engine.connect(14)
            assert fake.num_sampled == num_sampled
            assert (fake.weights, fake.label, engine.version) == (14, "14", 14)
            await engine.aclose()

    asyncio.run(scenario())


def test_a_vllm_server_is_not_told_to_load_a_folder_without_an_output_head(tmp_path: Path) -> None:
    """It would keep the head of the run before, which the canary need not notice."""
    fake = FakeVllm(weights=20, label="20")
    folder = save(random_model(1), tmp_path / "model")

    async def scenario() -> None:
        async with serving(fake.application()) as url:
            config = EngineConfig.model_validate({"kind": "vllm", "urls": [url]})
            with pytest.raises(EngineError, match=r"begins at version 0: start it again on the"):
                await start_engines(config, model_dir=folder, logs_dir=tmp_path, start_seconds=10)
        assert "/collective_rpc" not in fake.calls

    asyncio.run(scenario())
