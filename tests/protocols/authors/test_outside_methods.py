"""FeSEM, FlexCFL, FedSoft and SCAFFOLD, each a published method in one short file: what every
protocol must keep, with masks, noise, secure sums, clients that are lost, and newcomers.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
import torch
from cases import DOUBLE, Protocol, interrupt_after, serve, serve_nodes, two_clusters
from fedsoft import FedSoft
from fesem import FeSEM
from flexcfl import FlexCFL
from scaffold import ControlledClient, CountedAverages, Scaffold

from securecluster import FedAvg, Settings
from securecluster.core.serialization import pack, unpack
from securecluster.messaging.messages import Call
from securecluster.parties.client_state import ClientState
from securecluster.parties.endpoints import build_client
from securecluster.protocols import conformance
from securecluster.protocols.authoring import (
    SUM,
    AssignedModel,
    CallContext,
    Real,
    Rows,
    Update,
    answers,
    protocol,
)
from securecluster.runs.replay import replayed

TWELVE = two_clusters(12, 40, seed=1)
RUN = TWELVE.select(range(8))
NEWCOMERS = TWELVE.select(range(8, 12))
METHODS = (FeSEM, FlexCFL, FedSoft, Scaffold)
TARGET = {"clip": 1.0, "target_epsilon": 8.0}
LINES = {"fesem.py": 70, "flexcfl.py": 45, "fedsoft.py": 60, "scaffold.py": 115}


def made(protocol: Protocol, **params: Any) -> Any:
    small: dict[str, Any] = {"model": "linear", "rounds": 3}
    small |= (
        {"epochs": 1, "local_steps": 2} if issubclass(protocol, Scaffold) else {"epochs": 1, "k": 2}
    )
    return protocol(**{**small, **params})


def code_lines(path: Path) -> int:
    """Return the lines of a source that are neither blank, imports, comments nor docstrings."""
    text = path.read_text()
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or string:
            left_out.update(range(node.lineno, (node.end_lineno or 0) + 1))
    counted = 0
    for number, line in enumerate(text.splitlines(), 1):
        written = line.strip()
        counted += bool(written) and not written.startswith("#") and number not in left_out
    return counted


@pytest.mark.parametrize("name", LINES)
def test_a_method_is_short(name: str) -> None:
    lines = code_lines(Path(__file__).parent / name)
    assert 20 < lines <= LINES[name]


@pytest.mark.few(1)
@pytest.mark.parametrize("protocol", METHODS)
def test_a_method_keeps_what_every_protocol_must(protocol: Protocol) -> None:
    conformance.check(partial(made, protocol), RUN, NEWCOMERS).require()


@pytest.mark.few(3)
@pytest.mark.parametrize("protocol", METHODS)
@pytest.mark.parametrize("unit", ["client", "example"])
@pytest.mark.parametrize("aggregation", ["plain", "secagg"])
def test_a_target_is_met(protocol: Protocol, unit: str, aggregation: str) -> None:
    fitted = made(protocol, dp_unit=unit, aggregation=aggregation, **TARGET).fit(RUN)
    assert fitted.ledger_.exact() == []
    assert 7.9 < fitted.ledger_.epsilon <= 8


def test_shares_of_noise_in_secure_sums_meet_the_target() -> None:
    shares = {"placement": "distributed", "aggregation": "secagg"}
    fitted = made(FeSEM, **shares, **TARGET).fit(RUN)
    assert fitted.ledger_.exact() == []
    assert fitted.ledger_.epsilon <= 8


@pytest.mark.parametrize("protocol", METHODS)
def test_secure_sums_give_the_models_of_plain_ones(protocol: Protocol) -> None:
    plain, secure = (
        made(protocol, aggregation=aggregation).fit(RUN, DOUBLE)
        for aggregation in ("plain", "secagg")
    )
    assert secure.labels_.tolist() == plain.labels_.tolist()
    torch.testing.assert_close(
        secure.client_models_.values, plain.client_models_.values, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("protocol", METHODS)
def test_secure_sums_go_on_where_clients_are_lost(protocol: Protocol) -> None:
    settings = Settings(transcript="full", dropout=0.3)
    make = partial(made, protocol, aggregation="secagg", participation=0.8, rounds=4)
    fitted = make().fit(RUN, settings)
    config = make().config(RUN, "float32")
    repeated = pack(replayed(make(), fitted.transcript_, config)[0])
    assert repeated == fitted.server_state_


@pytest.mark.parametrize("protocol", METHODS)
def test_what_is_saved_places_newcomers_alike(protocol: Protocol, tmp_path: Path) -> None:
    fitted = made(protocol, mask="rotation").fit(RUN)
    fitted.save(tmp_path / "saved")
    loaded = protocol.load(tmp_path / "saved")
    assert loaded.labels_.tolist() == fitted.labels_.tolist()
    assert loaded.join(NEWCOMERS).tolist() == fitted.join(NEWCOMERS).tolist()


def test_flexcfl_finds_the_kinds_and_places_newcomers() -> None:
    fitted = made(FlexCFL, rounds=1).fit(RUN)
    assert fitted.agreement_ is not None and fitted.agreement_["exact"]
    assert RUN.truth is not None and NEWCOMERS.truth is not None
    kinds = dict(zip(RUN.truth, fitted.labels_, strict=True))
    assert [*fitted.join(NEWCOMERS)] == [kinds[kind] for kind in NEWCOMERS.truth]


def nearest(client: Any) -> list[int]:
    """Return argmin_j of the distance of each client's last model to the centres that it holds."""
    own = (client.base.values + client.moved.values).double().numpy()
    centres = [model.models.values.double().numpy() for model in client.model_sets[0]]
    distances = [np.linalg.norm(own - centre, axis=1) for centre in centres]
    return [int(j) for j in np.stack(distances, 1).argmin(1)]


def test_clients_tell_the_centre_nearest_to_what_they_trained() -> None:
    served = serve(made(FeSEM, mask="none"), RUN)
    client: Any = served.endpoint.client
    ids = tuple(range(len(RUN)))
    query = served.state.running.message_for(ids)
    told = client.choose(CallContext(ids, ids, 9, 10_000), query).centre.values.tolist()
    assert told == nearest(client)
    assert len(set(told)) == 2
    # trained from the centre of the last round, and kept as it was before any mask
    assert client.moved.values.norm(dim=1).min() > 0


def test_what_a_client_trained_is_not_weighted() -> None:
    client: Any = build_client(made(FeSEM, mask="none"), RUN, DOUBLE).client
    served = serve(made(FeSEM, mask="none", rounds=1), RUN)
    client.apply_averages(
        CallContext((0,), (0,), 1, 1), served.state.running.begin(0, 2, 8, False).message_for([0])
    )
    context = CallContext((0,), (0,), 1, 2)
    update = client.contribute(context, AssignedModel(Rows(torch.tensor([1]))))
    d = client.cohort.model.dimension
    expected = update.delta.values[:, :d] / client.cohort.sizes[0]
    assert torch.equal(client.moved[(0,)], expected)
    assert torch.equal(client.base[0], client.cohort.start)


def losses(flat: torch.Tensor, shard: Any) -> torch.Tensor:
    """Return the loss of each sample of a shard under a softmax regression on digits."""
    x, y = torch.as_tensor(shard.x, dtype=torch.float64).flatten(1), torch.as_tensor(shard.y)
    logits = torch.nn.functional.linear(x, flat[:640].view(10, 64), flat[640:])
    return torch.nn.functional.cross_entropy(logits, y, reduction="none")


def test_fedsoft_trains_near_its_mixture_as_plain_torch_does() -> None:
    options = {"mask": "none", "rounds": 1, "epochs": 3, "batch_size": 64, "lr": 0.1, "pull": 2.0}
    client: Any = build_client(made(FedSoft, **options), RUN, DOUBLE).client
    served = serve(made(FedSoft, **options), RUN)
    ids = tuple(range(len(RUN)))
    query = served.state.running.begin(0, 2, 8, False).message_for(list(ids))
    shares = client.weigh(CallContext(ids, ids, 1, 1), query).shares.values
    centres = torch.stack([each.models.values for each in client.model_sets[0]], 1)
    assigned = torch.arange(8) % 2
    context = CallContext(ids, ids, 1, 2)
    update = client.contribute(context, AssignedModel(Rows(assigned)))
    moved = client.own_updates(update)

    for i, shard in enumerate(RUN.shards):
        best = torch.stack([losses(centre, shard) for centre in centres[i]]).argmin(0)
        u = (best.bincount(minlength=2) / len(shard.y)).double().clamp(min=0.01)
        u = u / u.sum()
        # what is released has single precision, and the mixture follows from it
        torch.testing.assert_close(shares[i].double(), u, rtol=0, atol=1e-7)
        u = shares[i].double()
        w = centres[i, assigned[i]].clone().requires_grad_()
        for _ in range(3):  # an epoch is one batch
            pulls = [u[s] * (w - centres[i, s]).square().sum() for s in range(2)]
            loss = losses(w, shard).mean() + 2.0 / 2 * sum(pulls)
            (gradient,) = torch.autograd.grad(loss, w)
            w = (w - 0.1 * gradient).detach().requires_grad_()
        expected = w.detach() - centres[i, assigned[i]]
        torch.testing.assert_close(moved[i], expected, rtol=0, atol=1e-9)


def plain_scaffold(
    start: torch.Tensor, rounds: list[tuple[int, ...]], lost: dict[int, set[int]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, c and all c_i after Algorithm 1 with option II, K = 3 and η = 0.1.

    Args:
        start: x at first.
        rounds: the clients of each round.
        lost: by round, those whose reply is lost.
    """
    x, c, own = start, torch.zeros_like(start), torch.zeros(len(RUN), len(start)).double()
    for t, asked in enumerate(rounds):
        moves, changes = [], {}
        for i in [i for i in asked if i not in lost.get(t, set())]:
            y = x.clone()
            for _ in range(3):  # an epoch is one batch
                w = y.clone().requires_grad_()
                (gradient,) = torch.autograd.grad(losses(w, RUN.shards[i]).mean(), w)
                y = y - 0.1 * (gradient - own[i] + c)
            changes[i] = own[i] - c + (x - y) / (3 * 0.1) - own[i]
            moves.append(y - x)
        x = x + torch.stack(moves).mean(0)
        c = c + len(asked) / len(RUN) * torch.stack(list(changes.values())).mean(0)
        for i, change in changes.items():
            own[i] += change
    return x, c, own


@pytest.mark.parametrize("gone", [{}, {1: {0, 5, 6}}], ids=["all arrive", "some are lost"])
@pytest.mark.parametrize("mask", ["none", "rotation"])
def test_scaffold_is_algorithm_1(mask: str, gone: dict[int, set[int]]) -> None:
    options = {"rounds": 4, "local_steps": 3, "batch_size": 64, "lr": 0.1, "participation": 0.5}

    def lost(call: Call) -> set[int]:
        return gone.get(call.round - 1, set()) if call.method == "contribute" else set()

    served = serve(made(Scaffold, mask=mask, **options), RUN, lost)
    client: Any = served.endpoint.client
    calls = [served.transcript.content(n)[0] for n in range(len(served.transcript.entries))]
    rounds: list[tuple[int, ...]] = [call.to for call in calls if call.method == "contribute"]
    assert {len(to) for to in rounds} == {4} and len(set(rounds)) > 1
    x, c, own = plain_scaffold(client.cohort.start, rounds, gone)
    for k in range(len(RUN)):
        torch.testing.assert_close(client.models.row(k), x, rtol=0, atol=1e-9)
        torch.testing.assert_close(client.common[k], c, rtol=0, atol=1e-9)
        arrived = served.state.received[k] == client.calls[k]
        kept = client.after[k] if arrived else client.before[k]
        torch.testing.assert_close(kept, own[k], rtol=0, atol=1e-9)
    assert c.norm() > 0.1


@dataclass(frozen=True, eq=False)
class Both(Update):
    """Client to server: an update, and the change of the control variate, as the paper sends."""

    control: Annotated[Rows, Real(("dimension",))]


class BothClient(ControlledClient):
    """Clients that send Δc_i as a message of its own."""

    @answers(SUM, through=("delta", "control"), fresh=True, trains="usual")
    def contribute(self, context: CallContext, query: CountedAverages) -> Both:
        update = super().contribute(context, query)
        change = self.after[context.positions] - self.before[context.positions]
        return Both(update.delta, None, Rows(change))


@protocol
class BothSent(Scaffold):
    """SCAFFOLD with the paper's second message."""

    client: ClassVar[Any] = BothClient


@pytest.mark.parametrize("unit", ["client", "example"])
def test_control_variates_of_one_message_cost_nothing(unit: str) -> None:
    """A second clipped row is a second release; what follows from DP-SGD costs nothing more."""
    private = {"dp_unit": unit, "clip": 1.0, "noise": 4.0, "rounds": 2}
    one, both = (made(method, **private).fit(RUN).ledger_ for method in (Scaffold, BothSent))
    plain = FedAvg(model="linear", epochs=1, **private).fit(RUN).ledger_
    assert one.exact() == both.exact() == []
    if unit == "client":
        assert one.epsilon == plain.epsilon
        assert both.epsilon > 1.3 * one.epsilon
    else:
        assert both.epsilon == one.epsilon


def test_a_client_alone_with_a_centre_sends_no_update() -> None:
    """A sum over one client would be its update."""
    served = serve(made(FeSEM, k=8, rounds=4), RUN)
    calls = [served.transcript.content(n)[0] for n in range(len(served.transcript.entries))]
    sizes = [size for call in calls if call.method == "contribute" for size in call.members]
    assert sizes
    assert min(sizes) >= 2


def test_a_client_that_was_never_reached_has_the_model_of_most() -> None:
    def lost(call: Call) -> set[int]:
        return {7}

    served = serve(made(FeSEM), RUN, lost)
    assert served.state.assigned == [*range(7)]
    counts = np.bincount(served.state.labels[:7])
    assert served.state.labels[7] == counts.argmax()


def test_what_clients_keep_survives_a_checkpoint() -> None:
    one = serve(made(FeSEM), RUN).endpoint
    other = build_client(made(FeSEM), RUN, DOUBLE)
    state = unpack(pack(one.client.state(one.keys.secrets)), ClientState)
    other.client.restore(state)
    for name in ("base", "moved"):
        kept = getattr(one.client, name).values
        assert kept.norm() > 0
        assert torch.equal(getattr(other.client, name).values, kept)
    # a copy, which later training does not change
    other.client.moved.values.zero_()
    assert one.client.moved.values.norm() > 0


@pytest.mark.always
def test_each_node_keeps_its_own_row() -> None:
    _, nodes = serve_nodes(made(FeSEM), RUN)
    together: Any = serve(made(FeSEM), RUN).endpoint.client
    rows = torch.cat([node.client.moved.values for node in nodes])
    torch.testing.assert_close(rows, together.moved.values, rtol=0, atol=1e-9)


def test_a_run_that_is_stopped_before_a_choice_ends_as_if_it_never_had_been(tmp_path: Path) -> None:
    whole = made(FeSEM).fit(RUN)
    with pytest.raises(KeyboardInterrupt):
        made(FeSEM).fit(RUN, folder=tmp_path, report=interrupt_after(2))
    resumed = made(FeSEM).fit(RUN, folder=tmp_path)
    assert resumed.labels_.tolist() == whole.labels_.tolist()
    assert torch.equal(resumed.client_models_.values, whole.client_models_.values)


def test_choices_have_the_noise_of_updates() -> None:
    z = 0.5
    endpoint = build_client(made(FeSEM, clip=2.0, noise=z, mask="none"), RUN, DOUBLE)
    client: Any = endpoint.client
    ids = tuple(range(len(RUN)))
    rows = torch.ones(len(RUN), client.cohort.model.dimension, dtype=torch.float64)
    calls = [endpoint.context(ids, step, step, "choose") for step in range(20)]
    released = [client.release_training(context, rows) for context in calls]
    clipped = rows / rows.norm(dim=1, keepdim=True) * 2.0
    measured = torch.stack(released).sub(clipped).std().item()
    assert math.isclose(measured, z * 2.0, rel_tol=0.05)
    private = build_client(made(FeSEM, clip=2.0, noise=z, dp_unit="example"), RUN, DOUBLE)
    exact: Any = private.client
    assert torch.equal(exact.release_training(private.context(ids, 1, 1, "choose"), rows), rows)
