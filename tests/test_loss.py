"""The objectives against hand-computed values, and against a plain loop over sequences."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.config import ActorConfig
from headway.trainer.loss import policy_loss, token_logprobs
from headway.trainer.update import PolicyUpdater
from tiny_policy import make_batch, make_model


def loss_of(
    current: Any,
    behaviour: Any,
    proximal: Any,
    advantages: Any,
    *,
    decoupled: bool = True,
    cap: float = 5.0,
    eps: float = 0.2,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Loss (token mean), its gradient with respect to the current log-probabilities, stats."""
    now = torch.tensor(current, dtype=torch.float32, requires_grad=True)
    loss, sums = policy_loss(
        current=now,
        behaviour=torch.tensor(behaviour, dtype=torch.float32),
        proximal=None if proximal is None else torch.tensor(proximal, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        entropy=torch.zeros(len(current)),
        eps_clip=eps,
        weight_cap=cap,
        num_tokens=len(current),
        decoupled=decoupled,
    )
    (gradient,) = torch.autograd.grad(loss, now)
    return loss.detach(), gradient, sums.means()


def test_hand_computed() -> None:
    # Ratios 1.5, 0.5, 1.1 and 1; behaviour weights 2, 2, 10 (over the cap of 5) and 0.5.
    proximal = [-1.0, -1.0, -1.0, -2.0]
    current = [math.log(1.5) - 1, math.log(0.5) - 1, math.log(1.1) - 1, -2.0]
    behaviour = [-1 - math.log(2), -1 - math.log(2), -1 - math.log(10), -2 + math.log(2)]
    loss, gradient, stats = loss_of(current, behaviour, proximal, [1.0, -1.0, 2.0, -3.0])
    # min(1.5, 1.2) = 1.2 clipped; min(-0.5, -0.8) = -0.8 clipped; 2.2; -3.
    expected = -(2 * 1.2 + 2 * -0.8 + 5 * 2.2 + 0.5 * -3) / 4
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert gradient.tolist() == pytest.approx([0, 0, -5 * 2.2 / 4, 1.5 / 4], rel=1e-6)
    assert stats["clip_fraction"] == 0.5
    assert stats["capped_fraction"] == 0.25
    assert stats["behaviour_weight_mean"] == pytest.approx(14.5 / 4, rel=1e-6)
    assert stats["behaviour_weight_max"] == pytest.approx(10, rel=1e-6)
    assert stats["loss"] == pytest.approx(expected, rel=1e-6)


def test_plain_ppo_by_hand() -> None:
    loss, gradient, stats = loss_of(
        [math.log(1.5), math.log(0.9)], [0.0, 0.0], None, [1.0, 1.0], decoupled=False
    )
    assert loss.item() == pytest.approx(-(1.2 + 0.9) / 2, rel=1e-6)
    assert gradient.tolist() == pytest.approx([0, -0.45], rel=1e-6)
    assert stats["behaviour_weight_mean"] == 1.0
    drifts = [math.log(1.5), math.log(0.9)]
    assert stats["kl"] == pytest.approx(sum(math.exp(d) - 1 - d for d in drifts) / 2, rel=1e-5)


vectors = st.integers(1, 8).flatmap(
    lambda n: st.tuples(*[st.lists(st.floats(-4, -0.1), min_size=n, max_size=n)] * 3)
)


@settings(max_examples=100, deadline=None)
@given(vectors=vectors, seed=st.integers(0, 99))
def test_shifting_behaviour_moves_decoupled_loss_and_gradient(
    vectors: tuple[list[float], list[float], list[float]], seed: int
) -> None:
    """The incident: a decoupled loss whose behaviour weight was off by default."""
    current, behaviour, _ = vectors
    advantages = np.random.default_rng(seed).uniform(0.5, 2, len(current))
    arguments = (current, advantages)  # ratio 1: nothing is clipped
    loss, gradient, _ = loss_of(current, behaviour, *arguments, cap=1e6)
    shifted = [b - 0.5 for b in behaviour]
    loss_2, gradient_2, _ = loss_of(current, shifted, *arguments, cap=1e6)
    assert loss_2.item() == pytest.approx(loss.item() * math.exp(0.5), rel=1e-4)
    assert gradient_2.tolist() == pytest.approx((gradient * math.exp(0.5)).tolist(), rel=1e-4)


@settings(max_examples=100, deadline=None)
@given(vectors=vectors, seed=st.integers(0, 99))
def test_objectives_agree_when_proximal_is_behaviour(
    vectors: tuple[list[float], list[float], list[float]], seed: int
) -> None:
    current, behaviour, _ = vectors
    advantages = np.random.default_rng(seed).normal(size=len(current))
    decoupled = loss_of(current, behaviour, behaviour, advantages)
    plain = loss_of(current, behaviour, None, advantages, decoupled=False)
    assert torch.equal(decoupled[0], plain[0])
    assert torch.equal(decoupled[1], plain[1])


def test_gradient_at_ratio_one_is_reinforce() -> None:
    values = [-0.5, -1.0, -3.0]
    _, gradient, _ = loss_of(values, values, values, [2.0, -1.0, 0.5])
    assert gradient.tolist() == pytest.approx([-2 / 3, 1 / 3, -0.5 / 3])


def test_a_policy_that_ran_away_gives_a_finite_loss() -> None:
    loss, gradient, stats = loss_of([-0.1, -200.0], [-150.0, -0.1], [-90.0, -1.0], [-1.0, 1.0])
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert stats["capped_fraction"] == 0.5


def test_decoupled_needs_proximal() -> None:
    with pytest.raises(ValueError, match="recompute_logprobs"):
        loss_of([0.0], [0.0], None, [1.0])


def test_entropy_and_temperature() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [2.0, 0.0, -math.inf, 0.0]])
    chosen, entropy = token_logprobs(logits, torch.tensor([1, 0]), temperature=2.0)
    assert chosen[0].item() == pytest.approx(-math.log(4))
    assert chosen[1].item() == pytest.approx(1 - math.log(math.e + 2))
    assert entropy[0].item() == pytest.approx(math.log(4))
    p = [math.e / (math.e + 2), 1 / (math.e + 2)]
    expected = -p[0] * math.log(p[0]) - 2 * p[1] * math.log(p[1])
    assert entropy[1].item() == pytest.approx(expected, rel=1e-5)


def naive_logprobs(model: Any, rollout: Any, temperature: float = 1.0) -> list[Tensor]:
    """One sequence alone, one token at a time: token t from the logits at t - 1."""
    ids = torch.tensor(rollout.token_ids.tolist())
    logits = model(input_ids=ids[None]).logits[0] / temperature
    found = []
    for t in range(len(ids)):
        if rollout.loss_mask[t]:
            found.append(logits[t - 1].log_softmax(-1)[ids[t]])
    return found


@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 100000])
def test_batched_logprobs_equal_a_loop_over_sequences(micro_batch_tokens: int) -> None:
    """Alignment and independence of padding: off by one token is off by nats."""
    model = make_model()
    actor = ActorConfig(micro_batch_tokens=micro_batch_tokens)
    updater = PolicyUpdater(model, actor, temperature=0.7)
    rollouts = make_batch(num_groups=6, max_tokens=20).rollouts
    assert len({r.num_tokens for r in rollouts}) > 3
    for rollout, found in zip(rollouts, updater.logprobs(rollouts), strict=True):
        expected = torch.stack(naive_logprobs(model, rollout, 0.7))
        assert found.shape == (rollout.num_trainable,)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("decoupled", [True, False])
def test_gradient_of_a_batch_equals_a_naive_loop(decoupled: bool) -> None:
    """The whole path: mask, alignment, advantages, weights, normalisation."""
    batch = make_batch(num_groups=4)
    model = make_model()
    total = torch.zeros(())
    for trainable in batch.groups:
        for rollout, advantage in zip(trainable.group.rollouts, trainable.advantages, strict=True):
            behaviour = rollout.logprobs[rollout.loss_mask]
            for logprob, old in zip(naive_logprobs(model, rollout), behaviour, strict=True):
                now = logprob.detach().item()
                if decoupled:
                    weight = min(math.exp(now - float(old)), 5.0)
                    total = total - weight * (logprob - now).exp() * float(advantage)
                else:
                    ratio = (logprob - float(old)).exp()
                    clipped = ratio.clamp(0.8, 1.2)
                    total = total - torch.minimum(
                        ratio * float(advantage), clipped * float(advantage)
                    )
    (total / batch.num_trainable).backward()  # type: ignore[no-untyped-call]
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}

    model = make_model()
    actor = ActorConfig(use_decoupled_loss=decoupled, micro_batch_tokens=64)
    stats = PolicyUpdater(model, actor).update(batch)
    assert stats["loss"] == pytest.approx(total.item() / batch.num_trainable, rel=1e-4)
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-4)
    scale = min(1.0, 1.0 / norm)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name] * scale, atol=1e-5, rtol=1e-3, msg=name
        )
