"""The loop every private row goes through at its client: (sketch) → clip → noise → (mask) →
quantise.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError

if TYPE_CHECKING:
    from securecluster.privacy.dp.client_noise import ClientNoise
    from securecluster.privacy.dp.noise_streams import NoiseStreams
    from securecluster.privacy.masking.sealing import Seal


class Kind(IntEnum):
    """The kinds of stages, in the only order in which they compose."""

    SKETCH = 0
    CLIP = 1
    NOISE = 2
    MASK = 3
    QUANTISE = 4


class Stage(Protocol):
    """Rows (b, d) to rows (b, d') at the client; `step` numbers the call, so that what must be
    fresh is fresh.
    """

    @property
    def kind(self) -> Kind:
        """Where in the order it belongs."""
        ...

    @property
    def name(self) -> str:
        """What reports call it."""
        ...

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """What leaves the client."""
        ...

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """What a client makes of an average that comes back (the identity for stages that are not
        undone).
        """
        ...


@runtime_checkable
class Overwriting(Protocol):
    """A stage that can work in the memory of its rows, so that a cohort's updates need no second
    matrix.
    """

    def overwrite(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """What `forward` gives; `rows` is the buffer, and what is left in it is undefined unless it
        is what is returned.
        """
        ...

    def width(self, d: int) -> int:
        """Numbers in what `forward` makes of a row of d."""
        ...


@runtime_checkable
class Personal(Protocol):
    """A stage that draws for each client apart."""

    def arm(self, draws: NoiseStreams) -> None:
        """Hand in what it draws from."""
        ...

    def forward_for(
        self, rows: torch.Tensor, step: int, ids: Sequence[int], field: str
    ) -> torch.Tensor:
        """What leaves the clients `ids` of rows (b, d), which may be overwritten."""
        ...


@runtime_checkable
class Coding(Protocol):
    """A stage whose rows are codes, which the server decodes before it uses them."""

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows (b, n) uint8 to the numbers (b, d) that they stand for.

        Raises:
            FrameError: rows that are no codes.
        """
        ...


@runtime_checkable
class Noisy(Protocol):
    """A stage that adds noise, and says how much."""

    @property
    def multiplier(self) -> float:
        """z: its standard deviation over what rows are clipped to."""
        ...

    @property
    def shares(self) -> int:
        """How many clients' noise together amounts to z; a row by itself has that part of the
        variance.
        """
        ...

    def squared_noise(self, d: int) -> float:
        """Return the expected squared norm of what it adds to a row of d numbers.

        For Gaussian noise it is σ²d.
        """
        ...


@runtime_checkable
class Unlockable(Protocol):
    """What needs the seed that the clients share."""

    def unlock(self, seed: bytes) -> None:
        """Hand in the seed, 32 bytes."""
        ...


@runtime_checkable
class Widening(Protocol):
    """A stage that may add numbers to a row."""

    def width(self, d: int) -> int:
        """Numbers in what `forward` makes of a row of d."""
        ...


class Pipeline:
    """Stages in order; an order that would void a guarantee cannot be constructed.

    Args:
        seal: closes what goes client to client, through the server; without one nothing is sealed.
        fields: of replies that go through other stages than model rows do, by name.
        common: numbers of a row that has left its client that are the common layers', the first
            ones.
    """

    def __init__(
        self,
        stages: Sequence[Stage] = (),
        seal: Seal | None = None,
        fields: Mapping[str, Pipeline] | None = None,
        common: int = 0,
    ) -> None:
        kinds = [s.kind for s in stages]
        for before, after in itertools.pairwise(kinds):
            if after <= before:
                raise UsageError(
                    f"{after.name.lower()} cannot follow {before.name.lower()}: the order is "
                    "sketch, clip, noise, mask, quantise"
                )
        if Kind.NOISE in kinds and Kind.CLIP not in kinds:
            raise UsageError("noise without a clip bounds nothing: add a clip norm")
        self.stages = tuple(stages)
        self.seal, self.fields, self.common = seal, dict(fields or {}), common
        self.guard: ClientNoise | None = None  # at clients, where the run has noise
        # whether the run has noise of any kind, so that no error may depend on data
        self.private = False

    def arm(self, draws: NoiseStreams) -> None:
        """Hand in what the clients' noise is drawn from."""
        for stage in self.stages:
            if isinstance(stage, Personal):
                stage.arm(draws)
        for other in self.fields.values():
            other.arm(draws)

    @property
    def clips(self) -> bool:
        """Whether rows are clipped: then they count the same, and no client tells how many samples
        it holds.
        """
        return any(stage.kind is Kind.CLIP for stage in self.stages)

    @property
    def multiplier(self) -> float | None:
        """The noise multiplier z of what leaves; None where nothing random is added."""
        return next((stage.multiplier for stage in self.stages if isinstance(stage, Noisy)), None)

    @property
    def shares(self) -> int:
        """The fewest clients in a sum for which `multiplier` holds."""
        return max((stage.shares for stage in self.stages if isinstance(stage, Noisy)), default=1)

    def _part(self, first: Kind, last: Kind) -> Pipeline:
        return Pipeline([stage for stage in self.stages if first <= stage.kind <= last])

    @property
    def shield(self) -> Pipeline:
        """Its stages up to the noise: what a row that is sealed goes through first."""
        return self._part(Kind.SKETCH, Kind.NOISE)

    @property
    def veil(self) -> Pipeline:
        """Its masks alone: what a row goes through that depends on data only through what was
        released before.
        """
        return self._part(Kind.MASK, Kind.MASK)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """At the server: the numbers that rows stand for."""
        for stage in reversed(self.stages):
            rows = stage.decode(rows) if isinstance(stage, Coding) else rows
        return rows

    @property
    def keyed(self) -> bool:
        """Whether clients must share a seed before anything of theirs can leave."""
        own = self.seal is not None or any(stage.kind is Kind.MASK for stage in self.stages)
        return own or any(other.keyed for other in self.fields.values())

    def unlock(self, seed: bytes) -> None:
        """Hand in the 32-byte seed that the clients agreed on."""
        for part in (*self.stages, *self.fields.values(), *([self.seal] if self.seal else [])):
            if isinstance(part, Unlockable):
                part.unlock(seed)

    def of(self, field: str) -> Pipeline:
        """What a field of a reply goes through."""
        return self.fields.get(field, self)

    def forward(
        self,
        rows: torch.Tensor,
        step: int,
        own: bool = False,
        ids: Sequence[int] = (),
        field: str = "",
    ) -> torch.Tensor:
        """Apply every stage.

        Args:
            own: nobody else keeps `rows`, so stages that can may overwrite them.
            ids: whose rows they are, for stages that draw for each client. field: what they are
                called in the reply.
        """
        for stage in self.stages:
            if isinstance(stage, Personal):
                rows = stage.forward_for(rows, step, ids, field)
            else:
                rows = (
                    stage.overwrite(rows, step)
                    if own and isinstance(stage, Overwriting)
                    else stage.forward(rows, step)
                )
        return rows

    def room(self, d: int) -> int:
        """The width of rows, zero after the first d numbers, that `forward` can overwrite with what
        leaves the client.
        """
        return (
            self.stages[0].width(d)
            if len(self.stages) == 1 and isinstance(self.stages[0], Overwriting)
            else d
        )

    def width(self, d: int) -> int:
        """Numbers in what leaves the client of a row of d."""
        for stage in self.stages:
            d = stage.width(d) if isinstance(stage, Widening) else d
        return d

    def noise(self, d: int) -> float:
        """The expected squared norm of the noise that a row of d numbers leaves with, σ² times
        those it is added to.
        """
        total = 0.0
        for stage in self.stages:
            total += stage.squared_noise(d) if isinstance(stage, Noisy) else 0.0
            d = stage.width(d) if isinstance(stage, Widening) else d
        return total

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Undo what can be undone, in reverse."""
        for stage in reversed(self.stages):
            rows = stage.inverse(rows, step)
        return rows
