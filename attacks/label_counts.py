"""Label counts from the last bias of one full-batch step.

With a softmax and cross-entropy over n samples, the gradient of the last bias is

    ∂L/∂b_c = (Σ_i p_ic − n_c) / n,

where p_i are the predictions and n_c counts the samples of class c (Wang et al. 2019, "Beyond
Inferring Class Representatives"; Geng et al. 2021, "Towards General Deep Leakage in Federated
Learning", Section 4; Yin et al. 2021 use the same sign for one image). A step with the learning
rate η moves the bias by −η times that, so n_c = n·(p̄_c + Δb_c/η), where p̄ is the mean prediction.

p̄ depends on the samples. At the public θ_0 it is nearly the same for all samples, so public
samples give it; without any, uniform noise of the samples' range does. Of several local steps, the
displacement of each counts: the attack divides by their number, which ignores that p̄ moves.

The number of steps follows from n. A client that does not send n leaves two unknowns: the shares
n_c/n have no total, and the number of steps has to be estimated. Shares are not negative, so it is
at least max_c −Δb_c/(η·p̄_c), and about that if the client lacks some class. The attack takes the
nearest whole number of epochs, which is exact where one batch holds all samples.
"""

from __future__ import annotations

import math

import numpy as np

from securecluster.attacks.arrays import Array, as_array
from securecluster.attacks.base import (
    MASK,
    NO_LABELS,
    SUMS,
    Attack,
    Guess,
    Harm,
    Knowledge,
    Truth,
    View,
)
from securecluster.attacks.scoring import AgainstOthers
from securecluster.attacks.views import ObservedUpdate, observed_updates
from securecluster.core.lazy_torch import torch

PROBES = 200  # samples of noise where no public ones are known
SMALLEST = 1e-12  # prediction
NO_BIAS = "not applicable: the network's last parameter is no bias with one entry a class"


class MisplacedLabels(AgainstOthers):
    """Share of a client's samples whose label the guess misplaces.

    Guesses are compared as shares, since not all of them have a total.
    """

    metric = "share of misplaced labels"
    higher = False

    def compared(self, guess: Guess, truth: Truth, subjects: list[int]) -> Array:
        """Return the shares against the labels of the given clients, in the guess's order."""
        shares = []
        for guessed, client in guess.beside(subjects):
            true = truth.label_counts(client)
            difference = guessed / guessed.sum() - true / true.sum()
            # each misplaced sample is missing in one class, and too many in another
            misplaced = np.abs(difference).sum() / 2
            shares.append(misplaced)
        return np.asarray(shares)


class LabelCounts(Attack):
    """Counts of each client's labels, from the bias in its first update."""

    name = "label-counts"
    learns = "how many samples of each label a client holds"
    harm = Harm.CONTENTS
    source = (
        "Geng et al. 2021, Towards General Deep Leakage in Federated Learning; "
        "Wang et al. 2019, Beyond Inferring Class Representatives"
    )
    needs = (
        "single updates of the first round, the learning rate, and the number of samples of each "
        "client (else it guesses the share of each label)"
    )
    scorer = MisplacedLabels()
    reads = ("delta",)
    hidden_by = (MASK, SUMS)

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if not knowledge.has_labels:
            return NO_LABELS
        if last_bias(knowledge) is None:
            return NO_BIAS
        updates = _first_updates(view, knowledge)
        if not updates:
            return "not applicable: no single update of a first round was observed"
        knowledge.expect("lr", "epochs")
        if any(update.size for update in updates.values()):
            knowledge.expect("batch_size")
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the guessed counts by client; shares of 1 of a client that sends no size.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        prediction = mean_prediction(knowledge)
        lr = float(knowledge.config["lr"])
        guesses: dict[int, Array] = {}
        without_size = []
        for client, update in _first_updates(view, knowledge).items():
            # Δb of the last layer; divided by η it is −Σ ∂L/∂b over the steps
            gradients = bias_of(knowledge, update.row) / lr
            guesses[client] = guessed_counts(knowledge, prediction, gradients, update.size)
            if not update.size:
                without_size.append(client)
        details = {"without size": tuple(without_size)}
        return Guess("label counts", guesses, details)


def guessed_counts(
    knowledge: Knowledge, prediction: Array, gradients: Array, size: float | None
) -> Array:
    """Return the counts of a client's labels; their shares if its number of samples is unknown.

    Args:
        knowledge: of the configuration.
        prediction: mean prediction of the network at θ_0, (classes,).
        gradients: Δb/η of the last bias b in the client's update, (classes,).
        size: the client's number of samples.
    """
    if not size:
        steps = least_steps(prediction, gradients, int(knowledge.config["epochs"]))
        return normalised(prediction + gradients / steps)
    steps = local_steps(knowledge, size)
    shares = prediction + gradients / steps
    return rounded(shares, round(size))


def least_steps(prediction: Array, gradients: Array, epochs: int) -> int:
    """Return the number of local steps below which a share would be negative, in whole epochs.

    Args:
        prediction: p̄, (classes,).
        gradients: Δb/η, (classes,).
        epochs: of a round.
    """
    # p̄_c + Δb_c/(η·steps) ≥ 0 for every class c bounds the steps from below
    ratios = -gradients / np.maximum(prediction, SMALLEST)
    bound = float(ratios.max())
    return epochs * max(1, round(bound / epochs))


def normalised(shares: Array) -> Array:
    """Return shares that are not negative and sum to 1.

    Args:
        shares: of each class, (classes,); negative ones count as zero.
    """
    positive = np.clip(shares, 0, None)
    if positive.sum() <= 0:  # nothing was learned about any class
        positive = np.ones_like(positive)
    return np.asarray(positive / positive.sum())


def rounded(shares: Array, samples: int) -> Array:
    """Return counts with a given total that are nearest to some shares of it.

    Args:
        shares: share of each class, (classes,); negative ones count as zero.
        samples: number of samples.
    """
    exact = normalised(shares) * samples
    counts = np.floor(exact).astype(np.int64)
    missing = samples - int(counts.sum())
    # the largest remainders are rounded up
    order = np.argsort(counts - exact, kind="stable")
    largest = order[:missing]
    counts[largest] += 1
    return np.asarray(counts)


def last_bias(knowledge: Knowledge) -> str | None:
    """Return the name of the last layer's bias, or None if the last parameter is none.

    Args:
        knowledge: of the network.
    """
    shapes = knowledge.network.shapes
    name = list(shapes)[-1]
    # a weight matrix has two dimensions or more, so this shape is a bias
    if tuple(shapes[name]) != (knowledge.config["classes"],):
        return None
    return name


def bias_of(knowledge: Knowledge, rows: torch.Tensor) -> Array:
    """Return the coordinates of the last bias in unmasked rows, (…, classes).

    Args:
        knowledge: of the network, whose last parameter is such a bias.
        rows: (…, d) or wider.
    """
    name = last_bias(knowledge)
    assert name is not None
    return as_array(knowledge.parameters(rows)[name])


def _first_updates(view: View, knowledge: Knowledge) -> dict[int, ObservedUpdate]:
    """Return the first update of each client, if it was trained from θ_0: in the first round."""
    first: dict[int, ObservedUpdate] = {}
    for update in observed_updates(view, knowledge):
        client = update.sender.index
        if update.round == 1 and client is not None:
            first.setdefault(client, update)
    return first


def mean_prediction(knowledge: Knowledge) -> Array:
    """Return the mean prediction of θ_0, (classes,), on public samples or else on noise.

    Args:
        knowledge: of the network and θ_0, and samples if it has any.
    """
    if knowledge.samples is not None:
        samples = torch.as_tensor(knowledge.samples[0])
    else:
        shape = (PROBES, *knowledge.config["shape"])
        # uniform on [0, 1), the usual range of pixels
        noise = np.random.default_rng(0).random(shape)
        samples = torch.as_tensor(noise)
    views = knowledge.parameters(knowledge.initial)
    with torch.no_grad():
        inputs = samples.to(knowledge.initial)
        outputs = knowledge.network.call(views, inputs)
        shares = outputs.double().softmax(-1).mean(0)
    return as_array(shares)


def local_steps(knowledge: Knowledge, size: float) -> int:
    """Return the number of a client's local steps in a round.

    Args:
        knowledge: of the configuration.
        size: number of its samples.
    """
    config = knowledge.config
    # the last batch of an epoch may be smaller, and is a step as well
    batches = math.ceil(size / int(config["batch_size"]))
    return int(config["epochs"]) * batches
