"""Unmasked updates of other clients, by those of colluding ones in the same call.

All clients of a call share one mask. The adversary trains as its colluding clients did, and so
knows their rows before and after the mask; their seeds, which would undo the mask at once, are not
used. One pair gives away a permutation wherever its values differ. Of an orthonormal map k pairs
give what it does on the span of k rows (Sattler et al. 2019, V-B, propose the permutation; known
pairs against linear maps are Liu et al. 2008, "A Survey of Attack Techniques on Privacy-Preserving
Data Perturbation Methods", Section 4).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from securecluster.attacks.base import SUMS, TAPS, Attack, Guess, Knowledge, View
from securecluster.attacks.scoring import Scorer
from securecluster.attacks.shadow_training import local_updates
from securecluster.attacks.unmasking import (
    NO_MASK,
    NO_UPDATES,
    Array,
    RecoveredCoordinates,
    Subject,
    UnmaskedCosine,
    by_rank,
    by_span,
    first_updates,
    flips_signs,
    keeps_values,
    mask_of,
)


class MaskKnownPlaintext(Attack):
    """Updates without their mask, by the data of colluding clients.

    Attributes:
        further: other scores of the same guess.
    """

    name = "mask-known-plaintext"
    source = (
        "Liu, Giannella & Kargupta 2008, A Survey of Attack Techniques on Privacy-Preserving Data "
        "Perturbation Methods"
    )
    needs = (
        "single masked updates of the first round, and the data, though not the seeds, of a client "
        "that took part in the same call"
    )
    scorer = UnmaskedCosine()
    requires = frozenset({TAPS})
    reads = frozenset({"delta"})
    hidden_by = frozenset({SUMS})  # a mask falls with one known row
    further: ClassVar[tuple[Scorer, ...]] = (RecoveredCoordinates(),)

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if mask_of(knowledge) == "none":
            return NO_MASK
        if not knowledge.colluders:
            return "not applicable: no client gives the adversary its data"
        updates = first_updates(view, knowledge)
        if not updates:
            return NO_UPDATES
        for opened, others in _calls(list(updates), knowledge):
            if opened and others:
                return None
        return "not applicable: no call has updates of a colluding client and of another one"

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return updates (d,) of other clients by method, call and client.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        updates = first_updates(view, knowledge)
        rows = {key: update.row.double().cpu().numpy() for key, update in updates.items()}
        mask = mask_of(knowledge)
        d = knowledge.network.dimension
        recovered: dict[Subject, Array] = {}
        for opened, others in _calls(list(updates), knowledge):
            if not opened or not others:
                continue
            # training is deterministic given the data and the configuration's seed
            plain = _plain(opened, knowledge)
            masked_known = np.stack([rows[key] for key in opened])
            masked = np.stack([rows[key] for key in others])
            if keeps_values(mask):
                guesses = by_rank(plain, masked_known, masked, flips_signs(mask))
            else:
                guesses = by_span(plain, masked_known, masked)
            for key, guess in zip(others, guesses, strict=True):
                recovered[key] = guess[:d]
        return Guess("updates", recovered, {"pairs": len(knowledge.colluders), "mask": mask})


def _calls(
    subjects: list[Subject], knowledge: Knowledge
) -> list[tuple[list[Subject], list[Subject]]]:
    """Return for each call its colluding clients and the others."""
    calls: dict[tuple[str, int], tuple[list[Subject], list[Subject]]] = {}
    for subject in subjects:
        method, step, client = subject
        opened, others = calls.setdefault((method, step), ([], []))
        if client in knowledge.colluders:
            opened.append(subject)
        else:
            others.append(subject)
    return list(calls.values())


def _plain(subjects: list[Subject], knowledge: Knowledge) -> Array:
    """Return the updates of colluding clients of one call before the mask, (k, d)."""
    clients = [client for _, _, client in subjects]
    shards = [knowledge.colluders[client].shard for client in clients]
    step = subjects[0][1]
    rows: Array = local_updates(knowledge, shards, clients, step).double().numpy()
    return rows
