"""Writes `docs/configuration.md` from the models: `python -m headway.config.reference`.

Types, limits and defaults come from the models, descriptions from the docstrings below the fields.
"""

import ast
import inspect
from collections.abc import Iterator
from enum import Enum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from headway.config import Config, Section, config, engine, liveness, rollout, simulate, store
from headway.config.problems import Key, dotted, section_of

INTRODUCTION = """\
# Configuration

<!-- Written by `make docs` from src/headway/config/: edit the docstrings there. -->

A configuration is a YAML file with the sections below. Everything has a default; a file states
what differs. `headway run FILE --section.field VALUE` changes single fields: values are YAML, and a
number is the position in a list (`--envs.0.args.size 100`). What is wrong is told before anything
starts: all problems at once, with file, line, key and reason. The resolved configuration is kept
as `config.yaml` in the run directory, and can be run again.

A block of AReaL's loads as it is:

```yaml
rollout:
  max_head_offpolicyness: 4
  consumer_batch_size: 8
  max_concurrent_rollouts: 64
  queue_size: 1024
actor:
  use_decoupled_loss: true
  recompute_logprobs: true
```

`docs/glossary.md` explains the words.
"""

_NAMES = {int: "whole number", float: "number", bool: "true or false", str: "text", dict: "section"}
_LIMITS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def reference() -> str:
    """The whole page."""
    page = _Page()
    parts = [INTRODUCTION]
    for name, field in Config.model_fields.items():
        model = section_of(field.annotation)
        assert model is not None  # every field of Config is a section, or a list of one
        is_list = model is not field.annotation
        entry = " (a list; each entry has these)" if is_list else ""
        parts.append(f"## `{name}`{entry}\n\n{_summary(model)}\n")
        parts.append("| field | type | default | meaning |\n|---|---|---|---|")
        parts.append("\n".join(page.rows(model, name, ())) + "\n")
    return "\n".join(parts)


class _Page:
    """Rows of the tables; a section that several fields hold is written out at the first."""

    def __init__(self) -> None:
        self._docs = _field_docs()
        self._written: dict[type[Section], str] = {}

    def rows(self, model: type[Section], top: str, prefix: Key) -> Iterator[str]:
        """One per field of a model that stands at `prefix` below the section `top`."""
        for name, field in model.model_fields.items():
            inner = section_of(field.annotation)
            key = dotted((*prefix, name))
            meaning = self._docs.get((model.__name__, name), "")
            if inner is None:
                kind = _type(field.annotation, _limits(field))
                yield f"| `{key}` | {kind} | `{_default(field)}` | {meaning} |"
                continue
            by_name = get_origin(field.annotation) is dict
            kind = "sections by name" if by_name else "section"
            if type(None) in get_args(field.annotation):
                kind += ", or empty"
            told = self._written.get(inner)
            meaning = meaning or _summary(inner)
            if told is not None:
                meaning += f" Fields as of `{told}`."
            yield f"| `{key}` | {kind} | {_section_default(field)} | {meaning} |"
            if told is None:
                self._written[inner] = f"{top}.{key}"
                below = (*prefix, name, "NAME") if by_name else (*prefix, name)
                yield from self.rows(inner, top, below)


def _section_default(field: FieldInfo) -> str:
    """What differs from the section's own defaults."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "`empty`"
    if not isinstance(value, Section):
        return ""
    said = value.model_dump(exclude_unset=True)
    return f"`{', '.join(f'{key}: {one}' for key, one in said.items())}`" if said else ""


def _summary(model: type[Section]) -> str:
    return " ".join((inspect.getdoc(model) or "").split("\n\n")[0].split())


def _type(annotation: Any, limits: str = "") -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        kinds = [kind for kind in inner if kind is not type(None)]
        return " or ".join(_type(kind) for kind in kinds) + limits + ", or empty"
    if origin is Literal:
        return " / ".join(f"`{value}`" for value in inner) + limits
    if origin is tuple:
        return f"list of {_type(inner[0])}" + limits
    if origin is not None and origin is not dict:
        return _type(inner[0]) + limits
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " / ".join(f"`{one.value}`" for one in annotation) + limits
    return _NAMES[origin or annotation] + limits


def _limits(field: FieldInfo) -> str:
    """Limits of the field itself, or of the annotated type inside `... | None`."""
    inner = [meta for kind in get_args(field.annotation) for meta in get_args(kind)[1:]]
    metadata = [one for meta in inner for one in getattr(meta, "metadata", [meta])]
    found = [
        f"{sign} {getattr(one, name):g}"
        for one in [*field.metadata, *metadata]
        for name, sign in _LIMITS.items()
        if getattr(one, name, None) is not None
    ]
    return f" {', '.join(found)}" if found else ""


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    match value:
        case None:
            return "empty"
        case bool():
            return str(value).lower()
        case tuple():
            return f"[{', '.join(str(one) for one in value)}]"
        case _:
            return str(value)


def _field_docs() -> dict[tuple[str, str], str]:
    """`(model, field)` to the docstring below the field, which Python itself does not keep."""
    docs = {}
    nodes = [
        node
        for module in (config, engine, liveness, rollout, simulate, store)
        for node in ast.parse(inspect.getsource(module)).body
    ]
    for node in nodes:
        if not isinstance(node, ast.ClassDef):
            continue
        previous: ast.stmt | None = None
        for statement in node.body:
            match previous, statement:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docs[node.name, name] = " ".join(text.split())
            previous = statement
    return docs


if __name__ == "__main__":
    print(reference(), end="")
