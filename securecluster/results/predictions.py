"""Predictions on samples by the models of a finished run, as plain torch modules."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.data.feature_columns import Columns, names_of, order
from securecluster.data.plausibility import far_doubts
from securecluster.data.scaling import Categories, Scaling
from securecluster.data.user_arrays import in_order_of_x, read_pair
from securecluster.errors import SecureClusterWarning, UsageError
from securecluster.models.objectives import (
    Binary,
    Language,
    MultiLabel,
    Objective,
    Regression,
    Trajectory,
)
from securecluster.parties.method import Method
from securecluster.results.fitted_state import FittedState
from securecluster.training.evaluation import EVALUATED

Config = Mapping[str, Any]
DTYPES = {"float32": np.float32, "float64": np.float64}


def module_with(
    method: Method,
    config: Config,
    objective: Objective,
    state: Mapping[str, Any],
    numbers: Mapping[str, torch.Tensor] | None = None,
) -> torch.nn.Module:
    """Return a new module with given weights, of a network's name or of the user's own class.

    Args:
        method: names the network, or has the user's module, which stays as it is.
        config: of the run.
        objective: of the run.
        state: its `state_dict`.
        numbers: of the preparation of its samples; None for none.

    Returns:
        The module on the CPU, in evaluation mode and in the type of the run's models.
    """
    from securecluster.models.validation import named_module

    if isinstance(method.model, str):
        shape = tuple(config["shape"])
        network = method.training.network(method)
        module = named_module(network, shape, config["classes"], objective)
    else:
        module = copy.deepcopy(method.model).cpu()
    module = module.to(getattr(torch, config["dtype"]))
    module.load_state_dict(state)
    if numbers is not None:
        from securecluster.results.exported_models import Prepared

        module = Prepared(module, numbers, getattr(torch, config["dtype"]))
    return module.eval()


def read_samples(x: Any, kept: FittedState, seen: torch.Tensor | None = None) -> torch.Tensor:
    """Return samples as `module_with` takes them, in the order of the run's features.

    Args:
        x: n samples (n, …): an array, a tensor, or a table, whose columns are found by their names.
        kept: the state at the end of the run.
        seen: the smallest and the largest values that the client trained on (2, k), if known.

    Raises:
        UsageError: samples that are not numbers, or not of the run's shape or columns.
    """
    config = kept.learned.config
    scaling = Scaling.read(config.get("scaling"))
    categories = () if scaling is None else scaling.categories
    names = config.get("feature_names")
    values = _values(x, names, categories)
    shape = tuple(config["shape"]) if scaling is None else scaling.given_shape(config["shape"])
    if values.shape[1:] != shape:
        raise UsageError(
            f"X {values.shape} has samples of shape {values.shape[1:]}, and the run's are "
            f"{shape}: give (n, {', '.join(map(str, shape))})"
        )
    if config["objective"]["kind"] == Language.kind:
        return torch.as_tensor(_tokens(values, config["classes"]))
    # a preparation takes numbers as they are
    converted = values.astype(np.float64 if scaling is not None else DTYPES[config["dtype"]])
    if np.isinf(converted).any() or (np.isnan(converted).any() and not categories):
        raise UsageError("X has a value that is NaN or infinite: clean the samples first")
    doubts = [] if seen is None else far_doubts(values, seen.numpy(), names, categories)
    for doubt in doubts:
        warnings.warn(doubt, SecureClusterWarning, stacklevel=4)
    return torch.as_tensor(converted)


def _values(x: Any, names: Sequence[str] | None, categories: Sequence[Categories]) -> NDArray[Any]:
    """Return samples as an array of numbers (n, …), in the order of the run's features.

    Args:
        x: as for `read_samples`; of a `Table`, other columns are left out.
        names: of the features, if they have some.
        categories: of each of them, where the run fills gaps.
    """
    from securecluster.data.tables.coded import rows
    from securecluster.data.tables.parts import Table, frame_table

    if isinstance(x, Table):
        return rows(x, names or x.names, categories=categories)
    column_names = names_of(x)
    if names is None:
        return _numbers(x)
    if column_names is None:
        warnings.warn(
            "the columns of X have no names: they are taken in the order of the run's features",
            SecureClusterWarning,
            stacklevel=5,
        )
        return _numbers(x)
    # before the numbers: columns that are no features may hold text
    positions = order(column_names, names, "X has other columns than the run's data")
    if categories:
        return rows(frame_table(x), names, categories=categories)
    return _numbers(x)[:, positions]


def outputs_of(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return a module's outputs, a part of the samples at a time to bound memory.

    Args:
        module: in evaluation mode.
        x: samples, (n, …).

    Returns:
        (n, …), without gradients.
    """
    with torch.no_grad():
        return torch.cat([module(part) for part in torch.split(x, EVALUATED)])


def predicted(outputs: torch.Tensor, classes: NDArray[Any], objective: Objective) -> NDArray[Any]:
    """Return the labels, tokens or positions that outputs predict.

    Args:
        outputs: of a network, (n, …).
        classes: label of each output.
        objective: of the run.

    Returns:
        Labels (n,); for text the next token at every place (n, L); for trajectories positions
        (n, k), in units of the area; for a regression numbers (n,), or (n, k) of several targets;
        of several labels 0 or 1 (n, k).
    """
    known = outputs[..., : len(classes)]
    if objective.kind == Trajectory.kind:
        positions: NDArray[Any] = known.numpy()
        return positions
    if objective.kind == Regression.kind:
        numbers: NDArray[Any] = known.numpy()
        return numbers[:, 0] if len(classes) == 1 else numbers
    if objective.kind == MultiLabel.kind:
        return (known > 0).numpy().astype(np.int64)
    if objective.kind == Binary.kind:
        second: NDArray[Any] = classes[(outputs[:, 0] > 0).numpy().astype(np.int64)]
        return second
    labels: NDArray[Any] = classes[known.argmax(-1).numpy()]
    return labels


def probabilities(
    outputs: torch.Tensor, classes: NDArray[Any], objective: Objective
) -> NDArray[Any]:
    """Return the probabilities that outputs give to labels or tokens.

    Args:
        outputs: of a network, (n, …).
        classes: label of each output.
        objective: of the run.

    Returns:
        (n, classes), for text (n, L, classes); they sum to 1 over the last axis, but for several
        labels, each of which has a probability of its own.

    Raises:
        UsageError: positions of trajectories or numbers, which have none.
    """
    if objective.kind == Regression.kind:
        raise UsageError(
            "a number has no probability: predict_samples gives the numbers themselves"
        )
    if isinstance(objective, MultiLabel):
        ones: NDArray[Any] = outputs[..., : len(classes)].double().sigmoid().numpy()
        if objective.one_label:
            ones = ones[:, :1]
            return np.concatenate([1 - ones, ones], axis=1)
        return ones
    if objective.kind == Trajectory.kind:
        raise UsageError(
            "a position has no probability: predict_samples gives the positions themselves"
        )
    # a module of the user's own may have more outputs than there are classes
    shares: NDArray[Any] = outputs[..., : len(classes)].double().softmax(-1).numpy()
    return shares


def score_of(
    outputs: torch.Tensor, y: NDArray[Any], classes: NDArray[Any], objective: Objective
) -> float:
    """Return the run's metric on samples, such as the accuracy.

    Args:
        outputs: of a network, (n, …).
        y: labels as the user calls them (n,), tokens (n, L), positions (n, k), or numbers (n, k)
            in their own units.
        classes: label of each output.
        objective: of the run.

    Raises:
        UsageError: no sample, not one target per sample, or labels that the run does not know.
    """
    if len(y) != len(outputs) or not len(y):
        raise UsageError(
            f"score needs a target for each sample, and at least one: X has {len(outputs)} "
            f"samples and y {len(y)}"
        )
    if objective.one_label:
        labels = y.reshape(len(y), -1)[:, 0]
        unknown = labels[~np.isin(labels, classes)]
        if len(unknown):
            raise UsageError(
                f"the label {str(unknown[0])!r} of y is none of the run's classes "
                f"({', '.join(map(str, classes[:5]))}{' …' if len(classes) > 5 else ''})"
            )
        return float((predicted(outputs, classes, objective) == labels).mean())
    if isinstance(objective, Regression):
        # outputs have the targets' own numbers, whatever scale these were trained on
        objective = Regression()
    targets = torch.as_tensor(y)
    if objective.kind != Language.kind:
        targets = targets.to(outputs)
    scores = objective.scores(outputs, targets).double().numpy()
    return float(objective.judged(scores.mean(keepdims=True))[0])


def read_targets(name: str, x: Any, y: Any, objective: Objective) -> NDArray[Any]:
    """Return the targets in the order of the samples, by index where both have one.

    Args:
        name: of the client whose model is scored, for errors.
        x: samples as the user has them.
        y: their targets as the user has them.
        objective: of the run.
    """
    ordered = in_order_of_x(f"client {name!r}", (x, y), y)
    # samples may be of text and have gaps, which they are prepared for elsewhere
    return read_pair(name, (np.zeros((1, 1)), ordered), Columns(), objective)[1]


def _numbers(x: Any) -> NDArray[Any]:
    """Return samples as an array of numbers (n, …).

    Raises:
        UsageError: text, or rows of unequal lengths.
    """
    # a tensor may have gradients or lie on a GPU
    values = x.detach().cpu() if hasattr(x, "detach") else x
    # sparse matrices (scipy); networks take dense samples
    if hasattr(values, "toarray"):
        values = values.toarray()
    try:
        array = np.asarray(values)
        if array.dtype.kind == "O":
            array = array.astype(np.float64)
    except (TypeError, ValueError):
        array = np.empty(0, "O")
    if array.dtype.kind not in "biuf" or not array.ndim:
        raise UsageError(
            f"X ({type(x).__name__}) is no array of numbers: give samples (n, …) without texts"
        )
    return array


def _tokens(values: NDArray[Any], tokens: int) -> NDArray[np.int64]:
    """Return tokens as int64, after a check that the network knows them.

    Args:
        values: (n, L).
        tokens: size of the vocabulary.

    Raises:
        UsageError: no whole numbers, or tokens outside 0 … tokens − 1.
    """
    if values.dtype.kind not in "iu" or (values < 0).any() or (values >= tokens).any():
        raise UsageError(f"X is text: give tokens, whole numbers in 0 … {tokens - 1}")
    return values.astype(np.int64)
