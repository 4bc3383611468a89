"""Gradients that one-step updates reveal, and samples whose gradients match them.

A client that makes one step of SGD over all of its samples sends −η times its gradient at a model
that the server knows. Attacks look for samples with that gradient, all clients at once: their
models are stacked, and the searches are independent.

Each client's search has step lengths of its own, and ends where it would end alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from securecluster.attacks.base import Knowledge, View
from securecluster.attacks.label_counts import rounded
from securecluster.attacks.views import observed_updates
from securecluster.core.lazy_torch import torch
from securecluster.models.flat_model import FlatModel
from securecluster.training.config import LocalTraining

NUMBERS = 1 << 23  # of all stacked models at once, which bounds memory
MOST_SAMPLES = 8  # of one step: with more, matching one gradient is hopeless at this cost
MOST_CLIENTS = 20  # that are attacked
SMALLEST = 1e-30  # norm of a gradient
MOST_HALVINGS = 20  # of the length of a step
ARMIJO = 1e-4  # share of the decrease that a slope promises, which is enough
CURVED = 1e-12  # cosine of a step and the change of the slope, below which it tells no curvature

Losses = Callable[["torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True)
class ObservedGradient:
    """Gradient of a client's mean loss at θ_0.

    Args:
        client: its number.
        gradient: (d,) float64; under a mask, noise or a clip as these leave it.
        samples: number of samples that the gradient is over.
    """

    client: int
    gradient: torch.Tensor
    samples: int


def observed_gradients(view: View, knowledge: Knowledge) -> list[ObservedGradient]:
    """Return the gradients of the first MOST_CLIENTS clients that made one step from θ_0.

    A client that does not send its number of samples is taken to have one.

    Args:
        view: what the adversary observed.
        knowledge: what it knows besides.
    """
    config = knowledge.config
    if config["optimizer"] != "sgd":
        return []
    plan = LocalTraining(config["lr"], config["epochs"], config["batch_size"])
    gradients: dict[int, ObservedGradient] = {}
    for update in observed_updates(view, knowledge):
        client = update.sender.index
        samples = round(update.size or 1)
        if update.round != 1 or client is None or client in gradients:
            continue
        if plan.number(samples) != 1 or samples > MOST_SAMPLES:
            continue
        # one step of SGD from θ_0 is Δ = −η·∇L(θ_0), so the gradient is −Δ/η
        row = update.row[: knowledge.dimension].double().cpu()
        gradient = -row / float(config["lr"])
        gradients[client] = ObservedGradient(client, gradient, samples)
    return list(gradients.values())[:MOST_CLIENTS]


def guessed_labels(
    gradient: ObservedGradient, knowledge: Knowledge, prediction: torch.Tensor
) -> torch.Tensor:
    """Return the labels of a gradient's samples, ascending, (n,) int64.

    Of one sample only the true class's entry of the last bias is negative (Zhao et al. 2020,
    iDLG). Of several samples the entries give the share of each class.

    Args:
        gradient: of a client.
        knowledge: of the network, whose last parameter is a bias with one entry a class.
        prediction: mean prediction of the network at θ_0, (classes,).
    """
    classes = knowledge.classes
    bias = gradient.gradient[-classes:]
    if gradient.samples == 1:
        return bias.argmin()[None]
    # ∂L/∂b_c = p̄_c − n_c/n (Geng et al. 2021; see `label_counts`)
    shares = (prediction - bias).numpy()
    counts = rounded(shares, gradient.samples)
    labels = np.repeat(np.arange(classes), counts)
    return torch.from_numpy(labels)


@dataclass(frozen=True)
class GradientProblem:
    """Samples that b searches look for, by the gradients that they should have.

    Args:
        network: as a function of a flat vector, in float64.
        start: θ_0, (d,) float64.
        gradients: observed, (b, d) float64.
        labels: of the samples, (b, n) int64.
        shape: of a sample.
        bounds: least and largest value of a sample's numbers.
    """

    network: FlatModel
    start: torch.Tensor
    gradients: torch.Tensor
    labels: torch.Tensor
    shape: tuple[int, ...]
    bounds: tuple[float, float]

    def gradients_of(self, samples: torch.Tensor) -> torch.Tensor:
        """Return the gradients of some samples' mean losses, (b, d), differentiable by them.

        Args:
            samples: (b, n·numbers of a sample).
        """
        searches, count = self.labels.shape
        network = self.network
        x = samples.view(searches, count, *self.shape)
        rows = self.start.expand(searches, -1).clone().requires_grad_()
        views = network.views(rows)
        if network.together:
            outputs = network.stacked(views, x)
        else:
            single = []
            for n in range(searches):
                parameters = {name: view[n] for name, view in views.items()}
                output = network.call(parameters, x[n])
                single.append(output)
            outputs = torch.stack(single)
        flat = outputs.flatten(0, 1)
        losses = network.objective.losses(flat, self.labels.flatten())
        means = losses.view(searches, count).mean(1)
        # Searches are independent, so the gradient of their sum holds every search's own gradient.
        # The search differentiates it once more, by the samples: hence create_graph.
        (gradients,) = torch.autograd.grad(means.sum(), rows, create_graph=True)
        return gradients

    def squared_errors(self, samples: torch.Tensor) -> torch.Tensor:
        """Return each search's squared distance of gradients, relative to their norm, (b,).

        Args:
            samples: (b, n·numbers of a sample).
        """
        differences = self.gradients_of(samples) - self.gradients
        errors = differences.square().sum(1)
        norms = self.gradients.square().sum(1)
        return errors / norms.clamp_min(SMALLEST)

    def cosine_distances(self, samples: torch.Tensor) -> torch.Tensor:
        """Return each search's 1 − cos of gradients, (b,).

        Args:
            samples: (b, n·numbers of a sample).
        """
        gradients = self.gradients_of(samples)
        cosine_similarity = torch.nn.functional.cosine_similarity
        return 1 - cosine_similarity(gradients, self.gradients, dim=1, eps=SMALLEST)

    def variation(self, samples: torch.Tensor) -> torch.Tensor:
        """Return each search's total variation, (b,): mean difference of neighbouring pixels.

        Samples that are no images have none.

        Args:
            samples: (b, n·numbers of a sample).
        """
        if len(self.shape) != 3:
            return samples.new_zeros(len(samples))
        images = samples.view(len(samples), -1, *self.shape)
        # anisotropic total variation: vertical and horizontal differences count separately
        vertical = images.diff(dim=-2).abs()
        horizontal = images.diff(dim=-1).abs()
        return vertical.flatten(1).mean(1) + horizontal.flatten(1).mean(1)


def problems(
    gradients: Sequence[ObservedGradient],
    labels: Sequence[torch.Tensor],
    knowledge: Knowledge,
    restarts: int,
) -> list[tuple[list[int], GradientProblem]]:
    """Return problems of clients with equally many samples, each small enough for memory.

    Args:
        gradients: of clients.
        labels: of each client's samples.
        knowledge: of the network.
        restarts: searches for each client.

    Returns:
        The positions in `gradients` of each problem's clients, and the problem: it has `restarts`
        searches in a row for every client.
    """
    cpu = torch.device("cpu")
    network = knowledge.network.to(cpu, torch.float64)
    start = knowledge.initial.double().cpu()
    shape = tuple(knowledge.config["shape"])
    bounds = _bounds(knowledge)
    together = max(1, NUMBERS // (network.dimension * restarts))
    by_count: dict[int, list[int]] = {}
    for position, gradient in enumerate(gradients):
        by_count.setdefault(gradient.samples, []).append(position)
    grouped = []
    for positions in by_count.values():
        for first in range(0, len(positions), together):
            chosen = positions[first : first + together]
            rows = torch.stack([gradients[k].gradient for k in chosen])
            rows = rows.repeat_interleave(restarts, 0)
            targets = torch.stack([labels[k] for k in chosen])
            targets = targets.repeat_interleave(restarts, 0)
            problem = GradientProblem(network, start, rows, targets, shape, bounds)
            grouped.append((chosen, problem))
    return grouped


def _bounds(knowledge: Knowledge) -> tuple[float, float]:
    """Return the least and largest value of public samples, or 0 and 1 without any."""
    if knowledge.samples is None:
        return (0.0, 1.0)
    inputs = knowledge.inputs
    return (float(inputs.min()), float(inputs.max()))


def lbfgs(losses: Losses, start: torch.Tensor, steps: int, history: int = 20) -> torch.Tensor:
    """Return local minima of independent losses by L-BFGS (Nocedal & Wright 2006, Algorithm 7.5).

    Every row is a search of its own with its own step lengths, by backtracking (Armijo). A search
    whose step length becomes too small starts over from the steepest descent, and stops if that
    fails, too.

    Args:
        losses: of rows (b, n): (b,), differentiable.
        start: (b, n).
        steps: most steps.
        history: pairs of differences that the curvature is estimated from.

    Returns:
        (b, n).
    """
    x = start.clone()
    value, slope = _with_slope(losses, x)
    moves: list[torch.Tensor] = []
    changes: list[torch.Tensor] = []
    inverses: list[torch.Tensor] = []  # 1 / sᵀy, and 0 for pairs that do not count
    for _ in range(steps):
        direction = _direction(slope, moves, changes, inverses)
        descent = (direction * slope).sum(1)
        # A poor estimate of the curvature may point uphill: fall back to steepest descent.
        uphill = (descent >= 0)[:, None]
        direction = torch.where(uphill, -slope, direction)
        descent = (direction * slope).sum(1)
        length = torch.ones_like(value)
        # the first step has no curvature to scale it
        if not moves:
            steepness = slope.abs().sum(1)
            length = 1 / steepness.clamp_min(1)
        x_next, accepted = _backtracked(losses, x, value, direction, descent, length)
        if not bool(accepted.any()):
            if not moves:
                break
            moves, changes, inverses = [], [], []
            continue
        value_next, slope_next = _with_slope(losses, x_next)
        move = x_next - x
        change = slope_next - slope
        product = (move * change).sum(1)
        # a pair with sᵀy ≤ 0 would make H indefinite, so that −H·slope need not descend
        curved = product > CURVED * move.norm(dim=1) * change.norm(dim=1)
        divisor = torch.where(curved, product, 1.0)
        inverse = torch.where(curved, 1 / divisor, 0.0)
        moves.append(move)
        changes.append(change)
        inverses.append(inverse)
        del moves[:-history], changes[:-history], inverses[:-history]
        x = x_next
        value = value_next
        slope = slope_next
    return x


def _with_slope(losses: Losses, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses (b,) and their gradients (b, n)."""
    leaf = x.detach().requires_grad_()
    values = losses(leaf)
    (slope,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), slope


def _direction(
    slope: torch.Tensor,
    moves: Sequence[torch.Tensor],
    changes: Sequence[torch.Tensor],
    inverses: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return −H·slope, (b, n), by the two loops over stored pairs."""
    direction = -slope
    weights = []
    pairs = list(zip(moves, changes, inverses, strict=True))
    for move, change, inverse in reversed(pairs):
        weight = inverse * (move * direction).sum(1)
        direction = direction - weight[:, None] * change
        weights.append(weight)
    if moves:
        # initial H = sᵀy / yᵀy (Nocedal & Wright 2006, Equation 7.20)
        squared = changes[-1].square().sum(1)
        product = (moves[-1] * changes[-1]).sum(1)
        counts = (inverses[-1] > 0) & (squared > 0)
        divisor = torch.where(counts, squared, 1.0)
        scale = torch.where(counts, product / divisor, 1.0)
        direction = direction * scale[:, None]
    weights.reverse()
    for pair, weight in zip(pairs, weights, strict=True):
        move, change, inverse = pair
        correction = weight - inverse * (change * direction).sum(1)
        direction = direction + correction[:, None] * move
    return direction


def _backtracked(
    losses: Losses,
    x: torch.Tensor,
    value: torch.Tensor,
    direction: torch.Tensor,
    descent: torch.Tensor,
    length: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows after a step that decreases their losses, and which rows moved."""
    accepted = torch.zeros_like(value, dtype=torch.bool)
    result = x
    for _ in range(MOST_HALVINGS):
        trial = x + length[:, None] * direction
        # cosine and squared errors are of gradients, which need autograd even for a value alone
        with torch.enable_grad():
            leaf = trial.detach().requires_grad_()
            trial_value = losses(leaf).detach()
        # Armijo's condition of sufficient decrease, for each search with its own step length
        highest = value + ARMIJO * length * descent
        enough = trial_value <= highest
        new = enough & ~accepted & (descent < 0)
        result = torch.where(new[:, None], trial, result)
        accepted = accepted | new
        if bool(accepted.all()):
            break
        length = torch.where(accepted, length, length / 2)
    return result, accepted


def signed_adam(
    losses: Losses, start: torch.Tensor, steps: int, lr: float, low: float, high: float
) -> torch.Tensor:
    """Return rows of small losses by Adam on the signs of gradients, in a box.

    The learning rate falls by ten after 3/8, 5/8 and 7/8 of the steps (Geiping et al. 2020).

    Args:
        losses: of rows (b, n): (b,), differentiable.
        start: (b, n).
        steps: number of steps.
        lr: learning rate.
        low: least value of a number.
        high: largest value of a number.

    Returns:
        (b, n).
    """
    x = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([x], lr=lr)
    milestones = [steps * k // 8 for k in (3, 5, 7)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        losses(x).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        # signs keep steps alike over orders of magnitude of the gradient (Geiping et al. 2020)
        x.grad.sign_()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            x.clamp_(low, high)
    return x.detach()
