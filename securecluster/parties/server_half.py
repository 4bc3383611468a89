"""The server's half of a run, which messages alone can bring what clients know.

It runs on a new object with the run's hyper-parameters (`Method.as_server`), in runs, replays and
for newcomers: attributes that the protocol was given while it met the federation do not exist
there. Reports and observers keep the first object. What lies outside all objects shows in a new
process only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.core.devices import choose_device, cpu_threads, reproducible
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.core.serialization import plain, structured
from securecluster.errors import SecureClusterWarning, UsageError
from securecluster.messaging.outcomes import VerbOutcome
from securecluster.messaging.transcript import Recording
from securecluster.parties.deployment import build_network
from securecluster.parties.derived import adds_noise, server_copy, state_class
from securecluster.parties.labels import checked_labels
from securecluster.parties.method import Method
from securecluster.privacy.dp.ledger import Event, Recall
from securecluster.runtime.channel_state import ChannelState
from securecluster.runtime.run import Appended, CheckpointPart, Line, Run, Stop
from securecluster.runtime.transport import Recorded, Replay, Transport

if TYPE_CHECKING:
    from securecluster.messaging.transcript import Transcript
    from securecluster.privacy.masking.identities import Roster
    from securecluster.runtime.server_channel import ServerChannel


class ServerHalf:
    """The server's half of a run, or of its replay.

    Security rule: it shares nothing with clients but a transport, and its method is an object that
    never met a federation.

    Args:
        method: a new object with the hyper-parameters of the run.
        net: its channel to the clients.
        transcript: the frames of the channel.
    """

    def __init__(self, method: Method, net: ServerChannel, transcript: Transcript) -> None:
        self.method = method
        self.net = net
        self.transcript = transcript
        # called with the new events of the ledger, after they are written
        self.admit: Callable[[list[Event]], None] = lambda events: None
        self._recall = Recall()

    @classmethod
    def over(  # noqa: PLR0913 (what a server is made of)
        cls,
        transport: Transport,
        method: Method,
        config: Mapping[str, Any],
        transcript: Transcript,
        *,
        device: torch.device | None = None,
        secrets: Randomness | None = None,
        key: bytes | None = None,
        roster: Roster | None = None,
    ) -> ServerHalf:
        """Return the server's half over a transport to the clients.

        Args:
            transport: carries calls to the clients, and to the key authority if there is one.
            method: of whose hyper-parameters a new object is made.
            config: what clients and server agreed on.
            transcript: records the frames.
            device: where the server computes; None is main memory.
            secrets: secret random streams of a simulated run.
            key: 32 secret bytes of a deployed server.
            roster: identities of the clients that a deployed server accepts.

        Raises:
            UsageError: neither, where the server adds noise or opens ciphertexts.
        """
        if key is None and secrets is None:
            _check_no_secret(method, config)
        server = server_copy(method)
        recorded = Recorded(transport, transcript)
        net = build_network(server, recorded, config, key, device, roster, secrets)
        return cls(server, net, transcript)

    def started(
        self,
        folder: Path | None = None,
        components: Mapping[str, CheckpointPart] | None = None,
        observe: Callable[[Any], Line] = lambda state: {},
        report: Callable[[Line], str | None] = lambda line: None,
    ) -> Run:
        """Return the run, at its last checkpoint if the folder has one.

        Args:
            folder: where to write checkpoints; None stores everything in memory.
            components: of other components, which checkpoints have beside the server's own.
            observe: measures the state after each round, outside the protocol.
            report: called with the history line of each round; returns a reason to stop, or None.
        """
        run = Run(
            folder,
            {**(components or {}), **self._parts()},
            lambda state: {**observe(state), **self._traffic()},
            report,
            self.begin_round,
            # The ledger is written before a release leaves, and not only with checkpoints.
            {"ledger": self._ledger_log()},
        )

        def record(events: list[Event]) -> None:
            new = self._recall.new(events)
            self.net.add(new)
            run.append("ledger")
            # After the ledger: what is refused here has left its client all the same, in a
            # repetition with other bits for instance. Nobody uses it.
            self.admit(new)

        self.net.record = record
        if not run.resumed:
            # A run that was killed before its first checkpoint may have left frames.
            self.transcript.rewind(Recording())
        return run

    def final_state(self, run: Run) -> Any:
        """Run the server's loop, and return its final state.

        Args:
            run: gives the numbers of rounds, and stores checkpoints and history.

        Raises:
            UsageError: the loop asks for what only an object that met clients' data can have, or
                its state is of another class than it declares, or has no label for each client.
        """
        self.find_scale()
        with without_clients(self.method):
            state = self.method.run_server(self.net, run)
        self.net.end()
        self.check(state)
        return state

    def find_scale(self) -> None:
        """Find the scale of features that clients share, where they do, and tell those who lack it.

        It comes before the server's loop, which knows nothing of it.
        """
        from securecluster.parties.shared_scale import find_scale

        find_scale(self.method, self.net)

    def check(self, state: Any) -> None:
        """Check what the server's loop returned.

        Raises:
            UsageError: a state of another class than the loop declares, or one without a label for
                each client.
        """
        method = self.method
        state_type: Any = state_class(method)
        loop = f"{type(method).__name__}.run_server"
        if not isinstance(state, state_type):
            returned = "nothing" if state is None else type(state).__name__
            raise UsageError(
                f"{loop} returned {returned}, and declares {state_type.__name__}: end it with "
                "`return state`"
            )
        checked_labels(f"the state of {loop}", state.labels, len(self.net.clients))

    def begin_round(self, number: int) -> None:
        """Let calls from here on be of a round.

        Args:
            number: of the round.
        """
        self.net.round = int(number)
        if self.net.state.scale:  # who missed it is told now
            self.find_scale()

    def _traffic(self) -> Line:
        """Return the bytes so far, for the history."""
        totals = self.transcript.totals()
        return {"up": totals["up"], "down": totals["down"]}

    def _parts(self) -> dict[str, CheckpointPart]:
        """Return the server's parts of a checkpoint, in the order in which they are restored."""
        return {
            "network": CheckpointPart(
                ChannelState, lambda: _without_events(self.net.state), self._restore_network
            ),
            "transcript": CheckpointPart(
                Recording, self.transcript.snapshot, self.transcript.rewind
            ),
        }

    def _restore_network(self, state: ChannelState) -> None:
        self.net.state = state

    def _ledger_log(self) -> Appended:
        """Return the log of the ledger's events, which are appended to a file as lines."""
        return Appended(
            read=lambda: self.net.state.ledger.events,
            restore=self._restore_events,
            encode=plain,
            decode=lambda event: structured(event, Event),
            recall=self._recall_events,
        )

    def _restore_events(self, events: list[Event]) -> None:
        self.net.state.ledger.events = events

    def _recall_events(self, later: list[Event]) -> None:
        self.net.state.ledger.events += later
        self._recall.learn(later)


def _without_events(state: ChannelState) -> ChannelState:
    """Return the channel's state without the ledger's events, which have a file of their own."""
    return replace(state, ledger=replace(state.ledger, events=[]))


@contextmanager
def without_clients(server: Method) -> Iterator[None]:
    """Explain why a server's object lacks an attribute.

    Security rule: the server's half of a method runs on an object that never met a federation, so
    that nothing but messages can bring it clients' data.

    Args:
        server: the object whose server's half runs.

    Raises:
        UsageError: the server's half asks for an attribute that its object does not have.
    """
    try:
        yield
    except AttributeError as error:
        # an attribute of something else is a mistake of another kind
        if error.obj is not server:
            raise
        name = type(server).__name__
        raise UsageError(
            f"the server's half of {name} asks for self.{error.name}, which only an object that "
            "met the clients' data can have: it runs on a new object with the same "
            "hyper-parameters, so let it use what messages, the state and net.agreed tell"
        ) from error


def _check_no_secret(method: Method, config: Mapping[str, Any]) -> None:
    """Check that a server without a secret of its own needs none.

    Args:
        method: of the run.
        config: what clients and server agreed on.

    Raises:
        UsageError: it adds noise, or opens envelopes, which anybody could do who knows the seed.
    """
    needs = ""
    if config["placement"] == "central" and adds_noise(method, config):
        needs = "a trusted server draws its noise"
    elif method.pairs.by_authority:
        needs = "a server opens the ciphertexts that are sealed for it"
    if needs:
        raise UsageError(
            f"{needs} by a key of its own, and this one would follow from the public seed: give "
            "key, 32 secret bytes that the server keeps"
        )


def replayed(  # noqa: PLR0913 (what a replay is made of)
    method: Method,
    transcript: Transcript,
    config: dict[str, Any],
    threads: int = 0,
    device: str = "auto",
    observe: Callable[[VerbOutcome], None] | None = None,
    secrets: Randomness | None = None,
    key: bytes | None = None,
    stopped: Stop | None = None,
) -> tuple[Any, ChannelState]:
    """Run the server alone against a recorded transcript.

    Args:
        method: with the hyper-parameters of the run.
        transcript: the recorded frames.
        config: what clients and server agreed on.
        threads: those of the run's settings, since sums round differently with another number.
        device: that of the run's settings, since sums round differently on another device.
        observe: called with what each verb gives its reader; None for nobody.
        secrets: secret random streams of the run; None derives them from the seed, as runs with
            `keys_from_seed` do.
        key: of a deployed server, from which its noise follows; None in a simulation.
        stopped: after which round it was stopped; None if it was not.

    Returns:
        The server's final state, and that of its channel, which contains the ledger.

    Raises:
        ReplayError: a request differs from the recorded one by a bit, so the server used
            information that it received from no verb.
        UsageError: the server asks for an attribute that a new object does not have.
    """
    transport = Replay(transcript)
    server_device = choose_device(device)
    server = server_copy(method)
    net = build_network(server, transport, config, key, server_device, secrets=secrets)
    net.observe = observe
    half = ServerHalf(server, net, transcript)
    run = Run(begin=half.begin_round)
    run.stopped = stopped
    with (
        warnings.catch_warnings(),
        torch.inference_mode(False),
        cpu_threads(threads),
        reproducible(server_device),
    ):
        warnings.simplefilter("ignore", SecureClusterWarning)  # the run itself has warned
        state = half.final_state(run)
    transport.finish()
    return state, net.state
