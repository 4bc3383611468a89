"""The server's part of NSIM before any client is asked: synthetic users, their models, and a
network that tells users' similarity from a layer of two models (Pacheco et al. 2021, Section 3.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.metrics import pearson
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.data import Federation
from securecluster.errors import UpdateError, UsageError, unknown
from securecluster.messaging.messages import Rows
from securecluster.models.objectives import Objective, Trajectory
from securecluster.privacy.dp.gaussian_mechanism import Clip
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.protocols.nsim.client import INITIALIZATIONS, LAYERS, find_layer, initial_models
from securecluster.protocols.nsim.lcss import similarities
from securecluster.protocols.nsim.random_walks import Format, Generator, generated
from securecluster.protocols.nsim.representation_similarity import cca, cka, svcca
from securecluster.protocols.nsim.similarity_model import GRID, LEAST_USERS, Fitted, fit
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

if TYPE_CHECKING:
    from securecluster.models.validation import FlatModel

KERNELS = {"cka": cka, "cca": cca, "svcca": svcca}
ROUNDING = 1e-9


@dataclass
class TrainedSimilarityModel:
    """The network, and Pearson's correlations with the true similarity of synthetic users that it
    never saw: its own, and of kernels.
    """

    fitted: Fitted
    scores: dict[str, float | None]


@dataclass(frozen=True)
class SyntheticUsersConfig:
    """What synthetic users are, and what is learned from them.

    Args:
        users: how many.
        walks: what makes their data, in the declared format `form`.
        radius: up to which two of their positions match.
        layer: of their models, and `start` of training: see `securecluster.protocols.nsim.client`.
        rounds: in which they train alone.
        stride: LCSS compares every so many of their positions.
        grid: how many of the architectures of `GRID`, the first ones, are compared.
        shape: of a sample, what a generator of samples has to keep to; () takes any.
        clip, noise: S and z of the layers that real users hand in: synthetic users' are made alike;
            noise 0 leaves them as they are.
    """

    users: int
    walks: Generator
    form: Format
    radius: float
    layer: str
    start: str
    rounds: int
    stride: int
    grid: int
    shape: tuple[int, ...] = ()
    clip: float = 0.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        for name, word, words in (
            ("layer", self.layer, LAYERS),
            ("init", self.start, INITIALIZATIONS),
        ):
            if word not in words:
                raise unknown(name, word, words)
        if not callable(self.walks):
            raise UsageError(
                f"walks = {self.walks!r} makes no synthetic users: give random, or in Python a "
                "callable"
            )
        for name, value, least in (
            ("local_rounds", self.rounds, 1),
            ("synthetic", self.users, LEAST_USERS),
            ("stride", self.stride, 1),
        ):
            if not (isinstance(value, Integral) and int(value) >= least):
                raise UsageError(
                    f"{name} = {value!r} is not possible: it is a whole number from {least}"
                )
        if isinstance(self.grid, bool) or not (
            isinstance(self.grid, Integral) and 1 <= int(self.grid) <= len(GRID)
        ):
            raise UsageError(
                f"grid = {self.grid!r} architectures cannot be compared: it is a whole number from "
                f"1 to {len(GRID)}"
            )
        if not (isinstance(self.radius, Real) and 0 <= float(self.radius) < np.inf):
            raise UsageError(
                f"radius = {self.radius!r} is no distance: give a finite number from 0, in units "
                "of the area"
            )

    def learned(
        self, flat: FlatModel, plan: LocalTraining, agreed: Mapping[str, Any], draws: Randomness
    ) -> TrainedSimilarityModel:
        """Synthetic data, M_synth, their LCSS, and the network, trained to tell it; `agreed` is
        what everyone knows of the data.
        """
        users = generated(self.walks, self.form, self.users, draws.generator("walks"))
        models = self.trained(
            users, flat, plan, agreed["classes"], agreed["dtype"], draws.integer("training")
        )
        true = true_similarity([y for _, y in users], self.radius, self.stride)
        layer = find_layer(flat, self.layer)
        rows = self._shown(
            layer.rows(models), layer.rows(self._begun(flat, draws.integer("training"))), draws
        )
        fitted = fit(
            rows,
            torch.from_numpy(true),
            Randomness(draws.integer("estimator")),
            grid=GRID[: self.grid],
        )
        told = fitted.predicted.double().numpy()
        scores = correlations(
            told, layer.weights(rows[fitted.unseen]), true[np.ix_(fitted.unseen, fitted.unseen)]
        )
        return TrainedSimilarityModel(
            fitted, {"pearson_pairs": _number(fitted.pearson_pairs), **scores}
        )

    def trained(
        self,
        users: Sequence[tuple[Any, Any]],
        flat: FlatModel,
        plan: LocalTraining,
        classes: int,
        dtype: str,
        seed: int,
    ) -> torch.Tensor:
        """The models of users with samples (x, y), all trained in one batched pass as clients are,
        (u, d).
        """
        own = {f"synthetic {k}": pair for k, pair in enumerate(users)}
        none = {name: (x[:0], y[:0]) for name, (x, y) in own.items()}
        federation = Federation.from_arrays(
            own, test=none, objective=flat.objective, classes=classes, seed=seed
        )
        if self.shape and federation.shape != self.shape:
            raise UsageError(
                f"the generator of synthetic users gives samples of shape {federation.shape}, and "
                f"clients' have {self.shape}"
            )
        # they train with noise where users do; theirs is nobody's secret
        secret = NoiseStreams.derived(Randomness(seed), "synthetic")
        cohort = LocalTrainer(
            federation,
            flat,
            Randomness(seed),
            torch.device("cpu"),
            getattr(torch, dtype),
            secret=secret,
        )
        models = initial_models(cohort, self.start)
        for step in range(1, self.rounds + 1):
            models = models + cohort.train(Rows(models), range(len(users)), plan, step)
        if not bool(models.isfinite().all()):
            raise UpdateError(
                "the models of synthetic users are not finite: lower the learning rate (--lr)"
            )
        return models

    def _begun(self, flat: FlatModel, seed: int) -> torch.Tensor:
        """The weights that synthetic users begin with, (1, d) or (u, d)."""
        if self.start == "common":
            return flat.initial()[None]
        return torch.stack(
            [flat.redrawn(Randomness(seed), "client", i, "start") for i in range(self.users)]
        )

    def _shown(self, rows: torch.Tensor, begun: torch.Tensor, draws: Randomness) -> torch.Tensor:
        """Layers (u, q) as real users hand them in."""
        if not self.noise:
            return rows
        drawn = torch.from_numpy(draws.generator("layer noise").normal(size=rows.shape)).to(rows)
        return (
            begun.to(rows)
            + Clip(self.clip, nonfinite_as_zeros=True).forward(rows - begun.to(rows), 0)
            + self.noise * self.clip * drawn
        )


def check_walks(walks: Any, objective: Objective) -> None:
    """Raise UsageError where synthetic users are to be made by random walks, and clients' data are
    no positions.
    """
    if isinstance(walks, str) and not isinstance(objective, Trajectory):
        raise UsageError(
            "nsim makes synthetic users by random walks, for data that are positions, not for "
            f"{objective.kind}: take such data (--data mobility), or give it a generator of your "
            "own (walks=…), which makes samples of these data"
        )


def true_similarity(targets: Sequence[Any], radius: float, stride: int = 1) -> NDArray[np.float64]:
    """LCSS of users' targets (n_i, …) in the order of time, every `stride`-th of them, of all
    pairs, (m, m).
    """
    return similarities([np.asarray(y).reshape(len(y), -1)[::stride] for y in targets], radius)


def correlations(
    told: NDArray[np.float64],
    layers: NDArray[np.float64],
    true: NDArray[np.float64],
    name: str = "",
) -> dict[str, float | None]:
    """Pearson's correlation of the true similarity (m, m) of users, over all pairs, with what the
    network told, (m, m), and with CKA, mean CCA and SVCCA of the same layers (m, r, c).
    """
    pairs = np.triu_indices(len(true), 1)
    found = {"pearson": told, **{kernel: compare(layers) for kernel, compare in KERNELS.items()}}
    return {
        f"{kernel}{name}": _correlation(matrix[pairs], true[pairs])
        for kernel, matrix in found.items()
    }


def some_pairs(
    told: NDArray[np.float64], true: NDArray[np.float64], most: int = 500
) -> list[list[float]]:
    """[true, told] of some of the pairs of users, evenly spread over all, for a picture."""
    first, second = np.triu_indices(len(true), 1)
    chosen = (
        np.unique(np.linspace(0, len(first) - 1, min(most, len(first))).astype(int))
        if len(first)
        else first
    )
    return np.round(np.stack([true, told], axis=-1)[first[chosen], second[chosen]], 4).tolist()  # type: ignore[no-any-return]


def _correlation(told: NDArray[np.float64], true: NDArray[np.float64]) -> float | None:
    """None where nothing is told: CCA of square layers is 1 for every pair, up to rounding."""
    return _number(pearson(told, true)) if told.size and np.ptp(told) > ROUNDING else None


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value
