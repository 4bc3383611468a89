"""What an observer measures of the clients of a run, wherever these are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.metrics import agreement, share_at, spread
from securecluster.parties.method import Method
from securecluster.runtime.run import Line
from securecluster.runtime.settings import Settings

if TYPE_CHECKING:
    from securecluster.data.federation import Federation


class ObservedClients(ABC):
    """Clients of a run that an observer measures.

    Measurements lie outside the protocol, and need the server's state beside the clients' data.

    Args:
        method: with the hyper-parameters of the run.
        federation: the clients and their data.
        settings: of the run.
    """

    def __init__(self, method: Method, federation: Federation, settings: Settings) -> None:
        self.method = method
        self.federation = federation
        self.settings = settings

    @property
    @abstractmethod
    def observed(self) -> Any:
        """Return the clients' object, or what stands in for it, as observers read it."""

    @abstractmethod
    def evaluate(self, state: Any) -> NDArray[np.float64]:
        """Return each client's score after a round, (m,).

        Args:
            state: the server's state.
        """

    def observe(self, state: Any) -> Line:
        """Return the observer's numbers after a round.

        Args:
            state: the server's state.
        """
        scores = self.evaluate(state)
        line = dict(self.method.observer.observe(self.federation, self.observed, state, scores))
        line |= spread(scores)
        line["at_target"] = None
        if self.federation.objective.higher:
            line["at_target"] = share_at(scores, self.settings.target)
        return line

    def labels(self, state: Any) -> list[int]:
        """Return each client's cluster, (m,), as the experimenter knows it.

        Args:
            state: the server's final state.
        """
        return self.method.observer.known_labels(self.observed, state)

    def agreement(self, labels: list[int]) -> dict[str, Any] | None:
        """Return scores against the true clusters; None where nobody knows these.

        Args:
            labels: each client's cluster, (m,).
        """
        # Files of one's own data have no true clusters to be compared with.
        if self.federation.truth is None:
            return None
        return dict(agreement(labels, self.federation.truth))
