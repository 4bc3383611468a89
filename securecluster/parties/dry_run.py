"""What clients release in a whole run, found by a run without data.

`target_epsilon` is to know it before the first client is asked. So the server's loop runs with some
stand-ins for clients: their samples, updates and noise are made up from public facts, and their
methods write receipts as usual. Its ledger has what a client releases at the noise multiplier 1.

Where decisions of the server depend on replies, and releases on decisions, one such run is not
enough. `dry_runs` of a method lists further hyper-parameters, with which it releases what it may.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.data.facts import Form
from securecluster.data.federation import Federation, Shard
from securecluster.data.scaling import Scaling
from securecluster.errors import SecureClusterError
from securecluster.messaging.messages import Call, Rows
from securecluster.messaging.transcript import Transcript
from securecluster.parties.deployment import Deployment
from securecluster.parties.derived import initial_model, params_as_json, server_copy
from securecluster.parties.method import Method
from securecluster.parties.server_half import ServerHalf
from securecluster.privacy.dp import accounting
from securecluster.privacy.dp.ledger import COSTLESS, Event, Expense, expense_of
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.dp.skellam_noise import Integers
from securecluster.privacy.dp.target import Plan
from securecluster.privacy.pipeline import Pipeline
from securecluster.runtime.client_half import ClientHalf
from securecluster.runtime.endpoint import SUM
from securecluster.runtime.release_accounting import ReleaseAccounting
from securecluster.runtime.run import Run
from securecluster.runtime.settings import Settings
from securecluster.runtime.transport import InProcess
from securecluster.training.local_trainer import LocalTrainer, LocalTraining, LossTerm

if TYPE_CHECKING:
    from securecluster.data.facts import Facts
    from securecluster.privacy.masking.identities import Roster
    from securecluster.privacy.masking.key_agreement import KeyRing

# stand-ins for clients, and clusters that their updates form
CLIENTS = 12
CLUSTERS = 4
SAMPLES = 20  # of each
SPREAD = 1e-3  # of updates within a cluster
# Releases do not depend on the network, so one with more weights than this has a stand-in, too.
LARGE = 100_000
SMALL_NETWORK = "linear"
# hyper-parameters that change no client's releases, or make every client take part
COMMON: Mapping[str, Any] = {
    "mask": "none",
    "participation": 1.0,
    "placement": "local",
    "relevance": "plain",
    "sealed": False,
}


@dataclass(frozen=True)
class RunReleases:
    """Releases of one client in a whole run, at the noise multiplier 1.

    Args:
        single: those that are read individually, or whose noise is the client's alone, each with
            its number.
        summed: those whose noise clients add in shares to secure sums.
    """

    single: tuple[tuple[Expense, int], ...]
    summed: tuple[tuple[float, int], ...] = ()

    def plan(self, z: float, samples: int | None = None) -> Plan:
        """Return the releases at another noise multiplier.

        Args:
            z: noise multiplier of the run.
            samples: number of samples that the client trains on; None where no price depends on
                it.
        """
        steps = []
        for expense, count in self.single:
            multiplier = z * expense.noise_multiplier
            q, times = 1.0, 1
            if expense.mechanism == "dp-sgd":
                q, times = accounting.sampling(samples or 0, expense.batch, expense.epochs)
            steps.append((multiplier, q, times * count))
        summed = [(z * multiplier, count) for multiplier, count in self.summed]
        return Plan(tuple(steps), tuple(summed))

    @property
    def trains(self) -> bool:
        """Return whether any price depends on a client's number of samples."""
        return any(expense.mechanism == "dp-sgd" for expense, _ in self.single)


class _OfStandIns(Deployment):
    """Halves of a run of stand-ins, whose sums are plain: receipts alone tell what they release."""

    def aggregator(self, private: bytes | None = None, roster: Roster | None = None) -> None:
        """Return None, as for plain sums."""

    def client_halves(
        self, keys: KeyRing, draws: NoiseStreams, least: int = 0
    ) -> dict[str, ClientHalf]:
        """Return the halves of pairs alone, as for plain sums."""
        halves = super().client_halves(keys, draws, least)
        halves.pop(SUM, None)
        return halves

    def cohorts(self) -> None:
        """Return None: all clients reply."""

    def costs(self, pipeline: Pipeline, draws: NoiseStreams) -> ReleaseAccounting:
        """Return accounting by receipts alone."""
        return _NoiseOfZeros(pipeline)


class _NoiseOfZeros(ReleaseAccounting):
    """Accounting that takes rows to have no noise, as those of stand-ins are."""

    def noise(self, name: str, d: int, trains: str = "usual", round: int = 0) -> float:
        return 0.0


class StandInTrainer(LocalTrainer):
    """Trainer whose updates are made up: those of a cluster of clients are alike."""

    def train(  # noqa: PLR0913 (that of `LocalTrainer`)
        self,
        start: Rows,
        clients: Sequence[int],
        plan: LocalTraining,
        step: int,
        row_width: int = 0,
        scale: Sequence[float] | None = None,
        regularizer: LossTerm | None = None,
        apart: bool = False,
    ) -> torch.Tensor:
        """Return the clients' updates, after the checks of a training."""
        d = self.model.dimension
        with self.permitted(plan, clients, step):
            rows = self.start.new_zeros(len(clients), max(row_width, d))
            rows[:, :d] = self._updates[list(clients)]
        return rows

    @cached_property
    def _updates(self) -> torch.Tensor:
        """Return the update of each client, of about norm 1, (m, d)."""
        clients = len(self.ids)
        shape = (CLUSTERS + clients, self.model.dimension)
        directions = np.random.default_rng([0]).standard_normal(shape, np.float32)
        directions /= np.sqrt(np.float32(shape[1]))
        centres = directions[np.arange(clients) % CLUSTERS]
        return torch.from_numpy(centres + SPREAD * directions[CLUSTERS:]).to(self.start)


class StandInStreams(NoiseStreams):
    """Streams of noise that is all zeros."""

    def noised(
        self,
        client: int,
        purpose: str,
        step: int,
        row: torch.Tensor,
        multiplier: float,
        sensitivity: float,
    ) -> torch.Tensor:
        """Return a copy of a row, and log the draw."""
        self.log(client, multiplier)
        return row.clone()

    def skellam(
        self,
        client: int,
        purpose: str,
        step: int,
        row: Integers,
        exponent: int,
        variance: int,
        draws: int,
    ) -> Integers:
        """Return zeros."""
        return np.zeros_like(row)


# a class by itself, not by its name: a notebook may declare it anew
Key = tuple[type, str]
_KNOWN: dict[Key, RunReleases] = {}
_OBSERVED: dict[Key, Observed] = {}  # the latest
MOST_OBSERVED = 64


def run_releases(protocol: Any, facts: Facts, clients: int) -> RunReleases:
    """Return what a client of a protocol releases in a whole run, at the noise multiplier 1.

    Args:
        protocol: with a `target_epsilon`, so that all its noise has one multiplier.
        facts: of the clients and their data.
        clients: number of the run's clients.
    """
    key = _key(protocol, facts, clients)
    if key not in _KNOWN:
        counts: Counter[tuple[Expense, bool]] = Counter()
        is_large = initial_model(protocol, facts).dimension > LARGE
        stand_ins = _stand_ins(facts, clients)
        for changes in ({}, *protocol.dry_runs()):
            count = _of_small_network if is_large else _counted
            counts |= count(protocol, stand_ins, changes)
        _KNOWN[key] = _releases(counts)
    return _KNOWN[key]


def _key(protocol: Any, facts: Facts, clients: int, unused: Collection[str] = ()) -> Key:
    """Return all that a run of stand-ins follows from.

    Args:
        protocol: with its hyper-parameters.
        facts: of the clients and their data.
        clients: number of the run's clients.
        unused: names of hyper-parameters that make no difference.
    """
    params = params_as_json(protocol)
    known_by = (
        {name: value for name, value in params.items() if name not in unused},
        list(facts.shape),
        facts.scaling,
        facts.classes,
        facts.objective.as_json(),
        clients,
    )
    return type(protocol), json.dumps(known_by, sort_keys=True, default=str)


def _of_small_network(
    protocol: Method, federation: Federation, changes: Mapping[str, Any]
) -> Counter[tuple[Expense, bool]]:
    """Return what `_counted` does, by a small network where one fits.

    Args:
        protocol: the method.
        federation: of stand-ins for its clients.
        changes: further hyper-parameters.
    """
    small = {**changes, "model": SMALL_NETWORK}
    # Options may name layers that it lacks, and text has no such network.
    with suppress(SecureClusterError):
        return _counted(protocol, federation, small, complete=True)
    return _counted(protocol, federation, changes)


def _releases(counts: Mapping[tuple[Expense, bool], int]) -> RunReleases:
    """Return numbers of releases in an order that follows from them alone."""
    ordered = sorted(counts.items(), key=repr)
    single = tuple((expense, count) for (expense, summed), count in ordered if not summed)
    sums: Counter[float] = Counter()
    for (expense, summed), count in ordered:
        if summed:
            sums[expense.noise_multiplier] += count
    return RunReleases(single, tuple(sorted(sums.items())))


def _counted(
    protocol: Method, federation: Federation, changes: Mapping[str, Any], complete: bool = False
) -> Counter[tuple[Expense, bool]]:
    """Return how often a client releases each kind of thing, and whether in shares of noise.

    Args:
        protocol: the method.
        federation: of stand-ins for its clients.
        changes: further hyper-parameters.
        complete: whether a run that does not come to its end is an error.
    """
    params = protocol.get_params()
    common = {name: value for name, value in COMMON.items() if name in params}
    dry = type(protocol)(**{**params, **common, **changes})
    dry.privacy = dry.privacy.for_stand_ins()
    in_shares = protocol.privacy.placed(protocol) == "distributed"
    counts: Counter[tuple[Expense, bool]] = Counter()
    by_client, _ = _events_by_client(dry, federation, complete)
    for events in by_client.values():
        of_client: Counter[tuple[Expense, bool]] = Counter()
        for event in events:
            if event.mechanism not in (*COSTLESS, "exact"):
                summed = in_shares and event.verb == SUM and bool(event.fields)
                of_client[expense_of(event, None), summed] += 1
        counts |= of_client  # the most of any client
    return counts


def events_of_stand_ins(
    protocol: Method, facts: Facts, clients: int, watch: Callable[[Call, Any], Any]
) -> list[Event]:
    """Return what stand-ins for a run's clients release, in all runs that find how much it may be.

    Noise has the multipliers of the method; those at multiplier 1 where `target_epsilon` is to find
    it.

    Args:
        protocol: the method.
        facts: of the clients and their data.
        clients: number of the run's clients.
        watch: called with each reply before the pipeline, and returns it.

    Raises:
        SecureClusterError: the run with the method's own options does not come to its end.
    """
    params = protocol.get_params()
    changes = {name: value for name, value in COMMON.items() if name in params}
    if initial_model(protocol, facts).dimension > LARGE:
        # options may name layers that a small network lacks
        with suppress(SecureClusterError):
            return _events_of_runs(
                protocol, facts, clients, watch, {**changes, "model": SMALL_NETWORK}
            )
    return _events_of_runs(protocol, facts, clients, watch, changes)


def _events_of_runs(
    protocol: Method,
    facts: Facts,
    clients: int,
    watch: Callable[[Call, Any], Any],
    common: Mapping[str, Any],
) -> list[Event]:
    """Return what `events_of_stand_ins` does, with other hyper-parameters for all runs."""
    stand_ins = _stand_ins(facts, clients)
    collected: list[Event] = []
    for further in ({}, *protocol.dry_runs()):
        dry = type(protocol)(**{**protocol.get_params(), **common, **further})
        dry.privacy = dry.privacy.for_stand_ins()
        by_client, _ = _events_by_client(dry, stand_ins, not further, watch=watch)
        for events in by_client.values():
            collected += events
    return collected


@dataclass(frozen=True)
class Draw:
    """Gaussian noise that a client adds to one row.

    Args:
        client: its number.
        step: number of the call; 0 of a release that is repeated to the bit.
        purpose: name of the draw.
        numbers: of the row, d.
        multiplier: z.
        sensitivity: to blanking the unit of privacy: the noise has z times this deviation.
    """

    client: int
    step: int
    purpose: str
    numbers: int
    multiplier: float
    sensitivity: float


@dataclass(frozen=True)
class Observed:
    """Releases, in a run of stand-ins, of the client that releases most.

    Args:
        events: of the server's ledger.
        draws: of the client's noise.
        dimension: of the network that the stand-ins trained, a small one in place of a large one.
        alone: whether each client ended with a model of its own.
    """

    events: list[Event]
    draws: list[Draw]
    dimension: int
    alone: bool


def observed(protocol: Method, facts: Facts) -> Observed:
    """Return what a client releases in a run of stand-ins, with the draws of its noise.

    Noise has the multiplier of the method, or 1 where `target_epsilon` is to find it. Runs of other
    seeds and learning rates share the result: the updates of stand-ins are made up.

    Args:
        protocol: the method.
        facts: of the clients and their data.
    """
    key = _key(protocol, facts, facts.clients, unused=("lr",))
    if key not in _OBSERVED:
        if len(_OBSERVED) == MOST_OBSERVED:
            del _OBSERVED[next(iter(_OBSERVED))]
        _OBSERVED[key] = _of_stand_ins(protocol, facts)
    return _OBSERVED[key]


def _of_stand_ins(protocol: Method, facts: Facts) -> Observed:
    """Run what `observed` returns."""
    params = protocol.get_params()
    changes = {name: value for name, value in COMMON.items() if name in params}
    stand_ins = _stand_ins(facts, facts.clients)
    if initial_model(protocol, facts).dimension > LARGE:
        # options may name layers that a small network lacks
        with suppress(SecureClusterError):
            small = {**changes, "model": SMALL_NETWORK}
            return _observed(type(protocol)(**{**params, **small}), stand_ins)
    return _observed(type(protocol)(**{**params, **changes}), stand_ins)


def _observed(dry: Any, stand_ins: Federation) -> Observed:
    """Return what a client releases in a run of stand-ins.

    Args:
        dry: the method, whose options are those of such a run.
        stand_ins: the clients.
    """
    dry.privacy = dry.privacy.for_stand_ins()
    draws: list[Draw] = []

    class Recording(StandInStreams):
        """Streams that record what is drawn."""

        def noised(
            self,
            client: int,
            purpose: str,
            step: int,
            row: torch.Tensor,
            multiplier: float,
            sensitivity: float,
        ) -> torch.Tensor:
            """Return a copy of a row, and record the draw."""
            numbers = int(row.numel())
            draws.append(Draw(client, step, purpose, numbers, multiplier, sensitivity))
            return super().noised(client, purpose, step, row, multiplier, sensitivity)

    events, state = _events_by_client(dry, stand_ins, True, Recording)
    labels = getattr(state, "labels", None) or []
    busiest_client = max(events, key=lambda client: len(events[client]), default=0)
    return Observed(
        events.get(busiest_client, []),
        [draw for draw in draws if draw.client == busiest_client],
        initial_model(dry, stand_ins.facts).dimension,
        alone=len(labels) > 1 and len(set(labels)) == len(labels),
    )


def _events_by_client(
    dry: Any,
    federation: Federation,
    complete: bool,
    streams: type[NoiseStreams] = StandInStreams,
    watch: Callable[[Call, Any], Any] | None = None,
) -> tuple[dict[int, list[Event]], Any]:
    """Return the events of each client in a run of stand-ins, and the server's final state.

    The state is None of a run that does not come to its end.

    Args:
        dry: the method.
        federation: the stand-ins.
        complete: whether a run that does not come to its end is an error; otherwise what it
            released before counts, and a run that goes further is held to its target.
        streams: class of their noise.
        watch: called with each reply before the pipeline, and returns it; None for none.
    """
    from securecluster.parties.endpoints import build_client

    settings = Settings(device="cpu", dtype="float32", keys_from_seed=True)
    endpoint = build_client(
        dry,
        federation,
        settings,
        trainer=StandInTrainer,
        streams=streams,
        deployment_class=_OfStandIns,
    )
    if watch is not None:
        endpoint.before_pipeline = watch
    config = dry.config(federation, settings.dtype)
    server = server_copy(dry)
    server.privacy = server.privacy.for_stand_ins()
    transport = InProcess(endpoint.answer)
    net = _OfStandIns(server, config).network(transport, secrets=Randomness(federation.seed))
    half = ServerHalf(server, net, Transcript("none"))
    state = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with nullcontext() if complete else suppress(SecureClusterError):
            state = half.final_state(Run(begin=half.begin_round, dry=True))
    events: dict[int, list[Event]] = {}
    for event in net.state.ledger.events:
        for position, client in enumerate(event.ids):
            events.setdefault(client, []).append(event.select([position]))
    return events, state


def _stand_ins(facts: Facts, clients: int) -> Federation:
    """Return stand-ins for clients, made up from public facts.

    Args:
        facts: of the clients and their data.
        clients: number of the run's clients.
    """
    stand_ins = range(min(clients, CLIENTS))
    shards = []
    for k in stand_ins:
        x = _made_up(facts.x, k, facts.classes)
        y = _made_up(facts.y, k, facts.classes)
        shards.append(Shard(x, y, x[:1], y[:1]))
    return Federation(
        names=tuple(f"stand-in {k}" for k in stand_ins),
        shards=tuple(shards),
        classes=facts.classes,
        seed=0,
        objective=facts.objective,
        feature_names=facts.feature_names,
        class_names=facts.class_names,
        scaling=Scaling.read(facts.scaling),
    )


def _made_up(form: Form, k: int, classes: int) -> Any:
    """Return samples, or targets, of a form.

    Args:
        form: of a row.
        k: number of the client.
        classes: largest token or class, plus one.
    """
    shape = (SAMPLES, *form.shape)
    dtype = np.dtype(form.dtype)
    draws = np.random.default_rng([k])
    if dtype.kind == "f":
        return draws.random(shape).astype(dtype)
    return (np.arange(np.prod(shape)) + k).reshape(shape).astype(dtype) % classes
