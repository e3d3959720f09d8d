"""A recorded run as the report needs it: rows by kind, summary and configuration."""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml

from headway.errors import RunDirError
from headway.views.values import Row, integer, known, mean, number, section, value


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """Everything that was recorded; each list is in the order in which it was written.

    `summary` and `config` are empty when a crash left none.
    """

    run_dir: Path
    run: Row = field(default_factory=dict)
    intervals: list[Row] = field(default_factory=list)
    steps: list[Row] = field(default_factory=list)
    evals: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    summary: Row = field(default_factory=dict)
    config: Row = field(default_factory=dict)
    num_broken_lines: int = 0
    """Lines of metrics.jsonl that are no JSON object: a crash can leave half a line."""

    @classmethod
    def read(cls, run_dir: Path) -> Self:
        """Read what is there.

        Raises:
            RunDirError: when the folder holds neither metric rows nor a summary.
        """
        metrics, summary_file = run_dir / "metrics.jsonl", run_dir / "summary.json"
        if not metrics.is_file() and not summary_file.is_file():
            raise RunDirError(
                f"{run_dir} holds no run to report: neither metrics.jsonl nor summary.json is "
                "there; give the folder that `run.dir` names"
            )
        rows, num_broken_lines = _read_rows(metrics)
        kinds: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            kinds[str(value(row, "kind"))].append(row)
        summary = _read_json(summary_file) or (kinds["summary"] or [{}])[-1]
        return cls(
            run_dir=run_dir,
            run=(kinds["run"] or [{}])[0],
            intervals=kinds["interval"],
            steps=_latest(kinds["step"], "step"),
            evals=_latest(kinds["eval"], "version", "env"),
            events=kinds["event"],
            summary=summary,
            config=_read_yaml(run_dir / "config.yaml"),
            num_broken_lines=num_broken_lines,
        )

    @property
    def seconds(self) -> float | None:
        """Length of the run; without a summary, the time of its last row."""
        rows = (self.intervals[-1:], self.steps[-1:], self.events[-1:])
        times = known(number(row, "time") for last in rows for row in last)
        return number(self.summary, "loop_seconds") or max(times, default=None)

    @property
    def configured_age(self) -> int | None:
        """`S`, in versions."""
        found = integer(self.run, "configured")
        return integer(self.summary, "age", "configured") if found is None else found

    @property
    def guaranteed_age(self) -> int | None:
        """The head age that the settings guarantee; None when they guarantee none."""
        found = integer(self.run, "guaranteed")
        return integer(self.summary, "age", "guaranteed") if found is None else found

    @property
    def max_age(self) -> int | None:
        """Oldest token that was trained, in versions."""
        found = integer(self.summary, "age", "max")
        ages = known(number(row, "age", "max") for row in self.steps)
        return int(max(ages)) if found is None and ages else found

    @property
    def mean_age(self) -> float | None:
        """Mean age over trained tokens, in versions; over batches when there is no summary."""
        found = number(self.summary, "age", "mean")
        return mean(number(row, "age", "mean") for row in self.steps) if found is None else found

    def rewards(self) -> list[float]:
        """Mean reward of every batch, in step order."""
        return known(number(row, "reward_mean") for row in self.steps)

    def eval_points(self) -> dict[str, list[tuple[float, float]]]:
        """`(version, mean reward)` by environment."""
        points: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for row in self.evals:
            version, reward = number(row, "version"), number(row, "reward_mean")
            if version is not None and reward is not None:
                points[str(value(row, "env") or "eval")].append((version, reward))
        return dict(points)

    def idle_share(self, who: str) -> float | None:
        """Idle share of the `trainer` or the `engine` over the run."""
        rows = [self.summary, *reversed(self.intervals)]
        return next(iter(known(number(row, "idle", who) for row in rows)), None)

    def reason_counts(self, key: str) -> Counter[str]:
        """Samples by reason, summed over the steps; `key` is `rejected`, `dropped` or `failed`."""
        total: Counter[str] = Counter()
        for row in self.steps:
            counts = section(row, key)
            total.update({name: integer(counts, name) or 0 for name in counts})
        return total


def _latest(rows: list[Row], *keys: str) -> list[Row]:
    """Of rows about the same, the last: a resumed run trains some batches again."""
    latest: dict[tuple[Any, ...], Row] = {}
    for index, row in enumerate(rows):
        name = tuple(value(row, key) for key in keys)
        latest[(index,) if None in name else ("", *name)] = row
    return list(latest.values())


def _read_rows(path: Path) -> tuple[list[Row], int]:
    rows: list[Row] = []
    num_broken = 0
    if not path.is_file():
        return rows, num_broken
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                rows.append(row)
            else:
                num_broken += 1
    return rows, num_broken


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing or cut off: a crashed run is reported all the same
        return {}
    return found if isinstance(found, dict) else {}


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # as above
        return {}
    return found if isinstance(found, dict) else {}
