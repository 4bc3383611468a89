"""Audit of an app of others, by the recording that `securecluster.recordings.recording` made of it.

Attacks get what was recorded, and what `TrainingFacts` and the app's network tell. One that needs
something else is not applicable, and says what it needs. To score a guess takes the truth: links
between anonymous updates are scored by the recording itself, and everything else by the clients'
data, if they are given together with which node has which.

An app of others cannot be run again here, so it has no unprotected twin, and attacks that repeat a
run or ask its clients are not applicable.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.attacks.base import Attack, Guess, Knowledge, Truth, View, unmet
from securecluster.attacks.dp_audit import CanaryAudit
from securecluster.attacks.linkage import LinkedClients
from securecluster.attacks.registry import attack_named, attack_names
from securecluster.attacks.scoring import Score, score
from securecluster.audits import audit_page, audit_summary, recording_report
from securecluster.audits.findings import Finding
from securecluster.audits.recording_report import price
from securecluster.audits.run_audit import (
    BUDGET,
    RUN,
    SERVER,
    TWIN,
    UNTESTED,
    Adversary,
    Audit,
    Clock,
    OutOfTime,
    adversary_of,
    asks_about_candidates,
    failure,
    known_samples,
)
from securecluster.commands.failures import traceback_of
from securecluster.core.client_names import at
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.data.federation import Federation
from securecluster.errors import NoOutputsError, SecureClusterError, UsageError
from securecluster.messaging.messages import Rows
from securecluster.messaging.outcomes import VerbOutcome
from securecluster.messaging.parties import Party
from securecluster.messaging.transcript import ObservedMessage
from securecluster.models.validation import build
from securecluster.recordings.recording import PARTITION
from securecluster.recordings.recording_folder import Recording, partitions_in
from securecluster.reports import html_page as html

if TYPE_CHECKING:
    from securecluster.models.flat_model import FlatModel

NAME = "an app of Flower"
NO_TWIN = "There is no unprotected twin: an app of others cannot be run again here."
NO_EPSILON = "No ε bounds what attacks that were not tried could learn: no noise was declared."
NO_TWIN_CELL = "no unprotected twin"
REPEATS = "not applicable: it repeats the run, and an app of others cannot be run again here"
NO_DATA = "ran, not scored: it takes the clients' data (--data), to compare guesses with"
NO_NODES = (
    "ran, not scored: which node has which client's data is unknown (--clients, the folder of "
    "recorded_client)"
)
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
    """A configuration of which only some things are known."""

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


@dataclass(frozen=True)
class _Target:
    """Target of attacks, and what is known of it."""

    recording: Recording
    adversary: Adversary
    federation: Federation | None
    scored: Federation | None
    network: FlatModel | UnknownNetwork
    initial: torch.Tensor

    def knowledge(self, attack: Attack) -> Knowledge:
        """Return what the adversary knows, with samples for attacks that are asked about some."""
        config = Declared(self.recording.facts.known)
        config["clients"] = len(self.recording.nodes)
        config["mask"] = "none"
        config["dtype"] = "float32"
        samples = None
        if self.federation is not None:
            config["classes"] = self.federation.classes
            config["shape"] = tuple(self.federation.shape)
            samples = known_samples(self.federation, asks_about_candidates(attack))
        network: Any = self.network
        return Knowledge(NAME, config, network, self.initial, network.dimension, samples=samples)


def audit_recording(
    folder: Path | str,
    federation: Federation | None = None,
    *,
    model: torch.nn.Module | None = None,
    partitions: Mapping[int, int] | Path | str | None = None,
    adversary: str = SERVER,
    budget: float = BUDGET,
    attacks: Sequence[str] | None = None,
) -> Audit:
    """Attack an app of Flower by its recording.

    Args:
        folder: that `recorded` wrote.
        federation: the clients' data, to score guesses; None runs attacks without scores.
        model: the app's network, with any weights, or a `ForeignModel` of an app without torch;
            None for attacks that need none.
        partitions: by id of a node, the position of its data in the federation; or the folder of
            recordings of clients, which tell it. None takes it from metrics called "partition-id".
        adversary: whose view: "server", "wire" or "client:NODE".
        budget: seconds; what does not fit is skipped, and named.
        attacks: names of attacks; None for all registered ones.

    Raises:
        UsageError: nothing was recorded, or network and data that the app does not have.
        RunFolderError: no recording, or one that is damaged.
    """
    recording = Recording.read(folder)
    recording.check_begun()
    recording.check_arrays()
    if not budget > 0:
        raise UsageError(f"the budget is a positive number of seconds, not {budget:g}")
    recording.transcript.check()
    clock = Clock(budget)
    if not isinstance(partitions, Mapping):
        partitions = _partitions(recording, partitions)
    target = _Target(
        recording,
        adversary_of(recording.names, adversary),
        federation,
        _in_order(recording, federation, partitions),
        _network(recording, federation, model),
        _initial(recording),
    )
    findings = []
    chosen = [attack_named(name) for name in attacks or attack_names()]
    for position, attack in enumerate(chosen):
        remaining = clock.left if position == len(chosen) - 1 else clock.left / 2
        findings.append(_finding(attack, target, Clock(max(remaining, 0.0))))
    twins = []
    for finding in findings:
        reason = finding.reason if finding.score is None else NO_TWIN_CELL
        twins.append(Finding(finding.attack, None, reason, 0.0))
    return Audit(
        target.adversary,
        {RUN: findings, TWIN: twins},
        {},
        [*recording_report.notes(recording), NO_TWIN],
        clock.elapsed,
        budget,
        NO_TWIN,
    )


def _finding(attack: Attack, target: _Target, clock: Clock) -> Finding:
    """Return what one attack achieves; a mistake of the attack is a finding, too."""
    if clock.left <= 0.01:
        return Finding(attack.name, None, "skipped: the budget was used up", 0.0)
    start = time.monotonic()
    guess: Guess | None = None
    truth: Truth | None = None
    result: Score | None = None
    trace = ""
    try:
        with clock.limit():
            reason, guess, truth, result = _tried(attack, target)
    except OutOfTime:
        reason = f"skipped: {clock.budget:.1f} s of the budget were not enough"
    except AbsentError as error:
        reason = f"not applicable: needs {error}"
    except NoOutputsError as error:
        reason = f"not applicable: {error}"
    except Exception as error:
        reason = failure(error)
        trace = traceback_of(error)
    return Finding(attack.name, result, reason, time.monotonic() - start, guess, truth, trace=trace)


def _tried(attack: Attack, target: _Target) -> tuple[str, Guess | None, Truth | None, Score | None]:
    """Return why there is no score, the guess, the truth and the score.

    Raises:
        AbsentError: it needs something that nobody declared.
    """
    if isinstance(attack, CanaryAudit) or hasattr(attack, "endpoint"):
        return REPEATS, None, None, None
    if attack.of_mechanism:
        names = " and ".join(sorted(attack.hidden_by))
        return f"{UNTESTED}{names}, which this run does not claim", None, None, None
    parties = target.recording.transcript.resolved(target.adversary.parties)
    view = RecordingView(target.recording, parties, attack.anonymous)
    knowledge = target.knowledge(attack)
    reason = attack.applies(view, knowledge) or ""
    if reason:
        return reason, None, None, None
    federation: Any = target.scored
    identities = target.recording.transcript.identities(0) if attack.anonymous else {}
    truth = Truth(federation, identities)
    if federation is not None:
        reason = unmet(attack, truth) or ""
        if reason:
            return reason, None, None, None
    guess = attack.run(view, knowledge)
    if federation is None and not isinstance(attack.scorer, LinkedClients):
        return (NO_DATA if target.federation is None else NO_NODES), guess, None, None
    return "", guess, truth, score(attack.scorer, guess, truth)


def _partitions(recording: Recording, clients: Path | str | None) -> dict[int, int]:
    """Return by node the position of its data, as far as somebody recorded it."""
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
    return declared


def _in_order(
    recording: Recording, federation: Federation | None, partitions: Mapping[int, int]
) -> Federation | None:
    """Return the clients' data in the order of the recording; None if it is unknown.

    Raises:
        UsageError: a node has data that are not in the federation, or those of another node.
    """
    if federation is None or any(node not in partitions for node in recording.nodes):
        return None
    positions = [partitions[node] for node in recording.nodes]
    if not all(0 <= position < len(federation) for position in positions):
        raise UsageError(f"the data are of {len(federation)} clients, and the app has others")
    if len(set(positions)) < len(positions):
        raise UsageError("two nodes have the same client's data: guesses cannot be scored")
    return federation.select([at(position) for position in positions])


def _network(
    recording: Recording, federation: Federation | None, model: torch.nn.Module | None
) -> FlatModel | UnknownNetwork:
    """Return the app's network as a function of what was recorded.

    Raises:
        UsageError: a network with other parameters.
    """
    shapes = recording.layout
    dimension = sum(torch.Size(shape).numel() for _, shape in shapes)
    if model is None or federation is None:
        return UnknownNetwork(dimension)
    network = build(model, federation.shape, federation.classes, Randomness(0))
    parameter_shapes = [tuple(shape) for shape in network.shapes.values()]
    sent_shapes = [shape for _, shape in shapes]
    if parameter_shapes != sent_shapes:
        raise UsageError(
            f"this network has the parameters {parameter_shapes}, and the app sent arrays of "
            f"shapes {sent_shapes}: give the app's network"
        )
    return network


def _initial(recording: Recording) -> torch.Tensor:
    """Return the first model that the server sent to be trained; no numbers if there is none."""
    if not recording.transcript.count:
        return torch.zeros(0)
    call, _ = recording.transcript.content(0)
    rows: Rows = call.query.model
    return rows.row(0)


def page(recording: Recording, audit: Audit, command: str) -> str:
    """Return the page of an audit, which names the app.

    Args:
        recording: of the app.
        audit: the results.
        command: that made the audit.
    """
    table = html.table(recording_report.HEADINGS, recording_report.messages(recording))
    sentences = (price(recording), recording_report.sampling(recording))
    guarantee = " ".join(sentence for sentence in sentences if sentence) or NO_EPSILON
    facts = [("app", f"{recording.app}, over Flower")]
    sections = [
        audit_summary.section(audit, len(recording.nodes), guarantee, facts),
        html.section("The app", html.items(recording_report.summary(recording))),
        audit_page.results(audit),
        audit_page.pictures(audit),
        html.section("Messages", table),
        html.section("The command", html.code(command)),
    ]
    return html.document(f"Audit of {recording.app}", sections)


def named(path: str, option: str) -> Any:
    """Return what "module:name" names; a module may lie in the current folder.

    Args:
        path: "module:name".
        option: that it was given to.

    Raises:
        UsageError: there is no such thing.
    """
    module, _, name = path.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{option} takes module:name, and {path!r} is none ({error})") from None


def federation_of(path: str) -> Federation:
    """Return the clients' data that "module:function" returns.

    Args:
        path: "module:function".

    Raises:
        UsageError: it returns something else.
    """
    loaded = named(path, "--data")
    federation = loaded() if callable(loaded) else loaded
    if not isinstance(federation, Federation):
        raise UsageError(f"--data takes a function that returns a Federation, and {path} does not")
    return federation


def model_of(path: str) -> torch.nn.Module:
    """Return the network that "module:Class" makes.

    Args:
        path: "module:Class".

    Raises:
        UsageError: it makes something else.
    """
    loaded = named(path, "--model")
    model = loaded() if callable(loaded) and not isinstance(loaded, torch.nn.Module) else loaded
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"--model takes a class of a torch module, and {path} is none")
    return model
