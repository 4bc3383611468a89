"""Protections that a run claims, field by field, and those that are to hide what an attack gets.

They follow from the run's disclosures, and so from its ledger and its configuration.

An attack declares the fields of replies that it reads, and the protections that are to hide what it
guesses. A success breaks these where the disclosures have them on all these fields and they are
claimed against the adversary; otherwise what it found is visible. Attacks on mechanisms are not
tried where a run has none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from securecluster.attacks.base import HIDDEN_PAIRS, MASK, NOISE, SEALS, SUMS, Attack
from securecluster.messaging.parties import Party
from securecluster.statements.disclosures import CLIENT, Disclosure

# every client has the shared seed, and opens what is sealed and knows its own part of a pair
OF_CLIENTS = frozenset({MASK, SEALS, HIDDEN_PAIRS})


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
    covers = {MASK: field.masked, SEALS: field.reader == CLIENT, NOISE: field.noised}
    of_verb: frozenset[str] = frozenset()
    if field.protection is not None:
        of_verb = field.protection.claims
    return of_verb | {name for name, is_there in covers.items() if is_there}


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
    if field.protection is not None and field.by_authority and {"server", "authority"} <= kinds:
        without |= field.protection.claims
    return without
