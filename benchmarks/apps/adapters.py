"""Compare clients that train adapters of a frozen text transformer with clients that train all of
it: clusters, accuracy and bytes.

python -m benchmarks.apps.adapters [--seeds 5] [--minutes 10]

Twenty clients hold windows of twenty words of AG-News, whose label is the topic; four clusters name
the topics differently. The transformer has learned the topics from a tenth of the articles, which
are public and no client's. Adapters are of rank 4 (LoRA, Hu et al. 2022) on every dense layer of
the blocks, and the last layer trains as it is. AG-News is read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.grid import Grid, product, with_seeds
from benchmarks.sheet import Cell
from benchmarks.table import UNRECORDED
from securecluster import CFL, FedAvg, Federation, LabelPermutation
from securecluster.core.devices import global_generator
from securecluster.data.dataset import Source
from securecluster.data.pools import ArrayPool, Pool
from securecluster.data.text import LENGTH, TOPICS, WORDS, ag_news
from securecluster.models.objectives import CLASSIFICATION

WIDTH = 64
HEADS = 4
BLOCKS = 2
RANK = 4
SCALE = 2.0  # of an adapter's output
PUBLIC = 10  # every tenth window is public
STEPS = 400  # of the public training
BATCH = 64
METHODS: Mapping[str, Any] = {"fedavg": FedAvg, "cfl": CFL}
TRAINING: Mapping[str, Any] = {"rounds": 10, "epochs": 1, "batch_size": 10, "lr": 0.1}
TRAINED = ("adapters", "everything")


class Adapted(nn.Module):
    """A frozen dense layer W with an adapter: x -> Wx + s·BAx, of which A and B train.

    Args:
        layer: the dense layer.
        rank: rows of A and columns of B, which starts at 0.
    """

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's outputs with the adapter's added."""
        out: torch.Tensor = self.layer(x) + SCALE * self.up(self.down(x))
        return out


class Block(nn.Module):
    """Attention of all words to all words, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.attended = nn.Linear(WIDTH, 3 * WIDTH)
        self.merged = nn.Linear(WIDTH, WIDTH)
        self.before_dense = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Return the words' vectors (n, L, width) after the block."""
        projected = self.attended(self.before_attention(h)).unflatten(-1, (3 * HEADS, -1))
        query, key, value = projected.transpose(1, 2).chunk(3, dim=1)
        # by hand: torch's own attention refuses vmap on a CPU, and clients would train one by one
        weights = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)
        h = h + self.merged((weights @ value).transpose(1, 2).flatten(2))
        out: torch.Tensor = h + self.narrow(self.wide(self.before_dense(h)).relu())
        return out


class TopicTransformer(nn.Module):
    """The topic of a window of words: x (n, L) -> logits (n, topics)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, len(TOPICS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits.

        Args:
            x: numbers of words, which samples of a classification have as floats.
        """
        h = self.norm(self.blocks(self.words(x.long()) + self.places))
        out: torch.Tensor = self.out(h.mean(1))
        return out


@functools.cache
def topics() -> tuple[Source, torch.Tensor, torch.Tensor]:
    """Return AG-News with topics as labels, and the public windows and their topics."""
    source = ag_news()
    x, y = _labelled(source.train)
    public = np.arange(len(y)) % PUBLIC == 0
    labelled = replace(
        source,
        name="ag_news_topics",
        classes=len(TOPICS),
        train=ArrayPool(x[~public], y[~public]),
        test=ArrayPool(*_labelled(source.test)),
        objective=CLASSIFICATION,
    )
    return labelled, torch.as_tensor(x[public]), torch.as_tensor(y[public])


def _labelled(pool: Pool | None) -> tuple[Any, Any]:
    """Return the windows (n, L) of a pool as floats, and their topics (n,)."""
    assert pool is not None and pool.groups is not None
    number = {topic: k for k, topic in enumerate(TOPICS)}
    labels = np.array([number[topic] for topic in pool.groups])
    return pool.read(np.arange(len(labels))).astype(np.float32), labels


@functools.cache
def public_transformer() -> TopicTransformer:
    """Return the transformer after its training on public windows."""
    _, x, y = topics()
    generator = torch.Generator().manual_seed(0)
    with global_generator(0):
        module = TopicTransformer()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.002)
    for _ in range(STEPS):
        rows = torch.randint(len(y), (BATCH,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(x[rows]), y[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return module


def trained(what: str) -> nn.Module:
    """Return the transformer with what clients train.

    Args:
        what: one of `TRAINED`.
    """
    module = copy.deepcopy(public_transformer())
    if what == "everything":
        return module
    module.requires_grad_(False)
    module.out.requires_grad_(True)
    with global_generator(1):
        for block in module.blocks:
            for name, layer in list(block.named_children()):
                if isinstance(layer, nn.Linear):
                    setattr(block, name, Adapted(layer, RANK))
    return module


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return what trains by method by seed.

    Args:
        scale: "cpu"; there is no other.
        seeds: how many.
    """
    return with_seeds(product(scale=[scale], trained=TRAINED, method=METHODS), range(seeds))


def measure(cell: Cell) -> dict[str, Any]:
    """Run a method once.

    Args:
        cell: one of `cells`.

    Returns:
        Numbers that a client trains and sends, ARI, mean accuracy, and bytes of all clients.
    """
    federation = Federation.simulate(
        topics()[0],
        scenario=LabelPermutation(clusters=4),
        clients=20,
        samples=60,
        seed=cell["seed"],
    )
    method = METHODS[cell["method"]](model=trained(cell["trained"]), **TRAINING)
    fitted = method.fit(federation, UNRECORDED)
    assert fitted.agreement_ is not None
    return {
        "numbers": fitted.network_.dimension,
        "ari": fitted.agreement_["ari"],
        "accuracy": fitted.history_[-1]["accuracy"],
        "up": fitted.bytes_["up"],
        "down": fitted.bytes_["down"],
    }


GRID = Grid(
    __doc__,
    "adapters",
    cells,
    measure,
    by=["trained", "method"],
    values=["numbers", "ari", "accuracy", "up", "down"],
    seeds=5,
)

if __name__ == "__main__":
    print(GRID.main())
