"""The two networks, in plain PyTorch, and their weights as one vector in the order of
`named_parameters`.
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
    """784-200-10 with ReLU, d = 159,010 (McMahan et al. 2017 have two hidden layers; Vardhan et al.
    2024 this one).
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))


def cnn() -> nn.Sequential:
    """Two 5 × 5 convolutions of 32 and 64 channels, each with ReLU and 2 × 2 pooling, 512 dense, d
    = 1,663,370 (Briggs et al. 2020).
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


NETS = {"mlp": mlp, "cnn": cnn}


def build(work: Work, device: str = "cpu") -> nn.Sequential:
    """The work's network with its initial weights."""
    net = NETS[work.model]().to(device)
    put(net, torch.as_tensor(work.start).to(device))
    return net


def put(net: nn.Module, weights: torch.Tensor) -> None:
    """Write a vector (d,) into the network, in place."""
    at = 0
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(weights[at : at + parameter.numel()].view_as(parameter))
            at += parameter.numel()


def flat(net: nn.Module) -> torch.Tensor:
    """The network's weights as one new vector (d,)."""
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def sgd(
    net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, batch: int
) -> None:
    """One pass over samples that are in order already."""
    for first in range(0, len(y), batch):
        optimizer.zero_grad()
        nn.functional.cross_entropy(
            net(x[first : first + batch]), y[first : first + batch]
        ).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def accuracy(work: Work, weights: Weights) -> float:
    """On the test set, the same code for every worker."""
    net = build(work)
    put(net, torch.as_tensor(weights))
    hits = 0
    with torch.no_grad():
        for first in range(0, len(work.y_test), 500):
            part = slice(first, first + 500)
            guess: NDArray[np.int64] = (
                net(torch.as_tensor(scaled(work.x_test[part]))).argmax(1).numpy()
            )
            hits += int((guess == work.y_test[part]).sum())
    return hits / len(work.y_test)


def settle(device: str) -> Callable[[], int]:
    """Wait for the device, and tell the most memory this process has held there, in bytes (0 on the
    CPU).
    """

    def settled() -> int:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved()

    return settled if device == "cuda" else lambda: 0


def talk(work: Work, net: nn.Module, given: Options) -> Talk:
    """A pipe for a worker whose global model lies in `net`."""
    return Talk(
        lambda: np.asarray(flat(net).cpu().numpy(), dtype=np.float32),
        partial(accuracy, work),
        settle(given.device),
    )
