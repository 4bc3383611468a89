"""Scores of each client's model on its own test samples, beside those of its baseline.

All are defined as scikit-learn's are, and computed when they are asked for, of what models said at
the end of the run. They are the observer's, outside ε. Those of classes are computed here, since
scikit-learn checks each call anew: the runs of a sweep spent nine tenths of their time there.

A baseline knows its client's training targets alone (`training.baselines`): it is
`DummyClassifier(strategy="prior")`, and of values `DummyRegressor`, by the mean, and by the median
for the mean absolute error. With more than two classes F1 is the macro average, and the area under
the ROC curve and the average precision are means over the classes of the test samples, each against
the rest; with two they are those of the second class. With several labels a sample each score is
the mean over labels. `brier_score` is the mean squared error of probabilities, summed over classes
where there are more than two: the measure of calibration here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError
from securecluster.models.objectives import (
    Binary,
    Classification,
    MultiLabel,
    Objective,
    Regression,
)
from securecluster.results.declared import numbers_of, own_scores
from securecluster.results.fitted_state import FittedState
from securecluster.results.preparation import own_numbers, preparation
from securecluster.training.baselines import KNOWN, OUTPUTS, SIZES, TARGETS, answer, below

Array: TypeAlias = NDArray[Any]
Scores: TypeAlias = dict[str, float]
BASELINE = "baseline"  # end of a column's name, and what stands beside a score
SCORES = (
    "accuracy", "balanced_accuracy", "f1", "roc_auc", "average_precision", "log_loss",
    "brier_score", "r2_score", "mean_absolute_error", "root_mean_squared_error",
)  # fmt: skip
NO_SCORES = (
    "this result has no predictions on test samples: it is a server's, whose clients are nodes "
    "elsewhere, of an earlier version, or of a network without outputs"
)


def has_scores(kept: FittedState) -> bool:
    """Return whether a run measured its models on test samples.

    Args:
        kept: the state at the end of the run.
    """
    return SIZES in kept.clients.extra


def score_rows(kept: FittedState, objective: Objective) -> list[dict[str, Any]]:
    """Return the scores of each client, by name, with `_baseline` for those of its baseline.

    Args:
        kept: the state at the end of the run.
        objective: of the run.

    Returns:
        A row a client: its name, cluster and number of test samples, then the scores; NaN where a
        client has none, as the area under the ROC curve where its test samples have one class.

    Raises:
        UsageError: nobody measured any.
    """
    if not has_scores(kept):
        raise UsageError(NO_SCORES)
    learned = kept.learned
    sizes = kept.clients.extra[SIZES].tolist()
    metric = objective.metric
    rows = []
    for k, name in enumerate(learned.names):
        row = {"client": name, "cluster": learned.labels[k], "samples": sizes[k]}
        rows.append(row | beside({metric: learned.scores[k]}, {metric: learned.baselines[k]}))
    extra = kept.clients.extra
    if OUTPUTS not in extra:
        return rows
    outputs, targets = (torch.split(extra[name], sizes) for name in (OUTPUTS, TARGETS))
    for k, row in enumerate(rows):
        # a module of the user's own may have more outputs than there are any
        parts = Parts(outputs[k][:, : learned.config["classes"]], targets[k], extra[KNOWN][k])
        if objective.kind == Regression.kind:
            parts = parts.restored(preparation(learned.config, own_numbers(kept, k)) or {})
        row |= _of_client(objective, parts)
    return rows


def beside(scores: Scores, baselines: Scores) -> Scores:
    """Return scores by name, each followed by its baseline's.

    Args:
        scores: of a model.
        baselines: of its baseline, by the same names.
    """
    both: Scores = {}
    for name, value in scores.items():
        both |= {name: value, f"{name}_{BASELINE}": baselines[name]}
    return both


def names_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the scores in rows, without those of baselines.

    Args:
        rows: as `score_rows` returns them.
    """
    return [name for name in rows[0] if f"{name}_{BASELINE}" in rows[0]]


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the mean of each score, and of its baseline, over the clients that have it.

    Args:
        rows: as `score_rows` returns them.
    """
    found: dict[str, float | None] = {}
    for name in (n for score in names_of(rows) for n in (score, f"{score}_{BASELINE}")):
        values = [row[name] for row in rows if not np.isnan(row[name])]
        found[name] = float(np.mean(values)) if values else None
    return found


def study_scores(
    kept: FittedState, objective: Objective, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what studies write of a run's scores, beside its metric.

    Args:
        kept: the state at the end of the run.
        objective: of the run.
        fields: report fields of packages, by name.

    Returns:
        The mean baseline of the metric, how many clients' models are worse than theirs, and by name
        the means of further scores, and report fields that are numbers; nothing where nobody
        measured any scores.
    """
    if not has_scores(kept):
        return {}
    rows = score_rows(kept, objective)
    of_all = means(rows)
    learned, metric = kept.learned, objective.metric
    worse = below(objective, np.array(learned.scores), np.array(learned.baselines))
    return {
        f"{metric}_{BASELINE}": of_all[f"{metric}_{BASELINE}"],
        "below_baseline": len(worse),
        "scores": {name: of_all[name] for name in names_of(rows) if name != metric}
        | numbers_of(fields),
    }


class Parts(NamedTuple):
    """What the scores of one client follow from.

    Args:
        outputs: of its model, (n, k).
        targets: of its test samples, (n, …).
        known: of its training targets, as `known_of` returns it.
    """

    outputs: torch.Tensor
    targets: torch.Tensor
    known: torch.Tensor

    def restored(self, numbers: Mapping[str, torch.Tensor]) -> Parts:
        """Return the same in the targets' own units.

        Args:
            numbers: of the client's preparation; without any of targets these have no other scale.
        """
        if "target_width" not in numbers:
            return self
        width, centre = numbers["target_width"], numbers["target_centre"]
        return Parts(*(part.double() * width + centre for part in self))


def _of_client(objective: Objective, parts: Parts) -> Scores:
    """Return the scores of one client beside its baseline's.

    Args:
        objective: of the run.
        parts: of the client.
    """
    y = parts.targets.numpy()
    scored = SCORERS[objective.kind]
    given = _predicted(objective, parts.outputs)

    def of_answer(outputs: torch.Tensor) -> Scores:
        constant = np.broadcast_to(_predicted(objective, outputs[None]), given.shape)
        return scored(y, constant) | own_scores(y, constant)

    baselines = of_answer(answer(objective, parts.known))
    if (
        objective.kind == Regression.kind
    ):  # the mean is best by squares, the median by absolute errors
        absolute = "mean_absolute_error"
        baselines = of_answer(parts.known[0]) | {absolute: baselines[absolute]}
    return beside(scored(y, given) | own_scores(y, given), baselines)


def _predicted(objective: Objective, outputs: torch.Tensor) -> Array:
    """Return probabilities, or values, of outputs (n, k), float64."""
    predicted: Array = objective.predicted(outputs.double()).numpy()
    return predicted


def class_scores(y: Array, shares: Array) -> Scores:
    """Return the scores of probabilities of classes.

    Args:
        y: labels, (n,).
        shares: probability of each class, (n, classes).
    """
    classes = shares.shape[1]
    scores = dict.fromkeys(SCORES[:7], np.nan)
    if not len(y):
        return scores
    scores |= _of_decisions(y, shares.argmax(1), classes)
    # of a model that diverged there are no others
    if classes < 2 or not np.isfinite(shares).all():
        return scores
    smallest = np.finfo(shares.dtype).eps
    given = shares[np.arange(len(y)), y]
    scores["log_loss"] = -np.log(given.clip(smallest, 1 - smallest)).mean()
    is_class = y[:, None] == np.arange(classes)
    # the second of two classes stands for both
    columns = [1] if classes == 2 else list(range(classes))
    errors = is_class[:, columns] - shares[:, columns]
    scores["brier_score"] = np.square(errors).mean(0).sum()
    present = np.unique(y)
    if len(present) > 1:
        columns = [1] if classes == 2 else present.tolist()
        ranked = [_of_ranks(shares[:, c], is_class[:, c]) for c in columns]
        scores["roc_auc"], scores["average_precision"] = np.mean(ranked, axis=0)
    return {name: float(value) for name, value in scores.items()}


def _of_decisions(y: Array, decided: Array, classes: int) -> Scores:
    """Return the scores of decided labels (n,) that follow from the confusion matrix."""
    counts = np.bincount(y * classes + decided, minlength=classes * classes)
    confusion = counts.reshape(classes, classes)
    right = confusion.diagonal()
    true, given = confusion.sum(1), confusion.sum(0)
    occurs = true + given > 0
    harmonic = np.full(classes, np.nan)
    harmonic[occurs] = 2 * right[occurs] / (true + given)[occurs]
    is_present = true > 0
    return {
        "accuracy": right.sum() / len(y),
        "balanced_accuracy": (right[is_present] / true[is_present]).mean(),
        "f1": harmonic[1] if classes == 2 else harmonic[occurs].mean(),
    }


def _of_ranks(shares: Array, is_class: Array) -> tuple[float, float]:
    """Return the area under the ROC curve, and the average precision, of one class.

    The area is the part of pairs of a sample of the class and another one in which the first has
    the larger share, where equal shares count half. The average precision is the mean, over samples
    of the class, of the precision of all samples whose share is no smaller (a step at each share).

    Args:
        shares: of the class, (n,).
        is_class: mask (n,) of its samples: some, and not all.
    """
    inside, outside = np.sort(shares[is_class]), np.sort(shares[~is_class])
    below = np.searchsorted(outside, inside)
    not_above = np.searchsorted(outside, inside, side="right")
    area = (below + not_above).mean() / (2 * len(outside))
    as_large = len(inside) - np.searchsorted(inside, inside)
    precision = as_large / (as_large + len(outside) - below)
    return float(area), float(precision.mean())


def label_scores(y: Array, shares: Array) -> Scores:
    """Return the scores of probabilities of labels, of which a sample may have several.

    Args:
        y: 0 or 1 for each label, (n, L) or (n,) of one.
        shares: probability of each label, (n, L) or (n,).

    Returns:
        Means over the labels that have the score.
    """
    by_label = []
    for truth, share in zip(_columns(y), _columns(shares), strict=True):
        both = np.stack([1 - share, share], axis=1)
        by_label.append(class_scores(truth.astype(np.int64), both))
    found = {}
    for name in SCORES[:7]:
        values = [scores[name] for scores in by_label if not np.isnan(scores[name])]
        found[name] = float(np.mean(values)) if values else np.nan
    return found


def _of_several_labels(y: Array, shares: Array) -> Scores:
    """Return `label_scores` without the accuracy, which is the run's metric, under its name."""
    return {name: value for name, value in label_scores(y, shares).items() if name != "accuracy"}


def value_scores(y: Array, values: Array) -> Scores:
    """Return the scores of predicted values; means over several of a sample.

    Args:
        y: true values, (n,) or (n, k).
        values: predicted ones, of the same size.
    """
    from sklearn import metrics

    scores = dict.fromkeys(SCORES[7:], np.nan)
    truth, given = _columns(y).T, _columns(values).T
    if not len(y) or not np.isfinite(given).all():
        return scores
    scores["mean_absolute_error"] = metrics.mean_absolute_error(truth, given)
    scores["root_mean_squared_error"] = metrics.root_mean_squared_error(truth, given)
    if len(y) > 1:  # of one sample there is no variance
        scores["r2_score"] = metrics.r2_score(truth, given)
    return {name: float(value) for name, value in scores.items()}


def _columns(values: Array) -> Array:
    """Return values of samples (n, …) by column, (k, n)."""
    return np.atleast_2d(values.T)


SCORERS: dict[str, Callable[[Array, Array], Scores]] = {
    Classification.kind: class_scores,
    Binary.kind: label_scores,
    MultiLabel.kind: _of_several_labels,
    Regression.kind: value_scores,
}
