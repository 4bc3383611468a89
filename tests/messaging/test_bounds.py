"""What frames may hold by the configuration: each wrong number is refused before anything is made
of it.
"""

from __future__ import annotations

import math
import resource
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pytest
import torch

from securecluster import Federation, protocols
from securecluster.errors import FrameError, PolicyError, UpdateError
from securecluster.messaging import bounds, wire
from securecluster.messaging.bounds import LONGEST, too_long, undeclared
from securecluster.messaging.messages import FIRST_SEPARATE_STEP, Empty, Header, Picks, Rows, Shared
from securecluster.messaging.replies import check_squares
from securecluster.parties.endpoints import build_client
from securecluster.protections.registry import service_methods
from securecluster.protocols.common.averages.model_sets import ModelAverages
from securecluster.protocols.common.messages import AverageDeltas, Update
from securecluster.protocols.srfca.client import RelayedModels
from securecluster.runtime.endpoint import Endpoint, message_types

NAN = float("nan")


@dataclass(frozen=True, eq=False)
class Everything:
    rows: Annotated[Picks, bounds.Real((bounds.Upto("own", 3), "width"))]
    owner: Annotated[Picks, bounds.Whole((bounds.Upto("own", 3),), below="clients")]
    one: Annotated[Rows | None, bounds.Real(low=0, maximum=1)]
    code: Annotated[Shared, bounds.Octets((2,), maximum=1)]
    count: Annotated[int, bounds.Between(1, maximum="clients")]
    fixed: Annotated[int | None, bounds.Exactly("width")]
    word: str


def message(**changes: Any) -> Everything:
    fields: dict[str, Any] = {
        "rows": Picks(torch.zeros(2, 4), TWO),
        "owner": Picks(torch.tensor([0, 5]), TWO),
        "one": Rows(torch.ones(1)),
        "code": Shared(torch.ones(2, dtype=torch.uint8)),
        "count": 6,
        "fixed": 4,
        "word": "x",
    }
    return Everything(**{**fields, **changes})


EMPTY = Picks(torch.zeros(0, 0), ((),))
NONE = Picks(torch.zeros(0, dtype=torch.int64), ((),))
TWO = ((0, 1),)
LIMITS = bounds.Limits({"width": 4, "clients": 6})


def test_what_is_declared_passes() -> None:
    bounds.check(message(), LIMITS)
    bounds.check(message(one=None, fixed=None), LIMITS)
    bounds.check(message(rows=EMPTY, owner=NONE), LIMITS)
    assert bounds.axes_of(message()) == {"own": (2,)}
    assert not bounds.undeclared(Everything)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", Picks(torch.zeros(2, 5), TWO)),
        ("rows", Picks(torch.zeros(2, 4, 1), TWO)),
        ("rows", Picks(torch.zeros(1, 4), ((0,),))),
        ("rows", Picks(torch.zeros(4, 4), ((0, 1, 2, 3),))),
        ("rows", Picks(torch.zeros(2, 4, dtype=torch.int64), TWO)),
        ("rows", Picks(torch.full((2, 4), NAN), TWO)),
        (
            "rows",
            Picks(
                torch.full((2, 4), 3e38).index_fill(0, torch.tensor([1]), float("inf")), ((0, 1),)
            ),
        ),
        ("owner", Picks(torch.tensor([0, 6]), TWO)),
        ("owner", Picks(torch.tensor([0, -1]), TWO)),
        ("owner", Picks(torch.tensor([0, 1], dtype=torch.int32), TWO)),
        ("one", Rows(torch.tensor([1.5]))),
        ("one", Rows(torch.tensor([-0.5]))),
        ("one", Rows(torch.ones(1, 1))),
        ("code", Shared(torch.full((2,), 2, dtype=torch.uint8))),
        ("code", Shared(torch.ones(3, dtype=torch.uint8))),
        ("count", 0),
        ("count", 7),
        ("fixed", 5),
    ],
)
def test_everything_else_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    with pytest.raises(FrameError, match=rf"Everything\.({field}|owner)") as caught:
        bounds.check(message(**{field: value}), LIMITS)
    assert "\n" not in str(caught.value)


def test_large_finite_numbers_are_no_infinity() -> None:
    bounds.check(message(rows=Picks(torch.full((2, 4), 3e38), TWO)), LIMITS)


PROTOCOLS = [
    getattr(protocols, name)
    for name in (
        *("CFL", "CLoVE", "FLHC", "Hidden", "IFCA", "NSIM", "PACFL", "RDPCFL", "SRFCA", "FedAvg"),
        *("CFLGP", "FLUX", "FineTune", "LocalKMeans", "OneShot", "Signature"),
    )
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_field_of_every_message_declares_what_it_may_hold(
    protocol: type[protocols.ClusteringProtocol],
) -> None:
    client = protocol.client
    names = [name for name in dir(client) if hasattr(getattr(client, name), "__release__")]
    for name in names:
        for kind in message_types(client, name):
            assert bounds.undeclared(kind) == [], f"{protocol.__name__}.{name}: {kind.__name__}"


@pytest.mark.parametrize("name", service_methods())
def test_every_field_of_every_message_of_services_declares_what_it_may_hold(name: str) -> None:
    for kind in service_methods()[name]:
        assert undeclared(kind) == [], f"{name}: {kind.__name__}"


def node(made: Any, federation: Federation) -> Endpoint[Any]:
    found: Endpoint[Any] = build_client(made, federation, protocols.Settings(), [0])
    return found


def ask(own: Endpoint[Any], method: str, query: Any, verb: str = "gather", **header: Any) -> bytes:
    fields = {"round": 1, "step": 1, "sender": "server", "recipient": "client/0", "members": 2}
    return own.answer_frame(
        wire.encode(Header(own._config, method, verb, **{**fields, **header}), query)
    )


@pytest.mark.parametrize("clients", [300_000_000, 10**12, 0, 7])
def test_a_small_frame_sizes_no_large_table(clients: int, small: Federation) -> None:
    own = node(protocols.SRFCA(rounds=1, local_rounds=1, refine=1, mask="none"), small)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    query = RelayedModels(EMPTY, NONE, Shared(torch.tensor([0])), clients, 1)
    with pytest.raises(FrameError, match=r"RelayedModels\.clients is"):
        ask(own, "losses", query, "pairs")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize(("k", "field"), [(10**9, "k"), (3, "k"), (0, "k"), (-1, "k")])
def test_a_small_frame_starts_no_long_loop(k: int, field: str, small: Federation) -> None:
    own = node(protocols.IFCA(rounds=1, k=2, mask="none"), small)
    began = time.monotonic()
    count = Rows(torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(FrameError, match=r"ModelAverages\.k is"):
        ask(own, "choose", ModelAverages(EMPTY, NONE, NONE, k, 0, 0, False, count))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "wrong",
    [
        *({"round": number} for number in (5, 1 << 62)),
        {"step": 2 * FIRST_SEPARATE_STEP},
        {"members": 7},
        *({"sender": name} for name in ("server/1", "lps/x", "lps/-1", "client/1")),
        *({"recipient": name} for name in ("client/1", "server")),
    ],
)
def test_headers_that_the_run_cannot_have_are_refused(
    wrong: dict[str, Any], small: Federation
) -> None:
    own = node(protocols.FedAvg(rounds=3, model="linear"), small)
    count = Rows(torch.zeros(1, dtype=torch.int64))
    query = AverageDeltas(EMPTY, NONE, False, count)
    assert ask(own, "contribute", query, "sum", round=4)
    with pytest.raises(FrameError):
        ask(own, "contribute", query, "sum", **wrong)


def test_counts_of_two_numbers_and_steps_without_rows_are_refused(small: Federation) -> None:
    own = node(protocols.FedAvg(rounds=3, model="linear"), small)
    d = own.client.cohort.model.dimension
    none, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    row, two = Picks(torch.zeros(1, d), ((0,),)), Picks(torch.tensor([1, 2]), TWO)
    for query, sentence in (
        (AverageDeltas(EMPTY, NONE, False, Rows(none.repeat(1, 2))), "count"),
        (AverageDeltas(row, two, False, Rows(one)), "steps has another number of posts"),
        (
            AverageDeltas(EMPTY, NONE, False, Rows(none), 1),
            "restart = 1 is not possible: it is 0, and",
        ),
    ):
        with pytest.raises(FrameError, match=rf"AverageDeltas\.{sentence}"):
            ask(own, "contribute", query, "sum")


def test_an_unknown_verb_of_a_key_call_is_refused(small: Federation) -> None:
    own = node(protocols.FedAvg(rounds=3, model="linear", mask="permutation"), small)
    hello = Empty()
    assert ask(own, "key_offer", hello)
    with pytest.raises(PolicyError, match="through gather"):
        ask(own, "key_offer", hello, "sum")


def test_newcomers_beyond_one_frame_agree_on_the_mask_in_several(small: Federation) -> None:
    """A frame names as many peers as the run has clients; more newcomers than that still join."""
    fitted = protocols.FedAvg(rounds=1, model="linear", mask="permutation").fit(small)
    samples = (np.zeros((5, *small.shape), np.float32), np.arange(5))
    clients = {f"n{k}": samples for k in range(2 * len(small) + 1)}
    many = Federation.from_arrays(clients, classes=10, seed=0)
    kmeans = protocols.LocalKMeans(k=2, rounds=1, local_rounds=1, model="linear").fit(small)
    assert len(kmeans.join(many)) == len(many)
    assert list(fitted.join(many)) == [0] * len(many)


@pytest.mark.parametrize(("kind", "most"), [(torch.float32, 1e17), (torch.float64, 1e150)])
def test_rows_whose_squares_overflow_are_refused_by_their_clients_numbers(
    kind: torch.dtype, most: float
) -> None:
    rows = torch.zeros(3, 4, dtype=kind)
    rows[1] = most / 2
    check_squares(2, (4, 5, 6), Update(Rows(rows), None))
    rows[1] = most
    with pytest.raises(
        UpdateError, match=r"round 2: delta of client\(s\) 5 is too large to be squared"
    ):
        check_squares(2, (4, 5, 6), Update(Rows(rows), None))


@pytest.mark.parametrize("kind", [torch.float16, torch.float32, torch.float64])
def test_rows_are_too_long_by_their_norm_in_double_precision(kind: torch.dtype) -> None:
    longest = LONGEST[1] if kind == torch.float64 else LONGEST[0]
    directions = np.random.default_rng(0).random((9, 300))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    sizes = np.array([0.0, 1e-300, 1.0, 0.4, 0.51, 0.99, 1.01, 3.0, 100.0])
    most = torch.finfo(kind).max
    table = torch.from_numpy(directions * (sizes * longest)[:, None]).clamp(max=most).to(kind)
    norms = [math.hypot(*row) for row in table.double().tolist()]
    assert too_long(table) == [row for row, norm in enumerate(norms) if norm > longest]
    assert kind == torch.float16 or too_long(table) == [6, 7, 8]


@pytest.mark.parametrize(
    ("axes", "through", "shape"),
    [
        (("width", 3), False, ("width", 3)),
        # what the pipeline makes of a row of this shape, which is no sealed one
        (("width", 3), True, ("delta", [4, 3], False)),
        ((bounds.Upto("own", 3), 3), True, None),
        (("unknown",), True, None),
    ],
)
@pytest.mark.parametrize("bits", [32, 64])
def test_a_masked_row_has_the_form_that_its_pipeline_gives_it(
    axes: tuple[Any, ...], through: bool, shape: Any, bits: int
) -> None:
    limits: Any = SimpleNamespace(
        size=LIMITS.size,
        layout=lambda name, shape, sealed: SimpleNamespace(shape=(name, shape, sealed)),
    )
    form = bounds._ring_form("delta", bounds.Ring(axes, bits, through), limits)
    assert form == (None if shape is None else (bounds.RING[bits], shape))
