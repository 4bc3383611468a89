"""A server's own run in a folder, whose clients are nodes elsewhere.

The folder has what the server knows: configuration, frames, ledger, state and history, and neither
data nor models of clients. Scores are nobody's here. `report`, `replay`, `resume` and `load` read
it as they read the folder of a run in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.core import atomic_files
from securecluster.core.client_names import named_in_errors
from securecluster.core.devices import choose_device, cpu_threads, reproducible
from securecluster.core.lazy_torch import torch
from securecluster.core.serialization import pack
from securecluster.folders import run_folder
from securecluster.messaging.transcript import Transcript
from securecluster.models.objectives import objective
from securecluster.parties.client_state import ClientState
from securecluster.parties.derived import as_agreed, call_types, params_as_json, program_of
from securecluster.parties.labels import UNKNOWN_LABEL
from securecluster.parties.method import Method
from securecluster.parties.newcomers import NewcomerRecord
from securecluster.parties.server_half import ServerHalf
from securecluster.privacy import run_secret
from securecluster.results.fitted_state import FittedState, FittedSummary
from securecluster.results.joining import Joined, join_over
from securecluster.results.saving import SCHEMA, read_kept
from securecluster.runs.carry_out import complete, resolved
from securecluster.runtime.run import Line, Run
from securecluster.runtime.settings import Settings
from securecluster.runtime.transport import Transport
from securecluster.statements.result_json import Subject

if TYPE_CHECKING:
    from securecluster.privacy.masking.identities import Roster
    from securecluster.results.fitted import FittedRun


@dataclass(frozen=True)
class ServerRun:
    """A run as its server carries it out.

    Args:
        method: the protocol.
        config: what clients and server agreed on.
        transport: carries calls to the clients.
        names: of the clients, in the order of their numbers; by default their numbers.
        key: 32 secret bytes of a server that adds noise or opens ciphertexts; its folder has them,
            for replays.
        roster: public keys of the clients.
        settings: device, threads and transcript.
        scores: returns what clients tell of their scores when the run has ended, NaN for those who
            tell none; by default nobody is asked. No ε covers them.
    """

    method: Method
    config: Mapping[str, Any]
    transport: Transport
    names: Sequence[str] = ()
    key: bytes | None = None
    roster: Roster | None = None
    settings: Settings = field(default_factory=partial(Settings, transcript="full"))
    scores: Callable[[], list[float]] = list

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", as_agreed(self.method, self.config))

    def carried_out(
        self,
        folder: Path | None = None,
        report: Callable[[Line], None] = lambda line: None,
        force: bool = False,
    ) -> FittedRun:
        """Return the result of the run, which goes on where an earlier server stopped.

        Args:
            folder: new, empty, or of this run; None stores everything in memory.
            report: called with the history line of each round.
            force: replace the run in the folder.

        Raises:
            RefusedError: a client that refuses the run.
            RunFolderError: the folder holds another run, or one that has ended.
        """
        if folder is None:
            return self._carried_out(None, report)
        content = self._content()
        if run_folder.is_run(folder) and not force:
            with run_folder.locked(folder):
                run_folder.check_same(folder, run_folder.run_config(folder), content)
                run_folder.check_under_way(folder)
                return self._completed(folder, report)
        texts = {run_folder.CONFIG: run_folder.as_text(content)}
        with run_folder.claimed(folder, force, "", texts):
            return self._completed(folder, report)

    def join(self, folder: Path, newcomers: Mapping[int, int | None]) -> Joined:
        """Assign newcomers' nodes to the clusters of the finished run in a folder.

        They have agreed to the run (`Proposal.joins`). Releases of newcomers are recorded in the
        folder.

        Args:
            folder: of the run.
            newcomers: the number of training samples that each told, by its number on the roster;
                None for who told none.

        Raises:
            RefusedError: a newcomer that refuses what it is asked for.
            RunFolderError: the folder has another run, or one that has not ended.
            UpdateError: a newcomer that does not reply.
            UsageError: numbers of clients of the run.
        """
        run_folder.check_same(folder, run_folder.run_config(folder), self._content())
        fitted_state = read_kept(folder)
        record = NewcomerRecord(folder, int(self.config["clients"]))
        return join_over(self.method, fitted_state, record, self.transport, newcomers, self.roster)

    @property
    def _settings(self) -> Settings:
        """Return the settings, as a run in a folder records them."""
        return resolved(replace(self.settings, dtype=self.config["dtype"]))

    @property
    def _names(self) -> list[str]:
        """Return the names of the clients."""
        return list(self.names) or [str(i) for i in range(int(self.config["clients"]))]

    def _content(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return run_folder.config_content(
            self.method, None, self._settings, "", self._names, self.config
        )

    def _completed(self, folder: Path, report: Callable[[Line], None]) -> FittedRun:
        """Return the result of the run, with all its files written."""
        run_folder.remove_half_written(folder)
        run_secret.write(folder, self.key)
        fitted = self._carried_out(folder, report)
        subject = Subject(
            tuple(self._names), int(self.config["seed"]), objective(self.config["objective"])
        )
        complete(folder, subject, fitted)
        return fitted

    def _carried_out(self, folder: Path | None, report: Callable[[Line], None]) -> FittedRun:
        """Run the server's loop, and return its result."""
        settings = self._settings
        device = choose_device(settings.device)
        with torch.inference_mode(False), cpu_threads(settings.threads), reproducible(device):
            half = ServerHalf.over(
                self.transport,
                self.method,
                self.config,
                self._transcript(folder),
                device=device,
                key=self.key,
                roster=self.roster,
            )
            half.net.state.ledger.names = dict(enumerate(self._names))
            half.net.state.ledger.unit = self.config["dp_unit"]
            # the price of DP-SGD depends on them
            half.net.state.ledger.samples = dict(enumerate(self.config.get("sizes", ())))
            run = half.started(folder, observe=self._line, report=report)
            with named_in_errors(self._names) if self.names else nullcontext():
                state = half.final_state(run)
            fitted_state = self._kept(half, run, state)
        fitted_class = self.method.fitted_class
        fitted: FittedRun = fitted_class(self.method, fitted_state, half.transcript, folder)
        return fitted

    def _transcript(self, folder: Path | None) -> Transcript:
        """Return the record of frames, which lies in a folder for the owner's eyes."""
        frames = None
        if folder is not None:
            frames = folder / run_folder.TRANSCRIPT
            atomic_files.make_private_folder(frames)
        types_of = partial(call_types, self.method)
        return Transcript(self._settings.transcript, frames, types_of, self._names)

    def _labels(self, state: Any) -> list[int]:
        """Return each client's cluster, where the server knows it."""
        if not self.method.observer.server_knows_labels:
            return [UNKNOWN_LABEL] * len(self._names)
        return [int(label) for label in state.labels]

    def _line(self, state: Any) -> Line:
        """Return what the server knows after a round, for the history."""
        labels = set(self._labels(state)) - {UNKNOWN_LABEL}
        return {"clusters": len(labels)}

    def _kept(self, half: ServerHalf, run: Run, state: Any) -> FittedState:
        """Return what the server keeps of the run."""
        learned = FittedSummary(
            schema=SCHEMA,
            protocol=self.method.name,
            params=params_as_json(self.method),
            config=dict(self.config),
            settings=self._settings,
            names=self._names,
            labels=self._labels(state),
            local=[],
            history=run.history,
            bytes=half.transcript.totals(),
            scores=self.scores(),
            agreement=None,
            network=half.net.state,
            seconds=run.seconds,
            device=choose_device(self._settings.device).type,
            program=program_of(self.method),
        )
        return FittedState(learned, pack(state), ClientState.none(), self.key)
