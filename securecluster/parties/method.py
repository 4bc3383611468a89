"""What a run needs of a method.

Protocols call `carry_out` themselves, so this room lies below theirs, and knows of a method only
what stands here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from securecluster.data import Federation
    from securecluster.data.facts import Facts
    from securecluster.messaging.messages import Rows
    from securecluster.privacy.pipeline import Pipeline
    from securecluster.runtime.run import Line, Run
    from securecluster.runtime.server_channel import ServerChannel
    from securecluster.training.local_trainer import LocalTrainer, LocalTraining


class MethodObserver(Protocol):
    """Figures that the experimenter computes outside the protocol, of all clients' data."""

    @property
    def server_knows_labels(self) -> bool:
        """Return whether the final state has the clients' clusters."""

    @property
    def needs_state(self) -> bool:
        """Return whether the server's state decides which model a client has at the end."""

    def evaluate(self, client: Any, state: Any) -> NDArray[np.float64]:
        """Return each client's score after a round."""

    def observe(
        self, federation: Federation, client: Any, state: Any, scores: NDArray[np.float64]
    ) -> Line:
        """Return the observer's numbers after a round."""

    def known_labels(self, client: Any, state: Any) -> list[int]:
        """Return each client's cluster."""

    def newcomer_labels(self, client: Any, state: Any, labels: list[int]) -> list[int]:
        """Return the clusters of newcomers."""

    def final_models(self, client: Any, state: Any) -> Rows:
        """Return the model that each client has at the end."""

    def kept_models(self, client: Any, state: Any) -> Rows:
        """Return the model that each client keeps, tuned where the run says so."""

    def shared_models(self, client: Any) -> Any:
        """Return the clusters' models where clients continued alone from them."""


class Method(Protocol):
    """A method with its hyper-parameters.

    Attributes:
        name: of the method.
        client: class of the clients' object.
        gps: class of the global parameter server of hierarchical methods.
        fitted_class: class of its results.
        _length: name of the option by which a run goes on when it is given a larger value.
        rounds: number of rounds.
        model: name of the network that clients train, or a module of the user's own.
        training: options of local training.
        mask: name of the mask.
        privacy: options of noise.
        sums: options of sums over clients.
        pairs: options of pairs of clients.
    """

    name: ClassVar[str]
    client: ClassVar[Any]
    gps: ClassVar[type]
    fitted_class: ClassVar[Any]
    _length: ClassVar[str]
    rounds: int
    model: Any
    training: Any
    mask: str
    privacy: Any
    sums: Any
    pairs: Any

    @property
    def total_rounds(self) -> int:
        """Return the number of rounds, each of which has a line in the history."""

    def _unlike_longer(self, longer: Any) -> str | None:
        """Return what a run of this length did otherwise than a longer one; None for nothing."""

    # what both sides agree on

    def get_params(self) -> dict[str, Any]:
        """Return the hyper-parameters by name."""

    def config(self, data: Federation | Facts, dtype: str) -> dict[str, Any]:
        """Return what clients and server must agree on."""

    def pipeline(self, config: Mapping[str, Any]) -> Pipeline:
        """Return the stages between a client's update and the wire."""

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Return the sizes that bound the contents of frames."""

    # clients

    def trainings(
        self, training: LocalTraining, config: Mapping[str, Any]
    ) -> dict[str, LocalTraining]:
        """Return the hyper-parameters of each kind of training."""

    def make_client(
        self, cohort: LocalTrainer, pipeline: Pipeline, config: Mapping[str, Any]
    ) -> Any:
        """Return the clients' object."""

    def dry_runs(self) -> Sequence[Mapping[str, Any]]:
        """Return further hyper-parameters with which a run releases what this one may."""

    # the server

    def run_server(self, net: ServerChannel, run: Run) -> Any:
        """Run the server's loop, and return its final state."""

    def assign_newcomers(self, net: ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        """Return the clusters of newcomers."""

    # the experimenter

    @property
    def observer(self) -> MethodObserver:
        """Return what the experimenter computes outside the protocol."""

    def disclosures(self) -> Any:
        """Return what each party sees beyond the values of single replies."""

    def report_fields(self, state: Any) -> dict[str, Any]:
        """Return entries of result.json that the method adds."""
