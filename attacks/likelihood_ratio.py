"""Membership of candidates in a client's data, by a likelihood ratio (LiRA; Carlini et al. 2022).

Shadow models are trained as the client's was, each on some of the candidates. For a candidate
(x, y) and a model with the predictions p, the statistic is

    φ = log p_y − log(1 − p_y),

which is nearly normal over models. Of the shadow models that were trained on the candidate φ has
the mean μ_in and the deviation σ_in, of the others μ_out and σ_out. The score of the client's own
model, with φ, is

- online: log N(φ; μ_in, σ_in²) − log N(φ; μ_out, σ_out²),
- offline: (φ − μ_out) / σ_out, which orders candidates as the paper's Pr[N(μ_out, σ_out²) < φ]
  does. It takes no model that was trained on the candidate, so those could be trained beforehand.

Few shadow models give a poor estimate of each candidate's variance. In this case one variance is
shared by all candidates and by both kinds of models, as in the authors' code. With two variances, a
model that is far more confident of its own samples than the shadow models are would count as
trained without them.

All shadow models are trained in one batch, as the run's clients are. They have its clip and noise
where clients apply them to what leaves, but not the noise of a training with DP-SGD.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from securecluster.attacks.arrays import as_array
from securecluster.attacks.base import MASK, NO_LABELS, SUMS, Attack, Guess, Harm, Knowledge, View
from securecluster.attacks.client_models import ShownModel, shown_models, why_not
from securecluster.attacks.shadow_training import locally_trained
from securecluster.attacks.subspaces import AT_LOW_RATES, SampleMembership
from securecluster.core.lazy_torch import torch
from securecluster.data.federation import Shard
from securecluster.privacy.dp.gaussian_mechanism import Clip

Array = NDArray[np.float64]
Inside = NDArray[np.bool_]
Counts = NDArray[np.int64]

SHADOWS = 64
SEEN = 4  # shadow models, on average, that are trained on a candidate
MOST_SHADOWS = 512
MOST_NUMBERS = 1 << 26  # parameters of all shadow models, which are in memory at once
FEWEST_SHADOWS = 8  # of any network
ENOUGH = 64  # shadow models of each kind that give every candidate a variance of its own
MOST_SIZES = 3  # numbers of samples for which shadow models are trained
USUAL_SIZE = 40  # samples of a client that does not send its number
SMALLEST = 1e-6  # deviation of φ


class LikelihoodRatio(Attack):
    """Membership of candidates in clients' data, by shadow models with and without each of them.

    Args:
        shadows: number of shadow models; more are trained if these see candidates too seldom.
        seed: of their data.

    Attributes:
        online: True to use the models that were trained on a candidate, too.
        further: other scores of the same guess.
    """

    name = "membership-likelihood-ratio"
    learns = "whether a record is in a client's data"
    harm = Harm.MEMBERS
    source = "Carlini et al. 2022, Membership Inference Attacks From First Principles (online)"
    needs = (
        "single updates of the first round, or models that clients trained alone, without a mask, "
        "and candidate samples with labels, of which some may be clients' own"
    )
    scorer = SampleMembership()
    reads = ("delta",)
    hidden_by = (MASK, SUMS)
    online: ClassVar[bool] = True
    further = AT_LOW_RATES

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
        reason = why_not(view, knowledge)
        if reason is None:
            knowledge.expect("lr", "epochs", "batch_size", "optimizer", "momentum")
        return reason

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the score of each candidate by client, (candidates,).

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        shown = shown_models(view, knowledge)
        guesses: dict[int, Array] = {}
        for group, clients in _alike(shown).items():
            inside, shadows = self._shadows(knowledge, group.size, shown[clients[0]])
            shadow = confidences(shadows, knowledge)
            models = torch.stack([shown[client].model for client in clients])
            observed = confidences(models, knowledge)
            for client, row in zip(clients, observed, strict=True):
                guesses[client] = scores(row, shadow, inside, self.online)
        ordered = {client: guesses[client] for client in shown}
        details = {"candidates": knowledge.inputs}
        return Guess("membership", ordered, details)

    def _shadows(
        self, knowledge: Knowledge, size: int, shown: ShownModel
    ) -> tuple[Inside, torch.Tensor]:
        """Return which candidates shadow models are trained on, and the models.

        Args:
            knowledge: with the candidates as its samples.
            size: number of samples to train on.
            shown: a client's model, which is trained alike.

        Returns:
            Booleans (shadows, candidates), and models (shadows, d).
        """
        x = knowledge.inputs
        y = knowledge.labels
        draw = np.random.default_rng(self.seed)
        room = MOST_NUMBERS // knowledge.dimension
        largest = max(FEWEST_SHADOWS, min(room, MOST_SHADOWS))
        inside = dealt(len(y), size, self.shadows, largest, draw)
        shards = [Shard(x[row], y[row], x[:0], y[:0]) for row in inside]
        # numbers of no client, so that no batch is one of the run's
        first = knowledge.clients
        numbers = range(first, first + len(shards))
        updates = locally_trained(knowledge, shards, numbers, shown.steps, shown.initial)
        sent = as_sent(updates, knowledge, self.seed)
        return inside, shown.initial.cpu() + sent


class OfflineLikelihoodRatio(LikelihoodRatio):
    """LiRA that uses only shadow models trained without the candidate."""

    name = "membership-likelihood-ratio-offline"
    learns = "whether a record is in a client's data"
    harm = Harm.MEMBERS
    source = "Carlini et al. 2022, Membership Inference Attacks From First Principles (offline)"
    online: ClassVar[bool] = False


def dealt(
    candidates: int, size: int, shadows: int, largest: int, draw: np.random.Generator
) -> Inside:
    """Return which candidates each shadow model is trained on, (shadows, candidates).

    Candidates are shuffled and dealt out in hands of equal size, over and over, so that each is
    seen about equally often. No model sees more than half of them.

    Args:
        candidates: number of candidates, 2 or more.
        size: samples of a shadow model.
        shadows: number of shadow models; more are made if they see a candidate too seldom.
        largest: largest number of shadow models.
        draw: source of the order.
    """
    # half at most, so that every candidate also has models that were trained without it
    hand = max(1, min(size, candidates // 2))
    needed = math.ceil(SEEN * candidates / hand)
    count = min(max(shadows, needed), largest)
    hands_of_a_deck = candidates // hand
    inside = np.zeros((count, candidates), dtype=bool)
    order = np.arange(candidates)
    for k in range(count):
        position = k % hands_of_a_deck
        if position == 0:
            order = draw.permutation(candidates)
        first = position * hand
        chosen = order[first : first + hand]
        inside[k, chosen] = True
    return inside


def confidences(models: torch.Tensor, knowledge: Knowledge) -> Array:
    """Return φ of each candidate under each model, (models, candidates).

    Args:
        models: (models, d).
        knowledge: with the candidates as its samples.
    """
    x = torch.as_tensor(knowledge.inputs).to(models)
    labels = torch.as_tensor(knowledge.labels).long()
    y = labels[:, None]
    rows = []
    with torch.no_grad():
        for model in models:
            parameters = knowledge.parameters(model)
            outputs = knowledge.network.call(parameters, x).double()
            true_class = outputs.gather(1, y)[:, 0]
            # log(1 − p_y) from the other outputs: of a sure model 1 − p_y is rounded to zero
            others = outputs.scatter(1, y, -torch.inf).logsumexp(1)
            rows.append(as_array(true_class - others))
    # NaN of a model that diverged becomes φ = 0, which is p_y = 1/2
    return np.asarray(np.nan_to_num(np.stack(rows)))


def scores(observed: Array, shadow: Array, inside: Inside, online: bool = True) -> Array:
    """Return how likely each candidate is a member, (candidates,).

    Args:
        observed: φ of each candidate under the attacked model, (candidates,).
        shadow: φ of each candidate under the shadow models, (shadows, candidates).
        inside: True where a shadow model was trained on a candidate, (shadows, candidates).
        online: False to use only shadow models that were not trained on a candidate.
    """
    mean_out, squares_out = _moments(shadow, ~inside)
    count_out = (~inside).sum(0)
    if not online:
        deviation_out = _deviations([squares_out], [count_out])
        return np.asarray((observed - mean_out) / deviation_out)
    mean_in, squares_in = _moments(shadow, inside)
    count_in = inside.sum(0)
    if min(count_in.min(), count_out.min()) >= ENOUGH:
        deviation_in = _deviations([squares_in], [count_in])
        deviation_out = _deviations([squares_out], [count_out])
    else:
        deviation_in = _deviations([squares_in, squares_out], [count_in, count_out])
        deviation_out = deviation_in
    unseen = ~inside.any(0)
    if unseen.any():
        # a candidate that no shadow model saw moves as far as the others do on average
        shift = 0.0
        if not unseen.all():
            shifts = mean_in - mean_out
            shift = float(shifts[~unseen].mean())
        mean_in = np.where(unseen, mean_out + shift, mean_in)
    member = _log_density(observed, mean_in, deviation_in)
    other = _log_density(observed, mean_out, deviation_out)
    return np.asarray(member - other)


def _moments(shadow: Array, chosen: Inside) -> tuple[Array, Array]:
    """Return each candidate's mean over the chosen models, and their squared deviations' sum.

    Args:
        shadow: φ, (shadows, candidates).
        chosen: which models are chosen for which candidate, (shadows, candidates).

    Returns:
        Means and sums, (candidates,) each.
    """
    counts = chosen.sum(0)
    totals = np.where(chosen, shadow, 0.0).sum(0)
    means = totals / np.maximum(counts, 1)
    differences = shadow - means
    squares = np.where(chosen, differences**2, 0.0)
    return means, squares.sum(0)


def _deviations(squares: Sequence[Array], counts: Sequence[Counts]) -> Array:
    """Return each candidate's standard deviation, or one for all where models are few.

    Args:
        squares: sums of squared deviations from one mean or several, (candidates,) each.
        counts: models behind each of them, (candidates,) each.
    """
    # each mean takes one degree of freedom
    freedoms = [np.maximum(count - 1, 0) for count in counts]
    freedom = np.sum(freedoms, axis=0)
    sum_of_squares = np.sum(squares, axis=0)
    if len(counts) == 1 and counts[0].min() >= ENOUGH:
        deviations = np.sqrt(sum_of_squares / freedom)
    else:
        variance = sum_of_squares.sum() / max(1, freedom.sum())
        deviations = np.full(len(sum_of_squares), math.sqrt(variance))
    return np.asarray(np.maximum(deviations, SMALLEST))


def _log_density(values: Array, means: Array, deviations: Array) -> Array:
    """Return log N(value; mean, deviation²), (n,)."""
    scaled = (values - means) / deviations
    constant = math.log(2 * math.pi) / 2
    return np.asarray(-np.log(deviations) - constant - scaled**2 / 2)


class Group(NamedTuple):
    """Group of clients that share shadow models, which are expensive.

    Attributes:
        size: number of samples, which is near to that of each client.
        number: of the initial model.
        steps: numbers of the calls in which their models were trained.
    """

    size: int
    number: int
    steps: tuple[int, ...]


def _alike(shown: Mapping[int, ShownModel]) -> dict[Group, list[int]]:
    """Return the clients that are of about one size and started alike."""
    representative = _representative([_size(model) for model in shown.values()])
    groups: dict[Group, list[int]] = {}
    for client, model in shown.items():
        size = _nearest(representative, _size(model))
        group = Group(size, model.number, model.steps)
        groups.setdefault(group, []).append(client)
    return groups


def _size(model: ShownModel) -> int:
    """Return the number of samples that a model was trained on, or a usual one."""
    return round(model.size or USUAL_SIZE)


def _nearest(sizes: Sequence[int], size: int) -> int:
    """Return the number of samples that is nearest to a client's; the first of several."""
    return min(sizes, key=lambda other: abs(other - size))


def _representative(sizes: Sequence[int]) -> list[int]:
    """Return all numbers of samples, or a few quantiles of many."""
    distinct = sorted(set(sizes))
    if len(distinct) <= MOST_SIZES:
        return distinct
    # midpoints of equally large groups, such as 1/6, 1/2 and 5/6 for three
    shares = np.linspace(0, 1, 2 * MOST_SIZES + 1)[1::2]
    quantiles = np.quantile(sizes, shares)
    return [int(value) for value in quantiles]


def as_sent(updates: torch.Tensor, knowledge: Knowledge, seed: int) -> torch.Tensor:
    """Return what clients would have sent: clipped, and with noise where they add it.

    Args:
        updates: displacements from θ_0, (n, d).
        knowledge: of the configuration.
        seed: of the noise.
    """
    config: Any = knowledge.config
    clip = config.get("clip")
    if clip is None or config.get("dp_unit", "client") != "client":
        return updates
    # the order of a client's own pipeline: clip first, so that the noise fits the sensitivity
    norm = float(clip)
    clipped = Clip(norm, nonfinite_as_zeros=True).forward(updates, 0)
    noise = float(config.get("noise") or 0.0)
    if not noise or config.get("placement", "local") != "local":
        return clipped
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(clipped.shape, generator=generator, dtype=clipped.dtype)
    return clipped + noise * norm * normal
