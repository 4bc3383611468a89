"""What all workers read: one .npz with clients, test set, initial weights and the order of the
mini-batches.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from securecluster.benchmarks.peers.work import NAMES, Work, save
from securecluster.core.randomness import Randomness
from securecluster.data.datasets import FOLDER, source
from securecluster.data.pools import Pool as SourcePool
from securecluster.models.validation import build

SEED = 0  # this project draws the initial weights from it, as every worker must start from them
LR = 0.1
# ten steps a client and round: one pass, since pfl's `local_num_steps` only caps within one
SAMPLES, BATCH = (
    100,
    10,
)
Pool = tuple[NDArray[np.uint8], NDArray[np.int64]]


def export(path: Path, model: str, clients: int, rounds: int, samples: int = SAMPLES) -> Work:
    """Write the work of one configuration, and return it.

    Raises:
        UsageError: this project does not know the model.
    """
    flat = build(NAMES[model], (1, 28, 28), 10, Randomness(SEED))
    (x, y), (x_test, y_test), randomness = train(), test(), Randomness(SEED)
    own = dealt(len(y), clients, samples, randomness)
    order = np.stack([_order(clients, samples, t, randomness) for t in range(rounds)])
    work = Work(x[own], y[own], x_test, y_test, flat.initial().numpy(), order, model, LR, BATCH)
    save(path, work)
    return work


def dealt(pool: int, clients: int, samples: int, randomness: Randomness) -> NDArray[np.int64]:
    """Which samples each client holds, (m, n): a shuffled pool dealt out, shuffled anew each time
    it is used up.
    """
    turns = -(-clients * samples // pool)
    cards = np.concatenate(
        [randomness.generator("peers", "deal", turn).permutation(pool) for turn in range(turns)]
    )
    return cards[: clients * samples].reshape(clients, samples)


def train() -> Pool:
    """MNIST's training images; digits scaled up to 28 × 28 where MNIST is not at hand."""
    return _pixels(source("mnist").train) if data() == "mnist" else _digits(0)


def test() -> Pool:
    """The test images: of MNIST, or a fifth of the digits."""
    held = source("mnist").test if data() == "mnist" else None
    return _digits(1) if held is None else _pixels(held)


def data() -> str:
    """The name of the samples: MNIST where it lies under SECURECLUSTER_DATA."""
    folder = os.environ.get(FOLDER)
    return "mnist" if folder and (Path(folder) / "mnist").is_dir() else "digits 28x28"


def _order(clients: int, samples: int, turn: int, randomness: Randomness) -> NDArray[np.int16]:
    draws = randomness.generator("peers", "order", turn).random((clients, samples))
    return draws.argsort(axis=1).astype(np.int16)


def _pixels(pool: SourcePool) -> Pool:
    return np.round(pool.read(np.arange(len(pool.y))) * 255).astype(np.uint8), pool.y


def _digits(held_out: int) -> Pool:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    nearest = np.arange(28) * 8 // 28
    pixels = np.round(bunch.images * 255 / 16).astype(np.uint8)[:, None, nearest][..., nearest]
    mine = (np.arange(len(pixels)) % 5 == 4) == held_out
    return pixels[mine], bunch.target[mine].astype(np.int64)
