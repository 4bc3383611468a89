"""One local epoch of many clients' LSTMs, batched, beside the same clients one after the other
through nn.LSTM, taking turns in one run.

python -m securecluster.benchmarks.recurrent [--rounds 5] [--networks lstm-trajectory …]

"one by one" trains in the same cohort, each of torch's threads one client at a time; "plain loop"
is the loop everyone writes, with nn.Dropout, at one and at all threads. In float64 without dropout
the updates agree.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from securecluster import Federation
from securecluster.benchmarks.table import write
from securecluster.core.devices import cpu_threads
from securecluster.core.randomness import Randomness
from securecluster.messaging.messages import Rows
from securecluster.models.dropout import SeededDropout
from securecluster.models.flat_model import FlatModel
from securecluster.models.objectives import Language, Objective, Trajectory
from securecluster.models.recurrent import LSTM
from securecluster.models.sequence_architectures import lstm_chars, lstm_trajectory, lstm_words
from securecluster.models.validation import prepare_module
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

PLAN = LocalTraining(lr=0.1, epochs=1, batch_size=10)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A network and samples of the size its data have."""

    make: Callable[[tuple[int, ...], int], nn.Module]
    shape: tuple[int, ...]
    classes: int
    objective: Objective
    samples: int
    clients: tuple[int, ...]

    def federation(self, clients: int) -> Federation:
        """Clients with random samples."""
        rng = np.random.default_rng(0)

        def drawn() -> tuple[Any, Any]:
            if self.objective.kind == "trajectory":
                return rng.random((self.samples, *self.shape)), rng.random(
                    (self.samples, self.classes)
                )
            text = rng.integers(self.classes, size=(self.samples, self.shape[0] + 1))
            return text[:, :-1], text[:, 1:]

        arrays = {f"c{k}": drawn() for k in range(clients)}
        none: dict[str, Any] = {name: ([], []) for name in arrays}
        return Federation.from_arrays(
            arrays, test=none, objective=self.objective, classes=self.classes, seed=0
        )

    def cohort(
        self,
        clients: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> LocalTrainer:
        """The clients, with the network's own first weights."""
        torch.manual_seed(0)
        federation = self.federation(clients)
        flat = prepare_module(
            self.make(self.shape, self.classes), self.shape, self.classes, objective=self.objective
        )
        return LocalTrainer(federation, flat, Randomness(0), device, dtype)


CASES = {
    "lstm-trajectory": Case(lstm_trajectory, (10, 2), 2, Trajectory(), 100, (100, 400)),
    "lstm-words": Case(lstm_words, (20,), 2000, Language(), 50, (20, 100)),
    "lstm-chars": Case(lstm_chars, (80,), 74, Language(), 30, (20, 100)),
}


class Outputs(nn.Module):
    """nn.LSTM without its state."""

    def __init__(self, own: LSTM) -> None:
        super().__init__()
        self.lstm = nn.LSTM(own.inputs, own.cells, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (n, T, in)."""
        found: torch.Tensor = self.lstm(x)[0]
        return found


def plain_module(module: nn.Module, seeded: bool) -> nn.Module:
    """The same network through nn.LSTM, with the same order of parameters; dropout is nn.Dropout
    unless it stays seeded.
    """
    found = copy.deepcopy(module)
    for name, part in list(found.named_children()):
        if isinstance(part, LSTM):
            setattr(found, name, Outputs(part).to(part.bias_ih_l0))
        if isinstance(part, SeededDropout) and not seeded:
            setattr(found, name, nn.Dropout(part.p))
    return found


def load(module: nn.Module, flat: torch.Tensor) -> None:
    """Copy a flat vector (d,) into a module's parameters where they lie: cuDNN wants an LSTM's in
    one piece.
    """
    parameters = list(module.parameters())
    parts = torch.split(flat, [p.numel() for p in parameters])
    with torch.no_grad():
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.copy_(part.view_as(parameter))


def optimizer_of(plan: LocalTraining, module: nn.Module) -> torch.optim.Optimizer:
    """Return torch's own optimizer for a module, as the plan has it."""
    if plan.optimizer == "adam":
        return torch.optim.Adam(module.parameters(), lr=plan.lr)
    return torch.optim.SGD(module.parameters(), lr=plan.lr, momentum=plan.momentum)


def plain(
    batched: LocalTrainer,
    module: nn.Module,
    plan: LocalTraining,
    clients: int | None = None,
) -> torch.Tensor:
    """One client after the other, one optimizer each.

    Args:
        clients: how many of them, the first ones; all by default.
    """
    count = len(batched.ids) if clients is None else clients
    out = batched.start.new_empty(count, batched.model.dimension)
    module.train(plan.dropout)
    for client in range(count):
        load(module, batched.start)
        optimizer = optimizer_of(plan, module)
        for batch in batched._batches(client, plan, 1):
            rows = torch.as_tensor(batch).to(batched.device)
            optimizer.zero_grad()
            outputs = module(batched._x[rows])
            losses = batched.model.objective.losses(outputs, batched._y[rows])
            losses.mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        out[client] = nn.utils.parameters_to_vector(module.parameters()).detach() - batched.start
    return out


def variants(
    case: Case, clients: int, plan: LocalTraining, dtype: torch.dtype
) -> dict[str, tuple[int, Callable[[], torch.Tensor]]]:
    """Name -> (threads, one epoch)."""
    batched, single, threads = (
        case.cohort(clients, dtype),
        case.cohort(clients, dtype),
        torch.get_num_threads(),
    )
    single.model = FlatModel(
        plain_module(single.model.module, seeded=True), together=False, objective=case.objective
    )
    module = plain_module(batched.model.module, seeded=False)

    def epoch(of: LocalTrainer) -> torch.Tensor:
        return of.train(Rows(of.start[None], (0,) * clients), range(clients), plan, 1)

    return {
        "batched": (threads, lambda: epoch(batched)),
        "one by one": (threads, lambda: epoch(single)),
        "plain loop, 1 thread": (1, lambda: plain(batched, module, plan)),
        f"plain loop, {threads} threads": (threads, lambda: plain(batched, module, plan)),
    }


def measure(name: str, clients: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds an epoch of each variant, in turn."""
    case = CASES[name]
    exact = {
        way: epoch()
        for way, (_, epoch) in variants(
            case, 3, replace(PLAN, dropout=False), torch.float64
        ).items()
    }
    known = variants(case, clients, PLAN, torch.float32)
    seconds: dict[str, list[float]] = {way: [] for way in known}
    for number in range(rounds + 1):
        for way, (threads, epoch) in known.items():
            with cpu_threads(threads):
                began = time.perf_counter()
                epoch()
                if number:
                    seconds[way].append(time.perf_counter() - began)
    plainly, medians = (
        exact["plain loop, 1 thread"],
        {way: float(np.median(taken)) for way, taken in seconds.items()},
    )
    largest = plainly.abs().max()
    errors = {way: float((exact[way] - plainly).abs().max() / largest) for way in seconds}
    best = min(m for way, m in medians.items() if way.startswith("plain"))
    return [
        {
            "network": name,
            "clients": clients,
            "variant": way,
            "rounds": rounds,
            "median": round(medians[way], 4),
            "min": round(min(taken), 4),
            "max": round(max(taken), 4),
            "one_by_one_over_it": round(medians["one by one"] / medians[way], 2),
            "best_plain_loop_over_it": round(best / medians[way], 2),
            "error_in_float64": f"{errors[way]:.1e}",
        }
        for way, taken in seconds.items()
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--networks", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    rows = []
    for name in options.networks:
        for clients in CASES[name].clients:
            for row in (found := measure(name, clients, options.rounds)):
                print(row, flush=True)
            rows += found
    print(write("recurrent", rows))


if __name__ == "__main__":
    main()
