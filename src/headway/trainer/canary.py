"""The trainer's side of the canary: what the weights at hand say to its fixed prompts."""

from typing import Any

import torch

from headway.weights.canary import NUM_TOP, Canary, Probe, canary_sequences, prompt_lengths


@torch.no_grad()
def make_canary(model: Any, version: int) -> Canary:
    """One forward pass over two short sequences, in the model's own precision.

    Args:
        model: Hugging Face causal LM; dropout is off during the pass.
        version: that is being published.
    """
    config = model.config.get_text_config()
    sequences = canary_sequences(
        int(config.vocab_size), getattr(config, "max_position_embeddings", None)
    )
    was_training = model.training
    model.eval()
    try:
        device = next(model.parameters()).device
        logits = model(input_ids=torch.tensor(sequences, device=device), use_cache=False).logits
    finally:
        model.train(was_training)
    probes = []
    for sequence, rows in zip(sequences, logits, strict=True):
        for length in prompt_lengths(sequence):
            logprobs = torch.log_softmax(rows[length - 1].float(), dim=-1)
            top = logprobs.topk(min(NUM_TOP, len(logprobs)))
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            probes.append(Probe(token_ids=tuple(sequence[:length]), top=dict(pairs)))
    return Canary(version=version, probes=tuple(probes))
