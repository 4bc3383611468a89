"""Context of a call at its clients, by which their methods release what they computed of data.

A released tensor is remembered with the noise that was drawn for it. A reply's field that holds
such a tensor has receipts of this noise; what is computed from released tensors by `postprocess`
has theirs. Any other field is exact. So a price cannot be stated: it follows from draws.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.errors import OwnerPolicyError, UsageError
from securecluster.messaging.messages import Rows, Shared
from securecluster.messaging.receipts import GAUSSIAN, PUBLIC, Receipt, Receipts
from securecluster.privacy.dp import exponential_mechanism, loss_mechanism
from securecluster.privacy.dp.gaussian_mechanism import REPLACE, Clip
from securecluster.privacy.dp.noise_streams import digest
from securecluster.runtime.origins import chained

if TYPE_CHECKING:
    from securecluster.privacy.dp.client_noise import ClientNoise

Array = NDArray[np.float64]


@dataclass(frozen=True)
class _Draw:
    """Noise that was drawn for some clients, each by its own key.

    Args:
        receipt: of each of them, without fields.
        once: by client, name and digest of a release that is made once; "" for others.
    """

    receipt: Receipt
    once: Mapping[int, str]


@dataclass(frozen=True)
class _Released:
    """A tensor, a digest of its bytes when it was released, and the draws that it follows from."""

    tensor: torch.Tensor
    digest: bytes
    draws: frozenset[int]


class Releases:
    """Tensors that the methods of one call released, and the draws of their noise.

    Args:
        method: name of the called method, which names the draws.
        samples: numbers of samples of each client, where they are public; empty elsewhere.
        closed: returns a context in which clients' data cannot be read.
    """

    def __init__(
        self,
        method: str = "",
        samples: Mapping[int, frozenset[float]] | None = None,
        closed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.method = method
        self.closed = closed
        self._samples = dict(samples or {})
        self._draws: list[_Draw] = []
        self._released: dict[int, _Released] = {}  # by the tensor's identity
        self._counts: Counter[int] = Counter()

    def purpose(self, client: int) -> str:
        """Return the name of a client's next draw in this call.

        Args:
            client: its number.
        """
        # counted by client, so that a batch of one draws as a larger batch does
        self._counts[client] += 1
        return f"{self.method} {self._counts[client]}"

    def drawn(
        self, tensor: torch.Tensor, clients: Sequence[int], receipt: Receipt, once: str = ""
    ) -> torch.Tensor:
        """Remember a tensor with the receipt of its noise, and return it.

        Args:
            tensor: with the noise, one row for each client.
            clients: whose noise it is.
            receipt: of each of them, without fields.
            once: name of a release that is made once.
        """
        names = dict.fromkeys(clients, "")
        if once:
            # Other bits under the same name are another release.
            names = {
                i: f"{once} {digest(row).hex()[:16]}" for i, row in zip(names, tensor, strict=True)
            }
        self._draws.append(_Draw(receipt, names))
        return self.remember(tensor, frozenset([len(self._draws) - 1]))

    def remember(self, tensor: torch.Tensor, draws: frozenset[int]) -> torch.Tensor:
        """Remember a released tensor, and return it.

        Args:
            tensor: as it may leave.
            draws: that it follows from.
        """
        self._released[id(tensor)] = _Released(tensor, digest(tensor), draws)
        return tensor

    def of(self, tensors: Sequence[torch.Tensor]) -> frozenset[int] | None:
        """Return the draws that some tensors follow from; None if one of them was not released.

        Args:
            tensors: unchanged since they were released.
        """
        draws: set[int] = set()
        for tensor in tensors:
            released = self._released.get(id(tensor))
            if released is None or released.digest != digest(tensor):
                return None
            draws.update(released.draws)
        return frozenset(draws)

    def are_public(self, clients: Sequence[int], numbers: Sequence[float]) -> bool:
        """Return True if numbers of the clients' samples are public, and these are such numbers.

        Args:
            clients: their numbers.
            numbers: one for each of them.
        """
        if not self._samples:
            return False
        pairs = zip(clients, numbers, strict=True)
        return all(float(number) in self._samples.get(client, ()) for client, number in pairs)

    def receipts(self, reply: Any, clients: Sequence[int]) -> list[Receipts]:
        """Return the receipts of each client's noise in a reply.

        Args:
            reply: with the fields as the clients' method returned them.
            clients: their numbers.
        """
        fields_of: dict[int, list[str]] = {}
        for name, tensor in _tensors(reply):
            for draw in self.of([tensor]) or ():
                fields_of.setdefault(draw, []).append(name)
        written: dict[int, list[Receipt]] = {client: [] for client in clients}
        for draw, names in sorted(fields_of.items()):
            receipt = dataclasses.replace(self._draws[draw].receipt, fields=tuple(names))
            for client, once in self._draws[draw].once.items():
                of_client = dataclasses.replace(receipt, once=once) if once else receipt
                if client in written:
                    written[client].append(of_client)
        return [tuple(receipts) for receipts in written.values()]


@dataclass(frozen=True)
class CallContext:
    """Recipients and time of a call, and what its clients need to release numbers.

    Args:
        ids: numbers of the clients in the federation.
        positions: their positions at this endpoint, in the same order.
        round: the protocol's round.
        step: number of the call.
        noise: of the run; None where a method is called outside a run.
        releases: of this call.
        origins: digests of what `bind` has bound in this call, by client.
        tells_samples: whether the clients' owner lets the reader know numbers of samples.
    """

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    round: int
    step: int
    noise: ClientNoise | None = field(default=None, compare=False, repr=False)
    releases: Releases = field(default_factory=Releases, compare=False, repr=False)
    origins: dict[int, bytes] = field(default_factory=dict, compare=False, repr=False)
    tells_samples: bool = field(default=True, compare=False, repr=False)

    def select(self, frames: Sequence[int]) -> CallContext:
        """Return the context of some of the clients.

        Args:
            frames: indices into `ids` and `positions`.
        """
        ids = tuple(self.ids[n] for n in frames)
        positions = tuple(self.positions[n] for n in frames)
        return dataclasses.replace(self, ids=ids, positions=positions)

    def bind(self, origins: Sequence[bytes]) -> None:
        """Bind each client's reply to public numbers that it follows from, such as a model.

        In a secure sum it adds up only with replies that are bound to the same numbers.

        Args:
            origins: digest of these numbers for each client, as the server sent them: equal for
                all clients of one sum, and of nothing that the server may not learn.
        """
        for client, origin in zip(self.ids, origins, strict=True):
            self.origins[client] = chained(self.origins.get(client, b""), origin)

    @property
    def loss_bound(self) -> float | None:
        """Return B, to which each sample's loss is clipped; None in a run without noise."""
        if self.noise is None or not self.noise.noise:
            return None
        return self.noise.loss_clip

    def release(
        self,
        rows: torch.Tensor,
        norm: float | None = None,
        sensitivity: float | Sequence[float] | None = None,
        noise: float | None = None,
        replace: float = REPLACE,
        once: str = "",
    ) -> torch.Tensor:
        """Return each client's row as it may leave: bounded, and with Gaussian noise.

        A row is clipped to `norm`. Where single examples are protected this allows one to move the
        row through the whole ball, 2S; give the `sensitivity` instead where it is smaller by
        construction, as that of a mean of clipped examples is. Without noise in the run, rows are
        returned as they are, and are exact.

        Args:
            rows: (b, ...), one row for each client of the call.
            norm: S; without a `sensitivity` it is by default the run's clip norm.
            sensitivity: largest distance of a row to that with the unit of privacy blanked, for all
                clients or for each. Where whole clients are protected, longer rows are scaled down
                to it.
            noise: z, standard deviation over sensitivity; the run's by default, 0 for none.
                Under noise a row that is not finite counts as zeros.
            replace: sensitivity to replacing the unit over that to blanking it.
            once: name of a release that is the same whenever it is asked for, in every method, and
                counts once; empty for one that is new in every call.

        Returns:
            (b, ...) in new memory.

        Raises:
            UsageError: other rows than numbers of the clients, or noise that has no price.
        """
        multiplier = self._multiplier(noise)
        if self.noise is None or not multiplier:
            return rows
        _check_release(rows, len(self.ids), multiplier, replace)
        flat = rows.reshape(len(rows), -1)
        if sensitivity is None:
            norm = self.noise.clip if norm is None else norm
            flat = Clip(norm, nonfinite_as_zeros=True).forward(flat, self.step)
            sensitivity = norm
            if self.noise.unit == "example":
                # from one place in the ball to another one, whatever the neighbour is
                sensitivity, replace = 2 * norm, 1.0
        finite = flat.isfinite().all(1, keepdim=True)
        rows = torch.where(finite, flat, 0.0).view(rows.shape)
        if isinstance(sensitivity, int | float):
            sensitivity = [float(sensitivity)] * len(self.ids)
        noisy = []
        for client, row, reach in zip(self.ids, rows, sensitivity, strict=True):
            purpose = once or self.releases.purpose(client)
            step = 0 if once else self.step
            drawn = self.noise.draws.noised(client, purpose, step, row, multiplier, reach)
            noisy.append(drawn)
        receipt = Receipt(GAUSSIAN, (), multiplier, float(replace))
        return self.releases.drawn(torch.stack(noisy), self.ids, receipt, once)

    def release_losses(
        self, means: Array, samples: Sequence[int], widths: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return mean losses as they may leave: with noise in proportion to their sensitivity.

        Args:
            means: (b, k) means of losses that were clipped to [0, `loss_bound`].
            samples: behind each client's means, (b,).
            widths: for each client (b,), the means that are its own, the first ones of its row; all
                by default.

        Returns:
            (b, k) float64; without noise in the run, `means` as they are.
        """
        if self.loss_bound is None:
            return torch.as_tensor(means)
        assert self.noise is not None
        purposes = [self.releases.purpose(client) for client in self.ids]
        noisy = loss_mechanism.noised(
            self.noise, purposes, self.ids, self.step, means, samples, widths
        )
        receipt = Receipt(GAUSSIAN, (), self.noise.of_losses, loss_mechanism.REPLACE)
        return self.releases.drawn(torch.from_numpy(noisy), self.ids, receipt)

    def release_choice(self, counts: Array, noise: float | None = None) -> torch.Tensor:
        """Return the number of each client's best option, by the exponential mechanism.

        Without noise in the run it is the first option with the largest count.

        Args:
            counts: (b, k) how much speaks for each option; blanking or replacing the unit of
                privacy moves all counts of a client in one direction, by at most 1.
            noise: z of Gaussian noise that is no more private; the run's by default.

        Returns:
            (b,) int64.
        """
        multiplier = self._multiplier(noise)
        if self.noise is None or not multiplier:
            return torch.as_tensor(counts.argmax(1))
        counts = np.nan_to_num(counts)
        draws = self.noise.draws
        spread = exponential_mechanism.bounded_range(multiplier)
        chosen = []
        for client, row in zip(self.ids, counts, strict=True):
            purpose = self.releases.purpose(client)
            best = exponential_mechanism.choice(row, spread, draws, client, purpose, self.step)
            chosen.append(best)
        receipt = Receipt(GAUSSIAN, (), multiplier)
        return self.releases.drawn(torch.as_tensor(chosen), self.ids, receipt)

    def postprocess(self, function: Callable[..., torch.Tensor], *released: Any) -> torch.Tensor:
        """Return what a function computes from released tensors, which costs nothing more.

        Clients' data cannot be read within the function. If an argument was not released, neither
        is the result, which is exact then.

        Args:
            function: returns a tensor.
            *released: tensors that `release` and its kin, or this method, returned.

        Raises:
            UsageError: an argument is no tensor.
        """
        if not all(isinstance(tensor, torch.Tensor) for tensor in released):
            raise UsageError(
                "postprocess takes released tensors: give other values to the function itself, "
                "by functools.partial say"
            )
        with self.releases.closed():
            result = function(*released)
        draws = self.releases.of(released)
        if not draws:
            return result
        return self.releases.remember(result, draws)

    def sample_counts(self, counts: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        """Return the clients' numbers of samples, (b,).

        Where single examples are protected, the relation of neighbours keeps these numbers: they
        are public, and cost nothing. Elsewhere they are exact.

        Args:
            counts: number of training or validation samples of each client.
            dtype: of the result.

        Raises:
            OwnerPolicyError: the clients' owner does not tell them to who would read them.
        """
        if not self.tells_samples:
            raise OwnerPolicyError(
                f"{self.releases.method} would tell this client's number of samples in the clear, "
                "which its owner does not tell (samples of its policy)"
            )
        numbers = torch.as_tensor(counts, dtype=dtype)
        if not self.releases.are_public(self.ids, counts):
            return numbers
        return self.releases.drawn(numbers, self.ids, Receipt(PUBLIC))

    def _multiplier(self, noise: float | None) -> float:
        """Return z of a release; 0 without noise."""
        if noise is not None:
            return float(noise)
        return self.noise.noise if self.noise is not None else 0.0


def outside_run(noise: ClientNoise, clients: Sequence[int] = (0,), step: int = 0) -> CallContext:
    """Return the context of a call that no endpoint makes, for audits of single mechanisms.

    Args:
        noise: of the clients.
        clients: their numbers, which are their positions, too.
        step: number of the call.
    """
    ids = tuple(clients)
    return CallContext(ids, ids, round=0, step=step, noise=noise)


def _check_release(rows: torch.Tensor, clients: int, multiplier: float, replace: float) -> None:
    """Raise UsageError for rows that cannot be released, or for noise that has no price."""
    if not rows.is_floating_point() or not rows.ndim or len(rows) != clients:
        raise UsageError(
            f"context.release takes a row of real numbers for each of {clients} client(s), and was "
            f"given {rows.dtype} of shape {tuple(rows.shape)}"
        )
    if multiplier < 0 or not 1 <= replace <= 2:
        raise UsageError(
            f"noise = {multiplier:g} and replace = {replace:g} have no price: the first is above "
            "0, and the second from 1 to 2"
        )


def _tensors(reply: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the tensor of each field of a reply that holds nothing else.

    Which rows of a table a client has may depend on its data, so that these have no receipt.
    """
    for name, value in vars(reply).items():
        if isinstance(value, Shared):
            yield name, value.value
        elif isinstance(value, Rows) and value.index is None:
            yield name, value.table
