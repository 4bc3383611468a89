"""What a method fills in, and what it may leave as it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.metrics import agreement, mean
from securecluster.data import Federation
from securecluster.errors import UsageError
from securecluster.messaging.messages import FIRST_SEPARATE_STEP, Rows
from securecluster.protocols.common.client import TrainingClient
from securecluster.runtime.run import Line, Run
from securecluster.runtime.server_channel import ServerChannel


class ProtocolHooks(ABC):
    """The server's loop, newcomers, and the researcher's looks at both."""

    name: ClassVar[str]
    client: ClassVar[type[TrainingClient]] = TrainingClient
    scenario: ClassVar[str | None] = None
    """What the command line deals where no scenario is named; None is the data set's default."""
    one_model: ClassVar[bool] = True
    """Whether a client trains one model all the run, so that its momentum can live on."""
    gps: ClassVar[type] = object
    """The global parameter server: what it answers local parameter servers with, where the method
    has some.
    """
    rounds: int

    def __init_subclass__(cls, **rest: Any) -> None:
        """Check that a server's loop says what it returns.

        Raises:
            UsageError: `run_server` has no return annotation.
        """
        super().__init_subclass__(**rest)
        serve = vars(cls).get("run_server")
        if serve is not None and getattr(serve, "__annotations__", {}).get("return") in (
            None,
            "None",
        ):
            raise UsageError(
                f"{cls.__name__}.run_server does not say what it returns: annotate it with its "
                "state's class, -> State"
            )

    @abstractmethod
    def run_server(self, net: ServerChannel, run: Run) -> Any:
        """Run the paper's loop, which is all that the server does.

        Return its final state, which has `labels`.
        """

    @abstractmethod
    def assign_newcomers(self, net: ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        """Return the clusters of newcomers, which are clients that the run never saw.

        They have the numbers `to`, and are asked through verbs.

        Args:
            state: what `run_server` returned.
        """

    def server_view(self) -> list[str]:
        """What the server sees beyond the values of single replies."""
        return []

    def lps_view(self) -> list[str]:
        """Return what a local parameter server sees beyond the values of single replies.

        This is for methods that have local parameter servers.
        """
        return []

    def client_view(self) -> list[str]:
        """What clients see of other clients, beside averages."""
        return []

    def not_covered(self) -> list[str]:
        """What ε does not cover, beyond what holds for every method."""
        return []

    def state_class(self) -> type:
        """The class of what `run_server` returns.

        Raises:
            UsageError: the annotation names no dataclass with labels.
        """
        name = f"{type(self).__name__}.run_server"
        try:
            kind = get_type_hints(type(self).run_server)["return"]
        except NameError as error:
            raise UsageError(
                f"{name} is annotated with a class that is not there: {error}"
            ) from None
        fields = getattr(kind, "__dataclass_fields__", None)
        if fields is None or not ("labels" in fields or hasattr(kind, "labels")):
            told = getattr(kind, "__name__", kind)
            raise UsageError(
                f"{name} returns {told}: it must be a dataclass with labels, each client's "
                "cluster, and an outbox"
            )
        return kind  # type: ignore[no-any-return]

    def final_state(self, net: ServerChannel, run: Run) -> Any:
        """Run the server's loop, and return its final state.

        Raises:
            UsageError: `run_server` returned something else than it declares.
        """
        kind, state = self.state_class(), self.run_server(net, run)
        if isinstance(state, kind):
            return state
        told = "nothing" if state is None else f"a {type(state).__name__}"
        name = type(self).__name__
        raise UsageError(
            f"{name}.run_server returned {told}, and declares a {kind.__name__}: end it with "
            "`return state`"
        )

    def shared_facts(self, federation: Federation) -> dict[str, Any]:
        """What client and server must agree on besides the hyper-parameters."""
        return {}

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Return the sizes that bound what frames of a run may hold.

        They go by the names that messages declare. Every client and the server derive them from the
        configuration. A method whose messages name further sizes adds them.

        Args:
            config: what clients and server agreed on.
        """
        clients, total = int(config["clients"]), int(self.total_rounds)
        calls = (4 * clients + 64) * (total + 2)  # more than any method makes, repetitions included
        averages = 2 * (total + clients) + 4
        return {
            "clients": clients,
            "dimension": int(config["dimension"]),
            "rounds": total + 1,  # what follows the loop belongs to one more
            "steps": FIRST_SEPARATE_STEP + calls,
            "averages": averages,
            "restarts": 0,
        }

    @property
    def weighted(self) -> bool:
        """Whether clients tell how many samples they hold."""
        return False

    @property
    def validation_share(self) -> float:
        """Return the share of each client's training samples that is kept out of training.

        Models are judged by these samples.
        """
        return 0.0

    @property
    def total_rounds(self) -> int:
        """Lines of the history: one a round."""
        return self.rounds

    @property
    def vectors_per_round(self) -> int:
        """Return about how many rows of d numbers a client and the server exchange in a round.

        They are an update up and an average down.
        """
        return 2

    def models_after_round(self, client: Any, state: Any) -> Rows:
        """Return the model each client would use after this round.

        It is for the observer, which looks outside the network.
        """
        everyone = range(len(client.cohort.ids))
        return client.advanced(everyone, state.outbox.message_for(everyone))  # type: ignore[no-any-return]

    def evaluate(self, client: Any, state: Any) -> NDArray[np.float64]:
        """Return each client's accuracy after this round, (m,).

        For another objective it is the metric of that. Clients without test data have NaN.
        """
        found: NDArray[np.float64] = client.cohort.scores(self.models_after_round(client, state))
        return found

    def final_models(self, client: Any, state: Any) -> Rows:
        """The model each client holds at the end."""
        models: Rows = client.models
        return models

    def shared_models(self, client: Any) -> Any:
        """Return the clusters' models (k, d), where clients go on from these alone.

        Return None where clients' own models tell them.
        """
        return None

    def observe(
        self, federation: Federation, client: Any, state: Any, scores: NDArray[np.float64]
    ) -> Line:
        """The researcher's numbers after a round; `scores` are what `evaluate` found, (m,)."""
        line: Line = {"clusters": len(set(state.labels)), federation.objective.metric: mean(scores)}
        if federation.truth is not None:
            line["ari"] = agreement(state.labels, federation.truth)["ari"]
        return line
