"""What must hold of the files of any run, whatever happened to it: read from its folder alone."""

from collections.abc import Iterator
from pathlib import Path

from headway.config import Config
from headway.core.ledger import SampleState
from headway.core.rollout import Batch, Source
from headway.errors import HeadwayError
from headway.store.batches import batch_path, read_batch
from headway.store.database import RunDatabase
from headway.store.recovery import read_state


def audit(config: Config, run_dir: Path, num_batches: int) -> list[str]:
    """What does not hold of a run with this many batches on record; nothing, if all is well.

    Every batch is there, whole, within the guaranteed bound; no sample and no prompt is trained
    twice; every sample is accounted for; no prompt was skipped, and only those of dropped samples
    were issued again. Reads all batches.
    """
    try:
        return [*_of_batches(config, run_dir, num_batches), *_of_ledger(config, run_dir)]
    except HeadwayError as error:
        return [str(error)]


def _of_batches(config: Config, run_dir: Path, num_batches: int) -> Iterator[str]:
    size = config.rollout.consumer_batch_size
    samples: dict[int, int] = {}
    prompts: dict[int, int] = {}
    for step in range(num_batches):
        batch = read_batch(batch_path(run_dir, step))
        if batch.step != step or len(batch.groups) != size:
            yield f"the file of batch {step} holds batch {batch.step}, {len(batch.groups)} samples"
        for group in (one.group for one in batch.groups):
            number, prompt = group.group_id, group.task.position
            if number in samples:
                yield f"sample {number} is in batch {samples[number]} and in batch {step}"
            elif prompt in prompts:
                yield f"prompt {prompt} is trained in batch {prompts[prompt]} and in batch {step}"
            samples[number] = prompts[prompt] = step
        yield from _of_ages(config, batch)


def _of_ages(config: Config, batch: Batch) -> Iterator[str]:
    bound = config.bound.guaranteed_age
    ages = [
        batch.step - rollout.version_runs.head
        for rollout in batch.rollouts
        if rollout.num_trainable and rollout.source is Source.LIVE
    ]
    if min(ages, default=0) < 0 or (bound is not None and max(ages, default=0) > bound):
        yield f"batch {batch.step} holds head ages {sorted(ages)}, guaranteed are 0 to {bound}"


def _of_ledger(config: Config, run_dir: Path) -> Iterator[str]:
    database = RunDatabase(run_dir / "ledger.db")
    try:
        state = read_state(database, 0)
        state.check(config.rollout.consumer_batch_size)
        rows = database.rows("SELECT id, position FROM samples ORDER BY id")
    finally:
        database.close()
    ids, positions = [row[0] for row in rows], {row[1] for row in rows}
    if ids != list(range(len(ids))):
        yield f"numbers of samples are missing: {sorted(set(range(len(ids))) - set(ids))}"
    if skipped := set(range(state.next_position)) - positions:
        yield f"prompts {sorted(skipped)} were skipped; the next one is {state.next_position}"
    num_again = len(ids) - len(positions)
    num_dropped = sum(state.lost.get(SampleState.DROPPED, {}).values())
    if num_again != num_dropped - len(state.requeued):
        yield (
            f"{num_again} prompts were issued again; {num_dropped} samples were dropped, and the "
            f"prompts of {len(state.requeued)} of these wait"
        )
