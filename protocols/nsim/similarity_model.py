"""The similarity model, which predicts the similarity of two users' data from their models.

Its inputs are the last layers of the two models (Pacheco et al. 2021, Section 3.1). The paper says
that the network takes two models' weights and that a grid search determines its architecture. Here
both models pass one encoder, and the features of a pair do not depend on its order: this, and all
numbers here, are not in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.metrics import pearson
from securecluster.core.lazy_torch import torch
from securecluster.protocols import authoring as fl
from securecluster.protocols.nsim import pair_network
from securecluster.protocols.nsim.pair_network import PairNetwork, PairNetworkConfig

LEAST_USERS = 8
UNSEEN = 0.2  # share of the users that take no part in the fit
VALIDATION = 0.15  # share of the users for early stopping and the choice of the architecture
HELD_PAIRS = 0.1  # share of the training users' pairs that are not trained on
CLIP = 5.0  # standard deviations to which a standardised weight is clipped

GRID = (
    PairNetworkConfig(width=256, embedding=64),
    PairNetworkConfig(width=128, embedding=32),
    PairNetworkConfig(width=512, embedding=128),
    PairNetworkConfig(width=256, embedding=64, dropout=0.2),
)
"""The architectures that the search compares; without a search the first one is used."""


@dataclass(frozen=True, eq=False)
class SimilarityModel:
    """The parameters of `predict`.

    Rows are standardised by mean and scale (q,), then the networks' predictions are averaged.
    """

    mean: torch.Tensor
    scale: torch.Tensor
    networks: list[PairNetwork]


@dataclass(frozen=True)
class Trial:
    """One architecture of the grid search.

    Args:
        plan: the architecture.
        pearson: correlation of predicted and true similarities on the validation users' pairs.
    """

    plan: PairNetworkConfig
    pearson: float


@dataclass(frozen=True, eq=False)
class Fitted:
    """A fitted similarity model and its accuracy; a correlation is NaN where it is undefined.

    Args:
        estimator: the similarity model.
        pearson: correlation on the pairs of unseen users.
        pearson_pairs: correlation on pairs of training users that were not trained on.
        grid: the trials of the search.
        unseen: (k,) the users that took no part in the fit.
        true: (k, k) similarities of the unseen users.
        predicted: (k, k) predictions for them.
    """

    estimator: SimilarityModel
    pearson: float
    pearson_pairs: float
    grid: list[Trial]
    unseen: list[int]
    true: torch.Tensor
    predicted: torch.Tensor


@dataclass(frozen=True)
class _Split:
    """The division of the users, by number."""

    unseen: NDArray[np.int64]
    folds: list[NDArray[np.int64]]  # validation users of each network

    def train(self, users: int, fold: int) -> NDArray[np.int64]:
        """Return the training users of a network.

        Args:
            users: number of all users.
            fold: number of the network.
        """
        held = np.concatenate([self.unseen, self.folds[fold]])
        return np.setdiff1d(np.arange(users), held)


@dataclass(frozen=True, eq=False)
class _Users:
    """The synthetic users of a fit."""

    rows: torch.Tensor  # (u, q)
    similarity: torch.Tensor  # (u, u)
    held_pairs: torch.Tensor  # (u, u) bool, pairs that are not trained on
    split: _Split


def fit(
    rows: torch.Tensor,
    similarity: torch.Tensor,
    randomness: fl.Randomness,
    search: bool = True,
    grid: Sequence[PairNetworkConfig] = GRID,
    networks: int = 3,
) -> Fitted:
    """Train the similarity model on synthetic users, whose similarity is known.

    A fifth of the users takes no part and measures the accuracy. The architecture is chosen by the
    pairs of validation users. Then `networks` networks of this architecture are averaged, each with
    its own validation users for early stopping.

    Args:
        rows: (u, q) the users' last layers.
        similarity: (u, u) symmetric, in [0, 1].
        randomness: of the splits, the initial weights and the mini-batches.
        search: whether all of `grid` is compared; otherwise its first entry is used.
        grid: the architectures.
        networks: number of networks to average.

    Raises:
        UsageError: too few users, wrong shapes, a similarity outside [0, 1], an empty grid.
        UpdateError: a row that is not finite.
    """
    _check(rows, similarity, grid, networks)
    rows = rows.detach().float().cpu()
    split = _split(len(rows), networks, randomness)
    users = _Users(
        rows=rows,
        similarity=similarity.detach().float().cpu(),
        held_pairs=_held_pairs(len(rows), randomness),
        split=split,
    )
    # statistics of training users only, so that unseen users have no influence
    training_rows = rows[split.train(len(rows), 0)]
    mean = training_rows.mean(0)
    scale = training_rows.std(0).clamp_min(1e-8)
    standardised = replace(users, rows=_standard(rows, mean, scale))

    # grid search, with the validation users of the first network
    trials = []
    candidates = []
    plans = grid if search else grid[:1]
    for number, plan in enumerate(plans):
        network, score = _member(standardised, 0, plan, randomness, number)
        trials.append(Trial(plan, score))
        candidates.append(network)
    best = max(range(len(trials)), key=lambda k: trials[k].pearson)

    # the best architecture's first network is trained already
    members = [candidates[best]]
    for fold in range(1, networks):
        network, _ = _member(standardised, fold, trials[best].plan, randomness, best)
        members.append(network)
    return _evaluated(SimilarityModel(mean, scale, members), trials, users)


def predict(estimator: SimilarityModel, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the predicted similarities of all pairs of rows.

    Args:
        estimator: the similarity model.
        a: (m, q).
        b: (r, q).

    Returns:
        (m, r) float32 in [0, 1]; predict(a, b) equals predict(b, a).T to the last bit.

    Raises:
        UsageError: rows of another length than the model was fitted to.
        UpdateError: a row that is not finite.
    """
    for rows in (a, b):
        if rows.ndim != 2 or rows.shape[1] != len(estimator.mean):
            raise fl.UsageError(
                f"the estimator was fitted to layers of {len(estimator.mean)} numbers, not "
                f"{tuple(rows.shape)}: hand in those"
            )
        _check_finite(rows)
    rows_a = _standard(a.detach().float().cpu(), estimator.mean, estimator.scale)
    rows_b = _standard(b.detach().float().cpu(), estimator.mean, estimator.scale)
    predictions = [pair_network.pairwise(network, rows_a, rows_b) for network in estimator.networks]
    return torch.stack(predictions).mean(0)


def _member(
    users: _Users, fold: int, plan: PairNetworkConfig, randomness: fl.Randomness, number: int
) -> tuple[PairNetwork, float]:
    """Train one network.

    Args:
        users: with standardised rows.
        fold: of its validation users.
        plan: the architecture.
        randomness: of the fit.
        number: of the architecture in the grid, which names the draws.

    Returns:
        The network, and its correlation on the validation users' pairs.
    """
    train = torch.as_tensor(users.split.train(len(users.rows), fold))
    validation = torch.as_tensor(users.split.folds[fold])
    validation_rows = users.rows[validation]
    validation_similarity = _upper(_among(users.similarity, validation))

    def score(network: PairNetwork) -> float:
        predicted = pair_network.pairwise(network, validation_rows, validation_rows)
        return pearson(_upper(predicted), validation_similarity)

    pairs = pair_network.TrainingPairs(
        rows=users.rows[train],
        similarity=_among(users.similarity, train),
        weight=(~_among(users.held_pairs, train)).float(),
    )
    initial_draws = randomness.generator("pair network", number, fold)
    initial = pair_network.start(users.rows.shape[1], plan, initial_draws)
    seed = randomness.integer("pair network", number, fold, "batches")
    return pair_network.trained(initial, pairs, plan, seed, score)


def _evaluated(estimator: SimilarityModel, grid: list[Trial], users: _Users) -> Fitted:
    """Evaluate a model on unseen users and on held-out pairs.

    Args:
        estimator: the similarity model.
        grid: the trials of the search.
        users: with their original rows.
    """
    split = users.split
    unseen = torch.as_tensor(split.unseen)
    true = _among(users.similarity, unseen)
    unseen_rows = users.rows[unseen]
    predicted = predict(estimator, unseen_rows, unseen_rows)

    # pairs that were held out, of users that every network was trained on
    held_users = np.concatenate([split.unseen, *split.folds])
    training_users = np.setdiff1d(np.arange(len(users.rows)), held_users)
    trained_on = torch.as_tensor(training_users)
    held = _among(users.held_pairs, trained_on).triu(1)
    rows = users.rows[trained_on]
    predicted_pairs = predict(estimator, rows, rows)[held]
    true_pairs = _among(users.similarity, trained_on)[held]
    return Fitted(
        estimator=estimator,
        pearson=pearson(_upper(predicted), _upper(true)),
        pearson_pairs=pearson(predicted_pairs.numpy(), true_pairs.numpy()),
        grid=grid,
        unseen=split.unseen.tolist(),
        true=true,
        predicted=predicted,
    )


def _split(users: int, networks: int, randomness: fl.Randomness) -> _Split:
    """Draw the unseen users, and each network's validation users.

    Args:
        users: number of users.
        networks: number of networks.
        randomness: of the fit.
    """
    generator = randomness.generator("pair network", "users")
    order = generator.permutation(users).astype(np.int64)
    unseen = max(2, round(UNSEEN * users))
    validation = max(2, round(VALIDATION * users))
    remaining = order[unseen:]
    # consecutive slices, which are disjoint as long as there are enough users
    folds = []
    for k in range(networks):
        rotated = np.roll(remaining, -k * validation)
        folds.append(rotated[:validation])
    return _Split(order[:unseen], folds)


def _held_pairs(users: int, randomness: fl.Randomness) -> torch.Tensor:
    """Draw the pairs that are not trained on, (u, u) bool, symmetric."""
    draws = randomness.generator("pair network", "pairs").random((users, users))
    held = np.triu(draws < HELD_PAIRS, 1)
    return torch.as_tensor(held | held.T)


def _standard(rows: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return rows (n, q) standardised by mean and scale (q,), and clipped."""
    return ((rows - mean) / scale).clamp(-CLIP, CLIP)


def _upper(square: torch.Tensor) -> NDArray[np.float32]:
    """Return the entries above the diagonal, one for each pair."""
    above_diagonal = np.triu_indices(len(square), 1)
    pairs: NDArray[np.float32] = square.numpy()[above_diagonal]
    return pairs


def _among(square: torch.Tensor, users: torch.Tensor) -> torch.Tensor:
    """Return the entries of pairs of some users."""
    return square[users][:, users]


def _check(
    rows: torch.Tensor, similarity: torch.Tensor, grid: Sequence[PairNetworkConfig], networks: int
) -> None:
    """Check the arguments of `fit`.

    Raises:
        UsageError: too few users, wrong shapes, a similarity outside [0, 1], an empty grid.
        UpdateError: a row that is not finite.
    """
    if rows.ndim != 2 or len(rows) < LEAST_USERS:
        raise fl.UsageError(
            f"the pair network learns from the layers (u, q) of at least {LEAST_USERS} synthetic "
            f"users, not {tuple(rows.shape)}"
        )
    if similarity.shape != (len(rows), len(rows)):
        raise fl.UsageError(
            f"similarities of {len(rows)} users are a square of that size, not "
            f"{tuple(similarity.shape)}"
        )
    in_range = ((similarity >= 0) & (similarity <= 1)).all()
    if not in_range or not torch.equal(similarity, similarity.T):
        raise fl.UsageError(
            "similarities are symmetric numbers in [0, 1]: divide the LCSS by the shorter length"
        )
    if not grid or networks < 1:
        raise fl.UsageError(
            "a fit needs at least one architecture in its grid and at least one network"
        )
    _check_finite(rows)


def _check_finite(rows: torch.Tensor) -> None:
    """Raise UpdateError for rows that are not finite, by the users' numbers."""
    finite = torch.isfinite(rows).all(1)
    bad = (~finite).nonzero().flatten().tolist()
    if bad:
        raise fl.UpdateError(
            f"the layers of user(s) {', '.join(map(str, bad[:5]))} are not finite: lower the "
            "learning rate (lr)"
        )


__all__ = [
    "GRID",
    "Fitted",
    "PairNetwork",
    "PairNetworkConfig",
    "SimilarityModel",
    "Trial",
    "fit",
    "predict",
]
