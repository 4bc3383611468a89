"""A symmetric network on pairs of rows, and how it is trained: what the estimator is made of
(ours).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from securecluster.core.lazy_torch import torch

USERS = 64  # of a mini-batch, which is all pairs of these users
CHUNK = 1 << 16  # pairs predicted at once
SLOPE = 0.1  # of the leaky ReLUs


@dataclass(frozen=True)
class PairNetworkConfig:
    """One architecture and its training: an encoder q-`width`-`embedding`, and a head on the
    features of a pair.

    Args:
        dropout: share of the hidden units that are left out while training.
        noise: standard deviation of what is added to standardised rows while training.
        steps: mini-batches, under a learning rate that rises to `lr` and falls to 0 along a cosine.
        decay: of the weights, as AdamW's.
    """

    width: int = 256
    embedding: int = 64
    head: int = 64
    dropout: float = 0.1
    noise: float = 0.0
    steps: int = 1500
    lr: float = 2e-3
    decay: float = 1e-4


@dataclass(frozen=True, eq=False)
class PairNetwork:
    """Weights: two dense layers to an embedding e, then on (|e_a − e_b|, e_a·e_b) two more and a
    sigmoid.
    """

    layers: list[torch.Tensor]  # w (o, i) and b (o,) in turn: two of the encoder, two of the head


def start(inputs: int, plan: PairNetworkConfig, draw: np.random.Generator) -> PairNetwork:
    """Initial weights, uniform within ±1/√(inputs of the layer)."""
    layers = []
    for i, o in (
        (inputs, plan.width),
        (plan.width, plan.embedding),
        (2 * plan.embedding, plan.head),
        (plan.head, 1),
    ):
        bound = 1 / math.sqrt(i)
        layers += [draw.uniform(-bound, bound, (o, i)), draw.uniform(-bound, bound, o)]
    return PairNetwork([torch.as_tensor(layer, dtype=torch.float32) for layer in layers])


def pairwise(network: PairNetwork, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Predictions for all pairs of standardised rows a (m, q), b (r, q): (m, r); at most CHUNK
    pairs, or one row's, at once.

    The mean of both orders, so that swapping a and b gives the same bits: sums of a matrix product
    may round by their place in it.
    """
    with torch.no_grad():
        left, right = _encode(network, a), _encode(network, b)
        return (_one_way(network, left, right) + _one_way(network, right, left).T) / 2


@dataclass(frozen=True, eq=False)
class TrainingPairs:
    """The users whose pairs a network is trained on.

    Args:
        rows: standardised, (u, q).
        similarity: (u, u).
        weight: (u, u), 0 for pairs that are not trained on.
    """

    rows: torch.Tensor
    similarity: torch.Tensor
    weight: torch.Tensor


def trained(
    network: PairNetwork,
    pairs: TrainingPairs,
    plan: PairNetworkConfig,
    seed: int,
    score: Callable[[PairNetwork], float],
    every: int = 100,
) -> tuple[PairNetwork, float]:
    """The network trained on the squared error of pairs by AdamW, as it was where `score` was
    greatest, and that score.

    Args:
        seed: of mini-batches, dropout and noise.
        every: steps between two scores.
    """
    draw = torch.Generator().manual_seed(seed)
    layers = [layer.clone().requires_grad_() for layer in network.layers]
    optimizer = torch.optim.AdamW(layers, lr=plan.lr, weight_decay=plan.decay)
    best, best_score = network, -math.inf
    for step in range(plan.steps):
        optimizer.param_groups[0]["lr"] = plan.lr * _rate(step / plan.steps)
        loss = _loss(PairNetwork(layers), pairs, plan, draw)
        gradients = torch.autograd.grad(loss, layers)
        for layer, gradient in zip(layers, gradients, strict=True):
            layer.grad = gradient
        optimizer.step()
        scored = (step + 1) % every == 0 or step + 1 == plan.steps
        if scored:
            current = PairNetwork([layer.detach().clone() for layer in layers])
            current_score = score(current)
            # a NaN, where nothing can be correlated, counts as an improvement
            if not current_score <= best_score:
                best, best_score = current, current_score
    return best, best_score


def _rate(progress: float) -> float:
    """A tenth of the steps up, the rest down along a cosine."""
    if progress < 0.1:
        return (progress + 0.01) / 0.11
    return (1 + math.cos(math.pi * (progress - 0.1) / 0.9)) / 2


def _loss(
    network: PairNetwork, pairs: TrainingPairs, plan: PairNetworkConfig, draw: torch.Generator
) -> torch.Tensor:
    """Mean squared error of all pairs of a few users."""
    users = torch.randperm(len(pairs.rows), generator=draw)[:USERS]
    i, j = torch.triu_indices(len(users), len(users), 1)
    x = pairs.rows[users]
    if plan.noise:
        x = x + plan.noise * torch.randn(x.shape, generator=draw)
    e = _encode(network, x, plan.dropout, draw)
    predicted = _pair(network, e[i], e[j], plan.dropout, draw)
    error = predicted - pairs.similarity[users[i], users[j]]
    weight = pairs.weight[users[i], users[j]]
    return (error.square() * weight).sum() / weight.sum().clamp_min(1)


def _encode(
    network: PairNetwork, x: torch.Tensor, dropout: float = 0.0, draw: torch.Generator | None = None
) -> torch.Tensor:
    w1, b1, w2, b2 = network.layers[:4]
    return _hidden(x, w1, b1, dropout, draw) @ w2.T + b2


def _pair(
    network: PairNetwork,
    a: torch.Tensor,
    b: torch.Tensor,
    dropout: float = 0.0,
    draw: torch.Generator | None = None,
) -> torch.Tensor:
    w1, b1, w2, b2 = network.layers[4:]
    hidden = _hidden(torch.cat([(a - b).abs(), a * b], -1), w1, b1, dropout, draw)
    return torch.sigmoid(hidden @ w2[0] + b2)


def _hidden(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, dropout: float, draw: torch.Generator | None
) -> torch.Tensor:
    hidden = torch.nn.functional.leaky_relu(x @ w.T + b, SLOPE)
    if dropout and draw is not None:
        hidden = hidden * (torch.rand(hidden.shape, generator=draw) >= dropout) / (1 - dropout)
    return hidden


def _one_way(network: PairNetwork, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    m, r = len(left), len(right)
    parts = [
        _pair(network, part[:, None].expand(-1, r, -1), right[None].expand(len(part), -1, -1))
        for part in torch.split(left, max(1, CHUNK // max(1, r)))
    ]
    return torch.cat(parts) if parts else left.new_zeros(m, r)
