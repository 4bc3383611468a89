"""FeSEM, FlexCFL and FedSoft, each a published method in one short file: what every protocol must
keep, with masks, noise, secure sums, clients that are lost, and newcomers.
"""

from __future__ import annotations

import ast
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import DOUBLE, Protocol, interrupt_after, serve, serve_nodes
from fedsoft import FedSoft
from fesem import FeSEM
from flexcfl import FlexCFL

from securecluster import Federation, LabelSwap, Settings
from securecluster.core.serialization import pack, unpack
from securecluster.messaging.messages import Call
from securecluster.parties.client_state import ClientState
from securecluster.parties.endpoints import build_client
from securecluster.protocols import conformance
from securecluster.protocols.authoring import AssignedModel, CallContext, Rows
from securecluster.runs.replay import replayed

TWELVE = Federation.simulate(
    "digits", scenario=LabelSwap(clusters=2), clients=12, samples=40, seed=1
)
RUN = TWELVE.select(range(8))
NEWCOMERS = TWELVE.select(range(8, 12))
METHODS = (FeSEM, FlexCFL, FedSoft)
TARGET = {"clip": 1.0, "target_epsilon": 8.0}
LINES = {"fesem.py": 70, "flexcfl.py": 45, "fedsoft.py": 60}


def made(protocol: Protocol, **params: Any) -> Any:
    small: dict[str, Any] = {"model": "linear", "epochs": 1, "rounds": 3, "k": 2}
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

    def losses(flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(x, flat[:640].view(10, 64), flat[640:])
        return torch.nn.functional.cross_entropy(logits, y, reduction="none")

    for i, shard in enumerate(RUN.shards):
        x = torch.as_tensor(shard.x, dtype=torch.float64).flatten(1)
        y = torch.as_tensor(shard.y)
        best = torch.stack([losses(centre, x, y) for centre in centres[i]]).argmin(0)
        u = (best.bincount(minlength=2) / len(y)).double().clamp(min=0.01)
        u = u / u.sum()
        # what is released has single precision, and the mixture follows from it
        torch.testing.assert_close(shares[i].double(), u, rtol=0, atol=1e-7)
        u = shares[i].double()
        w = centres[i, assigned[i]].clone().requires_grad_()
        for _ in range(3):  # an epoch is one batch
            pulls = [u[s] * (w - centres[i, s]).square().sum() for s in range(2)]
            loss = losses(w, x, y).mean() + 2.0 / 2 * sum(pulls)
            (gradient,) = torch.autograd.grad(loss, w)
            w = (w - 0.1 * gradient).detach().requires_grad_()
        expected = w.detach() - centres[i, assigned[i]]
        torch.testing.assert_close(moved[i], expected, rtol=0, atol=1e-9)


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
