"""What an experiment changes in a run, for research on attacks only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from securecluster.messaging.messages import Call
from securecluster.messaging.outcomes import VerbOutcome
from securecluster.parties.method import Method
from securecluster.runtime.run import Stop

ATTRIBUTE = "_experiment"


@dataclass(frozen=True)
class Experiment:
    """Changes of a run, which `securecluster.attacks.experiments` makes; a folder refuses them.

    Args:
        before_pipeline: what clients do to each reply before it is protected.
        observe_server: called with what each verb gives the server, or a local parameter server.
        observe_authority: called with each R that a key authority decrypts.
        secret: of the run that is repeated; None draws a new one.
        stopped: after which round the run that is repeated was stopped; None if it was not.
    """

    before_pipeline: Callable[[Call, Any], Any] | None = None
    observe_server: Callable[[VerbOutcome], None] | None = None
    observe_authority: Callable[[VerbOutcome], None] | None = None
    secret: bytes | None = None
    stopped: Stop | None = None


def experiment_of(protocol: Method) -> Experiment:
    """Return what an experiment changes in the runs of a protocol; by default nothing."""
    experiment: Experiment = vars(protocol).get(ATTRIBUTE, Experiment())
    return experiment
