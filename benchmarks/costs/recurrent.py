"""Many clients' LSTMs, to be trained in a batch, and by the loop that everyone writes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from securecluster import Federation
from securecluster.core.randomness import Randomness
from securecluster.messaging.messages import Rows
from securecluster.models.dropout import SeededDropout
from securecluster.models.flat_model import FlatModel
from securecluster.models.objectives import Language, Objective, Trajectory
from securecluster.models.recurrent import LSTM
from securecluster.models.sequence_architectures import lstm_chars, lstm_trajectory, lstm_words
from securecluster.models.validation import prepare_module
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A network and samples of the size its data have."""

    make: Callable[[tuple[int, ...], int], nn.Module]
    shape: tuple[int, ...]
    classes: int
    objective: Objective
    samples: int

    def federation(self, clients: int) -> Federation:
        """Return clients with random samples."""
        rng = np.random.default_rng(0)
        arrays = {f"c{k}": self._draw(rng) for k in range(clients)}
        return Federation.from_arrays(
            arrays, test=no_tests(arrays), objective=self.objective, classes=self.classes, seed=0
        )

    def _draw(self, rng: np.random.Generator) -> tuple[Any, Any]:
        """Draw one client's samples and targets."""
        if self.objective.kind == "trajectory":
            x = rng.random((self.samples, *self.shape))
            y = rng.random((self.samples, self.classes))
            return x, y
        # a target is the token after its input, so a text is one token longer than a sample
        length = self.shape[0] + 1
        text = rng.integers(self.classes, size=(self.samples, length))
        inputs = text[:, :-1]
        targets = text[:, 1:]
        return inputs, targets

    def cohort(
        self, clients: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU
    ) -> LocalTrainer:
        """Return a trainer of the clients, with the network's own first weights.

        Args:
            clients: how many.
            dtype: of samples and weights.
            device: of both.
        """
        torch.manual_seed(0)
        federation = self.federation(clients)
        return LocalTrainer(federation, self.model(), Randomness(0), device, dtype)

    def model(self) -> FlatModel:
        """Return the network with first weights that torch draws."""
        module = self.make(self.shape, self.classes)
        return prepare_module(module, self.shape, self.classes, objective=self.objective)


def no_tests(clients: Iterable[str]) -> dict[str, Any]:
    """Return no held-out samples for each client.

    Args:
        clients: their names.
    """
    return {name: ([], []) for name in clients}


CASES = {
    # 10 past positions of two coordinates, and the next one (Pacheco et al. 2021)
    "lstm-trajectory": Case(lstm_trajectory, (10, 2), 2, Trajectory(), 100),
    # 20 words of AG-News, of a vocabulary of 2000
    "lstm-words": Case(lstm_words, (20,), 2000, Language(), 50),
    # 80 characters of Shakespeare
    "lstm-chars": Case(lstm_chars, (80,), 74, Language(), 30),
}


class Outputs(nn.Module):
    """nn.LSTM without its state."""

    def __init__(self, layer: LSTM) -> None:
        super().__init__()
        self.lstm = nn.LSTM(layer.inputs, layer.cells, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs (n, T, cells) of inputs (n, T, in)."""
        outputs: torch.Tensor = self.lstm(x)[0]
        return outputs


def plain_module(module: nn.Module, seeded: bool) -> nn.Module:
    """Return the same network through nn.LSTM, with the same order of parameters.

    Args:
        module: with layers of the package's own `LSTM`.
        seeded: dropout stays seeded; else it is nn.Dropout.
    """
    copied = copy.deepcopy(module)
    for name, layer in list(copied.named_children()):
        if isinstance(layer, LSTM):
            setattr(copied, name, Outputs(layer).to(layer.bias_ih_l0))
        if isinstance(layer, SeededDropout) and not seeded:
            setattr(copied, name, nn.Dropout(layer.p))
    return copied


def load(module: nn.Module, flat: torch.Tensor) -> None:
    """Copy a flat vector (d,) into a module's parameters, in place."""
    parameters = list(module.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    pieces = torch.split(flat, sizes)
    # in place, since cuDNN expects an LSTM's parameters in one piece of memory
    with torch.no_grad():
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.copy_(piece.view_as(parameter))


def optimizer_of(plan: LocalTraining, module: nn.Module) -> torch.optim.Optimizer:
    """Return torch's own optimizer for a module, as the plan has it."""
    if plan.optimizer == "adam":
        return torch.optim.Adam(module.parameters(), lr=plan.lr)
    return torch.optim.SGD(module.parameters(), lr=plan.lr, momentum=plan.momentum)


def plain(
    batched: LocalTrainer, module: nn.Module, plan: LocalTraining, clients: int | None = None
) -> torch.Tensor:
    """Train one client after the other, with one optimizer each.

    Args:
        batched: the clients, their samples and first weights.
        module: the network, of the same order of parameters as `batched.model`.
        plan: optimizer, learning rate and mini-batches.
        clients: how many of them, the first ones; all by default.

    Returns:
        The clients' updates (clients, d).
    """
    count = len(batched.ids)
    if clients is not None:
        count = clients
    out = batched.start.new_empty(count, batched.model.dimension)
    module.train(plan.dropout)
    for client in range(count):
        load(module, batched.start)
        optimizer = optimizer_of(plan, module)
        for batch in batched.batches(client, plan, 1):
            rows = torch.as_tensor(batch).to(batched.device)
            optimizer.zero_grad()
            outputs = module(batched._x[rows])
            losses = batched.model.objective.losses(outputs, batched._y[rows])
            losses.mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        trained = nn.utils.parameters_to_vector(module.parameters()).detach()
        out[client] = trained - batched.start
    return out


def batched_round(trainer: LocalTrainer, plan: LocalTraining) -> torch.Tensor:
    """Return the updates (clients, d) of one call of training, with all clients in it.

    Args:
        trainer: the clients, their samples and first weights.
        plan: of the training.
    """
    clients = range(len(trainer.ids))
    # all clients start from row 0 of a table with one model
    models = Rows(trainer.start[None], (0,) * len(clients))
    return trainer.train(models, clients, plan, 1)
