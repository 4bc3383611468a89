"""What server and clients agree on about gradient signatures: kinds, releases and their noise.

Kinds are sketches of gradients ("plain"), class blocks ("blocks") and residuals of class blocks
from the means of classes over all clients ("residuals").

All releases together cost what one with the given noise multiplier z does: μ = 1/z of Gaussian
releases adds up in squares, so a release with the share s of the budget has the multiplier z/√s. A
run that does not know the centre of its data asks for the mean number first, with 2 % of the
budget. Of what is left, 15 % go to class blocks where these choose the kind, or the means of
classes come from them; the rest is divided equally between the other releases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.parties.derived import training_sizes
from securecluster.privacy.gradient_signatures import ClassBlocks, GradientSketch
from securecluster.privacy.low_frequencies import FREQUENCIES, LowFrequencies

if TYPE_CHECKING:
    from securecluster.data.facts import Facts

Array = NDArray[np.float64]

PLAIN = "plain"
BLOCKS = "blocks"
RESIDUALS = "residuals"
AUTO = "auto"
KINDS = (PLAIN, BLOCKS, RESIDUALS)
BLOCK_CHOICES = (AUTO, *KINDS)

# norm to which the row of an example is clipped; gradients of most data are longer, so that all
# examples count the same
CLIP = 1.0
# directions of the second release of sketches, and of residuals, at least; found by trial
AXES = 6
RESIDUAL_AXES = 12
# shares of the budget for the mean number, and for class blocks that are asked first
CENTRE_SHARE = 0.02
OUTLINE_SHARE = 0.15
# numbers of a sketch, and projections of a block: both signatures fit into a kilobyte
DEFAULT_SIZES = {PLAIN: 64, BLOCKS: 12, RESIDUALS: 12}
# projections of all classes of residuals together, at most, as long as each class has two
MOST_PROJECTIONS = 240
# height and width from which noisy signatures of images are of their lowest frequencies
SMOOTHED = 2 * FREQUENCIES
# examples of a client where their number is not public, for what sampling adds
TYPICAL_EXAMPLES = 100


@dataclass(frozen=True)
class SignaturePlan:
    """Agreement of server and clients about signatures, from the run's configuration.

    Attributes:
        kind: "plain", "blocks" or "residuals"; "auto" where class blocks that are asked first
            choose it.
        sizes_of_kinds: q numbers of a sketch, and r projections of a class, by kind.
        noise: z of all releases together.
        per_client: whether the unit of privacy is a whole client.
        two: whether a second release of sketches is asked for, where it helps.
        sizes: numbers of examples by client, where they are public; empty otherwise.
        centre: c; None where clients tell their mean number.
        axes: directions that a second release has room for.
    """

    kind: str
    sizes_of_kinds: Mapping[str, int]
    noise: float
    per_client: bool
    two: bool
    sizes: Sequence[int]
    centre: float | None
    axes: int

    def may_be(self, signature_kind: str) -> bool:
        """Return whether clients may send signatures of a kind.

        Args:
            signature_kind: one of `KINDS`.
        """
        if self.kind != AUTO:
            return self.kind == signature_kind
        return signature_kind in self.choices

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the kinds that "auto" chooses from."""
        return (PLAIN, RESIDUALS) if self.noise else KINDS

    @property
    def block_size(self) -> int:
        """Return r, the projections of a class in whatever is sent by class."""
        return self.sizes_of_kinds[BLOCKS if self.may_be(BLOCKS) else RESIDUALS]

    def has_outline(self, signature_kind: str) -> bool:
        """Return whether class blocks are asked before the signatures of a kind.

        Args:
            signature_kind: one of `KINDS`.
        """
        return signature_kind == RESIDUALS or (self.kind == AUTO and signature_kind != BLOCKS)

    def releases(self, signature_kind: str) -> int:
        """Return the number of a kind's own releases, without outline and centre.

        Args:
            signature_kind: one of `KINDS`.
        """
        if signature_kind == RESIDUALS:
            return 2
        # a second release helps sketches with noise for single examples
        if signature_kind == PLAIN and self.two and self.noise and not self.per_client:
            return 2
        return 1

    @property
    def centre_multiplier(self) -> float:
        """Return z of the mean number."""
        return self.noise / math.sqrt(CENTRE_SHARE)

    @property
    def _rest(self) -> float:
        """Return z of all that follows the mean number."""
        if self.centre is None:
            return self.noise / math.sqrt(1 - CENTRE_SHARE)
        return self.noise

    @property
    def outline_multiplier(self) -> float:
        """Return z of class blocks that are asked before other signatures."""
        return self._rest / math.sqrt(OUTLINE_SHARE)

    def multiplier(self, signature_kind: str) -> float:
        """Return z of each of a kind's own releases.

        Args:
            signature_kind: one of `KINDS`.
        """
        share = 1.0
        if self.has_outline(signature_kind):
            share = 1 - OUTLINE_SHARE
        return self._rest * math.sqrt(self.releases(signature_kind) / share)

    def deviations(self, ids: Sequence[int], multiplier: float, clip: float = CLIP) -> Array:
        """Return the standard deviation of the noise in clients' rows, (b,).

        Args:
            ids: the clients' numbers; of newcomers, the run's mean size is taken.
            multiplier: z of the release.
            clip: S of the release.
        """
        if self.per_client:
            return np.full(len(ids), multiplier * clip)
        return multiplier * clip / self.examples(ids)

    def examples(self, ids: Sequence[int]) -> Array:
        """Return how many examples clients have, as far as it is public, (b,).

        Args:
            ids: the clients' numbers; of newcomers, the run's mean size is taken.
        """
        if not self.sizes:
            return np.full(len(ids), float(TYPICAL_EXAMPLES))
        mean = float(np.mean(self.sizes))
        sizes = dict(enumerate(self.sizes))
        return np.array([float(sizes.get(i, mean)) for i in ids])


def plan_of(config: Mapping[str, Any]) -> SignaturePlan:
    """Return the plan that a run's configuration describes.

    Args:
        config: what clients and server agreed on.
    """
    centre = config["signature_centre"]
    return SignaturePlan(
        str(config["signature_kind"]),
        sizes_of_kinds(config),
        float(config["signature_noise"]),
        config["dp_unit"] == "client",
        int(config["signature_releases"]) > 1,
        tuple(config["signature_sizes"]),
        None if centre is None else float(centre),
        axes_of(config),
    )


def sizes_of_kinds(config: Mapping[str, Any]) -> dict[str, int]:
    """Return q numbers of a sketch, and r projections of a class, by kind.

    Args:
        config: what clients and server agreed on, of a run with signatures.
    """
    configured_size = config["signature_size"]
    if configured_size is not None:
        return dict.fromkeys(KINDS, int(configured_size))
    per_class = max(2, MOST_PROJECTIONS // int(config["classes"]))
    return {**DEFAULT_SIZES, RESIDUALS: min(DEFAULT_SIZES[RESIDUALS], per_class)}


def axes_of(config: Mapping[str, Any]) -> int:
    """Return how many directions a second release has room for: one fewer than clusters, or more.

    Args:
        config: what clients and server agreed on.
    """
    return max(RESIDUAL_AXES, int(config.get("k") or 1) - 1)


def example_map(
    config: Mapping[str, Any], signature_kind: str, centre: float
) -> GradientSketch | ClassBlocks:
    """Return the public map of a run, from its seed.

    Args:
        config: what clients and server agreed on.
        signature_kind: one of `KINDS`.
        centre: c.
    """
    plan = plan_of(config)
    features = math.prod(config["shape"])
    classes = int(config["classes"])
    randomness = Randomness(config["seed"])
    smooth = smoothing(config["shape"], plan.noise)
    if signature_kind == PLAIN:
        size = plan.sizes_of_kinds[PLAIN]
        return GradientSketch(size, features, classes, centre, randomness, smooth)
    unit = not plan.may_be(BLOCKS)
    return ClassBlocks(plan.block_size, features, classes, centre, randomness, unit, smooth)


def smoothing(shape: Sequence[int], noise: float) -> LowFrequencies | None:
    """Return the map that signatures of examples begin with; None takes them as they are.

    Args:
        shape: of an example, of which images have channels, height and width.
        noise: z of the signatures.
    """
    if not noise or len(shape) != 3:
        return None
    channels, height, width = shape
    if min(height, width) < SMOOTHED:
        return None
    return LowFrequencies((channels, height, width))


def resolved_signature(method: Any, facts: Facts, noise: float) -> dict[str, Any]:
    """Return what the configuration says of signatures.

    Args:
        method: with its options of signatures.
        facts: of the clients and their data.
        noise: z of signatures, which `target_epsilon` may have found.

    Raises:
        UsageError: the data have no classes, or signatures would be longer than what they are of.
    """
    options = method.signatures
    others = [name for name in options.choices if name != options.signature]
    advice = "choose another protocol, cfl say"
    if others:
        advice = f"take signature {others[0]}"
    facts.check_classes("gradient signatures are of samples with classes", advice)
    per_client = method.privacy.dp_unit == "client"
    sizes: list[int] = []
    if options.needs_samples(method):
        # signatures are of the samples that clients train on
        sizes = training_sizes(method, facts)
    signature_kind = str(options.signature_blocks)
    if signature_kind == AUTO and (per_client if noise else not options.offers_blocks):
        # noise for whole clients leaves no shares to read, and blocks are compared pair by pair
        signature_kind = PLAIN
    if signature_kind == RESIDUALS and per_client and noise:
        raise UsageError(
            "residuals are signatures for the privacy of single examples: take dp_unit example, or "
            "signature_blocks plain"
        )
    size = options.signature_size
    if size is not None:
        size_kind = PLAIN if signature_kind == PLAIN else BLOCKS
        _check_size(int(size), size_kind, facts, noise)
    centre = options.signature_centre
    if centre is None:
        centre = facts.mean
    return {
        "signature_noise": noise,
        "signature_kind": signature_kind,
        "signature_size": size,
        "signature_sizes": sizes,
        "signature_centre": centre,
    }


def _check_size(size: int, signature_kind: str, facts: Facts, noise: float) -> None:
    """Raise UsageError for signatures that are longer than what they are of.

    Args:
        size: numbers of a sketch, or projections of a class block.
        signature_kind: "plain", or "blocks" for everything by class.
        facts: of the clients and their data.
        noise: z of the signatures.
    """
    smooth = smoothing(facts.shape, noise)
    longest = math.prod(facts.shape) if smooth is None else smooth.width
    if signature_kind == PLAIN:
        # weights and biases of softmax regression
        longest = (longest + 1) * facts.classes
    if size > max(longest, DEFAULT_SIZES[signature_kind]):
        raise UsageError(
            f"signature_size = {size} is more than the {longest} numbers that it is a sketch of: "
            "give a smaller one, or leave it out"
        )
