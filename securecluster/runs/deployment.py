"""What the parties of a run derive from its method and its configuration.

Clients, server and key authority each build their half from these two alone, so that they agree.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from functools import cached_property
from statistics import fmean as mean
from typing import TYPE_CHECKING, Any

from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.errors import FrameError, UsageError
from securecluster.messaging.bounds import Limits, free_axes, unknown_sizes
from securecluster.models.objectives import objective
from securecluster.privacy.dp.client_noise import ClientNoise
from securecluster.privacy.dp.gaussian_mechanism import TrustedCurator
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.dp.skellam_mechanism import SkellamMechanism
from securecluster.privacy.homomorphic.parameters import Parameters, default_parameters
from securecluster.privacy.masking.identities import Identity, Roster
from securecluster.privacy.masking.key_agreement import KeyRing
from securecluster.privacy.pipeline import Pipeline
from securecluster.privacy.row_layout import layout
from securecluster.privacy.secure_sum.cohorts import Cohort, Cohorts
from securecluster.privacy.secure_sum.pads import transcript as encoded
from securecluster.runs.method import Method
from securecluster.runtime.encrypted_pairs import EncryptedPairs, EncryptedPairService
from securecluster.runtime.encrypted_replies import encrypted_bits, is_encrypted
from securecluster.runtime.encrypted_sum_client import AUTHORITY_NUMBER, EncryptedSumService
from securecluster.runtime.encrypted_sums import EncryptedSums
from securecluster.runtime.endpoint import MINIMUM, config_hash, fixed_sums
from securecluster.runtime.key_authority import KeyAuthority
from securecluster.runtime.masked_replies import SumRanges
from securecluster.runtime.pad_client import PadService
from securecluster.runtime.padded_pairs import PaddedPairs
from securecluster.runtime.pair_aggregators import PairAggregator, PairFunctions, PlainPairs
from securecluster.runtime.pair_release import PairRelease
from securecluster.runtime.release_accounting import ReleaseAccounting
from securecluster.runtime.secure_sum_client import SecureSumService
from securecluster.runtime.secure_sums import SecureSums
from securecluster.runtime.server_channel import ServerChannel
from securecluster.runtime.transport import Transport
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

if TYPE_CHECKING:
    from securecluster.models.validation import FlatModel

ITEM_SIZES = {"float32": 4, "float64": 8}


class Deployment:
    """The halves of one run, from its method and its configuration.

    Args:
        method: with its hyper-parameters.
        config: what clients and server agreed on.
    """

    def __init__(self, method: Method, config: Mapping[str, Any]) -> None:
        self.method = method
        self.config = config

    @cached_property
    def run(self) -> str:
        """Return the fingerprint of the configuration, which is in every frame."""
        return config_hash(self.config)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the models' numbers."""
        dtypes = {"float32": torch.float32, "float64": torch.float64}
        return dtypes[self.config["dtype"]]

    def initial_model(self) -> FlatModel:
        """Return the network with its initial weights θ_0, as a flat vector."""
        from securecluster.models.validation import build

        config = self.config
        task = objective(config["objective"])
        shape = tuple(config["shape"])
        randomness = Randomness(config["seed"])
        return build(self.method.model, shape, config["classes"], randomness, task)

    def pipeline(self) -> Pipeline:
        """Return the stages between a client's update and the wire, as one party has them."""
        return self.method.pipeline(self.config)

    def limits(self, pipeline: Pipeline) -> Limits:
        """Return the limits of frames, which both sides enforce.

        Args:
            pipeline: the stages of clients' replies.
        """
        sizes = self.method.frame_sizes(self.config)
        self._check_sizes(sizes)
        return Limits(sizes, layout(pipeline, ITEM_SIZES[self.config["dtype"]]))

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Raise UsageError for a message of this method with a bound of an unknown name."""
        client = self.method.client
        messages: list[type] = []
        for name in dir(client):
            if hasattr(getattr(client, name), "__release__"):
                messages += self.method.message_types(name)
        names = set(sizes)
        for message in messages:
            names |= free_axes(message)
        for message in messages:
            unknown = unknown_sizes(message, names)
            if unknown:
                raise UsageError(
                    f"{message.__name__} has a bound by {unknown[0]!r}, which is no size of this "
                    f"protocol ({', '.join(sizes)}): name one of these, or add it to frame_sizes"
                )

    def client(self, cohort: LocalTrainer, pipeline: Pipeline) -> Any:
        """Return the clients' object, equipped for all options.

        Args:
            cohort: the clients' data and local training.
            pipeline: stages between an update and the wire.
        """
        client = self.method.make_client(cohort, pipeline, self.config)
        for options in self.method.option_groups:
            options.equip(self.method, self.config, client)
        return client

    # noise

    def client_noise(self, draws: NoiseStreams) -> ClientNoise:
        """Return the noise of what clients release by themselves, outside the pipeline.

        Args:
            draws: the clients' streams of noise.
        """
        noise: ClientNoise = self.method.privacy.client_noise(self.config, draws)
        return noise

    def row_noise_in_shares(self, draws: NoiseStreams | None = None) -> dict[str, SkellamMechanism]:
        """Return the noise of `row_noises` that clients add to secure sums in shares, by field.

        Args:
            draws: the clients' streams of noise; None at the server.
        """
        if self.method.privacy.sum_noise(self.config, draws) is None:
            return {}
        mechanisms = {}
        for name, noise in self.method.privacy.row_noises(self.method, self.config).items():
            mechanisms[name] = SkellamMechanism(noise.norm, noise.multiplier, MINIMUM, draws)
        return mechanisms

    def costs(self, pipeline: Pipeline, draws: NoiseStreams) -> ReleaseAccounting:
        """Return the accounting of the noise in replies, for the server.

        Args:
            pipeline: stages of clients' replies.
            draws: streams of the noise that a trusted server adds.
        """
        method = self.method
        config = self.config
        privacy = method.privacy
        private_trainings: dict[str, LocalTraining] = {}
        if privacy.per_example and config["noise"]:
            private_trainings = method.trainings(method.training(config), config)
        curator = None
        curators: dict[str, TrustedCurator] = {}
        if privacy.per_client and config["noise"] and config["placement"] == "central":
            curator = TrustedCurator(config["clip"], config["noise"], draws)
            for name, row_noise in privacy.row_noises(method, config).items():
                curators[name] = TrustedCurator(row_noise.norm, row_noise.multiplier, draws)
        # Mean variance of DP-SGD's noise in an update; it depends on a client's number of steps.
        variances = {}
        for name, plan in private_trainings.items():
            variances[name] = mean([plan.variance(n) for n in config["sizes"]])
        return ReleaseAccounting(
            pipeline,
            private_trainings,
            curator,
            variances,
            privacy.sum_noise(config),
            curators,
            self.row_noise_in_shares(),
        )

    # sums over clients

    def cohorts(self) -> Cohorts | None:
        """Return by which cohorts clients take part in secure sums; None where there are none."""
        config = self.config
        if not self.method.sums.hide_replies or config["cohort_size"] == 0:
            return None
        return Cohorts.drawn(
            int(config["clients"]),
            int(config["seed"]),
            MINIMUM,
            float(config["participation"]),
            config["cohort_size"],
        )

    def _cohorts_of_all(self) -> list[Cohort]:
        """Return the cohorts that every sum is over; empty where others follow from clusters."""
        cohorts = self.cohorts()
        if cohorts is None or not self.method.sums.over_all:
            return []
        return cohorts.of(range(int(self.config["clients"])))

    def _sum_ranges(self, draws: NoiseStreams | None = None) -> SumRanges:
        # Under noise an error would tell of the data, so numbers are clamped instead.
        return SumRanges(
            self.method.sums.fields(self.method, self.config),
            saturate=self.config["noise"] > 0,
            clamped=frozenset({"loss"}),
            noise=self.method.privacy.sum_noise(self.config, draws),
            noises=self.row_noise_in_shares(draws),
        )

    def sum_service(
        self, keys: KeyRing, pipeline: Pipeline, draws: NoiseStreams
    ) -> SecureSumService | EncryptedSumService | None:
        """Return the clients' half of secure sums; None where sums are plain.

        Args:
            keys: the clients' keys.
            pipeline: stages of their replies.
            draws: the streams of their noise.
        """
        sums = self.method.sums
        if not sums.hide_replies:
            return None
        cohorts = self._cohorts_of_all()
        if sums.by_authority:
            minimum = max(MINIMUM, pipeline.shares)
            parameters = default_parameters(sums.aggregation)
            ranges = self._sum_ranges()
            return EncryptedSumService(
                ranges, self.run, keys, minimum, parameters, self._schemes, cohorts
            )
        ranges = self._sum_ranges(draws)
        fixed = fixed_sums(self.method.client)
        return SecureSumService(self.run, keys, ranges, MINIMUM, pipeline.shares, fixed, cohorts)

    def aggregator(
        self, private: bytes | None = None, roster: Roster | None = None
    ) -> SecureSums | EncryptedSums | None:
        """Return the server's half of secure sums; None where sums are plain.

        Args:
            private: the server's private key for envelopes of ciphertexts, 32 bytes; None derives
                it from the seed, for simulations.
            roster: identities of the clients whose ciphertexts are accepted; None derives it from
                the seed where `private` is derived, and else verifies nothing.
        """
        sums = self.method.sums
        if not sums.hide_replies:
            return None
        ranges = self._sum_ranges()
        if not sums.by_authority:
            fixed = fixed_sums(self.method.client)
            return SecureSums(self.run, ranges, self.dtype, MINIMUM, fixed)
        private, roster = self._server_keys(private, roster)
        parameters = default_parameters(sums.aggregation)
        minimum = max(MINIMUM, self.pipeline().shares)
        return EncryptedSums(self.run, ranges, self.dtype, minimum, parameters, private, roster)

    # pairs of clients

    def pair_service(self, keys: KeyRing) -> PadService | EncryptedPairService | None:
        """Return the clients' half of pairs; None where the server reads their rows.

        Args:
            keys: the clients' keys.
        """
        pairs = self.method.pairs
        if not pairs.hide_rows:
            return None
        # Under noise an error would tell of the data, so numbers are clamped instead.
        noisy = self.config["noise"] > 0 or self.config.get("gram_noise", 0) > 0
        fields = pairs.fields
        if not pairs.by_authority:
            return PadService(self.run, keys, fields, noisy, MINIMUM)
        parameters = default_parameters(pairs.relevance)
        return EncryptedPairService(
            fields, noisy, self.run, keys, MINIMUM, parameters, self._schemes
        )

    def pair_aggregator(
        self, private: bytes | None = None, roster: Roster | None = None
    ) -> PairAggregator:
        """Return the server's half of the relevance of pairs.

        Args:
            private: as of `aggregator`.
            roster: as of `aggregator`.
        """
        pairs = self.method.pairs
        functions = PairFunctions(pairs.functions, self.config)
        if not pairs.hide_rows:
            return PlainPairs(functions)
        if not pairs.by_authority:
            return PaddedPairs(pairs.fields, functions)
        private, roster = self._server_keys(private, roster)
        return EncryptedPairs(
            self.run,
            default_parameters(pairs.relevance),
            private,
            roster,
            pairs.fields,
            functions,
            pairs.labelled,
        )

    # the key authority

    @property
    def _schemes(self) -> list[Parameters]:
        """Return the parameters of the run's encryptions."""
        schemes = []
        if self.method.sums.by_authority:
            schemes.append(self.method.sums.aggregation)
        if self.method.pairs.by_authority:
            schemes.append(self.method.pairs.relevance)
        return [default_parameters(scheme) for scheme in dict.fromkeys(schemes)]

    def authority(
        self,
        simulated: bool = True,
        identity: Identity | None = None,
        secrets: Randomness | None = None,
        roster: Roster | None = None,
    ) -> KeyAuthority | None:
        """Return the key authority of a run; None where nothing is encrypted.

        Args:
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
        method = self.method
        randomness = None
        if simulated:
            randomness = secrets or Randomness(self.config["seed"])
            identity = Identity.derived(randomness, AUTHORITY_NUMBER)
            roster = Roster.derived(randomness)
        ranges = SumRanges({})
        if method.sums.by_authority:
            ranges = self._sum_ranges()
        pairs = None
        if method.pairs.by_authority:
            functions = PairFunctions(method.pairs.functions, self.config)
            pairs = PairRelease(method.pairs.fields, functions, tuple(method.pairs.labelled))
        return KeyAuthority(
            self.run,
            schemes,
            ranges,
            self._encrypted_bits,
            max(MINIMUM, self.pipeline().shares),
            int(self.config["clients"]),
            randomness,
            identity,
            pairs,
            roster,
            self._cohorts_of_all(),
        )

    def _encrypted_bits(self, purpose: str) -> Mapping[str, int]:
        """Return the bits of the fields of a client method's encrypted replies.

        Raises:
            FrameError: a method whose replies are not encrypted.
        """
        _, reply = self.method.message_types(purpose)
        if not is_encrypted(reply):
            raise FrameError(f"replies of {purpose[:40]} are not encrypted: the sum is refused")
        return encrypted_bits(reply)

    # the server

    def network(
        self,
        transport: Transport,
        key: bytes | None = None,
        device: torch.device | None = None,
        roster: Roster | None = None,
        secrets: Randomness | None = None,
    ) -> ServerChannel:
        """Return the server's channel: client ids and verbs, from the configuration alone.

        Args:
            transport: carries calls to clients.
            key: 32 secret bytes, by which a trusted server draws its noise, and from which its key
                for envelopes of ciphertexts follows. None derives both from `secrets`: for
                simulations only.
            device: where the server computes with rows of models; None is main memory.
            roster: identities of the clients whose ciphertexts a server with a key accepts; None
                verifies no signature.
            secrets: secret random streams of a simulated run; None derives them from the seed,
                which protects nothing.
        """
        pipeline = self.pipeline()
        randomness = Randomness(self.config["seed"])
        if key is None:
            secrets = secrets or randomness
            noise_streams = NoiseStreams.derived(secrets, self.run)
            private, roster = _simulated_server_keys(secrets)
        else:
            noise_streams = NoiseStreams(lambda _: key, self.run)
            statement = encoded("securecluster server envelopes v1", self.run)
            private = hmac.digest(key, statement, "sha256")
        return ServerChannel(
            self.config["clients"],
            transport,
            self.run,
            pipeline,
            randomness,
            aggregator=self.aggregator(private, roster),
            agreed=self.config,
            costs=self.costs(pipeline, noise_streams),
            device=device,
            limits=self.limits(pipeline),
            pair_aggregator=self.pair_aggregator(private, roster),
            cohorts=self.cohorts(),
        )

    def _server_keys(
        self, private: bytes | None, roster: Roster | None
    ) -> tuple[bytes, Roster | None]:
        """Return the server's private key for envelopes, and the roster that it verifies against.

        Args:
            private: 32 bytes; None derives key and roster from the seed, for simulations.
            roster: of a server with a key; None verifies nothing.
        """
        if private is not None:
            return private, roster
        return _simulated_server_keys(Randomness(self.config["seed"]))


def _simulated_server_keys(secrets: Randomness) -> tuple[bytes, Roster]:
    """Return the private key for envelopes of a simulated server, and the roster of its clients.

    Args:
        secrets: secret random streams of the run.
    """
    return secrets.key("server", "envelopes x25519"), Roster.derived(secrets)
