"""Stand-ins for clients whose data nobody may look at yet, out of samples that are public.

A sample is a data set of its own, such as the digits of scikit-learn, or one that the user hands
in. Three quarters of it are trained on and a quarter is for testing. Where it has fewer rows than
the clients want, rows are repeated, in one client no sooner than in all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.noted_warnings import noted
from securecluster.core.randomness import Randomness
from securecluster.data.dataset import Source
from securecluster.data.datasets import IMAGE_SETS, MEANS, SOURCES, source
from securecluster.data.federation import Federation
from securecluster.data.pools import ArrayPool
from securecluster.data.scenarios import Scenario
from securecluster.errors import UsageError, quoted, unknown
from securecluster.models.objectives import CLASSIFICATION

MOST_ROWS = 20_000  # of a sample; more tell a simulation nothing
POWER_ROWS = 500  # by which a mean is measured
MOST_PIXELS = 65_536  # of a side
ROUNDING = 1e-4  # up to which pixels may lie beyond 0 and 1
UNKNOWN = "stand-ins"  # name of no known data set
OWN_SAMPLE = "the public sample"


@dataclass(frozen=True)
class PublicSample:
    """Samples that anybody may see.

    Args:
        name: of the data set.
        x: samples (n, …), float32.
        y: labels (n,), int64 in 0 … classes − 1.
        classes: number of labels.
        notes: what was changed in it, in sentences.
        own: whether the user handed it in, as like the clients' data, and not a known data set.
        known_as: name of the known data set that the clients have, whose public facts set defaults
            of a run (`Facts.bright`, `Facts.mean`); that of none where their data are their own.
    """

    name: str
    x: NDArray[Any]
    y: NDArray[Any]
    classes: int
    notes: tuple[str, ...] = ()
    own: bool = True
    known_as: str = UNKNOWN

    def like(
        self, shape: Sequence[int] | None, classes: int | None, mean: float | None = None
    ) -> PublicSample:
        """Return the sample with images of another form, and of the first classes alone.

        Args:
            shape: height and width, or channels, height and width; None leaves the images as they
                are.
            classes: how many; None keeps all.
            mean: of all pixels, which are from 0 to 1; None leaves them as they are.

        Raises:
            UsageError: the sample has no images, or fewer classes.
        """
        sample = self
        if classes is not None:
            sample = sample.with_classes(classes)
        if shape is not None:
            sample = sample.resized(shape)
        if mean is not None:
            sample = sample.toned(mean)
        return sample

    def standing_for(self, data: str) -> PublicSample:
        """Return the sample with the form of a known data set, of which no sample is read.

        Args:
            data: its name.

        Raises:
            UsageError: no known set of images, or one with more classes.
        """
        if data not in MEANS:
            raise unknown("data set of images", data, MEANS)
        if self.own:
            # its form is that of the clients' data
            return replace(self, known_as=data)
        shape, classes = (1, 8, 8), 10
        if data in IMAGE_SETS:
            shape, classes = IMAGE_SETS[data].shape, IMAGE_SETS[data].classes
        formed = self.like(shape, min(classes, self.classes), MEANS[data])
        return replace(formed, known_as=data)

    def toned(self, mean: float) -> PublicSample:
        """Return the sample with images as light, or as dark, as the clients'.

        Where the mean is on the other side of one half, images are turned into their negatives, as
        ink on paper is that of chalk, and every pixel is raised to the one power with which they
        have the mean. Others stay as they are.

        Args:
            mean: above 0 and below 1.

        Raises:
            UsageError: the samples are no images with pixels from 0 to 1, or no such mean.
        """
        if not 0 < mean < 1:
            raise UsageError(f"mean = {mean:g} is not possible: pixels are from 0 to 1")
        x = np.clip(self.x, 0, 1)
        if x.ndim != 4 or np.abs(x - self.x).max() > ROUNDING:
            raise UsageError(
                f"{self.name} has no images with pixels from 0 to 1, so that it has no mean to "
                "change: leave mean out"
            )
        if (x.mean() > 0.5) == (mean > 0.5):
            return self
        note = f"images of {self.name} are turned into negatives"
        return replace(self, x=_to_mean(1 - x, mean), notes=(*self.notes, note))

    def resized(self, shape: Sequence[int]) -> PublicSample:
        """Return the sample with its images brought to another size, by linear interpolation.

        Args:
            shape: height and width, or channels, height and width.

        Raises:
            UsageError: the samples are no images, or the size is none.
        """
        if self.x.ndim != 4:
            raise UsageError(
                f"{self.name} has no images, so that it has no shape to change: leave shape out"
            )
        if len(shape) not in (2, 3) or min(shape) < 1 or max(shape) > MOST_PIXELS:
            raise UsageError(
                "shape is the height and the width of an image, two whole numbers from 1 to "
                f"{MOST_PIXELS:,}, or its channels before them"
            )
        *channels, height, width = (int(size) for size in shape)
        x = self.x
        if channels and channels[0] != x.shape[1]:
            # grey images have the mean of all channels, and images in colour have it in each
            x = np.repeat(x.mean(axis=1, keepdims=True), channels[0], axis=1)
        if (height, width) != x.shape[2:]:
            import torch

            images = torch.from_numpy(np.ascontiguousarray(x))
            x = torch.nn.functional.interpolate(
                images, (height, width), mode="bilinear", align_corners=False
            ).numpy()
        if x is self.x:
            return self
        form = " × ".join(str(size) for size in (*channels, height, width))
        note = f"images of {self.name} are brought to {form}"
        return replace(self, x=x, notes=(*self.notes, note))

    def with_classes(self, classes: int) -> PublicSample:
        """Return the samples of the first classes alone.

        Args:
            classes: how many.

        Raises:
            UsageError: more than the sample has, or fewer than two.
        """
        if not 2 <= classes <= self.classes:
            raise UsageError(
                f"classes = {classes} is not possible: {self.name} has {self.classes} classes; "
                "hand in a public sample that has as many (--public)"
            )
        retained_rows = self.y < classes
        return replace(self, x=self.x[retained_rows], y=self.y[retained_rows], classes=classes)

    def clients(self, clients: int, samples: int, scenario: Scenario, seed: int) -> Federation:
        """Return stand-ins for clients.

        Args:
            clients: how many.
            samples: that each trains on; it tests on a quarter as many.
            scenario: how clusters differ.
            seed: of all draws.

        Raises:
            UsageError: a sample of fewer than eight rows, or clients that the scenario cannot make.
        """
        if len(self.y) < 8:
            raise UsageError(
                f"{self.name} has {len(self.y)} rows: a simulation needs eight, and better hundreds"
            )
        draw = Randomness(seed).generator("stand-ins", "rows")
        order = draw.permutation(len(self.y))
        held_out, learned = np.split(order, [max(1, len(order) // 4)])
        test = max(1, -(-samples // 4))
        # where labels are skewed, clients want more of some than rows have on average
        copies = 1
        while True:
            pools = []
            for rows, row_count in ((learned, clients * samples), (held_out, clients * test)):
                # whole copies of the sample, and the beginning of one
                some = np.resize(rows, row_count * copies)
                pools.append(ArrayPool(self.x[some], self.y[some]))
            shape = tuple(self.x.shape[1:])
            made = Source(self.known_as, self.classes, shape, pools[0], pools[1])
            last = copies > self.classes
            copies *= 2
            try:
                federation = Federation.simulate(
                    made, scenario=scenario, clients=clients, samples=samples, seed=seed
                )
            except UsageError:
                if last:
                    raise
                continue
            if last or min(len(shard.y_test) for shard in federation.shards) >= test:
                return federation

    def repeats(self, clients: int, samples: int) -> float:
        """Return how often each row is trained on by some client; at most 1 without repetition.

        Args:
            clients: how many.
            samples: that each trains on.
        """
        return clients * samples / max(1, len(self.y) - len(self.y) // 4)


def _to_mean(x: NDArray[Any], mean: float) -> NDArray[Any]:
    """Return pixels from 0 to 1, raised to the power with which they have a mean.

    Args:
        x: the pixels.
        mean: that they are to have, as nearly as powers from 1/16 to 16 bring it.
    """
    some = x[:POWER_ROWS].astype(np.float64)
    low, high = -4.0, 4.0
    for _ in range(20):
        middle = (low + high) / 2
        # a larger power darkens
        if (some**2.0**middle).mean() > mean:
            low = middle
        else:
            high = middle
    raised: NDArray[Any] = (x**2.0**middle).astype(x.dtype)
    return raised


def public_sample(public: Any = "digits", label_column: str | None = None) -> PublicSample:
    """Return a public sample.

    Args:
        public: the name of a data set with labels; the path of a CSV file of numbers; a pair (x, y)
            of arrays; or a federation, whose clients' samples are taken together.
        label_column: of a file, the column with the labels; all others are features.

    Raises:
        UsageError: none of these, or nothing to learn.
    """
    is_path = isinstance(public, str | Path) and str(public) not in SOURCES
    if label_column is not None and not is_path:
        raise UsageError(
            "label_column is a column of a CSV file, and public is none: name the file "
            "(--public FILE), or leave --label-column out"
        )
    if isinstance(public, Federation):
        return _of_federation(public)
    if isinstance(public, tuple | list) and len(public) == 2:
        return _noted(lambda: Federation.from_arrays({"public": tuple(public)}, seed=0))
    if not isinstance(public, str | Path):
        raise UsageError(
            f"public = {quoted(public)} is no sample: give the name of a data set, a CSV file, or "
            "arrays (x, y)"
        )
    text = str(public)
    if text in SOURCES:
        return _of_source(source(text))
    if Path(text).suffix != ".csv" and not os.path.exists(text):  # false for any impossible path
        raise unknown("public sample", text, SOURCES)
    return _of_file(Path(text), label_column)


def _of_source(dataset: Source) -> PublicSample:
    """Return the beginning of a data set, in a random order.

    Raises:
        UsageError: its samples have no labels.
    """
    if dataset.objective is not CLASSIFICATION:
        raise UsageError(
            f"{dataset.name} has no labels to learn: a plan takes a sample for classification"
        )
    rows = np.random.default_rng(0).permutation(len(dataset.train.y))[:MOST_ROWS]
    x, y = dataset.train.read(rows), dataset.train.y[rows]
    return PublicSample(dataset.name, x, y, dataset.classes, own=False)


def _of_file(path: Path, label_column: str | None) -> PublicSample:
    """Return the rows of a CSV file.

    Raises:
        UsageError: no such file, or no label column.
    """
    from securecluster.core.optional_packages import need

    if label_column is None:
        raise UsageError(f"{path} needs the name of the column with the labels (--label-column)")
    pandas = need("pandas")
    try:
        table = pandas.read_csv(path)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read as a CSV file ({type(error).__name__}): check the path"
        ) from None
    client = "public sample"
    while client in table.columns:
        client += "'"
    rows = table.assign(**{client: 0})
    return _noted(lambda: Federation.from_frame(rows, client=client, label=label_column, seed=0))


def _noted(read: Callable[[], Federation]) -> PublicSample:
    """Return the samples of a federation, with its doubts about them as notes.

    Args:
        read: makes the federation.
    """
    doubts: list[str] = []
    with noted(doubts.append):
        sample = _of_federation(read())
    return replace(sample, notes=tuple(doubts))


def _of_federation(federation: Federation) -> PublicSample:
    """Return all samples of a federation.

    Raises:
        UsageError: its samples have no labels.
    """
    if federation.objective.kind != CLASSIFICATION.kind:
        raise UsageError("public has no labels to learn: a plan takes a sample for classification")
    sample_sets = [(s.x, s.y) for s in federation.shards]
    sample_sets += [(s.x_test, s.y_test) for s in federation.shards if len(s.y_test)]
    x = np.concatenate([x for x, _ in sample_sets])
    y = np.concatenate([y for _, y in sample_sets])
    return PublicSample(OWN_SAMPLE, x, y, federation.classes)
