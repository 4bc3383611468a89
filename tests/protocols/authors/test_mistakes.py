"""Mistakes of a protocol's author: each ends in one sentence, or fails a check that every protocol
must pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any

import cases
import pytest
import torch
from rich.console import Console
from sixth import Client, Mean, Sixth, State

from securecluster import Federation, Rotation, protocols
from securecluster.cli.main import main
from securecluster.core import installed_packages
from securecluster.errors import PolicyError, SecureClusterError, UsageError
from securecluster.messaging.bounds import Real
from securecluster.messaging.messages import Empty, Rows
from securecluster.protocols import FedAvg, conformance, registry
from securecluster.protocols.common.averages.averaging import AveragingState, average_clusters
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.declaration import protocol
from securecluster.reports.privacy_report import show
from securecluster.runtime import endpoint
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import GATHER, answers
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel
from securecluster.statements.privacy_section import section
from securecluster.training.local_trainer import LocalTrainer

MASKS = ("none", *cases.MASKS)


@pytest.fixture
def clients() -> Federation:
    """Return eight clients, every other one of which has images that are upside down."""
    return Federation.simulate(
        "digits", scenario=Rotation(clusters=2), clients=8, samples=40, seed=0
    )


@pytest.fixture
def newcomers() -> Federation:
    """Return six clients of the same kinds."""
    return Federation.simulate(
        "digits", scenario=Rotation(clusters=2), clients=6, samples=40, seed=1
    )


def made(kind: type[Sixth], **params: Any) -> Sixth:
    return kind(**{"model": "linear", "epochs": 1, **params})


def with_client(client: type[Client]) -> type[Sixth]:
    """Return the protocol with other clients."""

    @dataclass
    class Mutant(Sixth):
        """The same."""

    Mutant.client = client
    return Mutant


@pytest.mark.few(1)
@pytest.mark.parametrize("mask", ["none", "rotation", cases.exhaustive("permutation")])
def test_without_a_mistake_the_sixth_protocol_passes_every_check(
    mask: str, clients: Federation, newcomers: Federation
) -> None:
    conformance.check(partial(made, Sixth), clients, newcomers, masks=("none", mask)).require()
    fitted = made(Sixth, rounds=1, mask=mask).fit(clients)
    assert fitted.agreement_ is not None and fitted.agreement_["exact"]


class Free(Client):
    """Declares that its mean is of nobody's data."""

    @answers(GATHER, fresh=True, private=False, public=("mean",))
    def tell(self, context: CallContext, query: Empty) -> Mean:
        return Mean(Rows(self.means(context)))


class Derived(Client):
    """Declares that its mean was released before."""

    @answers(GATHER, through=("mean",), fresh=True, derived=True)
    def tell(self, context: CallContext, query: Empty) -> Mean:
        return Mean(Rows(self.means(context)))


@pytest.mark.parametrize("client", [Free, Derived])
@pytest.mark.parametrize("mask", ["none", "permutation"])
def test_a_reply_that_carries_data_and_says_that_it_is_free(
    client: type[Client], mask: str, clients: Federation
) -> None:
    with pytest.raises(PolicyError, match=r"tell tells nothing new .* reads cohort\.inputs"):
        made(with_client(client), mask=mask).fit(clients)


@pytest.mark.parametrize(
    ("client", "sentence"),
    [(Free, "tell depends on data: it is private"), (Derived, "tell .* not derived")],
)
def test_a_reply_of_data_that_were_kept_is_found_by_a_check(
    client: type[Client], sentence: str, clients: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(cohort: Any, k: int) -> torch.Tensor:
        samples: torch.Tensor = cohort._x[cohort._offsets[k] : cohort._offsets[k + 1]]
        return samples  # what a client kept from an earlier call is read without a trace

    monkeypatch.setattr(LocalTrainer, "inputs", kept)
    with pytest.raises(AssertionError, match=sentence):
        conformance.check_free_replies(partial(made, with_client(client)), clients, mask="none")


@dataclass(frozen=True, eq=False)
class Status:
    """Client to server: that it is well, and a sample of its data."""

    load: Annotated[Rows, Real(("width",))]  # (b, D)


@dataclass(frozen=True, eq=False)
class Note:
    """Client to server: a single number, as a scalar."""

    load: float


def reporting(reply: type, **declared: Any) -> type[Client]:
    """Return clients that also tell something of their data beside an honest mean."""

    class Reporting(Client):
        @answers(GATHER, **declared)
        def status(self, context: CallContext, query: Empty) -> Any:
            told = [self.cohort.start[:64] + k for k in context.positions]  # of nobody's data
            if declared.get("private", True):
                told = [self.cohort.inputs(k).flatten(1)[0] for k in context.positions]
            if reply is Note:
                return Note(float(told[0].sum()))
            return Status(Rows(torch.stack(told)))

    Reporting.status.__annotations__["return"] = reply
    return Reporting


def asking(client: type[Client]) -> type[Sixth]:
    """Return a protocol whose server asks for the status of every client first."""

    class Asking(with_client(client)):  # type: ignore[misc]
        def run_server(self, net: ServerChannel, run: Run) -> State:
            net.gather(client.status, Empty(), to=net.clients)  # type: ignore[attr-defined]
            return super().run_server(net, run)

    return Asking


@pytest.mark.parametrize("reply", [Status, Note])
def test_samples_in_a_reply_that_is_said_not_to_be_private_are_refused(
    reply: type, clients: Federation
) -> None:
    client = reporting(reply, private=False)
    sentence = r"Reporting\.status would send load with private=False, at no cost to ε: leave"
    with pytest.raises(UsageError, match=sentence) as told:
        protocol(type("Leaky", (Sixth,), {"client": client, "__doc__": "One.", "name": "leaky"}))
    assert one_sentence(told.value)
    # a class that no declaration has checked
    with pytest.raises(PolicyError, match=sentence):
        made(asking(client), rounds=1, **cases.NOISE).fit(clients)


def test_a_number_in_a_private_reply_makes_epsilon_infinite_whatever_its_kind(
    clients: Federation,
) -> None:
    fitted = made(asking(reporting(Note)), rounds=1, **cases.NOISE).fit(clients)
    assert ("status", "load") in fitted.ledger_.exact()
    assert math.isinf(fitted.ledger_.epsilon)


def test_what_is_declared_public_stands_in_ledger_and_report(
    clients: Federation, capsys: pytest.CaptureFixture[str]
) -> None:
    client = reporting(Status, private=False, public=("load",))
    fitted = made(asking(client), rounds=1, **cases.NOISE).fit(clients)
    assert fitted.ledger_.declared_public() == [("status", "load")]
    events = [event for event in fitted.ledger_.events if event.method == "status"]
    assert [event.ids for event in events] == [tuple(range(len(clients)))]
    without = made(Sixth, rounds=1, **cases.NOISE).fit(clients)
    assert fitted.ledger_.price(1e-5) == without.ledger_.price(1e-5)
    privacy = section(fitted.result_)
    (declared,) = privacy["declared_public"]
    assert declared.startswith("load of status: ") and "nothing checks" in declared
    assert "declared_public" not in section(without.result_)
    show(Console(width=500), privacy)  # type: ignore[arg-type]
    assert "declared public" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("declared", "sentence"),
    [
        ({"public": ("load",)}, "names public fields of a private reply"),
        ({"public": "load", "private": False}, "gives public as a text"),
    ],
)
def test_public_fields_are_of_replies_that_are_not_private(
    declared: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        reporting(Status, **declared)


@dataclass
class OtherMask(Sixth):
    """Compares newcomers under the mask of their own call."""

    def assign_newcomers(self, net: ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        return self.nearest(net, state, to, None)


@pytest.mark.few(2)
@pytest.mark.parametrize("mask", MASKS[1:])
def test_newcomers_that_are_compared_under_another_mask(
    mask: str, clients: Federation, newcomers: Federation
) -> None:
    with pytest.raises(AssertionError):
        conformance.check_newcomers(partial(made, OtherMask), clients, newcomers, ("none", mask))


@dataclass
class Forgetful(Sixth):
    """Clusters anew when it goes on, and never sends the last average."""

    def run_server(self, net: ServerChannel, run: Run) -> State:
        found = self.cluster(net)
        state = State(
            found.labels, PendingUpdates.start(len(net.clients), fresh=self.mask != "none"), found
        )
        for t in run.rounds("train", state, self.rounds):
            average_clusters(net, state, self.participation, t)
        return state


def test_a_server_that_clusters_anew_when_it_goes_on(clients: Federation, tmp_path: Path) -> None:
    run = conformance.example(partial(made, Forgetful), clients)
    with pytest.raises(AssertionError):
        conformance.check_resume(run, tmp_path)


def test_a_server_that_does_not_deliver_the_last_average(clients: Federation) -> None:
    with pytest.raises(AssertionError):
        conformance.check_everyone_catches_up(partial(made, Forgetful), clients)


# Mistakes in what a method is: they end where the class is written, or in the first call.


def one_sentence(error: BaseException) -> bool:
    """Return whether an error tells its author's mistake in one line."""
    return isinstance(error, SecureClusterError) and "\n" not in str(error) and len(str(error)) > 20


def other_name(self: Any, context: CallContext, hello: Empty) -> Mean:
    raise NotImplementedError


def other_order(self: Any, query: Empty, context: CallContext) -> Mean:
    raise NotImplementedError


def no_query(self: Any, context: CallContext) -> Mean:
    raise NotImplementedError


def query_unknown(self: Any, context: CallContext, query) -> Mean:  # type: ignore[no-untyped-def]
    raise NotImplementedError


def no_return(self: Any, context: CallContext, query: Empty):  # type: ignore[no-untyped-def]
    raise NotImplementedError


def returns_nothing(self: Any, context: CallContext, query: Empty) -> None:
    raise NotImplementedError


def good(self: Any, context: CallContext, query: Empty) -> Mean:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (
            other_name,
            r"cannot call other_name\(self, context, hello\): .* takes \(self, context, query\)",
        ),
        (other_order, r"cannot call other_order\(self, query, context\)"),
        (no_query, r"cannot call no_query\(self, context\)"),
        (query_unknown, "query_unknown does not say what its query is"),
        (no_return, "no_return does not say what its return is"),
        (returns_nothing, "returns_nothing does not say what its return is"),
    ],
)
def test_a_method_that_the_server_cannot_call_is_refused_where_it_is_written(
    method: Any, sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence) as told:
        answers(GATHER)(method)
    assert one_sentence(told.value)


@pytest.mark.parametrize(
    ("via", "declared", "sentence"),
    [
        ((), {}, "names the verbs"),
        (("gathr",), {}, "one or more of gather, sum, pairs"),
        ((GATHER,), {"trough": ("mean",)}, "knows no 'trough': it takes through,"),
        ((GATHER,), {"sealed": ("mean",)}, "seals mean: name it in through"),
    ],
)
def test_a_declaration_that_cannot_hold_is_refused_where_it_is_written(
    via: tuple[str, ...], declared: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence) as told:
        answers(*via, **declared)(good)
    assert one_sentence(told.value)


class Bare(Client):
    """Replies with a tensor."""

    @answers(GATHER, through=("mean",))
    def tell(self, context: CallContext, query: Empty) -> Mean:
        return Mean(self.means(context))  # type: ignore[arg-type]


class Single(Client):
    """Replies with one row for all of its clients."""

    @answers(GATHER, through=("mean",))
    def tell(self, context: CallContext, query: Empty) -> Mean:
        return Mean(Rows(self.means(context)[:1]))


class Silent(Client):
    """Forgets to return its reply."""

    @answers(GATHER, through=("mean",))
    def tell(self, context: CallContext, query: Empty) -> Mean:
        self.means(context)  # type: ignore[return]


class Misnamed(Client):
    """Masks a field that its reply has not."""

    @answers(GATHER, through=("means",))
    def tell(self, context: CallContext, query: Empty) -> Mean:
        return Mean(Rows(self.means(context)))


class Unknown(Client):
    """Replies with a class that is not there."""

    @answers(GATHER, through=("mean",))
    def tell(self, context: CallContext, query: Empty) -> Average:  # type: ignore[name-defined]  # noqa: F821
        return Mean(Rows(self.means(context)))


class Naked(Client):
    """Replies with no message."""

    @answers(GATHER)
    def tell(self, context: CallContext, query: Empty) -> torch.Tensor:
        return self.means(context)


@dataclass(frozen=True, eq=False)
class Odd:
    """A message that cannot be sent."""

    mean: torch.Tensor


class Untyped(Client):
    """Replies with a message that cannot be sent."""

    @answers(GATHER, through=("mean",))
    def tell(self, context: CallContext, query: Empty) -> Odd:
        return Odd(self.means(context))


@pytest.mark.parametrize(
    ("client", "sentence"),
    [
        (Bare, r"Bare\.tell replied with a Tensor as mean: put it into Rows"),
        (Single, r"Single\.tell replied with 1 row\(s\) of mean for 8 client"),
        (Silent, r"Silent\.tell replied with a NoneType: it declares a Mean"),
        (Misnamed, r"Misnamed\.tell names 'means': a Mean has mean"),
        (Unknown, r"Unknown\.tell is annotated with a class that is not there: name 'Average'"),
        (Naked, r"Naked\.tell's return is Tensor, no message"),
        (Untyped, r"Untyped\.tell's return cannot be sent: Odd\.mean"),
    ],
)
@pytest.mark.parametrize("mask", ["none", "permutation"])
def test_a_reply_that_is_not_what_its_method_declares(
    client: type[Client], sentence: str, mask: str, clients: Federation
) -> None:
    with pytest.raises(UsageError, match=sentence) as told:
        made(with_client(client), rounds=1, mask=mask).fit(clients)
    assert one_sentence(told.value)


def test_a_loop_that_does_not_say_what_it_returns_is_refused_where_it_is_written() -> None:
    for told in (None, "None"):

        def serve(self: Any, net: ServerChannel, run: Run) -> Any: ...

        serve.__annotations__["return"] = told
        with pytest.raises(
            UsageError, match=r"Loop\.run_server does not say what it returns: .* -> State"
        ) as found:
            type("Loop", (FedAvg,), {"run_server": serve})
        assert one_sentence(found.value)
    del serve.__annotations__["return"]
    with pytest.raises(UsageError, match="does not say what it returns"):
        type("Loop", (FedAvg,), {"run_server": serve})


class Nothing(Sixth):
    """Forgets to return its state."""

    def run_server(self, net: ServerChannel, run: Run) -> State:
        super().run_server(net, run)  # type: ignore[return]


class Other(Sixth):
    """Returns another class than it says."""

    def run_server(self, net: ServerChannel, run: Run) -> State:
        return AveragingState(
            [0] * len(net.clients), PendingUpdates.start(len(net.clients), fresh=True)
        )  # type: ignore[return-value]


class Labels(Sixth):
    """Returns labels alone."""

    def run_server(self, net: ServerChannel, run: Run) -> list[int]:  # type: ignore[override]
        return super().run_server(net, run).labels


class Absent(Sixth):
    """Returns a class that is not there."""

    def run_server(self, net: ServerChannel, run: Run) -> Clusters:  # type: ignore[name-defined]  # noqa: F821
        return super().run_server(net, run)


LOOPS = [
    (
        Nothing,
        r"Nothing\.run_server returned nothing, and declares State: end it with `return state`",
    ),
    (Other, r"Other\.run_server returned AveragingState, and declares State"),
    (Labels, r"Labels\.run_server returns list.*: it must be a dataclass with labels"),
    (Absent, r"Absent\.run_server is annotated with a class that is not there: name 'Clusters'"),
]


@pytest.mark.parametrize(("kind", "sentence"), LOOPS)
def test_a_loop_that_does_not_return_what_it_says(
    kind: type[Sixth], sentence: str, clients: Federation, tmp_path: Path
) -> None:
    for folder in (None, tmp_path / "run"):
        with pytest.raises(UsageError, match=sentence) as told:
            made(kind, rounds=1).fit(clients, folder=folder)
        assert one_sentence(told.value)


ASKS = """
class Broken(FedAvg):
    name, client = "broken", Client
    def run_server(self, net, run) -> AveragingState:
        net.gather(Client.tell, Empty(), to=net.clients)
        return super().run_server(net, run)
"""
BROKEN = {
    "loop": (
        "class Broken(FedAvg):\n    name = 'broken'\n    def run_server(self, net, run):\n        "
        "super().run_server(net, run)\n",
        "Broken.run_server does not say what it returns",
    ),
    "silent loop": (
        "class Broken(FedAvg):\n    name = 'broken'\n    def run_server(self, net, run) -> "
        "AveragingState:\n        super().run_server(net, run)\n",
        "Broken.run_server returned nothing",
    ),
    "parameter": (
        "class Client(SumClient):\n    @answers('gather')\n"
        "    def tell(self, context, hello: Empty) -> Ack:\n"
        "        return Ack()\n" + ASKS,
        "the server cannot call Client.tell(self, context, hello)",
    ),
    "annotation": (
        "class Client(SumClient):\n    @answers('gather')\n    def tell(self, context, query: "
        "Empty):\n        return Ack()\n" + ASKS,
        "Client.tell does not say what its return is",
    ),
    "tensor": (
        "class Client(SumClient):\n    @answers('gather')\n"
        "    def tell(self, context, query: Empty) -> Ack:\n"
        "        return self.cohort.start\n" + ASKS,
        "Client.tell replied with a Tensor: it declares a Ack",
    ),
}
IMPORTS = """
from dataclasses import dataclass
from securecluster.protocols.common.averages.averaging import AveragingState, SumClient
from securecluster.runtime.endpoint import answers
from securecluster.messaging.messages import Ack, Empty
from securecluster.protocols.fedavg import FedAvg
"""


@pytest.mark.parametrize("name", BROKEN)
def test_on_the_command_line_a_mistake_is_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, sentence = BROKEN[name]
    module = "broken_" + name.replace(" ", "_")
    (tmp_path / f"{module}.py").write_text(IMPORTS + text)
    monkeypatch.syspath_prepend(tmp_path)
    declared = EntryPoint("broken", f"{module}:Broken", registry.GROUP)
    monkeypatch.setattr(installed_packages, "points", lambda group: [declared])
    small = [
        "--clients", "4", "--clusters", "2", "--samples", "20", "--rounds", "1", "--epochs", "1",
        "--quiet",
    ]  # fmt: skip
    assert main(["run", "broken", *small, "--out", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("securecluster: ") and sentence in told
    assert told.count("\n") == 1


def test_the_published_methods_say_what_no_mask_covers() -> None:
    """Losses, relevance, sample counts, NSIM's layers, in secure sums choices and their weights,
    shares of classes in signatures, their mean number, and their coordinates in directions of the
    server, moments of latent vectors: nothing else of numbers leaves without a mask.
    """
    found = set()
    for kind in (getattr(protocols, name) for name in protocols.__all__):
        client = getattr(kind, "client", TrainingClient)
        for name in dir(client):
            release = getattr(getattr(client, name), "__release__", None)
            if isinstance(release, endpoint.ReleasePolicy):
                found |= set(release.unmasked)
    others = {"coordinates", "losses", "mean", "moments", "shares"}
    assert found == {"count", "layer", "loss", "row", "size", "weight"} | others
