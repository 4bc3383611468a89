"""The attack on label distributions: what it reads through a permutation, and that the numbers told
of it are those measured.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from benchmarks.leaks.label_attack import label_shares, observed_updates
from securecluster import Federation, Pathological
from securecluster.attacks.label_distributions import guess_shares, matched_correlation
from securecluster.parties.derived import initial_model
from securecluster.privacy.masking.masks import INFO, LABELS
from securecluster.protocols import FedAvg, Settings


@pytest.fixture(scope="module")
def federation() -> Federation:
    """Sixteen clients with two labels each."""
    return Federation.simulate("digits", scenario=Pathological(), clients=16, samples=60, seed=0)


def test_columns_that_move_alike_are_one_group() -> None:
    draw = np.random.default_rng(1)
    hidden = draw.normal(size=(12, 3))
    columns = hidden[:, np.repeat([0, 1, 2], 5)] * draw.uniform(1, 2, size=15)
    still = np.full((12, 60), 3.0)
    updates = np.concatenate([columns, still], axis=1)[:, draw.permutation(75)]
    assert matched_correlation(guess_shares(updates, groups=3), hidden) == pytest.approx(1)


def test_the_attack_reads_what_the_server_read(federation: Federation) -> None:
    """Without a mask its rows are clients' mean updates, whose weighted mean is the step of the
    model.
    """
    fitted = FedAvg(rounds=1, model="linear").fit(
        federation, Settings(transcript="full", threads=1)
    )
    sizes = np.array([len(shard.y) for shard in federation.shards])
    moved = fitted.client_models_.row(0) - initial_model(fitted, federation).initial()
    mean = (observed_updates(fitted) * sizes[:, None]).sum(0) / sizes.sum()
    assert np.allclose(mean, moved.numpy(), atol=1e-6)
    assert np.allclose(label_shares(federation).sum(1), 1)


def test_the_numbers_told_are_those_measured() -> None:
    lines = Path("benchmarks/results/label_attack.csv").read_text().splitlines()[1:]
    rows = list(csv.DictReader(lines))
    for mask, told in LABELS.items():
        for scenario, value in zip(("dirichlet 0.3", "two labels"), told, strict=True):
            own = [row for row in rows if (row["protection"], row["scenario"]) == (mask, scenario)]
            assert len(own) == 3
            assert np.mean([float(row["correlation"]) for row in own]) == pytest.approx(
                value, abs=0.005
            )
            assert all(0.25 < float(row["chance"]) < 0.35 for row in own)
        assert f"{told[0]} and {told[1]}" in INFO[mask].not_covered
