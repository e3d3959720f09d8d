"""The canary: a few fixed prompts and what the published weights say comes next.

It lies beside the weights as `canary.json`, and that of the weights which a run begins with in the
run's folder. At the start and after an update every engine is asked the same, greedy and with one
token, through its ordinary path (prefix cache included): an engine that answers otherwise does not
serve those weights, whatever its label says.

The prompts are the same in every version, so that an engine that kept keys and values of an older
one would use them here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from headway.errors import WeightsError

CANARY = "canary.json"
NUM_TOP = 8
NUM_SEQUENCES = 2
LENGTHS = (8, 24, 72, 160)
"""Prompt lengths: the longest fills a block of every engine's prefix cache."""
_SEED = 20_240_229


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One prompt, and the `NUM_TOP` likeliest next tokens with their log-probabilities (natural
    log, at temperature 1)."""

    token_ids: tuple[int, ...]
    top: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """All probes of one version."""

    version: int
    probes: tuple[Probe, ...]

    def to_json(self) -> str:
        """For `canary.json`."""
        probes = [
            {"token_ids": [*probe.token_ids], "top": [[*pair] for pair in probe.top.items()]}
            for probe in self.probes
        ]
        return json.dumps({"version": self.version, "probes": probes}) + "\n"

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """Inverse of `to_json`, after parsing. Raises ValueError, KeyError or TypeError."""
        return cls(
            version=int(content["version"]),
            probes=tuple(
                Probe(
                    token_ids=tuple(map(int, probe["token_ids"])),
                    top={int(token): float(logprob) for token, logprob in probe["top"]},
                )
                for probe in content["probes"]
            ),
        )


def canary_sequences(vocabulary_size: int, max_tokens: int | None = None) -> list[list[int]]:
    """The fixed random sequences whose beginnings are the prompts.

    `max_tokens`: the longest that the model takes; one place is left for the answer.
    """
    longest = LENGTHS[-1] if max_tokens is None else min(LENGTHS[-1], max_tokens - 1)
    rng = np.random.default_rng([_SEED, vocabulary_size])
    # Always drawn at full length, so that a sequence cut shorter is the beginning of the other.
    drawn = rng.integers(0, vocabulary_size, (NUM_SEQUENCES, LENGTHS[-1]))
    return [sequence[:longest].tolist() for sequence in drawn]


def prompt_lengths(sequence: list[int]) -> list[int]:
    """Lengths of the prompts that are cut from a sequence."""
    return [length for length in LENGTHS if length <= len(sequence)] or [len(sequence)]


def read_canary(folder: Path) -> Canary | None:
    """The canary of a version; None when it was published without one. Raises WeightsError."""
    path = folder / CANARY
    try:
        return Canary.from_json(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{path} cannot be used: {error}") from error
