"""The planner: workloads whose right answer is known by construction, and round trips."""

import asyncio
import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from headway.cli import main
from headway.config import PRESETS, Config, DistributionConfig, Preset
from headway.config.file import dump_config, load_config
from headway.core.pacing import Pacing
from headway.errors import ConfigError, RunDirError
from headway.sim.app import simulate, simulate_in_memory
from headway.sim.binding import Binding, Window
from headway.sim.clock import run_virtual
from headway.sim.distributions import inverse_of
from headway.sim.fit import _alike, _fit_difficulty, empirical, fit_run
from headway.sim.plan import Plan, plan
from headway.sim.predict import Prediction, Setting, predict
from headway.sim.ranking import Objective, beats, is_sound, pareto_front, ranked, reasons
from headway.sim.run import build_simulation
from headway.sim.scale import lighter
from headway.sim.speed import Requests, fit_speed
from headway.views.plan import block_text, plan_text, write_plot, written_config
from simulated import sim_config
from test_cli import headway

RECOMMENDED = {name: value.value for name, value in PRESETS[Preset.RECOMMENDED].items()}

SATURATED: dict[str, Any] = {
    "rollout_seconds": None,
    "rollout_tokens": {"kind": "lognormal", "median": 40, "sigma": 0.6},
    "engine": {"slots": 16, "throughput": [[1, 20], [8, 100], [16, 120]]},
    "train_seconds": 1.0,
    "weight_sync_seconds": 0.1,
}
"""A batch of 8 takes the engine 8 * 48 / 120 = 3.2 s, and the trainer 1 s."""


SMALL = sim_config(
    rollout={"consumer_batch_size": 4, "max_concurrent_rollouts": 12},
    engine={"update_mode": "finish", "update_seconds": 5000},
)
"""Short simulations of it flatter: the engines drain for the longest of many rollouts."""


def seen(config: Config, **changes: Any) -> Prediction:
    """The prediction for a configuration's own setting, with some of it changed."""
    found = predict(config, dataclasses.replace(Setting.of(config), **changes), num_steps=60)
    assert found is not None
    return found


def planned(config: Config, tmp_path: Path, **options: Any) -> Plan:
    """A short plan on a workload file."""
    path = tmp_path / "workload.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    return plan(path, **{"jobs": 1, "effort": 0.03, "budget": 120.0, **options})


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A plan on a small workload, for tests that only read it."""
    return planned(SMALL, tmp_path_factory.mktemp("plan"))


# --- what binds -----------------------------------------------------------------------------------


def test_what_binds_is_told_where_it_is_known_by_construction() -> None:
    config = sim_config(
        simulate={"rollout_seconds": {"kind": "uniform", "low": 4, "high": 6}, "train_seconds": 4}
    )
    free = seen(config)
    assert free.binding is Binding.TRAINER
    assert free.step_seconds == pytest.approx(4.1, rel=0.03)
    starved = seen(config, max_concurrent=4)
    assert starved.binding is Binding.CONCURRENCY
    assert starved.step_seconds == pytest.approx(10, rel=0.05), "4 of 8 in flight, 5 s each"
    turns = seen(config, max_head_offpolicyness=0)
    assert turns.binding is Binding.STALENESS
    assert turns.head_age_mean == 0


def test_waiting_for_stragglers_is_told() -> None:
    config = sim_config(
        rollout={"over_bound": "wait", "order": "oldest_first"},
        simulate={"rollout_seconds": {"kind": "lognormal", "median": 5, "sigma": 1.2}},
    )
    found = seen(config)
    assert found.binding is Binding.STRAGGLERS
    assert found.held_seconds > 1 and found.age_max <= 2


def test_full_engines_are_told_and_more_staleness_does_not_help() -> None:
    config = sim_config(simulate=SATURATED)
    found = [seen(config, max_head_offpolicyness=age) for age in (2, 4, 6)]
    assert {one.binding for one in found} == {Binding.ENGINES}
    for one in found:
        assert one.step_seconds == pytest.approx(3.2, rel=0.06)
    more = seen(config, max_head_offpolicyness=6, engines=2)
    assert more.step_seconds < 0.6 * found[-1].step_seconds


def test_slow_weight_updates_are_told() -> None:
    config = sim_config(
        engine={"update_mode": "finish", "update_seconds": 5000},
        rollout={"max_head_offpolicyness": 4, "over_bound": "trim", "max_concurrent_rollouts": 40},
        simulate={
            "rollout_seconds": {"kind": "lognormal", "median": 5, "sigma": 1},
            "train_seconds": 2,
            "weight_sync_seconds": 0,
        },
    )
    found = seen(config)
    assert found.binding is Binding.UPDATES
    assert found.updating_share > 0.5
    quick = config.model_dump(mode="json")
    quick["engine"]["update_mode"] = "keep"
    assert seen(Config.model_validate(quick)).updating_share == 0


@pytest.mark.parametrize("rollout_seconds", [0.0, 3.0])
def test_bursts_of_steps_are_not_looked_at_more_often(rollout_seconds: float) -> None:
    config = sim_config(
        rollout={"max_head_offpolicyness": 8, "consumer_batch_size": 1},
        simulate={
            "rollout_seconds": rollout_seconds,
            "train_seconds": 1e-13,
            "weight_sync_seconds": 0,
        },
        run={"steps": 100},
    )

    async def looks() -> int:
        window = Window(first=10, last=80, deadline=float("inf"))
        run = build_simulation(config, metrics=window)
        running, looking = asyncio.create_task(run.run()), asyncio.create_task(window.watch(run))
        await window.end.wait()
        looking.cancel()
        running.cancel()
        await asyncio.gather(looking, running, return_exceptions=True)
        return window.num_looks

    assert run_virtual(looks()) < 100 * 100


# --- plans ----------------------------------------------------------------------------------------


def test_a_trainer_bound_workload_needs_little_staleness(tmp_path: Path) -> None:
    config = sim_config(
        rollout={
            "max_head_offpolicyness": 8,
            "consumer_batch_size": 2,
            "max_concurrent_rollouts": 18,
        },
        simulate={"rollout_seconds": {"kind": "uniform", "low": 4, "high": 6}, "train_seconds": 8},
    )
    found = planned(config, tmp_path)
    best, now = found.recommended, found.current
    assert found.is_complete and now is not None
    assert best.binding is Binding.TRAINER
    assert best.setting.pacing is Pacing.JUST_IN_TIME
    assert best.setting.max_concurrent <= 4, "rollouts take less than one update"
    assert best.head_age_mean <= 1.1 < 7 < now.head_age_mean
    assert best.step_seconds <= 1.015 * min(row.step_seconds for row in found.rows)
    assert is_sound(best)
    assert best.setting in found.front
    assert any("busy all the time" in reason for reason in found.why)


def test_with_full_engines_only_more_engines_help(tmp_path: Path) -> None:
    found = planned(
        sim_config(rollout=RECOMMENDED | {"consumer_batch_size": 4}, simulate=SATURATED), tmp_path
    )
    assert found.recommended.binding is Binding.ENGINES
    assert found.recommended.setting.engines == 1, "engines are the user's to add"
    assert any("more engines" in reason for reason in found.why)
    doubled = [row for row in found.rows if row.setting.engines == 2]
    assert min(row.step_seconds for row in doubled) < 0.75 * found.recommended.step_seconds


def test_the_same_plan_comes_out_again_whatever_the_number_of_processes(
    tmp_path: Path, small: Plan
) -> None:
    again = planned(SMALL, tmp_path, jobs=2)
    assert [row.as_row() for row in again.rows] == [row.as_row() for row in small.rows]
    assert (again.recommended, again.why) == (small.recommended, small.why)


def test_a_spent_budget_still_gives_a_plan_and_says_so(tmp_path: Path) -> None:
    found = planned(sim_config(), tmp_path, budget=0.5)
    assert not found.is_complete
    assert any("--budget" in reason for reason in found.why)


def test_the_recommendation_can_be_pasted_and_everything_can_be_shown(
    tmp_path: Path, small: Plan
) -> None:
    config, found = SMALL, small
    block = tmp_path / "block.yaml"
    block.write_text(block_text(found.recommended.setting), encoding="utf-8")
    assert Setting.of(load_config(block)) == found.recommended.setting
    merged = config.model_dump(mode="json")
    for name, values in yaml.safe_load(block.read_text()).items():
        merged[name].update(values)
    assert Setting.of(Config.model_validate(merged)) == found.recommended.setting
    json.dumps(found.as_dict())
    png = write_plot(found, tmp_path / "plot.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "recommended" in png.with_suffix(".svg").read_text()
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    console.print(plan_text(found))
    shown = console.export_text()
    assert "max_head_offpolicyness:" in shown and found.recommended.binding in shown


def test_a_workload_that_takes_no_time_can_be_planned_on(tmp_path: Path) -> None:
    config = sim_config(
        rollout={
            "max_head_offpolicyness": 0,
            "consumer_batch_size": 1,
            "max_concurrent_rollouts": 1,
        },
        simulate={"rollout_seconds": 0, "train_seconds": 0, "weight_sync_seconds": 0},
    )
    found = planned(config, tmp_path, budget=0.5)
    assert found.recommended.step_seconds == 0


def test_the_table_does_not_contradict_the_recommendation(small: Plan) -> None:
    found, best = small, small.recommended
    assert found.is_complete and not found.rivals
    assert {best.setting, *found.front} <= found.confirmed
    same = [row for row in found.rows if row.setting.engines == best.setting.engines]
    for row in same:
        if row.setting in found.confirmed:
            fine = not beats(row, best) or not is_sound(row)
            assert fine or row.trimmed_share > best.trimmed_share
            assert fine or any("No slower and no older" in reason for reason in found.why)
        else:
            assert not beats(row, best)
    assert best.step_seconds <= 1.015 * min(row.step_seconds for row in same)


MEASURES = st.tuples(
    st.floats(9, 12),
    st.floats(0, 4),
    st.sampled_from([0.0, 0.01, 0.1, 0.3]),
    st.booleans(),
    st.integers(1, 99),
)


@given(measures=st.lists(MEASURES, min_size=1, max_size=12), objective=st.sampled_from(Objective))
@settings(max_examples=200, deadline=None)
def test_no_sound_setting_beats_the_best_at_the_same_price(
    small: Plan, measures: list[tuple[float, float, float, bool, int]], objective: Objective
) -> None:
    base = small.recommended
    rows = [
        dataclasses.replace(
            base,
            setting=dataclasses.replace(base.setting, max_concurrent=size),
            step_seconds=step,
            head_age_mean=age,
            trimmed_share=trimmed,
            guaranteed=4 if bounded else None,
        )
        for step, age, trimmed, bounded, size in measures
    ]
    found = ranked(rows, objective, 0.015)
    assert sorted(map(id, found)) == sorted(map(id, rows))
    for row in found[1:]:
        worse = not is_sound(row) or row.trimmed_share > found[0].trimmed_share
        assert worse or not beats(row, found[0])


def test_much_trimming_is_said_plainly(small: Plan) -> None:
    row = dataclasses.replace(
        small.recommended, trimmed_share=0.25, longest_5pct_trained_token_share=0.4
    )
    told = [*reasons(dataclasses.replace(small, recommended=row), [row], [])]
    assert any("WARNING: 25 % of the tokens are trimmed" in reason for reason in told)
    assert any("40 % are trained" in reason for reason in told)
    assert "longest_5pct_trained_token_share" in small.as_dict()["recommended"]


def test_presets_and_the_number_of_hidden_settings_are_shown(tmp_path: Path, small: Plan) -> None:
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    console.print(plan_text(small))
    shown = console.export_text()
    for preset in Preset:
        assert f"12  {preset.value} " in shown, "at the concurrency in force"
    assert f"of {len(small.rows)} settings tried" in shown


def test_what_is_written_leaves_the_run_alone(tmp_path: Path, small: Plan) -> None:
    content = SMALL.model_dump(mode="json")
    content["rollout"]["filters"] = ["truncated"]
    content["run"]["dir"] = str(tmp_path / "run")
    own = Config.model_validate(content)
    written = written_config(small, own, "better.yaml")
    assert Setting.of(written) == small.recommended.setting
    assert written.run.dir == f"{own.run.dir}-better"
    assert written.rollout.filters == own.rollout.filters, "and not those of the fitted workload"
    assert written.simulate == small.config.simulate
    Path(written.run.dir).mkdir()
    assert written_config(small, own, "better.yaml").run.dir == f"{own.run.dir}-better-2"


def test_on_the_front_nobody_is_faster_and_younger(small: Plan) -> None:
    rows = small.rows
    front = pareto_front(rows)
    assert small.front <= small.confirmed
    for row in rows:
        better = [
            one
            for one in front
            if one.step_seconds <= 1.001 * row.step_seconds
            and one.head_age_mean <= row.head_age_mean + 0.01
        ]
        assert better, row.setting


# --- fits -----------------------------------------------------------------------------------------


def recorded(tmp_path: Path, **sections: Any) -> tuple[Config, Path, dict[str, Any]]:
    """A simulated run on disk, and its summary."""
    run = {"dir": str(tmp_path / "run"), "metrics_interval_seconds": 0.5, "steps": 60}
    config = sim_config(run=run, **sections)
    return config, tmp_path / "run", simulate(config)


USUAL = [[n, n / (0.05 + 0.0015 * n)] for n in (1, 2, 4, 8, 16, 32, 48)]
"""An engine whose tokens take 50 ms and 1.5 ms more for every running request."""

GROUPS: dict[str, Any] = {
    "group_size": 4,
    "filters": ["zero_advantage"],
    "max_concurrent_rollouts": 24,
    **RECOMMENDED,
}
WORKLOADS: dict[str, dict[str, Any]] = {
    "full engine, groups": {
        "rollout": GROUPS,
        "actor": {"advantage": "grpo"},
        "simulate": SATURATED
        | {"engine": {"slots": 48, "throughput": USUAL}}
        | {"reward_probability": 0.6, "difficulty_spread": 0.3, "length_correlation": 0.7},
    },
    "load without a queue": {
        "rollout": {"max_concurrent_rollouts": 20},
        "simulate": SATURATED | {"engine": {"slots": 64, "throughput": [[1, 20], [64, 300]]}},
    },
    "turns with tools": {
        "simulate": {
            "rollout_seconds": None,
            "rollout_tokens": {"kind": "uniform", "low": 20, "high": 80},
            "engine": {"slots": 64, "throughput": [[1, 20], [64, 640]]},
            "turns": {"kind": "uniform", "low": 2, "high": 5},
            "tool_seconds": {"kind": "lognormal", "median": 1.0, "sigma": 0.5},
            "train_seconds": {"kind": "uniform", "low": 1, "high": 3},
        }
    },
    "whatever the load": {},
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_fitted_workload_behaves_like_the_one_it_was_recorded_from(
    tmp_path: Path, name: str
) -> None:
    config, run_dir, before = recorded(tmp_path, **WORKLOADS[name])
    fit = fit_run(run_dir)
    assert Setting.of(fit.config) == Setting.of(config)
    after = simulate_in_memory(fit.config)
    assert after["step_seconds_mean"] == pytest.approx(before["step_seconds_mean"], rel=0.1)
    assert after["age"]["head_mean"] == pytest.approx(before["age"]["head_mean"], rel=0.1)
    assert fit.head_age_mean == pytest.approx(before["age"]["head_mean"])
    assert fit.step_seconds == pytest.approx(before["step_seconds_mean"], rel=0.1)
    rejected = [one["samples"]["rejected"] / one["samples"]["admitted"] for one in (before, after)]
    assert rejected[1] == pytest.approx(rejected[0], abs=0.05)


@pytest.mark.parametrize(("age", "size"), [(0, 8), (3, 32)])
def test_a_fit_made_at_one_setting_predicts_another(tmp_path: Path, age: int, size: int) -> None:
    sections = WORKLOADS["full engine, groups"]

    def at(age: int, size: int) -> dict[str, Any]:
        limits = {"max_head_offpolicyness": age, "max_concurrent_rollouts": size}
        return sections | {"rollout": sections["rollout"] | limits}

    _, run_dir, _ = recorded(tmp_path, **at(1, 16))  # so that some wait: it shows the slots
    real = simulate_in_memory(sim_config(run={"steps": 60}, **at(age, size)))
    content = fit_run(run_dir).config.model_dump(mode="json")
    content["rollout"].update(max_head_offpolicyness=age, max_concurrent_rollouts=size)
    told = simulate_in_memory(Config.model_validate(content))
    assert told["step_seconds_mean"] == pytest.approx(real["step_seconds_mean"], rel=0.1)
    assert told["age"]["head_mean"] == pytest.approx(real["age"]["head_mean"], rel=0.1)


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.9])
def test_likeness_within_groups_is_found(tmp_path: Path, correlation: float) -> None:
    sections = WORKLOADS["full engine, groups"]
    stated = sections["simulate"] | {"length_correlation": correlation}
    _, run_dir, _ = recorded(tmp_path, **sections | {"simulate": stated})
    found = fit_run(run_dir).config.simulate.length_correlation
    assert found == pytest.approx(correlation, abs=0.1)


def test_environments_are_fitted_one_by_one(tmp_path: Path) -> None:
    envs = [{"id": "arithmetic", "name": "short"}, {"id": "arithmetic", "name": "long"}]
    by_env = {"long": {"rollout_tokens": 300, "reward_probability": 0.1}}
    _, run_dir, _ = recorded(
        tmp_path,
        envs=envs,
        simulate=SATURATED | {"rollout_tokens": 30, "by_env": by_env, "reward_probability": 0.9},
    )
    found = fit_run(run_dir).config.simulate.by_env
    assert found["long"].rollout_tokens is not None and found["long"].rollout_tokens.value == 300
    assert found["long"].reward_probability == pytest.approx(0.1, abs=0.07)
    assert found["short"].reward_probability == pytest.approx(0.9, abs=0.07)


def test_loads_that_the_run_never_had_are_marked(tmp_path: Path) -> None:
    sections = WORKLOADS["load without a queue"]
    _, run_dir, _ = recorded(tmp_path, **sections)
    fit = fit_run(run_dir)
    assert fit.loads[1] == 20
    marks = []
    for size in (20, 10, 24):
        setting = dataclasses.replace(Setting.of(fit.config), max_concurrent=size)
        found = predict(fit.config, setting, num_steps=12, loads=fit.loads)
        assert found is not None
        marks.append(found.is_extrapolated)
    assert marks == [False, True, True]


def test_a_run_that_is_too_short_or_left_no_trace_cannot_be_planned_on(tmp_path: Path) -> None:
    simulate(sim_config(run={"dir": str(tmp_path / "run"), "steps": 4}))
    with pytest.raises(RunDirError, match=r"4 trained batches .* at least 5"):
        fit_run(tmp_path / "run")
    (tmp_path / "run" / "trace.jsonl").unlink()
    with pytest.raises(RunDirError, match=r"there is no trace\.jsonl"):
        fit_run(tmp_path / "run")
    with pytest.raises(RunDirError, match="neither a run directory nor"):
        plan(tmp_path / "none")


def test_a_workload_that_cannot_run_is_an_error_that_names_it(tmp_path: Path) -> None:
    config = sim_config(
        rollout={"group_size": 2, "filters": ["zero_advantage"]},
        simulate={"reward_probability": 0.0},
    )
    with pytest.raises(ConfigError, match="cannot be simulated"):
        planned(config, tmp_path)


@settings(max_examples=60, deadline=None)
@given(
    share=st.floats(0.02, 0.98),
    rejected=st.floats(0.02, 0.9),
    group_size=st.integers(2, 16),
)
def test_fitted_difficulty_rejects_as_often_as_the_run(
    share: float, rejected: float, group_size: int
) -> None:
    probability, spread = _fit_difficulty({"a": share}, {"a": 1.0}, rejected, group_size)
    got = _alike(probability["a"], spread, group_size)
    least = 2 * 0.5**group_size
    assert got == pytest.approx(max(rejected, least), abs=0.02)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), flat=st.booleans())
def test_a_speed_curve_is_found_from_starts_and_ends_alone(seed: int, flat: bool) -> None:
    """Requests of known lengths through an engine of known speed."""
    rng = np.random.default_rng(seed)
    rate = (lambda n: 50.0) if flat else (lambda n: 50.0 * n / (1 + n / 8))
    left = dict(enumerate(rng.integers(5, 60, 300).astype(float)))
    tokens = np.array([left[index] for index in range(300)])
    arrivals = np.cumsum(rng.exponential(float(rng.uniform(0.2, 0.8)), 300))
    starts, ends, now = arrivals.copy(), np.zeros(300), 0.0
    running: list[int] = []
    coming = list(range(300))
    while coming or running:
        speed = rate(len(running)) / len(running) if running else 0.0
        until = min((left[one] / speed for one in running), default=np.inf)
        step = min(until, arrivals[coming[0]] - now if coming else np.inf)
        for one in running:
            left[one] -= step * speed
        now += step
        for one in [one for one in running if left[one] < 1e-9]:
            running.remove(one)
            ends[one] = now
        while coming and arrivals[coming[0]] <= now:
            running.append(coming.pop(0))
    requests = Requests(started_at=starts, ended_at=ends, num_tokens=tokens, frozen=())
    found = fit_speed(requests, num_engines=1, slots=None)
    typical = found.max_load / 2
    assert found.at(typical) == pytest.approx(rate(typical), rel=0.1)
    assert found.error < 0.1


@pytest.mark.parametrize("sigma", [0.0, 0.3, 1.0, 1.5])
def test_an_empirical_distribution_keeps_range_mean_and_tail(sigma: float) -> None:
    values = 20 * np.exp(sigma * np.random.default_rng(3).standard_normal(4000))
    found = DistributionConfig.model_validate(empirical(values))
    drawn = inverse_of(found)
    at = (np.arange(20_000) + 0.5) / 20_000
    again = np.array([drawn(one) for one in at])
    assert again.mean() == pytest.approx(values.mean(), rel=0.02)
    assert again.max() == pytest.approx(values.max(), rel=0.25)
    assert np.quantile(again, 0.99) == pytest.approx(np.quantile(values, 0.99), rel=0.02)


def test_a_lighter_workload_takes_the_same_time() -> None:
    config = sim_config(simulate=SATURATED | {"prompt_tokens": 500})
    heavy = config.model_dump(mode="json")
    heavy["simulate"]["rollout_tokens"]["median"] *= 50
    heavy["simulate"]["engine"]["throughput"] = [[1, 1000], [8, 5000], [16, 6000]]
    before = Config.model_validate(heavy)
    after = lighter(before)
    assert after.simulate.prompt_tokens == 1
    summaries = [simulate_in_memory(one) for one in (before, after)]
    assert summaries[1]["tokens"]["generated"] < 0.1 * summaries[0]["tokens"]["generated"]
    steps = [one["step_seconds_mean"] for one in summaries]
    assert steps[1] == pytest.approx(steps[0], rel=0.02)


# --- the command ----------------------------------------------------------------------------------


def test_the_command_prints_json_alone_and_leaves_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    run = {"steps": 12, "dir": "runs/here"}
    (tmp_path / "in" / "w.yaml").write_text(dump_config(sim_config(run=run)), encoding="utf-8")
    words = ["--budget", "1", "--jobs", "1", "--json", "--quiet", "--write", "best.yaml"]
    done = headway("plan", "in/w.yaml", *words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["plot"], (tmp_path / "in" / "plan.png").exists()) == ("in/plan.png", True)
    block = load_config(tmp_path / "best.yaml").rollout
    assert block.max_head_offpolicyness == found["recommended"]["max_head_offpolicyness"]
    assert found["current"]["max_concurrent"] == 64
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "best.yaml", "--quiet", "--json"]) == 0
    assert (tmp_path / "runs" / "here-best" / "summary.json").exists()


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_prints_what_was_found(tmp_path: Path, jobs: int) -> None:
    (tmp_path / "w.yaml").write_text(dump_config(sim_config()), encoding="utf-8")
    words = ["plan", "w.yaml", "--jobs", str(jobs), "--plot", "drawn.svg"]
    with subprocess.Popen(
        [sys.executable, "-m", "headway", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert first.startswith("survey: 1 of"), "progress is told where there is no terminal, too"
    assert process.returncode == 130, err
    assert "was interrupted" in out and "max_head_offpolicyness:" in out
    assert (tmp_path / "drawn.svg").exists()
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plan"], "requires an argument"),
        (["plan", "none"], "none is neither a run directory nor a YAML file"),
        (["plan", "."], "holds no run to plan on"),
        (["plan", "w.yaml", "--budget", "0"], "--budget 0"),
        (["plan", "w.yaml", "--budget", "nan"], "--budget nan"),
        (["plan", "w.yaml", "--objective", "best"], "--objective"),
        (["plan", "w.yaml", "--plot", "x.foo"], "--plot x.foo: the name must end in .png or .svg"),
        (["plan", "w.yaml", "--plot", "none/x.png"], "--plot none/x.png: No such file"),
        (["plan", "w.yaml", "--write", "."], "--write .: Is a directory"),
    ],
)
def test_bad_usage_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    (tmp_path / "w.yaml").write_text(dump_config(sim_config()), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    out, error = capsys.readouterr()
    assert out == "" and told in error
    assert [one.name for one in tmp_path.iterdir()] == ["w.yaml"], "nothing was left behind"
