"""Classes that clients hold, from what a mask leaves of an update: invariants and shadow models.

A permutation keeps a row's sorted values, its zeros, its sum and all norms; a signed one the sorted
magnitudes; an orthonormal map the Euclidean norm. The adversary trains shadow clients on public
samples, computes the same invariants of their updates, and fits one classifier for each class,
which says how likely a client with such invariants holds it (shadow models: Ateniese et al. 2015,
"Hacking Smart Machines with Smarter Ones"; property inference from sorted weights: Ganju et al.
2018, "Property Inference Attacks on Fully Connected Neural Networks using Permutation Invariant
Representations").
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.attacks.base import SUMS, Attack, Guess, Knowledge, Truth, View
from securecluster.attacks.scoring import Scorer
from securecluster.attacks.shadow_training import local_updates
from securecluster.attacks.subspaces import auc
from securecluster.attacks.unmasking import (
    NO_MASK,
    NO_UPDATES,
    first_updates,
    keeps_values,
    mask_of,
)
from securecluster.data.federation import Shard

Array = NDArray[Any]
SHADOWS = 500
QUANTILES = 129  # of sorted values
CONCENTRATION = 0.3  # of the Dirichlet distribution of shadow clients' labels
USUAL_SIZE = 40  # samples of a client that does not send its number
SMALLEST = 1e-12  # magnitudes below this count as zeros


class PresenceByClass(Scorer):
    """Mean over classes of the AUC, over clients, of the question who holds samples of a class.

    Within a class alone, since how frequent classes are is public. The negative control shuffles
    the clients.
    """

    metric = "class presence AUC"

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return scores and answers, (n, classes, 2), by client.

        Args:
            guess: scores (classes,) by client.
            truth: of the run.
        """
        return self._rows(guess, truth, list(guess.values))

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the same with the answers of shuffled clients.

        Args:
            guess: scores (classes,) by client.
            truth: of the run.
            draw: source of the shuffle.
        """
        clients = list(guess.values)
        order = draw.permutation(len(clients))
        return self._rows(guess, truth, [clients[k] for k in order])

    def _rows(self, guess: Guess, truth: Truth, clients: list[int]) -> Array:
        """Return the units against the answers of the given clients, in the guess's order."""
        rows = []
        for scores, client in zip(guess.values.values(), clients, strict=True):
            present = truth.label_counts(client) > 0
            rows.append(np.stack([np.asarray(scores, float), present.astype(float)], axis=-1))
        return np.stack(rows)

    def summary(self, units: Array) -> float:
        """Return the mean AUC of the classes that some clients hold and others do not.

        Args:
            units: (n, classes, 2).
        """
        areas = []
        for k in range(units.shape[1]):
            present = units[:, k, 1] > 0
            if present.any() and not present.all():
                areas.append(auc(units[:, k, 0], present))
        return float(np.mean(areas)) if areas else 0.5


class MaskInvariants(Attack):
    """Classes that clients hold, by shadow clients and the invariants of their updates.

    Args:
        shadows: number of shadow clients.
        seed: of their data.
    """

    name = "mask-invariants"
    source = (
        "Ganju et al. 2018, Property Inference Attacks on Fully Connected Neural Networks using "
        "Permutation Invariant Representations"
    )
    needs = "single masked updates of the first round, and public samples with labels"
    scorer = PresenceByClass()
    reads = frozenset({"delta"})
    hidden_by = frozenset({SUMS})  # a mask keeps what it is named after

    def __init__(self, shadows: int = SHADOWS, seed: int = 0) -> None:
        self.shadows = shadows
        self.seed = seed

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if knowledge.network.objective.kind != "classification":
            return "not applicable: the clients' data have no labels"
        if mask_of(knowledge) == "none":
            return NO_MASK
        if knowledge.samples is None:
            return "not applicable: the adversary has no public samples to train shadow clients on"
        if not first_updates(view, knowledge):
            return NO_UPDATES
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the log-odds of each class by client, (classes,).

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        mask = mask_of(knowledge)
        rows: dict[int, Array] = {}
        sizes = []
        step = 1
        for (_, call, client), update in first_updates(view, knowledge).items():
            if client not in rows:
                rows[client] = update.row.double().cpu().numpy()
                sizes.append(round(update.size or USUAL_SIZE))
                step = call
        shards = shadow_shards(knowledge, self.shadows, sizes, self.seed)
        numbers = range(len(shards))
        updates = local_updates(knowledge, shards, numbers, step).double().numpy()
        d = knowledge.network.dimension
        examples = invariants(updates, mask, d)
        queries = invariants(np.stack(list(rows.values())), mask, d)
        classes = int(knowledge.config["classes"])
        counts = np.stack([np.bincount(shard.y, minlength=classes) for shard in shards])
        scores = _log_odds(examples, counts > 0, queries)
        return Guess("classes", dict(zip(rows, scores, strict=True)))


def shadow_shards(knowledge: Knowledge, count: int, sizes: list[int], seed: int = 0) -> list[Shard]:
    """Return data of shadow clients: public samples in which labels are as uneven as clients'.

    Args:
        knowledge: with public samples.
        count: number of shadow clients.
        sizes: numbers of samples that clients have, from which shadow clients' are drawn.
        seed: of the draws.
    """
    assert knowledge.samples is not None
    x = np.asarray(knowledge.samples[0], np.float32)
    y = np.asarray(knowledge.samples[1], np.int64)
    classes = np.unique(y)
    by_class = {label: np.flatnonzero(y == label) for label in classes}
    draw = np.random.default_rng(seed)
    shards = []
    # Dirichlet shares, the usual model of label skew (Hsu et al. 2019)
    for _ in range(count):
        shares = draw.dirichlet(np.full(len(classes), CONCENTRATION))
        size = int(draw.choice(sizes))
        labels = draw.choice(classes, size=size, p=shares)
        chosen = np.asarray([draw.choice(by_class[label]) for label in labels])
        shards.append(Shard(x[chosen], y[chosen], x[:0], y[:0]))
    return shards


def invariants(rows: Array, mask: str, dimension: int) -> Array:
    """Return features of rows that a mask leaves unchanged, (n, f).

    Args:
        rows: (n, w), masked or not.
        mask: its name.
        dimension: numbers in a row before the mask; masks of sorted values do not lengthen it.
    """
    # logarithms, since norms of updates vary by orders of magnitude over clients
    norms: Array = np.log(np.linalg.norm(rows, axis=1) + SMALLEST)[:, None]
    if not keeps_values(mask):
        return norms
    values = rows[:, :dimension]
    if mask != "permutation":
        values = np.abs(values)
    zeros = (np.abs(values) < SMALLEST).mean(1)[:, None]
    row_sums = values.sum(1, keepdims=True)
    # sorted values in fewer numbers: d features from a few hundred shadow clients would overfit
    quantiles = np.quantile(values, np.linspace(0, 1, QUANTILES), axis=1).T
    return np.concatenate([norms, zeros, row_sums, quantiles], axis=1)


def _log_odds(examples: Array, present: Array, queries: Array) -> Array:
    """Return the log-odds of each class, (n, classes), by logistic regression on shadow clients.

    Args:
        examples: invariants of shadow clients, (s, f).
        present: which classes these hold, (s, classes) of bool.
        queries: invariants of clients, (n, f).
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    scores = np.zeros((len(queries), present.shape[1]))
    for k in range(present.shape[1]):
        answers = present[:, k]
        # one answer alone cannot be learned from, and the log-odds stay zero
        if answers.all() or not answers.any():
            continue
        model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=500))
        model.fit(examples, answers)
        scores[:, k] = model.decision_function(queries)
    return scores
