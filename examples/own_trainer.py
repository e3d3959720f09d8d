"""A training loop of your own on Headway's client: plain REINFORCE in plain PyTorch.

python examples/own_trainer.py RUN MODEL_FOLDER
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from headway.trainer.client import TrainerClient

run_dir, model_dir = Path(sys.argv[1]), Path(sys.argv[2])
client = TrainerClient(run_dir, model_dir=model_dir)
model = AutoModelForCausalLM.from_pretrained(client.start_dir, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
if (state := client.start_state()) is not None:  # the run is resumed
    optimizer.load_state_dict(state)

client.ready(model)
for batch in client.batches():
    optimizer.zero_grad()
    for trainable in batch.groups:
        for rollout, advantage in zip(trainable.group.rollouts, trainable.advantages, strict=True):
            ids = torch.tensor(rollout.token_ids, dtype=torch.int64)[None]
            logprobs = model(ids[:, :-1]).logits.log_softmax(-1)
            chosen = logprobs.gather(-1, ids[:, 1:, None])[0, :, 0]
            mask = torch.tensor(rollout.loss_mask[1:])
            (-(chosen[mask] * float(advantage)).sum() / batch.num_trainable).backward()
    optimizer.step()
    client.publish(batch.step, model)
    if batch.step % 10 == 9:
        client.save(model, optimizer.state_dict())
client.save(model, optimizer.state_dict())
