"""Interface of attacks: what an adversary observed and knows, what it guesses, and the truth.

An attack gets a `View` and `Knowledge`, and returns a `Guess`. It never gets the `Truth`: only the
attack's scorer (`securecluster.attacks.scoring`) compares a guess with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from securecluster.attacks.arrays import Array
from securecluster.core.lazy_torch import torch
from securecluster.data import Federation
from securecluster.data.federation import Shard
from securecluster.messaging.messages import Rows
from securecluster.messaging.outcomes import VerbOutcome
from securecluster.messaging.parties import Party
from securecluster.messaging.transcript import ObservedMessage
from securecluster.privacy.masking.key_agreement import Secrets
from securecluster.protections import protection

if TYPE_CHECKING:
    from securecluster.models.flat_model import FlatModel

# protections that a run may claim of fields of clients' replies
MASK = "a mask"
SUMS = protection.HIDDEN_SUMS
HIDDEN_PAIRS = protection.HIDDEN_PAIRS
SEALS = "seals"
ENCRYPTION = protection.ENCRYPTION
NOISE = "clients' noise"
PROTECTIONS = frozenset({MASK, SUMS, HIDDEN_PAIRS, SEALS, ENCRYPTION, NOISE})
# what an attack or its scorer may need that not every run has
TRUE_CLUSTERS = "true clusters"
TAPS = "replies before any protection"
REQUIREMENTS = frozenset({TRUE_CLUSTERS, TAPS})
# reasons that several attacks have not to be applicable
NO_LABELS = "not applicable: the clients' data have no labels"
NO_SAMPLES = "not applicable: the adversary has no samples to ask about"


class Harm(IntEnum):
    """Kinds of what attacks learn, the most harmful one first: reports are in this order."""

    RECORDS = 1
    """records of the data themselves"""
    MEMBERS = 2
    """whether a record is in the data, or whose it is"""
    CONTENTS = 3
    """what the data of a client are like"""
    GROUPS = 4
    """which clients are alike, or the same"""
    MESSAGES = 5
    """what a protection hides of a message, from which the others may be guessed"""


class View(ABC):
    """Observations that colluding parties made in a run.

    `securecluster.attacks.views.view_of` creates it from a fitted protocol or a run folder.

    Attributes:
        parties: the colluding parties.
        anonymous: True if other clients appear under labels that are new for every call, as parties
            of kind "anonymous". Attacks that link calls use such a view.
    """

    parties: frozenset[Party]
    anonymous: bool

    @abstractmethod
    def messages(
        self, method: str | None = None, round: int | None = None
    ) -> Iterator[ObservedMessage]:
        """Yield the frames that the parties sent, received or overheard, in order.

        Args:
            method: only those of this client method; None for all.
            round: only those of this round; None for all.
        """

    @property
    @abstractmethod
    def outcomes(self) -> tuple[VerbOutcome, ...]:
        """Return what verbs gave the parties, such as sums over clients, in order."""

    @property
    def clusters(self) -> Mapping[int, int]:
        """Return by client its cluster at the end, as far as the parties know; empty if not."""
        return {}


@dataclass(frozen=True)
class Colluder:
    """Data and secrets that a colluding client gives the adversary.

    Args:
        number: of the client.
        shard: its data.
        secrets: its keys and seeds, and those of no other client.
        replies: what it computed before any protection, by method and call, as batches of one;
            empty unless the run was repeated with taps.
    """

    number: int
    shard: Shard = field(repr=False)
    secrets: Secrets = field(repr=False)
    replies: Mapping[tuple[str, int], Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Knowledge:
    """Background knowledge of an adversary, besides its view.

    Everything except `colluders` and `samples` is public: it follows from the configuration, which
    every party of the run has. Clients' keys and noise follow from it only in a simulation
    with `keys_from_seed`, so an attack must not derive keys from it.

    Args:
        protocol: name of the protocol.
        config: the configuration that clients and server agreed on: hyper-parameters, `clients`,
            `shape`, `classes`, `dimension` and `seed`. Hyper-parameters have their resolved values.
        network: the network as a function of a flat vector.
        initial: the initial model θ_0, (d,).
        width: number of coordinates of a row that left a client under the mask; d without a mask.
        weighted: names of methods whose rows are multiplied by the client's number of samples,
            where it is sent with them.
        colluders: by number, the clients that share their data and secrets with the adversary.
        samples: public samples (X, y) of the same distribution as the clients', or None.
        names: of the clients, by which they draw batches; their numbers, where there are none.
        unmasked: True where the adversary has undone the mask of all that it observed.
    """

    protocol: str
    config: Mapping[str, Any]
    network: FlatModel
    initial: torch.Tensor
    width: int
    weighted: frozenset[str] = frozenset()
    colluders: Mapping[int, Colluder] = field(default_factory=dict)
    samples: tuple[Array, Array] | None = None
    names: tuple[str, ...] = ()
    unmasked: bool = False

    def name_of(self, number: int) -> str:
        """Return the name by which a client draws batches; of nobody, its number.

        Args:
            number: of the client.
        """
        return self.names[number] if number < len(self.names) else str(number)

    @property
    def clients(self) -> int:
        """Return the number of the run's clients."""
        return int(self.config["clients"])

    @property
    def classes(self) -> int:
        """Return the number of classes."""
        return int(self.config["classes"])

    @property
    def dimension(self) -> int:
        """Return the number d of the network's parameters."""
        return self.network.dimension

    @property
    def mask(self) -> str:
        """Return the name of the mask of updates, "none" without one, and where it is undone."""
        return "none" if self.unmasked else str(self.config.get("mask", "none"))

    @property
    def has_labels(self) -> bool:
        """Return True if the clients' data have labels."""
        return self.network.objective.kind == "classification"

    @property
    def inputs(self) -> Array:
        """Return X of the public samples, which there must be."""
        assert self.samples is not None
        return np.asarray(self.samples[0])

    @property
    def labels(self) -> Array:
        """Return y of the public samples, which there must be."""
        assert self.samples is not None
        return np.asarray(self.samples[1])

    def expect(self, *names: str) -> None:
        """Ask for the network and hyper-parameters that only `run` reads, and fail if one lacks.

        Of a recorded app not all are known. `applies` asks, so that nothing runs in vain.

        Args:
            names: of hyper-parameters.
        """
        _ = self.network.shapes
        for name in names:
            _ = self.config[name]

    def parameters(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parameters that the coordinates of unmasked rows belong to.

        Args:
            rows: (…, d) or wider; coordinates beyond d are padding.

        Returns:
            Tensors (…, *shape) by the parameters' names.
        """
        # masks may pad rows beyond d; `views` splits exactly d contiguous coordinates
        unpadded = rows[..., : self.dimension].contiguous()
        return self.network.views(unpadded)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Return by name which coordinates of an unmasked row a parameter has."""
        layers = {}
        first = 0
        # the flat vector concatenates parameters in the order of `shapes`
        for name, shape in self.network.shapes.items():
            end = first + shape.numel()
            layers[name] = slice(first, end)
            first = end
        return layers


@dataclass(frozen=True)
class Tap:
    """Replies of one call before any protection: before the clip, noise, masks and sums.

    Args:
        method: name of the client method.
        verb: verb that it was called through.
        round: the protocol's round.
        step: number of the call.
        ids: numbers of the clients, in the order of the reply's rows.
        reply: the reply message, as a batch.
    """

    method: str
    verb: str
    round: int
    step: int
    ids: tuple[int, ...]
    reply: Any


@dataclass(frozen=True)
class Truth:
    """Ground truth of a run, which scorers compare guesses with and no adversary gets.

    Args:
        federation: the clients and their data.
        identities: number of the client behind each label of an anonymous view.
        taps: replies before any protection; empty unless the run was repeated with taps.
    """

    federation: Federation
    identities: Mapping[int, int] = field(default_factory=dict)
    taps: tuple[Tap, ...] = ()

    @property
    def clusters(self) -> tuple[int, ...] | None:
        """Return each client's true cluster, or None where it is unknown."""
        return self.federation.truth

    def label_counts(self, client: int) -> NDArray[np.int64]:
        """Return how many samples of each class a client trains on, (classes,).

        Args:
            client: its number.
        """
        return self._label_counts[client]

    @cached_property
    def _label_counts(self) -> list[NDArray[np.int64]]:
        """Return the same of all clients."""
        classes = self.federation.classes
        shards = self.federation.shards
        return [np.bincount(np.asarray(shard.y), minlength=classes) for shard in shards]

    def tapped_rows(self, field: str) -> Iterator[tuple[Tap, int, torch.Tensor]]:
        """Yield the rows of a field of replies, each with its tap and its client's number.

        Args:
            field: of the replies; those that have none are left out.
        """
        for tap in self.taps:
            rows = getattr(tap.reply, field, None)
            if not isinstance(rows, Rows):
                continue
            for client, row in zip(tap.ids, rows.values, strict=True):
                yield tap, client, row


@dataclass(frozen=True)
class Guess:
    """Conclusions of an attack about one or more subjects.

    Args:
        quantity: what is guessed, such as "label counts".
        values: the guess by subject. A subject is a client's number, a label of an anonymous view,
            or whatever the attack's scorer expects.
        details: further results for reports, such as reconstructed images.
    """

    quantity: str
    values: Mapping[Any, Any]
    details: Mapping[str, Any] = field(default_factory=dict)
    # (truth, result) of `once`, by what was computed
    _kept: dict[Any, tuple[Truth, Any]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    @property
    def listed(self) -> list[Any]:
        """Return the guesses in the order of their subjects."""
        return list(self.values.values())

    def beside(self, others: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield the guess about each subject beside something else.

        Args:
            others: one thing for each subject.
        """
        return zip(self.values.values(), others, strict=True)

    def once(self, truth: Truth, what: Any, compute: Callable[[], Any]) -> Any:
        """Return what scorers compute of this guess and a truth, which is computed once.

        The shuffles of every score need the same comparison of samples.

        Args:
            truth: of the run.
            what: name of the result.
            compute: returns it; nobody changes it in place.
        """
        known = self._kept.get(what)
        if known is None or known[0] is not truth:
            known = self._kept[what] = (truth, compute())
        return known[1]


class Scorer(ABC):
    """Comparison of a guess with the truth, unit by unit.

    Attributes:
        metric: name of the score.
        higher: True if a larger score is a more successful attack.
        bound: True if the score is itself the end of a confidence interval.
        counted: True if the score counts what was read exactly, so that one success is one.
    """

    metric: str
    higher: bool = True
    bound: ClassVar[bool] = False
    counted: ClassVar[bool] = False

    @abstractmethod
    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return what the score is made of, one row for each unit, (n, …).

        Args:
            guess: the attack's.
            truth: of the run.
        """

    @abstractmethod
    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return `units` for a truth that has nothing to do with the guess.

        Args:
            guess: the attack's.
            truth: of the run, whose subjects are to be shuffled.
            draw: source of the shuffle.
        """

    def why_not(self, guess: Guess, truth: Truth) -> str | None:
        """Return why this score is not defined for a guess; None if it is.

        Args:
            guess: the attack's.
            truth: of the run.
        """
        return None

    def summary(self, units: Array) -> float:
        """Return the score of some units: their mean, unless a scorer has another one.

        Args:
            units: (n, …).
        """
        return float(np.mean(units))

    def exact_interval(self, units: Array) -> tuple[float, float] | None:
        """Return the interval of `summary` where its distribution is known; None for a bootstrap.

        Args:
            units: (n, …).
        """
        return None

    def of_resamples(self, units: Array) -> Callable[[Array], float]:
        """Return `summary` for resamples, with whatever it fits to units as it fits these.

        Args:
            units: all of them, (n, …).

        Returns:
            Of the positions of a resample's units, (n,), its score.
        """
        return lambda chosen: self.summary(units[chosen])

    def controls(
        self, guess: Guess, truth: Truth, draw: np.random.Generator, count: int
    ) -> list[float]:
        """Return the scores of the negative control, each of a shuffle of its own.

        Args:
            guess: the attack's.
            truth: of the run.
            draw: source of the shuffles.
            count: of them.
        """
        return [self.summary(self.shuffled(guess, truth, draw)) for _ in range(count)]


class Attack(ABC):
    """Attack on what some parties observed.

    Subclasses have a file of their own. Installed packages declare theirs as entry points, see
    `securecluster.attacks.registry`.

    Attributes:
        name: lower case, words separated by "-".
        source: the paper that describes the attack.
        needs: one sentence on what the adversary must observe and know.
        learns: what it would learn, in words that complete "it could learn …"; its name if empty.
        harm: of what kind this is.
        anonymous: True if the attack works on an anonymous view.
        scorer: compares the guess with the truth.
        further: other scores of the same guess.
        requires: what it or its scorer needs that not every run has, of `REQUIREMENTS`.
        reads: names of the fields of clients' replies that it reads; empty for all.
        hidden_by: protections, of `PROTECTIONS`, that are said to hide what it guesses where they
            cover all fields that it reads. A score above chance then breaks a protection; else it
            is of something that the run leaves visible.
        of_mechanism: True if it tries the protections of `hidden_by` with rows of its own. It then
            says nothing of a run that has none of them.
        of_masks: True if it attacks masks themselves, and so runs on rows under them.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    needs: ClassVar[str]
    learns: ClassVar[str] = ""
    harm: ClassVar[Harm] = Harm.MESSAGES
    anonymous: ClassVar[bool] = False
    scorer: ClassVar[Scorer]
    further: ClassVar[tuple[Scorer, ...]] = ()
    requires: ClassVar[Collection[str]] = frozenset()
    reads: ClassVar[Collection[str]] = frozenset()
    hidden_by: ClassVar[Collection[str]] = frozenset()
    of_mechanism: ClassVar[bool] = False
    of_masks: ClassVar[bool] = False

    @abstractmethod
    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable, as "not applicable: …"; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """

    @abstractmethod
    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return what the adversary concludes.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """


def unmet(attack: Attack, truth: Truth) -> str | None:
    """Return which requirement of an attack a run does not meet, as "not applicable: …", or None.

    Args:
        attack: the attack.
        truth: of the run.
    """
    if TRUE_CLUSTERS in attack.requires and truth.clusters is None:
        return f"not applicable: it needs {TRUE_CLUSTERS}, which this run does not have"
    if TAPS in attack.requires and not truth.taps:
        return f"not applicable: it needs {TAPS}, which take a repetition of the run"
    return None
