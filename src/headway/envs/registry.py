"""From the configuration's `envs` to running environments: built-in ones, and anybody's own.

An environment `id` is a built-in name, `package.module:factory`, or `path/to/file.py:factory`. The
factory is called as

    factory(name=..., tokenizer=..., seed=..., split=..., **args)

once with `split="train"` and, when there is evaluation, once with `split="eval"`, and returns an
environment and a task source (`headway.ports`). `name` must be stamped on the environment and its
tasks; `tokenizer` is a `headway.envs.text.TextCodec`; `args` come from the configuration.
`examples/own_environment.py` is a whole one.
"""

import asyncio
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from headway.config import Config, EnvironmentConfig
from headway.core.rollout import Task
from headway.envs.arithmetic import create_arithmetic
from headway.envs.mixture import MixedTasks
from headway.envs.text import TextCodec, did_you_mean, load_tokenizer
from headway.errors import ConfigError
from headway.ports import Environment, TaskSource

BUILT_IN: Mapping[str, Callable[..., tuple[Environment, TaskSource]]] = {
    "arithmetic": create_arithmetic,
}
GIVEN = ("name", "tokenizer", "seed", "split")
"""What every factory is called with, besides its own args."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """What the control loop needs of the configured environments."""

    environments: Mapping[str, Environment]
    """By name."""
    source: TaskSource
    """Training tasks of all of them, mixed by weight."""
    eval_tasks: tuple[Task, ...]
    """The first `eval.num_tasks` held-out tasks of each; none when `eval.every` is 0."""


def load_tasks(config: Config, model_folder: Path) -> Tasks:
    """Resolve and create every environment of the configuration.

    May take seconds, since it imports what environments need. Call it before the event loop runs:
    it runs one of its own to take the eval tasks.

    Args:
        config: its `envs`, `eval` and `run.seed`.
        model_folder: where the tokenizer is.

    Raises:
        ConfigError: naming the environment and what about it cannot work.
    """
    tokenizer = load_tokenizer(model_folder)
    environments: dict[str, Environment] = {}
    sources: dict[str, TaskSource] = {}
    eval_tasks: list[Task] = []
    for index, one in enumerate(config.envs):
        where = f"envs[{index}] ({one.label})"
        factory = _factory(one.id, where)
        environments[one.label], sources[one.label] = _create(
            factory, one, where, tokenizer=tokenizer, seed=config.run.seed, split="train"
        )
        if config.eval.every:
            _, held_out = _create(
                factory, one, where, tokenizer=tokenizer, seed=config.run.seed, split="eval"
            )
            eval_tasks += asyncio.run(_take(held_out, config.eval.num_tasks, where))
    return Tasks(
        environments=environments,
        source=MixedTasks(sources, [one.weight for one in config.envs]),
        eval_tasks=tuple(eval_tasks),
    )


async def _take(source: TaskSource, num_tasks: int, where: str) -> list[Task]:
    tasks: list[Task] = []
    for _ in range(num_tasks):
        task = await source.next_task()
        if task is None:
            raise ConfigError(
                f"eval.num_tasks: {where} has only {len(tasks)} held-out tasks, not {num_tasks}; "
                "lower eval.num_tasks or let the environment hold out more"
            )
        tasks.append(task)
    return tasks


def _factory(identifier: str, where: str) -> Callable[..., Any]:
    if identifier in BUILT_IN:
        return BUILT_IN[identifier]
    module_name, colon, attribute = identifier.rpartition(":")
    if not colon or not module_name or not attribute:
        hint = did_you_mean(identifier, BUILT_IN)
        raise ConfigError(
            f"{where}: id {identifier!r} is no built-in environment (there is "
            f"{', '.join(sorted(BUILT_IN))}) and not of the form package.module:factory or "
            f"path/to/file.py:factory{hint}"
        )
    module = _module(module_name, where)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        known = [name for name, value in vars(module).items() if callable(value)]
        what = "is not callable" if hasattr(module, attribute) else "does not exist"
        raise ConfigError(
            f"{where}: {attribute!r} {what} in {module_name}{did_you_mean(attribute, known)}"
        )
    made: Callable[..., Any] = factory
    return made


def _module(name: str, where: str) -> ModuleType:
    is_file = name.endswith(".py")
    if is_file and not Path(name).is_file():
        near = [str(path) for path in Path(name).parent.glob("*.py")]
        raise ConfigError(f"{where}: there is no file {name}{did_you_mean(name, near)}")
    try:
        if not is_file:
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(Path(name).stem, name)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:  # the user's module may raise anything while it is imported
        if isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]:
            raise ConfigError(
                f"{where}: no module {name!r} on the Python path; install it, set PYTHONPATH, or "
                "give its file: path/to/file.py:factory"
            ) from error
        raise ConfigError(f"{where}: importing {name} failed: {_said(error)}") from error
    return module


def _create(
    factory: Callable[..., Any],
    config: EnvironmentConfig,
    where: str,
    *,
    tokenizer: TextCodec,
    seed: int,
    split: str,
) -> tuple[Environment, TaskSource]:
    _check_args(factory, config.args, where)
    try:
        made = factory(
            name=config.label, tokenizer=tokenizer, seed=seed, split=split, **config.args
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:  # the user's factory may raise anything
        raise ConfigError(f"{where}: creating it failed: {_said(error)}") from error
    if not isinstance(made, Sequence) or len(made) != 2:
        raise ConfigError(
            f"{where}: its factory must return (environment, task source), not {made!r}"
        )
    environment, source = made
    for part, methods in ((environment, ("name", "run", "score")), (source, ("next_task",))):
        lacking = [method for method in methods if not hasattr(part, method)]
        if lacking:
            raise ConfigError(
                f"{where}: {type(part).__name__} lacks {', '.join(lacking)} (headway.ports)"
            )
    if environment.name != config.label:
        raise ConfigError(
            f"{where}: its factory was called with name={config.label!r}, but the environment "
            f"calls itself {environment.name!r}"
        )
    return environment, source


def _check_args(factory: Callable[..., Any], args: Mapping[str, Any], where: str) -> None:
    """Refuse args that the factory does not take, or that it needs and lacks."""
    for key in args:
        if key in GIVEN:
            raise ConfigError(f"{where}: args.{key} is set by the run; leave it out")
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:  # some callables written in C have none: the call itself will tell
        return
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    own = [name for name in parameters if name not in GIVEN]
    for key in args:
        if key not in own:
            hint = did_you_mean(key, own) or f"; it takes {', '.join(own) or 'none'}"
            raise ConfigError(f"{where}: args.{key} is unknown{hint}")
    for key in GIVEN:
        if key not in parameters:
            raise ConfigError(f"{where}: its factory does not take the keyword {key!r}")
    for key in own:
        if parameters[key].default is inspect.Parameter.empty and key not in args:
            raise ConfigError(f"{where}: args.{key} is missing, and its factory needs it")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
