"""Unmasked updates of other clients, by those of colluding ones in the same call.

All clients of a call share one mask. The adversary trains as its colluding clients did, and so
knows their rows before and after the mask; their seeds, which would undo the mask at once, are not
used. One pair gives away a permutation wherever its values differ. Of an orthonormal map k pairs
give what it does on the span of k rows (Sattler et al. 2019, V-B, propose the permutation; known
pairs against linear maps are Liu et al. 2008, "A Survey of Attack Techniques on Privacy-Preserving
Data Perturbation Methods", Section 4).
"""

from __future__ import annotations

import numpy as np

from securecluster.attacks import unmasking
from securecluster.attacks.arrays import Array, as_array
from securecluster.attacks.base import SUMS, TAPS, Attack, Guess, Harm, Knowledge, View
from securecluster.attacks.shadow_training import local_updates


class MaskKnownPlaintext(Attack):
    """Updates without their mask, by the data of colluding clients."""

    name = "mask-known-plaintext"
    learns = "a client's update behind the mask"
    harm = Harm.MESSAGES
    source = (
        "Liu, Giannella & Kargupta 2008, A Survey of Attack Techniques on Privacy-Preserving Data "
        "Perturbation Methods"
    )
    needs = (
        "single masked updates of the first round, and the data, though not the seeds, of a client "
        "that took part in the same call"
    )
    scorer = unmasking.UnmaskedCosine()
    of_masks = True
    requires = (TAPS,)
    reads = ("delta",)
    hidden_by = (SUMS,)  # a mask falls with one known row
    further = (unmasking.RecoveredCoordinates(),)

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if knowledge.mask == "none":
            return unmasking.NO_MASK
        if not knowledge.colluders:
            return "not applicable: no client gives the adversary its data"
        updates = unmasking.first_updates(view, knowledge)
        if not updates:
            return unmasking.NO_UPDATES
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
        rows: dict[unmasking.Subject, Array] = {}
        for subject, update in unmasking.first_updates(view, knowledge).items():
            rows[subject] = as_array(update.row)
        mask = knowledge.mask
        d = knowledge.dimension
        recovered: dict[unmasking.Subject, Array] = {}
        for opened, others in _calls(list(rows), knowledge):
            if not opened or not others:
                continue
            # training is deterministic given the data and the configuration's seed
            plain = _plain(opened, knowledge)
            masked_known = np.stack([rows[subject] for subject in opened])
            masked = np.stack([rows[subject] for subject in others])
            if unmasking.keeps_values(mask):
                guesses = unmasking.by_rank(
                    plain, masked_known, masked, unmasking.flips_signs(mask)
                )
            else:
                guesses = unmasking.by_span(plain, masked_known, masked)
            for subject, guess in zip(others, guesses, strict=True):
                recovered[subject] = guess[:d]
        details = {"pairs": len(knowledge.colluders), "mask": mask}
        return Guess("updates", recovered, details)


def _calls(
    subjects: list[unmasking.Subject], knowledge: Knowledge
) -> list[tuple[list[unmasking.Subject], list[unmasking.Subject]]]:
    """Return for each call its colluding clients and the others."""
    calls: dict[tuple[str, int], tuple[list[unmasking.Subject], list[unmasking.Subject]]] = {}
    for subject in subjects:
        method, step, client = subject
        opened, others = calls.setdefault((method, step), ([], []))
        if client in knowledge.colluders:
            opened.append(subject)
        else:
            others.append(subject)
    return list(calls.values())


def _plain(subjects: list[unmasking.Subject], knowledge: Knowledge) -> Array:
    """Return the updates of colluding clients of one call before the mask, (k, d)."""
    clients = [client for _, _, client in subjects]
    shards = [knowledge.colluders[client].shard for client in clients]
    _, step, _ = subjects[0]
    return as_array(local_updates(knowledge, shards, clients, step))
