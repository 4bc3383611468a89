"""Measure what bounds a round: its products and convolutions, and bytes beside a memory copy.

python -m benchmarks.costs.round_bound [--model mlp|cnn] [--clients 100] [--repeats 9]

One thread, and 10 steps of 10 samples for every client. Of `mlp`, 784-200-10, the first layer; of
`cnn`, the network of Briggs et al. (2020), both convolutions with pooling and ReLU, and the wide
dense layer. "local training" is what the library takes for a round, without messages and sums.
Seconds are of the processor, the least of the repeats, in which the parts take turns. Bytes follow
from the shapes: a product reads its two factors and writes its result, and one in place reads that
as well.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.costs.dpsgd import cohort
from benchmarks.table import write
from securecluster.core.devices import cpu_threads
from securecluster.messaging.messages import Rows
from securecluster.models.products import product, products
from securecluster.training.config import LocalTraining

INPUTS = 784
OUTPUTS = 200
BATCH = 10
STEPS = 10
ROWS = STEPS * BATCH  # of a client's samples in a round
FEATURES = 3136  # inputs of the CNN's wide dense layer
HIDDEN = 512
CHUNK = 25  # clients that train together
NUMBER_BYTES = 4
COPIED = 1 << 24  # numbers of the copy, more than caches hold
LR = -0.05
COPY = "copy"
TRAINING = "local training"  # of all clients; the other parts are those of a chunk

# seconds of one call for the clients of a chunk, and the numbers that one client moves
Part = tuple[Callable[[], Any], int]


def mlp_parts(clients: int) -> dict[str, Part]:
    """Return the parts of a round's work on the first layer of 784-200-10, by name.

    Args:
        clients: of a round.
    """
    torch.manual_seed(0)
    weights = torch.randn(CHUNK, OUTPUTS, INPUTS)
    x = torch.rand(CHUNK, ROWS, INPUTS)
    gradients = 1e-4 * torch.randn(CHUNK, ROWS, OUTPUTS)
    bias = torch.randn(CHUNK, OUTPUTS, 1)
    updates = torch.empty_like(weights)
    layer = OUTPUTS * INPUTS
    inputs = ROWS * INPUTS
    outputs = ROWS * OUTPUTS
    # all clients' mini-batches of one step as one model's
    pooled = x.view(-1, INPUTS)
    pooled_gradients = gradients.view(-1, OUTPUTS)

    def forward_each_step() -> None:
        for first in range(0, ROWS, BATCH):
            torch.baddbmm(bias, weights, x[:, first : first + BATCH].mT)

    def change_each_step() -> None:
        for first in range(0, ROWS, BATCH):
            step = slice(first, first + BATCH)
            weights.baddbmm_(gradients[:, step].mT, x[:, step], alpha=LR)

    def change_a_window() -> None:
        for weight, gradient, features in zip(weights, gradients, x, strict=True):
            weight.add_(product(gradient.T, features), alpha=LR)

    def forward_and_change_one_model() -> None:
        torch.mm(pooled, weights[0].T)
        torch.mm(pooled_gradients.T, pooled)

    return {
        "outputs, a step at a time": (forward_each_step, STEPS * layer + inputs + outputs),
        "changes, a step at a time": (change_each_step, 2 * STEPS * layer + inputs + outputs),
        "outputs, a window": (lambda: product(pooled, weights[0].T), inputs + outputs),
        "products of inputs, a window": (lambda: products(x, x.mT), 2 * inputs + ROWS * ROWS),
        "changes, a window": (change_a_window, 2 * layer + inputs + outputs),
        "updates": (lambda: torch.sub(weights, weights[:1], out=updates), 2 * layer),
        "check and sum": (lambda: (updates.flatten(1).sum(1), updates.sum(0)), 2 * layer),
        "outputs and changes of one model": (
            forward_and_change_one_model,
            2 * inputs + 2 * outputs,
        ),
        # reads samples and writes updates
        TRAINING: (local_training("mlp-200", clients), inputs + layer),
    }


def local_training(model: str, clients: int) -> Callable[[], torch.Tensor]:
    """Return the local training of clients, by the library.

    Args:
        model: name of the network.
        clients: how many.
    """
    batched = cohort(model, clients, False, torch.float32)
    plan = LocalTraining(lr=-LR, epochs=1, batch_size=BATCH, steps=STEPS, dropout=False)
    start = Rows(batched.start[None], (0,) * clients)
    return lambda: batched.train(start, range(clients), plan, 1)


def cnn_parts(clients: int) -> dict[str, Part]:
    """Return the parts of a round's work on the layers of the CNN that take time, by name.

    Convolutions take one client's mini-batch at a time, in channels-last layout.

    Args:
        clients: of a round.
    """
    torch.manual_seed(0)
    named: dict[str, Part] = {}
    for name, channels, filters, side in (("first", 1, 32, 28), ("second", 32, 64, 14)):
        named |= _convolution_parts(name, channels, filters, side)
    # the mini-batches of all clients of the chunk, and a client's rows of all steps
    weights = torch.randn(FEATURES, HIDDEN).T.contiguous()
    x = torch.rand(CHUNK * BATCH, FEATURES)
    gradients = torch.randn(CHUNK * BATCH, HIDDEN)
    layer = FEATURES * HIDDEN
    inputs = ROWS * FEATURES
    outputs = ROWS * HIDDEN
    moved_numbers = inputs + outputs + STEPS * layer // CHUNK
    window = torch.rand(CHUNK, ROWS, FEATURES)
    window_gradients = torch.randn(CHUNK, ROWS, HIDDEN)
    models = torch.randn(CHUNK, HIDDEN, FEATURES)

    def change_a_window() -> None:
        for weight, gradient, features in zip(models, window_gradients, window, strict=True):
            weight.add_(product(gradient.T, features), alpha=LR)

    def every_step(product: Callable[[], Any]) -> Callable[[], None]:
        def work() -> None:
            for _ in range(STEPS):
                product()

        return work

    return {
        **named,
        "dense layer, outputs": (every_step(lambda: product(x, weights.T)), moved_numbers),
        "dense layer, gradient at its inputs": (
            every_step(lambda: product(gradients, weights)),
            moved_numbers,
        ),
        "dense layer, changes of a window": (change_a_window, 2 * layer + inputs + outputs),
        TRAINING: (local_training("cnn-briggs", clients), inputs + layer),
    }


def _convolution_parts(name: str, channels: int, filters: int, side: int) -> dict[str, Part]:
    """Return the forward and the backward pass of a 5 × 5 convolution.

    Args:
        name: of the layer; the first one needs no gradient at its inputs.
        channels: of its inputs.
        filters: of its outputs.
        side: height and width of its images.
    """
    layout = torch.channels_last
    x = torch.rand(BATCH, channels, side, side).contiguous(memory_format=layout)
    kernel = torch.randn(filters, channels, 5, 5).contiguous(memory_format=layout)
    gradient = torch.randn(BATCH, filters, side, side).contiguous(memory_format=layout)
    calls = range(CHUNK * STEPS)
    places = ROWS * side * side
    numbers = places * (channels + filters) + STEPS * kernel.numel()
    output_mask = [name != "first", True, False]

    def forward() -> None:
        for _ in calls:
            torch.conv2d(x, kernel, padding=2)

    def backward() -> None:
        for _ in calls:
            torch.ops.aten.convolution_backward(
                gradient, x, kernel, None, [1, 1], [2, 2], [1, 1], False, [0, 0], 1, output_mask
            )

    window = [2, 2], [2, 2], [0, 0], [1, 1], False  # of 2 × 2 pooling

    def pool() -> None:
        for _ in calls:
            pooled, positions = torch.ops.aten.max_pool2d_with_indices(gradient, *window)
            pooled.relu_()
            masked = torch.ops.aten.threshold_backward(pooled, pooled, 0)
            torch.ops.aten.max_pool2d_with_indices_backward(masked, gradient, *window, positions)

    gradients = 2 * numbers if name != "first" else numbers
    outputs = places * filters
    return {
        f"{name} convolution, outputs": (forward, numbers),
        f"{name} convolution, gradients": (backward, gradients),
        # reads, and writes a gradient; what is pooled is a quarter, and moved six times
        f"{name} pooling and ReLU": (pool, 2 * outputs + 6 * outputs // 4),
    }


def seconds(works: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the processor's seconds of the fastest call of each work, by name.

    Args:
        works: the calls, which take turns.
        repeats: how many turns, after one that is not counted.
    """
    for work in works.values():
        work()
    # other work on the machine only ever adds time, so the minimum is the least disturbed
    fastest = dict.fromkeys(works, math.inf)
    for _ in range(repeats):
        for name, work in works.items():
            start = time.process_time()
            work()
            fastest[name] = min(fastest[name], time.process_time() - start)
    return fastest


def measure(works_by_name: dict[str, Part], clients: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each part.

    Args:
        works_by_name: by name.
        clients: of a round.
        repeats: of each measurement.
    """
    source = torch.rand(COPIED)
    target = torch.empty_like(source)
    copy_bytes = 2 * source.numel() * source.element_size()
    # A copy measures the rate of memory, as in STREAM (McCalpin 1995).
    works: dict[str, Callable[[], Any]] = {COPY: lambda: target.copy_(source)}
    works |= {name: work for name, (work, _) in works_by_name.items()}
    fastest = seconds(works, repeats)
    bytes_per_second = copy_bytes / fastest[COPY]
    rows = []
    for name, (_, numbers) in works_by_name.items():
        moved_bytes = NUMBER_BYTES * numbers * clients
        chunks = 1 if name == TRAINING else clients / CHUNK
        milliseconds = 1e3 * fastest[name] * chunks
        copy_milliseconds = 1e3 * moved_bytes / bytes_per_second
        row = {
            "part": name,
            "milliseconds": f"{milliseconds:.1f}",
            "megabytes": f"{moved_bytes / 1e6:.0f}",
            "copy_milliseconds": f"{copy_milliseconds:.1f}",
        }
        print("  ".join(row.values()), flush=True)
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        arguments: the command line; None takes the process's own.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=("mlp", "cnn"), default="mlp")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(arguments)
    with cpu_threads(1):
        name = "round_bound"
        parts_of_model = mlp_parts
        if options.model == "cnn":
            name = "round_bound_cnn"
            parts_of_model = cnn_parts
        rows = measure(parts_of_model(options.clients), options.clients, options.repeats)
        print(write(name, rows))


if __name__ == "__main__":
    main()
