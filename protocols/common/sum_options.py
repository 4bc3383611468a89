"""How sums over clients are formed: options, ranges of what is summed, and what does not work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.core.validation import check_choice, check_number, check_whole
from securecluster.data import Federation
from securecluster.errors import FrameError, UsageError
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.homomorphic.ciphers import tenseal
from securecluster.privacy.homomorphic.parameters import BFV, CKKS, Parameters, default_parameters
from securecluster.privacy.masking.identities import Identity, Roster
from securecluster.privacy.masking.key_agreement import KeyRing
from securecluster.privacy.pipeline import Pipeline
from securecluster.privacy.secure_sum.cohorts import Cohort, Cohorts
from securecluster.privacy.secure_sum.fixed_point import LARGEST_BOUND, SMALLEST_BOUND
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.dp_options import DISTRIBUTED, DPOptions
from securecluster.runtime.client_half import ClientHalf, HiddenReplies
from securecluster.runtime.encrypted_pairs import (
    EncryptedPairs,
    EncryptedPairService,
    LabelledValue,
)
from securecluster.runtime.encrypted_replies import (
    EncryptedPairReplies,
    EncryptedReplies,
    encrypted_bits,
    is_encrypted,
)
from securecluster.runtime.encrypted_sum_client import AUTHORITY_NUMBER, EncryptedSumService
from securecluster.runtime.encrypted_sums import EncryptedSums
from securecluster.runtime.endpoint import (
    MINIMUM,
    PAIRS,
    SUM,
    config_hash,
    fixed_sums,
    has_pairs,
    releases_of,
)
from securecluster.runtime.key_authority import KeyAuthority
from securecluster.runtime.masked_replies import SumRanges
from securecluster.runtime.pad_client import PaddedReplies, PadService, PairRange
from securecluster.runtime.padded_pairs import PaddedPairs
from securecluster.runtime.pair_aggregators import (
    PairAggregator,
    PairFunction,
    PairFunctions,
    PlainPairs,
)
from securecluster.runtime.pair_release import LABELS, MATRIX, RELEASES, PairRelease
from securecluster.runtime.secure_sum_client import MaskedReplies, SecureSumService
from securecluster.runtime.secure_sums import SecureSums

PLAIN = "plain"
SECAGG = "secagg"
ENCRYPTED = (BFV, CKKS)
# backends of the relevance of pairs
PADS = "pads"
RELEVANCES = (PLAIN, PADS, CKKS)
# largest coordinate of an update without a clip norm
UNCLIPPED_BOUND = 8.0
# largest mean loss in nats that a secure sum tells from larger ones
LARGEST_LOSS = 1e6
# standard deviations of the noise that the bound of a noised update leaves room for, and room for
# rounding in the clip
DEVIATIONS = 8.0
ROUNDING = 1.01


@dataclass(kw_only=True)
class SumOptions(DPOptions):
    """Options of sums over clients."""

    # what protocols declare (`ProtocolHooks`)
    name: ClassVar[str]
    client: ClassVar[type[TrainingClient]]

    aggregation: str = PLAIN
    """how sums of updates are formed: plain (the server reads every reply and adds them), secagg
    (clients mask their replies, so that the server reads sums over two or more of them only), or
    bfv or ckks (clients encrypt their replies, the server adds ciphertexts, and a key authority
    decrypts the sums that clients' tags bind; neither it nor a client may work together with the
    server; both sum integers exactly, to which clients round their numbers, less finely under ckks)
    """
    sum_bound: float | None = None
    """largest coordinate of one client's update, before its weight, that a secure sum can hold;
    None is the clip norm with room for its noise, or 8 without a clip
    """
    cohort_size: int | None = None
    """secure sums only: number of clients of a cohort. Clients are divided into fixed cohorts, each
    of which is in a sum as a whole or not at all, since sums over ever other clients can be solved
    for each of them. None is the number of clients that a round asks, or a third of them where it
    asks all, up to ten; 0 is no cohorts (the report says how many clients can be solved for)
    """
    relevance: str = PLAIN
    """how R_ij = (r_ij + r_ji)/2 of pairs of clients is formed: plain (the server reads every
    r_ij), pads (it reads R_ij only) or ckks (a key authority decrypts R; see relevance_release)
    """
    relevance_release: str | None = None
    """relevance ckks only: what the key authority tells the server of R: labels (the clusters
    alone) or matrix (R of numbers that clients round to 2^-14); None is labels where the method
    clusters R itself (oneshot), and else matrix
    """

    sums_over_all: ClassVar[bool] = False
    """Whether all secure sums are over all clients or a share of them, and none over clusters that
    the server forms. Each client then knows the cohorts, and refuses other lists."""
    pair_functions: ClassVar[Mapping[str, PairFunction]] = {}
    """Functions of R that the server may ask for, by name. Their parameters are those of the
    configuration, so that another party than the server can compute them."""
    pair_fields: ClassVar[Mapping[str, PairRange]] = {}
    """Ranges of the fields of rows of pairs."""
    pair_labels: ClassVar[Mapping[str, LabelledValue]] = {}
    """Makes the value of a function of R where labels are all that the server is told, by its
    name."""

    @property
    def sums_securely(self) -> bool:
        """Return whether sums are secure."""
        return self.aggregation != PLAIN

    @property
    def sums_encrypted(self) -> bool:
        """Return whether sums are of ciphertexts, which a key authority decrypts."""
        return self.aggregation in ENCRYPTED

    @property
    def pads_pairs(self) -> bool:
        """Return whether rows of pairs are padded."""
        return self.relevance == PADS

    @property
    def encrypts_pairs(self) -> bool:
        """Return whether rows of pairs are encrypted."""
        return self.relevance == CKKS

    @property
    def hides_pairs(self) -> bool:
        """Return whether the server reads no row of pairs."""
        return self.relevance != PLAIN

    @property
    def reads_pair_sums(self) -> bool:
        """Return whether the server reads R_ij, and no part of it."""
        if self.encrypts_pairs:
            return not self._labelled
        return self.pads_pairs

    @property
    def encrypted_verbs(self) -> frozenset[str]:
        """Return the verbs whose replies are encrypted."""
        verbs = set()
        if self.sums_encrypted:
            verbs.add(SUM)
        if self.encrypts_pairs:
            verbs.add(PAIRS)
        return frozenset(verbs)

    @property
    def hidden_replies(self) -> dict[str, HiddenReplies]:
        """Return what hides replies, by the verb that they leave through."""
        hidden: dict[str, HiddenReplies] = {}
        if self.sums_encrypted:
            hidden[SUM] = EncryptedReplies()
        elif self.sums_securely:
            hidden[SUM] = MaskedReplies()
        if self.encrypts_pairs:
            hidden[PAIRS] = EncryptedPairReplies(self.pair_fields)
        elif self.pads_pairs:
            hidden[PAIRS] = PaddedReplies(self.pair_fields)
        return hidden

    @property
    def _schemes(self) -> list[Parameters]:
        """Return the parameters of the run's encryptions."""
        schemes = []
        if self.sums_encrypted:
            schemes.append(self.aggregation)
        if self.encrypts_pairs:
            schemes.append(self.relevance)
        return [default_parameters(scheme) for scheme in dict.fromkeys(schemes)]

    @property
    def _labelled(self) -> Mapping[str, LabelledValue]:
        """Return the functions of R of which labels alone are released."""
        if self.relevance_release == MATRIX:
            return {}
        return self.pair_labels

    @property
    def weights_updates(self) -> bool:
        """Return whether updates are multiplied by numbers of samples before they are summed."""
        return not self.per_client

    def check_sums(self) -> None:
        """Check the options of sums.

        Raises:
            UsageError: an option out of range, or a method that secure sums do not work with.
        """
        check_choice(self, aggregation=(PLAIN, SECAGG, *ENCRYPTED), relevance=RELEVANCES)
        if self.placement == DISTRIBUTED:
            self._check_distributed()
        if self.sum_bound is not None:
            check_number(self, "sum_bound", SMALLEST_BOUND, LARGEST_BOUND, high_in=True)
        # of the methods that have it
        if getattr(self, "exact_weights", False) and not self.sums_securely:
            raise UsageError(
                "exact_weights is of secure sums, and plain sums have exact weights as they are: "
                "take aggregation secagg, or leave exact_weights out"
            )
        self._check_pairs()
        if self._schemes:
            tenseal()  # a missing package is named before anything is sent
        if self.sums_securely:
            self._check_secure_sums()

    def _check_secure_sums(self) -> None:
        """Raise UsageError for a method or an option that secure sums do not work with."""
        if self.placement == "central":
            raise UsageError(
                "a trusted server reads every reply before it adds noise, and secure sums hide the "
                "replies: take placement local, or aggregation plain"
            )
        _refuse(self.secure_sums_refusal())

    def check_cohorts(self, clients: int) -> None:
        """Check the size of cohorts.

        Args:
            clients: m.

        Raises:
            UsageError: cohorts without secure sums, or of fewer than two or more than all clients.
        """
        if self.cohort_size is None:
            return
        check_whole(self, cohort_size=0)
        if self.cohort_size == 0:
            return
        if self.cohort_size < MINIMUM:
            raise UsageError(
                f"cohort_size = {self.cohort_size} is not possible: a cohort has {MINIMUM} clients "
                "or more, and 0 is no cohorts"
            )
        if not self.sums_securely:
            raise UsageError(
                "cohort_size is of secure sums, and the server of plain ones reads every reply: "
                "take aggregation secagg, or leave cohort_size out"
            )
        if self.cohort_size > clients:
            raise UsageError(
                f"cohort_size = {self.cohort_size} is more than the {clients} clients: take a "
                "smaller one, or leave it out"
            )

    def cohorts(self, config: Mapping[str, Any]) -> Cohorts | None:
        """Return by which cohorts clients take part in secure sums; None where there are none.

        Args:
            config: what clients and server agreed on.
        """
        if not self.sums_securely or config["cohort_size"] == 0:
            return None
        return Cohorts.drawn(
            int(config["clients"]),
            int(config["seed"]),
            MINIMUM,
            float(config["participation"]),
            config["cohort_size"],
        )

    def _cohorts_of_all(self, config: Mapping[str, Any]) -> list[Cohort]:
        """Return the cohorts that every sum is over; empty where others follow from clusters."""
        cohorts = self.cohorts(config)
        if cohorts is None or not self.sums_over_all:
            return []
        return cohorts.of(range(int(config["clients"])))

    def _check_pairs(self) -> None:
        """Check whether the method forms pairs, and what the key authority tells of R."""
        if self.relevance != PLAIN:
            _refuse(self.pairs_refusal())
        if self.relevance_release is None:
            return
        check_choice(self, relevance_release=RELEASES)
        if not self.encrypts_pairs:
            raise UsageError(
                "relevance_release is of the key authority: take relevance ckks, or leave "
                "relevance_release out"
            )
        if self.relevance_release == LABELS and not self.pair_labels:
            raise UsageError(
                f"the server of {type(self).__name__} computes with R itself, so labels are not "
                "enough: take relevance_release matrix"
            )

    def _check_distributed(self) -> None:
        """Raise UsageError where clients' shares of the noise would not all be in secure sums."""
        if self.aggregation != SECAGG:
            raise UsageError(
                "with placement distributed no client's reply has enough noise by itself, so sums "
                "must be secure: take aggregation secagg, or placement local"
            )
        if self.sums_encrypted:
            raise UsageError(
                "with placement distributed clients add their noise in the ring of secure sums, "
                "which ciphertexts do not have: take aggregation secagg, or placement local"
            )
        noised = self.fields_with_own_noise
        for method, release in sorted(releases_of(self.client).items()):
            if release.via == (SUM,) or not release.private or release.derived:
                continue
            if method in self.refused_methods:
                continue
            names = [name for name in release.through if name not in noised]
            if names:
                raise UsageError(
                    f"clients of {self.name} also send {names[0]} by itself ({method}), and with "
                    "placement distributed only sums have enough noise: take placement local, or "
                    "fedavg"
                )

    def check_sum_noise(self, config: Mapping[str, Any], pipeline: Pipeline) -> None:
        """Check that sums over all clients have room for their noise.

        Args:
            config: what clients and server agreed on.
            pipeline: stages of clients' replies.

        Raises:
            UsageError: they do not fit the ring of secure sums.
        """
        noise = self.sum_noise(config)
        if noise is not None:
            noise.plan(pipeline.width(config["dimension"]), config["clients"])

    @property
    def fields_with_own_noise(self) -> frozenset[str]:
        """Return the fields that clients add noise to before they pass the pipeline."""
        return frozenset()

    @property
    def refused_methods(self) -> frozenset[str]:
        """Return the names of client methods that the clients of this run refuse to answer."""
        return frozenset()

    def secure_sums_refusal(self) -> str | None:
        """Return why this method does not work with secure sums, and the nearest choice that does.

        Returns:
            One sentence; None where the method works.
        """
        return None

    def pairs_refusal(self) -> str | None:
        """Return why the server of this method forms no pairs, and the nearest choice that works.

        A method that forms pairs with some of its options only adds a reason.

        Returns:
            One sentence; None where the method works.
        """
        if has_pairs(self.client):
            return None
        return (
            f"no reply of {type(self).__name__} leaves in pairs, so there is no relevance to hide: "
            "take relevance plain"
        )

    def sum_facts(self, federation: Federation, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return what clients and server must agree on for secure sums; nothing for plain ones.

        The largest number of samples of a client is public then, unless updates are clipped: these
        count the same, and no number of samples leaves a client.

        Args:
            federation: the clients and their data.
            config: hyper-parameters with their defaults resolved.
        """
        if not self.sums_securely:
            return {}
        bound = self.sum_bound
        if bound is None:
            bound = UNCLIPPED_BOUND
            if self.per_client:
                noise = float(config["noise"])
                bound = float(config["clip"]) * (ROUNDING + DEVIATIONS * noise)
        facts: dict[str, Any] = {"sum_bound": float(bound)}
        if not self.per_client:
            facts["most_samples"] = max(len(shard.y) for shard in federation.shards)
        return facts

    def sum_fields(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Return the largest magnitude of one client's number in each field that is summed.

        A method whose sums have further fields adds them. Rows that pass through the pipeline have
        32 bits in a secure sum, and other fields 64.

        Args:
            config: what clients and server agreed on.
        """
        samples = float(config.get("most_samples", 1))
        weight = 1.0
        if self.weights_updates:
            weight = samples
        return {"delta": float(config["sum_bound"]) * weight, "size": samples}

    def _sum_ranges(
        self, config: Mapping[str, Any], draws: NoiseStreams | None = None
    ) -> SumRanges:
        # Under noise an error would tell of the data, so numbers are clamped instead.
        return SumRanges(
            self.sum_fields(config),
            saturate=config["noise"] > 0,
            clamped=frozenset({"loss"}),
            noise=self.sum_noise(config, draws),
            noises=self.sum_noises(config, draws),
        )

    def client_halves(
        self, config: Mapping[str, Any], keys: KeyRing, pipeline: Pipeline, draws: NoiseStreams
    ) -> dict[str, ClientHalf]:
        """Return the clients' halves of the protections, by the verb whose replies they hide.

        Args:
            config: what clients and server agreed on.
            keys: the clients' keys.
            pipeline: stages of their replies.
            draws: the streams of their noise.
        """
        halves: dict[str, ClientHalf] = {}
        sums = self.secure_sum_service(config, keys, pipeline, draws)
        if sums is not None:
            halves[SUM] = sums
        pairs = self.pad_service(config, keys)
        if pairs is not None:
            halves[PAIRS] = pairs
        return halves

    def secure_sum_service(
        self, config: Mapping[str, Any], keys: KeyRing, pipeline: Pipeline, draws: NoiseStreams
    ) -> SecureSumService | EncryptedSumService | None:
        """Return the clients' half of secure sums; None where sums are plain.

        Args:
            config: what clients and server agreed on.
            keys: the clients' keys.
            pipeline: stages of their replies.
            draws: the streams of their noise.
        """
        if not self.sums_securely:
            return None
        run = config_hash(config)
        if self.sums_encrypted:
            minimum = max(MINIMUM, pipeline.shares)
            parameters = default_parameters(self.aggregation)
            ranges = self._sum_ranges(config)
            return EncryptedSumService(
                ranges, run, keys, minimum, parameters, self._schemes, self._cohorts_of_all(config)
            )
        ranges = self._sum_ranges(config, draws)
        fixed = fixed_sums(self.client)
        cohorts = self._cohorts_of_all(config)
        return SecureSumService(run, keys, ranges, MINIMUM, pipeline.shares, fixed, cohorts)

    def aggregator(
        self, config: Mapping[str, Any], private: bytes | None = None, roster: Roster | None = None
    ) -> SecureSums | EncryptedSums | None:
        """Return the server's half of secure sums; None where sums are plain.

        Args:
            config: what clients and server agreed on.
            private: the server's private key for envelopes of ciphertexts, 32 bytes; None derives
                it from the seed, for simulations.
            roster: identities of the clients whose ciphertexts are accepted; None derives it from
                the seed where `private` is derived, and else verifies nothing.
        """
        if not self.sums_securely:
            return None
        dtypes = {"float32": torch.float32, "float64": torch.float64}
        dtype = dtypes[config["dtype"]]
        run = config_hash(config)
        ranges = self._sum_ranges(config)
        if not self.sums_encrypted:
            return SecureSums(run, ranges, dtype, MINIMUM, fixed_sums(self.client))
        private, roster = _server_keys(config, private, roster)
        parameters = default_parameters(self.aggregation)
        pipeline = self.pipeline(config)  # type: ignore[attr-defined]
        minimum = max(MINIMUM, pipeline.shares)
        return EncryptedSums(run, ranges, dtype, minimum, parameters, private, roster)

    def build_authority(
        self,
        config: Mapping[str, Any],
        simulated: bool = True,
        identity: Identity | None = None,
        secrets: Randomness | None = None,
        roster: Roster | None = None,
    ) -> KeyAuthority | None:
        """Return the key authority of a run; None where nothing is encrypted.

        Args:
            config: what all parties agreed on.
            simulated: derive its identity, and its key for envelopes, from `secrets`.
            identity: signs a deployed authority's public keys: on rosters its number is
                `AUTHORITY_NUMBER`.
            secrets: secret random streams of a simulated run; None derives them from the seed.
            roster: identities of the clients whose ciphertexts a deployed authority decrypts sums
                of. Without one a server that breaks the protocol can play any client, and so have
                any ciphertext decrypted.
        """
        schemes = self._schemes
        if not schemes:
            return None
        randomness = None
        if simulated:
            randomness = secrets or Randomness(config["seed"])
            identity = Identity.derived(randomness, AUTHORITY_NUMBER)
            roster = Roster.derived(randomness)
        ranges = SumRanges({})
        if self.sums_encrypted:
            ranges = self._sum_ranges(config)
        pairs = None
        if self.encrypts_pairs:
            functions = PairFunctions(self.pair_functions, config)
            pairs = PairRelease(self.pair_fields, functions, tuple(self._labelled))
        pipeline = self.pipeline(config)  # type: ignore[attr-defined]
        return KeyAuthority(
            config_hash(config),
            schemes,
            ranges,
            self._encrypted_bits,
            max(MINIMUM, pipeline.shares),
            int(config["clients"]),
            randomness,
            identity,
            pairs,
            roster,
            self._cohorts_of_all(config),
        )

    def _encrypted_bits(self, purpose: str) -> Mapping[str, int]:
        """Return the bits of the fields of a client method's encrypted replies.

        Raises:
            FrameError: a method whose replies are not encrypted.
        """
        _, reply = self.message_types(purpose)  # type: ignore[attr-defined]
        if not is_encrypted(reply):
            raise FrameError(f"replies of {purpose[:40]} are not encrypted: the sum is refused")
        return encrypted_bits(reply)

    def pad_service(
        self, config: Mapping[str, Any], keys: KeyRing
    ) -> PadService | EncryptedPairService | None:
        """Return the clients' half of pairs; None where the server reads their rows.

        Args:
            config: what clients and server agreed on.
            keys: the clients' keys.
        """
        if not self.hides_pairs:
            return None
        # Under noise an error would tell of the data, so numbers are clamped instead.
        noisy = config["noise"] > 0 or config.get("gram_noise", 0) > 0
        run = config_hash(config)
        if self.pads_pairs:
            return PadService(run, keys, self.pair_fields, noisy, MINIMUM)
        parameters = default_parameters(self.relevance)
        return EncryptedPairService(
            self.pair_fields, noisy, run, keys, MINIMUM, parameters, self._schemes
        )

    def pair_aggregator(
        self, config: Mapping[str, Any], private: bytes | None = None, roster: Roster | None = None
    ) -> PairAggregator:
        """Return the server's half of the relevance of pairs.

        Args:
            config: what clients and server agreed on.
            private: as of `aggregator`.
            roster: as of `aggregator`.
        """
        functions = PairFunctions(self.pair_functions, config)
        if self.pads_pairs:
            return PaddedPairs(self.pair_fields, functions)
        if not self.encrypts_pairs:
            return PlainPairs(functions)
        private, roster = _server_keys(config, private, roster)
        return EncryptedPairs(
            config_hash(config),
            default_parameters(self.relevance),
            private,
            roster,
            self.pair_fields,
            functions,
            self._labelled,
        )


def _server_keys(
    config: Mapping[str, Any], private: bytes | None, roster: Roster | None
) -> tuple[bytes, Roster | None]:
    """Return the server's private key for envelopes, and the roster that it verifies against.

    Args:
        config: what clients and server agreed on.
        private: 32 bytes; None derives key and roster from the seed, for simulations.
        roster: of a server with a key; None verifies nothing.
    """
    if private is not None:
        return private, roster
    return simulated_server_keys(Randomness(config["seed"]))


def simulated_server_keys(secrets: Randomness) -> tuple[bytes, Roster]:
    """Return the private key for envelopes of a simulated server, and the roster of its clients.

    Args:
        secrets: secret random streams of the run.
    """
    return secrets.key("server", "envelopes x25519"), Roster.derived(secrets)


def _refuse(reason: str | None) -> None:
    """Raise UsageError if there is a reason to."""
    if reason is not None:
        raise UsageError(reason)
