"""Batch files: what is written is read back bit for bit, and damage is named."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from headway.store.batches import batch_path, read_batch, read_metadata, write_batch

floats = st.floats(allow_nan=False, width=32)
doubles = st.floats(allow_nan=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | doubles | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
spans = st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 4)), max_size=6)


@st.composite
def rollouts(draw: st.DrawFn, group_id: int, episode: int) -> Rollout:
    """Any trajectory, empty ones too: spans of sampled and observed tokens."""
    parts = draw(spans)
    mask = np.array([sampled for sampled, _, n in parts for _ in range(n)], np.bool_)
    runs = VersionRuns.of((version, n) for sampled, version, n in parts if sampled)
    size = len(mask)
    ids = draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=size, max_size=size))
    logprobs = draw(st.lists(floats, min_size=size, max_size=size))
    return Rollout(
        group_id=GroupId(group_id),
        episode=episode,
        env=draw(texts),
        token_ids=np.array(ids, np.int32),
        loss_mask=mask,
        logprobs=np.array(logprobs, np.float32),
        version_runs=runs,
        reward=draw(doubles),
        num_turns=draw(st.integers(0, 9)),
        finish_reason=draw(st.sampled_from(FinishReason)),
        timings=Timings(started_at=draw(doubles), finished_at=draw(doubles)),
        source=draw(st.sampled_from(Source)),
        metrics=draw(st.dictionaries(texts, doubles, max_size=3)),
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Groups of any size, in any order of ids."""
    groups = []
    ids = draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=4, unique=True))
    for group_id in ids:
        size = draw(st.integers(1, 3))
        data = draw(st.dictionaries(texts, json_values, max_size=3))
        task = Task(env=draw(texts), key=draw(texts), position=draw(st.integers(0, 99)), data=data)
        members = tuple(draw(rollouts(group_id, episode)) for episode in range(size))
        advantages = draw(st.lists(floats, min_size=size, max_size=size))
        group = Group(group_id=GroupId(group_id), task=task, rollouts=members)
        groups.append(TrainableGroup(group=group, advantages=np.array(advantages, np.float32)))
    return Batch(step=draw(st.integers(0, 2**31)), groups=tuple(groups))


def plain(value: Any) -> Any:
    """A value in which equality means bit for bit."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), [plain(getattr(value, f.name)) for f in dataclasses.fields(value)]
    if isinstance(value, msgspec.Struct):
        return type(value), [plain(getattr(value, name)) for name in value.__struct_fields__]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, float):
        return value.hex()
    return value


def example() -> Batch:
    """Two groups of two rollouts."""
    groups = []
    for group_id in (5, 3):
        members = tuple(
            Rollout(
                group_id=GroupId(group_id),
                episode=episode,
                env="añb",
                token_ids=np.arange(6, dtype=np.int32),
                loss_mask=np.array([0, 0, 1, 1, 0, 1], np.bool_),
                logprobs=np.array([0, 0, -1, -2, 0, -0.0], np.float32),
                version_runs=VersionRuns.of([(1, 1), (2, 2)]),
                reward=0.1,
                num_turns=2,
                finish_reason=FinishReason.STOP,
                timings=Timings(started_at=0.1, finished_at=0.3),
                metrics={"ok": np.float32(1.0)},  # type: ignore[dict-item]
            )
            for episode in range(2)
        )
        task = Task(env="añb", key="k", position=0, data={"é": [1, None]})
        group = Group(group_id=GroupId(group_id), task=task, rollouts=members)
        groups.append(TrainableGroup(group=group, advantages=np.array([1, -1], np.float32)))
    return Batch(step=12, groups=tuple(groups))


@settings(max_examples=60, deadline=None)
@given(batch=batches())
def test_round_trip_is_exact(batch: Batch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batch.parquet"
        write_batch(path, batch)
        assert plain(read_batch(path)) == plain(batch)
        assert [entry.name for entry in Path(folder).iterdir()] == [path.name]


def test_writing_twice_gives_the_same_bytes_and_arrays_can_be_changed(tmp_path: Path) -> None:
    path = batch_path(tmp_path, 12)
    path.parent.mkdir()
    write_batch(path, example(), {"seed": "7"})
    first = path.read_bytes()
    again = read_batch(path)
    write_batch(path, again, {"seed": "7"})
    assert path.read_bytes() == first
    assert read_metadata(path) == {"seed": "7"}
    again.rollouts[0].logprobs[:] = 0
    assert path.name == "step-000012.parquet"


@pytest.mark.parametrize("kind", ["missing", "empty", "truncated", "flipped", "other"])
def test_damage_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "batch.parquet"
    write_batch(path, example())
    content = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "flipped":
        content[len(content) // 3] ^= 0xFF
        path.write_bytes(content)
    else:
        path.write_text("something else")
    with pytest.raises(StoreError, match=r"batch\.parquet.*(missing|damaged)"):
        read_batch(path)


def test_a_parquet_file_of_something_else_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(StoreError, match="not a batch file"):
        read_batch(path)


def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    batch = example()
    first = batch.groups[0]
    task = msgspec.structs.replace(first.group.task, data={"x": {1, 2}})
    group = msgspec.structs.replace(first.group, task=task)
    odd = msgspec.structs.replace(batch, groups=(msgspec.structs.replace(first, group=group),))
    with pytest.raises(StoreError, match="not JSON"):
        write_batch(tmp_path / "a.parquet", odd)
    with pytest.raises(StoreError, match="twice"):
        write_batch(tmp_path / "a.parquet", msgspec.structs.replace(batch, groups=(first, first)))
    with pytest.raises(StoreError, match="no group"):
        write_batch(tmp_path / "a.parquet", Batch(step=0, groups=()))
    with pytest.raises(StoreError, match="check that its folder exists"):
        write_batch(tmp_path / "absent" / "a.parquet", batch)
    assert list(tmp_path.iterdir()) == []
