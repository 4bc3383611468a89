"""Servers that send clients each other's replies, and messages that may hold anything."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import cases
import pytest
import torch
from sixth import Client, Mean, Sixth, State

from securecluster import Federation
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.bounds import Real, Upto
from securecluster.messaging.messages import Ack, Empty, Picks, Rows, Shared
from securecluster.protocols import conformance
from securecluster.protocols.common.declaration import protocol
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import GATHER, answers, message_types
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel
from securecluster.statements.privacy_section import section


@dataclass(frozen=True, eq=False)
class Broadcast:
    """Server to client: the means of all clients, as they arrived."""

    rows: Annotated[Picks, Real((Upto("others", "clients"), "width"), sent="mean")]


class Listener(Client):
    """Clients that are told the means of all others."""

    @answers(GATHER, private=False)
    def hear(self, context: CallContext, query: Broadcast) -> Ack:
        """Receive the means."""
        return Ack()

    @answers(GATHER, private=False, relays=("rows",))
    def hear_relayed(self, context: CallContext, query: Broadcast) -> Ack:
        """Receive the means, which is declared."""
        return Ack()


@protocol
class Tells(Sixth):
    """The sixth protocol, whose server tells everyone the means of all before it begins."""

    name = "tells"
    client = Listener
    listen: str = "hear"
    """client method that receives the means"""

    def run_server(self, net: ServerChannel, run: Run) -> State:
        """Send all means to all clients first."""
        told = net.gather(Listener.tell, Empty(), to=net.clients)
        everything = tuple(range(len(told.ids)))
        query = Broadcast(Picks(told.rows.mean.values.cpu(), (everything,) * len(net.clients)))
        net.gather(getattr(Listener, self.listen), query, to=net.clients)
        return super().run_server(net, run)


SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "linear"}


@pytest.mark.parametrize("mask", ["none", "rotation"])
def test_a_server_that_sends_everyones_replies_to_everyone_is_refused(mask: str) -> None:
    federation = cases.two_clusters(6, 24)
    with pytest.raises(PolicyError, match=r"hear would bring .*in rows of .*relays=") as told:
        Tells(mask=mask, **SMALL).fit(federation)
    assert "\n" not in str(told.value)


def test_rows_with_a_trusted_servers_noise_are_still_their_clients() -> None:
    noise: dict[str, Any] = {"clip": 1.0, "noise": 0.7, **cases.WAYS["central"]}
    with pytest.raises(PolicyError, match=r"hear would bring"):
        Tells(mask="none", **noise, **SMALL).fit(cases.two_clusters(6, 24))


def test_a_declared_relay_runs_resumes_replays_and_is_in_the_report(tmp_path: Path) -> None:
    federation = cases.two_clusters(6, 24)
    make = partial(Tells, listen="hear_relayed", mask="rotation", **SMALL)
    with pytest.raises(KeyboardInterrupt):
        make().fit(federation, folder=tmp_path, report=cases.interrupt_after(1))
    resumed = make().fit(federation, folder=tmp_path)
    assert list(resumed.labels_) == list(make().fit(federation).labels_)
    conformance.check_replay(conformance.example(make, federation))
    views = section(resumed.result_)["query_view"]
    (relayed,) = (view for view in views if "rows of single clients" in view)
    assert "their mean" in relayed and "every client can take off" in relayed
    assert "sent as rows with hear_relayed" in relayed


@pytest.mark.parametrize("name", ["cfl", "cfl compress", "rdpcfl"])
@pytest.mark.parametrize("mask", ["none", "rotation"])
def test_an_average_over_the_one_client_that_replied_is_no_alarm(name: str, mask: str) -> None:
    def all_but_one(call: Any) -> set[int]:
        sends = call.method in ("train", "send_compressed_update", "contribute")
        return set(call.to[1:]) if sends else set()

    made = cases.variant(name, mask=mask, rounds=3, epochs=1, model="linear")
    cases.serve(made, cases.two_clusters(6, 24), all_but_one)


@pytest.mark.parametrize(
    ("protocol_name", "sentence"),
    [
        ("srfca sealed", "rows of single clients: their delta, sealed, which every client that"),
        (
            "srfca",
            "rows of single clients: their delta, under a mask that every client can take off",
        ),
        ("oneshot", "rows of single clients: their vectors, sealed"),
        ("fedavg", "averages of delta, under a mask that every client can take off (sent as means"),
        ("cfl", "over one client it is that client's own"),
    ],
)
def test_every_report_says_what_queries_brought_to_clients(
    protocol_name: str, sentence: str
) -> None:
    made = cases.variant(protocol_name, mask="permutation", rounds=2, epochs=1, model="linear")
    views = section(made.fit(cases.two_clusters(6, 24)).result_)["query_view"]
    assert any(sentence in view for view in views), views


def test_a_method_that_sends_no_updates_has_no_averages_in_its_report() -> None:
    made = cases.variant("local", rounds=1, epochs=1, model="linear")
    assert "query_view" not in section(made.fit(cases.two_clusters(6, 24)).result_)


@dataclass(frozen=True, eq=False)
class Unbounded:
    """Client to server: as many numbers as the client likes."""

    mean: Rows


@dataclass(frozen=True, eq=False)
class UnboundedPicks:
    """Server to client: as many rows as the server likes."""

    others: Picks


@dataclass(frozen=True, eq=False)
class UnboundedShared:
    """Server to client: as many numbers as the server likes."""

    both: Shared | None


class Wide(Client):
    """Clients that send 300 times as many numbers as a sample has."""

    @answers(GATHER, through=("mean",), fresh=True)
    def tell(self, context: CallContext, query: Empty) -> Unbounded:
        """Return the mean of each client's samples, many times over."""
        return Unbounded(Rows(self.means(context).repeat(1, 300)))


class AskedWidely(Client):
    """Clients that receive as many rows as the server likes."""

    @answers(GATHER, through=("mean",), fresh=True)
    def tell(self, context: CallContext, query: UnboundedPicks) -> Mean:
        """Return the mean of each client's samples."""
        return Mean(Rows(self.means(context)))


class AskedForAll(Client):
    """Clients that receive as many numbers as the server likes."""

    @answers(GATHER, through=("mean",), fresh=True)
    def tell(self, context: CallContext, query: UnboundedShared) -> Mean:
        """Return the mean of each client's samples."""
        return Mean(Rows(self.means(context)))


@pytest.mark.parametrize(
    ("client", "sentence"),
    [
        (
            Wide,
            r"Wide\.tell's return may hold anything as Unbounded\.mean: give it a bound, such as "
            r"mean: Annotated\[Rows, Real\(\(\"width\",\)\)\]",
        ),
        (AskedWidely, r"query .*UnboundedPicks\.others: .*Annotated\[Picks, Real\(\(Upto"),
        (AskedForAll, r"query .*UnboundedShared\.both: .*Annotated\[Shared, Real"),
    ],
)
def test_a_message_without_bounds_is_refused_where_its_protocol_is_declared(
    client: type[Client], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence) as told:
        protocol(type("Open", (Sixth,), {"client": client, "__doc__": "One.", "name": "open"}))
    assert "\n" not in str(told.value)


def test_a_message_without_bounds_is_refused_where_a_method_is_first_used() -> None:
    class Undeclared(Sixth):
        client = Wide

    federation: Federation = cases.two_clusters(6, 24)
    with pytest.raises(UsageError, match=r"Wide\.tell's return may hold anything"):
        Undeclared(**SMALL).fit(federation)


def test_relays_names_fields_of_the_query() -> None:
    class Misspelt(Client):
        @answers(GATHER, private=False, relays=("row",))
        def hear(self, context: CallContext, query: Broadcast) -> Ack:
            return Ack()

    with pytest.raises(UsageError, match=r"relays 'row': its query, Broadcast, has rows"):
        message_types(Misspelt, "hear")
    with pytest.raises(UsageError, match=r'gives relays as a text: write relays=\("rows",\)'):
        answers(GATHER, relays="rows")(Listener.hear)


def test_rows_of_pure_server_numbers_may_go_to_everyone() -> None:
    torch.manual_seed(0)
    served = cases.serve(Tells(listen="hear_relayed", **SMALL), cases.two_clusters(6, 24))
    table = torch.rand(1, 64, dtype=torch.float64)
    query = Broadcast(Picks(table, ((0,),) * 6))
    assert len(served.net.gather(Listener.hear, query, to=range(6)).ids) == 6
