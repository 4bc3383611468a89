"""Protected rounds on one thread: DP-SGD beside opacus, secure sums beside plain ones, and the
server's check of norms, for `benchmarks.ratios`.

Times are processor milliseconds, the least of the repeats; the variants of a case take turns, so
that other work of the machine meets them alike.

- DP-SGD: ten mini-batches of ten images of every client, one client after the other with opacus.
- secure sum: a round of FedAvg, of which every client trains two mini-batches.
- norms: the server checks that updates are not too long, beside their training.
"""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.costs import server_scale, speed
from benchmarks.costs.recurrent import batched_round, no_tests
from benchmarks.table import UNRECORDED
from securecluster import Federation
from securecluster.messaging.bounds import too_long
from securecluster.privacy.dp import fused_noise
from securecluster.privacy.dp.grid_noise import GridNoise
from securecluster.protocols import ClusteringProtocol, FedAvg
from securecluster.training.dp_sgd import DPSGDState
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

PLAN = replace(speed.PLAN, dropout=False, clip=1.0, noise=1.0)
CLIENTS_OF_SUMS = 30
CLIENTS_OF_NORMS = 100
OPACUS = "opacus"
TRAINING = "training"


class Keys:
    """A client's key follows from its number."""

    def seed(self, client: int, purpose: str, step: int, about: bytes = b"") -> bytes:
        """Return 32 bytes."""
        text = repr((client, purpose, step, about))
        return hashlib.sha256(text.encode()).digest()


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
    for client, size in enumerate(batched.sizes):
        # every client starts from the same first weights
        module = GradSampleModule(copy.deepcopy(batched.model.module), loss_reduction="sum")
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
            trained[name.removeprefix("_module.")] = parameter.detach()
        vector = torch.cat([trained[name].flatten() for name in names])
        out[client] = vector - batched.start
    return out


def least(tasks: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the least processor milliseconds of each task.

    Args:
        tasks: functions by name, which take turns.
        repeats: timed executions of each.
    """
    shortest = dict.fromkeys(tasks, float("inf"))
    # the first execution only warms up
    for number in range(repeats + 1):
        for name, task in tasks.items():
            start = time.process_time()
            task()
            if number:
                shortest[name] = min(shortest[name], 1e3 * (time.process_time() - start))
    return shortest


def dp_sgd(clients: int, repeats: int) -> dict[str, float]:
    """Return the milliseconds of a local round, by the variant.

    Args:
        clients: how many train.
        repeats: timed rounds of each variant.
    """
    batched = speed.cohort("mlp-200", clients, secret=Keys())
    without_noise = replace(PLAN, noise=0.0)
    tasks = {
        "plain training": partial(batched_round, batched, replace(without_noise, clip=0.0)),
        "DP-SGD, no noise": partial(batched_round, batched, without_noise),
        "DP-SGD": partial(batched_round, batched, PLAN),
        OPACUS: partial(opacus, batched, PLAN),
    }
    return least(tasks, repeats)


def noise(rows: int, d: int, repeats: int) -> dict[str, float]:
    """Return the milliseconds of adding exact noise to rows, and inexact Gaussians of torch.

    Exact noise is numpy's, and in a long run compiled, which is NaN where numba is not installed.

    Args:
        rows: how many.
        d: numbers of each.
        repeats: timed executions of each.
    """
    table, memory = torch.zeros(rows, d), torch.zeros(rows, d)
    seeds = [Keys().seed(k, "noise", 0) for k in range(rows)]

    def exact(drawn_before: int) -> None:
        usage = fused_noise.usage
        fused_noise.usage = fused_noise.Usage(drawn_before)
        try:
            GridNoise(seeds).add_to(table, [2.0**-20] * rows, [0.1] * rows)
        finally:
            fused_noise.usage = usage

    variants: dict[str, Callable[[], object]] = {
        "numpy": partial(exact, 0),
        # in memory that is there, as it is in a long run
        "randn": lambda: table.add_(torch.randn(rows, d, out=memory)),
    }
    if fused_noise.kernel() is not None:
        variants["compiled"] = partial(exact, fused_noise.WORTH)
    return {"compiled": math.nan, **least(variants, repeats)}


def whole_run(protocol: ClusteringProtocol, clients: int) -> tuple[float, dict[str, Any]]:
    """Return the processor seconds of a run of clients with few samples, and its bytes.

    Args:
        protocol: what is run.
        clients: how many.
    """
    federation = server_scale.few_samples(clients)
    start = time.process_time()
    fitted = protocol.fit(federation, replace(UNRECORDED, threads=1))
    return time.process_time() - start, fitted.bytes_


def secure_sums(model: str, repeats: int, clients: int = CLIENTS_OF_SUMS) -> dict[str, float]:
    """Return the milliseconds of a round without those of the first, by the aggregation.

    Args:
        model: name of the network.
        repeats: timed runs of each aggregation.
        clients: how many.
    """
    draw = np.random.default_rng(0)
    arrays = {}
    for k in range(clients):
        images = draw.random((20, 1, 28, 28), dtype=np.float32)
        arrays[f"c{k}"] = (images, draw.integers(0, 10, 20))
    federation = Federation.from_arrays(arrays, test=no_tests(arrays), seed=0)
    shortest = {"plain": float("inf"), "secagg": float("inf")}
    settings = replace(UNRECORDED, threads=1)
    for _ in range(repeats):
        for aggregation in shortest:
            ends: list[float] = []
            run = FedAvg(rounds=5, model=model, epochs=1, batch_size=10, aggregation=aggregation)
            run.fit(federation, settings, report=partial(_note, ends))
            # the keys are exchanged in the first round
            shortest[aggregation] = min(shortest[aggregation], 1e3 * float(min(np.diff(ends))))
    return shortest


def _note(ends: list[float], _: Any) -> None:
    """Note the processor time at which a round ends."""
    ends.append(time.process_time())


def norms(repeats: int) -> dict[str, float]:
    """Return the milliseconds of local training, and of the check of the updates' norms.

    Args:
        repeats: timed executions of each.
    """
    batched = speed.cohort("mlp-200", CLIENTS_OF_NORMS, secret=Keys())
    train = partial(batched_round, batched, replace(PLAN, clip=0.0, noise=0.0))
    return least({TRAINING: train, "norms": partial(too_long, train())}, repeats)
