"""Checks of networks, masks, mechanisms and protocols on a device against the CPU."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from benchmarks.costs.recurrent import batched_round as updates
from benchmarks.gpu import oracles, runs
from benchmarks.gpu.data import CPU, SECRET, SIZES, apart, cohort, differing
from benchmarks.gpu.pieces import Check
from securecluster.core.randomness import Randomness
from securecluster.messaging.messages import Rows
from securecluster.models.architectures import names
from securecluster.privacy.masking.block_mask import Blocks
from securecluster.privacy.masking.masks import MASKS, build
from securecluster.privacy.pipeline import Stage
from securecluster.training.local_trainer import LocalTraining

WIDE = torch.float64
NARROW = torch.float32
# clients have SIZES samples: one full batch, and a full and a partial one
PLAN = LocalTraining(lr=0.05, epochs=1, batch_size=3, dropout=False)
PRIVATE = replace(PLAN, clip=0.5)
LONGER = replace(PLAN, epochs=2)
OPTIMIZERS = {
    "sgd": LONGER,
    "momentum": replace(LONGER, momentum=0.9),
    "adam": replace(LONGER, optimizer="adam", lr=0.001),
}
SYNCHRONIZING = "synchronizing CUDA operation"  # in CUDA's warning of a wait
# Waits of two steps of DP-SGD: for the first models, which noise is keyed by, and at each step for
# the number of draws that float64 may have rounded wrongly, for their words, and to replace them
WAITS_OF_DPSGD = 1 + 2 * 3
# seconds of a check on two cores
SLOW = {"resnet9": 1.0, "cnn-briggs": 0.3, "cnn-cifar": 0.3, "lstm-chars-256": 0.4}

EXACT = "the same operations on the same bits"
LINEAR = "float64 sums in another order differ by some 1e-16 of the terms"
STEPS64 = "a few steps in float64: 1e-16 a sum, amplified by gradients that cancel"
STEPS32 = (
    "a few steps in float32: 6e-8 a sum, amplified by gradients that cancel and by ReLUs near 0"
)
FUNCTIONS = (
    "logarithms and cosines of a device differ from the CPU's by a few units in the last place"
)


def every_check() -> list[Check]:
    """Return all checks: parts before the whole, and what is quick before what is slow."""
    return [*mask_checks(), *mechanism_checks(), *network_checks(), *runs.protocol_checks()]


# Masks


def rows_of(dtype: torch.dtype, count: int = 3, width: int = 50) -> torch.Tensor:
    """Return random rows in main memory, the same ones every time.

    Args:
        dtype: of the rows; they are drawn in float64.
        count: number of rows.
        width: numbers of a row.
    """
    draw = Randomness(0).generator("rows", count, width)
    rows = draw.standard_normal((count, width))
    return torch.from_numpy(rows).to(dtype)


def unlocked(mask: str, width: int) -> Stage:
    """Return a mask with a seed.

    Args:
        mask: its name.
        width: numbers of a row.
    """
    (stage,) = build(mask, width)
    stage.unlock(bytes(range(32)))  # type: ignore[attr-defined]
    return stage


def masked(mask: str, dtype: torch.dtype, device: torch.device) -> float:
    """Return how far rows masked on the device are from those masked on the CPU.

    Args:
        mask: its name.
        dtype: of the rows.
        device: the one that is checked.
    """
    rows = rows_of(dtype)
    width = rows.shape[1]
    # the map follows from seed and call's number, so both devices draw the same
    expected = unlocked(mask, width).forward(rows, 1)
    result = unlocked(mask, width).forward(rows.to(device), 1)
    return apart(result, expected)


def overwritten(mask: str, device: torch.device) -> float:
    """Return how far rows that are masked in place are from rows masked on the CPU."""
    rows = rows_of(WIDE)
    width = rows.shape[1]
    expected = unlocked(mask, width).forward(rows, 1)
    # masked rows may be wider: the room for them begins with the rows and is zero elsewhere
    room = rows.new_zeros(expected.shape)
    room[:, :width] = rows
    stage: Any = unlocked(mask, width)
    result = stage.overwrite(room.to(device), 1)
    return apart(result, expected)


def unmasked(mask: str, dtype: torch.dtype, device: torch.device) -> float:
    """Return how far rows are from themselves after they were masked and unmasked on the device.

    Args:
        mask: its name.
        dtype: of the rows.
        device: the one that is checked.
    """
    rows = rows_of(dtype)
    stage = unlocked(mask, 50)
    hidden = stage.forward(rows.to(device), 1)
    return apart(stage.inverse(hidden, 1), rows)


def inner_products(mask: str, device: torch.device) -> float:
    """Return how far masked rows' inner products on the device are from the rows' own."""
    rows = rows_of(WIDE)
    stage = unlocked(mask, rows.shape[1])
    # every mask is an orthonormal map
    hidden = stage.forward(rows.to(device), 1).cpu()
    return apart(hidden @ hidden.T, rows @ rows.T)


def in_blocks(device: torch.device) -> float:
    """Return how far a mask in two blocks on the device is from that on the CPU."""
    rows = rows_of(WIDE)

    def masked_on(target: torch.device) -> torch.Tensor:
        stage = Blocks("rotation", 20, 30)
        stage.unlock(bytes(range(32)))
        return stage.forward(rows.to(target), 1)

    return apart(masked_on(device), masked_on(CPU))


def mask_checks() -> list[Check]:
    """Return the checks of masks."""
    checks = [Check("mask blocks, float64", 1e-12, LINEAR, in_blocks)]
    for mask in MASKS[1:]:  # without “none”
        name = f"mask {mask}"
        masked64 = partial(masked, mask, WIDE)
        masked32 = partial(masked, mask, NARROW)
        in_place = partial(overwritten, mask)
        undone64 = partial(unmasked, mask, WIDE)
        undone32 = partial(unmasked, mask, NARROW)
        products = partial(inner_products, mask)
        bound64 = 1e-12
        bound32 = 1e-5
        why64 = LINEAR
        why32 = "three layers of float32 sums"
        if mask in ("permutation", "signed-permutation"):  # they compute no sums
            bound64 = 0.0
            bound32 = 0.0
            why64 = EXACT
            why32 = EXACT
        checks += [
            Check(f"{name}, float64", bound64, why64, masked64),
            Check(f"{name}, float32", bound32, why32, masked32),
            Check(f"{name}, in place", bound64, why64, in_place),
            Check(f"{name}, undone, float64", bound64, why64, undone64),
            Check(f"{name}, undone, float32", bound32, why32, undone32),
            Check(f"{name}, inner products", 1e-12, LINEAR, products),
        ]
    return [replace(check, cost=0.02) for check in checks]


# Mechanisms


def on_both(
    make: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    width: int = 51,
) -> float:
    """Return how far what is made of rows on the device is from what is made of them on the CPU.

    Args:
        make: computes something from rows; it may change them.
        dtype: of the rows.
        device: the one that is checked.
        width: numbers of a row.
    """
    rows = rows_of(dtype, width=width)
    result = make(rows.to(device, copy=True))
    expected = make(rows.clone())
    return apart(result, expected)


def sketched(rows: torch.Tensor) -> torch.Tensor:
    """Return sketches of 8 numbers."""
    from securecluster.privacy.compression.sketches import Sketch

    return Sketch(8, Randomness(0)).forward(rows, 1)


def clipped(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of norm 0.5 at most."""
    from securecluster.privacy.dp.gaussian_mechanism import Clip

    return Clip(0.5).forward(rows, 1)


def noised(rows: torch.Tensor) -> torch.Tensor:
    """Return rows with each client's noise, as a GPU draws it."""
    SECRET.noise_together(range(len(rows)), "delta", 1, rows, 0.5, 1.0)
    return rows


def curated(rows: torch.Tensor) -> torch.Tensor:
    """Return sums with a trusted server's noise."""
    from securecluster.privacy.dp.gaussian_mechanism import TrustedCurator
    from securecluster.privacy.dp.noise_streams import NoiseStreams

    streams = NoiseStreams(lambda client: bytes(32), "run")
    curator = TrustedCurator(1.0, 0.5, streams)
    return curator.add(rows, 1, "delta", [2] * len(rows))


def gram_noise(rows: torch.Tensor) -> torch.Tensor:
    """Return a Gram matrix of clipped rows with noise."""
    from securecluster.protocols.common.comparison.gram_mechanism import gram, packed, unpacked

    row = packed(gram(rows))
    # the noise belongs to the very bits of a row
    drawn = SECRET.noised(1, "gram", 0, torch.zeros_like(row), 1.0, 1.0)
    return unpacked(row + drawn, rows.shape[1])


def spectrum(rows: torch.Tensor) -> torch.Tensor:
    """Return leading eigenvalues and what rows become in their directions."""
    from securecluster.clustering.eigenvectors import projected, top

    values, vectors = top(rows, 3)
    return torch.cat([values, projected(rows, vectors)])


def layer_noise(rows: torch.Tensor) -> torch.Tensor:
    """Return rows that leave in another way than a pipeline's, clipped and with noise."""
    from securecluster.privacy.dp.client_noise import ClientNoise
    from securecluster.runtime.call_context import outside_run

    # a bound that cuts nothing: the noise belongs to the very bits of a row
    noise = ClientNoise("client", 1e6, 1e-7, 1.0, SECRET)
    return outside_run(noise, range(len(rows)), step=1).release(rows)


def grid_noise(rows: torch.Tensor) -> torch.Tensor:
    """Return Gaussians of ChaCha20 streams on a fine grid, as many as the rows have numbers."""
    from securecluster.privacy.dp.device_noise import add_noise

    out = torch.zeros_like(rows)
    count = len(rows)
    keys = [bytes([k] * 32) for k in range(count)]
    grids = [2.0**-20] * count  # spacing of the grid
    add_noise(out, keys, grids, [1.0] * count)
    return out


def drawn_by_kernels(device: torch.device) -> float:
    """Return how far streams and Gaussians of a device are from those of torch's operations.

    Returns:
        The largest difference of integers that no rounding leaves open; infinity where a GPU has
        no compiled kernels.
    """
    from securecluster.privacy.dp import device_cipher

    if device.type == "cuda" and device_cipher._kernels(torch.cuda.current_device()) is None:
        return math.inf
    keys = device_cipher.words_of([bytes([k] * 32) for k in range(3)], CPU)
    nonces = torch.arange(9, dtype=torch.int32).view(3, 3)
    scales = torch.full((3,), 1e5, dtype=WIDE)
    expected, open_here, _ = device_cipher.by_operations(keys, nonces, scales, 5000)
    integers, open_there, _ = device_cipher.gaussians(
        keys.to(device), nonces.to(device), scales.to(device), 5000
    )
    sure = ~(open_here | open_there.cpu())
    return apart(integers.cpu() * sure, expected * sure)


def waited(plan: LocalTraining, allowed: int, device: torch.device) -> float:
    """Return how often the host waited for CUDA while clients trained, beyond what is allowed.

    Args:
        plan: of local training, with or without DP-SGD.
        allowed: number of waits.
        device: the one that is checked.
    """
    trainer = cohort("mlp", device, NARROW)
    clients = range(len(SIZES))
    starts = Rows(trainer.start[None], (0,) * len(SIZES))
    trainer.train(starts, clients, plan, 1)  # what is made once
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.train(starts, clients, plan, 2)
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    waits = sum(SYNCHRONIZING in str(warning.message) for warning in caught)
    return float(max(0, waits - allowed))


def coded(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Return the bytes of compressed rows."""
    from securecluster.privacy.compression.codecs import build as compression

    stages = compression(name, rows.shape[1])
    return stages[0].forward(rows, 1)


def decoded(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Return what compressed rows stand for."""
    from securecluster.privacy.compression.codecs import build as compression

    (stage,) = compression(name, rows.shape[1])
    codes = stage.forward(rows, 1)
    return stage.decode(codes)


def sealed(device: torch.device) -> float:
    """Return how many numbers and bytes a seal on the device gets wrong.

    Rows are sealed and opened there, and the sealed bytes stand beside the CPU's.
    """
    from securecluster.privacy.masking.sealing import Seal

    rows = rows_of(NARROW)
    seal = Seal("run")
    seal.unlock(bytes(32))
    ids = [0, 1, 2]
    step = 1
    method = "eigen"
    field = "vectors"
    expected = seal.close(rows, ids, step, method, field)
    boxes = seal.close(rows.to(device), ids, step, method, field)
    template = rows[0].to(device)
    opened = seal.open(boxes.to(device), ids, step, method, field, template)
    return differing(opened, rows) + differing(boxes, expected)


def distance(metric: str, rows: torch.Tensor) -> torch.Tensor:
    """Return the distances of all pairs."""
    from securecluster.clustering.distances import distances

    return distances(rows, metric)


def mechanism_checks() -> list[Check]:
    """Return the checks of mechanisms, each on the same rows."""
    checks = []
    linear = {"sketch": sketched, "clip": clipped, "eigenvalues": spectrum}
    for metric in ("l1", "l2", "cosine"):
        linear[f"distances {metric}"] = partial(distance, metric)
    random = {
        "noise, local": noised,
        "noise, central": curated,
        "noise of a layer": layer_noise,
        "noise of a Gram matrix": gram_noise,
        "Gaussians": grid_noise,
    }
    for name, make in linear.items():
        error64 = partial(on_both, make, WIDE)
        error32 = partial(on_both, make, NARROW)
        checks.append(Check(f"{name}, float64", 1e-9, LINEAR, error64))
        checks.append(Check(f"{name}, float32", 1e-4, "float32 sums", error32))
    for name, make in random.items():
        error64 = partial(on_both, make, WIDE)
        error32 = partial(on_both, make, NARROW)
        checks.append(Check(f"{name}, float64", 1e-9, FUNCTIONS, error64))
        checks.append(Check(f"{name}, float32", 1e-4, FUNCTIONS, error32))
    for name in ("8bit", "4bit", "1bit", "topk:0.2"):
        code_error = partial(on_both, partial(coded, name), NARROW)
        number_error = partial(on_both, partial(decoded, name), NARROW)
        checks.append(Check(f"compression {name}, bytes", 0.0, CODES, code_error))
        checks.append(Check(f"compression {name}, numbers", 1e-6, CODES, number_error))
    checks.append(Check("noise by kernels", 0.0, SETTLED, drawn_by_kernels))
    without = partial(waited, PLAN, 0)
    checks.append(Check("training without waits", 0.0, "CUDA tells of each wait", without))
    noisy = partial(waited, replace(PRIVATE, noise=1.0), WAITS_OF_DPSGD)
    checks.append(Check("waits of DP-SGD", 0.0, "CUDA tells of each wait", noisy))
    checks.append(Check("seals", 0.0, "the same bytes are sealed", sealed))
    return [replace(check, cost=0.03) for check in checks]


SETTLED = "what float64 may round otherwise is marked, and nothing else differs"
CODES = "random rows have no number within 1e-7 of where its code changes"


# Networks


@cache
def wanted_updates(network: str, plan: LocalTraining) -> torch.Tensor:
    """Return a plain loop's updates, float64.

    Args:
        network: name of an architecture.
        plan: of local training, with or without DP-SGD.
    """
    trainer = cohort(network, CPU, WIDE)
    if plan.private:
        return oracles.private_updates(trainer, plan)
    return oracles.updates(trainer, plan)


def trained(network: str, plan: LocalTraining, dtype: torch.dtype, device: torch.device) -> float:
    """Return how far updates made on the device are from a plain loop's.

    Args:
        network: name of an architecture.
        plan: of local training, without dropout.
        dtype: of the training on the device; the loop is in float64.
        device: the one that is checked.
    """
    result = updates(cohort(network, device, dtype), plan)
    return apart(result, wanted_updates(network, plan))


def trained_alike(network: str, plan: LocalTraining, device: torch.device) -> float:
    """Return how far updates made on the device are from the CPU's, with dropout or noise."""
    expected = updates(cohort(network, CPU, WIDE), plan)
    result = updates(cohort(network, device, WIDE), plan)
    return apart(result, expected)


def trained_twice(network: str, plan: LocalTraining, device: torch.device) -> float:
    """Return in how many numbers the same call differs from itself."""
    # sums in an order that varies would show in float32
    first = updates(cohort(network, device, NARROW), plan)
    second = updates(cohort(network, device, NARROW), plan)
    return differing(first, second)


def forward_and_gradient(network: str, device: torch.device) -> float:
    """Return how far a batch's gradients on the device are from autograd's on the module."""
    reference = cohort(network, CPU, WIDE)
    trainer = cohort(network, device, WIDE)
    model = trainer.model
    worst = 0.0
    for client, size in enumerate(SIZES):
        x = trainer.inputs(client)[None]
        first = int(trainer._offsets[client])
        y = trainer._y[first : first + size][None]
        # equal weights make the weighted sum of losses their mean, as in the oracle
        weight = x.new_full((1, size), 1 / size, dtype=WIDE)
        views = model.views(trainer.start[None])
        gradients = model.gradients(views, x, y, weight, None)
        result = torch.cat([gradients[name].flatten() for name in model.shapes])
        expected = oracles.gradient(reference, client)
        worst = max(worst, apart(result, expected))
    return worst


def judged(network: str, device: torch.device) -> float:
    """Return how far clients' losses on the device are from the CPU's."""

    def losses_on(target: torch.device) -> torch.Tensor:
        trainer = cohort(network, target, WIDE)
        clients = range(len(trainer.ids))
        models = Rows(trainer.start[None], (0,) * len(clients))
        losses = trainer.loss(models, clients)
        return torch.from_numpy(losses)

    return apart(losses_on(device), losses_on(CPU))


def network_checks() -> list[Check]:
    """Return the checks of networks: gradients, training, DP-SGD, and the same bits twice."""
    checks = []
    for network in names():
        cost = SLOW.get(network, 0.1)
        loss = partial(judged, network)
        gradient = partial(forward_and_gradient, network)
        training64 = partial(trained, network, PLAN, WIDE)
        training32 = partial(trained, network, PLAN, NARROW)
        dp_sgd64 = partial(trained, network, PRIVATE, WIDE)
        training_twice = partial(trained_twice, network, PLAN)
        dp_sgd_twice = partial(trained_twice, network, PRIVATE)
        of_network = [
            Check(f"{network}: loss", 1e-12, LINEAR, loss),
            Check(f"{network}: gradient", 1e-9, STEPS64, gradient),
            Check(f"{network}: training, float64", 1e-9, STEPS64, training64),
            Check(f"{network}: training, float32", 5e-3, STEPS32, training32),
            Check(f"{network}: DP-SGD, float64", 1e-9, STEPS64, dp_sgd64),
            Check(f"{network}: training twice", 0.0, EXACT, training_twice),
            Check(f"{network}: DP-SGD twice", 0.0, EXACT, dp_sgd_twice),
        ]
        checks += [replace(check, cost=cost) for check in of_network]
    for name, plan in OPTIMIZERS.items():
        private = replace(plan, clip=0.5)
        noisy = replace(private, noise=1.0)
        for network in ("mlp-32", "lstm-trajectory"):
            dp_sgd = f"{network}: DP-SGD by {name}"
            plain_error = partial(trained, network, plan, WIDE)
            private_error = partial(trained, network, private, WIDE)
            noisy_error = partial(trained_alike, network, noisy)
            checks += [
                Check(f"{network}: {name}", 1e-8, STEPS64, plain_error),
                Check(dp_sgd, 1e-8, STEPS64, private_error),
                Check(f"{dp_sgd}, with noise", 1e-8, FUNCTIONS, noisy_error),
            ]
    for network in ("lstm-words", "lstm-trajectory"):
        plan = replace(PLAN, dropout=True)
        plain_error = partial(trained_alike, network, plan)
        checks.append(Check(f"{network}: dropout", 1e-9, STEPS64, plain_error))
        private = replace(PRIVATE, dropout=True)
        private_error = partial(trained_alike, network, private)
        checks.append(Check(f"{network}: DP-SGD, dropout", 1e-9, STEPS64, private_error))
    return checks
