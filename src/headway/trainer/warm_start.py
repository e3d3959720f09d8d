"""How the built-in model comes to be: a small Qwen3 and a short supervised phase.

`python -m headway.trainer.warm_start --folder DIR --seed N --steps N` builds it in DIR, which must
exist, and prints some ten JSON lines of progress. `headway.builtin_model` runs this in a
process of its own, so that the control process never loads torch.

**What the model is shown**, so that nobody takes the demo for more than it is. The problems are
those of `headway.envs.arithmetic` under a seed of their own, held-out questions left out, and each
comes with one demonstration. The first `CLEAN` share of the steps shows work, all of it right:
`4-1=3,3-7=-4`. The rest is imperfect on purpose:

- a share of `DIRECT` is the bare answer, `-4`, which so small a model mostly cannot compute;
- the others show work whose every step slips with probability `SLIP`: its result is off by 1 to 9,
  and the next step goes on from there.

So the model is *able* to compute a step, and to show its work, but sampled at temperature 1 it does
neither reliably: a quarter to a third of its answers are right. What reinforcement learning can
find, from right and wrong alone, is to show work always and to slip never; rollouts grow longer as
it does. Held-out problems profit as much.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headway.envs.arithmetic import Problems, prompt_text
from headway.envs.characters import EOS_ID, PAD_ID, VOCABULARY, character_tokenizer, save_tokenizer

BATCH_SIZE = 64
POOL = 16
"""Batches made at a time; sorting their problems by length saves padding."""
LEARNING_RATE = 4e-3
WARMUP_STEPS = 50
FINAL_LEARNING_RATE_SHARE = 0.05
CLEAN = 0.78
"""Share of the steps with perfect demonstrations: they teach the ability, the rest spoils it."""
DIRECT = 0.4
SLIP = 0.25
NUM_THREADS = 1
"""A second one spins at barriers where other processes want the cores, and makes it slower."""
NUM_REPORTS = 10
MODEL = {
    "hidden_size": 96,
    "intermediate_size": 288,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # attention kernels of inference servers take few other small ones
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}
IGNORED = -100
"""Label of tokens that are not learnt: prompt and padding."""


def demonstration(expression: str, rng: random.Random, *, direct: float, slip: float) -> str:
    """One answer to a sum without spaces: bare with probability `direct`, else with work of which
    each step slips with probability `slip`.

    Example:
        `"4-1-7"` gives `"-4"`, `"4-1=3,3-7=-4"`, or with a slip `"4-1=5,5-7=-2"`.
    """
    first, *others = re.findall(r"[+-]?\d+", expression)
    if rng.random() < direct:
        return str(sum(map(int, (first, *others))))
    total, steps = int(first), []
    for term in others:
        result = total + int(term)
        if rng.random() < slip:
            result += rng.choice((-1, 1)) * rng.randint(1, 9)
        steps.append(f"{total}{term}={result}")
        total = result
    return ",".join(steps)


def build(folder: Path, *, seed: int, steps: int) -> None:
    """Build, warm up and save the model with its tokenizer. Prints progress. Raises OSError."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(NUM_THREADS)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        **MODEL,
    )
    model: Any = Qwen3ForCausalLM(config).float()
    _supervise(model, _batches(seed, steps), steps=steps)
    model.generation_config.eos_token_id = EOS_ID
    model.generation_config.pad_token_id = PAD_ID
    model.save_pretrained(folder)
    save_tokenizer(folder)


def _batches(seed: int, steps: int) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Batches of (prompt ids, answer ids), each of prompts about equally long."""
    rng = random.Random(seed)
    tokenizer = character_tokenizer()
    problems = Problems(seed=seed, split="warm-start")
    num_clean = round(steps * CLEAN)
    position = 0
    while True:
        is_clean = position < num_clean * BATCH_SIZE
        direct, slip = (0.0, 0.0) if is_clean else (DIRECT, SLIP)
        pairs = []
        for _ in range(BATCH_SIZE * POOL):
            prompt = prompt_text(problems[position], "expression")
            position += 1
            answer = demonstration(prompt.removesuffix("="), rng, direct=direct, slip=slip)
            pairs.append((tokenizer.encode(prompt).ids, [*tokenizer.encode(answer).ids, EOS_ID]))
        # By the prompt alone: sorting by the answer would put bare and worked answers into batches
        # of their own, and a token of a short batch weighs more.
        pairs.sort(key=lambda pair: len(pair[0]))
        batches = [pairs[at : at + BATCH_SIZE] for at in range(0, len(pairs), BATCH_SIZE)]
        rng.shuffle(batches)
        yield from batches


def _supervise(
    model: Any, batches: Iterator[list[tuple[list[int], list[int]]]], *, steps: int
) -> None:
    import torch

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    for step in range(steps):
        warm = min(1.0, (step + 1) / WARMUP_STEPS)
        decay = 1 - (1 - FINAL_LEARNING_RATE_SHARE) * step / steps
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * warm * decay
        tokens, labels = _padded(next(batches))
        hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1]
        learnt = labels[:, 1:] != IGNORED
        logits = model.lm_head(hidden[learnt])
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:][learnt])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % max(steps // NUM_REPORTS, 1) == 0 or step + 1 == steps:
            progress = {"step": step + 1, "loss": round(loss.item(), 4)}
            print(json.dumps(progress), flush=True)


def _padded(pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[Any, Any]:
    """Token ids and labels, int64 `(len(pairs), longest)`. Padding on the right needs no attention
    mask: a causal model's real tokens never look at it."""
    import torch

    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    tokens = torch.full((len(pairs), longest), PAD_ID)
    labels = torch.full((len(pairs), longest), IGNORED)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return tokens, labels


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="python -m headway.trainer.warm_start")
    parser.add_argument("--folder", type=Path, required=True, help="existing folder to fill")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    build(options.folder, seed=options.seed, steps=options.steps)


if __name__ == "__main__":
    main()
