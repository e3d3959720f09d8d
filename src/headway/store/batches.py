"""Batches on disk: one Parquet file a step, one row a rollout.

The file is at once the record of the run, the hand-off to the trainer and the resume point, so it
is written in one piece (temporary name, fsync, rename) before the batch is shipped, and holds all
of it: reading it back gives the same batch bit for bit. Everything here is synchronous; from a
running loop call it in a thread (writing 512 rollouts of 8,192 tokens takes some 0.4 s).

Columns: `COLUMNS`. `data` of a task and `metrics` of a rollout are JSON, so what JSON cannot tell
apart (a tuple and a list) comes back as JSON has it.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headway.core.rollout import (
    Batch,
    FinishReason,
    Group,
    GroupId,
    Rollout,
    Source,
    Task,
    Timings,
    TrainableGroup,
)
from headway.core.versions import VersionRuns
from headway.errors import StoreError
from headway.store.atomic import atomic_file

FORMAT = "1"
"""Format version of the file; a reader refuses another one."""

_METADATA_PREFIX = "headway."
_VERSION_RUN = pa.struct([("version", pa.int32()), ("count", pa.int32())])
_TIMINGS = pa.struct([(name, pa.float64()) for name in Timings.__struct_fields__])

COLUMNS = pa.schema(
    [
        pa.field(name, kind, nullable=False)
        for name, kind in [
            ("step", pa.int64()),
            ("group_id", pa.int64()),
            ("episode", pa.int32()),
            ("env", pa.string()),
            ("task_env", pa.string()),
            ("task_key", pa.string()),
            ("task_position", pa.int64()),
            ("task_data", pa.string()),
            ("source", pa.string()),
            ("reward", pa.float64()),
            ("advantage", pa.float32()),
            ("num_turns", pa.int32()),
            ("finish_reason", pa.string()),
            ("token_ids", pa.list_(pa.field("element", pa.int32(), nullable=False))),
            ("loss_mask", pa.list_(pa.field("element", pa.bool_(), nullable=False))),
            ("logprobs", pa.list_(pa.field("element", pa.float32(), nullable=False))),
            ("version_runs", pa.list_(pa.field("element", _VERSION_RUN, nullable=False))),
            ("timings", _TIMINGS),
            ("metrics", pa.string()),
            ("num_trimmed", pa.int32()),
        ]
    ]
)
"""Schema of a batch file. `version_runs` covers the tokens whose `loss_mask` is true, in order."""


def batch_path(run_dir: Path, step: int) -> Path:
    """Where the batch of a step lies: `RUN/batches/step-000012.parquet`."""
    return run_dir / "batches" / f"step-{step:06d}.parquet"


def shipped_path(run_dir: Path, step: int) -> Path:
    """Marker that the trainer may read the batch: `RUN/batches/step-000012.shipped`."""
    return run_dir / "batches" / f"step-{step:06d}.shipped"


def finished_path(run_dir: Path) -> Path:
    """`RUN/batches/finished.json`, `{"num_steps": N}`: there are no batches from step N on."""
    return run_dir / "batches" / "finished.json"


def write_batch(path: Path, batch: Batch, metadata: Mapping[str, str] | None = None) -> None:
    """Persist a batch; when this returns it survives a crash of the machine.

    Args:
        path: the file; it replaces an older one of that name in one step.
        batch: at least one rollout in every group.
        metadata: strings kept with the file, read back by `read_metadata`.

    Raises:
        StoreError: when the batch cannot be represented, or writing fails.
    """
    try:
        table = _to_table(batch)
    except (TypeError, ValueError, OverflowError, pa.ArrowException) as error:
        raise StoreError(f"batch {batch.step} cannot be written to {path}: {error}") from error
    own = {"format": FORMAT, "step": str(batch.step), "user": json.dumps(dict(metadata or {}))}
    table = table.replace_schema_metadata({_METADATA_PREFIX + k: v for k, v in own.items()})
    try:
        with atomic_file(path) as temporary:
            pq.write_table(
                table,
                temporary,
                compression="zstd",
                compression_level=1,
                # Dictionaries cost time and saved nothing: zstd finds what repeats.
                use_dictionary=False,
                write_page_checksum=True,
            )
    except (OSError, pa.ArrowException) as error:
        raise StoreError(
            f"cannot write {path}: {error}; check that its folder exists, is writable and has room"
        ) from error


def read_batch(path: Path) -> Batch:
    """Read a batch back, arrays included, bit for bit.

    Raises:
        StoreError: when the file is missing, damaged, or of another format.
    """
    table, _ = _read(path)
    try:
        return _from_table(table)
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(
            f"{path} holds an inconsistent batch ({error}); restore it from a copy"
        ) from error


def read_metadata(path: Path) -> dict[str, str]:
    """The strings given to `write_batch`. Raises StoreError."""
    _, metadata = _read(path, columns=["step"])
    return metadata


def _json(value: Mapping[str, Any], what: str) -> str:
    try:
        return json.dumps(dict(value), default=_plain)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} is not JSON ({error}); keep plain values in it") from error


def _plain(value: object) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} {value!r}")


def _check(batch: Batch) -> None:
    seen: set[int] = set()
    if not batch.groups:
        raise ValueError("it holds no group")
    for trainable in batch.groups:
        group = trainable.group
        if group.group_id in seen:
            raise ValueError(f"group {group.group_id} is in it twice")
        seen.add(group.group_id)
        if not group.rollouts:
            raise ValueError(f"group {group.group_id} holds no rollout")
        if trainable.advantages.shape != (len(group.rollouts),):
            raise ValueError(
                f"group {group.group_id} has {len(group.rollouts)} rollouts but advantages of "
                f"shape {trainable.advantages.shape}"
            )
        for rollout in group.rollouts:
            if rollout.group_id != group.group_id:
                raise ValueError(f"rollout {rollout.rollout_id} is in group {group.group_id}")


def _lists(arrays: Sequence[NDArray[Any]], name: str) -> Any:
    """Vectors of any length, one a row, as one list column."""
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"{offsets[-1]} tokens are more than one file can hold (2^31 - 1)")
    kind = COLUMNS.field(name).type
    values = pa.array(np.concatenate(arrays), kind.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values, type=kind)


def _runs(rollouts: Sequence[Rollout]) -> Any:
    flat = [run for rollout in rollouts for run in rollout.version_runs]
    versions, counts = zip(*flat, strict=True) if flat else ((), ())
    offsets = np.zeros(len(rollouts) + 1, np.int32)
    np.cumsum([len(rollout.version_runs.runs) for rollout in rollouts], out=offsets[1:])
    values = pa.StructArray.from_arrays(
        [pa.array(versions, pa.int32()), pa.array(counts, pa.int32())], fields=list(_VERSION_RUN)
    )
    kind = COLUMNS.field("version_runs").type
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=kind)


def _to_table(batch: Batch) -> Any:
    _check(batch)
    rollouts = batch.rollouts
    rows = [
        (trainable.group, index, trainable.advantages[index])
        for trainable in batch.groups
        for index in range(len(trainable.group.rollouts))
    ]
    data = {t.group.group_id: _json(t.group.task.data, "data of a task") for t in batch.groups}
    timings = [
        pa.array([getattr(r.timings, field.name) for r in rollouts], field.type)
        for field in _TIMINGS
    ]
    columns: dict[str, Any] = {
        "step": [batch.step] * len(rollouts),
        "group_id": [group.group_id for group, _, _ in rows],
        "episode": [r.episode for r in rollouts],
        "env": [r.env for r in rollouts],
        "task_env": [group.task.env for group, _, _ in rows],
        "task_key": [group.task.key for group, _, _ in rows],
        "task_position": [group.task.position for group, _, _ in rows],
        "task_data": [data[group.group_id] for group, _, _ in rows],
        "source": [r.source.value for r in rollouts],
        "reward": [float(r.reward) for r in rollouts],
        "advantage": np.array([advantage for _, _, advantage in rows], np.float32),
        "num_turns": [r.num_turns for r in rollouts],
        "finish_reason": [r.finish_reason.value for r in rollouts],
        "token_ids": _lists([r.token_ids for r in rollouts], "token_ids"),
        "loss_mask": _lists([r.loss_mask for r in rollouts], "loss_mask"),
        "logprobs": _lists([r.logprobs for r in rollouts], "logprobs"),
        "version_runs": _runs(rollouts),
        "timings": pa.StructArray.from_arrays(timings, fields=list(_TIMINGS)),
        "metrics": [_json(r.metrics, f"metrics of rollout {r.rollout_id}") for r in rollouts],
        "num_trimmed": [r.num_trimmed for r in rollouts],
    }
    return pa.Table.from_pydict(columns, schema=COLUMNS)


def _read(path: Path, columns: list[str] | None = None) -> tuple[Any, dict[str, str]]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            metadata = {
                key.decode().removeprefix(_METADATA_PREFIX): value.decode()
                for key, value in (schema.metadata or {}).items()
            }
            if metadata.get("format") != FORMAT or not schema.equals(COLUMNS):
                raise StoreError(
                    f"{path} is not a batch file of format {FORMAT} (it says "
                    f"{metadata.get('format', 'nothing')}); read it with the Headway that wrote it"
                )
            table = file.read(columns=columns)
    except FileNotFoundError as error:
        raise StoreError(
            f"batch file {path} is missing; a batch is written there before it is shipped: check "
            "that this is the run's folder"
        ) from error
    except (OSError, ValueError, pa.ArrowException) as error:
        raise StoreError(
            f"batch file {path} is damaged ({error}); restore it from a copy"
        ) from error
    return table.combine_chunks(), json.loads(metadata["user"])


def _vectors(table: Any, name: str) -> list[NDArray[Any]]:
    """The rows of a list column, as views into one array of their own (writable)."""
    column = _one(table, name)
    values = np.array(column.values.to_numpy(zero_copy_only=False))
    offsets = column.offsets.to_numpy()
    return [values[a:b] for a, b in pairwise(offsets)]


def _one(table: Any, name: str) -> Any:
    """A column as one array."""
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _from_table(table: Any) -> Batch:
    if not table.num_rows:
        raise ValueError("no rows")
    vectors = ("token_ids", "loss_mask", "logprobs", "version_runs")
    rest = table.drop_columns(list(vectors))
    rows: list[dict[str, Any]] = rest.to_pylist()
    runs = _one(table, "version_runs")
    offsets = runs.offsets.to_pylist()
    versions = runs.values.field("version").to_pylist()
    counts = runs.values.field("count").to_pylist()
    advantages = _one(table, "advantage").to_numpy()
    tokens, masks, logprobs = (_vectors(table, name) for name in vectors[:3])

    def rollout(index: int, row: dict[str, Any]) -> Rollout:
        span = slice(offsets[index], offsets[index + 1])
        return Rollout(
            group_id=GroupId(row["group_id"]),
            episode=row["episode"],
            env=row["env"],
            token_ids=tokens[index],
            loss_mask=masks[index],
            logprobs=logprobs[index],
            version_runs=VersionRuns(tuple(zip(versions[span], counts[span], strict=True))),
            reward=row["reward"],
            num_turns=row["num_turns"],
            finish_reason=FinishReason(row["finish_reason"]),
            timings=Timings(**row["timings"]),
            source=Source(row["source"]),
            metrics=json.loads(row["metrics"]),
            num_trimmed=row["num_trimmed"],
        )

    groups = []
    for group_id, members in groupby(enumerate(rows), key=lambda pair: pair[1]["group_id"]):
        own = list(members)
        first = own[0][1]
        task = Task(
            env=first["task_env"],
            key=first["task_key"],
            position=first["task_position"],
            data=json.loads(first["task_data"]),
        )
        group = Group(
            group_id=GroupId(group_id),
            task=task,
            rollouts=tuple(rollout(index, row) for index, row in own),
        )
        span = slice(own[0][0], own[-1][0] + 1)
        groups.append(TrainableGroup(group=group, advantages=np.array(advantages[span])))
    return Batch(step=rows[0]["step"], groups=tuple(groups))
