"""A run of this process: clients, server and key authority, who share nothing but a transport."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.core import atomic_files
from securecluster.core.client_names import called_by_position
from securecluster.core.randomness import Randomness
from securecluster.core.serialization import pack
from securecluster.errors import RunFolderError
from securecluster.messaging.transcript import Transcript
from securecluster.parties.deployment import Deployment
from securecluster.parties.derived import call_types, params_as_json, program_of, server_copy
from securecluster.parties.endpoints import target_of
from securecluster.parties.experiment import experiment_of
from securecluster.parties.method import Method
from securecluster.parties.power_check import power_entry
from securecluster.parties.server_half import ServerHalf
from securecluster.privacy import run_secret
from securecluster.protections.occupancy import Occupancy, SumTap
from securecluster.results.fitted_state import FittedState, FittedSummary
from securecluster.results.preparation import kept_numbers
from securecluster.results.saving import SCHEMA
from securecluster.runs.callbacks import Watcher
from securecluster.runs.clients_half import ClientsHalf
from securecluster.runs.longer import check_goes_on
from securecluster.runtime.authority import Authority
from securecluster.runtime.endpoint import SUM, config_hash
from securecluster.runtime.run import CheckpointPart, Run, checkpoints
from securecluster.runtime.settings import Settings
from securecluster.runtime.transport import Transport, WithAuthority, random_dropouts
from securecluster.training.chance_level import ENOUGH_ROUNDS, Chance

if TYPE_CHECKING:
    from securecluster.data.federation import Federation


@dataclass
class Origin:
    """Configuration and program with which the run of a checkpoint began.

    Attributes:
        config: hash of its configuration.
        program: digest of the program.
        named_draws: whether clients draw by their names; by their positions in versions before.
    """

    config: str
    program: str = ""
    named_draws: bool = False


class SimulatedRun:
    """Run of all clients in this process: the clients' half, the server's, and their checkpoints.

    Args:
        method: with the hyper-parameters of the run.
        federation: the clients and their data.
        settings: device, precision, dropouts and transcript.
        folder: the run folder; None stores everything in memory.
    """

    def __init__(
        self, method: Method, federation: Federation, settings: Settings, folder: Path | None
    ) -> None:
        self.method = method
        self._federation = federation
        self._settings = settings
        self._folder = folder
        self._program = program_of(method)
        if folder:
            atomic_files.make_folder(folder)
        self._secret = _secret_of(method, settings, folder)
        public = Randomness(federation.seed)
        secrets = public if self._secret is None else run_secret.randomness(self._secret)
        self._config = method.config(federation, settings.dtype)
        self.clients = ClientsHalf.of(method, federation, settings, secrets)
        method.sums.warn_of_losses(settings.dropout, len(federation.names))
        dropouts = random_dropouts(settings.dropout, public, federation.names)
        transport: Transport = self.clients.transport(dropouts)
        self._authority = self._authority_of(secrets)
        if self._authority is not None:
            transport = WithAuthority(
                transport, self._authority.answer_frame, lambda name: call_types(method, name)[1]
            )
        device = self.clients.device
        self.server = ServerHalf.over(
            transport, method, self._config, self._transcript(), device=device, secrets=secrets
        )
        self.server.net.observe = experiment_of(method).observe_server
        self._tap = self._tapped()
        ledger = self.server.net.state.ledger
        # The price of DP-SGD depends on numbers of samples. In other runs the ledger does not have
        # them.
        ledger.samples = self.clients.samples
        ledger.names = dict(enumerate(federation.names))
        ledger.unit = self._config["dp_unit"]

    def _tapped(self) -> SumTap | None:
        """Return what counts which coordinates of hidden sums clients move; None of plain sums."""
        half = self.clients.endpoint.halves.get(SUM)
        if half is None:
            return None
        tap = SumTap()
        half.tap = tap.add
        self.server.net.settle = tap.settle
        return tap

    def _authority_of(self, secrets: Randomness) -> Authority | None:
        """Return the key authority; None where nothing is encrypted.

        Args:
            secrets: secret random streams of the run.
        """
        authority = Deployment(server_copy(self.method), self._config).authority(secrets=secrets)
        if authority is not None:
            authority.observe = experiment_of(self.method).observe_authority
        return authority

    def _transcript(self) -> Transcript:
        """Return the record of frames."""
        frames = None
        # Frames hold what clients sent, so their folder is for the owner's eyes.
        if self._folder:
            frames = self._folder / "transcript"
            atomic_files.make_private_folder(frames)
        types_of = partial(call_types, self.method)
        return Transcript(self._settings.transcript, frames, types_of, self._federation.names)

    def start(self, watcher: Watcher) -> Run:
        """Return the run, at its last checkpoint if the folder has one.

        Args:
            watcher: told of each round, of a resumed run also of the earlier ones.
        """
        checkpoint_parts = {
            "origin": CheckpointPart(Origin, self._origin, self._check_origin),
            "clients": self.clients.part(),
        }
        tap = self._tap
        if tap is not None:
            checkpoint_parts["occupancy"] = CheckpointPart(
                Occupancy, lambda: tap.occupancy, tap.restore
            )
        authority = self._authority
        if authority is not None:
            checkpoint_parts["authority"] = CheckpointPart(
                type(authority.state), lambda: authority.state, authority.restore
            )
        observe = self.clients.observe
        run = self.server.started(self._folder, checkpoint_parts, observe, watcher.told)
        run.stopped = run.stopped or experiment_of(self.method).stopped
        reason = watcher.catch_up(run.history)
        if reason and run.stopped is None:
            run.stop(reason)
        if self.method.privacy.holds_target:
            self._hold_target()
        return run

    def _hold_target(self) -> None:
        """Hold the run to its target, of which a resumed run has spent a part."""
        ledger = self.server.net.state.ledger
        target = target_of(self.method, self._config, ledger.samples, self._federation)
        target.learn(ledger.events)
        self.clients.hold(ledger.events)
        self.server.admit = target.admit

    def _origin(self) -> Origin:
        return Origin(config_hash(self._config), self._program, named_draws=True)

    def _check_origin(self, origin: Origin) -> None:
        assert self._folder is not None, "checkpoints are in a folder"
        check_goes_on(self._folder)
        if origin.config != config_hash(self._config):
            raise RunFolderError(
                f"{self._folder} holds a run of another configuration: resume with the same one, "
                "or give another folder"
            )
        if not origin.named_draws and not called_by_position(self._federation.names):
            raise RunFolderError(
                f"{self._folder} holds a run of an earlier version, whose clients drew batches by "
                "their positions and not by their names: resume it with that version, or give "
                "another folder"
            )
        # A run that two programs made is none of the second alone.
        self._program = origin.program

    def fitted(self, run: Run, state: Any) -> tuple[FittedState, Chance | None]:
        """Return the result of the run, and a comparison of the models with chance.

        Args:
            run: the finished run.
            state: the server's final state.

        Returns:
            The result; and the comparison, or None in a run too short for it.
        """
        method = self.method
        clients = self.clients
        models = clients.models(state)
        held_out = clients.held_out(models)
        labels = clients.labels(state)
        learned = FittedSummary(
            schema=SCHEMA,
            protocol=method.name,
            params=params_as_json(method),
            config=self._config,
            settings=self._settings,
            names=list(self._federation.names),
            labels=labels,
            local=clients.unshared,
            history=run.history,
            bytes=self.server.transcript.totals(),
            scores=held_out.scores.tolist(),
            baselines=held_out.baselines.tolist(),
            agreement=clients.agreement(labels),
            network=self.server.net.state,
            seconds=run.seconds,
            device=clients.device.type,
            program=self._program,
            power=power_entry(method, self._federation.facts, self._config),
            named_draws=True,
            occupancy=None if self._tap is None else self._tap.occupancy,
            stopped=run.stopped,
        )
        final = clients.final(models, labels)
        final.extra |= kept_numbers(self._federation) | held_out.kept
        result = FittedState(learned, pack(state), final, self._secret)
        if run.length(method.rounds) < ENOUGH_ROUNDS:
            return result, None
        return result, clients.chance(models, held_out.scores)


def _secret_of(method: Method, settings: Settings, folder: Path | None) -> bytes | None:
    """Return the secret of a run, which is drawn as it starts and kept in its folder.

    Args:
        method: which has the secret of a run that it repeats.
        settings: of the run.
        folder: the run folder; None stores everything in memory.

    Returns:
        None where keys, masks and noise follow from the seed.

    Raises:
        RunFolderError: the folder of a run that has begun is without its secret.
    """
    if settings.keys_from_seed:
        return None
    if folder is None:
        return experiment_of(method).secret or run_secret.drawn()
    secret = run_secret.read(folder)
    if secret is not None:
        return secret
    # a secret of its own would undo what was released under the lost one
    if checkpoints(folder) or (folder / "ledger.jsonl").is_file():
        raise run_secret.missing(folder)
    secret = run_secret.drawn()
    run_secret.write(folder, secret)
    return secret
