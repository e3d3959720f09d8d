"""The engine's side of the canary: does it answer like the weights that it was told to load?

Two things are looked at. The answer itself: a token that the weights find unlikely, or another
log-probability, comes from other weights (an output head that was not replaced, a tensor that was
missing, keys and values of an older version in the prefix cache, a label on the wrong weights).
And its change since the version before: small updates stay within any tolerance, but an engine
whose answers do not move while those of the trainer do has not loaded them.
"""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from headway.core.rollout import Completion
from headway.errors import EngineError, WrongVersion
from headway.ports import Engine, GenerateRequest, PublishedWeights
from headway.weights.canary import Canary, read_canary

CanaryAction = Literal["warn", "stop"]
_LEAST_MOVE = 1e-4
"""Nats by which the trainer's log-probabilities must have moved to conclude anything from it."""
_NOISE_FACTOR = 4.0
"""... and how many times as far as engine and trainer differed before."""
_LEAST_SHARE = 0.5
"""Of the trainer's move that the engine must show."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The one token that an engine answered a prompt with."""

    token_id: int
    logprob: float


@dataclass(slots=True)
class EngineCanary:
    """Asks one kind of question of all engines, and remembers what each said last time.

    Args:
        action: what follows when an engine fails: `warn` is an event, `stop` ends the run.
        tolerance: in nats, between the engine's log-probability and the trainer's.
    """

    action: CanaryAction = "stop"
    tolerance: float = 0.1
    _last: dict[str, tuple[Canary, Mapping[int, Answer]]] = field(default_factory=dict)

    async def check(
        self,
        engine: Engine,
        weights: PublishedWeights,
        *,
        max_model_len: int | None = None,
        named: str | None = None,
    ) -> str | None:
        """What is wrong with an engine that serves `weights`; None: nothing, or it cannot be told
        (published without a canary, or a newer version came meanwhile). `named` is what they are
        called, `version 3` if not given. Raises EngineError when the engine fails at answering,
        WeightsError when the canary is damaged."""
        if weights.path is None:
            return None
        canary = await asyncio.to_thread(read_canary, weights.path)
        if canary is None:
            return None
        if canary.version != weights.version:
            return (
                f"the weights of version {weights.version} carry the canary of version "
                f"{canary.version}"
            )
        limit = max_model_len or math.inf
        asked = [i for i, probe in enumerate(canary.probes) if len(probe.token_ids) < limit]
        completions = await asyncio.gather(*(self._ask(engine, canary, i) for i in asked))
        answers: dict[int, Answer] = {}
        for number, completion in zip(asked, completions, strict=True):
            if not len(completion.token_ids):
                continue
            if completion.version_runs.tail != weights.version:
                if completion.version_runs.tail < weights.version:
                    raise WrongVersion(
                        f"engine {engine.name} answers under version "
                        f"{completion.version_runs.tail} after it loaded {weights.version}"
                    )
                return None
            answers[number] = Answer(int(completion.token_ids[0]), float(completion.logprobs[0]))
        problem = self._compare(canary, answers) or self._compare_move(engine.name, canary, answers)
        if problem is None:
            self._last[engine.name] = (canary, answers)
            return None
        named = named or f"version {weights.version}"
        return f"engine {engine.name} does not serve {named}: {problem}"

    async def _ask(self, engine: Engine, canary: Canary, number: int) -> Completion:
        return await engine.generate(
            GenerateRequest(
                request_id=f"c{canary.version:09d}-{number:04d}-00-0000",
                token_ids=[*canary.probes[number].token_ids],
                max_tokens=1,
                temperature=0.0,
            )
        )

    def _compare(self, canary: Canary, answers: Mapping[int, Answer]) -> str | None:
        worst, worst_at = 0.0, -1
        for number, answer in answers.items():
            probe = canary.probes[number]
            expected = probe.top.get(answer.token_id)
            if expected is None:
                likeliest = max(probe.top, key=lambda token: probe.top[token])
                return (
                    f"after {len(probe.token_ids)} fixed tokens it samples {answer.token_id}, "
                    f"which is not among the {len(probe.top)} likeliest of the published weights "
                    f"(first: {likeliest})"
                )
            difference = abs(answer.logprob - expected)
            if difference > worst:
                worst, worst_at = difference, number
        if worst <= self.tolerance:
            return None
        return (
            f"its log-probability after {len(canary.probes[worst_at].token_ids)} fixed tokens is "
            f"{worst:.3g} nats from that of the published weights (tolerance {self.tolerance:g}, "
            "engine.canary_tolerance)"
        )

    def _compare_move(self, name: str, canary: Canary, answers: Mapping[int, Answer]) -> str | None:
        if name not in self._last or self._last[name][0].version >= canary.version:
            return None
        old, old_answers = self._last[name]
        moves: list[tuple[float, float, float]] = []
        """Trainer's move, engine's move, and how far the two were apart before."""
        for number, new in answers.items():
            before = old_answers.get(number)
            if before is None or number >= len(old.probes):
                continue
            was = old.probes[number].top.get(new.token_id)
            if before.token_id != new.token_id or was is None:
                return None  # it answers something else than before: it moved
            now = canary.probes[number].top[new.token_id]
            moves.append((now - was, new.logprob - before.logprob, before.logprob - was))
        square = sum(trainers**2 for trainers, _, _ in moves)
        noise = sum(apart**2 for _, _, apart in moves)
        if not moves or math.sqrt(square / len(moves)) < _LEAST_MOVE:
            return None
        if square < _NOISE_FACTOR**2 * noise:
            return None
        share = sum(trainers * engines for trainers, engines, _ in moves) / square
        if share >= _LEAST_SHARE:
            return None
        return (
            f"since version {old.version} the trainer's log-probabilities moved by "
            f"{math.sqrt(square / len(moves)):.2g} nats, its own by {share:.0%} of that: it still "
            "answers from the weights before"
        )


def canary_failed(problem: str) -> EngineError:
    """What ends a run with `engine.canary: stop`."""
    return EngineError(
        f"{problem}. Rollouts from it would be trained under the wrong version; engine.canary: "
        "warn goes on all the same"
    )
