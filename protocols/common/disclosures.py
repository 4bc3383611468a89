"""What each party sees beyond the values of single replies, in sentences for the report.

What replies release, and with how much noise, stands in the ledger, by clients' receipts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


class OfPlainSums(str):
    """Sentence that holds only where the server reads every reply of a sum."""

    __slots__ = ()


class OfHiddenSums(str):
    """Sentence that holds only where sums hide single replies."""

    __slots__ = ()


class OfPlainPairs(str):
    """Sentence that holds only where the server reads every row of pairs."""

    __slots__ = ()


class OfPaddedPairs(str):
    """Sentence that holds only where the server reads sums of pairs, and no row of them."""

    __slots__ = ()


@dataclass(frozen=True)
class Disclosures:
    """Sentences for the report on what each party sees beyond the values of single replies.

    The fields of replies, and who reads them under which mask and noise, need no sentence: the
    report takes these from the ledger.

    Args:
        server: what the server sees of all replies together, under every mask.
        lps: what a local parameter server sees, in methods that have these.
        clients: what clients see of other clients, beside averages.
        not_covered: what ε leaves out, beyond what holds for every method.
    """

    server: Sequence[str] = ()
    lps: Sequence[str] = ()
    clients: Sequence[str] = ()
    not_covered: Sequence[str] = ()

    def of_run(self, method: Any) -> Disclosures:
        """Return these without the sentences on the server and its helpers that a run makes untrue.

        Args:
            method: with the hyper-parameters of the run.
        """
        untrue: list[type[str]] = [OfPlainSums if method.sums.hide_replies else OfHiddenSums]
        if method.pairs.hide_rows:
            untrue.append(OfPlainPairs)
        if not method.pairs.show_sums:
            untrue.append(OfPaddedPairs)

        def true(views: Sequence[str]) -> list[str]:
            return [view for view in views if not isinstance(view, tuple(untrue))]

        return replace(self, server=true(self.server), lps=true(self.lps))
