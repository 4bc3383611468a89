"""The estimate of the primal attack beside published limits, and the parameters of runs."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.leaks import lattice
from securecluster.protections.encryption.parameters import MOST_BITS, Parameters


@pytest.mark.parametrize(
    ("degree", "most"), [(1024, 26), (2048, 53), (4096, 107), (8192, 214), (16384, 431)]
)
def test_the_largest_modulus_at_128_bits_is_the_published_one(degree: int, most: int) -> None:
    """What the authors of the guidelines found with the lattice estimator, to within two bits."""
    assert lattice.primal(degree, most - 2)[1] >= 128
    assert lattice.primal(degree, most + 2)[1] < 128


def test_the_parameters_of_runs_are_within_the_guidelines() -> None:
    assert {degree: MOST_BITS[degree] for degree in (4096, 8192)} == {4096: 106, 8192: 214}
    parameters = Parameters()
    bits = sum(parameters.moduli)
    assert bits <= MOST_BITS[parameters.degree]
    assert lattice.primal(parameters.degree, bits)[1] >= 192
    # of the standard of 2018, which the guidelines lowered
    assert lattice.primal(4096, 109)[1] < 128


def test_the_tables_are_of_these_parameters() -> None:
    results = Path(lattice.__file__).parents[1] / "results"
    for name, lines in (("lattice", lattice.lines()), ("flooding", lattice.flooding_lines())):
        with (results / f"{name}.csv").open() as stream:
            kept = list(csv.DictReader(line for line in stream if not line.startswith("#")))
        assert kept == [{key: str(value) for key, value in row.items()} for row in lines]
