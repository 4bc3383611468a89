"""Losses of clients' models, for attacks that compare them: θ_0 and a client's first update."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from securecluster.attacks.base import Knowledge, View
from securecluster.attacks.views import observed_updates
from securecluster.core.lazy_torch import torch

Array = NDArray[np.float64]
FEWEST = 2  # clients whose models are compared


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


def first_models(view: View, knowledge: Knowledge) -> dict[int, torch.Tensor]:
    """Return each client's model after its first local training, (d,), by its number.

    Args:
        view: what the adversary observed.
        knowledge: what it knows besides.
    """
    d = knowledge.network.dimension
    models: dict[int, torch.Tensor] = {}
    for update in observed_updates(view, knowledge):
        client = update.sender.index
        if update.round == 1 and client is not None and client not in models:
            models[client] = knowledge.initial + update.row[:d].to(knowledge.initial)
    return models


def candidate_losses(model: torch.Tensor, knowledge: Knowledge) -> Array:
    """Return the loss of each candidate under a model, (candidates,).

    Args:
        model: (d,).
        knowledge: with the candidates as its samples.
    """
    assert knowledge.samples is not None
    x = torch.as_tensor(np.asarray(knowledge.samples[0])).to(model)
    y = torch.as_tensor(np.asarray(knowledge.samples[1]))
    with torch.no_grad():
        outputs = knowledge.network.call(knowledge.parameters(model), x)
        losses = knowledge.network.objective.losses(outputs, y)
    return np.asarray(losses.double().cpu().numpy())
