"""Audit of a finished run: every attack that applies, on the run and on its unprotected twin.

The twin is the same run without mask, noise and secure sums. A score on the run means little by
itself: beside the twin's it shows what the protection is worth.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.app import execution, run_folder
from securecluster.app.finished_run import FinishedRun
from securecluster.app.number_format import printable
from securecluster.attacks import experiments
from securecluster.attacks.base import Attack, Guess, Tap, Truth, View
from securecluster.attacks.dp_audit import CanaryAudit, Planted
from securecluster.attacks.hidden_sums import TwoSums
from securecluster.attacks.registry import attack_named, attack_names
from securecluster.attacks.scoring import Score, score
from securecluster.attacks.source_inference import OwnersFound
from securecluster.attacks.subspaces import SampleMembership
from securecluster.attacks.views import knowledge_of, truth_of, view_of
from securecluster.data import Federation
from securecluster.errors import SecureClusterError, SecureClusterWarning, UsageError
from securecluster.messaging.parties import Party
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.runtime.settings import Settings

SCHEMA = 1
BUDGET = 180.0  # seconds
LEAVING = 16  # clients without each of which a run is repeated, for sums that differ in one client
KNOWN = 8  # test samples of each client that the adversary has
SERVER = "server"
AUTHORITY = "authority"
# parties of which there is one
SINGLE = {SERVER: "the server", AUTHORITY: "the key authority", "wire": "the wire"}
RUN = "run"
TWIN = "unprotected"
WITHIN = "not above the ledger's ε"
REFUTED = "above the ledger's ε: refuted"
Note = Callable[[str], None]


@dataclass(frozen=True)
class Adversary:
    """Parties that attack together.

    Args:
        parties: as a transcript takes them: "server", "wire", or a client's number.
        clients: numbers of the clients among them, who give their data and secrets, too.
        text: the adversary in words.
    """

    parties: tuple[Party | int | str, ...]
    clients: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Finding:
    """What one attack achieved on one run.

    Args:
        attack: its name.
        score: of its guess; None if there is none.
        reason: why there is no score: "not applicable: …", "skipped: …" or "failed: …".
        seconds: that it took.
        guess: of the attack, for pictures.
        truth: that it was compared with.
        claimed: the ledger's ε of what an audit of noise bounds from below; None for other attacks.
    """

    attack: str
    score: Score | None
    reason: str
    seconds: float
    guess: Guess | None = None
    truth: Truth | None = None
    claimed: float | None = None

    @property
    def verdict(self) -> str:
        """Return the verdict against chance or a finite ε, or why there is none."""
        if self.score is None:
            return self.reason
        if self.claimed is not None and math.isfinite(self.claimed):
            return REFUTED if self.score.value > self.claimed else WITHIN
        return self.score.verdict


@dataclass(frozen=True)
class Audit:
    """Results of an audit.

    Args:
        adversary: that attacked.
        findings: of the run and of its twin, by `RUN` and `TWIN`, in the same order of attacks.
        protections: options of the run that the twin is without, with their values.
        notes: sentences on what was repeated or left out.
        seconds: that the audit took.
        budget: seconds that it was allowed.
    """

    adversary: Adversary
    findings: dict[str, list[Finding]]
    protections: dict[str, Any]
    notes: list[str]
    seconds: float
    budget: float


class _OutOfTime(BaseException):
    """An attack went beyond the budget; no attack catches it by mistake."""


class _Clock:
    """Time of an audit.

    Args:
        budget: seconds that it may take.
    """

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self._start = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        """Return the seconds that are left; negative beyond the budget."""
        return self.budget - self.elapsed

    @contextmanager
    def limit(self) -> Iterator[None]:
        """Raise _OutOfTime in this context when the budget is used up.

        Signals reach the main thread only, and not every system has this one. Elsewhere an attack
        that has begun goes on to its end.
        """
        possible = hasattr(signal, "setitimer") and (
            threading.current_thread() is threading.main_thread()
        )
        if not possible or math.isinf(self.budget):
            yield
            return
        before = signal.signal(signal.SIGALRM, _out_of_time)
        signal.setitimer(signal.ITIMER_REAL, max(0.001, self.left))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def _out_of_time(number: int, frame: Any) -> None:
    raise _OutOfTime


def adversary_of(names: Sequence[str], party: str, helpers: str | None = None) -> Adversary:
    """Return the adversary that a user specifies.

    Args:
        names: of the clients, in the order of their numbers.
        party: "server", "authority", "wire" or "client:NAME".
        helpers: parties that collude with it, "client:NAME,client:NAME"; None for nobody.

    Raises:
        UsageError: a party that does not exist.
    """
    texts = [party]
    if helpers:
        texts += helpers.split(",")
    parties: list[Party | int | str] = []
    clients = []
    words = []
    for text in texts:
        party_kind, _, name = text.strip().partition(":")
        if party_kind in SINGLE and not name:
            parties.append(party_kind)
            words.append(SINGLE[party_kind])
            continue
        if party_kind != "client" or not name:
            raise UsageError(
                f"there is no party {text.strip()!r}: give server, authority, wire or "
                f"client:NAME, such as client:{names[0]}"
            )
        number = _client_number(names, name)
        parties.append(number)
        clients.append(number)
        words.append(f"client {printable(names[number])}")
    return Adversary(tuple(parties), tuple(dict.fromkeys(clients)), " and ".join(words))


def _client_number(names: Sequence[str], name: str) -> int:
    """Return a client's number by its name, or else by the number itself."""
    if name in names:
        return list(names).index(name)
    if name.isascii() and name.isdigit() and int(name) < len(names):
        return int(name)
    examples = ", ".join(names[:3])
    raise UsageError(
        f"there is no client {name!r}: give a name ({examples}, …) or a number from 0 to "
        f"{len(names) - 1}"
    )


def twin_of(protocol: ClusteringProtocol) -> ClusteringProtocol:
    """Return the protocol of the twin, without mask, noise, seals and secure sums.

    Args:
        protocol: with the run's hyper-parameters.
    """
    return experiments.unprotected(protocol)


def protections_of(protocol: ClusteringProtocol) -> dict[str, Any]:
    """Return the options of a protocol that protect, with their values.

    Args:
        protocol: with the run's hyper-parameters.
    """
    plain = twin_of(protocol).get_params()
    protections = {}
    for name, value in protocol.get_params().items():
        if value != plain[name]:
            protections[name] = value
    return protections


def audited(
    run: FinishedRun,
    federation: Federation,
    adversary: Adversary,
    budget: float = BUDGET,
    attacks: Sequence[str] | None = None,
    note: Note = lambda text: None,
) -> Audit:
    """Return the results of all attacks on a run and on its unprotected twin.

    Args:
        run: the run.
        federation: its clients.
        adversary: whose view is attacked.
        budget: seconds; what does not fit is skipped, and named.
        attacks: names of attacks; None for all registered ones.
        note: called with a sentence on what is going on.

    Raises:
        UsageError: no positive budget, an unknown attack, or a party that does not exist.
    """
    if not budget > 0:
        raise UsageError(f"the budget is a positive number of seconds, not {budget:g}")
    chosen = [attack_named(name) for name in attacks or attack_names()]
    clock = _Clock(budget)
    notes: list[str] = []

    def say(text: str) -> None:
        notes.append(text)
        note(text)

    protections = protections_of(run.protocol)
    if AUTHORITY in adversary.parties and not run.protocol.encrypted_verbs:
        raise UsageError(
            "this run has no key authority, since nothing in it is encrypted: give --as server"
        )
    target = _Target(run, federation, adversary, say)
    findings: dict[str, list[Finding]] = {}
    for column in (RUN, TWIN):
        # without protections the two are the same run
        if column == TWIN and not protections:
            findings[TWIN] = findings[RUN]
            say("The run is its own twin: it has no mask, no noise and no secure sums.")
            break
        time_left = clock.left
        if column == RUN and protections:
            time_left /= 2
        findings[column] = _column(target, chosen, column, _Clock(time_left))
    return Audit(adversary, findings, protections, notes, clock.elapsed, budget)


@dataclass(frozen=True)
class _Target:
    """What is attacked, and by whom.

    Args:
        run: the run.
        federation: its clients.
        adversary: whose view is attacked.
        say: called with a sentence on what was repeated or left out.
    """

    run: FinishedRun
    federation: Federation
    adversary: Adversary
    say: Note


def _column(
    target: _Target, attacks: Sequence[Attack], column: str, clock: _Clock
) -> list[Finding]:
    """Return the findings on the run or on its twin.

    Args:
        target: what is attacked.
        attacks: to be run.
        column: `RUN` or `TWIN`.
        clock: of this column.
    """
    if column == TWIN and AUTHORITY in target.adversary.parties:
        target = replace(target, adversary=_without_authority(target.adversary))
        target.say("The unprotected run has no key authority: its server attacks it.")
    try:
        fitted, taps = _fitted(target, column, clock)
    except _OutOfTime:
        reason = f"skipped: repeating the run did not fit into {clock.budget:.0f} s of the budget"
        return [Finding(attack.name, None, reason, 0.0) for attack in attacks]
    findings = []
    # one repetition with canaries serves all audits of the same releases
    repetitions: dict[Any, Planted] = {}
    for position, attack in enumerate(attacks):
        share = clock.left
        # the first slow attack must not take the time of all others
        if position < len(attacks) - 1:
            share /= 2
        if isinstance(attack, CanaryAudit):
            findings.append(_bounded(attack, target, column, _Clock(share), repetitions))
            continue
        findings.append(_attacked(attack, target, fitted, taps, _Clock(share)))
    return findings


def _without_authority(adversary: Adversary) -> Adversary:
    """Return the parties that learn in the unprotected run what a key authority decrypts."""
    parties = [SERVER if party == AUTHORITY else party for party in adversary.parties]
    return replace(adversary, parties=tuple(dict.fromkeys(parties)))


def _fitted(target: _Target, column: str, clock: _Clock) -> tuple[ClusteringProtocol, list[Tap]]:
    """Return the run with the contents of its frames, or its twin, and replies before protection.

    Whatever the folder does not hold is made by repeating the run.

    Raises:
        _OutOfTime: it does not fit into the time that is left.
    """
    run = target.run
    in_folder = column == RUN and _holds_the_view(target)
    if in_folder:
        restored = type(run.protocol)(**run.protocol.get_params()).restore_from(run.folder)
        # only some attacks are compared with replies before protection
        if run.result["seconds"] > clock.left / 2:
            target.say("Attacks on masks have no score: repeating the run takes too long.")
            return restored, []
    if run.result["seconds"] > clock.left:
        raise _OutOfTime
    protocol = run.protocol
    if column == TWIN:
        protocol = twin_of(run.protocol)
    settings = replace(Settings(**run.config["settings"]), transcript="full")
    with clock.limit():
        repeated, taps = experiments.tapped(protocol, target.federation, settings)
    if in_folder:
        return restored, taps
    if column == TWIN:
        target.say("The unprotected twin was run from config.json.")
    else:
        _say_repeated(target, repeated)
    return repeated, taps


def _holds_the_view(target: _Target) -> bool:
    """Return True if a run's folder has all that the adversary observed.

    No frame has R as the key authority decrypts it.
    """
    full: bool = target.run.config["settings"]["transcript"] == "full"
    return full and AUTHORITY not in target.adversary.parties


def _say_repeated(target: _Target, repeated: ClusteringProtocol) -> None:
    """Say that a run was repeated, and why."""
    why = "The run kept no contents of messages"
    if AUTHORITY in target.adversary.parties:
        why = "No message has what the key authority decrypted"
    target.say(f"{why}: the run was repeated from config.json.")
    if [int(label) for label in repeated.labels_] != target.run.result["labels"]:
        target.say("The repeated run found other clusters than the run did.")


def _attacked(
    attack: Attack,
    target: _Target,
    fitted: ClusteringProtocol,
    taps: Sequence[Tap],
    clock: _Clock,
) -> Finding:
    """Return what one attack achieves; a mistake of the attack is a finding, too.

    Args:
        attack: to be run.
        target: what is attacked.
        fitted: the run or its twin.
        taps: its replies before protection.
        clock: of this attack.
    """
    if clock.left <= 0.01:
        return Finding(attack.name, None, "skipped: the budget was used up", 0.0)
    start = time.monotonic()
    try:
        with clock.limit():
            return finding_of(attack, fitted, target.federation, target.adversary, taps)
    except _OutOfTime:
        reason = f"skipped: {clock.budget:.1f} s of the budget were not enough"
    return Finding(attack.name, None, reason, time.monotonic() - start)


def finding_of(
    attack: Attack,
    fitted: ClusteringProtocol,
    federation: Federation,
    adversary: Adversary,
    taps: Sequence[Tap] = (),
) -> Finding:
    """Return what one attack achieves on one run; a mistake of the attack is a finding, too.

    Args:
        attack: to be run.
        fitted: the run, with a full transcript.
        federation: its clients.
        adversary: whose view is attacked.
        taps: the run's replies before protection, for scorers that compare with them.
    """
    start = time.monotonic()
    guess: Guess | None = None
    truth: Truth | None = None
    result: Score | None = None
    try:
        attack = _active(attack, fitted, federation, adversary)
        view = view_of(fitted, adversary.parties, attack.anonymous)
        samples = known_samples(federation, asks_about_candidates(attack))
        knowledge = knowledge_of(fitted, federation, adversary.clients, samples)
        reason = attack.applies(view, knowledge) or ""
        if not reason:
            guess = attack.run(view, knowledge)
            truth = truth_of(fitted, federation, view, taps)
            result = score(attack.scorer, guess, truth)
    except SecureClusterError as error:
        reason = f"failed: {error}"
    except Exception as error:
        # an installed package's attack must not end the audit of all others
        reason = f"failed: {type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    if result is None:
        return Finding(attack.name, None, reason, seconds)
    return Finding(attack.name, result, "", seconds, guess, truth)


def noiseless(protocol: ClusteringProtocol) -> ClusteringProtocol:
    """Return the twin of an audit of noise: canaries have the clip norm, and nothing hides them.

    Args:
        protocol: with the run's hyper-parameters.
    """
    params = protocol.get_params()
    changes = {
        "noise": 0.0,
        "gram_noise": 0.0,
        "signature_noise": 0.0,
        "target_epsilon": None,
        "placement": "local",
    }
    for name, value in changes.items():
        if name in params:
            params[name] = value
    return type(protocol)(**params)


def _bounded(
    attack: CanaryAudit,
    target: _Target,
    column: str,
    clock: _Clock,
    repetitions: dict[Any, Planted],
) -> Finding:
    """Return the lower bound of ε that an audit of noise gives, and the ledger's ε.

    Args:
        attack: the audit.
        target: the run.
        column: `RUN`, or `TWIN` for a repetition without noise.
        clock: of this audit.
        repetitions: by the kind of releases, those that were made already.
    """
    start = time.monotonic()
    protocol = target.run.protocol
    config = target.run.config["network"]
    result: Score | None = None
    claimed: float | None = None
    reason = ""
    if not any(config.get(name) for name in ("noise", "gram_noise", "signature_noise")):
        return Finding(attack.name, None, "not applicable: the run has no noise", 0.0)
    if clock.left <= 0.01:
        return Finding(attack.name, None, "skipped: the budget was used up", 0.0)
    if column == TWIN:
        protocol = noiseless(protocol)
    settings = replace(Settings(**target.run.config["settings"]), transcript="full")
    try:
        with clock.limit(), warnings.catch_warnings():
            # canaries are no data to learn from
            warnings.simplefilter("ignore", SecureClusterWarning)
            if attack.release not in repetitions:
                repetitions[attack.release] = attack.planted_in(
                    protocol, target.federation, settings, target.adversary.parties
                )
            planted = repetitions[attack.release]
            claimed = planted.claimed
            result = planted.score(attack.scorer, target.federation)
    except _OutOfTime:
        reason = f"skipped: {clock.budget:.1f} s of the budget were not enough"
    except UsageError as error:
        reason = f"not applicable: {error}"
    except Exception as error:
        reason = f"failed: {type(error).__name__}: {error}"
    return Finding(attack.name, result, reason, time.monotonic() - start, claimed=claimed)


def _active(
    attack: Attack, fitted: ClusteringProtocol, federation: Federation, adversary: Adversary
) -> Attack:
    """Return the attack, with what it takes besides the view: clients to call, or further runs.

    Only a server sends calls. The clients are made again from the run's configuration, and are as
    they were before the run.

    Args:
        attack: as it is registered.
        fitted: the run.
        federation: its clients.
        adversary: whose view is attacked.
    """
    active: Any = copy.copy(attack)
    if SERVER not in adversary.parties:
        return attack
    if hasattr(attack, "endpoint"):
        active.endpoint = fitted.build_client(federation, fitted.kept_.learned.settings)
    if isinstance(attack, TwoSums) and fitted.name == attack.protocol:
        active.second = _runs_without_one(fitted, federation, adversary)
    made: Attack = active
    return made


def _runs_without_one(
    fitted: ClusteringProtocol, federation: Federation, adversary: Adversary
) -> dict[int, View]:
    """Return by client what the server sees of the same run without it, for the first clients.

    They stay with the run, since several attacks read them.
    """
    runs: dict[int, ClusteringProtocol] = vars(fitted).setdefault("runs_without_one_", {})
    settings = replace(fitted.kept_.learned.settings, transcript="full")
    for client in range(min(LEAVING, len(federation))):
        if client not in runs:
            runs[client] = experiments.without_client(fitted, federation, client, settings)
    return {client: view_of(run, (SERVER,)) for client, run in runs.items()}


def asks_about_candidates(attack: Attack) -> bool:
    """Return True if an attack says of samples that the adversary has whether clients have them.

    Args:
        attack: one of the registered ones.
    """
    by_scorer = isinstance(attack.scorer, SampleMembership | OwnersFound)
    return by_scorer or "membership" in attack.name


def known_samples(
    federation: Federation, candidates: bool
) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Return samples (X, y) that the adversary has; None if clients have no test samples.

    They are some of the clients' test samples, as public ones of the same distribution.

    Args:
        federation: the clients.
        candidates: True for attacks on membership: as many training samples are among them.
    """
    inputs = []
    targets = []
    for shard in federation.shards:
        count = min(KNOWN, len(shard.y), len(shard.y_test))
        inputs.append(shard.x_test[:count])
        targets.append(shard.y_test[:count])
        if candidates:
            inputs.append(shard.x[:count])
            targets.append(shard.y[:count])
    samples = np.concatenate(inputs)
    if not len(samples):
        return None
    return samples, np.concatenate(targets)


def federation_of(run: FinishedRun) -> Federation:
    """Return the clients of a run, made again from its config.json.

    Args:
        run: the run.

    Raises:
        UsageError: their data, or objects that took part, came from Python.
        RunFolderError: the data have changed since.
    """
    if run.config["simulation"] is None:
        raise UsageError(
            f"{run.folder} was run from Python on data of your own, which it does not hold: audit "
            "it there, with securecluster.app.audit.audited(run, federation, adversary)"
        )
    plan, config = run_folder.load(run.folder)
    return execution.federation_of(run.folder, plan, config)


def content(audit: Audit) -> dict[str, Any]:
    """Return the content of audit.json; it holds no seed, no key and no client's data.

    Args:
        audit: the results.
    """
    rows = []
    for position, finding in enumerate(audit.findings[RUN]):
        attack = attack_named(finding.attack)
        twin = audit.findings[TWIN][position]
        rows.append(
            {
                "attack": finding.attack,
                "source": attack.source,
                "needs": attack.needs,
                RUN: _entry(finding),
                TWIN: _entry(twin),
            }
        )
    return {
        "schema": SCHEMA,
        "adversary": audit.adversary.text,
        "protections": audit.protections,
        "notes": audit.notes,
        "budget": audit.budget if math.isfinite(audit.budget) else None,
        "seconds": round(audit.seconds, 1),
        "attacks": rows,
    }


def _entry(finding: Finding) -> dict[str, Any]:
    """Return one finding as JSON values."""
    entry: dict[str, Any] = {"verdict": finding.verdict, "score": None}
    if finding.score is not None:
        entry["score"] = dataclasses.asdict(finding.score)
    if finding.claimed is not None:
        # JSON has no infinity
        entry["ledger_epsilon"] = finding.claimed if math.isfinite(finding.claimed) else None
    entry["seconds"] = round(finding.seconds, 2)
    return entry


def score_text(finding: Finding) -> str:
    """Return a score with its interval and what chance reaches, or why there is none.

    Args:
        finding: of one attack on one run.
    """
    result = finding.score
    if result is None:
        return finding.reason
    interval = f"{result.interval.low:.3g} to {result.interval.high:.3g}"
    text = f"{result.value:.3g} ({interval}; chance {result.chance:.3g})"
    if finding.claimed is None:
        return text
    claimed = f"{finding.claimed:.3g}" if math.isfinite(finding.claimed) else "infinite"
    return f"{text}; the ledger's ε is {claimed}"


def show(audit: Audit) -> None:
    """Print the table attack × as run × unprotected.

    Args:
        audit: the results.
    """
    from rich.console import Console
    from rich.table import Table

    # attacks of installed packages may have names that look like markup
    console = Console(markup=False, highlight=False)
    table = Table(title=f"attacks by {audit.adversary.text}", show_lines=True)
    # a name is one word, which would else be broken anywhere
    widest = max(len(finding.attack) for finding in audit.findings[RUN])
    table.add_column("attack", width=widest)
    for heading in ("as run", "unprotected"):
        table.add_column(heading, overflow="fold")
    without = []
    for finding, twin in zip(audit.findings[RUN], audit.findings[TWIN], strict=True):
        result = finding.score or twin.score
        if result is None:
            without.append(f"{finding.attack}: {both_reasons(finding, twin)}")
            continue
        better = "higher" if result.higher else "lower"
        name = f"{finding.attack}\n{result.metric} ({better} is a better attack)"
        table.add_row(name, _cell(finding), _cell(twin))
    if table.row_count:
        console.print(table)
    else:
        console.print(table.title)
    for text in without:
        console.print(text)
    for text in audit.notes:
        console.print(text)
    console.print(f"{audit.seconds:.1f} s of {audit.budget:g} s", soft_wrap=True)


def both_reasons(finding: Finding, twin: Finding) -> str:
    """Return why an attack has a score neither on the run nor on its twin.

    Args:
        finding: on the run.
        twin: on the unprotected twin.
    """
    if finding.reason == twin.reason:
        return finding.reason
    return f"{finding.reason}; on the unprotected run {twin.reason}"


def _cell(finding: Finding) -> str:
    """Return a score and its verdict on two lines."""
    if finding.score is None:
        return finding.reason
    return f"{score_text(finding)}\n{finding.verdict}"
