"""Files that are nobody's, in every folder of a run; and checkpoints that went bad."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from headway.trainer.checkpoints import OPTIMIZER, latest_checkpoint
from headway.weights.folder import COMPLETE, WEIGHTS_FILE, version_name


def _file(*parts: str, content: str = "nobody's") -> Callable[[Path], None]:
    def make(run_dir: Path) -> None:
        path = run_dir.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(content, encoding="utf-8")

    return make


def _half_a_version(run_dir: Path) -> None:
    """As another tool would copy it: the version to come, under its own name, not complete."""
    names = [path.name for path in (run_dir / "weights").glob("v0000??")]
    folder = run_dir / "weights" / version_name(max((int(n[1:]) for n in names), default=0) + 1)
    folder.mkdir(exist_ok=True)
    (folder / WEIGHTS_FILE).write_bytes(b"half")


def _copied_checkpoint(run_dir: Path) -> None:
    """A sound one, under the number of a later one."""
    found = latest_checkpoint(run_dir)
    target = run_dir / "checkpoints" / "step-000800"
    if found is not None and not target.exists():
        shutil.copytree(found[1], target)


def _copied_batch(run_dir: Path) -> None:
    """The newest one, under the number of the next."""
    found = sorted((run_dir / "batches").glob("step-0000??.parquet"))
    if found:
        step = int(found[-1].stem.removeprefix("step-")) + 1
        shutil.copyfile(found[-1], found[-1].with_name(f"step-{step:06d}.parquet"))


def _half_a_row(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "inter')


ALWAYS: tuple[Callable[[Path], None], ...] = (
    _file("weights", "notes.txt"),
    _file("weights", "v1", "model.safetensors"),
    _file("weights", "v000900", "config.json"),
    _file("weights", "v000901"),
    _file("weights", "v000902", COMPLETE),
    _file("weights", "v000903", COMPLETE, "nested"),
    _file("weights", ".v000003.99.tmp", "config.json"),
    _half_a_version,
    _file("batches", "notes.txt"),
    _file("batches", "step-000900.parquet"),
    _file("batches", "step-000901.shipped"),
    _file("batches", "step-old.shipped"),
    _file("batches", "step-000902.parquet", "nested"),
    _file("batches", ".step-000001.parquet.99.tmp"),
    _file("batches", ".folder.tmp", "nested"),
    _file("checkpoints", "notes.txt"),
    _file("checkpoints", "step-000900", "config.json"),
    _file("checkpoints", "step-000901"),
    _file("checkpoints", "step-000902", COMPLETE),
    _file("checkpoints", "step-000903", COMPLETE, content="{}"),
    _file("checkpoints", ".step-000003.99.tmp", "config.json"),
    _copied_checkpoint,
    _file("core.4242"),
    _file("nohup.out"),
    _file("start.tmp", "nested"),
    _file(".ledger.db.swp"),
)
BETWEEN_LIVES: tuple[Callable[[Path], None], ...] = (
    _half_a_row,
    _copied_batch,
    _file("start", "nobody's.bin"),
    _file("batches", "finished.json", content='{"num_st'),
)
"""What could not come about while the run has the file open, or is about to write it."""


def plant(run_dir: Path, seed: int, *, is_between_lives: bool) -> None:
    """Some of them, drawn by seed."""
    chance = random.Random(seed)
    known = (*ALWAYS, *BETWEEN_LIVES) if is_between_lives else ALWAYS
    for make in chance.sample(known, chance.randrange(1, len(known))):
        make(run_dir)


def corrupt(run_dir: Path, which: int) -> int | None:
    """Damage the newest sound checkpoint. Returns its version, None when there is none."""
    found = latest_checkpoint(run_dir)
    if found is None:
        return None
    version, folder = found
    match which % 5:
        case 0:
            content = bytearray((folder / OPTIMIZER).read_bytes())
            content[-1] ^= 1
            (folder / OPTIMIZER).write_bytes(content)
        case 1:
            (folder / WEIGHTS_FILE).unlink()
        case 2:
            (folder / COMPLETE).write_text('{"version"', encoding="utf-8")
        case 3:
            (folder / COMPLETE).unlink()
        case _:
            (folder / WEIGHTS_FILE).write_bytes(b"")
    return version
