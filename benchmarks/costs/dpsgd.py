"""DP-SGD of many clients beside plain training and beside opacus, one client after the other,
taking turns in one run.

python -m benchmarks.costs.dpsgd [--rounds 3] [--models mlp-200 …]

A round is 10 mini-batches of every client, 10 of its samples each on average, the same for all
variants of DP-SGD. "by hand" takes norms from the layers' tensors, "examples as clients" makes each
example's gradient, "opacus" wraps the same module in its GradSampleModule and DPOptimizer. In
float64 without noise their updates agree up to the 1e-6 that opacus adds to norms.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.costs.recurrent import (
    CASES,
    Outputs,
    Variants,
    batched_round,
    best_of,
    medians_of,
    no_tests,
    relative_error,
    timed,
)
from benchmarks.table import tabulate
from securecluster import Federation
from securecluster.core.randomness import Randomness
from securecluster.models.dropout import SeededDropout
from securecluster.models.flat_model import FlatModel
from securecluster.models.recurrent import LSTM
from securecluster.models.validation import build
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
        """Return 32 bytes."""
        text = repr((client, purpose, step, about))
        return hashlib.sha256(text.encode()).digest()


def cohort(model: str, clients: int, general: bool, dtype: torch.dtype) -> LocalTrainer:
    """Return clients with 100 random images each, or as many samples as the network's data have.

    Args:
        model: one of `CLIENTS`.
        clients: how many.
        general: the model has no gradients by hand.
        dtype: of samples and weights.
    """
    torch.manual_seed(0)
    if model in CASES:
        case = CASES[model]
        federation = case.federation(clients)
        flat = case.model()
    else:
        rng = np.random.default_rng(0)
        arrays = {}
        for k in range(clients):
            images = rng.random((100, 1, 28, 28), dtype=np.float32)
            labels = rng.integers(0, 10, 100)
            arrays[f"c{k}"] = (images, labels)
        federation = Federation.from_arrays(arrays, test=no_tests(arrays), seed=0)
        flat = build(model, federation.shape, 10, Randomness(0))
    trainer = LocalTrainer(
        federation, flat, Randomness(0), torch.device("cpu"), dtype, secret=Keys()
    )
    if general:
        without_stack = General(flat.module, flat.together, flat.objective)
        trainer.model = without_stack.to(trainer.device, trainer.dtype)
    return trainer


def for_opacus(module: nn.Module) -> nn.Module:
    """Return the same network with opacus' LSTM, whose parameters have another order."""
    from opacus.layers import DPLSTM

    copied = copy.deepcopy(module)
    for name, layer in list(copied.named_children()):
        if isinstance(layer, LSTM):
            outputs = Outputs(layer)
            outputs.lstm = DPLSTM(layer.inputs, layer.cells, batch_first=True)
            weights = {n: p.detach() for n, p in layer.named_parameters()}
            outputs.lstm.load_state_dict(weights)
            setattr(copied, name, outputs.to(layer.bias_ih_l0))
        # the plan trains without dropout
        if isinstance(layer, SeededDropout):
            setattr(copied, name, nn.Identity())
    return copied


def opacus(batched: LocalTrainer, plan: LocalTraining) -> torch.Tensor:
    """Train one client after the other, with one wrapped module and one optimizer each.

    Args:
        batched: the clients, their samples and first weights.
        plan: learning rate, clip norm, noise multiplier and mini-batches.

    Returns:
        The clients' updates (clients, d), in the order of `batched.model`'s parameters.
    """
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    out = torch.empty(len(batched.ids), batched.model.dimension, dtype=batched.dtype)
    names = [name for name, _ in batched.model.module.named_parameters()]
    objective = batched.model.objective
    secret = Keys()
    initial = for_opacus(batched.model.module)
    for client, size in enumerate(batched.sizes):
        # every client starts from the same first weights
        module = GradSampleModule(copy.deepcopy(initial), loss_reduction="sum")
        sgd = torch.optim.SGD(module.parameters(), lr=plan.lr)
        optimizer = DPOptimizer(
            sgd,
            noise_multiplier=plan.noise,
            max_grad_norm=plan.clip,
            # DP-SGD divides sums by the expected number of examples of a batch, whatever is drawn
            expected_batch_size=min(plan.batch_size, size),
            loss_reduction="mean",
        )
        ids = [batched.ids[client]]
        start = batched.start[None]
        digests = [batched._train_on.digest(client)]
        # the same mini-batches as of the other variants of DP-SGD
        draws = DPSGDState(secret, ids, [size], start, plan, 1, 1, digests)
        for batch in draws.batches(0):
            rows = torch.as_tensor(batch + batched._offsets[client])
            optimizer.zero_grad()
            outputs = module(batched._x[rows])
            losses = objective.losses(outputs, batched._y[rows])
            # a sum, as the wrapper's `loss_reduction` says: no gradient is divided by a batch size
            losses.sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        trained = {}
        for name, parameter in module.named_parameters():
            # opacus' wrapper and `Outputs` each add a prefix
            plain_name = name.replace("_module.", "").replace(".lstm.", ".")
            trained[plain_name] = parameter.detach()
        vector = torch.cat([trained[name].flatten() for name in names])
        out[client] = vector - batched.start
    return out


def variants(model: str, clients: int, plan: LocalTraining, dtype: torch.dtype) -> Variants:
    """Return, by name, the threads and one round of each variant.

    Args:
        model: one of `CLIENTS`.
        clients: how many.
        plan: of the round.
        dtype: of samples and weights.
    """
    batched = cohort(model, clients, False, dtype)
    threads = torch.get_num_threads()
    general = cohort(model, clients, True, dtype)

    without_noise = replace(plan, noise=0.0)
    not_private = replace(plan, clip=0.0, noise=0.0)
    private = {}
    # only models with a stack of layers have gradients by hand
    if batched.model.stack is not None:
        private["by hand"] = (threads, partial(batched_round, batched, plan))
        private["by hand, no noise"] = (threads, partial(batched_round, batched, without_noise))
    private["examples as clients"] = (threads, partial(batched_round, general, plan))
    by_opacus = partial(opacus, batched, plan)
    return {
        "plain training": (threads, partial(batched_round, batched, not_private)),
        **private,
        "opacus, 1 thread": (1, by_opacus),
        f"opacus, {threads} threads": (threads, by_opacus),
    }


def measure(model: str, clients: int, rounds: int) -> list[dict[str, Any]]:
    """Measure seconds a round of each variant, in turn.

    Args:
        model: one of `CLIENTS`.
        clients: how many are timed.
        rounds: timed ones of each variant.

    Returns:
        A line of the table for each variant.
    """
    updates = {}
    # updates agree only without noise and rounding
    without_noise = replace(PLAN, noise=0.0)
    exact = variants(model, 2, without_noise, torch.float64)
    for variant, (_, run_once) in exact.items():
        updates[variant] = run_once()
    seconds = timed(variants(model, clients, PLAN, torch.float32), rounds)
    medians = medians_of(seconds)
    best_opacus = best_of(medians, "opacus")
    reference = updates["opacus, 1 thread"]
    rows = []
    for variant, times in seconds.items():
        median = medians[variant]
        error = ""
        # plain training neither clips nor adds noise, so its updates are others
        if variant != "plain training":
            # opacus adds 1e-6 to norms, so about 1e-6
            error = f"{relative_error(updates[variant], reference):.1e}"
        row = {
            "model": model,
            "clients": clients,
            "variant": variant,
            "rounds": rounds,
            "median": round(median, 4),
            "min": round(min(times), 4),
            "max": round(max(times), 4),
            "over_plain_training": round(median / medians["plain training"], 2),
            "best_opacus_over_it": round(best_opacus / median, 2),
            "error_in_float64": error,
        }
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # as opacus has it
    measured = (measure(model, CLIENTS[model], options.rounds) for model in options.models)
    print(tabulate("dpsgd", measured))


if __name__ == "__main__":
    main()
