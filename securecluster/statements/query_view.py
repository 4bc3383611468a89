"""What the queries of a finished run brought to clients, and who reads what one client alone moved.

It is derived from the declarations of queries: which field is made of which field of replies, and
whether it holds averages or rows of single clients.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from securecluster.messaging.bounds import Real, declared
from securecluster.parties.deployment import Deployment
from securecluster.privacy.pipeline import Kind
from securecluster.protections.occupancy import FieldOccupancy
from securecluster.runtime.endpoint import GATHER, message_types, release_of
from securecluster.runtime.release_policy import ReleasePolicy
from securecluster.statements.disclosures import READERS, Disclosure, disclosures, figures_of, mixed
from securecluster.statements.occupancy_words import in_averages, read_of_one

if TYPE_CHECKING:
    from securecluster.results.fitted import FittedRun

# what covers the rows that queries bring to clients
SEALED = "sealed, which every client that receives them opens"
UNDONE = "under a mask that every client can take off"
AS_THEY_ARE = "as they are"


@dataclass(frozen=True)
class Brought:
    """One field of queries, as clients received it.

    Args:
        field: of the query.
        source: the field of replies that it is made of; empty where its bound names none.
        average: True for averages over the clients that replied.
        relayed: True if it may have rows of single clients.
        lone: True if a single client may be all of those that replied.
        cover: what covers it on its way.
        few: what averages of hidden replies tell of clients that were nearly alone in a sum.
    """

    field: str
    source: str
    average: bool
    relayed: bool
    lone: bool
    cover: str
    few: str = ""

    def sentence(self, methods: Sequence[str]) -> str:
        """Return what clients received, in words.

        Args:
            methods: client methods whose queries have the field.
        """
        source = self.source or "replies"
        location = f"sent as {self.field} with {', '.join(methods)}"
        if self.average and self.relayed:
            return f"averages of {source}, also of a single client's, {self.cover} ({location})"
        if self.average:
            one = "; over one client it is that client's own" if self.lone else ""
            return f"averages of {source}, {self.cover} ({location}){one}{self.few}"
        if self.relayed:
            return f"rows of single clients: their {source}, {self.cover} ({location})"
        if self.source:
            return f"what the server made of {source}, {self.cover} ({location})"
        return f"numbers of the server ({location})"


def query_view(fitted: FittedRun) -> list[str]:
    """Return what the queries of a run brought to clients.

    These are the averages and models that the server made of replies, and rows of single clients
    where a method declares that it relays them. Whole numbers, such as labels, are left out, and so
    is what would be made of a field that no client sent.

    Args:
        fitted: the result of the run.
    """
    return [brought.sentence(methods) for brought, methods in all_brought(fitted).items()]


def all_brought(fitted: FittedRun) -> dict[Brought, list[str]]:
    """Return what queries brought to clients, with the client methods that it came with.

    Args:
        fitted: the result of the run.
    """
    sent = {name for event in fitted.ledger_.events for name in event.fields}
    methods_of: dict[Brought, list[str]] = {}
    for method in fitted.bytes_["by_message"]:
        release = getattr(getattr(fitted.method.client, method, None), "__release__", None)
        if not isinstance(release, ReleasePolicy):  # a message of secure sums, or between servers
            continue
        query, _ = message_types(fitted.method.client, method)
        for name, bound in declared(cast(Hashable, query)).items():
            source = _source(bound, sent) if isinstance(bound, Real) else None
            if source is not None:
                brought = _brought(fitted, name, cast(Real, bound), source, name in release.relays)
                methods_of.setdefault(brought, []).append(method)
    return methods_of


def _source(bound: Real, sent: Collection[str]) -> str | None:
    """Return the field of replies that a field of queries is made of; None where none was sent.

    It is empty where the bound names none.

    Args:
        bound: of the field of queries.
        sent: fields of replies that clients sent.
    """
    names = [name for name in (bound.sent, *bound.made_of) if name]
    if not names:
        return ""
    return next((name for name in names if name in sent), None)


def _brought(fitted: FittedRun, name: str, bound: Real, source: str, relayed: bool) -> Brought:
    """Return what a field of queries brings to clients.

    Args:
        fitted: the result of the run.
        name: of the field.
        bound: of the field.
        source: field of replies that it is made of; empty where the bound names none.
        relayed: True if its method declares that it relays rows of single clients.
    """
    pipeline = Deployment(fitted.method, fitted.kept_.learned.config).pipeline()
    sealed = bound.sealed and pipeline.seal is not None
    masked = False
    if source and not sealed:
        stages = pipeline.of(source).stages
        masked = any(stage.kind is Kind.MASK for stage in stages)
    return Brought(
        field=name,
        source=source,
        average=bound.average,
        relayed=relayed,
        lone=bound.average and _read_alone(fitted, source),
        cover=SEALED if sealed else UNDONE if masked else AS_THEY_ARE,
        few=_in_averages(fitted, source) if bound.average else "",
    )


def _in_averages(fitted: FittedRun, source: str) -> str:
    """Return what averages of hidden replies tell of clients that were nearly alone in a sum.

    Args:
        fitted: the result of the run.
        source: the field of replies.
    """
    sentences: dict[str, None] = {}  # each sentence once, in order
    for field in disclosures(fitted):
        if field.field == source and field.in_exact_sums:
            sentences[in_averages(figures_of(fitted, field), mixed(fitted, field))] = None
    return "".join(sentences)


def _read_alone(fitted: FittedRun, source: str) -> bool:
    """Return True if some reply with a field could be averaged with no other client's."""
    events = fitted.ledger_.events
    releases = {
        event.method: release_of(getattr(fitted.method.client, event.method)) for event in events
    }
    of_field = [
        release
        for release in releases.values()
        if source in release.through and not release.derived
    ]
    return any(GATHER in release.via for release in of_field)


def occupied(fitted: FittedRun, disclosed: Sequence[Disclosure]) -> list[FieldOccupancy]:
    """Return how many members moved the coordinates of each field of exact hidden sums.

    Of fields with noise nothing is told: epsilon covers their sums, and no count of rows.

    Args:
        fitted: the result of the run.
        disclosed: all disclosures of the run.
    """
    counted = [figures_of(fitted, field) for field in _in_exact_sums(disclosed)]
    return [figures for figures in counted if figures is not None]


def of_one_client(fitted: FittedRun, disclosed: Sequence[Disclosure]) -> list[str]:
    """Return a sentence for each field of hidden sums of which one client alone moved numbers.

    It names everybody who reads them: who reads the sums, and clients that are sent averages.

    Args:
        fitted: the result of the run.
        disclosed: all disclosures of the run.
    """
    sources = {brought.source for brought in all_brought(fitted)}
    sentences = []
    for field in _in_exact_sums(disclosed):
        figures = figures_of(fitted, field)
        if figures is None or not figures.of_one:
            continue
        masked = ", under the mask" if field.masked else ""
        same = [other for other in disclosed if other.name == field.name]
        readers = dict.fromkeys(f"{READERS[other.reader]}{masked}" for other in same)
        if field.field in sources:
            readers["clients that are sent what is made of it"] = None
        sentences.append(read_of_one(field.name, figures, list(readers)))
    return sentences


def _in_exact_sums(disclosed: Sequence[Disclosure]) -> list[Disclosure]:
    """Return the disclosures of hidden sums without noise, one of each field."""
    by_name: dict[str, Disclosure] = {}
    for field in disclosed:
        if field.in_exact_sums:
            by_name.setdefault(field.name, field)
    return list(by_name.values())
