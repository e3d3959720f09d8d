"""The policy handle: the one place that knows the current version."""

from headway.errors import InvariantError
from headway.loop.signal import Signal


class PolicyHandle:
    """The version that engines serve. Everybody reads it here; only the weight watcher raises it.

    `advance` wakes every waiter itself: nobody has to be told separately.
    """

    def __init__(self, version: int = 0) -> None:
        self._version = version
        self._announced = version
        self._changed = Signal()

    @property
    def version(self) -> int:
        """Number of policy updates applied."""
        return self._version

    @property
    def announced(self) -> int:
        """Newest version that the trainer has published; above `version` while engines load it."""
        return self._announced

    def announce(self, version: int) -> None:
        """The trainer has published `version`: wake waiters. Raises InvariantError going back."""
        if version <= self._announced:
            raise InvariantError(f"version {version} was published after {self._announced}")
        self._announced = version
        self._changed.notify()

    def advance(self, version: int) -> None:
        """All engines serve `version`: wake waiters. Raises InvariantError going back, or when it
        was not announced."""
        if not self._version < version <= self._announced:
            raise InvariantError(
                f"the version cannot go from {self._version} to {version} "
                f"({self._announced} was published)"
            )
        self._version = version
        self._changed.notify()

    async def reached(self, version: int) -> None:
        """Return once the version is at least `version`; the caller has the deadline."""
        await self._changed.until(lambda: self._version >= version)

    async def published(self, version: int) -> None:
        """Return once `version` is announced; the caller has the deadline."""
        await self._changed.until(lambda: self._announced >= version)
