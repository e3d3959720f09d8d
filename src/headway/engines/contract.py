"""The contract: what trainer and engines must agree on before a single token is worth anything.

The trainer's side is read off the folder of the initial model (and off every version it
publishes), an engine's side off what the engine says and off the folder it says it was started on.
An empty field is one that a side does not know; only what both know is compared.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from headway.engines.tensors import read_tensors
from headway.errors import WeightsError

HEAD = "lm_head.weight"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")
_ID_CHARACTERS = 16
PEER_FIELDS = ("dtype", "engine")
"""Compared among the engines of a pool only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """One side.

    `model`: type and architecture, `qwen3 Qwen3ForCausalLM`. `shapes`: hash over names and shapes
    of all tensors, a tied output head left out, since it may be written or not. `tokenizer`: hash
    over its files. `dtype`: what the weights are computed in. `weight_format`: of the files.
    `engine`: name and version, `vllm 0.32.0`.
    """

    model: str = ""
    vocabulary_size: int = 0
    shapes: str = ""
    tokenizer: str = ""
    weight_format: str = ""
    dtype: str = ""
    engine: str = ""

    @classmethod
    def of_folder(cls, folder: Path, *, dtype: str = "", engine: str = "") -> Self:
        """What a Hugging Face folder says; what it does not say stays empty. Raises WeightsError
        when its `config.json` or a tensor file is damaged."""
        config = read_config(folder)
        if config is None:
            return cls(dtype=dtype, engine=engine)
        text: dict[str, Any] = config.get("text_config") or config
        architectures = config.get("architectures") or [""]
        has_tensors = any(folder.glob("*.safetensors"))
        return cls(
            model=f"{config.get('model_type', '')} {architectures[0]}".strip(),
            vocabulary_size=int(text.get("vocab_size") or 0),
            shapes=_shapes(folder, config) if has_tensors else "",
            tokenizer=_tokenizer(folder),
            weight_format="safetensors" if has_tensors else "",
            dtype=dtype,
            engine=engine,
        )

    @property
    def id(self) -> str:
        """Hash over all that trainer and engine share, 16 hexadecimal digits."""
        return _hash([value for name, value in asdict(self).items() if name not in PEER_FIELDS])

    def differences(self, other: Self) -> list[str]:
        """`field: mine here, theirs there` for all that both know and do not agree on."""
        found = []
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if mine and theirs and mine != theirs:
                found.append(f"{one.name}: {mine} against {theirs}")
        return found


def read_config(folder: Path) -> dict[str, Any] | None:
    """`config.json` of a model folder; None when there is none. Raises WeightsError."""
    path = folder / "config.json"
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be used: {error}") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} must hold an object")
    return content


def _shapes(folder: Path, config: dict[str, Any]) -> str:
    tied = bool(config.get("tie_word_embeddings"))
    shapes = {name: list(one.shape) for name, one in read_tensors(folder).items()}
    if tied:
        shapes.pop(HEAD, None)
    return _hash(sorted(shapes.items()))


def _tokenizer(folder: Path) -> str:
    found = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        return ""
    return _hash([hashlib.sha256(path.read_bytes()).hexdigest() for path in found])


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:_ID_CHARACTERS]
