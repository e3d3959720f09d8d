"""From text to token ids and back: what environments need of a tokenizer, and no more."""

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from headway.errors import ConfigError


class TextCodec(Protocol):
    """A tokenizer as environments see it."""

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, without special tokens around it."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these ids, without special tokens."""
        ...


def load_tokenizer(folder: Path) -> TextCodec:
    """The tokenizer of a Hugging Face model folder.

    A `tokenizer.json` is read by the `tokenizers` library alone, because importing transformers
    costs the control process seconds and hundreds of MB. Folders without one need transformers.

    Raises:
        ConfigError: when there is no tokenizer that can be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _SlowCodec(folder)
    from tokenizers import Tokenizer

    try:
        return _FastCodec(Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises plain Exception for any unreadable file
        raise ConfigError(f"model.path: {path} is not a readable tokenizer: {error}") from error


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A hint to append to a message; empty when nothing known is close."""
    close = difflib.get_close_matches(given, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


class _FastCodec:
    def __init__(self, tokenizer: object) -> None:
        self._tokenizer: Any = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(map(int, token_ids)), skip_special_tokens=True))


class _SlowCodec:
    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(f"model.path: {folder} has no tokenizer: {error}") from error

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(map(int, token_ids)), skip_special_tokens=True))
