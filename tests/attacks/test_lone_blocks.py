"""Blocks that one client alone fills: read by the server, and by a client that is sent averages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar

import pytest
import torch
from attacked import FULL, digits, scene

from securecluster.attacks.base import Tap, View
from securecluster.attacks.experiments import tapped
from securecluster.attacks.lone_blocks import LoneBlocks
from securecluster.attacks.lone_members import MEMBERS
from securecluster.attacks.scoring import BETTER, CHANCE, score
from securecluster.audits.findings import BROKEN, UNTOLD
from securecluster.audits.run_audit import adversary_of, audited, finding_of
from securecluster.core.option_groups import group
from securecluster.messaging.messages import Picks, Rows
from securecluster.messaging.parties import client as client_party
from securecluster.privacy.pipeline import Kind, Pipeline
from securecluster.protocols import FedAvg
from securecluster.protocols.authoring import (
    SUM,
    AverageDeltas,
    AveragingState,
    CallContext,
    PendingUpdates,
    Real,
    Run,
    ServerChannel,
    SumClient,
    TrainingClient,
    answers,
    protocol,
)
from securecluster.protocols.common.averages.blocks import BlockStage
from securecluster.protocols.common.options.sum_options import SumOptions, SumsOverAll

CLIENTS = 6
FEDERATION = digits(clients=CLIENTS, samples=20)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Client to server, in a sum: an update in the block of the client's group."""

    blocks: Annotated[Rows, Real(("groups", "dimension"))]


class GroupClient(SumClient):
    """Clients whose update goes into the block of their group."""

    @answers(SUM, through=("blocks",), fresh=True, trains="usual")
    def contribute_blocks(self, context: CallContext, query: AverageDeltas) -> Blocks:
        """Train, and return the update in its block."""
        own = self.trained(context, query).delta.values
        blocks = own.new_zeros(len(own), CLIENTS, own.shape[1])
        blocks[torch.arange(len(own)), torch.as_tensor(context.ids) // Victim.members] = own
        return Blocks(Rows(blocks))


class SumsOfGroups(SumsOverAll):
    """Sums of blocks."""

    def fields(self, method: Any, config: Mapping[str, Any]) -> dict[str, float]:
        """Add the blocks."""
        return {**super().fields(method, config), "blocks": float(config["sum_bound"])}


@protocol
class Victim(FedAvg):
    """Sums with a block for every few clients, which tell each other nothing."""

    sums: SumOptions = group(SumsOfGroups)
    name: ClassVar[str] = "victim"
    client: ClassVar[type[TrainingClient]] = GroupClient
    members: ClassVar[int] = 1

    def run_server(self, net: ServerChannel, run: Run) -> AveragingState:
        """Sum updates by group in each round."""
        outbox = PendingUpdates.start(len(net.clients), fresh=self.mask != "none")
        state = AveragingState([0] * len(net.clients), outbox)
        for _ in run.rounds("train", state, self.rounds):
            query = outbox.message_for(list(net.clients))
            net.sum(GroupClient.contribute_blocks, query, to=net.clients)
        return state

    def pipeline(self, config: Mapping[str, Any]) -> Pipeline:
        """Mask and clip block by block."""
        pipeline = super().pipeline(config)
        stages = [s if s.kind is Kind.NOISE else BlockStage(s) for s in pipeline.stages]
        pipeline.fields["blocks"] = Pipeline(stages)
        return pipeline

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Add the number of groups."""
        return {**super().frame_sizes(config), "groups": CLIENTS}


def made(**options: Any) -> Any:
    """Return a victim with the options of a small run."""
    small = {"rounds": 1, "epochs": 1, "model": "linear", "mask": "none", "aggregation": "secagg"}
    return Victim(**{**small, **options})


def achieved(**options: Any) -> Any:
    """Return what the attack by the server achieves."""
    fitted, taps = tapped(made(**options), FEDERATION, FULL)
    adversary = adversary_of(FEDERATION.names, "server")
    return finding_of(LoneBlocks(), fitted, FEDERATION, adversary, taps)


@pytest.mark.parametrize(
    ("members", "options", "verdict", "read"),
    [
        (1, {}, BETTER, CLIENTS),
        (1, {"rounds": 2}, BETTER, 2 * CLIENTS),
        (1, {"clip": 0.01}, BETTER, CLIENTS),
        (2, {}, CHANCE, 0),
        (3, {}, CHANCE, 0),
        (1, {"mask": "permutation"}, CHANCE, 0),
        (1, {"mask": "rotation"}, CHANCE, 0),
        (1, {"clip": 1.0, "noise": 0.3}, CHANCE, 0),
    ],
)
def test_the_server_reads_blocks_of_one_without_mask_and_noise(
    members: int, options: dict[str, Any], verdict: str, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Victim, "members", members)
    found = achieved(**options)
    assert (found.outcome, found.score and found.score.value) == (verdict, read), found.reason


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize(("members", "verdict"), [(1, BROKEN), (3, UNTOLD)])
def test_an_audit_says_that_secure_sums_are_broken(
    members: int, verdict: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(Victim, "members", members)
    fitted = made()
    fitted.fit(FEDERATION, FULL, folder=tmp_path / "run")
    results = audited(fitted, FEDERATION, "server", attacks=["lone-blocks"])
    (finding,) = results.findings["run"]
    assert finding.verdict == verdict


def test_without_blocks_it_is_not_applicable() -> None:
    fitted, taps = tapped(FedAvg(rounds=1, model="linear", aggregation="secagg"), FEDERATION, FULL)
    view, knowledge, _ = scene(fitted, FEDERATION, taps=taps)
    assert str(LoneBlocks().applies(view, knowledge)).startswith("not applicable: no block")


# The view of client 0: call 5 brings blocks of itself and client 1, of client 2, and of three.
ROWS = {i: torch.linspace(-1, 1, 7) + i**2 for i in range(6)}
BLOCK_OF = {0: 0, 1: 0, 2: 1, 3: 2, 4: 2, 5: 2}


class ClientView(View):
    """Averages of three blocks, as a client receives them."""

    parties = frozenset({client_party(0)})
    anonymous = False
    outcomes = ()

    def __init__(self, absolute: bool) -> None:
        self.absolute = absolute

    def messages(self, method: str | None = None, round: int | None = None) -> Iterator[Any]:
        """Yield the averages of call 4, which all sent alike, and of call 5."""
        means = torch.stack([torch.stack(self.of(block)).mean(0) for block in range(3)])
        earlier = torch.ones_like(means)
        tables = [earlier, earlier + means if self.absolute else means]
        for step, table in zip((4, 5), tables, strict=True):
            content = SimpleNamespace(
                means=Picks(table[None], ((0,),)),
                steps=Picks(torch.tensor([step]), ((0,),)),
                absolute=self.absolute,
            )
            yield SimpleNamespace(receiver=client_party(0), content=content)

    def of(self, block: int) -> list[torch.Tensor]:
        """Return the rows of a block."""
        return [row for client, row in ROWS.items() if BLOCK_OF[client] == block]


@pytest.mark.parametrize("absolute", [False, True])
def test_a_client_reads_blocks_of_one_and_its_partner_in_a_block_of_two(absolute: bool) -> None:
    table = torch.zeros(6, 3, 7)
    for client, row in ROWS.items():
        table[client, BLOCK_OF[client]] = row
    reply = SimpleNamespace(blocks=Rows(table))
    tap = Tap("contribute_block", "sum", 1, 5, tuple(range(6)), reply)
    own = SimpleNamespace(blocks=Rows(table[:1]))
    colluder = SimpleNamespace(replies={("contribute_block", 5): own})
    knowledge: Any = SimpleNamespace(
        mask="none", clients=6, colluders={0: colluder}, config={"clip": None}
    )
    attack = LoneBlocks()
    view = ClientView(absolute)
    assert attack.applies(view, knowledge) is None
    guess = attack.run(view, knowledge)
    assert all(0 not in members for members in guess.details[MEMBERS].values())
    truth: Any = SimpleNamespace(
        tapped_rows=lambda field: ((tap, i, row) for i, row in enumerate(reply.blocks.values))
    )
    found = score(attack.scorer, guess, truth)
    # of call 5 the blocks of client 1 and of client 2, and nothing of the three
    assert (found.value, found.verdict) == (2, BETTER)
