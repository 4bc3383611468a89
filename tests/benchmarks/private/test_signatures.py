"""The benchmark of signatures: its noise, its clusters, and that it goes on where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.private import signatures
from securecluster.privacy.dp.accounting import gaussian_epsilon


def test_the_noise_costs_the_epsilon_of_its_row() -> None:
    for epsilon in (0.5, 8.0):
        z = signatures.noise_for(epsilon)
        assert gaussian_epsilon(1 / z, 1e-5) == pytest.approx(epsilon, rel=1e-6)


def test_one_of_four_clusters_is_small() -> None:
    assert np.bincount(signatures.truth_of(4)).tolist() == [3, 6, 6, 6]
    assert np.bincount(signatures.truth_of(1)).tolist() == [21]


def test_skewed_clients_have_other_shares_of_classes() -> None:
    labels = np.tile(np.arange(10), 100)
    draw = np.random.default_rng(0)
    picked = signatures.chosen(labels, 1.0, 300, draw)
    assert len(set(picked.tolist())) == 300
    counts = np.bincount(labels[picked], minlength=10)
    assert counts.max() > 3 * counts.min()
    assert signatures.chosen(labels, 0.0, 3, draw).tolist() == [0, 1, 2]


def test_a_run_that_was_cut_off_measures_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def measured(setting: Any, seed: int, draws: int) -> list[dict[str, Any]]:
        asked.append((setting, seed))
        if len(asked) == 5:
            raise KeyboardInterrupt
        row: dict[str, Any] = dict.fromkeys(signatures.COLUMNS, 0)
        return [{**row, **vars(setting), "seed": seed}]

    monkeypatch.setattr(signatures, "measured", measured)
    path = tmp_path / "signatures.csv"
    arguments = ["--seeds", "0", "--out", str(path)]
    with pytest.raises(KeyboardInterrupt):
        signatures.main(arguments)
    signatures.main(arguments)
    assert asked.pop(4) == asked[4]  # the one that was cut off is measured again
    assert len(asked) == len(set(asked)) == len(list(signatures.settings()))
    lines = path.read_text().splitlines()
    assert len(lines) == 2 + len(asked)
