"""Clients' models for attacks: θ_0 plus the first update, or a model that was trained locally.

Clients of some methods first train alone for several rounds, and then send their model once. Those
of IFCA begin with one of several initial models, which are as public as θ_0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.attacks.arrays import as_array
from securecluster.attacks.base import NO_SAMPLES, Knowledge, View
from securecluster.attacks.views import observed_updates
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness

Array = NDArray[np.float64]
FEWEST = 2  # clients whose models are compared
# client methods: training without an update that leaves, and the model that a client sends after it
TRAINED_ALONE = "train_locally"
SENT_ALONE = "send_model"
CHOICE = "choose"  # client method of IFCA, whose reply is the number of an initial model


def why_not(view: View, knowledge: Knowledge) -> str | None:
    """Return why candidates cannot be compared by clients' models; None if they can.

    Args:
        view: what the adversary observed.
        knowledge: what it knows besides.
    """
    if knowledge.samples is None:
        return NO_SAMPLES
    if knowledge.mask != "none":
        return "not applicable: no model can be evaluated under a mask"
    if len(first_models(view, knowledge)) < FEWEST:
        return "not applicable: no single updates of a first round were observed"
    knowledge.expect()
    return None


@dataclass(frozen=True)
class ShownModel:
    """A client's model that was trained on its data alone, as an adversary reads it.

    Args:
        model: (d,).
        initial: the initial model, (d,): θ_0 unless clients choose among several.
        number: of the initial model.
        steps: numbers of the calls in which it was trained from that, in order.
        size: the client's number of samples, if it sent it.
    """

    model: torch.Tensor
    initial: torch.Tensor
    number: int
    steps: tuple[int, ...]
    size: float | None


def shown_models(view: View, knowledge: Knowledge) -> dict[int, ShownModel]:
    """Return by client the first of its models that nobody else's data went into.

    Args:
        view: what the adversary observed.
        knowledge: what it knows besides.
    """
    d = knowledge.dimension
    alone = _trained_alone(view)
    choices = _first_choices(view)
    models: dict[int, ShownModel] = {}
    for update in observed_updates(view, knowledge):
        client = update.sender.index
        if client is None or client in models:
            continue
        steps: tuple[int, ...] = ()
        if update.method == SENT_ALONE:
            calls = alone.get(client, [])
            # calls after this upload trained other models
            steps = tuple(step for step in calls if step < update.step)
        elif update.round == 1:
            steps = (update.step,)
        if steps:
            number = choices.get(client, 0)
            initial = initial_model(knowledge, number)
            model = initial + update.row[:d].to(initial)
            models[client] = ShownModel(model, initial, number, steps, update.size)
    return models


def initial_model(knowledge: Knowledge, number: int, start: int = 0) -> torch.Tensor:
    """Return an initial model, (d,): the first is θ_0, and clients of IFCA draw the others.

    Args:
        knowledge: of the network and of the seed.
        number: of the model.
        start: of several, each with models of its own.
    """
    if number == start == 0:
        return knowledge.initial
    # the labels under which IFCA's clients and server draw the same initial models
    randomness = Randomness(int(knowledge.config["seed"]))
    drawn = knowledge.network.redrawn(randomness, "start", start, number)
    return drawn.to(knowledge.initial)


def _first_choices(view: View) -> dict[int, int]:
    """Return by client the initial model that it chose first, where clients choose."""
    choices: dict[int, int] = {}
    for message in view.messages(CHOICE, 1):
        chosen = getattr(message.content, "model", None)
        sender = message.sender
        if chosen is not None and sender.kind == "client" and sender.index is not None:
            number = int(chosen.values[0])
            choices.setdefault(sender.index, number)
    return choices


def first_models(view: View, knowledge: Knowledge) -> dict[int, torch.Tensor]:
    """Return each client's model after its first local training, (d,), by its number.

    Args:
        view: what the adversary observed.
        knowledge: what it knows besides.
    """
    models = {}
    for client, shown in shown_models(view, knowledge).items():
        models[client] = shown.model
    return models


def _trained_alone(view: View) -> dict[int, list[int]]:
    """Return by client the calls in which it trained from θ_0 without any average."""
    updates: dict[int, list[int]] = {}
    averaged = set()
    for message in view.messages(TRAINED_ALONE):
        means = getattr(message.content, "means", None)
        client = message.receiver.index
        if means is None or client is None:
            continue
        # from its first average on, the model reflects other clients' data
        if means.picks[0]:
            averaged.add(client)
        if client not in averaged:
            updates.setdefault(client, []).append(message.step)
    return updates


def candidate_losses(
    model: torch.Tensor, knowledge: Knowledge, samples: NDArray[Any] | None = None
) -> Array:
    """Return the loss of each candidate under a model, (candidates,).

    Args:
        model: (d,).
        knowledge: with the candidates as its samples.
        samples: in place of the candidates' own samples, with the same labels, (candidates, …).
    """
    if samples is None:
        samples = knowledge.inputs
    network = knowledge.network
    x = torch.as_tensor(samples).to(model)
    y = torch.as_tensor(knowledge.labels)
    with torch.no_grad():
        outputs = network.call(knowledge.parameters(model), x)
        losses = network.objective.losses(outputs, y)
    return as_array(losses)
