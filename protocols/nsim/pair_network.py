"""A symmetric network on pairs of rows, and its training (not in the paper).

The similarity model of NSIM consists of such networks.
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
    """One architecture and its training.

    An encoder maps q numbers to `width` and then `embedding` numbers; a head predicts from the
    features of a pair.

    Args:
        width: hidden units of the encoder.
        embedding: outputs of the encoder.
        head: hidden units of the head.
        dropout: share of the hidden units that are left out in training.
        noise: standard deviation of the noise that is added to standardised rows in training.
        steps: mini-batches, with a learning rate that increases to `lr` and then decays to 0 along
            a cosine.
        lr: largest learning rate.
        decay: of the weights, as in AdamW.
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
    """Weights of two dense layers for an embedding e, and of two for a pair's similarity.

    The input of the second two is (|e_a − e_b|, e_a·e_b); their output passes a sigmoid.
    """

    layers: list[torch.Tensor]  # w (o, i) and b (o,) in turn: two of the encoder, two of the head


def start(inputs: int, plan: PairNetworkConfig, draw: np.random.Generator) -> PairNetwork:
    """Draw initial weights, uniform within ±1/√(inputs of the layer).

    Args:
        inputs: q, numbers of a row.
        plan: the architecture.
        draw: the source of random numbers.
    """
    shapes = (
        (inputs, plan.width),
        (plan.width, plan.embedding),
        (2 * plan.embedding, plan.head),
        (plan.head, 1),
    )
    layers = []
    for i, o in shapes:
        bound = 1 / math.sqrt(i)
        weight = draw.uniform(-bound, bound, (o, i))
        bias = draw.uniform(-bound, bound, o)
        layers += [weight, bias]
    return PairNetwork([torch.as_tensor(layer, dtype=torch.float32) for layer in layers])


def pairwise(network: PairNetwork, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the predictions for all pairs of standardised rows.

    At most CHUNK pairs, or those of one row, are in memory at once.

    Args:
        network: the weights.
        a: (m, q).
        b: (r, q).

    Returns:
        (m, r); swapping a and b gives the same bits.
    """
    # Sums of a matrix product may be rounded differently by their position in it, so the mean of
    # both orders is returned.
    with torch.no_grad():
        encoded_a = _encode(network, a)
        encoded_b = _encode(network, b)
        forward = _one_way(network, encoded_a, encoded_b)
        backward = _one_way(network, encoded_b, encoded_a)
        return (forward + backward.T) / 2


@dataclass(frozen=True, eq=False)
class TrainingPairs:
    """The users whose pairs a network is trained on.

    Args:
        rows: (u, q), standardised.
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
    """Train a network on the squared error of pairs by AdamW.

    Args:
        network: the initial weights.
        pairs: the training data.
        plan: the training.
        seed: of mini-batches, dropout and noise.
        score: the validation score, which is to be large.
        every: steps between two scores.

    Returns:
        The network at its largest score, and this score.
    """
    draw = torch.Generator().manual_seed(seed)
    # clones, so that the initial network is unchanged where it is the best one
    layers = [layer.clone().requires_grad_() for layer in network.layers]
    optimizer = torch.optim.AdamW(layers, lr=plan.lr, weight_decay=plan.decay)
    best = network
    best_score = -math.inf
    for step in range(plan.steps):
        rate = plan.lr * _rate(step / plan.steps)
        optimizer.param_groups[0]["lr"] = rate
        loss = _loss(PairNetwork(layers), pairs, plan, draw)
        gradients = torch.autograd.grad(loss, layers)
        for layer, gradient in zip(layers, gradients, strict=True):
            layer.grad = gradient
        optimizer.step()

        is_last = step + 1 == plan.steps
        if (step + 1) % every and not is_last:
            continue
        current = PairNetwork([layer.detach().clone() for layer in layers])
        current_score = score(current)
        # a NaN, where nothing can be correlated, counts as an improvement
        if not current_score <= best_score:
            best = current
            best_score = current_score
    return best, best_score


def _rate(progress: float) -> float:
    """Return the learning rate relative to its maximum.

    It increases during a tenth of the steps, and then decays along a cosine.

    Args:
        progress: share of the steps that are completed, in [0, 1).
    """
    if progress < 0.1:
        return (progress + 0.01) / 0.11
    angle = math.pi * (progress - 0.1) / 0.9
    return (1 + math.cos(angle)) / 2


def _loss(
    network: PairNetwork, pairs: TrainingPairs, plan: PairNetworkConfig, draw: torch.Generator
) -> torch.Tensor:
    """Return the mean squared error of all pairs of a mini-batch of users.

    Args:
        network: the weights.
        pairs: the training data.
        plan: noise and dropout.
        draw: the source of random numbers.
    """
    users = torch.randperm(len(pairs.rows), generator=draw)[:USERS]
    i, j = torch.triu_indices(len(users), len(users), 1)
    x = pairs.rows[users]
    if plan.noise:
        x = x + plan.noise * torch.randn(x.shape, generator=draw)
    embeddings = _encode(network, x, plan.dropout, draw)
    predicted = _pair(network, embeddings[i], embeddings[j], plan.dropout, draw)
    first = users[i]
    second = users[j]
    error = predicted - pairs.similarity[first, second]
    weight = pairs.weight[first, second]
    # a mini-batch may consist of held-out pairs only
    weighted = error.square() * weight
    return weighted.sum() / weight.sum().clamp_min(1)


def _encode(
    network: PairNetwork, x: torch.Tensor, dropout: float = 0.0, draw: torch.Generator | None = None
) -> torch.Tensor:
    """Return the embeddings of standardised rows.

    Args:
        network: the weights.
        x: (n, q).
        dropout: share of the hidden units to leave out.
        draw: the source of random numbers; None means no dropout.

    Returns:
        (n, e)
    """
    w1, b1, w2, b2 = network.layers[:4]
    hidden = _hidden(x, w1, b1, dropout, draw)
    return hidden @ w2.T + b2


def _pair(
    network: PairNetwork,
    a: torch.Tensor,
    b: torch.Tensor,
    dropout: float = 0.0,
    draw: torch.Generator | None = None,
) -> torch.Tensor:
    """Return the predicted similarities of pairs of embeddings.

    Args:
        network: the weights.
        a: (…, e).
        b: (…, e).
        dropout: share of the hidden units to leave out.
        draw: the source of random numbers; None means no dropout.

    Returns:
        (…) in [0, 1].
    """
    w1, b1, w2, b2 = network.layers[4:]
    # both features are the same for (a, b) and (b, a)
    distance = (a - b).abs()
    features = torch.cat([distance, a * b], -1)
    hidden = _hidden(features, w1, b1, dropout, draw)
    return torch.sigmoid(hidden @ w2[0] + b2)


def _hidden(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, dropout: float, draw: torch.Generator | None
) -> torch.Tensor:
    """Return a hidden layer of leaky ReLUs, with dropout in training.

    Args:
        x: (…, i).
        w: (o, i).
        b: (o,).
        dropout: share of the units to leave out.
        draw: the source of random numbers; None means no dropout.

    Returns:
        (…, o)
    """
    hidden = torch.nn.functional.leaky_relu(x @ w.T + b, SLOPE)
    if dropout and draw is not None:
        mask = torch.rand(hidden.shape, generator=draw) >= dropout
        # scaled, so that the expectation is that of the full layer
        hidden = hidden * mask / (1 - dropout)
    return hidden


def _one_way(network: PairNetwork, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the predictions for all pairs of embeddings, in one order.

    Args:
        network: the weights.
        first: (m, e).
        second: (r, e).

    Returns:
        (m, r)
    """
    m = len(first)
    r = len(second)
    if not m:
        return first.new_zeros(m, r)
    # by blocks of rows, since a pair has 2e features
    height = max(1, CHUNK // max(1, r))
    predictions = []
    for rows in torch.split(first, height):
        a = rows[:, None].expand(-1, r, -1)
        b = second[None].expand(len(rows), -1, -1)
        predictions.append(_pair(network, a, b))
    return torch.cat(predictions)
