"""What a sweep's runs cost together, against closed forms of Gaussians."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from securecluster import sweep
from securecluster.cli.main import main
from securecluster.privacy.dp.ledger import Event, Expense, Ledger
from securecluster.studies import sweep_costs
from securecluster.studies import sweep_figures as plots

DELTA = 1e-5


def gaussian(precision: float) -> float:
    """Return ε at DELTA of Gaussian releases with Σ 1/z² = precision (Balle & Wang 2018)."""
    mu = math.sqrt(precision)

    def excess(epsilon: float) -> float:
        first = norm.cdf(mu / 2 - epsilon / mu)
        return float(first - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - DELTA)

    return float(brentq(excess, 0, 200, xtol=1e-12))


def released(*multipliers: float) -> Ledger:
    """Return a ledger of two clients, of which the second released but once."""
    events = [
        Event("m", "gather", ("f",), k, (0, 1) if not k else (0,), "gaussian", z)
        for k, z in enumerate(multipliers)
    ]
    return Ledger(events, names={0: "a", 1: "b"})


def row(run: int, ledger: Ledger, **values: Any) -> dict[str, Any]:
    """Return the row of a run that has ended."""
    price = ledger.price(DELTA)
    spent = sweep_costs.as_json(ledger.costliest(DELTA))
    described = {"run": run, "dp_unit": "client", "status": "done", "delta": DELTA}
    return {**described, "epsilon": price.epsilon, "spent": spent, **values}


def test_runs_cost_what_one_run_of_all_their_releases_would() -> None:
    rows = [row(0, released(2.0, 3.0)), row(1, released(2.0, 3.0)), row(2, released(5.0))]
    (total,) = sweep_costs.totals(rows)
    assert total.epsilon == pytest.approx(gaussian(2 * (1 / 4 + 1 / 9) + 1 / 25), rel=1e-8)
    assert (total.runs, total.private, total.epsilon_private) == (3, 3, total.epsilon)
    assert f"{total.epsilon:.4g} at δ = 1e-05 (3 runs)" in sweep_costs.sentences(rows, "ari")[0]


def test_a_person_is_the_dearest_client_of_every_run() -> None:
    """A seed may deal the sample of one client to another one."""
    first, second = released(2.0, 3.0), released(2.0, 3.0)
    # in the other run the second client is the dearest
    second.names = {0: "b", 1: "a"}
    (total,) = sweep_costs.totals([row(0, first), row(1, second)])
    by_names = Ledger.union(first, second).price(DELTA).epsilon
    assert total.epsilon == pytest.approx(gaussian(2 * (1 / 4 + 1 / 9)), rel=1e-8)
    assert total.epsilon is not None and total.epsilon > by_names


def test_one_run_without_noise_makes_all_of_them_infinite_in_words() -> None:
    exact = Ledger([Event("m", "gather", ("f",), 0, (0,))], names={0: "a"})
    rows = [row(0, released(2.0)), row(1, exact), row(2, released(2.0)), row(3, Ledger())]
    (total,) = sweep_costs.totals(rows)
    assert (total.epsilon, total.runs, total.private) == (math.inf, 4, 3)
    text = sweep_costs.sentences(rows, "accuracy")[0]
    assert "infinite, since 1 run released something without noise" in text
    assert f"without these, {gaussian(2 / 4):.4g} at δ = 1e-05 (3 runs)" in text


def test_what_failed_or_is_of_another_unit_or_version_is_said() -> None:
    rows = [
        row(0, released(2.0)),
        row(1, released(2.0), dp_unit="example"),
        {"run": 2, "dp_unit": "client", "status": "failed", "delta": DELTA},
        row(3, released(2.0), dp_unit="example", spent=None),
    ]
    of_clients, of_examples = sweep_costs.totals(rows)
    assert (of_clients.failed, of_clients.epsilon) == ((2,), pytest.approx(gaussian(1 / 4)))
    assert of_examples.epsilon is None, "a record of an earlier version has no releases"
    text = "\n".join(sweep_costs.sentences(rows, "accuracy"))
    assert "what was released before it failed: run 2" in text
    assert "do not add up" in text and "do not say what they released" in text
    assert "worst_accuracy is one client's number" in text


def test_training_is_written_and_read_with_the_samples_of_its_client() -> None:
    training = Event("t", "sum", (), 1, (0,), "dp-sgd", 1.1, batch=5, epochs=10)
    ledger = Ledger([training, training], {0: 100}, {0: "a"})
    entries = json.loads(json.dumps(sweep_costs.as_json(ledger.costliest(DELTA))))
    assert entries[0]["times"] == 2 and entries[0]["samples"] == 100
    assert sweep_costs.history_of(entries) == ledger.costliest(DELTA)
    (total,) = sweep_costs.totals([row(0, ledger)])
    assert total.epsilon == ledger.price(DELTA).epsilon


def test_a_step_over_all_samples_is_written_and_read() -> None:
    (run,) = sweep(
        ["rdpcfl"], epsilon=[8], seeds=1, clients=4, clusters=2, samples=40, rounds=4,
        model="linear", clip=1.0, dp_unit="example",
    ).to_dict("records")  # fmt: skip
    assert run["status"] == "done"
    assert 0 < run["epsilon"] <= 8


GAUSSIAN = Expense("gaussian", 2.0, 2.0, None, 1, None, False, (), 0.0)
(POSSIBLE,) = sweep_costs.as_json(frozenset({(GAUSSIAN, 3)}))


@pytest.mark.parametrize(
    "values",
    [
        {"times": 0},
        {"times": 10**400},
        {"times": 1.5},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": 1e-300},
        {"noise_multiplier": math.nan},
        {"mechanism": "magic"},
        {"mechanism": "dp-sgd"},
        {"mechanism": "skellam"},
        {"mechanism": "dp-sgd", "samples": -1},
        {"batch": 0},
        {"replace": 0.5},
        {"other": 1},
    ],
)
def test_what_no_run_spends_is_refused(values: dict[str, Any]) -> None:
    assert sweep_costs.history_of([POSSIBLE])
    with pytest.raises(ValueError, match=r".+"):
        sweep_costs.history_of([{**POSSIBLE, **values}])


def test_a_sweep_says_what_its_runs_cost_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "draw", lambda *_: [])
    dealt = ["--clients", "6", "--clusters", "2", "--samples", "40", "--model", "linear"]
    shared = ["--clip", "1", "--rounds", "3", "--seeds", "3", "--jobs", "1"]
    shared += ["--aggregation", "plain"]  # sums of shares of noise cost a little more
    out = tmp_path / "out"
    levels = ["--epsilon", "1", "2", "4", "8"]
    assert main(["sweep", "fedavg", *dealt, *shared, *levels, "--out", str(out)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    lines = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    together = gaussian(sum(3 / line["noise"] ** 2 for line in lines))
    assert 19.9 < together < 20.0 and f"{together:.4g} at δ = 1e-05 (12 runs)" in said
    assert "worst_accuracy is one client's number" in said
    header, *rows = [line.split(",") for line in (out / "runs.csv").read_text().splitlines()]
    column = header.index("epsilon_together")
    (written,) = {float(cells[column]) for cells in rows}
    assert written == pytest.approx(together, rel=1e-6)
    assert f"{together:.4g} at δ" in (out / "privacy.txt").read_text()
    # what was recorded is enough: nothing is run again
    assert main(["resume", str(out)]) == 0
    assert f"{together:.4g} at δ = 1e-05 (12 runs)" in " ".join(capsys.readouterr().out.split())
