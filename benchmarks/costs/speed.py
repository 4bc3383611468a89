"""Batched local training of many clients, and the same training in a plain PyTorch loop.

`benchmarks.ratios` measures one beside the other, and other benchmarks train so. A round is 10
mini-batches of 10 images of 28×28 for every client, the same ones in both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.costs.recurrent import no_tests
from securecluster import Federation
from securecluster.core.randomness import Randomness
from securecluster.messaging.messages import Rows
from securecluster.models.validation import build
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

PLAN = LocalTraining(lr=0.05, epochs=1, batch_size=10, steps=10)


def cohort(
    model: str, clients: int, shape: tuple[int, ...] = (1, 28, 28), secret: Any = None
) -> LocalTrainer:
    """Return a trainer of clients with 100 random images each.

    Args:
        model: a network's name.
        clients: how many.
        shape: of one image.
        secret: keys of the clients, which DP-SGD takes noise from.
    """
    rng = np.random.default_rng(0)
    arrays = {}
    for k in range(clients):
        images = rng.random((100, *shape), dtype=np.float32)
        labels = rng.integers(0, 10, 100)
        arrays[f"c{k}"] = (images, labels)
    federation = Federation.from_arrays(arrays, test=no_tests(arrays), seed=0)
    flat = build(model, federation.shape, 10, Randomness(0))
    device = torch.device("cpu")
    return LocalTrainer(federation, flat, Randomness(0), device, torch.float32, secret=secret)


def train(batched: LocalTrainer) -> torch.Tensor:
    """Return the updates (clients, d) of one batched round of all clients.

    Args:
        batched: the clients, their samples and first weights.
    """
    clients = range(len(batched.ids))
    # all clients start from row 0 of a table with one model
    models = Rows(batched.start[None], (0,) * len(clients))
    return batched.train(models, clients, PLAN, 1)


def plain(batched: LocalTrainer, module: nn.Module) -> torch.Tensor:
    """Train one client after the other in a plain PyTorch loop, with one optimizer each.

    Args:
        batched: the clients, their samples and first weights.
        module: the network, of the same order of parameters as `batched.model`.

    Returns:
        The clients' updates (clients, d).
    """
    clients = len(batched.ids)
    out = torch.empty(clients, batched.model.dimension, dtype=batched.dtype)
    for client in range(clients):
        # a clone, since parameters become views of the vector and training would change it
        nn.utils.vector_to_parameters(batched.start.clone(), module.parameters())
        optimizer = torch.optim.SGD(module.parameters(), lr=PLAN.lr)
        for batch in batched.batches(client, PLAN, 1):
            optimizer.zero_grad()
            outputs = module(batched._x[batch])
            loss = nn.functional.cross_entropy(outputs, batched._y[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        trained = nn.utils.parameters_to_vector(module.parameters()).detach()
        out[client] = trained - batched.start
    return out
