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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.attacks.base import Attack, Guess, Truth, unmet
from securecluster.attacks.linkage import LinkedClients
from securecluster.attacks.registry import attack_named, attack_names
from securecluster.attacks.scoring import Score, score
from securecluster.audits import audit_page, audit_summary, further_lines, recording_report
from securecluster.audits.findings import Finding
from securecluster.audits.recorded_target import (
    AbsentError,
    RecordedTarget,
    UnknownNetwork,
    partitions_of,
)
from securecluster.audits.recording_report import price
from securecluster.audits.run_audit import (
    BUDGET,
    RUN,
    SERVER,
    TWIN,
    Audit,
    Clock,
    OutOfTime,
    adversary_of,
    failure,
)
from securecluster.commands.failures import traceback_of
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.data.federation import Federation
from securecluster.errors import NoOutputsError, UsageError
from securecluster.models.validation import build
from securecluster.recordings.recording_folder import Recording
from securecluster.reports import html_page as html

if TYPE_CHECKING:
    from securecluster.models.flat_model import FlatModel

NO_TWIN = "There is no unprotected twin: an app of others cannot be run again here."
NO_EPSILON = "No ε bounds what attacks that were not tried could learn: no noise was declared."
NO_TWIN_CELL = "no unprotected twin"
NO_DATA = "ran, not scored: it takes the clients' data (--data), to compare guesses with"
NO_NODES = (
    "ran, not scored: which node has which client's data is unknown (--clients, the folder of "
    "recorded_client)"
)


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
        budget: processor seconds; what does not fit is skipped, and named.
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
        partitions = partitions_of(recording, partitions)
    target = RecordedTarget(
        recording,
        recording.facts,
        adversary_of(recording.names, adversary),
        federation,
        partitions,
        _network(recording, federation, model),
        model is not None,
    )
    _ = target.scored  # refuses data of other clients before any attack
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
        [*recording_report.notes(recording), NO_TWIN, *further_lines.sentences(target, chosen)],
        clock.elapsed,
        budget,
        NO_TWIN,
    )


def _finding(attack: Attack, target: RecordedTarget, clock: Clock) -> Finding:
    """Return what one attack achieves; a mistake of the attack is a finding, too."""
    if clock.left <= 0.01:
        return Finding(attack.name, None, "skipped: the budget was used up", 0.0)
    start = time.process_time()
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
    seconds = time.process_time() - start
    return Finding(attack.name, result, reason, seconds, guess, truth, trace=trace)


def _tried(
    attack: Attack, target: RecordedTarget
) -> tuple[str, Guess | None, Truth | None, Score | None]:
    """Return why there is no score, the guess, the truth and the score.

    Raises:
        AbsentError: it needs something that nobody declared.
    """
    reason = target.barred(attack)
    if reason:
        return reason, None, None, None
    view, knowledge = target.view(attack), target.knowledge(attack)
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
