"""Properties of the pure functions that put a batch together, trim it, and say what they promise;
and how policies are chosen by name."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headway.config import Config
from headway.config.rollout import PRESETS, Preset, RolloutConfig
from headway.core.assembly import Selection, select
from headway.core.bound import Bound, Enforcement, OverBound, trimmed
from headway.core.ledger import Admission
from headway.core.order import Candidate, Order
from headway.core.pacing import Pacing
from headway.core.rollout import GroupId, Source
from headway.core.versions import VersionRuns
from rollouts import rollout
from simulated import sim_config

ENVS = ("one", "two")


def a_bound(**fields: Any) -> Bound:
    """Trim at `S = 2`, `B = 3`, with these fields instead."""
    return Bound(
        **{
            "max_age": 2,
            "batch_size": 3,
            "enforcement": Enforcement.ADMISSION,
            "order": Order.OLDEST_FIRST,
            "over_bound": OverBound.TRIM,
            "envs": ENVS,
            **fields,
        }
    )


@dataclass(frozen=True)
class Scene:
    """Everything that is unbatched when a batch is to be put together."""

    step: int
    bound: Bound
    candidates: list[Candidate]
    unbatched: dict[GroupId, Admission]

    def select(self, **options: Any) -> Selection:
        return select(self.step, self.candidates, self.unbatched, self.bound, **options)

    @property
    def unfinished(self) -> set[GroupId]:
        return self.unbatched.keys() - {one.group_id for one in self.candidates}

    def due(self, group_id: GroupId) -> int:
        """The last batch in which a sample is not too old."""
        return self.unbatched[group_id].version + self.bound.max_age

    def num_due(self, last: int, without: tuple[GroupId, ...] = ()) -> int:
        """Samples that are waited for and due in batch `last` or before."""
        return sum(
            self.bound.choice(admission.env) is OverBound.WAIT and self.due(group_id) <= last
            for group_id, admission in self.unbatched.items()
            if group_id not in without
        )

    def is_feasible(self, step: int, without: tuple[GroupId, ...] = ()) -> bool:
        """Whether all that is waited for can be in time if `step` is the next batch."""
        size = self.bound.batch_size
        lasts = range(step - 1, self.step + self.bound.max_age + 1)
        return all(self.num_due(last, without) <= (last - step + 1) * size for last in lasts)


@st.composite
def scenes(draw: st.DrawFn, /, **fixed: Any) -> Scene:
    """Any state of the loop, with samples of all ages in it, overdue ones too."""
    fields = {
        "max_age": draw(st.integers(0, 4)),
        "batch_size": draw(st.integers(1, 4)),
        "order": draw(st.sampled_from([Order.COMPLETION, Order.OLDEST_FIRST])),
        "over_bound": draw(st.sampled_from(OverBound)),
        "by_env": draw(st.sampled_from([{}, {"two": OverBound.DROP}, {"two": OverBound.ADMIT}])),
        **fixed,
    }
    bound = a_bound(**fields)
    step = draw(st.integers(0, 8))
    versions = sorted(draw(st.lists(st.integers(0, step), max_size=20)))
    unbatched, candidates = {}, []
    for number, version in enumerate(versions):
        group_id = GroupId(number * 2)
        env = draw(st.sampled_from(ENVS))
        unbatched[group_id] = Admission(version, env)
        if draw(st.booleans()):
            head = draw(st.integers(version, step))
            tail = draw(st.integers(head, step))
            candidates.append(Candidate(group_id, env, version, head, tail))
    return Scene(step, bound, draw(st.permutations(candidates)), unbatched)


@settings(max_examples=400)
@given(scenes(), st.booleans())
def test_a_selection_is_a_whole_batch_of_finished_samples_or_none(
    scene: Scene, gave_up: bool
) -> None:
    selection = scene.select(gave_up=gave_up)
    finished = {one.group_id for one in scene.candidates}
    taken, dropped = set(selection.taken), set(selection.dropped)
    assert len(selection.taken) == len(taken) and len(taken) in (0, scene.bound.batch_size)
    assert taken <= finished and dropped <= finished and not taken & dropped
    assert set(selection.held_for) <= scene.unfinished
    if selection.held_for:
        assert not taken and not gave_up
    if len(finished - dropped) < scene.bound.batch_size:
        assert not taken and not selection.held_for  # short of samples, not held for one
    elif not taken:
        assert selection.held_for
    oldest = scene.step - scene.bound.max_age
    for one in scene.candidates:
        assert one.head is not None and one.tail is not None
        lost = {
            OverBound.DROP: one.head < oldest,
            OverBound.TRIM: one.tail < oldest,
        }.get(scene.bound.choice(one.env), False)
        assert (one.group_id in dropped) == lost


@given(scenes(over_bound=OverBound.ADMIT, by_env={}, order=Order.OLDEST_FIRST))
def test_oldest_first_takes_the_oldest(scene: Scene) -> None:
    taken = scene.select().taken
    oldest = sorted(one.group_id for one in scene.candidates)[: scene.bound.batch_size]
    assert not taken or sorted(taken) == oldest


@given(scenes(over_bound=OverBound.ADMIT, by_env={}, order=Order.COMPLETION))
def test_completion_takes_the_first_finished(scene: Scene) -> None:
    taken = scene.select().taken
    first = [one.group_id for one in scene.candidates][: scene.bound.batch_size]
    assert not taken or list(taken) == first


@settings(max_examples=600)
@given(scenes(over_bound=OverBound.WAIT))
def test_waiting_keeps_feasible_what_was_feasible(scene: Scene) -> None:
    """Then no sample is ever overdue: the invariant for `last = step` says that none is left."""
    assume(scene.is_feasible(scene.step))
    selection = scene.select()
    if selection.taken:
        assert scene.is_feasible(scene.step + 1, selection.taken)
        assert not any(
            scene.due(one) <= scene.step
            for one in scene.unbatched.keys() - set(selection.taken)
            if scene.bound.choice(scene.unbatched[one].env) is OverBound.WAIT
        )
        return
    # Held only when needed: with those that it is held for, it could not be put together without.
    for last in range(scene.step, scene.step + scene.bound.max_age + 1):
        if set(selection.held_for) == {
            one for one in scene.unfinished if _is_waited_for(scene, one) and scene.due(one) <= last
        }:
            num_ready = scene.num_due(last) - len(selection.held_for)
            needed = scene.num_due(last) - (last - scene.step) * scene.bound.batch_size
            if num_ready < needed:
                return
    assert not selection.held_for


def _is_waited_for(scene: Scene, group_id: GroupId) -> bool:
    return scene.bound.choice(scene.unbatched[group_id].env) is OverBound.WAIT


@given(scenes(over_bound=OverBound.WAIT, wait_seconds=1.0))
def test_giving_up_takes_what_there_is(scene: Scene) -> None:
    selection = scene.select(gave_up=True)
    assert not selection.held_for
    left = len(scene.candidates) - len(selection.dropped)
    assert bool(selection.taken) == (left >= scene.bound.batch_size)


@settings(max_examples=200)
@given(st.data(), st.integers(1, 9), st.integers(1, 4))
def test_in_a_window_nobody_is_overtaken_by_more_than_its_size(
    data: st.DataObject, window: int, batch_size: int
) -> None:
    """A whole run of it: samples are admitted, finish, are lost and batched in any order."""
    bound = a_bound(
        order=Order.WINDOW, window=window, over_bound=OverBound.ADMIT, batch_size=batch_size
    )
    unbatched: dict[GroupId, Admission] = {}
    finished: list[Candidate] = []
    overtaking: set[GroupId] = set()
    overtaken: dict[GroupId, int] = {}
    for number in range(40):
        match data.draw(st.sampled_from(["admit", "admit", "finish", "finish", "lose", "batch"])):
            case "admit":
                unbatched[GroupId(number)] = Admission(0, "one")
                overtaken[GroupId(number)] = 0
            case "finish":
                known = {one.group_id for one in finished}
                if running := sorted(unbatched.keys() - known):
                    chosen = data.draw(st.sampled_from(running))
                    finished.append(Candidate(chosen, "one", 0, 0, 0))
            case "lose" if unbatched:
                lost = data.draw(st.sampled_from(sorted(unbatched)))
                del unbatched[lost]
                finished = [one for one in finished if one.group_id != lost]
            case _:
                selection = select(0, finished, unbatched, bound, overtaking=overtaking)
                for one in selection.taken:
                    del unbatched[one]
                finished = [one for one in finished if one.group_id in unbatched]
                for one in unbatched:
                    overtaken[one] += sum(other > one for other in selection.taken)
                oldest = min(unbatched, default=GroupId(10**9))
                overtaking |= set(selection.taken)
                overtaking = {one for one in overtaking if one > oldest}
                assert max(overtaken.values(), default=0) <= window - 1


# --- trimming ---------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 6), max_size=30), st.integers(0, 7), st.sampled_from(Source))
def test_trimming_is_what_it_is_token_by_token(
    versions: list[int], oldest: int, source: Source
) -> None:
    before = rollout(versions=versions, prompt_tokens=3, source=source)
    after = trimmed(before, oldest)
    if source is not Source.LIVE:
        assert after is before
        return
    kept = [version >= oldest for version in versions]
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert after.loss_mask.tolist() == [False] * 3 + kept
    assert after.logprobs.tolist() == [0.0] * 3 + [-0.5 if keep else 0.0 for keep in kept]
    young = [version for version in versions if version >= oldest]
    assert after.version_runs.expand().tolist() == young
    assert after.num_trimmed == len(versions) - len(young)
    assert after.num_trainable == len(young)
    assert (after.reward, after.num_turns) == (before.reward, before.num_turns)
    assert trimmed(after, oldest) is after


def test_trimming_knows_gaps_in_the_mask() -> None:
    turns = rollout(versions=[0, 1, 1, 2], prompt_tokens=1)
    mask = np.array([False, True, True, False, True])
    runs = VersionRuns.from_versions([0, 1, 2])
    one = msgspec.structs.replace(turns, loss_mask=mask, version_runs=runs)
    after = trimmed(one, 1)
    assert after.loss_mask.tolist() == [False, False, True, False, True]
    assert after.version_runs.runs == ((1, 1), (2, 1))
    assert after.num_trimmed == 1


# --- what a setting guarantees ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("enforcement", "order", "over_bound"), list(product(Enforcement, Order, OverBound))
)
@pytest.mark.parametrize("max_age", [0, 3])
def test_the_guaranteed_age(
    enforcement: Enforcement, order: Order, over_bound: OverBound, max_age: int
) -> None:
    bound = a_bound(
        enforcement=enforcement,
        order=order,
        over_bound=over_bound,
        max_age=max_age,
        window=9 if order is Order.WINDOW else None,
    )
    by_formula = enforcement is not Enforcement.SHIP
    expected: int | None = max_age
    if over_bound is OverBound.ADMIT:
        if not by_formula:
            expected = None
        elif max_age > 0:
            # 9 samples: 8 may overtake, with 3 to a batch.
            expected = max_age + 1 + 2 if order is Order.WINDOW else None
    assert bound.guaranteed_age == expected


GUARANTEED: dict[str, Callable[[int, int, int], int | None]] = {
    "`S`": lambda max_age, window, size: max_age,
    "0": lambda max_age, window, size: 0,
    "none": lambda max_age, window, size: None,
    "`S + 1 + floor((W - 2) / B)`": lambda max_age, window, size: (
        max_age + 1 + math.floor((window - 2) / size)
    ),
}
"""Entries of the table in docs/bounds.md as functions of `S`, `W` and `B`."""


def test_the_table_of_the_documentation_is_what_the_code_says() -> None:
    """And every combination that is not refused is in exactly one row."""
    text = (Path(__file__).parents[1] / "docs/bounds.md").read_text(encoding="utf-8")
    table = text[text.index("| `over_bound` |") :]
    rows = re.findall(r"^\| (`\w+`.*) \| (.*) \| (.*) \| (.*) \|$", table, re.MULTILINE)[1:]
    for over_bound, enforcement, order, max_age, window in product(
        OverBound, Enforcement, Order, (0, 1, 4), (1, 2, 7, 50)
    ):
        bound = a_bound(
            over_bound=over_bound,
            enforcement=enforcement,
            order=order,
            max_age=max_age,
            window=window,
        )
        found = [
            guaranteed
            for what, enforcements, orders, guaranteed in rows
            if what.startswith(f"`{over_bound}`")
            and not ("= 0" in what and max_age)
            and not ("> 0" in what and not max_age)
            and (enforcements == "any" or f"`{enforcement}`" in enforcements)
            and (orders == "any" or f"`{order}`" in orders)
        ]
        if list(bound.problems()):
            continue
        assert len(found) == 1, bound
        expected = GUARANTEED[found[0]](max_age, window, bound.batch_size)
        assert bound.guaranteed_age == expected, bound


@pytest.mark.parametrize(
    ("window", "age"), [(1, 4), (2, 5), (3, 5), (4, 5), (5, 6), (7, 6), (8, 7), (300, 104)]
)
def test_the_window_costs_one_version_and_one_more_for_every_batch_in_it(
    window: int, age: int
) -> None:
    bound = a_bound(max_age=4, order=Order.WINDOW, window=window, over_bound=OverBound.ADMIT)
    assert bound.guaranteed_age == age


def test_the_weakest_environment_decides() -> None:
    window = {"order": Order.WINDOW, "window": 2, "over_bound": OverBound.DROP}
    assert a_bound(**window).guaranteed_age == 2
    assert a_bound(**window, by_env={"two": OverBound.ADMIT}).guaranteed_age == 3
    assert a_bound(by_env={"two": OverBound.ADMIT}).guaranteed_age is None
    assert a_bound(by_env={"elsewhere": OverBound.ADMIT}).guaranteed_age == 2


@pytest.mark.parametrize("after", [OverBound.DROP, OverBound.TRIM, OverBound.ADMIT])
def test_a_wait_with_a_time_limit_guarantees_what_follows_it(after: OverBound) -> None:
    bound = a_bound(over_bound=OverBound.WAIT, wait_seconds=5.0, after_wait=after)
    assert bound.guaranteed_age == (None if after is OverBound.ADMIT else 2)
    assert bound.remedy("one") is after
    assert bound.trims == (after is OverBound.TRIM)
    assert not a_bound(over_bound=OverBound.WAIT, after_wait=after).trims


# --- policies in the configuration ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "key", "reason"),
    [
        (
            {"rollout": {"over_bound": "trim"}, "engine": {"stamps_tokens": False}},
            "rollout.over_bound",
            "trim needs the version of every token, and engine.stamps_tokens is off",
        ),
        (
            {
                "rollout": {"over_bound": "wait", "wait_seconds": 5},
                "engine": {"stamps_tokens": False},
            },
            "rollout.over_bound",
            "trim needs the version of every token",
        ),
        (
            {"rollout": {"over_bound": "wait", "enforcement": "ship"}},
            "rollout.over_bound",
            "wait needs enforcement: admission or both",
        ),
        ({"rollout": {"order": "window"}}, "rollout.window", "order: window needs its size"),
        (
            {"rollout": {"order": "window", "window": 4, "enforcement": "ship"}},
            "rollout.order",
            "window needs enforcement: admission or both",
        ),
        (
            {"rollout": {"order": "window", "window": 4, "over_bound": "wait"}},
            "rollout.order",
            "both say who comes first",
        ),
        (
            {"rollout": {"over_bound": "wait", "wait_seconds": 5, "after_wait": "wait"}},
            "rollout.after_wait",
            "must be what follows a wait",
        ),
        (
            {"rollout": {"over_bound": "wait", "queue_size": 23}},
            "rollout.queue_size",
            "23 is below (S + 1) * B = 24",
        ),
        (
            {"rollout": {"order": "window", "window": 4, "queue_size": 23}},
            "rollout.queue_size",
            "23 is below (S + 1) * B = 24",
        ),
    ],
)
def test_impossible_combinations_are_refused_with_the_reason(
    sections: dict[str, Any], key: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(key)) as caught:
        sim_config(**sections)
    assert reason in str(caught.value)


def test_what_is_refused_for_one_environment_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rollout\.over_bound.*wait needs enforcement"):
        sim_config(
            rollout={"enforcement": "ship"},
            envs=[{"id": "one"}, {"id": "two", "over_bound": "wait"}],
        )
    sim_config(rollout={"queue_size": 24, "over_bound": "wait"})
    sim_config(rollout={"over_bound": "wait", "wait_seconds": 5, "enforcement": "ship"})


@pytest.mark.parametrize("preset", Preset)
def test_a_preset_is_its_fields_and_what_is_said_wins(preset: Preset) -> None:
    plain = RolloutConfig(preset=preset)
    assert {name: getattr(plain, name) for name in PRESETS[preset]} == PRESETS[preset]
    for name, other in {
        "enforcement": Enforcement.BOTH,
        "order": Order.COMPLETION,
        "over_bound": OverBound.ADMIT,
        "pacing": Pacing.FILL,
    }.items():
        said = RolloutConfig.model_validate({"preset": preset, name: other})
        assert getattr(said, name) is other
        assert all(
            getattr(said, kept) == PRESETS[preset][kept] for kept in PRESETS[preset] if kept != name
        )
    assert RolloutConfig().preset is Preset.RECOMMENDED


@pytest.mark.parametrize(
    ("preset", "age"),
    [("recommended", 2), ("admission", None), ("ship_drop", 2), ("wait_oldest", 2)],
)
def test_what_presets_guarantee(preset: str, age: int | None) -> None:
    config = Config.model_validate({"rollout": {"preset": preset, "max_head_offpolicyness": 2}})
    assert config.bound.guaranteed_age == age
    assert Config.model_validate(config.model_dump()).bound == config.bound


def test_each_environment_has_its_own_choice() -> None:
    bound = sim_config(
        rollout={"over_bound": "drop"},
        envs=[
            {"id": "math"},
            {"id": "tools", "name": "agent", "over_bound": "trim"},
            {"id": "web", "over_bound": "admit"},
        ],
    ).bound
    assert [bound.choice(env) for env in ("math", "agent", "web")] == [
        OverBound.DROP,
        OverBound.TRIM,
        OverBound.ADMIT,
    ]
    scene = Scene(
        5,
        a_bound(over_bound=OverBound.DROP, by_env={"two": OverBound.TRIM}, batch_size=2),
        [
            Candidate(GroupId(0), "one", 1, 1, 5),
            Candidate(GroupId(1), "two", 1, 1, 5),
            Candidate(GroupId(2), "two", 1, 1, 2),
            Candidate(GroupId(3), "one", 3, 3, 5),
        ],
        {GroupId(number): Admission(1, "one") for number in range(4)},
    )
    assert scene.select() == Selection(
        taken=(GroupId(1), GroupId(3)), dropped=(GroupId(0), GroupId(2))
    )
