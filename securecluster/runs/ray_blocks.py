"""Blocks of a run's clients in Ray actors, and the transport to them.

An actor for each GPU or CPU core holds a block of consecutive clients as one batched endpoint. A
call is one message to each block that it concerns, whose shared tensors move once, and the replies
of a block come back as one batch. The server's half, the ledger and the transcript stay in the
process that begins the run.

Clients' numbers are those of a run in one process, since their draws depend on their numbers, and
parts of sums are those of one process, too. Batched products round by the size of a batch on some
processors; elsewhere results are equal to the bit.

After each call an actor leaves its clients' state in Ray's object store. An actor that dies is made
again with the state before the call, and asked again: clients draw the same noise for the same
question. The store of a machine is lost with it; then the run goes on from its folder.
"""

from __future__ import annotations

import copy
import importlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.client_names import at
from securecluster.core.devices import choose_device
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.data import Federation
from securecluster.errors import RunFolderError, SecureClusterWarning, UsageError
from securecluster.messaging.messages import Call, Response, Rows, stack
from securecluster.privacy.masking.key_agreement import AuthorityKeys, PairwiseKeys, Secrets
from securecluster.runs.block import Block, BlockEnd, BlockPlan, Outcome, Piece, shared_rows
from securecluster.runs.client_state import ClientState
from securecluster.runs.derived import initial_model
from securecluster.runs.experiment import ATTRIBUTE, experiment_of
from securecluster.runs.method import Method
from securecluster.runs.observed_clients import ObservedClients
from securecluster.runs.parcels import Parcel, opened, packed, size
from securecluster.runtime.chunks import FIRST_CHUNK, in_chunks
from securecluster.runtime.run import CheckpointPart
from securecluster.runtime.settings import Settings, check_engine
from securecluster.runtime.transport import Transport
from securecluster.training.chance_level import Chance, at_chance
from securecluster.training.foreign_trainer import trainer_of

# times that actors of one block may die in one call
MOST_DEATHS = 3
# until all actors have started
START_SECONDS = 600
# how much larger than equal blocks the largest may be
UNEVEN = 1.1


@dataclass
class Traffic:
    """What has moved between processes since a run began.

    Args:
        messages: requests to blocks, and their replies.
        bytes: of these messages.
    """

    messages: int = 0
    bytes: int = 0

    def add(self, parcel: Parcel) -> None:
        """Count a message.

        Args:
            parcel: that moves.
        """
        self.messages += 1
        self.bytes += size(parcel)


@dataclass
class BlockStates:
    """States of the clients of all blocks, as checkpoints have them."""

    blocks: list[ClientState]


@dataclass
class _Actor:
    """An actor, and what is to be known to make it again.

    Args:
        plan: of its block.
        handle: of Ray.
        state: reference to the clients' state after their last call; None before the first.
        held: reference to the replies to the last call that it keeps for sums; None before it.
        request: the call that it has not answered yet, with the references to its results.
    """

    plan: BlockPlan
    handle: Any = None
    state: Any = None
    held: Any = None
    request: _Request | None = None

    @property
    def pending(self) -> _Request:
        """Return the call that it has not answered yet."""
        assert self.request is not None, "this block was asked nothing"
        return self.request


@dataclass(frozen=True)
class _Request:
    """A request to an actor.

    Args:
        method: of `Block`.
        parcel: its argument.
        reply: reference to the reply.
        state: reference to the state after it; None where it changes none.
        held: reference to replies that stay there; None where none do.
    """

    method: str
    parcel: Parcel
    reply: Any
    state: Any = None
    held: Any = None


class RayBlocks:
    """Actors of a run, each with the clients of its block.

    Args:
        plan: returns the plan of the clients at some positions.
        clients: number of clients.
        workers: number of blocks; 0 is one per GPU, or per CPU core that Ray has.
        device: that the run computes on.
    """

    def __init__(
        self,
        plan: Callable[[Sequence[int]], BlockPlan],
        clients: int,
        workers: int,
        device: torch.device,
    ) -> None:
        self.traffic = Traffic()
        # called for the ledger's events so far, where clients hold a target ε
        self.events: Callable[[], list[Any]] = list
        self._plan = plan
        self._clients = clients
        self._resource = "GPU" if device.type == "cuda" else "CPU"
        self._ray = importlib.import_module("ray")
        self._started = not self._ray.is_initialized()
        if self._started:
            _start(self._ray)
        try:
            self._make(workers or self._available())
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._actors)

    @property
    def handles(self) -> list[Any]:
        """Return Ray's handles of the actors, block by block."""
        return [actor.handle for actor in self._actors]

    def _available(self) -> int:
        """Return the number of GPUs, or of CPU cores, that Ray has."""
        return max(1, int(self._ray.cluster_resources().get(self._resource, 0)))

    def _make(self, workers: int) -> None:
        """Make the actors of all blocks.

        Raises:
            UsageError: Ray has no GPU, or no room for them.
        """
        total = self._ray.cluster_resources().get(self._resource, 0)
        if total < 1:
            raise UsageError(
                f"Ray has no {self._resource}: start it with one, or give --device cpu"
            )
        workers = min(workers, self._clients)
        # several blocks share a GPU or a core where there are more blocks
        self._share = 1 / math.ceil(workers / int(total))
        positions = blocks_of(self._clients, workers)
        self.block_of = {k: b for b, part in enumerate(positions) for k in part}
        self.positions = positions
        self._actors = [_Actor(self._plan(part)) for part in positions]
        for actor in self._actors:
            self._begin(actor)
        ready = [actor.handle.__ray_ready__.remote() for actor in self._actors]
        try:
            self._ray.get(ready, timeout=START_SECONDS)
        except self._ray.exceptions.GetTimeoutError:
            raise self._no_room() from None

    def _no_room(self) -> UsageError:
        """Return the error for actors that do not start."""
        return UsageError(
            f"Ray has no room for {len(self._actors)} workers: stop its other jobs, or give fewer "
            "workers"
        )

    def _begin(self, actor: _Actor) -> None:
        """Start an actor, without any state of its clients."""
        options: dict[str, Any] = {"num_cpus": self._share, "scheduling_strategy": "SPREAD"}
        if self._resource == "GPU":
            options = {**options, "num_cpus": 0, "num_gpus": self._share}
        remote = self._ray.remote(Block).options(**options)
        actor.handle = remote.remote(packed(actor.plan))

    def ask(self, method: str, contents: Mapping[int, Any]) -> dict[int, Any]:
        """Ask blocks at once, and return what each replies.

        Args:
            method: of `Block`.
            contents: what each block is asked, by its number.

        Raises:
            SecureClusterError: a block refuses.
        """
        self.send(method, contents)
        return {b: self.reply(b) for b in contents}

    def send(self, method: str, contents: Mapping[int, Any]) -> None:
        """Ask blocks at once, without waiting for replies.

        Args:
            method: of `Block`.
            contents: what each block is asked, by its number.
        """
        parcels: dict[int, Parcel] = {}
        for b, content in contents.items():
            # one content for several blocks is packed once
            parcel = parcels.get(id(content))
            if parcel is None:
                parcel = parcels[id(content)] = packed(content)
            self._send(self._actors[b], method, parcel)

    def reply(self, b: int) -> Any:
        """Return what a block replies to what it was sent last.

        Args:
            b: its number.

        Raises:
            SecureClusterError: the block refuses.
            UsageError: its actors die again and again.
            RunFolderError: its state was lost with a machine.
        """
        actor = self._actors[b]
        errors = self._ray.exceptions
        for _ in range(MOST_DEATHS):
            request = actor.pending
            try:
                parcel = self._ray.get(request.reply)
            except errors.RayActorError:
                self._replace(actor)
                self._send(actor, request.method, request.parcel)
                continue
            except errors.RayTaskError as error:
                raise error.cause from error
            actor.request = None
            if request.state is not None:
                actor.state = request.state
            if request.held is not None:
                actor.held = request.held
            self.traffic.add(parcel)
            return _value(opened(parcel))
        raise UsageError(
            f"the process of block {b} died {MOST_DEATHS} times in {request.method}: give more "
            "workers, or machines with more memory"
        )

    def _send(self, actor: _Actor, method: str, parcel: Parcel) -> None:
        """Send a request to an actor."""
        self.traffic.add(parcel)
        remote = getattr(actor.handle, method)
        if method == "answer":
            reply, state = remote.options(num_returns=2).remote(parcel)
            actor.request = _Request(method, parcel, reply, state)
        elif method == "hold":
            reply, held, state = remote.options(num_returns=3).remote(parcel)
            actor.request = _Request(method, parcel, reply, state, held)
        elif method == "piece":
            actor.request = _Request(method, parcel, remote.remote(parcel, actor.held))
        else:
            actor.request = _Request(method, parcel, remote.remote(parcel))

    def _replace(self, actor: _Actor) -> None:
        """Make an actor that has died again, with its clients as they were before the call."""
        self._begin(actor)
        state = actor.state
        if state is None:
            state = packed(Outcome(None, None, ()))
        try:
            restored = actor.handle.restore.remote(state, packed(self.events()))
            _value(opened(self._ray.get(restored, timeout=START_SECONDS)))
        except self._ray.exceptions.RayActorError:
            return  # counts as the next death
        except self._ray.exceptions.GetTimeoutError:
            raise self._no_room() from None
        except self._ray.exceptions.RayError:
            raise RunFolderError(
                "clients' states were lost with a machine of the cluster: resume the run from its "
                "folder"
            ) from None

    def states(self) -> list[ClientState]:
        """Return the clients' state, block by block."""
        missing = [b for b, actor in enumerate(self._actors) if actor.state is None]
        asked = self.ask("state", dict.fromkeys(missing))
        states: list[ClientState] = []
        for b, actor in enumerate(self._actors):
            state = asked[b] if b in asked else _value(opened(self._ray.get(actor.state)))
            states.append(state)
        return states

    def restore(self, states: Sequence[ClientState]) -> None:
        """Set the clients' states.

        Args:
            states: block by block; another number of them makes other blocks.
        """
        if len(states) != len(self._actors):
            self._kill()
            self._make(len(states))
        for actor, state in zip(self._actors, states, strict=True):
            actor.state = self._ray.put(packed(Outcome(state, None, ())))
        self._restore_all()

    def learn(self) -> None:
        """Hold the clients to a target that a resumed run has spent a part of."""
        nothing = packed(Outcome(None, None, ()))
        events = packed(self.events())
        replies = [actor.handle.restore.remote(nothing, events) for actor in self._actors]
        for reply in self._ray.get(replies):
            _value(opened(reply))

    def _restore_all(self) -> None:
        none = packed([])
        replies = [actor.handle.restore.remote(actor.state, none) for actor in self._actors]
        for reply in self._ray.get(replies):
            _value(opened(reply))

    def _kill(self) -> None:
        for actor in getattr(self, "_actors", []):
            if actor.handle is not None:
                self._ray.kill(actor.handle)
        self._actors = []

    def close(self) -> None:
        """End the actors, and Ray where the run has started it."""
        self._kill()
        if self._started:
            self._ray.shutdown()


def blocks_of(clients: int, workers: int) -> list[list[int]]:
    """Return the positions of the clients of each block.

    Blocks begin where parts of sums over large updates begin, so that few parts have clients of two
    blocks, unless a block would be more than a tenth larger than equal ones are.

    Args:
        clients: number of clients.
        workers: number of blocks, at most as many.
    """
    even = np.array_split(np.arange(clients), workers)
    firsts = [FIRST_CHUNK * round(part[0] / FIRST_CHUNK) for part in even[1:]]
    blocks = np.split(np.arange(clients), firsts)
    if max(map(len, blocks)) > UNEVEN * len(even[0]):
        blocks = even
    return [[int(position) for position in block] for block in blocks]


class BlockTransport(Transport):
    """Transport to clients in blocks.

    Args:
        blocks: the actors.
        lost: returns the clients that do not reply to a call, as a network would lose them.
    """

    def __init__(self, blocks: RayBlocks, lost: Callable[[Call], set[int]]) -> None:
        self._blocks = blocks
        self._lost = lost

    def exchange(self, call: Call) -> Response:
        """Send each block its part of a call, and join the replies in the order of the call.

        Args:
            call: requests to clients.
        """
        return _Replies(self._blocks, call, self._lost(call)).part(call)

    def stream(self, call: Call, chunk: int | None = None) -> Iterator[tuple[Call, Response]]:
        """Ask all blocks at once, and yield the replies in the parts of a run in one process.

        Args:
            call: requests to clients.
            chunk: clients of a part; None takes as many as memory allows.
        """
        replies = _Replies(self._blocks, call, self._lost(call))
        yield from in_chunks(replies.part, call, chunk)

    def relay(self, call: Call, answer: Response) -> None:
        """Do nothing, since all servers are in one process."""


class _Replies:
    """Replies of all blocks to one call, taken block by block as parts of the call ask for them.

    Replies that the server only adds stay in their blocks, which send the sums of each part. A part
    with clients of several blocks comes as single replies.

    Args:
        blocks: the actors, which are asked at once.
        call: the call.
        lost: clients that do not reply.
    """

    def __init__(self, blocks: RayBlocks, call: Call, lost: set[int]) -> None:
        self._blocks = blocks
        self._lost = lost
        self._responses: dict[int, Response] = {}
        self._group_of = dict(zip(call.to, call.adds, strict=False))  # empty where nothing is added
        self._settled: set[int] = set()  # blocks that have answered
        parts: dict[int, list[int]] = {}
        for k, client in enumerate(call.to):
            if client not in lost:
                parts.setdefault(blocks.block_of[client], []).append(k)
        # clients of each block whose replies were not taken yet
        self._left = {b: len(positions) for b, positions in parts.items()}
        requests = {b: call.select(positions) for b, positions in parts.items()}
        blocks.send("hold" if call.adds else "answer", requests)

    def part(self, part: Call) -> Response:
        """Return the replies of some clients of the call, in its order.

        Args:
            part: the call to these clients.
        """
        wanted = [client for client in part.to if client not in self._lost]
        if not wanted:
            return Response((), None)
        by_block: dict[int, list[int]] = {}
        for client in wanted:
            by_block.setdefault(self._blocks.block_of[client], []).append(client)
        if self._group_of:
            pieces = self._held_pieces(by_block)
        else:
            pieces = [self._piece(b, clients) for b, clients in by_block.items()]
        return _joined(pieces, wanted)

    def _held_pieces(self, by_block: Mapping[int, Sequence[int]]) -> list[Response]:
        """Return replies that blocks hold: their sums, where one block has all of them."""
        for b in by_block:
            if b not in self._settled:
                self._blocks.reply(b)
                self._settled.add(b)
        wanted = {b: Piece(clients) for b, clients in by_block.items()}
        if len(by_block) == 1:
            ((b, clients),) = by_block.items()
            wanted = {b: Piece(clients, {client: self._group_of[client] for client in clients})}
        return list(self._blocks.ask("piece", wanted).values())

    def _piece(self, b: int, clients: Sequence[int]) -> Response:
        """Return the replies of some clients of a block."""
        if b not in self._responses:
            self._responses[b] = self._blocks.reply(b)
        response = self._responses[b]
        self._left[b] -= len(clients)
        if not self._left[b]:  # no later part needs it
            del self._responses[b]
        return response.of(clients)


def _joined(pieces: Sequence[Response], order: Sequence[int]) -> Response:
    """Return responses as one, whose clients are in an order.

    Args:
        pieces: of blocks.
        order: all clients of the pieces.
    """
    if len(pieces) == 1:
        return pieces[0]
    ids = [client for piece in pieces for client in piece.ids]
    reply = None
    if ids:
        reply = stack([piece.reply for piece in pieces if piece.ids])
    receipts = [piece.receipts_at(k) for piece in pieces for k in range(len(piece.ids))]
    refused = {client: code for piece in pieces for client, code in piece.refused.items()}
    whole = Response(tuple(ids), reply, tuple(receipts) if any(receipts) else (), refused)
    if ids == list(order):
        return whole
    return whole.of(order)


class BlockedClients(ObservedClients):
    """The clients' half of a run whose clients are in blocks.

    The experimenter's scores are computed in the blocks, from the server's state. At the end the
    models come to this process.

    Args:
        method: with the hyper-parameters of the run.
        federation: the clients and their data.
        settings: of the run.
        secrets: secret random streams of the run.

    Raises:
        UsageError: what only clients in one process can do, or Ray is missing.
    """

    def __init__(
        self, method: Method, federation: Federation, settings: Settings, secrets: Randomness
    ) -> None:
        check_engine(settings)
        _check(method)
        super().__init__(method, federation, settings)
        self.device = choose_device(settings.device)
        config = method.config(federation, settings.dtype)
        carried = _without_result(method)
        placed = replace(settings, device=self.device.type)

        def plan(positions: Sequence[int]) -> BlockPlan:
            own = replace(federation.select(map(at, positions)), truth=None)
            return BlockPlan(carried, own, placed, positions, config, secrets)

        self.blocks = RayBlocks(plan, len(federation), settings.workers, self.device)
        self._elsewhere = _Elsewhere(method, federation, self._gathered)
        self._end: list[BlockEnd] = []

    def transport(self, lost: Callable[[Call], set[int]]) -> BlockTransport:
        """Return the transport to the clients.

        Args:
            lost: returns the clients that do not reply to a call.
        """
        return BlockTransport(self.blocks, lost)

    def close(self) -> None:
        """End the processes of the blocks."""
        self.blocks.close()

    @property
    def samples(self) -> dict[int, int]:
        """Return the number of samples that each client trains on, where these are public."""
        if not self.method.privacy.per_example:
            return {}
        return dict(enumerate(self._gathered("sizes", None)))

    def part(self) -> CheckpointPart:
        """Return the clients' part of a checkpoint, which must stay private."""
        return CheckpointPart(
            BlockStates,
            lambda: BlockStates(self.blocks.states()),
            lambda states: self.blocks.restore(states.blocks),
        )

    def hold(self, events: Callable[[], list[Any]]) -> None:
        """Hold the clients to a target ε.

        Args:
            events: returns those of the ledger so far.
        """
        self.blocks.events = events
        self.blocks.learn()

    @property
    def observed(self) -> Any:
        """Return what stands in for the clients' object."""
        return self._elsewhere

    def evaluate(self, state: Any) -> NDArray[np.float64]:
        """Return each client's score after a round, (m,).

        Args:
            state: the server's state.
        """
        return np.asarray(self._gathered("evaluate", state))

    def models(self, state: Any) -> Rows:
        """Return the model that each client keeps, (m, d).

        Args:
            state: the server's final state.
        """
        replies = self.blocks.ask("end", dict.fromkeys(range(len(self.blocks)), state))
        self._end = list(replies.values())
        return _all_rows([end.models for end in self._end])

    def scores(self, models: Rows) -> NDArray[np.float64]:
        """Return each client's score on its test data, (m,).

        Args:
            models: (m, d) of the clients.
        """
        parts = {b: models.select(part) for b, part in enumerate(self.blocks.positions)}
        return np.concatenate(list(self.blocks.ask("scores", parts).values()))

    def tuned_once(self, models: Rows) -> Rows:
        """Return the clients' models after a round in which each trains its own alone, (m, d).

        Args:
            models: (m, d) of the clients.
        """
        parts = {b: models.select(part) for b, part in enumerate(self.blocks.positions)}
        return _all_rows(list(self.blocks.ask("tuned_once", parts).values()))

    def final(self, models: Rows, labels: Sequence[int]) -> ClientState:
        """Return what clients keep of the run: their models and secrets.

        Args:
            models: (m, d) of the clients at the end.
            labels: (m,) each client's cluster.
        """
        assert models.index is not None
        shared = next((end.shared for end in self._end if end.shared is not None), None)
        parts = [end.untuned for end in self._end if end.untuned is not None]
        untuned = _all_rows(parts) if parts else None
        extra = shared_rows(shared, untuned, labels, self.unshared)
        secrets = _all_secrets([state.secrets for state in self.blocks.states()])
        return ClientState(models.table, list(models.index), secrets, extra=extra)

    @property
    def unshared(self) -> list[int]:
        """Return the numbers of clients whose final model was trained alone."""
        return sorted(client for end in self._end for client in end.unshared)

    def chance(self, models: Rows, scores: NDArray[np.float64]) -> Chance:
        """Return a comparison of the models with chance.

        Args:
            models: (m, d) of the clients.
            scores: (m,) on their test data.
        """
        dtypes = {"float32": torch.float32, "float64": torch.float64}
        flat = initial_model(self.method, self.federation)
        cohort = trainer_of(flat)(
            self.federation,
            flat,
            Randomness(self.federation.seed),
            self.device,
            dtypes[self.settings.dtype],
            validation_share=self.method.training.validation_share(self.method),
        )
        return at_chance(cohort, models, scores)

    def _gathered(self, method: str, content: Any) -> list[Any]:
        """Return what all blocks reply of each client, in the order of the clients."""
        replies = self.blocks.ask(method, dict.fromkeys(range(len(self.blocks)), content))
        return [value for reply in replies.values() for value in reply]


class _Elsewhere:
    """Stands in for the clients' object where an observer reads it.

    It has the network, and what the clients' class lists in `by_client`.

    Args:
        method: whose observer it is.
        federation: the clients.
        gathered: asks all blocks.
    """

    def __init__(
        self, method: Method, federation: Federation, gathered: Callable[[str, Any], list[Any]]
    ) -> None:
        self._name = type(method).__name__
        self._class = method.client
        self._gathered = gathered
        self.cohort = SimpleNamespace(model=initial_model(method, federation))

    def __getattr__(self, name: str) -> Any:
        if name in self._class.by_client:
            if callable(getattr(self._class, name, None)):
                return lambda *arguments: self._gathered("entries", (name, arguments))
            return self._gathered("entries", (name, ()))
        raise UsageError(
            f"the observer of {self._name} reads {name} of its clients, which are in other "
            "processes: leave engine out"
        )


def _check(method: Method) -> None:
    """Raise UsageError for a run whose clients have to be in one process."""
    if experiment_of(method).before_pipeline is not None:
        raise UsageError(
            "an experiment changes what clients reply in one process: leave engine out"
        )


def _without_result(method: Method) -> Method:
    """Return a copy of a method without what it was fitted to."""
    carried = copy.copy(method)
    for name in ("result_", ATTRIBUTE):
        vars(carried).pop(name, None)
    return carried


def _start(ray: Any) -> None:
    """Connect to the cluster of RAY_ADDRESS, or start Ray on this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of later versions of Ray
        if "RAY_ADDRESS" in os.environ:
            ray.init(log_to_driver=False)
        else:
            ray.init(include_dashboard=False, log_to_driver=False)


def _value(outcome: Outcome) -> Any:
    """Return what a block replied, or raise its error; its warnings are given here."""
    for text in outcome.warnings:
        warnings.warn(text, SecureClusterWarning, stacklevel=2)
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


def _all_rows(blocks: Sequence[Rows]) -> Rows:
    """Return the rows of all blocks, of which equal ones are stored once."""
    unique: dict[bytes, int] = {}
    table: list[torch.Tensor] = []
    index: list[int] = []
    for rows in blocks:
        found: dict[int, int] = {}
        for row in rows.index or range(len(rows.table)):
            if row not in found:
                values = rows.table[row]
                key = values.cpu().numpy().tobytes()
                if key not in unique:
                    unique[key] = len(table)
                    table.append(values)
                found[row] = unique[key]
            index.append(found[row])
    return Rows(torch.stack(table), tuple(index))


def _all_secrets(blocks: Sequence[Secrets]) -> Secrets:
    """Return the secrets of the clients of all blocks."""
    whole = Secrets()
    for secrets in blocks:
        _add(whole, secrets)
    return whole


def _add(whole: Any, part: Any) -> None:
    """Add the entries of a part's dictionaries to those of the whole."""
    for each in fields(part):
        entries = getattr(part, each.name)
        if isinstance(entries, PairwiseKeys | AuthorityKeys):
            _add(getattr(whole, each.name), entries)
        elif each.name == "records":
            for protection, records in entries.items():
                whole.records.setdefault(protection, {}).update(records)
        else:
            getattr(whole, each.name).update(entries)
