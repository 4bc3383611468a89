"""Checks of networks, masks, mechanisms and protocols on a device against the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from securecluster.benchmarks.gpu import oracles, runs
from securecluster.benchmarks.gpu.data import CPU, SECRET, SIZES, apart, cohort, differing
from securecluster.benchmarks.gpu.pieces import Check
from securecluster.core.randomness import Randomness
from securecluster.messaging.messages import Rows
from securecluster.models.architectures import names
from securecluster.privacy.masking.block_mask import Blocks
from securecluster.privacy.masking.masks import MASKS, build
from securecluster.privacy.pipeline import Stage
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

WIDE, NARROW = torch.float64, torch.float32
PLAN = LocalTraining(lr=0.05, epochs=1, batch_size=3, dropout=False)
PRIVATE = replace(PLAN, clip=0.5)
LONGER = replace(PLAN, epochs=2)
OPTIMIZERS = {
    "sgd": LONGER,
    "momentum": replace(LONGER, momentum=0.9),
    "adam": replace(LONGER, optimizer="adam", lr=0.001),
}
# seconds of a check on two cores
SLOW = {
    "resnet9": 1.0,
    "cnn-briggs": 0.3,
    "cnn-cifar": 0.3,
    "lstm-chars-256": 0.4,
}

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
    return [
        *mask_checks(),
        *mechanism_checks(),
        *network_checks(),
        *runs.protocol_checks(),
    ]


# Masks


def rows_of(dtype: torch.dtype, count: int = 3, width: int = 50) -> torch.Tensor:
    """Return random rows in main memory, the same ones every time."""
    draw = Randomness(0).generator("rows", count, width)
    return torch.from_numpy(draw.standard_normal((count, width))).to(dtype)


def unlocked(mask: str, width: int) -> Stage:
    """Return a mask with a seed."""
    (stage,) = build(mask, width)
    stage.unlock(bytes(range(32)))  # type: ignore[attr-defined]
    return stage


def masked(mask: str, dtype: torch.dtype, device: torch.device) -> float:
    """Return how far rows masked on the device are from those masked on the CPU."""
    rows = rows_of(dtype)
    wanted = unlocked(mask, rows.shape[1]).forward(rows, 1)
    return apart(unlocked(mask, rows.shape[1]).forward(rows.to(device), 1), wanted)


def overwritten(mask: str, device: torch.device) -> float:
    """Return how far rows that are masked in place are from rows masked on the CPU."""
    rows = rows_of(WIDE)
    wanted = unlocked(mask, rows.shape[1]).forward(rows, 1)
    room = rows.new_zeros(wanted.shape)
    room[:, : rows.shape[1]] = rows
    stage: Any = unlocked(mask, rows.shape[1])
    return apart(stage.overwrite(room.to(device), 1), wanted)


def unmasked(mask: str, dtype: torch.dtype, device: torch.device) -> float:
    """Return how far rows are from themselves after they were masked and unmasked on the device."""
    rows, stage = rows_of(dtype), unlocked(mask, 50)
    return apart(stage.inverse(stage.forward(rows.to(device), 1), 1), rows)


def inner_products(mask: str, device: torch.device) -> float:
    """Return how far masked rows' inner products on the device are from the rows' own."""
    rows = rows_of(WIDE)
    found = unlocked(mask, rows.shape[1]).forward(rows.to(device), 1).cpu()
    return apart(found @ found.T, rows @ rows.T)


def in_blocks(device: torch.device) -> float:
    """Return how far a mask in two blocks on the device is from that on the CPU."""
    rows = rows_of(WIDE)

    def masked_on(place: torch.device) -> torch.Tensor:
        stage = Blocks("rotation", 20, 30)
        stage.unlock(bytes(range(32)))
        return stage.forward(rows.to(place), 1)

    return apart(masked_on(device), masked_on(CPU))


def mask_checks() -> list[Check]:
    """Return the checks of masks."""
    checks = [Check("mask blocks, float64", 1e-12, LINEAR, in_blocks)]
    for mask in MASKS[1:]:
        name = f"mask {mask}"
        bound64, why64 = 1e-12, LINEAR
        bound32, why32 = 1e-5, "three layers of float32 sums"
        if mask in ("permutation", "signed-permutation"):  # they compute no sums
            bound64, why64 = 0.0, EXACT
            bound32, why32 = 0.0, EXACT
        checks += [
            Check(f"{name}, float64", bound64, why64, partial(masked, mask, WIDE)),
            Check(f"{name}, float32", bound32, why32, partial(masked, mask, NARROW)),
            Check(f"{name}, in place", bound64, why64, partial(overwritten, mask)),
            Check(f"{name}, undone, float64", bound64, why64, partial(unmasked, mask, WIDE)),
            Check(f"{name}, undone, float32", bound32, why32, partial(unmasked, mask, NARROW)),
            Check(f"{name}, inner products", 1e-12, LINEAR, partial(inner_products, mask)),
        ]
    return [replace(check, cost=0.02) for check in checks]


# Mechanisms


def on_both(
    make: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    width: int = 51,
) -> float:
    """Return how far what is made of rows on the device is from what is made of them on the CPU."""
    rows = rows_of(dtype, width=width)
    return apart(make(rows.to(device, copy=True)), make(rows.clone()))


def sketched(rows: torch.Tensor) -> torch.Tensor:
    """Return sketches of 8 numbers."""
    from securecluster.privacy.compression.sketches import Sketch

    return Sketch(8, Randomness(0)).forward(rows, 1)


def clipped(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of norm 0.5 at most."""
    from securecluster.privacy.dp.gaussian_mechanism import Clip

    return Clip(0.5).forward(rows, 1)


def noised(rows: torch.Tensor) -> torch.Tensor:
    """Return rows with each client's noise."""
    from securecluster.privacy.dp.gaussian_mechanism import Noise

    noise = Noise(1.0, 0.5)
    noise.arm(SECRET)
    return noise.forward_for(rows, 1, range(len(rows)), "delta")


def curated(rows: torch.Tensor) -> torch.Tensor:
    """Return sums with a trusted server's noise."""
    from securecluster.privacy.dp.gaussian_mechanism import TrustedCurator
    from securecluster.privacy.dp.noise_streams import NoiseStreams

    curator = TrustedCurator(1.0, 0.5, NoiseStreams(lambda client: bytes(32), "run"))
    return curator.add(rows, 1, "delta", [2] * len(rows))


def gram_noise(rows: torch.Tensor) -> torch.Tensor:
    """Return a Gram matrix of clipped rows with noise."""
    from securecluster.protocols.oneshot.gram_mechanism import gram, packed, unpacked

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
    from securecluster.privacy.dp.loss_mechanism import noised_rows

    everyone = tuple(range(len(rows)))
    # a bound that cuts nothing: the noise belongs to the very bits of a row
    guard = ClientNoise("client", 1e6, 1e-7, 1.0, SECRET)
    return noised_rows(guard, "layer", everyone, 1, rows)


def grid_noise(rows: torch.Tensor) -> torch.Tensor:
    """Return Gaussians of ChaCha20 streams on a fine grid, as many as the rows have numbers."""
    from securecluster.privacy.dp.grid_noise import GridNoise

    out, count = torch.zeros_like(rows), len(rows)
    GridNoise([bytes([k] * 32) for k in range(count)]).add_to(
        out, [2.0**-20] * count, [1.0] * count
    )
    return out


def coded(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Return the bytes of compressed rows."""
    from securecluster.privacy.compression.codecs import build as compression

    return compression(name, rows.shape[1])[0].forward(rows, 1)


def decoded(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Return what compressed rows stand for."""
    from securecluster.privacy.compression.codecs import build as compression

    (stage,) = compression(name, rows.shape[1])
    return stage.decode(stage.forward(rows, 1))


def sealed(device: torch.device) -> float:
    """Return how many numbers and bytes a seal on the device gets wrong.

    Rows are sealed and opened there, and the sealed bytes stand beside the CPU's.
    """
    from securecluster.privacy.masking.sealing import Seal

    rows = rows_of(NARROW)
    seal = Seal("run")
    seal.unlock(bytes(32))
    ids, step, method, field = [0, 1, 2], 1, "eigen", "vectors"
    wanted = seal.close(rows, ids, step, method, field)
    boxes = seal.close(rows.to(device), ids, step, method, field)
    opened = seal.open(boxes.to(device), ids, step, method, field, rows[0].to(device))
    return differing(opened, rows) + differing(boxes, wanted)


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
        checks.append(Check(f"{name}, float64", 1e-9, LINEAR, partial(on_both, make, WIDE)))
        checks.append(
            Check(f"{name}, float32", 1e-4, "float32 sums", partial(on_both, make, NARROW))
        )
    for name, make in random.items():
        checks.append(Check(f"{name}, float64", 1e-9, FUNCTIONS, partial(on_both, make, WIDE)))
        checks.append(Check(f"{name}, float32", 1e-4, FUNCTIONS, partial(on_both, make, NARROW)))
    for name in ("8bit", "4bit", "1bit", "topk:0.2"):
        bytes_of, numbers_of = partial(coded, name), partial(decoded, name)
        checks.append(
            Check(f"compression {name}, bytes", 0.0, CODES, partial(on_both, bytes_of, NARROW))
        )
        checks.append(
            Check(f"compression {name}, numbers", 1e-6, CODES, partial(on_both, numbers_of, NARROW))
        )
    checks.append(Check("seals", 0.0, "the same bytes are sealed", sealed))
    return [replace(check, cost=0.03) for check in checks]


CODES = "random rows have no number within 1e-7 of where its code changes"


# Networks


def updates(trainer: LocalTrainer, plan: LocalTraining) -> torch.Tensor:
    """Return the updates (m, d) of one call of training."""
    everyone = range(len(trainer.ids))
    models = Rows(trainer.start[None], (0,) * len(everyone))
    return trainer.train(models, everyone, plan, 1)


@cache
def wanted_updates(network: str, plan: LocalTraining) -> torch.Tensor:
    """Return a plain loop's updates, float64."""
    oracle = oracles.private_updates if plan.private else oracles.updates
    return oracle(cohort(network, CPU, WIDE), plan)


def trained(network: str, plan: LocalTraining, dtype: torch.dtype, device: torch.device) -> float:
    """Return how far updates made on the device are from a plain loop's."""
    return apart(updates(cohort(network, device, dtype), plan), wanted_updates(network, plan))


def trained_alike(network: str, plan: LocalTraining, device: torch.device) -> float:
    """Return how far updates made on the device are from the CPU's, with dropout or noise."""
    wanted = updates(cohort(network, CPU, WIDE), plan)
    return apart(updates(cohort(network, device, WIDE), plan), wanted)


def trained_twice(network: str, plan: LocalTraining, device: torch.device) -> float:
    """Return in how many numbers the same call differs from itself."""
    first, second = (updates(cohort(network, device, NARROW), plan) for _ in range(2))
    return differing(first, second)


def forward_and_gradient(network: str, device: torch.device) -> float:
    """Return how far a batch's gradients on the device are from autograd's on the module."""
    here = cohort(network, CPU, WIDE)
    there = cohort(network, device, WIDE)
    worst = 0.0
    for client, size in enumerate(SIZES):
        x = there.inputs(client)[None]
        first = int(there._offsets[client])
        y = there._y[first : first + size][None]
        weight = x.new_full((1, size), 1 / size, dtype=WIDE)
        views = there.model.views(there.start[None])
        gradients = there.model.gradients(views, x, y, weight, None)
        found = torch.cat([gradients[name].flatten() for name in there.model.shapes])
        worst = max(worst, apart(found, oracles.gradient(here, client)))
    return worst


def judged(network: str, device: torch.device) -> float:
    """Return how far clients' losses on the device are from the CPU's."""

    def losses_on(place: torch.device) -> torch.Tensor:
        trainer = cohort(network, place, WIDE)
        clients = range(len(trainer.ids))
        models = Rows(trainer.start[None], (0,) * len(clients))
        return torch.from_numpy(trainer.loss(models, clients))

    return apart(losses_on(device), losses_on(CPU))


def network_checks() -> list[Check]:
    """Return the checks of networks: gradients, training, DP-SGD, and the same bits twice."""
    checks = []
    for network in names():
        cost = SLOW.get(network, 0.1)
        own = [
            Check(f"{network}: loss", 1e-12, LINEAR, partial(judged, network)),
            Check(f"{network}: gradient", 1e-9, STEPS64, partial(forward_and_gradient, network)),
            Check(
                f"{network}: training, float64",
                1e-9,
                STEPS64,
                partial(trained, network, PLAN, WIDE),
            ),
            Check(
                f"{network}: training, float32",
                5e-3,
                STEPS32,
                partial(trained, network, PLAN, NARROW),
            ),
            Check(
                f"{network}: DP-SGD, float64",
                1e-9,
                STEPS64,
                partial(trained, network, PRIVATE, WIDE),
            ),
            Check(f"{network}: training twice", 0.0, EXACT, partial(trained_twice, network, PLAN)),
            Check(f"{network}: DP-SGD twice", 0.0, EXACT, partial(trained_twice, network, PRIVATE)),
        ]
        checks += [replace(check, cost=cost) for check in own]
    for name, plan in OPTIMIZERS.items():
        private = replace(plan, clip=0.5)
        noisy = replace(private, noise=1.0)
        for network in ("mlp-32", "lstm-trajectory"):
            checks += [
                Check(f"{network}: {name}", 1e-8, STEPS64, partial(trained, network, plan, WIDE)),
                Check(
                    f"{network}: DP-SGD by {name}",
                    1e-8,
                    STEPS64,
                    partial(trained, network, private, WIDE),
                ),
                Check(
                    f"{network}: DP-SGD by {name}, with noise",
                    1e-8,
                    FUNCTIONS,
                    partial(trained_alike, network, noisy),
                ),
            ]
    for network in ("lstm-words", "lstm-trajectory"):
        plan = replace(PLAN, dropout=True)
        checks.append(
            Check(f"{network}: dropout", 1e-9, STEPS64, partial(trained_alike, network, plan))
        )
        plan = replace(PRIVATE, dropout=True)
        checks.append(
            Check(
                f"{network}: DP-SGD, dropout", 1e-9, STEPS64, partial(trained_alike, network, plan)
            )
        )
    return checks
