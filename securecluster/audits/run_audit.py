"""Audit of a finished run: every attack that applies, on the run and on its unprotected twin.

The twin is the same run without mask, noise and secure sums. A score on the run means little by
itself: beside the twin's it shows what the protection is worth. What is at chance is attacked on
further twins, each without one protection alone, where the attack succeeds without all of them;
each twin is run once, for all attacks.

Half of the budget of time is for the run, an attack gets at most half of what is left, and a timer
ends it; whatever did not fit is named. An attack that fails ends no audit and no audit hides it: it
is named in one line, has its traceback, and the exit code is 3. The twin is without every option of
privacy and every protection of `compatibility`. An audit as the key authority repeats the run,
since R is in no file.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import securecluster
from securecluster.attacks import experiments
from securecluster.attacks.base import Attack, Guess, Knowledge, Tap, Truth, View, unmet
from securecluster.attacks.dp_audit import CanaryAudit, Planted, with_half_the_noise
from securecluster.attacks.hidden_sums import TwoSums
from securecluster.attacks.on_models.crafted import CraftedModel, Server
from securecluster.attacks.registry import attack_named, attack_names
from securecluster.attacks.scoring import BETTER, CHANCE, Score, score
from securecluster.attacks.source_inference import OwnersFound
from securecluster.attacks.subspaces import SampleMembership
from securecluster.attacks.undone import undone
from securecluster.attacks.views import OUTCOMES, knowledge_of, truth_of, view_of
from securecluster.audits import claimed_protections as protections
from securecluster.audits import twins
from securecluster.audits.audit_table import SCHEMA
from securecluster.audits.findings import (
    BROKEN,
    EVERYTHING,
    FAILED,
    HALF,
    UNTOLD,
    VISIBLE,
    WITHIN,
    Finding,
    number,
)
from securecluster.commands import execution
from securecluster.commands.failures import traceback_of
from securecluster.core.client_names import ClientNames, at, called_by_position
from securecluster.core.number_format import printable
from securecluster.core.optional_packages import need
from securecluster.core.progress import bar
from securecluster.errors import (
    NoOutputsError,
    RunFolderError,
    SecureClusterError,
    SecureClusterWarning,
    UsageError,
)
from securecluster.messaging.parties import Party, client
from securecluster.parties.endpoints import KeySource, build_client
from securecluster.privacy import run_secret
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.reports import loading
from securecluster.reports.finished_run import FinishedRun, open_run
from securecluster.results.saving import read_kept
from securecluster.runtime.settings import Settings
from securecluster.statements.disclosures import disclosures

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.text import Text

    from securecluster.data.federation import Federation

# what attacks read, know and are compared with, by what tells these apart
Scenes = dict[Any, tuple[View, Knowledge, Truth]]
BUDGET = 180.0  # processor seconds
WAITING = 10.0  # times as long by the clock on the wall, where an attack may wait
LEFT_FOR_ALL = 2 / 3  # of the time that the twin without all protections may take
LEAVING = 16  # clients without each of which a run is repeated, for sums that differ in one client
KNOWN = 8  # test samples of each client that the adversary has
SERVER = "server"
AUTHORITY = "authority"
WIRE = "wire"
# parties of which there is one
SINGLE = {SERVER: "the server", AUTHORITY: "the key authority", WIRE: "the wire"}
# a comma before another party: names may contain commas
BETWEEN_PARTIES = re.compile(rf",(?=\s*(?:client:|(?:{'|'.join(SINGLE)})\s*(?:,|$)))")
RUN = "run"
TWIN = "unprotected"
COLUMNS = {RUN: "as run", TWIN: "unprotected"}
UNTESTED = "not applicable: it tests "
MOST_LETTERS = 300  # of an error in one line
WORDS = {VISIBLE: "Visible, as the report says", UNTOLD: "Could not tell", CHANCE: "At chance"}
READING = (
    "A score stands with its 95 % interval, and chance with its level and, in parentheses, the "
    "range that decides: 95 % of the same guesses against shuffled clients are in it. A score "
    "within it is at chance where the same attack is beyond it without the protection; else the "
    "audit could not tell."
)
Note = Callable[[str], None]


@dataclass(frozen=True)
class Adversary:
    """Parties that attack together.

    Args:
        parties: as a transcript takes them: "server", "wire", or a client's party.
        clients: positions of the clients among them, who give their data and secrets, too.
        text: the adversary in words.
    """

    parties: tuple[Party | str, ...]
    clients: tuple[int, ...]
    text: str

    @property
    def numbered(self) -> str:
        """Return the adversary in words, with clients by their positions and not their names."""
        words = [SINGLE[party] for party in self.parties if isinstance(party, str)]
        words += [f"client #{position}" for position in self.clients]
        return " and ".join(dict.fromkeys(words))


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
        no_twin: why there is no unprotected twin; empty where there is one.
        made: when the audit ended, in UTC.
        version: of the software that made it.
    """

    adversary: Adversary
    findings: dict[str, list[Finding]]
    protections: dict[str, Any]
    notes: list[str]
    seconds: float
    budget: float
    no_twin: str = ""
    made: datetime = field(default_factory=lambda: datetime.now(UTC))
    version: str = securecluster.__version__

    @property
    def tried(self) -> list[Finding]:
        """Return the findings on the run that have a score."""
        return [finding for finding in self.findings[RUN] if finding.score is not None]

    @property
    def broken(self) -> list[Finding]:
        """Return the findings that break a protection which the run claims."""
        return self.judged(BROKEN)

    @property
    def untold(self) -> list[str]:
        """Return the protections that were put to a test which could not tell whether they hold."""
        tested: dict[str, None] = {}
        for finding in self.tried:
            tested |= dict.fromkeys(finding.twins if finding.bounds else finding.claims)
        told = [*self.judged(CHANCE), *self.broken]
        names = {name for f in told for name in (f.held if f.verdict == CHANCE else f.claims)}
        # how much noise there is, only its own audits tell
        if not any(f.bounds for f in told):
            names -= {twins.NOISE, twins.SERVERS_NOISE}
        return [name for name in tested if name not in names]

    def judged(self, verdict: str) -> list[Finding]:
        """Return the findings on the run with a verdict.

        Args:
            verdict: of `findings.VERDICTS`.
        """
        return [finding for finding in self.findings[RUN] if finding.verdict == verdict]

    @property
    def failed(self) -> list[Finding]:
        """Return the findings of attacks that failed, on the run or on its twin."""
        columns = {id(column): column for column in self.findings.values()}
        return [finding for column in columns.values() for finding in column if finding.failed]

    @property
    def sentences(self) -> list[str]:
        """Return what the audit says of the run, in sentences, as the command prints them."""
        return headline(self)

    @property
    def table(self) -> dict[str, Any]:
        """Return the table that the command writes, as JSON values."""
        return content(self)

    def to_frame(self) -> DataFrame:
        """Return a row for each attack, on the run and on its twin.

        Raises:
            UsageError: pandas is not installed.
        """
        pandas = need("pandas")
        rows = []
        for column in (RUN, TWIN):
            for finding in self.findings[column]:
                judged = finding.verdict if column == RUN else finding.outcome
                row: dict[str, Any] = {"attack": finding.attack, "on": column, "verdict": judged}
                row |= {"reason": finding.reason, "seconds": finding.seconds}
                if finding.score is not None:
                    score = finding.score
                    row |= {"metric": score.metric, "score": score.value, "chance": score.chance}
                    if score.interval is not None:
                        row |= {"low": score.interval.low, "high": score.interval.high}
                    row["chance_low"] = score.chance_interval.low
                    row["chance_high"] = score.chance_interval.high
                rows.append(row)
        return pandas.DataFrame(rows)

    def show(self) -> None:
        """Print what the command prints."""
        show(self)


class OutOfTime(BaseException):
    """An attack went beyond the budget; no attack catches it by mistake."""


class Clock:
    """Time of an audit, in processor seconds of this process: other work changes no verdict.

    Args:
        budget: processor seconds that it may take.
    """

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self._start = time.process_time()

    @property
    def elapsed(self) -> float:
        """Return the processor seconds since the start."""
        return time.process_time() - self._start

    @property
    def left(self) -> float:
        """Return the seconds that are left; negative beyond the budget."""
        return self.budget - self.elapsed

    @contextmanager
    def limit(self) -> Iterator[None]:
        """Raise OutOfTime in this context when the budget is used up.

        An attack that waits uses no processor: it ends after `WAITING` times as long by the clock
        on the wall. Signals reach the main thread only, and not every system has these. Elsewhere
        an attack that has begun goes on to its end.
        """
        possible = hasattr(signal, "setitimer") and (
            threading.current_thread() is threading.main_thread()
        )
        if not possible or math.isinf(self.budget):
            yield
            return
        left = max(0.001, self.left)
        timers = {
            signal.SIGPROF: (signal.ITIMER_PROF, left),
            signal.SIGALRM: (signal.ITIMER_REAL, WAITING * left),
        }
        before = {number: signal.signal(number, _out_of_time) for number in timers}
        for timer, seconds in timers.values():
            signal.setitimer(timer, seconds)
        try:
            yield
        finally:
            for timer, _ in timers.values():
                signal.setitimer(timer, 0)
            for number, handler in before.items():
                signal.signal(number, handler)


def _out_of_time(number: int, frame: Any) -> None:
    raise OutOfTime


def adversary_of(names: Sequence[str], party: str, helpers: str | None = None) -> Adversary:
    """Return the adversary that a user specifies.

    Args:
        names: of the clients, in the order of their positions.
        party: "server", "authority", "wire" or "client:NAME"; "client:#2" is the client at position
            2, counted from 0.
        helpers: parties that collude with it, "client:NAME,client:NAME"; None for nobody.

    Raises:
        UsageError: a party that does not exist.
    """
    clients_by_name = ClientNames(names, position_text="client:#{}")
    texts = [party]
    if helpers:
        texts += BETWEEN_PARTIES.split(helpers)
    parties: list[Party | str] = []
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
        position = clients_by_name.parsed(name)
        parties.append(client(position))
        clients.append(position)
        words.append(f"client {printable(names[position])}")
    # the same client may be given by its name and by its position
    text = " and ".join(dict.fromkeys(words))
    return Adversary(tuple(parties), tuple(dict.fromkeys(clients)), text)


def audited(
    run: FinishedRun | ClusteringProtocol | Path | str,
    federation: Federation,
    adversary: Adversary | str = SERVER,
    budget: float = BUDGET,
    attacks: Sequence[str] | None = None,
    note: Note = lambda text: None,
    progress: bool | None = False,
) -> Audit:
    """Return the results of all attacks on a run and on its unprotected twin.

    An attack that fails ends no audit: it is among `Audit.failed`, with its traceback.

    Args:
        run: a folder, what `open_run` returns of it, or the object that was fitted in it.
        federation: its clients.
        adversary: whose view is attacked; a text as `audit --as` takes it.
        budget: processor seconds; what does not fit is skipped, and named.
        attacks: names of attacks; None for all registered ones.
        note: called with a sentence on what is going on.
        progress: show a bar of the attacks that are done; None as `audit` takes it.

    Raises:
        UsageError: no run, no positive budget, an unknown attack, or a party that does not exist.
    """
    if not budget > 0:
        raise UsageError(f"the budget is a positive number of seconds, not {budget:g}")
    run = finished(run)
    if isinstance(adversary, str):
        adversary = adversary_of(run.names, adversary)
    if attacks is not None and not attacks:
        raise UsageError("no attacks were given: name one, or leave the option out for all")
    chosen = [attack_named(name) for name in attack_names() if attacks is None]
    chosen += [attack_named(name) for name in attacks or ()]
    _check_secret(run, adversary)
    clock = Clock(budget)
    notes: list[str] = []

    def say(text: str) -> None:
        notes.append(text)
        note(text)

    protecting = twins.protections_of(run.protocol)
    if AUTHORITY in adversary.parties and not run.protocol.pairs.by_authority:
        raise UsageError(
            "this run has no key authority, since nothing in it is encrypted: give --as server"
        )
    time_left = clock.left / 2 if protecting else clock.left
    done = count(1)
    with bar("audit", (1 + bool(protecting)) * len(chosen), progress) as advance:
        target = _Target(run, federation, adversary, say, lambda: advance(next(done)))
        findings = {RUN: _column(target, chosen, RUN, Clock(time_left))}
        if protecting:
            # a mechanism that the run does not have is not tried on its twin either
            untested = {finding.attack: finding for finding in findings[RUN] if _untested(finding)}
            single = _Twins(target)
            time_left = clock.left * (LEFT_FOR_ALL if single.further else 1)
            findings[TWIN] = _column(target, chosen, TWIN, Clock(time_left), untested)
            findings[RUN] = [
                replace(finding, twins=single.findings(attack, finding, twin, clock))
                for attack, finding, twin in zip(chosen, *findings.values(), strict=True)
            ]
    if not protecting:
        # without protections the two are the same run
        findings[TWIN] = findings[RUN]
        say("The run is its own twin: it has no mask, no noise and no secure sums.")
    return Audit(adversary, findings, protecting, notes, clock.elapsed, budget)


def audit(
    run: FinishedRun | ClusteringProtocol | Path | str,
    federation: Federation | None = None,
    *,
    adversary: str = SERVER,
    helpers: str | None = None,
    budget: float = BUDGET,
    attacks: Sequence[str] | None = None,
    progress: bool | None = None,
) -> Audit:
    """Attack a finished run and its unprotected twin, as the command `audit` does.

    Args:
        run: a run's folder, or the object that was fitted in it.
        federation: the clients; None makes those of a simulation again.
        adversary: whose view: "server", "authority", "wire" or "client:NAME".
        helpers: who colludes, as "client:3,client:5"; None for nobody.
        budget: processor seconds; what does not fit is skipped, and named.
        attacks: names of attacks, or "module:Class" of others; None for all registered ones.
        progress: show a bar of the attacks that are done, and the time left. None shows it in
            notebooks and at the prompt of a terminal only.

    Returns:
        The results: `findings`, `broken`, `failed`, `sentences`, `table` and `show()`.

    Raises:
        UsageError: no finished run, an unknown attack or party, or data of your own that were not
            given.
    """
    target = finished(run)
    parties = adversary_of(target.names, adversary, helpers)
    clients = federation_of(target) if federation is None else federation
    return audited(target, clients, parties, budget, attacks, progress=progress)


def finished(run: FinishedRun | ClusteringProtocol | Path | str) -> FinishedRun:
    """Return a finished run by its folder, or by the object that was fitted in it.

    Args:
        run: a folder, what `open_run` returns of it, or the object that was fitted in it.

    Raises:
        UsageError: none of these, or an object that was fitted without a folder.
    """
    if isinstance(run, FinishedRun):
        return run
    if isinstance(run, Path | str):
        return open_run(Path(run), "audit")
    if not isinstance(run, ClusteringProtocol):
        raise UsageError(
            f"an audit takes the folder of a run, or the object that was fitted in it, and not "
            f"{type(run).__name__}"
        )
    folder = getattr(run, "folder", None)
    if folder is None:
        raise UsageError(
            f"this {type(run).__name__} was fitted in no folder: an audit reads what a run left in "
            'its folder, so fit it with folder="..."'
        )
    # the folder does not hold objects of the user's own, such as a module
    protocol = type(run)(**run.get_params())
    return open_run(folder, "audit", protocol)


def _check_secret(run: FinishedRun, adversary: Adversary) -> None:
    """Raise RunFolderError for a run whose secret was removed: it can be neither read nor repeated.

    A server's folder has none, since each client has keys of its own.

    Args:
        run: the run.
        adversary: whose view is attacked.

    Raises:
        RunFolderError: the secret was removed, or a server's folder has not all of the view.
    """
    from securecluster.folders import run_folder

    if run_folder.of_server(run.config):
        if run.config["settings"]["transcript"] != "full" or AUTHORITY in adversary.parties:
            raise RunFolderError(
                f"{run.folder} does not hold all that {adversary.text} observed, and cannot be "
                "repeated, since clients' keys are with the clients: give --as server, and let "
                "the server keep a full transcript"
            )
        return
    if not Settings(**run.config["settings"]).keys_from_seed and not run_secret.read(run.folder):
        raise run_secret.missing(run.folder)


class _Twins:
    """Twins of a run, each without one protection alone; each is run once, where it is needed.

    Args:
        target: what is attacked.
    """

    def __init__(self, target: _Target) -> None:
        self._target = target
        bare = twins.twin_of(target.run.protocol).get_params()
        self._protocols = twins.twins_of(target.run.protocol)
        # where it is the only protection, the unprotected twin is that without it alone
        self._alike = {name for name, twin in self._protocols.items() if twin.get_params() == bare}
        self._repeated: dict[str, tuple[ClusteringProtocol, list[Tap]] | str] = {}

    @property
    def further(self) -> bool:
        """Return True if there are twins beside the unprotected one."""
        return len(self._protocols) > len(self._alike)

    def findings(
        self, attack: Attack, finding: Finding, bare: Finding, clock: Clock
    ) -> dict[str, Finding]:
        """Return what an attack that is at chance on the run achieves on its twins.

        Args:
            attack: the attack.
            finding: on the run.
            bare: on the unprotected twin; of an audit of noise on the run without noise.
            clock: of the audit.
        """
        if finding.outcome not in (CHANCE, WITHIN):
            return {}
        if isinstance(attack, CanaryAudit):
            return {twins.noise_of(self._target.run.protocol): bare, **finding.twins}
        if attack.of_mechanism:
            # rows of its own have no other protection
            return {" and ".join(sorted(attack.hidden_by)): bare}
        if self._alike:
            return dict.fromkeys(self._alike, bare)
        found = {EVERYTHING: bare}
        if bare.outcome == BETTER:
            for name in self._protocols:
                found[name] = self._attacked(attack, name, clock)
        return found

    def _attacked(self, attack: Attack, name: str, clock: Clock) -> Finding:
        """Return what an attack achieves on the twin without one protection."""
        protocol = self._protocols[name]
        target = self._target
        if AUTHORITY in target.adversary.parties and not protocol.pairs.by_authority:
            target = replace(target, adversary=_without_authority(target.adversary))
        if name not in self._repeated:
            try:
                self._repeated[name] = _repeated(target, protocol, clock)
            except OutOfTime:
                self._repeated[name] = "skipped: the budget was used up"
            except UsageError as error:
                self._repeated[name] = f"not applicable: {error}"
        made = self._repeated[name]
        if isinstance(made, str):
            return Finding(attack.name, None, made, 0.0)
        return _attacked(attack, target, *made, clock)


@dataclass(frozen=True)
class _Target:
    """Target of attacks, and its attacker.

    Args:
        run: the run.
        federation: its clients.
        adversary: whose view is attacked.
        say: called with a sentence on what was repeated or left out.
        step: called after each attack.
        scenes: that attacks which read alike share.
    """

    run: FinishedRun
    federation: Federation
    adversary: Adversary
    say: Note
    step: Callable[[], None]
    scenes: Scenes = field(default_factory=dict, repr=False)


def _column(
    target: _Target,
    attacks: Sequence[Attack],
    column: str,
    clock: Clock,
    untested: Mapping[str, Finding] | None = None,
) -> list[Finding]:
    """Return the findings on the run or on its twin.

    Args:
        target: what is attacked.
        attacks: to be run.
        column: `RUN` or `TWIN`.
        clock: of this column.
        untested: findings of attacks that are not tried, by name.
    """
    untested = dict(untested or {})
    if column == TWIN and AUTHORITY in target.adversary.parties:
        target = replace(target, adversary=_without_authority(target.adversary))
        target.say("The unprotected run has no key authority: its server attacks it.")
    try:
        fitted, taps = _fitted(target, column, clock)
    except OutOfTime:
        reason = f"skipped: repeating the run did not fit into {clock.budget:.0f} s of the budget"
        return [Finding(attack.name, None, reason, 0.0) for attack in attacks]
    findings = []
    claims: dict[str, tuple[str, ...]] = {}
    if column == RUN:
        claims = _claims(target, attacks, fitted)
        untested = _untried(attacks, claims)
    # one repetition with canaries serves all audits of the same releases
    repetitions: dict[Any, Planted] = {}
    for position, attack in enumerate(attacks):
        share = clock.left
        # the first slow attack must not take the time of all others
        if position < len(attacks) - 1:
            share /= 2
        if attack.name in untested:
            findings.append(untested[attack.name])
        elif isinstance(attack, CanaryAudit):
            findings.append(_bounded(attack, target, column, Clock(share), repetitions))
        else:
            finding = _attacked(attack, target, fitted, taps, Clock(share))
            findings.append(replace(finding, claims=claims.get(attack.name, ())))
        target.step()
    return findings


def _claims(
    target: _Target, attacks: Sequence[Attack], fitted: ClusteringProtocol
) -> dict[str, tuple[str, ...]]:
    """Return by attack the protections of the run that are said to hide what it guesses.

    Args:
        target: what is attacked.
        attacks: to be run.
        fitted: the run.
    """
    disclosed = disclosures(fitted.result_)
    adversary = target.adversary
    clients = len(target.federation)
    claims = {}
    for attack in attacks:
        claims[attack.name] = protections.claimed(
            attack, disclosed, adversary.parties, adversary.clients, clients
        )
    return claims


def _untried(
    attacks: Sequence[Attack], claims: Mapping[str, tuple[str, ...]]
) -> dict[str, Finding]:
    """Return the findings of attacks on mechanisms that the run does not have.

    Args:
        attacks: to be run.
        claims: by attack, the protections that the run claims against it.
    """
    findings = {}
    for attack in attacks:
        if attack.of_mechanism and not claims[attack.name]:
            names = " and ".join(sorted(attack.hidden_by))
            reason = f"{UNTESTED}{names}, which this run does not claim"
            findings[attack.name] = Finding(attack.name, None, reason, 0.0)
    return findings


def _untested(finding: Finding) -> bool:
    return finding.reason.startswith(UNTESTED)


def _without_authority(adversary: Adversary) -> Adversary:
    """Return the parties that learn in the unprotected run what a key authority decrypts."""
    parties = [SERVER if party == AUTHORITY else party for party in adversary.parties]
    return replace(adversary, parties=tuple(dict.fromkeys(parties)))


def _fitted(target: _Target, column: str, clock: Clock) -> tuple[ClusteringProtocol, list[Tap]]:
    """Return the run with the contents of its frames, or its twin, and replies before protection.

    Whatever the folder does not hold is made by repeating the run.

    Raises:
        OutOfTime: it does not fit into the time that is left.
    """

    run = target.run
    in_folder = column == RUN and _holds_the_view(target)
    if in_folder:
        restored = type(run.protocol)(**run.protocol.get_params())
        restored.result_ = restored.fitted_class.of_folder(restored, run.folder)
        # a frame that is damaged is no failure of each attack that reads it
        restored.result_.transcript_.check()
        # only some attacks are compared with replies before protection
        obstacle = _obstacle(run, clock)
        if obstacle is not None:
            target.say(f"Attacks on masks have no score: {obstacle}.")
            return restored, []
    protocol = run.protocol
    if column == TWIN:
        protocol = twins.twin_of(run.protocol)
    secret = run_secret.read(run.folder) if column == RUN else None
    repeated, taps = _repeated(target, protocol, clock, secret)
    if in_folder:
        if restored.result_.transcript_.same_as(repeated.result_.transcript_):
            # a replay would give what the repetition's server was told
            OUTCOMES[restored.result_] = OUTCOMES[repeated.result_]
        return restored, taps
    if column == TWIN:
        target.say("The same run without protections, its twin, was made from config.json.")
    else:
        _say_repeated(target, repeated)
    return repeated, taps


def _repeated(
    target: _Target, protocol: ClusteringProtocol, clock: Clock, secret: bytes | None = None
) -> tuple[ClusteringProtocol, list[Tap]]:
    """Return the run once more, or a twin of it, and replies before protection.

    Args:
        target: what is attacked.
        protocol: of the run or of a twin.
        clock: that limits it.
        secret: of the run; None draws a new one.

    Raises:
        OutOfTime: it does not fit into the time that is left.
    """
    if target.run.result["seconds"] > clock.left:
        raise OutOfTime
    settings = replace(Settings(**target.run.config["settings"]), transcript="full")
    stopped = None
    if "stopped" in target.run.result:
        stopped = read_kept(target.run.folder).learned.stopped
    with clock.limit():
        return experiments.tapped(protocol, target.federation, settings, secret, stopped)


def _obstacle(run: FinishedRun, clock: Clock) -> str | None:
    """Return why a run whose contents are in its folder is not repeated; None where it is.

    Args:
        run: that is attacked.
        clock: of the audit.
    """
    from securecluster.folders import run_folder

    if run_folder.of_server(run.config):
        return "clients' keys are with the clients"
    if not _draws_alike(run):
        return "the clients of this run drew batches by their positions, as in earlier versions"
    if run.result["seconds"] > clock.left / 2:
        return "repeating the run takes too long"
    return None


def _draws_alike(run: FinishedRun) -> bool:
    """Return whether clients draw the batches of a run when it is repeated.

    Args:
        run: of this version, or of an earlier one, in which clients drew by their positions.
    """
    if called_by_position(run.config["clients"]):
        return True
    return read_kept(run.folder).learned.named_draws


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
    if not _draws_alike(target.run):
        target.say("Its clients drew batches by their positions then, and by their names now.")
    if [int(label) for label in repeated.labels_] != target.run.result["labels"]:
        target.say("The repeated run found other clusters than the run did.")


def _attacked(
    attack: Attack, target: _Target, fitted: ClusteringProtocol, taps: Sequence[Tap], clock: Clock
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
    start = time.process_time()
    try:
        with clock.limit():
            return finding_of(
                attack, fitted, target.federation, target.adversary, taps, target.scenes
            )
    except OutOfTime:
        reason = f"skipped: {clock.budget:.1f} s of the budget were not enough"
    return Finding(attack.name, None, reason, time.process_time() - start)


def finding_of(
    attack: Attack,
    fitted: ClusteringProtocol,
    federation: Federation,
    adversary: Adversary,
    taps: Sequence[Tap] = (),
    scenes: Scenes | None = None,
) -> Finding:
    """Return what one attack achieves on one run; a mistake of the attack is a finding, too.

    Args:
        attack: to be run.
        fitted: the run, with a full transcript.
        federation: its clients.
        adversary: whose view is attacked.
        taps: the run's replies before protection, for scorers that compare with them.
        scenes: of one audit, for attacks that read alike; None makes this attack's anew.
    """
    start = time.process_time()
    guess: Guess | None = None
    truth: Truth | None = None
    result: Score | None = None
    trace = ""
    try:
        attack = _active(attack, fitted, federation, adversary)
        asks = asks_about_candidates(attack)
        key = (fitted.result_, adversary, attack.anonymous, attack.of_masks, asks)
        scenes = {} if scenes is None else scenes
        if key not in scenes:
            scenes[key] = _scene(attack, fitted, federation, adversary, taps)
        view, knowledge, truth = scenes[key]
        reason = unmet(attack, truth) or attack.applies(view, knowledge) or ""
        if not reason:
            guess = attack.run(view, knowledge)
            result = score(attack.scorer, guess, truth)
    except NoOutputsError as error:
        reason = f"not applicable: {error}"
    except Exception as error:
        # an installed package's attack must not end the audit of all others
        reason = failure(error)
        trace = traceback_of(error)
    seconds = time.process_time() - start
    if result is None:
        return Finding(attack.name, None, reason, seconds, trace=trace)
    return Finding(attack.name, result, "", seconds, guess, truth)


def _scene(
    attack: Attack,
    fitted: ClusteringProtocol,
    federation: Federation,
    adversary: Adversary,
    taps: Sequence[Tap],
) -> tuple[View, Knowledge, Truth]:
    """Return what an attack reads, knows and is compared with."""
    view = view_of(fitted, adversary.parties, attack.anonymous)
    samples = known_samples(federation, asks_about_candidates(attack))
    knowledge = knowledge_of(fitted, federation, map(at, adversary.clients), samples, taps)
    truth = truth_of(fitted, federation, view, taps)
    return (*undone(fitted, attack, view, knowledge), truth)


def failure(error: Exception) -> str:
    """Return in one line that an attack failed, and how."""
    text = str(error)
    if not isinstance(error, SecureClusterError):
        text = f"{type(error).__name__}: {text}"
    return FAILED + printable(" ".join(text.split()))[:MOST_LETTERS]


def _bounded(
    attack: CanaryAudit, target: _Target, column: str, clock: Clock, repetitions: dict[Any, Planted]
) -> Finding:
    """Return the lower bound of ε that an audit of noise gives, and the ledger's ε.

    Args:
        attack: the audit.
        target: the run.
        column: `RUN`, or `TWIN` for a repetition without noise.
        clock: of this audit.
        repetitions: by the kind of releases, those that were made already.
    """
    start = time.process_time()
    protocol = target.run.protocol
    config = target.run.config["network"]
    result: Score | None = None
    further: dict[str, Finding] = {}
    claimed: float | None = None
    reason = trace = ""
    if not any(config.get(name) for name in ("noise", "gram_noise", "signature_noise")):
        return Finding(attack.name, None, "not applicable: the run has no noise", 0.0)
    if clock.left <= 0.01:
        return Finding(attack.name, None, "skipped: the budget was used up", 0.0)
    if column == TWIN:
        protocol = twins.noiseless(protocol)
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
            further = _with_half(attack, planted, result) if column == RUN else {}
    except OutOfTime:
        reason = f"skipped: {clock.budget:.1f} s of the budget were not enough"
    except UsageError as error:
        reason = f"not applicable: {error}"
    except Exception as error:
        reason = failure(error)
        trace = traceback_of(error)
    seconds = time.process_time() - start
    return Finding(
        attack.name, result, reason, seconds, claimed=claimed, trace=trace, twins=further
    )


def _with_half(attack: CanaryAudit, planted: Planted, result: Score) -> dict[str, Finding]:
    """Return what an audit of noise would find with half of the noise that the ledger has.

    Args:
        attack: the audit.
        planted: what the run's repetition shows.
        result: of the audit.
    """
    if not math.isfinite(planted.claimed):
        return {}
    half = replace(result, value=with_half_the_noise(planted, attack.scorer))
    return {HALF: Finding(attack.name, half, "", 0.0, claimed=planted.claimed)}


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
        kept_run = fitted.kept_
        active.endpoint = build_client(
            fitted,
            federation,
            kept_run.learned.settings,
            key_source=KeySource(secrets=kept_run.secrets()),
        )
    if isinstance(attack, CraftedModel):
        active.clients = partial(_with_server, fitted, federation)
    if isinstance(attack, TwoSums) and fitted.name == attack.protocol:
        active.second = _runs_without_one(attack, fitted, federation, adversary)
    made: Attack = active
    return made


def _with_server(fitted: ClusteringProtocol, federation: Federation, server: Server) -> None:
    """Run the clients of a run, as they were before it, with a server of the adversary's own."""
    kept = fitted.kept_
    experiments.with_server(
        fitted, federation, server, replace(kept.learned.settings, transcript="full"), kept.secret
    )


def _runs_without_one(
    attack: Attack, fitted: ClusteringProtocol, federation: Federation, adversary: Adversary
) -> dict[int, View]:
    """Return by client what the server sees of the same run without it, for the first clients.

    They stay with the run, since several attacks read them. Colluders are in them, too.
    """
    runs: dict[int, ClusteringProtocol] = vars(fitted).setdefault("runs_without_one_", {})
    settings = replace(fitted.kept_.learned.settings, transcript="full")
    views = {}
    for position in range(min(LEAVING, len(federation))):
        if position in adversary.clients:
            continue
        if position not in runs:
            excluded = at(position)
            try:
                runs[position] = experiments.without_client(fitted, federation, excluded, settings)
            except UsageError:
                # the method refuses as few clients, so that no server has such a run
                break
        others = federation.select([at(k) for k in range(len(federation)) if k != position])
        helpers = [at(helper - (helper > position)) for helper in adversary.clients]
        knowledge = knowledge_of(runs[position], others, helpers)
        view = view_of(runs[position], (SERVER,))
        views[position], _ = undone(runs[position], attack, view, knowledge)
    return views


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
    from securecluster.folders import run_folder

    if run_folder.of_server(run.config):
        raise UsageError(
            f"{run.folder} is a server's, whose clients are nodes elsewhere: attacks are measured "
            "against the clients' data, so give them, with securecluster.audit(folder, federation)"
        )
    if run.config["simulation"] is None:
        raise UsageError(
            f"{run.folder} was run from Python on data of your own, which it does not hold: audit "
            "it there, with securecluster.audit(run, federation)"
        )
    plan, config = loading.plan_of(run.folder)
    return execution.federation_of(run.folder, plan, config)


def content(audit: Audit) -> dict[str, Any]:
    """Return an audit as JSON values, without any seed, key or data of clients.

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
                "learns": finding.learns,
                "harm": finding.harm.name.lower(),
                RUN: _entry(finding, on_run=True),
                TWIN: _entry(twin, on_run=False),
            }
        )
    return {
        "schema": SCHEMA,
        "adversary": audit.adversary.text,
        "numbered": audit.adversary.numbered,
        "made": audit.made.isoformat(timespec="seconds"),
        "version": audit.version,
        "headline": headline(audit),
        "reading": READING,
        "protections": audit.protections,
        "notes": audit.notes,
        "budget": audit.budget if math.isfinite(audit.budget) else None,
        "seconds": round(audit.seconds, 1),
        "attacks": rows,
    }


def _entry(finding: Finding, on_run: bool) -> dict[str, Any]:
    """Return one finding as JSON values.

    Args:
        finding: on the run, or on its twin.
        on_run: True on the run, whose protections the finding is about.
    """
    entry: dict[str, Any] = {"verdict": finding.outcome, "score": None}
    if on_run:
        entry["verdict"] = finding.verdict
        entry["why"] = finding.why
        entry["claims"] = list(finding.claims)
        entry["held"] = list(finding.held)
        entry["without"] = [
            {"protection": name, **_entry(twin, on_run=False)}
            for name, twin in finding.twins.items()
        ]
    if finding.score is not None:
        entry["score"] = dataclasses.asdict(finding.score)
    if finding.claimed is not None:
        # JSON has no infinity
        entry["ledger_epsilon"] = finding.claimed if math.isfinite(finding.claimed) else None
    if finding.said:
        entry["said"] = list(finding.said)
    entry["seconds"] = round(finding.seconds, 2)
    return entry


def headline(audit: Audit) -> list[str]:
    """Return what an audit found, in a few sentences.

    Args:
        audit: the results.
    """
    return [sentence(audit), *lines(audit)]


def sentence(audit: Audit) -> str:
    """Return what an audit found, in one sentence.

    Args:
        audit: the results.
    """
    held = [f for f in audit.judged(CHANCE) if f.held]
    if audit.broken:
        names = [f"{finding.protections} by {finding.attack}" for finding in audit.broken]
        return f"Broken, although the run claims it: {', '.join(names)}."
    if held:
        names = [f"{finding.protections} against {finding.attack}" for finding in held]
        return f"No protection that the run claims was broken, and these held: {', '.join(names)}."
    if not audit.tried:
        return "Nothing was tried, so this audit says nothing of what the adversary could learn."
    if audit.judged(VISIBLE):
        return "What this run shows can be read, and no protection was put to the test."
    return "This audit could not tell whether any protection of the run holds."


def lines(audit: Audit) -> list[str]:
    """Return by verdict which attacks have it, in a few lines.

    Args:
        audit: the results.
    """
    on_run = audit.findings[RUN]
    listed = [f"{len(audit.tried)} of {len(on_run)} attacks could be tried on the run."]
    for verdict in (VISIBLE, UNTOLD, CHANCE):
        names = [finding.attack for finding in audit.judged(verdict)]
        if names:
            listed.append(f"{WORDS[verdict]}: {', '.join(names)}.")
    held = [finding for finding in on_run if finding.held]
    if held and all(attack_named(finding.attack).of_mechanism for finding in held):
        listed.append(
            "What held are mechanisms, with rows of the attacks' own: nothing that this run "
            "released was tested."
        )
    failed = [finding.attack for finding in on_run if finding.failed]
    if failed:
        listed.append(f"Failed: {', '.join(failed)}.")
    return listed


def unscored(
    audit: Audit, chosen: Callable[[Finding], bool] = lambda finding: True
) -> dict[str, list[str]]:
    """Return the attacks that have a score neither on the run nor on its twin, by the reason.

    Args:
        audit: the results.
        chosen: says of a finding on the run whether it is among them.
    """
    by_reason: dict[str, list[str]] = {}
    for finding, twin in zip(audit.findings[RUN], audit.findings[TWIN], strict=True):
        if finding.score is None and twin.score is None and chosen(finding):
            by_reason.setdefault(both_reasons(finding, twin), []).append(finding.attack)
    return by_reason


def without_errors(text: str) -> str:
    """Return why an attack has no score without the text of an error, which may name clients.

    Args:
        text: for one attack, or several.
    """
    before, failed, _ = text.partition(FAILED)
    if not failed:
        return text
    return f"{before}failed, as the printed table says"


def score_text(finding: Finding) -> str:
    """Return a score with its interval and what chance reaches, or why there is none.

    Args:
        finding: of one attack on one run.
    """
    result = finding.score
    if result is None:
        return finding.reason
    text = number(result.value)
    if result.interval is not None:
        text += f" ({number(result.interval.low)} to {number(result.interval.high)})"
    reached = result.chance_interval
    chance = f"{number(result.chance)} ({number(reached.low)} to {number(reached.high)})"
    text = f"{text}; chance {chance}"
    if finding.claimed is None:
        return text
    claimed = f"{finding.claimed:.3g}" if math.isfinite(finding.claimed) else "infinite"
    return f"{text}; the ledger's ε is {claimed}"


def scored(audit: Audit) -> Iterator[tuple[Finding, Finding, str]]:
    """Yield the findings on the run and on its twin of attacks with a score, and its metric.

    Args:
        audit: the results.
    """
    for finding, twin in zip(audit.findings[RUN], audit.findings[TWIN], strict=True):
        result = finding.score or twin.score
        if result is not None:
            better = "higher" if result.higher else "lower"
            yield finding, twin, f"{result.metric} ({better} is a better attack)"


def show(audit: Audit) -> None:
    """Print the table attack × as run × unprotected.

    Args:
        audit: the results.
    """
    from securecluster.reports import terminal

    # attacks of installed packages may have names that look like markup
    console = terminal.Console(markup=False)
    title = f"attacks by {audit.adversary.text}"
    rows = []
    for finding, twin, metric in scored(audit):
        name = terminal.lines(finding.attack, metric)
        rows.append((name, _cell(finding, finding.judgement), _cell(twin, twin.outcome)))
    if rows:
        table = terminal.table(("attack", *COLUMNS.values()), rows, title)
        table.show_lines = True
        # a name is one word, which would else be broken anywhere
        table.columns[0].width = max(len(finding.attack) for finding in audit.findings[RUN])
        console.print(table)
        console.print(READING)
    else:
        console.print(title)
    reasons = [f"{', '.join(names)}: {reason}" for reason, names in unscored(audit).items()]
    for text in [*reasons, *audit.notes, *headline(audit)]:
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


def _cell(finding: Finding, judgement: str) -> Text:
    """Return a score, and below it what is to be said of it.

    Args:
        finding: of one attack on one run.
        judgement: its verdict.
    """
    from securecluster.reports import terminal

    if finding.score is None:
        return terminal.lines(finding.reason)
    return terminal.lines(score_text(finding), judgement, *finding.said)
