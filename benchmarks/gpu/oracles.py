"""References for the checks of networks: plain PyTorch on the CPU in float64."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.costs.recurrent import load, optimizer_of, plain, plain_module
from securecluster.training.dp_sgd import DPSGDState
from securecluster.training.local_trainer import LocalTrainer, LocalTraining


def gradient(cohort: LocalTrainer, client: int) -> torch.Tensor:
    """Return the gradient (d,) of a client's mean loss, by autograd on the module itself.

    Args:
        cohort: on the CPU, in float64.
        client: its position in the cohort.
    """
    objective = cohort.model.objective
    # LSTMs become torch's nn.LSTM; dropout stays the package's, seeded one
    module = plain_module(cohort.model.module, seeded=True)
    load(module, cohort.start)
    # the cohort concatenates its clients' samples
    first, end = cohort._offsets[client : client + 2]
    rows = slice(int(first), int(end))
    outputs = module(cohort._x[rows])
    losses = objective.losses(outputs, cohort._y[rows])
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(losses.mean(), parameters)
    return torch.cat([gradient.flatten() for gradient in gradients])


def updates(cohort: LocalTrainer, plan: LocalTraining) -> torch.Tensor:
    """Return the updates (m, d) of a torch.optim loop over one client after the other.

    Args:
        cohort: on the CPU, in float64.
        plan: of local training, without DP-SGD.
    """
    module = plain_module(cohort.model.module, seeded=True)
    return plain(cohort, module, plan)


def private_updates(cohort: LocalTrainer, plan: LocalTraining) -> torch.Tensor:
    """Return the updates (m, d) of DP-SGD without noise.

    One example's gradient after the other is clipped and added up.

    Args:
        cohort: on the CPU, in float64.
        plan: of local training by DP-SGD.
    """
    module = plain_module(cohort.model.module, seeded=True)
    updates = []
    for client in range(len(cohort.ids)):
        updates.append(_private_update(cohort, module, plan, client))
    return torch.stack(updates)


def _private_update(
    cohort: LocalTrainer, module: nn.Module, plan: LocalTraining, client: int
) -> torch.Tensor:
    """Return the update (d,) of one client.

    Args:
        cohort: on the CPU, in float64.
        module: the network; its weights change in place.
        plan: of local training by DP-SGD.
        client: its position in the cohort.
    """
    assert cohort.secret is not None
    objective = cohort.model.objective
    size = cohort.sizes[client]
    offset = int(cohort._offsets[client])
    start = cohort.start[None]
    digest = cohort._train_on.digest(client)
    identity = cohort.ids[client]
    # the batches (Poisson sampling) are the trainer's own; only the arithmetic is independent
    draws = DPSGDState(cohort.secret, [identity], [size], start, plan, 1, 1, [digest])
    load(module, cohort.start)
    parameters = list(module.parameters())
    optimizer = optimizer_of(plan, module)
    # a client with few samples cannot fill a batch
    expected_size = min(plan.batch_size, size)
    for batch in draws.batches(0):
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for position in batch:
            row = offset + int(position)
            example = slice(row, row + 1)
            outputs = module(cohort._x[example])
            loss = objective.losses(outputs, cohort._y[example]).sum()
            gradients = torch.autograd.grad(loss, parameters)
            flat_gradient = torch.cat([gradient.flatten() for gradient in gradients])
            # g / max(1, ‖g‖/C): Abadi et al. 2016, Algorithm 1
            ratio = plan.clip / flat_gradient.norm()
            # a gradient within the bound is not scaled up
            factor = float(ratio.clamp(max=1))
            for clipped_sum, gradient in zip(sums, gradients, strict=True):
                clipped_sum += factor * gradient
        for parameter, clipped_sum in zip(parameters, sums, strict=True):
            # over the expected size: the size of a random batch would depend on the draw
            parameter.grad = clipped_sum / expected_size
        optimizer.step()
    trained = nn.utils.parameters_to_vector(parameters).detach()
    return trained - cohort.start
