"""Plans of releases, and what goes beyond them."""

from __future__ import annotations

from typing import Any

import pytest

from securecluster.errors import TargetError
from securecluster.privacy.dp import target as targets
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.privacy.dp.ledger import Event, expense_of
from securecluster.privacy.dp.skellam_mechanism import least_release
from securecluster.privacy.dp.target import Plan, Target

DELTA = 1e-5


def gaussian(z: float, name: str = "delta", ids: tuple[int, ...] = (0,), **more: Any) -> Event:
    return Event("train", "gather", (name,), 1, ids, "gaussian", z, **more)


def training(z: float, kept: bool = False, **more: Any) -> Event:
    more = {"batch": 10, "epochs": 1, **more}
    return Event("train", "gather", (), 1, (0,), "dp-sgd", z, kept=kept, **more)


def summed(z: float, variance: float = 1.0) -> Event:
    least = least_release(z)
    sizes = (least.norm, least.magnitudes)
    return Event(
        "add", "sum", ("delta",), 1, (0,), "skellam", z,
        sensitivities=sizes, variance=variance * least.variance,
    )  # fmt: skip


def history(*events: Event, samples: int = 40) -> frozenset[Any]:
    counts: dict[Any, int] = {}
    for event in events:
        cost = expense_of(event, samples)
        counts[cost] = counts.get(cost, 0) + 1
    return frozenset(counts.items())


@pytest.mark.parametrize(
    ("plan", "events", "covered"),
    [
        # Gaussians compose into one, whatever their multipliers are
        (Plan(((1.0, 1.0, 4),)), [gaussian(1.0)] * 4, True),
        (Plan(((1.0, 1.0, 4),)), [gaussian(1.0)] * 5, False),
        (Plan(((1.0, 1.0, 4),)), [gaussian(0.5)], True),
        (Plan(((1.0, 1.0, 4),)), [gaussian(0.5), gaussian(9.0)], False),
        (Plan(((2.0, 1.0, 4), (1.0, 1.0, 3))), [gaussian(1.0)] * 4, True),
        (Plan(()), [], True),
        (Plan(()), [gaussian(1.0)], False),
        # 40 samples in batches of 10: four steps at q = 1/4
        (Plan(((1.0, 0.25, 8),)), [training(1.0)] * 2, True),
        (Plan(((1.0, 0.25, 7),)), [training(1.0)] * 2, False),
        (Plan(((1.0, 0.25, 8),)), [training(0.9)], False),
        (Plan(((1.0, 0.25, 8),)), [training(1.0, batch=20)], False),
        (Plan(((1.0, 0.25, 8),)), [training(1.0), gaussian(9.0)], False),
        (Plan(((1.0, 1.0, 1),)), [training(1.0, batch=None)], True),
        # batches that may be those of an earlier training count as known ones
        (Plan(((1.0, 0.25, 8),)), [training(1.0), training(1.0, again=True)], False),
        (Plan((), ((1.0, 2),)), [summed(1.0)] * 2, True),
        (Plan((), ((1.0, 2),)), [summed(1.0)] * 3, False),
        (Plan((), ((1.0, 2),)), [summed(1.0, variance=0.99)], False),
        (Plan((), ((1.0, 2),)), [summed(2.0)], False),
        (Plan((), ((1.0, 1), (1.0, 1))), [summed(1.0)] * 2, True),
        # a sum that was planned may be a Gaussian of no less noise
        (Plan((), ((1.0, 2),)), [summed(1.0), gaussian(1.0)], True),
        (Plan((), ((1.0, 2),)), [summed(1.0), gaussian(0.9)], False),
        (Plan((), ((1.0, 2),)), [summed(1.0)] * 2 + [gaussian(9.0)], False),
    ],
)
def test_a_plan_covers_what_costs_no_more(plan: Plan, events: list[Event], covered: bool) -> None:
    assert plan.covers(history(*events)) == covered


def target(*steps: tuple[float, float, int], epsilon: float = 8.0, **samples: Any) -> Target:
    return Target(epsilon, DELTA, lambda n: Plan(tuple(steps)), **samples)


def test_beyond_the_plan_the_price_decides() -> None:
    """One release at z = 1 costs 4.38, two 6.6, three 8.6 (Balle and Wang 2018)."""
    beyond = target((1.0, 1.0, 1))
    for _ in range(2):
        beyond.admit([gaussian(1.0)])
    assert gaussian_epsilon(2**0.5, DELTA) < 8 < gaussian_epsilon(3**0.5, DELTA)
    with pytest.raises(
        TargetError, match=r"train\.delta would bring .*: with this one, train\.delta 3,"
    ):
        beyond.admit([gaussian(1.0)])
    # what was refused is not counted
    beyond.admit([gaussian(9.0)])


def test_clients_are_counted_one_by_one_and_refused_together() -> None:
    planned = target((1.0, 1.0, 3))
    for _ in range(3):
        planned.admit([gaussian(1.0, ids=(0, 1))])
    with pytest.raises(TargetError, match="client 1 to epsilon"):
        planned.admit([gaussian(1.0, ids=(2, 1))])
    for _ in range(3):
        planned.admit([gaussian(1.0, ids=(2,))])
    with pytest.raises(TargetError, match="client 2 to epsilon"):
        planned.admit([gaussian(1.0, ids=(2,))])


def test_a_plan_depends_on_the_number_of_samples() -> None:
    asked = []

    def plan(samples: int | None) -> Plan:
        asked.append(samples)
        return Plan(((1.0, 0.25, 4), (1.0, 0.5, 2)))

    mixed = Target(8.0, DELTA, plan, {0: 40, 1: 20})
    mixed.admit([Event("train", "sum", (), 1, (0, 1), "dp-sgd", 1.0, batch=10)])
    assert asked == [40, 20]


def test_training_that_was_kept_counts_once_anything_leaves() -> None:
    kept = target((1.0, 0.25, 4), epsilon=1.5, samples={0: 40})
    for _ in range(9):
        kept.admit([training(1.0, kept=True)])
    free = Event("send", "gather", ("model",), 1, (0,), "free")
    with pytest.raises(TargetError, match=r"send\.model would bring .*train \(training\) 9,"):
        kept.admit([free])


def test_an_exact_field_is_refused_whatever_was_planned() -> None:
    exact = Event("tell", "gather", ("mean",), 1, (0,))
    with pytest.raises(TargetError, match=r"tell\.mean would leave client 0 without noise"):
        target((1e-9, 1.0, 9)).admit([exact])


def test_what_a_resumed_run_has_released_is_counted_and_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resumed = target((1.0, 1.0, 2))
    resumed.learn([gaussian(1.0)] * 5)
    with pytest.raises(TargetError, match=r": with this one, train\.delta 6,"):
        resumed.admit([gaussian(1.0)])
    within = target((1.0, 1.0, 2))
    within.learn([gaussian(1.0)])
    monkeypatch.delattr(targets, "joint_price")  # no accountant is asked
    within.admit([gaussian(1.0)])
