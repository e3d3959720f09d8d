"""`S = 0` is the plain synchronous loop, bit for bit: real model, real trainer step."""

import asyncio
import zlib
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from headway.config import Config
from headway.core.advantages import Baseline, group_advantages
from headway.core.filters import rejection
from headway.core.rollout import (
    Batch,
    Completion,
    FinishReason,
    Group,
    GroupId,
    Rollout,
    Task,
    Timings,
    TrainableGroup,
)
from headway.core.versions import VersionRuns
from headway.loop.signal import Signal
from headway.ports import (
    EngineStatistics,
    GenerateRequest,
    PublishedWeights,
    Score,
    Transcript,
)
from headway.trainer.update import PolicyUpdater
from simulated import sim_config, simulate_in_memory
from tiny_policy import VOCABULARY, make_model

STEPS, BATCH, GROUP, MAX_TOKENS = 4, 4, 4, 6


@torch.no_grad()
def sample(model: torch.nn.Module, prompt: list[int], seed: int) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities, from nothing but weights, prompt and seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens, logprobs = list(prompt), []
    for _ in range(2 + seed % (MAX_TOKENS - 1)):
        logits = model(torch.tensor([tokens])).logits[0, -1]
        distribution = torch.log_softmax(logits, -1)
        token = int(torch.multinomial(distribution.exp(), 1, generator=generator))
        tokens.append(token)
        logprobs.append(float(distribution[token]))
    return tokens[len(prompt) :], logprobs


def seed_of(group_id: int, episode: int) -> int:
    return zlib.crc32(f"{group_id}/{episode}".encode())


def prompt_of(position: int) -> list[int]:
    return [1 + position % (VOCABULARY - 1), 2]


def reward_of(token_ids: list[int]) -> float:
    return float(sum(token_ids) % 7 == 0)


class InProcessPolicy:
    """Engine, trainer link, weight channel and trainer around one updater; latencies are random."""

    name = "in-process"

    def __init__(self, updater: PolicyUpdater, served: torch.nn.Module, seed: int) -> None:
        self.updater, self.served = updater, served
        self.version = self.published = 0
        self.batches: list[Batch] = []
        self.changed = Signal()
        self.rng = np.random.default_rng(seed)

    async def generate(self, request: GenerateRequest) -> Completion:
        await asyncio.sleep(float(self.rng.exponential()))
        group_id, episode = (int(part) for part in request.request_id[1:].split("-")[:2])
        tokens, logprobs = sample(self.served, request.token_ids, seed_of(group_id, episode))
        return Completion(
            token_ids=np.array(tokens, np.int32),
            logprobs=np.array(logprobs, np.float32),
            version_runs=VersionRuns(((self.version, len(tokens)),)),
            finish_reason=FinishReason.STOP,
        )

    async def update_weights(self, weights: PublishedWeights) -> None:
        self.served.load_state_dict(self.updater.model.state_dict())
        self.version = weights.version

    async def statistics(self) -> Mapping[str, EngineStatistics]:
        return {}

    async def aclose(self) -> None: ...

    async def ship(self, batch: Batch) -> None:
        self.batches.append(batch)
        self.changed.notify()

    async def finish(self, num_steps: int) -> None: ...

    async def wait_newer(self, version: int) -> PublishedWeights:
        await self.changed.until(lambda: self.published > version)
        return PublishedWeights(version=self.published, path=None)

    async def train(self) -> None:
        while True:
            await self.changed.until(lambda: len(self.batches) > self.published)
            self.updater.update(self.batches[self.published])
            self.published += 1
            self.changed.notify()


class ModuloEnvironment:
    name = "arithmetic"

    async def run(self, transcript: Transcript) -> None:
        transcript.observe(prompt_of(transcript.task.position))
        await transcript.act()

    def score(self, task: Task, completions: list[Completion]) -> Score:
        return Score(reward=reward_of(completions[-1].token_ids.tolist()))


def updater_for(config: Config) -> PolicyUpdater:
    torch.set_num_threads(1)
    return PolicyUpdater(make_model(), config.actor, seed=0, temperature=1.0)


def plain_synchronous_loop(config: Config) -> tuple[PolicyUpdater, int]:
    """Sample a batch, train on it, again; no Headway loop. Returns the number rejected too."""
    updater = updater_for(config)
    position = rejected = 0
    for step in range(STEPS):
        groups: list[TrainableGroup] = []
        while len(groups) < BATCH:
            group = plain_group(updater.model, position, step)
            position += 1
            advantages = group_advantages(group.rewards, Baseline.GRPO)
            if rejection(group, advantages, config.rollout.filters):
                rejected += 1
            else:
                groups.append(TrainableGroup(group=group, advantages=advantages))
        updater.update(Batch(step=step, groups=tuple(groups)))
    return updater, rejected


def plain_group(model: torch.nn.Module, position: int, step: int) -> Group:
    task = Task(env="arithmetic", key=str(position), position=position, data={})
    rollouts = []
    for episode in range(GROUP):
        prompt = prompt_of(position)
        tokens, logprobs = sample(model, prompt, seed_of(position, episode))
        rollouts.append(
            Rollout(
                group_id=GroupId(position),
                episode=episode,
                env="arithmetic",
                token_ids=np.array(prompt + tokens, np.int32),
                loss_mask=np.array([False] * len(prompt) + [True] * len(tokens)),
                logprobs=np.array([0.0] * len(prompt) + logprobs, np.float32),
                version_runs=VersionRuns(((step, len(tokens)),)),
                reward=reward_of(tokens),
                num_turns=1,
                finish_reason=FinishReason.STOP,
                timings=Timings(started_at=0, finished_at=0),
            )
        )
    return Group(group_id=GroupId(position), task=task, rollouts=tuple(rollouts))


def config_for(staleness: int) -> Config:
    return sim_config(
        run={"steps": STEPS, "max_empty_batches": 100},
        rollout={
            "max_head_offpolicyness": staleness,
            "consumer_batch_size": BATCH,
            "group_size": GROUP,
            "filters": ["zero_advantage"],
        },
        actor={"advantage": "grpo", "optimizer": {"lr": 0.01, "warmup_steps": 0}},
    )


def through_the_loop(config: Config, seed: int) -> PolicyUpdater:
    updater = updater_for(config)
    policy = InProcessPolicy(updater, make_model(), seed)
    run = simulate_in_memory(
        config,
        ports={
            "engine": policy,
            "trainer": policy,
            "channel": policy,
            "environments": {"arithmetic": ModuloEnvironment()},
            "watched": {"trainer": policy.train},
        },
    )
    assert run.outcome.exit_code == 0, run.outcome
    return updater


def same_weights(left: PolicyUpdater, right: PolicyUpdater) -> bool:
    ours, theirs = left.model.state_dict(), right.model.state_dict()
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_s0_equals_a_plain_synchronous_loop_bit_for_bit(seed: int) -> None:
    config = config_for(0)
    plain, rejected = plain_synchronous_loop(config)
    assert rejected > 0, "the case should hold rejected samples too"
    assert same_weights(through_the_loop(config, seed), plain)
    assert not same_weights(updater_for(config), plain), "training should change the weights"


def test_s2_differs_so_the_comparison_can_fail() -> None:
    plain, _ = plain_synchronous_loop(config_for(0))
    assert not same_weights(through_the_loop(config_for(2), 0), plain)
