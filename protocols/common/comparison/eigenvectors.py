"""Clients that share the leading eigenvectors of their data, exact or from noisy Gram matrices.

One-shot clustering compares relevance under them (Ali & Arafa 2024), PACFL principal angles between
their spans (Vahidian et al. 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

import numpy as np

from securecluster.clustering.eigenvectors import top
from securecluster.core.lazy_torch import torch
from securecluster.core.option_groups import group, grouped
from securecluster.core.validation import AtLeast, NoiseMultiplier
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.bounds import Real
from securecluster.messaging.messages import Empty, Rows
from securecluster.models.objectives import Language
from securecluster.parties.method import Method
from securecluster.privacy.dp.noise_streams import digest
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.averages.averaging import SumClient
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.client_tensors import ClientTensor
from securecluster.protocols.common.comparison.gram_mechanism import GramNoise
from securecluster.protocols.common.options.option_group import OptionGroup
from securecluster.protocols.common.options.privacy_options import PrivacyOptions
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import GATHER, answers
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

if TYPE_CHECKING:
    from securecluster.data.facts import Facts


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
        frames = range(len(context.ids))
        vectors = [self._released(context.select([n])) for n in frames]
        start = self.cohort.start
        stacked = context.postprocess(lambda *rows: torch.stack(rows).to(start), *vectors)
        return Eigenvectors(Rows(stacked))

    def _features(self, k: int) -> torch.Tensor:
        """Return Φ of the samples of the client at position k, (n, D)."""
        # under noise, rows that are not finite count as zeros: an error would be a release
        refuse_nonfinite = self._gram_noise is None
        return self._phi(self.cohort.inputs(k), finite=refuse_nonfinite)

    def _parts(self, k: int) -> list[torch.Tensor]:
        """Return the features whose spectra a client shares: here those of all its samples.

        Args:
            k: the client's position.
        """
        return [self._features(k)]

    def _noisy(self, context: CallContext, noise: GramNoise) -> torch.Tensor:
        """Return the noisy Gram matrices of a client's parts, which are one release.

        Args:
            context: of a call to the client alone.
            noise: of Gram matrices.

        Returns:
            (parts, D, D) float64, released.

        Raises:
            PolicyError: they differ from what was used before.
        """
        (k,) = context.positions
        return self._checked(k, noise.matrices(self._parts(k), context))

    def _checked(self, k: int, matrix: torch.Tensor) -> torch.Tensor:
        """Return what was released of the client at position k, if it is what was used before.

        Args:
            k: the client's position.
            matrix: its noisy Gram matrices.

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

    def _released(self, context: CallContext) -> torch.Tensor:
        """Return the eigenvectors (p, D) that leave a client.

        Args:
            context: of a call to the client alone.
        """
        (k,) = context.positions
        noise = self._gram_noise
        if noise is not None:
            matrices = self._noisy(context, noise)
            return context.postprocess(lambda noisy: self._noisy_spectrum(k, noisy)[1], matrices)
        _, vectors = self._spectrum(k)
        if self._noise is not None:
            return self._noise.blurred(vectors, context)
        return vectors

    def _spectrum(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return exact eigenvalues (q,) and eigenvectors (q, D) of all parts of a client's data.

        Args:
            k: the client's position.
        """
        if k not in self._spectra:
            self._spectra[k] = _joined([top(block, self._count) for block in self._parts(k)])
        return self._spectra[k]

    def _noisy_spectrum(self, k: int, matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return eigenvalues (q,) and eigenvectors (q, D) of a client's noisy matrices.

        Args:
            k: the client's position.
            matrices: (parts, D, D), always the same ones.
        """
        if k not in self._spectra:
            assert self._noise is not None
            pairs = [self._noise.spectrum(matrix, self._count) for matrix in matrices]
            self._spectra[k] = _joined(pairs)
        return self._spectra[k]


def _joined(
    spectra: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eigenvalues and the eigenvectors of several matrices, one after the other."""
    values = torch.cat([own_values for own_values, _ in spectra])
    vectors = torch.cat([own_vectors for _, own_vectors in spectra])
    return values, vectors


@dataclass(kw_only=True)
class GramOptions(OptionGroup):
    """Options of the noise of Gram matrices."""

    gram_noise: Annotated[float, NoiseMultiplier()] = 0.0
    """noise multiplier of each client's Gram matrix, whose samples are clipped to norm 1, for its
    dp_unit
    """

    def check(self, method: Method, clients: int) -> None:
        """Check the noise.

        Args:
            method: whose options they are.
            clients: m.

        Raises:
            UsageError: the noise is out of range, or given twice.
        """
        if self.gram_noise and method.privacy.target_epsilon is not None:
            raise UsageError(
                "gram_noise and target_epsilon both say how much noise there is: give one of them"
            )

    def noisy(self, privacy: PrivacyOptions) -> bool:
        """Return whether Gram matrices have noise.

        Args:
            privacy: of the run.
        """
        return privacy.target_epsilon is not None or bool(self.gram_noise)

    def fields_with_own_noise(self, method: Method) -> frozenset[str]:
        """Return the eigenvectors, where Gram matrices have noise.

        Args:
            method: whose options they are.
        """
        return frozenset({"vectors"}) if self.noisy(method.privacy) else frozenset()

    def adds_noise(self, config: Mapping[str, Any]) -> bool:
        """Return whether Gram matrices have noise.

        Args:
            config: what clients and server agreed on.
        """
        return bool(config["gram_noise"])

    def resolved(self, method: Method, facts: Facts, known: Mapping[str, Any]) -> dict[str, Any]:
        """Return the noise multiplier; with a `target_epsilon` it follows from that of other noise.

        Args:
            method: whose options they are.
            facts: of the clients and their data.
            known: what is resolved already.
        """
        noise = float(self.gram_noise)
        if method.privacy.target_epsilon is not None:
            noise = float(known["noise"]) * float(method.privacy.cluster_noise)
        return {"gram_noise": noise}


@grouped
class EigenvectorProtocol(ClusteringProtocol):
    """Options of the methods whose clients share eigenvectors, with noise in Gram matrices."""

    vectors: Annotated[int, AtLeast(1)] = 5
    """p, eigenvectors that each client shares"""
    dp_unit: str = "example"
    """what is protected: client (all data of one) or example (one sample of one client: DP-SGD in
    local training); ε bounds what blanking one tells: it keeps its place and contributes zeros,
    while numbers of samples and who takes part are public
    """
    gram: GramOptions = group(GramOptions)

    client: ClassVar[type[TrainingClient]] = EigenvectorClient
    signature_method: ClassVar[Any] = EigenvectorClient.eigen
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

    def shared_facts(self, facts: Facts) -> dict[str, Any]:
        """Return D, the numbers of a sample's features.

        Args:
            facts: of the clients and their data.

        Raises:
            UsageError: the data are text.
        """
        check_objective(facts)
        return {**super().shared_facts(facts), "width": int(np.prod(facts.shape))}

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
        self, cohort: LocalTrainer, pipeline: Pipeline, config: Mapping[str, Any]
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
            self.training.usual(self, config),
            pipeline,
            self.weighted,
            self.eigenvector_options(config),
        )
        return client

    def eigenvector_options(self, config: Mapping[str, Any]) -> EigenvectorOptions:
        """Return the clients' options.

        Args:
            config: the run's configuration.
        """
        features = self.feature_map(config)
        count = min(int(self.vectors), features.dimension)
        return EigenvectorOptions(features, count, self.gram_noise_of(config))

    def gram_noise_of(self, config: Mapping[str, Any]) -> GramNoise | None:
        """Return the noise of Gram matrices that a configuration specifies, or None.

        Args:
            config: the run's configuration.
        """
        if not config["gram_noise"]:
            return None
        return GramNoise(config["gram_noise"], self.mechanism, config["dp_unit"] == "client")

    @property
    def mechanism(self) -> str:
        """Return the mechanism of the noise, "gram" or "naive"."""
        return "gram"

    def check(self, clients: int) -> None:
        """Add checks of the eigenvectors and of their noise.

        Args:
            clients: m.

        Raises:
            UsageError: an option is out of range, or the noise is given twice.
        """
        super().check(clients)


def check_objective(facts: Facts) -> None:
    """Raise UsageError for text: a Gram matrix of token numbers means nothing.

    Args:
        facts: of the clients and their data.
    """
    if isinstance(facts.objective, Language):
        raise UsageError(
            "eigenvectors are of samples that are numbers, and text is not: choose another "
            "protocol, cfl say"
        )
