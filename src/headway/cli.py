"""The command line: `headway run`, `simulate` and `report`.

`main` returns the exit code and never lies about it: 0 completed, 1 failed, 2 bad configuration or
usage, 3 a broken invariant (a bug in Headway), 75 preempted (start it again), 130 Ctrl-C. Modules
are imported where they are used, so that `headway --help` answers at once.
"""

import difflib
import json as json_module
import os
import shlex
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

from headway import __version__
from headway.errors import ConfigError, HeadwayError

if TYPE_CHECKING:
    from rich.console import Console

    from headway.config import Config
    from headway.sim.plan import Plan

DEBUG_VARIABLE = "HEADWAY_DEBUG"
"""Set to 1, it shows the traceback of errors that are otherwise one line."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it (128 + SIGINT)."""

Arguments = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]
Json = Annotated[
    bool,
    Parameter(
        negative=(),
        show_default=False,
        help="Print the summary as JSON, and nothing else, to stdout.",
    ),
]
Quiet = Annotated[
    bool,
    Parameter(
        negative=(),
        show_default=False,
        help="No view while it runs; errors and the summary remain.",
    ),
]

app = App(
    name="headway",
    version=__version__,
    version_flags=["--version"],
    help="The control loop between generation and training in asynchronous RL post-training.",
    help_format="plaintext",
    help_epilogue="Start with: headway run examples/demo.yaml",
    suppress_keyboard_interrupt=False,
)


@app.command(
    sort_key=1, usage="Usage: headway run [CONFIG.yaml] [--section.field VALUE]... [OPTIONS]"
)
def run(
    *arguments: Arguments,
    resume: Annotated[
        Path | None,
        Parameter(name="--resume", help="Go on with the run in this directory."),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Run a configuration: start engines and trainer, train to the step target, report.

    Without CONFIG.yaml the defaults are run, which are the embedded demo.
    Every field of the configuration can be given as an option; docs/configuration.md lists them.

    Try:

    headway run examples/demo.yaml

    headway run examples/demo.yaml --run.dir runs/s4 --rollout.max_head_offpolicyness 4

    headway run my.yaml --actor.optimizer.lr=1e-4 --envs.0.args '{size: 1000}' --json

    headway run --resume runs/demo-1 --run.steps 200
    """
    config = _load(arguments, resume)
    console = _console(to_stderr=json)
    from headway.store.run_dir import RunDir

    run_dir = RunDir(Path(config.run.dir))
    is_resumed = resume is not None or (config.run.resume and run_dir.config.exists())
    if not is_resumed:
        RunDir.check(config)
    from headway.app import run as run_config
    from headway.builtin_model import ensure_model
    from headway.views.terminal import TerminalView

    model_dir = ensure_model(config.model, seed=config.run.seed, progress=console.out)
    if quiet:
        summary: Mapping[str, Any] = run_config(config, model_dir=model_dir, resume=is_resumed)
    else:
        with TerminalView(console) as view:
            summary = run_config(config, model_dir=model_dir, view=view, resume=is_resumed)
    return _finish(config, summary, json)


@app.command(
    sort_key=2, usage="Usage: headway simulate [WORKLOAD.yaml] [--section.field VALUE]... [OPTIONS]"
)
def simulate(
    *arguments: Arguments,
    faults: Annotated[
        str | None,
        Parameter(
            name="--faults",
            help="Break the run on purpose: a seed (7), a range (0-199), or a schedule's file.",
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Run the same control loop on a stated workload, in virtual time: hours pass in seconds.

    WORKLOAD.yaml is a configuration; its section `simulate` states how long things take
    (docs/simulate.md). Nothing is generated or trained. The run directory gets the same metric
    rows, trace, summary and report as that of a real run; --quiet leaves the report out.

    Try:

    headway simulate examples/demo.yaml --run.dir runs/sim

    headway simulate --simulate.train_seconds 30 --rollout.max_concurrent_rollouts 48 --json

    headway simulate --faults 0-199
    """
    if faults is not None:
        from headway.faults import simulate_faults

        return simulate_faults(
            faults,
            config=_load(arguments) if arguments else None,
            workload_words="".join(f" {shlex.quote(word)}" for word in arguments),
            as_json=json,
            is_quiet=quiet,
        )
    config = _load(arguments)
    from headway.sim.app import simulate as simulate_config
    from headway.views.terminal import TerminalView

    if quiet:
        return _finish(config, simulate_config(config), json)
    with TerminalView(_console(to_stderr=json)) as view:
        summary = simulate_config(config, view=view)
    from headway.views.report import write_report

    write_report(Path(config.run.dir))
    return _finish(config, summary, json)


@app.command(sort_key=3)
def plan(
    source: Annotated[
        Path,
        Parameter(name="RUN_OR_WORKLOAD", help="A run directory, or a YAML file with a workload."),
    ],
    /,
    *,
    objective: Annotated[
        Literal["balanced", "fastest", "youngest"],
        Parameter(help="balanced: the youngest data within 1.5 % of the shortest step time."),
    ] = "balanced",
    budget: Annotated[float, Parameter(help="Seconds for the simulations.")] = 60.0,
    jobs: Annotated[int, Parameter(help="Processes; 0: one per CPU core.")] = 0,
    plot: Annotated[
        Path | None,
        Parameter(
            help="Where to draw, .png or .svg (both are); by default plan.png in the run "
            "directory, or beside the file."
        ),
    ] = None,
    write: Annotated[
        Path | None,
        Parameter(help="Write a configuration with the recommendation in it, ready to be run."),
    ] = None,
    workload: Annotated[
        Path | None,
        Parameter(help="Write the workload to this file, as YAML for headway simulate."),
    ] = None,
    json: Annotated[
        bool,
        Parameter(
            negative=(), show_default=False, help="Print everything as JSON, alone, to stdout."
        ),
    ] = False,
    quiet: Annotated[
        bool, Parameter(negative=(), show_default=False, help="No progress while it runs.")
    ] = False,
) -> int:
    """Say which setting to use: try S, concurrency, policies and engine counts in virtual time.

    Reads how long things took in a recorded run, or takes the workload that a YAML file states.
    docs/plan.md says what a plan can know, and what it cannot.

    Try:

    headway plan runs/demo-1

    headway plan examples/demo.yaml --budget 20 --write recommended.yaml
    """
    if not 0 < budget < float("inf") or jobs < 0:
        raise ConfigError(
            f"--budget {budget:g} --jobs {jobs}: give a number of seconds above 0, and no negative "
            "number of processes"
        )
    from headway.sim.plan import plan as find_plan
    from headway.sim.ranking import Objective
    from headway.views.plan import PLOT_KINDS, PlanProgress, plan_text

    if plot is not None and plot.suffix.lower() not in PLOT_KINDS:
        raise ConfigError(f"--plot {plot}: the name must end in {' or '.join(PLOT_KINDS)}")
    plot = plot or (source if source.is_dir() else source.parent) / "plan.png"
    for option, file in (("plot", plot), ("write", write), ("workload", workload)):
        if file is not None and source.exists():  # else the source is what is wrong
            _check_writable(file, f"--{option} {file}")
    console = _console(to_stderr=json)
    if not console.is_terminal:
        console.width = max(console.width, 100)  # a file has room for the table
    shown = console if console.is_terminal else _console(to_stderr=True)
    with PlanProgress(None if quiet else shown) as progress:
        found = find_plan(
            source, objective=Objective(objective), budget=budget, jobs=jobs, progress=progress
        )
    if json:
        print(json_module.dumps({**found.as_dict(), "plot": str(plot)}, indent=2))
    else:
        console.print(plan_text(found))
    for line in _write_plan(found, source, plot=plot, write=write, workload=workload):
        if not json:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return INTERRUPTED if found.is_interrupted else 0


def _check_writable(file: Path, what: str) -> None:
    """Refuse a file that cannot be written, before anything expensive is done for it."""
    try:
        existed = file.exists()
        file.open("ab").close()  # permissions alone do not tell: a disk can be read-only
        if not existed:
            file.unlink()
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror}; give a file that can be written") from error


def _write_plan(
    found: "Plan", source: Path, *, plot: Path, write: Path | None, workload: Path | None
) -> Iterator[str]:
    """Write the files of a plan that has been printed; a line about each. Raises OSError."""
    from headway.config.file import dump_config, load_config
    from headway.store.run_dir import RunDir
    from headway.views.plan import write_plot, written_config

    yield f"{'file':<10}{write_plot(found, plot)}"
    if write is not None:
        own = load_config(RunDir(source).config if source.is_dir() else source)
        config = written_config(found, own, write.name)
        write.write_text(dump_config(config), encoding="utf-8")
        yield f"{'file':<10}{write} (headway run {write}, headway simulate {write})"
    if workload is not None:
        workload.write_text(dump_config(found.config), encoding="utf-8")
        yield f"{'file':<10}{workload} (headway simulate {workload})"


@app.command(sort_key=6)
def replay(
    run_dir: Annotated[Path, Parameter(name="RUN", help="A run directory.")],
    /,
    *,
    json: Json = False,
) -> int:
    """Replay the recorded inputs of a run through the real loop, in virtual time.

    Shows that the same decisions come out (what was admitted, judged, dropped and batched, in
    order), or the first one that differs; then the exit code is 1.

    Try:

    headway replay runs/demo-1
    """
    import dataclasses

    from headway.sim.replay import replay as replay_run

    result = replay_run(run_dir)
    if json:
        print(
            json_module.dumps({**dataclasses.asdict(result), "is_same": result.is_same}, indent=2)
        )
        return 0 if result.is_same else 1
    print(f"{result.num_inputs:,} inputs, {result.num_decisions:,} decisions")
    print(f"recorded hash  {result.recorded_hash or 'none: the run left no summary'}")
    print(f"replayed hash  {result.replayed_hash}")
    print("the same decisions, in the same order" if result.is_same else "first difference:")
    if result.difference:
        print(result.difference)
    return 0 if result.is_same else 1


@app.command(sort_key=7)
def report(run_dir: Annotated[Path, Parameter(name="RUN", help="A run directory.")], /) -> int:
    """Write report.html and plots/*.png of a run, finished or not, into its directory.

    Try:

    headway report runs/demo-1
    """
    from headway.views.report import write_report

    print(write_report(run_dir))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: this process's own) and return its exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = app(words, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        return _fail(_usage(error, words), 2)
    except HeadwayError as error:
        return _fail(str(error), error.exit_code)
    except OSError as error:
        if error.filename is None:
            raise
        return _fail(f"{error.filename}: {error.strerror}", 1)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    # --help and --version return nothing.
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    if os.environ.get(DEBUG_VARIABLE) == "1":
        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
    return code


def _usage(error: CycloptsError, words: Sequence[str]) -> str:
    """cyclopts' message, with a suggestion for options too."""
    if words and words[0].startswith("-"):
        near = difflib.get_close_matches(words[0], ["--help", "--version"], n=1)
        return f"unknown option {words[0]}" + (f"; did you mean {near[0]}?" if near else "")
    return " ".join(str(error).split()) + " (see headway --help)"


def _load(arguments: Sequence[str], resume: Path | None = None) -> "Config":
    """The configuration of `[CONFIG] [--section.field VALUE]...`, with `resume` on top of that
    run's own; its warnings go to stderr."""
    from headway.config import Config
    from headway.config.file import load_config

    words = list(arguments)
    path = Path(words.pop(0)) if words and not words[0].startswith("-") else None
    flags = ["--json", "--quiet", "--help", "--resume", "--faults"]
    for word in words:
        name = word.partition("=")[0]
        near = difflib.get_close_matches(name, flags, n=1, cutoff=0.7)
        is_section = "." in name or name.removeprefix("--") in Config.model_fields
        if name.startswith("-") and near and not is_section:
            raise ConfigError(f"unknown option {name}; did you mean {near[0]}?")
    if resume is None:
        config = load_config(path, words)
    else:
        from headway.resume import config_to_resume

        config = config_to_resume(resume, path, words)
    for warning in config.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return config


def _console(*, to_stderr: bool) -> "Console":
    """Where people look: stdout, or stderr when stdout is for a script."""
    from rich.console import Console

    return Console(stderr=to_stderr)


def _finish(config: "Config", summary: Mapping[str, Any], as_json: bool) -> int:
    """Print the summary of a run that was started, and say how it went."""
    if as_json:
        print(json_module.dumps(summary, indent=2))
    else:
        from headway.views.summary import summary_text

        console = _console(to_stderr=False)
        console.print(summary_text(summary, width=min(console.width, 100)))
        console.print(f"\n{'files':<10}{config.run.dir}", markup=False, highlight=False)
    return int(summary["exit_code"])
