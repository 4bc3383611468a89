"""The sentence that warns of models that learned nothing, or are worse than their baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from securecluster.core.number_format import shown
from securecluster.data.feature_columns import listed
from securecluster.errors import SecureClusterWarning
from securecluster.models.objectives import Classification, Language
from securecluster.statements.cluster_notes import reason_of_noise
from securecluster.training.baselines import OUTPUTS, SIZES, TARGETS, below
from securecluster.training.chance_level import ENOUGH_ROUNDS, Chance

if TYPE_CHECKING:
    from securecluster.data.federation import Federation
    from securecluster.results.fitted import FittedRun

FEW_ROUNDS = 30  # below this number more rounds may help, and nobody expects clusters yet
MOST_NAMED = 8  # clients or classes in a sentence
FEWEST = 5  # test samples of a class; that fewer have other answers may be chance


def chance_warning(fitted: FittedRun, chance: Chance, federation: Federation) -> str | None:
    """Return a warning, with advice, if many clients' models learned nothing.

    Args:
        fitted: the result of the run.
        chance: training loss of the clients' models, and that of a model without input.
        federation: the clients and their data.
    """
    from securecluster.models.architectures import rate

    # A few poor clients are usual; the warning is for runs that learned nothing.
    if not chance.notable:
        return None
    method = fitted.method
    # the models are those that clients end with, tuned where they tune them
    rounds = len(fitted.history_) + method.training.tuning(method)
    poor = len(chance.clients)
    lr = float(fitted.kept_.learned.config["lr"])
    task = federation.objective
    default = rate(
        method.training.network(method),
        task,
        federation.classes,
        method.training.optimizer,
        federation.bright,
    )
    # Advise the network's default learning rate, or a lower one where that was used already.
    suggested = default
    # Advice that was followed already helps nobody.
    if default / 2 <= lr <= 1.5 * default:
        suggested = float(f"{lr / 3:.1g}")
    direction = "a higher" if suggested > lr else "a lower"
    advice = [f"{direction} learning rate (--lr {suggested:g} in place of {lr:g})"]
    if method.privacy.noisy:
        advice.append("less noise")
    if rounds < FEW_ROUNDS:
        advice.append("more rounds")
    if method.training.epochs > 1 and suggested < lr:
        advice.append("fewer epochs")
    text = (
        f"after {rounds} rounds the models of {poor} of {chance.tested} clients do no better "
        f"than chance (training loss {chance.loss:.3g}, chance {chance.chance:.3g}): "
        f"try {', or '.join(advice)}{reason_of_noise(fitted, 'training')}"
    )
    # with options as they are written here: in Python, or on the command line
    return str(SecureClusterWarning(text))


def below_baseline(fitted: FittedRun) -> list[int]:
    """Return the positions of clients whose model is worse than their baseline.

    Args:
        fitted: the result of the run.
    """
    baselines = np.asarray(fitted.kept_.learned.baselines, dtype=np.float64)
    if not len(baselines):
        return []
    return below(fitted.network_.objective, fitted.scores_, baselines)


def unfound_warning(fitted: FittedRun) -> str | None:
    """Return a warning of classes that test samples have and that no client's model answers.

    Args:
        fitted: the result of the run.
    """
    kept = fitted.kept_
    extra = kept.clients.extra
    is_classes = fitted.network_.objective.kind == Classification.kind
    if not is_classes or OUTPUTS not in extra or len(fitted.history_) < FEW_ROUNDS:
        return None
    classes = kept.learned.config["classes"]
    answers = set(extra[OUTPUTS][:, :classes].argmax(1).tolist())
    pairs = sorted(Counter(extra[TARGETS].tolist()).items())
    unfound = [f"{fitted.classes_[k]} ({n})" for k, n in pairs if n >= FEWEST and k not in answers]
    if not unfound:
        return None
    return (
        f"no client's model ever answers {listed(unfound, MOST_NAMED)}, of which there are test "
        "samples (in parentheses): try class_weight balanced, or more rounds"
    )


def baseline_warning(fitted: FittedRun, said: Collection[int]) -> str | None:
    """Return a warning of models that are worse than what training labels alone tell, or None.

    Args:
        fitted: the result of the run.
        said: positions of clients that another sentence is about.
    """
    # the frequencies of tokens, which networks take many rounds to learn more than
    is_text = fitted.network_.objective.kind == Language.kind
    clients = [k for k in below_baseline(fitted) if k not in said]
    if not clients or len(fitted.history_) < (FEW_ROUNDS if is_text else ENOUGH_ROUNDS):
        return None
    learned, metric = fitted.kept_.learned, fitted.metric_
    unit = fitted.network_.objective.unit
    sizes = fitted.kept_.clients.extra[SIZES].tolist()
    texts = []
    for k in clients:
        score = shown(learned.scores[k], metric, unit)
        baseline = shown(learned.baselines[k], metric, unit)
        texts.append(f"{learned.names[k]} {score} against {baseline} ({sizes[k]} samples)")
    tested = int(np.isfinite(fitted.scores_).sum())
    return (
        f"on their own test samples the models of {len(clients)} of {tested} clients are worse "
        f"than answers that know their training targets alone: {metric} of "
        f"{listed(texts, MOST_NAMED)}{reason_of_noise(fitted, 'training')}"
    )
