"""Clients' Gram matrices by crafted eigenvectors: an active attack on one-shot clustering.

A client i answers the "eigenvectors of j" with r(i, j), which for a single vector v is

    r = min(λ_1, ‖G_i v‖) / max(λ_1, ‖G_i v‖) = ‖G_i v‖ / λ_1

for every unit v, since ‖G_i‖ = λ_1. A server that sends vectors of its own choice, and zeros where
others would follow, so reads ‖G_i v‖ up to one common factor. These energies are a quadratic form,
‖G_i v‖² = vᵀ G_i² v, so D(D + 1)/2 vectors give G_i² by polarisation, and with it the span of all
of the client's samples. A record of a client with fewer than D samples lies in that span.

Under a mask the client undoes the mask of what it receives, and a sealed frame must have been
sealed under the clients' seed: the server needs a colluding client's seed for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from securecluster.attacks import base
from securecluster.attacks.arrays import Array, as_array, flat_rows
from securecluster.attacks.base import HIDDEN_PAIRS, Attack, Guess, Harm, Knowledge, Truth, View
from securecluster.attacks.experiments import probe
from securecluster.attacks.scoring import AgainstOtherClients
from securecluster.attacks.subspaces import AT_LOW_RATES, SampleMembership
from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Call, Picks
from securecluster.protocols.oneshot.client import OtherEigenvectors
from securecluster.runtime.endpoint import PAIRS, Endpoint, config_hash

MOST_DIMENSIONS = 64  # D up to which all of G² is read; beyond, energies of candidates only
SMALLEST = 1e-6  # energy that errors are relative to
RANK = 1e-5  # eigenvalues of G², relative to the largest, below which they are rounding


class EnergyError(AgainstOtherClients):
    """Mean relative error of the energies ‖G x‖ / (λ_1 ‖x‖) of candidates."""

    metric = "relative error of the energy"
    higher = False

    def compared(self, guess: Guess, truth: Truth, subjects: list[int]) -> Array:
        """Return the error of the energies of each client against those of a client, (n,).

        Args:
            guess: by client; the energies are among the details.
            truth: of the run.
            subjects: clients, one for each guess.
        """
        candidates = _unit_rows(guess.details["candidates"])
        errors = []
        for client, other in zip(guess.values, subjects, strict=True):
            flat = flat_rows(truth.federation.shards[other].x)
            gram = flat.T @ flat / len(flat)
            largest = np.linalg.norm(gram, 2)
            true = np.linalg.norm(candidates @ gram, axis=1) / largest
            read = guess.details["energies"][client]
            differences = np.abs(read - true)
            # a relative error needs a floor where a candidate has no energy
            relative = differences / np.maximum(true, SMALLEST)
            errors.append(relative.mean())
        return np.asarray(errors)


class RelevanceOracle(Attack):
    """Membership of candidates in clients' data, by energies that clients answer with.

    Args:
        endpoint: of the clients, to which crafted calls are sent; without it the attack is not
            applicable.
    """

    name = "relevance-oracle"
    learns = "how much of a client's data lies along directions that the server asks for"
    harm = Harm.CONTENTS
    source = "this project's threat model: relevance of Ali & Arafa 2024, eq. 2 to 4, as an oracle"
    needs = (
        "an active server that clients answer, eigenvectors that are neither sealed nor masked, "
        "and candidate samples"
    )
    scorer = SampleMembership()
    reads = ("row",)
    hidden_by = (HIDDEN_PAIRS,)
    further = (*AT_LOW_RATES, EnergyError())

    def __init__(self, endpoint: Endpoint[Any] | None = None) -> None:
        self.endpoint = endpoint

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        config = knowledge.config
        if "phi" not in config:
            return "not applicable: clients of this protocol answer no eigenvectors with relevance"
        if config.get("features", "identity") != "identity":
            return "not applicable: the eigenvectors are of features, not of the samples themselves"
        if self.endpoint is None:
            return "not applicable: the adversary only observed, and sent no calls of its own"
        if knowledge.samples is None:
            return base.NO_SAMPLES
        if config.get("relevance", "plain") != "plain":
            return "not applicable: a client's relevance is padded or encrypted, and only R is read"
        if config.get("sealed", False):
            return "not applicable: clients open only what was sealed under their seed"
        if knowledge.mask != "none":
            return "not applicable: clients undo a mask that the server does not know"
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return scores of the candidates by client, (candidates,).

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.

        Raises:
            SecureClusterError: a client refuses a crafted call.
        """
        endpoint = self.endpoint
        assert endpoint is not None
        candidates = knowledge.inputs
        queries = _unit_rows(candidates)
        scores = {}
        read = {}
        grams = {}
        for client in endpoint.ids:
            if client in knowledge.colluders:
                continue
            energies = energies_of(endpoint, knowledge, client, queries)
            read[client] = energies
            scores[client] = energies
            if queries.shape[1] <= MOST_DIMENSIONS:
                gram = squared_gram(endpoint, knowledge, client)
                grams[client] = gram
                scores[client] = _share_in_range(gram, queries)
        details = {"candidates": candidates, "energies": read, "squared_grams": grams}
        return Guess("membership", scores, details)


def energies_of(
    endpoint: Endpoint[Any], knowledge: Knowledge, client: int, vectors: Array
) -> Array:
    """Return ‖G_i v‖ / λ_1 of a client's Gram matrix for crafted unit vectors, (n,).

    Args:
        endpoint: of the client.
        knowledge: of the configuration.
        client: its number.
        vectors: unit rows, (n, D).

    Raises:
        SecureClusterError: the client refuses.
    """
    energies = []
    for call in _crafted(knowledge, client, vectors):
        answer = probe(endpoint, call)
        if answer.refusal is not None:
            raise answer.refusal
        others = call.query.ids.table.tolist()
        row = as_array(answer.reply.row.values[0])
        energies.append(row[others])
    return np.concatenate(energies)[: len(vectors)]


def _crafted(knowledge: Knowledge, client: int, vectors: Array) -> Iterator[Call]:
    """Yield calls that pass each vector off as the only eigenvector of another client."""
    config = knowledge.config
    run = config_hash(config)
    width = int(config["width"])
    vectors_each = min(int(config["vectors"]), width)
    others = [other for other in range(knowledge.clients) if other != client]
    count = len(others)
    picks = (tuple(range(count)),)
    ids = Picks(torch.as_tensor(others), picks)
    # one call carries a vector in the name of every other client
    for first in range(0, len(vectors), count):
        chosen = torch.from_numpy(vectors[first : first + count])
        block = chosen.to(knowledge.initial)
        table = torch.zeros(count, vectors_each, width, dtype=block.dtype)
        table[: len(block), 0] = block
        # the last call's unused places hold a vector, too: the row must have its usual length
        table[len(block) :, 0] = block[-1]
        query = OtherEigenvectors(vectors=Picks(table, picks), ids=ids, labels=None, step=1)
        yield Call(run, "relevance", PAIRS, 1, 1, (client,), query, (1,))


def squared_gram(endpoint: Endpoint[Any], knowledge: Knowledge, client: int) -> Array:
    """Return G_i² / λ_1², (D, D), by polarisation.

    Args:
        endpoint: of the client.
        knowledge: of the configuration.
        client: its number.
    """
    width = int(knowledge.config["width"])
    # D vectors e_a give the diagonal of A = G², and (e_a + e_b)/√2 the rest, a < b
    basis = np.eye(width)
    rows, columns = np.triu_indices(width, 1)
    sums = (basis[rows] + basis[columns]) / np.sqrt(2)
    queries = np.concatenate([basis, sums])
    squares = energies_of(endpoint, knowledge, client, queries) ** 2
    diagonal = squares[:width]
    matrix = np.diag(diagonal)
    # vᵀ A v of v = (e_a + e_b) / √2 is (A_aa + A_bb) / 2 + A_ab
    means = (diagonal[rows] + diagonal[columns]) / 2
    beside = squares[width:] - means
    matrix[rows, columns] = beside
    matrix[columns, rows] = beside
    return matrix


def _share_in_range(squared: Array, vectors: Array) -> Array:
    """Return the share of each vector's squared norm in the range of a matrix, (n,)."""
    # eigh sorts eigenvalues in ascending order, so the last one is the largest
    values, columns = np.linalg.eigh(squared)
    basis = columns[:, values > RANK * values[-1]]
    coordinates = vectors @ basis
    return np.asarray((coordinates**2).sum(1))


def _unit_rows(samples: Array) -> Array:
    """Return samples as rows of norm one; zeros stay zeros."""
    flat = flat_rows(samples)
    norms = np.linalg.norm(flat, axis=1, keepdims=True)
    return np.asarray(flat / np.where(norms > 0, norms, 1.0))


def with_endpoint(endpoint: Endpoint[Any]) -> Mapping[str, Attack]:
    """Return by name the active attacks on some clients.

    Args:
        endpoint: of the clients, as `build_client` of `securecluster.parties.endpoints` makes it.
    """
    return {RelevanceOracle.name: RelevanceOracle(endpoint)}
