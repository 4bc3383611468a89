"""No block of a secure sum is of few clients: what the server, a client, and a liar read."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from cases import DOUBLE, FULL, run_server, serve, two_clusters

from securecluster import Federation, LabelSwap
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.messages import Call, Response, Rows, Shared
from securecluster.parties.deployment import build_network
from securecluster.parties.endpoints import build_client
from securecluster.protocols import IFCA, Hidden, Settings
from securecluster.protocols.common.averages.counted_blocks import BlockCount, FilledBlocks
from securecluster.protocols.hidden.client import HiddenClient
from securecluster.protocols.ifca.hidden_client import HiddenChoiceClient
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import SUM
from securecluster.runtime.transport import InProcess

# every sum of either protocol whose rows have a block for each of several groups, and its field
BLOCKS: dict[type, dict[str, str]] = {
    HiddenClient: {
        "send_parts": "parts",
        "send_counted_parts": "parts",
        "send_cell": "cells",
        "send_step": "steps",
        "send_counted_step": "steps",
        "contribute_block": "blocks",
        "contribute_counted": "blocks",
    },
    HiddenChoiceClient: {"contribute_blocks": "blocks"},
}
SUMS: dict[str, Any] = {"aggregation": "secagg", "mask": "none", "model": "linear", "epochs": 1}
Row = dict[int, torch.Tensor]


def as_declared(wrapper: Any, method: Any) -> Any:
    """A function that stands for a client method, with what the method declares."""
    for mark in ("__release__", "__annotations__", "__name__", "__qualname__", "__module__"):
        setattr(wrapper, mark, getattr(method, mark))
    wrapper.__wrapped__ = method
    return wrapper


class Rowwatch:
    """The rows that clients added to each sum of blocks, by method and call."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rows: dict[tuple[str, int], Row] = {}
        for kind, fields in BLOCKS.items():
            for name, field in fields.items():
                patch.setattr(kind, name, self._watched(getattr(kind, name), name, field))

    def _watched(self, method: Any, name: str, field: str) -> Any:
        def watched(client: Any, context: CallContext, query: Any) -> Any:
            reply = method(client, context, query)
            sent = self.rows.setdefault((name, context.step), {})
            for i, row in zip(context.ids, getattr(reply, field).values, strict=True):
                sent[i] = row.reshape(len(row), -1).clone()
            weight = getattr(reply, "weight", None)
            if weight is not None:
                for i, row in zip(context.ids, weight.values, strict=True):
                    assert torch.equal(row > 0, sent[i].abs().sum(1) > 0)
            return reply

        return as_declared(watched, method)

    def occupancy(self, fitted: Any) -> dict[str, list[int]]:
        """How many of the clients of each sum fill each block that anybody fills, by method."""
        found: dict[str, list[int]] = {}
        for outcome in fitted.verb_outcomes():
            sent = self.rows.get((outcome.method, outcome.step))
            if sent is None:
                continue
            for members in outcome.groups:
                for block in range(len(next(iter(sent.values())))):
                    inside = [i for i in members if sent[i][block].any()]
                    if inside:
                        found.setdefault(outcome.method, []).append(len(inside))
        return found


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Rowwatch:
    return Rowwatch(monkeypatch)


def federation(clients: int, clusters: int, seed: int) -> Federation:
    return Federation.simulate(
        "digits", scenario=LabelSwap(clusters=clusters), clients=clients, samples=30, seed=seed
    )


# --- the server ---

RUNS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "a dozen": (12, 4, 0, {}),
    "a dozen, half of the rounds": (12, 4, 7, {"participation": 0.5}),
    "without cohorts": (12, 4, 0, {"participation": 0.5, "cohort_size": 0}),
    "with residuals": (12, 4, 0, {"residuals": True}),
    "by label maps": (12, 4, 0, {"points": "labels"}),
    "with weights": (12, 4, 0, {"exact_weights": True, "participation": 0.5, "cohort_size": 0}),
    "cohorts of twelve": (24, 4, 1, {"participation": 0.5, "cohort_size": 12}),
    "four choosers": (12, 3, 2, {"least_choosers": 4, "participation": 0.5, "cohort_size": 0}),
}


@pytest.mark.always
@pytest.mark.few(2)
@pytest.mark.parametrize("name", list(RUNS))
def test_no_block_of_hidden_is_of_fewer_clients_than_chosen(name: str, watch: Rowwatch) -> None:
    clients, k, seed, options = RUNS[name]
    made = Hidden(k=k, rounds=4, **{**SUMS, **options})
    fitted = made.fit(federation(clients, k, seed), FULL)
    found = watch.occupancy(fitted)
    assert "contribute_counted" in found
    assert ("send_counted_step" in found) == (options.get("points") != "labels")
    assert ("send_counted_parts" in found) == bool(options.get("residuals"))
    assert min(min(counts) for counts in found.values()) >= made.least_choosers


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_no_model_of_ifca_is_of_fewer_clients_than_chosen(
    seed: int, share: float, watch: Rowwatch
) -> None:
    made = IFCA(k=4, rounds=6, starts=1, participation=share, cohort_size=0, **SUMS)
    fitted = made.fit(federation(12, 4, seed), FULL)
    found = watch.occupancy(fitted)
    assert min(found["contribute_blocks"]) >= 3


@pytest.mark.parametrize("dropout", [0.1, 0.3])
@pytest.mark.parametrize("size", [None, 0])
def test_clients_that_are_lost_leave_no_block_to_few(
    dropout: float, size: int | None, watch: Rowwatch
) -> None:
    made = Hidden(k=2, rounds=6, cohort_size=size, **SUMS)
    fitted = made.fit(federation(8, 2, 0), Settings(transcript="full", dropout=dropout))
    assert min(watch.occupancy(fitted)["contribute_counted"], default=3) >= 3


# --- a client, honest or not ---


def read_by(client: int, watch: Rowwatch, fitted: Any, method: str) -> set[int]:
    """Whose update is the average of a block but for the client's own part, over all rounds."""
    read = set()
    for outcome in fitted.verb_outcomes():
        if outcome.method != method:
            continue
        sent = watch.rows[method, outcome.step]
        for members in outcome.groups:
            for block in range(len(next(iter(sent.values())))):
                others = [i for i in members if i != client and sent[i][block].any()]
                if len(others) == 1:
                    read.add(others[0])
    return read


@pytest.mark.parametrize("seed", [0])
def test_an_honest_client_of_hidden_reads_no_other(seed: int, watch: Rowwatch) -> None:
    made = Hidden(k=4, rounds=6, participation=0.5, **SUMS)
    fitted = made.fit(federation(12, 4, seed), FULL)
    for client in range(12):
        assert read_by(client, watch, fitted, "contribute_counted") == set()


class Liars:
    """The first clients, which join a model that too few others chose, and send zeros.

    They know what the others chose last, which is more than they are told.
    """

    def __init__(self, patch: pytest.MonkeyPatch, liars: int, least: int) -> None:
        self.joined = 0
        self._liars = liars
        self._least = least
        self._last: Counter[int] = Counter()
        self._take = HiddenChoiceClient._take
        self._contribute = HiddenChoiceClient.contribute_blocks
        patch.setattr(HiddenChoiceClient, "_take", self._lying())
        zeros = as_declared(self._zeros(), self._contribute)
        patch.setattr(HiddenChoiceClient, "contribute_blocks", zeros)

    def _lying(self) -> Any:
        def take(client: Any, context: CallContext, start: int, losses: torch.Tensor) -> Any:
            losses = losses.clone()
            rare = [model for model in range(5) if 0 < self._last[model] < self._least]
            for n, i in enumerate(context.ids):
                if i < self._liars and rare:
                    losses[n] = 1e9
                    losses[n, rare[0]] = 0.0
                    self.joined += 1
            choice = self._take(client, context, start, losses)
            models = choice.model.values.tolist()
            honest = [m for i, m in zip(context.ids, models, strict=True) if i >= self._liars]
            self._last = Counter(honest)
            return choice

        return take

    def _zeros(self) -> Any:
        def contribute(client: Any, context: CallContext, query: Any) -> Any:
            reply = self._contribute(client, context, query)
            for n, i in enumerate(context.ids):
                if i < self._liars:
                    reply.blocks.row(n).zero_()
            return reply

        return contribute


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("liars", "least", "seed"), [(1, 3, 0), (1, 3, 1), (1, 3, 2), (2, 4, 0), (2, 4, 1)]
)
def test_liars_that_name_a_model_and_send_zeros_read_nobody(
    liars: int, least: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying = Liars(monkeypatch, liars, least)
    # watched last, so that rows are seen as they leave
    seen = Rowwatch(monkeypatch)
    made = IFCA(k=5, rounds=8, starts=1, least_choosers=least, **SUMS)
    fitted = made.fit(federation(9, 5, seed), FULL)
    assert lying.joined
    for counts in seen.occupancy(fitted).values():
        assert min(counts) >= 2


def test_a_client_is_told_of_no_count(watch: Rowwatch) -> None:
    fitted = Hidden(k=4, rounds=2, **SUMS).fit(federation(12, 4, 0), FULL)
    told = [
        fitted.transcript_.content(k)[0].query
        for k, entry in enumerate(fitted.transcript_.entries)
        if entry.method in ("contribute_counted", "send_counted_step")
    ]
    assert told
    for query in told:
        assert set(query.filled.value.tolist()) <= {0, 1}
        assert query.least == query.counted == 12


# --- who is alone ---


@pytest.fixture
def lone_labels(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[int]], None]:
    """A function that gives clients the clusters that it is told."""

    def fix(labels: Sequence[int]) -> None:
        def assign(self: Any, context: CallContext, query: Any) -> Any:
            answer = original(self, context, query)
            self._labels[context.positions] = [labels[i] for i in context.ids]
            return answer

        original = HiddenClient.assign
        monkeypatch.setattr(HiddenClient, "assign", as_declared(assign, original))

    return fix


@pytest.fixture(scope="module")
def eight() -> Federation:
    return two_clusters(8, 30)


def small(**options: Any) -> Any:
    return Hidden(**{"k": 2, "rounds": 2, **SUMS, **options})


def test_clients_of_a_small_cluster_train_alone_and_send_nothing(
    eight: Federation, lone_labels: Any, watch: Rowwatch
) -> None:
    lone_labels([0, 0, 0, 0, 0, 0, 1, 1])
    made = small()
    fitted = made.fit(eight, FULL)
    assert set(watch.occupancy(fitted)["contribute_counted"]) == {6}
    models = fitted.client_models_.values
    assert not torch.equal(models[6], models[7])
    assert torch.equal(models[0], models[5])
    served = serve(small(), eight)
    assert served.endpoint.client.unshared == {6, 7}


def test_an_average_of_its_cluster_replaces_what_a_client_trained_alone(
    eight: Federation, lone_labels: Any
) -> None:
    lone_labels([0, 0, 0, 0, 0, 1, 1, 1])

    def gone(call: Call) -> set[int]:
        return {5, 6} if call.method == "count_block" and call.round == 1 else set()

    made = small(cohort_size=0)
    served = serve(made, eight, gone)
    client = served.endpoint.client
    assert not client.unshared
    held = made.observer.final_models(client, served.state).values
    assert torch.equal(held[5], held[7])
    once = serve(small(cohort_size=0, rounds=1), eight, gone)
    assert once.endpoint.client.unshared == {7}


# --- a server that lies, and frames that come again ---


def rounds_of(made: Any, federation: Federation, lie: Callable[[Call], Call]) -> None:
    """Run a server that changes its requests for blocks."""
    endpoint = build_client(made, federation, DOUBLE)

    def answer(call: Call) -> Response:
        return endpoint.answer(lie(call))

    net = build_network(made, InProcess(answer), made.config(federation, "float64"))
    run_server(made, net)


def changed(method: str, **changes: Any) -> Callable[[Call], Call]:
    def lie(call: Call) -> Call:
        if call.method != method:
            return call
        return dataclasses.replace(call, query=dataclasses.replace(call.query, **changes))

    return lie


LIES = {
    "one may be lost in a round": (changed("contribute_counted", least=7), "single client"),
    "one may be lost in a step": (changed("send_counted_step", least=7), "single client"),
    "more blocks": (
        changed("contribute_counted", filled=Shared(torch.tensor([1, 1, 1]))),
        "of 2 blocks is told of 3",
    ),
    "other centres than were counted": (
        changed("send_counted_step", mean=Shared(torch.zeros(10, dtype=torch.float64))),
        "about other blocks",
    ),
    "another call": (changed("contribute_counted", earlier=1), "did not take part|another call"),
}


@pytest.mark.parametrize("name", list(LIES))
def test_a_client_refuses_a_sum_that_was_not_counted(name: str, eight: Federation) -> None:
    lie, words = LIES[name]
    with pytest.raises(PolicyError, match=words):
        rounds_of(small(), eight, lie)


@pytest.mark.parametrize("name", ["send_cell", "send_step", "contribute_block", "send_parts"])
def test_a_run_with_counts_has_no_sums_without(name: str, eight: Federation) -> None:
    served = serve(small(), eight)
    client = served.endpoint.client
    context = CallContext(tuple(range(8)), tuple(range(8)), 9, 999)
    with pytest.raises(PolicyError, match="counts first"):
        getattr(client, name)(context, served.state.centres.message())


def counting_client() -> tuple[Any, CallContext]:
    made = small()
    client = serve(made, two_clusters(8, 30)).endpoint.client
    return client, CallContext(tuple(range(8)), tuple(range(8)), 9, 1000)


def told(**changes: Any) -> FilledBlocks:
    query = FilledBlocks(
        earlier=1000, among="0-7", counted=8, least=8, filled=Shared(torch.tensor([1, 0]))
    )
    return dataclasses.replace(query, **changes)


@pytest.fixture
def counted_client(eight: Federation) -> Iterator[tuple[Any, CallContext, torch.Tensor]]:
    client, context = counting_client()
    about = torch.arange(32, dtype=torch.uint8)
    ones = torch.zeros(8, 2, dtype=torch.bool)
    ones[:, 0] = True
    rows = client.counted(context, ones, about)
    assert isinstance(rows, Rows) and rows.values.sum() == 8
    yield client, context, about


def test_a_repeated_frame_is_answered_and_another_call_or_another_tale_is_not(
    counted_client: Any,
) -> None:
    client, context, about = counted_client
    later = dataclasses.replace(context, step=1001)
    assert client.filled(later, told(), 2, about) == [True, False]
    assert client.filled(later, told(), 2, about) == [True, False]
    for other, query in (
        (dataclasses.replace(context, step=1002), told()),
        (later, told(filled=Shared(torch.tensor([0, 1])))),
    ):
        with pytest.raises(PolicyError, match="something else of the same count"):
            client.filled(other, query, 2, about)


def test_what_was_counted_is_in_a_checkpoint(counted_client: Any) -> None:
    client, context, about = counted_client
    later = dataclasses.replace(context, step=1001)
    client.filled(later, told(), 2, about)
    memory = {name: value.clone() for name, value in client.memory().items()}
    fresh, _ = counting_client()
    fresh.recall(memory)
    assert fresh.filled(later, told(), 2, about) == [True, False]
    with pytest.raises(PolicyError, match="something else of the same count"):
        fresh.filled(dataclasses.replace(context, step=1002), told(), 2, about)


def test_a_client_believes_no_more_blocks_than_clients_can_fill(counted_client: Any) -> None:
    client, context, about = counted_client
    few = told(counted=5, least=5, filled=Shared(torch.tensor([1, 1])))
    with pytest.raises(PolicyError, match="cannot fill as many"):
        client.filled(dataclasses.replace(context, step=1001), few, 2, about)


def test_counts_that_no_clients_can_have_are_given_up(
    eight: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed client that adds two ones; that it may take one away is said in the report."""
    original = HiddenClient.count_block

    def twice(self: Any, context: CallContext, query: Any) -> BlockCount:
        reply: BlockCount = original(self, context, query)
        reply.count.values[0] *= 0
        return reply

    monkeypatch.setattr(HiddenClient, "count_block", as_declared(twice, original))
    served = serve(small(), eight)
    methods = {entry.method for entry in served.transcript.entries}
    assert "count_block" in methods and "contribute_counted" not in methods
    views = small().disclosures().server
    assert any("clients add ones: neither can be checked" in view for view in views)


# --- too few clients ---


def test_too_few_clients_or_too_small_a_cohort_is_refused(eight: Federation) -> None:
    with pytest.raises(UsageError, match=r"8 clients do not fill 3 clusters of 3 .* take k = 2"):
        small(k=3).fit(eight)
    with pytest.raises(UsageError, match=r"cohort_size = 4 .* give 6 or more"):
        small(cohort_size=4).fit(eight)
    with pytest.raises(UsageError, match="least_choosers"):
        small(least_choosers=1).fit(eight)
    # noise covers single rows
    noisy = small(k=3, clip=1.0, noise=1.0, placement="distributed")
    assert "least_choosers" not in noisy.config(eight, "float32")


def test_cohorts_have_three_clients_for_each_block(eight: Federation) -> None:
    fitted = small(participation=0.25).fit(two_clusters(24, 10), FULL)
    sizes = [
        len(group)
        for outcome in fitted.verb_outcomes()
        if outcome.verb == SUM
        for group in outcome.groups
        if len(group)
    ]
    assert min(sizes) == 6 and all(size % 6 == 0 for size in sizes)
