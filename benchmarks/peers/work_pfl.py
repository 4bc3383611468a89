"""Train by Apple's pfl 0.6: its FederatedAveraging on its SimulatedBackend.

It is held after each central iteration until the driver goes on. It runs alone, or as one of the
processes that work_pfl_mp starts. Users are weighted equally (a user's
statistics have weight 1), as all clients hold equally many samples. In iteration 0 pfl evaluates
the training users before and after, whatever the evaluation frequency: that is part of the first
round, which is reported apart.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

from .net import build, talk
from .work import Options, Quit, Talk, Work, load, options


class Net(torch.nn.Module):
    """The network with the two methods pfl asks for."""

    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        logits: torch.Tensor = self.layers(x)
        return logits

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy that a local step minimises."""
        return torch.nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        """Return the loss; pfl asks for metrics in iteration 0."""
        count = len(y)
        with torch.no_grad():
            loss = self.loss(x, y).item()
            return {"loss": Weighted(loss * count, count)}


class Users:
    """The clients' samples in this round's order.

    They are tensors on the device, as in pfl's own benchmarks of small data sets.

    Args:
        work: holds the samples and the order.
        device: "cpu" or "cuda".
    """

    def __init__(self, work: Work, device: str) -> None:
        self._work = work
        self._x: list[torch.Tensor] = []
        for client in range(work.clients):
            images = torch.as_tensor(work.images(client))
            self._x.append(images.to(device))
        self._y = torch.as_tensor(work.y).to(device)
        self._device = device
        self._order = torch.empty(0)

    def turn(self, number: int) -> None:
        """Take the order of round `number`, counted from 0."""
        order = torch.as_tensor(self._work.turn(number))
        self._order = order.to(self._device)

    def __call__(self, user: int) -> Any:
        """Return one client's samples, in order."""
        order = self._order[user]
        x = self._x[user][order]
        y = self._y[user][order]
        return Dataset([x, y], user_id=str(user))


class Steps(TrainingProcessCallback):  # type: ignore[misc]
    """Waits for the driver between central iterations."""

    def __init__(self, pipe: Talk | None, users: Users) -> None:
        self._pipe = pipe
        self._users = users

    def on_train_begin(self, *, model: Any) -> Any:
        """Wait for the driver before iteration 0."""
        self._next(0)
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Any]:
        """End the round, whose averaged update has been applied, and wait for the driver."""
        if self._pipe is not None:
            self._pipe.end()
        self._next(central_iteration + 1)
        return False, Metrics()

    def _next(self, number: int) -> None:
        """Wait for the driver in rank 0, and for rank 0 in the other processes."""
        if self._pipe is not None:
            self._pipe.begin()
        if torch.distributed.is_initialized():
            try:
                torch.distributed.barrier()
            except RuntimeError:  # rank 0 was told to quit
                raise Quit from None
        self._users.turn(number)


def main(arguments: Options) -> None:
    """Train rounds until the driver quits."""
    os.environ["PFL_PYTORCH_DEVICE"] = arguments.device
    torch.set_num_threads(arguments.threads)
    work = load(arguments.export)
    net = build(work, arguments.device)
    # pfl applies the average as a gradient: at rate 1 the new model is the mean, as in FedAvg
    central_optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model = PyTorchModel(Net(net), torch.optim.SGD, central_optimizer)
    users = Users(work, arguments.device)
    # each user once a round, as the cohort is all of them
    sampler = MinimizeReuseUserSampler(list(range(work.clients)))
    data = FederatedDataset(users, sampler)
    pipe: Talk | None = None
    # one process talks to the driver; the others follow it by a barrier
    if os.environ.get("RANK", "0") == "0":
        pipe = talk(work, net, arguments)
    rounds = NNAlgorithmParams(
        central_num_iterations=len(work.order) + 1,
        # never again after iteration 0
        evaluation_frequency=1 << 30,
        train_cohort_size=work.clients,
        val_cohort_size=0,
    )
    local = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch
    )
    evaluation = NNEvalHyperParams(local_batch_size=None)
    with suppress(Quit):
        FederatedAveraging().run(
            rounds,
            SimulatedBackend(data, data),
            model,
            local,
            evaluation,
            callbacks=[Steps(pipe, users)],
        )


if __name__ == "__main__":
    main(options())
