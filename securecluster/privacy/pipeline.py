"""Stages that every private row goes through at its client.

The order is fixed: (sketch) → clip → noise → (mask) → quantise.

The order holds whatever the options. A guarantee would be void in another: noise needs rows that
were clipped before.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError

if TYPE_CHECKING:
    from securecluster.privacy.dp.noise_streams import NoiseStreams
    from securecluster.privacy.masking.sealing import Seal


class Kind(IntEnum):
    """Kinds of stages, in the only order in which they compose."""

    # A sketch comes first, so that noise of the same σ falls on few numbers.
    SKETCH = 0
    CLIP = 1
    NOISE = 2
    MASK = 3
    QUANTISE = 4


class Stage(Protocol):
    """Map from rows (b, d) to rows (b, d') at the client."""

    @property
    def kind(self) -> Kind:
        """Return the kind, which determines the position among other stages."""
        ...

    @property
    def name(self) -> str:
        """Return the name for reports."""
        ...

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return the rows that leave the client, (b, d').

        Args:
            rows: rows (b, d).
            step: number of the call, for stages that draw anew for each call.
        """
        ...

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return an average of the server as the client uses it.

        Stages that are not undone return it unchanged.

        Args:
            rows: averages (b, d').
            step: number of the call whose rows were averaged.
        """
        ...


@runtime_checkable
class Overwriting(Protocol):
    """Stage that can work in the memory of its rows.

    So the updates of many clients need no second matrix.
    """

    def overwrite(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return the same as `forward`, possibly in the memory of `rows`.

        Args:
            rows: rows (b, d). Their content is undefined afterwards, unless they are returned.
            step: number of the call.
        """
        ...

    def width(self, d: int) -> int:
        """Return the width of `forward`'s rows.

        Args:
            d: numbers in a row before the stage.
        """
        ...


@runtime_checkable
class Personal(Protocol):
    """Stage that draws for each client separately."""

    def arm(self, draws: NoiseStreams) -> None:
        """Set the source of the draws.

        Args:
            draws: streams of the clients.
        """
        ...

    def forward_for(
        self, rows: torch.Tensor, step: int, ids: Sequence[int], field: str
    ) -> torch.Tensor:
        """Return the rows that leave some clients.

        Args:
            rows: rows (b, d), which may be overwritten.
            step: number of the call.
            ids: clients of the rows (b,).
            field: field of the reply that the rows are.
        """
        ...


@runtime_checkable
class Coding(Protocol):
    """Stage whose rows are codes, which the server decodes before it uses them."""

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the numbers (b, d) that codes stand for.

        Args:
            rows: codes (b, n) uint8.

        Raises:
            FrameError: rows that are no codes.
        """
        ...


@runtime_checkable
class Noisy(Protocol):
    """Stage that adds noise of a known amount."""

    @property
    def multiplier(self) -> float:
        """Return z, the standard deviation over the norm that rows are clipped to."""
        ...

    @property
    def shares(self) -> int:
        """Return the number of clients whose noise together amounts to z.

        A row by itself has 1/shares of the variance.
        """
        ...

    def squared_noise(self, d: int) -> float:
        """Return the expected squared norm of the noise on a row; σ²d for Gaussian noise.

        Args:
            d: numbers in a row.
        """
        ...


@runtime_checkable
class Unlockable(Protocol):
    """Object that needs the seed that the clients share."""

    def unlock(self, seed: bytes) -> None:
        """Set the shared seed.

        Args:
            seed: 32 secret bytes.
        """
        ...


@runtime_checkable
class Widening(Protocol):
    """Stage that may add numbers to a row."""

    def width(self, d: int) -> int:
        """Return the width of `forward`'s rows.

        Args:
            d: numbers in a row before the stage.
        """
        ...


class Pipeline:
    """Stages in order; an order that would void a guarantee cannot be constructed.

    Args:
        stages: stages, in ascending order of their kinds, at most one of each.
        seal: seal of rows that go client to client, through the server; None seals nothing.
        fields: pipelines of the reply fields that go through other stages than model rows, by
            name.
        common: numbers of a released row that belong to the common layers, its first ones.

    Raises:
        UsageError: stages in another order, or noise without a clip.
    """

    def __init__(
        self,
        stages: Sequence[Stage] = (),
        seal: Seal | None = None,
        fields: Mapping[str, Pipeline] | None = None,
        common: int = 0,
    ) -> None:
        kinds = [stage.kind for stage in stages]
        _check_order(kinds)
        _check_noise_is_clipped(kinds)
        self.stages = tuple(stages)
        self.seal = seal
        self.fields = dict(fields or {})
        self.common = common
        # True if the run has noise of any kind, so that no error may depend on data
        self.private = False

    def arm(self, draws: NoiseStreams) -> None:
        """Set the source of the clients' noise.

        Args:
            draws: streams of the clients.
        """
        for stage in self.stages:
            if isinstance(stage, Personal):
                stage.arm(draws)
        for pipeline in self.fields.values():
            pipeline.arm(draws)

    @property
    def clips(self) -> bool:
        """Return True if rows are clipped.

        Then clients have equal weights, and none sends its number of samples.
        """
        return self._has(Kind.CLIP)

    @property
    def multiplier(self) -> float | None:
        """Return the noise multiplier z of released rows; None without noise."""
        for stage in self.stages:
            if isinstance(stage, Noisy):
                return stage.multiplier
        return None

    @property
    def shares(self) -> int:
        """Return the smallest number of clients in a sum for which `multiplier` holds."""
        shares = [stage.shares for stage in self.stages if isinstance(stage, Noisy)]
        return max(shares, default=1)

    def _has(self, stage_kind: Kind) -> bool:
        return any(stage.kind is stage_kind for stage in self.stages)

    def _between(self, first: Kind, last: Kind) -> Pipeline:
        stages = [stage for stage in self.stages if first <= stage.kind <= last]
        return Pipeline(stages)

    @property
    def noising_stages(self) -> Pipeline:
        """Return the stages up to the noise, which a row goes through before it is sealed."""
        return self._between(Kind.SKETCH, Kind.NOISE)

    @property
    def masking_stages(self) -> Pipeline:
        """Return the mask alone, for rows that depend on data only through earlier releases."""
        # Such rows have their noise already: post-processing needs no more.
        return self._between(Kind.MASK, Kind.MASK)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the numbers that released rows stand for, at the server.

        Args:
            rows: rows (b, n) as they left their clients.
        """
        # Noise and masks stay: the server computes with masked rows.
        for stage in reversed(self.stages):
            if isinstance(stage, Coding):
                rows = stage.decode(rows)
        return rows

    @property
    def keyed(self) -> bool:
        """Return True if clients must share a seed before they can release anything."""
        if self.seal is not None or self._has(Kind.MASK):
            return True
        return any(pipeline.keyed for pipeline in self.fields.values())

    def unlock(self, seed: bytes) -> None:
        """Set the seed that the clients agreed on, wherever it is needed.

        Args:
            seed: 32 secret bytes.
        """
        pipelines = self.fields.values()
        for item in (*self.stages, *pipelines, self.seal):
            if isinstance(item, Unlockable):
                item.unlock(seed)

    def of(self, field: str) -> Pipeline:
        """Return the pipeline of a reply field.

        Args:
            field: name of the field; one without a pipeline of its own goes through this one.
        """
        return self.fields.get(field, self)

    def forward(
        self,
        rows: torch.Tensor,
        step: int,
        overwrite: bool = False,
        ids: Sequence[int] = (),
        field: str = "",
    ) -> torch.Tensor:
        """Return rows after all stages.

        Args:
            rows: rows (b, d).
            step: number of the call.
            overwrite: True if stages may work in the memory of `rows`, which nobody else uses.
            ids: clients of the rows (b,), for stages that draw for each client.
            field: field of the reply that the rows are, for the same stages.
        """
        for stage in self.stages:
            if isinstance(stage, Personal):
                rows = stage.forward_for(rows, step, ids, field)
            elif overwrite and isinstance(stage, Overwriting):
                rows = stage.overwrite(rows, step)
            else:
                rows = stage.forward(rows, step)
        return rows

    def buffer_width(self, d: int) -> int:
        """Return the width of rows that `forward` can overwrite with what leaves the client.

        Such rows are zero after their first d numbers.

        Args:
            d: numbers in a row before the pipeline.
        """
        # Several stages need rows of d numbers: noise, for instance, would fall on the zeros too.
        if len(self.stages) != 1:
            return d
        (stage,) = self.stages
        if isinstance(stage, Overwriting):
            return stage.width(d)
        return d

    def width(self, d: int) -> int:
        """Return the numbers in a released row.

        Args:
            d: numbers in a row before the pipeline.
        """
        for stage in self.stages:
            if isinstance(stage, Widening):
                d = stage.width(d)
        return d

    def noise(self, d: int) -> float:
        """Return the expected squared norm of the noise in a released row.

        That is σ² times the numbers that noise is added to, which may be those of a sketch.

        Args:
            d: numbers in a row before the pipeline.
        """
        noise = 0.0
        # d follows the row's width from stage to stage.
        for stage in self.stages:
            if isinstance(stage, Noisy):
                noise += stage.squared_noise(d)
            if isinstance(stage, Widening):
                d = stage.width(d)
        return noise

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return an average of the server with the mask undone.

        Args:
            rows: averages (b, n).
            step: number of the call whose rows were averaged.
        """
        # Only masks change the rows here: clips, noise, sketches and codes are not undone.
        for stage in reversed(self.stages):
            rows = stage.inverse(rows, step)
        return rows


def _check_order(kinds: Sequence[Kind]) -> None:
    """Raise UsageError unless kinds ascend.

    Another order could void a guarantee: a noise multiplier, for instance, holds only for rows that
    were clipped before.
    """
    for earlier, later in itertools.pairwise(kinds):
        if later <= earlier:
            first = earlier.name.lower()
            second = later.name.lower()
            raise UsageError(
                f"{second} cannot follow {first}: the order is sketch, clip, noise, mask, quantise"
            )


def _check_noise_is_clipped(kinds: Sequence[Kind]) -> None:
    """Raise UsageError for noise without a clip.

    Without a bound on a row's norm its sensitivity is infinite, and no noise multiplier holds.
    """
    if Kind.NOISE in kinds and Kind.CLIP not in kinds:
        raise UsageError("noise without a clip bounds nothing: add a clip norm")
