"""Forge and damage frames of every protocol, at clients, at the server and at the key authority,
and count what comes of them.

python -m benchmarks.fuzz [--frames 200000] [--side all] [--seed 0]

A short run of each protocol over real frames is recorded, plain, with secure sums and with
encryption. Then its frames are changed in one to three places (a field of the header, a scalar, a
tensor's type, shape or numbers, a receipt), damaged as bytes, or sent out of order: requests to a
client's endpoint and to the key authority, and replies of both to the server's loop. Every one must
be answered or refused by an error that says why; whatever else is raised counts as unnamed. A
row per protocol and side goes to results/fuzz.csv: frames, what became of them, the slowest one in
milliseconds, and the largest memory of the process in MB.
"""

from __future__ import annotations

import copy
import json
import math
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.grid import script_parser
from benchmarks.table import SEEDED, write
from securecluster import Federation
from securecluster.core.lazy_torch import torch
from securecluster.core.serialization import pack, unpack
from securecluster.errors import SecureClusterError, UnforeseenError
from securecluster.messaging import wire
from securecluster.messaging.messages import AUTHORITY_CALL, Header
from securecluster.parties.client_state import ClientState
from securecluster.parties.deployment import Deployment, build_network
from securecluster.parties.derived import call_types
from securecluster.parties.endpoints import build_client
from securecluster.protections.encryption.authority import AuthorityState
from securecluster.protections.encryption.messages import AUTHORITY_METHODS
from securecluster.protections.registry import service_methods
from securecluster.protocols import (
    CFL,
    CFLGP,
    FLHC,
    FLUX,
    IFCA,
    MRMTL,
    NSIM,
    PACFL,
    RDPCFL,
    SRFCA,
    CLoVE,
    FedAvg,
    FineTune,
    Hidden,
    Local,
    LocalKMeans,
    OneShot,
    RandomClusters,
    Signature,
)
from securecluster.protocols.nsim import synthetic_users
from securecluster.protocols.nsim.pair_network import PairNetworkConfig
from securecluster.protocols.nsim.similarity_model import fit
from securecluster.runtime.authority import Authority
from securecluster.runtime.endpoint import Endpoint
from securecluster.runtime.run import Run
from securecluster.runtime.transport import Framed, Transport, WithAuthority

CLIENTS = 4
NEWCOMERS = 2
AUTHORITY = -1  # stands for the key authority where clients are meant by their ids
FEATURES = 12
CLASSES = 4
EVERYONE = list(range(CLIENTS + NEWCOMERS))
PATIENCE = 20.0  # seconds after which a frame counts as one that does not end
# shares of frames; the others are sent unchanged, out of order
STRUCTURED = 0.6
RAW = 0.3
VARIANTS = 12  # forged replies per call of a server's loop
# around the limits of indices, counts and integer types, and of other types
NUMBERS = (
    -1,
    0,
    1,
    2,
    3,
    7,
    1000,
    1 << 20,
    10**9,
    1 << 31,
    1 << 62,
    -(1 << 40),
    True,
    1.5,
    "x",
    None,
    [1],
    {"a": 1},
)
TEXTS = (
    "", "x", "server", "server/1", "lps/0", "lps/x", "lps/-1", "client/0", "client/1", "client/4",
    "gather", "sum", "pairs", "relay",
)  # fmt: skip
# in float32 the square of 3e38 overflows, 1e300 is infinite, and 1e-45 is the smallest subnormal
SPECIAL = (float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e300, 0.0, -1.0, 1e-45)
SHAPES: tuple[tuple[int, ...], ...] = (
    (), (0,), (1,), (3,), (0, 0), (2, 3), (1, 2, 3), (1 << 16,),
)  # fmt: skip
INTEGERS = (-1, 0, 1, 2, 3, 4, 7, 1 << 20, 1 << 33, 1 << 62, -(1 << 62))
# values of receipts that no client writes, each as the whole list, one receipt, or one value of it
RECEIPTS: tuple[Any, ...] = (
    None, 1, "x", {}, [], [[]], [1], ["gaussian"], [[None]], [["laplace", ["delta"], 1.0]],
    [["gaussian", ["delta"], math.inf]], [["gaussian", ["delta"], math.nan]],
    [["gaussian", ["delta"], -1.0]], [["gaussian", ["delta"], 1]], [["gaussian", "delta", 1.0]],
    [["gaussian", [1], 1.0]], [["gaussian", ["no field"], 1.0]], [["follows", ["delta"], 1.0]],
    [["gaussian", ["delta"], 1.0, 0.5]], [["dp-sgd", [], 1.0, 2.0, -1]],
    [["dp-sgd", [], 1.0, 2.0, 1 << 70]], [["dp-sgd", [], 1.0, 2.0, 1, 0]],
    [["public", [], 0.0, 2.0, 0, 1, "", "x"]], [["public", ["x" * 1000]]],
    [["public"]] * 65, [["public"]] * 100_000, [["gaussian", ["delta"] * 100_000, 1.0]],
)  # fmt: skip
# classes of named errors with a column of their own in the table
OUTCOMES = ("FrameError", "PolicyError", "UpdateError", "UsageError")


def walks(form: Any, users: int, draw: np.random.Generator) -> list[Any]:
    """Return synthetic users of NSIM for the data of `federation`.

    Args:
        form: of the data, unused.
        users: how many.
        draw: of samples and labels.
    """
    synthetic = []
    for k in range(users):
        x = draw.random((20, FEATURES)).astype(np.float32)
        y = draw.integers(k % 2, CLASSES, 20)
        synthetic.append((x, y))
    return synthetic


# CFL splits where ‖mean Δ‖ < ε1, max ‖Δ_i‖ > ε2 and γ_max < √((1 − α_cross^max)/2) (Sattler et al.
# 2019, eq. 39): bounds that updates keep in every round, so that short runs reach later code, too
SPLITS: dict[str, Any] = {
    "criterion": "absolute",
    "eps1": 100.0,
    "eps2": 1e-6,
    "gamma_max": 0.0,
    "min_size": 2,
}
PRIVATE: dict[str, Any] = {"clip": 1.0, "noise": 0.5, "dp_unit": "client"}
CASES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "cfl": (CFL, {**SPLITS, "fallback": 0.3}),
    "cfl, gradients": (
        CFL,
        {**SPLITS, "similarity": "gradient", "mask": "rotation", "average": "weighted"},
    ),
    "cfl, sketches": (CFL, {**SPLITS, "sketch": 8, "compress": "8bit"}),
    "flhc": (FLHC, {"pre_rounds": 1, "mask": "none"}),
    "flhc, top k": (FLHC, {"pre_rounds": 1, "compress": "topk:0.5", "threshold": 0.0}),
    "oneshot": (OneShot, {"tasks": 2, "model": "mlp-32"}),
    "oneshot, unsealed": (OneShot, {"tasks": 2, "sealed": False, "gram_noise": 1.0}),
    "srfca": (SRFCA, {"local_rounds": 1, "refine": 1, "sealed": True}),
    "srfca, l2": (
        SRFCA,
        {"local_rounds": 1, "refine": 2, "distance": "l2", "trim": 0.1, "retrain": 1},
    ),
    "srfca, private": (SRFCA, {"local_rounds": 1, "refine": 1, **PRIVATE}),
    "nsim": (
        NSIM,
        {
            "local_rounds": 1,
            "synthetic": 8,
            "walks": walks,
            "layer": "last",
            "mask": "rotation",
            "eps": 1.0,
        },
    ),
    "ifca": (IFCA, {"k": 2, "starts": 2, "start_rounds": 1}),
    "ifca, private": (IFCA, {"k": 2, "starts": 1, "mask": "none", **PRIVATE}),
    "fedavg": (FedAvg, {"mask": "permutation"}),
    "finetune": (FineTune, {"mask": "permutation", "tune_rounds": 1}),
    "local-kmeans": (LocalKMeans, {"k": 2, "local_rounds": 1}),
    "random": (RandomClusters, {"k": 3, "mask": "signed-permutation"}),
    "local": (Local, {}),
    "mrmtl": (MRMTL, {}),
    "signature": (Signature, {"k": 2, "signature_blocks": "plain"}),
    "signature, class blocks": (
        Signature,
        {"signature_blocks": "blocks", "signature_noise": 0.5, "mask": "none"},
    ),
    "cfl, signatures": (CFL, {**SPLITS, "signature": "gradient", "signature_blocks": "plain"}),
    "pacfl": (PACFL, {"k": 2}),
    "clove": (CLoVE, {"k": 2, "stable_rounds": 2}),
    "cflgp": (CFLGP, {"k": 2}),
    "flux": (FLUX, {"pre_rounds": 1, "k": 2}),
    "rdpcfl": (RDPCFL, {"k": 2}),
    "ifca, rebalanced": (IFCA, {"k": 2, "starts": 1, "rebalance": 2, "mask": "none"}),
    "hidden": (Hidden, {"k": 2, "aggregation": "plain"}),
    "hidden, secure sums": (Hidden, {"k": 2, **PRIVATE, "mask": "none"}),
    "ifca, secure sums": (IFCA, {"k": 2, "starts": 1, "aggregation": "secagg"}),
    "fedavg, secure sums": (FedAvg, {"aggregation": "secagg"}),
    "fedavg, distributed noise": (
        FedAvg,
        {"aggregation": "secagg", "placement": "distributed", **PRIVATE},
    ),
    "oneshot, padded pairs": (OneShot, {"tasks": 2, "model": "mlp-32", "relevance": "pads"}),
    "oneshot, encrypted pairs": (OneShot, {"tasks": 2, "model": "mlp-32", "relevance": "ckks"}),
}


def federation(clients: int, seed: int) -> Federation:
    """Return clients in two clusters, of 16 samples each.

    Args:
        clients: how many; every other one is of the second cluster.
        seed: of samples; the labels' true weights are always the same.
    """
    weights = np.random.default_rng(0).normal(size=(2, FEATURES, CLASSES))
    draw = np.random.default_rng(seed)
    train: dict[str, Any] = {}
    test: dict[str, Any] = {}
    for i in range(clients):
        x = draw.normal(size=(24, FEATURES)).astype(np.float32)
        cluster = i % 2
        scores = x @ weights[cluster]
        y = scores.argmax(1)
        # every class occurs in every client's training samples
        y[:CLASSES] = np.arange(CLASSES)
        train[f"c{i}"] = (x[:16], y[:16])
        test[f"c{i}"] = (x[16:], y[16:])
    return Federation.from_arrays(train, test=test, classes=CLASSES, seed=0)


def method_of(case: str) -> Any:
    """Return the protocol of a case."""
    protocol, params = CASES[case]
    rounds = 2
    if protocol is CFL:
        rounds = 3
    defaults = {"rounds": rounds, "epochs": 1, "model": "linear"}
    return protocol(**{**defaults, **params})


@dataclass
class Count:
    """Outcomes of the frames of one case on one side."""

    frames: int = 0
    answered: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # named ones, by class
    unnamed: Counter[str] = field(default_factory=Counter)  # everything else, by what it says
    slowest: float = 0.0  # seconds
    memory: int = 0  # bytes, the largest resident set since the case began

    def refuse(self, error: BaseException, about: str) -> None:
        """Count an error.

        Args:
            error: what a frame raised.
            about: the method that the frame was for.
        """
        foreseen = not isinstance(error, UnforeseenError)
        if isinstance(error, SecureClusterError) and foreseen:
            self.errors[type(error).__name__] += 1
            return
        # an endpoint raises an UnforeseenError from any failure that no check has named
        cause = error.__cause__ or error
        name = type(cause).__name__
        text = str(cause)[:100]
        self.unnamed[f"{about}: {name}: {text}"] += 1

    def send(self, answer_frame: Callable[[bytes], bytes], data: bytes, about: str) -> None:
        """Send a forged frame to a party, and count what becomes of it.

        Args:
            answer_frame: the party's function.
            data: the frame.
            about: the method that the frame is for.
        """
        self.frames += 1
        try:
            with timed(self):
                answer_frame(data)
            self.answered += 1
        except (Exception, EndlessError) as error:
            self.refuse(error, about)

    def row(self, case: str, side: str) -> dict[str, Any]:
        """Return a line of the table.

        Args:
            case: one of `CASES`.
            side: one of `SIDES`.
        """
        named = {name: self.errors[name] for name in OUTCOMES}
        others = sum(self.errors.values()) - sum(named.values())
        return {
            "case": case,
            "side": side,
            "frames": self.frames,
            "answered": self.answered,
            **named,
            "other named": others,
            "unnamed": sum(self.unnamed.values()),
            "slowest_ms": round(1e3 * self.slowest, 1),
            "largest_mb": round(self.memory / 2**20),
        }


class EndlessError(Exception):
    """A frame took longer than anybody waits."""


def _ring(*_: Any) -> None:
    """Handle the timer's signal."""
    raise EndlessError(f"still busy after {PATIENCE:g} s")


@contextmanager
def timed(count: Count, patience: float = PATIENCE) -> Iterator[None]:
    """Record how long a frame took, and stop one that does not end.

    Args:
        count: of which the slowest frame is updated.
        patience: seconds after which a frame is stopped.
    """
    # the signal's handler raises in this thread, in the middle of the frame
    before = signal.signal(signal.SIGALRM, _ring)
    signal.setitimer(signal.ITIMER_REAL, patience)
    start = time.perf_counter()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        elapsed = time.perf_counter() - start
        count.slowest = max(count.slowest, elapsed)


def forget_peak() -> None:
    """Make Linux count the largest resident set anew.

    Elsewhere it stays that of the whole process.
    """
    path = Path("/proc/self/clear_refs")
    if path.exists():
        # 5 resets the peak resident set, VmHWM in /proc/self/status (proc(5))
        path.write_text("5")


def peak() -> int:
    """Return the largest resident set in bytes."""
    path = Path("/proc/self/status")
    lines: list[str] = []
    if path.exists():
        lines = path.read_text().splitlines()
    # both sources count in KiB
    for line in lines:
        if line.startswith("VmHWM:"):
            kibibytes = int(line.split()[1])
            return kibibytes << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@dataclass
class Sent:
    """A request of a recorded run, what its client remembered before, and the reply."""

    client: int
    before: bytes
    request: bytes
    reply: bytes
    method: str
    step: int


@dataclass
class Recorded:
    """A run of a case over real frames."""

    method: Any
    data: Federation
    config: dict[str, Any]
    sent: list[Sent]
    phases: dict[str, Any]

    def node(self, client: int) -> Endpoint[Any]:
        """Return the endpoint of one client, or newcomer, as it is before a run."""
        if client < CLIENTS:
            return build_client(self.method, self.data, SEEDED, [client])
        joining = federation(NEWCOMERS, seed=1)
        ids = [client - CLIENTS]
        return build_client(self.method, joining, SEEDED, ids, joins=self.config)

    def authority(self) -> Authority | None:
        """Return the key authority, as it is before a run; None where nothing is encrypted."""
        return Deployment(self.method, self.config).authority()

    @property
    def parties(self) -> list[int]:
        """Return the ids of all clients and newcomers, and the key authority if there is one."""
        if self.authority() is None:
            return EVERYONE
        return [*EVERYONE, AUTHORITY]

    def run_server(
        self,
        doors: dict[int, Callable[[bytes], bytes]],
        change: Callable[[Any], None] = lambda net: None,
    ) -> None:
        """Run the server's loop over the doors of clients and of the key authority, and assign
        newcomers; phases without queries are not run again.

        Args:
            doors: each party's function from request to reply.
            change: called with the network before the run.
        """

        def reply_class(name: str) -> type:
            reply: type = call_types(self.method, name)[1]
            return reply

        transport: Transport = Framed(doors, reply_class)
        if AUTHORITY in doors:
            transport = WithAuthority(transport, doors[AUTHORITY], reply_class)
        net = build_network(self.method, transport, self.config)
        change(net)
        run = Run(begin=lambda number: setattr(net, "round", number))
        # parts of a run that are there already are not computed again, as in a resumed run
        run._parts.update(self.phases)
        state = self.method.run_server(net, run)
        if "phase-estimator" in run._parts:
            self.phases["phase-estimator"] = run._parts["phase-estimator"]
        net.divide([])  # newcomers are queried by the server itself
        self.method.assign_newcomers(net, state, EVERYONE[CLIENTS:])


def record(case: str) -> Recorded:
    """Run a case over real frames, and record them."""
    method = method_of(case)
    data = federation(CLIENTS, seed=0)
    config = method.config(data, "float32")
    recorded = Recorded(method, data, config, [], {})
    doors = {i: _recording(recorded, i) for i in EVERYONE}
    authority = recorded.authority()
    if authority is not None:
        doors[AUTHORITY] = _recorded_answer(
            recorded, AUTHORITY, authority.answer_frame, lambda: pack(authority.state)
        )
    recorded.run_server(doors)
    return recorded


def _recording(recorded: Recorded, i: int) -> Callable[[bytes], bytes]:
    """Return client i's function from request to reply, which records both."""
    node = recorded.node(i)

    def state() -> bytes:
        return pack(node.client.state(node.keys.secrets))

    return _recorded_answer(recorded, i, node.answer_frame, state)


def _recorded_answer(
    recorded: Recorded,
    party: int,
    answer_frame: Callable[[bytes], bytes],
    state: Callable[[], bytes],
) -> Callable[[bytes], bytes]:
    """Return a party's function from request to reply, which records both.

    Args:
        recorded: the run, to which they are added.
        party: id of a client, or `AUTHORITY`.
        answer_frame: the party's function.
        state: returns what the party remembers.
    """

    def answer(data: bytes) -> bytes:
        before = state()
        header = wire.peek(data)
        reply = answer_frame(data)
        sent = Sent(party, before, data, reply, header.method, header.step)
        recorded.sent.append(sent)
        return reply

    return answer


class Forger:
    """Changes frames at random.

    Args:
        draw: what it draws from.
        frames: valid ones, whose parts it exchanges.
        methods: names that a header may have.
    """

    def __init__(
        self, draw: random.Random, frames: Sequence[bytes], methods: Sequence[str]
    ) -> None:
        self._draw = draw
        self._frames = frames
        self._methods = methods

    def forge(self, data: bytes) -> bytes:
        """Return another frame than a valid one, but for a few that are sent as they are."""
        share = self._draw.random()
        if share < STRUCTURED:
            return self._rewritten(data)
        if share < STRUCTURED + RAW:
            return self._damaged(data)
        return data

    def _rewritten(self, data: bytes) -> bytes:
        text, tensors = wire._read(data)
        header, scalars, *receipts = json.loads(text)
        for _ in range(self._draw.choice([1, 1, 1, 2, 3])):
            if self._draw.random() < 0.15:
                self._change_header(header)
            elif self._draw.random() < (0.2 if receipts else 0.05):
                receipts = self._other_receipts(receipts)
            elif tensors and self._draw.random() < 0.7:
                self._change_tensors(tensors)
            else:
                self._change_scalars(scalars)
        return saved(header, scalars, tensors, receipts)

    def _other_receipts(self, receipts: list[Any]) -> list[Any]:
        """Return what follows header and scalars in a frame: receipts, or none, or more than them.

        Args:
            receipts: of the frame: a list of one list, or of nothing.
        """
        what = self._draw.random()
        if what < 0.1:
            return []
        if what < 0.15:
            return [*receipts, [["public"]]] if receipts else [[["public"]], []]
        written = copy.deepcopy(receipts[0]) if receipts else []
        # an earlier change may have left what is no list of receipts
        are_receipts = isinstance(written, list) and all(isinstance(one, list) for one in written)
        if what < 0.6 or not written or not are_receipts or not all(written):
            return [self._draw.choice(RECEIPTS)]
        receipt = self._draw.choice(written)
        if what < 0.7:
            written.append(receipt)
        elif what < 0.8:
            receipt += self._draw.choices(NUMBERS, k=self._draw.randint(1, 6))
        else:
            others: list[Any] = [*NUMBERS, *SPECIAL, *TEXTS, ["no field"], [1], [[]]]
            # the value is drawn before its position
            value = self._draw.choice(others)
            receipt[self._draw.randrange(len(receipt))] = value
        return [written]

    def _change_header(self, header: list[Any]) -> None:
        position = self._draw.randrange(len(header))
        # the second field is the method's name
        if position == 1:
            header[position] = self._draw.choice(self._methods)
        elif isinstance(header[position], str):
            header[position] = self._draw.choice(TEXTS)
        else:
            header[position] = self._draw.choice(NUMBERS)

    def _change_scalars(self, scalars: dict[str, Any]) -> None:
        name = self._draw.choice([*scalars, "restart", "more"])
        if self._draw.random() < 0.1:
            scalars.pop(name, None)
        else:
            scalars[name] = self._draw.choice(NUMBERS)

    def _change_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        name = self._draw.choice(list(tensors))
        what = self._draw.random()
        if what < 0.05:
            del tensors[name]
        elif what < 0.15:
            # another message's valid tensor, which only a check of its place can refuse
            _, others = wire._read(self._draw.choice(self._frames))
            if others:
                tensors[name] = self._draw.choice(list(others.values()))
        elif what < 0.3:
            tensors[name] = self._of_another_type(tensors[name])
        elif what < 0.6:
            tensors[name] = self._of_another_shape(tensors[name])
        else:
            tensors[name] = self._with_other_numbers(tensors[name])

    def _of_another_type(self, tensor: torch.Tensor) -> torch.Tensor:
        types = [
            torch.float32,
            torch.float64,
            torch.int64,
            torch.int32,
            torch.uint8,
            torch.bool,
            torch.float16,
        ]
        # NaN has no value in a type of integers
        return tensor.nan_to_num().to(self._draw.choice(types))

    def _of_another_shape(self, tensor: torch.Tensor) -> torch.Tensor:
        change = self._draw.randrange(6)
        if change == 0:
            return tensor[None]
        if change == 1:
            return tensor.flatten()
        # a tensor without axes has no length
        if change == 2 and tensor.ndim:
            return torch.cat([tensor, tensor])
        if change == 3 and tensor.ndim:
            length = self._draw.randint(0, len(tensor))
            return tensor[:length]
        if change == 4:
            return tensor.new_zeros(self._draw.choice(SHAPES))
        if tensor.ndim:
            return tensor[..., :-1]
        return tensor

    def _with_other_numbers(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        flat = tensor.view(-1)
        if not len(flat):
            return tensor
        position = self._draw.randrange(len(flat))
        if tensor.is_floating_point():
            if self._draw.random() < 0.3:
                return tensor * self._draw.choice([0.0, -1.0, 1e10, 1e30])
            value = self._draw.choice(SPECIAL)
            flat[position] = torch.tensor(value, dtype=torch.float64).to(tensor.dtype)
        elif tensor.dtype == torch.int64:
            flat[position] = self._draw.choice(INTEGERS)
        else:
            flat[position] = self._draw.choice([0, 1])
        return tensor

    def _damaged(self, data: bytes) -> bytes:
        share = self._draw.random()
        if share < 0.6:
            return self._with_other_bytes(data)
        if share < 0.8:
            length = self._draw.randrange(len(data))
            return data[:length]
        if share < 0.9:
            # the first 8 bytes of a frame are the length of its JSON header
            lengths = [1 << 63, 1 << 40, 2 * len(data), 0, 7]
            length = self._draw.choice(lengths)
            return length.to_bytes(8, "little") + data[8:]
        if share < 0.95:
            surplus = self._draw.randrange(1, 9)
            return data + bytes(surplus)
        return self._bomb()

    def _with_other_bytes(self, data: bytes) -> bytes:
        """Return a frame with up to eight other bytes, mostly among its first 400."""
        damaged = bytearray(data)
        stop = len(damaged)
        if self._draw.random() >= 0.3:
            stop = min(stop, 400)
        for _ in range(self._draw.randint(1, 8)):
            # the value is drawn before its position
            value = self._draw.randrange(256)
            damaged[self._draw.randrange(stop)] = value
        return bytes(damaged)

    def _bomb(self) -> bytes:
        """Return a short frame that describes deeply nested or giant content."""
        # deeper than Python's recursion limit; and 2^62 numbers, whose size must be checked before
        # anything of that size is allocated
        deep = "[" * 10_000 + "]" * 10_000
        side = 1 << 31
        giant = {"dtype": "F32", "shape": [side, side], "data_offsets": [0, 4]}
        bombs = [
            {"__metadata__": {"frame": deep}},
            {"__metadata__": {"frame": "[]"}, "means": giant},
        ]
        bomb = self._draw.choice(bombs)
        text = json.dumps(bomb).encode()
        # laid out as safetensors: the header's length, the header, the tensors' numbers
        length = len(text).to_bytes(8, "little")
        return length + text + bytes(4)


def saved(
    header: list[Any],
    scalars: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    receipts: Sequence[Any] = (),
) -> bytes:
    """Return a frame of any content, also of one that no sender would encode.

    Args:
        header: fields of the frame's header.
        scalars: of the message, by name.
        tensors: of the message, by name.
        receipts: what follows the scalars: the receipts of a reply, or nothing.
    """
    from safetensors.torch import save

    copies = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    text = json.dumps([header, scalars, *receipts])
    return bytes(save(copies, {"frame": text}))


def reheaded(data: bytes, header: Header) -> bytes:
    """Return a frame with another header.

    Args:
        data: a valid frame.
        header: the other one.
    """
    text, tensors = wire._read(data)
    _, scalars, *receipts = json.loads(text)
    return saved(wire.header_fields(header), scalars, tensors, receipts)


def client_side(run: Recorded, frames: int, draw: random.Random) -> Count:
    """Send forged requests to the endpoints of a client and of a newcomer.

    Args:
        run: whose requests are forged.
        frames: how many.
        draw: what the forger draws from.
    """
    nodes = {i: run.node(i) for i in (0, CLIENTS)}
    count = Count()
    own_frames = [sent for sent in run.sent if sent.client in nodes]
    names = sorted({*_methods(run), *remote_methods(run.method.client)})
    requests = [sent.request for sent in run.sent]
    forger = Forger(draw, requests, names)
    forget_peak()
    for _ in range(frames):
        sent = draw.choice(own_frames)
        node = nodes[sent.client]
        if draw.random() < 0.1:
            state = unpack(sent.before, ClientState)
            # the client as it was when the recorded request reached it, so that some are in order
            node.client.restore(state)
            node.keys.restore(state.secrets)
        count.send(node.answer_frame, forger.forge(sent.request), sent.method)
    count.memory = peak()
    return count


def remote_methods(client: type) -> list[str]:
    """Return the names of the methods that a client's endpoint answers."""
    releases = [name for name in dir(client) if hasattr(getattr(client, name), "__release__")]
    return [*releases, *service_methods()]


def _methods(run: Recorded) -> set[str]:
    """Return the names of the methods that a run called."""
    return {sent.method for sent in run.sent}


def authority_side(run: Recorded, frames: int, draw: random.Random) -> Count:
    """Send forged requests to the key authority.

    Args:
        run: whose requests are forged.
        frames: how many.
        draw: what the forger draws from.
    """
    authority = run.authority()
    assert authority is not None
    count = Count()
    own_frames = [sent for sent in run.sent if sent.client == AUTHORITY]
    # its keys are of the recorded run, or no ciphertext in these requests would open
    authority.restore(unpack(own_frames[-1].before, AuthorityState))
    names = sorted({*_methods(run), *AUTHORITY_METHODS})
    forger = Forger(draw, [sent.request for sent in own_frames], names)
    forget_peak()
    for _ in range(frames):
        sent = draw.choice(own_frames)
        if draw.random() < 0.1:
            # of what it has released it remembers nothing, so that it decrypts again
            secrets = authority.state
            authority.restore(AuthorityState(secrets.secret, secrets.exchange))
        count.send(authority.answer_frame, forger.forge(sent.request), sent.method)
    count.memory = peak()
    return count


def server_side(run: Recorded, frames: int, draw: random.Random) -> Count:
    """Run the server's loop again and again, over clients whose replies are forged.

    Each call is tried with several forged replies. What the network refuses is counted; with some
    of those that it takes the loop goes on.

    Args:
        run: whose replies are forged.
        frames: how many forged replies, at least.
        draw: what the forger draws from.
    """
    count = Count()
    replies = [sent.reply for sent in run.sent]
    forger = Forger(draw, replies, sorted(_methods(run)))
    forget_peak()
    while count.frames < frames:
        liar = _Liar(run, forger, draw, count)
        try:
            # the time of the loop is not that of any frame
            with timed(Count()):
                doors = {party: liar.door(party) for party in run.parties}
                run.run_server(doors, liar.intercept)
        except (Exception, EndlessError) as error:
            # the forged reply that stopped the loop was counted as answered when it was taken
            count.answered -= 1
            taken = ", ".join(liar.taken)
            count.refuse(error, f"serve, after {taken}")
    count.memory = peak()
    return count


class _Liar:
    """Clients, and a key authority, that answer with recorded replies, or with forged ones when
    they are told to.
    """

    def __init__(self, run: Recorded, forger: Forger, draw: random.Random, count: Count) -> None:
        self._forger = forger
        self._draw = draw
        self._count = count
        self._replies: dict[tuple[int, str], list[Sent]] = {}
        for sent in run.sent:
            replies = self._replies.setdefault((sent.client, sent.method), [])
            replies.append(sent)
        self._lies: int | None = None  # the party whose next reply is forged
        self.taken: list[str] = []  # methods of forged replies that the loop has used

    def door(self, i: int) -> Callable[[bytes], bytes]:
        """Return a party's function from request to reply."""

        def answer(data: bytes) -> bytes:
            header = wire.peek(data)
            recorded = self._replies.get((i, header.method))
            # a party that never answered this method is out of reach
            if recorded is None:
                raise ConnectionError
            same_step = [sent for sent in recorded if sent.step == header.step]
            sent = (same_step or recorded)[0]
            turned = {**vars(header), "sender": header.recipient, "recipient": header.sender}
            reply = reheaded(sent.reply, Header(*turned.values()))
            if self._lies == i:
                return self._forger.forge(reply)
            return reply

        return answer

    def intercept(self, net: Any) -> None:
        """Have a network try forged replies before it takes honest ones."""
        calls_of = net._calls_of
        hidden_calls_of = net._hidden_calls_of
        send = net._send

        def tried_calls(method: Any, tries: int = 1) -> _TriedCalls:
            return _TriedCalls(calls_of(method, tries), self._tried)

        def tried_hidden_calls(method: Any) -> _TriedCalls:
            return _TriedCalls(hidden_calls_of(method), self._tried)

        def sent(name: str, to: Sequence[int], *arguments: Any, **message: Any) -> Any:
            ask = partial(send, name, to, *arguments, **message)
            liars = to
            if message.get("verb") == AUTHORITY_CALL:
                liars = [AUTHORITY]
            return self._tried(ask, liars, name)

        net._calls_of = tried_calls
        net._hidden_calls_of = tried_hidden_calls
        net._send = sent
        self._intercept_together(net)
        # the channel's parts hold the function that they were given before
        net.connect()

    def _intercept_together(self, net: Any) -> None:
        """Have a network try forged replies to what goes out beside other calls, too."""
        send_all = net._send_all
        posted = net._posted
        begun = net._begun

        def tried_sent(messages: Sequence[Any]) -> Any:
            liars = [client for message in messages for client in message.to]
            names = " and ".join(message.method for message in messages)
            return self._tried(partial(send_all, messages), liars, names)

        def tried_posted(method: Any, calls: Sequence[Any]) -> Any:
            if not calls:
                return []
            liars = [client for call in calls for client in call.to]
            return self._tried(partial(posted, method, calls), liars, method.name)

        def tried_begun(method: Any, call: Any, finish: Any) -> Any:
            return self._tried(partial(begun, method, call, finish), call.to, method.name)

        net._send_all = tried_sent
        net._posted = tried_posted
        net._begun = tried_begun

    def _tried(self, ask: Callable[[], Any], to: Sequence[int], name: str) -> Any:
        for _ in range(VARIANTS):
            self._lies = self._draw.choice(list(to))
            self._count.frames += 1
            try:
                with timed(self._count):
                    answer = ask()
            except (Exception, EndlessError) as error:
                self._count.refuse(error, name)
                continue
            finally:
                self._lies = None
            self._count.answered += 1
            if self._draw.random() < 0.3:
                self.taken.append(name)
                return answer
        # an honest reply, so that the loop goes on
        return ask()


@dataclass
class _TriedCalls:
    """Calls of one client method, with forged replies before honest ones.

    Args:
        calls: sends them.
        tried: asks with forged replies first.
    """

    calls: Any
    tried: Callable[[Callable[[], Any], Sequence[int], str], Any]

    def __call__(self, call: Any) -> Any:
        """Return the replies that the network takes."""
        return self.tried(partial(self.calls, call), call.to, call.method)

    def stream(self, call: Any, chunk: int | None = None) -> Iterator[Any]:
        """Yield the parts of the replies that the network takes."""

        def ask() -> list[Any]:
            return list(self.calls.stream(call, chunk))

        yield from self.tried(ask, call.to, call.method)


@contextmanager
def brief_estimator() -> Iterator[None]:
    """Have NSIM's pair network hardly train: its similarities do not matter here."""

    def brief(rows: Any, true: Any, draws: Any, grid: Any = None, networks: int = 1) -> Any:
        return fit(rows, true, draws, grid=(PairNetworkConfig(steps=3),), networks=1)

    module = vars(synthetic_users)
    before = module["fit"]
    module["fit"] = brief
    try:
        yield
    finally:
        module["fit"] = before


SIDES: dict[str, Callable[[Recorded, int, random.Random], Count]] = {
    "client": client_side,
    "server": server_side,
    "authority": authority_side,
}


def sides(case: str) -> list[str]:
    """Return the sides that a case has: there is a key authority where something is encrypted.

    Args:
        case: one of `CASES`.
    """
    _, params = CASES[case]
    encrypts = params.get("relevance") == "ckks"
    return [side for side in SIDES if side != "authority" or encrypts]


def fuzz(case: str, side: str, frames: int, seed: int) -> Count:
    """Return what became of forged frames of a case on one side.

    Args:
        case: one of `CASES`.
        side: one of `SIDES`.
        frames: how many.
        seed: of the forger's draws.
    """
    # draws of its own for each case and side, whichever others are run
    draw = random.Random(f"{case} {side} {seed}")
    with brief_estimator():
        recorded = record(case)
        return SIDES[side](recorded, frames, draw)


def main(argv: Sequence[str] | None = None) -> None:
    """Print and write a row per case and side."""
    parser = script_parser(__doc__)
    parser.add_argument("--frames", type=int, default=200_000, help="in all")
    parser.add_argument("--side", choices=[*SIDES, "all"], default="all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    chosen = [
        (case, side)
        for case in options.cases
        for side in sides(case)
        if options.side in (side, "all")
    ]
    if not chosen:
        parser.error("none of these cases has a key authority: choose another side")
    frames = math.ceil(options.frames / len(chosen))
    rows: list[dict[str, Any]] = []
    unnamed: Counter[str] = Counter()
    for case, side in chosen:
        count = fuzz(case, side, frames, options.seed)
        row = count.row(case, side)
        rows.append(row)
        print(row, flush=True)
        for about, times in count.unnamed.most_common():
            print(f"    unnamed, {times} times: {about}", flush=True)
        unnamed.update(count.unnamed)
    sent = sum(row["frames"] for row in rows)
    largest = max(row["largest_mb"] for row in rows)
    print(f"{sent} frames, {unnamed.total()} unnamed, largest {largest} MB")
    print(write("fuzz", rows))


if __name__ == "__main__":
    main()
