"""Label counts and membership from gradient signatures.

A signature is the mean over a client's samples of a public function of each sample: a sketch of its
gradient at zero weights, or a class block (`securecluster.privacy.gradient_signatures`). The server
can compute this function for samples of its own. Without noise, therefore:

- The shares in class blocks are the client's shares of classes, up to the clip, which shortens the
  rows of a class by a factor that public samples give. No mask covers the shares.
- A sketch is about Σ_y π_y·μ_y, where π_y is the client's share of class y and μ_y the mean sketch
  of the class, which public samples give. Least squares on its 64 numbers recover the shares.
- The residual, a signature less the means of its classes, points to the client's own samples: each
  member contributes 1/n of its row to the mean (Homer et al. 2008; Dwork et al. 2015, "Robust
  Traceability from Trace Amounts", for means of attributes).

If a mask covers sketches or projections, nobody else can tell which coordinate is which, and the
last two attacks do not apply.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from securecluster.attacks.arrays import Array, as_array, sample_keys
from securecluster.attacks.base import MASK, Attack, Guess, Harm, Knowledge, Truth, View
from securecluster.attacks.label_counts import MisplacedLabels, normalised, rounded
from securecluster.attacks.subspaces import SampleMembership
from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Rows
from securecluster.privacy.gradient_signatures import ClassBlocks, clipped_rows
from securecluster.protocols.common.comparison.gradient_signatures import SignatureRequest
from securecluster.protocols.common.comparison.signature_plan import (
    BLOCKS,
    PLAIN,
    example_map,
    plan_of,
)

CLIP = 1.0  # norm to which clients clip the row of a sample
RIDGE = 0.01  # of covariances, as a share of their mean variance
TYPICAL_SIZE = 100.0  # samples of a client that sends no number of them
OWN_MEMBERSHIP = "membership among a client's own samples"  # a quantity
NO_SIGNATURES = "not applicable: clients of this run send no signatures of gradients"
NO_SAMPLES = "not applicable: the adversary has no samples with labels"
MASKED = "not applicable: signatures are under a mask, and the adversary's samples are not"


@dataclass(frozen=True)
class Observed:
    """A client's signature as an adversary reads it.

    Attributes:
        rows: (C, r) projections of class blocks, or (1, q) a sketch.
        shares: (C,) of class blocks; None of a sketch.
        size: the client's number of samples; None where neither the configuration nor the client
            tells it.
        centre: that the client subtracted from each number.
    """

    rows: Array
    shares: Array | None
    size: float | None
    centre: float = 0.0

    @property
    def kind(self) -> str:
        """Return the kind of signatures that it is."""
        return PLAIN if self.shares is None else BLOCKS


def observed_signatures(view: View, knowledge: Knowledge) -> dict[int, Observed]:
    """Return by client the signature that it sent, under the mask.

    Args:
        view: what the adversary observed.
        knowledge: what it knows besides.
    """
    if "signature_kind" not in knowledge.config:
        return {}
    signatures: dict[int, Observed] = {}
    public_sizes = knowledge.config.get("signature_sizes", ())
    sizes: dict[int, float] = dict(enumerate(public_sizes))
    centre = float(knowledge.config["signature_centre"] or 0.0)
    for message in view.messages():
        if isinstance(message.content, SignatureRequest):
            centre = float(message.content.centre.value[0])
        client = message.sender.index
        if message.sender.kind != "client" or client is None:
            continue
        signature = _signature_of(message.content)
        if signature is not None:
            signatures.setdefault(client, signature)
        size = getattr(message.content, "size", None)
        if isinstance(size, Rows) and size.values.is_floating_point():
            sizes.setdefault(client, float(size.values[0]))
    observed = {}
    for client, signature in signatures.items():
        observed[client] = replace(signature, size=sizes.get(client), centre=centre)
    return observed


def _signature_of(content: Any) -> Observed | None:
    """Return the signature in a message of one client; None if there is none."""
    projections = getattr(content, "projections", None)
    if projections is not None:
        rows = as_array(projections.values[0])
        shares = as_array(content.shares.values[0])
        return Observed(rows, shares, None)
    sketch = getattr(content, "signature", None)
    # messages of key agreement carry cryptographic signatures, in bytes, under the same name
    if not isinstance(sketch, Rows) or not sketch.values.is_floating_point():
        return None
    return Observed(as_array(sketch.values), None, None)


@dataclass(frozen=True)
class PublicRows:
    """Rows that the adversary's own samples would add to a signature.

    Attributes:
        rows: (n, width) clipped rows: sketches, or blocks of r projections and a one.
        labels: (n,) classes of the samples.
        classes: C.
    """

    rows: Array
    labels: Array
    classes: int

    def of_class(self, label: int) -> Array:
        """Return which samples are of a class, (n,) of bool; all where there are none.

        Args:
            label: the class.
        """
        members = self.labels == label
        # the mean of no rows is NaN, so a class without samples gets the mean of all
        if not members.any():
            return np.ones_like(members)
        return np.asarray(members)

    def means(self) -> Array:
        """Return the mean row of each class, (C, width); that of all for a class without any."""
        means = []
        for label in range(self.classes):
            rows = self.rows[self.of_class(label)]
            means.append(rows.mean(0))
        return np.stack(means)

    def covariance(self) -> Array:
        """Return the covariance (width, width) of rows about the means of their classes."""
        rows = self.rows - self.means()[self.labels]
        return np.asarray(rows.T @ rows / len(rows))


def public_rows(knowledge: Knowledge, observed: Observed) -> PublicRows:
    """Return the rows of the adversary's samples under the public map of the run.

    Args:
        knowledge: with samples, and the configuration that determines the map.
        observed: a signature, whose map it is.
    """
    samples = torch.as_tensor(knowledge.inputs)
    inputs = samples.flatten(1).float()
    labels = knowledge.labels.astype(np.int64)
    examples = example_map(knowledge.config, observed.kind, observed.centre)
    if isinstance(examples, ClassBlocks):
        rows = examples.rows(inputs)
    else:
        rows = examples.rows(inputs, torch.as_tensor(labels))
    # clients clip each row before they average, so the adversary does, too
    clipped = clipped_rows(rows, CLIP)
    return PublicRows(as_array(clipped), labels, knowledge.classes)


class SignatureLabelCounts(Attack):
    """Counts of each client's labels, from its signature."""

    name = "signature-label-counts"
    learns = "how many samples of each label a client holds"
    harm = Harm.CONTENTS
    source = "not in a paper: least squares on the signatures of this project"
    needs = (
        "single signatures; of sketches also samples with labels, and no mask (class blocks tell "
        "the shares of classes under every mask)"
    )
    scorer = MisplacedLabels()
    reads = ("signature", "projections", "shares")
    hidden_by = (MASK,)  # of sketches: shares of classes have none

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        observed = observed_signatures(view, knowledge)
        if not observed:
            return NO_SIGNATURES
        if all(signature.shares is not None for signature in observed.values()):
            return None
        return _why_no_rows(knowledge)

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the guessed counts by client; shares of 1 of a client whose size is not known.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        guesses: dict[int, Array] = {}
        for client, observed in observed_signatures(view, knowledge).items():
            weights = class_weights(observed, knowledge)
            if observed.size is None:
                guesses[client] = normalised(weights)
            else:
                size = round(observed.size)
                guesses[client] = rounded(weights, size)
        return Guess("label counts", guesses)


class OwnSampleMembership(SampleMembership):
    """AUC of the question which of its own candidates a client trains on.

    Candidates are compared with others of the same client, which are its test samples: those of
    other clients differ in classes and clusters, which a signature tells of, too, and which are no
    membership.
    """

    metric = f"AUC of {OWN_MEMBERSHIP}"

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return scores and answers, (n, candidates, 2), by client; NaN of others' samples.

        Args:
            guess: scores by client.
            truth: of the run.
        """
        rows: Array = guess.once(truth, "own samples", partial(self._compared, guess, truth))
        return rows.copy()

    def _compared(self, guess: Guess, truth: Truth) -> Array:
        """Return what `units` does."""
        shards = truth.federation.shards
        candidates = np.asarray(guess.details["candidates"])
        # samples are compared byte by byte, so both sides need the same type
        keys = sample_keys(candidates.astype(shards[0].x.dtype))
        rows = np.full((len(guess.values), len(keys), 2), np.nan)
        for position, (client, scores) in enumerate(guess.values.items()):
            members = set(sample_keys(shards[client].x))
            clients_samples = members | set(sample_keys(shards[client].x_test))
            for k, key in enumerate(keys):
                if key in clients_samples:
                    rows[position, k] = scores[k], key in members
        return rows

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the same with the answers about each client's own samples in random order.

        Args:
            guess: scores by client.
            truth: of the run.
            draw: source of the shuffle.
        """
        rows = self.units(guess, truth)
        for client_rows in rows:
            answers = client_rows[:, 1]
            is_answered = ~np.isnan(answers)
            answers[is_answered] = draw.permutation(answers[is_answered])
        return rows

    def summary(self, units: Array) -> float:
        """Return the AUC over all questions about own samples.

        Args:
            units: (n, candidates, 2).
        """
        rows = units.reshape(-1, 2)
        is_answered = ~np.isnan(rows[:, 1])
        return super().summary(rows[is_answered])


class SignatureMembership(Attack):
    """Membership of candidates in clients' data, by their share in a signature."""

    name = "signature-membership"
    learns = "whether a record is in a client's data"
    harm = Harm.MEMBERS
    source = (
        "Homer et al. 2008, Resolving Individuals Contributing Trace Amounts of DNA; "
        "Dwork et al. 2015, Robust Traceability from Trace Amounts"
    )
    needs = "single signatures without a mask, and candidates with labels, some of them members"
    scorer = OwnSampleMembership()
    reads = ("signature", "projections")
    hidden_by = (MASK,)

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if not observed_signatures(view, knowledge):
            return NO_SIGNATURES
        return _why_no_rows(knowledge)

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the log-likelihood ratio of each candidate by client, (candidates,).

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        guesses = {}
        for client, observed in observed_signatures(view, knowledge).items():
            if observed.shares is not None:
                guesses[client] = _blocks_ratios(observed, observed.shares, knowledge)
            else:
                public = public_rows(knowledge, observed)
                size = _size(observed)
                deviation = _deviation(knowledge, observed, size)
                guesses[client] = mean_ratios(observed.rows[0], public, size, deviation)
        details = {"candidates": knowledge.inputs}
        return Guess(OWN_MEMBERSHIP, guesses, details)


def class_weights(observed: Observed, knowledge: Knowledge) -> Array:
    """Return what a client has of each class, (C,), up to a common factor.

    In class blocks the clip shortens a row (p, 1) to (p, 1)/‖(p, 1)‖. By how much in the mean of a
    class is known of public samples; without any, all classes count as shortened alike.

    Args:
        observed: the client's signature.
        knowledge: with samples, which class blocks can do without.
    """
    if observed.shares is not None and knowledge.samples is None:
        return observed.shares
    public = public_rows(knowledge, observed)
    if observed.shares is not None:
        samples_each = public.means()[:, -1]
        return np.asarray(observed.shares / samples_each)
    size = _size(observed)
    deviation = _deviation(knowledge, observed, size)
    return explained_weights(observed.rows[0], public, size, deviation)


def explained_weights(row: Array, public: PublicRows, size: float, deviation: float) -> Array:
    """Return the weights (C,) with which the means of classes explain a mean, by least squares.

    They are not negative. Numbers are weighted by the precision with which they are explained.

    Args:
        row: (w,) the mean of a client's rows.
        public: rows of public samples.
        size: number of the client's samples.
        deviation: of the noise in each number.
    """
    from scipy.optimize import nnls

    precision = precision_of(public.covariance(), size, deviation)
    # With P = LLᵀ, generalised least squares with weights P is ordinary least squares on Lᵀ·rows.
    root = np.linalg.cholesky(precision).T
    means = root @ public.means().T
    weights, _ = nnls(means, root @ row)
    return np.asarray(weights)


def mean_ratios(row: Array, public: PublicRows, size: float, deviation: float) -> Array:
    """Return the log-likelihood ratio of each known row to be in a mean, (n,).

    Args:
        row: (w,) the mean of a client's rows, up to a factor.
        public: rows of the candidates.
        size: number of the client's samples.
        deviation: of the noise in each number.
    """
    weights = explained_weights(row, public, size, deviation)
    # The mean may be scaled by an unknown factor: weights that explain it sum to that factor.
    scale = _positive(weights.sum())
    means = public.means()
    residual = (row - weights @ means) / scale
    precision = precision_of(public.covariance(), size, deviation / scale)
    rows = public.rows - means[public.labels]
    return likelihood_ratios(rows, residual, precision, size)


def likelihood_ratios(rows: Array, residual: Array, precision: Array, size: float) -> Array:
    """Return for each row log p(residual | it is in the mean) − log p(residual | it is not), (n,).

    A member x of n adds x/n to the mean, whose deviation is Gaussian with the given precision P:
    xᵀP·residual/n − xᵀP·x/(2n²).

    Args:
        rows: (n, w) candidates' deviations from the mean of their class.
        residual: (w,) deviation of the observed mean from what is expected.
        precision: (w, w) inverse covariance of the residual.
        size: number of samples in the mean.
    """
    # One product with P serves both terms; forming xᵀPx for all pairs would take n² numbers.
    projected = rows @ precision
    linear = projected @ residual / size
    quadratic = (projected * rows).sum(1) / (2 * size**2)
    return np.asarray(linear - quadratic)


def _blocks_ratios(observed: Observed, shares: Array, knowledge: Knowledge) -> Array:
    """Return the log-likelihood ratio of each candidate's class block, (candidates,)."""
    public = public_rows(knowledge, observed)
    weights = class_weights(observed, knowledge)
    scale = _positive(weights.sum())
    normalised_weights = normalised(weights)
    size = _size(observed)
    means = public.means()
    # The share of a class is known, so that only what is beyond its mean projection per one counts.
    directions = means[:, :-1] / means[:, -1:]
    expected = public.rows[:, -1:] * directions[public.labels]
    rows = public.rows[:, :-1] - expected
    covariance = rows.T @ rows / len(rows)
    deviation = _deviation(knowledge, observed, size) / scale
    ratios = np.zeros(len(rows))
    # the blocks have disjoint samples, so each is a test of its own
    for label in range(public.classes):
        candidates = public.labels == label
        expected_block = shares[label] * directions[label]
        residual = (observed.rows[label] - expected_block) / scale
        # the mean over all n samples has those of the class alone; it holds one or more of them
        share = max(float(normalised_weights[label]), 1 / size)
        precision = precision_of(share * covariance, size, deviation)
        ratios[candidates] = likelihood_ratios(rows[candidates], residual, precision, size)
    return ratios


def precision_of(covariance: Array, size: float, deviation: float) -> Array:
    """Return the inverse covariance (w, w) of a mean of rows with noise.

    Args:
        covariance: (w, w) of one row.
        size: number of rows.
        deviation: of the noise in each number.
    """
    numbers = len(covariance)
    identity = np.eye(numbers)
    variance = covariance / size + deviation**2 * identity
    # Fewer samples than numbers give a singular covariance: a ridge makes it invertible.
    ridge = RIDGE * np.trace(variance) / numbers
    inverse = np.linalg.inv(variance + ridge * identity)
    return np.asarray(inverse)


def _deviation(knowledge: Knowledge, observed: Observed, size: float) -> float:
    """Return the standard deviation of the noise in each number of a client's signature."""
    plan = plan_of(knowledge.config)
    multiplier = plan.multiplier(observed.kind)
    if observed.shares is not None and not plan.may_be(BLOCKS):
        # class blocks that were asked before other signatures
        multiplier = plan.outline_multiplier
    if plan.per_client:
        # the unit is a whole client, whose signature has norm CLIP at most
        return multiplier * CLIP
    # one of n samples adds at most CLIP / n to the mean
    return multiplier * CLIP / size


def _why_no_rows(knowledge: Knowledge) -> str | None:
    """Return why samples cannot be compared with signatures; None if they can."""
    if knowledge.samples is None:
        return NO_SAMPLES
    if knowledge.mask != "none":
        return MASKED
    return None


def _size(observed: Observed) -> float:
    """Return a client's number of samples, or a typical one where it is not known."""
    if observed.size is None:
        return TYPICAL_SIZE
    return observed.size


def _positive(value: float) -> float:
    """Return a factor that can be divided by; noise may leave none."""
    if value > 0:
        return float(value)
    return 1.0
