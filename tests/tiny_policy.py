"""A real but tiny Qwen3 policy and batches for it, shared by tests."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from headway.core.rollout import (
    Batch,
    FinishReason,
    Group,
    GroupId,
    Rollout,
    Task,
    Timings,
    TrainableGroup,
)
from headway.core.versions import VersionRuns

VOCABULARY = 24


def make_model(seed: int = 0, *, tied: bool = True, hidden: int = 16) -> Any:
    """A Qwen3 of a few thousand parameters, float32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    return Qwen3ForCausalLM(config).float().eval()


def save_model(folder: Path, seed: int = 0, *, tied: bool = True) -> Path:
    """The same as a Hugging Face folder."""
    make_model(seed, tied=tied).save_pretrained(folder)
    return folder


def make_batch(
    step: int = 0,
    *,
    seed: int = 0,
    num_groups: int = 4,
    group_size: int = 2,
    max_tokens: int = 12,
    prompt_tokens: int = 3,
) -> Batch:
    """Random rollouts of various lengths, some with a second turn after an environment reply."""
    rng = np.random.default_rng([seed, step])
    groups = []
    for group_id in range(num_groups):
        members = []
        for episode in range(group_size):
            first, reply, second = rng.integers(1, max_tokens // 2 + 1, 3)
            if episode % 2:
                reply, second = 0, 0
            mask = np.repeat([False, True, False, True], [prompt_tokens, first, reply, second])
            sampled = int(mask.sum())
            logprobs = np.where(mask, -rng.exponential(2.0, len(mask)), 0.0)
            members.append(
                Rollout(
                    group_id=GroupId(step * num_groups + group_id),
                    episode=episode,
                    env="test",
                    token_ids=rng.integers(2, VOCABULARY, len(mask)).astype(np.int32),
                    loss_mask=mask,
                    logprobs=logprobs.astype(np.float32),
                    version_runs=VersionRuns.of([(step, sampled)]),
                    reward=float(rng.integers(0, 2)),
                    num_turns=2 if second else 1,
                    finish_reason=FinishReason.STOP,
                    timings=Timings(started_at=0.0, finished_at=1.0),
                )
            )
        task = Task(env="test", key=str(group_id), position=group_id, data={})
        group = Group(
            group_id=GroupId(step * num_groups + group_id), task=task, rollouts=tuple(members)
        )
        advantages = rng.normal(size=group_size).astype(np.float32)
        groups.append(TrainableGroup(group=group, advantages=advantages))
    return Batch(step=step, groups=tuple(groups))
