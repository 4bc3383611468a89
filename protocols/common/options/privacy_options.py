"""Differential privacy of all methods: options, noise of replies, and numbers of releases.

Unit "client": each update is clipped and gets noise before it leaves, and updates have equal
weights. Unit "example": local training is DP-SGD, and clients release its results without further
noise. What clients' methods release by themselves (`CallContext.release`) has noise of the same
multiplier. How much a run releases is found by runs without data (`dry_run`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from securecluster.core.validation import IN_PYTHON, NoiseMultiplier, Number, OneOf
from securecluster.errors import UsageError
from securecluster.parties.derived import BEGUN, CHOSEN, SCALE_NOISE, training_sizes, with_chosen
from securecluster.privacy.dp.gaussian_mechanism import Clip, Noise, RowNoise
from securecluster.privacy.dp.renyi import Step
from securecluster.privacy.pipeline import Stage
from securecluster.protections.registry import survivors_of
from securecluster.protocols.common.options.option_group import OptionGroup
from securecluster.training.local_trainer import LocalTraining

if TYPE_CHECKING:
    from securecluster.data.facts import Facts
    from securecluster.parties.dry_run import RunReleases
    from securecluster.parties.method import Method
    from securecluster.privacy.dp.client_noise import ClientNoise
    from securecluster.privacy.dp.noise_streams import NoiseStreams
    from securecluster.privacy.dp.skellam_mechanism import SkellamMechanism
    from securecluster.protocols.common.client import TrainingClient

LOCAL = "local"
DISTRIBUTED = "distributed"
AUTO = "auto"
# Range of clip norms. Single precision represents their products with noise multipliers.
CLIP_BOUNDS = (1e-12, 1e9)
# Smallest ratio of two noise multipliers: the price of less is too large a number.
SMALLEST_RATIO = 1e-6
# Share of the budget that the sum of a shared scale gets, in 1/z².
SCALE_SHARE = 0.1


@dataclass(kw_only=True)
class PrivacyOptions(OptionGroup):
    """Options of differential privacy."""

    clip: Annotated[float | None, Number(*CLIP_BOUNDS, high_in=True)] = None
    """clip norm S of each update that leaves its client, or, with dp_unit example, of each
    example's gradient
    """
    noise: Annotated[float, NoiseMultiplier()] = 0.0
    """noise multiplier Z = σ/S of the Gaussian noise on all releases; needs a clip"""
    placement: Annotated[str, OneOf(AUTO, LOCAL, "central", DISTRIBUTED)] = AUTO
    """party that adds the noise of updates: local (each client), central (a trusted server, before
    its protocol sees anything) or distributed (each client a share of it, in secure sums); auto is
    distributed where updates leave in such sums alone, and local otherwise
    """
    dp_unit: Annotated[str, OneOf("client", "example")] = "client"
    """unit of privacy: client (all data of one client) or example (one sample of one client: DP-SGD
    in local training); ε bounds how well a run with its data, and one with blanks in their place,
    can be told apart, while numbers of samples and who takes part are public
    """
    loss_clip: Annotated[float | None, Number(*CLIP_BOUNDS, high_in=True), IN_PYTHON] = None
    """bound B of a sample's loss where losses are released with noise; None is 1.5·ln(classes)
    nats, of positions 0.25
    """
    loss_noise: Annotated[float, Number(SMALLEST_RATIO, 1e6, high_in=True), IN_PYTHON] = 1.0
    """noise multiplier of losses that are released, over that of training; below 1, losses get a
    larger share of ε
    """
    cluster_noise: Annotated[float, Number(SMALLEST_RATIO, 1e6, high_in=True)] = 1.0
    """with target_epsilon, noise multiplier of signatures and of Gram matrices, over that of
    training; below 1, what clusters follow from gets a larger share of ε
    """
    scale_noise: Annotated[float | None, Number(SMALLEST_RATIO, 1e6, high_in=True), IN_PYTHON] = (
        None
    )
    """noise multiplier of the sums by which a run finds a shared scale of features, over that of
    training; None spends about a tenth of the budget on them
    """
    target_epsilon: Annotated[float | None, Number(0, low_in=False)] = None
    """before the run starts, find the smallest noise with which the whole run costs at most this ε
    for one dp_unit; ε is stated against blanks in place of its data, and is larger against any
    other data, which the report states, too
    """
    delta: Annotated[float, Number(0, 1, low_in=False)] = 1e-5
    """δ of (ε, δ)"""

    stand_ins: ClassVar[bool] = False
    """Whether clients are stand-ins, which release nothing real, at the noise multiplier 1."""
    estimates: ClassVar[bool] = False
    """Whether the noise for a target is an estimate, by which options are compared before a run."""

    def check(self, method: Method, clients: int) -> None:
        """Check the options of differential privacy.

        Args:
            method: whose options they are.
            clients: m.

        Raises:
            UsageError: options that are out of range, or that do not go together.
        """
        self._check_combinations(getattr(method, "average", "uniform"))

    def _check_combinations(self, average: str) -> None:
        """Raise UsageError for options that do not go together.

        Args:
            average: "weighted" where updates are weighted by numbers of samples.
        """
        if self.noise and self.target_epsilon is not None:
            raise UsageError(
                "--noise and --target-epsilon both say how much noise there is: give one of them"
            )
        if self.noise and self.clip is None:
            raise UsageError("noise without a clip bounds nothing: give the clip norm too (--clip)")
        if self.per_client and average == "weighted":
            raise UsageError(
                "a clipped update counts as much as any other, since its weight would reveal "
                "|D_i|: take average uniform"
            )
        if self.placement not in (AUTO, LOCAL) and self.dp_unit == "example":
            raise UsageError(
                "with dp_unit example clients train with noise, so it is theirs: leave the "
                "placement local, or take dp_unit client"
            )

    @property
    def noisy(self) -> bool:
        """Return whether updates, or the local training that they result from, have noise."""
        return self.noise > 0 or self.target_epsilon is not None

    @property
    def per_example(self) -> bool:
        """Return whether local training is DP-SGD."""
        return self.dp_unit == "example" and self._clipped

    @property
    def per_client(self) -> bool:
        """Return whether updates are clipped before they leave."""
        return self.dp_unit == "client" and self._clipped

    @property
    def _clipped(self) -> bool:
        """Return whether there is a clip norm, which a target has by default."""
        return self.clip is not None or self.target_epsilon is not None

    def placed(self, method: Method) -> str:
        """Return who adds the noise of updates: local, central or distributed.

        By default the noise is distributed where that is possible, since a secure sum has the noise
        of one release then, and with local noise that of as many releases as it has clients.

        Args:
            method: whose options they are.
        """
        if self.placement != AUTO:
            return self.placement
        if self.noisy and self.per_client and method.sums.refusal_of_shares(method) is None:
            return DISTRIBUTED
        return LOCAL

    def settled(self, method: Any, facts: Facts) -> Any:
        """Return the method with all options, of which a target ε chooses those not given.

        Args:
            method: whose options they are.
            facts: of the clients and their data.

        Returns:
            The method itself where it has no target, or its options were chosen before.
        """
        from securecluster.protocols.common.options.target_defaults import chosen_for

        if self.target_epsilon is None or self.stand_ins or CHOSEN in vars(method):
            return method
        chosen = chosen_for(method, facts)
        if facts.shares_scale and self.scale_noise is None:
            made = with_chosen(method, chosen)
            chosen[SCALE_NOISE] = made.privacy.scale_ratio(made, facts)
        return with_chosen(method, chosen)

    def scale_ratio(self, method: Method, facts: Facts) -> float:
        """Return the noise multiplier of the sums of a shared scale over that of training.

        Args:
            method: whose options they are.
            facts: of the clients and their data.
        """
        begun = vars(method).get(BEGUN, {})
        given = begun.get(SCALE_NOISE, self.scale_noise)
        if given is not None:
            return float(given)
        # what training costs, in releases of everything
        trained = float(method.total_rounds)
        if self.per_example:
            sizes = training_sizes(method, facts)
            samples = sum(sizes) / len(sizes)
            trained *= method.training.epochs * min(1.0, method.training.batch_size / samples)
        return math.sqrt((1 - SCALE_SHARE) / (SCALE_SHARE * trained))

    def adds_noise(self, config: Mapping[str, Any]) -> bool:
        """Return whether updates, or the local training that they result from, have noise.

        Args:
            config: what clients and server agreed on.
        """
        return config["noise"] > 0 or self.target_epsilon is not None

    def stages(self, config: Mapping[str, Any]) -> tuple[Stage, ...]:
        """Return the stages that an update passes before its mask.

        Args:
            config: what clients and server agreed on.
        """
        if not self.per_client:
            return ()
        noise = config["noise"]
        clip = Clip(config["clip"], nonfinite_as_zeros=bool(noise))
        # Under central placement the trusted server adds the noise, and under distributed placement
        # it is added to the integers of secure sums, after the mask.
        if noise and config["placement"] == LOCAL:
            return (clip, Noise(config["clip"], noise))
        return (clip,)

    def client_noise(self, config: Mapping[str, Any], draws: NoiseStreams) -> ClientNoise:
        """Return the noise of what clients release by themselves, outside the pipeline.

        Args:
            config: what clients and server agreed on.
            draws: the clients' streams of noise.
        """
        from securecluster.privacy.dp.client_noise import ClientNoise

        return ClientNoise(
            config["dp_unit"],
            float(config["clip"] or 0),
            float(config["noise"]),
            float(config["loss_clip"]),
            draws,
            float(config["loss_noise"]),
        )

    def sum_noise(
        self, config: Mapping[str, Any], draws: NoiseStreams | None = None
    ) -> SkellamMechanism | None:
        """Return the noise that clients add to secure sums in shares; None without any.

        Args:
            config: what clients and server agreed on.
            draws: the clients' streams of noise; None at the server.
        """
        if not (self.per_client and config["noise"] and config["placement"] == DISTRIBUTED):
            return None
        from securecluster.privacy.dp.skellam_mechanism import SkellamMechanism

        survivors = survivors_of(config)
        return SkellamMechanism(config["clip"], config["noise"], survivors, draws)

    def row_noises(self, method: Method, config: Mapping[str, Any]) -> dict[str, RowNoise]:
        """Return the clip norm and noise of fields whose rows are not updates, by field.

        The party that adds the noise of updates adds this noise as well. It is empty in runs
        without noise.

        Args:
            method: whose options they are.
            config: what clients and server agreed on.
        """
        return {}

    def row_stages(self, noise: RowNoise, config: Mapping[str, Any]) -> tuple[Stage, ...]:
        """Return the stages of a field's rows at their client.

        Args:
            noise: the field's clip norm and noise.
            config: what clients and server agreed on.
        """
        clip = Clip(noise.norm, nonfinite_as_zeros=True)
        if config["placement"] == LOCAL:
            return (clip, Noise(noise.norm, noise.multiplier))
        return (clip,)

    def training(self, plan: LocalTraining, config: Mapping[str, Any]) -> LocalTraining:
        """Return hyper-parameters of local training, with DP-SGD where the run uses it.

        Args:
            plan: the hyper-parameters without privacy.
            config: what clients and server agreed on.
        """
        if not self.per_example:
            return plan
        clip = float(config["clip"])
        noise = float(config["noise"])
        return replace(plan, clip=clip, noise=noise)

    def resolved(self, method: Method, facts: Facts, known: Mapping[str, Any]) -> dict[str, Any]:
        """Return the bound of a loss, the noise and who adds it, and public numbers of samples.

        The noise multiplier is the hyper-parameter, or the smallest one with which every client
        stays within `target_epsilon`.

        Args:
            method: whose options they are.
            facts: of the clients and their data.
            known: what is resolved already.
        """
        sizes = training_sizes(method, facts) if self.needs_samples(method) else []
        noise = float(self.noise)
        if self.target_epsilon is not None:
            noise = self.smallest_noise(method, facts, sizes)
        if self.loss_clip is None:
            loss_clip = facts.objective.loss_bound(facts.classes)
        else:
            loss_clip = float(self.loss_clip)
        resolved: dict[str, Any] = {
            "loss_clip": loss_clip,
            "noise": noise,
            "placement": self.placed(method),
        }
        if self.per_example and self.noisy:
            resolved["sizes"] = sizes  # public, as the price of DP-SGD assumes
        if facts.shares_scale:
            resolved[SCALE_NOISE] = self.scale_ratio(method, facts) if noise else 1.0
        return resolved

    def agreed(self, method: Method, facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration, without a ratio of noise that changes nothing.

        Args:
            method: whose options they are.
            facts: of the clients and their data.
            config: the configuration, with defaults resolved.
        """
        if self.cluster_noise == 1.0:
            del config["cluster_noise"]
        if not facts.shares_scale:
            del config[SCALE_NOISE]
        return config

    def equip(self, method: Method, config: Mapping[str, Any], client: TrainingClient) -> None:
        """Give clients the noise multiplier of the sums of a shared scale."""
        client.scale_noise = float(config.get(SCALE_NOISE, 1.0))

    def releases(self, method: Method, facts: Facts, clients: int) -> RunReleases:
        """Return what a client releases in a whole run, at the noise multiplier 1.

        Args:
            method: whose options they are, with a target.
            facts: of the clients and their data.
            clients: number of the run's clients.
        """
        from securecluster.parties.dry_run import run_releases

        if facts.shares_scale:  # stand-ins have other numbers of samples
            ratio = {SCALE_NOISE: self.scale_ratio(method, facts)}
            method = type(method)(**{**method.get_params(), **ratio})
        return run_releases(method, facts, clients)

    def smallest_noise(self, method: Method, facts: Facts, sizes: Sequence[int]) -> float:
        """Return the smallest noise multiplier with which every client stays within the target.

        Args:
            method: whose options they are.
            facts: of the clients and their data.
            sizes: number of samples that each client trains on.
        """
        if self.stand_ins:
            return 1.0
        releases = self.releases(method, facts, facts.clients)
        assert self.target_epsilon is not None
        target = float(self.target_epsilon)
        if self.estimates:
            return _estimated_noise(releases, sizes, target, float(self.delta))
        if releases.summed:
            steps = releases.plan(1.0).steps
            return _smallest_sum_noise(releases.summed, steps, target, float(self.delta))
        counted = sizes if releases.trains else [0]
        units = {releases.plan(1.0, n).steps for n in counted}
        if not any(units):
            # Nothing is released: what clients keep has the noise of one release.
            units = {((1.0, 1.0, 1),)}
        # Sorted, so that equal sets of histories have one cache entry.
        return _smallest_noise(tuple(sorted(units)), target, float(self.delta))

    def needs_samples(self, method: Method) -> bool:
        """Return whether numbers of samples are public, as the price of DP-SGD assumes.

        Args:
            method: whose options they are.
        """
        return self.per_example and self.noisy

    @property
    def holds_target(self) -> bool:
        """Return whether releases are held to a target ε."""
        return self.target_epsilon is not None and not self.stand_ins

    def for_stand_ins(self) -> Self:
        """Return these options for a run of stand-ins."""
        made = replace(self)
        vars(made)["stand_ins"] = True
        return made

    def for_estimates(self) -> Self:
        """Return these options for runs that are only compared."""
        made = replace(self)
        vars(made)["estimates"] = True
        return made


def _estimated_noise(
    releases: RunReleases, sizes: Sequence[int], target: float, delta: float
) -> float:
    """Return about the noise that `PrivacyOptions.smallest_noise` finds.

    Args:
        releases: of a client.
        sizes: number of samples that each client trains on.
        target: ε.
        delta: δ.
    """
    from securecluster.privacy.dp.accounting import estimated_noise

    sums = tuple((multiplier, 1.0, count) for multiplier, count in releases.summed)
    counted = sizes if releases.trains else [0]
    units = {releases.plan(1.0, n).steps + sums for n in counted}
    if not any(units):
        units = {((1.0, 1.0, 1),)}
    return estimated_noise([partial(_scaled, unit) for unit in units], target, delta)


@lru_cache(maxsize=64)
def _smallest_sum_noise(
    sums: tuple[tuple[float, int], ...], others: tuple[Step, ...], target: float, delta: float
) -> float:
    """Return the smallest z with which sums with Skellam noise, and more, cost at most the target.

    Args:
        sums: the sums that a client's rows are in: their noise multiplier over z, and their number.
        others: its other releases at z = 1.
        target: ε.
        delta: δ.
    """
    from securecluster.privacy.dp.accounting import find_skellam_noise, skellam_epsilon
    from securecluster.privacy.dp.skellam_mechanism import least_release

    def cost(z: float) -> float:
        releases = [(least_release(z * factor), count) for factor, count in sums]
        return skellam_epsilon(_scaled(others, z), releases, delta).epsilon

    return float(find_skellam_noise(cost, target, delta))


@lru_cache(maxsize=64)
def _smallest_noise(units: tuple[tuple[Step, ...], ...], target: float, delta: float) -> float:
    """Return the smallest z with which the releases of every unit cost at most the target.

    Args:
        units: releases at z = 1, one history for each kind of client.
        target: ε.
        delta: δ.
    """
    from securecluster.privacy.dp.accounting import find_noise_for_all

    histories = [partial(_scaled, unit) for unit in units]
    return float(find_noise_for_all(histories, target, delta))


def _scaled(unit: tuple[Step, ...], z: float) -> list[Step]:
    """Return a history with all noise multipliers times z."""
    return [(z * multiplier, rate, steps) for multiplier, rate, steps in unit]
