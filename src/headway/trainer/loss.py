"""Policy objectives as pure functions on flat vectors of trainable tokens.

All vectors have shape `(N,)`, one entry per token that the policy sampled. Three policies occur:

- *behaviour*: sampled the token; its log-probability came with the rollout;
- *proximal*: starts this update; the anchor of the clipping;
- *current*: being optimized.

Decoupled PPO (Hilton et al. 2022, arXiv:2110.00641; asynchronous RL: arXiv:2505.24298) clips the
current against the proximal policy and corrects for the behaviour policy with a weight:

    r = current / proximal        w = min(proximal / behaviour, cap)
    loss = -sum(w * min(r * A, clip(r, 1 - eps, 1 + eps) * A)) / num_tokens

The weight is a constant (no gradient) and is *clamped* at the cap, which is truncated importance
sampling: a token over the cap still trains, with weight `cap`, so a batch never loses its most
changed tokens without anybody noticing. Other implementations drop them; `capped_fraction`
reports how many there are.

Plain PPO clips the current against the behaviour policy, without a weight.

**Normalisation**: sums over tokens are divided by a `num_tokens` that the caller gives, the same
for all parts of a batch. So every token counts the same however a batch is cut into micro-batches,
and their losses and gradients add up to those of one pass.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this, so that a policy which ran away gives a large loss, not NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Sums over tokens, scalar tensors without gradient: add them up, then divide.

    `kl` estimates KL(behaviour || current) by Schulman's k3, which is never negative. `clipped`
    counts tokens whose gradient the clipping took away. Weights are those before the cap.
    """

    num_tokens: int
    loss: Tensor
    clipped: Tensor
    capped: Tensor
    behaviour_weight: Tensor
    behaviour_weight_max: Tensor
    kl: Tensor
    entropy: Tensor

    def __add__(self, other: "LossSums") -> "LossSums":
        return LossSums(
            num_tokens=self.num_tokens + other.num_tokens,
            loss=self.loss + other.loss,
            clipped=self.clipped + other.clipped,
            capped=self.capped + other.capped,
            behaviour_weight=self.behaviour_weight + other.behaviour_weight,
            behaviour_weight_max=torch.maximum(
                self.behaviour_weight_max, other.behaviour_weight_max
            ),
            kl=self.kl + other.kl,
            entropy=self.entropy + other.entropy,
        )

    def means(self) -> dict[str, float]:
        """Token means under the names that metrics use; one transfer from the device."""
        sums = torch.stack(
            [self.loss, self.clipped, self.capped, self.behaviour_weight, self.kl, self.entropy]
        ).tolist()
        names = (
            "loss",
            "clip_fraction",
            "capped_fraction",
            "behaviour_weight_mean",
            "kl",
            "entropy",
        )
        means = {name: value / self.num_tokens for name, value in zip(names, sums, strict=True)}
        return {**means, "behaviour_weight_max": self.behaviour_weight_max.item()}


def token_logprobs(
    logits: Tensor, token_ids: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token, and the entropy of the distribution it was drawn from.

    Args:
        logits: `(N, V)`; row `i` must be what the model said *before* it saw token `i`, that is,
            the logits at the position to its left.
        token_ids: int64 `(N,)`.
        temperature: what the tokens were sampled with; engines report log-probabilities after it.

    Returns:
        float32 `(N,)` with gradient, and float32 `(N,)` without; natural log, nats.
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    chosen = logprobs.gather(-1, token_ids[:, None]).squeeze(-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).nan_to_num(0.0).sum(-1)
    return chosen, entropy


def policy_loss(
    *,
    current: Tensor,
    behaviour: Tensor,
    proximal: Tensor | None,
    advantages: Tensor,
    entropy: Tensor,
    eps_clip: float,
    weight_cap: float,
    num_tokens: float,
    decoupled: bool,
) -> tuple[Tensor, LossSums]:
    """The objective of this module's docstring, for some tokens of a batch.

    Args:
        current: log-probabilities with gradient, float32 `(N,)`, as are the following.
        behaviour: log-probabilities of the policy that sampled.
        proximal: log-probabilities under the policy that starts the update. Required when
            `decoupled`; otherwise it only serves to report the behaviour weight.
        advantages: one per token.
        entropy: one per token, for the report.
        eps_clip: the ratio is clipped to `1 - eps_clip .. 1 + eps_clip`.
        weight_cap: largest behaviour weight.
        num_tokens: what to divide by; the same for all parts of a batch.
        decoupled: decoupled PPO, else plain clipped PPO.

    Returns:
        The loss, a scalar with gradient, and the sums to report.

    Raises:
        ValueError: decoupled without proximal log-probabilities.

    Example:
        Ratio 1, weight `exp(-1 - (-2)) = 2.718`, advantage 1, one token: loss -2.718.
    """
    if decoupled and proximal is None:
        raise ValueError(
            "the decoupled loss needs proximal log-probabilities: set actor.recompute_logprobs"
        )
    anchor = proximal if decoupled and proximal is not None else behaviour
    ratio = (current - anchor.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    clipped_ratio = ratio.clamp(1 - eps_clip, 1 + eps_clip)
    objective = torch.minimum(ratio * advantages, clipped_ratio * advantages)

    reference = (anchor if proximal is None else proximal).detach()
    raw_weight = (reference - behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if decoupled:
        objective = objective * raw_weight.clamp(max=weight_cap)
    total = -objective.sum()

    with torch.no_grad():
        drift = (current - behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        sums = LossSums(
            num_tokens=len(current),
            loss=total.detach(),
            clipped=(clipped_ratio * advantages < ratio * advantages).sum().float(),
            capped=(raw_weight > weight_cap).sum().float(),
            behaviour_weight=raw_weight.sum(),
            behaviour_weight_max=raw_weight.max(),
            kl=(drift.exp() - 1 - drift).sum(),
            entropy=entropy.sum(),
        )
    return total / num_tokens, sums
