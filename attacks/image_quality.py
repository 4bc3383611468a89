"""Similarity of reconstructed samples to true ones, and scorers of reconstructions."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from securecluster.attacks.arrays import Array, flat_rows
from securecluster.attacks.base import Guess, Truth
from securecluster.attacks.scoring import AgainstOtherClients

LARGEST_PSNR = 200.0  # dB, of samples that are equal to the last bit
RECOGNISABLE = 30.0  # dB, above which a reconstruction counts as successful
WINDOW = 7  # pixels of a side, as in Wang et al. 2004's uniform variant


def psnr(guess: Array, true: Array, span: float = 1.0) -> float:
    """Return the peak signal-to-noise ratio 10 log₁₀(span² / MSE) in dB, at most LARGEST_PSNR.

    Args:
        guess: a sample, of any shape.
        true: the true one.
        span: largest minus smallest possible value.
    """
    difference = np.asarray(guess, float) - np.asarray(true, float)
    error = float(np.mean(difference**2))
    if error == 0:
        return LARGEST_PSNR
    decibels = 10 * float(np.log10(span**2 / error))
    return min(LARGEST_PSNR, decibels)


def ssim(guess: Array, true: Array, span: float = 1.0) -> float:
    """Return the structural similarity of two images (Wang et al. 2004, eq. 13).

    It is the mean over all windows of WINDOW × WINDOW pixels that lie within the image, and over
    channels. Samples that are no images are one window.

    Args:
        guess: an image (channels, height, width), or numbers of another shape.
        true: the true one.
        span: largest minus smallest possible value.
    """
    first = _channels(guess)
    second = _channels(true)
    _, height, width = first.shape
    # samples that are no images have one window
    if np.ndim(guess) == 3:
        height = width = min(WINDOW, height, width)
    windows = np.lib.stride_tricks.sliding_window_view
    axes = (-2, -1)
    x = windows(first, (height, width), (1, 2))
    y = windows(second, (height, width), (1, 2))
    mean_x = x.mean(axes, keepdims=True)
    mean_y = y.mean(axes, keepdims=True)
    deviation_x = x - mean_x
    deviation_y = y - mean_y
    mean_x = mean_x.squeeze(axes)
    mean_y = mean_y.squeeze(axes)
    # sample variances, as in scikit-image
    unbiased = max(1, height * width - 1)
    variance_x = (deviation_x**2).sum(axes) / unbiased
    variance_y = (deviation_y**2).sum(axes) / unbiased
    covariance = (deviation_x * deviation_y).sum(axes) / unbiased
    # constants K1 = 0.01 and K2 = 0.03 of Wang et al. 2004, which keep ratios of small terms stable
    c1 = (0.01 * span) ** 2
    c2 = (0.03 * span) ** 2
    above = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    squares = mean_x**2 + mean_y**2
    below = (squares + c1) * (variance_x + variance_y + c2)
    return float((above / below).mean())


def _channels(sample: Array) -> Array:
    """Return a sample as channels of two axes; one that is no image is one row."""
    numbers = np.asarray(sample, float)
    if numbers.ndim == 3:
        return numbers
    return numbers.reshape(1, 1, -1)


class Reconstruction(AgainstOtherClients):
    """Quality of reconstructed samples, each against the true sample that it is nearest to.

    A guess has for each client samples (n, …); no true sample is taken twice. The negative control
    compares them with the samples of another client.
    """

    @abstractmethod
    def quality(self, guess: Array, true: Array, span: float) -> float:
        """Return the quality of one reconstruction.

        Args:
            guess: a sample.
            true: the true one.
            span: largest minus smallest value of true samples.
        """

    def compared(self, guess: Guess, truth: Truth, subjects: list[int]) -> Array:
        """Return the quality of each reconstruction against a client's samples, (n,).

        Args:
            guess: samples by client.
            truth: of the run.
            subjects: clients, one for each guess.
        """
        qualities = []
        for samples, client in guess.beside(subjects):
            # images of one value have no span, and any one serves
            true = np.asarray(truth.federation.shards[client].x, float)
            span = float(true.max() - true.min()) or 1.0
            for row, column in nearest(samples, true):
                quality = self.quality(samples[row], true[column], span)
                qualities.append(quality)
        return np.asarray(qualities)


class MeanPSNR(Reconstruction):
    """Mean peak signal-to-noise ratio of the reconstructions."""

    metric = "PSNR (dB)"

    def quality(self, guess: Array, true: Array, span: float) -> float:
        """Return the PSNR in dB."""
        return psnr(guess, true, span)


class MeanSSIM(Reconstruction):
    """Mean structural similarity of the reconstructions."""

    metric = "SSIM"

    def quality(self, guess: Array, true: Array, span: float) -> float:
        """Return the SSIM, at most 1."""
        return ssim(guess, true, span)


class ShareRecognised(Reconstruction):
    """Share of reconstructions whose PSNR is above RECOGNISABLE."""

    metric = f"share of samples above {RECOGNISABLE:.0f} dB"

    def quality(self, guess: Array, true: Array, span: float) -> float:
        """Return 1 if the PSNR is above RECOGNISABLE, else 0."""
        return float(psnr(guess, true, span) > RECOGNISABLE)


def nearest(samples: Array, true: Array) -> list[tuple[int, int]]:
    """Return pairs of samples and true ones with the smallest sum of squared distances.

    Args:
        samples: (n, …).
        true: (k, …).

    Returns:
        min(n, k) pairs of positions.
    """
    from scipy.optimize import linear_sum_assignment

    guessed_rows = flat_rows(samples)
    true_rows = flat_rows(true)
    differences = guessed_rows[:, None] - true_rows[None]
    # The order of samples in a batch leaves no trace in its gradient, so they are matched.
    costs = (differences**2).sum(-1)
    rows, columns = linear_sum_assignment(costs)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))
