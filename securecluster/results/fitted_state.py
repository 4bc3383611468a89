"""What a finished run consists of: the part that may be published, and the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.parties.client_state import ClientState
from securecluster.parties.program import UNKNOWN
from securecluster.privacy import run_secret
from securecluster.protections.occupancy import Occupancy
from securecluster.runtime.channel_state import ChannelState
from securecluster.runtime.run import Line, Stop
from securecluster.runtime.settings import Settings

if TYPE_CHECKING:
    from securecluster.core.client_names import Client
    from securecluster.core.lazy_torch import torch
    from securecluster.messaging.messages import Rows
    from securecluster.models.flat_model import FlatModel
    from securecluster.parties.method import Method
    from securecluster.privacy.dp.ledger import Ledger

# In the clients' extra state: the clusters' models (k, d), where no client's own is one of them.
SHARED = "shared"
# and where clients tuned their models alone at the end: the clusters' models before it, (k, d)
UNTUNED = "untuned"


@dataclass
class FittedSummary:
    """Part of the result without clients' models and keys; it has names, labels and scores."""

    schema: int
    protocol: str
    params: dict[str, Any]
    config: dict[str, Any]  # what clients and server of the run agreed on
    settings: Settings
    names: list[str]
    labels: list[int]
    local: list[int]  # the clients whose final model was trained alone, so that no noise covers it
    history: list[Line]
    bytes: dict[str, Any]
    scores: list[float]  # of the objective, NaN where a client has no test data
    agreement: dict[str, Any] | None
    network: ChannelState
    seconds: float
    device: str
    program: str = UNKNOWN  # digest of the protocol's source as the run began; empty where unknown
    power: dict[str, Any] | None = None  # of a private run's noise, as `PowerCheck.as_json` has it
    named_draws: bool = False  # clients drew by their names; by their positions in versions before
    # what the members of hidden sums moved; None where nobody counts it, on many machines
    occupancy: Occupancy | None = None
    # the same metric of answers that know each client's training targets alone; empty where nobody
    # measures them, on many machines and in versions before
    baselines: list[float] = field(default_factory=list)
    stopped: Stop | None = None  # why it ended before its last round


@dataclass
class FittedState:
    """Complete state of a fitted protocol."""

    learned: FittedSummary
    server: bytes  # the server's final state, packed
    clients: ClientState  # models and secrets, which must stay private
    # of the run, from which keys, masks and noise follow; None where they follow from the seed, or
    # where the folder is without it. In a server's folder it is the server's key, if it has one.
    secret: bytes | None = field(default=None, repr=False)

    @property
    def of_server(self) -> bool:
        """Return whether it is a server's alone, whose clients are nodes elsewhere."""
        return not self.clients.index

    def check_clients(self) -> None:
        """Raise UsageError where clients are nodes elsewhere."""
        if self.of_server:
            raise UsageError(
                "this is a server's result, whose clients are nodes elsewhere: they have their "
                "models and keys themselves"
            )

    @property
    def key(self) -> bytes | None:
        """Return the server's own key, from which its noise follows; None in a simulation."""
        return self.secret if self.of_server else None

    def secrets(self) -> Randomness:
        """Return the secret random streams of a simulated run.

        Those of a server alone are no secret, and a server without a key of its own needs none.

        Raises:
            RunFolderError: the secret was removed from the run's folder.
        """
        if self.learned.settings.keys_from_seed or self.of_server:
            return Randomness(self.learned.config["seed"])
        if self.secret is None:
            raise run_secret.missing(None)
        return run_secret.randomness(self.secret)


class Fitted(Protocol):
    """What saving, export and tables need of a result.

    Attributes are those of `FittedRun`.
    """

    method: Method
    kept_: FittedState
    labels_: NDArray[Any]
    classes_: NDArray[Any]
    models_: list[dict[str, Any] | None]
    unshared_labels_: list[int]
    client_models_: Rows
    history_: list[Line]
    ledger_: Ledger
    bytes_: dict[str, Any]
    network_: FlatModel
    _start: dict[str, torch.Tensor]  # weights that a module of the user's own began with
    _newcomers_record: Any
    _guests: dict[str, Any]  # newcomers by name

    @property
    def earlier(self) -> Any:
        """Return the models of another run that this one started from, or None."""

    def _own(self, client: Client | None) -> Mapping[str, torch.Tensor]:
        """Return what a client or a newcomer keeps of its own data."""

    def model_of(self, client: Client) -> dict[str, Any]:
        """Return the `state_dict` of a client's model."""
