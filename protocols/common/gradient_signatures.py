"""Clients that send a signature of their gradients before any training, and its options.

The mathematics is in `securecluster.privacy.gradient_signatures`: sketches of gradients, or class
blocks. Noise is added by each client, before the mask.

In two releases, the second one is in the few directions in which the noisy signatures of the first
differ. Examples are short there, so the clip is smaller, and so is the noise. Both together cost
what one release with the given noise multiplier does: each has √2 times the noise.

A client clips again in the server's directions, whatever they are, and answers one set of them. The
second release, whose noise the directions do not depend on, is what clusters are counted by. A
class block is one release of two fields: its projections pass the mask, its shares cannot, and the
event of the projections prices both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.noisy_rows import NoisyBlocks, NoisyRows, weighted_mean
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.data.facts import Facts
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.bounds import Between, Real
from securecluster.messaging.messages import Empty, Rows, Shared
from securecluster.models.objectives import Classification
from securecluster.privacy.dp.noise_streams import digest
from securecluster.privacy.gradient_signatures import (
    ClassBlocks,
    ExampleMap,
    GradientSketch,
    Projected,
    client_sensitivity,
    example_sensitivity,
    scaled_to_norm,
    signature_mean,
)
from securecluster.protocols.common.averaging import SumClient
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.client_tensors import ClientTensor
from securecluster.protocols.common.messages import MOST_SAMPLES
from securecluster.runs.derived import training_sizes
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import GATHER, answers

Array = NDArray[np.float64]

# norm to which the row of an example is clipped; gradients of most data are longer, so that all
# examples count the same
CLIP = 1.0
# norm to which an example is clipped in the directions of the second release; found by trial
SECOND_CLIP = 0.2
# directions of the second release; found by trial
AXES = 6
# the public rule for class blocks: the noise of a class's count is at most this share of its mean
BLOCK_NOISE = 0.04
# variance that sampling adds in these directions, over that of examples of equal variance in all of
# them: examples vary most in the directions in which clients differ; found by trial
SAMPLING = 2.0
# assumed variance of a number within a class of examples, in class blocks
WITHIN = 0.05
# examples of a client where their number is not public, for what sampling adds to class blocks
TYPICAL_EXAMPLES = 100
BLOCK_CHOICES = ("auto", "plain", "blocks")
# numbers of a sketch, and projections of a block: both signatures fit into a kilobyte
DEFAULT_SIZES = {"plain": 64, "blocks": 12}


@dataclass(frozen=True, eq=False)
class GradientSignature:
    """Client to server: the sketch of its clipped gradients."""

    # (b, q) mean of clipped sketches, with noise
    signature: Annotated[Rows, Real(("signature_size",), squared=True)]
    # (b,) |D_i|, on which depends what sampling adds to the mean
    size: Annotated[Rows | None, Real(low=0, maximum=MOST_SAMPLES)] = None


@dataclass(frozen=True, eq=False)
class SignatureDirections:
    """Server to client: the directions in which noisy signatures differ."""

    # (r, q) rows, as linear functions of masked signatures
    directions: Annotated[Shared, Real(("axes", "signature_size"), sent="signature", squared=True)]
    step: Annotated[int, Between(maximum="steps")]  # the call of the signatures, by its mask


@dataclass(frozen=True, eq=False)
class SignatureCoordinates:
    """Client to server: its examples in the directions of the server."""

    coordinates: Annotated[Rows, Real(("axes",), squared=True)]  # (b, r), with noise


@dataclass(frozen=True, eq=False)
class ClassSums:
    """Client to server: for each class, the sum of projections and the share of examples."""

    # (b, C, r), with noise
    projections: Annotated[Rows, Real(("classes", "signature_size"), squared=True)]
    shares: Annotated[Rows, Real(("classes",), squared=True)]  # (b, C), with noise
    # (b,) |D_i|, on which depends what sampling adds to a class's mean
    size: Annotated[Rows | None, Real(low=0, maximum=MOST_SAMPLES)] = None


@dataclass(frozen=True)
class SignatureOptions:
    """What clients need to make their signatures.

    Attributes:
        examples: the public map from examples to rows.
        releases: 1 or 2.
        multiplier: z of each release, standard deviation over sensitivity; 0 adds no noise.
        per_client: whether the unit of privacy is a whole client, not one of its examples.
        with_sizes: whether a client's number of examples comes with its signature.
    """

    examples: GradientSketch | ClassBlocks
    releases: int
    multiplier: float
    per_client: bool
    with_sizes: bool = False

    def release(
        self,
        name: str,
        context: CallContext,
        examples: ExampleMap,
        data: tuple[torch.Tensor, torch.Tensor],
        clip: float,
    ) -> torch.Tensor:
        """Return a client's signature with noise, (1, width) float64, released.

        It is the same for the same data, however often it is asked for.

        Args:
            name: of the release, which is made once.
            context: of a call to the client alone.
            examples: the map from examples to rows.
            data: the client's examples and their classes.
            clip: S.
        """
        inputs, labels = data
        row = signature_mean(examples, inputs, labels, clip)
        sensitivity = example_sensitivity(clip, len(labels))
        if self.per_client:
            # The mean of many gradients is short, and its length tells little of the cluster.
            row = scaled_to_norm(row, clip)
            sensitivity = client_sensitivity(clip)
        return context.release(row[None], sensitivity=sensitivity, noise=self.multiplier, once=name)


class SignatureSender(TrainingClient):
    """Clients that send a signature of their gradients, in runs that ask for one."""

    # None in runs without gradient signatures, where clients send none
    _signature_options: SignatureOptions | None = None
    # the digest of the directions that each client has answered; zeros before
    _answered = ClientTensor(32, dtype="uint8")

    def use_signatures(self, options: SignatureOptions) -> None:
        """Let the clients send signatures.

        Args:
            options: of the signatures.
        """
        self._signature_options = options

    @property
    def _options(self) -> SignatureOptions:
        """Return the options of signatures.

        Raises:
            PolicyError: the run has no gradient signatures.
        """
        if self._signature_options is None:
            raise PolicyError("this run has no gradient signatures, so clients send none")
        return self._signature_options

    @answers(GATHER, through=("signature",), fresh=True, unmasked=("size",))
    def send_signature(self, context: CallContext, query: Empty) -> GradientSignature:
        """Return the mean sketch of the client's clipped gradients at zero weights, with noise.

        Raises:
            PolicyError: the run's signatures are class blocks.
        """
        rows = self._released("signature", context, self._sketch())
        return GradientSignature(Rows(rows), self._told_sizes(context))

    @answers(GATHER, unmasked=("coordinates",))
    def send_coordinates(
        self, context: CallContext, query: SignatureDirections
    ) -> SignatureCoordinates:
        """Return the mean of the client's examples in a few directions, with noise.

        Raises:
            PolicyError: the run has no second release, or a client has answered other directions.
        """
        sketch = self._sketch()
        if self._options.releases < 2:
            raise PolicyError(
                "send_coordinates is the second release of a signature, and this run has one alone"
            )
        self._check_directions(context, query)
        mask = self._pipeline.of("signature")
        directions = mask.inverse(query.directions.value.to(self.cohort.start), query.step)
        projected = Projected(sketch, directions[:, : sketch.width].double(), CLIP)
        rows = self._released("coordinates", context, projected, SECOND_CLIP)
        return SignatureCoordinates(Rows(rows))

    @answers(GATHER, through=("projections",), unmasked=("shares", "size"))
    def send_class_sums(self, context: CallContext, query: Empty) -> ClassSums:
        """Return the client's class blocks, with noise.

        Raises:
            PolicyError: the run's signatures are sketches of gradients.
        """
        examples = self._options.examples
        if not isinstance(examples, ClassBlocks):
            raise PolicyError("send_class_sums is for class blocks, and this run has none")
        rows = self._released("class sums", context, examples)
        shape = (len(context.ids), examples.classes, examples.size + 1)
        projections = context.postprocess(
            lambda told: told.view(shape)[:, :, :-1].contiguous(), rows
        )
        shares = context.postprocess(lambda told: told.view(shape)[:, :, -1].contiguous(), rows)
        return ClassSums(Rows(projections), Rows(shares), self._told_sizes(context))

    def _sketch(self) -> GradientSketch:
        """Return the run's sketch of gradients.

        Raises:
            PolicyError: the run's signatures are class blocks.
        """
        examples = self._options.examples
        if not isinstance(examples, GradientSketch):
            raise PolicyError(
                "send_signature is for sketches of gradients, and this run has class blocks"
            )
        return examples

    def _told_sizes(self, context: CallContext) -> Rows | None:
        """Return |D_i|, (b,), where the server reads it in any case; elsewhere None."""
        if not self._options.with_sizes:
            return None
        return self._sizes(context)

    def _check_directions(self, context: CallContext, query: SignatureDirections) -> None:
        """Remember the directions, which are answered once.

        Every other set of directions is a further release, which nobody has priced.

        Raises:
            PolicyError: a client has answered other directions.
        """
        current = torch.tensor(list(digest(query.directions.value)), dtype=torch.uint8)
        others = []
        for i, before in zip(context.ids, self._answered[context.positions], strict=True):
            if bool(before.any()) and not torch.equal(before, current):
                others.append(i)
        if others:
            few = ", ".join(map(str, others[:5]))
            raise PolicyError(
                f"client(s) {few} have answered other directions than these, and the noise is that "
                "of one answer: start a new run"
            )
        self._answered[context.positions] = current

    def _released(
        self, name: str, context: CallContext, examples: ExampleMap, clip: float = CLIP
    ) -> torch.Tensor:
        """Return the clients' rows with noise, (b, width), released."""
        rows = []
        for n, k in enumerate(context.positions):
            data = (self.cohort.inputs(k), self.cohort.labels(k))
            row = self._options.release(name, context.select([n]), examples, data, clip)
            rows.append(row)
        start = self.cohort.start
        return context.postprocess(lambda *told: torch.cat(told).to(start), *rows)


class SignatureClient(SignatureSender, SumClient):
    """Clients that can send a signature of their gradients, and then contribute to averages."""


@dataclass(frozen=True)
class SignaturePlan:
    """What server and clients agree on about signatures, from the run's configuration.

    Attributes:
        blocks: whether signatures are class blocks.
        size: q numbers of a sketch, or r projections of a block.
        noise: z of all releases together.
        per_client: whether the unit of privacy is a whole client.
        two: whether a second release is asked for, where it helps.
        sizes: numbers of examples by client, where they are public; empty otherwise.
    """

    blocks: bool
    size: int
    noise: float
    per_client: bool
    two: bool
    sizes: Sequence[int]

    @property
    def releases(self) -> int:
        """Return 2 where a second release helps: for sketches with noise for single examples."""
        if self.two and self.noise and not self.blocks and not self.per_client:
            return 2
        return 1

    @property
    def multiplier(self) -> float:
        """Return z of each release: of r releases, √r times that of all together."""
        return self.noise * math.sqrt(self.releases)

    def deviations(self, ids: Sequence[int], clip: float) -> Array:
        """Return the standard deviation of the noise in clients' rows, (b,).

        Args:
            ids: the clients' numbers; of newcomers, the run's mean size is taken.
            clip: S of the release.
        """
        if self.per_client:
            return np.full(len(ids), self.multiplier * clip)
        return self.multiplier * clip / self.examples(ids)

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


def blocks_by_rule(noise: float, classes: int, sizes: Sequence[int], per_client: bool) -> bool:
    """Return whether the public rule takes class blocks.

    Blocks are robust to clients' shares of classes, and divide by noisy counts. So they are taken
    where the noise of a count is at most `BLOCK_NOISE` of a class's mean count n/C in every client.
    For the unit "client" the mean share of a class is 1/C of a signature of norm 1.

    Args:
        noise: z of the signature; 0 without noise.
        classes: C.
        sizes: n of each client.
        per_client: whether the unit of privacy is a whole client.
    """
    if per_client:
        return noise * classes <= BLOCK_NOISE
    return noise * classes <= BLOCK_NOISE * min(sizes, default=0)


def plan_of(config: Mapping[str, Any]) -> SignaturePlan:
    """Return the plan that a run's configuration describes.

    Args:
        config: what clients and server agreed on.
    """
    return SignaturePlan(
        bool(config["signature_kind"] == "blocks"),
        int(config["signature_size"]),
        float(config["signature_noise"]),
        config["dp_unit"] == "client",
        int(config["signature_releases"]) > 1,
        tuple(config["signature_sizes"]),
    )


def example_map(config: Mapping[str, Any]) -> GradientSketch | ClassBlocks:
    """Return the public map of a run, from its seed.

    Args:
        config: what clients and server agreed on.
    """
    make: type[GradientSketch | ClassBlocks] = GradientSketch
    if config["signature_kind"] == "blocks":
        make = ClassBlocks
    return make(
        int(config["signature_size"]),
        math.prod(config["shape"]),
        int(config["classes"]),
        float(config["signature_centre"]),
        Randomness(config["seed"]),
    )


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
    if not isinstance(facts.objective, Classification):
        others = [name for name in options.choices if name != options.signature]
        advice = "choose another protocol, cfl say"
        if others:
            advice = f"take signature {others[0]}"
        raise UsageError(
            f"gradient signatures are of samples with classes, and these data have none: {advice}"
        )
    per_client = method.privacy.dp_unit == "client"
    sizes: list[int] = []
    if options.needs_samples(method):
        # signatures are of the samples that clients train on
        sizes = training_sizes(method, facts)
    blocks = str(options.signature_blocks)
    if blocks == "auto":
        by_rule = blocks_by_rule(noise, facts.classes, sizes, per_client)
        blocks = "plain"
        if by_rule and options.offers_blocks:
            blocks = "blocks"
    size = options.signature_size
    if size is None:
        size = DEFAULT_SIZES[blocks]
    else:
        _check_size(int(size), blocks, facts)
    return {
        "signature_noise": noise,
        "signature_kind": blocks,
        "signature_size": int(size),
        "signature_sizes": sizes,
    }


def _check_size(size: int, kind: str, facts: Facts) -> None:
    """Raise UsageError for signatures that are longer than what they are of.

    Args:
        size: numbers of a sketch, or projections of a class block.
        kind: "plain" or "blocks".
        facts: of the clients and their data.
    """
    longest = math.prod(facts.shape)
    if kind == "plain":
        # weights and biases of softmax regression
        longest = (longest + 1) * facts.classes
    if size > max(longest, DEFAULT_SIZES[kind]):
        raise UsageError(
            f"signature_size = {size} is more than the {longest} numbers that it is a sketch of: "
            "give a smaller one, or leave it out"
        )


@dataclass(frozen=True)
class SketchSignatures:
    """Signatures of clients by sketches, of one or two releases, as one tensor holds them.

    Attributes:
        first: (m, w) the first release, under the mask; w is q or more.
        second: (m, r) the second release, or (m, 0).
        deviations: (m,) of the noise in each number of the first release.
        examples: (m,) numbers of examples, as far as they are public.
        width: q.
    """

    first: Array
    second: Array
    deviations: Array
    examples: Array
    width: int

    def packed(self) -> torch.Tensor:
        """Return all of it in rows (m, 4 + w + r) of float64."""
        m, axes = self.second.shape
        sizes = np.broadcast_to([self.width, axes], (m, 2))
        header = np.column_stack([self.deviations, self.examples, sizes])
        return torch.from_numpy(np.hstack([header, self.first, self.second]))

    @classmethod
    def unpacked(cls, rows: torch.Tensor) -> SketchSignatures:
        """Return the signatures that `packed` made rows of.

        Args:
            rows: (m, 4 + w + r).
        """
        table = rows.double().numpy()
        header = table[:, :4]
        width = int(header[0, 2])
        axes = int(header[0, 3])
        end = table.shape[1] - axes
        return cls(table[:, 4:end], table[:, end:], header[:, 0], header[:, 1], width)

    def comparable(self, directions: Array) -> NoisyRows:
        """Return the rows that are compared.

        With a second release these are the coordinates in its directions, by both releases, and
        the noise is that of the second alone, since the directions follow the noise of the first.

        Args:
            directions: (r, w) of the second release.
        """
        if not self.second.shape[1]:
            sampling = SAMPLING * CLIP**2 / (self.width * self.examples)
            return NoisyRows(self.first, self.deviations, sampling, self.width)
        ratio = SECOND_CLIP / CLIP
        second = self.second
        coordinates = self.first @ directions.T
        combined = weighted_mean(coordinates, 1.0, second, ratio**2)
        sampling = SAMPLING * SECOND_CLIP**2 / (AXES * self.examples)
        return NoisyRows(combined, ratio * self.deviations, sampling, AXES, second)


@dataclass(frozen=True)
class BlockSignatures:
    """Signatures of clients by class blocks, as one tensor holds them.

    Attributes:
        blocks: (m, C, w + 1) projections, under the mask, and shares; w is r or more.
        deviations: (m,) of the noise in each number.
        examples: (m,) numbers of examples, as far as they are public.
        width: r.
    """

    blocks: Array
    deviations: Array
    examples: Array
    width: int

    def packed(self) -> torch.Tensor:
        """Return all of it in rows (m, C, 3 + w + 1) of float64."""
        m, classes, _ = self.blocks.shape
        widths = np.full(m, float(self.width))
        header = np.column_stack([self.deviations, self.examples, widths])
        repeated = np.repeat(header[:, None], classes, axis=1)
        return torch.from_numpy(np.concatenate([repeated, self.blocks], axis=2))

    @classmethod
    def unpacked(cls, rows: torch.Tensor) -> BlockSignatures:
        """Return the signatures that `packed` made rows of.

        Args:
            rows: (m, C, 3 + w + 1).
        """
        table = rows.double().numpy()
        header = table[:, 0, :3]
        return cls(table[:, :, 3:], header[:, 0], header[:, 1], int(header[0, 2]))

    def comparable(self) -> NoisyBlocks:
        """Return the blocks with what noise and sampling add."""
        return NoisyBlocks(self.blocks, self.deviations, WITHIN / self.examples, self.width)
