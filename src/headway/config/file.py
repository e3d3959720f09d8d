"""Reading a configuration: a YAML file, `--dotted.override value`, and every problem at once.

What is read is validated strictly: `"4"` and `4.0` are no whole numbers. A problem is told with its
place (file and line, or "command line"), dotted key, reason and, for names, "did you mean".
"""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from headway.config import Config, Section
from headway.config.problems import SPELLINGS, Key, Places, Problem, dotted, problems_of
from headway.errors import ConfigError

MAX_BYTES = 1 << 20
"""A larger file is no configuration: most likely the wrong file was named."""

_STR, _INT, _FLOAT, _BOOL, _NULL, _MAP, _SEQ = (
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq")
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's numbers: `1e-3` is a number, `010` is ten, `12:30` is text, and a
    date is text."""


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back equal, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _number(text: str) -> int | float:
    text = text.replace("_", "").lower()
    if text.lstrip("+-") in (".inf", ".nan"):
        return float(text.replace(".", ""))
    return int(text) if text.lstrip("+-").isdigit() else float(text)


_Loader.add_constructor(_INT, lambda loader, node: _number(node.value))
_Loader.add_constructor(_FLOAT, lambda loader, node: _number(node.value))
for _kind in (_Loader, _Dumper):
    _kind.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag in (_BOOL, _NULL)]
        for first, resolvers in _kind.yaml_implicit_resolvers.items()
    }
    _kind.add_implicit_resolver(_INT, re.compile(r"[-+]?[0-9][0-9_]*$"), [*"-+0123456789"])
    _kind.add_implicit_resolver(
        _FLOAT,
        re.compile(
            r"[-+]?(?:(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:e[-+]?[0-9]+)?|\.inf|\.nan)$",
            re.IGNORECASE,
        ),
        [*"-+.0123456789"],
    )


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """The resolved configuration; what is not given has its default.

    Args:
        path: a YAML file; None is all defaults, which is the embedded demo.
        overrides: words of the command line, `--a.b value` or `--a.b=value`. Values are YAML; a
            number in the key is the position in a list, as in `--envs.0.args.size 5`. They come
            after the file, and the last one of a key counts.

    Raises:
        ConfigError: with every problem that was found.

    Example:
        >>> load_config(None, ["--rollout.max_head_offpolicyness", "4"]).rollout.queue_size
        1024
    """
    draft = _Draft(path)
    draft.apply(overrides)
    _fill_empty_sections(draft.content, Config)
    try:
        config = Config.model_validate_json(json.dumps(draft.content), strict=True)
        if not draft.problems:
            return config
    except ValidationError as error:
        draft.problems += problems_of(error, draft.places)
    name = str(path) if path else "command line"
    lines = [problem.told(name) for problem in sorted(draft.problems, key=lambda one: one.order)]
    if len(lines) == 1:
        raise ConfigError(lines[0])
    raise ConfigError(f"{len(lines)} problems in the configuration\n  " + "\n  ".join(lines))


def dump_config(config: Config) -> str:
    """YAML of the whole configuration, which loads back equal.

    Other characters than ASCII are escaped: PyYAML writes some of them (NEL) as line breaks.
    """
    content = config.model_dump(mode="json")
    return str(yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=100))


class _Draft:
    """Plain content on its way to a Config, with the place of every key and what is wrong so far.

    `places` maps a key to its line in the file, or to None for the command line.
    """

    def __init__(self, path: Path | None) -> None:
        self.content: dict[str, Any] = {}
        self.places: Places = {}
        self.problems: list[Problem] = []
        if path is not None:
            self._read(path)

    # --- the file -------------------------------------------------------------------------------

    def _read(self, path: Path) -> None:
        try:
            content = self._parse(_text_of(path), (), in_file=True)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = f"{path}:{mark.line + 1}" if mark else str(path)
            hint = " (indent with spaces)" if "\\t" in str(error.problem) else ""
            raise ConfigError(f"{place}: not valid YAML: {error.problem}{hint}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
        if isinstance(content, dict):
            self.content = content
        elif content is not None:
            raise ConfigError(
                f"{path}: sections (`rollout:` and lines below it) are needed, not {content!r:.60}"
            )

    def _parse(self, text: str, key: Key, *, in_file: bool) -> Any:
        """Plain content of a YAML text that stands at `key`. Raises YAMLError."""
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            return None if node is None else self._build(loader, node, key, (), in_file)
        finally:
            loader.dispose()

    def _build(
        self,
        loader: _Loader,
        node: yaml.Node,
        key: Key,
        parents: tuple[yaml.Node, ...],
        in_file: bool,
    ) -> Any:
        """Plain content of a node, noting the place of every key and refusing doubles."""

        def line_of(part: yaml.Node) -> int | None:
            return part.start_mark.line + 1 if in_file else None

        if node in parents:
            self._wrong(key, "refers to itself; write the values out", line_of(node))
            return None
        if node.tag not in (_STR, _INT, _FLOAT, _BOOL, _NULL, _MAP, _SEQ):
            self._wrong(key, f"the tag {node.tag} has no meaning here; remove it", line_of(node))
            return None
        parents = (*parents, node)
        if isinstance(node, yaml.SequenceNode):
            items: list[Any] = []
            for index, item in enumerate(node.value):
                self.places[*key, index] = line_of(item)
                items.append(self._build(loader, item, (*key, index), parents, in_file))
            return items
        if not isinstance(node, yaml.MappingNode):
            return loader.construct_object(node)
        content: dict[str, Any] = {}
        for name_node, value_node in node.value:
            name, line = str(name_node.value), line_of(name_node)
            inner = (*key, name)
            if name_node.tag != _STR:
                self._wrong(inner, "a key must be text; put it in quotes", line)
            elif name in content:
                also = f" (on line {self.places[inner]}, too)" if in_file else ""
                self._wrong(inner, f"is given twice{also}; keep one", line)
            else:
                self.places[inner] = line
                self.places.setdefault((*key, SPELLINGS.get(inner, name)), line)
                content[name] = self._build(loader, value_node, inner, parents, in_file)
        return content

    # --- the command line -----------------------------------------------------------------------

    def apply(self, words: Sequence[str]) -> None:
        """Put overrides over the content."""
        left = list(words)
        while left:
            word = left.pop(0)
            name, equals, text = word.removeprefix("--").partition("=")
            key = tuple(name.split("."))
            if not word.startswith("--") or not name:
                self._wrong((), f"{word!r} is no override; write --section.field value")
                continue
            if not equals:
                if not left or left[0].startswith("--"):
                    self._wrong(key, "needs a value")
                    continue
                text = left.pop(0)
            try:
                self._put(key, text)
            except yaml.YAMLError as error:
                reason = getattr(error, "problem", None) or error
                self._wrong(key, f"the value {text!r} is not valid YAML: {reason}; quote it")

    def _put(self, key: tuple[str, ...], text: str) -> None:
        """Set a dotted key; sections on the way that are missing are made. Raises YAMLError."""
        here: Any = self.content
        done: Key = ()
        for depth, name in enumerate(key):
            part: str | int = name
            if isinstance(here, list):
                if not name.isdigit() or int(name) >= len(here):
                    what = f"has {len(here)} {'entry' if len(here) == 1 else 'entries'}"
                    self._wrong(key, f"{dotted(done)} {what}, numbered from 0")
                    return
                part = int(name)
            elif not isinstance(here, dict):
                self._wrong(key, f"{dotted(done)} is {here!r:.40} and has nothing below it")
                return
            elif here.get(name) is None and depth + 1 < len(key):
                here[name] = _default_list(key[: depth + 1]) or {}
            done = (*done, part)
            if depth + 1 < len(key):
                self.places.setdefault(done, None)
                here = here[part]
                continue
            if isinstance(here, dict):
                self._forget_other_spelling(here, done)
            for known in [known for known in self.places if known[: len(done)] == done]:
                del self.places[known]
            self.places[done] = None
            here[part] = self._parse(text, done, in_file=False)

    def _forget_other_spelling(self, section: dict[str, Any], key: Key) -> None:
        """An override beats the file, whichever way the two spell the field."""
        field = SPELLINGS.get(key, key[-1])
        for spelling, meant in SPELLINGS.items():
            if spelling[:-1] == key[:-1] and meant == field:
                for name in (str(spelling[-1]), meant):
                    section.pop(name, None)
                    self.places.pop((*key[:-1], name), None)
                self.places[*key[:-1], meant] = None

    def _wrong(self, key: Key, reason: str, line: int | None = None) -> None:
        self.problems.append(Problem(key=key, reason=reason, line=line))


def _text_of(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(f"{path} holds {size:,} bytes: that is no configuration file")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; give the YAML file in it") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file (UTF-8): {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _default_list(key: Sequence[str]) -> list[Any] | None:
    """The default at a key, when it is a list: what `--envs.0.id x` changes an entry of."""
    here: Any = Config().model_dump(mode="json")
    for name in key:
        here = here.get(name) if isinstance(here, Mapping) else None
    return copy.deepcopy(here) if isinstance(here, list) else None


def _fill_empty_sections(content: dict[str, Any], model: type[Section]) -> None:
    """`rollout:` with nothing below it (all lines commented out) means all defaults."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if name in content and isinstance(kind, type) and issubclass(kind, Section):
            if content[name] is None:
                content[name] = {}
            if isinstance(content[name], dict):
                _fill_empty_sections(content[name], kind)
