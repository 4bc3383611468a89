"""What attacks get of an app of others: what was recorded, and what somebody declared of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.attacks.base import Attack, Knowledge, View
from securecluster.attacks.dp_audit import CanaryAudit
from securecluster.audits.run_audit import UNTESTED, Adversary, asks_about_candidates, known_samples
from securecluster.core.client_names import at
from securecluster.core.lazy_torch import torch
from securecluster.data.federation import Federation
from securecluster.errors import SecureClusterError, UsageError
from securecluster.messaging.messages import Rows
from securecluster.messaging.outcomes import VerbOutcome
from securecluster.messaging.parties import SERVER, Party
from securecluster.messaging.transcript import ObservedMessage
from securecluster.recordings.recording import PARTITION
from securecluster.recordings.recording_folder import Recording, partitions_in
from securecluster.recordings.training_facts import TrainingFacts

if TYPE_CHECKING:
    from securecluster.models.flat_model import FlatModel

NAME = "an app of Flower"
REPEATS = "not applicable: it repeats the run, and an app of others cannot be run again here"
NO_MODEL = "the app's network (--model)"
WORDS = {
    "lr": "the learning rate",
    "epochs": "the number of epochs",
    "batch_size": "the batch size",
    "optimizer": "the optimizer",
    "momentum": "the momentum",
    "classes": "the number of classes, which the clients' data tell (--data)",
    "shape": "the shape of a sample, which the clients' data tell (--data)",
}


class AbsentError(SecureClusterError):
    """Something that an attack needs and nobody declared."""


class Declared(dict[str, Any]):
    """A configuration of which only some things are known.

    Attributes:
        asked: names that somebody asked for.
    """

    def __init__(self, known: Mapping[str, Any]) -> None:
        super().__init__(known)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        """Return a value, or raise AbsentError."""
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or the default of one that is unknown."""
        self.asked.add(name)
        return super().get(name, default)

    def __missing__(self, name: str) -> Any:
        """Raise AbsentError."""
        text = WORDS.get(name, f"{name!r} of the configuration")
        if name in ("lr", "epochs", "batch_size", "optimizer", "momentum", "clip"):
            text += f" (TrainingFacts({name}=...))"
        raise AbsentError(text)


class UnknownNetwork:
    """Network of an app, of which only the number of parameters is known.

    Args:
        dimension: that number.
    """

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension

    def __getattr__(self, name: str) -> Any:
        """Raise AbsentError."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise AbsentError(NO_MODEL)


@dataclass(frozen=True)
class RecordingView(View):
    """View of a recorded app.

    Args:
        recording: of the app.
        parties: the colluding parties.
        anonymous: True if other clients appear under labels that are new for every call.
    """

    recording: Recording
    parties: frozenset[Party]
    anonymous: bool = False

    def messages(
        self, method: str | None = None, round: int | None = None
    ) -> Iterator[ObservedMessage]:
        """Yield the frames that the parties sent, received or overheard, in order.

        Args:
            method: only those of this type of message; None for all.
            round: only those of this round; None for all.
        """
        for message in self.recording.transcript.seen_by(self.parties, self.anonymous):
            if method in (None, message.method) and round in (None, message.round):
                yield message

    @property
    def outcomes(self) -> tuple[VerbOutcome, ...]:
        """Return nothing: what an app computes of its messages is in no message."""
        return ()

    @cached_property
    def clusters(self) -> Mapping[int, int]:
        """Return by client of the last call its cluster: those that the server sent one model.

        Empty where each has a model of its own, and for others than the server.
        """
        transcript = self.recording.transcript
        if self.anonymous or SERVER not in self.parties or not transcript.count:
            return {}
        call, _ = transcript.content(transcript.count - 1)
        models: Rows = call.query.model
        numbers: dict[bytes, int] = {}
        clusters = {}
        for position, client in enumerate(call.to):
            model = models.row(position).numpy().tobytes()
            clusters[client] = numbers.setdefault(model, len(numbers))
        return clusters if len(numbers) < len(clusters) else {}


@dataclass(frozen=True)
class RecordedTarget:
    """Target of attacks, and what is known of it.

    Args:
        recording: of the app.
        facts: that were declared of its training.
        adversary: whose view it is.
        federation: the clients' data; None if they are not given.
        partitions: by node the position of its data, as far as that is known.
        network: the app's.
        has_model: whether the app's network was given; it takes the data's shapes to be evaluated.
    """

    recording: Recording
    facts: TrainingFacts
    adversary: Adversary
    federation: Federation | None
    partitions: Mapping[int, int]
    network: FlatModel | UnknownNetwork
    has_model: bool = False

    @property
    def tells_nodes(self) -> bool:
        """Return whether it is known which node has which client's data."""
        return all(node in self.partitions for node in self.recording.nodes)

    @cached_property
    def scored(self) -> Federation | None:
        """Return the clients' data in the order of the recording; None if it is unknown.

        Raises:
            UsageError: a node has data that are not in the federation, or those of another node.
        """
        if self.federation is None or not self.tells_nodes:
            return None
        positions = [self.partitions[node] for node in self.recording.nodes]
        clients = len(self.federation)
        if not all(0 <= position < clients for position in positions):
            raise UsageError(f"the data are of {clients} clients, and the app has others")
        if len(set(positions)) < len(positions):
            raise UsageError("two nodes have the same client's data: guesses cannot be scored")
        return self.federation.select([at(position) for position in positions])

    @cached_property
    def initial(self) -> torch.Tensor:
        """Return the first model that was sent to be trained; no numbers if there is none."""
        if not self.recording.transcript.count:
            return torch.zeros(0)
        call, _ = self.recording.transcript.content(0)
        rows: Rows = call.query.model
        return rows.row(0)

    def barred(self, attack: Attack) -> str:
        """Return why an attack is on no recording, whatever is declared; no text if it may be.

        Args:
            attack: any.
        """
        if isinstance(attack, CanaryAudit) or hasattr(attack, "endpoint"):
            return REPEATS
        if attack.of_mechanism:
            names = " and ".join(sorted(attack.hidden_by))
            return f"{UNTESTED}{names}, which this run does not claim"
        return ""

    def view(self, attack: Attack) -> RecordingView:
        """Return what the adversary observed.

        Args:
            attack: that it is for.
        """
        parties = self.recording.transcript.resolved(self.adversary.parties)
        return RecordingView(self.recording, parties, attack.anonymous)

    def knowledge(self, attack: Attack) -> Knowledge:
        """Return what the adversary knows, with samples for attacks that are asked about some.

        Args:
            attack: that it is for.
        """
        config = Declared(self.facts.known)
        config["clients"] = len(self.recording.nodes)
        config["seed"] = 0  # of the adversary's own models: that of an app is in no message
        config["mask"] = "none"
        config["dtype"] = "float32"
        samples = None
        if self.federation is not None:
            config["classes"] = self.federation.classes
            config["shape"] = tuple(self.federation.shape)
            samples = known_samples(self.federation, asks_about_candidates(attack))
        network: Any = self.network
        return Knowledge(NAME, config, network, self.initial, network.dimension, samples=samples)


def partitions_of(recording: Recording, clients: Path | str | None = None) -> dict[int, int]:
    """Return by node the position of its data, as far as somebody recorded it.

    Args:
        recording: of the server.
        clients: folder of recordings of clients; None for those in the recording's own folder, and
            for clients that tell it among their metrics.

    Raises:
        UsageError: no client of that folder tells it.
    """
    if clients is not None:
        recorded = partitions_in(Path(clients))
        if not recorded:
            raise UsageError(f"{clients} has no recordings of clients that tell their partition")
        return recorded
    declared = {}
    for exchange in recording.exchanges:
        for number, metrics in exchange["metrics"].items():
            if PARTITION in metrics:
                declared[recording.nodes[int(number)]] = int(metrics[PARTITION])
    return declared | recording.partitions | partitions_in(recording.folder)
