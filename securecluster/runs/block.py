"""A block of a run's clients, as one process of several holds it.

A block is an endpoint of some clients, which draw what they would draw among all: keys and noise
depend on a client's number in the run, and batches on its name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from securecluster.clustering.labels import members as clusters_of
from securecluster.core.devices import choose_device, cpu_threads, reproducible
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.errors import SecureClusterError, SecureClusterWarning
from securecluster.messaging.messages import Call, Response, Rows
from securecluster.parties.client_state import ClientState
from securecluster.parties.endpoints import KeySource, build_client
from securecluster.parties.method import Method
from securecluster.results.fitted_state import SHARED, UNTUNED
from securecluster.runs.packed_messages import PackedMessage, opened, packed
from securecluster.runtime.aggregators import added
from securecluster.runtime.release_target import ReleaseTarget
from securecluster.runtime.settings import Settings
from securecluster.training.baselines import HeldOut

if TYPE_CHECKING:
    from securecluster.data.federation import Federation
    from securecluster.runtime.endpoint import Endpoint


@dataclass(frozen=True)
class BlockPlan:
    """Plan by which a block is made.

    Args:
        method: with the hyper-parameters of the run.
        federation: the clients of the block and their data.
        settings: of the run.
        numbers: of the clients in the run.
        config: what clients and server agreed on.
        secrets: secret random streams of the run.
    """

    method: Method
    federation: Federation
    settings: Settings
    numbers: Sequence[int]
    config: Mapping[str, Any]
    secrets: Randomness


@dataclass(frozen=True)
class Outcome:
    """Reply of a block.

    Args:
        value: of the work; None where it failed.
        error: by which the work failed.
        warnings: sentences for the user.
    """

    value: Any
    error: SecureClusterError | None
    warnings: Sequence[str]


@dataclass(frozen=True, eq=False)
class BlockEnd:
    """Models that clients of a block have at the end of a run.

    Args:
        models: that each client keeps.
        untuned: of each client before it tuned its model alone; None where nobody did.
        shared: the clusters' models where clients continued alone from them.
        unshared: numbers of the clients whose model was trained alone.
    """

    models: Rows
    untuned: Rows | None
    shared: torch.Tensor | None
    unshared: Sequence[int]

    @classmethod
    def of(cls, method: Method, client: Any, state: Any) -> BlockEnd:
        """Return what clients have at the end of a run.

        Args:
            method: of the run.
            client: the clients' object.
            state: the server's final state.
        """
        observer = method.observer
        untuned = None
        if method.training.personal(method):
            untuned = observer.final_models(client, state)
        return cls(
            observer.kept_models(client, state),
            untuned,
            observer.shared_models(client),
            [client.cohort.ids[k] for k in client.unshared],
        )


def shared_rows(
    shared: torch.Tensor | None,
    untuned: Rows | None,
    labels: Sequence[int],
    unshared: Collection[int],
) -> dict[str, torch.Tensor]:
    """Return the clusters' models, (k, d), where clients' own are others, by name.

    Of clients that tuned their models, a cluster's is that of its first client before tuning, of
    the first whose model was not trained alone if there is one.

    Args:
        shared: the clusters' models where the method has them beside the clients' own.
        untuned: all clients' models before tuning; None where there was none.
        labels: (m,) each client's cluster.
        unshared: numbers of the clients whose model was trained alone in the run.
    """
    if shared is not None:
        return {SHARED: shared}
    if untuned is None:
        return {}
    rows = []
    for members in clusters_of(labels):
        averaged = [i for i in members if i not in unshared]
        # a label that no client has, as where clients choose their own, stands for no model
        first = [*averaged, *members, 0][0]
        rows.append(untuned.row(first))
    return {UNTUNED: torch.stack(rows)}


@dataclass(frozen=True)
class Piece:
    """Selection of the replies to a call that the server wants.

    Args:
        ids: of clients whose replies it wants.
        group_of: group of each, where it wants sums; empty for single replies.
    """

    ids: Sequence[int]
    group_of: Mapping[int, int] = field(default_factory=dict)


class Block:
    """The clients of one process, asked by parcels.

    Args:
        plan: a `BlockPlan`.
    """

    def __init__(self, plan: PackedMessage) -> None:
        self._plan: BlockPlan = opened(plan)
        self._device = choose_device(self._plan.settings.device)
        self._endpoint: Endpoint[Any] | None = None
        self._held: Response | None = None

    def answer(self, call: PackedMessage) -> tuple[PackedMessage, PackedMessage]:
        """Answer a call, and return the response and the clients' state after it.

        Args:
            call: a `Call` to clients of the block.
        """
        outcome = self._done(lambda: self._made().answer(_call(call)))
        state = self._done(self._state)
        return outcome, state

    def hold(self, call: PackedMessage) -> tuple[PackedMessage, PackedMessage, PackedMessage]:
        """Answer a call, and keep the response for `piece`.

        Args:
            call: a `Call` to clients of the block.

        Returns:
            An `Outcome` without a value, the response, and the clients' state after it.
        """
        self._held = None

        def answer() -> None:
            self._held = self._made().answer(_call(call))

        outcome = self._done(answer)
        return outcome, packed(self._held), self._done(self._state)

    def piece(self, request: PackedMessage, held: PackedMessage) -> PackedMessage:
        """Return some of the replies that are held, or their sums by group.

        Args:
            request: a `Piece`.
            held: the response, for a process that was started since.
        """

        def piece() -> Response:
            if self._held is None:
                self._held = opened(held)
            selection: Piece = opened(request)
            replies = self._held.of(selection.ids)
            if replies.reply is None or not selection.group_of:
                return replies
            return added(replies, [selection.group_of[client] for client in replies.ids])

        return self._done(piece)

    def state(self, nothing: PackedMessage) -> PackedMessage:
        """Return the clients' state.

        Args:
            nothing: is ignored.
        """
        return self._done(self._state)

    def restore(self, state: PackedMessage, events: PackedMessage) -> PackedMessage:
        """Set the clients' state, and hold them to what was released already.

        Args:
            state: an `Outcome` with a `ClientState`, or with None for the state before all calls.
            events: of the ledger so far.
        """

        def restore() -> None:
            endpoint = self._made()
            client_state: ClientState | None = opened(state).value
            if client_state is not None:
                endpoint.client.restore(client_state)
                endpoint.keys.restore(client_state.secrets)
            for reservation in endpoint.reservations:
                if isinstance(reservation, ReleaseTarget):
                    reservation.learn(opened(events))

        return self._done(restore)

    def sizes(self, nothing: PackedMessage) -> PackedMessage:
        """Return the number of samples that each client trains on.

        Args:
            nothing: is ignored.
        """
        return self._done(lambda: list(self._made().client.cohort.sizes))

    def evaluate(self, state: PackedMessage) -> PackedMessage:
        """Return each client's score after a round.

        Args:
            state: the server's state.
        """
        observer = self._plan.method.observer
        return self._done(lambda: observer.evaluate(self._made().client, opened(state)))

    def end(self, state: PackedMessage) -> PackedMessage:
        """Return what the clients have at the end, a `BlockEnd`.

        Args:
            state: the server's final state.
        """

        method = self._plan.method
        return self._done(lambda: BlockEnd.of(method, self._made().client, opened(state)))

    def entries(self, member: PackedMessage) -> PackedMessage:
        """Return what a member of the clients' object has of each client.

        Args:
            member: its name, and the arguments of a method.
        """

        def entries() -> list[Any]:
            name, arguments = opened(member)
            value = getattr(self._made().client, name)
            return list(value(*arguments) if callable(value) else value)

        return self._done(entries)

    def scores(self, models: PackedMessage) -> PackedMessage:
        """Return each client's score on its test data under its model.

        Args:
            models: `Rows` of the clients.
        """
        return self._done(lambda: self._made().client.cohort.scores(opened(models)))

    def held_out(self, models: PackedMessage) -> PackedMessage:
        """Return what models and baselines say of the clients' test samples, a `HeldOut`.

        Args:
            models: `Rows` of the clients.
        """
        return self._done(lambda: HeldOut.of(self._made().client.cohort, opened(models)))

    def tuned_once(self, models: PackedMessage) -> PackedMessage:
        """Return each client's model after a round in which it trains it alone.

        Args:
            models: `Rows` of the clients.
        """
        return self._done(lambda: self._made().client.tuned(opened(models), 1))

    def _state(self) -> ClientState:
        endpoint = self._made()
        state: ClientState = endpoint.client.state(endpoint.keys.secrets)
        return state

    def _made(self) -> Endpoint[Any]:
        """Return the endpoint of the clients, which is made on first use."""
        if self._endpoint is None:
            plan = self._plan
            self._endpoint = build_client(
                plan.method,
                plan.federation,
                plan.settings,
                key_source=KeySource(secrets=plan.secrets),
                agreed=plan.config,
                numbers=plan.numbers,
                names=plan.federation.names,
            )
        return self._endpoint

    def _done(self, work: Callable[[], Any]) -> PackedMessage:
        """Return the `Outcome` of some work, whose errors and warnings are for the user."""
        with self._computing(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value, error = None, None
            try:
                value = work()
            except SecureClusterError as raised:
                error = raised
            notes = [
                str(one.message) for one in caught if issubclass(one.category, SecureClusterWarning)
            ]
            return packed(Outcome(value, error, notes))

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Compute as a run in one process does: numbers round by these settings."""
        threads = self._plan.settings.threads
        with torch.inference_mode(False), cpu_threads(threads), reproducible(self._device):
            yield


def _call(packed_message: PackedMessage) -> Call:
    call: Call = opened(packed_message)
    return call
