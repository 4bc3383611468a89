"""PACFL against scipy's angles, what every protocol must keep, and recovery of known clusters."""

from functools import partial

import numpy as np
import pytest
import torch
from pacfl import PACFL, angles
from scipy.linalg import subspace_angles

from securecluster import Federation, Rotation
from securecluster.protocols import conformance
from securecluster.protocols.authoring import UsageError

TWELVE = Federation.simulate("digits", scenario=Rotation(2), clients=12, samples=40, seed=1)
RUN = TWELVE.select(range(8))
NEWCOMERS = TWELVE.select(range(8, 12))
NOISE = {"clip": 1.0, "noise": 1.0, "gram_noise": 0.05, "dp_unit": "client"}

small = partial(PACFL, model="linear", epochs=1, rounds=2)


def bases(count: int, seed: int) -> torch.Tensor:
    """Return orthonormal rows (count, 3, 10)."""
    drawn = torch.from_numpy(np.random.default_rng(seed).normal(size=(count, 10, 3)))
    return torch.linalg.qr(drawn).Q.mT


def test_angles_are_those_of_scipy() -> None:
    ours, theirs = bases(4, seed=0), bases(5, seed=1)
    expected = [[np.degrees(subspace_angles(a.T, b.T).min()) for b in theirs] for a in ours]
    np.testing.assert_allclose(angles(ours, theirs, "smallest"), expected, rtol=1e-9)


def test_the_sum_adds_the_angles_of_paired_vectors() -> None:
    ours, theirs = bases(4, seed=0), bases(5, seed=1)
    expected = np.zeros((4, 5))
    for i, j, k in np.ndindex(4, 5, 3):
        expected[i, j] += np.degrees(subspace_angles(ours[i, k, :, None], theirs[j, k, :, None])[0])
    np.testing.assert_allclose(angles(ours, theirs, "sum"), expected, rtol=1e-9)
    np.testing.assert_allclose(angles(ours, -theirs, "sum"), expected, rtol=1e-9)


def test_vectors_of_noise_are_at_right_angles_to_everything() -> None:
    ours, nothing = bases(1, seed=0), torch.zeros(1, 3, 10)
    assert angles(ours, nothing, "smallest").item() == pytest.approx(90)
    assert angles(ours, nothing, "sum").item() == pytest.approx(270)


@pytest.mark.parametrize("cut", [{"k": 2}, {}, {"threshold": 8.5}], ids=str)
def test_the_two_kinds_are_found_under_a_mask(cut: dict[str, float]) -> None:
    fitted = small(mask="rotation", **cut).fit(RUN)
    assert fitted.agreement_ is not None and fitted.agreement_["exact"]


@pytest.mark.parametrize("linkage", ["average", "single", "complete"])
def test_newcomers_join_their_kind(linkage: str) -> None:
    fitted = small(k=2, linkage=linkage).fit(RUN)
    assert RUN.truth is not None and NEWCOMERS.truth is not None
    kinds = dict(zip(RUN.truth, fitted.labels_, strict=True))
    assert [*fitted.join(NEWCOMERS)] == [kinds[kind] for kind in NEWCOMERS.truth]


def test_sums_of_angles_cluster_too() -> None:
    fitted = small(angle="sum", threshold=0.0).fit(RUN)
    assert sorted(fitted.labels_) == [*range(8)]


@pytest.mark.exhaustive
def test_a_pacfl_run_keeps_what_every_protocol_must() -> None:
    make = partial(small, k=2)
    conformance.check(make, RUN, NEWCOMERS, masks=("none", "permutation")).require()


def test_noise_makes_epsilon_finite() -> None:
    exact = small(k=2).fit(RUN)
    noisy = small(k=2, **NOISE).fit(RUN)
    assert exact.ledger_.epsilon == np.inf
    assert noisy.ledger_.epsilon < np.inf


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"k": 2, "threshold": 20.0}, "threshold and k are two ways to cut; give one of them"),
        ({"threshold": -1.0}, "threshold"),
        ({"k": 9}, "k"),
        ({"angle": "largest"}, "angle"),
        ({"linkage": "ward"}, "linkage"),
    ],
    ids=str,
)
def test_cuts_that_cannot_work_are_refused(params: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        small(**params).fit(RUN)
