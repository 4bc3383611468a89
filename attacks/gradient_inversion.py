"""Samples from the gradient of one local step: by division, and by matching gradients.

A first dense layer with a bias computes W x + b, so of one sample ∂L/∂W = (∂L/∂b) xᵀ: the sample
is a quotient (Phong et al. 2018, "Privacy-Preserving Deep Learning via Additively Homomorphic
Encryption", Section 3; Geiping et al. 2020, Proposition 3.1). For other networks, and several
samples, the attacks search for samples whose gradient is the observed one: by squared distance with
L-BFGS (Zhu et al. 2019, DLG), with the label read from the last bias (Zhao et al. 2020, iDLG), and
by cosine with a total variation penalty (Geiping et al. 2020).

L-BFGS needs a loss that is smooth in the sample: DLG's authors replace ReLU by sigmoids. Cosine
matching uses signs of gradients, and does with ReLU, too.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np

from securecluster.attacks.arrays import Array
from securecluster.attacks.base import (
    MASK,
    NO_LABELS,
    SUMS,
    Attack,
    Guess,
    Harm,
    Knowledge,
    Scorer,
    Truth,
    View,
)
from securecluster.attacks.gradient_matching import (
    MOST_SAMPLES,
    GradientProblem,
    guessed_labels,
    lbfgs,
    observed_gradients,
    problems,
    signed_adam,
)
from securecluster.attacks.image_quality import MeanPSNR, MeanSSIM, ShareRecognised
from securecluster.attacks.label_counts import NO_BIAS, last_bias, mean_prediction
from securecluster.attacks.scoring import AgainstOthers
from securecluster.core.lazy_torch import torch

NO_GRADIENTS = (
    "not applicable: clients train by functions over arrays, through which no gradient is taken"
)
NO_STEP = (
    "not applicable: no single update of a first round with one step of SGD over at most "
    f"{MOST_SAMPLES} samples was observed"
)
NEEDS = (
    f"single updates of one step over at most {MOST_SAMPLES} samples, and θ_0; public samples give "
    "the range of values, which is else 0 to 1"
)


class ReadLabels(AgainstOthers):
    """Share of labels that were read rightly on the way, without regard to their order."""

    metric = "share of labels read"

    def others(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> list[int]:
        """Return for each client of a guess any one of the run.

        Args:
            guess: by client.
            truth: of the run.
            draw: source of the clients.
        """
        clients = draw.integers(0, len(truth.federation), len(guess.values))
        return [int(client) for client in clients]

    def compared(self, guess: Guess, truth: Truth, subjects: list[int]) -> Array:
        """Return the share of each client's labels that a client holds, (n,).

        Args:
            guess: by client; its labels are among the details.
            truth: of the run.
            subjects: clients, one for each guess.
        """
        shares = []
        for client, other in zip(guess.values, subjects, strict=True):
            true = truth.label_counts(other)
            read = np.bincount(guess.details["labels"][client], minlength=len(true))
            # the size of the multisets' intersection
            shares.append(np.minimum(read, true).sum() / read.sum())
        return np.asarray(shares)


class GradientInversion(Attack):
    """Base class of attacks that reconstruct the samples behind gradients.

    Attributes:
        further: other scores of the same guess.
    """

    scorer = MeanPSNR()
    reads = ("delta",)
    hidden_by = (MASK, SUMS)
    further: ClassVar[tuple[Scorer, ...]] = (MeanSSIM(), ShareRecognised())


class AnalyticInversion(GradientInversion):
    """The sample of a step over one sample, from the first dense layer's weights and bias."""

    name = "gradient-inversion-analytic"
    learns = "samples of a client themselves"
    harm = Harm.RECORDS
    source = (
        "Phong et al. 2018, Privacy-Preserving Deep Learning via Additively Homomorphic Encryption"
    )
    needs = "single updates of one step over one sample, of a network whose first layer is dense"

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if _first_dense(knowledge) is None:
            return "not applicable: the network's first layer is not a dense one with a bias"
        gradients = observed_gradients(view, knowledge)
        if not any(gradient.samples == 1 for gradient in gradients):
            return (
                "not applicable: no single update of a first round with one step of SGD over one "
                "sample was observed"
            )
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the sample by client.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        name = _first_dense(knowledge)
        assert name is not None
        shape = tuple(knowledge.config["shape"])
        guesses = {}
        for observed in observed_gradients(view, knowledge):
            if observed.samples != 1:
                continue
            parameters = knowledge.parameters(observed.gradient)
            weight = parameters[f"{name}weight"]
            bias = parameters[f"{name}bias"]
            sample = dense_input(weight, bias)
            guesses[observed.client] = sample.view(1, *shape).numpy()
        return Guess("samples", guesses)


def dense_input(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the x for which `bias` xᵀ is nearest to `weight`, (inputs,).

    Args:
        weight: gradient of a dense layer's weights, (outputs, inputs).
        bias: gradient of its bias, (outputs,); zeros give zeros.
    """
    # Least squares over x of ‖weight − bias xᵀ‖²; the clamp keeps a zero gradient from giving NaN.
    smallest = torch.finfo(bias.dtype).tiny
    return bias @ weight / bias.square().sum().clamp_min(smallest)


def _first_dense(knowledge: Knowledge) -> str | None:
    """Return the prefix of the first layer's parameters, or None if it is not dense with a bias."""
    numbers = int(np.prod(knowledge.config["shape"]))
    names = knowledge.network.shapes
    for name, layer in knowledge.network.module.named_modules():
        # containers and activations have no parameters of their own
        if not list(layer.parameters(recurse=False)):
            continue
        if not isinstance(layer, torch.nn.Linear) or layer.bias is None:
            return None
        prefix = f"{name}." if name else ""
        trained = f"{prefix}weight" in names and f"{prefix}bias" in names
        if trained and layer.in_features == numbers:
            return prefix
        return None
    return None


class GradientMatching(GradientInversion):
    """Base class of attacks that search for samples with the observed gradient.

    Args:
        steps: of the search.
        restarts: searches for each client, of which the one with the smallest loss counts.
        seed: of the searches' starts.
    """

    further: ClassVar[tuple[Scorer, ...]] = (MeanSSIM(), ShareRecognised(), ReadLabels())

    def __init__(self, steps: int, restarts: int, seed: int) -> None:
        self.steps = steps
        self.restarts = restarts
        self.seed = seed

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if not knowledge.has_labels:
            return NO_LABELS
        if not knowledge.network.has_gradients:
            return NO_GRADIENTS
        if last_bias(knowledge) is None:
            return NO_BIAS
        if not observed_gradients(view, knowledge):
            return NO_STEP
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the samples by client, with their labels and losses in the details.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        gradients = observed_gradients(view, knowledge)
        # Labels first: searching for them as well makes DLG unstable (Zhao et al. 2020).
        prediction = torch.from_numpy(mean_prediction(knowledge))
        labels = [guessed_labels(gradient, knowledge, prediction) for gradient in gradients]
        by_client = {}
        for gradient, read in zip(gradients, labels, strict=True):
            by_client[gradient.client] = read.numpy()
        samples: dict[int, Any] = {}
        losses: dict[int, float] = {}
        for positions, problem in problems(gradients, labels, knowledge, self.restarts):
            clients = [gradients[k].client for k in positions]
            guesses, values = self._best(problem, clients)
            for client, images, value in zip(clients, guesses, values, strict=True):
                samples[client] = images.numpy()
                losses[client] = value
        details = {"labels": by_client, "losses": losses}
        return Guess("samples", samples, details)

    def _best(
        self, problem: GradientProblem, clients: list[int]
    ) -> tuple[list[torch.Tensor], list[float]]:
        """Return each client's samples (n, …) of the search with the smallest loss, and that."""
        count = problem.labels.shape[1]
        numbers = count * int(np.prod(problem.shape))
        starts = []
        for client in clients:
            # a seed for each client, so that its start does not depend on who else is attacked
            draw = np.random.default_rng([self.seed, client])
            starts.append(draw.normal(0.5, 0.25, (self.restarts, numbers)))
        low, high = problem.bounds
        drawn = torch.from_numpy(np.concatenate(starts))
        start = low + (high - low) * drawn
        rows = self.search(problem, start)
        losses = self.losses(problem, rows).detach()
        values = losses.view(len(clients), self.restarts)
        # a search that diverged is no minimum
        values = torch.where(values.isfinite(), values, torch.inf)
        best = values.argmin(1)
        inside = rows.clamp(low, high)
        images = inside.view(len(clients), self.restarts, count, *problem.shape)
        candidates = []
        smallest = []
        for k, winner in enumerate(best.tolist()):
            candidates.append(images[k, winner])
            value = float(values[k, winner])
            smallest.append(value)
        return candidates, smallest

    @abstractmethod
    def losses(self, problem: GradientProblem, rows: torch.Tensor) -> torch.Tensor:
        """Return the losses of searches, (b,).

        Args:
            problem: of the searches.
            rows: their samples, (b, n).
        """

    @abstractmethod
    def search(self, problem: GradientProblem, start: torch.Tensor) -> torch.Tensor:
        """Return the samples that searches end with, (b, n).

        Args:
            problem: of the searches.
            start: their first samples, (b, n).
        """


class DeepLeakage(GradientMatching):
    """Samples whose gradient is nearest to the observed one, by L-BFGS.

    Args:
        steps: of L-BFGS.
        restarts: searches for each client.
        seed: of the searches' starts.
    """

    name = "gradient-inversion-dlg"
    learns = "samples of a client themselves"
    harm = Harm.RECORDS
    source = (
        "Zhu et al. 2019, Deep Leakage from Gradients; "
        "Zhao et al. 2020, iDLG: Improved Deep Leakage from Gradients"
    )
    needs = NEEDS

    def __init__(self, steps: int = 300, restarts: int = 2, seed: int = 0) -> None:
        super().__init__(steps, restarts, seed)

    def losses(self, problem: GradientProblem, rows: torch.Tensor) -> torch.Tensor:
        """Return the squared distances of gradients, (b,)."""
        return problem.squared_errors(rows)

    def search(self, problem: GradientProblem, start: torch.Tensor) -> torch.Tensor:
        """Return the samples after L-BFGS, (b, n)."""
        return lbfgs(problem.squared_errors, start, self.steps)


class CosineInversion(GradientMatching):
    """Samples whose gradient has the direction of the observed one, and that are smooth images.

    Args:
        steps: of Adam.
        restarts: searches for each client.
        seed: of the searches' starts.
        variation: weight of the total variation.
    """

    name = "gradient-inversion-cosine"
    learns = "samples of a client themselves"
    harm = Harm.RECORDS
    source = (
        "Geiping et al. 2020, Inverting Gradients: How Easy Is It to Break Privacy in Federated "
        "Learning?"
    )
    needs = NEEDS

    def __init__(
        self, steps: int = 800, restarts: int = 1, seed: int = 0, variation: float = 1e-4
    ) -> None:
        super().__init__(steps, restarts, seed)
        self.variation = variation

    def losses(self, problem: GradientProblem, rows: torch.Tensor) -> torch.Tensor:
        """Return 1 − cos of gradients and the weighted total variation, (b,)."""
        return problem.cosine_distances(rows) + self.variation * problem.variation(rows)

    def search(self, problem: GradientProblem, start: torch.Tensor) -> torch.Tensor:
        """Return the samples after Adam on signs of gradients, (b, n)."""

        def losses(rows: torch.Tensor) -> torch.Tensor:
            return self.losses(problem, rows)

        low, high = problem.bounds
        return signed_adam(losses, start, self.steps, 0.1 * (high - low), low, high)
