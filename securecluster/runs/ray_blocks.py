"""Blocks of a run's clients in Ray actors.

An actor for each GPU or CPU core holds a block of consecutive clients as one batched endpoint. A
call is one message to each block that it concerns, whose shared tensors move once, and the replies
of a block come back as one batch. The server's half, the ledger and the transcript stay in the
process that begins the run.

Clients' numbers are those of a run in one process, since their draws depend on their numbers, and
parts of sums are those of one process, too. Batched products round by the size of a batch on some
processors; elsewhere results are equal to the bit.

After each call an actor leaves its clients' state in Ray's object store. An actor that dies is made
again with the state before the call, and asked again: clients draw the same noise for the same
question. The store of a machine is lost with it; then the run goes on from its folder, as after all
else that goes wrong in Ray (`ray_cluster`).
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.client_names import at
from securecluster.core.devices import choose_device
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.errors import SecureClusterWarning, UsageError
from securecluster.messaging.chunks import FIRST_CHUNK
from securecluster.messaging.messages import Call, Rows
from securecluster.parties.client_state import ClientState
from securecluster.parties.derived import initial_model
from securecluster.parties.experiment import ATTRIBUTE, experiment_of
from securecluster.parties.method import Method
from securecluster.privacy.masking.key_agreement import AuthorityKeys, PairwiseKeys, Secrets
from securecluster.runs.block import Block, BlockEnd, BlockPlan, Outcome, shared_rows
from securecluster.runs.block_transport import BlockTransport
from securecluster.runs.observed_clients import ObservedClients
from securecluster.runs.packed_messages import PackedMessage, opened, packed, size
from securecluster.runs.ray_cluster import RESUME, ActorLostError, RayCluster
from securecluster.runtime.run import CheckpointPart
from securecluster.runtime.settings import Settings, check_engine
from securecluster.training.baselines import HeldOut
from securecluster.training.chance_level import Chance, at_chance
from securecluster.training.foreign_trainer import trainer_of

if TYPE_CHECKING:
    from securecluster.data.federation import Federation

# times that actors of one block may die in one call
MOST_DEATHS = 3
# until all actors have started
START_SECONDS = 600
# how much larger than equal blocks the largest may be
UNEVEN = 1.1


@dataclass
class Traffic:
    """Messages that have moved between processes since a run began.

    Args:
        messages: requests to blocks, and their replies.
        bytes: of these messages.
    """

    messages: int = 0
    bytes: int = 0

    def add(self, packed_message: PackedMessage) -> None:
        """Count a message.

        Args:
            parcel: that moves.
        """
        self.messages += 1
        self.bytes += size(packed_message)


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
    packed_message: PackedMessage
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
        self._actors: list[_Actor] = []
        self._cluster = RayCluster()
        try:
            self._make(workers or max(1, self._cluster.count(self._resource)))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._actors)

    @property
    def handles(self) -> list[Any]:
        """Return Ray's handles of the actors, block by block."""
        return [actor.handle for actor in self._actors]

    def _make(self, workers: int) -> None:
        """Make the actors of all blocks.

        Raises:
            UsageError: Ray has no GPU, or no room for them.
        """
        resource_count = self._cluster.count(self._resource)
        if resource_count < 1:
            raise UsageError(
                f"Ray has no {self._resource}: start it with one, or give --device cpu"
            )
        workers = min(workers, self._clients)
        # several blocks share a GPU or a core where there are more blocks
        self._share = 1 / math.ceil(workers / resource_count)
        positions = blocks_of(self._clients, workers)
        self.block_of = {k: b for b, block in enumerate(positions) for k in block}
        self.positions = positions
        self._actors = [_Actor(self._plan(block)) for block in positions]
        for actor in self._actors:
            self._begin(actor)
        ready = [self._ready(actor) for actor in self._actors]
        for actor, reply in zip(self._actors, ready, strict=True):
            self._outlived(actor, reply, self._ready)

    def _begin(self, actor: _Actor) -> None:
        """Start an actor, without any state of its clients."""
        if actor.handle is not None:  # it may only be out of reach
            self._cluster.kill(actor.handle)
        options: dict[str, Any] = {"num_cpus": self._share, "scheduling_strategy": "SPREAD"}
        if self._resource == "GPU":
            options = {**options, "num_cpus": 0, "num_gpus": self._share}
        actor.handle = self._cluster.begin(Block, options, packed(actor.plan))

    def _ready(self, actor: _Actor) -> Any:
        """Return a reference that is there when an actor has started."""
        return self._cluster.ready(actor.handle)

    def _restored(self, actor: _Actor) -> Any:
        """Have an actor restore its clients as they were, and return the reference to its reply."""
        state = actor.state
        if state is None:
            state = packed(Outcome(None, None, ()))
        return self._cluster.call(actor.handle, "restore", state, packed(self.events()))

    def _outlived(
        self,
        actor: _Actor,
        reply: Any,
        again: Callable[[_Actor], Any],
        seconds: float | None = START_SECONDS,
    ) -> Any:
        """Return a reply, also of an actor that dies before it replies.

        Args:
            actor: that was asked.
            reply: reference to its reply.
            again: asks an actor that was made again.
            seconds: to wait for the first reply; None waits as long as it takes.

        Raises:
            UsageError: its processes die again and again, or Ray has no room for them.
            RunFolderError: Ray cannot go on.
        """
        for _ in range(MOST_DEATHS):
            try:
                return self._cluster.got(reply, seconds)
            except ActorLostError:
                self._begin(actor)
                reply, seconds = again(actor), START_SECONDS
            except TimeoutError:
                raise UsageError(
                    f"Ray has no room for {len(self._actors)} workers: stop its other jobs, or "
                    "give fewer workers"
                ) from None
        raise self._died(actor, "the beginning")

    def _died(self, actor: _Actor, method: str) -> UsageError:
        """Return the error for an actor whose processes die again and again."""
        return UsageError(
            f"the process of block {self._actors.index(actor)} died {MOST_DEATHS} times in "
            f"{method}: give machines with more memory and {RESUME}, or begin it with more workers"
        )

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
        packed_messages: dict[int, PackedMessage] = {}
        for b, content in contents.items():
            # one content for several blocks is packed once
            packed_message = packed_messages.get(id(content))
            if packed_message is None:
                packed_message = packed_messages[id(content)] = packed(content)
            self._send(self._actors[b], method, packed_message)

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
        for _ in range(MOST_DEATHS):
            request = actor.pending
            try:
                packed_message = self._cluster.got(request.reply)
            except ActorLostError:
                self._replace(actor)
                self._send(actor, request.method, request.packed_message)
                continue
            actor.request = None
            if request.state is not None:
                actor.state = request.state
            if request.held is not None:
                actor.held = request.held
            self.traffic.add(packed_message)
            return _value(opened(packed_message))
        raise self._died(actor, actor.pending.method)

    def _send(self, actor: _Actor, method: str, packed_message: PackedMessage) -> None:
        """Send a request to an actor."""
        self.traffic.add(packed_message)
        call = self._cluster.call
        if method == "answer":
            reply, state = call(actor.handle, method, packed_message, returns=2)
            actor.request = _Request(method, packed_message, reply, state)
        elif method == "hold":
            reply, held, state = call(actor.handle, method, packed_message, returns=3)
            actor.request = _Request(method, packed_message, reply, state, held)
        elif method == "piece":
            reply = call(actor.handle, method, packed_message, actor.held)
            actor.request = _Request(method, packed_message, reply)
        else:
            actor.request = _Request(
                method, packed_message, call(actor.handle, method, packed_message)
            )

    def _replace(self, actor: _Actor) -> None:
        """Make an actor that has died again, with its clients as they were before the call."""
        self._begin(actor)
        _value(opened(self._outlived(actor, self._restored(actor), self._restored)))

    def states(self) -> list[ClientState]:
        """Return the clients' state, block by block."""
        missing = [b for b, actor in enumerate(self._actors) if actor.state is None]
        fetched = self.ask("state", dict.fromkeys(missing))
        states: list[ClientState] = []
        for b, actor in enumerate(self._actors):
            if b in fetched:
                state = fetched[b]
            else:
                outcome = opened(self._cluster.got(actor.state))
                state = _value(outcome)
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
            actor.state = self._cluster.put(packed(Outcome(state, None, ())))
        self._restore_all([actor.state for actor in self._actors], [])

    def learn(self) -> None:
        """Hold the clients to a target that a resumed run has spent a part of."""
        nothing = packed(Outcome(None, None, ()))
        self._restore_all([nothing] * len(self._actors), self.events())

    def _restore_all(self, states: Sequence[Any], events: Sequence[Any]) -> None:
        """Have all actors restore states, and count events of the ledger.

        An actor that dies restores its clients as they were, and counts all events.
        """
        packed_message = packed(events)
        replies = [
            self._cluster.call(actor.handle, "restore", state, packed_message)
            for actor, state in zip(self._actors, states, strict=True)
        ]
        for actor, reply in zip(self._actors, replies, strict=True):
            _value(opened(self._outlived(actor, reply, self._restored, None)))

    def _kill(self) -> None:
        for actor in self._actors:
            if actor.handle is not None:
                self._cluster.kill(actor.handle)
        self._actors = []

    def close(self) -> None:
        """End the actors, and Ray where the run has started it."""
        self._kill()
        self._cluster.close()


def blocks_of(clients: int, workers: int) -> list[list[int]]:
    """Return the positions of the clients of each block.

    Blocks begin where parts of sums over large updates begin, so that few parts have clients of two
    blocks, unless a block would be more than a tenth larger than equal ones are.

    Args:
        clients: number of clients.
        workers: number of blocks, at most as many.
    """
    even = np.array_split(np.arange(clients), workers)
    firsts = [FIRST_CHUNK * round(chunk[0] / FIRST_CHUNK) for chunk in even[1:]]
    blocks = np.split(np.arange(clients), firsts)
    if max(map(len, blocks)) > UNEVEN * len(even[0]):
        blocks = even
    return [[int(position) for position in block] for block in blocks]


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
            block_federation = replace(federation.select(map(at, positions)), truth=None)
            return BlockPlan(carried, block_federation, placed, positions, config, secrets)

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
        return np.concatenate(self._by_models("scores", models))

    def held_out(self, models: Rows) -> HeldOut:
        """Return what models and baselines say of the clients' test samples.

        Args:
            models: (m, d) of the clients.
        """
        blocks: list[HeldOut] = self._by_models("held_out", models)
        kept = [block.kept for block in blocks]
        return HeldOut(
            np.concatenate([block.scores for block in blocks]),
            np.concatenate([block.baselines for block in blocks]),
            {name: torch.cat([tensors[name] for tensors in kept]) for name in kept[0]},
        )

    def tuned_once(self, models: Rows) -> Rows:
        """Return the clients' models after a round in which each trains its own alone, (m, d).

        Args:
            models: (m, d) of the clients.
        """
        return _all_rows(self._by_models("tuned_once", models))

    def final(self, models: Rows, labels: Sequence[int]) -> ClientState:
        """Return what clients keep of the run: their models and secrets.

        Args:
            models: (m, d) of the clients at the end.
            labels: (m,) each client's cluster.
        """
        assert models.index is not None
        shared = next((end.shared for end in self._end if end.shared is not None), None)
        untuned_blocks = [end.untuned for end in self._end if end.untuned is not None]
        untuned = _all_rows(untuned_blocks) if untuned_blocks else None
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

    def _by_models(self, method: str, models: Rows) -> list[Any]:
        """Return what each block replies of its clients' models, (m, d) of all."""
        parts = {b: models.select(positions) for b, positions in enumerate(self.blocks.positions)}
        return list(self.blocks.ask(method, parts).values())

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
        index_of: dict[int, int] = {}
        for row in rows.index or range(len(rows.table)):
            if row not in index_of:
                values = rows.table[row]
                key = values.cpu().numpy().tobytes()
                if key not in unique:
                    unique[key] = len(table)
                    table.append(values)
                index_of[row] = unique[key]
            index.append(index_of[row])
    return Rows(torch.stack(table), tuple(index))


def _all_secrets(blocks: Sequence[Secrets]) -> Secrets:
    """Return the secrets of the clients of all blocks."""
    merged = Secrets()
    for secrets in blocks:
        _add(merged, secrets)
    return merged


def _add(target: Any, source: Any) -> None:
    """Add the entries of a source's dictionaries to those of a target."""
    for entry in fields(source):
        entries = getattr(source, entry.name)
        if isinstance(entries, PairwiseKeys | AuthorityKeys):
            _add(getattr(target, entry.name), entries)
        elif entry.name == "records":
            for protection, records in entries.items():
                target.records.setdefault(protection, {}).update(records)
        else:
            getattr(target, entry.name).update(entries)
