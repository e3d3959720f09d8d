"""What a run amounts to, in sentences: did it learn, was the bound kept, what held it up."""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from enum import StrEnum
from statistics import variance

from headway.views.run_data import RunData
from headway.views.summary import STOPPED, bias_line, price_line
from headway.views.values import count, integer, mean, number, seconds, section, share, value

WINDOW = 10
"""Batches at each end of the run whose rewards are compared."""

BUSY_SHARE = 0.1
"""A part that is idle for less than this share of the time counts as busy."""


FAIR_SHARE = 0.95
"""Of the longest rollouts, the share that must be trained for the data to count as unbiased."""


class Tone(StrEnum):
    """How a finding should be taken."""

    GOOD = "good"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence, with a few words of headline."""

    tone: Tone
    headline: str
    text: str


def verdict(data: RunData) -> list[Finding]:
    """The findings of a run, in the order in which one asks for them."""
    found = (
        ending(data),
        learning(data),
        evaluation(data),
        bound(data),
        price(data),
        bottleneck(data),
        losses(data),
    )
    return [finding for finding in found if finding is not None]


def ending(data: RunData) -> Finding:
    """How the run ended."""
    reason = value(data.summary, "exit_reason")
    num_steps = len(data.steps) or integer(data.summary, "steps") or 0
    target = integer(data.run, "steps")
    of_target = f"{num_steps:,}" + (f" of {target:,}" if target else "")
    done = f"{of_target} steps in {seconds(data.seconds)}."
    if reason is None:
        return Finding(
            Tone.BAD,
            "No summary",
            f"The run did not get to write its summary, or is still going on: {done}",
        )
    if reason == "completed":
        return Finding(Tone.GOOD, "Completed", done)
    message = str(value(data.summary, "message") or "").rstrip(".")
    words = str(reason).replace("_", " ").capitalize()
    tone = Tone.NOTE if reason in STOPPED else Tone.BAD
    return Finding(tone, words, (f"{message}. " if message else "") + done)


def learning(data: RunData) -> Finding | None:
    """Whether the training reward rose, judged against its own noise from batch to batch."""
    rewards = data.rewards()
    if len(rewards) < 2:
        return None
    window = min(WINDOW, len(rewards) // 2)
    first, last = rewards[:window], rewards[-window:]
    before, after = mean(first) or 0.0, mean(last) or 0.0
    noise = 0.0
    if window > 1:
        noise = 2 * ((variance(first) + variance(last)) / window) ** 0.5
    batches = f"{window} batches" if window > 1 else "batch"
    change = f"({after - before:+.3f})"
    text = f"from {before:.3f} in the first {batches} to {after:.3f} in the last {change}"
    if abs(after - before) <= max(noise, 1e-9):
        return Finding(Tone.NOTE, "Reward did not move", f"{text}: within its noise.")
    if after > before:
        return Finding(Tone.GOOD, "Reward rose", f"{text}.")
    return Finding(Tone.BAD, "Reward fell", f"{text}.")


def evaluation(data: RunData) -> Finding | None:
    """First against last evaluation, per environment."""
    parts, changes = [], []
    for env, points in data.eval_points().items():
        (old, first), (new, last) = points[0], points[-1]
        if len(points) > 1:
            changes.append(last - first)
            parts.append(
                f"{env} from {first:.3f} at version {old:.0f} to {last:.3f} at version {new:.0f}"
            )
    if not parts:
        return None
    text = "; ".join(parts) + "."
    if min(changes) > 0:
        return Finding(Tone.GOOD, "Eval rose", text)
    if max(changes) <= 0:
        return Finding(Tone.NOTE, "Eval did not rise", text)
    return Finding(Tone.NOTE, "Eval is mixed", text)


def bound(data: RunData) -> Finding | None:
    """Whether what was trained stayed within `S`."""
    oldest, configured, guaranteed = data.max_age, data.configured_age, data.guaranteed_age
    if oldest is None or configured is None:
        return None
    middle = data.mean_age
    about = f"oldest trained token {oldest}" + (
        f", mean {middle:.2f} versions" if middle is not None else " versions"
    )
    if guaranteed is not None and oldest > guaranteed:
        return Finding(
            Tone.BAD, "Bound broken", f"{about}, although these settings guarantee {guaranteed}."
        )
    promise = (
        f"these settings guarantee {guaranteed}"
        if guaranteed is not None
        else "these settings guarantee no bound"
    )
    if oldest <= configured:
        return Finding(Tone.GOOD, f"Age within S = {configured}", f"{about}; {promise}.")
    over = [row for row in data.steps if (number(row, "age", "max") or 0) > configured]
    return Finding(
        Tone.NOTE,
        f"Age above S = {configured}",
        f"{about}; {len(over)} of {len(data.steps)} batches held a token older than S; {promise}.",
    )


def price(data: RunData) -> Finding | None:
    """What the bound cost, and against which rollouts it chose."""
    cost, bias = price_line(data.summary), bias_line(data.summary)
    if not cost and not bias:
        return None
    longest = number(data.summary, "bias", "longest_5pct_trained_share")
    text = ". ".join(part[:1].upper() + part[1:] for part in (cost, bias) if part)
    if longest is not None and longest < FAIR_SHARE:
        return Finding(Tone.BAD, "Long rollouts are not trained", f"{text}.")
    return Finding(Tone.NOTE, "Price of the bound", f"{text}.")


def bottleneck(data: RunData) -> Finding | None:
    """Who waited for whom, by the idle shares."""
    trainer, engine = data.idle_share("trainer"), data.idle_share("engine")
    if trainer is None or engine is None or not data.steps:
        return None
    shares = f"trainer idle {share(trainer)}, engines idle {share(engine)} of the time"
    if trainer < BUSY_SHARE and engine < BUSY_SHARE:
        return Finding(Tone.GOOD, "Both sides busy", f"{shares}.")
    if trainer >= 2 * engine:
        return Finding(
            Tone.NOTE,
            "Generation was the bottleneck",
            f"{shares}: the trainer waited for batches.",
        )
    if engine >= 2 * trainer:
        return Finding(
            Tone.NOTE,
            "Training was the bottleneck",
            f"{shares}: the engines waited for the trainer.",
        )
    return Finding(Tone.NOTE, "The two took turns", f"{shares}: each waited for the other.")


def losses(data: RunData) -> Finding | None:
    """What was generated and not trained."""
    samples = section(data.summary, "samples")
    counts = {name: integer(samples, name) for name in ("rejected", "failed", "dropped")}
    if not samples:
        counts = {name: data.reason_counts(name).total() for name in ("rejected", "failed")}
    admitted = integer(samples, "admitted")
    parts = [f"{total:,} {name}" for name, total in counts.items() if total]
    if not parts:
        if not data.steps:
            return None
        return Finding(Tone.GOOD, "Nothing lost", "every finished sample was trained.")
    of = f" of {count(admitted)} samples" if admitted else " samples"
    headline = "Some samples failed" if counts.get("failed") else "Some samples were not trained"
    return Finding(Tone.NOTE, headline, ", ".join(parts) + of + ".")


def waits(data: RunData) -> dict[str, list[tuple[str | None, float]]]:
    """For every part, what it waited for and in which share of the interval rows; None: busy.

    Numbers are left out, so that waiting for batch 3 and for batch 4 are the same thing.
    """
    seen: dict[str, Counter[str | None]] = defaultdict(Counter)
    for row in data.intervals:
        for part, what in section(row, "waiting_for").items():
            seen[str(part)][None if what is None else _without_numbers(str(what))] += 1
    return {
        part: [(what, times / counts.total()) for what, times in counts.most_common()]
        for part, counts in seen.items()
    }


def _without_numbers(what: str) -> str:
    named = re.sub(r"\b(?<!a )(batch|version) \d+", r"a \1", what)
    return re.sub(r"\s\d+\b", " ...", named)
