"""MR-MTL, against a plain loop in numpy, local training and FedAvg, and what it costs."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from securecluster import Federation
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.messages import Call
from securecluster.models.optimizers import MeanRegularized, Sgd, build
from securecluster.parties.endpoints import build_client
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.protocols import MRMTL, FedAvg, Local, Settings
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.protocols.contrib.mrmtl import MRMTLState
from securecluster.runtime.call_context import CallContext

EXACT = Settings(dtype="float64")
FEATURES, CLASSES, SAMPLES, LR = 5, 3, 8, 0.3
EXAMPLE: dict[str, Any] = {"dp_unit": "example", "clip": 1.0}
Array = NDArray[np.float64]


def arrays(clients: int = 3) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    data = {}
    for k in range(clients):
        x = draw.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
        data[f"c{k}"] = (x, draw.integers(0, CLASSES, SAMPLES))
    return data


def federation(clients: int = 3) -> Federation:
    data = arrays(clients)
    return Federation.from_arrays(data, test=data, classes=CLASSES, seed=0)


def linear() -> torch.nn.Module:
    """Return a softmax regression at fixed weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return torch.nn.Linear(FEATURES, CLASSES)


def gradient(weights: Array, x: Array, y: Any) -> Array:
    """Return the gradient (3, 6) of the mean cross-entropy; the bias is the last column."""
    samples = np.hstack([x, np.ones((len(x), 1))]).astype(np.float64)
    scores = np.exp(samples @ weights.T)
    errors = scores / scores.sum(1, keepdims=True) - np.eye(CLASSES)[y]
    return np.asarray(errors.T @ samples / len(x))


def plain_loop(
    strength: float, rounds: int, steps: int, absent: dict[int, set[int]] | None = None
) -> tuple[list[Array], Array]:
    """Return every client's weights and the mean, by full gradients.

    Args:
        absent: by round, the clients whose update is lost.
    """
    module = linear()
    state = module.state_dict()
    start = np.hstack([state["weight"].numpy(), state["bias"].numpy()[:, None]]).astype(float)
    own = [start.copy() for _ in arrays()]
    mean = start.copy()
    for t in range(1, rounds + 1):
        changes = []
        for k, (x, y) in enumerate(arrays().values()):
            if k in (absent or {}).get(t, set()):
                continue
            before = own[k].copy()
            for _ in range(steps):
                own[k] -= LR * (gradient(own[k], x, y) + strength * (own[k] - mean))
            changes.append(own[k] - before)
        mean = mean + np.mean(changes, 0)
    return own, mean


def weights_of(state: Any) -> Array:
    return np.hstack([state["weight"].numpy(), state["bias"].numpy()[:, None]])


@pytest.mark.parametrize("mask", ["none", "permutation", "rotation"])
@pytest.mark.parametrize("strength", [0.0, 0.5, 1 / LR])
def test_it_is_gradient_descent_on_the_regularized_losses(strength: float, mask: str) -> None:
    made = MRMTL(
        regularization=strength,
        model=linear(),
        rounds=3,
        epochs=2,
        batch_size=SAMPLES,
        lr=LR,
        mask=mask,
    )
    fitted = made.fit(federation(), EXACT)
    own, mean = plain_loop(strength, rounds=3, steps=2)
    for k, expected in enumerate(own):
        np.testing.assert_allclose(weights_of(fitted.model_of(k)), expected, atol=1e-7)
    np.testing.assert_allclose(weights_of(fitted.models_[0]), mean, atol=1e-7)
    np.testing.assert_allclose(mean, np.mean(own, 0), atol=1e-12)
    assert list(fitted.labels_) == [0, 0, 0]


def test_without_regularization_it_is_local_training(small: Federation) -> None:
    one = MRMTL(regularization=0.0, rounds=3).fit(small)
    other = Local(rounds=3).fit(small)
    torch.testing.assert_close(
        one.client_models_.values, other.client_models_.values, rtol=0, atol=1e-6
    )


def test_the_stronger_the_regularization_the_nearer_are_models_to_the_mean(
    small: Federation,
) -> None:
    distances = []
    for strength in (0.0, 0.5, 5.0):
        fitted = MRMTL(regularization=strength, rounds=3, lr=0.2).fit(small, EXACT)
        models = fitted.client_models_.values
        distances.append(float((models - models.mean(0)).norm()))
    assert distances[0] > 1.5 * distances[1] > 3 * distances[2] > 0


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_regularizer_is_added_to_gradients_and_products(optimizer: str) -> None:
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(2, 3, 4, generator=draw, dtype=torch.float64)
    mean = torch.randn(2, 3, 4, generator=draw, dtype=torch.float64)
    left = torch.randn(2, 3, 5, generator=draw, dtype=torch.float64)
    right = torch.randn(2, 5, 4, generator=draw, dtype=torch.float64)
    expected = {"w": start.clone()}
    plain = build(optimizer, expected, 0.1)
    given = {"w": start.clone()}
    inner = build(optimizer, given, 0.1)
    regularized = MeanRegularized(inner, given, {"w": mean}, 0.7)
    for _ in range(2):
        plain.begin()
        plain.value("w", left @ right + 0.7 * (expected["w"] - mean))
        regularized.begin()
        regularized.product("w", left, right)
    torch.testing.assert_close(given["w"], expected["w"], rtol=0, atol=1e-12)


def test_only_clients_that_still_train_are_regularized() -> None:
    given = {"w": torch.ones(2, 1)}
    optimizer = MeanRegularized(Sgd(given, 0.5), given, {"w": torch.zeros(2, 1)}, 1.0)
    optimizer.value("w", torch.zeros(1, 1))
    assert given["w"].tolist() == [[0.5], [1.0]]


@pytest.mark.parametrize("z", [0.7, 3.0])
def test_it_costs_what_dp_sgd_of_the_same_steps_costs(z: float) -> None:
    """With all examples in each batch it is a Gaussian mechanism a step."""
    options: dict[str, Any] = {"rounds": 3, "epochs": 2, "batch_size": SAMPLES, "noise": z}
    fitted = MRMTL(model="linear", **EXAMPLE, **options).fit(federation())
    same = FedAvg(model="linear", **EXAMPLE, **options).fit(federation())
    assert fitted.ledger_.exact() == []
    assert fitted.ledger_.epsilon == same.ledger_.epsilon < math.inf
    expected = gaussian_epsilon(math.sqrt(3 * 2) / z, 1e-5)
    assert fitted.ledger_.epsilon == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_own_models_are_in_no_file_but_their_owners(
    noise: float, small: Federation, tmp_path: Path
) -> None:
    method = MRMTL(rounds=1, model="linear", mask="none", clip=100.0, noise=noise)
    fitted = method.fit(small, Settings(transcript="full"), folder=tmp_path)
    own = fitted.client_models_.values
    for row in own:
        pattern = row[:64].numpy().tobytes()
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        holders = [path for path in files if pattern in path.read_bytes()]
        names = {path.relative_to(tmp_path).as_posix() for path in holders}
        assert names == {"clients.safetensors", "last-round/clients"}
        if os.name == "posix":
            assert not any(path.stat().st_mode & 0o077 for path in holders)

    transcript = fitted.transcript_
    places = [k for k, entry in enumerate(transcript.entries) if entry.method == "contribute"]
    sent = torch.cat([transcript.content(k)[1].reply.delta.values for k in places])
    moved = own - fitted.network_.initial()
    apart = torch.cdist(sent.double(), moved.double()).amin(0)
    # without noise the update is sent as it is, which shows that this would find it
    if noise:
        assert apart.min() > 0.9 * noise * 100.0 * math.sqrt(own.shape[1])
    else:
        assert apart.max() < 1e-4


def test_the_regularizer_is_outside_the_clip_and_the_noise() -> None:
    """One step with a clip far below all gradients ends where the regularizer alone leads."""
    options: dict[str, Any] = {"rounds": 1, "epochs": 1, "batch_size": SAMPLES, "lr": LR}
    made = MRMTL(model=linear(), regularization=1.0, dp_unit="example", clip=1e-12, **options)
    client: Any = build_client(made, federation(), EXACT).client
    client._after.values.add_(1.0)
    client._before.values.add_(1.0)
    update = ask(made, client, step=1, received=0)
    expected = -LR * np.ones(FEATURES * CLASSES + CLASSES)
    np.testing.assert_allclose(update.numpy(), expected, atol=1e-9)


def ask(made: MRMTL, client: Any, step: int, received: int) -> torch.Tensor:
    """Return the first client's update.

    Args:
        received: the call of its last update that arrived.
    """
    state = MRMTLState([0], PendingUpdates.start(1, fresh=False), [received])
    context = CallContext((0,), (0,), step, step)
    update: torch.Tensor = client.contribute(context, state.message_for([0])).delta.values[0]
    return update


def test_a_training_whose_update_is_lost_is_undone() -> None:
    """Else a later update would follow from a training that the ledger does not count."""
    made = MRMTL(model=linear(), rounds=3, epochs=1, batch_size=SAMPLES, lr=LR)
    client: Any = build_client(made, federation(), EXACT).client
    first = ask(made, client, step=1, received=0)
    # the examples of a batch are summed in another order in each call
    again = ask(made, client, step=2, received=0)
    torch.testing.assert_close(again, first, rtol=0, atol=1e-12)
    second = ask(made, client, step=3, received=2)
    assert float((second - first).norm()) > 1e-3
    torch.testing.assert_close(
        client.own_models.row(0), client.cohort.start + first + second, rtol=0, atol=1e-12
    )


def test_clients_that_miss_rounds_go_on_from_their_own_models() -> None:
    made = MRMTL(regularization=0.5, model=linear(), rounds=4, epochs=2, batch_size=SAMPLES, lr=LR)
    absent = {2: {1}, 3: {0, 1}}

    def lost(call: Call) -> set[int]:
        return absent.get(call.round, set()) if call.method == "contribute" else set()

    served = cases.serve(made, federation(), lost)
    client: Any = served.endpoint.client
    own, _ = plain_loop(0.5, 4, 2, absent)
    for k, expected in enumerate(own):
        row = client.own_models.row(k).numpy()
        weights = np.hstack([row[:15].reshape(3, 5), row[15:, None]])
        np.testing.assert_allclose(weights, expected, atol=1e-7)


def test_a_repeated_call_has_the_same_answer_and_a_late_one_is_refused() -> None:
    made = MRMTL(model=linear(), rounds=2, epochs=1, lr=LR)
    client: Any = build_client(made, federation(), EXACT).client
    first = ask(made, client, step=1, received=0)
    assert torch.equal(ask(made, client, step=1, received=0), first)
    client._calls[0] = 5
    with pytest.raises(PolicyError, match="moved on"):
        ask(made, client, step=1, received=0)


@pytest.mark.parametrize(
    ("wrong", "sentence"), [(-1.0, "regularization"), (5.1, "beyond the mean")]
)
def test_regularizations_that_cannot_work_are_refused(wrong: float, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        MRMTL(regularization=wrong, lr=0.2, rounds=1, model="linear").fit(federation())
