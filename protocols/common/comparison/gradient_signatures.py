"""Clients that send a signature of their gradients before any training, and its messages.

The mathematics is in `securecluster.privacy.gradient_signatures`: sketches of gradients, class
blocks, or residuals. Noise is added by each client, before the mask.

In two releases, the second one is in the few directions in which the noisy signatures of the first
differ. Examples are short there, so the clip is smaller, and so is the noise. All releases together
cost what one release with the given noise multiplier does (`SignaturePlan`): each is a Gaussian
release of a mean of clipped rows, which one example moves by at most S/n. What server and clients
agreed on decides which releases there are; the server's choice among kinds follows from a release
that has its price already, and a client answers one kind, one centre and one set of directions.

A client clips again in the server's directions, whatever they are. The second release, whose noise
the directions do not depend on, is what clusters of sketches are counted by. A class block is one
release of two fields: its projections pass the mask, its shares cannot, and the event of the
projections prices both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

from securecluster.core.lazy_torch import torch
from securecluster.core.validation import Between
from securecluster.errors import PolicyError
from securecluster.messaging.bounds import Real
from securecluster.messaging.messages import Empty, Rows, Shared
from securecluster.privacy import gradient_signatures
from securecluster.privacy.dp.noise_streams import digest
from securecluster.protocols.common.averages.averaging import SumClient
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.client_tensors import ClientTensor
from securecluster.protocols.common.comparison import signature_plan
from securecluster.protocols.common.comparison.packed_signatures import SECOND_CLIP
from securecluster.protocols.common.messages import MOST_SAMPLES
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import GATHER, answers

FAR = 1e6  # centres are no further from zero
# shapes of what is by class
BY_CLASS = ("classes", "block_size")


@dataclass(frozen=True, eq=False)
class MeanOfNumbers:
    """Client to server: the mean number of its examples."""

    mean: Annotated[Rows, Real(("one",), squared=True)]  # (b, 1), with noise


@dataclass(frozen=True, eq=False)
class SignatureRequest:
    """Server to client: what signatures are made with."""

    # (1,) the constant that is subtracted from each number of an example
    centre: Annotated[Shared, Real(("one",), low=-FAR, maximum=FAR)]


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
    projections: Annotated[Rows, Real(BY_CLASS, squared=True)]
    shares: Annotated[Rows, Real(("classes",), squared=True)]  # (b, C), with noise
    # (b,) |D_i|, on which depends what sampling adds to a class's mean
    size: Annotated[Rows | None, Real(low=0, maximum=MOST_SAMPLES)] = None


@dataclass(frozen=True, eq=False)
class ClassMeans:
    """Server to client: the means of classes over all clients."""

    # (C, r) under the mask of class sums
    means: Annotated[Shared, Real(BY_CLASS, sent="projections", squared=True)]
    step: Annotated[int, Between(maximum="steps")]  # the call of the class sums, by its mask


@dataclass(frozen=True, eq=False)
class ResidualSums:
    """Client to server: for each class, the sum of residuals from the means of classes."""

    residuals: Annotated[Rows, Real(BY_CLASS, squared=True)]  # (b, C, r), with noise


@dataclass(frozen=True, eq=False)
class ResidualDirections:
    """Server to client: the directions in which noisy residuals differ."""

    # (r, C, r) as linear functions of masked residuals
    directions: Annotated[Shared, Real(("axes", *BY_CLASS), sent="residuals", squared=True)]
    # (C, r) what residuals have in common over all clients, under the mask of residuals
    shifts: Annotated[Shared, Real(BY_CLASS, sent="residuals", squared=True)]
    step: Annotated[int, Between(maximum="steps")]  # the call of the residuals, by its mask
    # (C, r) as before, under the mask of class sums
    means: Annotated[Shared, Real(BY_CLASS, sent="projections", squared=True)]
    means_step: Annotated[int, Between(maximum="steps")]


@dataclass(frozen=True)
class SignatureOptions:
    """Options by which clients make their signatures.

    Attributes:
        plan: what was agreed on about signatures.
        maps: returns the public map of a kind, for a centre.
        with_sizes: whether a client's number of examples comes with its signature.
    """

    plan: signature_plan.SignaturePlan
    maps: Callable[
        [str, float], gradient_signatures.GradientSketch | gradient_signatures.ClassBlocks
    ]
    with_sizes: bool = False


@dataclass(frozen=True)
class SignatureRelease:
    """One Gaussian release of a mean of clipped rows.

    Blanking one of n examples moves the mean by at most S/n. All data of a client move it by at
    most S, also where it is scaled to norm S.

    Attributes:
        name: of the release, which is made once.
        multiplier: z, standard deviation over sensitivity; 0 adds no noise.
        clip: S.
        per_client: whether the unit of privacy is a whole client, not one of its examples.
        scaled: whether the row is scaled to norm S where the unit is a client.
    """

    name: str
    multiplier: float
    clip: float = signature_plan.CLIP
    per_client: bool = False
    scaled: bool = True

    def of(
        self,
        context: CallContext,
        examples: gradient_signatures.ExampleMap,
        data: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Return a client's mean of clipped rows with noise, (1, width) float64, released.

        It is the same for the same data, however often it is asked for.

        Args:
            context: of a call to the client alone.
            examples: the map from examples to rows.
            data: the client's examples and their classes.
        """
        inputs, labels = data
        row = gradient_signatures.signature_mean(examples, inputs, labels, self.clip)
        sensitivity = gradient_signatures.example_sensitivity(self.clip, len(labels))
        if self.per_client:
            if self.scaled:
                # The mean of many gradients is short, and its length tells little of the cluster.
                row = gradient_signatures.scaled_to_norm(row, self.clip)
            sensitivity = gradient_signatures.client_sensitivity(self.clip)
        return context.release(
            row[None], sensitivity=sensitivity, noise=self.multiplier, once=self.name
        )


class SignatureSender(TrainingClient):
    """Clients that send a signature of their gradients, in runs that ask for one."""

    # None in runs without gradient signatures, where clients send none
    _signature_options: SignatureOptions | None = None
    # digests of what each client has answered in one way; zeros before
    _asked = ClientTensor(32, dtype="uint8", lasting=True)  # centre, and kind beyond class sums
    _subtracted = ClientTensor(32, dtype="uint8", lasting=True)  # means of classes
    _answered = ClientTensor(32, dtype="uint8", lasting=True)  # directions
    # the centre of each client's signatures, and the number of its kind, from 1
    _centre = ClientTensor(1, lasting=True)
    _kind = ClientTensor(dtype="int64", lasting=True)

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

    @answers(GATHER, unmasked=("mean",))
    def send_mean_number(self, context: CallContext, query: Empty) -> MeanOfNumbers:
        """Return the mean number of the client's examples, with noise.

        Raises:
            PolicyError: the run knows the centre of its data.
        """
        plan = self._options.plan
        if plan.centre is not None:
            raise PolicyError(
                "send_mean_number is for data of which no centre is known, and this run has one"
            )
        release = SignatureRelease("mean number", plan.centre_multiplier, scaled=False)
        rows = self._released(context, gradient_signatures.MeanNumber(), release)
        return MeanOfNumbers(Rows(rows))

    @answers(GATHER, through=("signature",), fresh=True, unmasked=("size",))
    def send_signature(self, context: CallContext, query: SignatureRequest) -> GradientSignature:
        """Return the mean sketch of the client's clipped gradients at zero weights, with noise.

        Raises:
            PolicyError: the run's signatures are of another kind, or a client was asked for another
                one, or for another centre.
        """
        self._check_request(context, query, signature_plan.PLAIN)
        release = SignatureRelease("signature", self._options.plan.multiplier(signature_plan.PLAIN))
        rows = self._released(context, self._sketch(context), release)
        return GradientSignature(Rows(rows), self._told_sizes(context))

    @answers(GATHER, unmasked=("coordinates",))
    def send_coordinates(
        self, context: CallContext, query: SignatureDirections
    ) -> SignatureCoordinates:
        """Return the mean of the client's examples in a few directions, with noise.

        Raises:
            PolicyError: the run has no second release, or a client has answered other directions.
        """
        plan = self._options.plan
        self._check_kind(context, signature_plan.PLAIN)
        if plan.releases(signature_plan.PLAIN) < 2:
            raise PolicyError(
                "send_coordinates is the second release of a signature, and this run has one alone"
            )
        sketch = self._sketch(context)
        self._once(context, "_answered", "directions", query.directions.value)
        mask = self._pipeline.of("signature")
        directions = mask.inverse(query.directions.value.to(self.cohort.start), query.step)
        projected = gradient_signatures.Projected(
            sketch, directions[:, : sketch.width].double(), signature_plan.CLIP
        )
        release = SignatureRelease(
            "coordinates", plan.multiplier(signature_plan.PLAIN), SECOND_CLIP
        )
        rows = self._released(context, projected, release)
        return SignatureCoordinates(Rows(rows))

    @answers(GATHER, through=("projections",), unmasked=("shares", "size"))
    def send_class_sums(self, context: CallContext, query: SignatureRequest) -> ClassSums:
        """Return the client's class blocks, with noise.

        Raises:
            PolicyError: the run has no class blocks, or a client was asked for another centre.
        """
        options = self._options
        plan = options.plan
        if plan.kind == signature_plan.PLAIN:
            raise PolicyError("send_class_sums is for class blocks, and this run has none")
        outline = not plan.may_be(signature_plan.BLOCKS)
        self._check_centre(context, query)
        multiplier = plan.outline_multiplier if outline else plan.multiplier(signature_plan.BLOCKS)
        examples = options.maps(signature_plan.BLOCKS, float(query.centre.value[0]))
        assert isinstance(examples, gradient_signatures.ClassBlocks)
        rows = self._released(context, examples, SignatureRelease("class sums", multiplier))
        shape = (len(context.ids), examples.classes, examples.size + 1)
        projections = context.postprocess(
            lambda noisy: noisy.view(shape)[:, :, :-1].contiguous(), rows
        )
        shares = context.postprocess(lambda noisy: noisy.view(shape)[:, :, -1].contiguous(), rows)
        return ClassSums(Rows(projections), Rows(shares), self._told_sizes(context))

    @answers(GATHER, through=("residuals",))
    def send_residuals(self, context: CallContext, query: ClassMeans) -> ResidualSums:
        """Return the sums by class of residuals from the means of classes, with noise.

        Raises:
            PolicyError: the run has no residuals, or a client has answered other means.
        """
        residuals = self._residuals(context, query.means, query.step)
        multiplier = self._options.plan.multiplier(signature_plan.RESIDUALS)
        release = SignatureRelease("residuals", multiplier, scaled=False)
        rows = self._released(context, residuals, release)
        shape = (len(context.ids), residuals.blocks.classes, residuals.blocks.size)
        sums = context.postprocess(lambda noisy: noisy.view(shape).contiguous(), rows)
        return ResidualSums(Rows(sums))

    @answers(GATHER, unmasked=("coordinates",))
    def send_residual_coordinates(
        self, context: CallContext, query: ResidualDirections
    ) -> SignatureCoordinates:
        """Return the mean of the client's residuals in a few directions, with noise.

        Raises:
            PolicyError: the run has no residuals, or a client has answered other means or
                directions.
        """
        residuals = self._residuals(context, query.means, query.means_step)
        self._once(context, "_answered", "directions", query.directions.value, query.shifts.value)
        mask = self._pipeline.of("residuals")
        size = residuals.blocks.size
        shifts = mask.inverse(query.shifts.value.to(self.cohort.start), query.step)
        flat = query.directions.value.to(self.cohort.start).flatten(0, 1)
        directions = mask.inverse(flat, query.step)[:, :size].double()
        of_class = directions.view(-1, residuals.blocks.classes, size)
        coordinates = gradient_signatures.ResidualCoordinates(
            residuals, shifts[:, :size].double(), of_class, signature_plan.CLIP
        )
        multiplier = self._options.plan.multiplier(signature_plan.RESIDUALS)
        release = SignatureRelease("coordinates", multiplier, SECOND_CLIP, scaled=False)
        rows = self._released(context, coordinates, release)
        return SignatureCoordinates(Rows(rows))

    def _residuals(
        self, context: CallContext, means: Shared, step: int
    ) -> gradient_signatures.ClassResiduals:
        """Return the map of residuals, which a client has once.

        Args:
            means: of classes, under the mask of class sums.
            step: the call of the class sums.

        Raises:
            PolicyError: the run has no residuals, or a client has answered other means.
        """
        self._check_kind(context, signature_plan.RESIDUALS)
        self._once(context, "_subtracted", "means of classes", means.value)
        centre = self._known_centre(context)
        blocks = self._options.maps(signature_plan.RESIDUALS, centre)
        assert isinstance(blocks, gradient_signatures.ClassBlocks)
        mask = self._pipeline.of("projections")
        unmasked = mask.inverse(means.value.to(self.cohort.start), step)
        return gradient_signatures.ClassResiduals(blocks, unmasked[:, : blocks.size].double())

    def _sketch(self, context: CallContext) -> gradient_signatures.GradientSketch:
        """Return the run's sketch of gradients."""
        sketch = self._options.maps(signature_plan.PLAIN, self._known_centre(context))
        assert isinstance(sketch, gradient_signatures.GradientSketch)
        return sketch

    def _known_centre(self, context: CallContext) -> float:
        """Return the centre that all clients of a call were asked with."""
        return float(self._centre[context.positions][0, 0])

    def _told_sizes(self, context: CallContext) -> Rows | None:
        """Return |D_i|, (b,), where the server reads it in any case; elsewhere None."""
        if not self._options.with_sizes:
            return None
        return self._sizes(context)

    def _check_request(
        self, context: CallContext, query: SignatureRequest, signature_kind: str
    ) -> None:
        """Remember the centre and the kind of signatures.

        Raises:
            PolicyError: they are not the run's, or a client was asked for others.
        """
        self._check_centre(context, query)
        self._check_kind(context, signature_kind)

    def _check_centre(self, context: CallContext, query: SignatureRequest) -> None:
        """Remember the centre of signatures.

        Raises:
            PolicyError: it is not the run's, or a client was asked with another one.
        """
        declared = self._options.plan.centre
        centre = query.centre.value
        if declared is not None:
            same = torch.tensor([declared], dtype=centre.dtype)
            if not torch.equal(centre.cpu(), same):
                raise PolicyError(
                    f"the server asks for signatures with another centre than {declared:g}, which "
                    "this run has"
                )
        self._once(context, "_asked", "centre", centre)
        self._centre[context.positions] = centre.expand(len(context.ids), 1)

    def _check_kind(self, context: CallContext, requested: str) -> None:
        """Remember the kind of signatures.

        Raises:
            PolicyError: the run has another kind, or a client has sent another one.
        """
        plan = self._options.plan
        if not plan.may_be(requested):
            raise PolicyError(
                f"the server asks for signatures of the kind {requested}, and this run has "
                f"{plan.kind}"
            )
        number = 1 + signature_plan.KINDS.index(requested)
        before = self._kind[context.positions]
        sent = zip(context.ids, before.tolist(), strict=True)
        others = [i for i, k in sent if k not in (0, number)]
        if others:
            few = ", ".join(map(str, others[:5]))
            raise PolicyError(
                f"client(s) {few} have sent signatures of another kind than {requested}, and the "
                "noise is that of one kind: start a new run"
            )
        self._kind[context.positions] = torch.full((len(context.ids),), number)

    def _once(self, context: CallContext, memory: str, what: str, *values: torch.Tensor) -> None:
        """Remember what the server sent, which is answered once.

        Every other one is a further release, which nobody has priced.

        Args:
            memory: name of the tensor that remembers it.
            what: its name in errors.
            values: that the server sent.

        Raises:
            PolicyError: a client has answered another one.
        """
        flat = torch.cat([value.flatten() for value in values])
        current = torch.tensor(list(digest(flat)), dtype=torch.uint8)
        digests = getattr(self, memory)
        others = []
        for i, before in zip(context.ids, digests[context.positions], strict=True):
            if bool(before.any()) and not torch.equal(before, current):
                others.append(i)
        if others:
            few = ", ".join(map(str, others[:5]))
            raise PolicyError(
                f"client(s) {few} have answered other {what} than these, and the noise is that "
                "of one answer: start a new run"
            )
        digests[context.positions] = current

    def _released(
        self,
        context: CallContext,
        examples: gradient_signatures.ExampleMap,
        release: SignatureRelease,
    ) -> torch.Tensor:
        """Return the clients' rows with noise, (b, width), released."""
        of_unit = replace(release, per_client=self._options.plan.per_client)
        rows = []
        for n, k in enumerate(context.positions):
            data = (self.cohort.inputs(k), self.cohort.labels(k))
            rows.append(of_unit.of(context.select([n]), examples, data))
        start = self.cohort.start
        return context.postprocess(lambda *noisy: torch.cat(noisy).to(start), *rows)


class SignatureClient(SignatureSender, SumClient):
    """Clients that can send a signature of their gradients, and then contribute to averages."""
