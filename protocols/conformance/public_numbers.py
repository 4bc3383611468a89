"""Clients that release fixed public numbers in place of all that has noise, and note what they do.

The numbers depend on no data. They are generic: none is zero, no two are equal, and both signs
occur, so that what multiplies, orders or selects them shows. (Zeros would hide all of that.) They
differ by client, call and draw; each pass has others, of another magnitude: of the row before the
noise, of the noise, and of order 1.

A training with noise is replaced as a whole by numbers that follow from its start, its plan, its
regularizer and its scale: what steers it with data shows, too.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Call
from securecluster.privacy.dp.gaussian_mechanism import REPLACE
from securecluster.privacy.dp.noise_streams import digest
from securecluster.protocols import authoring as fl
from securecluster.protocols.common.client_tensors import ClientRows
from securecluster.protocols.conformance.held_values import held_values, numbers_in, printed
from securecluster.runtime.endpoint import release_of
from securecluster.training.config import LocalTraining
from securecluster.training.evaluation import Samples
from securecluster.training.local_trainer import LossTerm

if TYPE_CHECKING:
    from securecluster.runtime.endpoint import Endpoint

PASSES = 3
SMALLEST, LARGEST = 0.5, 1.5  # magnitudes, before they are scaled
NOISE = "noise"  # a kind of deed; others are "training" with a part of it
# who may use released numbers alone: a function in `postprocess`, a call that trains with noise
FUNCTION, STATE = "function", "state"


@dataclass(frozen=True)
class PublicNumbers:
    """Numbers of one pass, which follow from names and shapes alone.

    Args:
        number: of the pass.
    """

    number: int

    def like(
        self, row: torch.Tensor, sensitivity: float, multiplier: float, *name: Any
    ) -> torch.Tensor:
        """Return numbers of a row's shape and type.

        Args:
            row: that they replace; its values are not looked at.
            sensitivity: of the noise that the row would get.
            multiplier: z of this noise.
            *name: of the draw.
        """
        draw = np.random.default_rng(self._seed(tuple(row.shape), *name))
        magnitudes = draw.uniform(SMALLEST, LARGEST, row.numel())
        signs = draw.choice((-1.0, 1.0), row.numel())
        scales = (sensitivity / math.sqrt(max(1, row.numel())), multiplier * sensitivity, 1.0)
        scale = scales[self.number % len(scales)]
        numbers = torch.from_numpy(magnitudes * signs * (scale or 1.0))
        return numbers.view(row.shape).to(row)

    def option(self, options: int, *name: Any) -> int:
        """Return one of some options, another one in each pass.

        Args:
            options: how many there are.
            *name: of the draw.
        """
        return (self._seed(options, *name) + self.number) % options

    def _seed(self, *name: Any) -> int:
        """Return the seed of a draw; options of a draw count on from pass to pass."""
        text = repr(name).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class Deed(NamedTuple):
    """Use of noise or training by a client, but for the numbers themselves.

    Args:
        kind: the part of it, in words.
        value: what is equal whatever the data are.
    """

    kind: str
    value: str


@dataclass(frozen=True)
class Draw:
    """One draw of a client's noise: the row before it, and what the noise is scaled to.

    Args:
        purpose: name of the draw.
        row: the row (d,) in double precision.
        multiplier: z.
        sensitivity: the largest L2 norm of what the unit of privacy contributes.
    """

    purpose: str
    row: torch.Tensor
    multiplier: float
    sensitivity: float


@dataclass
class Answer:
    """Answers of the clients of a world to a call, and what they did for it.

    Args:
        fields: digest of each field of the reply; None if the call was refused.
        deeds: of each client, in order.
        draws: of each client, in order.
        used: by client and name, digests of what a function of released numbers, or a training with
            noise, had at hand.
    """

    fields: Mapping[str, str] | None = None
    deeds: dict[int, list[Deed]] = field(default_factory=dict)
    draws: dict[int, list[Draw]] = field(default_factory=dict)
    used: dict[tuple[int, str, str], list[str]] = field(default_factory=dict)

    def note(self, client: int, deed_kind: str, value: Any) -> None:
        """Add what a client did.

        Args:
            client: its number.
            deed_kind: of the deed, in words.
            value: what is equal whatever the data are.
        """
        self.deeds.setdefault(client, []).append(Deed(deed_kind, str(value)))

    def use(self, clients: Sequence[int], user: str, name: str, value: str) -> None:
        """Add what was at hand where only released numbers may be used.

        Args:
            clients: that it is of.
            user: `FUNCTION` or `STATE`.
            name: of the variable or the attribute.
            value: its digest.
        """
        for client in clients:
            self.used.setdefault((client, user, name), []).append(value)


@dataclass(frozen=True)
class PublicContext(fl.CallContext):
    """Context by which clients release public numbers.

    Args:
        world: that notes what they do.
    """

    world: Any = field(default=None, compare=False, repr=False)

    def release(
        self,
        rows: torch.Tensor,
        norm: float | None = None,
        sensitivity: float | Sequence[float] | None = None,
        noise: float | None = None,
        replace: float = REPLACE,
        once: str = "",
    ) -> torch.Tensor:
        """Return public numbers in place of the rows and their noise."""
        for client in self.ids:
            self.world.now.note(client, NOISE, ("release", replace, once))
        return super().release(rows, norm, sensitivity, noise, replace, once)

    def release_choice(self, counts: Any, noise: float | None = None) -> torch.Tensor:
        """Return a public option for each client."""
        multiplier = self._multiplier(noise)
        if not multiplier:
            return super().release_choice(counts, noise)
        options = counts.shape[1]
        chosen = []
        for client in self.ids:
            purpose = self.releases.purpose(client)
            self.world.now.note(client, NOISE, (purpose, options, multiplier))
            chosen.append(self.world.numbers.option(options, client, purpose, self.step))
        return torch.as_tensor(chosen)

    def postprocess(self, function: Any, *released: Any) -> torch.Tensor:
        """Return what a function computes of public numbers, and note what it holds and reads."""
        for name, value in held_values(function):
            self.world.now.use(self.ids, FUNCTION, name, value)
        with self.world.watching(FUNCTION):
            return super().postprocess(function, *released)


class World:
    """Clients that release public numbers.

    Args:
        endpoint: of the clients, whose streams and training are replaced.
        numbers: that they release.
        unit: of privacy.
    """

    def __init__(self, endpoint: Endpoint[Any], numbers: PublicNumbers, unit: str) -> None:
        self.numbers = numbers
        self.now = Answer()
        self._endpoint = endpoint
        self._unit = unit
        self._watched = ""  # who reads the client's attributes
        self._called: fl.CallContext | None = None
        self._trained = endpoint.client.cohort.train
        self._context = endpoint.context
        _watch(endpoint.client, self._read)
        # what is released here leaves nobody, and has no receipts
        endpoint.guard = None
        endpoint.reservations.clear()
        cohort = endpoint.client.cohort
        # one object is behind every draw of an endpoint's clients
        vars(cohort.secret).update(noised=self._noised, noise_together=self._noised_together)
        vars(cohort).update(train=self._train)
        vars(endpoint).update(context=self._public_context)

    def answer(self, call: Call) -> Answer:
        """Return the reply to a call, and what the clients did for it.

        Args:
            call: to clients of the endpoint.
        """
        self.now = Answer()
        method = getattr(self._endpoint.client, call.method, None)
        trains = method is not None and self._unit == "example" and bool(release_of(method).trains)
        try:
            with self.watching(STATE if trains else ""):
                reply = self._endpoint.answer(call).reply
        except (fl.PolicyError, fl.UpdateError):
            return self.now
        self.now.fields = {one.name: _digest(getattr(reply, one.name)) for one in fields(reply)}
        return self.now

    @contextmanager
    def watching(self, user: str) -> Iterator[None]:
        """Note which attributes of the client are read until the end of the context.

        Args:
            user: who reads them; empty to note nothing.
        """
        before, self._watched = self._watched, user
        try:
            yield
        finally:
            self._watched = before

    def _read(self, name: str, value: Any) -> None:
        """Note the value of a client's attribute, where somebody watches."""
        user, self._watched = self._watched, ""  # what follows reads attributes, too
        context = self._called
        if user and context is not None and not name.startswith("__"):
            if isinstance(value, ClientRows):
                for client, k in zip(context.ids, context.positions, strict=True):
                    self.now.use([client], user, name, printed(value.values[k]))
            else:
                for number in numbers_in(value):
                    self.now.use(context.ids, user, name, printed(number))
        self._watched = user

    def _public_context(self, *args: Any, **options: Any) -> fl.CallContext:
        exact = self._context(*args, **options)
        values = {one.name: getattr(exact, one.name) for one in fields(exact)}
        self._called = PublicContext(**values, world=self)
        return self._called

    def _noised(
        self,
        client: int,
        purpose: str,
        step: int,
        row: torch.Tensor,
        multiplier: float,
        sensitivity: float,
    ) -> torch.Tensor:
        exact = row.detach().double().flatten().cpu()
        draw = Draw(purpose, exact, float(multiplier), float(sensitivity))
        self.now.draws.setdefault(client, []).append(draw)
        level = (purpose, tuple(row.shape), draw.multiplier, draw.sensitivity)
        self.now.note(client, NOISE, level)
        return self.numbers.like(row, sensitivity, multiplier, client, purpose, step)

    def _noised_together(
        self,
        clients: Sequence[int],
        purpose: str,
        step: int,
        rows: torch.Tensor,
        multiplier: float,
        sensitivity: float,
    ) -> None:
        for row, client in zip(rows, clients, strict=True):
            row.copy_(self._noised(client, purpose, step, row, multiplier, sensitivity))

    def _train(  # noqa: PLR0913 (that of `LocalTrainer`)
        self,
        start: fl.Rows,
        clients: Sequence[int],
        plan: LocalTraining,
        step: int,
        row_width: int = 0,
        scale: Sequence[float] | None = None,
        regularizer: LossTerm | None = None,
        apart: bool = False,
    ) -> torch.Tensor:
        if not plan.noise:
            trained: torch.Tensor = self._trained(
                start, clients, plan, step, row_width, scale, regularizer, apart
            )
            return trained
        cohort = self._endpoint.client.cohort
        d = cohort.model.dimension
        updates = torch.zeros(
            len(clients), max(row_width, d), dtype=cohort.dtype, device=cohort.device
        )
        for entry, k in enumerate(clients):
            client = cohort.ids[k]
            descriptions = {"start": digest(start.row(entry)).hex(), "plan": repr(plan)}
            descriptions["network"] = _fixed_parts(cohort.model)
            if scale is not None:
                descriptions["scale"] = repr(float(scale[entry]))
            if regularizer is not None:
                rows = digest(regularizer.rows([entry])).hex()
                descriptions["regularizer"] = f"{rows} {regularizer.kind}"
            for aspect, value in descriptions.items():
                self.now.note(client, f"training {aspect}", value)
            row = updates[entry, :d]
            identity = (client, step, *descriptions.values())
            row.copy_(self.numbers.like(row, plan.clip, plan.noise, *identity))
        return updates


def samples_of(cohort: Any) -> list[str]:
    """Return digests of all samples that a trainer holds.

    Args:
        cohort: the trainer.
    """
    held = [value for value in vars(cohort).values() if isinstance(value, Samples)]
    return [printed(table) for samples in held for table in (samples.x, samples.y)]


def _fixed_parts(model: Any) -> str:
    """Return what is equal for two networks that train alike: all but trainable parameters."""
    objective = getattr(model.objective, "__dict__", {})
    held: list[Any] = [repr(model.module), type(model.objective).__name__, *numbers_in(objective)]
    for module in model.module.modules():
        held += module.buffers(recurse=False)
        held += [one for one in module.parameters(recurse=False) if not one.requires_grad]
        attributes = {name: one for name, one in vars(module).items() if not name.startswith("_")}
        held += numbers_in(attributes)
    return hashlib.blake2b(" ".join(map(printed, held)).encode()).hexdigest()


def _watch(client: Any, read: Callable[[str, Any], None]) -> None:
    """Call a function with the name and the value of each attribute of a client that is read."""
    client_class: Any = type(client)

    def attribute(self: Any, name: str) -> Any:
        value = client_class.__getattribute__(self, name)
        read(name, value)
        return value

    names = {
        "__getattribute__": attribute,
        "__module__": client_class.__module__,
        "__doc__": client_class.__doc__,
    }
    client.__class__ = type(client_class.__name__, (client_class,), names)


def _digest(value: Any) -> str:
    """Return what is equal for two fields of replies of which every bit is equal."""
    if isinstance(value, fl.Rows):
        return printed(value.values)
    if isinstance(value, fl.Shared):
        return printed(value.value)
    if isinstance(value, fl.Picks):
        return f"{printed(value.table)} {value.picks}"
    return repr(value)
