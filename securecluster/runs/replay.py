"""Replay of a run: the server alone against the transcript, with no client in the process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import securecluster
from securecluster.core import atomic_files, manifest
from securecluster.core.randomness import Randomness
from securecluster.core.serialization import pack, structured, unpack
from securecluster.errors import ReplayError, RunFolderError, SecureClusterError
from securecluster.folders.run_folder import (
    CONFIG,
    RESULT,
    TRANSCRIPT,
    RunPlan,
    finished,
    result_of,
)
from securecluster.folders.schemas import Result, RunConfig
from securecluster.messaging.transcript import INDEX, Transcript, entry_of
from securecluster.parties.derived import call_types, program_of
from securecluster.parties.labels import UNKNOWN_LABEL
from securecluster.parties.program import UNKNOWN
from securecluster.parties.server_half import replayed
from securecluster.privacy import run_secret
from securecluster.privacy.dp.ledger import Event, Release
from securecluster.results.fitted_state import FittedState
from securecluster.results.saving import read_kept
from securecluster.statements.privacy_section import section
from securecluster.statements.result_json import stopped

if TYPE_CHECKING:
    from securecluster.results.fitted import FittedRun

PEEKED = ": it used something that no message contained"
# what an accountant says, which may have become sharper since
EPSILONS = ("epsilon", "epsilon_rdp", "epsilon_replace")
ABSENT = object()


@dataclass(frozen=True)
class Replayed:
    """Counts of a replay.

    Args:
        calls: calls that the server made again.
        unused: releases of single clients that the ledger has beside those of these calls. They
            were sent to a server that was killed before it used them, and ε counts them.
        restated: entries of the privacy of result.json that another version of this toolkit wrote,
            and that this one words, or computes, in another way: of these nothing is verified.
    """

    calls: int
    unused: int
    restated: tuple[str, ...] = ()


def replay(plan: RunPlan, config: RunConfig, folder: Path) -> Replayed:
    """Replay a finished run folder.

    Every file must be what the run wrote, and the index must agree with the frames. The server must
    make the same requests and end in the same state, from which the result's labels, bytes and
    privacy must follow, except for labels that the server never learns. The ledger must have every
    release of these calls; it may have more, which were sent to a server that was killed, and whose
    frames are gone. Metrics and the history are the observer's, and cannot be replayed.

    Args:
        plan: of the run.
        config: content of config.json.
        folder: of the run.

    Raises:
        ReplayError: the server makes other requests, or ends in another state, than in the run.
        RunFolderError: the folder cannot be replayed, or a file is missing or damaged.
    """
    if plan.settings.transcript != "full" or not finished(folder):
        raise RunFolderError(
            f"{folder} cannot be replayed: that takes a finished run with --transcript full"
        )
    result = result_of(folder)
    recorded = read_kept(folder)
    settings = plan.settings
    if recorded.secret is None and not settings.keys_from_seed and not recorded.of_server:
        raise run_secret.missing(folder)
    agreed_config = recorded.learned.config
    if agreed_config != config["network"]:
        raise ReplayError(
            f"{folder / CONFIG} differs from the configuration that clients and server agreed on"
        )
    types_of = partial(call_types, plan.protocol)
    names = config["clients"]
    transcript = Transcript.read(settings.transcript, folder / TRANSCRIPT, types_of, names)
    secrets = recorded.secrets()
    try:
        _check_index(folder / TRANSCRIPT, transcript)
        unused, restated = _compare(folder, plan, result, recorded, transcript, secrets)
    except RunFolderError:
        raise
    # A changed program may also fail where the run's did not.
    except Exception as error:
        now = program_of(plan.protocol)
        then = recorded.learned.program
        if now == then != UNKNOWN:
            raise
        raise ReplayError(_of_another_program(folder, error, UNKNOWN in (now, then))) from error
    return Replayed(transcript.count, unused, restated)


def _compare(
    folder: Path,
    plan: RunPlan,
    result: Result,
    recorded: FittedState,
    transcript: Transcript,
    secrets: Randomness,
) -> tuple[int, tuple[str, ...]]:
    """Run the server again, and compare it with the record.

    Args:
        folder: of the run.
        plan: of the run.
        result: content of result.json.
        recorded: the result of the run.
        transcript: of the run.
        secrets: secret random streams of the run.

    Returns:
        The number of unused releases, and the entries that another version stated otherwise.

    Raises:
        ReplayError: the server makes other requests, or ends in another state, than in the run.
    """
    settings = plan.settings
    # threads and device of the run: others round sums differently
    state, network = replayed(
        plan.protocol,
        transcript,
        recorded.learned.config,
        settings.threads,
        settings.device,
        secrets=secrets,
        key=recorded.key,
        stopped=recorded.learned.stopped,
    )
    of_other_version = _is_of_other_version(result, recorded.learned.program, plan)
    server = recorded.server
    if of_other_version and server is not None:
        # with the defaults of what states of that version lack
        server = pack(unpack(server, type(state)))
    if pack(state) != server:
        raise ReplayError(
            f"{folder}: the server's final state differs from the recorded one{PEEKED}"
        )

    ledger_file = folder / "ledger.jsonl"
    events = _recorded_events(ledger_file)
    unused = _check_ledger(ledger_file, events, network.ledger.events)
    # ε counts unused releases too, so the result's privacy follows from all recorded events
    network.ledger.events = events
    # these are public, and no message carries them
    network.ledger.samples = recorded.learned.network.ledger.samples
    network.ledger.names = recorded.learned.network.ledger.names
    network.ledger.unit = recorded.learned.network.ledger.unit
    fitted: FittedRun = plan.protocol.fitted_class.of_folder(plan.protocol, folder)
    fitted.ledger_ = network.ledger
    restated = _check_result(
        folder / RESULT, result, fitted, state, transcript, restates=of_other_version
    )
    return unused, restated


def _of_another_program(folder: Path, error: Exception, unknown: bool) -> str:
    """Return the sentence on a replay that fails with a program that may not be the run's.

    Args:
        folder: of the run.
        error: by which the replay fails.
        unknown: whether nobody knows if the program has changed.
    """
    # the sentence of an error that was meant for a reader
    reason = type(error).__name__
    if isinstance(error, SecureClusterError):
        reason = str(error).removeprefix(f"{folder}: ").removesuffix(PEEKED)
    if unknown:
        return (
            f"{folder}: the replay differs from the run, which does not say by which program it "
            "was made: either the program has changed since, or the server used something that no "
            f"message contained ({reason})"
        )
    return (
        f"{folder}: the program has changed since this run, and a replay differs: replay it with "
        f"the version that made it ({reason})"
    )


def _check_index(folder: Path, transcript: Transcript) -> None:
    """Check that the index of a transcript agrees with its frames.

    Args:
        folder: of the transcript.
        transcript: opened on this folder.

    Raises:
        RunFolderError: a file of frames that the index does not list.
        ReplayError: a line of the index that differs from the frames of its call.
    """
    for path in transcript.surplus():
        raise RunFolderError(
            f"{path} belongs to no call that the index lists: one of the two is not the run's"
        )
    for position, entry in enumerate(transcript.entries):
        content = transcript.content(position)
        if entry_of(*content) != entry:
            raise ReplayError(
                f"line {position + 1} of {folder / INDEX} differs from the frames of that call"
            )


def _recorded_events(path: Path) -> list[Event]:
    """Return the events of a ledger's file, which a run without releases does not have.

    Raises:
        RunFolderError: it does not parse.
    """
    data = b""
    if path.is_file():
        data = atomic_files.read(path)

    def decode(line: str) -> Event:
        return structured(json.loads(line), Event)

    return manifest.read_lines(path, data, decode)


def _check_ledger(path: Path, recorded: list[Event], repeated: list[Event]) -> int:
    """Check that a ledger has every release of the replay, and return how many more it has.

    Args:
        path: of the ledger's file.
        recorded: its events.
        repeated: the events of the replay.

    Raises:
        ReplayError: the ledger lacks a release, or records another one in its place.
    """
    if recorded == repeated:
        return 0
    # by client: a call that was made again after a kill may have had other clients
    counts: Counter[Release] = Counter()
    for event in recorded:
        counts.update(event.releases())
    for event in repeated:
        counts.subtract(event.releases())
    if any(count < 0 for count in counts.values()):
        raise ReplayError(f"{path} differs from the replay")
    return counts.total()


def _check_result(
    path: Path,
    result: Result,
    fitted: FittedRun,
    state: Any,
    transcript: Transcript,
    *,
    restates: bool,
) -> tuple[str, ...]:
    """Check that the labels, bytes and privacy of result.json follow from the replay.

    Args:
        path: of result.json.
        result: its content.
        fitted: the recorded result, with the replayed ledger.
        state: the server's final state.
        transcript: of the run.
        restates: whether another version wrote it, whose words may be others.

    Returns:
        The entries of its privacy that another version stated otherwise.

    Raises:
        ReplayError: an entry differs.
    """
    learned = fitted.kept_.learned
    # Some servers never learn the labels: those that the clients told the experimenter are as
    # recorded, and no replay can verify them.
    labels = list(learned.labels)
    if fitted.method.observer.server_knows_labels:
        labels = [int(label) for label in state.labels]
    names = list(learned.names)
    seed = None if learned.settings.keys_from_seed else learned.config["seed"]
    # through JSON, as the file was written: tuples become lists
    privacy = json.loads(json.dumps(section(fitted)))
    own_fields = json.loads(json.dumps(fitted.method.report_fields(state)))
    repeated = {
        **own_fields,
        "protocol": fitted.method.name,
        "names": names,
        "clients": len(names),
        "labels": labels,
        "clusters": len(set(labels) - {UNKNOWN_LABEL}),
        "seed": seed,
        "bytes": transcript.totals(),
        "stopped": stopped(fitted).get("stopped"),
    }
    recorded: Mapping[str, Any] = result
    for name, value in repeated.items():
        if recorded.get(name) != value:
            raise ReplayError(f"{path} differs from the replay in its {name}")
    differing = _differing(result["privacy"], privacy)
    restated = []
    if restates:
        restated = [name for name in differing if _is_statement(name, privacy.get(name, ABSENT))]
    if differing != restated:
        raise ReplayError(f"{path} differs from the replay in its privacy")
    return tuple(_with_numbers(name, result["privacy"], privacy) for name in restated)


def _is_of_other_version(result: Result, program: str, plan: RunPlan) -> bool:
    """Return whether another version wrote a result, by its own word and by its program's digest.

    Args:
        result: content of result.json.
        program: digest of the program of the run, which is also one of the version.
        plan: of the run.
    """
    if result["version"] == securecluster.__version__:
        return False
    return program == UNKNOWN or program != program_of(plan.protocol)


def _with_numbers(name: str, recorded: Mapping[str, Any], repeated: Mapping[str, Any]) -> str:
    """Return the name of an entry, of an ε with what it is there and here."""
    if name not in EPSILONS:
        return name
    there, here = (_as_epsilon(privacy.get(name)) for privacy in (recorded, repeated))
    return f"{name} ({there} there, {here} here)"


def _as_epsilon(value: float | None) -> str:
    """Return an ε in digits; null is ∞."""
    return "∞" if value is None else f"{value:.4g}"


def _differing(recorded: Mapping[str, Any], repeated: Mapping[str, Any]) -> list[str]:
    """Return the entries of two privacy sections that are not the same, by name."""
    names = sorted({*recorded, *repeated})
    return [name for name in names if recorded.get(name, ABSENT) != repeated.get(name, ABSENT)]


def _is_statement(name: str, value: Any) -> bool:
    """Return whether an entry of a privacy section is words or an ε, which versions may restate.

    Args:
        name: of the entry.
        value: of this version; `ABSENT` if it has none.
    """
    if name in EPSILONS or value is ABSENT or isinstance(value, str):
        return True
    if isinstance(value, dict):
        return "sentence" in value
    return isinstance(value, list) and all(isinstance(line, str) for line in value)
