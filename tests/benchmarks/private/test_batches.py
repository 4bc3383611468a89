"""Batch sizes of DP-SGD: which learning rates are compared, and how leads are taken."""

from __future__ import annotations

import pytest

from benchmarks.private import batches


def row(batch: str, seed: int, accuracy: float, lr: str = "0.2") -> dict[str, str]:
    return {
        "setting": "digits",
        "protocol": "fedavg",
        "epsilon": "4",
        "batch": batch,
        "lr": lr,
        "seed": str(seed),
        "accuracy": str(accuracy),
        "ari": "1",
        "processor": "2",
        "status": "done",
    }


def test_both_batches_have_as_many_rates_around_that_of_their_size() -> None:
    rates = [batches.rates_of(size) for size in (20, 80)]
    assert rates == [[0.1, 0.2, 0.4], [0.4, 0.8, 1.6]]
    tried = [cell for cell in batches.tuning_cells() if cell["setting"] == "digits"]
    assert len(tried) == len({tuple(cell.values()) for cell in tried}) == 3 * 3 * 3


def test_rates_are_those_of_the_seed_for_it_and_no_seed_is_used_twice() -> None:
    tuned = [row("20", 0, 0.5, "0.1"), row("20", 0, 0.6, "0.2"), row("quarter", 0, 0.4, "0.4")]
    chosen = batches.plans(tuned)
    usual, larger = (("digits", "fedavg", batch) for batch in batches.COMPARED)
    assert chosen["tuned"] == {usual: 0.2, larger: 0.4}
    rates = [chosen[way][larger] for way in ("root", "ratio", "half")]
    assert rates == [0.272, 0.37, 0.185]
    assert {chosen[way][usual] for way in chosen} == {0.2}
    cells = batches.cells(chosen, 2)
    assert len(cells) == len({tuple(cell.values()) for cell in cells})
    assert batches.TUNING_SEED not in {cell["seed"] for cell in cells}


def test_leads_are_of_pairs_of_one_federation() -> None:
    # the second federation has no run with the usual batch, so it tells nothing
    rows = [row("20", 1, 0.5), row("quarter", 1, 0.6, "0.4"), row("quarter", 2, 0.9, "0.4")]
    (line,) = batches.compared(rows, {"tuned": batches.plans(rows)["tuned"]})
    assert (line["lead"], line["better"], line["seeds"]) == ("0.1000", 1, 1)
    assert float(line["accuracy_larger"]) == pytest.approx(0.6)
