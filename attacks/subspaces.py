"""Membership, classes and mean samples from clients' leading eigenvectors.

In one-shot clustering clients share the p leading eigenvectors V_i of their Gram matrices. Each
other client reads them; so does the server where they are neither sealed nor masked. They span most
of a small client's samples, so

- a record of the client lies nearer to span(V_i) than others of its kind do (membership),
- samples of a class that the client holds do, too (composition),
- v_1 points to the mean sample where samples are not centred, as pixels are (mean image).

The first two use ‖V_i x‖² / ‖x‖², the score of subspace classification (Oja 1983, "Subspace Methods
of Pattern Recognition").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np
from scipy.special import betaincinv

from securecluster.attacks import base
from securecluster.attacks.arrays import Array, as_array, flat_rows, sample_keys
from securecluster.attacks.base import (
    MASK,
    SEALS,
    Attack,
    Guess,
    Harm,
    Knowledge,
    Scorer,
    Truth,
    View,
)
from securecluster.attacks.scoring import LEVEL, cosine
from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, UsageError
from securecluster.messaging.messages import Picks
from securecluster.privacy.masking.masks import build
from securecluster.privacy.masking.sealing import Seal
from securecluster.privacy.pipeline import Pipeline
from securecluster.runtime.endpoint import config_hash

SOURCE = "Oja 1983, Subspace Methods of Pattern Recognition; this project's threat model"
NEEDS = "clients' eigenvectors in the clear, or a colluding client that can open them"
FALSE_POSITIVES = 0.01  # rate at which the true positive rate is read
LOWEST_RATE = 0.001  # at which it is read where there are enough non-members
ROUNDING = 1e-9  # 1 / rate may be above the whole number that it stands for


def observed_subspaces(view: View, knowledge: Knowledge) -> dict[int, Array]:
    """Return the eigenvectors (p, D) of each client that the adversary can read.

    Rows beyond a client's rank are zero.

    Args:
        view: what the adversary observed.
        knowledge: what it knows besides.
    """
    subspaces: dict[int, Array] = {}
    for message in view.messages():
        vectors = getattr(message.content, "vectors", None)
        if vectors is None:
            continue
        if isinstance(vectors, Picks):  # what a client received of others
            content = message.content
            rows = list(vectors.picks[0])
            ids = content.ids.table[rows].tolist()
            table = vectors.table[rows]
            step = int(content.step)
        elif message.sender.kind == "client" and message.sender.index is not None:
            ids = [message.sender.index]
            table = vectors.values
            step = message.step
        else:
            continue
        opened = _opened(table, ids, step, knowledge)
        if opened is not None:
            subspaces.update(zip(ids, opened, strict=True))
    return subspaces


def _opened(table: torch.Tensor, ids: list[int], step: int, knowledge: Knowledge) -> Array | None:
    """Return eigenvectors (r, p, D) as their clients made them, or None if that takes a seed.

    Args:
        table: as they left their clients.
        ids: the clients, (r,).
        step: number of the call in which they did.
        knowledge: with the secrets of colluding clients.
    """
    config = knowledge.config
    seed = _shared_seed(knowledge)
    width = int(config["width"])
    # sealed vectors are bytes, and any client with the shared seed can open them
    if not table.is_floating_point():
        if seed is None:
            return None
        seal = Seal(config_hash(config))
        seal.unlock(seed)
        count = min(int(config["vectors"]), width)
        template = torch.empty((count, width), dtype=knowledge.initial.dtype)
        try:
            table = seal.open(table, ids, step, "eigen", "vectors", template)
        except FrameError:
            # authentication failed: the colluder's seed is not that of these clients
            return None
    elif knowledge.mask != "none":
        if seed is None:
            return None
        pipeline = Pipeline(build(knowledge.mask, width))
        pipeline.unlock(seed)
        table = pipeline.inverse(table, step)
    return as_array(table)


def _shared_seed(knowledge: Knowledge) -> bytes | None:
    """Return the seed that a colluding client shares with the others, or None without one."""
    for number, colluder in knowledge.colluders.items():
        if number in colluder.secrets.seed:
            return colluder.secrets.seed[number]
    return None


def energies(vectors: Array, samples: Array) -> Array:
    """Return the share of each sample's squared norm in a span, (n,).

    Args:
        vectors: orthonormal rows, or zeros, (p, D).
        samples: (n, …) of D numbers each.
    """
    flat = flat_rows(samples)
    squared = (flat**2).sum(1)
    # rows are orthonormal, so ‖V x‖ is the norm of the projection; a zero sample has share 0
    coordinates = flat @ vectors.T
    inside = (coordinates**2).sum(1)
    return np.asarray(inside / np.where(squared > 0, squared, 1.0))


def auc(scores: Array, positive: Array) -> float:
    """Return the area under the ROC curve; 0.5 if all units are of one kind.

    Args:
        scores: (n,); ties count half.
        positive: (n,) True or False.

    Raises:
        UsageError: a score is infinite or NaN.
    """
    return areas(scores)(np.asarray(positive, bool), 1)


def areas(scores: Array) -> Callable[[Array, Array | int], float]:
    """Return the areas under the ROC curve of scores, which are sorted once, for many answers.

    Args:
        scores: (n,); ties count half.

    Returns:
        Of answers (n,), True or False, and the units' whole weights, (n,) or one for all, the area;
        0.5 if all units are of one kind.

    Raises:
        UsageError: a score is infinite or NaN.
    """
    order = np.argsort(_finite(scores))
    ordered = np.asarray(scores, float)[order]
    first = np.searchsorted(ordered, ordered, side="left")
    end = np.searchsorted(ordered, ordered, side="right")

    def area(positive: Array, weights: Array | int) -> float:
        positives = np.where(positive, weights, 0)[order]
        others = np.where(positive, 0, weights)[order]
        # Mann–Whitney: the AUC is the probability that a positive exceeds a negative, ties half
        before = np.append(0, np.cumsum(others))
        pairs = int(positives.sum()) * int(before[-1])
        if not pairs:
            return 0.5
        exceeded = positives @ (before[first] + before[end])
        return float(exceeded / 2 / pairs)

    return area


def true_positive_rate(scores: Array, positive: Array, false: float = FALSE_POSITIVES) -> float:
    """Return the share of positives above the score that at most `false` of the others exceed.

    Args:
        scores: (n,).
        positive: (n,) True or False.
        false: rate of false positives.

    Raises:
        UsageError: a score is infinite or NaN.
    """
    chosen = np.asarray(positive, bool)
    values = _finite(scores)
    others = np.sort(values[~chosen])[::-1]
    if not len(others) or not chosen.any():
        return 0.0
    # the threshold is the score of the first negative that must not be exceeded
    allowed = math.floor(false * len(others) + ROUNDING)
    detected = values[chosen] > others[allowed]
    return float(np.mean(detected))


def _finite(scores: Array) -> Array:
    """Return scores, or raise UsageError where one ranks nowhere."""
    values = np.asarray(scores, float)
    if not np.all(np.isfinite(values)):
        raise UsageError(
            "scores that are infinite or NaN rank nowhere: leave such units out, or give them "
            "finite scores"
        )
    return values


def scored_answers(scores: Array, answers: Array) -> Array:
    """Return scores beside their answers, (n, 2), as units of an AUC.

    Args:
        scores: (n,).
        answers: (n,) of bool.
    """
    return np.stack([np.asarray(scores, float), answers.astype(float)], axis=-1)


class Detection(Scorer):
    """Base class of scorers of yes-or-no questions: rows are (score, truth).

    A guess has scores of all questions by client. The negative control shuffles the answers.
    """

    metric = "AUC"

    def summary(self, units: Array) -> float:
        """Return the AUC over all questions.

        Args:
            units: (n, 2) or (n, questions, 2).
        """
        scores, answers = units.reshape(-1, 2).T
        return auc(scores, answers > 0)

    def of_resamples(self, units: Array) -> Callable[[Array], float]:
        """Return the AUC of resamples, whose scores are sorted once.

        Args:
            units: (n, 2) or (n, questions, 2).
        """
        if type(self).summary is not Detection.summary:  # another score than the AUC
            return super().of_resamples(units)
        scores, answers = units.reshape(-1, 2).T
        area = areas(scores)

        def of_chosen(chosen: Array) -> float:
            times = np.bincount(chosen, minlength=len(units))
            return area(answers > 0, np.repeat(times, len(scores) // len(units)))

        return of_chosen

    def controls(
        self, guess: Guess, truth: Truth, draw: np.random.Generator, count: int
    ) -> list[float]:
        """Return the AUC of shuffled answers, by scores that are sorted once.

        Args:
            guess: scores by client.
            truth: of the run.
            draw: source of the shuffles.
            count: of them.
        """
        cls = type(self)
        if (cls.summary, cls.shuffled) != (Detection.summary, Detection.shuffled):
            return super().controls(guess, truth, draw, count)
        rows = self.units(guess, truth)
        area = areas(rows[..., 0].ravel())
        return [area(draw.permuted(rows[..., 1], axis=1).ravel(), 1) for _ in range(count)]

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return scores and answers, (n, questions, 2), by client.

        Args:
            guess: scores by client.
            truth: of the run.
        """
        rows = []
        for client, scores in guess.values.items():
            answers = self.answers(guess, truth, client)
            rows.append(scored_answers(scores, answers))
        return np.stack(rows)

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the same with each client's answers in random order.

        Answers about another client are no control: of candidates that are all clients' samples,
        one client's are no other's.

        Args:
            guess: scores by client.
            truth: of the run.
            draw: source of the shuffle.
        """
        rows = self.units(guess, truth)
        rows[..., 1] = draw.permuted(rows[..., 1], axis=1)
        return rows

    def answers(self, guess: Guess, truth: Truth, client: int) -> Array:
        """Return the answers about a client, (questions,) of bool.

        Args:
            guess: scores by client.
            truth: of the run.
            client: its number.
        """
        raise NotImplementedError


class SampleMembership(Detection):
    """AUC of the question which candidates a client trains on."""

    metric = "membership AUC"

    def answers(self, guess: Guess, truth: Truth, client: int) -> Array:
        """Return for each candidate True if it is among the client's samples, (candidates,)."""

        def compared() -> Array:
            # samples are equal if their bytes are; converting types first makes these comparable
            samples = truth.federation.shards[client].x
            training = set(sample_keys(samples))
            candidates = np.asarray(guess.details["candidates"]).astype(samples.dtype)
            return np.asarray([key in training for key in sample_keys(candidates)])

        answers: Array = guess.once(truth, ("samples", client), compared)
        return answers


class MembershipAtLowRate(SampleMembership):
    """True positive rate of the same at a low false positive rate.

    Args:
        rate: of false positives.
    """

    def __init__(self, rate: float = FALSE_POSITIVES) -> None:
        self.rate = rate
        self.metric = f"membership TPR at {100 * rate:g} % FPR"

    def why_not(self, guess: Guess, truth: Truth) -> str | None:
        """Return why there is no such rate: it is less than one non-member.

        Args:
            guess: scores by client.
            truth: of the run.
        """
        members = 0
        questions = 0
        for client in guess.values:
            answers = self.answers(guess, truth, client)
            members += int(answers.sum())
            questions += len(answers)
        others = questions - members
        needed = math.ceil(1 / self.rate - ROUNDING)
        if others >= needed:
            return None
        return (
            f"a false positive rate of {100 * self.rate:g} % takes {needed} non-members or more, "
            f"and the attack was asked about {others}"
        )

    def summary(self, units: Array) -> float:
        """Return the true positive rate over all questions.

        Args:
            units: (n, candidates, 2).
        """
        scores, answers = units.reshape(-1, 2).T
        return true_positive_rate(scores, answers > 0, self.rate)

    def exact_interval(self, units: Array) -> tuple[float, float] | None:
        """Return the Clopper–Pearson interval of the rate; None where there are no members.

        Args:
            units: (n, candidates, 2).
        """
        members = int((units.reshape(-1, 2)[:, 1] > 0).sum())
        if not members:
            return None
        detected = round(self.summary(units) * members)
        missed = members - detected
        tail = (1 - LEVEL) / 2
        low = betaincinv(detected, missed + 1, tail) if detected else 0.0
        high = betaincinv(detected + 1, missed, 1 - tail) if missed else 1.0
        return float(low), float(high)


# true positive rates of every attack on membership
AT_LOW_RATES = (MembershipAtLowRate(), MembershipAtLowRate(LOWEST_RATE))


class ClassPresence(Detection):
    """AUC of the question which classes a client holds."""

    metric = "class presence AUC"

    def answers(self, guess: Guess, truth: Truth, client: int) -> Array:
        """Return for each class True if the client holds samples of it, (classes,)."""
        return truth.label_counts(client) > 0


class MeanCosine(Scorer):
    """Mean |cos| of guessed directions and clients' mean samples."""

    metric = "|cos| with the mean sample"

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return the |cos| of each client, (n,).

        Args:
            guess: directions (D,) by client.
            truth: of the run.
        """
        return self._cosines(guess, truth, list(guess.values), None)

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the |cos| with mean samples whose numbers are shuffled.

        Means of other clients are no control: images of all clients have a common mean.

        Args:
            guess: directions (D,) by client.
            truth: of the run.
            draw: source of the shuffle.
        """
        return self._cosines(guess, truth, list(guess.values), draw)

    def _cosines(
        self, guess: Guess, truth: Truth, clients: list[int], draw: np.random.Generator | None
    ) -> Array:
        cosines = []
        for direction, client in guess.beside(clients):
            samples = truth.federation.shards[client].x
            mean = flat_rows(samples).mean(0)
            if draw is not None:
                mean = draw.permutation(mean)
            cosines.append(abs(cosine(direction, mean)))
        return np.asarray(cosines)


class SubspaceAttack(Attack):
    """Base class of attacks on shared eigenvectors."""

    source = SOURCE
    reads = ("vectors",)
    hidden_by = (MASK, SEALS)
    takes_samples: ClassVar[bool] = True

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        config = knowledge.config
        if "vectors" not in config or "width" not in config:
            return "not applicable: clients of this protocol share no eigenvectors"
        if config.get("features", "identity") != "identity":
            return "not applicable: the eigenvectors are of features, not of the samples themselves"
        if self.takes_samples and knowledge.samples is None:
            return base.NO_SAMPLES
        if not _others(view, knowledge):
            return (
                "not applicable: no eigenvectors of another client can be read; they are sealed or "
                "masked, and no client gives its secrets"
            )
        return None


def _others(view: View, knowledge: Knowledge) -> Mapping[int, Array]:
    """Return the eigenvectors of clients that do not collude."""
    others = {}
    for client, vectors in sorted(observed_subspaces(view, knowledge).items()):
        if client not in knowledge.colluders:
            others[client] = vectors
    return others


class SubspaceMembership(SubspaceAttack):
    """Membership of candidates in clients' data, by their energy in span(V_i).

    Candidates are the samples that the adversary knows, some of them members.
    """

    name = "subspace-membership"
    learns = "whether a record is in a client's data"
    harm = Harm.MEMBERS
    needs = f"{NEEDS}, and candidate samples, of which some may be clients' own"
    scorer = SampleMembership()
    further = AT_LOW_RATES

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the energy of each candidate by client, (candidates,).

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        candidates = knowledge.inputs
        guesses = {}
        for client, vectors in _others(view, knowledge).items():
            guesses[client] = energies(vectors, candidates)
        return Guess("membership", guesses, {"candidates": candidates})


class SubspaceComposition(SubspaceAttack):
    """Classes that clients hold, by the mean energy of public samples of a class in span(V_i)."""

    name = "subspace-composition"
    learns = "which labels a client holds"
    harm = Harm.CONTENTS
    needs = f"{NEEDS}, and public samples with labels"
    scorer = ClassPresence()

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the mean energy of each class by client, (classes,), relative to all clients'.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        inputs = knowledge.inputs
        table = {}
        for client, vectors in _others(view, knowledge).items():
            inside = energies(vectors, inputs)
            table[client] = _class_means(inside, knowledge.labels, knowledge.classes)
        # Some classes fit well into any span, so only differences between clients are evidence.
        common = np.mean(list(table.values()), axis=0)
        beyond = {client: means - common for client, means in table.items()}
        return Guess("classes", beyond)


def _class_means(values: Array, labels: Array, classes: int) -> Array:
    """Return the mean of values by class, (classes,); of a class without samples, that of all."""
    means = np.full(classes, values.mean())
    for k in range(classes):
        of_class = values[labels == k]
        if len(of_class):
            means[k] = of_class.mean()
    return means


class MeanImage(SubspaceAttack):
    """Direction of each client's mean sample: its first eigenvector."""

    name = "mean-image"
    learns = "the direction of the mean of a client's samples"
    harm = Harm.CONTENTS
    needs = NEEDS
    scorer = MeanCosine()
    takes_samples = False

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the direction by client, (D,), of positive sum.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        guesses = {}
        for client, vectors in _others(view, knowledge).items():
            first = vectors[0]
            # an eigenvector has no sign of its own, and pixels are not negative
            if first.sum() < 0:
                first = -first
            guesses[client] = first
        return Guess("mean samples", guesses)
