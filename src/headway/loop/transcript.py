"""The recorder behind `ports.Transcript`: one rollout while it grows."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from headway.core.rollout import (
    Completion,
    FinishReason,
    GroupId,
    Rollout,
    Task,
    Timings,
)
from headway.core.versions import VersionRuns
from headway.errors import EngineError, EnvironmentFailure, UnusableAnswer
from headway.ports import GenerateRequest, Score

Generate = Callable[[GenerateRequest], Awaitable[Completion]]

_NUMBERS = (float, int, np.number)
_NO_TOKENS = np.zeros(0, np.int32)


class RecordedTranscript:
    """Records token ids, loss mask, log-probabilities and version runs of one rollout as they come.

    Args:
        task: the prompt.
        request_id: prefix of the engine requests; each turn appends its number.
        generate: the engine.
        max_tokens: per turn.
        temperature: of the sampling.
    """

    def __init__(
        self,
        *,
        task: Task,
        request_id: str,
        generate: Generate,
        max_tokens: int,
        temperature: float,
    ) -> None:
        self._task = task
        self._request_id = request_id
        self._generate = generate
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._tokens: list[int] = []
        self._newest: NDArray[np.int32] = _NO_TOKENS
        """Sampled tokens that `_tokens` lacks so far: the last turn's never need to be a list."""
        self._turns: list[tuple[int, Completion]] = []
        self._now = asyncio.get_running_loop().time
        self._started_at = self._now()
        self.generation_seconds = 0.0
        self.waits_for_engine = False
        """Whether it is inside an engine call: who is to blame when its deadline passes."""
        self.engine_error: EngineError | None = None

    @property
    def task(self) -> Task:
        """The prompt to run."""
        return self._task

    @property
    def completions(self) -> list[Completion]:
        """The model's turns so far."""
        return [completion for _, completion in self._turns]

    def observe(self, token_ids: list[int]) -> None:
        """Append tokens that the policy did not sample."""
        self._take_newest()
        self._tokens.extend(token_ids)

    def _take_newest(self) -> None:
        if len(self._newest):
            self._tokens.extend(self._newest.tolist())
            self._newest = _NO_TOKENS

    async def act(self, *, max_tokens: int | None = None) -> Completion:
        """Sample one turn after everything so far. Raises EngineError, EnvironmentFailure."""
        self._take_newest()
        limit = self._max_tokens if max_tokens is None else min(max_tokens, self._max_tokens)
        if not self._tokens:
            raise EnvironmentFailure(
                f"environment {self._task.env!r} called act() before it observed any prompt token"
            )
        if limit < 1:
            raise EnvironmentFailure(
                f"environment {self._task.env!r} called act(max_tokens={max_tokens}): at least 1"
            )
        request = GenerateRequest(
            request_id=f"{self._request_id}-{len(self._turns):04d}",
            token_ids=self._tokens.copy(),
            max_tokens=limit,
            temperature=self._temperature,
        )
        asked_at = self._now()
        self.waits_for_engine = True
        try:
            completion = await self._generate(request)
            _check(request, completion)
        except EngineError as error:
            self.engine_error = error
            raise
        finally:
            self.generation_seconds += self._now() - asked_at
        self.waits_for_engine = False
        self.engine_error = None
        self._turns.append((len(self._tokens), completion))
        self._newest = completion.token_ids
        return completion

    def finish(
        self, *, group_id: GroupId, episode: int, score: Score, reward_seconds: float
    ) -> Rollout:
        """The finished rollout. Raises EnvironmentFailure for an episode without a model turn or a
        reward that is not a finite number."""
        if not self._turns:
            raise EnvironmentFailure(
                f"environment {self._task.env!r} ended task {self._task.key!r} without act()"
            )
        if not isinstance(score, Score):
            raise EnvironmentFailure(
                f"environment {self._task.env!r} gave {score!r} for task {self._task.key!r}: "
                "score() must return a Score",
                stage="reward",
            )
        reward = score.reward
        if not isinstance(reward, _NUMBERS) or not math.isfinite(reward):
            raise EnvironmentFailure(
                f"environment {self._task.env!r} gave reward {reward!r} for task "
                f"{self._task.key!r}: a finite number is needed",
                stage="reward",
            )
        for name, value in score.metrics.items():
            if not isinstance(value, _NUMBERS) or not math.isfinite(value):
                raise EnvironmentFailure(
                    f"environment {self._task.env!r} gave metric {name} = {value!r} for task "
                    f"{self._task.key!r}: a finite number is needed",
                    stage="reward",
                )
        num_known = len(self._tokens)
        num_tokens = num_known + len(self._newest)
        token_ids = np.empty(num_tokens, np.int32)
        token_ids[:num_known] = self._tokens
        token_ids[num_known:] = self._newest
        loss_mask = np.zeros(num_tokens, np.bool_)
        logprobs = np.zeros(num_tokens, np.float32)
        for start, completion in self._turns:
            end = start + len(completion.token_ids)
            loss_mask[start:end] = True
            logprobs[start:end] = completion.logprobs
        runs = [completion.version_runs for _, completion in self._turns]
        now = self._now()
        total = now - self._started_at
        return Rollout(
            group_id=group_id,
            episode=episode,
            env=self._task.env,
            token_ids=token_ids,
            loss_mask=loss_mask,
            logprobs=logprobs,
            version_runs=runs[0] if len(runs) == 1 else VersionRuns.of(chain.from_iterable(runs)),
            reward=float(reward),
            num_turns=len(self._turns),
            finish_reason=FinishReason(self._turns[-1][1].finish_reason),
            timings=Timings(
                started_at=self._started_at,
                finished_at=now,
                generation_seconds=self.generation_seconds,
                environment_seconds=max(total - self.generation_seconds - reward_seconds, 0.0),
                reward_seconds=reward_seconds,
            ),
            metrics=score.metrics,
        )


def _check(request: GenerateRequest, completion: Completion) -> None:
    """Raise UnusableAnswer for a completion whose parts do not belong to each other."""
    num_tokens = len(completion.token_ids)
    num_logprobs, num_stamped = len(completion.logprobs), completion.version_runs.num_tokens
    if num_logprobs != num_tokens or num_stamped != num_tokens:
        raise UnusableAnswer(
            f"the answer to {request.request_id} has {num_tokens} tokens, {num_logprobs} "
            f"log-probabilities and the versions of {num_stamped}: all must be equally many"
        )
