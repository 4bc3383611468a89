"""Experiments on clients: taps, malicious clients, unprotected twins and crafted calls.

For research only. The functions run a protocol in memory with clients that are not as they should
be, or without the protection that it has.

Taps repeat the run: replies before any protection are those of the same run once more, which draws
the same numbers, while an unprotected twin differs after its first round. A run with changed
clients is kept in no folder. Active attacks ask clients that are made again from the run's
configuration, and only if the adversary is a server.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from securecluster.attacks.base import Tap
from securecluster.attacks.views import OUTCOMES
from securecluster.core.client_names import Client, ClientNames, at
from securecluster.core.lazy_torch import torch
from securecluster.data import Federation
from securecluster.data.federation import Shard
from securecluster.errors import SecureClusterError
from securecluster.messaging.messages import Call, Rows
from securecluster.messaging.outcomes import VerbOutcome
from securecluster.parties.experiment import ATTRIBUTE, Experiment
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.runtime.endpoint import Endpoint
from securecluster.runtime.run import Stop
from securecluster.runtime.settings import Settings

P = TypeVar("P", bound=ClusteringProtocol)
Hook = Callable[[Call, Any], Any]
# (position of a client, its update (d,), round) -> the update that it sends instead
ChangeUpdate = Callable[[int, torch.Tensor, int], torch.Tensor]
# (positions of the malicious clients of a call, their updates (k, d), round) -> those sent (k, d)
ChangeTogether = Callable[[tuple[int, ...], torch.Tensor, int], torch.Tensor]
# hyper-parameters of protection, which an unprotected twin has at their defaults
PROTECTION = (
    "clip", "noise", "placement", "dp_unit", "loss_clip", "loss_noise", "target_epsilon",
    "signature_noise", "sum_bound", "cohort_size", "gram_noise", "gram_mechanism", "relevance",
    "relevance_release", "exact_weights", "cluster_noise", "scale_noise", "least_members",
    "least_choosers", "lost", "colluding",
)  # fmt: skip
# those whose defaults protect
OPEN = {"mask": "none", "layer_mask": "none", "sealed": False, "aggregation": "plain"}


def tapped(
    protocol: P,
    federation: Federation,
    settings: Settings | None = None,
    secret: bytes | None = None,
    stopped: Stop | None = None,
) -> tuple[P, list[Tap]]:
    """Run a protocol, and record every reply before it is clipped, noised, masked or summed.

    With the secret of a finished run, the run is the same, bit for bit: the same seeds draw the
    same batches, and the same secrets the same noise and keys. So a finished run's taps are those
    of its repetition.

    Args:
        protocol: its hyper-parameters; it is left as it is.
        federation: the clients and their data.
        settings: of the run.
        secret: of a run that is repeated, `kept_.secret`; None draws a new one.
        stopped: after which round that run was stopped, `kept_.learned.stopped`.

    Returns:
        The fitted protocol, and its taps in the order of the calls. A call in chunks has several.
    """
    taps: list[Tap] = []

    def record(call: Call, reply: Any) -> Any:
        # A copy, since the pipeline may work in the reply's memory.
        copied = copy.deepcopy(reply)
        taps.append(Tap(call.method, call.verb, call.round, call.step, call.to, copied))
        return reply

    outcomes: list[VerbOutcome] = []
    authority_outcomes: list[VerbOutcome] = []
    changes = Experiment(record, outcomes.append, authority_outcomes.append, secret, stopped)
    fitted = _with_changes(protocol, changes, federation, settings)
    # so that nothing is replayed for them
    OUTCOMES[fitted.result_] = tuple(outcomes)
    # no frame has R as a key authority decrypts it
    vars(fitted)["authority_outcomes_"] = tuple(authority_outcomes)
    return fitted, taps


def with_malicious_updates(
    protocol: P,
    federation: Federation,
    clients: Iterable[Client],
    change: ChangeUpdate,
    settings: Settings | None = None,
) -> P:
    """Run a protocol with clients that send other updates than they computed.

    They change what they computed, and then follow the protocol: the clip, the mask and the sum
    hold for what they send. An update that is multiplied by the number of samples is changed after
    that.

    Args:
        protocol: its hyper-parameters; it is left as it is.
        federation: the clients and their data.
        clients: the malicious ones, each as for `Federation.select`.
        change: makes the update that a client sends of its position, its own update, (width,), and
            the round.
        settings: of the run.

    Raises:
        UsageError: no such client, or a number that could be a name.
    """

    def change_each(present: tuple[int, ...], updates: torch.Tensor, round: int) -> torch.Tensor:
        pairs = zip(present, updates, strict=True)
        return torch.stack([change(client, update, round) for client, update in pairs])

    return with_colluding_updates(protocol, federation, clients, change_each, settings)


def with_colluding_updates(
    protocol: P,
    federation: Federation,
    clients: Iterable[Client],
    change: ChangeTogether,
    settings: Settings | None = None,
) -> P:
    """Run a protocol with clients that agree in every call on the updates that they send.

    It is `with_malicious_updates` with one difference: each of them knows what the others computed.

    Args:
        protocol: its hyper-parameters; it is left as it is.
        federation: the clients and their data.
        clients: the malicious ones, each as for `Federation.select`.
        change: makes the updates (k, width) that the k malicious clients of a call send of their
            positions, their own updates, (k, width), and the round.
        settings: of the run.

    Raises:
        UsageError: no such client, or a number that could be a name.
    """
    malicious = set(ClientNames(federation.names).positions(clients))

    def tamper(call: Call, reply: Any) -> Any:
        delta = getattr(reply, "delta", None)
        if not isinstance(delta, Rows):
            return reply
        # a sum may be called in chunks, some of which have no malicious client
        positions = [k for k, client in enumerate(call.to) if client in malicious]
        if not positions:
            return reply
        rows = delta.values.clone()
        present = tuple(call.to[k] for k in positions)
        rows[positions] = change(present, rows[positions], call.round)
        return dataclasses.replace(reply, delta=Rows(rows))

    return with_hook(protocol, tamper, federation, settings)


def with_poisoned_data(
    federation: Federation, clients: Iterable[Client], change: Callable[[int, Shard], Shard]
) -> Federation:
    """Return a federation in which some clients have other data to train on.

    Args:
        federation: the clients and their data.
        clients: the malicious ones, each as for `Federation.select`.
        change: makes a client's data of its position and its own data.

    Raises:
        UsageError: no such client, or a number that could be a name.
    """
    malicious = set(ClientNames(federation.names).positions(clients))
    shards = []
    for client, shard in enumerate(federation.shards):
        if client in malicious:
            shard = change(client, shard)
        shards.append(shard)
    # no recipe makes these data again
    return replace(federation, shards=tuple(shards), recipe=None)


def unprotected(protocol: P) -> P:
    """Return a protocol without mask, clip, noise, seals and secure sums, and with the same seeds.

    It is to be fitted on the same federation. In its first round clients draw the same batches as
    in the protected run; later rounds differ as far as noise has changed the models.

    Args:
        protocol: its hyper-parameters; it is left as it is.
    """
    params: dict[str, Any] = {}
    for name, value in protocol.get_params().items():
        if name not in PROTECTION:
            params[name] = OPEN.get(name, value)
    return type(protocol)(**params)


def without_client(
    protocol: P, federation: Federation, client: Client, settings: Settings | None = None
) -> P:
    """Run a protocol once more, on a federation that one client has left.

    The other clients have the same data. They are numbered anew from 0, in the same order.

    Args:
        protocol: its hyper-parameters; it is left as it is.
        federation: the clients and their data.
        client: the one that has left, as for `Federation.select`.
        settings: of the run.

    Raises:
        UsageError: no such client, or a number that could be a name.
    """
    excluded = ClientNames(federation.names).position(client)
    others = [at(other) for other in range(len(federation)) if other != excluded]
    # a new object, since fitting would overwrite the results of the given one
    made = type(protocol)(**protocol.get_params())
    return made.fit(federation.select(others), settings)


@dataclass(frozen=True)
class Probed:
    """Reaction of a client to a crafted call.

    Args:
        reply: its reply; None if it refused.
        refusal: the error by which it refused; None if it replied.
    """

    reply: Any
    refusal: SecureClusterError | None

    @property
    def refused(self) -> bool:
        """Return True if the client refused the call."""
        return self.refusal is not None


def probe(endpoint: Endpoint[Any], call: Call) -> Probed:
    """Send a crafted call to clients, as a malicious server would.

    `build_client` of `securecluster.parties.endpoints` makes an endpoint. A call can have any
    method, verb, round, step, recipients, group and query; `config` is what `config_hash` of
    `securecluster.runtime` gives for the run's configuration.

    Args:
        endpoint: of the clients.
        call: the request.
    """
    try:
        response = endpoint.answer(call)
    except SecureClusterError as error:
        return Probed(None, error)
    return Probed(response.reply, None)


def with_hook(protocol: P, hook: Hook, federation: Federation, settings: Settings | None) -> P:
    """Return a copy of a protocol, fitted with a hook at its clients.

    Args:
        protocol: its hyper-parameters.
        hook: of the clients.
        federation: the clients and their data.
        settings: of the run.
    """
    return _with_changes(protocol, Experiment(hook), federation, settings)


def _with_changes(
    protocol: P, changes: Experiment, federation: Federation, settings: Settings | None
) -> P:
    """Return a copy of a protocol, fitted with what an experiment changes."""
    made = type(protocol)(**protocol.get_params())
    # attributes of this object alone, so that no other run has them
    vars(made)[ATTRIBUTE] = changes
    fitted = made.fit(federation, settings)
    del vars(made)[ATTRIBUTE]
    return fitted


def with_server(
    protocol: ClusteringProtocol,
    federation: Federation,
    server: Callable[[ClusteringProtocol, Any], None],
    settings: Settings | None = None,
    secret: bytes | None = None,
) -> None:
    """Run the clients of a protocol with a server of the adversary's own.

    Clients are the protocol's, behind their own endpoints, and refuse what they refuse of anyone.

    Args:
        protocol: its hyper-parameters; it is left as it is.
        federation: the clients and their data.
        server: called with the protocol and a server's channel in place of `run_server`.
        settings: of the run.
        secret: of a run whose clients these are; None draws a new one.

    Raises:
        SecureClusterError: the clients refuse what this server asks.
    """

    class Over(Exception):  # noqa: N818
        """The server is done: what a protocol computes after its loop is not made."""

    class Dishonest(type(protocol)):  # type: ignore[misc]
        """The protocol with this server."""

        @functools.wraps(type(protocol).run_server)  # what follows from its annotations stays
        def run_server(self, net: Any, run: Any) -> Any:
            """Run the server, and end the run."""
            server(self, net)
            raise Over

    with contextlib.suppress(Over):
        made: Any = Dishonest(**protocol.get_params())
        vars(made)[ATTRIBUTE] = Experiment(secret=secret)
        made.fit(federation, settings)
