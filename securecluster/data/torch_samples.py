"""Samples in torch's data sets and loaders, collated into arrays."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from securecluster.errors import UsageError

LOADED = "torch.utils.data"  # a module that is not loaded has made no object


def pair_in(client: str, samples: Any) -> tuple[Any, Any] | None:
    """Return X and y of a torch Dataset, Subset or DataLoader; None for anything else.

    The samples of a loader are in the order of its data set: shuffling and batches are the run's.

    Args:
        client: its name.
        samples: as the user has them.

    Raises:
        UsageError: a loader that repeats or weighs samples, or samples that are no pair (x, y).
    """
    data = sys.modules.get(LOADED)
    if data is None or not isinstance(samples, data.Dataset | data.DataLoader):
        return None
    collate = data.default_collate
    dataset = samples
    chosen = None
    if isinstance(samples, data.DataLoader):
        dataset = samples.dataset
        # without batches the loader collates nothing
        if samples.batch_sampler is not None:
            collate = samples.collate_fn
        chosen = _positions(client, samples, data)
    if isinstance(dataset, data.IterableDataset):
        rows = list(dataset)
    else:
        rows = [dataset[position] for position in chosen or range(len(dataset))]
    return _collated(client, rows, collate)


def _positions(client: str, loader: Any, data: Any) -> Sequence[int] | None:
    """Return the positions in a loader's data set that it draws; None for all of them.

    Args:
        client: its name.
        loader: a DataLoader.
        data: the module torch.utils.data.
    """
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(loader.dataset, data.IterableDataset):
        return None
    if isinstance(sampler, data.SubsetRandomSampler):
        return [int(position) for position in sampler.indices]
    is_usual = isinstance(sampler, data.SequentialSampler | data.RandomSampler)
    repeats = getattr(sampler, "replacement", False)
    if is_usual and not repeats and len(sampler) == len(loader.dataset):
        return None
    raise UsageError(
        f"client {client!r}: its DataLoader draws by a {type(sampler).__name__}, which may repeat "
        "or leave out samples: give the Dataset, or a Subset of it"
    )


def _collated(client: str, rows: Sequence[Any], collate: Any) -> tuple[Any, Any]:
    """Return X and y of samples that a data set gave."""
    if not rows:
        raise UsageError(f"client {client!r}: its data set is empty: leave the client out")
    first = rows[0]
    if not isinstance(first, tuple | list) or len(first) != 2:
        raise UsageError(
            f"client {client!r}: its data set gives a {type(first).__name__} for a sample, not a "
            "pair (x, y): give one that does"
        )
    try:
        batch = collate(rows)
    except Exception as error:  # whatever samples of the user's own cause
        raise UsageError(
            f"client {client!r}: samples of its data set cannot be collated "
            f"({type(error).__name__}: {error}): make tensors of one shape of them"
        ) from None
    return batch[0], batch[1]
