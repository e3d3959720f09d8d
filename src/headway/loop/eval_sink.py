"""The eval sink: finished eval samples in, mean rewards out. No advantages, no filters."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.core.rollout import GroupId, Rollout, Task
from headway.loop.dispatcher import FinishedSample
from headway.loop.rollout_runner import SampleRequest
from headway.loop.signal import Signal


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """One evaluation of one environment. `reward_mean` is None when every sample failed."""

    version: int
    env: str
    reward_mean: float | None
    num_rollouts: int
    num_failed: int
    eval_seconds: float
    head: int | None
    """Oldest and newest version that sampled it: training goes on meanwhile."""
    tail: int | None

    def row(self) -> dict[str, Any]:
        """As a metric row."""
        return {"kind": "eval", **{name: getattr(self, name) for name in self.__slots__}}


class EvalSink:
    """Runs one evaluation at a time, on the same tasks each time, alongside training.

    An evaluation that is due while one runs is skipped, except the last, which waits its turn.

    Args:
        tasks: held-out tasks of all environments.
        every: versions between two evaluations; 0: there are none.
        results: of an earlier life of the run; what was evaluated is not evaluated again.
        submit: hands samples to the dispatcher; synchronous.
        on_result: called for every environment of a finished evaluation; synchronous.
    """

    def __init__(
        self,
        *,
        tasks: Sequence[Task],
        every: int,
        results: Sequence[EvalResult] = (),
        temperature: float,
        submit: Callable[[list[SampleRequest]], None],
        on_result: Callable[[EvalResult], None],
    ) -> None:
        self._tasks = tasks
        self._every = every
        self.results = [*results]
        self._temperature = temperature
        self._submit = submit
        self._on_result = on_result
        self._next_id = 0
        self._version: int | None = None
        self._due: int | None = None
        self._started_at = 0.0
        self._missing = 0
        self._rollouts: Mapping[str, list[Rollout]] = {}
        self._failed: Mapping[str, int] = {}
        self._changed = Signal()

    def owes(self) -> str | None:
        """What the running evaluation lacks, in words; None: none is running."""
        if self._version is None:
            return None
        return f"{self._missing} rollouts of the evaluation of version {self._version}"

    def start_due(self, versions: range) -> bool:
        """Evaluate the last of these versions if one of them is due; False when that cannot be
        done, because the evaluation before is still running."""
        return not any(map(self._is_due, versions)) or self.start(versions[-1])

    def _is_due(self, version: int) -> bool:
        is_done = any(one.version == version for one in self.results)
        return self._every > 0 and version % self._every == 0 and not is_done

    def start(self, version: int, *, is_last: bool = False) -> bool:
        """Evaluate `version`; False when one is running (the last one is then queued)."""
        if not self._tasks:
            return True
        if self._version is not None:
            if is_last:
                self._due = version
            return False
        self._version = version
        self._started_at = asyncio.get_running_loop().time()
        self._missing = len(self._tasks)
        self._rollouts = defaultdict(list)
        self._failed = defaultdict(int)
        requests = []
        for task in self._tasks:
            requests.append(
                SampleRequest(
                    group_id=GroupId(self._next_id),
                    task=task,
                    group_size=1,
                    temperature=self._temperature,
                    eval_version=version,
                )
            )
            self._next_id += 1
        self._submit(requests)
        return True

    def add(self, finished: FinishedSample) -> None:
        """Take a finished eval sample; the last one closes the evaluation."""
        env = finished.request.task.env
        if finished.group is None:
            self._failed[env] += 1  # type: ignore[index]
        else:
            self._rollouts[env].extend(finished.group.rollouts)
        self._missing -= 1
        if self._missing == 0:
            self._close()

    def _close(self) -> None:
        version, self._version = self._version, None
        assert version is not None
        seconds = asyncio.get_running_loop().time() - self._started_at
        for env in dict.fromkeys(task.env for task in self._tasks):
            rollouts = self._rollouts[env]
            runs = [rollout.version_runs for rollout in rollouts if rollout.version_runs]
            rewards = [rollout.reward for rollout in rollouts]
            result = EvalResult(
                version=version,
                env=env,
                reward_mean=float(np.mean(rewards)) if rewards else None,
                num_rollouts=len(rollouts),
                num_failed=self._failed[env],
                eval_seconds=seconds,
                head=min((r.head for r in runs), default=None),
                tail=max((r.tail for r in runs), default=None),
            )
            self.results.append(result)
            self._on_result(result)
        due, self._due = self._due, None
        if due is not None:
            self.start(due)
        self._changed.notify()

    async def idle(self) -> None:
        """Return once no evaluation is running or due; the caller has the deadline."""
        await self._changed.until(lambda: self._version is None)
