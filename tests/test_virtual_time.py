"""The virtual clock, and deadlines under it."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.loop.deadlines import Deadlines
from headway.loop.signal import Signal
from headway.sim.clock import Deadlock, run_virtual


@given(st.lists(st.integers(0, 5), max_size=30))
def test_timers_fire_in_order_and_first_set_first_among_equals(delays: list[int]) -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        fired: list[int] = []
        for index, delay in enumerate(delays):
            loop.call_later(delay, fired.append, index)
        await asyncio.sleep(10)
        assert loop.time() == 10
        return fired

    assert run_virtual(main()) == sorted(range(len(delays)), key=lambda index: delays[index])


def test_a_wait_that_nobody_ends_is_a_deadlock_and_not_a_hang() -> None:
    async def main() -> None:
        await Signal().until(lambda: False)

    with pytest.raises(Deadlock):
        run_virtual(main())


def test_a_year_passes_at_once() -> None:
    assert run_virtual(asyncio.sleep(365 * 86_400, "later")) == "later"


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=20),
    st.integers(1, 10),
)
def test_deadlines_agree_with_asyncio_timeout(work: list[tuple[int, int]], limit: int) -> None:
    async def main() -> None:
        deadlines: Deadlines[str] = Deadlines(limit + 0.5)
        loop = asyncio.get_running_loop()

        async def one(start: int, seconds: int) -> tuple[bool, float]:
            await asyncio.sleep(start)
            try:
                with deadlines.limit("work"):
                    await asyncio.sleep(seconds)
            except TimeoutError:
                return False, loop.time()
            return True, loop.time()

        results = await asyncio.gather(*(one(*times) for times in work))
        for (start, seconds), (finished, at) in zip(work, results, strict=True):
            assert finished == (seconds <= limit)
            assert at == start + min(seconds, limit + 0.5)

    run_virtual(main())


def test_a_cancellation_from_outside_stays_a_cancellation() -> None:
    async def main() -> None:
        deadlines: Deadlines[str] = Deadlines(5)

        async def one() -> None:
            with deadlines.limit("work"):
                await asyncio.sleep(100)

        task = asyncio.ensure_future(one())
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(100)

    run_virtual(main())
