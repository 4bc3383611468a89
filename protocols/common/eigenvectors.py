"""Clients that share the leading eigenvectors of their data, exact or from noisy Gram matrices.

One-shot clustering compares relevance under them (Ali & Arafa 2024), PACFL principal angles between
their spans (Vahidian et al. 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np

from securecluster.clustering.eigenvectors import top
from securecluster.core.lazy_torch import torch
from securecluster.core.validation import check_noise, check_whole
from securecluster.data import Federation
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.bounds import Real
from securecluster.messaging.messages import Empty, Rows
from securecluster.models.objectives import Language
from securecluster.privacy.dp.noise_streams import NoiseStreams, digest
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.averaging import SumClient
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.client_tensors import ClientTensor
from securecluster.protocols.common.gram_mechanism import REPLACE, GramNoise
from securecluster.protocols.common.privacy_spec import PrivacySpec
from securecluster.runtime.endpoint import GATHER, CallContext, answers
from securecluster.runtime.release_accounting import FieldNoise
from securecluster.training.local_trainer import LocalTrainer, LocalTraining


@dataclass(frozen=True, eq=False)
class Eigenvectors:
    """Client to server: the eigenvectors that the client shares."""

    # (b, p, D) unit eigenvectors v_k of G_i, or (b, n) uint8, sealed; zero beyond the rank
    vectors: Annotated[Rows, Real(("vectors", "features"), squared=True)]


class FeatureMap(Protocol):
    """A public map of samples to vectors, the same for all clients."""

    @property
    def dimension(self) -> int:
        """Return D, the numbers of a sample's features."""

    def __call__(self, x: torch.Tensor, finite: bool = True) -> torch.Tensor:
        """Return the features (n, D) of samples (n, ...).

        Args:
            x: the samples.
            finite: whether a row that is not finite is refused.
        """


@dataclass(frozen=True)
class FlatSamples:
    """The identity map: a sample's own numbers.

    Args:
        dimension: D, the numbers in a sample.
    """

    dimension: int

    def __call__(self, x: torch.Tensor, finite: bool = True) -> torch.Tensor:
        """Return the samples as rows (n, D) of float32.

        Args:
            x: the samples.
            finite: whether a row that is not finite is refused.

        Raises:
            UsageError: a sample is not finite.
        """
        rows = x.reshape(len(x), self.dimension).float()
        if finite and not bool(rows.isfinite().all()):
            raise UsageError("a sample is NaN or infinite: clean the data before the run")
        return rows


@dataclass(frozen=True)
class EigenvectorOptions:
    """Options of the eigenvectors that clients share.

    Args:
        features: Φ.
        count: p, the eigenvectors that are shared.
        noise: of Gram matrices; None leaves them exact.
    """

    features: FeatureMap
    count: int
    noise: GramNoise | None = None


class EigenvectorClient(SumClient):
    """Clients that share eigenvectors of their data, and then contribute to averages.

    Args:
        cohort: the clients' data and local training.
        training: local training between two averages.
        pipeline: the stages between a client's update and the wire.
        weighted: whether averages are weighted by |D_i|.
        options: of the eigenvectors.
    """

    # the digest of each client's noisy matrix, once used; zeros before
    _made = ClientTensor(32, dtype="uint8")

    def __init__(
        self,
        cohort: LocalTrainer,
        training: LocalTraining,
        pipeline: Pipeline,
        weighted: bool,
        options: EigenvectorOptions,
    ) -> None:
        super().__init__(cohort, training, pipeline, weighted)
        self._phi = options.features
        self._count = options.count
        self._noise = options.noise
        # by position: eigenvalues and eigenvectors of the client's own data
        self._spectra: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def _gram_noise(self) -> GramNoise | None:
        """Return the noise of Gram matrices; None where the mechanism is naive."""
        if self._noise is None or self._noise.naive:
            return None
        return self._noise

    @answers(GATHER, through=("vectors",), sealed=("vectors",), fresh=True)
    def eigen(self, context: CallContext, query: Empty) -> Eigenvectors:
        """Return the first p eigenvectors of G_i = Φ(X_i)ᵀΦ(X_i)/n_i.

        They are those of a noisy matrix where the run adds noise. Eigenvalues stay at the client.
        """
        vectors = torch.stack([self._released(k) for k in context.positions])
        return Eigenvectors(Rows(vectors.to(self.cohort.start)))

    def _features(self, k: int) -> torch.Tensor:
        """Return Φ of the samples of the client at position k, (n, D)."""
        # under noise, rows that are not finite count as zeros: an error would be a release
        refuse_nonfinite = self._gram_noise is None
        return self._phi(self.cohort.inputs(k), finite=refuse_nonfinite)

    def _noisy(
        self,
        k: int,
        features: torch.Tensor,
        noise: GramNoise,
    ) -> torch.Tensor:
        """Return the one noisy Gram matrix of a client.

        Args:
            k: the client's position.
            features: (n, D) of its samples.
            noise: of Gram matrices.

        Returns:
            (D, D) float64.

        Raises:
            PolicyError: the matrix differs from the one that was used before.
        """
        return self._checked(k, noise.matrix(features, self.cohort.ids[k]))

    def _checked(self, k: int, matrix: torch.Tensor) -> torch.Tensor:
        """Return what was released of the client at position k, if it is what was used before.

        Args:
            k: the client's position.
            matrix: its noisy Gram matrix, or several of them.

        Raises:
            PolicyError: it differs from the one that was used before.
        """
        client = self.cohort.ids[k]
        # The noise depends on every bit of the exact matrix. If that is rounded differently, the
        # noisy matrix is a new one, and everything computed from it is a second release.
        current = torch.tensor(list(digest(matrix)), dtype=torch.uint8)
        before = self._made[k]
        if bool(before.any()) and not torch.equal(before, current):
            raise PolicyError(
                f"client {client}'s noisy Gram matrix came out otherwise than when it was first "
                "used, as on a machine that rounds otherwise, and its noise covers one matrix "
                "only: answer with the data, hardware, software and number of threads of before, "
                "or start a new run"
            )
        self._made[k] = current
        return matrix

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Restore what `memory` returned; spectra of other matrices are computed again."""
        if "made_at" in memory:  # an earlier version kept the digests of some clients
            digests = torch.zeros_like(self._made.values)
            digests[memory["made_at"]] = memory["made"]
            memory = {**memory, "made": digests}
        super().recall(memory)
        self._spectra = {}  # they may be of other matrices

    def _released(self, k: int) -> torch.Tensor:
        """Return the eigenvectors (p, D) that leave the client at position k."""
        _, vectors = self._spectrum(k)
        if self._noise and self._noise.naive:
            return self._noise.blurred(vectors, self.cohort.ids[k])
        return vectors

    def _spectrum(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return eigenvalues (p,) and eigenvectors (p, D) of the client at position k."""
        if k not in self._spectra:
            features = self._features(k)
            noise = self._gram_noise
            if noise is None:
                self._spectra[k] = top(features, self._count)
            else:
                matrix = self._noisy(k, features, noise)
                self._spectra[k] = noise.spectrum(matrix, self._count)
        return self._spectra[k]


@dataclass(kw_only=True)
class EigenvectorProtocol(ClusteringProtocol):
    """Options of the methods whose clients share eigenvectors, with noise in Gram matrices."""

    vectors: int = 5
    """p, eigenvectors that each client shares"""
    dp_unit: str = "example"
    """what is protected: client (all data of one) or example (one sample of one client: DP-SGD in
    local training); ε bounds what blanking one tells: it keeps its place and contributes zeros,
    while numbers of samples and who takes part are public
    """
    gram_noise: float = 0.0
    """noise multiplier of each client's Gram matrix, whose samples are clipped to norm 1, for its
    dp_unit
    """

    client: ClassVar[type[TrainingClient]] = EigenvectorClient
    # the pipeline adds no noise to eigenvectors: the Gram matrices have noise of their own
    noises_signatures: ClassVar[bool] = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Check that this class comes before `ClusterOnce` among the bases.

        Raises:
            UsageError: signatures would be clipped and noised as updates are.
        """
        super().__init_subclass__(**keywords)
        if cls.noises_signatures:
            raise UsageError(
                f"class {cls.__name__}: name EigenvectorProtocol first among the bases, since its "
                "noise replaces that of signatures"
            )

    def shared_facts(self, federation: Federation) -> dict[str, Any]:
        """Return D, the numbers of a sample's features.

        Args:
            federation: the clients and their data.

        Raises:
            UsageError: the data are text.
        """
        check_objective(federation)
        return {**super().shared_facts(federation), "width": int(np.prod(federation.shape))}

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Add the number of eigenvectors that a client shares, and their length.

        Args:
            config: the run's configuration.
        """
        width = int(config["width"])
        return {
            **super().frame_sizes(config),
            "vectors": min(int(self.vectors), width),
            "features": width,
        }

    def feature_map(self, config: Mapping[str, Any]) -> FeatureMap:
        """Return Φ, by default the samples as they are.

        Args:
            config: the run's configuration.
        """
        return FlatSamples(int(config["width"]))

    def make_client(
        self,
        cohort: LocalTrainer,
        pipeline: Pipeline,
        config: Mapping[str, Any],
    ) -> TrainingClient:
        """Return the clients, with Φ and the noise of Gram matrices.

        Args:
            cohort: the clients' data and local training.
            pipeline: the stages between a client's reply and the wire.
            config: the run's configuration.
        """
        make: Any = self.client  # whose constructor takes the options too
        client: TrainingClient = make(
            cohort,
            self.training(config),
            pipeline,
            self.weighted,
            self.eigenvector_options(cohort, config),
        )
        return client

    def eigenvector_options(
        self, cohort: LocalTrainer, config: Mapping[str, Any]
    ) -> EigenvectorOptions:
        """Return the clients' options.

        Args:
            cohort: the clients' data and local training.
            config: the run's configuration.
        """
        features = self.feature_map(config)
        count = min(int(self.vectors), features.dimension)
        return EigenvectorOptions(features, count, self.gram_noise_of(cohort, config))

    def gram_noise_of(self, cohort: LocalTrainer, config: Mapping[str, Any]) -> GramNoise | None:
        """Return the noise of Gram matrices that a configuration specifies, or None.

        Args:
            cohort: the clients, with their source of noise.
            config: the run's configuration.
        """
        if not config["gram_noise"]:
            return None
        assert isinstance(cohort.secret, NoiseStreams)
        per_client = config["dp_unit"] == "client"
        return GramNoise(config["gram_noise"], self.mechanism, per_client, cohort.secret)

    @property
    def mechanism(self) -> str:
        """Return the mechanism of the noise, "gram" or "naive"."""
        return "gram"

    def resolve_defaults(self, federation: Federation) -> dict[str, Any]:
        """Add the noise of Gram matrices.

        Args:
            federation: the clients and their data.
        """
        resolved = super().resolve_defaults(federation)
        return resolved | {"gram_noise": self._gram_multiplier(resolved["noise"])}

    def _gram_multiplier(self, noise: float) -> float:
        """Return the noise multiplier of Gram matrices; with a `target_epsilon` all have the same.

        Args:
            noise: Z.
        """
        if self.target_epsilon is not None:
            return float(noise)
        return float(self.gram_noise)

    def privacy_spec(self, noise: float) -> PrivacySpec:
        """Count a Gram matrix, and add the noise of the eigenvectors that follow from it.

        Args:
            noise: Z.
        """
        spec = super().privacy_spec(noise)
        spec = spec.with_releases(replace(spec.releases, gram=1))
        z = self._gram_multiplier(noise)
        if not z:
            return spec
        spec = replace(spec, keeps_local_models=True)
        return spec.with_fields(vectors=FieldNoise(z, REPLACE))

    def check(self, clients: int) -> None:
        """Add checks of the eigenvectors and of their noise.

        Args:
            clients: m.

        Raises:
            UsageError: an option is out of range, or the noise is given twice.
        """
        super().check(clients)
        check_whole(self, vectors=1)
        check_noise(self, "gram_noise")
        if self.gram_noise and self.target_epsilon is not None:
            raise UsageError(
                "gram_noise and target_epsilon both say how much noise there is: give one of them"
            )


def check_objective(federation: Federation) -> None:
    """Raise UsageError for text: a Gram matrix of token numbers means nothing.

    Args:
        federation: the clients and their data.
    """
    if isinstance(federation.objective, Language):
        raise UsageError(
            "eigenvectors are of samples that are numbers, and text is not: choose another "
            "protocol, cfl say"
        )
