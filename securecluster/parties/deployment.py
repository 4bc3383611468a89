"""What the parties of a run derive from its method and its configuration.

Clients, server and key authority each build their half from these two alone, so that they agree.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from functools import cached_property
from statistics import fmean as mean
from typing import TYPE_CHECKING, Any

from securecluster.core.lazy_torch import torch
from securecluster.core.option_groups import option_groups
from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.messaging.bounds import Limits, check, free_axes, unknown_sizes
from securecluster.messaging.messages import Call, Response
from securecluster.messaging.replies import check_finite, check_squares
from securecluster.parties.derived import as_agreed, call_types, model_of
from securecluster.parties.method import Method
from securecluster.parties.public_randomness import cohort_seed
from securecluster.privacy.cohorts import Cohort, Cohorts
from securecluster.privacy.dp.gaussian_mechanism import TrustedCurator
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.dp.skellam_mechanism import SkellamMechanism
from securecluster.privacy.masking.identities import AUTHORITY_NUMBER, Identity, Roster
from securecluster.privacy.masking.pads import transcript as encoded
from securecluster.privacy.pipeline import Pipeline
from securecluster.privacy.row_layout import layout
from securecluster.protections.key_exchange import check_offer
from securecluster.protections.protection import (
    AuthorityFacts,
    PairFacts,
    PairProtection,
    ServerKeys,
    SumFacts,
    SumProtection,
)
from securecluster.protections.registry import sum_plan_of
from securecluster.protections.sum_ranges import SumRanges
from securecluster.runtime.aggregators import Aggregator
from securecluster.runtime.authority import Authority
from securecluster.runtime.client_half import ClientHalf
from securecluster.runtime.endpoint import (
    MINIMUM,
    PAIRS,
    SUM,
    config_hash,
    fixed_sums,
    least_members,
    message_types,
    planned_losses,
    release_of,
)
from securecluster.runtime.pair_aggregators import PairAggregator, PairFunctions
from securecluster.runtime.release_accounting import ReleaseAccounting
from securecluster.runtime.server_channel import ServerChannel
from securecluster.runtime.transport import Transport
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

if TYPE_CHECKING:
    from securecluster.models.validation import FlatModel
    from securecluster.parties.shared_scale import SharedScale
    from securecluster.privacy.dp.client_noise import ClientNoise
    from securecluster.privacy.masking.key_agreement import KeyRing

ITEM_SIZES = {"float32": 4, "float64": 8}


class Deployment:
    """The halves of one run, from its method and its configuration.

    Args:
        method: with its hyper-parameters.
        config: what clients and server agreed on.
    """

    def __init__(self, method: Method, config: Mapping[str, Any]) -> None:
        self.method = as_agreed(method, config)
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

    @cached_property
    def _scale(self) -> SharedScale:
        """Return what follows of a scale of features that clients share."""
        from securecluster.parties.shared_scale import SharedScale

        return SharedScale(self.method, self.config)

    def initial_model(self) -> FlatModel:
        """Return the network with its initial weights θ_0, as a flat vector."""
        return model_of(self.method, self.config)

    def pipeline(self) -> Pipeline:
        """Return the stages between a client's update and the wire, as one party has them."""
        return self._scale.pipeline()

    def limits(self, pipeline: Pipeline) -> Limits:
        """Return the limits of frames, which both sides enforce.

        Args:
            pipeline: the stages of clients' replies.
        """
        sizes = {**self.method.frame_sizes(self.config), **self._scale.sizes}
        self._check_sizes(sizes)
        return Limits(sizes, layout(pipeline, ITEM_SIZES[self.config["dtype"]]))

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Raise UsageError for a message of this method with a bound of an unknown name."""
        client = self.method.client
        messages: list[type] = []
        for name in dir(client):
            if hasattr(getattr(client, name), "__release__"):
                messages += call_types(self.method, name)
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
        for options in option_groups(self.method):
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

    def _row_noises(self) -> Mapping[str, Any]:
        """Return the clip norm and noise of fields whose rows are not updates, by field."""
        of_method = self.method.privacy.row_noises(self.method, self.config)
        return {**of_method, **self._scale.row_noises}

    def row_noise_in_shares(self, draws: NoiseStreams | None = None) -> dict[str, SkellamMechanism]:
        """Return the noise of `row_noises` that clients add to secure sums in shares, by field.

        Args:
            draws: the clients' streams of noise; None at the server.
        """
        if self.method.privacy.sum_noise(self.config, draws) is None:
            return {}
        survivors = sum_plan_of(self.config).least_survivors
        mechanisms = {}
        for name, noise in self._row_noises().items():
            mechanisms[name] = SkellamMechanism(noise.norm, noise.multiplier, survivors, draws)
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
            private_trainings = method.trainings(method.training.usual(method, config), config)
        curator = None
        curators: dict[str, TrustedCurator] = {}
        if privacy.per_client and config["noise"] and config["placement"] == "central":
            curator = TrustedCurator(config["clip"], config["noise"], draws)
            for name, row_noise in self._row_noises().items():
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
            cohort_seed(config),
            max(least_members(config), self.method.sums.least_cohort(self.method)),
            float(config["participation"]),
            config["cohort_size"],
        )

    def _cohorts_of_all(self) -> list[Cohort]:
        """Return the cohorts that every sum is over; empty where others follow from clusters."""
        cohorts = self.cohorts()
        if cohorts is None or not self.method.sums.over_all:
            return []
        return cohorts.of(range(int(self.config["clients"])))

    def _sum_facts(self, draws: NoiseStreams | None = None, fewest: int = 0) -> SumFacts:
        """Return what the halves of the protection of sums are made from.

        Args:
            draws: the clients' streams of noise; None elsewhere.
            fewest: as `least` of `client_halves`.
        """
        method = self.method
        # Under noise an error would tell of the data, so numbers are clamped instead.
        ranges = SumRanges(
            {**method.sums.fields(method, self.config), **self._scale.largest},
            saturate=self.config["noise"] > 0,
            clamped=frozenset({"loss"}),
            noise=method.privacy.sum_noise(self.config, draws),
            noises=self.row_noise_in_shares(draws),
        )
        lost, colluding = planned_losses(self.config)
        return SumFacts(
            run=self.run,
            ranges=ranges,
            dtype=self.dtype,
            minimum=least_members(self.config),
            shares=max(self.pipeline().shares, fewest),
            fixed=fixed_sums(method.client),
            cohorts=self._cohorts_of_all(),
            lost=lost,
            colluding=colluding,
        )

    def _pair_facts(self) -> PairFacts:
        """Return what the halves of the protection of pairs are made from."""
        pairs = self.method.pairs
        return PairFacts(
            run=self.run,
            ranges=pairs.fields,
            functions=PairFunctions(pairs.functions, self.config),
            labelled=pairs.labelled,
            # Under noise an error would tell of the data, so numbers are clamped instead.
            saturate=self.config["noise"] > 0 or self.config.get("gram_noise", 0) > 0,
            minimum=MINIMUM,
        )

    def client_halves(
        self, keys: KeyRing, draws: NoiseStreams, least: int = 0
    ) -> dict[str, ClientHalf]:
        """Return the clients' halves of the protections, by the verb whose replies they hide.

        Args:
            keys: the clients' keys.
            draws: the streams of their noise.
            least: fewest members and survivors of a sum that the clients' owner asks for.
        """
        halves: dict[str, ClientHalf] = {}
        sums = self.method.sums.protection
        pairs = self.method.pairs.protection
        if sums.hides:
            halves[SUM] = sums.client_half(self._sum_facts(draws, least), keys)
        if pairs.hides:
            halves[PAIRS] = pairs.client_half(self._pair_facts(), keys)
        return halves

    def aggregator(
        self, private: bytes | None = None, roster: Roster | None = None
    ) -> Aggregator | None:
        """Return the server's half of the protection of sums; None for the channel's own.

        Args:
            private: the server's private key for envelopes of ciphertexts, 32 bytes; None derives
                it from the seed, for simulations.
            roster: identities of the clients whose ciphertexts are accepted; None derives it from
                the seed where `private` is derived, and else verifies nothing.
        """
        protection: SumProtection = self.method.sums.protection
        if not protection.hides:
            return None
        return protection.server_half(self._sum_facts(), self._server_keys(private, roster))

    def pair_aggregator(
        self, private: bytes | None = None, roster: Roster | None = None
    ) -> PairAggregator:
        """Return the server's half of the relevance of pairs.

        Args:
            private: as of `aggregator`.
            roster: as of `aggregator`.
        """
        protection: PairProtection = self.method.pairs.protection
        return protection.server_half(self._pair_facts(), self._server_keys(private, roster))

    # the key authority

    def authority(
        self,
        simulated: bool = True,
        identity: Identity | None = None,
        secrets: Randomness | None = None,
        roster: Roster | None = None,
        least: int = 0,
    ) -> Authority | None:
        """Return the key authority of a run; None where no protection needs one.

        Args:
            simulated: derive its identity, and its key for envelopes, from `secrets`.
            identity: signs a deployed authority's public keys: on rosters its number is
                `AUTHORITY_NUMBER`.
            secrets: secret random streams of a simulated run; None derives them from the seed.
            roster: identities of the clients whose ciphertexts a deployed authority decrypts sums
                of. Without one a server that breaks the protocol can play any client, and so have
                any ciphertext decrypted.
            least: fewest clients of a sum that the authority's owner asks for.
        """
        method = self.method
        protection: PairProtection = method.pairs.protection
        if not protection.by_authority:
            return None
        randomness = None
        if simulated:
            randomness = secrets or Randomness(self.config["seed"])
            identity = Identity.derived(randomness, AUTHORITY_NUMBER)
            roster = Roster.derived(randomness)
        facts = AuthorityFacts(
            run=self.run,
            clients=int(self.config["clients"]),
            minimum=max(least_members(self.config), self.pipeline().shares, least),
            pairs=self._pair_facts(),
            reply_class=lambda name: call_types(method, name)[1],
            randomness=randomness,
            identity=identity,
            roster=roster,
        )
        return protection.authority(facts)

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

    def reply_check(self, roster: Roster | None = None) -> Callable[[Call, int, Any], None]:
        """Return what raises for a client's reply that the configuration does not allow.

        The server's channel makes these checks on all replies of a call at once, and ends the run
        of a simulation. A transport that makes them reply by reply refuses the client alone.

        A public key that its client did not sign is refused here, too. The other clients would
        refuse the message that it is in, and so one of them could drop all others.

        Args:
            roster: whose signatures count; None verifies none.
        """
        limits = self.limits(self.pipeline())
        client_class = self.method.client

        def check_reply(call: Call, client: int, reply: Any) -> None:
            of_call = limits.beside(call.query)
            method = getattr(client_class, call.method, None)
            # a message of keys or sums, or a reply that such a protection hides
            if method is None or type(reply) is not message_types(client_class, call.method)[1]:
                check(reply, of_call)
                check_offer(self.run, client, reply, roster)
                return
            release = release_of(method)
            through = {name: name in release.sealed for name in release.through}
            check(reply, of_call, through, finite=False)
            check_finite(call, Response((client,), reply))
            check_squares(call.round, (client,), reply)

        return check_reply

    def _server_keys(self, private: bytes | None, roster: Roster | None) -> ServerKeys:
        """Return the server's private key for envelopes, and the roster that it verifies against.

        Args:
            private: 32 bytes; None derives key and roster from the seed, for simulations.
            roster: of a server with a key; None verifies nothing.
        """
        if private is None:
            private, roster = _simulated_server_keys(Randomness(self.config["seed"]))
        return ServerKeys(private, roster)


def build_network(
    method: Method,
    transport: Transport,
    config: Mapping[str, Any],
    key: bytes | None = None,
    device: torch.device | None = None,
    roster: Roster | None = None,
    secrets: Randomness | None = None,
) -> ServerChannel:
    """Return the server's channel: client ids and verbs, from the configuration alone.

    Args:
        method: with its hyper-parameters.
        transport: carries calls to clients.
        config: what clients and server agreed on.
        key: 32 secret bytes, by which a trusted server draws its noise, and from which its key for
            envelopes of ciphertexts follows. None derives both from `secrets`: for simulations
            only.
        device: where the server computes with rows of models; None is main memory.
        roster: identities of the clients whose ciphertexts a server with a key accepts; None
            verifies no signature.
        secrets: secret random streams of a simulated run; None derives them from the seed, which
            protects nothing.
    """
    return Deployment(method, config).network(transport, key, device, roster, secrets)


def _simulated_server_keys(secrets: Randomness) -> tuple[bytes, Roster]:
    """Return the private key for envelopes of a simulated server, and the roster of its clients.

    Args:
        secrets: secret random streams of the run.
    """
    return secrets.key("server", "envelopes x25519"), Roster.derived(secrets)
