"""DP-SGD of many clients at once: each example's gradient clipped, their sum with noise (Abadi et
al. 2016, Algorithm 1).

Where the model is a stack of layers by hand, one backward pass gives every layer's input and output
gradient, and from these the norm of each example's gradient, ‖d‖²(‖x‖² + 1) for a dense layer
(Goodfellow 2015; Lee and Kifer 2021; "ghost clipping": Li et al. 2022). The clipped sum is one more
product of the same tensors with rescaled rows (Bu et al. 2023, "book-keeping"), so no gradient of a
single example of a dense layer is ever made. Any other module trains its examples as if each were a
client of its own (`FlatModel.gradients`).

What is secret is drawn from a seed of the client, the call, the weights that it starts from, its
examples and the plan: which examples are in a batch, and the noise. Asked the same again, a client
makes the same draws; asked anything else, others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace

import numpy as np
import torch
from numpy.typing import NDArray

from securecluster.models.dropout import example_keys
from securecluster.models.flat_model import FlatModel, Params
from securecluster.models.fused_layers import Stack
from securecluster.models.optimizers import Optimizer
from securecluster.models.per_example_gradients import Each, clipped
from securecluster.privacy.dp.grid_noise import GridNoise, deviation, spacing
from securecluster.training.batches import Minibatches
from securecluster.training.config import LocalTraining, Secret

CONVOLVED = 64  # examples whose convolutions' gradients are in memory at once (ours)
FEW = 8  # clients whose examples fill a block (ours): that many go one at a time, more go together


class DPSGDState:
    """The secret draws of a chunk's clients in one call, and their steps.

    Args:
        ids: the clients' numbers.
        sizes: how many examples each has, taken as public.
        weights: the models they start from, (b, d).
        block: examples whose gradients may be in memory at once, where a model has none by hand.
        data: what stands for each client's examples: other examples have other noise, or two
            answers' difference would have none.
    """

    def __init__(  # noqa: PLR0913 (everything that a draw follows from)
        self,
        secret: Secret,
        ids: Sequence[int],
        sizes: Sequence[int],
        weights: torch.Tensor,
        plan: LocalTraining,
        step: int,
        block: int,
        data: Sequence[bytes],
    ) -> None:
        self._plan, self._sizes, self._block = plan, sizes, block
        about = [own + mine for own, mine in zip(_digests(weights, plan), data, strict=True)]
        self._batches = [
            secret.seed(i, "dp-sgd batches", step, a) for i, a in zip(ids, about, strict=True)
        ]
        self._secrets = [
            secret.seed(i, "dp-sgd noise", step, a) for i, a in zip(ids, about, strict=True)
        ]
        self._steps = 0
        d = weights.shape[1]
        # of a sum, in the unit of a mean gradient
        reach = [plan.clip / min(plan.batch_size, n) for n in sizes]
        self._grid = [spacing(plan.noise, r, d) for r in reach] if plan.noise else []
        self._sigma = [deviation(plan.noise, r, d) for r in reach] if plan.noise else []
        self._room = torch.empty_like(weights)

    def batches(self, k: int) -> Iterator[NDArray[np.int64]]:
        """Yield the k-th client's mini-batches in order.

        They are places among its own examples. Some of them are empty.
        """
        size = self._sizes[k]
        rate, everyone = self._plan.rate(size), np.arange(size)
        draw = _Uniform(self._batches[k])
        for _ in range(self._plan.number(size)):
            yield everyone if rate == 1 else np.flatnonzero(draw.next(size) < rate)

    def add_noise(self, sums: torch.Tensor) -> None:
        """Round the sums of a step to their grids and add its noise, in place.

        The noise belongs to the rounded sums. Sums that differ, of gradients that another machine
        rounded otherwise, have another noise: under the same one their difference would tell them.

        Args:
            sums: (k, d) of the first k clients.
        """
        grid = self._grid[: len(sums)]
        spacings = sums.new_tensor(grid)[:, None]
        # exact: a power of two, and no more bits than there were
        sums.div_(spacings).round_().mul_(spacings)
        about = f"step {self._steps} ".encode()
        seeds = [
            _keyed(secret, about, row) for secret, row in zip(self._secrets, sums, strict=False)
        ]
        GridNoise(seeds).add_to(sums, grid, self._sigma[: len(sums)])
        self._steps += 1

    def step(
        self,
        model: FlatModel,
        params: Params,
        batch: Minibatches,
        places: torch.Tensor,
        optimizer: Optimizer,
    ) -> None:
        """Make one step of the first k clients, by (Σ clipped gradients + noise)/(q n).

        Args:
            batch: of each client; the weight of a loss is 1/(q n).
            places: of the examples among their client's own, (k, n): which mask an example has does
                not depend on the other examples that are drawn.
        """
        total = self._room[: len(batch.x)].zero_()
        views = model.views(total)
        if model.stack is not None and (len(batch.x) == 1 or not model.stack.convolves):
            _by_hand(model.stack, params, batch, self._plan.clip, views)
        else:
            if batch.keys is not None:
                batch = replace(batch, keys=example_keys(batch.keys[:, None], places))
            _one_by_one(model, params, batch, self._plan.clip, views, self._block)
        if self._plan.noise:
            self.add_noise(total)
        optimizer.begin()
        for name, gradient in views.items():
            optimizer.value(name, gradient)


class _Uniform:
    """Uniform numbers of 53 bits in [0, 1), from a ChaCha20 stream under a seed of 32 bytes."""

    def __init__(self, seed: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        self._stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()

    def next(self, count: int) -> NDArray[np.float64]:
        """Return the next numbers, (count,)."""
        words = np.frombuffer(self._stream.update(bytes(8 * count)), dtype="<u8")
        return np.ldexp((words >> np.uint64(11)).astype(np.float64), -53)


def _keyed(secret: bytes, about: bytes, row: torch.Tensor) -> bytes:
    """Return 32 bytes that follow from a secret and the numbers of a row."""
    numbers = row.detach().cpu().contiguous().numpy().tobytes()
    return hashlib.blake2b(about + numbers, digest_size=32, key=secret).digest()


def _digests(weights: torch.Tensor, plan: LocalTraining) -> Iterator[bytes]:
    """What each client's call is about, beside its number: the weights it starts from, often its
    neighbour's, and how it trains.
    """
    plain = astuple(plan)[:-1]  # without keep_momentum, which DP-SGD has not
    # numpy's numbers are the same numbers
    values = [v if v is None or isinstance(v, str | bool) else float(v) for v in plain]
    training, found = json.dumps(values).encode(), b""
    for k, row in enumerate(weights):
        if not k or not torch.equal(row, weights[k - 1]):
            found = hashlib.blake2b(row.cpu().numpy().tobytes() + training, digest_size=32).digest()
        yield found


@torch.no_grad()
def _by_hand(
    stack: Stack,
    params: Params,
    batch: Minibatches,
    clip: float,
    total: Params,
) -> None:
    """Add the clipped and weighted gradients to `total`, by name."""
    examples = batch.weight.shape[1]
    block = CONVOLVED if stack.convolves else max(1, examples)
    for first in range(0, examples, block):
        part = slice(first, first + block)
        gradients = stack.examples(params, batch.x[:, part], batch.y[:, part])
        found, factors = clipped(gradients, batch.weight[:, part], clip)
        for name, own in found.items():
            own.add_to(total[name], factors)


def _one_by_one(
    model: FlatModel,
    params: Params,
    batch: Minibatches,
    clip: float,
    total: Params,
    block: int,
) -> None:
    """Add the clipped and weighted gradients to `total`, by name: `block` examples at a time, each
    as a client with one sample.
    """
    x, y, weight, keys = batch.x, batch.y, batch.weight, batch.keys
    clients, most_examples = weight.shape
    if clients > 1 and block < FEW * most_examples:
        # One client at a time: its examples share its weights, which need no copies.
        for c in range(clients):
            one = slice(c, c + 1)
            own_params = {name: value[one] for name, value in params.items()}
            own_total = {name: value[one] for name, value in total.items()}
            _one_by_one(model, own_params, batch.of_client(c), clip, own_total, block)
        return
    owners, places = weight.nonzero(as_tuple=True)
    for first in range(0, len(owners), block):
        owner, place = owners[first : first + block], places[first : first + block]
        block_keys = None if keys is None else keys[owner, place]
        gradients = model.gradients(
            _weights_of(params, owner),
            x[owner, place][:, None],
            y[owner, place][:, None],
            weight.new_ones(len(owner), 1),
            block_keys,
        )
        examples = {name: Each.of(gradient) for name, gradient in gradients.items()}
        found, factors = clipped(examples, weight[owner, place][None], clip)
        for name, each in found.items():
            if clients == 1:
                each.add_to(total[name], factors)
            else:
                each.deal_to(total[name], factors, owner)


def _weights_of(params: Params, owner: torch.Tensor) -> Params:
    """Return the weights (n, …) that n examples meet; `owner` is each one's client."""
    found = {}
    for name, value in params.items():
        shared = len(value) == 1
        found[name] = value.expand(len(owner), *value.shape[1:]) if shared else value[owner]
    return found
