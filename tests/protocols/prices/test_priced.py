"""What clients really did, spied on while protocols ran, against what their ledger says; and an
audit of a whole run with canaries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import cases
import pytest
import torch
from cases import NOISE, SYNTHETIC_USERS

from securecluster import Federation, Iid
from securecluster.messaging import wire
from securecluster.messaging.messages import Rows
from securecluster.parties.deployment import build_network
from securecluster.parties.endpoints import build_client
from securecluster.privacy.dp import exponential_mechanism, noise_streams
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.privacy.dp.auditing import Audit, lower_bound
from securecluster.privacy.dp.ledger import Ledger
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.protocols import CFL, Settings
from securecluster.runtime.endpoint import message_types
from securecluster.runtime.transport import Framed
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

NAMES = (
    "cfl", "cfl gradient", "cfl fallback", "cfl sketch", "cfl signature", "flhc", "flhc sketch",
    "flhc signature", "srfca", "srfca l2", "srfca trim", "oneshot noise", "pacfl noise",
    "signature noise", "signature blocks", "nsim", "hidden", "ifca", "clove", "cflgp", "rdpcfl",
    "flux", "local-kmeans", "random", "fedavg", "local",
)  # fmt: skip


def method(name: str, **params: Any) -> Any:
    """Return a protocol of few rounds with noise and no mask."""
    few = {"rounds": 3, "epochs": 2, "batch_size": 16, "mask": "none"}
    return cases.variant(name, **{**few, **NOISE, **params})


@dataclass
class Spy:
    """What clients did, whatever they say of it."""

    # (client, purpose, call) of noise on what leaves, and of choices in private
    drawn: set[tuple[int, str, int]] = field(default_factory=set)
    # (client, noise multiplier, sampling rate, steps)
    trained: Counter[Any] = field(default_factory=Counter)
    plain: list[int] = field(default_factory=list)  # clients that trained without noise

    def forget(self) -> None:
        self.drawn, self.trained, self.plain = set(), Counter(), []


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    seen, noised, train = Spy(), NoiseStreams.noised, LocalTrainer.train
    choice = exponential_mechanism.choice

    def spied_noise(
        self: NoiseStreams, client: int, purpose: str, step: int, *rest: Any, **more: Any
    ) -> torch.Tensor:
        seen.drawn.add((client, purpose, step))
        return noised(self, client, purpose, step, *rest, **more)

    def spied_choice(
        scores: Any, eta: float, draws: NoiseStreams, client: int, purpose: str, step: int
    ) -> int:
        seen.drawn.add((client, purpose, step))
        return choice(scores, eta, draws, client, purpose, step)

    def spied_train(
        self: LocalTrainer,
        start: Rows,
        who: Sequence[int],
        plan: LocalTraining,
        *rest: Any,
        **more: Any,
    ) -> torch.Tensor:
        if len(self.ids) != SYNTHETIC_USERS:
            seen.plain += [self.ids[k] for k in who if not plan.private]
            seen.trained.update(
                (self.ids[k], plan.noise, plan.rate(self.sizes[k]), plan.number(self.sizes[k]))
                for k in who
            )
        return train(self, start, who, plan, *rest, **more)

    monkeypatch.setattr(NoiseStreams, "noised", spied_noise)
    monkeypatch.setattr(exponential_mechanism, "choice", spied_choice)
    monkeypatch.setattr(LocalTrainer, "train", spied_train)
    return seen


def check(ledger: Ledger, spy: Spy, unit: str) -> None:
    """Every release with noise has a draw, and every draw a release; every training is priced as it
    was.
    """
    told = Counter(i for event in ledger.events if event.mechanism == "gaussian" for i in event.ids)
    assert told == Counter(client for client, _, _ in spy.drawn)
    priced: Counter[Any] = Counter()
    for event in (e for e in ledger.events if e.mechanism == "dp-sgd"):
        for i in event.ids:
            n = ledger.samples[i]
            whole = event.batch is None or event.batch >= n
            steps = event.epochs * (1 if whole else -(-n // event.batch))
            priced[i, event.noise_multiplier, 1.0 if whole else event.batch / n, steps] += 1
    if unit == "example":
        assert priced == spy.trained and not spy.plain
    assert not ledger.exact()


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("name", "unit"),
    [
        (name, unit)
        for name, unit in product(NAMES, ("client", "example"))
        if (name, unit) != ("hidden", "example")  # whose sums protect whole clients
    ],
)
def test_what_clients_and_newcomers_do_is_priced_as_it_was(
    name: str, unit: str, small: Federation, spy: Spy
) -> None:
    fitted = method(name, dp_unit=unit).fit(small)
    assert spy.trained
    check(fitted.ledger_, spy, unit)
    spy.forget()
    fitted.join(cases.two_clusters(clients=2, samples=40, seed=9))
    check(fitted.joined_.ledger, spy, unit)


@pytest.mark.always
def test_training_whose_reply_is_lost_on_the_way_is_priced(small: Federation, spy: Spy) -> None:
    """The client has moved its model, which it hands in later."""
    made = method("local-kmeans", dp_unit="example", local_rounds=2)
    nodes = [build_client(made, small, Settings(), [i]) for i in range(6)]

    def door(i: int) -> Any:
        def answered(frame: bytes) -> bytes:
            reply, header = nodes[i].answer_frame(frame), wire.peek(frame)
            if (i, header.method, header.round) == (2, "train_locally", 1):
                raise ConnectionError
            return reply

        return answered

    transport = Framed(
        {i: door(i) for i in range(6)}, lambda call: message_types(made.client, call)[1]
    )
    net = build_network(made, transport, made.config(small, "float32"))
    net.state.ledger.samples = {i: node.client.cohort.sizes[0] for i, node in enumerate(nodes)}
    cases.run_server(made, net)
    check(net.state.ledger, spy, "example")


def audited(z: float) -> tuple[Audit, Any]:
    """Clients' updates as a server reads them, along what they would be without privacy, against
    clients that have learned nothing.
    """
    federation = Federation.simulate("digits", scenario=Iid(), clients=150, samples=8, seed=0)

    def told(**more: Any) -> tuple[torch.Tensor, Any]:
        made = CFL(rounds=1, epochs=1, mask="none", model="linear", **more)
        fitted = made.fit(federation, Settings(transcript="full"))
        place = next(
            n for n, entry in enumerate(fitted.transcript_.entries) if entry.method == "train"
        )
        return fitted.transcript_.content(place)[1].reply.delta.values.double(), fitted

    canaries, _ = told(lr=1.0)
    assert float(canaries.norm(dim=1).min()) > 0.1
    along = canaries / canaries.norm(dim=1, keepdim=True)
    (there, fitted), (gone, _) = told(lr=1.0, clip=0.1, noise=z), told(lr=1e-12, clip=0.1, noise=z)
    return lower_bound(*((rows * along).sum(1).numpy() for rows in (there, gone))), fitted


@pytest.mark.always
@pytest.mark.parametrize("halved", [False, True])
def test_an_audit_of_a_whole_run_stays_below_its_epsilon_and_finds_half_the_noise(
    halved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if halved:
        # of what is drawn, and not of what its receipt says
        genuine = noise_streams.deviation
        monkeypatch.setattr(noise_streams, "deviation", lambda *asked: genuine(*asked) / 2)
    audit, fitted = audited(0.5)
    claimed = gaussian_epsilon(1 / 0.5, 1e-5)
    assert fitted.ledger_.price(1e-5).epsilon == pytest.approx(claimed, rel=1e-8)
    assert (gaussian_epsilon(audit.mu, 1e-5) <= claimed) == (not halved)
    assert audit.mu > 1.4
