"""Membership from the updates of all rounds, with the other clients as the null (FedMIA).

An update of a client that trains on a record points along minus the gradient of the record's loss
more than updates of clients that do not. For the record x, the model θ_t of round t and the update
Δ_i^t of client i the statistic is

    s_i^t(x) = −⟨∇ℓ(θ_t; x), Δ_i^t⟩ / (‖∇ℓ(θ_t; x)‖ ‖Δ_i^t‖).

No shadow model is trained: a record is of one client at most, so the statistics of all others are a
sample of the null. Of these μ and σ are the mean and the deviation, and the score of the record is
the mean of (s_i^t − μ)/σ over the rounds. (The paper averages the normal distribution function of
it, which rounds the surest members to the same 1 and so leaves no order at low rates.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from securecluster.attacks.arrays import Array, as_array
from securecluster.attacks.base import MASK, NO_SAMPLES, SUMS, Attack, Guess, Harm, Knowledge, View
from securecluster.attacks.hidden_sums import gradient_blocks
from securecluster.attacks.subspaces import AT_LOW_RATES, SampleMembership
from securecluster.attacks.views import ObservedUpdate, observed_updates
from securecluster.core.lazy_torch import torch

FEWEST = 4  # clients of a call: one is asked about, and three are the null
SMALLEST = 1e-12  # length and deviation


class AllRounds(Attack):
    """Membership of candidates in clients' data, by how their updates of all rounds are aligned."""

    name = "membership-all-rounds"
    learns = "whether a record is in a client's data"
    harm = Harm.MEMBERS
    source = "Zhu et al. 2025, FedMIA, arXiv 2402.06289"
    needs = (
        f"single updates of {FEWEST} clients in a call, the models that they trained from, no "
        "mask, and candidate samples, of which some may be clients' own"
    )
    scorer = SampleMembership()
    further = AT_LOW_RATES
    reads = ("delta",)
    hidden_by = (MASK, SUMS)

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if knowledge.samples is None:
            return NO_SAMPLES
        if knowledge.mask != "none":
            return "not applicable: no gradient can be compared with an update under a mask"
        if not _calls(view, knowledge):
            return f"not applicable: no call shows single updates of {FEWEST} clients"
        knowledge.expect()
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the mean standardised alignment of each candidate by client, (candidates,).

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        starts = started_from(view, knowledge)
        by_client: dict[int, list[Array]] = {}
        for updates in _calls(view, knowledge):
            clients, rows = _aligned(updates, starts, knowledge)
            for client, row in zip(clients, against_others(rows), strict=True):
                by_client.setdefault(client, []).append(row)
        scores = {client: np.mean(rows, axis=0) for client, rows in sorted(by_client.items())}
        return Guess("membership", scores, {"candidates": knowledge.inputs})


def against_others(statistics: Array) -> Array:
    """Return statistics in deviations from the mean of all other clients', (clients, candidates).

    Args:
        statistics: (clients, candidates), 3 clients or more.
    """
    scores = []
    for client, row in enumerate(statistics):
        others = np.delete(statistics, client, axis=0)
        deviations = np.maximum(others.std(0, ddof=1), SMALLEST)
        scores.append((row - others.mean(0)) / deviations)
    return np.stack(scores)


def started_from(view: View, knowledge: Knowledge) -> Mapping[tuple[int, int], torch.Tensor]:
    """Return by client and call the model that the client trained from, (d,).

    Args:
        view: what the adversary observed; averages are displacements from θ_0, as without a mask.
        knowledge: what it knows besides.
    """
    latest: dict[int, torch.Tensor] = {}
    starts = {}
    for message in view.messages():
        client = message.receiver.index
        content: Any = message.content
        if message.receiver.kind != "client" or client is None:
            continue
        if getattr(content, "absolute", False) and not hasattr(content, "models"):
            rows = content.means.table[list(content.means.picks[0])]
            if len(rows) and rows.shape[-1] == knowledge.dimension:
                latest[client] = knowledge.initial + rows[-1].to(knowledge.initial)
        starts[client, message.step] = latest.get(client, knowledge.initial)
    return starts


def _calls(view: View, knowledge: Knowledge) -> list[list[ObservedUpdate]]:
    """Return the updates of each call that enough other clients answered."""
    calls: dict[int, list[ObservedUpdate]] = {}
    for update in observed_updates(view, knowledge):
        if update.sender.index is not None:
            calls.setdefault(update.step, []).append(update)
    return [updates for updates in calls.values() if len(updates) >= FEWEST]


def _aligned(
    updates: list[ObservedUpdate],
    starts: Mapping[tuple[int, int], torch.Tensor],
    knowledge: Knowledge,
) -> tuple[list[int], Array]:
    """Return the clients of a call, and how candidates' gradients are aligned with their updates.

    Returns:
        The clients, (n,), and cosines (n, candidates).
    """
    # clients of one cluster train from one model
    of_model: dict[bytes, tuple[torch.Tensor, list[int]]] = {}
    for position, update in enumerate(updates):
        model = starts.get((_number(update), update.step), knowledge.initial)
        of_model.setdefault(model.numpy().tobytes(), (model, []))[1].append(position)
    moved = torch.stack([update.row[: knowledge.dimension] for update in updates])
    cosines = np.empty((len(updates), len(knowledge.inputs)))
    for model, positions in of_model.values():
        begun = replace(knowledge, initial=model)
        aligned = [_cosines(moved[positions], block) for block in gradient_blocks(begun)]
        cosines[positions] = -as_array(torch.cat(aligned, dim=1))
    return [_number(update) for update in updates], cosines


def _number(update: ObservedUpdate) -> int:
    """Return the number of the client that sent an update."""
    assert update.sender.index is not None
    return update.sender.index


def _cosines(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the cosines of rows (n, d) and others (m, d), (n, m); 0 where a length is."""
    units = rows / rows.norm(dim=1, keepdim=True).clamp_min(SMALLEST)
    cosines: torch.Tensor = units @ others.T / others.norm(dim=1).clamp_min(SMALLEST)
    return cosines
