"""Differential privacy as every method has it.

The module has the options, what they do to replies, and what releases cost.

Unit "client": what leaves is clipped and noised on its way, and updates count the same. Unit
"example": training itself is DP-SGD, and what leaves is made of its results. The noise of losses,
Gram matrices and single layers is the methods' own (`multipliers`).
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
from securecluster.privacy.pipeline import Pipeline, Stage
from securecluster.runtime.release_accounting import ReleaseAccounting
from securecluster.training.config import FULL_GRADIENT
from securecluster.training.local_trainer import LocalTraining

# of clip norms: single precision holds what noise multiplies them to, with its last bits
BOUNDS = (
    1e-12,
    1e9,
)
History = list[tuple[float, float, int]]


@dataclass(frozen=True)
class ReleaseCounts:
    """How often a client releases something at most, in a whole run."""

    updates: int = 0
    """rows that are clipped and noised on their way"""
    losses: int = 0
    """rows of losses"""
    gram: int = 0
    trainings: int = 0
    """local trainings, for DP-SGD"""
    full: int = 0
    """those by one step over all samples"""


@dataclass(kw_only=True)
class DPOptions(ABC):
    """The options of differential privacy."""

    rounds: int  # these are every protocol's, and are listed before those of privacy
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
    """clip norm S: of each update that leaves its client, or, with dp_unit example, of each
    example's gradient
    """
    noise: float = 0.0
    """noise multiplier Z = σ/S of the Gaussian noise on whatever is released; needs a clip"""
    placement: str = "local"
    """who adds the noise of updates: local (each client) or central (a trusted server, before its
    protocol sees anything)
    """
    dp_unit: str = "client"
    """what is protected: client (all data of one) or example (one sample of one client: DP-SGD in
    local training)
    """
    loss_clip: float | None = None
    """bound B of a sample's loss where losses are released with noise; None is 1.5·ln(classes)
    nats, of positions 0.25
    """
    target_epsilon: float | None = None
    """find the least noise with which the whole run costs at most this ε, for its dp_unit, before
    it starts
    """
    delta: float = 1e-5
    """δ of (ε, δ)"""

    def check_private(self) -> None:
        """Raise UsageError for options of differential privacy that do not go together."""
        check_choice(self, placement=("local", "central"), dp_unit=("client", "example"))
        for name in ("clip", "loss_clip"):
            if getattr(self, name) is not None:
                check_number(self, name, *BOUNDS, high_in=True)
        if self.target_epsilon is not None:
            check_number(self, "target_epsilon", 0, low_in=False)
        check_noise(self, "noise")
        check_number(self, "delta", 0, 1, low_in=False)
        if self.noise and self.target_epsilon is not None:
            raise UsageError(
                "noise and target_epsilon both say how much noise there is: give one of them"
            )
        if self.noisy and self.clip is None:
            raise UsageError("noise without a clip bounds nothing: give the clip norm too (--clip)")
        if self.per_client and getattr(self, "average", "uniform") == "weighted":
            raise UsageError(
                "a clipped update counts as much as any other, since its weight would tell |D_i|: "
                "take average uniform"
            )
        if self.placement == "central" and self.dp_unit == "example":
            raise UsageError(
                "with dp_unit example clients train with noise, so it is theirs: leave the "
                "placement local, or take dp_unit client"
            )

    @property
    def noisy(self) -> bool:
        """Whether updates, or the training behind them, have noise."""
        return self.noise > 0 or self.target_epsilon is not None

    @property
    def per_example(self) -> bool:
        """Whether local training is DP-SGD."""
        return self.dp_unit == "example" and self.clip is not None

    @property
    def per_client(self) -> bool:
        """Whether updates are clipped on their way."""
        return self.dp_unit == "client" and self.clip is not None

    def releases(self) -> ReleaseCounts:
        """Upper bounds, from which `target_epsilon` finds the noise."""
        return ReleaseCounts(updates=self.rounds, trainings=self.rounds)

    def multipliers(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Return noise multipliers of reply fields that do not go through the pipeline's noise.

        A field that holds nothing new, or something public, has an infinite one.
        """
        trained = self.per_example and config["noise"] > 0
        return {"delta": math.inf, "size": math.inf} if trained else {}

    def replacement_factors(self) -> dict[str, float]:
        """Return the sensitivity to replacing the unit of privacy, by reply field.

        The value is the ratio to the sensitivity to adding or removing the unit. Fields for which
        it is 2 are left out.
        """
        return {}

    def stages(self, config: Mapping[str, Any]) -> tuple[Stage, ...]:
        """What an update goes through before its mask."""
        if not self.per_client:
            return ()
        own = (
            (Noise(config["clip"], config["noise"]),)
            if config["noise"] and config["placement"] == "local"
            else ()
        )
        return (Clip(config["clip"], nonfinite_as_zeros=bool(config["noise"])), *own)

    def keeps_local_models(self, config: Mapping[str, Any]) -> bool:
        """Return whether models that clients trained alone stay out of the results.

        They do where noise is to cover the results.
        """
        return float(config["noise"]) > 0

    def guard(self, config: Mapping[str, Any], draws: NoiseStreams) -> ClientNoise | None:
        """What clients need for noise of their methods' own."""
        if not (config["clip"] and config["noise"]):
            return None
        return ClientNoise(
            config["dp_unit"],
            float(config["clip"]),
            float(config["noise"]),
            float(config["loss_clip"]),
            draws,
        )

    def private_training(self, plan: LocalTraining, config: Mapping[str, Any]) -> LocalTraining:
        """The same, with DP-SGD where the run has it."""
        return (
            replace(plan, clip=float(config["clip"]), noise=float(config["noise"]))
            if self.per_example
            else plan
        )

    def training(self, config: Mapping[str, Any]) -> LocalTraining:
        """Return what a client does in a round.

        The learning rate and the noise are those that the run goes by.
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
        """The kinds of training that clients' methods name (`Release.trains`)."""
        return {
            "usual": usual,
            "refine": usual,
            "full": self.private_training(FULL_GRADIENT, config),
        }

    def costs(
        self, pipeline: Pipeline, config: Mapping[str, Any], draws: NoiseStreams
    ) -> ReleaseAccounting:
        """What the server knows of the noise, and adds where it is trusted to."""
        known = (
            self.trainings(self.training(config), config)
            if self.per_example and config["noise"]
            else {}
        )
        central = self.per_client and config["noise"] and config["placement"] == "central"
        curator = TrustedCurator(config["clip"], config["noise"], draws) if central else None
        trained = {
            kind: mean([plan.variance(n) for n in config["sizes"]]) for kind, plan in known.items()
        }
        return ReleaseAccounting(
            pipeline, self.multipliers(config), self.replacement_factors(), known, curator, trained
        )

    def history(self, z: float, samples: int, usual: LocalTraining) -> History:
        """Return what a client with so many samples would release at noise multiplier z.

        Releases are given as (multiplier, sampling rate, steps).
        """
        n = self.releases()
        if self.dp_unit == "client":
            return [(z, 1.0, k) for k in (n.updates, n.losses, n.gram) if k]
        own = [
            (z, usual.rate(samples), n.trainings * usual.number(samples)),
            (z, 1.0, n.full),
            (z, 1.0, n.losses),
            (z, 1.0, n.gram),
        ]
        return [entry for entry in own if entry[2]]

    def resolve_noise(
        self, federation: Federation, lr: float, validation_share: float
    ) -> dict[str, Any]:
        """Return the bound of a loss, and the noise multiplier.

        The multiplier is as given, or as `target_epsilon` needs it for the client that releases
        most.
        """
        kind, found = federation.objective, dict[str, Any](noise=float(self.noise))
        sizes = [
            len(shard.y) - math.floor(validation_share * len(shard.y))
            for shard in federation.shards
        ]
        if self.target_epsilon is not None:
            plan = LocalTraining(lr, self.epochs, self.batch_size)
            each = {tuple(self.history(1.0, n, plan)) for n in sizes}
            found = {
                "noise": _least(tuple(sorted(each)), float(self.target_epsilon), float(self.delta))
            }
        if self.per_example and self.noisy:
            found |= {"sizes": sizes}  # public, as the price takes them to be
        return {
            "loss_clip": kind.loss_bound(federation.classes)
            if self.loss_clip is None
            else float(self.loss_clip),
            **found,
        }


@lru_cache(maxsize=64)
def _least(
    units: tuple[tuple[tuple[float, float, int], ...], ...], target: float, delta: float
) -> float:
    """Return the least z with which releases cost at most the target.

    The releases are of multiplier z times those of any of `units`.
    """
    from securecluster.privacy.dp.accounting import find_noise_for_all

    return float(find_noise_for_all([partial(_scaled, unit) for unit in units], target, delta))


def _scaled(unit: tuple[tuple[float, float, int], ...], z: float) -> History:
    return [(z * k, q, steps) for k, q, steps in unit]
