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
    first, end = cohort._offsets[client : client + 2]
    rows = slice(int(first), int(end))
    losses = cohort.model.objective.losses(module(cohort._x[rows]), cohort._y[rows])
    gradients = torch.autograd.grad(losses.mean(), list(module.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def updates(cohort: LocalTrainer, plan: LocalTraining) -> torch.Tensor:
    """Return the updates (m, d) of a torch.optim loop over one client after the other."""
    return plain(cohort, plain_module(cohort.model.module, seeded=True), plan)


def private_updates(cohort: LocalTrainer, plan: LocalTraining) -> torch.Tensor:
    """Return the updates (m, d) of DP-SGD without noise.

    One example's gradient after the other is clipped and added up.
    """
    module = plain_module(cohort.model.module, seeded=True)
    clients = range(len(cohort.ids))
    return torch.stack([_private_update(cohort, module, plan, client) for client in clients])


def _private_update(
    cohort: LocalTrainer, module: nn.Module, plan: LocalTraining, client: int
) -> torch.Tensor:
    """Return the update (d,) of one client."""
    assert cohort.secret is not None
    size = cohort.sizes[client]
    offset = int(cohort._offsets[client])
    start = cohort.start[None]
    digest = cohort._train_on.digest(client)
    draws = DPSGDState(cohort.secret, [cohort.ids[client]], [size], start, plan, 1, 1, [digest])
    load(module, cohort.start)
    parameters = list(module.parameters())
    optimizer = optimizer_of(plan, module)
    for batch in draws.batches(0):
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for position in batch:
            row = offset + int(position)
            x, y = cohort._x[row : row + 1], cohort._y[row : row + 1]
            loss = cohort.model.objective.losses(module(x), y).sum()
            gradients = torch.autograd.grad(loss, parameters)
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            factor = float((plan.clip / norm).clamp(max=1))
            for clipped_sum, gradient in zip(sums, gradients, strict=True):
                clipped_sum += factor * gradient
        for parameter, clipped_sum in zip(parameters, sums, strict=True):
            parameter.grad = clipped_sum / min(plan.batch_size, size)
        optimizer.step()
    return nn.utils.parameters_to_vector(parameters).detach() - cohort.start
