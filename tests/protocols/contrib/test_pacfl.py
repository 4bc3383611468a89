"""PACFL: angles against scipy, subspaces against numpy, the price of its matrices, recovery."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from cases import serve, two_clusters
from scipy.linalg import subspace_angles

from securecluster import Federation, Rotation
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.protocols import PACFL
from securecluster.protocols.authoring import UsageError
from securecluster.protocols.common.comparison.gram_mechanism import REPLACE, gram
from securecluster.protocols.contrib.pacfl import angles

TWELVE = Federation.simulate("digits", scenario=Rotation(2), clients=12, samples=40, seed=1)
RUN = TWELVE.select(range(8))
NEWCOMERS = TWELVE.select(range(8, 12))


def made(**params: Any) -> PACFL:
    """Return a small protocol with two clusters."""
    return PACFL(**{"k": 2, "rounds": 1, "epochs": 1, "model": "linear", **params})


def bases(count: int, seed: int) -> torch.Tensor:
    """Return orthonormal rows (count, 3, 10)."""
    drawn = torch.from_numpy(np.random.default_rng(seed).normal(size=(count, 10, 3)))
    return torch.linalg.qr(drawn).Q.mT


def test_the_smallest_principal_angle_is_that_of_scipy() -> None:
    ours, theirs = bases(4, seed=0), bases(5, seed=1)
    expected = [[np.degrees(subspace_angles(a.T, b.T).min()) for b in theirs] for a in ours]
    np.testing.assert_allclose(angles(ours, theirs, "smallest"), expected, rtol=1e-9)


def test_vectors_of_several_classes_need_not_be_orthogonal() -> None:
    # two bases side by side span a space of six dimensions, in which they lie askew
    ours = torch.cat([bases(3, seed=0), bases(3, seed=1)], 1)[:, :4]
    theirs = torch.cat([bases(3, seed=2), bases(3, seed=3)], 1)[:, :4]
    expected = [[np.degrees(subspace_angles(a.T, b.T).min()) for b in theirs] for a in ours]
    np.testing.assert_allclose(angles(ours, theirs, "smallest"), expected, rtol=1e-9)


def test_the_sum_adds_the_angles_of_paired_vectors() -> None:
    ours, theirs = bases(4, seed=0), bases(5, seed=1)
    expected = np.zeros((4, 5))
    for i, j, k in np.ndindex(4, 5, 3):
        expected[i, j] += np.degrees(subspace_angles(ours[i, k, :, None], theirs[j, k, :, None])[0])
    np.testing.assert_allclose(angles(ours, theirs, "sum"), expected, rtol=1e-9)
    np.testing.assert_allclose(angles(ours, -theirs, "sum"), expected, rtol=1e-9)


def test_the_angle_of_vectors_is_the_smallest_of_all_pairs() -> None:
    ours, theirs = bases(2, seed=0), bases(3, seed=1)
    expected = np.full((2, 3), 90.0)
    for i, j, k, other in np.ndindex(2, 3, 3, 3):
        pair = subspace_angles(ours[i, k, :, None], theirs[j, other, :, None])
        expected[i, j] = min(expected[i, j], np.degrees(pair[0]))
    np.testing.assert_allclose(angles(ours, theirs, "vectors"), expected, rtol=1e-9)


@pytest.mark.parametrize(("kind", "right"), [("smallest", 90), ("vectors", 90), ("sum", 270)])
def test_vectors_of_noise_are_at_right_angles_to_everything(kind: str, right: float) -> None:
    nothing = torch.zeros(1, 3, 10)
    assert angles(bases(1, seed=0), nothing, kind).item() == pytest.approx(right)


def test_clients_send_singular_vectors_of_each_class() -> None:
    served = serve(made(mask="none", vectors=2), RUN)
    received = served.state.signatures.rows.numpy()
    assert received.shape == (8, 10 * 2, 64)
    for rows, shard in zip(received, RUN.shards, strict=True):
        for label in range(10):
            samples = shard.x[shard.y == label].reshape(-1, 64).astype(np.float64)
            own = rows[2 * label : 2 * label + 2]
            left = np.linalg.svd(samples.T, full_matrices=False)[0]
            count = min(2, len(samples))
            cosines = np.abs(np.sum(own[:count] * left[:, :count].T, axis=1))
            np.testing.assert_allclose(cosines, 1, atol=1e-9)
            assert not own[count:].any()


def test_all_samples_have_one_subspace_as_in_algorithm_1() -> None:
    served = serve(made(mask="none", subspaces="samples"), RUN)
    received = served.state.signatures.rows.numpy()
    for rows, shard in zip(received, RUN.shards, strict=True):
        samples = shard.x.reshape(-1, 64).astype(np.float64)
        left = np.linalg.svd(samples.T, full_matrices=False)[0]
        # of the three largest singular values, which are well apart
        np.testing.assert_allclose(subspace_angles(rows.T, left[:, :3]), 0, atol=1e-6)


# The spans of ten classes meet in so small images, and the order of the vectors of all samples is
# hardly determined: these two are no way to find clusters of digits.
WAYS = [("classes", "sum"), ("classes", "vectors"), ("samples", "smallest"), ("samples", "vectors")]


@pytest.mark.parametrize(("subspaces", "angle"), WAYS)
def test_turned_images_are_found_under_a_mask(subspaces: str, angle: str) -> None:
    fitted = made(mask="rotation", subspaces=subspaces, angle=angle).fit(RUN)
    assert fitted.agreement_["exact"]


def test_sums_of_classes_see_swapped_labels() -> None:
    federation = two_clusters(8, 60)
    assert made().fit(federation).agreement_["exact"]
    # without classes, samples of both kinds of client are the same
    assert not made(subspaces="samples").fit(federation).agreement_["exact"]


@pytest.mark.parametrize("linkage", ["average", "single", "complete"])
def test_newcomers_join_their_kind(linkage: str) -> None:
    fitted = made(linkage=linkage).fit(RUN)
    kinds = dict(zip(RUN.truth, fitted.labels_, strict=True))
    assert [*fitted.join(NEWCOMERS)] == [kinds[kind] for kind in NEWCOMERS.truth]


@pytest.mark.parametrize(
    "cut", [{"k": None, "threshold": 2000.0}, {"k": None, "threshold": 0.0}], ids=str
)
def test_a_threshold_cuts_between_one_cluster_and_clients_alone(cut: dict[str, Any]) -> None:
    labels = made(**cut).fit(RUN).labels_
    if cut["threshold"]:
        # 30 pairs of vectors are at most 90° apart each, so less than 2,700° in all
        assert len(set(labels)) == 1
    else:
        assert sorted(labels) == [*range(8)]


def together(parts: list[torch.Tensor], divisor: float = 1.0) -> torch.Tensor:
    """Return the exact Gram matrices of parts of a client's samples, in one tensor."""
    return torch.stack([gram(part) for part in parts]) / divisor


def test_matrices_of_classes_together_move_no_further_than_one() -> None:
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(5, 8, generator=draw) for _ in range(3)]
    sample = torch.randn(1, 8, generator=draw)
    base = together(parts)
    added = together([torch.cat([parts[0], sample]), *parts[1:]])
    assert float((added - base).norm()) <= 1 + 1e-9
    # the first sample becomes another one, of another class
    moved = together([parts[0][1:], torch.cat([parts[1], sample]), parts[2]])
    distance = float((moved - base).norm())
    assert distance <= REPLACE + 1e-9
    assert distance > 1.2  # the bound is nearly reached: samples of norm above 1 are clipped to it
    # one client's matrices against none, and against another client's
    assert float((base / 15).norm()) <= 1
    other = [torch.randn(5, 8, generator=draw) for _ in range(3)]
    assert float((base / 15 - together(other, 15)).norm()) <= REPLACE


@pytest.mark.parametrize("unit", ["example", "client"])
def test_matrices_of_classes_have_the_noise_that_is_priced(unit: str) -> None:
    z = 0.01  # small beside the matrices, whose scale shows, too
    params = {"mask": "none", "gram_noise": z, "dp_unit": unit, "vectors": 1}
    served = serve(made(**params), RUN)
    client = served.endpoint.client
    context = served.endpoint.context([0], 0, 1, "eigen")
    features = client._features(0)
    labels = client.cohort.labels(0)
    parts = [features[labels == c] for c in range(10)]
    noisy = client._noise.matrices(parts, context)
    divisor = len(features) if unit == "client" else 1
    noise = noisy - together(parts, divisor)
    diagonals = noise.diagonal(dim1=1, dim2=2)
    # 640 draws on the diagonals and 20,160 above them
    assert float(diagonals.std()) == pytest.approx(z, rel=0.12)
    upper = noise[:, *torch.triu_indices(64, 64, 1)]
    assert float(upper.std()) == pytest.approx(z / math.sqrt(2), rel=0.03)


def test_matrices_and_training_together_reach_the_target() -> None:
    target = 8.0
    fitted = made(clip=1.0, target_epsilon=target).fit(RUN)
    config = fitted.kept_.learned.config
    assert config["gram_noise"] == config["noise"] > 0
    price = fitted.ledger_.price(1e-5).epsilon
    assert 0.9 * target < price <= target
    # one release of the matrices alone costs what the Gaussian mechanism costs
    alone = gaussian_epsilon(REPLACE / config["gram_noise"], 1e-5)
    assert alone < price


def test_noise_of_matrices_alone_prices_the_clustering() -> None:
    fitted = made(gram_noise=1.0, clip=1.0, noise=1.0).fit(RUN)
    fields = {field for event in fitted.ledger_.events for field in event.fields}
    assert "vectors" in fields
    assert fitted.ledger_.price(1e-5).epsilon < math.inf
    assert made().fit(RUN).ledger_.price(1e-5).epsilon == math.inf


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"k": 2, "threshold": 20.0}, "threshold and k are two ways to cut: give one of them"),
        ({"k": None, "threshold": -1.0}, "threshold"),
        ({"k": 9}, "k"),
        ({"angle": "largest"}, "angle"),
        ({"subspaces": "labels"}, "subspaces"),
        ({"linkage": "ward"}, "linkage"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(params: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        made(**params).fit(RUN)


def test_the_server_is_said_to_see_which_classes_a_client_has() -> None:
    sentence = "which classes each client has samples of"
    exact = made(subspaces="classes").disclosures().server
    assert sentence in exact
    noisy = made(subspaces="classes", gram_noise=1.0, dp_unit="client").disclosures().server
    assert f"{sentence}, as far as the noise shows it" in noisy
    assert not any(sentence in line for line in made(subspaces="samples").disclosures().server)
