"""The sentence that warns of a run whose models learned nothing, with advice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from securecluster.errors import SecureClusterWarning
from securecluster.statements.cluster_notes import reason_of_noise
from securecluster.training.chance_level import Chance

if TYPE_CHECKING:
    from securecluster.data.federation import Federation
    from securecluster.results.fitted import FittedRun

FEW_ROUNDS = 30  # below this number more rounds may help, and nobody expects clusters yet


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
