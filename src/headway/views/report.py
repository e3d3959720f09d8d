"""The report of a run: one HTML file that needs nothing else, and the plots as PNG beside it."""

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from headway.store.atomic import atomic_file
from headway.views.live_state import event_line
from headway.views.plot_kit import DARK, LIGHT
from headway.views.plots import RenderedPlot, render
from headway.views.run_data import RunData
from headway.views.values import (
    UNKNOWN,
    Row,
    clock,
    count,
    decimal,
    integer,
    listing,
    mean,
    number,
    seconds,
    section,
    share,
    value,
)
from headway.views.verdict import Finding, verdict, waits

MAX_EVENTS = 200
"""Events shown in the page; all of them are in metrics.jsonl."""


def write_report(run_dir: Path) -> Path:
    """Write `report.html` and `plots/*.png` into a run directory; return the path of the page.

    Works for every run that recorded anything: one without steps, or without a summary.

    Raises:
        RunDirError: when there is no run in that folder.
        OSError: when it cannot be written.
    """
    data = RunData.read(run_dir)
    plots = list(render(data))
    folder = run_dir / "plots"
    folder.mkdir(exist_ok=True)
    for plot in plots:
        (folder / f"{plot.name}.png").write_bytes(plot.png)
    page = run_dir / "report.html"
    with atomic_file(page) as temporary:
        temporary.write_text(report_html(data, plots), encoding="utf-8")
    return page


def report_html(data: RunData, plots: Iterable[RenderedPlot]) -> str:
    """The page. Everything that comes from the run is escaped."""
    name = str(value(data.run, "run_dir") or data.run_dir)
    body = [
        _header(data, name),
        _findings(verdict(data)),
        _tiles(data),
        _figures(plots),
        _section("Who waited for whom", _waits(data)),
        _section("Evaluations", _evals(data)),
        _section("Events", _events(data)),
        _section("Samples", _samples(data)),
        _section("Settings", _settings(data)),
        _section("Summary", _key_values(_flat(_without(data.summary, "eval")))),
        _footer(data),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(Path(name).name)} - Headway report</title>\n"
        f"<style>{_css()}</style></head>\n"
        f"<body><main>\n{''.join(body)}</main></body></html>\n"
    )


# --- sections -----------------------------------------------------------------------------------


def _header(data: RunData, name: str) -> str:
    facts = []
    if (configured := data.configured_age) is not None:
        facts.append(f"S = {configured}")
    if (size := integer(data.run, "batch_size")) is not None:
        group_size = integer(data.run, "group_size") or 1
        facts.append(f"B = {size}" + (f" groups of {group_size}" if group_size > 1 else ""))
    if (limit := integer(data.run, "max_concurrent")) is not None:
        facts.append(f"{limit:,} in flight")
    for seed in (integer(data.run, "seed"), integer(data.summary, "seed")):
        if seed is not None:
            facts.append(f"seed {seed}")
            break
    if value(data.run, "simulated"):
        facts.append("simulated time")
    line = " &middot; ".join(escape(fact) for fact in facts)
    return (
        f'<header><p class="kicker">Headway report</p><h1>{escape(name)}</h1>'
        f"<p>{line}</p></header>\n"
    )


def _findings(findings: list[Finding]) -> str:
    items = "".join(
        f'<li class="{finding.tone}"><b>{escape(finding.headline)}</b>'
        f"<span>{escape(finding.text)}</span></li>\n"
        for finding in findings
    )
    return f'<ul class="findings">\n{items}</ul>\n'


def _tiles(data: RunData) -> str:
    rewards = data.rewards()
    first, last = mean(rewards[:10]), mean(rewards[-10:])
    tiles = [
        ("steps", f"{len(data.steps):,}", f"in {clock(data.seconds)}"),
        ("reward", decimal(last), f"last ten batches; first ten {decimal(first)}"),
        ("oldest token", count(data.max_age), f"versions; mean {decimal(data.mean_age, 2)}"),
        ("a step", seconds(mean(number(row, "step_seconds") for row in data.steps)), "mean"),
        ("tokens per second", count(_tokens_per_second(data)), "mean, all engines"),
        ("trainer idle", share(data.idle_share("trainer")), "of the time"),
        ("engines idle", share(data.idle_share("engine")), "of the time"),
    ]
    cells = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(shown)}</dd><dd>{escape(note)}</dd></div>"
        for label, shown, note in tiles
        if shown != UNKNOWN
    )
    return f'<dl class="tiles">{cells}</dl>\n'


def _tokens_per_second(data: RunData) -> float | None:
    generated, wall = number(data.summary, "tokens", "generated"), data.seconds
    if generated is not None and wall:
        return generated / wall
    return mean(number(row, "tokens_per_second") for row in data.intervals)


def _figures(plots: Iterable[RenderedPlot]) -> str:
    figures = "".join(
        f"<figure><h2>{escape(plot.title)}</h2>{plot.svg}"
        f"<figcaption>{escape(plot.caption)}</figcaption></figure>\n"
        for plot in plots
    )
    return f'<div class="figures">\n{figures}</div>\n' if figures else ""


def _waits(data: RunData) -> str:
    rows = []
    for part, shares in waits(data).items():
        for index, (what, of_time) in enumerate(shares[:4]):
            label = f"<th>{escape(part)}</th>" if index == 0 else "<th></th>"
            text = "busy" if what is None else escape(what)
            tone = "busy" if what is None else "wait"
            rows.append(
                f'<tr>{label}<td class="bar"><i class="{tone}" style="width:{100 * of_time:.1f}%">'
                f'</i></td><td class="number">{share(of_time)}</td><td>{text}</td></tr>'
            )
    if not rows:
        return ""
    return f'<table class="waits">{"".join(rows)}</table>'


def _evals(data: RunData) -> str:
    if not data.evals:
        return ""
    head = _cells("th", "version", "environment", "mean reward", "rollouts", "seconds", "versions")
    rows = []
    for row in data.evals:
        oldest, newest = integer(row, "head"), integer(row, "tail")
        spread = count(oldest) if oldest == newest else f"{count(oldest)} to {count(newest)}"
        cells = (
            count(number(row, "version")),
            str(value(row, "env") or UNKNOWN),
            decimal(number(row, "reward_mean")),
            count(number(row, "num_rollouts")),
            decimal(number(row, "eval_seconds"), 1),
            spread,
        )
        rows.append(_cells("td", *cells))
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def _cells(tag: str, *texts: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts) + "</tr>"


def _events(data: RunData) -> str:
    if not data.events:
        return ""
    shown = data.events[-MAX_EVENTS:]
    hidden = len(data.events) - len(shown)
    note = f"<p>The last {len(shown)} of {len(data.events):,} events.</p>" if hidden else ""
    lines = "\n".join(
        f'<span class="{escape(str(value(event, "level") or "info"))}">'
        f"{escape(event_line(event))}</span>"
        for event in shown
    )
    return f"{note}<pre>{lines}</pre>"


def _samples(data: RunData) -> str:
    samples = section(data.summary, "samples")
    return _key_values(_flat(samples))


def _settings(data: RunData) -> str:
    return _key_values(_flat(data.config))


def _footer(data: RunData) -> str:
    version = value(data.run, "headway") or value(data.summary, "versions_of", "headway")
    text = f"Headway {version}" if version else "Headway"
    if data.num_broken_lines:
        text += f"; {data.num_broken_lines} unreadable lines of metrics.jsonl were passed over"
    return f"<footer>{escape(text)}. Ages are in versions, times in seconds.</footer>\n"


# --- pieces -------------------------------------------------------------------------------------


def _section(title: str, content: str) -> str:
    if not content:
        return ""
    is_open = " open" if title in ("Who waited for whom", "Evaluations", "Events") else ""
    return (
        f"<details{is_open}><summary><h2>{escape(title)}</h2></summary>\n"
        f'<div class="scroll">{content}</div></details>\n'
    )


def _key_values(pairs: list[tuple[str, str]]) -> str:
    if not pairs:
        return ""
    rows = "".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(shown)}</dd></div>" for key, shown in pairs
    )
    return f'<dl class="pairs">{rows}</dl>'


def _flat(content: Row, prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as `dotted.key`, value."""
    pairs: list[tuple[str, str]] = []
    for key, one in content.items():
        name = f"{prefix}{key}"
        if isinstance(one, dict) and one:
            pairs += _flat(one, f"{name}.")
        elif isinstance(one, list) and any(isinstance(item, dict) for item in one):
            pairs += _flat({str(index): item for index, item in enumerate(one)}, f"{name}.")
        else:
            pairs.append((name, _shown(one)))
    return pairs


def _shown(one: Any) -> str:
    if one is None:
        return UNKNOWN
    if isinstance(one, bool):
        return "yes" if one else "no"
    if isinstance(one, float):
        return f"{one:.6g}"
    if isinstance(one, list | tuple):
        return ", ".join(_shown(item) for item in listing({"list": one}, "list")) or "none"
    return str(one) if one != {} else "none"


def _without(content: Row, *keys: str) -> Row:
    return {key: one for key, one in content.items() if key not in (*keys, "kind", "time")}


def _css() -> str:
    light = ";".join(f"--{name}:{colour}" for name, colour in LIGHT.items())
    dark = ";".join(f"--{name}:{colour}" for name, colour in DARK.items())
    return (
        f":root{{color-scheme:light dark;{light};--font:{FONT}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{CSS}"
    )


FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Liberation Sans',Arial,sans-serif"

CSS = """\
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 var(--font)}
main{max-width:1160px;margin:0 auto;padding:40px 28px 64px}
h1{font-size:30px;line-height:1.2;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:16px;margin:0;display:inline}
header p{margin:6px 0 0;color:var(--muted)}
header .kicker{margin:0 0 4px;font-size:13px;letter-spacing:.04em}
.findings{list-style:none;margin:26px 0;padding:0;border-top:1px solid var(--grid)}
.findings li{display:grid;grid-template-columns:270px 1fr;gap:4px 20px;padding:9px 0 9px 14px;
border-bottom:1px solid var(--grid);border-left:4px solid var(--grey)}
.findings .good{border-left-color:var(--green)}
.findings .note{border-left-color:var(--orange)}
.findings .bad{border-left-color:var(--red)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:18px 20px;
margin:0 0 34px}
.tiles dt,.tiles dd+dd{color:var(--muted);font-size:13px;line-height:1.35}
.tiles dd{margin:0;font-size:25px;line-height:1.3;font-variant-numeric:tabular-nums}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));
gap:34px 44px;margin-bottom:34px}
figure{margin:0;min-width:0}
figure svg{display:block;width:100%;height:auto;margin:6px 0 4px}
figcaption{color:var(--muted);font-size:13px;line-height:1.4}
details{border-top:1px solid var(--grid);padding:14px 0}
summary{cursor:pointer}
.scroll{overflow-x:auto;padding-top:10px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px}
th,td{text-align:left;padding:4px 22px 4px 0;font-weight:400;white-space:nowrap}
thead th{color:var(--muted);border-bottom:1px solid var(--grid)}
.waits th{font-weight:600}
.waits .number{text-align:right}
.waits .bar{width:220px;min-width:120px}
.waits .bar i{display:block;height:10px;border-radius:2px;background:var(--blue)}
.waits .bar .wait{background:var(--grey)}
.pairs{margin:0;columns:2 420px;column-gap:44px;font-size:14px}
.pairs div{display:flex;justify-content:space-between;gap:18px;break-inside:avoid;padding:3px 0;
border-bottom:1px solid var(--grid)}
.pairs dt{color:var(--muted);overflow-wrap:anywhere}
.pairs dd{margin:0;text-align:right;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
pre{margin:0;font:13px/1.5 ui-monospace,'DejaVu Sans Mono',monospace;white-space:pre-wrap}
pre .warning{color:var(--orange)}
pre .error{color:var(--red)}
footer{border-top:1px solid var(--grid);padding-top:14px;color:var(--muted);font-size:13px}
@media (max-width:640px){main{padding:24px 16px}.findings li{grid-template-columns:1fr}}
@media print{details{break-inside:avoid}}
"""
