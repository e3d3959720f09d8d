"""The rollout runner: plays all rollouts of one sample, with retries by failure class."""

import asyncio
from collections.abc import Mapping
from itertools import islice

import msgspec

from headway.config import RolloutConfig
from headway.core.rollout import Group, GroupId, Rollout, Task
from headway.errors import EngineError, EnvironmentFailure
from headway.loop.deadlines import Deadlines
from headway.loop.transcript import RecordedTranscript
from headway.ports import Engine, Environment

RETRY_SECONDS = 0.2
"""Pause before the first retry after an engine failed; it doubles with every further one."""


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sample to run: `group_size` rollouts of one task."""

    group_id: GroupId
    task: Task
    group_size: int
    temperature: float
    eval_version: int | None = None
    """For an eval sample, the version whose evaluation it belongs to; None: training."""

    @property
    def is_eval(self) -> bool:
        """Whether this sample belongs to an evaluation and is never trained."""
        return self.eval_version is not None


class RolloutRunner:
    """Turns a SampleRequest into a Group.

    A rollout that fails is retried alone, at most `max_infrastructure_retries` times for an engine
    and `max_environment_retries` times for an environment; then the whole sample fails and its
    siblings are cancelled. What the model does badly is data, not a failure.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        environments: Mapping[str, Environment],
        max_new_tokens: int,
        deadline_seconds: float,
        max_infrastructure_retries: int,
        max_environment_retries: int,
    ) -> None:
        self._engine = engine
        self._environments = environments
        self._max_new_tokens = max_new_tokens
        self._deadlines: Deadlines[RecordedTranscript] = Deadlines(deadline_seconds)
        self._max_infrastructure_retries = max_infrastructure_retries
        self._max_environment_retries = max_environment_retries
        self.num_retries = 0

    @classmethod
    def of(
        cls, rollout: RolloutConfig, *, engine: Engine, environments: Mapping[str, Environment]
    ) -> "RolloutRunner":
        """As section `rollout` has it."""
        return cls(
            engine=engine,
            environments=environments,
            max_new_tokens=rollout.max_new_tokens,
            deadline_seconds=rollout.deadline_seconds,
            max_infrastructure_retries=rollout.max_infrastructure_retries,
            max_environment_retries=rollout.max_environment_retries,
        )

    async def run(self, request: SampleRequest) -> Group:
        """Play the sample. Raises EngineError or EnvironmentFailure once retries are used up."""
        if request.group_size == 1:
            rollouts = [await self._with_retries(request, 0)]
        else:
            try:
                async with asyncio.TaskGroup() as tasks:
                    running = [
                        tasks.create_task(self._with_retries(request, episode))
                        for episode in range(request.group_size)
                    ]
            except ExceptionGroup as failures:
                known, unknown = failures.split((EngineError, EnvironmentFailure))
                if unknown is not None or known is None:
                    raise
                raise known.exceptions[0] from None
            rollouts = [task.result() for task in running]
        return Group(group_id=request.group_id, task=request.task, rollouts=tuple(rollouts))

    def oldest(self, count: int) -> list[str]:
        """The rollouts that have been running for longest, each in words."""
        now = asyncio.get_running_loop().time()
        return [
            f"task {one.task.key!r} of {one.task.env} ({now - since:.0f} s, in its "
            f"{'engine' if one.waits_for_engine else 'environment'})"
            for one, since in islice(self._deadlines.running(), count)
        ]

    @property
    def num_running(self) -> int:
        """Rollouts being played right now, those of evaluations included."""
        return self._deadlines.num_running

    def overdue(self) -> str | None:
        """The oldest rollout that was cancelled at its deadline and does not end; None: there is
        none. Code that swallows its cancellation does this."""
        for one, _ in self._deadlines.overdue():
            return f"the end of task {one.task.key!r} of environment {one.task.env!r}"
        return None

    async def _with_retries(self, request: SampleRequest, episode: int) -> Rollout:
        infrastructure = environment = 0
        while True:
            attempt = infrastructure + environment
            try:
                return await self._attempt(request, episode, attempt)
            except EngineError:
                infrastructure += 1
                if infrastructure > self._max_infrastructure_retries:
                    raise
                await asyncio.sleep(RETRY_SECONDS * 2 ** (infrastructure - 1))
            except EnvironmentFailure:
                environment += 1
                if environment > self._max_environment_retries:
                    raise
            self.num_retries += 1

    async def _attempt(self, request: SampleRequest, episode: int, attempt: int) -> Rollout:
        task = request.task
        environment = self._environments[task.env]
        kind = "e" if request.is_eval else "t"
        transcript = RecordedTranscript(
            task=task,
            request_id=f"{kind}{request.group_id:09d}-{episode:04d}-{attempt:02d}",
            generate=self._engine.generate,
            max_tokens=self._max_new_tokens,
            temperature=request.temperature,
        )
        try:
            with self._deadlines.limit(transcript):
                await environment.run(transcript)
        except TimeoutError as error:
            raise self._overdue(transcript, error) from error
        except EnvironmentFailure:
            raise
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            raise self._raised(task, error) from error
        except (Exception, SystemExit) as error:  # the user's code: it may raise anything
            if transcript.engine_error is not None:
                raise transcript.engine_error from error
            raise self._raised(task, error) from error
        if transcript.engine_error is not None:  # swallowed: never train what an engine broke
            raise transcript.engine_error
        return self._scored(environment, transcript, request.group_id, episode)

    @staticmethod
    def _raised(task: Task, error: BaseException) -> EnvironmentFailure:
        return EnvironmentFailure(
            f"environment {task.env!r} raised {type(error).__name__}: {error} on task {task.key!r}"
        )

    def _overdue(
        self, transcript: RecordedTranscript, error: TimeoutError
    ) -> EngineError | EnvironmentFailure:
        """Who held the rollout when its deadline passed (or an inner time limit rose)."""
        task = transcript.task
        if transcript.waits_for_engine:
            return EngineError(
                f"{self._engine.name} did not answer a rollout of task {task.key!r} "
                f"({task.env}) within rollout.deadline_seconds = {self._deadlines.seconds:g}"
            )
        return EnvironmentFailure(
            f"environment {task.env!r} did not end task {task.key!r} within "
            f"rollout.deadline_seconds = {self._deadlines.seconds:g} {error}".rstrip()
        )

    def _scored(
        self,
        environment: Environment,
        transcript: RecordedTranscript,
        group_id: GroupId,
        episode: int,
    ) -> Rollout:
        loop = asyncio.get_running_loop()
        task = transcript.task
        started_at = loop.time()
        try:
            score = environment.score(task, transcript.completions)
        except (Exception, SystemExit) as error:  # the user's code: it may raise anything
            raise EnvironmentFailure(
                f"the reward of environment {task.env!r} raised {type(error).__name__}: {error} "
                f"on task {task.key!r}",
                stage="reward",
            ) from error
        return transcript.finish(
            group_id=group_id,
            episode=episode,
            score=score,
            reward_seconds=loop.time() - started_at,
        )


def _is_cancelled() -> bool:
    """Whether somebody cancelled this task, as opposed to code in it that raises CancelledError."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
