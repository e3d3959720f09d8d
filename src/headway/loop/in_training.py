"""What the trainer has: batches from the moment they are shipped until their version is served."""

from headway.errors import TrainerError
from headway.loop.step_log import ShippedBatch
from headway.ports import PublishedWeights

SHORT_UPDATE = 0.25
"""An update that takes less than this share of a step is worth waiting for."""


class InTraining:
    """Matches shipped batches with the versions that they produced.

    Engines that load slowly pass versions over, so one served version can settle several batches.
    Instants `at` are seconds since the start of the run.
    """

    def __init__(self) -> None:
        self._shipped: dict[int, ShippedBatch] = {}
        self._announced: dict[int, tuple[float, PublishedWeights]] = {}
        self._served_at = 0.0
        self.updates_are_short = True
        """Whether what is admitted now would better wait for an update that is under way."""

    def shipped(self, batch: ShippedBatch) -> None:
        """The trainer has it."""
        self._shipped[batch.step] = batch

    def announced(self, at: float, weights: PublishedWeights) -> None:
        """The trainer has published a version."""
        self._announced[weights.version] = (at, weights)

    def served(
        self, at: float, version: int, *, first: int
    ) -> list[tuple[ShippedBatch, PublishedWeights]]:
        """All engines serve `version`: the batches from `first` on that it settles, each with the
        version that it produced, as the trainer published it.

        Raises:
            TrainerError: one of them was never shipped.
        """
        announced_at, newest = self._announced[version]
        self.updates_are_short = at - announced_at < SHORT_UPDATE * (at - self._served_at)
        self._served_at = at
        settled = []
        for step in range(first, version):
            batch = self._shipped.pop(step, None)
            if batch is None:
                raise TrainerError(
                    f"the trainer published version {version}, but batch {step} was never shipped"
                )
            _, weights = self._announced.pop(step + 1, (at, newest))
            settled.append((batch, weights))
        return settled
