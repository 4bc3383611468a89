"""The server's part of NSIM before any client is asked.

The server generates synthetic users, trains their models, and trains a network that predicts users'
similarity from a layer of two models (Pacheco et al. 2021, Section 3.1).

It is a phase (`run.once`) of the server's own draws and the agreed configuration, and replays like
everything else. Synthetic users are trained by the clients' code, plan and number of calls, and
their layers have the same noise.
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
from securecluster.models.objectives import Objective, Trajectory
from securecluster.privacy.dp.gaussian_mechanism import Clip
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.protocols import authoring as fl
from securecluster.protocols.nsim.client import INITIALIZATIONS, LAYERS, find_layer, initial_models
from securecluster.protocols.nsim.lcss import similarities
from securecluster.protocols.nsim.pair_network import PairNetworkConfig
from securecluster.protocols.nsim.random_walks import Format, Generator, generated
from securecluster.protocols.nsim.representation_similarity import cca, cka, svcca
from securecluster.protocols.nsim.similarity_model import GRID, LEAST_USERS, Fitted, fit

if TYPE_CHECKING:
    from securecluster.models.validation import FlatModel

# the paper compares its network with such kernels of the same layers (Figures 1 to 3)
KERNELS = {"cka": cka, "cca": cca, "svcca": svcca}
ROUNDING = 1e-9  # similarities whose range is smaller count as constant


@dataclass
class TrainedSimilarityModel:
    """The similarity model, and its correlations with the true similarity of unseen users.

    Args:
        fitted: the model.
        scores: Pearson's correlations by name, of the model and of kernels of the same layers; None
            where one is undefined.
    """

    fitted: Fitted
    scores: dict[str, float | None]


@dataclass(frozen=True)
class SyntheticUsersConfig:
    """Synthetic users, their training, and the similarity model that is trained on them.

    Args:
        users: number of synthetic users.
        walks: the source of their data, in the declared format.
        form: the declared format.
        radius: two positions match up to this distance, in units of the area.
        layer: of their models; see `securecluster.protocols.nsim.client`.
        start: initial weights; see `securecluster.protocols.nsim.client`.
        rounds: in which they train alone.
        stride: LCSS compares one of so many of their positions.
        grid: number of architectures of `GRID`, the first ones, that are compared.
        shape: of a sample, which a generator of samples must respect; () accepts any.
        clip: S of the layers that real users send, to which synthetic users' are clipped, too.
        noise: z of the layers that real users send; 0 leaves layers as they are.
        networks: number of pair networks whose predictions are averaged.
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
    networks: int = 3

    def __post_init__(self) -> None:
        _check_word("layer", self.layer, LAYERS)
        _check_word("init", self.start, INITIALIZATIONS)
        if not callable(self.walks):
            raise fl.UsageError(
                f"walks = {self.walks!r} makes no synthetic users: give random, or in Python a "
                "callable"
            )
        _check_count("local_rounds", self.rounds, 1)
        _check_count("synthetic", self.users, LEAST_USERS)
        _check_count("stride", self.stride, 1)
        _check_count("networks", self.networks, 1)
        is_count = isinstance(self.grid, Integral) and not isinstance(self.grid, bool)
        if not (is_count and 1 <= int(self.grid) <= len(GRID)):
            raise fl.UsageError(
                f"grid = {self.grid!r} architectures cannot be compared: it is a whole number from "
                f"1 to {len(GRID)}"
            )
        if not (isinstance(self.radius, Real) and 0 <= float(self.radius) < np.inf):
            raise fl.UsageError(
                f"radius = {self.radius!r} is no distance: give a finite number from 0, in units "
                "of the area"
            )

    def learned(
        self,
        flat: FlatModel,
        plan: fl.LocalTraining,
        agreed: Mapping[str, Any],
        draws: fl.Randomness,
    ) -> TrainedSimilarityModel:
        """Generate synthetic users, train their models M_synth, and train the similarity model.

        Args:
            flat: the users' architecture A_u.
            plan: local training of a round.
            agreed: the run's configuration.
            draws: the source of all random numbers.

        Raises:
            UpdateError: a model is not finite.
        """
        users = generated(self.walks, self.form, self.users, draws.generator("walks"))
        seed = draws.integer("training")
        models = self.trained(users, flat, plan, agreed["classes"], agreed["dtype"], seed)
        targets = [y for _, y in users]
        true = true_similarity(targets, self.radius, self.stride)

        layer = find_layer(flat, self.layer)
        initial = layer.rows(self._initial(flat, seed))
        rows = self._released(layer.rows(models), initial, draws)
        fitted = fit(
            rows,
            torch.from_numpy(true),
            fl.Randomness(draws.integer("estimator")),
            grid=GRID[: self.grid],
            networks=self.networks,
        )

        # accuracy on users that took no part in the fit
        predicted = fitted.predicted.double().numpy()
        unseen_layers = layer.weights(rows[fitted.unseen])
        unseen_pairs = np.ix_(fitted.unseen, fitted.unseen)
        scores = correlations(predicted, unseen_layers, true[unseen_pairs])
        scores = {"pearson_pairs": _number(fitted.pearson_pairs), **scores}
        return TrainedSimilarityModel(fitted, scores)

    def trained(
        self,
        users: Sequence[tuple[Any, Any]],
        flat: FlatModel,
        plan: fl.LocalTraining,
        classes: int,
        dtype: str,
        seed: int,
    ) -> torch.Tensor:
        """Train the users' models, in one batched pass as clients are trained.

        Args:
            users: samples (x, y) of each.
            flat: the architecture.
            plan: local training of a round.
            classes: of the targets.
            dtype: of the models.
            seed: of batches, initial weights and noise.

        Returns:
            (u, d)

        Raises:
            UsageError: samples of another shape than the clients'.
            UpdateError: a model is not finite.
        """
        training_data = {}
        no_test_data = {}
        for number, (x, y) in enumerate(users):
            name = str(number)
            training_data[name] = (x, y)
            no_test_data[name] = (x[:0], y[:0])
        federation = fl.Federation.from_arrays(
            training_data, test=no_test_data, objective=flat.objective, classes=classes, seed=seed
        )
        if self.shape and federation.shape != self.shape:
            raise fl.UsageError(
                f"the generator of synthetic users gives samples of shape {federation.shape}, and "
                f"clients' have {self.shape}"
            )
        randomness = fl.Randomness(seed)
        cohort = fl.LocalTrainer(
            federation,
            flat,
            randomness,
            torch.device("cpu"),
            getattr(torch, dtype),
            # they train with noise where users do, but theirs need not be secret
            secret=NoiseStreams.derived(randomness, "synthetic"),
        )
        # the same code, plan and number of calls as those of clients
        models = initial_models(cohort, self.start)
        for step in range(1, self.rounds + 1):
            updates = cohort.train(fl.Rows(models), range(len(users)), plan, step)
            models = models + updates
        if not bool(models.isfinite().all()):
            raise fl.UpdateError(
                "the models of synthetic users are not finite: lower the learning rate (--lr)"
            )
        return models

    def _initial(self, flat: FlatModel, seed: int) -> torch.Tensor:
        """Return the weights that synthetic users begin with, (1, d) or (u, d)."""
        if self.start == "common":
            return flat.initial()[None]
        models = []
        for user in range(self.users):
            models.append(flat.redrawn(fl.Randomness(seed), "client", user, "start"))
        return torch.stack(models)

    def _released(
        self, rows: torch.Tensor, initial: torch.Tensor, draws: fl.Randomness
    ) -> torch.Tensor:
        """Return layers as real users send them: their change clipped, and with noise.

        Args:
            rows: (u, q) layers after training.
            initial: (1, q) or (u, q) layers before training.
            draws: the source of the noise.

        Returns:
            (u, q)
        """
        if not self.noise:
            return rows
        generator = draws.generator("layer noise")
        normal = torch.from_numpy(generator.normal(size=rows.shape)).to(rows)
        # initial weights are public, so only the change from them needs noise
        initial = initial.to(rows)
        clipped = Clip(self.clip, nonfinite_as_zeros=True).forward(rows - initial, 0)
        return initial + clipped + self.noise * self.clip * normal


def _check_word(name: str, word: str, words: Sequence[str]) -> None:
    """Raise UsageError for an option that is not one of some words."""
    if word not in words:
        raise fl.unknown(name, word, words)


def _check_count(name: str, value: object, minimum: int) -> None:
    """Raise UsageError for an option that is no whole number from a minimum."""
    if not (isinstance(value, Integral) and int(value) >= minimum):
        raise fl.UsageError(
            f"{name} = {value!r} is not possible: it is a whole number from {minimum}"
        )


def check_walks(walks: Any, objective: Objective) -> None:
    """Raise UsageError for random walks where clients' data are no positions.

    Args:
        walks: the source of synthetic users, or "random".
        objective: of the clients' data.
    """
    if isinstance(walks, str) and not isinstance(objective, Trajectory):
        raise fl.UsageError(
            "nsim makes synthetic users by random walks, for data that are positions, not for the "
            f"task {objective.kind}: take such data (--data mobility), or give it a generator of "
            "your own (walks=…), which makes samples of these data"
        )


def true_similarity(targets: Sequence[Any], radius: float, stride: int = 1) -> NDArray[np.float64]:
    """Return the LCSS of all pairs of users.

    Args:
        targets: (n_i, …) of each user, in the order of time.
        radius: two targets match up to this distance.
        stride: one of so many targets is compared.

    Returns:
        (m, m) in [0, 1], symmetric.
    """
    sequences = []
    for y in targets:
        # a target is one point, whatever its shape
        flat = np.asarray(y).reshape(len(y), -1)
        sequences.append(flat[::stride])
    return similarities(sequences, radius)


def correlations(
    predicted: NDArray[np.float64],
    layers: NDArray[np.float64],
    true: NDArray[np.float64],
    name: str = "",
) -> dict[str, float | None]:
    """Return Pearson's correlations of similarities with the true one, over all pairs of users.

    The similarities are the model's predictions, and CKA, mean CCA and SVCCA of the same layers.

    Args:
        predicted: (m, m) by the model.
        layers: (m, r, c).
        true: (m, m).
        name: suffix of the keys.

    Returns:
        By name; None where the correlation is undefined.
    """
    pairs = np.triu_indices(len(true), 1)
    similarity = {"pearson": predicted}
    for kernel, compare in KERNELS.items():
        similarity[kernel] = compare(layers)
    scores = {}
    for kernel, matrix in similarity.items():
        scores[f"{kernel}{name}"] = _correlation(matrix[pairs], true[pairs])
    return scores


def some_pairs(
    predicted: NDArray[np.float64], true: NDArray[np.float64], maximum: int = 500
) -> list[list[float]]:
    """Return true and predicted similarity of some pairs of users, for a plot.

    Args:
        predicted: (m, m).
        true: (m, m).
        maximum: number of pairs; they are evenly spread over all.

    Returns:
        [true, predicted] of each pair.
    """
    first, second = np.triu_indices(len(true), 1)
    pairs = len(first)
    chosen = first
    if pairs:
        even = np.linspace(0, pairs - 1, min(maximum, pairs))
        chosen = np.unique(even.astype(int))
    both_values = np.stack([true, predicted], axis=-1)
    values = both_values[first[chosen], second[chosen]]
    return np.round(values, 4).tolist()  # type: ignore[no-any-return]


def _correlation(similarity: NDArray[np.float64], true: NDArray[np.float64]) -> float | None:
    """Return Pearson's correlation; None where similarities are constant.

    CCA of square layers is 1 for every pair, up to rounding.
    """
    if not similarity.size or np.ptp(similarity) <= ROUNDING:
        return None
    return _number(pearson(similarity, true))


def _number(value: float) -> float | None:
    """Return a number, or None in place of NaN."""
    return None if np.isnan(value) else value


def unlearned(width: int, draws: fl.Randomness) -> TrainedSimilarityModel:
    """Return a similarity model that has learned next to nothing, for runs without data.

    Args:
        width: q, numbers in a layer.
        draws: of its weights.
    """
    rows = torch.as_tensor(draws.generator("unlearned").random((LEAST_USERS, width)))
    similarity = torch.eye(LEAST_USERS)
    plan = PairNetworkConfig(steps=1)
    return TrainedSimilarityModel(fit(rows, similarity, draws, grid=(plan,), networks=1), {})
