"""Differential privacy of all methods: options, noise of replies, and numbers of releases.

Unit "client": each update is clipped and gets noise before it leaves, and updates have equal
weights. Unit "example": local training is DP-SGD, and clients release its results without further
noise. The noise of losses, Gram matrices and single layers differs by method (`privacy_spec`).
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import fmean as mean
from typing import Any

from securecluster.core.validation import check_choice, check_noise, check_number
from securecluster.data import Federation
from securecluster.errors import UsageError
from securecluster.privacy.dp.client_noise import ClientNoise
from securecluster.privacy.dp.gaussian_mechanism import Clip, Noise, TrustedCurator
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.dp.skellam_mechanism import SkellamMechanism, least_release
from securecluster.privacy.dp.target import Plan
from securecluster.privacy.pipeline import Pipeline, Stage
from securecluster.protocols.common.privacy_spec import (
    FOLLOWS,
    PrivacySpec,
    ReleaseCounts,
    RowNoise,
)
from securecluster.runtime.endpoint import MINIMUM
from securecluster.runtime.release_accounting import ReleaseAccounting
from securecluster.training.config import FULL_GRADIENT
from securecluster.training.local_trainer import LocalTraining

DISTRIBUTED = "distributed"
# Range of clip norms. Single precision represents their products with noise multipliers.
BOUNDS = (1e-12, 1e9)
# Releases of one client, as (noise multiplier, sampling rate, steps).
Releases = tuple[float, float, int]
History = list[Releases]


@dataclass(kw_only=True)
class DPOptions(ABC):
    """Options of differential privacy."""

    # The options of all protocols, declared here so that they are listed before those of privacy.
    rounds: int
    model: Any
    lr: float | None
    epochs: int
    batch_size: int
    optimizer: str
    momentum: float
    keep_momentum: bool
    participation: float
    mask: str
    clip: float | None = None
    """clip norm S of each update that leaves its client, or, with dp_unit example, of each
    example's gradient
    """
    noise: float = 0.0
    """noise multiplier Z = σ/S of the Gaussian noise on all releases; needs a clip"""
    placement: str = "local"
    """party that adds the noise of updates: local (each client), central (a trusted server, before
    its protocol sees anything) or distributed (each client a share of it, in secure sums)
    """
    dp_unit: str = "client"
    """unit of privacy: client (all data of one client) or example (one sample of one client: DP-SGD
    in local training); ε bounds what blanking one tells: it keeps its place and contributes zeros,
    while numbers of samples and who takes part are public
    """
    loss_clip: float | None = None
    """bound B of a sample's loss where losses are released with noise; None is 1.5·ln(classes)
    nats, of positions 0.25
    """
    target_epsilon: float | None = None
    """before the run starts, find the smallest noise with which the whole run costs at most this ε
    for a blanked dp_unit; for a replaced one it costs more, which the report states
    """
    delta: float = 1e-5
    """δ of (ε, δ)"""

    def check_private(self) -> None:
        """Check the options of differential privacy.

        Raises:
            UsageError: options that are out of range, or that do not go together.
        """
        check_choice(
            self, placement=("local", "central", DISTRIBUTED), dp_unit=("client", "example")
        )
        if self.clip is not None:
            check_number(self, "clip", *BOUNDS, high_in=True)
        if self.loss_clip is not None:
            check_number(self, "loss_clip", *BOUNDS, high_in=True)
        if self.target_epsilon is not None:
            check_number(self, "target_epsilon", 0, low_in=False)
        check_noise(self, "noise")
        check_number(self, "delta", 0, 1, low_in=False)
        self._check_combinations()

    def _check_combinations(self) -> None:
        """Raise UsageError for options that do not go together."""
        if self.noise and self.target_epsilon is not None:
            raise UsageError(
                "noise and target_epsilon both say how much noise there is: give one of them"
            )
        if self.noisy and self.clip is None:
            raise UsageError("noise without a clip bounds nothing: give the clip norm too (--clip)")
        if self.per_client and getattr(self, "average", "uniform") == "weighted":
            raise UsageError(
                "a clipped update counts as much as any other, since its weight would reveal "
                "|D_i|: take average uniform"
            )
        if self.placement != "local" and self.dp_unit == "example":
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
        return self.dp_unit == "example" and self.clip is not None

    @property
    def per_client(self) -> bool:
        """Return whether updates are clipped before they leave."""
        return self.dp_unit == "client" and self.clip is not None

    def privacy_spec(self, noise: float) -> PrivacySpec:
        """Return a client's releases, and the noise of fields that the pipeline does not add.

        A method that releases more than an update a round extends it:
        `super().privacy_spec(noise).with_releases(...)`.

        Args:
            noise: Z, the run's noise multiplier, which `target_epsilon` may have found; 0 without
                noise.
        """
        spec = PrivacySpec(
            ReleaseCounts(updates=self.rounds, trainings=self.rounds),
            keeps_local_models=noise > 0,
        )
        if self.per_example and noise > 0:
            # Updates result from DP-SGD, which the ledger counts already, and sizes are public.
            return spec.with_fields(delta=FOLLOWS, size=FOLLOWS)
        return spec

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
        if noise and config["placement"] == "local":
            return (clip, Noise(config["clip"], noise))
        return (clip,)

    def guard(self, config: Mapping[str, Any], draws: NoiseStreams) -> ClientNoise | None:
        """Return what clients need for noise outside the pipeline; None in a run without noise.

        Args:
            config: what clients and server agreed on.
            draws: the clients' streams of noise.
        """
        if not (config["clip"] and config["noise"]):
            return None
        return ClientNoise(
            config["dp_unit"],
            float(config["clip"]),
            float(config["noise"]),
            float(config["loss_clip"]),
            draws,
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
        return SkellamMechanism(config["clip"], config["noise"], MINIMUM, draws)

    def row_noises(self, config: Mapping[str, Any]) -> dict[str, RowNoise]:
        """Return the clip norm and noise of fields whose rows are not updates, by field.

        The party that adds the noise of updates adds this noise as well. It is empty in runs
        without noise.

        Args:
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
        if config["placement"] == "local":
            return (clip, Noise(noise.norm, noise.multiplier))
        return (clip,)

    def sum_noises(
        self, config: Mapping[str, Any], draws: NoiseStreams | None = None
    ) -> dict[str, SkellamMechanism]:
        """Return the noise of `row_noises` that clients add to secure sums in shares, by field.

        Args:
            config: what clients and server agreed on.
            draws: the clients' streams of noise; None at the server.
        """
        if self.sum_noise(config, draws) is None:
            return {}
        mechanisms = {}
        for name, noise in self.row_noises(config).items():
            mechanisms[name] = SkellamMechanism(noise.norm, noise.multiplier, MINIMUM, draws)
        return mechanisms

    def private_training(self, plan: LocalTraining, config: Mapping[str, Any]) -> LocalTraining:
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

    def training(self, config: Mapping[str, Any]) -> LocalTraining:
        """Return the hyper-parameters of a client's training in a round.

        Args:
            config: what clients and server agreed on, with the resolved learning rate and noise.
        """
        plan = LocalTraining(
            config["lr"],
            self.epochs,
            self.batch_size,
            self.optimizer,
            self.momentum,
            keep_momentum=bool(self.keep_momentum),
        )
        return self.private_training(plan, config)

    def trainings(
        self, usual: LocalTraining, config: Mapping[str, Any]
    ) -> dict[str, LocalTraining]:
        """Return the kinds of training by the name that client methods use (`Release.trains`).

        Args:
            usual: the training of a round.
            config: what clients and server agreed on.
        """
        full = self.private_training(FULL_GRADIENT, config)
        plans = {
            "usual": usual,
            "refine": usual,
            "full": full,
        }
        spec = self.privacy_spec(float(config["noise"]))
        for kind in spec.gradient_trainings:
            plans[kind] = replace(full, lr=config["lr"])
        return plans

    def costs(
        self, pipeline: Pipeline, config: Mapping[str, Any], draws: NoiseStreams
    ) -> ReleaseAccounting:
        """Return the accounting of the noise in replies, for the server.

        Args:
            pipeline: stages of clients' replies.
            config: what clients and server agreed on.
            draws: streams of the noise that a trusted server adds.
        """
        private_trainings: dict[str, LocalTraining] = {}
        if self.per_example and config["noise"]:
            private_trainings = self.trainings(self.training(config), config)
        curator = None
        curators: dict[str, TrustedCurator] = {}
        if self.per_client and config["noise"] and config["placement"] == "central":
            curator = TrustedCurator(config["clip"], config["noise"], draws)
            for name, row_noise in self.row_noises(config).items():
                curators[name] = TrustedCurator(row_noise.norm, row_noise.multiplier, draws)
        # Mean variance of DP-SGD's noise in an update; it depends on a client's number of steps.
        variances = {}
        for name, plan in private_trainings.items():
            variances[name] = mean([plan.variance(n) for n in config["sizes"]])
        fields = self.privacy_spec(float(config["noise"])).fields
        return ReleaseAccounting(
            pipeline,
            fields,
            private_trainings,
            curator,
            variances,
            self.sum_noise(config),
            curators,
            self.sum_noises(config),
        )

    def history(self, z: float, samples: int, usual: LocalTraining) -> History:
        """Return the releases of one client in a whole run, for accounting.

        Args:
            z: noise multiplier.
            samples: number of samples that the client trains on.
            usual: hyper-parameters of its training in a round.

        Returns:
            Releases as (noise multiplier, sampling rate, steps).
        """
        counts = self.privacy_spec(z).releases
        if self.dp_unit == "client":
            releases = [
                (z, 1.0, counts.updates),
                (z, 1.0, counts.losses),
                (z, 1.0, counts.gram),
                (z, 1.0, counts.signatures),
            ]
        else:
            steps = counts.trainings * usual.number(samples)
            releases = [
                (z, usual.rate(samples), steps),
                (z, 1.0, counts.full),
                (z, 1.0, counts.losses),
                (z, 1.0, counts.gram),
                (z, 1.0, counts.signatures),
            ]
        return [release for release in releases if release[2]]

    def planned_releases(self, config: Mapping[str, Any], samples: int | None) -> Plan:
        """Return the releases of one client for which the run's noise was found.

        Args:
            config: what clients and server agreed on.
            samples: number of samples that the client trains on; None where no price depends on
                it.
        """
        z = float(config["noise"])
        if self.placement == DISTRIBUTED:
            plan = self._sum_plan()
            sums = tuple((z * factor, count) for factor, count in plan.sums)
            return Plan(tuple(_scaled(plan.steps, z)), sums)
        return Plan(tuple(self.history(z, samples or 0, self.training(config))))

    def _sum_plan(self) -> Plan:
        """Return the releases of one client under distributed noise at z = 1."""
        counts = self.privacy_spec(1.0).releases
        others = [
            (1.0, 1.0, counts.losses),
            (1.0, 1.0, counts.gram),
            (1.0, 1.0, counts.signatures),
        ]
        released = tuple(release for release in others if release[2])
        sums = ((1.0, counts.updates), *self.other_sums())
        return Plan(released, sums)

    def other_sums(self) -> tuple[tuple[float, int], ...]:
        """Return a client's releases in sums that are not of updates, for `target_epsilon`.

        Returns:
            (noise multiplier over that of updates, number of releases)
        """
        return ()

    def resolve_noise(
        self, federation: Federation, lr: float, validation_share: float
    ) -> dict[str, Any]:
        """Return the bound of a loss, the noise multiplier, and public numbers of samples.

        The noise multiplier is the hyper-parameter, or the smallest one with which every client
        stays within `target_epsilon`.

        Args:
            federation: the clients and their data.
            lr: learning rate.
            validation_share: share of each client's samples that is kept out of training.
        """
        sizes = []
        for shard in federation.shards:
            samples = len(shard.y)
            sizes.append(samples - math.floor(validation_share * samples))
        noise = float(self.noise)
        if self.target_epsilon is not None:
            plan = LocalTraining(lr, self.epochs, self.batch_size)
            histories = {tuple(self.history(1.0, n, plan)) for n in sizes}
            target = float(self.target_epsilon)
            if self.placement == DISTRIBUTED:
                plan_of_sums = self._sum_plan()
                noise = _smallest_sum_noise(
                    plan_of_sums.sums, plan_of_sums.steps, target, float(self.delta)
                )
            else:
                # Sorted, so that equal sets of histories have one cache entry.
                noise = _smallest_noise(tuple(sorted(histories)), target, float(self.delta))
        if self.loss_clip is None:
            loss_clip = federation.objective.loss_bound(federation.classes)
        else:
            loss_clip = float(self.loss_clip)
        resolved: dict[str, Any] = {"loss_clip": loss_clip, "noise": noise}
        if self.per_example and self.noisy:
            resolved["sizes"] = sizes  # public, as the price of DP-SGD assumes
        return resolved


@lru_cache(maxsize=64)
def _smallest_sum_noise(
    sums: tuple[tuple[float, int], ...],
    others: tuple[Releases, ...],
    target: float,
    delta: float,
) -> float:
    """Return the smallest z with which sums with Skellam noise, and more, cost at most the target.

    Args:
        sums: the sums that a client's rows are in: their noise multiplier over z, and their number.
        others: its other releases at z = 1.
        target: ε.
        delta: δ.
    """
    from securecluster.privacy.dp.accounting import find_skellam_noise, skellam_epsilon

    def cost(z: float) -> float:
        releases = [(least_release(z * factor), count) for factor, count in sums]
        return skellam_epsilon(_scaled(others, z), releases, delta).epsilon

    return float(find_skellam_noise(cost, target, delta))


@lru_cache(maxsize=64)
def _smallest_noise(units: tuple[tuple[Releases, ...], ...], target: float, delta: float) -> float:
    """Return the smallest z with which the releases of every unit cost at most the target.

    Args:
        units: releases at z = 1, one history for each kind of client.
        target: ε.
        delta: δ.
    """
    from securecluster.privacy.dp.accounting import find_noise_for_all

    histories = [partial(_scaled, unit) for unit in units]
    return float(find_noise_for_all(histories, target, delta))


def _scaled(unit: tuple[Releases, ...], z: float) -> History:
    """Return a history with all noise multipliers times z."""
    return [(z * multiplier, rate, steps) for multiplier, rate, steps in unit]
