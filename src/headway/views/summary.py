"""The summary of a run, as text: printed at the end of it."""

from textwrap import wrap

from rich.text import Text

from headway.views.values import (
    UNKNOWN,
    Row,
    count,
    decimal,
    integer,
    listing,
    number,
    reasons,
    seconds,
    section,
    share,
    value,
)

LABEL_WIDTH = 10
STOPPED = ("interrupted", "preempted")
"""Exit reasons of a run that somebody stopped, and nothing was wrong with."""


def summary_text(summary: Row, *, width: int = 80) -> Text:
    """What `summary.json` says, aligned, in about ten lines of at most `width` characters.

    `str(...)` of the result is plain text; a rich console shows it with a few colours.
    """
    reason = str(value(summary, "exit_reason") or "unknown end")
    styles = {"completed": "bold green", **dict.fromkeys(STOPPED, "bold yellow")}
    style = styles.get(reason, "bold red")
    text = Text()
    text.append(reason.replace("_", " "), style=style)
    text.append(f"  {_pace(summary)}\n")
    if message := value(summary, "message"):
        text.append(f"{message}\n")
    lines = [
        ("reward", _reward(summary)),
        *_evals(summary),
        ("age", _age(summary)),
        ("price", price_line(summary)),
        ("bias", bias_line(summary)),
        ("samples", _samples(summary)),
        ("tokens", _tokens(summary)),
        ("idle", _idle(summary)),
    ]
    for label, line in lines:
        for index, part in enumerate(wrap(line, width - LABEL_WIDTH)):
            text.append(f"\n{'' if index else label:<{LABEL_WIDTH}}", style="dim").append(part)
    return text


def _pace(summary: Row) -> str:
    steps = integer(summary, "steps")
    parts = [f"{count(steps)} step{'' if steps == 1 else 's'}"]
    if (wall := number(summary, "wall_seconds")) is not None:
        parts.append(f"in {seconds(wall)}")
    text = " ".join(parts)
    if (each := number(summary, "step_seconds_mean")) is not None:
        text += f", {seconds(each)} a step"
    if (seed := integer(summary, "seed")) is not None:
        text += f", seed {seed}"
    return text


def _reward(summary: Row) -> str:
    first, last = (number(summary, f"reward_{which}_mean") for which in ("first10", "last10"))
    if first is None or last is None:
        return ""
    if (number(summary, "steps") or 0) < 20:  # the two would overlap
        return f"{decimal(last)}  (the last ten batches, or all)"
    return f"{decimal(first)} -> {decimal(last)}  ({last - first:+.3f}, first and last ten batches)"


def _evals(summary: Row) -> list[tuple[str, str]]:
    by_env: dict[str, list[tuple[float, float]]] = {}
    for row in listing(summary, "eval"):
        version, reward = number(row, "version"), number(row, "reward_mean")
        if version is not None and reward is not None:
            by_env.setdefault(str(value(row, "env")), []).append((version, reward))
    lines = []
    for env, points in by_env.items():
        (v0, first), (v1, last) = points[0], points[-1]
        line = f"{first:.3f} (version {v0:.0f}), {env}"
        if len(points) > 1:
            line = (
                f"{first:.3f} -> {last:.3f}  "
                f"({last - first:+.3f}, {env}, version {v0:.0f} to {v1:.0f})"
            )
        lines.append(("eval", line))
    return lines


def _age(summary: Row) -> str:
    age = section(summary, "age")
    if number(age, "max") is None:
        return ""
    guaranteed = integer(age, "guaranteed")
    bound = "no bound guaranteed" if guaranteed is None else f"guaranteed {guaranteed}"
    return (
        f"max {count(number(age, 'max'))}, p99 {count(number(age, 'p99'))}, "
        f"mean {decimal(number(age, 'mean'), 2)} versions; "
        f"S = {count(number(age, 'configured'))}, {bound}"
    )


def price_line(summary: Row) -> str:
    """What the bound cost: nothing is said of what cost nothing."""
    price = section(summary, "price")
    dropped, trimmed = integer(price, "samples_dropped"), integer(price, "tokens_trimmed")
    admitted = integer(summary, "samples", "admitted")
    generated = number(summary, "tokens", "generated")
    held, starved = number(price, "held_seconds"), number(price, "starved_seconds")
    parts = []
    if dropped:
        parts.append(f"{dropped:,} samples dropped ({percent(dropped, admitted)})")
    if trimmed:
        parts.append(f"{count(trimmed)} tokens trimmed ({percent(trimmed, generated)})")
    if held:
        parts.append(f"{seconds(held)} held for the oldest")
    if starved:
        parts.append(f"{seconds(starved)} short of samples")
    return ", ".join(parts)


def percent(part: float, whole: float | None) -> str:
    """A share in per cent with one decimal, for what is often small."""
    return f"{100 * part / whole:.1f} %" if whole else UNKNOWN


def bias_line(summary: Row) -> str:
    """How what was trained differs from what was dispatched."""
    bias = section(summary, "bias")
    longest = number(bias, "longest_5pct_trained_share")
    of_tokens = number(bias, "longest_5pct_trained_token_share")
    lengths = [number(bias, "tokens_mean", who) for who in ("dispatched", "trained", "in_loss")]
    if longest is None or None in lengths:
        return ""
    of_all, trained, in_loss = (count(one) for one in lengths)
    line = f"trained rollouts {trained} tokens long"
    if in_loss != trained:
        line += f", {in_loss} of them in the loss"
    line += f"; dispatched {of_all}; {share(longest)} of the longest 5 % trained"
    return line + ("" if of_tokens in (None, 1) else f", with {share(of_tokens)} of their tokens")


def _samples(summary: Row) -> str:
    samples = section(summary, "samples")
    counts = {name: integer(samples, name) for name in samples if name != "admitted"}
    parts = []
    for name, total in counts.items():
        if not total:
            continue
        why = reasons(section(samples, "reasons", name))
        parts.append(f"{total:,} {name}" + (f" ({why})" if why else ""))
    admitted = integer(samples, "admitted")
    head = f"{admitted:,} admitted: " if admitted is not None else ""
    return head + ", ".join(parts) if parts else ""


def _tokens(summary: Row) -> str:
    tokens = section(summary, "tokens")
    names = ("generated", "trained", "trimmed")
    line = ", ".join(
        f"{count(number(tokens, name))} {name}" for name in names if number(tokens, name)
    )
    wall, generated = number(summary, "loop_seconds"), number(tokens, "generated")
    if line and wall and generated:
        line += f"; {count(generated / wall)}/s"
    return line


def _idle(summary: Row) -> str:
    idle = section(summary, "idle")
    shares = {"trainer": number(idle, "trainer"), "engines": number(idle, "engine")}
    return ", ".join(f"{who} {share(one)}" for who, one in shares.items() if one is not None)
