"""Clients whose samples are in torch's data sets and loaders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data

from securecluster import Federation
from securecluster.errors import UsageError

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(40, 3, generator=DRAW)
Y = torch.arange(40) % 2


class Texts(data.Dataset[tuple[torch.Tensor, str]]):
    """Samples with labels of text, one by one."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, position: int) -> tuple[torch.Tensor, str]:
        return X[position], ["ill", "well"][int(Y[position])]


class Stream(data.IterableDataset[tuple[torch.Tensor, int]]):
    """Samples that come in an order of their own."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return iter(zip(X, Y.tolist(), strict=True))


def digest(samples: Any) -> str:
    return Federation.from_arrays({"ann": samples}, seed=0).digest()


WHOLE = data.TensorDataset(X, Y)
ODD = range(1, 40, 3)


@pytest.mark.parametrize(
    "samples",
    [
        WHOLE,
        Stream(),
        data.ConcatDataset([data.Subset(WHOLE, range(15)), data.Subset(WHOLE, range(15, 40))]),
        data.DataLoader(WHOLE, batch_size=7),
        data.DataLoader(WHOLE, batch_size=7, shuffle=True, drop_last=True),
        data.DataLoader(WHOLE, batch_size=None),
        data.DataLoader(Stream(), batch_size=4),
    ],
    ids=["data set", "stream", "parts", "loader", "shuffled", "unbatched", "loader of a stream"],
)
def test_all_samples_of_a_data_set_are_a_clients_in_its_order(samples: Any) -> None:
    assert digest(samples) == digest((X.numpy(), Y.numpy()))


@pytest.mark.parametrize(
    "samples",
    [
        data.Subset(WHOLE, list(ODD)),
        data.DataLoader(data.Subset(WHOLE, list(ODD)), shuffle=True),
        data.DataLoader(WHOLE, sampler=data.SubsetRandomSampler(list(ODD))),
    ],
    ids=["subset", "loader of a subset", "subset sampler"],
)
def test_a_subset_is_these_samples_alone(samples: Any) -> None:
    chosen = list(ODD)
    assert digest(samples) == digest((X.numpy()[chosen], Y.numpy()[chosen]))


def test_labels_of_text_keep_their_names() -> None:
    federation = Federation.from_arrays({"ann": Texts()}, seed=0)
    assert federation.class_names == ("ill", "well")
    assert federation.digest() == digest(WHOLE)


def test_a_loader_collates_as_it_says() -> None:
    def doubled(rows: list[Any]) -> Any:
        x, y = data.default_collate(rows)
        return 2 * x, y

    assert digest(data.DataLoader(WHOLE, collate_fn=doubled)) == digest((2 * X, Y))


class Single(data.Dataset[torch.Tensor]):
    """Samples without labels, of different shapes."""

    def __init__(self, pairs: bool) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return 9

    def __getitem__(self, position: int) -> Any:
        x = torch.zeros(position)
        return (x, 0) if self.pairs else x


@pytest.mark.parametrize(
    ("samples", "sentence"),
    [
        (Single(False), r"gives a Tensor for a sample, not a pair \(x, y\)"),
        (Single(True), "cannot be collated .*: make tensors of one shape"),
        (data.Subset(WHOLE, []), "its data set is empty"),
        (
            data.DataLoader(WHOLE, sampler=data.WeightedRandomSampler([1.0] * 40, 40)),
            "draws by a WeightedRandomSampler, which may repeat or leave out samples",
        ),
        (
            data.DataLoader(WHOLE, sampler=data.RandomSampler(WHOLE, replacement=True)),
            "draws by a RandomSampler",
        ),
    ],
    ids=["no labels", "ragged", "empty", "weighted", "with replacement"],
)
def test_what_gives_no_samples_is_refused_by_the_clients_name(samples: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=f"client 'ann': .*{sentence}") as caught:
        digest(samples)
    assert "\n" not in str(caught.value)


def test_no_global_generator_is_drawn_from() -> None:
    state = torch.get_rng_state()
    digest(data.DataLoader(WHOLE, shuffle=True))
    assert torch.equal(state, torch.get_rng_state())
    assert np.array_equal(Y.numpy(), np.arange(40) % 2)
