"""The views show every run, however incomplete its rows, and take nothing from the network."""

import copy
import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from rich.console import Console

from headway.errors import RunDirError
from headway.views.dashboard import draw
from headway.views.live_state import History, LiveState
from headway.views.plots import PLOTS
from headway.views.report import report_html, write_report
from headway.views.run_data import RunData
from headway.views.summary import summary_text
from headway.views.terminal import TerminalView
from headway.views.values import resampled, sparkline
from headway.views.verdict import Tone, bottleneck, bound, learning, verdict, waits
from simulated import sim_config, simulate_in_memory
from view_rows import run_rows, summary_of, write_run

Rows = list[dict[str, Any]]


def data_of(rows: Rows, run_dir: Path = Path("run")) -> RunData:
    """As `RunData.read`, without the disk."""
    by_kind: dict[str, Rows] = {}
    for row in rows:
        by_kind.setdefault(row.get("kind", ""), []).append(row)
    return RunData(
        run_dir=run_dir,
        run=by_kind.get("run", [{}])[0],
        intervals=by_kind.get("interval", []),  # type: ignore[arg-type]
        steps=by_kind.get("step", []),  # type: ignore[arg-type]
        evals=by_kind.get("eval", []),  # type: ignore[arg-type]
        events=by_kind.get("event", []),  # type: ignore[arg-type]
        summary=by_kind.get("summary", [{}])[0],
    )


def state_of(rows: Rows) -> LiveState:
    """The live state after these rows."""
    state = LiveState()
    for row in rows:
        state.update(row)
    return state


def as_text(renderable: Any, width: int) -> str:
    """What a terminal of this width would show."""
    console = Console(width=width, file=io.StringIO(), record=True, legacy_windows=False)
    console.print(renderable)
    return console.export_text()


def holes(row: Any, random: Any) -> Any:
    """A copy in which any key may be missing, null, or something else than expected."""
    if not isinstance(row, dict):
        return row
    result = {}
    for key, one in row.items():
        match random.randrange(8):
            case 0 if key != "kind":
                continue
            case 1 if key != "kind":
                result[key] = random.choice([None, "text", float("nan"), [], {}, True])
            case _:
                result[key] = holes(one, random)
    return result


# --- any keys missing -----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.randoms(use_true_random=False), st.integers(0, 6), st.sampled_from(["completed", None]))
def test_no_view_needs_any_key(random: Any, num_steps: int, exit_reason: str | None) -> None:
    rows = [holes(row, random) for row in run_rows(num_steps, exit_reason=exit_reason)]
    state = state_of(rows)
    assert as_text(draw(state, width=80, height=40), 80)
    view = TerminalView(Console(file=io.StringIO()), live=False)
    for row in rows:
        view.emit(row)
    data = data_of(rows)
    assert str(summary_text(data.summary))
    assert verdict(data)
    assert "</html>" in report_html(data, [])


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.randoms(use_true_random=False), st.integers(0, 3))
def test_no_plot_needs_any_key(random: Any, num_steps: int) -> None:
    data = data_of([holes(row, random) for row in run_rows(num_steps)])
    for plot in PLOTS:
        plot.draw(Figure(), data)


# --- terminal -------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(50, 200), st.integers(6, 60), st.integers(0, 120))
def test_the_picture_fits_the_terminal(width: int, height: int, num_rows: int) -> None:
    lines = as_text(draw(state_of(run_rows(40)[:num_rows]), width=width, height=height), width)
    assert len(lines.splitlines()) < height
    assert max(len(line) for line in lines.splitlines()) <= width


def test_the_picture_keeps_its_lines_in_place() -> None:
    rows = run_rows(30)
    labels = {
        tuple(
            line[:11]
            for line in as_text(draw(state_of(rows[:end]), width=80, height=40), 80).splitlines()
        )
        for end in range(40, 80)
    }
    assert len(labels) == 1


def test_live_view_leaves_warnings_behind() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=40)
    with TerminalView(console, live=True) as view:
        for row in run_rows(3):
            view.emit(row)
    last_frame = out.getvalue().rsplit("\x1b[2K", 1)[-1]
    assert "reward raised ValueError" in last_frame
    assert "engine-0 is ready" not in last_frame
    view.stop()


def test_plain_lines_are_ascii_and_spaced() -> None:
    out = io.StringIO()
    view = TerminalView(Console(file=out), plain_seconds=9)
    assert not view.is_live
    rows = [*run_rows(60), {"kind": "event", "time": 1.0, "level": "error", "text": "caf\xe9 ⚠"}]
    for row in rows:
        view.emit(row)
    text = out.getvalue()
    assert text.isascii()
    steps = re.findall(r"step +(\d+)/60", text)
    # A step takes two seconds, so every fifth is due after nine; the last one always is.
    assert [int(step) for step in steps] == [*range(1, 60, 5), 60]
    assert "error: caf? ?" in text


def test_a_long_simulated_run_prints_a_bounded_number_of_lines() -> None:
    out = io.StringIO()
    view = TerminalView(Console(file=out), live=False)
    view.emit({"kind": "run", "simulated": True, "steps": 10_000})
    for step in range(10_000):
        view.emit({"kind": "step", "time": 60.0 * step, "step": step, "step_seconds": 60.0})
    assert 100 <= len(out.getvalue().splitlines()) <= 103


def test_a_silent_run_says_what_it_waits_for() -> None:
    out = io.StringIO()
    view = TerminalView(Console(file=out), live=False)
    for time in range(100):
        waits = {"ship": "batch 0 to fill", "fetch": None}
        view.emit({"kind": "interval", "time": time, "num_running": 4, "waiting_for": waits})
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert "4 in flight; ship waits for batch 0 to fill" in lines[0]


class ClosedPipe(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_closed_pipe_does_not_end_the_run() -> None:
    view = TerminalView(Console(file=ClosedPipe()), live=False)
    for row in run_rows(3):
        view.emit(row)


@given(st.lists(st.floats(-1e6, 1e6), max_size=600), st.integers(2, 40).map(lambda half: 2 * half))
def test_history_is_bounded_and_within_its_values(values: list[float], size: int) -> None:
    history = History(size)
    for one in values:
        history.add(one)
    points = history.points()
    assert len(points) <= size
    assert bool(points) == bool(values)
    assert all(min(values) - 1e-6 <= point <= max(values) + 1e-6 for point in points)


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(1, 50))
def test_resampling_and_sparklines_keep_their_size(values: list[float], size: int) -> None:
    assert len(resampled(values, size)) == min(size, len(values))
    assert len(sparkline(values, size)) == min(size, len(values))
    if values:
        assert max(resampled(values, size, max)) == max(values)


# --- summary and verdict --------------------------------------------------------------------------


def test_summary_says_it_in_few_columns() -> None:
    text = str(summary_text(run_rows()[-1]))
    assert text.startswith("completed")
    assert "reward    0.283 -> 0.728  (+0.445" in text
    assert "no bound guaranteed" in text
    assert "160 rejected (zero_advantage 160)" in text
    assert max(map(len, text.splitlines())) <= 80


def test_summary_of_a_failure_shows_its_message() -> None:
    text = str(summary_text(summary_of(run_rows(0, exit_reason=None), "trainer_failed")))
    assert text.startswith("trainer failed")
    assert "trainer: the process ended (exit 9)" in text


def with_rewards(rewards: list[float]) -> RunData:
    """A run with these mean rewards."""
    return data_of([{"kind": "step", "step": k, "reward_mean": r} for k, r in enumerate(rewards)])


@pytest.mark.parametrize(
    ("rewards", "tone"),
    [
        ([0.1] * 10 + [0.5] * 10, Tone.GOOD),
        ([0.5] * 10 + [0.1] * 10, Tone.BAD),
        ([0.3] * 20, Tone.NOTE),
        ([0.2, 0.6] * 9 + [0.3, 0.6], Tone.NOTE),
    ],
)
def test_verdict_on_learning(rewards: list[float], tone: Tone) -> None:
    finding = learning(with_rewards(rewards))
    assert finding is not None and finding.tone is tone


@pytest.mark.parametrize(
    ("oldest", "guaranteed", "tone"),
    [(2, None, Tone.GOOD), (3, None, Tone.NOTE), (2, 2, Tone.GOOD), (3, 2, Tone.BAD)],
)
def test_verdict_on_the_bound(oldest: int, guaranteed: int | None, tone: Tone) -> None:
    run = {"kind": "run", "configured": 2, "guaranteed": guaranteed}
    step = {"kind": "step", "step": 0, "age": {"max": oldest}}
    finding = bound(data_of([run, step]))
    assert finding is not None and finding.tone is tone


@pytest.mark.parametrize(
    ("trainer", "engine", "words"),
    [
        (0.4, 0.02, "Generation was"),
        (0.02, 0.4, "Training was"),
        (0.5, 0.45, "took turns"),
        (0.03, 0.02, "Both sides busy"),
    ],
)
def test_verdict_on_the_bottleneck(trainer: float, engine: float, words: str) -> None:
    summary = {"kind": "summary", "idle": {"trainer": trainer, "engine": engine}}
    finding = bottleneck(data_of([{"kind": "step", "step": 0}, summary]))
    assert finding is not None and words in finding.headline


def test_waits_add_up_and_forget_numbers() -> None:
    shares = waits(data_of(run_rows(30)))
    assert all(abs(sum(share for _, share in parts) - 1) < 1e-9 for parts in shares.values())
    assert [what for what, _ in shares["watcher"]] == ["a version to appear"]


# --- report ---------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collects what a page refers to, and its ids."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.ids: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, one in attrs:
            if name in ("src", "href", "xlink:href", "srcset"):
                self.references.append(one or "")
            if name == "id":
                self.ids.append(one or "")


@pytest.mark.parametrize("num_steps", [0, 1, 12])
@pytest.mark.parametrize("exit_reason", ["completed", None])
def test_report_needs_nothing_but_itself(
    tmp_path: Path, num_steps: int, exit_reason: str | None
) -> None:
    write_run(tmp_path, run_rows(num_steps, exit_reason=exit_reason))
    html = write_report(tmp_path).read_text(encoding="utf-8")
    page = Page(html)
    assert all(reference.startswith(("#", "data:")) for reference in page.references)
    assert not re.search(r"@import|url\((?!#)", html)
    assert len(page.ids) == len(set(page.ids))
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert "<not a number>" not in html and "&lt;not a number&gt;" in html
    pngs = sorted((tmp_path / "plots").glob("*.png"))
    assert all(png.read_bytes().startswith(b"\x89PNG") for png in pngs)
    assert bool(pngs) == (num_steps > 0)
    assert ("No summary" in html) == (exit_reason is None)


def test_report_is_the_same_each_time(tmp_path: Path) -> None:
    write_run(tmp_path, run_rows(5))
    first = write_report(tmp_path).read_bytes()
    assert write_report(tmp_path).read_bytes() == first


def test_report_survives_half_a_line(tmp_path: Path) -> None:
    write_run(tmp_path, run_rows(2, exit_reason=None))
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "step", "ti')
    assert "1 unreadable line" in write_report(tmp_path).read_text(encoding="utf-8")


def test_report_of_nothing_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="holds no run to report"):
        write_report(tmp_path)


def test_views_of_a_simulated_run(tmp_path: Path) -> None:
    run = simulate_in_memory(sim_config(eval={"every": 5, "num_tasks": 4}))
    state = state_of(run.rows)
    assert state.num_steps == 20
    shown = as_text(draw(state, width=100, height=50), 100)
    assert "20 of 20" in shown and "waits for" in shown
    write_run(tmp_path, copy.deepcopy(run.rows))
    html = write_report(tmp_path).read_text(encoding="utf-8")
    for title in ("Reward", "Age distribution", "Stage times", "Throughput", "Queues"):
        assert f"<h2>{title}</h2>" in html
    assert len(RunData.read(tmp_path).steps) == 20
