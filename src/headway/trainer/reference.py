"""The reference trainer: `python -m headway.trainer --run RUN --model DIR`.

One process, one device. Reads the run's batches in order, applies `PolicyUpdater`, publishes each
version, and saves a checkpoint every `actor.checkpoint_every` versions and at the end. Ends with
status 0 only when every batch of the run was trained. SIGTERM and SIGINT end it at once with
status 128 + signal; since every file and folder appears whole or not at all, nothing half-written
is left under a name that anybody reads.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from headway.errors import HeadwayError, TrainerError
from headway.trainer.client import TrainerClient


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status (`HeadwayError.exit_code` of what went wrong)."""
    parser = argparse.ArgumentParser(
        prog="python -m headway.trainer", description="The reference trainer of a run."
    )
    parser.add_argument("--run", type=Path, required=True, help="run directory")
    parser.add_argument("--model", type=Path, required=True, help="folder of the initial model")
    parser.add_argument(
        "--parent-pid", type=int, help="end with an error when this process is gone"
    )
    options = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        train(options.run, options.model, parent_pid=options.parent_pid)
    except HeadwayError as error:
        print(f"headway trainer: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def train(run_dir: Path, model_dir: Path, *, parent_pid: int | None = None) -> None:
    """Train all batches of a run, from its newest sound checkpoint on. Raises HeadwayError.

    Args:
        run_dir: the run directory.
        model_dir: folder of the initial model.
        parent_pid: see `TrainerClient`.
    """
    client = TrainerClient(run_dir, model_dir=model_dir, parent_pid=parent_pid)
    config = client.config
    # Imported late: a wrong run directory should not take seconds to say so.
    import torch

    from headway.trainer.update import PolicyUpdater

    torch.set_num_threads(config.actor.num_threads)
    torch.manual_seed(config.run.seed)
    model = load_model(client.start_dir, config.actor.device)
    updater = PolicyUpdater(
        model, config.actor, seed=config.run.seed, temperature=config.rollout.temperature
    )
    if (state := client.start_state()) is not None:
        updater.load_state_dict(state)
    client.ready(model)
    version = saved = client.start_version
    print(f"headway trainer: ready at version {version}", flush=True)
    every = config.actor.checkpoint_every
    for batch in client.batches():
        stats = updater.update(batch)
        published = client.publish(batch.step, model, stats)
        version = published.version
        client.log({"step": batch.step, "version": version, **published.stats})
        if every and version % every == 0:
            client.save(model, updater.state_dict())
            saved = version
    if saved != version:
        client.save(model, updater.state_dict())
    print(f"headway trainer: finished at version {version}", flush=True)


def load_model(folder: Path, device: str = "auto") -> Any:
    """A causal LM from a Hugging Face folder, float32.

    Args:
        folder: with `config.json` and safetensors.
        device: a torch device, or `auto`: the GPU when there is one.

    Raises:
        TrainerError: the folder is missing or unusable, or the device is.
    """
    if not (folder / "config.json").is_file():
        raise TrainerError(
            f"model folder {folder} does not exist or has no config.json; give a Hugging Face "
            "folder with weights (model.path)"
        )
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # the log is read by people who look for what went wrong
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )
        return model.to(device)
    except Exception as error:  # transformers, safetensors and torch each raise their own kinds
        raise TrainerError(f"cannot load the model from {folder} on {device}: {error}") from error


def _stop(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
