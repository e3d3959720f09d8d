"""Several task sources as one, by weight, with one position that restores all of them."""

from collections.abc import Mapping, Sequence

import msgspec

from headway.core.rollout import Task
from headway.errors import ConfigError
from headway.ports import TaskSource


class MixedTasks:
    """Interleaves sources so that after any number of tasks each has had its share, to within one.

    Deterministic: the source of task `n` depends on the weights alone. Position `n` of the mixture
    means that `n` tasks were taken, and restoring it restores each source to the number of tasks
    that were its own. So a mixed source must number its tasks 0, 1, 2, ... .

    The mixture ends when the source whose turn it is ends.

    Args:
        sources: by the name of their environment.
        weights: one per source, positive, of any sum.
    """

    def __init__(self, sources: Mapping[str, TaskSource], weights: Sequence[float]) -> None:
        self._sources = dict(sources)
        total = sum(weights)
        self._shares = {
            name: weight / total for name, weight in zip(self._sources, weights, strict=True)
        }
        self._taken = dict.fromkeys(self._sources, 0)
        self._position = 0

    async def next_task(self) -> Task | None:
        """The next task, its position being the mixture's.

        Raises:
            ConfigError: when a source makes a task for another environment.
        """
        name = self._next_name()
        task = await self._sources[name].next_task()
        if task is None:
            return None
        if task.env != name:
            raise ConfigError(
                f"the task source of environment {name!r} made a task for {task.env!r}; every task "
                "must bear the `name` that the factory was called with"
            )
        position = self._position
        self._count(name)
        return msgspec.structs.replace(task, position=position)

    def restore(self, position: int) -> None:
        """Make `position` the next one. Counts up to it, well under a second per million."""
        self._taken = dict.fromkeys(self._sources, 0)
        self._position = 0
        while self._position < position:
            self._count(self._next_name())
        for name, taken in self._taken.items():
            self._sources[name].restore(taken)

    def _next_name(self) -> str:
        """The source that is furthest behind its share; the earlier one when several are."""
        return max(
            self._sources,
            key=lambda name: self._shares[name] * (self._position + 1) - self._taken[name],
        )

    def _count(self, name: str) -> None:
        self._taken[name] += 1
        self._position += 1
