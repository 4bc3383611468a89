"""Gradient signatures against plain loops over examples."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.fft import dctn, idctn

from securecluster.core.randomness import Randomness
from securecluster.privacy.gradient_signatures import (
    LONGEST,
    ClassBlocks,
    ClassResiduals,
    GradientSketch,
    MeanNumber,
    Projected,
    ResidualCoordinates,
    client_sensitivity,
    clipped_rows,
    example_sensitivity,
    scaled_to_norm,
    shortened,
    signature_mean,
)
from securecluster.privacy.low_frequencies import LowFrequencies

FEATURES = 5
CLASSES = 3
CENTRE = 0.25
SIDE = 16  # height and width of images
LOW = LowFrequencies((1, SIDE, SIDE))


def examples(count: int = 20, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples (count, 1, 5) and labels, of which class 2 is rare."""
    draw = np.random.default_rng(seed)
    inputs = draw.normal(size=(count, 1, FEATURES)).astype(np.float32)
    labels = draw.choice(CLASSES, count, p=[0.5, 0.4, 0.1])
    return torch.from_numpy(inputs), torch.from_numpy(labels)


def images(count: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (count, 1, 16, 16) and labels."""
    inputs = np.random.default_rng(1).normal(size=(count, 1, SIDE, SIDE)).astype(np.float32)
    return torch.from_numpy(inputs), examples(count)[1]


def sketch(size: int = 4) -> GradientSketch:
    """Return a sketch of gradients."""
    return GradientSketch(size, FEATURES, CLASSES, CENTRE, Randomness(3))


def blocks(size: int = 2) -> ClassBlocks:
    """Return class blocks."""
    return ClassBlocks(size, FEATURES, CLASSES, CENTRE, Randomness(3))


def residuals(size: int = 2) -> ClassResiduals:
    """Return residuals of class blocks from means that are not theirs."""
    draw = np.random.default_rng(5)
    unit = ClassBlocks(size, FEATURES, CLASSES, CENTRE, Randomness(3), unit=True)
    return ClassResiduals(unit, torch.from_numpy(draw.normal(size=(CLASSES, size))))


def coordinates() -> ResidualCoordinates:
    """Return residuals in three directions that are no unit vectors."""
    draw = np.random.default_rng(6)
    shifts = torch.from_numpy(draw.normal(size=(CLASSES, 2)))
    directions = torch.from_numpy(10 * draw.normal(size=(3, CLASSES, 2)))
    return ResidualCoordinates(residuals(), shifts, directions)


def of_images() -> list[GradientSketch | ClassBlocks | ClassResiduals]:
    """Return maps of images that begin with their lowest frequencies."""
    public = Randomness(3)
    numbers = SIDE**2
    unit = ClassBlocks(2, numbers, CLASSES, CENTRE, public, unit=True, smooth=LOW)
    means = torch.from_numpy(np.random.default_rng(5).normal(size=(CLASSES, 2)))
    return [
        GradientSketch(4, numbers, CLASSES, CENTRE, public, LOW),
        ClassBlocks(2, numbers, CLASSES, CENTRE, public, smooth=LOW),
        ClassResiduals(unit, means),
    ]


def clipped(row: np.ndarray, clip: float) -> np.ndarray:
    """Return a row scaled down to a norm where it is longer."""
    return row * min(1.0, clip / np.linalg.norm(row))


def autograd_gradient(x: torch.Tensor, y: int) -> np.ndarray:
    """Return the gradient (C, D + 1) of softmax regression at zero weights, by autograd."""
    weights = torch.zeros(CLASSES, FEATURES + 1, dtype=torch.float64, requires_grad=True)
    extended = torch.cat([x.double().flatten() - CENTRE, torch.ones(1, dtype=torch.float64)])
    loss = torch.nn.functional.cross_entropy((weights @ extended)[None], torch.tensor([y]))
    (gradient,) = torch.autograd.grad(loss, weights)
    return gradient.numpy()


def loop_sum(public: GradientSketch, clip: float) -> np.ndarray:
    """Return the sum of clipped sketches by a loop over examples, classes and numbers."""
    inputs, labels = examples()
    total = np.zeros(public.size)
    for x, y in zip(inputs, labels.tolist(), strict=True):
        gradient = autograd_gradient(x, y)
        row = np.zeros(public.size)
        for label in range(CLASSES):
            row += gradient[label] @ public.class_map(label).double().numpy()
        total += clipped(row, clip)
    return total


MAPS = [
    sketch(),
    blocks(),
    Projected(sketch(), 5 * torch.eye(4, dtype=torch.float64)),
    residuals(),
    coordinates(),
]


@pytest.mark.parametrize("clip", [0.5, 100.0])
def test_the_signature_is_the_mean_of_clipped_sketches_of_autograds_gradients(clip: float) -> None:
    inputs, labels = examples()
    mean = signature_mean(sketch(), inputs, labels, clip)
    np.testing.assert_allclose(mean.numpy(), loop_sum(sketch(), clip) / 20, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("clip", [0.5, 100.0])
def test_class_blocks_are_sums_by_class_with_their_counts(clip: float) -> None:
    inputs, labels = examples()
    public = blocks()
    projection = public.projection().double().numpy()
    total = np.zeros((CLASSES, 3))
    for x, y in zip(inputs, labels.tolist(), strict=True):
        centred = x.double().flatten().numpy() - CENTRE
        total[y] += clipped(np.append(centred @ projection, 1.0), clip)
    mean = signature_mean(public, inputs, labels, clip).numpy().reshape(CLASSES, 3)
    np.testing.assert_allclose(mean, total / 20, rtol=1e-5, atol=1e-7)
    if clip == 100.0:  # nothing is clipped: the last number of a block counts its examples
        counts = np.bincount(labels.numpy(), minlength=CLASSES)
        np.testing.assert_allclose(mean[:, -1] * 20, counts)


def test_rows_in_few_directions_are_clipped_there() -> None:
    inputs, labels = examples()
    directions = torch.eye(4, dtype=torch.float64)[:2] * 3  # neither unit vectors
    mean = signature_mean(Projected(sketch(), directions), inputs, labels, 0.2)
    total = np.zeros(2)
    for row in sketch().rows(inputs.flatten(1), labels).double().numpy():
        total += clipped(3 * clipped(row, 1.0)[:2], 0.2)
    np.testing.assert_allclose(mean.numpy(), total / 20, rtol=1e-6)


@pytest.mark.parametrize(
    ("public", "made"), [(of, examples) for of in MAPS] + [(of, images) for of in of_images()]
)
def test_one_example_moves_a_signature_by_at_most_its_sensitivity(
    public: object, made: Callable[[], tuple[torch.Tensor, torch.Tensor]]
) -> None:
    inputs, labels = made()
    inputs[0] *= 1e6
    whole = signature_mean(public, inputs, labels, 0.7)  # type: ignore[arg-type]
    rest = signature_mean(public, inputs[1:], labels[1:], 0.7)  # type: ignore[arg-type]
    moved = float((whole - rest * 19 / 20).norm())
    bound = example_sensitivity(0.7, 20)
    assert moved == pytest.approx(bound, rel=1e-9)  # a long row is clipped: the bound is reached
    assert float(whole.norm()) <= client_sensitivity(0.7)


@pytest.mark.parametrize("public", MAPS)
def test_a_replaced_example_moves_a_signature_by_at_most_twice_that(public: object) -> None:
    # the replacement is of any class, and of any length
    inputs, labels = examples(6)
    before = signature_mean(public, inputs, labels, 0.7)  # type: ignore[arg-type]
    furthest = 0.0
    for place in range(6):
        for label in range(CLASSES):
            for factor in (0.0, -1e4, 1e4):
                others, theirs = inputs.clone(), labels.clone()
                others[place] *= factor
                theirs[place] = label
                after = signature_mean(public, others, theirs, 0.7)  # type: ignore[arg-type]
                furthest = max(furthest, float((after - before).norm()))
    bound = 2 * example_sensitivity(0.7, 6)
    assert 0.7 * bound < furthest <= bound * (1 + 1e-9)


def residual(x: np.ndarray, y: int) -> np.ndarray:
    """Return the clipped residual of one example, in a loop of its own."""
    public = residuals()
    centred = x.astype(np.float64) - CENTRE
    signs = np.sign(public.blocks.projection().double().numpy())
    projected = (centred / np.linalg.norm(centred)) @ signs / np.sqrt(2)
    return clipped(1.5 * (projected - public.means[y].numpy()), 1.0)


def test_residuals_are_those_of_examples_of_norm_one_from_the_means_of_their_classes() -> None:
    inputs, labels = examples()
    total = np.zeros((CLASSES, 2))
    for x, y in zip(inputs.flatten(1).numpy(), labels.tolist(), strict=True):
        total[y] += residual(x, y)
    mean = signature_mean(residuals(), inputs, labels, 1.0)
    np.testing.assert_allclose(mean.numpy(), total.ravel() / 20, atol=1e-7)


def test_coordinates_of_residuals_are_clipped_again() -> None:
    inputs, labels = examples()
    public = coordinates()
    total = np.zeros(3)
    for x, y in zip(inputs.flatten(1).numpy(), labels.tolist(), strict=True):
        shifted = residual(x, y) - public.shifts[y].numpy()
        total += clipped(public.directions[:, y].numpy() @ shifted, 0.2)
    mean = signature_mean(public, inputs, labels, 0.2)
    np.testing.assert_allclose(mean.numpy(), total / 20, atol=1e-7)


@pytest.mark.parametrize("factor", [1e-3, 1.0, 7.0])
def test_rows_of_norm_one_do_not_depend_on_the_scale_of_examples(factor: float) -> None:
    inputs, _ = examples()
    centred = inputs.flatten(1) - CENTRE
    unit = residuals().blocks
    expected = unit.rows(centred + CENTRE)
    torch.testing.assert_close(unit.rows(factor * centred + CENTRE), expected, rtol=1e-3, atol=1e-4)


def test_the_mean_number_is_that_of_clipped_means() -> None:
    inputs, labels = examples()
    inputs[3] = 50.0
    means = [np.clip(x.mean(), -0.5, 0.5) for x in inputs.double().numpy()]
    told = signature_mean(MeanNumber(), inputs, labels, 0.5)
    np.testing.assert_allclose(told.numpy(), [np.mean(means)])


def test_an_example_moves_the_mean_number_by_at_most_its_sensitivity() -> None:
    inputs, labels = examples()
    for value in (1e6, -1e6, float("nan")):
        inputs[0] = value
        whole = signature_mean(MeanNumber(), inputs, labels, 1.0)
        rest = signature_mean(MeanNumber(), inputs[1:], labels[1:], 1.0)
        assert float((whole - rest * 19 / 20).norm()) <= example_sensitivity(1.0, 20) * (1 + 1e-9)


def test_long_examples_that_the_sketch_hardly_sees_keep_the_sensitivity() -> None:
    # The sketch of these examples is almost only what rounding leaves, and single precision rounds
    # a product of three rows otherwise than one of four: all of them would change direction.
    public = GradientSketch(16, 64, 10, CENTRE, Randomness(3))
    seen = (public._mean_map() - public.class_map(0)).double().numpy().T[:, :64]
    labels = torch.zeros(4, dtype=torch.int64)
    draw = np.random.default_rng(0)
    for _ in range(20):
        x = draw.normal(size=64)
        x -= np.linalg.lstsq(seen, seen @ x, rcond=None)[0]
        x *= 1e7 / np.linalg.norm(x)
        inputs = torch.from_numpy(np.tile(x, (4, 1))).float()
        whole = signature_mean(public, inputs, labels, 1.0) * 4
        rest = signature_mean(public, inputs[1:], labels[1:], 1.0) * 3
        assert float((whole - rest).norm()) <= 1.001


def test_examples_of_usual_length_are_not_scaled() -> None:
    inputs, _ = examples()
    flat = inputs.flatten(1)
    assert torch.equal(shortened(flat), flat)
    long = torch.cat([flat * 1e9, torch.full((1, FEATURES), float("inf"))])
    norms = shortened(long).norm(dim=1)
    torch.testing.assert_close(norms[:-1], torch.full((20,), LONGEST))
    assert not bool(norms[-1].isfinite())


@pytest.mark.parametrize("public", of_images())
def test_images_that_have_hardly_any_low_frequencies_keep_the_sensitivity(public: object) -> None:
    # single precision rounds a product of three rows otherwise than one of four, and what is left
    # of such images would be scaled up
    labels = torch.zeros(4, dtype=torch.int64)
    draw = np.random.default_rng(0)
    for _ in range(20):
        spectrum = dctn(draw.normal(size=(SIDE, SIDE)), norm="ortho")
        spectrum[:8, :8] = 0
        image = idctn(spectrum, norm="ortho")
        image *= 1e7 / np.linalg.norm(image)
        inputs = torch.from_numpy(np.tile(image.ravel(), (4, 1))).float()
        whole = signature_mean(public, inputs, labels, 1.0) * 4  # type: ignore[arg-type]
        rest = signature_mean(public, inputs[1:], labels[1:], 1.0) * 3  # type: ignore[arg-type]
        assert float((whole - rest).norm()) <= 1.001


@pytest.mark.parametrize("public", of_images())
def test_high_frequencies_do_not_matter_where_low_ones_are_taken(public: object) -> None:
    inputs, labels = images()
    spectra = dctn(inputs.double().numpy(), axes=(2, 3), norm="ortho")
    spectra[:, :, 7:] += 5.0
    spectra[:, :, :, 7:] -= 3.0
    others = torch.from_numpy(idctn(spectra, axes=(2, 3), norm="ortho")).float()
    expected = signature_mean(public, inputs, labels, 1.0)  # type: ignore[arg-type]
    found = signature_mean(public, others, labels, 1.0)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert float(expected.norm()) > 0.01


def test_rows_that_are_not_finite_count_as_zeros() -> None:
    rows = torch.tensor([[3.0, 4.0], [float("nan"), 1.0], [float("inf"), 0.0]])
    expected = torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(clipped_rows(rows, 1.0), expected)


def test_a_scaled_signature_has_the_norm_whatever_it_was() -> None:
    row = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert float(scaled_to_norm(row, 0.5).norm()) == pytest.approx(0.5)
    assert not scaled_to_norm(torch.zeros(2)).any()


def test_a_client_without_examples_has_a_signature_of_zeros() -> None:
    inputs, labels = examples()
    assert signature_mean(sketch(), inputs[:0], labels[:0], 1.0).tolist() == [0.0] * 4


def test_the_public_map_follows_from_the_seed_and_differs_by_class() -> None:
    again = GradientSketch(4, FEATURES, CLASSES, CENTRE, Randomness(3))
    other = GradientSketch(4, FEATURES, CLASSES, CENTRE, Randomness(4))
    assert torch.equal(sketch().class_map(0), again.class_map(0))
    assert not torch.equal(sketch().class_map(0), other.class_map(0))
    assert not torch.equal(sketch().class_map(0), sketch().class_map(1))


def test_sketches_keep_inner_products_on_average() -> None:
    inputs, labels = examples(2, seed=1)
    gradients = []
    for x, y in zip(inputs, labels.tolist(), strict=True):
        gradients.append(autograd_gradient(x, y).ravel())
    rows = sketch(20_000).rows(inputs.flatten(1), labels).double().numpy()
    assert rows[0] @ rows[1] == pytest.approx(gradients[0] @ gradients[1], abs=0.1)
    assert rows[0] @ rows[0] == pytest.approx(gradients[0] @ gradients[0], rel=0.05)
