"""Samples from gradients: exact without a mask, chance under a permutation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attacked import FULL, digits, scene, score_of
from cases import exhaustive
from scipy.ndimage import uniform_filter

from securecluster import Dirichlet, Federation
from securecluster.attacks.base import Guess, Truth
from securecluster.attacks.gradient_inversion import (
    AnalyticInversion,
    CosineInversion,
    DeepLeakage,
    GradientInversion,
    dense_input,
)
from securecluster.attacks.gradient_matching import lbfgs
from securecluster.attacks.image_quality import (
    LARGEST_PSNR,
    MeanPSNR,
    ShareRecognised,
    nearest,
    psnr,
    ssim,
)
from securecluster.attacks.scoring import score
from securecluster.attacks.views import knowledge_of, view_of
from securecluster.protocols import CFL, FedAvg, Settings

STEP: dict[str, Any] = {"rounds": 1, "epochs": 1, "batch_size": 1000, "model": "mlp-32"}
DOUBLE = Settings(transcript="full", threads=1, dtype="float64")


def images(clients: int, samples: int = 1) -> Federation:
    return digits(scenario=Dirichlet(alpha=1.0), clients=clients, samples=samples)


def smooth_network() -> torch.nn.Module:
    """The network of one hidden layer of sigmoids, with the weights of a fixed generator."""
    generator = torch.Generator().manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Sigmoid(), torch.nn.Linear(32, 10)
    )
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.uniform_(-0.3, 0.3, generator=generator)
    return network


def guessed(
    attack: GradientInversion, federation: Federation, settings: Settings, **params: Any
) -> tuple[Guess, Truth]:
    fitted = FedAvg(**{**STEP, **params}).fit(federation, settings)
    view, knowledge, truth = scene(fitted, federation)
    return attack.run(view, knowledge), truth


@pytest.mark.parametrize("clients", [2, exhaustive(20)])
def test_dlg_recovers_every_digit_and_label_of_a_small_smooth_network(clients: int) -> None:
    federation = images(clients)
    attack = DeepLeakage(steps=150, restarts=1)
    guess, truth = guessed(attack, federation, DOUBLE, model=smooth_network())
    assert attack.scorer.units(guess, truth).min() > 90
    for client, shard in enumerate(federation.shards):
        assert np.allclose(guess.values[client], shard.x, atol=1e-5)
        assert guess.details["labels"][client].tolist() == shard.y.tolist()
    results = {s.metric: score(s, guess, truth).value for s in (attack.scorer, *attack.further)}
    assert results["share of samples above 30 dB"] == results["share of labels read"] == 1
    assert results["SSIM"] == pytest.approx(1)


@pytest.mark.exhaustive
def test_dlg_recovers_two_digits_of_one_step() -> None:
    federation = images(3, 2)
    guess, truth = guessed(DeepLeakage(), federation, DOUBLE, model=smooth_network())
    assert MeanPSNR().units(guess, truth).shape == (6,)
    assert MeanPSNR().units(guess, truth).mean() > 60


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "attack", [AnalyticInversion(), CosineInversion(steps=30), DeepLeakage(steps=20, restarts=1)]
)
def test_a_permutation_brings_inversions_to_chance(attack: GradientInversion) -> None:
    federation = images(5)
    clear, hidden = (
        score_of(attack, CFL(**STEP, mask=mask).fit(federation, FULL), federation)
        for mask in ("none", "permutation")
    )
    assert clear.units == 5
    assert clear.beats_chance and clear.value > 15
    assert not hidden.beats_chance
    assert hidden.value < 12


def test_the_analytic_inversion_divides_weights_by_biases() -> None:
    guess, truth = guessed(AnalyticInversion(), images(3), FULL)
    assert MeanPSNR().units(guess, truth).min() > 100
    bias = torch.tensor([0.5, -2.0, 0.0])
    sample = torch.tensor([1.0, 3.0])
    assert dense_input(torch.outer(bias, sample), bias).tolist() == [1.0, 3.0]
    assert dense_input(torch.zeros(3, 2), torch.zeros(3)).tolist() == [0.0, 0.0]


def test_inversions_say_why_they_do_not_apply() -> None:
    federation = images(2, 12)
    cases: list[tuple[GradientInversion, dict[str, Any], str]] = [
        (AnalyticInversion(), {}, "over one sample was observed"),
        (DeepLeakage(), {}, "over at most 8 samples was observed"),
        (CosineInversion(), {"batch_size": 4}, "over at most 8 samples was observed"),
        (AnalyticInversion(), {"model": "cnn-briggs"}, "first layer is not a dense one"),
    ]
    for attack, params, reason in cases:
        fitted = FedAvg(**{**STEP, **params}).fit(federation, FULL)
        said = attack.applies(view_of(fitted), knowledge_of(fitted))
        assert said is not None and said.startswith("not applicable: ")
        assert reason in said
    single = images(2)
    secure = FedAvg(**STEP, aggregation="secagg").fit(single, FULL)
    for attack in (AnalyticInversion(), DeepLeakage(), CosineInversion()):
        assert "was observed" in str(attack.applies(view_of(secure), knowledge_of(secure)))


def test_lbfgs_minimises_every_row_by_itself() -> None:
    """Rosenbrock's function has its minimum at (1, 1)."""

    def rosenbrock(x: torch.Tensor) -> torch.Tensor:
        return (1 - x[:, 0]) ** 2 + 100 * (x[:, 1] - x[:, 0] ** 2) ** 2

    start = torch.tensor([[-1.2, 1.0], [0.0, 0.0], [3.0, -2.0]], dtype=torch.float64)
    found = lbfgs(rosenbrock, start, steps=200)
    assert torch.allclose(found, torch.ones_like(found), atol=1e-6)
    assert torch.allclose(lbfgs(rosenbrock, start[:1], steps=200), found[:1], atol=1e-6)


def test_qualities_are_those_of_other_implementations() -> None:
    draw = np.random.default_rng(0)
    true = draw.random((1, 9, 12))
    assert psnr(true + 0.1, true) == pytest.approx(20)
    assert psnr(true + 10, true, span=100) == pytest.approx(20)
    assert psnr(true, true) == LARGEST_PSNR
    assert ssim(true, true) == pytest.approx(1)
    # constant images: only the factor of the means is left
    dark, bright = np.full((1, 8, 8), 0.2), np.full((1, 8, 8), 0.6)
    assert ssim(dark, bright) == pytest.approx((2 * 0.12 + 1e-4) / (0.04 + 0.36 + 1e-4))
    noisy = true + 0.2 * draw.normal(size=true.shape)
    assert ssim(noisy, true) == pytest.approx(filtered_ssim(noisy[0], true[0]))
    assert ssim(true[0, 0], true[0, 0]) == pytest.approx(1)


def filtered_ssim(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    """SSIM by filters, as scikit-image computes it by default."""
    ux, uy = uniform_filter(x, 7), uniform_filter(y, 7)
    vx = (uniform_filter(x * x, 7) - ux * ux) * 49 / 48
    vy = (uniform_filter(y * y, 7) - uy * uy) * 49 / 48
    vxy = (uniform_filter(x * y, 7) - ux * uy) * 49 / 48
    above = (2 * ux * uy + 1e-4) * (2 * vxy + 9e-4)
    below = (ux**2 + uy**2 + 1e-4) * (vx + vy + 9e-4)
    return float((above / below)[3:-3, 3:-3].mean())


def test_reconstructions_are_matched_with_the_nearest_samples() -> None:
    assert nearest(np.array([[2.0], [0.1]]), np.array([[0.0], [5.0], [2.2]])) == [(0, 2), (1, 0)]
    federation = images(2, 3)
    truth = Truth(federation)
    reversed_samples = {k: shard.x[::-1] for k, shard in enumerate(federation.shards)}
    guess = Guess("samples", reversed_samples)
    assert MeanPSNR().units(guess, truth).tolist() == [LARGEST_PSNR] * 6
    draw = np.random.default_rng(0)
    # with two clients the control always takes the other one's samples
    assert ShareRecognised().shuffled(guess, truth, draw).max() == 0
