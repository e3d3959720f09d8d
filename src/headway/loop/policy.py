"""The policy handle: the one place that knows the current version."""

from collections.abc import Callable

from headway.errors import InvariantError
from headway.loop.signal import Signal


class PolicyHandle:
    """The version that engines serve. Everybody reads it here; only the weight watcher raises it.

    `advance` wakes every waiter itself and calls observers synchronously: no observer can block a
    version bump, and nobody has to be told separately.
    """

    def __init__(self, version: int = 0) -> None:
        self._version = version
        self._changed = Signal()
        self._observers: list[Callable[[int], None]] = []

    @property
    def version(self) -> int:
        """Number of policy updates applied."""
        return self._version

    def subscribe(self, observer: Callable[[int], None]) -> None:
        """Call `observer(version)` at every bump; it must not block."""
        self._observers.append(observer)

    def advance(self, version: int) -> None:
        """Bump to `version`, tell observers, wake waiters. Raises InvariantError going back."""
        if version <= self._version:
            raise InvariantError(f"the version cannot go from {self._version} to {version}")
        self._version = version
        for observer in self._observers:
            observer(version)
        self._changed.notify()

    async def reached(self, version: int) -> None:
        """Return once the version is at least `version`; the caller has the deadline."""
        await self._changed.until(lambda: self._version >= version)
