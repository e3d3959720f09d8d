"""Temperature per request inside one batch, and the log-probabilities that go with it.

The batching of transformers has one temperature for all requests, or one per request that must
not be 0, and reports log-probabilities after it. Here each request has its own, 0 is greedy, and
log-probabilities follow vLLM's `--logprobs-mode`: `raw_logprobs` (its default) are those of the
model itself, before temperature; `processed_logprobs` are those of the distribution that was
sampled from, which is what a policy gradient needs. At temperature 1, and for greedy requests, the
two are the same.
"""

from typing import Any

import torch
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
)

Tensor = torch.Tensor


class Sampler(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]  # untyped base
    """Samples every row of a batch at its own temperature.

    It is a logits processor only to be told which temperature belongs to which row; it passes the
    logits on unchanged, and `sample` takes the place of the runner's sampling step. Used by the
    generation thread alone.
    """

    supported_kwargs: dict[str, type] = {"temperature": float}  # noqa: RUF012 - the base's
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, *, processed: bool = False) -> None:
        self._processed = processed
        self.num_sampled = 0
        """Tokens sampled since the start, whatever became of them."""
        self._temperatures: Tensor = torch.ones(0)

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Temperature 1 where no request says otherwise (the storage is int32, the bits float)."""
        int32_tensor.copy_(torch.ones_like(int32_tensor, dtype=torch.float32).view(torch.int32))

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        """Temperatures of the requests that sample in this pass, as bits in int32 `(N,)`."""
        self.num_sampled += len(requests_with_new_token)
        temperatures = [
            request.state.logit_processor_kwargs["temperature"]
            for request in requests_with_new_token
        ]
        return torch.tensor(temperatures, dtype=torch.float32).view(torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Take note of the rows' temperatures; logits `(N, V)` pass unchanged."""
        self._temperatures = tensor_arg[: scores.size(0)].view(torch.float32)
        return scores

    def sample(self, scores: Tensor, output_ids: Tensor) -> None:
        """Draw one token per row and write tokens and log-probabilities where the runner reads.

        `scores`: raw logits, float32 `(1, N, V)`; `output_ids`: int32 `(2, >= N)`, row 1 holds the
        bits of float32.
        """
        logprobs = torch.log_softmax(scores[0], dim=-1)
        temperatures = self._temperatures.unsqueeze(-1)
        # Gumbel-max draws from the softmax without normalizing again. The maximum is moved to 0
        # first, so that no temperature, however small, can make a whole row overflow.
        shifted = logprobs - logprobs.amax(dim=-1, keepdim=True)
        noise = torch.empty_like(logprobs).exponential_().log_()
        perturbed = torch.where(temperatures > 0, shifted / temperatures - noise, shifted)
        tokens = perturbed.argmax(dim=-1, keepdim=True)
        num_rows = tokens.size(0)
        output_ids[0, :num_rows].copy_(tokens.squeeze(-1))
        if self._processed:
            scaled = shifted / torch.where(temperatures > 0, temperatures, 1.0)
            logprobs = torch.log_softmax(scaled, dim=-1)
        chosen = logprobs.gather(1, tokens).squeeze(-1)
        output_ids[1, :num_rows].copy_(chosen.view(torch.int32))
