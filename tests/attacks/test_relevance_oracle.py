"""A server that sends crafted eigenvectors reads clients' Gram matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attacked import FULL, digits, samples_of, scene

from securecluster import Dirichlet, Federation, Pathological
from securecluster.attacks.relevance_oracle import EnergyError, RelevanceOracle, energies_of
from securecluster.attacks.scoring import Score, evaluate, score
from securecluster.errors import SecureClusterError
from securecluster.parties.endpoints import build_client
from securecluster.protocols import OneShot

SMALL: dict[str, Any] = {"rounds": 1, "epochs": 1, "model": "linear", "tasks": 2}
OPEN: dict[str, Any] = {"mask": "none", "sealed": False}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return digits(scenario=Pathological(), clients=10, samples=8)


def attacked(federation: Federation, **params: Any) -> tuple[Any, Any, Any, Any]:
    protocol = OneShot(**{**SMALL, **params})
    other = digits(scenario=Dirichlet(alpha=100.0), clients=6, samples=8, seed=9)
    fitted = protocol.fit(federation, FULL)
    endpoint = build_client(protocol, federation, FULL)
    return endpoint, *scene(fitted, federation, samples_of(federation, other))


def gram_of(federation: Federation, client: int) -> np.ndarray[Any, Any]:
    rows = np.asarray(federation.shards[client].x, float).reshape(8, -1)
    gram: np.ndarray[Any, Any] = rows.T @ rows / 8
    return gram


@pytest.mark.always
def test_crafted_vectors_read_every_energy_and_record(federation: Federation) -> None:
    endpoint, view, knowledge, truth = attacked(federation, **OPEN)
    # two clients stand for all: the questions are the same
    endpoint.ids = endpoint.ids[:2]
    attack = RelevanceOracle(endpoint)
    assert attack.applies(view, knowledge) is None
    guess = attack.run(view, knowledge)
    membership = score(attack.scorer, guess, truth)
    assert membership.value > 0.95 and abs(membership.chance - 0.5) < 0.05
    error = score(EnergyError(), guess, truth)
    assert error.value < 1e-4 and error.beats_chance
    assert error.chance > 0.05
    gram = gram_of(federation, 1)
    expected = gram @ gram / np.linalg.norm(gram, 2) ** 2
    assert np.allclose(guess.details["squared_grams"][1], expected, atol=1e-5)


def test_noisy_gram_matrices_answer_with_their_noise(federation: Federation) -> None:
    endpoint, _, knowledge, _ = attacked(federation, **OPEN, gram_noise=20.0)
    gram = gram_of(federation, 0)
    exact = gram @ gram / np.linalg.norm(gram, 2) ** 2
    read = energies_of(endpoint, knowledge, 0, np.eye(64)[:9]) ** 2
    assert np.linalg.norm(read - np.diag(exact)[:9]) > np.linalg.norm(np.diag(exact)[:9])


def test_the_attack_needs_what_the_server_lacks_under_a_seal_or_a_mask(
    federation: Federation,
) -> None:
    for params, reason in (
        ({}, "sealed under their seed"),
        ({"sealed": False}, "undo a mask that the server does not know"),
        ({**OPEN, "relevance": "pads"}, "padded or encrypted"),
    ):
        endpoint, view, knowledge, truth = attacked(federation, **params)
        said = evaluate(RelevanceOracle(endpoint), view, knowledge, truth)
        assert not isinstance(said, Score)
        assert reason in said
        # and clients do refuse what is neither sealed, under their mask, nor part of a padded pair
        with pytest.raises(SecureClusterError):
            energies_of(endpoint, knowledge, 0, np.eye(64)[:3])
    assert "sent no calls" in str(RelevanceOracle().applies(view, knowledge))
