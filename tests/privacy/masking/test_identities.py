"""Digests of rosters, which the configurations of runs have."""

from __future__ import annotations

import pytest

from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.privacy.masking.identities import AUTHORITY_NUMBER, Roster

ONE, OTHER = bytes(32), bytes(range(32))


def test_a_digest_is_of_numbers_and_keys_in_any_order() -> None:
    digest = Roster({0: ONE, 1: OTHER}).digest
    assert Roster({1: OTHER, 0: ONE}).digest == digest
    others = [{0: OTHER, 1: ONE}, {0: ONE}, {0: ONE, 2: OTHER}, {0: ONE, AUTHORITY_NUMBER: OTHER}]
    digests = {Roster(keys).digest for keys in others}
    assert len(digests | {digest}) == 1 + len(others)


@pytest.mark.parametrize("roster", [Roster({}), Roster.derived(Randomness(0))])
def test_a_roster_that_names_nobody_has_no_digest(roster: Roster) -> None:
    with pytest.raises(UsageError, match="a roster without clients has no digest"):
        _ = roster.digest
