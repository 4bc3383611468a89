"""Clients' models, for attacks on them: θ_0 and a client's first update, or what it trained alone.

Clients of some methods first train alone for several rounds, and then send their model once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.attacks.base import Knowledge, View
from securecluster.attacks.views import observed_updates
from securecluster.core.lazy_torch import torch

Array = NDArray[np.float64]
FEWEST = 2  # clients whose models are compared
# client methods: training without an update that leaves, and the model that a client sends after it
TRAINED_ALONE = "train_locally"
SENT_ALONE = "send_model"


def why_not(view: View, knowledge: Knowledge) -> str | None:
    """Return why candidates cannot be compared by clients' models; None if they can.

    Args:
        view: what the adversary observed.
        knowledge: what it knows besides.
    """
    if knowledge.samples is None:
        return "not applicable: the adversary has no samples to ask about"
    if knowledge.config.get("mask", "none") != "none":
        return "not applicable: no model can be evaluated under a mask"
    if len(first_models(view, knowledge)) < FEWEST:
        return "not applicable: no single updates of a first round were observed"
    return None


@dataclass(frozen=True)
class ShownModel:
    """A client's model that was trained on its data alone, as an adversary reads it.

    Args:
        model: (d,).
        steps: numbers of the calls in which it was trained from θ_0, in order.
        size: the client's number of samples, if it sent it.
    """

    model: torch.Tensor
    steps: tuple[int, ...]
    size: float | None


def shown_models(view: View, knowledge: Knowledge) -> dict[int, ShownModel]:
    """Return by client the first of its models that nobody else's data went into.

    Args:
        view: what the adversary observed.
        knowledge: what it knows besides.
    """
    d = knowledge.network.dimension
    alone = _trained_alone(view)
    models: dict[int, ShownModel] = {}
    for update in observed_updates(view, knowledge):
        client = update.sender.index
        if client is None or client in models:
            continue
        steps: tuple[int, ...] = ()
        if update.method == SENT_ALONE:
            steps = tuple(step for step in alone.get(client, ()) if step < update.step)
        elif update.round == 1:
            steps = (update.step,)
        if steps:
            model = knowledge.initial + update.row[:d].to(knowledge.initial)
            models[client] = ShownModel(model, steps, update.size)
    return models


def first_models(view: View, knowledge: Knowledge) -> dict[int, torch.Tensor]:
    """Return each client's model after its first local training, (d,), by its number.

    Args:
        view: what the adversary observed.
        knowledge: what it knows besides.
    """
    return {client: shown.model for client, shown in shown_models(view, knowledge).items()}


def _trained_alone(view: View) -> dict[int, list[int]]:
    """Return by client the calls in which it trained from θ_0 without any average."""
    found: dict[int, list[int]] = {}
    averaged = set()
    for message in view.messages(TRAINED_ALONE):
        means = getattr(message.content, "means", None)
        client = message.receiver.index
        if means is None or client is None:
            continue
        if means.picks[0]:
            averaged.add(client)
        if client not in averaged:
            found.setdefault(client, []).append(message.step)
    return found


def candidate_losses(
    model: torch.Tensor, knowledge: Knowledge, samples: NDArray[Any] | None = None
) -> Array:
    """Return the loss of each candidate under a model, (candidates,).

    Args:
        model: (d,).
        knowledge: with the candidates as its samples.
        samples: in place of the candidates' own samples, with the same labels, (candidates, …).
    """
    assert knowledge.samples is not None
    if samples is None:
        samples = np.asarray(knowledge.samples[0])
    x = torch.as_tensor(samples).to(model)
    y = torch.as_tensor(np.asarray(knowledge.samples[1]))
    with torch.no_grad():
        outputs = knowledge.network.call(knowledge.parameters(model), x)
        losses = knowledge.network.objective.losses(outputs, y)
    return np.asarray(losses.double().cpu().numpy())
