"""Options of the methods that can cluster by private signatures of clients' gradients.

Signatures are of a public model, the zero weights of a softmax regression, so they do not depend on
the round: each client sends one, once, whatever the method's training does. None of this is in the
methods' papers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from securecluster.core.validation import check_choice, check_noise, check_number, check_whole
from securecluster.data import Federation
from securecluster.errors import UsageError
from securecluster.privacy.masking.masks import build
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.averaging import SumClient
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.gradient_signatures import (
    AXES,
    BLOCK_CHOICES,
    SignatureOptions,
    SignatureSender,
    example_map,
    plan_of,
    resolved_signature,
)
from securecluster.runtime.endpoint import releases_of
from securecluster.training.local_trainer import LocalTrainer

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
class GradientSignatureProtocol(ClusteringProtocol):
    """Options of gradient signatures; without them a run is as if there were none."""

    signature: str = UPDATE
    """what clients are clustered by: update (of the model, as in the paper) or gradient (a private
    signature of about a kilobyte that each client sends once)
    """
    signature_noise: float = 0.0
    """noise multiplier of a client's gradient signature, all releases together, for its dp_unit"""
    signature_blocks: str = "auto"
    """what gradient signatures are: plain (a sketch of gradients), blocks (sums by class, in which
    clients with other shares of classes are no further apart, so that clusters of these shares are
    not found), or auto (blocks where the noise is small beside n/C)
    """
    signature_size: int | None = None
    """numbers of a sketch, or projections of a class block; None is 64, or 12"""
    signature_releases: int = 2
    """2 asks sketches with noise again, in the directions in which they differ, with half of the
    noise budget; 1 does not
    """
    signature_centre: float = 0.13
    """public constant that gradient signatures subtract from each number of a sample"""

    signature_choices: ClassVar[tuple[str, ...]] = (UPDATE, GRADIENT)
    """Values of `signature`."""

    @property
    def by_gradients(self) -> bool:
        """Return whether clients are clustered by gradient signatures."""
        return self.signature == GRADIENT

    @property
    def offers_blocks(self) -> bool:
        """Return whether signatures can be class blocks."""
        return True

    @property
    def unused_options(self) -> frozenset[str]:
        """Return the options of signatures in a run without any."""
        if self.by_gradients:
            return super().unused_options
        return super().unused_options | SIGNATURE_OPTIONS

    @property
    def refused_methods(self) -> frozenset[str]:
        """Return the client methods of signatures, which clients refuse in a run without any."""
        if self.by_gradients:
            return super().refused_methods
        # what a client could be asked in addition would not be in the price of the run
        of_signatures = set(releases_of(SignatureSender)) - set(releases_of(TrainingClient))
        return super().refused_methods | of_signatures

    def _check_no_landmarks(self) -> None:
        """Raise UsageError for landmarks, where signatures are compared."""
        if self.by_gradients and getattr(self, "landmarks", None) is not None:
            raise UsageError(
                "landmarks are for the comparison of updates, and gradient signatures are all "
                "compared: leave landmarks out, or take signature update"
            )

    def config(self, federation: Federation, dtype: str) -> dict[str, Any]:
        """Return what client and server must agree on.

        Args:
            federation: the clients and their data.
            dtype: of the models, float32 or float64.
        """
        config = super().config(federation, dtype)
        # Noise follows the configuration: that of a run without signatures is as it was before
        # there were any.
        if not self.by_gradients:
            for name in ("signature", *self.unused_options):
                del config[name]
        elif len(self.signature_choices) == 1:
            del config["signature"]
        return config

    def resolve_defaults(self, federation: Federation) -> dict[str, Any]:
        """Add the kind, the size and the noise of signatures.

        Args:
            federation: the clients and their data.
        """
        resolved = super().resolve_defaults(federation)
        if not self.by_gradients:
            return resolved
        noise = self._signature_multiplier(resolved["noise"])
        return resolved | resolved_signature(self, federation, noise)

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Add the numbers of a signature, of classes and of directions.

        Args:
            config: the run's configuration.
        """
        return {
            **super().frame_sizes(config),
            "signature_size": int(config.get("signature_size") or 1),
            "classes": int(config["classes"]),
            "axes": AXES,
        }

    def pipeline(self, config: Mapping[str, Any]) -> Pipeline:
        """Return the stages of updates and of signatures, which have noise before they get here.

        Args:
            config: the run's configuration.
        """
        updates = super().pipeline(config)
        if not self.by_gradients:
            return updates
        size = config["signature_size"]
        signatures = Pipeline(build(self.mask, size))
        blocks = Pipeline(build(self.mask, size))
        fields = {**updates.fields, "signature": signatures, "projections": blocks}
        return Pipeline(updates.stages, updates.seal, fields, updates.common)

    def make_client(
        self, cohort: LocalTrainer, pipeline: Pipeline, config: Mapping[str, Any]
    ) -> TrainingClient:
        """Return the clients, with the options of their signatures.

        Args:
            cohort: the clients' data and local training.
            pipeline: the stages between a client's reply and the wire.
            config: the run's configuration.
        """
        client = super().make_client(cohort, pipeline, config)
        if not self.by_gradients:
            return client
        assert isinstance(client, SignatureSender)
        plan = plan_of(config)
        client.use_signatures(
            SignatureOptions(
                example_map(config),
                plan.releases,
                plan.multiplier,
                plan.per_client,
                with_sizes=not plan.noise and self._shows_sizes,
            )
        )
        return client

    @property
    def _shows_sizes(self) -> bool:
        """Return whether the server reads each client's number of samples beside its updates."""
        sends = self.weighted or issubclass(self.client, SumClient)
        return sends and not self.per_client and not self.sums_securely

    def _signature_multiplier(self, noise: float) -> float:
        """Return z of signatures; with a `target_epsilon` it is that of all other noise.

        Args:
            noise: Z.
        """
        if self.target_epsilon is not None:
            return float(noise)
        return float(self.signature_noise)

    @property
    def fields_with_own_noise(self) -> frozenset[str]:
        """Return the fields of gradient signatures, where these have noise."""
        if not self.by_gradients or not self._signature_multiplier(1.0):
            return super().fields_with_own_noise
        return super().fields_with_own_noise | {"signature", "projections"}

    def adds_noise(self, config: Mapping[str, Any]) -> bool:
        """Return whether signatures have noise, or anything else has.

        Args:
            config: what clients and server agreed on.
        """
        return bool(config.get("signature_noise")) or super().adds_noise(config)

    def signature_views(self) -> list[str]:
        """Return what the server sees of all signatures together; nothing without any.

        They are read one by one, also where sums are secure.
        """
        if not self.by_gradients:
            return []
        views = ["norms and inner products of all clients' gradient signature, sent one by one"]
        if self.signature_blocks != "plain":
            views.append(
                "where signatures are class blocks, each client's share of each class, with as "
                "much noise as its projections"
            )
        return views

    def signature_assumptions(self) -> list[str]:
        """Return what ε leaves out of signatures."""
        noisy = self.signature_noise > 0 or self.target_epsilon is not None
        noisy = noisy and self.by_gradients
        if noisy and self.dp_unit == "example":
            return ["each client's number of samples, by which signatures are divided"]
        return []

    def check(self, clients: int) -> None:
        """Check the options of signatures, too.

        Args:
            clients: m.

        Raises:
            UsageError: an option is out of range or has no effect, or the noise is given twice.
        """
        super().check(clients)
        check_choice(self, signature=self.signature_choices)
        if not self.by_gradients:
            self._check_unused()
            return
        check_choice(self, signature_blocks=BLOCK_CHOICES)
        check_noise(self, "signature_noise")
        check_whole(self, signature_releases=1)
        check_number(self, "signature_releases", 1, 2, high_in=True)
        check_number(self, "signature_centre", -1e6, 1e6, high_in=True)
        if self.signature_size is not None:
            check_whole(self, signature_size=1)
        if self.signature_noise and self.target_epsilon is not None:
            raise UsageError(
                "signature_noise and target_epsilon both say how much noise there is: give one of "
                "them"
            )

    def _check_unused(self) -> None:
        """Raise UsageError for options of signatures in a run without any."""
        for name in sorted(SIGNATURE_OPTIONS):
            if getattr(self, name) != getattr(GradientSignatureProtocol, name):
                raise UsageError(
                    f"{name} is of gradient signatures, and clients send none: take signature "
                    "gradient, or leave it out"
                )
