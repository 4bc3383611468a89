"""What a protection of replies is: one object for each name that users give.

It hides what single clients send through one verb, `sum` or `pairs`. The object says what the
protection needs and what it does not work with, makes its messages and its halves at clients,
server and key authority, and has its words for reports. Everything else asks the object, and knows
no protection by name. `registry` has the objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.privacy.cohorts import Cohort
from securecluster.protections.pair_rows import PairRange
from securecluster.protections.sum_ranges import SumRanges
from securecluster.runtime.aggregators import Aggregator
from securecluster.runtime.authority import Authority
from securecluster.runtime.client_half import ClientHalf, HiddenReplies
from securecluster.runtime.endpoint import COLLUDING, LOST
from securecluster.runtime.pair_aggregators import LabelledValue, PairAggregator, PairFunctions
from securecluster.runtime.services import MessageTypes

if TYPE_CHECKING:
    from securecluster.privacy.masking.identities import Identity, Roster
    from securecluster.privacy.masking.key_agreement import KeyRing

# what is told of hidden replies: their sums, all of R, or the clusters' labels alone
SUMS = "sums"
MATRIX = "matrix"
LABELS = "labels"
# protections that a run may claim of fields of clients' replies
HIDDEN_SUMS = "secure sums"
HIDDEN_PAIRS = "sums or encryption of pairs"
ENCRYPTION = "encryption for a key authority"


@dataclass(frozen=True)
class ServerKeys:
    """Keys of a server.

    Args:
        private: its private key for envelopes, 32 bytes.
        roster: identities whose signatures count; None verifies nothing.
    """

    private: bytes
    roster: Roster | None


@dataclass(frozen=True)
class SumFacts:
    """Facts from which each party of a run makes its half of a protection of sums.

    Args:
        run: hash of the run's configuration.
        ranges: ranges of the fields that are summed; at clients with the streams of their noise.
        dtype: type of the models' numbers.
        minimum: members of the smallest sum.
        shares: fewest members and survivors: the shares of the pipeline's noise, and at a client
            what its owner asks for.
        fixed: client methods whose rows are the same in every call (`fixed_sums`).
        cohorts: of all clients of the run, where every sum is over whole ones; else empty.
        lost: fraction of a sum's members that may be lost.
        colluding: fraction of a sum's members that may collude with the server.
    """

    run: str
    ranges: SumRanges
    dtype: torch.dtype
    minimum: int
    shares: int
    fixed: frozenset[str]
    cohorts: Sequence[Cohort]
    lost: float
    colluding: float


@dataclass(frozen=True)
class PairFacts:
    """Facts from which each party of a run makes its half of a protection of pairs.

    Args:
        run: hash of the run's configuration.
        ranges: range of each field of rows.
        functions: functions of R.
        labelled: makes a function's value of the labels alone, by its name; of functions that are
            not here, R is released.
        saturate: True to clamp numbers beyond their range, in runs with noise, where an error would
            be a release.
        minimum: fewest members of a call in which a client takes part.
    """

    run: str
    ranges: Mapping[str, PairRange]
    functions: PairFunctions
    labelled: Mapping[str, LabelledValue]
    saturate: bool
    minimum: int


@dataclass(frozen=True)
class AuthorityFacts:
    """Facts from which a key authority is made.

    Args:
        run: hash of the run's configuration.
        clients: number of clients of the run.
        minimum: members of the smallest sum that is opened.
        pairs: of the protection of pairs.
        reply_class: returns the class of a client method's replies, as they arrive.
        randomness: source of its key for envelopes in simulations; None takes it from the operating
            system.
        identity: signs its public keys; None where clients have no roster.
        roster: identities of the clients whose rows count; None verifies no signature.
    """

    run: str
    clients: int
    minimum: int
    pairs: PairFacts
    reply_class: Callable[[str], type]
    randomness: Randomness | None
    identity: Identity | None
    roster: Roster | None


class Protection:
    """Base of protections.

    One that hides no replies is asked for its words alone, and has none of the methods that raise
    NotImplementedError here but these.

    Attributes:
        name: by which users choose it.
        about: what it does, for the command line, in brackets behind its name.
        hides: True if the server reads no single reply.
        claims: what a run with it claims of the fields that it hides.
        methods: (query class, reply class) of the methods that clients answer for it, by name.
    """

    name: str
    about: str
    hides: bool = True
    claims: frozenset[str] = frozenset()
    methods: Mapping[str, MessageTypes] = MappingProxyType({})

    def check(self) -> None:
        """Check that the protection can be had here, before anything is sent.

        Raises:
            UsageError: a package that it needs is missing.
        """

    def read(self, reply: str, released: str) -> str:
        """Return what the server reads of a field, for reports.

        Args:
            reply: the field, of whom and in which calls, and how noise protects it.
            released: what is told of it: `SUMS`, `MATRIX` or `LABELS`; empty for single replies.
        """
        raise NotImplementedError

    def unseen(self, field: str, released: str) -> str:
        """Return what the server does not see of a field, for reports.

        Args:
            field: its name, with that of its method.
            released: what is told of it.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class SumPlan:
    """What the sums of a run bear: here any loss of members, as where no keys are shared.

    Args:
        minimum: smallest number of honest clients in anything that the server may learn.
        lost: fraction of the members of a sum that may be lost.
        colluding: fraction of the members that may collude with the server.
    """

    minimum: int
    lost: float = LOST
    colluding: float = COLLUDING

    def least_survivors(self, members: int) -> int:
        """Return the smallest number of survivors of which a sum is read.

        Args:
            members: clients that are asked for a row.
        """
        return self.minimum

    def bears(self, members: int) -> bool:
        """Return whether a sum can be read where as many are lost and collude as is planned.

        Args:
            members: clients that are asked for a row.
        """
        return True

    def is_sparse(self, members: int) -> bool:
        """Return whether fewer than all pairs of some members share keys.

        Args:
            members: of the sum.
        """
        return False

    def sentence(self, members: int) -> str:
        """Return what a sum of some members bears, for reports; empty where any loss is borne.

        Args:
            members: of the sum.
        """
        return ""


class SumProtection(Protection):
    """Base of protections of sums.

    Attributes:
        adds_noise: True if clients may add their noise to sums in shares.
        remembers_sums: True if clients keep a record of sums, and so answer a `FollowingSum`.
        advice: how to have it, and what for, where reports advise it.
        plan: class of what its sums bear.
    """

    adds_noise: bool = False
    remembers_sums: bool = False
    advice: str = ""
    plan: type[SumPlan] = SumPlan

    def replies(self) -> HiddenReplies:
        """Return the messages of the protection."""
        raise NotImplementedError

    def client_half(self, facts: SumFacts, keys: KeyRing) -> ClientHalf:
        """Return the clients' half.

        Args:
            facts: of the run.
            keys: the clients' keys.
        """
        raise NotImplementedError

    def server_half(self, facts: SumFacts, keys: ServerKeys) -> Aggregator:
        """Return the server's half.

        Args:
            facts: of the run.
            keys: the server's keys.
        """
        raise NotImplementedError


class PairProtection(Protection):
    """Base of protections of pairs.

    Attributes:
        by_authority: True if a key authority opens what the server computes of hidden rows.
    """

    by_authority: bool = False

    def authority(self, facts: AuthorityFacts) -> Authority | None:
        """Return the key authority of a run; None of a protection that needs none.

        Args:
            facts: of the run.
        """
        return None

    def authority_view(self, fields: str) -> list[str]:
        """Return what a key authority saw, and what its part rests on; empty without one.

        Args:
            fields: names of the fields of whose pairs it opened sums.
        """
        return []

    def replies(self, ranges: Mapping[str, PairRange]) -> HiddenReplies:
        """Return the messages of the protection.

        Args:
            ranges: range of each field of rows.
        """
        raise NotImplementedError

    def client_half(self, facts: PairFacts, keys: KeyRing) -> ClientHalf:
        """Return the clients' half.

        Args:
            facts: of the run.
            keys: the clients' keys.
        """
        raise NotImplementedError

    def server_half(self, facts: PairFacts, keys: ServerKeys) -> PairAggregator:
        """Return the server's half.

        Args:
            facts: of the run.
            keys: the server's keys.
        """
        raise NotImplementedError
