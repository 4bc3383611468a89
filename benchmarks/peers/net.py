"""Define the two networks in plain PyTorch.

Their weights as one vector are in the order of `named_parameters`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from .work import Options, Talk, Weights, Work, scaled


def mlp() -> nn.Sequential:
    """Return a 784-200-10 network with ReLU, d = 159,010.

    McMahan et al. (2017) have two hidden layers, Vardhan et al. (2024) this one.
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))


def cnn() -> nn.Sequential:
    """Return the convolutional network of Briggs et al. (2020), d = 1,663,370.

    It has two 5 × 5 convolutions of 32 and 64 channels, each with ReLU and 2 × 2 pooling, and a
    dense layer of 512 units.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        # 64 channels of 7 × 7: 28 × 28 pixels, halved by two poolings
        nn.Linear(3136, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


NETS = {"mlp": mlp, "cnn": cnn}


def build(work: Work, device: str = "cpu") -> nn.Sequential:
    """Return the work's network with its initial weights.

    Args:
        work: names the network and holds the weights.
        device: where the network is to be.
    """
    net = NETS[work.model]().to(device)
    start = torch.as_tensor(work.start).to(device)
    put(net, start)
    return net


def put(net: nn.Module, weights: torch.Tensor) -> None:
    """Write a vector (d,) into the network, in place."""
    offset = 0
    with torch.no_grad():
        for parameter in net.parameters():
            end = offset + parameter.numel()
            values = weights[offset:end]
            parameter.copy_(values.view_as(parameter))
            offset = end


def flat(net: nn.Module) -> torch.Tensor:
    """Return the network's weights as one new vector (d,)."""
    # concatenation copies, so later training does not change the vector
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def sgd(
    net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, batch: int
) -> None:
    """Train for one pass over samples that are in order already.

    Args:
        net: changes in place.
        optimizer: of the network's parameters.
        x: samples (n, …).
        y: labels (n,).
        batch: samples of a mini-batch; the last one may have fewer.
    """
    # no shuffling: callers pass samples in the exported order
    for first in range(0, len(y), batch):
        rows = slice(first, first + batch)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def accuracy(work: Work, weights: Weights) -> float:
    """Return a model's accuracy on the test set, by the same code for every worker.

    Args:
        work: holds the test set.
        weights: of the model, (d,).
    """
    # on the CPU on any device, so that all workers are evaluated with the same arithmetic
    net = build(work)
    put(net, torch.as_tensor(weights))
    hits = 0
    with torch.no_grad():
        for first in range(0, len(work.y_test), 500):
            rows = slice(first, first + 500)
            images = torch.as_tensor(scaled(work.x_test[rows]))
            logits = net(images)
            predicted: NDArray[np.int64] = logits.argmax(1).numpy()
            correct = predicted == work.y_test[rows]
            hits += int(correct.sum())
    return hits / len(work.y_test)


def settle(device: str) -> Callable[[], int]:
    """Return a function that waits for the device.

    It returns the most memory that this process has held there, in bytes (0 on the CPU).

    Args:
        device: "cpu" or "cuda".
    """

    def settled() -> int:
        # kernels run asynchronously: without this the clock would stop before the round's work ends
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved()

    if device != "cuda":
        return lambda: 0
    return settled


def talk(work: Work, net: nn.Module, arguments: Options) -> Talk:
    """Return a pipe to the driver for a worker whose global model is in `net`.

    Args:
        work: holds the test set.
        net: the global model.
        arguments: of the worker.
    """

    def weights() -> Weights:
        return np.asarray(flat(net).cpu().numpy(), dtype=np.float32)

    return Talk(weights, partial(accuracy, work), settle(arguments.device))
