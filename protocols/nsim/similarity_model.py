"""The pair network: predicts how alike two users' data are from the last layers of their models
(Pacheco et al. 2021, 3.1).

The paper says that the network takes two models' weights and that a grid search finds its
architecture. Both models go through one encoder, and the features of the pair do not depend on its
order: this shape, and all numbers here, are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.metrics import pearson
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.errors import UpdateError, UsageError
from securecluster.protocols.nsim.pair_network import (
    PairNetwork,
    PairNetworkConfig,
    pairwise,
    start,
    trained,
)

LEAST_USERS = 8
# shares of the users: in no part of the fit; to stop by and to choose the architecture by
UNSEEN, VALIDATION = (
    0.2,
    0.15,
)
HELD_PAIRS = 0.1  # share of the training users' pairs that are not trained on
CLIP = 5.0  # standard deviations beyond which a weight counts as that far

GRID = (
    PairNetworkConfig(width=256, embedding=64),
    PairNetworkConfig(width=128, embedding=32),
    PairNetworkConfig(width=512, embedding=128),
    PairNetworkConfig(width=256, embedding=64, dropout=0.2),
)
"""The architectures the search compares; the first is used without a search."""


@dataclass(frozen=True, eq=False)
class SimilarityModel:
    """What `predict` needs: rows are standardised by mean and scale (q,), then the networks'
    predictions are averaged.
    """

    mean: torch.Tensor
    scale: torch.Tensor
    networks: list[PairNetwork]


@dataclass(frozen=True)
class Trial:
    """One architecture of the grid search, and Pearson's correlation on the validation users'
    pairs.
    """

    plan: PairNetworkConfig
    pearson: float


@dataclass(frozen=True, eq=False)
class Fitted:
    """A fitted estimator and how well it predicts.

    `unseen` are the users in no part of the fit; `true` and `predicted` (k, k) are theirs.
    `pearson_pairs` is over pairs of training users that were not trained on. A correlation is NaN
    where there is nothing to correlate.
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
    """Users by number."""

    unseen: NDArray[np.int64]
    folds: list[NDArray[np.int64]]  # validation users of each network

    def train(self, users: int, fold: int) -> NDArray[np.int64]:
        return np.setdiff1d(np.arange(users), np.concatenate([self.unseen, self.folds[fold]]))


def fit(
    rows: torch.Tensor,
    similarity: torch.Tensor,
    randomness: Randomness,
    search: bool = True,
    grid: Sequence[PairNetworkConfig] = GRID,
    networks: int = 3,
) -> Fitted:
    """Train the pair network on synthetic users, whose similarity is known.

    A fifth of the users is kept out of everything and judges the result. The architecture is chosen
    by the pairs of validation users; then `networks` networks of it, each with validation users of
    its own that it stops by, are averaged.

    Args:
        rows: the users' last layers, (u, q).
        similarity: (u, u) symmetric, in [0, 1].
        randomness: of the splits, the initial weights and the mini-batches.
        search: whether the whole `grid` is tried, or its first entry taken.

    Raises:
        UsageError: too few users, wrong shapes, a similarity outside [0, 1], an empty grid.
        UpdateError: a row that is not finite.
    """
    _check(rows, similarity, grid, networks)
    rows, similarity = rows.detach().float().cpu(), similarity.detach().float().cpu()
    split, pairs = _split(len(rows), networks, randomness), _held_pairs(len(rows), randomness)
    known = split.train(len(rows), 0)
    mean, scale = rows[known].mean(0), rows[known].std(0).clamp_min(1e-8)
    data = _standard(rows, mean, scale)
    tried: list[tuple[Trial, PairNetwork]] = []
    for k, plan in enumerate(grid if search else grid[:1]):
        network, score = _member(data, similarity, pairs, split, 0, plan, randomness, k)
        tried.append((Trial(plan, score), network))
    best = max(range(len(tried)), key=lambda k: tried[k][0].pearson)
    members = [tried[best][1]]
    for fold in range(1, networks):
        members.append(
            _member(data, similarity, pairs, split, fold, tried[best][0].plan, randomness, best)[0]
        )
    estimator = SimilarityModel(mean, scale, members)
    return _judged(estimator, [trial for trial, _ in tried], rows, similarity, pairs, split)


def predict(estimator: SimilarityModel, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Predicted similarities of all pairs of rows of a (m, q) and b (r, q): (m, r) float32 in [0,
    1].

    predict(a, b) equals predict(b, a).T to the last bit.

    Raises:
        UsageError: rows of another length than the estimator was fitted to.
        UpdateError: a row that is not finite.
    """
    for rows in (a, b):
        if rows.ndim != 2 or rows.shape[1] != len(estimator.mean):
            raise UsageError(
                f"the estimator was fitted to layers of {len(estimator.mean)} numbers, not "
                f"{tuple(rows.shape)}: hand in those"
            )
        _check_finite(rows)
    left, right = (
        _standard(rows.detach().float().cpu(), estimator.mean, estimator.scale) for rows in (a, b)
    )
    each = [pairwise(network, left, right) for network in estimator.networks]
    return torch.stack(each).mean(0)


def _member(
    data: torch.Tensor,
    similarity: torch.Tensor,
    pairs: torch.Tensor,
    split: _Split,
    fold: int,
    plan: PairNetworkConfig,
    randomness: Randomness,
    number: int,
) -> tuple[PairNetwork, float]:
    """One network, and its correlation on the validation users of its fold."""
    train, validation = (
        torch.as_tensor(users) for users in (split.train(len(data), fold), split.folds[fold])
    )
    judge = (data[validation], similarity[validation][:, validation])

    def score(network: PairNetwork) -> float:
        return pearson(*(_upper(t) for t in (pairwise(network, judge[0], judge[0]), judge[1])))

    weight = (~pairs[train][:, train]).float()
    first = start(data.shape[1], plan, randomness.generator("pair network", number, fold))
    draws = randomness.integer("pair network", number, fold, "batches")
    return trained(first, data[train], similarity[train][:, train], weight, plan, draws, score)


def _judged(
    estimator: SimilarityModel,
    grid: list[Trial],
    rows: torch.Tensor,
    similarity: torch.Tensor,
    pairs: torch.Tensor,
    split: _Split,
) -> Fitted:
    unseen = torch.as_tensor(split.unseen)
    true, predicted = similarity[unseen][:, unseen], predict(estimator, rows[unseen], rows[unseen])
    seen = torch.as_tensor(
        np.setdiff1d(np.arange(len(rows)), np.concatenate([split.unseen, *split.folds]))
    )
    held = pairs[seen][:, seen].triu(1)
    known = predict(estimator, rows[seen], rows[seen])[held]
    by_pairs = pearson(known.numpy(), similarity[seen][:, seen][held].numpy())
    return Fitted(
        estimator,
        pearson(_upper(predicted), _upper(true)),
        by_pairs,
        grid,
        split.unseen.tolist(),
        true,
        predicted,
    )


def _split(users: int, networks: int, randomness: Randomness) -> _Split:
    order = randomness.generator("pair network", "users").permutation(users).astype(np.int64)
    away = max(2, round(UNSEEN * users))
    each = max(2, round(VALIDATION * users))
    rest = order[away:]
    return _Split(order[:away], [np.roll(rest, -k * each)[:each] for k in range(networks)])


def _held_pairs(users: int, randomness: Randomness) -> torch.Tensor:
    drawn = np.triu(
        randomness.generator("pair network", "pairs").random((users, users)) < HELD_PAIRS, 1
    )
    return torch.as_tensor(drawn | drawn.T)


def _standard(rows: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return ((rows - mean) / scale).clamp(-CLIP, CLIP)


def _upper(square: torch.Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = square.numpy()[np.triu_indices(len(square), 1)]
    return found


def _check(
    rows: torch.Tensor, similarity: torch.Tensor, grid: Sequence[PairNetworkConfig], networks: int
) -> None:
    if rows.ndim != 2 or len(rows) < LEAST_USERS:
        raise UsageError(
            f"the pair network learns from the layers (u, q) of at least {LEAST_USERS} synthetic "
            f"users, not {tuple(rows.shape)}"
        )
    if similarity.shape != (len(rows), len(rows)):
        raise UsageError(
            f"similarities of {len(rows)} users are a square of that size, not "
            f"{tuple(similarity.shape)}"
        )
    if not ((similarity >= 0) & (similarity <= 1)).all() or not torch.equal(
        similarity, similarity.T
    ):
        raise UsageError(
            "similarities are symmetric numbers in [0, 1]: divide the LCSS by the shorter length"
        )
    if not grid or networks < 1:
        raise UsageError(
            "a fit needs at least one architecture in its grid and at least one network"
        )
    _check_finite(rows)


def _check_finite(rows: torch.Tensor) -> None:
    bad = (~torch.isfinite(rows).all(1)).nonzero().flatten().tolist()
    if bad:
        raise UpdateError(
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
