"""The shape of the code, as rules: what may import what, and how large things may grow."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headway
from headway import ports

SOURCE = Path(headway.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))
MAX_LINES = 450
MAX_METHODS = 5

CORE_MAY_USE = {
    "array",
    "heapq",
    "collections",
    "dataclasses",
    "enum",
    "itertools",
    "math",
    "msgspec",
    "numpy",
    "typing",
    "headway.core",
    "headway.errors",
}
"""All that core/ may import: nothing with a clock, a task, a socket, a file or chance in it."""

LOOP_MAY_USE = {"config", "core", "errors", "loop", "ports"}
"""Parts of Headway that loop/ may import: what stands behind the ports is not among them."""


def imports(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module or ""


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@pytest.mark.parametrize("path", sorted((SOURCE / "core").glob("*.py")), ids=relative)
def test_the_core_is_pure(path: Path) -> None:
    for name in imports(path):
        allowed = any(name == one or name.startswith(f"{one}.") for one in CORE_MAY_USE)
        assert allowed, f"{relative(path)} imports {name}"
    text = path.read_text(encoding="utf-8")
    assert "np.random" not in text and "open(" not in text


@pytest.mark.parametrize("path", sorted((SOURCE / "loop").glob("*.py")), ids=relative)
def test_the_loop_knows_only_ports(path: Path) -> None:
    for name in imports(path):
        package, *rest = name.split(".")
        if package == "headway":
            assert rest and rest[0] in LOOP_MAY_USE, f"{relative(path)} imports {name}"
        assert name not in ("time", "random"), (
            f"{relative(path)}: time and chance come from outside"
        )


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_modules_are_small_and_say_what_they_are(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES, f"{relative(path)}: split it"
    assert ast.get_docstring(ast.parse(text)), f"{relative(path)} has no docstring"


def test_a_seam_has_few_methods_and_explains_each() -> None:
    protocols: list[Any] = [
        one
        for one in vars(ports).values()
        if inspect.isclass(one)
        and getattr(one, "_is_protocol", False)
        and one.__module__ == ports.__name__
    ]
    assert len(protocols) >= 7
    for protocol in protocols:
        methods = [name for name in vars(protocol) if not name.startswith("_")]
        assert 1 <= len(methods) <= MAX_METHODS, f"{protocol.__name__}: {methods}"
        for name in methods:
            assert inspect.getdoc(getattr(protocol, name)), f"{protocol.__name__}.{name}"


def test_the_control_process_does_without_torch() -> None:
    """torch and transformers are extras, cost seconds to import, and are the other processes'."""
    names = [
        "headway." + relative(path).removesuffix(".py").replace("/", ".")
        for path in MODULES
        if path.parent.name in ("core", "loop", "sim", "store", "views") and path.stem != "__init__"
    ]
    program = (
        f"import importlib, sys\n"
        f"for name in {['headway.cli', 'headway.config.file', *names]!r}:\n"
        f"    importlib.import_module(name)\n"
        f"heavy = {{'torch', 'transformers', 'reasoning_gym'}} & set(sys.modules)\n"
        f"assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    light = "import headway.cli, sys; assert 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", light], check=True, timeout=120)
