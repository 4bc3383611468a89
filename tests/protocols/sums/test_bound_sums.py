"""Replies in hidden sums are bound to the models that clients were sent, in every protocol.

A server that sends another model to one member of a sum (Pasquini, Francati & Ateniese 2022) is
played between an honest server and its nodes: one node's requests are changed on their way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cases import DOUBLE, VARIANTS, node_each, run_server, serve, stub_pair_network, two_clusters
from test_secure_sums import make, row_dropouts

from securecluster import Federation
from securecluster.errors import SecureClusterError, SecureClusterWarning, UsageError
from securecluster.messaging import wire
from securecluster.messaging.messages import Picks, Rows, Shared
from securecluster.parties.deployment import build_network
from securecluster.parties.derived import call_types
from securecluster.protocols import Local
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.conformance.simulation import with_authority
from securecluster.protocols.registry import PROTOCOLS, protocol_class
from securecluster.runtime.transport import Framed

TARGET = 2
# variants of all protocols that offer secure sums and send clients a model
BOUND = (
    "cfl sketch", "cfl compress", "cfl signature", "cflgp", "fedavg", "finetune", "flhc",
    "flhc sketch", "flux", "hidden", "hidden residuals", "ifca", "local-kmeans", "mrmtl", "nsim",
    "oneshot", "pacfl", "random", "signature", "srfca",
)  # fmt: skip
# a cluster of two has no majority
OTHER = rf"{TARGET} follows from (another model, or other public numbers|several models)"

Rewrite = Callable[[str, Any], Any]  # of a method's query


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(6, 40)


@pytest.fixture(autouse=True)
def small_pair_network(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_pair_network(monkeypatch)


def one_bit(values: torch.Tensor) -> torch.Tensor:
    """Return numbers of which the first differs in its last bit."""
    changed = values.clone()
    width = torch.int64 if values.dtype == torch.float64 else torch.int32
    changed.view(width).view(-1)[0] ^= 1
    return changed


def other_zeros(values: torch.Tensor) -> torch.Tensor:
    """Return numbers with a zero of the other sign in place of each zero."""
    assert bool((values == 0).any())
    return torch.where(values == 0, -values, values)


def with_means(query: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a query with other averages."""
    return dataclasses.replace(query, means=Picks(change(query.means.table), query.means.picks))


def without_one(query: Any) -> Any:
    """Return a query without the last average."""
    picks = tuple(rows[:-1] for rows in query.means.picks)
    return dataclasses.replace(
        query,
        means=Picks(query.means.table, picks),
        steps=Picks(query.steps.table, picks),
        count=Rows(query.count.table - 1, query.count.index),
    )


def of_other_calls(query: Any) -> Any:
    """Return a query whose averages are said to be of other calls."""
    return dataclasses.replace(query, steps=Picks(query.steps.table + 1, query.steps.picks))


def run_with(
    made: Any, federation: Federation, rewrite: Rewrite, strict: bool = True
) -> tuple[Any, list[str]]:
    """Run a protocol over nodes of one client each, of which the target's queries are rewritten.

    Args:
        made: the protocol.
        federation: the clients and their data.
        rewrite: of the target's queries.
        strict: as of `Framed`.

    Returns:
        The server's final state, and the methods whose queries were changed.
    """
    nodes = node_each(made, federation, DOUBLE)
    changed: list[str] = []

    def lied_to(data: bytes) -> bytes:
        method = wire.peek(data).method
        header, query = wire.decode(data, nodes[TARGET]._message_types(method)[0])
        other = rewrite(method, query)
        if other is not query:
            changed.append(method)
            data = wire.encode(header, other)
        return nodes[TARGET].answer_frame(data)

    doors = {i: node.answer_frame for i, node in enumerate(nodes)}
    doors[TARGET] = lied_to
    config = made.config(federation, "float64")
    framed = Framed(doors, lambda name: call_types(made, name)[1], strict)
    net = build_network(made, with_authority(made, config, framed), config)
    return run_server(made, net), changed


def once(change: Callable[[Any], Any], done: list[str]) -> Rewrite:
    """Return what changes the first query that has averages for its client."""

    def rewrite(method: str, query: Any) -> Any:
        means = getattr(query, "means", None)
        if done or not isinstance(means, Picks) or not any(means.picks):
            return query
        done.append(method)
        return change(query)

    return rewrite


def offers(name: str) -> bool:
    """Return whether a variant may have secure sums."""
    try:
        make(name).check(6)
    except UsageError:
        return False
    return True


def test_every_protocol_that_offers_secure_sums_is_among_these() -> None:
    offering = {VARIANTS[name][0] for name in VARIANTS if offers(name)}
    # clients of Local are sent nothing
    assert {VARIANTS[name][0] for name in BOUND} == offering - {Local}
    assert offering <= {protocol_class(name) for name in PROTOCOLS}


@pytest.mark.always
@pytest.mark.few(2)
@pytest.mark.parametrize("name", BOUND)
def test_a_member_that_was_sent_one_other_bit_is_named(name: str, federation: Federation) -> None:
    done: list[str] = []
    rewrite = once(lambda query: with_means(query, one_bit), done)
    with pytest.raises(SecureClusterError, match=OTHER):
        run_with(make(name), federation, rewrite)
    assert done


@pytest.mark.parametrize(
    "method",
    [
        "send_residual", "send_moments", "count_cell", "count_step", "send_counted_step",
        "count_cluster", "assign",
    ],
)  # fmt: skip
def test_other_public_numbers_of_hidden_are_noticed(method: str, federation: Federation) -> None:
    def rewrite(asked: str, query: Any) -> Any:
        if asked != method:
            return query
        numbers = query.parts if asked == "send_residual" else query.mean
        name = "parts" if asked == "send_residual" else "mean"
        return dataclasses.replace(query, **{name: Shared(one_bit(numbers.value))})

    # of a step, the client itself knows what was counted
    expected = "about other blocks" if method == "send_counted_step" else OTHER
    with pytest.raises(SecureClusterError, match=expected):
        run_with(make("hidden residuals"), federation, rewrite)


CRAFTED: dict[str, Callable[[Any], Any]] = {
    "zeros of the other sign": lambda query: with_means(query, other_zeros),
    "no update": lambda query: with_means(query, torch.zeros_like),
    "a missing average": without_one,
    "averages of other calls": of_other_calls,
}


@pytest.mark.parametrize("mask", ["none", "permutation"])
@pytest.mark.parametrize("crafted", CRAFTED)
def test_crafted_averages_do_not_add_up(crafted: str, mask: str, federation: Federation) -> None:
    made = make("fedavg", mask=mask, rounds=3)
    with pytest.raises(SecureClusterError, match=OTHER):
        run_with(made, federation, once(CRAFTED[crafted], []))


def test_a_deployment_goes_on_without_the_member_that_was_lied_to(federation: Federation) -> None:
    made = make("fedavg", rounds=2, mask="none")
    done: list[str] = []
    rewrite = once(lambda query: with_means(query, lambda means: means + 1), done)
    with pytest.warns(SecureClusterWarning, match=OTHER):
        state, changed = run_with(made, federation, rewrite, strict=False)
    lost = serve(
        make("fedavg", rounds=2, mask="none"),
        federation,
        lambda call: {TARGET} if call.round == 2 and call.method == "contribute" else set(),
    )
    assert changed == ["contribute"]
    # the sum of the others, to the bit
    assert torch.equal(state.outbox.posts[-1].table, lost.state.outbox.posts[-1].table)


@pytest.mark.parametrize("mask", ["none", "permutation", "rotation", "haar"])
@pytest.mark.parametrize("name", ["fedavg", "hidden", "ifca", "mrmtl", "srfca"])
def test_members_that_missed_rounds_add_up_with_the_others(name: str, mask: str) -> None:
    made = make(name, rounds=6, model="linear", mask=mask, participation=0.5)
    served = serve(made, two_clusters(12, 20), row_dropouts(0.1))
    assert not served.net.state.refused


def test_machines_that_undo_masks_with_other_rounding_add_up(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    undone = TrainingClient._undone

    def elsewhere(self: TrainingClient, row: torch.Tensor, step: int) -> torch.Tensor:
        exact = undone(self, row, step)
        return exact * (1 + 1e-15) if self.cohort.ids == (TARGET,) else exact

    def models() -> Sequence[torch.Tensor]:
        made = make("fedavg", mask="rotation", rounds=3)
        state, _ = run_with(made, federation, lambda method, query: query)
        return [post.table for post in state.outbox.posts]

    alike = models()
    monkeypatch.setattr(TrainingClient, "_undone", elsewhere)
    for before, after in zip(alike, models(), strict=True):
        torch.testing.assert_close(before, after)
