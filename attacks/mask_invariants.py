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

import numpy as np

from securecluster.attacks.arrays import Array, as_array
from securecluster.attacks.base import NO_LABELS, SUMS, Attack, Guess, Harm, Knowledge, Truth, View
from securecluster.attacks.scoring import AgainstOthers
from securecluster.attacks.shadow_training import local_updates
from securecluster.attacks.subspaces import auc, scored_answers
from securecluster.attacks.unmasking import NO_MASK, NO_UPDATES, first_updates, keeps_values
from securecluster.data.federation import Shard

SHADOWS = 500
QUANTILES = 129  # of sorted values
CONCENTRATION = 0.3  # of the Dirichlet distribution of shadow clients' labels
USUAL_SIZE = 40  # samples of a client that does not send its number
SMALLEST = 1e-12  # magnitudes below this count as zeros


class PresenceByClass(AgainstOthers):
    """Mean over classes of the AUC, over clients, of the question who holds samples of a class.

    Within a class alone, since how frequent classes are is public. The negative control shuffles
    the clients.
    """

    metric = "class presence AUC"

    def compared(self, guess: Guess, truth: Truth, subjects: list[int]) -> Array:
        """Return the units against the answers of the given subjects, in the guess's order."""
        rows = []
        for scores, client in guess.beside(subjects):
            present = truth.label_counts(client) > 0
            rows.append(scored_answers(scores, present))
        return np.stack(rows)

    def summary(self, units: Array) -> float:
        """Return the mean AUC of the classes that some clients hold and others do not.

        Args:
            units: (n, classes, 2).
        """
        areas = []
        for k in range(units.shape[1]):
            scores = units[:, k, 0]
            present = units[:, k, 1] > 0
            if present.any() and not present.all():
                areas.append(auc(scores, present))
        if not areas:
            return 0.5
        return float(np.mean(areas))


class MaskInvariants(Attack):
    """Classes that clients hold, by shadow clients and the invariants of their updates.

    Args:
        shadows: number of shadow clients.
        seed: of their data.
    """

    name = "mask-invariants"
    learns = "which labels a client holds"
    harm = Harm.CONTENTS
    source = (
        "Ganju et al. 2018, Property Inference Attacks on Fully Connected Neural Networks using "
        "Permutation Invariant Representations"
    )
    needs = "single masked updates of the first round, and public samples with labels"
    scorer = PresenceByClass()
    of_masks = True
    reads = ("delta",)
    hidden_by = (SUMS,)  # a mask keeps what it is named after

    def __init__(self, shadows: int = SHADOWS, seed: int = 0) -> None:
        self.shadows = shadows
        self.seed = seed

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if not knowledge.has_labels:
            return NO_LABELS
        if knowledge.mask == "none":
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
        mask = knowledge.mask
        rows: dict[int, Array] = {}
        sizes = []
        step = 1
        for subject, update in first_updates(view, knowledge).items():
            _, call, client = subject
            if client not in rows:
                rows[client] = as_array(update.row)
                size = round(update.size or USUAL_SIZE)
                sizes.append(size)
                step = call
        shards = shadow_shards(knowledge, self.shadows, sizes, self.seed)
        numbers = range(len(shards))
        updates = as_array(local_updates(knowledge, shards, numbers, step))
        observed = np.stack(list(rows.values()))
        d = knowledge.dimension
        examples = invariants(updates, mask, d)
        queries = invariants(observed, mask, d)
        counts = [np.bincount(shard.y, minlength=knowledge.classes) for shard in shards]
        present = np.stack(counts) > 0
        scores = _log_odds(examples, present, queries)
        by_client = dict(zip(rows, scores, strict=True))
        return Guess("classes", by_client)


def shadow_shards(knowledge: Knowledge, count: int, sizes: list[int], seed: int = 0) -> list[Shard]:
    """Return data of shadow clients: public samples in which labels are as uneven as clients'.

    Args:
        knowledge: with public samples.
        count: number of shadow clients.
        sizes: numbers of samples that clients have, from which shadow clients' are drawn.
        seed: of the draws.
    """
    x = np.asarray(knowledge.inputs, np.float32)
    y = np.asarray(knowledge.labels, np.int64)
    classes = np.unique(y)
    by_class = {label: np.flatnonzero(y == label) for label in classes}
    # Dirichlet shares, the usual model of label skew (Hsu et al. 2019)
    concentrations = np.full(len(classes), CONCENTRATION)
    draw = np.random.default_rng(seed)
    shards = []
    for _ in range(count):
        shares = draw.dirichlet(concentrations)
        size = int(draw.choice(sizes))
        labels = draw.choice(classes, size=size, p=shares)
        places = draw.integers([len(by_class[label]) for label in labels])
        chosen = [by_class[label][k] for label, k in zip(labels, places, strict=True)]
        shard = Shard(x[chosen], y[chosen], x[:0], y[:0])
        shards.append(shard)
    return shards


def invariants(rows: Array, mask: str, dimension: int) -> Array:
    """Return features of rows that a mask leaves unchanged, (n, f).

    Args:
        rows: (n, w), masked or not.
        mask: its name.
        dimension: numbers in a row before the mask; masks of sorted values do not lengthen it.
    """
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    # logarithms, since norms of updates vary by orders of magnitude over clients
    logarithms = np.log(norms + SMALLEST)
    if not keeps_values(mask):
        return np.asarray(logarithms)
    values = rows[:, :dimension]
    if mask != "permutation":
        values = np.abs(values)
    is_zero = np.abs(values) < SMALLEST
    zeros = is_zero.mean(1, keepdims=True)
    row_sums = values.sum(1, keepdims=True)
    # sorted values in fewer numbers: d features from a few hundred shadow clients would overfit
    shares = np.linspace(0, 1, QUANTILES)
    quantiles = np.quantile(values, shares, axis=1).T
    return np.concatenate([logarithms, zeros, row_sums, quantiles], axis=1)


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
