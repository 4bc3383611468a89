"""The server's half of a run and the clients' are two objects that share nothing but frames."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import two_clusters

from securecluster import CFL, FLHC, Federation
from securecluster.core.atomic_files import MARKER
from securecluster.core.devices import cpu_threads
from securecluster.core.randomness import Randomness
from securecluster.core.serialization import pack, unpack
from securecluster.errors import SecureClusterWarning
from securecluster.messaging import wire
from securecluster.messaging.messages import Rows, Shared
from securecluster.messaging.transcript import Transcript
from securecluster.parties.client_state import ClientState
from securecluster.parties.deployment import Deployment
from securecluster.parties.derived import call_types
from securecluster.parties.method import Method
from securecluster.parties.server_half import ServerHalf
from securecluster.protocols import ClusteringProtocol, OneShot, Settings
from securecluster.protocols.common.messages import Update
from securecluster.results.fitted_state import UNTUNED
from securecluster.runs.clients_half import ClientsHalf, shared_rows
from securecluster.runtime import transport as transports
from securecluster.runtime.transport import Framed, Replay, Transport, WithAuthority

SEEDED = Settings(dtype="float64", keys_from_seed=True, transcript="full", threads=1)
METHODS: dict[str, ClusteringProtocol] = {
    "cfl": CFL(rounds=4, epochs=1, model="linear", mask="permutation"),
    "flhc": FLHC(rounds=4, pre_rounds=1, epochs=1, model="linear", aggregation="secagg"),
    "oneshot": OneShot(rounds=3, epochs=1, model="linear", relevance="ckks"),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let halves compute as `fit` does, since products are rounded by the number of threads."""
    with cpu_threads(1):
        yield


@pytest.fixture(scope="module")
def tiny() -> Federation:
    return two_clusters(4, 20)


class StoppedError(Exception):
    """A process that ends after a round."""


def server_of(
    method: ClusteringProtocol, federation: Federation, transport: Transport
) -> ServerHalf:
    """Return the server's half of a run, which gets the configuration and a transport."""
    config = method.config(federation, SEEDED.dtype)
    secrets = Randomness(federation.seed)
    return ServerHalf.over(transport, method, config, Transcript("full"), secrets=secrets)


def frames_to(
    method: ClusteringProtocol, federation: Federation, clients: ClientsHalf
) -> Transport:
    """Return a transport of bytes to some clients, and to the key authority if there is one."""

    def replies(name: str) -> type:
        return call_types(method, name)[1]

    doors = dict.fromkeys(range(len(federation)), clients.endpoint.answer_frame)
    transport: Transport = Framed(doors, replies)
    authority = Deployment(method, method.config(federation, SEEDED.dtype)).authority()
    if authority is None:
        return transport
    return WithAuthority(transport, authority.answer_frame, replies)


@pytest.mark.parametrize("name", METHODS)
def test_two_halves_that_exchange_bytes_make_the_run_that_fit_makes(
    name: str, tiny: Federation
) -> None:
    method = METHODS[name]
    whole = method.fit(tiny, SEEDED).result_
    clients = ClientsHalf.of(method, tiny, SEEDED)
    server = server_of(method, tiny, frames_to(method, tiny, clients))
    run = server.started()
    state = server.final_state(run)
    assert pack(state) == whole.server_state_
    assert server.net.state.ledger.events == whole.ledger_.events
    assert server.transcript.totals() == whole.bytes_
    models = clients.models(state)
    assert clients.labels(state) == whole.labels_.tolist()
    np.testing.assert_array_equal(clients.scores(models), whole.scores_)
    kept = clients.final(models, clients.labels(state))
    same_rows = kept.index == whole.kept_.clients.index
    assert same_rows and torch.equal(kept.table, whole.kept_.clients.table)
    assert kept.secrets.seed == whole.kept_.clients.secrets.seed
    # nobody observes a server by itself: its history has what it knows
    assert [line["up"] for line in run.history] == [line["up"] for line in whole.history_]
    assert not {"clusters", "accuracy", "ari"} & run.history[-1].keys()


@pytest.mark.parametrize("name", METHODS)
def test_a_server_alone_ends_in_the_state_of_the_run(name: str, tiny: Federation) -> None:
    method = METHODS[name]
    whole = method.fit(tiny, SEEDED).result_
    server = server_of(method, tiny, Replay(whole.transcript_))
    assert pack(server.final_state(server.started())) == whole.server_state_


def test_each_half_goes_on_from_what_it_keeps_itself(tiny: Federation, tmp_path: Path) -> None:
    method = METHODS["cfl"]
    whole = method.fit(tiny, SEEDED).result_
    clients = ClientsHalf.of(method, tiny, SEEDED)
    kept: list[bytes] = []

    def stop(line: Any) -> None:
        kept.append(pack(clients.part().read()))
        if line["round"] == 2:
            raise StoppedError

    server = server_of(method, tiny, frames_to(method, tiny, clients))
    (tmp_path / MARKER).touch()  # of run folders, in which earlier checkpoints are removed
    with pytest.raises(StoppedError):
        server.final_state(server.started(tmp_path, report=stop))
    # the server's checkpoint has nothing of the clients
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    assert not any(path.name.startswith("clients") for path in checkpoint.iterdir())

    clients = ClientsHalf.of(method, tiny, SEEDED)
    clients.part().restore(unpack(kept[-1], ClientState))
    server = server_of(method, tiny, frames_to(method, tiny, clients))
    run = server.started(tmp_path)
    assert run.resumed
    state = server.final_state(run)
    assert pack(state) == whole.server_state_
    models = clients.models(state)
    final = clients.final(models, clients.labels(state))
    final.extra |= clients.held_out(models).kept
    assert pack(final) == pack(whole.kept_.clients)


def test_a_protocol_is_a_method() -> None:
    method: Method = METHODS["cfl"]
    wanted = {*Method.__annotations__, *vars(Method)} - {*vars(type("", (), {})), *dir(object)}
    public = {name for name in wanted if not name.startswith("_")}
    assert all(hasattr(method, name) for name in public)


# --- a client that lies about the form of its replies ---


def liar(endpoint: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a client whose updates are changed on their way."""

    def answer(data: bytes) -> bytes:
        frame = endpoint.answer_frame(data)
        if wire.peek(data).method != "train":
            return frame
        header, sent, receipts = wire.decode_reply(frame, Update)
        lie = dataclasses.replace(sent, delta=Rows(change(sent.delta.values)))
        return wire.encode(header, lie, receipts=receipts)

    return answer


LIES = {
    "longer": (lambda rows: torch.cat([rows, rows], 1), "frame"),
    "of another type": (lambda rows: rows.float(), "frame"),
    "not finite": (lambda rows: rows * torch.nan, "update"),
    "too large": (lambda rows: rows + 1e200, "update"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_reply_that_the_run_does_not_allow_refuses_its_client_and_not_the_run(
    lie: str, tiny: Federation
) -> None:
    method = CFL(rounds=3, epochs=1, model="linear")
    clients = ClientsHalf.of(method, tiny, SEEDED)
    change, code = LIES[lie]
    doors = dict.fromkeys(range(len(tiny)), clients.endpoint.answer_frame)
    doors[2] = liar(clients.endpoint, change)
    check = Deployment(method, method.config(tiny, SEEDED.dtype)).reply_check()
    transport = Framed(doors, lambda name: call_types(method, name)[1], strict=False, check=check)
    server = server_of(method, tiny, transport)
    run = server.started()
    with pytest.warns(SecureClusterWarning):
        state = server.final_state(run)
    assert len(run.history) == 3
    assert server.net.state.refused == {2: {code: [1, 2, 3]}}
    # a replay of what the server has kept ends in the same state
    again = server_of(method, tiny, Replay(server.transcript))
    assert pack(again.final_state(again.started())) == pack(state)


@dataclasses.dataclass(frozen=True, eq=False)
class Sent:
    """A reply of one field."""

    value: Any


def test_replies_of_two_forms_that_the_run_allows_are_those_of_most_clients() -> None:
    replies = {client: Rows(torch.zeros(1, 2)) for client in range(4)}
    replies[1] = Rows(torch.zeros(1, 3))
    assert transports._of_another_form({i: Sent(rows) for i, rows in replies.items()}) == [1]
    assert transports._of_another_form({0: Sent(None), 1: Sent(None)}) == []
    assert transports._of_another_form({0: Sent(None), 1: Sent(replies[0])}) == [1]
    shared = {i: Sent(Shared(torch.tensor([i // 3]))) for i in range(4)}
    assert transports._of_another_form(shared) == [3]


def test_a_label_that_no_client_has_takes_no_model_from_others() -> None:
    untuned = Rows(torch.arange(6.0).reshape(3, 2), (0, 1, 2))
    kept = shared_rows(None, untuned, [3, 1, 3], unshared=[0])
    # clients that choose alone may leave 0 and 2 to nobody
    assert [row.tolist() for row in kept[UNTUNED][[1, 3]]] == [[2.0, 3.0], [4.0, 5.0]]
