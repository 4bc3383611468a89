"""Plain PyTorch on the CPU in float64: what checks of networks compare with."""

from __future__ import annotations

import torch
from torch import nn

from securecluster.benchmarks.recurrent import load, optimizer_of, plain, plain_module
from securecluster.training.dp_sgd import DPSGDState
from securecluster.training.local_trainer import LocalTrainer, LocalTraining


def gradient(cohort: LocalTrainer, client: int) -> torch.Tensor:
    """Return the gradient (d,) of a client's mean loss, by autograd on the module itself."""
    module = plain_module(cohort.model.module, seeded=True)
    load(module, cohort.start)
    rows = slice(int(cohort._offsets[client]), int(cohort._offsets[client + 1]))
    losses = cohort.model.objective.losses(module(cohort._x[rows]), cohort._y[rows])
    found = torch.autograd.grad(losses.mean(), list(module.parameters()))
    return torch.cat([part.flatten() for part in found])


def updates(cohort: LocalTrainer, plan: LocalTraining) -> torch.Tensor:
    """Return the updates (m, d) of a torch.optim loop over one client after the other."""
    return plain(cohort, plain_module(cohort.model.module, seeded=True), plan)


def private_updates(cohort: LocalTrainer, plan: LocalTraining) -> torch.Tensor:
    """Return the updates (m, d) of DP-SGD without noise: one example's gradient after the other,
    clipped and added up.
    """
    module = plain_module(cohort.model.module, seeded=True)
    found = [_private_update(cohort, module, plan, client) for client in range(len(cohort.ids))]
    return torch.stack(found)


def _private_update(
    cohort: LocalTrainer, module: nn.Module, plan: LocalTraining, client: int
) -> torch.Tensor:
    assert cohort.secret is not None
    size, offset = cohort.sizes[client], int(cohort._offsets[client])
    start, digest = cohort.start[None], cohort._train_on.digest(client)
    draws = DPSGDState(cohort.secret, [cohort.ids[client]], [size], start, plan, 1, 1, [digest])
    load(module, cohort.start)
    parameters = list(module.parameters())
    optimizer = optimizer_of(plan, module)
    for batch in draws.batches(0):
        total = [torch.zeros_like(p) for p in parameters]
        for place in batch:
            row = slice(offset + int(place), offset + int(place) + 1)
            loss = cohort.model.objective.losses(module(cohort._x[row]), cohort._y[row]).sum()
            example = torch.autograd.grad(loss, parameters)
            norm = torch.cat([part.flatten() for part in example]).norm()
            factor = float((plan.clip / norm).clamp(max=1))
            for whole, part in zip(total, example, strict=True):
                whole += factor * part
        for parameter, whole in zip(parameters, total, strict=True):
            parameter.grad = whole / min(plan.batch_size, size)
        optimizer.step()
    return nn.utils.parameters_to_vector(parameters).detach() - cohort.start
