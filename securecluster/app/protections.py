"""Protections that a run claims, field by field, and those that are to hide what an attack gets.

They follow from the run's disclosures, and so from its ledger and its configuration.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from securecluster.attacks.base import ENCRYPTION, HIDDEN_PAIRS, MASK, NOISE, SEALS, SUMS, Attack
from securecluster.messaging.parties import Party
from securecluster.runs.disclosures import CLIENT, Disclosure
from securecluster.runtime.endpoint import PAIRS

# every client has the shared seed, and opens what is sealed and knows its own part of a pair
OF_CLIENTS = frozenset({MASK, SEALS, HIDDEN_PAIRS})
DECRYPTED = frozenset({SUMS, HIDDEN_PAIRS, ENCRYPTION})


def claimed(
    attack: Attack,
    disclosed: Sequence[Disclosure],
    parties: Collection[Party | int | str],
    colluding: Collection[int],
    clients: int,
) -> tuple[str, ...]:
    """Return the protections of a run that are said to hide from parties what an attack guesses.

    Args:
        attack: the attack.
        disclosed: the run's disclosures.
        parties: that attack together.
        colluding: numbers of the clients among them.
        clients: number of clients of the run.

    Returns:
        Names of protections, sorted; none where a field that the attack reads has none of those
        that it is hidden by.
    """
    covers = []
    for field in disclosed:
        # what is made of earlier releases tells no more than they do
        is_read = not attack.reads or field.field in attack.reads
        if is_read and not field.derived:
            standing = protections_of(field) - fallen(field, parties, colluding, clients)
            covers.append(standing & frozenset(attack.hidden_by))
    # a mechanism is tried by itself; of a run all that is read must be covered
    if not attack.of_mechanism and not all(covers):
        return ()
    return tuple(sorted(frozenset().union(*covers)))


def protections_of(field: Disclosure) -> frozenset[str]:
    """Return the protections that cover a field of clients' replies.

    Args:
        field: of the run.
    """
    of_pairs = field.paired or (bool(field.encrypted) and field.verb == PAIRS)
    covers = {
        MASK: field.masked,
        SUMS: field.summed,
        HIDDEN_PAIRS: of_pairs,
        SEALS: field.reader == CLIENT,
        ENCRYPTION: bool(field.encrypted),
        NOISE: field.noised,
    }
    return frozenset(name for name, is_there in covers.items() if is_there)


def fallen(
    field: Disclosure,
    parties: Collection[Party | int | str],
    colluding: Collection[int],
    clients: int,
) -> frozenset[str]:
    """Return the protections of a field that are not claimed against some parties.

    Args:
        field: of the run.
        parties: that attack together.
        colluding: numbers of the clients among them.
        clients: number of clients of the run.
    """
    without: frozenset[str] = frozenset()
    if colluding:
        without |= OF_CLIENTS
    # everyone but one can subtract
    if len(colluding) >= clients - 1:
        without |= {SUMS}
    kinds = {str(party) for party in parties}
    if field.encrypted and {"server", "authority"} <= kinds:
        without |= DECRYPTED
    return without
