"""What clients learn, beside torch's own losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from securecluster import Federation
from securecluster.core.randomness import Randomness
from securecluster.data import Shard
from securecluster.errors import UsageError
from securecluster.messaging.messages import Rows
from securecluster.models import architectures
from securecluster.models.objectives import (
    CLASSIFICATION,
    METRICS,
    OBJECTIVES,
    TASKS,
    Binary,
    Classification,
    Language,
    Objective,
    Trajectory,
    objective,
)
from securecluster.models.validation import build
from securecluster.protocols import CFL, FLHC, IFCA, SRFCA, FedAvg, Local, Settings
from securecluster.training.local_trainer import LocalTrainer, LocalTraining


class Words(nn.Module):
    """The logits of the next token from this one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.out = nn.Linear(5, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.table(x))
        return out


class Track(nn.Module):
    """The next position from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(x[:, -1])
        return out


def federation(kind: Objective) -> Federation:
    """Three clients of 9, 12 and 15 samples."""
    draw, shards = np.random.default_rng(0), []
    for n in (9, 12, 15):
        if isinstance(kind, Language):
            text = draw.integers(0, 7, (n + 4, 6))
            shards.append(Shard(text[:n, :-1], text[:n, 1:], text[n:, :-1], text[n:, 1:]))
        else:
            track = draw.random((n + 4, 5, 2)).astype(np.float32)
            shards.append(Shard(track[:n, :-1], track[:n, -1], track[n:, :-1], track[n:, -1]))
    return Federation(
        ("a", "b", "c"), tuple(shards), 7 if isinstance(kind, Language) else 2, 0, objective=kind
    )


def cohort(kind: Objective, module: nn.Module) -> LocalTrainer:
    fed = federation(kind)
    flat = build(module, fed.shape, fed.classes, Randomness(0), kind)
    assert flat.together
    return LocalTrainer(fed, flat, Randomness(0), torch.device("cpu"), torch.float64)


@pytest.mark.parametrize("kind", [Language(), Trajectory((10.0, 6.0))], ids=lambda kind: kind.kind)
def test_training_is_torchs_own_on_every_client(kind: Objective) -> None:
    made = cohort(kind, Words() if isinstance(kind, Language) else Track())
    plan = LocalTraining(0.3, 2, 4)
    found = made.train(Rows(made.start[None], (0,) * 3), range(3), plan, step=0)
    for k in range(3):
        network, classes = (Words(), 7) if isinstance(kind, Language) else (Track(), 2)
        module = build(network, made._x.shape[1:], classes, Randomness(0), kind).module.double()
        nn.utils.vector_to_parameters(made.start.clone(), module.parameters())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
        for batch in made.batches(k, plan, 0):
            x, y = made._x[batch], made._y[batch]
            optimizer.zero_grad()
            out = module(x)
            loss = (
                nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())
                if isinstance(kind, Language)
                else nn.functional.mse_loss(out, y)
            )
            loss.backward()
            optimizer.step()
        after = nn.utils.parameters_to_vector(module.parameters()).detach()
        assert torch.allclose(found[k], after - made.start, rtol=1e-9, atol=1e-12)


def test_perplexity_is_exp_of_the_mean_over_all_tokens() -> None:
    made = cohort(Language(), Words())
    rows = torch.stack([made.start, 0.5 * made.start])
    found = made.scores(Rows(rows, (0, 1, 1)))
    for k, row in enumerate((0, 1, 1)):
        nn.utils.vector_to_parameters(rows[row], (module := Words().double()).parameters())
        shard = federation(Language()).shards[k]
        x, y = torch.as_tensor(shard.x_test), torch.as_tensor(shard.y_test)
        nats = nn.functional.cross_entropy(module(x).transpose(1, 2), y)
        assert found[k] == pytest.approx(float(nats.exp().detach()), rel=1e-9)


def test_padding_counts_in_no_loss_and_no_gradient() -> None:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(1, 7, (4, 6), generator=generator)
    outputs = torch.randn(4, 6, 7, generator=generator, dtype=torch.float64)
    lengths = (6, 3, 1, 5)
    for row, length in enumerate(lengths):
        y[row, length:] = 0
    outputs.requires_grad_()
    losses = Language(padding=0).losses(outputs, y)
    for row, length in enumerate(lengths):
        alone = nn.functional.cross_entropy(outputs[row, :length], y[row, :length])
        assert float(losses[row].detach()) == pytest.approx(float(alone.detach()), rel=1e-12)
    losses.sum().backward()
    assert outputs.grad is not None
    assert torch.equal(outputs.grad.abs().sum(-1) > 0, y != 0)
    # the reviews' case: random tokens of 11 kinds, half of each sequence padded
    uniform = torch.zeros(5, 8, 11)
    half = torch.randint(1, 11, (5, 8), generator=generator)
    half[:, 4:] = 0
    perplexities = Language(padding=0).scores(uniform, half).exp()
    assert perplexities.tolist() == pytest.approx([11.0] * 5)


def test_a_sample_of_padding_alone_is_refused() -> None:
    y = np.array([[1, 2], [0, 0]])
    with pytest.raises(UsageError, match="all padding"):
        Language(padding=0).check("ward", y, y, 3)


def test_the_error_of_trajectories_is_in_metres() -> None:
    kind = Trajectory((10.0, 6.0))
    made = cohort(kind, Track())
    found = made.scores(Rows(made.start[None], (0,) * 3))
    nn.utils.vector_to_parameters(made.start, (module := Track().double()).parameters())
    shard = federation(kind).shards[1]
    away = module(torch.as_tensor(shard.x_test).double()).detach().numpy() - shard.y_test
    assert found[1] == pytest.approx(np.hypot(10 * away[:, 0], 6 * away[:, 1]).mean(), rel=1e-6)
    assert (kind.unit, Trajectory().unit) == ("m", "")


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary() -> None:
    made = cohort(Language(), Words())
    assert made.scores(Rows(torch.zeros_like(made.start)[None], (0,) * 3)) == pytest.approx(
        np.full(3, 7.0)
    )


@pytest.mark.parametrize(
    "kind",
    [CLASSIFICATION, Language(), Language(padding=3), Trajectory(), Trajectory((3.0, 4.5))],
    ids=repr,
)
def test_objectives_go_to_json_and_back(kind: Objective) -> None:
    assert objective(json.loads(json.dumps(kind.as_json()))) == kind


def test_every_objective_is_listed_once() -> None:
    assert {name: kind.kind for name, kind in OBJECTIVES.items()} == {n: n for n in OBJECTIVES}
    assert {*TASKS[1:], "language", "trajectory"} == set(OBJECTIVES)
    shared = [kind for kind in OBJECTIVES.values() if kind.metric == "accuracy"]
    assert shared == [Classification, Binary] and len(METRICS) == len(OBJECTIVES) - 1


@pytest.mark.parametrize(
    ("kind", "x", "y", "said"),
    [
        (Language(), np.zeros((3, 4)), np.zeros((3, 4), np.int64), "token numbers"),
        (Language(), np.zeros((3, 4), np.int64), np.zeros(3, np.int64), "token numbers"),
        (Language(), np.full((3, 4), 7), np.zeros((3, 4), np.int64), "a token lies outside 0 … 6"),
        (Trajectory(), np.zeros((3, 4, 2)), np.zeros((3, 3)), "the past T positions"),
        (Trajectory(), np.zeros((3, 2)), np.zeros((3, 2)), "the past T positions"),
        (Trajectory(), np.zeros((3, 4, 2)), np.full((3, 2), np.nan), "NaN"),
        (Trajectory((1.0,)), np.zeros((3, 4, 2)), np.zeros((3, 2)), "one for each"),
    ],
)
def test_data_of_another_kind_are_refused(
    kind: Objective, x: np.ndarray, y: np.ndarray, said: str
) -> None:  # type: ignore[type-arg]
    with pytest.raises(UsageError, match=said):
        classes = 7 if isinstance(kind, Language) else 2
        Federation(("a",), (Shard(x, y, x[:0], y[:0]),), classes, 0, objective=kind)


@pytest.mark.parametrize(
    ("model", "kind", "shape", "classes", "said"),
    [
        (
            "cnn-ali",
            Trajectory(),
            (4, 2),
            2,
            "made for classification, .*and these data are for trajectory: choose .*mlp",
        ),
        (Track(), Language(), (6,), 7, "does not take|it must give 6 × 7 logits"),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(8, 1)),
            Trajectory(),
            (4, 2),
            2,
            "a position of 2 coordinates",
        ),
    ],
)
def test_networks_of_another_kind_are_refused(
    model: str | nn.Module, kind: Objective, shape: tuple[int, ...], classes: int, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        build(model, shape, classes, Randomness(0), kind)


def test_auto_is_the_network_that_suits_the_data_and_brings_its_learning_rate() -> None:
    text, track, image = Language(), Trajectory(), CLASSIFICATION
    found = [
        architectures.chosen("auto", kind, classes)
        for kind, classes in ((image, 10), (text, 77), (text, 2000), (track, 2))
    ]
    assert found == ["mlp", "lstm-chars", "lstm-words", "lstm-trajectory"]
    # which is refused by name later, not replaced
    assert architectures.chosen("linear", text, 77) == "linear"
    assert architectures.rate("auto", image, 10, "sgd") == 0.2
    assert architectures.rate(Words(), text, 7, "sgd") == 0.2
    cases = ((text, 2000), (image, 10), (track, 2))
    rates = [architectures.rate("auto", kind, classes, "sgd") for kind, classes in cases]
    assert rates[0] > rates[1] > rates[2]
    assert architectures.rate("mlp", image, 10, "adam") == 0.001


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "protocol", [CFL, FLHC, SRFCA, IFCA, FedAvg, Local], ids=lambda protocol: protocol.name
)
@pytest.mark.parametrize("kind", [Language(), Trajectory((10.0, 6.0))], ids=lambda kind: kind.kind)
def test_protocols_run_on_sequences_and_judge_them(
    protocol: type[Any], kind: Objective, tmp_path: Path
) -> None:
    more = (
        {"pre_rounds": 1} if protocol is FLHC else {"starts": 1, "k": 2} if protocol is IFCA else {}
    )
    own = federation(kind)
    module = Words() if isinstance(kind, Language) else Track()
    fitted = protocol(rounds=2, model=module, **more).fit(own, Settings(transcript="full"))
    assert fitted.metric_ == kind.metric
    assert all(kind.metric in line and line["at_target"] is None for line in fitted.history_)
    scores = getattr(fitted, f"{kind.metric}_")
    assert scores is fitted.scores_ and not hasattr(fitted, "accuracy_")
    module.load_state_dict(fitted.model_of(1))
    x, y = torch.as_tensor(own.shards[1].x_test), torch.as_tensor(own.shards[1].y_test)
    out = module(x).detach()
    if isinstance(kind, Language):
        expected = float(nn.functional.cross_entropy(out.transpose(1, 2), y).exp())
    else:
        expected = float(np.hypot(*((out - y).numpy() * (10.0, 6.0)).T).mean())
    assert scores[1] == pytest.approx(expected, rel=1e-5)
    fitted.save(tmp_path)
    network = Words() if isinstance(kind, Language) else Track()
    assert protocol.load(tmp_path, model=network).metric_ == kind.metric
    fitted.replay(fitted.transcript_, fitted.kept_.learned.config)
    with pytest.raises(UsageError, match="give the same kind of data"):
        rows = np.random.default_rng(0).random((20, 4))
        fitted.join(Federation.from_arrays({"n": (rows, np.arange(20) % 2)}, seed=0))


@pytest.mark.parametrize("kind", [Language(), Trajectory((10.0, 6.0))], ids=lambda kind: kind.kind)
def test_a_model_that_has_diverged_is_judged_by_a_finite_number(kind: Objective) -> None:
    """Files of numbers have no infinity, and a client with test data must not look like one
    without.
    """
    made = cohort(kind, Words() if isinstance(kind, Language) else Track())
    worst = torch.full_like(made.start, 1e300)  # outputs overflow: inf − inf
    found = made.scores(Rows(worst[None], (0,) * 3))
    assert np.allclose(found, 1e300, rtol=1e-9, atol=0)
