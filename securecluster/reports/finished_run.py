"""A finished run's folder as reports and audits read it, and the command that repeats the run."""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securecluster.core import atomic_files
from securecluster.core.option_groups import option_groups
from securecluster.core.validation import check_ranges, python_only_fields
from securecluster.data.simulation import Simulation
from securecluster.errors import RunFolderError, UsageError
from securecluster.folders import run_folder
from securecluster.folders.schemas import Result, RunConfig, checked_lines
from securecluster.privacy.dp.ledger import Ledger, Release
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.reports import loading
from securecluster.results.fitted_state import FittedState
from securecluster.results.saving import LEARNED, read_kept
from securecluster.runtime.settings import Settings

MOST_PRICES = 12  # points of ε over rounds: with sampled batches one may take seconds


@dataclass(frozen=True)
class FinishedRun:
    """Files of a finished run, after a check of their digests and of the types in them.

    Args:
        folder: of the run.
        config: content of config.json.
        result: content of result.json.
        history: lines of history.jsonl.
        protocol: with the run's hyper-parameters; objects of the user's own are left out.
        ledger: of the run.
        kept: the state at the end of the run.
    """

    folder: Path
    config: RunConfig
    result: Result
    history: list[dict[str, Any]]
    protocol: ClusteringProtocol
    ledger: Ledger
    kept: FittedState

    @property
    def names(self) -> tuple[str, ...]:
        """Return the clients' names in the order of their numbers."""
        return tuple(self.result["names"])

    @property
    def pictures(self) -> list[Path]:
        """Return the paths of the run's pictures; links are none, since no run writes any."""
        paths = [self.folder / name for name in run_folder.PICTURES]
        return [path for path in paths if path.is_file() and not path.is_symlink()]


def open_run(
    folder: Path | str, command: str = "open_run", protocol: ClusteringProtocol | None = None
) -> FinishedRun:
    """Return what a finished run left in its folder.

    Args:
        folder: of the run.
        command: that reads it, for the sentence of an error.
        protocol: that ran, with objects of the user's own, or of an author's own class; by default
            made of config.json, without such objects.

    Raises:
        RunFolderError: no run folder, or a damaged one.
        UsageError: a comparison, a sweep, or a run that has not ended.
    """
    folder = Path(folder)
    names = loading.compared(folder)
    if names is not None:
        raise UsageError(
            f"{folder} holds a comparison: {command} takes one of its runs, such as "
            f"{folder / names[0]}"
        )
    config = (run_folder if protocol else loading).run_config(folder)
    if not run_folder.finished(folder):
        raise _not_ended(folder, config)
    result = run_folder.result_of(folder)
    stored = read_kept(folder)
    return FinishedRun(
        folder=folder,
        config=config,
        result=result,
        history=checked_lines(folder / LEARNED, stored.learned.history),
        protocol=protocol or protocol_of(folder, config),
        ledger=_ledger(folder, stored),
        kept=stored,
    )


def _not_ended(folder: Path, config: RunConfig) -> UsageError:
    """Return the error for a run that has not ended, which says how it gets there."""
    if run_folder.is_being_written(folder):
        history = folder / "history.jsonl"
        rounds = atomic_files.read(history).count(b"\n") if history.is_file() else 0
        return UsageError(
            f"the run in {folder} is under way in another process, and has ended {rounds} of its "
            "rounds: wait for its end"
        )
    if run_folder.of_server(config):
        return UsageError(
            f"the run in {folder} has not ended, and its server has stopped: start it again with "
            "this folder, over Flower by flwr run with the same out, and it goes on"
        )
    return UsageError(
        f"the run in {folder} has not ended: go on with it first, with: securecluster resume "
        f"{shlex.quote(str(folder))}"
    )


def protocol_of(folder: Path, config: RunConfig) -> ClusteringProtocol:
    """Return the run's protocol without objects of the user's own.

    Raises:
        RunFolderError: an option of config.json that no run has.
    """
    params = {}
    for name, value in config["protocol"].items():
        # config.json has a description in place of an object
        if name != "name" and not isinstance(value, dict):
            params[name] = value
    protocol: ClusteringProtocol = loading.protocol_type(folder, config)(**params)
    try:
        for options in (*option_groups(protocol), protocol):
            check_ranges(options)
    except UsageError as error:
        raise loading.not_written(folder, error) from None
    return protocol


def _ledger(folder: Path, stored: FittedState) -> Ledger:
    """Return a copy of a run's ledger, which names every client with a release.

    Raises:
        RunFolderError: it does not.
    """
    ledger = stored.learned.network.ledger
    for event in ledger.events:
        if not ledger.names.keys() >= set(event.ids):
            raise RunFolderError(
                f"{folder / LEARNED} has releases of clients without a name: restore it from a "
                "copy, or run anew into another folder"
            )
    return Ledger(list(ledger.events), dict(ledger.samples), dict(ledger.names), ledger.unit)


def epsilon_by_client(ledger: Ledger, delta: float) -> dict[str, float]:
    """Return ε of each client that released anything, by name; equal histories are priced once.

    Args:
        ledger: of the run, which names all its clients.
        delta: δ of (ε, δ).
    """
    releases: dict[str, list[Release]] = {}
    for event in ledger.events:
        for release in event.releases():
            releases.setdefault(ledger.names[release.client], []).append(release)
    priced: dict[Any, float] = {}
    prices = {}
    for name, client_releases in releases.items():
        key = _history_key(ledger, name, client_releases)
        if key not in priced:
            priced[key] = ledger.of([name]).price(delta).epsilon
        prices[name] = priced[key]
    return prices


def _history_key(ledger: Ledger, name: str, releases: Sequence[Release]) -> Any:
    """Return what clients of equal cost have in common.

    Args:
        ledger: of the run.
        name: of a client.
        releases: of this client.
    """
    ids = {release.client for release in releases}
    digests = [release.digest for release in releases if release.digest]
    # a reply that was sent twice may cost once, and a client may be there twice: by itself
    if len(set(digests)) < len(digests) or len(ids) > 1:
        return name
    calls = Counter(release.call for release in releases)
    samples = {ledger.samples.get(client) for client in ids}
    return frozenset(calls.items()), frozenset(samples)


def epsilon_by_round(ledger: Ledger, delta: float) -> list[tuple[int, float]]:
    """Return ε of all releases up to some rounds: (round, ε), the last one among them.

    Args:
        ledger: of the run.
        delta: δ of (ε, δ).
    """
    rounds = sorted({event.round for event in ledger.events})
    step = max(1, -(-len(rounds) // MOST_PRICES))
    chosen = rounds[::-1][::step][::-1]
    points = []
    for last in chosen:
        events = [event for event in ledger.events if event.round <= last]
        price = dataclasses.replace(ledger, events=events).price(delta)
        points.append((last, price.epsilon))
    return points


def epsilon_of_field(ledger: Ledger, method: str, field: str, delta: float) -> float:
    """Return ε of the releases of one field alone.

    Args:
        ledger: of the run.
        method: client method whose replies have the field.
        field: its name.
        delta: δ of (ε, δ).
    """
    events = []
    for event in ledger.events:
        if event.method == method and field in event.fields:
            events.append(event)
    return dataclasses.replace(ledger, events=events).price(delta).epsilon


def command_of(run: FinishedRun) -> str | None:
    """Return the command that repeats a run, without its seed.

    The seed is left out: with it, a simulation's data can be made again.

    Args:
        run: the run.

    Returns:
        None where data or options are from Python, or a callback stopped it.
    """
    if run.config["simulation"] is None or "stopped" in run.result:
        return None
    words = ["securecluster", "run", run.config["protocol"]["name"]]
    simulation = Simulation(**run.config["simulation"])
    settings = Settings(**run.config["settings"])
    if any(map(_set_in_python, (run.protocol, simulation, settings))):
        return None
    if simulation.own:
        # the path belongs to the machine of the run
        simulation = dataclasses.replace(simulation, data=Path(simulation.data).name)
    words += _options(run.protocol, ())
    words += _options(simulation, ("seed",))
    # the number of threads and the device are this machine's
    words += _options(settings, ("threads", "device", "transcript"))
    return " ".join([*map(shlex.quote, words), "--seed", "SEED"])


def _set_in_python(options: Any) -> bool:
    """Return whether an option that is set in Python only differs from its default."""
    options_class: Any = type(options)
    marked = python_only_fields(options_class)
    for field in dataclasses.fields(options):
        if field.name in marked and getattr(options, field.name) != field.default:
            return True
    return False


def _options(options: Any, left_out: Sequence[str]) -> list[str]:
    """Return options that differ from their defaults, as they are typed.

    Args:
        options: a dataclass with its values.
        left_out: names of fields that are not shown.
    """
    words = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        default = field.default
        if isinstance(value, list):
            value = tuple(value)  # a tuple, before it was written to config.json
        if field.name in left_out or value == default or not field.init:
            continue
        option = field.name.replace("_", "-")
        if value is True:
            words.append(f"--{option}")
        elif value is False:
            words.append(f"--no-{option}")
        elif isinstance(value, tuple):
            words += [f"--{option}", *map(str, value)]
        else:
            words += [f"--{option}", str(value)]
    return words
