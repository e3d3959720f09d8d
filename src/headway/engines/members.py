"""The members of a pool: which takes requests, how busy each is, and which gets the next one."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from headway.engines.capabilities import Capabilities, EngineClient
from headway.ports import Engine, PublishedWeights

OnEvent = Callable[[str, str], None]
"""Level (`info`, `warning`, `error`) and text."""
_LEAST_SHARE = 0.1
"""Of its full share of requests, for an engine that has just come in."""
_MAX_SESSIONS = 65_536


@dataclass(slots=True, eq=False)
class Member:
    """One engine of a pool.

    `is_live`: it takes requests; it serves `version` then. `limits` are the deadlines of the
    requests in flight, which an ejection moves to now. `lock` is held while its weights change or
    its health is checked, so that neither happens during the other.
    """

    engine: Engine
    version: int
    is_live: bool = True
    is_new: bool = False
    """It has never been live."""
    reason: str = ""
    """Why it is out."""
    out_since: float = 0.0
    live_since: float = float("-inf")
    held_until: float = float("-inf")
    num_failures: int = 0
    """In a row."""
    limits: set[asyncio.Timeout] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    keeper: "asyncio.Task[None] | None" = None

    @property
    def name(self) -> str:
        """The engine's own."""
        return self.engine.name

    @property
    def client(self) -> EngineClient | None:
        """The engine, where it is one on a server."""
        return self.engine if isinstance(self.engine, EngineClient) else None

    @property
    def capabilities(self) -> Capabilities | None:
        """Found at connect, where it is one on a server."""
        return self.client.capabilities if self.client is not None else None

    @property
    def in_flight(self) -> int:
        """Requests sent and not yet answered."""
        return len(self.limits)

    @contextmanager
    def running(self, limit: asyncio.Timeout) -> Iterator[None]:
        """A request in flight; `limit` is what an ejection cuts it off with."""
        self.limits.add(limit)
        try:
            yield
        finally:
            self.limits.discard(limit)


class Roster:
    """Who is in a pool, who of them is live, and what they are to serve.

    Args:
        engines: names unique.
        version: what they serve at the start.
        on_event: is told who comes and goes.
    """

    def __init__(self, engines: Sequence[Engine], version: int, on_event: OnEvent) -> None:
        self.members = {engine.name: Member(engine, version) for engine in engines}
        self.start_version = version
        self.target: PublishedWeights | None = None
        """The newest weights; None: still those of the start."""
        self.say = on_event
        self._changed = asyncio.Event()

    @property
    def live(self) -> list[Member]:
        """Those that take requests."""
        return [member for member in self.members.values() if member.is_live]

    def add(self, engine: Engine) -> Member:
        """A member that is out until it is admitted. Raises ValueError for a name that is taken."""
        if engine.name in self.members:
            raise ValueError(f"the pool has an engine {engine.name} already")
        member = Member(
            engine, self.start_version, is_live=False, is_new=True, reason="it is joining"
        )
        member.out_since = asyncio.get_running_loop().time()
        self.members[engine.name] = member
        return member

    def admit(self, member: Member, version: int) -> None:
        """It is healthy and serves `version`, which is the newest: requests may go there."""
        now = asyncio.get_running_loop().time()
        verb = "joined" if member.is_new else "is back"
        member.is_live, member.is_new = True, False
        member.live_since, member.held_until = now, float("-inf")
        member.version, member.num_failures, member.reason = version, 0, ""
        member.wake.clear()
        self._notify()
        seconds = now - member.out_since
        self.say("info", f"engine {member.name} {verb} after {seconds:.1f} s at version {version}")

    def eject(self, member: Member, reason: str, *, level: str = "warning") -> None:
        """No requests from now on; those in flight end at once. Harmless when it is out."""
        if not member.is_live:
            return
        now = asyncio.get_running_loop().time()
        member.is_live, member.reason, member.out_since = False, reason, now
        # Those that are cut off now are no longer its own, should it be back before they notice.
        cut_off, member.limits = member.limits, set()
        for limit in cut_off:
            limit.reschedule(now)
        member.wake.set()
        self._notify()
        self.say(level, f"engine {member.name} ejected: {reason}; {len(cut_off)} requests move on")

    async def until_changed(self, until: float) -> None:
        """Until a member comes or goes, or this instant of the loop's time."""
        try:
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        except TimeoutError:
            return

    def nobody(self) -> str:
        """Why no engine is live, with the reason of each."""
        reasons = [f"{name}: {member.reason}" for name, member in self.members.items()]
        return "no engine is live. " + "; ".join(reasons or ["the pool is empty"])

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Router:
    """Least busy first, but the turns of one rollout stay where their prefix is cached.

    Args:
        slow_start_seconds: an engine that has come in gets its full share of requests after this
            long; before, it counts as busier than it is, so that a cold engine is not flooded.
    """

    def __init__(self, slow_start_seconds: float) -> None:
        self._slow_start_seconds = slow_start_seconds
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def choose(self, members: Sequence[Member], request_id: str, now: float) -> Member:
        """One of `members`, of which there is at least one."""
        session = request_id.rpartition("-")[0]
        name = self._sessions.get(session)
        chosen = next((member for member in members if member.name == name), None)
        if chosen is None:
            chosen = min(members, key=lambda member: self._load(member, now))
        self._sessions[session] = chosen.name
        self._sessions.move_to_end(session)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return chosen

    def _load(self, member: Member, now: float) -> float:
        since = now - member.live_since
        if since >= self._slow_start_seconds:
            return float(member.in_flight)
        share = max(_LEAST_SHARE, since / self._slow_start_seconds)
        return (member.in_flight + 1) / share - 1
