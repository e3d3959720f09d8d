"""What is wrong with a configuration, in words that name the place, the key and the remedy."""

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from headway.config import Config, ImpossibleError, Section

Key = tuple[str | int, ...]
"""Path to a value: names of sections and fields, positions in lists."""

Places = dict[Key, int | None]
"""Where keys were given: the line in the file, or None for the command line."""

SPELLINGS: Mapping[Key, str] = {("actor", "recompute_logprob"): "recompute_logprobs"}
"""Other spellings of a field, as other systems write them."""

MAX_SHOWN = 60
"""Characters of a wrong value that a message repeats."""

_NEEDED = {
    "int_type": "a whole number is needed",
    "float_type": "a number is needed",
    "finite_number": "a finite number is needed",
    "bool_type": "true or false is needed",
    "string_type": "text is needed",
    "dict_type": "a section is needed",
    "model_type": "a section is needed",
    "tuple_type": "a list is needed",
}
_LIMITS = {
    "greater_than": ("must be above", "gt"),
    "greater_than_equal": ("must be at least", "ge"),
    "less_than": ("must be below", "lt"),
    "less_than_equal": ("must be at most", "le"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong. `line` None: the command line; 0: the file as a whole."""

    key: Key
    reason: str
    line: int | None

    @property
    def order(self) -> float:
        """For sorting: by line, the command line last."""
        return float("inf") if self.line is None else self.line

    def told(self, file: str) -> str:
        """One line of text."""
        place = "command line" if self.line is None else f"{file}:{self.line}"
        name = dotted(self.key)
        if name and self.line is None:
            name = f"--{name}"
        return ": ".join(part for part in (place if self.line != 0 else file, name) if part) + (
            f": {self.reason}"
        )


def dotted(key: Key) -> str:
    """`("envs", 0, "id")` is `envs.0.id`."""
    return ".".join(str(part) for part in key)


def problems_of(error: ValidationError, places: Places) -> list[Problem]:
    """Every problem that the models found, each at the nearest place that was given."""
    found = []
    for one in error.errors():
        key: Key = tuple(one["loc"])
        for inner, reason in _reasons(key, one):
            whole = (*key, *inner)
            found.append(Problem(key=whole, reason=reason, line=_line(whole, places)))
    return found


def _line(key: Key, places: Places) -> int | None:
    for length in range(len(key), 0, -1):
        if key[:length] in places:
            return places[key[:length]]
    return 0


def _reasons(key: Key, error: Mapping[str, Any]) -> Iterator[tuple[Key, str]]:
    """`(key below this one, reason)` of one error of pydantic's."""
    kind, given, context = error["type"], error["input"], error.get("ctx", {})
    match kind:
        case "extra_forbidden":
            yield (), f"unknown key; {_suggestion(key)}"
        case "value_error":
            cause = context["error"]
            if isinstance(cause, ImpossibleError):
                for inner, reason in cause.problems:
                    yield tuple(inner.split(".")), reason
            else:
                yield (), str(cause)
        case "enum" | "literal_error":
            yield (), f"must be {context['expected']}, not {_shown(given)}{_close(given, context)}"
        case "too_short":
            # With wrong entries pydantic counts the right ones and adds this to their own errors.
            if len(given) < context["min_length"]:
                yield (), f"must have at least {context['min_length']} entry"
        case _ if kind in _NEEDED:
            yield (), f"{_NEEDED[kind]}, not {_shown(given)}{_quotes(kind, given)}"
        case _ if kind in _LIMITS:
            words, limit = _LIMITS[kind]
            yield (), f"{words} {context[limit]:g}, not {_shown(given)}"
        case _:
            said = str(error["msg"])
            yield (), f"{said[:1].lower()}{said[1:]}, not {_shown(given)}"


def _shown(value: Any) -> str:
    """The value as YAML would have it, shortened."""
    if value is None:
        return "empty"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def _quotes(kind: str, given: Any) -> str:
    if kind == "string_type" and isinstance(given, bool | int | float):
        return "; put it in quotes"
    if kind != "string_type" and isinstance(given, str):
        number = given.strip().replace(".", "", 1).lstrip("+-").isdigit()
        if number or given.strip().lower() in ("true", "false"):
            return "; remove the quotes"
    return ""


def _close(given: Any, context: Mapping[str, Any]) -> str:
    options = str(context["expected"]).replace(" or ", ", ").split(", ")
    near = difflib.get_close_matches(str(given), [option.strip("'") for option in options], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _suggestion(key: Key) -> str:
    """For an unknown key: the field that was probably meant, or those that there are."""
    section = _section(key[:-1])
    names = [*section.model_fields]
    names += [str(other[-1]) for other in SPELLINGS if other[:-1] == key[:-1]]
    name = str(key[-1]).replace("-", "_")
    elsewhere = {str(path[-1]): path for path in reversed([*_leaves(Config, ())])}
    if name in elsewhere:
        return f"did you mean {dotted(elsewhere[name])}?"
    if near := difflib.get_close_matches(name, names, n=1):
        return f"did you mean {dotted((*key[:-1], near[0]))}?"
    if near := difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.8):
        return f"did you mean {dotted(elsewhere[near[0]])}?"
    return f"known here: {', '.join(section.model_fields)}"


def _section(key: Key) -> type[Section]:
    """The model whose fields lie below a key."""
    model: type[Section] = Config
    for part in key:
        if part in model.model_fields:  # else a position in a list, or a name in a mapping
            model = section_of(model.model_fields[str(part)].annotation) or model
    return model


def section_of(annotation: Any) -> type[Section] | None:
    """The section that an annotation holds: itself, optional, or as a tuple's or dict's entry."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def _leaves(model: type[Section], prefix: Key) -> Iterator[Key]:
    """Every key of the configuration that holds a value; lists by their first entry."""
    for name, field in model.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None:
            yield (*prefix, name)
        else:
            is_list = get_origin(field.annotation) is tuple
            yield from _leaves(inner, (*prefix, name, 0) if is_list else (*prefix, name))
