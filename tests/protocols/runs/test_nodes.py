"""Every protocol over nodes behind real frames, on a network that loses, repeats and delays them,
and under servers that are killed.

A node here holds one client's shard and the agreed configuration, and nothing of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import cases
import pytest
import torch

from securecluster import Federation
from securecluster.core.randomness import Randomness
from securecluster.core.serialization import pack, unpack
from securecluster.errors import PolicyError, SecureClusterError
from securecluster.messaging import wire
from securecluster.messaging.messages import Empty, Header
from securecluster.models.objectives import objective
from securecluster.parties.client_state import ClientState
from securecluster.parties.deployment import Deployment, build_network
from securecluster.parties.derived import adds_noise, call_types, initial_model
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.masking.identities import Identity, Roster
from securecluster.privacy.masking.key_agreement import KeyRing
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.protocols.common.averages.restarts import Restart
from securecluster.runtime.channel_state import ChannelState
from securecluster.runtime.endpoint import Endpoint, config_hash
from securecluster.runtime.release_guard import ReleaseGuard
from securecluster.runtime.run import CheckpointPart, Run
from securecluster.runtime.server_channel import ServerChannel
from securecluster.runtime.transport import Framed
from securecluster.training.local_trainer import LocalTrainer

CLIENTS = 4


PRIVATE: dict[str, Any] = {"clip": 1.0, "noise": 0.5}
CLIENT: dict[str, Any] = {**PRIVATE, "dp_unit": "client"}
EXAMPLE: dict[str, Any] = {**PRIVATE, "dp_unit": "example"}
# so long that every phase has a call that can be lost and a later one
REFINED: dict[str, Any] = {"rounds": 2, "local_rounds": 2, "refine": 2, "retrain": 1}
LONGER: dict[str, dict[str, Any]] = {
    "ifca": {"start_rounds": 2, "rounds": 6},  # the starts take 4 of them
    "local-kmeans": {"local_rounds": 2},
    "nsim": {"local_rounds": 2},
    "nsim apart": {"local_rounds": 2},
    "random": {"k": 3},  # a pair, and two who are alone
    "srfca": REFINED,
    "srfca l2": REFINED,
    "finetune": {"tune_rounds": 2},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, LONGER.get(name, {}))
    for name in (
        "fedavg", "cfl", "cfl gradient", "cfl sketch", "cfl signature", "cfl compress",
        "cfl fallback", "flhc", "flhc apart", "flhc 4bit", "flhc signature", "hidden", "clove",
        "cflgp", "flux", "rdpcfl", "ifca", "local-kmeans", "nsim", "nsim apart", "oneshot", "pacfl",
        "random", "signature", "srfca", "srfca l2", "local", "finetune", "mrmtl",
    )
}  # fmt: skip
NOISY: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg, clients": ("fedavg", CLIENT),
    "cfl sketch, clients": ("cfl sketch", CLIENT),
    "ifca, clients": ("ifca", {**LONGER["ifca"], **CLIENT}),
    "srfca, clients": ("srfca", {**REFINED, **CLIENT}),
    "fedavg, examples": ("fedavg", EXAMPLE),
    "cfl sketch, examples": ("cfl sketch", EXAMPLE),
    "finetune, examples": ("finetune", {**LONGER["finetune"], **EXAMPLE}),
    "mrmtl, examples": ("mrmtl", EXAMPLE),
    "oneshot, examples": ("oneshot", {"gram_noise": 0.05}),
    "pacfl, examples": ("pacfl noise", {"gram_noise": 0.05}),
    "signature, examples": ("signature noise", {"signature_noise": 0.05, "dp_unit": "example"}),
    "cfl signature, examples": ("cfl signature", {"dp_unit": "example"}),
    "flhc signature, examples": ("flhc signature", {"dp_unit": "example"}),
    "signature, blocks": ("signature blocks", {"signature_noise": 0.05}),
}
MOMENTUM: dict[str, Any] = {"momentum": 0.9, "lr": 0.05, "keep_momentum": True}
KEPT = {
    f"{name}, momentum": (CASES[name][0], {**CASES[name][1], **MOMENTUM})
    for name in (
        "fedavg", "cfl", "cfl sketch", "flhc apart", "local-kmeans", "nsim", "oneshot", "local",
    )
}  # fmt: skip
SECURE = {
    f"{name}, secagg": (base, {**params, "aggregation": "secagg"})
    for name, (base, params) in CASES.items()
    if name in ("fedavg", "cfl sketch", "ifca", "srfca")
}
PADS: dict[str, Any] = {"relevance": "pads"}
SECURE |= {
    "oneshot, pads": (CASES["oneshot"][0], {**CASES["oneshot"][1], **PADS}),
    "srfca, pads": (SECURE["srfca, secagg"][0], {**SECURE["srfca, secagg"][1], **PADS}),
}
# noise in shares, which every new process draws as the last one did
SHARES: dict[str, Any] = {**CLIENT, "placement": "distributed", "aggregation": "secagg"}
SECURE["fedavg, shares"] = ("fedavg", SHARES)
SECURED = [
    ("fedavg, secagg", "none"),
    ("cfl sketch, secagg", "permutation"),
    ("ifca, secagg", "permutation"),  # one client chooses a model alone
    ("srfca, secagg", "permutation"),
]
PADDED = [("oneshot, pads", "none"), cases.exhaustive("srfca, pads", "permutation")]
PADDED_TOO = [cases.exhaustive("oneshot, pads", "none"), PADDED[1]]
LASTING = [
    (name, "none")
    if name in ("fedavg, momentum", "cfl sketch, momentum", "local, momentum")
    else cases.exhaustive(name, "none")
    for name in KEPT
]
# variants of methods that are tried without a mask
MASKED_ONLY = ("cfl gradient", "cfl compress", "flhc 4bit", "nsim apart")
PLAIN = [(name, "none") for name in CASES if name not in MASKED_ONLY]
EVERY = [*PLAIN, *((name, "permutation") for name in CASES if name != "local")]
TURNED = [("cfl sketch", "rotation"), ("srfca l2", "rotation")]
ALL = [*EVERY, *TURNED, *((name, "permutation") for name in NOISY)]
# Every client class meets every disturbance; variants, noise, other masks and no mask meet those
# that their own state or their own calls could break ("cfl sketch" sends what "cfl compress" and
# "flhc 4bit" do)
MAIN = [
    (name, "permutation")
    for name in ("fedavg", "cfl sketch", "flhc", "ifca", "local-kmeans", "nsim", "oneshot", "srfca")
]
LOST = [
    *MAIN, ("cfl", "permutation"), ("cfl gradient", "permutation"), ("finetune", "permutation"),
    ("srfca l2", "permutation"), ("oneshot, examples", "permutation"),
    ("signature, examples", "permutation"), ("srfca, clients", "permutation"), ("fedavg", "none"),
]  # fmt: skip
TWICE = [
    *MAIN,
    ("cfl fallback", "permutation"),
    ("finetune", "permutation"),
    ("nsim apart", "permutation"),
    ("srfca l2", "permutation"),
    ("ifca, clients", "permutation"),
    ("cfl sketch, examples", "permutation"),
    ("cfl", "none"),
]
KILLED = [
    *MAIN, ("cfl fallback", "permutation"), ("flhc apart", "permutation"),
    ("random", "permutation"), ("finetune", "permutation"), ("cfl sketch, clients", "permutation"),
    ("srfca, clients", "permutation"), ("cfl", "none"), ("nsim", "none"), *TURNED[:1],
]  # fmt: skip
FEW = [
    case
    for case in ALL
    if case not in TURNED[1:]
    and case[0] not in ("random", "cfl sketch, clients", "fedavg, examples")
]


def method(name: str, mask: str) -> Any:
    """A protocol by its name in `CASES`, `NOISY` or `KEPT`, with few rounds and a small network."""
    base, params = (CASES | NOISY | KEPT | SECURE)[name]
    rounds = 4 if name == "local, momentum" else 3
    small = {"rounds": rounds, "model": "mlp-32", "mask": mask, "epochs": 1}
    return cases.variant(base, **{**small, **params})


@pytest.fixture(scope="module")
def federation(four_clients: Federation) -> Federation:
    return four_clients


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Sums of as many parts in every run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def cohort_of(
    made: Any, federation: Federation, number: int, config: dict[str, Any]
) -> LocalTrainer:
    """What lies on a node's disk: its own shard, and the network that everyone agreed on."""
    shard, kind = federation.shards[number], objective(config["objective"])
    own = Federation((str(number),), (shard,), config["classes"], config["seed"], objective=kind)
    draws, cpu = Randomness(config["seed"]), torch.device("cpu")
    return LocalTrainer(
        own,
        initial_model(made, own),
        draws,
        cpu,
        torch.float32,
        [0],
        [number],
        made.training.validation_share(made),
    )


def endpoint_of(
    made: Any, cohort: LocalTrainer, config: dict[str, Any], simulated: bool
) -> Endpoint[Any]:
    """The endpoint of a node that has its own data and the configuration alone."""
    randomness, pipeline = Randomness(config["seed"]), made.pipeline(config)
    # of an enrolled client, whose keys are its own all the same
    identity = partial(Identity.derived, randomness)
    own = KeyRing(
        config_hash(config),
        randomness if simulated else None,
        pipeline.unlock,
        identity,
        Roster.derived(randomness),
    )
    whole_clients = config["dp_unit"] == "client"
    draws = NoiseStreams(own.noise, config_hash(config), bounds_rows=whole_clients)
    pipeline.arm(draws)
    cohort.secret = draws
    deployment = Deployment(made, config)
    client = deployment.client(cohort, pipeline)
    limits = deployment.limits(pipeline)
    halves = deployment.client_halves(own, draws)
    run = config_hash(config)
    found = Endpoint(client, cohort.ids, run, pipeline, own, limits=limits, halves=halves)
    found.noise = made.privacy.client_noise(config, draws)
    found.guard = guard_of(made, client, config)
    return found


def guard_of(made: Any, client: Any, config: dict[str, Any]) -> ReleaseGuard:
    """The guard of a node's calls, to which numbers of samples are public under dp_unit example."""
    cohort = client.cohort
    public: dict[int, frozenset[float]] = {}
    if config["dp_unit"] == "example" and adds_noise(made, config):
        sizes = (float(cohort.sizes[0]), float(cohort.validation_sizes[0]))
        public[cohort.ids[0]] = frozenset(sizes)
    private_training = made.privacy.per_example and config["noise"] > 0
    return ReleaseGuard(client, cohort.access, public, private_training)


def state_of(endpoint: Endpoint[Any]) -> ClientState:
    """All that a process leaves to the next one."""
    return endpoint.client.state(endpoint.keys.secrets)


def restore(endpoint: Endpoint[Any], state: ClientState) -> None:
    """Give a new process what the last one left."""
    endpoint.client.restore(state)
    endpoint.keys.restore(state.secrets)


@dataclass
class Node:
    """Bytes in, bytes out. An amnesic one is a new process for every frame, which has what the last
    one packed.
    """

    make: Callable[[], Endpoint[Any]]
    amnesic: bool = False
    living: Endpoint[Any] | None = None
    packed: bytes = b""
    sizes: list[int] = field(default_factory=list)

    def endpoint(self) -> Endpoint[Any]:
        """The process that answers now."""
        if self.living is not None:
            return self.living
        found = self.make()
        if self.packed:
            restore(found, unpack(self.packed, ClientState))
        self.living = None if self.amnesic else found
        return found

    def remembers(self) -> bytes:
        """All that it would leave to another process."""
        return pack(state_of(self.endpoint()))

    def answer(self, data: bytes) -> bytes:
        """The reply to a frame."""
        own = self.endpoint()
        reply = own.answer_frame(data)
        if self.amnesic:
            self.packed = pack(state_of(own))
            self.sizes.append(len(self.packed))
        return reply


class KilledError(Exception):
    """The server dies."""


Fault = Callable[[int, Header], str]


def no_fault(client: int, header: Header) -> str:
    return ""


class World:
    """Nodes, the frames between them and a server, and what befalls these."""

    def __init__(
        self,
        name: str,
        mask: str,
        federation: Federation,
        amnesic: bool = False,
        simulated: bool = True,
    ) -> None:
        self.made = method(name, mask)
        self.config = self.made.config(federation, "float32")
        self.nodes = {
            i: Node(self._maker(federation, i, simulated), amnesic) for i in range(CLIENTS)
        }
        self.fault: Fault = no_fault
        self.seen: list[tuple[int, Header]] = []  # the frames that were sent
        self.sent: dict[int, list[bytes]] = {i: [] for i in range(CLIENTS)}
        self._late: dict[int, list[tuple[int, bytes, bool]]] = {i: [] for i in range(CLIENTS)}

    def _maker(
        self, federation: Federation, i: int, simulated: bool
    ) -> Callable[[], Endpoint[Any]]:
        cohort = cohort_of(self.made, federation, i, self.config)
        return lambda: endpoint_of(self.made, cohort, self.config, simulated)

    def _door(self, i: int) -> Callable[[bytes], bytes]:
        def answer(data: bytes) -> bytes:
            header, node = wire.peek(data), self.nodes[i]
            self.seen.append((i, header))
            self.sent[i].append(data)
            what = self.fault(i, header)
            if what == "request":
                raise ConnectionError
            if what in ("late", "echo"):
                self._late[i].append((header.round, data, what == "echo"))
            if what == "late":
                raise ConnectionError
            reply = node.answer(data)
            if what == "echo":
                before = node.remembers()
                assert node.answer(data) == reply
                assert node.remembers() == before
            self._deliver_late(i, header.round)
            if what == "kill":
                raise KilledError
            if what == "reply":
                raise ConnectionError
            return reply

        return answer

    def _deliver_late(self, i: int, number: int) -> None:
        """What was on its way while a node answered a frame of a later round reaches it now; nobody
        reads its replies.
        """
        due = [(data, carried_out) for sent, data, carried_out in self._late[i] if sent < number]
        self._late[i] = [frame for frame in self._late[i] if frame[0] >= number]
        node = self.nodes[i]
        for data, carried_out in due:
            before = node.remembers()
            with suppress(SecureClusterError):
                node.answer(data)
            assert node.remembers() == before or not carried_out

    def run_server(self, folder: Path | None = None) -> tuple[Any, ServerChannel]:
        """The server's final state, and its network."""
        doors = {i: self._door(i) for i in self.nodes}
        net = build_network(
            self.made, Framed(doors, lambda name: call_types(self.made, name)[1]), self.config
        )
        part = CheckpointPart(
            ChannelState, lambda: net.state, lambda state: setattr(net, "state", state)
        )
        run = Run(folder, {"network": part}, begin=lambda number: setattr(net, "round", number))
        return self.made.run_server(net, run), net

    def result(self) -> Result:
        """What a run ends with."""
        state, net = self.run_server()
        return self.result_of(state, net)

    def result_of(self, state: Any, net: ServerChannel) -> Result:
        models = [
            self.made.observer.final_models(node.endpoint().client, state).values[0]
            for node in self.nodes.values()
        ]
        alone = [i for i, node in self.nodes.items() if node.endpoint().client.unshared]
        labels = list(state.labels)
        if not self.made.observer.server_knows_labels:
            labels = []
            for node in self.nodes.values():
                labels += self.made.observer.known_labels(node.endpoint().client, state)
        return Result(pack(state), torch.stack(models), labels, pack(net.state.ledger), alone)


@dataclass
class Result:
    """Of a run: the server's state, each client's final model, (m, d), the labels, the ledger, and
    who holds a model of its own.
    """

    state: bytes
    models: torch.Tensor
    labels: list[int]
    ledger: bytes
    alone: list[int]

    def same_models(self, other: Result) -> bool:
        """Bit for bit."""
        return torch.equal(self.models, other.models)

    def peers_agree(self) -> bool:
        """Whether all members of a cluster hold one model."""
        first = [self.labels.index(c) for c in self.labels]
        return torch.equal(self.models, self.models[first])


@pytest.fixture(scope="module")
def calm(federation: Federation) -> Callable[[str, str], tuple[Result, list[tuple[int, Header]]]]:
    """The undisturbed run of a case, and its frames."""
    known: dict[tuple[str, str], tuple[Result, list[tuple[int, Header]]]] = {}

    def run(name: str, mask: str) -> tuple[Result, list[tuple[int, Header]]]:
        if (name, mask) not in known:
            world = World(name, mask, federation)
            known[name, mask] = (world.result(), world.seen)
        return known[name, mask]

    return run


def some(what: str, but: tuple[str, ...] = ("train_locally",)) -> Fault:
    """A fault in client 0's second call of every method, or its first where there may be one, and
    in client 1's first.

    Args:
        but: methods without faults.
    """
    calls: dict[tuple[int, str], list[int]] = {}

    def fault(i: int, header: Header) -> str:
        known = calls.setdefault((i, header.method), [])
        if header.step in known:  # asked again
            return ""
        known.append(header.step)
        hit = (i, len(known)) == ((0, 1 if header.method in ONCE else 2)) or (i, len(known)) == (
            1,
            1,
        )
        return what if hit and header.method not in but else ""

    return fault


ONCE = (
    "key_offer", "key_seal", "key_open", "send_model", "pool", "eigen", "relevance", "losses",
    "receive", "judge", "post",
)  # fmt: skip


TRAINED_ALONE = ("local",)
# whose models are its own after the run
TUNED = ("finetune", "finetune, examples")
# every client ends with a model of its own
UNLIKE = (*TRAINED_ALONE, *TUNED, "mrmtl", "mrmtl, examples")


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "mask"), [*cases.covering(FEW, LOST), *SECURED, *PADDED_TOO])
def test_a_lost_reply_ends_as_a_lost_request_does(
    name: str, mask: str, federation: Federation
) -> None:
    """Training alone is another matter (below).

    It is done, whether the server hears of it or not; so is MR-MTL's training of a client's own
    model in its last round.
    """
    found = {}
    for what in ("request", "reply", "late"):
        world = World(name, mask, federation)
        world.fault = some(what)
        found[what] = world.result()
        if name not in UNLIKE:
            assert found[what].peers_agree()
    for what in ("reply", "late"):
        assert found[what].state == found["request"].state, what
        if not name.startswith("mrmtl"):
            assert found[what].same_models(found["request"]), what
        assert found[what].ledger == found["request"].ledger, what


ALONE = ("flhc apart", "local-kmeans", "nsim", "nsim apart", "random", "srfca l2")
WITH_LONE = (*ALONE, *TRAINED_ALONE)
LONE = [(name, mask) for name, mask in ALL if name in WITH_LONE]


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "mask"), cases.covering(LONE, MAIN + KILLED))
def test_who_trained_alone_has_done_so_whether_its_reply_came_or_not(
    name: str, mask: str, federation: Federation, calm: Any
) -> None:
    world = World(name, mask, federation)
    world.fault = lambda i, header: (
        "reply" if header.method == "train_locally" and (i + header.step) % 3 == 0 else ""
    )
    assert any(header.method == "train_locally" for _, header in calm(name, mask)[1])
    assert world.result().same_models(calm(name, mask)[0])


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "mask"), [*cases.covering(FEW, TWICE), *LASTING, *SECURED, *PADDED_TOO]
)
def test_frames_that_come_twice_and_again_when_a_round_has_passed_change_nothing(
    name: str, mask: str, federation: Federation, calm: Any
) -> None:
    world, (whole, frames) = World(name, mask, federation), calm(name, mask)
    world.fault = lambda i, header: "echo"
    found = world.result()
    node = world.nodes[0]
    before = node.remembers()
    for data in world.sent[0]:  # and once more when all is over
        with suppress(SecureClusterError):
            node.answer(data)
        assert node.remembers() == before
    assert found.state == whole.state
    assert found.same_models(whole)
    assert world.seen == frames


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "mask"), [*cases.covering(ALL, KILLED), *LASTING, *SECURED, *PADDED]
)
def test_a_server_killed_in_every_call_ends_as_if_it_never_had_been(
    name: str, mask: str, federation: Federation, calm: Any, tmp_path: Path
) -> None:
    """It dies when client 2, whom others come after, has answered; clients live on, and it resumes
    from its checkpoint.
    """
    world, (whole, frames) = World(name, mask, federation), calm(name, mask)
    killed: set[tuple[str, int]] = set()

    def fault(i: int, header: Header) -> str:
        call = (header.method, header.step)
        if i != 2 or call in killed:
            return ""
        killed.add(call)
        return "kill"

    world.fault = fault
    for _ in frames:
        try:
            state, net = world.run_server(tmp_path)
            break
        except KilledError:
            continue
    found = world.result_of(state, net)
    assert len(killed) >= min(world.made.rounds, world.made.total_rounds)
    assert found.state == whole.state
    assert found.same_models(whole)
    assert found.ledger == whole.ledger


def test_clients_that_agreed_on_a_key_unheard_agree_anew(federation: Federation) -> None:
    """All replies to the first agreement are lost, client 0's after it took the seed; the second is
    led by another client.
    """
    found = []
    for what in ("request", "reply"):
        world = World("fedavg", "permutation", federation)

        def fault(i: int, header: Header, what: str = what) -> str:
            if header.round == 1 and header.method == "key_open":
                return what if i == 0 else "request"
            return "request" if i == 0 and header.round == 2 else ""

        world.fault = fault
        found.append(world.result())
        assert found[-1].peers_agree()
    assert found[0].same_models(found[1])


def test_a_resumed_server_has_a_client_lead_that_knows_the_key(
    federation: Federation, calm: Any, tmp_path: Path
) -> None:
    """Client 0 missed the agreement of the round in which the server died, and replies first when
    it is asked again.
    """
    world = World("fedavg", "permutation", federation)
    killed: list[int] = []

    def fault(i: int, header: Header) -> str:
        if killed:
            return ""
        if i == 2 and header.method == "contribute":
            killed.append(i)
            return "kill"
        return "request" if i == 0 else ""

    world.fault = fault
    with pytest.raises(KilledError):
        world.run_server(tmp_path)
    state, net = world.run_server(tmp_path)
    found, (whole, _) = world.result_of(state, net), calm("fedavg", "permutation")
    assert found.peers_agree()
    # the mask's key is another client's
    torch.testing.assert_close(found.models, whole.models, rtol=0, atol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["fedavg", "cfl sketch", "flhc apart", "srfca"])
def test_what_a_node_remembers_does_not_grow_with_rounds(name: str, federation: Federation) -> None:
    sizes = []
    for longer in (0, 8):
        world = World(name, "permutation", federation, amnesic=True)
        world.made.rounds += longer
        world.config = world.made.config(federation, "float32")
        world.run_server()
        sizes.append(max(world.nodes[1].sizes))
    model = 4 * world.config["dimension"]
    assert model < sizes[0] < 1.5 * model
    assert abs(sizes[1] - sizes[0]) <= 64  # numbers of more digits


def test_a_late_choice_does_not_replace_a_later_one(federation: Federation) -> None:
    """Under noise, for the losses of one and the same models are otherwise the same."""
    world = World("ifca, clients", "none", federation)
    node = world.nodes[0].endpoint()
    client = node.client
    letter = Restart.begin(0, 2, CLIENTS, fresh=False).message_for([0])
    with pytest.raises(PolicyError, match="choose comes first"):
        client.contribute(node.context((0,), 1, 1, "contribute"), Empty())
    taken = {
        step: client.choose(node.context((0,), 1, step, "choose"), letter).model.values.item()
        for step in range(40, 0, -1)
    }
    assert set(taken.values()) == {0, 1}
    assert client._chosen[0].tolist() == [0, taken[40], 40]
    with pytest.raises(PolicyError, match="moved on"):
        client.contribute(node.context((0,), 1, 39, "contribute"), Empty())
    client.contribute(node.context((0,), 1, 41, "contribute"), Empty())
    client.choose(
        node.context((0,), 2, 42, "choose"),
        Restart.begin(1, 2, CLIENTS, fresh=False).message_for([0]),
    )
    with pytest.raises(PolicyError, match="moved on"):
        client.choose(node.context((0,), 1, 41, "choose"), letter)
    assert list(client.model_sets) == [1]


def test_the_latest_compressed_update_is_the_one_contributed(federation: Federation) -> None:
    """A request for an earlier compressed update comes late, while the model is still the same, and
    the process forgets both updates.
    """
    letter = PendingUpdates.start(CLIENTS, fresh=False).message_for([0])

    def kept(node: Endpoint[Any]) -> torch.Tensor:
        context = node.context((0,), 1, 6, "contribute_kept_update")
        return node.client.contribute_kept_update(context, Empty()).delta.values

    rows = []
    for steps in ((5,), (5, 3)):
        world = World("cfl sketch", "none", federation)
        node = world.nodes[0].endpoint()
        for step in steps:
            context = node.context((0,), 1, step, "send_compressed_update")
            node.client.send_compressed_update(context, letter)
        rows.append(kept(node))
        world.nodes[0].packed, world.nodes[0].living = world.nodes[0].remembers(), None
        rows.append(kept(world.nodes[0].endpoint()))
    assert all(torch.equal(row, rows[0]) for row in rows)
