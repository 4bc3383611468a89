"""DP-SGD of many clients beside plain training and beside opacus, one client after the other,
taking turns in one run.

python -m securecluster.benchmarks.dpsgd [--rounds 3] [--models mlp-200 …]

A round is 10 mini-batches of every client, 10 of its samples each on average, the same for all
variants of DP-SGD. "by hand" takes norms from the layers' tensors, "examples as clients" makes each
example's gradient, "opacus" wraps the same module in its GradSampleModule and DPOptimizer. In
float64 without noise their updates agree up to the 1e-6 that opacus adds to norms.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from securecluster import Federation
from securecluster.benchmarks.recurrent import CASES, Outputs
from securecluster.benchmarks.table import write
from securecluster.core.devices import cpu_threads
from securecluster.core.randomness import Randomness
from securecluster.messaging.messages import Rows
from securecluster.models.dropout import SeededDropout
from securecluster.models.flat_model import FlatModel
from securecluster.models.recurrent import LSTM
from securecluster.models.validation import build, prepare_module
from securecluster.training.dp_sgd import DPSGDState
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

PLAN = LocalTraining(lr=0.05, epochs=1, batch_size=10, steps=10, dropout=False, clip=1.0, noise=1.0)
CLIENTS = {"mlp-200": 100, "cnn-ali": 50, "cnn-briggs": 10, "lstm-trajectory": 100}


class General(FlatModel):
    """The same model without gradients by hand."""

    stack = None


class Keys:
    """A client's key follows from its number."""

    def seed(self, client: int, purpose: str, step: int, about: bytes = b"") -> bytes:
        """32 bytes."""
        return hashlib.sha256(repr((client, purpose, step, about)).encode()).digest()


def cohort(model: str, clients: int, general: bool, dtype: torch.dtype) -> LocalTrainer:
    """Clients with 100 random images each, or as many samples as the network's own data have."""
    torch.manual_seed(0)
    if model in CASES:
        case = CASES[model]
        federation = case.federation(clients)
        flat = prepare_module(
            case.make(case.shape, case.classes), case.shape, case.classes, objective=case.objective
        )
    else:
        rng = np.random.default_rng(0)
        arrays = {
            f"c{k}": (rng.random((100, 1, 28, 28), dtype=np.float32), rng.integers(0, 10, 100))
            for k in range(clients)
        }
        federation = Federation.from_arrays(
            arrays, test={name: ([], []) for name in arrays}, seed=0
        )
        flat = build(model, federation.shape, 10, Randomness(0))
    found = LocalTrainer(federation, flat, Randomness(0), torch.device("cpu"), dtype, secret=Keys())
    if general:
        found.model = General(flat.module, flat.together, flat.objective).to(
            found.device, found.dtype
        )
    return found


def for_opacus(module: nn.Module) -> nn.Module:
    """The same network with opacus' LSTM in place of ours, whose parameters have another order."""
    from opacus.layers import DPLSTM

    found = copy.deepcopy(module)
    for name, part in list(found.named_children()):
        if isinstance(part, LSTM):
            own = Outputs(part)
            own.lstm = DPLSTM(part.inputs, part.cells, batch_first=True)
            own.lstm.load_state_dict({n: p.detach() for n, p in part.named_parameters()})
            setattr(found, name, own.to(part.bias_ih_l0))
        if isinstance(part, SeededDropout):
            setattr(found, name, nn.Identity())
    return found


def opacus(batched: LocalTrainer, plan: LocalTraining) -> torch.Tensor:
    """One client after the other, one wrapped module and one optimizer each."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    out = torch.empty(len(batched.ids), batched.model.dimension, dtype=batched.dtype)
    names = [n for n, _ in batched.model.module.named_parameters()]
    objective, secret = batched.model.objective, Keys()
    first = for_opacus(batched.model.module)
    for client, size in enumerate(batched.sizes):
        module = GradSampleModule(copy.deepcopy(first), loss_reduction="sum")
        sgd = torch.optim.SGD(module.parameters(), lr=plan.lr)
        optimizer = DPOptimizer(
            sgd,
            noise_multiplier=plan.noise,
            max_grad_norm=plan.clip,
            expected_batch_size=min(plan.batch_size, size),
            loss_reduction="mean",
        )
        own = [batched._train_on.digest(client)]
        draws = DPSGDState(
            secret, [batched.ids[client]], [size], batched.start[None], plan, 1, 1, own
        )
        for batch in draws.batches(0):
            rows = torch.as_tensor(batch + batched._offsets[client])
            optimizer.zero_grad()
            objective.losses(module(batched._x[rows]), batched._y[rows]).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        found = {
            n.replace("_module.", "").replace(".lstm.", "."): p.detach()
            for n, p in module.named_parameters()
        }
        out[client] = torch.cat([found[n].flatten() for n in names]) - batched.start
    return out


def variants(
    model: str, clients: int, plan: LocalTraining, dtype: torch.dtype
) -> dict[str, tuple[int, Callable[[], torch.Tensor]]]:
    """Name -> (threads, one round)."""
    batched, threads = cohort(model, clients, False, dtype), torch.get_num_threads()
    general = cohort(model, clients, True, dtype)

    def ours(of: LocalTrainer, plan: LocalTraining) -> torch.Tensor:
        return of.train(Rows(of.start[None], (0,) * clients), range(clients), plan, 1)

    by_hand = (
        {"by hand": batched, "by hand, no noise": batched}
        if batched.model.stack is not None
        else {}
    )
    every = {**by_hand, "examples as clients": general}
    quiet = replace(plan, noise=0.0)
    private = {
        name: (threads, partial(ours, of, quiet if "no" in name else plan))
        for name, of in every.items()
    }
    return {
        "plain training": (threads, lambda: ours(batched, replace(plan, clip=0.0, noise=0.0))),
        **private,
        "opacus, 1 thread": (1, lambda: opacus(batched, plan)),
        f"opacus, {threads} threads": (threads, lambda: opacus(batched, plan)),
    }


def measure(model: str, clients: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds a round of each variant, in turn."""
    exact = {
        way: once()
        for way, (_, once) in variants(model, 2, replace(PLAN, noise=0.0), torch.float64).items()
    }
    known = variants(model, clients, PLAN, torch.float32)
    seconds: dict[str, list[float]] = {way: [] for way in known}
    for number in range(rounds + 1):
        for way, (threads, once) in known.items():
            with cpu_threads(threads):
                began = time.perf_counter()
                once()
                if number:
                    seconds[way].append(time.perf_counter() - began)
    medians = {way: float(np.median(taken)) for way, taken in seconds.items()}
    best = min(m for way, m in medians.items() if way.startswith("opacus"))
    reference = exact["opacus, 1 thread"]
    return [
        {
            "model": model,
            "clients": clients,
            "variant": way,
            "rounds": rounds,
            "median": round(medians[way], 4),
            "min": round(min(taken), 4),
            "max": round(max(taken), 4),
            "over_plain_training": round(medians[way] / medians["plain training"], 2),
            "best_opacus_over_it": round(best / medians[way], 2),
            "error_in_float64": ""
            if way == "plain training"
            else f"{float((exact[way] - reference).abs().max() / reference.abs().max()):.1e}",
        }
        for way, taken in seconds.items()
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # as opacus has it
    rows = []
    for model in options.models:
        for row in (found := measure(model, CLIENTS[model], options.rounds)):
            print(row, flush=True)
        rows += found
        print(write("dpsgd", rows))


if __name__ == "__main__":
    main()
