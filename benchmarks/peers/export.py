"""Write the .npz that all workers read: clients, test set, initial weights, mini-batch order."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.work import NAMES, Work, save
from securecluster.core.randomness import Randomness
from securecluster.data.datasets import FOLDER, source
from securecluster.data.pools import Pool as SourcePool
from securecluster.models.validation import build

SEED = 0  # this project draws the initial weights from it, as every worker must start from them
LR = 0.1
# ten steps a client and round: one pass, since pfl's `local_num_steps` only caps within one
SAMPLES = 100
BATCH = 10
Pool = tuple[NDArray[np.uint8], NDArray[np.int64]]


def export(path: Path, model: str, clients: int, rounds: int, samples: int = SAMPLES) -> Work:
    """Write the work of one configuration, and return it.

    Args:
        path: of the .npz.
        model: one of `NAMES`.
        clients: m.
        rounds: how many have an order of mini-batches.
        samples: of each client.

    Raises:
        UsageError: this project does not know the model.
    """
    flat = build(NAMES[model], (1, 28, 28), 10, Randomness(SEED))
    x, y = train()
    x_test, y_test = test()
    randomness = Randomness(SEED)
    positions = dealt(len(y), clients, samples, randomness)
    order = np.stack([_order(clients, samples, t, randomness) for t in range(rounds)])
    work = Work(
        x=x[positions],
        y=y[positions],
        x_test=x_test,
        y_test=y_test,
        # in the order of `named_parameters`, which the networks of net.py share
        start=flat.initial().numpy(),
        order=order,
        model=model,
        lr=LR,
        batch=BATCH,
    )
    save(path, work)
    return work


def dealt(pool: int, clients: int, samples: int, randomness: Randomness) -> NDArray[np.int64]:
    """Return the positions (m, n) of each client's samples.

    A shuffled pool is dealt out, and shuffled anew each time it is used up.

    Args:
        pool: its number of samples.
        clients: m.
        samples: n.
        randomness: of the permutations.
    """
    needed = clients * samples
    turns = -(-needed // pool)
    permutations = []
    for turn in range(turns):
        generator = randomness.generator("peers", "deal", turn)
        permutations.append(generator.permutation(pool))
    positions = np.concatenate(permutations)
    return positions[:needed].reshape(clients, samples)


def train() -> Pool:
    """Return MNIST's training images, or digits scaled up to 28 × 28 where MNIST is missing."""
    if data() == "mnist":
        return _pixels(source("mnist").train)
    return _digits(0)


def test() -> Pool:
    """Return the test images: of MNIST, or a fifth of the digits."""
    if data() == "mnist":
        pool = source("mnist").test
        if pool is not None:
            return _pixels(pool)
    return _digits(1)


def data() -> str:
    """Return the name of the samples: MNIST where SECURECLUSTER_DATA has it."""
    folder = os.environ.get(FOLDER)
    if folder and (Path(folder) / "mnist").is_dir():
        return "mnist"
    return "digits 28x28"


def _order(clients: int, samples: int, turn: int, randomness: Randomness) -> NDArray[np.int16]:
    # by round, so that a longer run begins with the orders of a shorter one
    generator = randomness.generator("peers", "order", turn)
    draws = generator.random((clients, samples))
    # sorting uniform numbers makes a random permutation of each row, (m, n)
    return draws.argsort(axis=1).astype(np.int16)


def _pixels(pool: SourcePool) -> Pool:
    """Return a pool's images as bytes, and its labels."""
    positions = np.arange(len(pool.y))
    # bytes are a quarter of float32, and every worker scales them to the same bits (`work.scaled`)
    pixels = np.round(pool.read(positions) * 255)
    return pixels.astype(np.uint8), pool.y


def _digits(held_out: int) -> Pool:
    """Return the digits, scaled up to 28 × 28.

    Args:
        held_out: 0 for the training samples, 1 for the test samples.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    # their pixels are from 0 to 16
    intensities = bunch.images * 255 / 16
    small = np.round(intensities).astype(np.uint8)
    nearest = np.arange(28) * 8 // 28  # the source of each row and column
    pixels = small[:, None, nearest][..., nearest]
    every_fifth = np.arange(len(pixels)) % 5 == 4
    selected = every_fifth == held_out
    labels = bunch.target[selected].astype(np.int64)
    return pixels[selected], labels
