"""The comparison with the field: noise, federations, choice of settings, and what needs which ε."""

from __future__ import annotations

import csv
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import table
from benchmarks.grid import as_told
from benchmarks.private import field
from securecluster import Federation
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.privacy.dp.ledger import COSTLESS


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> Federation:
    """Return the federation of the comparison, with few samples of another data set."""
    monkeypatch.setattr(field, "DATA", "digits")
    field.clients_of.cache_clear()
    federation = field.clients_of("swap", 24, 0)
    field.clients_of.cache_clear()
    return federation


@pytest.mark.parametrize("share", [0.2, 0.6])
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_clustering_and_training_cost_the_total(epsilon: float, share: float) -> None:
    clustering, training = field.noises_for(epsilon, share, 20)
    total = math.sqrt(1 / clustering**2 + 20 / training**2)
    assert gaussian_epsilon(total, field.DELTA) == pytest.approx(epsilon, rel=2e-3)
    assert gaussian_epsilon(total, field.DELTA) <= epsilon
    assert (1 / clustering**2) / total**2 == pytest.approx(share)


def test_one_of_four_clusters_is_small(digits: Federation) -> None:
    assert digits.truth is not None
    assert sorted(Counter(digits.truth).values()) == [3, 6, 6, 6]
    assert Counter(digits.truth)[0] == 3


VARIANTS = [(name, n) for name, method in field.METHODS.items() for n in range(len(method.own))]


@pytest.mark.parametrize(("method", "own"), VARIANTS)
def test_every_method_runs_within_its_budget(method: str, own: int, digits: Federation) -> None:
    options = {**field.options_of(method, 4.0, 0.5, own), "epochs": 1, "batch_size": 1000}
    # of fewer rounds than the noise is for
    options["rounds"] = 1 + options.get("tune_rounds", 0)
    found = field.outcome(digits, method, options)
    assert 0 < found["epsilon"] <= 4.0
    assert found["releases"] >= 1
    assert 0 <= found["accuracy"] <= 1


def rows_of(values: dict[tuple[float, int], list[float]]) -> list[dict[str, str]]:
    rows = []
    for (rate, own), accuracies in values.items():
        for accuracy in accuracies:
            row = {
                "method": "signature", "target": "1", "lr": str(rate), "own": str(own),
                "status": "done", "accuracy": str(accuracy),
            }  # fmt: skip
            rows.append(row)
    return rows


def test_the_setting_of_the_largest_mean_accuracy_is_chosen() -> None:
    values = {
        (0.5, 0): [0.5, 0.5, 0.6, 0.6],
        (1.0, 1): [0.9, 0.1, 0.9, 0.4],
        (2.0, 0): [1.0, 1.0, 1.0],  # not run on all seeds and shifts
        (2.0, 1): [0.2, 0.2, 0.3, 0.3],
    }
    assert field.chosen(rows_of(values)) == {("signature", 1.0): (1.0, 1)}


def test_the_needed_epsilon_is_the_smallest_from_which_all_suffice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    scores = {
        ("signature", "swap"): (0.95, 0.8, 0.9, 1.0),
        ("signature", "rotation"): (0.9, 0.9, 0.9, 0.9),
        ("ifca", "swap"): (0.0, 0.1, 0.2, 0.89),
    }
    rows: list[Any] = []
    for (method, shift), levels in scores.items():
        for epsilon, ari in zip(field.EPSILONS, levels, strict=True):
            row = {
                "setting": "field", "status": "done", "method": method, "shift": shift,
                "target": str(epsilon), "ari": str(ari),
            }  # fmt: skip
            rows.append(row)
    path = field.write_needed(rows)
    lines = path.read_text().splitlines()[1:]
    needed = {(row["method"], row["shift"]): row["needed"] for row in csv.DictReader(lines)}
    assert needed["signature", "swap"] == "4"
    assert needed["signature", "rotation"] == "1"
    assert needed["ifca", "swap"] == "above 8"
    assert ("fedavg", "swap") not in needed


def test_every_cell_stands_once() -> None:
    for grid in (field.cells(30), field.tuning_cells()):
        keys = [tuple(cell.values()) for cell in grid]
        assert len(keys) == len(set(keys))


# the methods of clients whose replies clusters follow from
CLUSTERING = {
    "cflgp": "send_gradient",
    "clove": "measure",
    "flux": "describe",
    "ifca": "choose",
    "rdpcfl": "send_first_update",
}


@pytest.mark.parametrize("share", [0.2, 0.6])
@pytest.mark.parametrize("method", CLUSTERING)
def test_clustering_gets_its_share_of_the_price(
    method: str, share: float, digits: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = field.METHODS[method]
    own = {**described.own[0], "rounds": 4, "share": share}
    if method == "cflgp":
        own |= {"cluster_rounds": 3}
    if method == "clove":
        # clusters that are never stable, so that losses are released in all rounds but the last
        own |= {"cluster_rounds": 3}
        described = replace(described, fixed={**described.fixed, "stable_rounds": 9})
    monkeypatch.setitem(field.METHODS, method, replace(described, own=(own,)))
    options = {**field.options_of(method, 4.0, 0.5, 0), "batch_size": 1000}
    if method == "rdpcfl":
        # choices cost next to nothing, so that the two parts are all there is
        options["selection_noise"] = 1e4
    fitted = as_told(described.protocol, options).fit(digits)

    # of a client that took part in every call: some miss one, as of a cluster that is not trained
    costly = [event for event in fitted.ledger_.events if event.mechanism not in COSTLESS]
    (client, _), *_ = Counter(i for event in costly for i in event.ids).most_common()
    prices = {True: 0.0, False: 0.0}
    for event in costly:
        if client in event.ids:
            clusters = event.method == CLUSTERING[method]
            prices[clusters] += event.epochs / event.noise_multiplier**2
    assert prices[True] / sum(prices.values()) == pytest.approx(share, rel=0.01)
