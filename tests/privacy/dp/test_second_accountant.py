"""The second accountant that holds ledgers to dp-accounting, and, where that is installed, ledgers
of real runs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from securecluster import Federation
from securecluster.privacy.dp.accounting import gaussian_delta
from securecluster.protocols import CFL, FedAvg

HOME = Path(__file__).resolve().parents[3] / ".ci"
DELTA = 1e-5


def loaded(name: str) -> ModuleType:
    """Return a script of the continuous integration as a module."""
    spec = importlib.util.spec_from_file_location(name, HOME / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


second = loaded("second_accountant")


def event(
    mechanism: str, ids: tuple[int, ...], z: float | None = None, **more: Any
) -> dict[str, Any]:
    told = {"mechanism": mechanism, "ids": ids, "noise_multiplier": z}
    return {**told, "batch": None, "epochs": 1, "kept": False, **more}


def test_it_reads_events_by_itself() -> None:
    events = [
        event("gaussian", (0, 1), 2.0),
        event("gaussian", (0,), 2.0),
        event("free", (0, 1, 2)),
        event("dp-sgd", (1, 3), 1.5, batch=10, epochs=2, kept=True),
        event("dp-sgd", (2,), 1.5, batch=30, epochs=2),
    ]
    ledger = {"delta": DELTA, "samples": {"0": 25, "1": 25, "2": 25, "3": 25}, "events": events}
    expected = {((2.0, 1.0, 2),), ((1.5, 0.4, 6), (2.0, 1.0, 1)), ((1.5, 1.0, 2),)}
    assert second.histories(ledger) == expected, "client 3 released nothing"
    assert second.histories({**ledger, "events": [event("exact", (0,))]}) == {((0.0, 1.0, 1),)}
    shares = event("skellam", (0,), 1.0, sensitivities=[4.0, 9.0], variance=36.0)
    assert second.steps(shares, None) == [(1.5, 1.0, 1)]
    with pytest.raises(ValueError, match="no price for an event of 'laplace'"):
        second.steps(event("laplace", (0,), 1.0), 25)
    with pytest.raises(ValueError, match="with None samples"):
        second.steps(event("dp-sgd", (0,), 1.0), None)


def test_a_replaced_unit_has_other_histories_and_prices() -> None:
    events = [
        {**event("gaussian", (0,), 2.0), "replace": 2.0},
        {**event("gaussian", (0,), 2.0), "replace": 1.0},
        {**event("dp-sgd", (0,), 1.5, batch=10), "replace": 2.0},
    ]
    ledger = {"delta": DELTA, "samples": {"0": 20}, "events": events}
    # sampled steps keep their z: their mixtures are priced as they are
    assert second.histories(ledger, replaced=True) == {
        ((1.0, 1.0, 1), (1.5, 0.5, 2), (2.0, 1.0, 1))
    }
    # in batches of nearly all examples it is a Gaussian of twice the sensitivity
    known = 2 / 1.5
    for epsilon in (0.5, 2.0):
        delta = second.replaced_delta(1.5, 1 - 1e-12, epsilon)
        assert math.log(delta) == pytest.approx(gaussian_delta(epsilon, known), abs=1e-6)


def test_a_claim_that_is_too_low_or_far_too_high_is_named() -> None:
    assert second.verdict(5.0, 5.0) == second.verdict(4.999, 5.0) == second.verdict(5.1, 5.0) == ""
    assert second.verdict(math.inf, math.inf) == second.verdict(0.0, 0.0) == ""
    for pair in ((4.99, 5.0), (5.0, math.inf), (math.nan, 5.0)):
        assert second.verdict(*pair) == "TOO LOW"
    assert second.verdict(5.3, 5.0) == second.verdict(math.inf, 5.0) == "TOO HIGH"


def test_ledgers_of_real_runs_hold_against_it(small: Federation) -> None:
    pytest.importorskip("dp_accounting")
    for kind, own in ((FedAvg, {"dp_unit": "example"}), (CFL, {"dp_unit": "client"})):
        fitted = kind(rounds=2, epochs=1, clip=1.0, noise=1.2, **own).fit(small)  # type: ignore[arg-type]
        ledger = fitted.ledger_
        samples = {str(i): n for i, n in ledger.samples.items()}
        events = [dataclasses.asdict(one) for one in ledger.events]
        told = {"delta": DELTA, "samples": samples, "events": events}
        found = second.price(told)
        assert second.verdict(ledger.price(DELTA).epsilon, found) == ""
        replaced = ledger.price(DELTA, "replace").epsilon
        assert second.verdict(replaced, second.price(told, replaced=True)) == ""
        last = max(n for n, one in enumerate(told["events"]) if one["mechanism"] != "free")
        fewer = {**told, "events": told["events"][:last]}
        assert second.verdict(second.price(fewer), found) == "TOO LOW", (
            "a release that was forgotten is found"
        )
