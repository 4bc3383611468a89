"""Options of the methods that can cluster by private signatures of clients' gradients.

Signatures are of a public model, the zero weights of a softmax regression, so they do not depend on
the round: each client sends one, once, whatever the method's training does. None of this is in the
methods' papers.

A run without signatures has none of these options in its configuration, and so the noise that it
would have without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from securecluster.core.validation import (
    IN_PYTHON,
    AtLeast,
    NoiseMultiplier,
    Number,
    OneOf,
    check_choice,
)
from securecluster.errors import UsageError
from securecluster.privacy.masking.masks import build
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.averages.averaging import SumClient
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.comparison import signature_plan
from securecluster.protocols.common.comparison.gradient_signatures import (
    SignatureOptions,
    SignatureSender,
)
from securecluster.protocols.common.options.option_group import OptionGroup
from securecluster.protocols.common.options.privacy_options import PrivacyOptions
from securecluster.runtime.endpoint import releases_of

if TYPE_CHECKING:
    from securecluster.data.facts import Facts
    from securecluster.parties.method import Method

UPDATE = "update"
GRADIENT = "gradient"
# options that say how gradient signatures are made
SIGNATURE_OPTIONS = frozenset(
    {
        "signature_noise",
        "signature_blocks",
        "signature_size",
        "signature_releases",
        "signature_centre",
    }
)


@dataclass(kw_only=True)
class GradientSignatureOptions(OptionGroup):
    """Options of gradient signatures; without them a run is as if there were none."""

    signature: str = UPDATE
    """what clients are clustered by: update (of the model, as in the paper) or gradient (a private
    signature of about a kilobyte that each client sends once)
    """
    signature_noise: Annotated[float, NoiseMultiplier()] = 0.0
    """noise multiplier of a client's gradient signature, all releases together, for its dp_unit"""
    signature_blocks: Annotated[str, OneOf(*signature_plan.BLOCK_CHOICES), IN_PYTHON] = "auto"
    """what gradient signatures are: plain (a sketch of gradients), blocks (sums by class, in which
    clients with other shares of classes are no further apart, so that clusters of these shares are
    not found), residuals (such sums less those of all clients, in two releases, for noise on single
    examples), or auto (chosen by the clients' shares of classes, which they tell first, and by the
    noise)
    """
    signature_size: Annotated[int | None, AtLeast(1), IN_PYTHON] = None
    """numbers of a sketch, or projections of a class block; None is 64, or 12"""
    signature_releases: Annotated[int, AtLeast(1), Number(1, 2, high_in=True), IN_PYTHON] = 2
    """2 asks sketches with noise again, in the directions in which they differ, with half of the
    noise budget; 1 does not
    """
    signature_centre: Annotated[float | None, Number(-1e6, 1e6, high_in=True), IN_PYTHON] = None
    """public constant that gradient signatures subtract from each number of a sample; None is the
    mean of a known data set, and for other data the clients tell theirs, with 2 % of the budget
    """

    choices: ClassVar[tuple[str, ...]] = (UPDATE, GRADIENT)
    """Values of `signature`."""
    offers_blocks: ClassVar[bool] = True
    """Whether signatures can be class blocks."""

    @property
    def by_gradients(self) -> bool:
        """Return whether clients are clustered by gradient signatures."""
        return self.signature == GRADIENT

    @property
    def unused(self) -> frozenset[str]:
        """Return the options of signatures in a run without any."""
        return frozenset() if self.by_gradients else SIGNATURE_OPTIONS

    @property
    def refused_methods(self) -> frozenset[str]:
        """Return the client methods of signatures, which clients refuse in a run without any."""
        if self.by_gradients:
            return frozenset()
        # what a client could be asked in addition would not be in the price of the run
        return frozenset(releases_of(SignatureSender)) - frozenset(releases_of(TrainingClient))

    def fields_with_own_noise(self, method: Method) -> frozenset[str]:
        """Return the fields of gradient signatures, where these have noise.

        Args:
            method: whose options they are.
        """
        if not self.by_gradients or not self._multiplier(method, 1.0):
            return frozenset()
        return frozenset({"signature", "projections", "residuals"})

    def adds_noise(self, config: Mapping[str, Any]) -> bool:
        """Return whether signatures have noise.

        Args:
            config: what clients and server agreed on.
        """
        return bool(config.get("signature_noise"))

    def _multiplier(self, method: Method, noise: float) -> float:
        """Return z of signatures; with a `target_epsilon` it follows from that of other noise.

        Args:
            method: whose options they are.
            noise: Z.
        """
        if method.privacy.target_epsilon is not None:
            return float(noise) * float(method.privacy.cluster_noise)
        return float(self.signature_noise)

    def resolved(self, method: Method, facts: Facts, known: Mapping[str, Any]) -> dict[str, Any]:
        """Return the kind, the size and the noise of signatures.

        Args:
            method: whose options they are.
            facts: of the clients and their data.
            known: what is resolved already.
        """
        if not self.by_gradients:
            return {}
        return signature_plan.resolved_signature(
            method, facts, self._multiplier(method, known["noise"])
        )

    def needs_samples(self, method: Method) -> bool:
        """Return whether the noise of signatures is weighed by numbers of samples.

        Args:
            method: whose options they are.
        """
        privacy = method.privacy
        noisy = self.signature_noise > 0 or privacy.target_epsilon is not None
        return self.by_gradients and privacy.dp_unit == "example" and noisy

    def agreed(self, method: Method, facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration, without options that have no effect.

        Noise follows the configuration: that of a run without signatures is as it was before there
        were any.

        Args:
            method: whose options they are.
            facts: of the clients and their data.
            config: the configuration, with defaults resolved.
        """
        left_out: set[str] = set()
        if not self.by_gradients:
            left_out = {"signature", *self.unused}
        elif len(self.choices) == 1:
            left_out = {"signature"}
        return {name: value for name, value in config.items() if name not in left_out}

    def most_clusters(self, method: Method, config: Mapping[str, Any]) -> int | None:
        """Return the number of clusters that the directions of the second release tell apart.

        Args:
            method: whose options they are.
            config: what clients and server agreed on.
        """
        has_k = getattr(method, "k", None) is not None
        if has_k or not self.by_gradients or not self.adds_noise(config):
            return None
        return 1 + self.frame_sizes(config)["axes"]

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Return the numbers of a signature, of classes and of directions.

        Args:
            config: what clients and server agreed on.
        """
        sizes = {"signature_size": 1, "block_size": 1, "axes": 1}
        if self.by_gradients:
            plan = signature_plan.plan_of(config)
            sizes = {
                "signature_size": plan.sizes_of_kinds[signature_plan.PLAIN],
                "block_size": plan.block_size,
                "axes": signature_plan.axes_of(config),
            }
        return {**sizes, "classes": int(config["classes"]), "one": 1}

    def pipeline(self, method: Method, config: Mapping[str, Any], pipeline: Pipeline) -> Pipeline:
        """Return the pipeline with the masks of signatures, which have noise before they get here.

        Args:
            method: whose options they are.
            config: what clients and server agreed on.
            pipeline: the stages of clients' replies.
        """
        if not self.by_gradients:
            return pipeline
        plan = signature_plan.plan_of(config)
        fields = {
            **pipeline.fields,
            "signature": Pipeline(build(method.mask, plan.sizes_of_kinds[signature_plan.PLAIN])),
            "projections": Pipeline(build(method.mask, plan.block_size)),
            "residuals": Pipeline(build(method.mask, plan.block_size)),
        }
        return Pipeline(pipeline.stages, pipeline.seal, fields, pipeline.common)

    def equip(self, method: Method, config: Mapping[str, Any], client: TrainingClient) -> None:
        """Give clients the options of their signatures.

        Args:
            method: whose options they are.
            config: what clients and server agreed on.
            client: the clients' object.
        """
        if not self.by_gradients:
            return
        assert isinstance(client, SignatureSender)
        plan = signature_plan.plan_of(config)
        client.use_signatures(
            SignatureOptions(
                plan,
                partial(signature_plan.example_map, config),
                with_sizes=not plan.noise and _shows_sizes(method),
            )
        )

    @property
    def views(self) -> list[str]:
        """Return what the server sees of all signatures together; nothing without any.

        They are read one by one, also where sums are secure.
        """
        if not self.by_gradients:
            return []
        views = ["norms and inner products of all clients' gradient signature, sent one by one"]
        if self.signature_blocks != "plain":
            views.append(
                "where class blocks choose the kind of signatures, or are among them, each "
                "client's share of each class, with as much noise as its projections"
            )
        return views

    def assumptions(self, privacy: PrivacyOptions) -> list[str]:
        """Return what ε leaves out of signatures.

        Args:
            privacy: options of the run.
        """
        noisy = self.signature_noise > 0 or privacy.target_epsilon is not None
        if noisy and self.by_gradients and privacy.dp_unit == "example":
            return ["each client's number of samples, by which signatures are divided"]
        return []

    def check(self, method: Method, clients: int) -> None:
        """Check the options of signatures.

        Args:
            method: whose options they are.
            clients: m.

        Raises:
            UsageError: an option is out of range or has no effect, or the noise is given twice.
        """
        check_choice(self, signature=self.choices)
        if not self.by_gradients:
            self._check_unused()
            return
        if self.signature_noise and method.privacy.target_epsilon is not None:
            raise UsageError(
                "signature_noise and target_epsilon both say how much noise there is: give one of "
                "them"
            )
        if getattr(method, "landmarks", None) is not None:
            raise UsageError(
                "landmarks are for the comparison of updates, and gradient signatures are all "
                "compared: leave landmarks out, or take signature update"
            )

    def _check_unused(self) -> None:
        """Raise UsageError for options of signatures in a run without any."""
        for option in sorted(fields(self), key=lambda one: one.name):
            changed = getattr(self, option.name) != option.default
            if option.name in SIGNATURE_OPTIONS and changed:
                raise UsageError(
                    f"{option.name} is of gradient signatures, and clients send none: take "
                    "signature gradient, or leave it out"
                )


def by_gradients(method: Method) -> bool:
    """Return whether the clients of a method, of any kind, are clustered by gradient signatures."""
    options = getattr(method, "signatures", None)
    return options is not None and bool(options.by_gradients)


def _shows_sizes(method: Method) -> bool:
    """Return whether the server reads each client's number of samples beside its updates."""
    sends = getattr(method, "weighted", False) or issubclass(method.client, SumClient)
    return sends and not method.privacy.per_client and not method.sums.hide_replies
