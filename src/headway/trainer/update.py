"""One policy update from one batch, as a library: `PolicyUpdater(model, actor).update(batch)`.

The model is any Hugging Face causal LM on any device. Given the model, the configuration, the seed
and the batches, the weights that come out are the same bit for bit (on CPU at a fixed number of
threads): nothing here depends on time, on process state or on the global random generator.

Rollouts are cut after their last trainable token, sorted by length and padded on the right into
micro-batches. No attention mask is passed: under causal attention a token never sees what comes
after it, so padding on the right cannot change anything, and kernels without a mask are faster.
Dropout is off (the model is in evaluation mode), since the ratio to the proximal policy is to
measure the update and not the noise.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headway.config import ActorConfig
from headway.core.rollout import Batch, Rollout
from headway.errors import TrainerError
from headway.trainer.loss import LossSums, policy_loss, token_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Padded rollouts for one forward pass.

    `token_ids` int64 `(R, T)`. The trainable tokens are listed rollout by rollout: `rows` and
    `columns`, int64 `(N,)`, say where each stands; `targets` int64, `behaviour` and `advantages`
    float32 are `(N,)`. `first_column` is the first column whose logits are needed.
    """

    token_ids: Tensor
    rows: Tensor
    columns: Tensor
    targets: Tensor
    behaviour: Tensor
    advantages: Tensor
    first_column: int


@dataclass(frozen=True, slots=True)
class _Item:
    """A rollout that has something to train on, with its advantage and its length as fed."""

    rollout: Rollout
    advantage: float
    length: int


class PolicyUpdater:
    """Holds the model and its optimizer (AdamW: linear warm-up, gradient clipping).

    Weight decay applies to matrices, not to norms and biases.

    Args:
        model: Hugging Face causal LM, float32; it is changed in place and put into eval mode.
        actor: objective and optimizer.
        seed: of the order in which rollouts are dealt to minibatches.
        temperature: that rollouts are sampled with (`rollout.temperature`); the log-probabilities
            that come with them are of that distribution.
    """

    def __init__(
        self,
        model: nn.Module,
        actor: ActorConfig,
        *,
        seed: int = 0,
        temperature: float = 1.0,
    ) -> None:
        self.model = model.eval()
        self._actor = actor
        self._seed = seed
        self._temperature = temperature
        self.num_optimizer_steps = 0
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._parameters = parameters
        self._device = parameters[0].device
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        settings = actor.optimizer
        self._optimizer = torch.optim.AdamW(
            [
                {
                    "params": [p for p in parameters if p.ndim >= 2],
                    "weight_decay": settings.weight_decay,
                },
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
        )

    def update(self, batch: Batch) -> dict[str, float]:
        """Train on a batch: `ppo_n_minibatches` optimizer steps over all of it once.

        A loss is divided by the batch's trainable tokens over the number of minibatches, so every
        token of the batch weighs the same, whatever micro-batch or minibatch it falls into.

        Returns:
            `loss` and the other token means of `LossSums.means`, `grad_norm` (before clipping,
            mean over minibatches), `lr`, `num_tokens`, `num_rollouts`, `num_minibatches`.

        Raises:
            TrainerError: nothing to train on, unusable tokens, or a loss or gradient that is not
                finite; the weights and the optimizer are then as before that minibatch.
        """
        items = self._items(batch)
        minibatches = self._deal(items, batch.step)
        packed = [list(self._pack(minibatch)) for minibatch in minibatches]
        # With one minibatch the policy that starts the update is the one in its only forward pass:
        # recomputing would give the same numbers again, bit for bit.
        single = len(packed) == 1
        recompute = self._actor.recompute_logprobs
        proximals = self.proximal_logprobs(packed) if recompute and not single else None
        divisor = batch.num_trainable / len(packed)
        sums: LossSums | None = None
        norms = []
        for number, minibatch in enumerate(packed):
            self._optimizer.zero_grad(set_to_none=True)
            for index, micro in enumerate(minibatch):
                current, entropy = self._forward(micro)
                proximal = None
                if recompute:
                    proximal = proximals[number][index] if proximals else current.detach()
                loss, part = policy_loss(
                    current=current,
                    behaviour=micro.behaviour,
                    proximal=proximal,
                    advantages=micro.advantages,
                    entropy=entropy,
                    eps_clip=self._actor.eps_clip,
                    weight_cap=self._actor.behav_imp_weight_cap,
                    num_tokens=divisor,
                    decoupled=self._actor.use_decoupled_loss,
                )
                loss.backward()  # type: ignore[no-untyped-call]
                sums = part if sums is None else sums + part
            assert sums is not None
            norms.append(self._step(batch.step, sums))
        assert sums is not None
        return {
            **sums.means(),
            "grad_norm": sum(norms) / len(norms),
            "lr": self._optimizer.param_groups[0]["lr"],
            "num_tokens": float(sums.num_tokens),
            "num_rollouts": float(len(items)),
            "num_minibatches": float(len(packed)),
        }

    @torch.no_grad()
    def proximal_logprobs(self, packed: Sequence[Sequence[MicroBatch]]) -> list[list[Tensor]]:
        """Log-probabilities of all trainable tokens under the present weights, by micro-batch."""
        return [[self._forward(micro)[0] for micro in minibatch] for minibatch in packed]

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Log-probabilities of each rollout's trainable tokens under the present weights.

        Returns:
            One float32 vector per rollout, in the order given. Raises TrainerError as `update`.
        """
        items = [_item(rollout, 0.0) for rollout in rollouts if rollout.num_trainable]
        found: dict[int, Tensor] = {}
        with torch.no_grad():
            for members in self._cut(items):
                counts = [item.rollout.num_trainable for item in members]
                parts = torch.split(self._forward(self._pad(members))[0], counts)
                found.update((id(i.rollout), part) for i, part in zip(members, parts, strict=True))
        return [found.get(id(rollout), torch.zeros(0)) for rollout in rollouts]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep beside the model's weights."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "num_optimizer_steps": self.num_optimizer_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Raises TrainerError when it is of another model."""
        try:
            self._optimizer.load_state_dict(state["optimizer"])
            self.num_optimizer_steps = int(state["num_optimizer_steps"])
        except (KeyError, ValueError) as error:
            raise TrainerError(f"the optimizer's checkpoint does not fit: {error}") from error

    def _items(self, batch: Batch) -> list[_Item]:
        items = [
            _item(rollout, float(advantage))
            for trainable in batch.groups
            for rollout, advantage in zip(
                trainable.group.rollouts, trainable.advantages, strict=True
            )
            if rollout.num_trainable
        ]
        if not items:
            raise TrainerError(
                f"batch {batch.step} has no trainable token in its {len(batch.rollouts)} rollouts: "
                "the update would be empty; look at the loss masks and at what was trimmed"
            )
        vocabulary = self.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        for item in items:
            ids = item.rollout.token_ids
            if ids.min() < 0 or ids.max() >= vocabulary:
                raise TrainerError(
                    f"rollout {item.rollout.rollout_id} in batch {batch.step} has token id "
                    f"{int(ids.min() if ids.min() < 0 else ids.max())}, outside the model's "
                    f"vocabulary of {vocabulary}: engine and trainer run different models"
                )
        return items

    def _deal(self, items: list[_Item], step: int) -> list[list[_Item]]:
        """Minibatches of about as many rollouts each, in an order that seed and step decide."""
        count = min(self._actor.ppo_n_minibatches, len(items))
        if count == 1:
            return [items]
        order = np.random.default_rng([self._seed, step]).permutation(len(items))
        return [[items[i] for i in part] for part in np.array_split(order, count)]

    def _cut(self, items: Sequence[_Item]) -> Iterator[list[_Item]]:
        """Rollouts of similar length together, at most `micro_batch_tokens` padded tokens each; a
        rollout longer than that goes alone."""
        members: list[_Item] = []
        for item in sorted(items, key=lambda item: item.length):
            if members and (len(members) + 1) * item.length > self._actor.micro_batch_tokens:
                yield members
                members = []
            members.append(item)
        if members:
            yield members

    def _pack(self, items: Sequence[_Item]) -> Iterator[MicroBatch]:
        return (self._pad(members) for members in self._cut(items))

    def _pad(self, members: Sequence[_Item]) -> MicroBatch:
        width = max(item.length for item in members)
        token_ids = np.zeros((len(members), width), np.int64)
        rows, columns, targets, behaviour, advantages = [], [], [], [], []
        for row, item in enumerate(members):
            rollout = item.rollout
            token_ids[row, : item.length] = rollout.token_ids[: item.length]
            positions = np.flatnonzero(rollout.loss_mask)
            rows.append(np.full(len(positions), row))
            columns.append(positions - 1)  # what the model says one position to the left
            targets.append(rollout.token_ids[positions].astype(np.int64))
            behaviour.append(rollout.logprobs[positions])
            advantages.append(np.full(len(positions), item.advantage, np.float32))

        def tensor(arrays: list[Any]) -> Tensor:
            return torch.from_numpy(np.concatenate(arrays)).to(self._device)

        return MicroBatch(
            token_ids=torch.from_numpy(token_ids).to(self._device),
            rows=tensor(rows),
            columns=tensor(columns),
            targets=tensor(targets),
            behaviour=tensor(behaviour),
            advantages=tensor(advantages),
            first_column=int(min(part[0] for part in columns)),
        )

    def _forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each trainable token, `(N,)`; logits of the prompt are not
        computed where the model can leave them out."""
        arguments: dict[str, Any] = {}
        start = 0
        if self._keeps_logits:
            start = micro.first_column
            arguments["logits_to_keep"] = micro.token_ids.shape[1] - start
        output = self.model(input_ids=micro.token_ids, use_cache=False, **arguments)
        logits = output.logits[micro.rows, micro.columns - start]
        return token_logprobs(logits, micro.targets, self._temperature)

    def _step(self, step: int, sums: LossSums) -> float:
        """Clip, check, and apply the gradient. Returns its norm before clipping."""
        settings = self._actor.optimizer
        norm = float(nn.utils.clip_grad_norm_(self._parameters, settings.gradient_clipping))
        loss = float(sums.loss)
        if not (math.isfinite(norm) and math.isfinite(loss)):
            raise TrainerError(
                f"batch {step}: loss {loss / sums.num_tokens} and gradient norm {norm} must be "
                "finite; this step was not applied. Look for log-probabilities or rewards that are "
                "not finite, or lower actor.optimizer.lr"
            )
        warmth = min(1.0, (self.num_optimizer_steps + 1) / max(settings.warmup_steps, 1))
        for group in self._optimizer.param_groups:
            group["lr"] = settings.lr * warmth
        self._optimizer.step()
        self.num_optimizer_steps += 1
        return norm


def _item(rollout: Rollout, advantage: float) -> _Item:
    """Everything after the last trainable token, and that token itself, need not be fed."""
    positions = np.flatnonzero(rollout.loss_mask)
    if positions[0] == 0:
        raise TrainerError(
            f"rollout {rollout.rollout_id}: its first token is in the loss mask, but nothing comes "
            "before it that could predict it; every prompt needs at least one token"
        )
    return _Item(rollout, advantage, int(positions[-1]))
