"""The update step, the hand-off, and the reference trainer as a real process."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headway.config import ActorConfig, Config, OptimizerConfig
from headway.core.rollout import Batch
from headway.core.versions import VersionRuns
from headway.errors import RunDirError, StoreError, TrainerError
from headway.store.batches import batch_path, finished_path, shipped_path, write_batch
from headway.trainer.canary import make_canary
from headway.trainer.checkpoints import latest_checkpoint, save_checkpoint
from headway.trainer.client import TrainerClient
from headway.trainer.link import FolderTrainerLink
from headway.trainer.reference import load_model, main
from headway.trainer.update import PolicyUpdater
from headway.weights.canary import read_canary
from headway.weights.folder import verify, version_name
from tiny_policy import make_batch, make_model, save_model

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def process_state() -> Iterator[None]:
    """Bit-equality holds at a fixed number of threads; `main` sets that and signal handlers."""
    threads = torch.get_num_threads()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def make_run(folder: Path, *, finish_at: int | None = None, **actor: Any) -> Path:
    """A run directory with a configuration, and `finish_at` batches handed over when given."""
    (folder / "batches").mkdir(parents=True)
    config = Config(actor=ActorConfig(**actor))
    content = yaml.safe_dump(config.model_dump(mode="json"))
    (folder / "config.yaml").write_text(content)
    if finish_at is not None:
        for step in range(finish_at):
            hand_over(folder, make_batch(step))
        asyncio.run(FolderTrainerLink(folder).finish(finish_at))
    return folder


def hand_over(run_dir: Path, batch: Batch) -> None:
    write_batch(batch_path(run_dir, batch.step), batch)
    asyncio.run(FolderTrainerLink(run_dir).ship(batch))


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Poll until a real process has done something; its end, or a minute, is a failure."""
    for _ in range(6000):
        if condition():
            return
        try:
            process.wait(0.01)
        except subprocess.TimeoutExpired:
            continue
        assert condition(), f"the process ended with {process.returncode}"
    raise AssertionError("nothing happened within a minute")


def start_trainer(run_dir: Path, model: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headway.trainer", "--run", str(run_dir), "--model"]
    return subprocess.Popen(
        [*command, str(model), *more], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


# --- the update ----------------------------------------------------------------------------------


@pytest.mark.parametrize("minibatches", [1, 3])
def test_update_is_deterministic_bit_for_bit(minibatches: int) -> None:
    actor = ActorConfig(ppo_n_minibatches=minibatches, micro_batch_tokens=40)
    results = []
    for disturbance in (0, 1):
        model = make_model()
        updater = PolicyUpdater(model, actor, seed=3)
        torch.manual_seed(disturbance)  # nothing may depend on the global generator
        stats = [updater.update(make_batch(step)) for step in range(3)]
        results.append((weights(model), stats))
    assert_same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert any(not torch.equal(a, results[0][0][n]) for n, a in make_model().state_dict().items())


def test_micro_batches_add_up_to_one_pass() -> None:
    stats, models = [], []
    for tokens in (1, 50, 10**6):
        model = make_model()
        stats.append(
            PolicyUpdater(model, ActorConfig(micro_batch_tokens=tokens)).update(make_batch())
        )
        models.append(model)
    for other in (1, 2):
        assert stats[0] == pytest.approx(stats[other], rel=1e-4)
        for name, parameter in models[0].named_parameters():
            twin = dict(models[other].named_parameters())[name]
            torch.testing.assert_close(parameter.grad, twin.grad, atol=1e-6, rtol=1e-3)


def test_minibatches_at_a_still_policy_add_up_to_one_pass() -> None:
    """With a vanishing learning rate every minibatch sees the starting policy."""
    still = OptimizerConfig(lr=1e-30, weight_decay=0.0)
    whole = PolicyUpdater(make_model(), ActorConfig(optimizer=still)).update(make_batch())
    parts = PolicyUpdater(make_model(), ActorConfig(optimizer=still, ppo_n_minibatches=3))
    cut = parts.update(make_batch())
    for key in ("loss", "kl", "entropy", "behaviour_weight_mean", "num_tokens"):
        assert cut[key] == pytest.approx(whole[key], rel=1e-4), key
    assert cut["num_minibatches"] == 3
    assert parts.num_optimizer_steps == 3


def test_the_only_forward_pass_is_the_proximal_one() -> None:
    """One minibatch skips recomputing; that must be the same numbers, bit for bit."""
    model = make_model()
    updater = PolicyUpdater(model, ActorConfig(micro_batch_tokens=50))
    packed = [list(updater._pack(updater._items(make_batch())))]
    proximal = updater.proximal_logprobs(packed)[0]
    for micro, expected in zip(packed[0], proximal, strict=True):
        assert torch.equal(updater._forward(micro)[0].detach(), expected)


def test_updates_raise_the_probability_of_what_was_good() -> None:
    model = make_model()
    batch = make_batch()
    actor = ActorConfig(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0))
    updater = PolicyUpdater(model, actor)
    rollouts = batch.rollouts
    advantages = np.concatenate([trainable.advantages for trainable in batch.groups])

    def score() -> float:
        sums = [float(part.sum()) for part in updater.logprobs(rollouts)]
        return float(np.dot(sums, advantages))

    before = score()
    updater.update(batch)
    assert score() > before


def test_warm_up_and_clipping() -> None:
    settings = OptimizerConfig(lr=0.1, warmup_steps=4, gradient_clipping=1e-3)
    model = make_model()
    updater = PolicyUpdater(model, ActorConfig(optimizer=settings))
    rates = [updater.update(make_batch(step))["lr"] for step in range(6)]
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)


def untrainable(batch: Batch, keep: int) -> Batch:
    """The same batch with nothing to train on except in its first `keep` groups."""
    groups = []
    for index, trainable in enumerate(batch.groups):
        rollouts = tuple(
            rollout
            if index < keep
            else msgspec.structs.replace(
                rollout,
                loss_mask=np.zeros_like(rollout.loss_mask),
                version_runs=VersionRuns(),
            )
            for rollout in trainable.group.rollouts
        )
        group = msgspec.structs.replace(trainable.group, rollouts=rollouts)
        groups.append(msgspec.structs.replace(trainable, group=group))
    return msgspec.structs.replace(batch, groups=tuple(groups))


def test_rollouts_without_trainable_tokens_contribute_nothing() -> None:
    batch = make_batch()
    some = untrainable(batch, keep=2)
    only = msgspec.structs.replace(batch, groups=batch.groups[:2])
    left, right = make_model(), make_model()
    PolicyUpdater(left, ActorConfig()).update(some)
    PolicyUpdater(right, ActorConfig()).update(only)
    assert_same(weights(left), weights(right))
    updater = PolicyUpdater(make_model(), ActorConfig())
    with pytest.raises(TrainerError, match="no trainable token in its 8 rollouts"):
        updater.update(untrainable(batch, keep=0))
    assert [len(v) for v in updater.logprobs(untrainable(batch, keep=1).rollouts)][2:] == [0] * 6


def with_first_rollout(batch: Batch, **changes: Any) -> Batch:
    first = batch.groups[0]
    rollout = msgspec.structs.replace(first.group.rollouts[0], **changes)
    group = msgspec.structs.replace(first.group, rollouts=(rollout, *first.group.rollouts[1:]))
    return msgspec.structs.replace(
        batch, groups=(msgspec.structs.replace(first, group=group), *batch.groups[1:])
    )


def test_unusable_batches_are_refused_and_change_nothing() -> None:
    batch = make_batch()
    rollout = batch.rollouts[0]
    nan = np.where(rollout.loss_mask, np.nan, 0).astype(np.float32)
    foreign = np.full_like(rollout.token_ids, 999)
    first = np.arange(rollout.num_tokens) == 0
    bad: dict[str, dict[str, Any]] = {
        "must be finite": {"logprobs": nan},
        "token id 999, outside the model's vocabulary of 24": {"token_ids": foreign},
        "first token is in the loss mask": {
            "loss_mask": first,
            "version_runs": VersionRuns.of([(0, 1)]),
        },
    }
    for message, changes in bad.items():
        model = make_model()
        updater = PolicyUpdater(model, ActorConfig())
        with pytest.raises(TrainerError, match=message):
            updater.update(with_first_rollout(batch, **changes))
        assert_same(weights(model), weights(make_model()))


def test_checkpoint_continues_bit_for_bit(tmp_path: Path) -> None:
    source = save_model(tmp_path / "initial")
    actor = ActorConfig(ppo_n_minibatches=2)
    model = load_model(source, "cpu")
    updater = PolicyUpdater(model, actor)
    for step in range(2):
        updater.update(make_batch(step))
    save_checkpoint(tmp_path, 2, model, updater.state_dict(), source=source)
    updater.update(make_batch(2))

    from headway.trainer.checkpoints import load_optimizer

    found = latest_checkpoint(tmp_path)
    assert found is not None
    version, path = found
    assert version == 2
    again = load_model(path, "cpu")
    resumed = PolicyUpdater(again, actor)
    resumed.load_state_dict(load_optimizer(path))
    resumed.update(make_batch(2))
    assert_same(weights(model), weights(again))


def test_incomplete_checkpoints_do_not_count(tmp_path: Path) -> None:
    source = save_model(tmp_path / "initial")
    assert latest_checkpoint(tmp_path) is None
    model = make_model()
    for version in (1, 2, 3):
        save_checkpoint(tmp_path, version, model, {}, source=source)
    folder = tmp_path / "checkpoints"
    assert sorted(os.listdir(folder)) == ["step-000002", "step-000003"]
    (folder / "step-000003" / "COMPLETE").unlink()
    (folder / "step-000009").mkdir()
    (folder / ".step-000010.1.tmp").mkdir()
    found = latest_checkpoint(tmp_path)
    assert found is not None and found[0] == 2


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "COMPLETE"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    source = save_model(tmp_path / "initial")
    for version in (1, 2):
        save_checkpoint(tmp_path, version, make_model(), {}, source=source)
    path = tmp_path / "checkpoints" / "step-000002" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    match damage:
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "flip":
            path.write_bytes(content)
        case _:
            path.unlink()
    found = latest_checkpoint(tmp_path)
    assert found is not None and found[0] == 1
    assert (name, damage) == ("COMPLETE", "gone") or "step-000002 is passed over" in caplog.text


# --- the hand-off --------------------------------------------------------------------------------


def test_batches_come_in_order_and_only_once_shipped(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    client = TrainerClient(run_dir, poll_seconds=0.001)
    client.ready()
    assert (run_dir / "trainer" / "ready.json").exists()
    assert read_canary(run_dir) is None  # nobody gave a model
    seen: list[int] = []
    gate = threading.Semaphore(0)

    def read() -> None:
        for batch in client.batches():
            seen.append(batch.step)
            gate.release()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for step in (1, 0, 2):  # 1 is shipped early and must wait for 0
            write_batch(batch_path(run_dir, step), make_batch(step))
        asyncio.run(FolderTrainerLink(run_dir).ship(make_batch(1)))
        assert not gate.acquire(timeout=0.05)
        asyncio.run(FolderTrainerLink(run_dir).ship(make_batch(0)))
        assert gate.acquire(timeout=20) and gate.acquire(timeout=20)
        assert not gate.acquire(timeout=0.05)  # 2 is persisted, not shipped
    finally:
        asyncio.run(FolderTrainerLink(run_dir).finish(2))
        reader.join(20)
    assert seen == [0, 1]
    assert client.idle_seconds_total > 0


def test_link_ships_only_what_is_persisted(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    link = FolderTrainerLink(run_dir)
    with pytest.raises(StoreError, match="before it was persisted"):
        asyncio.run(link.ship(make_batch(0)))
    hand_over(run_dir, make_batch(0))
    hand_over(run_dir, make_batch(0))
    assert shipped_path(run_dir, 0).exists()
    asyncio.run(link.finish(7))
    assert json.loads(finished_path(run_dir).read_text()) == {"num_steps": 7}


def test_client_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="not a run directory"):
        TrainerClient(tmp_path)
    (tmp_path / "config.yaml").write_text("rollout: {max_head_offpolicines: 3}")
    with pytest.raises(RunDirError, match="max_head_offpolicines"):
        TrainerClient(tmp_path)
    run_dir = make_run(tmp_path / "run")
    with pytest.raises(TrainerError, match="model_dir"):
        _ = TrainerClient(run_dir).model_dir
    hand_over(run_dir, make_batch(1))
    batch_path(run_dir, 1).rename(batch_path(run_dir, 0))
    shipped_path(run_dir, 0).touch()
    with pytest.raises(TrainerError, match="holds batch 1, not 0"):
        next(TrainerClient(run_dir).batches())


def test_waiting_ends_when_the_run_is_gone(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    with pytest.raises(TrainerError, match=f"process {child.pid} is gone"):
        next(TrainerClient(run_dir, parent_pid=child.pid).batches())


# --- real processes ------------------------------------------------------------------------------


def test_reference_trainer_trains_a_run_and_equals_the_library(tmp_path: Path) -> None:
    source = save_model(tmp_path / "initial")
    run_dir = make_run(tmp_path / "run", finish_at=3, checkpoint_every=2)
    process = start_trainer(run_dir, source)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "finished at version 3" in out

    model = load_model(source, "cpu")
    updater = PolicyUpdater(model, ActorConfig())
    rows = [json.loads(line) for line in (run_dir / "trainer/metrics.jsonl").open()]
    for step in range(3):
        stats = updater.update(make_batch(step))
        path = run_dir / "weights" / version_name(step + 1)
        manifest = verify(path)
        assert {key: manifest.stats[key] for key in stats} == stats
        assert {"train_seconds", "idle_seconds", "publish_seconds"} <= manifest.stats.keys()
        assert_same(load_file(path / "model.safetensors"), weights(model))
        assert rows[step] == {"step": step, "version": step + 1, **manifest.stats}
    assert sorted(os.listdir(run_dir / "checkpoints")) == ["step-000002", "step-000003"]
    assert read_canary(run_dir) == make_canary(load_model(source, "cpu"), 0)

    # Going on from the last checkpoint: nothing is left to do, and nothing is done again.
    assert main(["--run", str(run_dir), "--model", str(source)]) == 0
    assert read_canary(run_dir) == make_canary(model, 3)
    assert len((run_dir / "trainer/metrics.jsonl").read_text().splitlines()) == 3


def test_resumed_run_equals_one_that_was_not_interrupted(tmp_path: Path) -> None:
    source = save_model(tmp_path / "initial")
    whole = make_run(tmp_path / "whole", finish_at=3, ppo_n_minibatches=2)
    parts = make_run(tmp_path / "parts", finish_at=2, ppo_n_minibatches=2)
    arguments = ["--model", str(source)]
    assert main(["--run", str(whole), *arguments]) == 0
    assert main(["--run", str(parts), *arguments]) == 0
    hand_over(parts, make_batch(2))
    asyncio.run(FolderTrainerLink(parts).finish(3))
    assert main(["--run", str(parts), *arguments]) == 0
    last = Path("weights") / version_name(3) / "model.safetensors"
    assert (whole / last).read_bytes() == (parts / last).read_bytes()


def test_failures_are_named_and_not_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "run")
    assert main(["--run", str(run_dir), "--model", str(tmp_path / "absent")]) == 1
    assert "absent does not exist" in capsys.readouterr().err
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "no-such-model"}')
    assert main(["--run", str(run_dir), "--model", str(tmp_path / "broken")]) == 1
    assert "cannot load the model" in capsys.readouterr().err
    assert main(["--run", str(tmp_path), "--model", str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err

    batch = make_batch(0)
    nan = np.where(batch.rollouts[0].loss_mask, np.nan, 0).astype(np.float32)
    hand_over(run_dir, with_first_rollout(batch, logprobs=nan))
    asyncio.run(FolderTrainerLink(run_dir).finish(1))
    source = save_model(tmp_path / "initial")
    assert main(["--run", str(run_dir), "--model", str(source)]) == 1
    assert "must be finite" in capsys.readouterr().err
    assert not (run_dir / "weights").exists()
    assert not (run_dir / "checkpoints").exists()


@pytest.mark.parametrize("when", ["waiting", "training"])
def test_sigterm_ends_it_with_nothing_half_written(tmp_path: Path, when: str) -> None:
    source = save_model(tmp_path / "initial")
    run_dir = make_run(tmp_path / "run", checkpoint_every=1)
    steps = 1 if when == "waiting" else 200
    batch = make_batch(0)
    for step in range(steps):
        hand_over(run_dir, msgspec.structs.replace(batch, step=step))
    process = start_trainer(run_dir, source)
    first = run_dir / "checkpoints" / "step-000001"
    wait_until(first.exists, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, err
    for folder in ("weights", "checkpoints"):
        for entry in (run_dir / folder).iterdir():
            assert not entry.name.endswith(".tmp")
            assert (entry / "COMPLETE").exists() or entry.name.startswith(".")
    for entry in (run_dir / "weights").glob("v*"):
        verify(entry)


def test_a_killed_trainer_leaves_nothing_half_written(tmp_path: Path) -> None:
    source = save_model(tmp_path / "initial")
    run_dir = make_run(tmp_path / "run", checkpoint_every=1)
    batch = make_batch(0)
    for step in range(200):
        hand_over(run_dir, msgspec.structs.replace(batch, step=step))
    process = start_trainer(run_dir, source)
    wait_until((run_dir / "weights" / version_name(5)).exists, process)
    process.kill()
    process.communicate(timeout=30)
    versions = sorted((run_dir / "weights").glob("v*"))
    assert versions
    for entry in versions:
        verify(entry)
    found = latest_checkpoint(run_dir)
    assert found is not None
    AutoModelForCausalLM.from_pretrained(found[1])


def test_own_trainer_example_runs(tmp_path: Path) -> None:
    source = save_model(tmp_path / "initial")
    run_dir = make_run(tmp_path / "run", finish_at=2)
    command = [sys.executable, str(ROOT / "examples/own_trainer.py"), str(run_dir), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, second = (run_dir / "weights" / version_name(v) for v in (1, 2))
    assert verify(first).contract == verify(second).contract
    before = load_file(source / "model.safetensors")
    after = load_file(second / "model.safetensors")
    assert not torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])

    # In a resumed run it begins where it was: what it has trained is not read again.
    batch_path(run_dir, 0).unlink()
    hand_over(run_dir, make_batch(2))
    asyncio.run(FolderTrainerLink(run_dir).finish(3))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert verify(run_dir / "weights" / version_name(3)).version == 3
    client = TrainerClient(run_dir, model_dir=source)
    assert client.start_version == 3
    assert client.start_dir == run_dir / "checkpoints" / "step-000003"
    state = client.start_state()
    assert state is not None and state["param_groups"][0]["lr"] == 1e-4
