"""Neighbouring data sets, literally: what each release tells of one example, or of one client, that
is blanked, replaced, or really added or removed.

python -m benchmarks.leaks.relations [--draws 1000] [--only losses] [--confidence 0.9999]

Each mechanism that clients release by, as protocols call it, draws many releases of a client, or of
a sum, in two worlds. In one there is a canary among n examples (or clients); in the other it is

- blanked: its place is kept, and it contributes zeros. ε is for this relation.
- replaced by an example (a client) of the other extreme. The ledger has an ε for this, too.
- removed: n − 1 are left. Exchanged, the worlds are those of an example that is added. Means are
  then divided by n − 1, and noise follows: no ε covers this, since n is public.

The statistic is the logarithm of the likelihood ratio of the two worlds, from the exact release and
its noise. A lower bound of ε by Clopper and Pearson needs no assumption
(`securecluster.privacy.dp.auditing`); one above the claim refutes it, one below proves nothing.
Writes benchmarks/results/relations.csv.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.leaks.worlds import (
    DELTA,
    FULL,
    LINEAR,
    LONG,
    Finding,
    first_updates,
    telling_feature,
    with_canaries,
)
from benchmarks.table import tabulate
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.data import Federation
from securecluster.privacy.dp.auditing import lower_bound
from securecluster.privacy.dp.client_noise import ClientNoise
from securecluster.privacy.dp.exponential_mechanism import bounded_range, choice, probabilities
from securecluster.privacy.dp.gaussian_mechanism import Clip, Noise, TrustedCurator
from securecluster.privacy.dp.ledger import Event, Ledger, Relation
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.dp.skellam_mechanism import SkellamMechanism
from securecluster.privacy.gradient_signatures import (
    ClassBlocks,
    ClassResiduals,
    ExampleMap,
    GradientSketch,
    MeanNumber,
    Projected,
    ResidualCoordinates,
)
from securecluster.protections.secure_sums.graph import Plan
from securecluster.protocols import CFL
from securecluster.protocols.common.comparison.gradient_signatures import SignatureRelease
from securecluster.protocols.common.comparison.gram_mechanism import REPLACE as REPLACE_GRAM
from securecluster.protocols.common.comparison.gram_mechanism import GramNoise
from securecluster.protocols.common.comparison.packed_signatures import SECOND_CLIP
from securecluster.protocols.common.comparison.signature_plan import CLIP
from securecluster.protocols.contrib.flux.client import release_sums
from securecluster.protocols.contrib.flux.descriptors import REPLACE as REPLACE_DESCRIPTOR
from securecluster.protocols.contrib.flux.descriptors import DescriptorMap
from securecluster.runtime.call_context import outside_run

Array = NDArray[np.float64]
MINIMUM = 2  # members of the smallest sum
# of which a secure sum is unmasked, by its members
SURVIVORS = Plan(MINIMUM).least_survivors
PRESENT = "present"
BLANKED = "blanked"
REPLACED = "replaced"
REMOVED = "removed"
WORLDS = (BLANKED, REPLACED, REMOVED)
# of the evidence page: at z = 4 one release claims 0.926
NOISE = 4.0
SIZES = (2, 5, 10, 30)
FEATURES = 8
CLASSES = 4
BOUND = 0.5  # of a loss
MODELS = 3  # losses in a row, and models to choose among


class Plain(NoiseStreams):
    """Streams that add no noise, and note the standard deviation of what they would have added."""

    def __init__(self) -> None:
        super().__init__(lambda client: bytes(32), "plain")
        self.deviation = 0.0

    def noised(
        self,
        client: int,
        purpose: str,
        step: int,
        row: torch.Tensor,
        multiplier: float,
        sensitivity: float,
    ) -> torch.Tensor:
        """Return the row as it is."""
        self.deviation = multiplier * sensitivity
        return row.clone()


class Release(NamedTuple):
    """One world's releases.

    Attributes:
        rows: (draws, d), each with noise of its own.
        exact: (d,), or the probabilities of each choice.
        deviation: standard deviation of the noise in each number; 0 of choices.
    """

    rows: Array
    exact: Array
    deviation: float


@dataclass(frozen=True)
class Mechanism:
    """A mechanism by which clients release something.

    Attributes:
        name: of what is released.
        unit: of privacy.
        release: world, n, z, number of draws -> the releases.
        replace: sensitivity under replacing over that under blanking.
        event: n, z -> the ledger's event; None is one Gaussian release.
        gaussian: whether a release is Gaussian, with a variance that blanking leaves as it is.
    """

    name: str
    unit: str
    release: Callable[[str, int, float, int], Release]
    replace: float = 2.0
    event: Callable[[int, float], Event] | None = None
    gaussian: bool = True

    def claimed(self, n: int, z: float, relation: Relation) -> float:
        """Return the ε that a ledger with one such release claims."""
        event = Event("m", "gather", ("f",), 1, (0,), "gaussian", z, self.replace)
        if self.event is not None:
            event = self.event(n, z)
        return Ledger([event], {0: n}).price(DELTA, relation).epsilon

    def audits(
        self,
        n: int,
        z: float,
        draws: int,
        confidence: float,
        worlds: Sequence[str] = WORLDS,
        noise: float = 1.0,
    ) -> dict[str, Finding]:
        """Return what the releases tell of a canary, by the world in which it is not as it was.

        Args:
            n: number of examples of a client, or of clients in a sum.
            z: noise multiplier.
            draws: number of releases in each world.
            confidence: of the lower bound, in (0, 1).
            worlds: the worlds.
            noise: share of the noise that is added, 1 but for controls.
        """
        present = self.release(PRESENT, n, noise * z, draws)
        findings = {}
        for world in worlds:
            absent = self.release(world, n, noise * z, draws)
            audit = lower_bound(
                _log_ratios(present.rows, present, absent),
                _log_ratios(absent.rows, present, absent),
                confidence,
            )
            claimed = self.claimed(n, z, "replace" if world == REPLACED else "blank")
            # what is removed changes the variance as well
            gaussian = self.gaussian and world != REMOVED
            name = f"{self.name}, n = {n}"
            findings[world] = Finding(name, self.unit, claimed, audit, gaussian)
        return findings


def _log_ratios(rows: Array, present: Release, absent: Release) -> Array:
    """Return log p(row | present) − log p(row | absent) of each row, (draws,)."""
    if not present.deviation:
        chosen = rows[:, 0].astype(int)
        ratios: Array = np.log(present.exact[chosen] / absent.exact[chosen])
        return ratios
    return _log_density(rows, present) - _log_density(rows, absent)


def _log_density(rows: Array, world: Release) -> Array:
    """Return log p(row | world) of each row, (draws,), but for a constant."""
    distances = ((rows - world.exact) ** 2).sum(1)
    squares = distances / (2 * world.deviation**2)
    numbers = rows.shape[1]
    log_density: Array = -squares - numbers * math.log(world.deviation)
    return log_density


class Remembered:
    """A map of examples to rows that computes the sum of the same examples once.

    Args:
        examples: the map.
    """

    def __init__(self, examples: ExampleMap) -> None:
        self._examples = examples
        self._sums: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """Return the numbers in a row."""
        return self._examples.width

    def sums(self, inputs: torch.Tensor, labels: torch.Tensor, clip: float) -> torch.Tensor:
        """Return the sum of the rows (width,) of the first examples that it was called with."""
        if self._sums is None:
            self._sums = self._examples.sums(inputs, labels, clip)
        return self._sums


def streams() -> NoiseStreams:
    """Return streams whose every client has a key of its own."""
    keys: dict[int, bytes] = {}

    def key(client: int) -> bytes:
        return keys.setdefault(client, os.urandom(32))

    return NoiseStreams(key, "worlds")


def repeated(release: Callable[[NoiseStreams, int], torch.Tensor], draws: int) -> Release:
    """Return many releases of the same data, each by a client with keys of its own.

    Args:
        release: streams of noise, client -> its released row.
        draws: number of releases.
    """

    def released(noise: NoiseStreams, client: int) -> Array:
        row = release(noise, client)
        return row.double().numpy().ravel()

    plain = Plain()
    exact = released(plain, 0)
    secret = streams()
    rows = [released(secret, client) for client in range(draws)]
    return Release(np.stack(rows), exact, plain.deviation)


def examples(world: str, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a client's examples (n, FEATURES) and labels, of which the last is the canary.

    A blank example is one that is not finite: it counts as zeros.
    """
    count = n - 1
    x = torch.full((count, FEATURES), 0.5)
    y = torch.zeros(count, dtype=torch.int64)
    if world == REMOVED:
        return x, y
    value = {PRESENT: -LONG, BLANKED: math.nan, REPLACED: LONG}[world]
    canary = torch.full((1, FEATURES), value)
    label = torch.ones(1, dtype=torch.int64)
    return torch.cat([x, canary]), torch.cat([y, label])


# releases whose rows are scaled to the clip norm where the unit is a client
SCALED = ("sketch", "blocks", "coordinates")


def signatures(variant: str, per_client: bool = False) -> Callable[[str, int, float, int], Release]:
    """Return releases of gradient signatures.

    Args:
        variant: "sketch", "blocks", "coordinates", "mean number", "residuals" or "residual
            coordinates".
        per_client: whether whole clients are protected.
    """

    def release(world: str, n: int, z: float, draws: int) -> Release:
        public = Randomness(0)
        sketch = GradientSketch(32, FEATURES, CLASSES, 0.0, public)
        blocks = ClassBlocks(6, FEATURES, CLASSES, 0.0, public)
        made: GradientSketch | ClassBlocks = blocks if variant == "blocks" else sketch
        example_map: ExampleMap = made
        clip = CLIP
        if variant == "coordinates":
            x, y = examples(PRESENT, 1)
            direction = sketch.rows(x, y).double()
            example_map = Projected(sketch, direction / direction.norm(), CLIP)
            clip = SECOND_CLIP
        if variant == "mean number":
            example_map = MeanNumber()
        if variant.startswith("residual"):
            means = torch.full((CLASSES, blocks.size), 0.3)
            residuals = ClassResiduals(blocks, means)
            example_map = residuals
        if variant == "residual coordinates":
            x, y = examples(PRESENT, 1)
            direction = residuals.rows(x, y, CLIP)[0]
            directions = (direction / direction.norm()).expand(1, CLASSES, -1)
            shifts = torch.full((CLASSES, blocks.size), 0.1)
            example_map = ResidualCoordinates(residuals, shifts, directions, CLIP)
            clip = SECOND_CLIP
        data = examples(world, n)
        if per_client:
            # all examples are the client's: its own, none that counts, or those of another one
            x, y = examples(BLANKED if world == REMOVED else world, 1)
            data = (x.expand(n, -1), y.expand(n))

        summed = Remembered(example_map)

        def made_by(secret: NoiseStreams, client: int) -> torch.Tensor:
            made_once = SignatureRelease("signature", z, clip, per_client, variant in SCALED)
            unit = "client" if per_client else "example"
            context = outside_run(ClientNoise(unit, 0.0, 0.0, BOUND, secret), [client])
            return made_once.of(context, summed, data)[0]

        return repeated(made_by, draws)

    return release


def losses(unit: str) -> Callable[[str, int, float, int], Release]:
    """Return the releases of a row of mean losses: the canary costs the bound, or nothing."""

    def release(world: str, n: int, z: float, draws: int) -> Release:
        samples = np.full(n - (world == REMOVED), BOUND / 4)
        if world == PRESENT:
            samples[-1] = BOUND
        elif world != REMOVED:
            samples[-1] = 0.0
        if unit == "client":
            samples = np.full(n, BOUND if world == PRESENT else 0.0)
        means = np.full((1, MODELS), samples.mean())

        def made_by(secret: NoiseStreams, client: int) -> torch.Tensor:
            context = outside_run(ClientNoise(unit, 1.0, z, BOUND, secret), [client])
            return context.release_losses(means, [len(samples)])

        return repeated(made_by, draws)

    return release


def grams(unit: str) -> Callable[[str, int, float, int], Release]:
    """Return the releases of a Gram matrix: the canary is a row in a direction of its own."""

    def release(world: str, n: int, z: float, draws: int) -> Release:
        directions = torch.eye(FEATURES)
        first_row, second_row = directions[:2] * LONG
        blank = torch.full((FEATURES,), math.nan)
        canaries = {PRESENT: first_row, REPLACED: second_row, BLANKED: blank, REMOVED: blank}
        canary = canaries[world]
        rows = directions[2:3].expand(n - 1, FEATURES)
        if world != REMOVED:
            rows = torch.cat([rows, canary[None]])
        if unit == "client":
            rows = canary.expand(n, FEATURES)

        def made_by(secret: NoiseStreams, client: int) -> torch.Tensor:
            noise = GramNoise(z, "gram", unit == "client")
            context = outside_run(ClientNoise(unit, 0.0, 0.0, BOUND, secret), [client])
            matrix = noise.matrix(rows, context)
            i, j = torch.triu_indices(FEATURES, FEATURES)
            # the isometry in which the noise is isotropic
            scales = torch.where(i == j, 1.0, math.sqrt(2))
            return matrix[i, j] * scales

        return repeated(made_by, draws)

    return release


def descriptors(unit: str) -> Callable[[str, int, float, int], Release]:
    """Return the sums from which FLUX's descriptors follow: the canary has a class of its own."""
    plan = DescriptorMap(FEATURES, 1, CLASSES, 0)  # of one direction, along which |z²| is 1, too

    def release(world: str, n: int, z: float, draws: int) -> Release:
        direction = LONG * plan.directions
        canary = {PRESENT: direction, REPLACED: -direction}.get(world, direction * math.nan)
        own_class = 2 if world == REPLACED else 1
        latents = np.repeat(direction, n - 1, 0)
        labels = np.zeros(n - 1, dtype=np.int64)
        if world != REMOVED:
            latents = np.concatenate([latents, canary])
            labels = np.append(labels, own_class)
        if unit == "client":
            latents = np.repeat(canary, n, 0)
            labels = np.full(n, own_class)
        sums = plan.sums(latents, labels)[None]

        def made_by(secret: NoiseStreams, client: int) -> torch.Tensor:
            context = outside_run(ClientNoise(unit, 0.0, 0.0, BOUND, secret), [client])
            return release_sums(context, sums, [len(labels)], z)[0]

        return repeated(made_by, draws)

    return release


def choices(unit: str) -> Callable[[str, int, float, int], Release]:
    """Return choices of a model by its number of right answers: a canary has one of its own."""

    def release(world: str, n: int, z: float, draws: int) -> Release:
        counts = np.full(MODELS, float(n - 1))
        if unit == "client":
            counts[:] = 0.0
        canary_cells = {PRESENT: 0, REPLACED: 1}
        if world in canary_cells:
            counts[canary_cells[world]] += 1
        eta = bounded_range(z)
        secret = streams()
        chosen = [choice(counts, eta, secret, client, "choose", 0) for client in range(draws)]
        rows = np.array(chosen, dtype=float)[:, None]
        return Release(rows, probabilities(counts, eta), 0.0)

    return release


def canary_row(world: str) -> torch.Tensor:
    """Return a client's row (1, FEATURES), longer than the clip norm; zeros where it is blanked."""
    sign = {PRESENT: 1.0, REPLACED: -1.0}.get(world, 0.0)
    return torch.full((1, FEATURES), sign * LONG)


def local_rows(world: str, n: int, z: float, draws: int) -> Release:
    """Return clipped rows with the client's own noise; an absent client's is one of zeros."""
    clip = Clip(1.0, nonfinite_as_zeros=True)

    def made_by(secret: NoiseStreams, client: int) -> torch.Tensor:
        noise = Noise(1.0, z)
        noise.arm(secret)
        clipped = clip.forward(canary_row(world), 0)
        return noise.forward_for(clipped, 0, [client], "delta")

    return repeated(made_by, draws)


def layers(world: str, n: int, z: float, draws: int) -> Release:
    """Return rows that leave beside the pipeline, such as NSIM's layer."""

    def made_by(secret: NoiseStreams, client: int) -> torch.Tensor:
        context = outside_run(ClientNoise("client", 1.0, z, BOUND, secret), [client])
        return context.release(canary_row(world))

    return repeated(made_by, draws)


def rows_of_sum(world: str, n: int) -> torch.Tensor:
    """Return the clipped rows of n clients, (n, FEATURES), of which the last is the canary's."""
    rows = torch.zeros(n - 1, FEATURES)
    if world != REMOVED:
        rows = torch.cat([rows, canary_row(world)])
    return Clip(1.0, nonfinite_as_zeros=True).forward(rows, 0)


def central_sums(world: str, n: int, z: float, draws: int) -> Release:
    """Return sums of n clients' rows with the noise of a trusted server."""
    rows = rows_of_sum(world, n)

    def made_by(secret: NoiseStreams, client: int) -> torch.Tensor:
        curator = TrustedCurator(1.0, z, secret)
        row_sum = rows.sum(0)[None]
        # each draw is a call of its own
        return curator.add(row_sum, client, "delta", [len(rows)])

    return repeated(made_by, draws)


def shared_sums(world: str, n: int, z: float, draws: int) -> Release:
    """Return sums to which each of n clients adds a share of whole-numbered noise."""
    rows = rows_of_sum(world, n)
    secret = streams()
    mechanism = SkellamMechanism(1.0, z, SURVIVORS, secret)
    # of two clients one survives in the world that lacks the other
    plan = mechanism.plan(FEATURES, max(len(rows), MINIMUM))
    released = []
    for draw in range(draws):
        encoded_sum = torch.zeros(FEATURES, dtype=torch.int32)
        for i, row in enumerate(rows):
            encoded_sum += mechanism.encode(row, plan, i, "delta", draw)
        decoded = mechanism.decode(encoded_sum, plan)
        released.append(decoded.double().numpy())
    exact = rows.sum(0).double().numpy()
    # in units of the grid, which are 2**-exponent
    whole_deviation = math.sqrt(len(rows) * plan.share_variance)
    deviation = math.ldexp(whole_deviation, -plan.exponent)
    return Release(np.stack(released), exact, deviation)


def shared_event(n: int, z: float) -> Event:
    """Return the ledger's event of a sum with noise in shares."""
    plan = SkellamMechanism(1.0, z, SURVIVORS).plan(FEATURES, n)
    priced = plan.release(n)
    sizes = (priced.norm, priced.magnitudes)
    return Event(
        "m", "sum", ("f",), 1, (0,), "skellam", z, sensitivities=sizes, variance=priced.variance
    )


def training(sampled: bool) -> Callable[[str, int, float, int], Release]:
    """Return updates of a round of DP-SGD: of one step on all examples, or of sampled batches."""

    def release(world: str, n: int, z: float, draws: int) -> Release:
        params = {**LINEAR, "lr": 1e-3, "clip": 0.5, "dp_unit": "example"}
        batch = batch_of(n, sampled)
        # CFL's updates are not multiplied by the number of examples
        noiseless = CFL(**params, batch_size=n)
        plain = noiseless.fit(trained_on(world, n, 1), FULL)
        exact = first_updates(plain, "train")[0]
        private = CFL(**params, batch_size=batch, noise=z)
        fitted = private.fit(trained_on(world, n, draws), FULL)
        noisy = first_updates(fitted, "train")
        rows = np.stack([noisy[client] for client in range(draws)])
        deviations = rows - rows.mean(0)
        return Release(rows, exact, float(deviations.std()))

    return release


def batch_of(n: int, sampled: bool) -> int:
    """Return the expected examples of a batch: all of them, or half of them."""
    return max(1, n // 2) if sampled else n


def training_event(sampled: bool) -> Callable[[int, float], Event]:
    """Return how the ledger has a round of DP-SGD."""

    def event(n: int, z: float) -> Event:
        return Event("m", "sum", (), 1, (0,), "dp-sgd", z, batch=batch_of(n, sampled))

    return event


def trained_on(world: str, n: int, count: int) -> Federation:
    """Return clients of equal data, and one more: examples of no gradient, and a canary beyond the
    clip norm.
    """
    sample, hit, miss = telling_feature()
    # a class that neither the sample nor its negative is taken for: their gradients are far apart
    other = next(label for label in range(CLASSES) if label not in (hit, miss))
    x = np.tile(sample, (n, 1))
    y = np.full(n, hit)
    if world == PRESENT:
        y[-1] = other
    elif world == REPLACED:
        x[-1] = -sample
        y[-1] = other
    elif world == REMOVED:
        x = x[:-1]
        y = y[:-1]
    # a blanked canary is left as it is: of no gradient, like the other examples
    clients: dict[str, Any] = {f"c{i}": (x, y) for i in range(count)}
    # a run of clients that are all the same is refused
    clients["other"] = (-x, y)
    # one seed, since canaries are made for its first model; noise follows from the data, too
    return with_canaries(clients)


MECHANISMS: dict[str, Mechanism] = {
    "training": Mechanism(
        "DP-SGD, all examples", "example", training(False), event=training_event(False)
    ),
    "batches": Mechanism(
        "DP-SGD, sampled batches", "example", training(True), event=training_event(True),
        gaussian=False,
    ),
    "sketch": Mechanism("sketch of gradients", "example", signatures("sketch")),
    "blocks": Mechanism("class blocks", "example", signatures("blocks")),
    "coordinates": Mechanism("second release", "example", signatures("coordinates")),
    "mean number": Mechanism("mean number", "example", signatures("mean number")),
    "residuals": Mechanism("residuals by class", "example", signatures("residuals")),
    "residual coordinates": Mechanism(
        "second release of residuals", "example", signatures("residual coordinates")
    ),
    "losses": Mechanism("losses", "example", losses("example"), 1.0),
    "gram": Mechanism("Gram matrix", "example", grams("example"), REPLACE_GRAM),
    "descriptor": Mechanism(
        "moments of latent vectors", "example", descriptors("example"), REPLACE_DESCRIPTOR
    ),
    "choices": Mechanism("choice of a model", "example", choices("example"), gaussian=False),
    "rows": Mechanism("updates, noise of clients", "client", local_rows),
    "layer": Mechanism("layer", "client", layers),
    "central": Mechanism("sums, noise of a trusted server", "client", central_sums),
    "shares": Mechanism("sums, noise in shares", "client", shared_sums, event=shared_event),
    "client sketch": Mechanism("sketch of gradients", "client", signatures("sketch", True)),
    "client blocks": Mechanism("class blocks", "client", signatures("blocks", True)),
    "client mean number": Mechanism("mean number", "client", signatures("mean number", True)),
    "client losses": Mechanism("losses", "client", losses("client"), 1.0),
    "client gram": Mechanism("Gram matrix", "client", grams("client"), REPLACE_GRAM),
    "client descriptor": Mechanism(
        "moments of latent vectors", "client", descriptors("client"), REPLACE_DESCRIPTOR
    ),
    "client choices": Mechanism("choice of a model", "client", choices("client"), gaussian=False),
}  # fmt: skip


def row(
    mechanism: Mechanism, n: int, draws: int, confidence: float, z: float = NOISE
) -> Mapping[str, Any]:
    """Return a line of the table: the claims, and the lower bounds in each world."""
    line: dict[str, Any] = {"mechanism": mechanism.name, "unit": mechanism.unit, "n": n}
    findings = mechanism.audits(n, z, draws, confidence)
    for world, finding in findings.items():
        if world != REMOVED:
            line[f"claimed_{world}"] = round(finding.claimed, 3)
        line[world] = round(finding.least, 3)
        line[f"{world}_refuted"] = int(finding.refuted)
    return line


def sizes_of(mechanism: Mechanism) -> Sequence[int]:
    """Return the numbers of examples that a mechanism is measured with.

    Args:
        mechanism: one of `MECHANISMS`; of a client's releases its examples tell nothing.
    """
    if mechanism.unit == "example":
        return SIZES
    return SIZES[2:3]


def main(argv: Sequence[str] | None = None) -> Path:
    """Print a line for each mechanism and size, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=1000)
    # of each bound: there are some eighty
    parser.add_argument("--confidence", type=float, default=0.9999)
    parser.add_argument("--only", nargs="*", default=list(MECHANISMS))
    options = parser.parse_args(argv)
    torch.set_num_threads(1)

    def measured() -> Iterator[list[Mapping[str, Any]]]:
        for name in options.only:
            mechanism = MECHANISMS[name]
            for n in sizes_of(mechanism):
                yield [row(mechanism, n, options.draws, options.confidence)]

    return tabulate("relations", measured())


if __name__ == "__main__":
    print(main())
