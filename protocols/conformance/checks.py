"""All checks by name, what they run on, and the run of them all."""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from securecluster.data import Federation, Rotation
from securecluster.errors import SecureClusterWarning
from securecluster.models.objectives import Trajectory
from securecluster.privacy.masking.masks import check_known
from securecluster.protocols import authoring as fl
from securecluster.protocols.conformance import fresh_process, privacy, runs, worlds
from securecluster.protocols.conformance.report import (
    NotApplicableError,
    Report,
    Result,
    author_files,
    outcome_of,
)
from securecluster.protocols.conformance.simulation import DOUBLE

MASKS = ("none", "permutation", "rotation")
MOST_ROUNDS = 12  # of the shortest run that a protocol may need
# hyper-parameters of small runs, of those that a protocol has
SMALL: Mapping[str, Any] = MappingProxyType({"model": "linear", "epochs": 1, "k": 2})
# further ones that let this project's protocols reach every phase in a few rounds
SMALLEST: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "finetune": {"tune_rounds": 1},
        "flhc": {"pre_rounds": 1},
        "ifca": {"starts": 2, "start_rounds": 1},
        "local-kmeans": {"local_rounds": 1},
        "nsim": {
            "grid": 1,
            "layer": "last",
            "local_rounds": 1,
            "networks": 1,
            "positions": (30, 60),
            "synthetic": 8,
        },
        "srfca": {"local_rounds": 1, "refine": 1},
    }
)


def small_clients(seed: int = 0, clients: int = 8) -> Federation:
    """Return digits of two clusters, every other client's of which are upside down.

    Args:
        seed: of the data.
        clients: how many.
    """
    scenario = Rotation(clusters=2)
    return Federation.simulate("digits", scenario=scenario, clients=clients, samples=40, seed=seed)


def small_traces(seed: int = 0, clients: int = 8) -> Federation:
    """Return random walks near one of two places, for methods whose synthetic users walk.

    Args:
        seed: of the walks.
        clients: how many.
    """
    draw = np.random.default_rng(seed)
    windows, past = 40, 8
    traces = {}
    for i in range(clients):
        centre = 0.25 + 0.5 * (i % 2)
        path = centre + np.cumsum(draw.normal(size=(windows + past, 2)), axis=0) * 0.01
        path = path.clip(0, 1).astype(np.float32)
        x = np.stack([path[k : k + past] for k in range(windows)])
        traces[f"walker {seed} {i}"] = (x, path[past:])
    objective = Trajectory(metres=(1000.0, 1000.0))
    return Federation.from_arrays(traces, objective=objective, seed=seed)


# default clients of methods that do not work on images
CLIENTS: Mapping[str, Callable[[int, int], Federation]] = MappingProxyType({"nsim": small_traces})


def small_params(protocol_class: Any) -> dict[str, Any]:
    """Return hyper-parameters by which the checks of a protocol take seconds.

    Args:
        protocol_class: class of the protocol.
    """
    declared = {option.name for option in dataclasses.fields(protocol_class)}
    accepted = {name: value for name, value in SMALL.items() if name in declared}
    name = getattr(protocol_class, "name", "")
    if name in CLIENTS:
        del accepted["model"]
    return {**accepted, **SMALLEST.get(name, {})}


@dataclass
class Subject:
    """Protocol under test, and runs that several checks read.

    Args:
        make: makes the protocol from hyper-parameters.
        federation: the clients of runs.
        newcomers: clients that join afterwards.
        masks: names of masks.
        folder: empty, for runs that are stopped, saved or replayed.
    """

    make: Callable[..., Any]
    federation: Federation
    newcomers: Federation
    masks: Sequence[str]
    folder: Path
    count: int = field(default=0, init=False)

    def room(self) -> Path:
        """Return an empty folder."""
        self.count += 1
        room = self.folder / str(self.count)
        room.mkdir()
        return room

    def rounds(self, fewest: int) -> int:
        """Return the smallest number of rounds, from a given one on, that the protocol accepts.

        Args:
            fewest: number of rounds that a check needs.
        """
        for rounds in range(fewest, MOST_ROUNDS):
            if self.refusal(rounds=rounds) is None:
                return rounds
        return fewest  # the run itself then says what is wrong

    def refusal(self, **params: Any) -> str | None:
        """Return why the protocol's own check refuses hyper-parameters; None where it does not.

        Args:
            params: hyper-parameters.
        """
        try:
            self.make(**params).check(len(self.federation))
        except fl.UsageError as error:
            return str(error)
        return None

    def require(self, **params: Any) -> None:
        """Raise `NotApplicableError` where the protocol's own check refuses hyper-parameters.

        Args:
            params: hyper-parameters.
        """
        refusal = self.refusal(rounds=self.rounds(3), **params)
        if refusal is not None and self.refusal(rounds=self.rounds(3)) is None:
            raise NotApplicableError(refusal)

    def require_valid(self) -> None:
        """Raise UsageError for an unknown mask, and for hyper-parameters that no check can take.

        What is refused after this does not work with the protocol, and is left out.
        """
        for mask in self.masks:
            check_known(mask)
        try:
            made = self.make(rounds=self.rounds(3))
            made.check(len(self.federation))
            made.config(self.federation, "float32")
        except fl.UsageError:
            raise
        except Exception:  # a fault of the protocol's own, of which its checks tell
            return

    @cached_property
    def _refusals(self) -> dict[str, str | None]:
        """Return why the protocol refuses each mask; None where it does not."""
        rounds = self.rounds(3)
        return {mask: self.refusal(rounds=rounds, mask=mask) for mask in self.masks}

    @property
    def accepted(self) -> list[str]:
        """Return the masks that the protocol accepts; "none" is the first."""
        chosen = [mask for mask, refusal in self._refusals.items() if refusal is None]
        return ["none", *(mask for mask in chosen if mask != "none")]

    @property
    def mask(self) -> str:
        """Return the mask of runs that need only one."""
        return self.accepted[-1]

    def comparable(self) -> list[str]:
        """Return the masks under which the protocol leads to the same clusters.

        Raises:
            NotApplicableError: there is none but "none".
        """
        made = self.make()
        masks = [mask for mask in self.accepted if mask not in made.other_clusters_under]
        if masks == ["none"]:
            refusals = [refusal for refusal in self._refusals.values() if refusal is not None]
            reason = f": {refusals[0]}" if refusals else ""
            raise NotApplicableError(f"no mask is left to compare with{reason}")
        return masks

    @cached_property
    def _example(self) -> runs.Example | Exception:
        try:
            return runs.example(self.make, self.federation, rounds=self.rounds(4), mask=self.mask)
        except Exception as error:  # told by each check that needs the run
            return error

    @property
    def example(self) -> runs.Example:
        """Return a run with dropouts.

        Raises:
            Exception: what the run ended with.
        """
        outcome = self._example
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


Check = Callable[[Subject], None]


def _frames(subject: Subject) -> None:
    runs.check_frames(subject.example.fitted)


def _replay(subject: Subject) -> None:
    runs.check_replay(subject.example)


def _fresh(subject: Subject) -> None:
    fresh_process.check_in_new_process(subject.example, subject.room())


def _repeats(subject: Subject) -> None:
    runs.check_repeats(subject.example)


def _resume(subject: Subject) -> None:
    runs.check_resume(subject.example, subject.room())


def _saved(subject: Subject) -> None:
    runs.check_saved(subject.example, subject.newcomers, subject.room())


def _masks(subject: Subject) -> None:
    make = partial(subject.make, **_plain(subject))  # secure sums round
    for mask in subject.comparable()[1:]:
        for rounds in (subject.rounds(1), subject.rounds(3)):
            runs.check_masked_round(make, subject.federation, mask, rounds, DOUBLE)


def _nodes(subject: Subject) -> None:
    rounds = subject.rounds(3)
    runs.check_nodes(subject.make, subject.federation, rounds, mask=subject.mask)


def _dropouts(subject: Subject) -> None:
    rounds = subject.rounds(5)
    runs.check_everyone_catches_up(subject.make, subject.federation, rounds, mask=subject.mask)


def _newcomers(subject: Subject) -> None:
    runs.check_newcomers(
        subject.make,
        subject.federation,
        subject.newcomers,
        subject.comparable(),
        rounds=subject.rounds(4),
    )


def _secure_sums(subject: Subject) -> None:
    subject.require(aggregation="secagg", mask=subject.mask)
    reason = subject.make(aggregation="secagg").sums.other_than_plain
    if reason:
        raise NotApplicableError(reason)
    rounds = subject.rounds(3)
    runs.check_secure_sums(subject.make, subject.federation, rounds, mask=subject.mask)


def _free(subject: Subject) -> None:
    rounds = subject.rounds(4)
    make = partial(subject.make, **_plain(subject))
    compared = 0
    for mask in dict.fromkeys(("none", subject.mask)):
        params = {"rounds": rounds, "mask": mask}
        compared += privacy.check_free_replies(make, subject.federation, **params)
    if not compared:
        raise NotApplicableError("no reply with content is declared to tell nothing new")


def _plain(subject: Subject) -> dict[str, Any]:
    """Return the hyper-parameters by which every reply is read as it left its client."""
    return {} if subject.refusal(aggregation="plain") else {"aggregation": "plain"}


def _events(subject: Subject) -> None:
    fitted = subject.example.fitted
    privacy.check_events(privacy.events_owed(fitted), privacy.events_written(fitted))


def _unit(subject: Subject, unit: str) -> None:
    rounds = subject.rounds(3)
    params = privacy.private(unit)
    subject.require(**params, mask=subject.mask)
    privacy.check_target(subject.make, subject.federation, rounds, **params, mask=subject.mask)
    central = privacy.private(unit, "central")
    if subject.refusal(rounds=rounds, **central, mask=subject.mask) is None:
        privacy.check_target(subject.make, subject.federation, rounds, **central, mask=subject.mask)


def _newcomers_price(subject: Subject) -> None:
    params = _some_unit(subject)
    rounds = subject.rounds(3)
    privacy.check_newcomers_price(
        subject.make, subject.federation, subject.newcomers, rounds, **params, mask=subject.mask
    )


def _some_unit(subject: Subject) -> dict[str, Any]:
    """Return hyper-parameters of noise in the first unit that the protocol accepts."""
    for unit in ("client", "example"):
        params = privacy.private(unit)
        if subject.refusal(rounds=subject.rounds(3), **params, mask=subject.mask) is None:
            return params
    subject.require(**params, mask=subject.mask)
    return params


def _worlds(subject: Subject, unit: str) -> None:
    params = {**privacy.private(unit), **_plain(subject), "mask": "none"}
    subject.require(**params)
    rounds = subject.rounds(3)
    worlds.check_worlds(subject.make, subject.federation, subject.newcomers, rounds, **params)


# name -> what it compares in one line, and the check
CHECKS: Mapping[str, tuple[str, Check]] = MappingProxyType(
    {
        "bytes": ("bytes are the lengths of the encoded frames", _frames),
        "replay": ("the server replays bit for bit", _replay),
        "new-process": ("a new process replays the server from messages alone", _fresh),
        "repeats": ("the same seed gives the same run", _repeats),
        "resume": ("a stopped run ends as if it never had been", _resume),
        "save-load": ("a loaded protocol predicts as it did", _saved),
        "masks": ("models are equal under every mask", _masks),
        "nodes": ("nodes with real frames end as one batch does", _nodes),
        "dropouts": ("clients that miss rounds catch up", _dropouts),
        "newcomers": ("newcomers are placed alike under every mask", _newcomers),
        "secure-sums": ("secure sums lead to the models of plain ones", _secure_sums),
        "free-replies": ("replies that cost nothing depend on no data", _free),
        "events": ("every release has its event in the ledger", _events),
        "unit-client": ("ε per client meets its target", partial(_unit, unit="client")),
        "unit-example": ("ε per example meets its target", partial(_unit, unit="example")),
        "newcomers-price": ("the ledger grows by what newcomers release", _newcomers_price),
        "worlds-client": (
            "no release tells more of a client than its price",
            partial(_worlds, unit="client"),
        ),
        "worlds-example": (
            "no release tells more of an example than its price",
            partial(_worlds, unit="example"),
        ),
    }
)


def check(
    make_or_class: Callable[..., Any],
    federation: Federation | None = None,
    newcomers: Federation | None = None,
    *,
    masks: Sequence[str] = MASKS,
    only: Iterable[str] = (),
    report: Callable[[Result], None] = lambda result: None,
    **params: Any,
) -> Report:
    """Run every check of a protocol to its end, and return what each of them found.

    Args:
        make_or_class: class of the protocol, or a function that makes it from hyper-parameters. A
            class gets small hyper-parameters, where `params` does not say otherwise.
        federation: eight or so clients, with equally many samples; None is digits of two clusters.
        newcomers: other clients of the same kinds; None is digits, too.
        masks: names of the masks to compare; those that the protocol refuses are left out.
        only: names of the checks to run; empty for all.
        report: called with each result, as soon as it is known.
        params: hyper-parameters of all runs.

    Returns:
        The results. A check that fails ends no other one.

    Raises:
        UsageError: an unknown check or mask, or hyper-parameters that the protocol refuses.
    """
    chosen = _chosen(only)
    if isinstance(masks, str):
        raise fl.UsageError(f"masks = {masks!r} is one name: give a list of names")
    if isinstance(make_or_class, type):
        params = {**small_params(make_or_class), **params}
    clients = CLIENTS.get(getattr(make_or_class, "name", ""), small_clients)
    make = partial(make_or_class, **params)
    results = []
    with tempfile.TemporaryDirectory() as folder, _quiet():
        subject = Subject(
            make,
            federation if federation is not None else clients(0, 8),
            newcomers if newcomers is not None else clients(1, 6),
            tuple(masks),
            Path(folder),
        )
        subject.require_valid()
        name, files = _identity(make, make_or_class)
        for check_name in chosen:
            description, function = CHECKS[check_name]
            result = outcome_of(check_name, description, partial(function, subject), files)
            results.append(result)
            report(result)
    return Report(name, tuple(results))


def _chosen(only: Iterable[str]) -> list[str]:
    """Return the names of the checks to run, in order.

    Raises:
        UsageError: an unknown name.
    """
    requested = set(only)
    for name in sorted(requested):
        if name not in CHECKS:
            raise fl.unknown("check", name, CHECKS)
    return [name for name in CHECKS if not requested or name in requested]


def _identity(
    make: Callable[..., Any], make_or_class: Callable[..., Any]
) -> tuple[str, frozenset[Path]]:
    """Return the name of a protocol's class, and the files of its author."""
    try:
        made = make()
    except Exception:  # every check then tells why
        return getattr(make_or_class, "__name__", "protocol"), frozenset()
    return type(made).__name__, author_files(made)


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore warnings of small runs about their accuracy or their price."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureClusterWarning)
        yield
