"""A finished run's folder as reports and audits read it, and the command that repeats the run."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securecluster.app import run_folder
from securecluster.app.options import Simulation
from securecluster.app.registry import protocol_class
from securecluster.core import atomic_files
from securecluster.core.serialization import structured
from securecluster.errors import RunFolderError, UsageError
from securecluster.privacy.dp.ledger import Event, Ledger, Release
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.serialization import read_kept
from securecluster.runtime.settings import Settings

MOST_PRICES = 12  # points of ε over rounds: with sampled batches one may take seconds


@dataclass(frozen=True)
class FinishedRun:
    """Files of a finished run, after a check of their digests.

    Args:
        folder: of the run.
        config: content of config.json.
        result: content of result.json.
        history: lines of history.jsonl.
        protocol: with the run's hyper-parameters; objects of the user's own are left out.
        ledger: of the run.
    """

    folder: Path
    config: dict[str, Any]
    result: dict[str, Any]
    history: list[dict[str, Any]]
    protocol: ClusteringProtocol
    ledger: Ledger

    @property
    def names(self) -> tuple[str, ...]:
        """Return the clients' names in the order of their numbers."""
        return tuple(self.result["names"])

    @property
    def pictures(self) -> list[Path]:
        """Return the paths of the run's pictures."""
        return [
            self.folder / name for name in run_folder.PICTURES if (self.folder / name).is_file()
        ]


def open_run(folder: Path, command: str) -> FinishedRun:
    """Return what a finished run left in its folder.

    Args:
        folder: of the run.
        command: that reads it, for the sentence of an error.

    Raises:
        RunFolderError: no run folder, or a damaged one.
        UsageError: a comparison, a sweep, or a run that has not ended.
    """
    config = run_folder.config_of(folder)
    names = run_folder.compared(folder)
    if names is not None:
        raise UsageError(
            f"{folder} holds a comparison: {command} takes one of its runs, such as "
            f"{folder / names[0]}"
        )
    run_folder.check_run(folder, config)
    if not run_folder.finished(folder):
        raise UsageError(
            f"the run in {folder} has not ended: go on with it first, with: securecluster resume "
            f"{shlex.quote(str(folder))}"
        )
    result = run_folder.result_of(folder)
    stored = read_kept(folder)
    network = stored.learned.network.ledger
    ledger = Ledger(_events(folder), dict(network.samples), dict(network.names))
    return FinishedRun(
        folder=folder,
        config=config,
        result=result,
        history=list(stored.learned.history),
        protocol=_protocol(folder, config),
        ledger=ledger,
    )


def _protocol(folder: Path, config: dict[str, Any]) -> ClusteringProtocol:
    """Return the run's protocol without objects of the user's own.

    Raises:
        RunFolderError: its parameters do not parse.
    """
    params = {}
    for name, value in config["protocol"].items():
        # config.json has a description in place of an object
        if name != "name" and not isinstance(value, dict):
            params[name] = value
    try:
        protocol: ClusteringProtocol = protocol_class(config["protocol"]["name"])(**params)
    except TypeError:
        raise RunFolderError(
            f"{folder / run_folder.CONFIG} does not parse: start the run anew"
        ) from None
    return protocol


def _events(folder: Path) -> list[Event]:
    """Return the events of a run's ledger, whose file a run without releases does not have."""
    path = folder / "ledger.jsonl"
    if not path.is_file():
        return []
    lines = atomic_files.read(path).decode().splitlines()
    return [structured(json.loads(line), Event) for line in lines]


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
        price = Ledger(events, ledger.samples, ledger.names).price(delta)
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
    return Ledger(events, ledger.samples, ledger.names).price(delta).epsilon


def command_of(run: FinishedRun) -> str | None:
    """Return the command that repeats a run, without its seed; None for data from Python.

    The seed is left out since keys, and in a simulation all noise, follow from it.

    Args:
        run: the run.
    """
    if run.config["simulation"] is None:
        return None
    words = ["securecluster", "run", run.config["protocol"]["name"]]
    simulation = Simulation(**run.config["simulation"])
    if simulation.own:
        # the path belongs to the machine of the run
        simulation = dataclasses.replace(simulation, data=Path(simulation.data).name)
    words += _options(run.protocol, ())
    words += _options(simulation, ("seed",))
    # the number of threads and the device are this machine's
    words += _options(Settings(**run.config["settings"]), ("threads", "device", "transcript"))
    return " ".join([*map(shlex.quote, words), "--seed", "SEED"])


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
