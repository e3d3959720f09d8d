"""Log-probabilities recomputed under exactly the versions that a completion claims.

This is the proof of its stamps: if a token was sampled by other weights than its stamp says, the
recomputed value is another one.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from headway.core.rollout import Completion
from headway.core.versions import VersionRuns

VOCABULARY = 48
MAX_POSITIONS = 1024
TOLERANCE = 1e-3

Recompute = Callable[
    [Mapping[int, Any], Sequence[int], Sequence[int], VersionRuns], NDArray[np.float32]
]


def random_model(seed: int, *, tied: bool = True) -> Any:
    """A Qwen3 of about 0.1 M parameters in float32, with logits large enough to tell two apart."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return Qwen3ForCausalLM(config).float().eval().requires_grad_(False)


def save(model: Any, folder: Path) -> Path:
    """As a Hugging Face folder."""
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def recompute_plain(
    models: Mapping[int, Any], prompt: Sequence[int], sampled: Sequence[int], runs: VersionRuns
) -> NDArray[np.float32]:
    """Every run by one plain forward pass of its version over everything before it: what an
    engine samples from when it computes keys and values again after an update."""
    found: list[torch.Tensor] = []
    start = 0
    for version, count in runs:
        tokens = torch.tensor([[*prompt, *sampled[: start + count]]])
        logits = models[version](tokens).logits[0, -count - 1 : -1]
        found.append(_chosen(logits, sampled[start : start + count]))
        start += count
    return np.concatenate([part.numpy() for part in found])


@torch.no_grad()
def recompute_carried(
    models: Mapping[int, Any], prompt: Sequence[int], sampled: Sequence[int], runs: VersionRuns
) -> NDArray[np.float32]:
    """Every run by its version, on the keys and values that the versions before it computed: what
    an engine samples from when it keeps them. The last token of a run was sampled by the old
    version and is the first that the new one computes keys and values of."""
    cache = DynamicCache()
    found: list[torch.Tensor] = []
    pending = list(prompt)
    start = 0
    for version, count in runs:
        tokens = list(sampled[start : start + count])
        inputs = torch.tensor([[*pending, *tokens[:-1]]])
        output = models[version](inputs, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(_chosen(output.logits[0, -count:], tokens))
        pending = tokens[-1:]
        start += count
    return np.concatenate([part.numpy() for part in found])


def largest_error(
    recompute: Recompute,
    models: Mapping[int, Any],
    prompt: Sequence[int],
    completion: Completion,
    runs: VersionRuns | None = None,
) -> float:
    """Largest difference, in nats, between the engine's log-probabilities and those recomputed
    under its own stamps, or under `runs`."""
    expected = recompute(
        models, prompt, completion.token_ids.tolist(), runs or completion.version_runs
    )
    return float(np.abs(expected - completion.logprobs).max())


def shift_stamps(runs: VersionRuns, by: int) -> VersionRuns:
    """The same stamps with every boundary between two runs moved by this many tokens."""
    counts = [count for _, count in runs]
    counts[0] += by
    counts[-1] -= by
    return VersionRuns.of(zip((version for version, _ in runs), counts, strict=True))


def _chosen(logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return logprobs.gather(1, torch.tensor(list(tokens)).unsqueeze(1)).squeeze(1)
