"""`benchmarks.private.plan`: settings that no margin was chosen on, and intervals that cover."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest

from benchmarks.private import plan


def row(**changes: Any) -> dict[str, str]:
    """Return a line of the sheet of a run that found its clusters."""
    values = {
        "part": plan.HELD_OUT, "number": "0", "protocol": "cfl", "data": "mnist", "clients": "12",
        "public": "digits", "epsilon": "8", "power": "no noise", "status": "done",
        "ari": "1", "ari_least": "0.5",
        "ari_most": "1", "ari_happened": "1", "accuracy": "0.7", "accuracy_least": "0.6",
        "accuracy_most": "0.8", "accuracy_happened": "0.75",
    }  # fmt: skip
    return {**values, **changes}


def test_no_setting_is_in_two_parts_and_each_protocol_in_all() -> None:
    parts = {name: plan.drawn(name) for name in plan.PARTS}
    seeds = [cell["seed"] for cells in parts.values() for cell in cells]
    assert len(seeds) == len(set(seeds))
    for one, other in combinations(plan.PARTS, 2):
        assert not set(plan.PAIRS[one]) & set(plan.PAIRS[other])
    for name, cells in parts.items():
        assert len(cells) == plan.DRAWS[name][1]
        protocols = plan.LATER.get(name, plan.PROTOCOLS)
        assert {cell["protocol"] for cell in cells} == set(protocols)
        assert plan.drawn(name) == cells


@pytest.mark.parametrize("part", [plan.NEW, plan.LAST])
def test_later_settings_have_sizes_and_epsilons_of_their_own(part: str) -> None:
    new = plan.drawn(part)
    older = [cell for other in plan.PARTS for cell in plan.drawn(other) if other != part]
    for name in ("clients", "samples", "rounds", "epsilon"):
        few = {} if name == "epsilon" else plan.FEW
        taken = {cell[name] for cell in older if cell["data"] not in few}
        assert not {cell[name] for cell in new if cell["data"] not in few} & taken
    for data, public in plan.PAIRS[part]:
        chosen = [cell for cell in new if (cell["data"], cell["public"]) == (data, public)]
        assert len(chosen) >= 2


@pytest.mark.parametrize(
    ("score", "happened", "covered", "short"),
    [
        ("ari", 0.5, 1, 0.0),
        ("ari", 0.5 - plan.TESTED["ari", False] + 0.01, 1, plan.TESTED["ari", False] - 0.01),
        ("ari", 0.5 - plan.TESTED["ari", False] - 0.01, 0, plan.TESTED["ari", False] + 0.01),
        ("accuracy", 0.87, 1, 0.515),
        ("accuracy", 0.89, 0, 0.704),
    ],
)
def test_an_interval_covers_up_to_its_margin(
    score: str, happened: float, covered: int, short: float
) -> None:
    lines = plan.judged([row(**{f"{score}_happened": str(happened)})])
    (line,) = [line for line in lines if line["score"] == score]
    assert line["covered"] == covered
    # of accuracies in logits
    assert float(line["short_by"]) == pytest.approx(short, abs=1e-3)


def test_a_margin_is_the_conformal_quantile() -> None:
    short = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    # of nine the largest covers nine tenths of what comes next, and fewer are no proof
    assert plan.quantile(short) == 0.8
    assert plan.quantile(short[:8]) == math.inf
    assert plan.quantile([*short, 0.9, 1.0]) == 1.0
    assert plan.quantile([*short] * 3) == 0.8


def test_a_data_set_is_judged_by_margins_of_the_others() -> None:
    # ten runs of one data set that ended as simulated, and ten of another that were far off
    near = [row(data="mnist", ari_happened="0.5") for _ in range(10)]
    far = [row(data="femnist", ari_happened="0.2") for _ in range(10)]
    found = {
        line["data"]: line["covered"]
        for line in plan.left_out([*near, *far])
        if line["score"] == "ari"
    }
    assert found == {"mnist": True, "femnist": False}


def test_baselines_have_accuracy_alone_and_what_was_not_run_nothing() -> None:
    baseline = row(protocol="fedavg", ari="", ari_least="", ari_most="")
    assert [line["score"] for line in plan.judged([baseline])] == ["accuracy"]
    assert plan.judged([row(status="not run")]) == []


def test_images_of_the_sample_are_no_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from securecluster.data import Source
    from securecluster.data.pools import ArrayPool

    count = plan.PUBLIC_ROWS + 200
    x = np.arange(count, dtype=np.float32)[:, None]
    pool = ArrayPool(x, np.arange(count) % 2)
    made = Source("made", 2, (1,), pool, pool)
    monkeypatch.setitem(plan.SOURCES, "made", lambda: made)
    (images, _), private = plan.parted("made")
    assert len(images) == plan.PUBLIC_ROWS
    others = private.train.read(np.arange(200))
    assert not set(images.ravel()) & set(others.ravel())


def test_todays_simulations_take_the_place_of_those_of_then_and_runs_stay() -> None:
    own = row(number="1", seed="7", ari_happened="0.2")
    other = row(number="2", seed="8")
    again = row(number="1", seed="7", ari="0.3", ari_least="0.1", ari_happened="")
    # the number of a setting that was another one before a target chose options
    former = row(number="1", seed="1")
    found = plan.as_today([own, other, former], [again])
    assert (found[0]["ari"], found[0]["ari_least"], found[0]["ari_happened"]) == (
        "0.3",
        "0.1",
        "0.2",
    )
    assert found[1:] == [other, former]


def test_settings_change_where_images_are_lighter_or_defaults_others() -> None:
    cell = {
        "part": plan.HELD_OUT, "protocol": "srfca", "scenario": "rotation", "data": "mnist",
        "public": "digits",
    }  # fmt: skip
    assert not plan.changed(cell)
    assert plan.changed({**cell, "public": "femnist"})
    # negatives of known dark images are light, and so are photos: a rate of their own
    assert plan.changed({**cell, "scenario": "inversion"})
    assert plan.changed({**cell, "data": "cifar10", "public": plan.OWN})
    # signatures are centred on a known mean
    assert plan.changed({**cell, "protocol": "signature"})
    assert not plan.changed({**cell, "data": "letters", "public": plan.OWN})


def test_what_chance_reaches_needs_no_margin() -> None:
    lost = row(
        ari_least="0", ari_most="0", ari_happened="0.15", clients="8",
        power="clusters drowned, training drowned",
    )  # fmt: skip
    (line, _) = plan.judged([lost], by_chance=True)
    assert (line["group"], line["short_by"], line["covered"]) == ("lost", "0.000", True)
    assert float(plan.judged([lost])[0]["short_by"]) == 0.15
