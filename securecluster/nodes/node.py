"""One client of runs on many machines: its data, keys, state and ledger, in a folder of its own.

A node answers bytes with bytes, whatever carries them. What it answers is on its disk before the
reply leaves, its own ledger first: a machine that dies in between has accounted for the release,
and gives the same reply when it is asked again. So no reply leaves twice with other bits, and no
release without a line in the ledger.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.core import atomic_files
from securecluster.core.devices import cpu_threads
from securecluster.core.serialization import pack, unpack
from securecluster.data.facts import ClientFacts
from securecluster.data.federation import Federation
from securecluster.errors import OwnerPolicyError, PolicyError, UsageError
from securecluster.messaging import run_number, wire
from securecluster.nodes import run_progress
from securecluster.nodes.party import STATE, Party, number_of, stamp_of
from securecluster.nodes.policy import Policy
from securecluster.nodes.policy_events import check_run
from securecluster.nodes.policy_file import PolicyFile
from securecluster.nodes.proposal import Proposal, accepted, facts_in
from securecluster.nodes.run_progress import Progress
from securecluster.parties.client_state import ClientState
from securecluster.parties.derived import (
    adds_noise,
    as_agreed,
    model_of,
    needs_samples,
    training_sizes,
)
from securecluster.parties.endpoints import KeySource, build_client
from securecluster.parties.method import Method
from securecluster.parties.newcomers import check_sizes, samples_batches
from securecluster.privacy.dp.budget import UNITS, Budget
from securecluster.privacy.dp.ledger import Event
from securecluster.runtime.endpoint import GATHER
from securecluster.runtime.release_budget import ReleaseBudget
from securecluster.runtime.settings import Settings

if TYPE_CHECKING:
    from securecluster.core.lazy_torch import torch
    from securecluster.privacy.masking.identities import Identity, Roster
    from securecluster.runtime.endpoint import Endpoint

NO_BUDGET = math.inf


@dataclass
class _Running:
    """A run that a node takes part in, as it is in memory.

    Args:
        endpoint: answers its frames.
        stamp: of the state's file that the endpoint agrees with; None without a file.
        config: that the node agreed to.
        policy: of its owner, by which the endpoint was built.
    """

    endpoint: Endpoint[Any]
    stamp: tuple[int, int] | None
    config: Mapping[str, Any]
    policy: Policy


class Node(Party):
    """A client of runs on many machines.

    Its folder can be read by its owner alone. It has a folder for each run that the node agreed to
    (`agreed.json`, `state.safetensors`), a line for each of them in `agreements.jsonl`, and a
    ledger over all runs of each unit of privacy (`ledger-client.jsonl`, `ledger-example.jsonl`).

    Args:
        method: the protocol that the node runs, with its owner's hyper-parameters.
        data: a federation of this client alone.
        folder: of the node, which is made if it is not there.
        identity: signs what the node sends in the key agreement; None in runs without a roster.
        roster: public keys of all clients, from the party that enrols them, and not from the
            server.
        number: of the client; None is that of its key on the roster.
        policy: what its owner allows, or the file that says so, which then holds from the message
            after it was changed; None allows every run of the method that has a roster.
        settings: device and threads.
        durable: state and ledger outlive a power cut. Only a simulation, whose server is on the
            same machine, may do without: it then waits for no disk.

    Raises:
        UsageError: several clients, a roster without this client, or no number; or classes that
            only these data name.
    """

    def __init__(  # noqa: PLR0913 (what a node is made of)
        self,
        method: Method,
        data: Federation,
        folder: Path | str,
        *,
        identity: Identity | None = None,
        roster: Roster | None = None,
        number: int | None = None,
        policy: Policy | PolicyFile | None = None,
        settings: Settings | None = None,
        durable: bool = True,
    ) -> None:
        if len(data) != 1:
            raise UsageError(
                f"a node is one client, and these data are of {len(data)}: give one node to each"
            )
        data.facts_of(0)  # refuses classes whose names would tell of this client's labels
        own_number = number_of(number, identity, roster)
        super().__init__(method, folder, own_number, identity, roster, policy, durable)
        self.recipient = f"client/{own_number}"
        self._data = data
        self._settings = settings or Settings(threads=1)
        self._running: dict[str, _Running] = {}

    def __repr__(self) -> str:
        return f"Node({self.method.name}, client {self.number}, {self.folder})"

    def facts(self) -> ClientFacts:
        """Return what the node tells a server of its data before a run.

        Its number of samples is among it only where the method needs it, and the policy allows it.
        """
        samples = needs_samples(self.method) and self.policy.samples
        return self._data.facts_of(0, samples)

    def _told(self) -> Any:
        """Return what the node tells of its data, as JSON has it."""
        return self.facts().as_json()

    def _agree(self, proposal: Proposal) -> str:
        """Take part in a run, and return as `agree` does, or raise PolicyError."""
        own_facts = self._data.facts_of(0, samples=True, classes=True)
        config = accepted(proposal, self.method, own_facts, self.number, self.policy, self._roster)
        drawn = self._drawn(proposal, config)
        if drawn is not None:
            return drawn
        run = self._keep(config, proposal.joins)
        if proposal.joins:
            self._start_anew(run)
        return run

    def _forget(self, run: str) -> None:
        """Forget what is in memory of a run that was revoked."""
        self._running.pop(run, None)

    def _check(self, config: Mapping[str, Any], policy: Policy) -> None:
        """Raise OwnerPolicyError for a run that the owner does not allow."""
        own_facts = self._data.facts_of(0, samples=True, classes=True)
        check_run(policy, self.method, facts_in(config, own_facts), config)

    def _start_anew(self, run: str) -> None:
        """Let a newcomer join a run from the beginning, with the keys that it has.

        Whatever is asked of it again has the same noise, and anything else draws anew and costs
        anew. What a client answers in one way alone stays answered (`ClientTensor(lasting=True)`).
        """
        with self._alone():
            path = self._folder_of(run) / STATE
            if not path.exists():
                return
            self._running.pop(run, None)
            state: ClientState = unpack(atomic_files.read(path), ClientState)
            endpoint = self._endpoint(self._agreed(run))
            anew: ClientState = endpoint.client.state(state.secrets)
            lasting = endpoint.client.lasting & anew.extra.keys() & state.extra.keys()
            anew.extra |= {name: state.extra[name] for name in lasting}
            self._write_state(run, pack(anew))

    def _answered(self, frame: bytes) -> bytes:
        """Return the reply to a frame, or raise one of many errors."""
        header = wire.peek(frame)
        run = header.config
        with self._alone(), cpu_threads(self._settings.threads):
            running = self._living(run)
            try:
                self._check_size(running.config, frame)
                reply = running.endpoint.reply_frame(frame)
                self._store(run, running)
                self._come_to(run, header.round)
            except BaseException:
                # what it changed in memory is not what is on the disk
                del self._running[run]
                raise
        return reply

    def _check_size(self, config: Mapping[str, Any], frame: bytes) -> None:
        """Raise PolicyError where a newcomer's training would cost more than that of clients."""
        joins = self.number >= int(config["clients"])
        if not joins or not samples_batches(self.method, config, wire.peek(frame).method):
            return
        try:
            check_sizes(
                self.method, config, self._data, training_sizes(self.method, self._data.facts)
            )
        except UsageError as error:
            raise PolicyError(str(error)) from None

    def _come_to(self, run: str, number: int) -> None:
        """Write down that the run has come to a round."""
        progress = run_progress.read(self._folder_of(run))
        if number > progress.round:
            self._write_progress(run, replace(progress, round=number))

    def score(self, run: bytes) -> bytes:
        """Return the score of the client's model on its own test samples, as JSON.

        It is outside the protocol, and no ε covers it: the policy decides. It is told once a run,
        after the node has answered in the last round, and is an exact release in the ledger.
        Whoever asks again is told the same, whatever model the node was sent since.

        Args:
            run: fingerprint of a run that the node agreed to.

        Returns:
            null where the client has no test samples.

        Raises:
            UnknownRunError: no such run.
            PolicyError: scores that the owner does not tell, or that need the server's state; or a
                run that has not come to its last round.
        """
        name = run.decode("ascii", "replace")
        with self._alone(), cpu_threads(self._settings.threads):
            config = self._check_allowed(name, self.policy)
            self._check_scores(config)
            progress = run_progress.read(self._folder_of(name))
            if not progress.told:
                self._check_ended(config, progress)
                progress = replace(progress, told=True, score=self._evaluated(name, progress.round))
                self._write_progress(name, progress)
        return json.dumps(progress.score).encode()

    def module_of(self, run: bytes) -> torch.nn.Module:
        """Return the client's model of a run, as `FittedRun.module_of` of its client.

        It stays at the node, and takes samples as the owner has them.

        Args:
            run: fingerprint of a run that the node agreed to, and that has ended.

        Raises:
            UnknownRunError: no such run.
            PolicyError: a method whose server knows which model is the client's own.
        """
        from securecluster.results.predictions import module_with
        from securecluster.results.preparation import kept_numbers, preparation

        with self._alone(), cpu_threads(self._settings.threads):
            running = self._living(run.decode("ascii", "replace"))
            self._check_own_model()
            models = self.method.observer.kept_models(running.endpoint.client, None)
            network = model_of(self.method, running.config)
            state = network.state_dict(models.row(0).cpu())
            data = self._data
            if data.feature_names is not None:
                data = data.with_features(running.config["feature_names"])
            kept = {**kept_numbers(data), **running.endpoint.client.cohort.memory()}
            own = {name: rows[0] for name, rows in kept.items()}
            numbers = preparation(running.config, own)
            return module_with(self.method, running.config, network.objective, state, numbers)

    def _check_own_model(self) -> None:
        """Raise PolicyError for a method whose server knows which model is the client's own."""
        if self.method.observer.needs_state:
            raise PolicyError(
                f"a client of {self.method.name} has several models, and the server knows which "
                "one is its own: it tells no score, and has no module"
            )

    def _evaluated(self, run: str, number: int) -> float | None:
        """Return the score of the client's model, whose release is in the ledger."""
        endpoint = self._living(run).endpoint
        client = endpoint.client
        models = self.method.observer.kept_models(client, None)
        (score,) = client.cohort.scores(models).tolist()
        if math.isnan(score):
            return None
        event = Event("score", GATHER, ("score",), number, (self.number,))
        for reservation in endpoint.reservations:
            if isinstance(reservation, ReleaseBudget):
                reservation.record(event)
        return float(score)

    def _check_scores(self, config: Mapping[str, Any]) -> None:
        """Raise PolicyError for a score that is not told."""
        allowed = self.policy.scores
        if allowed is None:
            hidden = self.method.sums.hide_replies or self.method.pairs.hide_rows
            allowed = not (hidden or adds_noise(self.method, config))
        if not allowed:
            raise OwnerPolicyError(
                "this client does not tell its score, which no noise covers and no sum hides "
                "(scores of its policy)"
            )
        self._check_own_model()

    def _check_ended(self, config: Mapping[str, Any], progress: Progress) -> None:
        """Raise PolicyError for a run in which the node has not answered in the last round."""
        last = as_agreed(self.method, config).total_rounds
        if progress.round < last:
            raise PolicyError(
                f"the score of a run is told after its last round, {last}, and this client has "
                f"answered in none after round {progress.round}"
            )

    def spent(self, unit: str | None = None) -> dict[str, float]:
        """Return ε of all runs of this node so far, by its own ledger and without any server.

        Args:
            unit: of privacy, "client" or "example"; None is each that has a ledger.

        Returns:
            ε at the policy's δ, by unit; infinite where something was released without noise.
        """
        units = [unit] if unit is not None else [one for one in UNITS if self._ledger(one).exists()]
        return {one: self._budget(one).spent for one in units}

    # private

    def _living(self, run: str) -> _Running:
        """Return a run as it is on the disk, from memory where that agrees with it.

        Raises:
            OwnerPolicyError: a run that its owner allows no more.
            UnknownRunError: a run that the node has not agreed to.
        """
        policy = self.policy
        self._refuse_revoked(run)
        path = self._folder_of(run) / STATE
        stamp = stamp_of(path)
        running = self._running.get(run)
        # another process may have answered since, or the owner have changed the policy
        if running is not None and running.stamp == stamp and running.policy == policy:
            return running
        config = self._check_allowed(run, policy)
        # of which nothing is left if its state cannot be read
        running = self._running.pop(run, None)
        if running is not None and stamp is not None and running.policy == policy:
            endpoint = running.endpoint  # with the keys that it derived
        else:
            endpoint = self._endpoint(config)
        if stamp is not None:
            state: ClientState = unpack(atomic_files.read(path), ClientState)
            endpoint.client.restore(state)
            endpoint.keys.restore(state.secrets)
        running = _Running(endpoint, stamp, config, policy)
        if stamp is None:
            # its keys are on the disk before they are used: new ones would draw other noise
            self._store(run, running)
        # one run at a time: an endpoint takes the memory of a model
        self._running = {run: running}
        return running

    def _endpoint(self, config: Mapping[str, Any]) -> Endpoint[Any]:
        """Return an endpoint of this client, as it is before the first call."""
        policy = self.policy
        signed = self._roster is not None
        keys = KeySource(False, self._identity if signed else None, self._roster)
        joins = self.number >= int(config["clients"])
        # a run of an earlier version, which had no number, goes on with the draws that it has made
        by_number = run_number.of(config) is None
        return build_client(
            self.method,
            self._data,
            replace(self._settings, dtype=str(config["dtype"])),
            key_source=keys,
            joins=config if joins else None,
            agreed=None if joins else config,
            numbers=[self.number],
            budget=self._budget(str(config["dp_unit"])),
            least=math.ceil(policy.least_clients),
            names=[str(self.number)] if by_number else None,
            least_noise=policy.least_noise,
            tells_samples=policy.samples,
        )

    def _store(self, run: str, running: _Running) -> None:
        """Write the state of a run, so that it is on the disk when this returns."""
        endpoint = running.endpoint
        data = pack(endpoint.client.state(endpoint.keys.secrets))
        running.stamp = self._write_state(run, data)

    def _budget(self, unit: str) -> Budget:
        """Return the node's ledger of a unit, with the ε that its owner allows."""
        epsilon = self.policy.most_epsilon
        return Budget(
            self._ledger(unit),
            NO_BUDGET if epsilon is None else epsilon,
            self.policy.delta,
            unit,
            self._durable,
        )

    def _released_in(self) -> set[str]:
        """Return the fingerprints of runs in which the client has released something."""
        units = [unit for unit in UNITS if self._ledger(unit).exists()]
        names = {name for unit in units for name in self._budget(unit).runs}
        return {name.partition(" ")[0] for name in names}  # then a digest of a key

    def _ledger(self, unit: str) -> Path:
        return ledger_of(self.folder, unit)


def ledger_of(folder: Path, unit: str) -> Path:
    """Return the path of a node's ledger.

    Args:
        folder: of the node.
        unit: of privacy, "client" or "example".
    """
    return folder / f"ledger-{unit}.jsonl"
