"""DP-SGD of many clients at once (Abadi et al. 2016, Algorithm 1): clipped per-example gradients,
whose sum gets noise.

If the model is a stack of layers with a backward pass by hand, one backward pass gives the input x
and output gradient d of every layer, and from these the norm of each example's gradient,
‖d‖²(‖x‖² + 1) for a dense layer (Goodfellow 2015; Lee and Kifer 2021; "ghost clipping": Li et al.
2022). The clipped sum is one more product of the same tensors with rescaled rows (Bu et al. 2023,
"book-keeping"), so the gradient of a single example of a dense layer is never computed. Any other
module trains its examples as if each were a client of its own (`FlatModel.gradients`).

The secret draws, which are the examples of each batch and the noise, follow from a seed of the
client, the call, the initial weights, the client's examples and the plan. For the same request a
client makes the same draws; for any other request, different ones.

Convolutions compute the gradients of their own kernels, in blocks of examples.

Security rules: an example whose gradient is not finite counts as zero, since an error would reveal
that it is there. The mask of dropout belongs to the example: one that depends on the position in
the batch would change with the other examples drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from numpy.typing import NDArray

from securecluster.models.dropout import example_keys
from securecluster.models.flat_model import FlatModel, Params
from securecluster.models.fused_layers import Stack
from securecluster.models.optimizers import Optimizer
from securecluster.models.per_example_gradients import Each, clipped
from securecluster.privacy.dp.device_noise import Tags, add_noise
from securecluster.privacy.dp.grid_noise import GridNoise, deviation, spacing
from securecluster.privacy.keyed_digest import keyed_digest
from securecluster.training.batches import Minibatches
from securecluster.training.config import LocalTraining, Secret

# examples whose convolutions' gradients are in memory at once (not in the paper)
CONVOLVED = 64
# clients go together if a block holds the examples of this many of them, and else one at a time
# (not in the paper)
FEW = 8
PLAIN = 9  # hyper-parameters that every digest of a request has


class DPSGDState:
    """Secret draws of a chunk's clients in one call, and their steps.

    Args:
        secret: source of the draws.
        ids: numbers of the clients.
        sizes: number of each client's examples, taken as public.
        weights: initial weights, (b, d).
        plan: hyper-parameters, with a clip.
        step: number of the call.
        block: examples whose gradients may be in memory at once, for models without a backward pass
            by hand.
        data: digest of each client's examples. Other examples get other noise: under the same
            noise, the difference of two replies would have none.
        equal: whether all initial weights are known to be the same.
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
        equal: bool = False,
    ) -> None:
        self._plan = plan
        self._sizes = sizes
        self._block = block
        self._batches: list[bytes] = []  # seeds of the batches, 32 bytes each
        self._secrets: list[bytes] = []  # keys of the noise, 32 bytes each
        requests = _digests(weights, plan, equal)
        for client, request, examples in zip(ids, requests, data, strict=True):
            about = request + examples
            self._batches.append(secret.seed(client, "dp-sgd batches", step, about))
            self._secrets.append(secret.seed(client, "dp-sgd noise", step, about))
        self._steps = 0
        self._grid: list[float] = []  # spacing of each client's grid, a power of two
        self._sigma: list[float] = []  # standard deviation in each coordinate
        if plan.noise:
            dimension = weights.shape[1]
            for size in sizes:
                # clip norm of a sum of gradients, in the unit of a mean gradient
                norm = plan.clip / min(plan.batch_size, size)
                self._grid.append(spacing(plan.noise, norm, dimension))
                self._sigma.append(deviation(plan.noise, norm, dimension))
        self._sums = torch.empty_like(weights)
        self._tags: Tags | None = None  # made by the first noise that is drawn on a GPU

    def batches(self, k: int) -> Iterator[NDArray[np.int64]]:
        """Yield a client's mini-batches in order (Poisson sampling), some of which may be empty.

        Args:
            k: position of the client in the chunk.

        Yields:
            Positions among the client's own examples, in ascending order.
        """
        size = self._sizes[k]
        rate = self._plan.rate(size)  # q
        all_examples = np.arange(size)
        uniform = _Uniform(self._batches[k])
        for _ in range(self._plan.number(size)):
            if rate == 1:  # nothing is random, and the stream stays unused
                yield all_examples
            else:
                drawn = uniform.next(size) < rate
                yield np.flatnonzero(drawn)

    def add_noise(self, sums: torch.Tensor) -> None:
        """Round the sums of a step to their grids and add noise, in place.

        The noise is keyed by the rounded sums. Sums that differ, such as those of gradients that
        another machine has rounded differently, get other noise: under the same noise their
        difference would reveal them.

        Args:
            sums: sums of the first k clients, (k, d).
        """
        active = len(sums)
        grid = self._grid[:active]
        if sums.device.type != "cpu":
            self._add_noise_there(sums)
            self._steps += 1
            return
        spacings = sums.new_tensor(grid)[:, None]  # (k, 1)
        # exact: spacings are powers of two, and a rounded sum needs no more bits than before
        sums.div_(spacings).round_().mul_(spacings)
        about = f"step {self._steps} ".encode()
        seeds = []
        # clients that no longer train have secrets and no row
        for secret, row in zip(self._secrets, sums, strict=False):
            array = row.detach().cpu().contiguous().numpy()
            seeds.append(keyed_digest(secret, about, array))
        noise = GridNoise(seeds)
        noise.add_to(sums, grid, self._sigma[:active])
        self._steps += 1

    def _add_noise_there(self, sums: torch.Tensor) -> None:
        """Round the sums of a step and add noise, in place, without a copy to main memory.

        Args:
            sums: sums of the first k clients, (k, d).
        """
        if self._tags is None:
            self._tags = Tags([_derived(key, b"tags") for key in self._secrets], self._sums)
        active = len(sums)
        purpose = b"noise of step %d" % self._steps
        secrets = [_derived(key, purpose) for key in self._secrets[:active]]
        add_noise(sums, secrets, self._grid[:active], self._sigma[:active], self._tags)

    def step(
        self,
        model: FlatModel,
        params: Params,
        batch: Minibatches,
        rows: torch.Tensor,
        first: torch.Tensor,
        optimizer: Optimizer,
    ) -> None:
        """Make one step of the first k clients, by (Σ clipped gradients + noise)/(q n).

        Args:
            model: the network.
            params: parameters of the k clients, by name.
            batch: mini-batch of each client; the weight of a loss is 1/(q n).
            rows: rows of the examples, (k, n). Those after a client's first one determine the
                dropout masks, so an example's mask does not depend on which others are drawn.
            first: row of each client's first example, (k, 1).
            optimizer: updates the parameters.
        """
        active = len(batch.x)
        clip = self._plan.clip
        stack = model.stack
        sums = self._sums[:active]  # (k, d)
        on_gpu = sums.device.type != "cpu"
        dense = stack is not None and not stack.convolves and batch.weight.shape[1] > 0
        # the one block of a GPU's dense layers overwrites what was there
        if not (on_gpu and dense):
            sums.zero_()
        views = model.views(sums)
        # the backward pass of convolutions by hand is that of one client
        if stack is not None and (active == 1 or not stack.convolves):
            _by_hand(stack, params, batch, clip, views)
        else:
            if batch.keys is not None:
                keys = example_keys(batch.keys[:, None], rows - first)  # (k, n)
                batch = replace(batch, keys=keys)
            _one_by_one(model, params, batch, clip, views, self._block)
        if self._plan.noise:
            self.add_noise(sums)
        optimizer.begin()
        for name, gradient in stepped(sums, views).items():
            optimizer.value(name, gradient)


def stepped(flat: torch.Tensor, views: Params) -> Params:
    """Return what an optimizer of DP-SGD steps, by name: on a GPU all parameters at once.

    Args:
        flat: parameters or gradients, (b, d).
        views: the same by name.
    """
    # on a CPU short rows by themselves may be rounded otherwise than as parts of a long one
    return views if flat.device.type == "cpu" else {"": flat}


class _Uniform:
    """Uniform numbers of 53 bits in [0, 1), from a ChaCha20 stream under a seed of 32 bytes."""

    def __init__(self, seed: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        nonce = bytes(16)  # zero: each seed has one stream
        cipher = Cipher(ChaCha20(seed, nonce), mode=None)
        self._stream = cipher.encryptor()

    def next(self, count: int) -> NDArray[np.float64]:
        """Return the next numbers, (count,).

        Args:
            count: how many.
        """
        keystream = self._stream.update(bytes(8 * count))
        words = np.frombuffer(keystream, dtype="<u8")
        # a float64 holds 53 bits exactly, so no number is rounded up to 1
        mantissas = (words >> np.uint64(11)).astype(np.float64)
        return np.ldexp(mantissas, -53)


def _derived(secret: bytes, purpose: bytes) -> bytes:
    """Return 32 bytes (keyed BLAKE2b) that follow from a secret and a purpose."""
    person = b"dp-sgd on device"
    return hashlib.blake2b(purpose, digest_size=32, key=secret, person=person).digest()


def _digests(weights: torch.Tensor, plan: LocalTraining, equal: bool) -> Iterator[bytes]:
    """Yield a digest of each client's request: its initial weights and the plan.

    Args:
        weights: initial weights, (b, d).
        plan: hyper-parameters.
        equal: whether all rows are known to be the same.
    """
    # without keep_momentum and label_power, which DP-SGD refuses
    values = [getattr(plan, option.name) for option in fields(plan)]
    numbers: list[object] = [_plain_number(value) for value in values[:PLAIN]]
    # options without an effect, which earlier versions did not have, leave the draws as they are
    later = zip(fields(plan)[PLAIN + 2 :], values[PLAIN + 2 :], strict=True)
    numbers += [[option.name, value] for option, value in later if value != option.default]
    training = json.dumps(numbers).encode()
    digest = b""
    # one copy of what lies on a GPU
    distinct = weights[:1].cpu().expand_as(weights) if equal else weights.cpu()
    for k, row in enumerate(distinct):
        # neighbours often start from the same weights, whose digest is computed once
        repeated = k > 0 and (equal or torch.equal(row, distinct[k - 1]))
        if not repeated:
            contents = row.numpy().tobytes() + training
            digest = hashlib.blake2b(contents, digest_size=32).digest()
        yield digest


def _plain_number(value: object) -> object:
    """Return a number as a float, so that numpy's numbers have the same digest; else the value."""
    if value is None or isinstance(value, str | bool):
        return value
    return float(value)  # type: ignore[arg-type]


@torch.no_grad()
def _by_hand(stack: Stack, params: Params, batch: Minibatches, clip: float, sums: Params) -> None:
    """Add the clipped and weighted gradients of a stack to sums.

    Args:
        stack: layers with a backward pass by hand.
        params: parameters of the k clients, by name.
        batch: mini-batch of each client.
        clip: largest norm of an example's gradient.
        sums: sums of the k clients, by name, changed in place.
    """
    examples = batch.weight.shape[1]
    block = max(1, examples)
    if stack.convolves:
        # convolutions do compute the gradients of single examples
        block = CONVOLVED
    for first in range(0, examples, block):
        columns = slice(first, first + block)
        x = batch.x[:, columns]
        y = batch.y[:, columns]
        weight = batch.weight[:, columns]
        importance = None if batch.importance is None else batch.importance[:, columns]
        gradients = stack.examples(params, x, y)
        by_name, factors = clipped(gradients, weight, clip, importance)
        overwrites = weight.device.type != "cpu" and not stack.convolves
        for name, gradient in by_name.items():
            gradient.add_to(sums[name], factors, kept=0 if overwrites else 1)


def _one_by_one(
    model: FlatModel, params: Params, batch: Minibatches, clip: float, sums: Params, block: int
) -> None:
    """Add the clipped and weighted gradients of any module to sums.

    Each example is trained as a client with one sample.

    Args:
        model: the network.
        params: parameters of the k clients, by name.
        batch: mini-batch of each client.
        clip: largest norm of an example's gradient.
        sums: sums of the k clients, by name, changed in place.
        block: number of examples at a time.
    """
    clients, most_examples = batch.weight.shape
    if clients > 1 and block < FEW * most_examples:
        # One client at a time: its examples share its weights, which need no copies.
        for client in range(clients):
            one = slice(client, client + 1)
            client_params = _selected(params, one)
            client_sums = _selected(sums, one)  # views, so the sums change in place
            client_batch = batch.of_client(client)
            _one_by_one(model, client_params, client_batch, clip, client_sums, block)
        return
    # padding has weight 0, and is left out
    owners, columns = batch.weight.nonzero(as_tuple=True)
    for first in range(0, len(owners), block):
        block_entries = slice(first, first + block)
        entries = (owners[block_entries], columns[block_entries])
        _add_block(model, params, batch, clip, sums, entries)


def _selected(params: Params, clients: slice) -> Params:
    """Return the parameters of some clients, without a copy."""
    return {name: value[clients] for name, value in params.items()}


def _add_block(
    model: FlatModel,
    params: Params,
    batch: Minibatches,
    clip: float,
    sums: Params,
    entries: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Add the clipped and weighted gradients of some examples to sums.

    Args:
        model: the network.
        params: parameters of the k clients, by name.
        batch: mini-batch of each client.
        clip: largest norm of an example's gradient.
        sums: sums of the k clients, by name, changed in place.
        entries: client and column of each of the n examples, (n,) each.
    """
    owner, _ = entries
    x = batch.x[entries]
    y = batch.y[entries]
    weight = batch.weight[entries]  # (n,)
    keys = None
    if batch.keys is not None:
        keys = batch.keys[entries]
    # a client axis of n examples with one sample each; losses get their weights after the clip
    gradients = model.gradients(
        _weights_of(params, owner), x[:, None], y[:, None], weight.new_ones(len(owner), 1), keys
    )
    examples = {name: Each.of(gradient) for name, gradient in gradients.items()}
    importance = None if batch.importance is None else batch.importance[entries][None]
    by_name, factors = clipped(examples, weight[None], clip, importance)
    for name, gradient in by_name.items():
        if len(batch.weight) == 1:
            gradient.add_to(sums[name], factors)
        else:
            gradient.deal_to(sums[name], factors, owner)


def _weights_of(params: Params, owner: torch.Tensor) -> Params:
    """Return the weights (n, …) of n examples; those of a single client are not copied.

    Args:
        params: parameters of the clients, by name.
        owner: client of each example, (n,).
    """
    weights = {}
    for name, value in params.items():
        if len(value) == 1:
            shape = (len(owner), *value.shape[1:])
            weights[name] = value.expand(shape)
        else:
            weights[name] = value[owner]
    return weights
