"""One local epoch of many clients' LSTMs, batched, beside the same clients one after the other
through nn.LSTM, taking turns in one run.

python -m benchmarks.costs.recurrent [--rounds 5] [--networks lstm-trajectory …]

"one by one" trains in the same cohort, each of torch's threads one client at a time; "plain loop"
is the loop everyone writes, with nn.Dropout, at one and at all threads. In float64 without dropout
the updates agree.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.table import tabulate
from securecluster import Federation
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

Variants = dict[str, tuple[int, Callable[[], torch.Tensor]]]  # threads and one round, by name
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
    "lstm-trajectory": Case(lstm_trajectory, (10, 2), 2, Trajectory(), 100, (100, 400)),
    # 20 words of AG-News, of a vocabulary of 2000
    "lstm-words": Case(lstm_words, (20,), 2000, Language(), 50, (20, 100)),
    # 80 characters of Shakespeare
    "lstm-chars": Case(lstm_chars, (80,), 74, Language(), 30, (20, 100)),
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


def variants(case: Case, clients: int, plan: LocalTraining, dtype: torch.dtype) -> Variants:
    """Return, by name, the threads and one epoch of each variant.

    Args:
        case: the network and the size of its samples.
        clients: how many.
        plan: of the epoch.
        dtype: of samples and weights.
    """
    batched = case.cohort(clients, dtype)
    single = case.cohort(clients, dtype)
    threads = torch.get_num_threads()
    single.model = FlatModel(
        plain_module(single.model.module, seeded=True),
        # clients are not batched: each thread trains one client at a time
        together=False,
        objective=case.objective,
    )
    module = plain_module(batched.model.module, seeded=False)
    loop = partial(plain, batched, module, plan)
    return {
        "batched": (threads, partial(batched_round, batched, plan)),
        "one by one": (threads, partial(batched_round, single, plan)),
        "plain loop, 1 thread": (1, loop),
        f"plain loop, {threads} threads": (threads, loop),
    }


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


def medians_of(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median seconds of each variant.

    Args:
        seconds: of its rounds.
    """
    return {variant: float(np.median(times)) for variant, times in seconds.items()}


def best_of(medians: Mapping[str, float], beginning: str) -> float:
    """Return the least median of the variants whose names begin alike.

    Args:
        medians: by variant.
        beginning: of the names.
    """
    names = [variant for variant in medians if variant.startswith(beginning)]
    return min(medians[variant] for variant in names)


def relative_error(updates: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest difference of two tables, relative to the largest number of the second.

    Args:
        updates: (clients, d).
        reference: (clients, d).
    """
    largest = reference.abs().max()
    difference = (updates - reference).abs().max()
    return float(difference / largest)


def measure(name: str, clients: int, rounds: int) -> list[dict[str, Any]]:
    """Measure seconds an epoch of each variant, in turn.

    Args:
        name: one of `CASES`.
        clients: how many are timed.
        rounds: timed epochs of each variant.

    Returns:
        A line of the table for each variant.
    """
    case = CASES[name]
    updates = {}
    # updates agree only without dropout and rounding
    without_dropout = replace(PLAN, dropout=False)
    exact = variants(case, 3, without_dropout, torch.float64)
    for variant, (_, epoch) in exact.items():
        updates[variant] = epoch()
    seconds = timed(variants(case, clients, PLAN, torch.float32), rounds)
    medians = medians_of(seconds)
    best_plain = best_of(medians, "plain")
    reference = updates["plain loop, 1 thread"]
    rows = []
    for variant, times in seconds.items():
        median = medians[variant]
        error = relative_error(updates[variant], reference)
        row = {
            "network": name,
            "clients": clients,
            "variant": variant,
            "rounds": rounds,
            "median": round(median, 4),
            "min": round(min(times), 4),
            "max": round(max(times), 4),
            "one_by_one_over_it": round(medians["one by one"] / median, 2),
            "best_plain_loop_over_it": round(best_plain / median, 2),
            "error_in_float64": f"{error:.1e}",
        }
        rows.append(row)
    return rows


def timed(tasks: Variants, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each variant's rounds, which take turns.

    Args:
        tasks: threads and function of each variant, by name.
        rounds: timed ones.
    """
    seconds: dict[str, list[float]] = {variant: [] for variant in tasks}
    # the first round only warms up
    for number in range(rounds + 1):
        for variant, (threads, run_once) in tasks.items():
            # variants take turns, so that other load of the machine affects all of them
            with cpu_threads(threads):
                start = time.perf_counter()
                run_once()
                if number:
                    seconds[variant].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--networks", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    measured = (
        measure(name, clients, options.rounds)
        for name in options.networks
        for clients in CASES[name].clients
    )
    print(tabulate("recurrent", measured))


if __name__ == "__main__":
    main()
