"""Clients that were not in a finished run join its clusters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from securecluster.core.client_names import named_in_errors
from securecluster.core.devices import choose_device, cpu_threads, reproducible
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.core.serialization import pack, unpack
from securecluster.data.feature_columns import listed
from securecluster.data.scaling import Scaling
from securecluster.errors import RunFolderError, UsageError
from securecluster.messaging.bounds import Limits
from securecluster.messaging.messages import Call, Response
from securecluster.messaging.transcript import Transcript
from securecluster.models.objectives import objective
from securecluster.parties.deployment import build_network
from securecluster.parties.derived import (
    adds_noise,
    call_types,
    server_copy,
    state_class,
    training_size,
    training_sizes,
)
from securecluster.parties.endpoints import KeySource, build_client, samples_of
from securecluster.parties.labels import UNKNOWN_LABEL, checked_labels
from securecluster.parties.method import Method
from securecluster.parties.newcomers import NewcomerRecord, check_sizes, number_of, samples_batches
from securecluster.parties.server_half import without_clients
from securecluster.privacy.dp.ledger import Event, Ledger, Recall
from securecluster.privacy.masking.identities import Identity, Roster
from securecluster.privacy.masking.key_agreement import KeyRing
from securecluster.privacy.pipeline import Pipeline
from securecluster.results.fitted_state import FittedState
from securecluster.runtime.channel_state import ChannelState
from securecluster.runtime.endpoint import Endpoint, config_hash
from securecluster.runtime.transport import InProcess, Recorded, Transport

if TYPE_CHECKING:
    from securecluster.data.federation import Federation
    from securecluster.privacy.masking.key_agreement import Secrets
    from securecluster.runtime.server_channel import ServerChannel


@dataclass(frozen=True)
class Joined:
    """Clusters of newcomers, and what their assignment released and cost."""

    labels: tuple[int, ...]
    ledger: Ledger
    transcript: Transcript
    bytes: dict[str, Any]


def join(
    protocol: Method,
    kept: FittedState,
    ledger: Ledger,
    record: NewcomerRecord | None,
    newcomers: Federation,
) -> Joined:
    """Assign clients that were not in a finished run to its clusters.

    Every call starts from the end of the run, and adds to its ledger.

    Args:
        protocol: with the hyper-parameters of the run.
        kept: the state at the end of the run.
        ledger: of the run and all its newcomers, which is added to.
        record: the file beside the run; None where there is none.
        newcomers: the clients and their data.

    Raises:
        UsageError: data of another kind, or too few samples for the run's noise.
        RunFolderError: releases of newcomers cannot be recorded in the protocol's folder.
    """
    learned = kept.learned
    config = learned.config
    settings = learned.settings
    newcomers = _check_kind_of_data(newcomers, config)
    sizes = training_sizes(protocol, newcomers.facts)
    record = _opened_record(protocol, config, ledger, record)
    ledger.names = dict(enumerate(learned.names)) | ledger.names
    first = int(config["clients"])
    # Numbers are planned on a copy: the run's ledger takes them only after a release.
    planned = replace(ledger, names=dict(ledger.names), samples=dict(ledger.samples))
    numbers = _newcomer_numbers(protocol, planned, first, newcomers.names, sizes)
    secrets = kept.secrets()
    guests = build_client(
        protocol,
        newcomers,
        settings,
        key_source=KeySource(secrets=secrets),
        joins=config,
        numbers=numbers,
        # a request that is repeated in a later version has the same bits
        names=None if learned.named_draws else list(map(str, numbers)),
    )
    hosts = _hosts(config, kept.clients.secrets, guests.limits, secrets)

    def answer(call: Call) -> Response:
        if call.to[0] < first:  # the key agreement, by which newcomers get the mask seed
            return hosts.answer(call)
        # Checked at the call, since not every method asks newcomers to train.
        if samples_batches(protocol, config, call.method):
            check_sizes(protocol, config, newcomers, sizes)
        return guests.answer(call)

    device = guests.client.cohort.device
    samples = samples_of(guests.client) if protocol.privacy.per_example else {}
    server = _Server(protocol, kept, InProcess(answer), device, secrets=secrets)
    found = server.assigned(numbers, samples, ledger, planned, record)
    labels = protocol.observer.newcomer_labels(guests.client, found.state, list(found.labels))
    return replace(found.joined, labels=_checked(protocol, labels, len(guests.ids)))


def join_over(
    protocol: Method,
    kept: FittedState,
    record: NewcomerRecord,
    transport: Transport,
    newcomers: Mapping[int, int | None],
    roster: Roster | None = None,
) -> Joined:
    """Assign newcomers' nodes to the clusters of a finished run of a server.

    The run's own nodes are the hosts: one that has the mask seed seals it to newcomers on its
    roster, which the server relays and cannot read.

    Args:
        protocol: with the hyper-parameters of the run.
        kept: the state at the end of the run.
        record: the file beside the run.
        transport: carries calls to the newcomers and to the run's own clients.
        newcomers: the number of training samples that each told, by its number on the roster; None
            for who told none.
        roster: public keys of all parties; None in runs without one.

    Returns:
        UNKNOWN_LABEL for newcomers that alone know their cluster.

    Raises:
        UsageError: a number of a client of the run, or numbers of samples that are not known.
        RunFolderError: releases of newcomers cannot be recorded in the run's folder.
    """
    learned = kept.learned
    config = learned.config
    first = int(config["clients"])
    numbers = sorted(newcomers)
    if not numbers or numbers[0] < first:
        raise UsageError(
            f"newcomers have the numbers on the roster after the run's {first} clients: give one "
            "or more of these"
        )
    samples = {}
    for number, told in newcomers.items():
        if protocol.privacy.per_example:
            if told is None:
                raise UsageError(f"newcomer {number} did not tell its number of samples")
            # as `LocalTrainer` holds validation samples out
            samples[number] = training_size(protocol, told)
    ledger = unpack(pack(learned.network), ChannelState).ledger
    ledger.names |= {i: str(i) for i in range(first, 1 + numbers[-1])}
    ledger.samples |= samples
    _opened_record(protocol, config, ledger, record)
    device = choose_device(learned.settings.device)
    server = _Server(protocol, kept, transport, device, key=kept.key, roster=roster)
    found = server.assigned(numbers, samples, ledger, ledger, record)
    labels = list(found.labels)
    if not protocol.observer.server_knows_labels:
        labels = [UNKNOWN_LABEL] * len(labels)
        return replace(found.joined, labels=tuple(labels))
    return replace(found.joined, labels=_checked(protocol, labels, len(numbers)))


def _checked(protocol: Method, labels: Sequence[int], newcomers: int) -> tuple[int, ...]:
    """Return newcomers' clusters after a check of what the protocol returned."""
    name = f"{type(protocol).__name__}.assign_newcomers"
    return tuple(checked_labels(name, labels, newcomers))


@dataclass(frozen=True)
class _Assigned:
    """What the server's half found out: the labels that it knows, and its state."""

    joined: Joined
    labels: Sequence[int]
    state: Any


@dataclass(frozen=True)
class _Server:
    """The server's half of newcomers' assignment.

    Args:
        protocol: with the hyper-parameters of the run.
        kept: the state at the end of the run.
        transport: carries calls to newcomers and hosts.
        device: where the server computes.
        secrets: secret random streams of a simulated run.
        key: 32 secret bytes of a deployed server.
        roster: identities of the clients that a deployed server accepts.
    """

    protocol: Method
    kept: FittedState
    transport: Transport
    device: torch.device
    secrets: Randomness | None = None
    key: bytes | None = None
    roster: Roster | None = None

    def assigned(
        self,
        numbers: Sequence[int],
        samples: Mapping[int, int],
        ledger: Ledger,
        planned: Ledger,
        record: NewcomerRecord | None,
    ) -> _Assigned:
        """Return the newcomers' clusters.

        Args:
            numbers: of the newcomers.
            samples: that each trains on, where prices depend on it.
            ledger: of the run and all its newcomers, which is added to.
            planned: the ledger with the newcomers' names and numbers of samples.
            record: the file beside the run; None where there is none.
        """
        from securecluster.parties.shared_scale import tell_scale

        protocol = self.protocol
        learned = self.kept.learned
        config = learned.config
        settings = learned.settings
        numbered = range(1 + max(planned.names))
        names = [planned.names[i] for i in numbered]
        transcript = Transcript(settings.transcript, None, partial(call_types, protocol), names)
        server = server_copy(protocol)
        net = build_network(
            server,
            Recorded(self.transport, transcript),
            config,
            self.key,
            self.device,
            self.roster,
            self.secrets,
        )
        guest_names = {number: names[number] for number in numbers}
        guests = Ledger(samples=dict(samples), names=guest_names, unit=ledger.unit)
        # A copy by value, so that the state of the run does not change.
        end_of_run = unpack(pack(learned.network), ChannelState)
        net.state = replace(end_of_run, ledger=guests)
        rounds = [line["round"] for line in learned.history]
        net.round = 1 + max(rounds, default=0)
        first = int(config["clients"])
        net.record = _recorder(net, ledger, planned, record, first)
        state: Any = unpack(self.kept.server, state_class(protocol))
        with (
            named_in_errors(names),
            without_clients(server),
            torch.inference_mode(False),
            cpu_threads(settings.threads),
            reproducible(self.device),
        ):
            tell_scale(server, net, tuple(numbers))
            labels = server.assign_newcomers(net, state, tuple(numbers))
        joined = Joined((), net.state.ledger, transcript, transcript.totals())
        return _Assigned(joined, labels, state)


def _newcomer_numbers(
    protocol: Method, planned: Ledger, first: int, names: Sequence[str], sizes: Sequence[int]
) -> list[int]:
    """Return the newcomers' numbers, and add them to a ledger.

    Args:
        planned: the ledger, which is changed.
        first: the smallest number of a newcomer.
        names: of the newcomers.
        sizes: numbers of samples that they train on.
    """
    numbers = []
    for name, size in zip(names, sizes, strict=True):
        # Only the price of DP-SGD depends on the number of samples.
        samples = size if protocol.privacy.per_example else None
        numbers.append(number_of(planned, first, name, samples))
    return numbers


def _check_kind_of_data(newcomers: Federation, config: Mapping[str, Any]) -> Federation:
    """Return newcomers with their features in the run's order.

    Args:
        newcomers: the clients and their data.
        config: of the run.

    Raises:
        UsageError: their data are of another kind than the run's.
    """
    task = objective(config["objective"])
    if newcomers.objective != task:
        raise UsageError(
            f"newcomers' data are for {newcomers.objective.as_json()}, the run's for "
            f"{task.as_json()}: give the same kind of data"
        )
    if "feature_names" in config:
        if newcomers.feature_names is None:
            raise UsageError(
                "the run's features have names and the newcomers' have none: give them as tables "
                "with these columns"
            )
        newcomers = newcomers.with_features(config["feature_names"])
    names = config.get("class_names")
    if names is None and newcomers.class_names is not None:
        raise UsageError(
            f"the newcomers' labels have names ({listed([str(n) for n in newcomers.class_names])}) "
            "and the run's are class numbers: give class numbers"
        )
    if names is not None:
        newcomers = newcomers.with_classes(names)
    if newcomers.scaling != Scaling.read(config.get("scaling")):
        raise UsageError(
            f"the newcomers' features are scaled by {newcomers.facts.scaling}, the run's by "
            f"{config.get('scaling')}: give the same scaling, and the same categories (prepare)"
        )
    same_shape = list(newcomers.shape) == config["shape"]
    if not same_shape or newcomers.classes > config["classes"]:
        shape = tuple(config["shape"])
        raise UsageError(
            f"newcomers hold samples of shape {newcomers.shape} in {newcomers.classes} classes, "
            f"the run's {shape} in {config['classes']}: give them the same kind of data"
        )
    return newcomers


def _recorder(
    net: ServerChannel, ledger: Ledger, planned: Ledger, record: NewcomerRecord | None, first: int
) -> Callable[[list[Event]], None]:
    """Return a function that adds newcomers' releases to the run's ledger, and to its file.

    Args:
        net: the channel to the newcomers.
        ledger: of the run and all its newcomers.
        planned: the ledger with the newcomers' names and numbers of samples.
        record: the file beside the run; None where there is none.
        first: the smallest number of a newcomer.
    """
    # A repeated release of the same bits costs nothing more.
    of_newcomers = [event for event in ledger.events if min(event.ids) >= first]
    recall = Recall(of_newcomers)

    def record_events(events: list[Event]) -> None:
        net.add(events)
        ledger.names.update(planned.names)
        ledger.samples.update(planned.samples)
        new = recall.new(events)
        if new and record is not None:
            record.append(new, ledger)
        ledger.events.extend(new)

    return record_events


def _opened_record(
    protocol: Method, config: Mapping[str, Any], ledger: Ledger, record: NewcomerRecord | None
) -> NewcomerRecord | None:
    """Return the file that records newcomers' releases, after a check that it can be written.

    Args:
        protocol: with the hyper-parameters of the run.
        config: of the run.
        ledger: of the run and all its newcomers.
        record: the file; None where the protocol has no folder.

    Returns:
        None where the protocol has no folder, or where a run without noise cannot write to it.

    Raises:
        RunFolderError: the file of a run with noise cannot be written.
    """
    if record is None:
        return None
    record.update(ledger)
    try:
        record.check_writable()
    except RunFolderError:
        # Updates, training or Gram matrices have noise, so ε has to be complete.
        if adds_noise(protocol, config):
            raise
        # Without noise every release of newcomers has an infinite ε, recorded or not.
        return None
    return record


def _hosts(
    config: Mapping[str, Any], kept: Secrets, limits: Limits, secrets: Randomness
) -> Endpoint[Any]:
    """Return the endpoint of the run's own clients, without data or models.

    Newcomers need them for the key agreement only: one of them seals the mask seed.

    Args:
        config: of the run.
        kept: keys and seeds of the run's clients.
        limits: of frames.
        secrets: secret random streams of the run.
    """
    run = config_hash(config)
    keys = KeyRing(
        run, None, lambda seed: None, partial(Identity.derived, secrets), Roster.derived(secrets)
    )
    keys.restore(kept)
    return Endpoint(None, range(config["clients"]), run, Pipeline(), keys, limits=limits)
