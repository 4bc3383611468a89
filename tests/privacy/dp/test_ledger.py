"""What was released and what it cost: each client's own union, in series; clients in parallel."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from opacus.accountants import PRVAccountant

from securecluster.core.serialization import pack, plain, structured, unpack
from securecluster.errors import UsageError
from securecluster.messaging.receipts import Receipt
from securecluster.privacy.dp import accounting
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.privacy.dp.ledger import Event, Ledger, PaidOnce, Recall, joint_price

DELTA = 1e-5


def gaussian(
    z: float,
    ids: Sequence[int],
    method: str = "train",
    verb: str = "sum",
    field: str = "delta",
    **more: Any,
) -> Event:
    return Event(method, verb, (field,), 1, tuple(ids), "gaussian", z, **more)


def training(
    ids: Sequence[int], z: float = 1.1, batch: int | None = 10, epochs: int = 2, kept: bool = False
) -> Event:
    return Event(
        "train", "sum", (), 1, tuple(ids), "dp-sgd", z, batch=batch, epochs=epochs, kept=kept
    )


def ledger(*events: Event, **samples: int) -> Ledger:
    return Ledger(list(events), {int(name[1:]): n for name, n in samples.items()})


def assert_mu(run: Ledger, mu: float) -> None:
    """All releases of the dearest client are as one Gaussian of this μ."""
    assert run.price(DELTA).epsilon == pytest.approx(gaussian_epsilon(mu, DELTA), rel=1e-8)


def prv(*history: tuple[float, float, int]) -> float:
    """ε by opacus, without the error of its grid that it adds."""
    accountant = PRVAccountant()
    accountant.history = list(history)
    with np.errstate(divide="ignore"):  # at q = 1
        return float(accountant.get_epsilon(DELTA, eps_error=0.01)) - 0.01


def test_epsilon_is_zero_before_and_infinite_after_any_exact_release() -> None:
    run = Ledger()
    assert (run.epsilon, run.reported(), run.price(DELTA).client) == (0.0, 0.0, None)
    run.add(gaussian(4.0, (4, 7)))
    assert 0 < run.epsilon < 1
    run.add(Event("train", "sum", ("delta",), 1, (7, 9)))
    assert (run.epsilon, run.reported()) == (math.inf, None)
    assert (run.price(DELTA).client, run.price(DELTA, "replace")) == (7, run.price(DELTA))


def test_ledgers_are_apart_keep_order_and_survive_a_checkpoint() -> None:
    one, other = Ledger(), Ledger()
    again = Event("b", "sum", ("x", "y"), 2, (3, 1))
    events = [
        again,
        gaussian(0.5, (1,), replace=math.sqrt(2)),
        again,
        training((1, 2), batch=None, kept=True),
    ]
    for event in events:
        one.add(event)
    one.samples = {1: 30, 2: 40}
    assert (one.events, other.events) == (events, [])
    assert (again.clients, unpack(pack(one), Ledger)) == (2, one)


def test_one_client_composes_in_series_over_rounds_methods_verbs_and_fields() -> None:
    run = ledger(
        gaussian(4, (0, 1)),
        gaussian(4, (0, 1)),
        gaussian(3, (1, 2), field="loss"),
        gaussian(5, (1,), method="judge", verb="gather"),
        gaussian(6, (1,), verb="pairs"),
    )
    mu = math.sqrt(2 / 16 + 1 / 9 + 1 / 25 + 1 / 36)
    assert_mu(run, mu)
    assert (run.price(DELTA).client, run.price(DELTA).accountant) == (1, "exact Gaussian")
    assert run.price(1e-9).epsilon > run.price(DELTA).epsilon


def test_clients_compose_in_parallel() -> None:
    alone, spread = ledger(*[gaussian(4, (0,))] * 3), ledger(*[gaussian(4, (i,)) for i in range(3)])
    assert spread.price(DELTA) == ledger(gaussian(4, (0,))).price(DELTA)
    assert alone.price(DELTA).epsilon > spread.price(DELTA).epsilon
    uneven = ledger(gaussian(4, (0, 1, 2)), gaussian(2, (2,)), gaussian(3, (1,)))
    assert uneven.price(DELTA).client == 2
    assert_mu(uneven, math.sqrt(1 / 16 + 1 / 4))


def test_a_thousand_clients_that_dropped_out_now_and_then_are_priced_once_a_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = ledger(
        *[gaussian(4 + f, range(1000 - 10 * r), field=str(f)) for r in range(40) for f in range(2)]
    )
    calls, genuine = list[object](), accounting.merged
    monkeypatch.setattr(
        accounting, "merged", lambda steps, *rest: calls.append(steps) or genuine(steps, *rest)
    )
    found = run.price(DELTA)
    assert (found.client, len(calls)) == (0, 40)
    assert_mu(run, math.sqrt(40 / 16 + 40 / 25))


def test_what_costs_nothing_is_in_the_ledger_and_not_in_the_price() -> None:
    run = ledger(Event("post", "gather", ("delta",), 2, (0, 1), "free"), gaussian(4, (1,)))
    assert (run.price(DELTA), len(run.summary())) == (ledger(gaussian(4, (1,))).price(DELTA), 2)
    free = ledger(Event("post", "gather", ("delta",), 2, (0,), "free"))
    assert free.price(DELTA).accountant == "nothing released"


def test_training_is_priced_by_the_samples_of_its_client() -> None:
    run = ledger(
        training((0, 1)), training((0, 1)), gaussian(4, (0, 1), field="loss"), c0=100, c1=400
    )
    found = run.price(DELTA)
    assert (found.client, found.accountant) == (0, "PRV")
    assert found.epsilon == pytest.approx(prv((4, 1, 1), (1.1, 0.1, 40)), abs=1e-3)
    few = ledger(training((0,)), c0=7)  # all of them in both steps
    assert_mu(few, math.sqrt(2) / 1.1)
    assert_mu(ledger(training((0,), batch=None, epochs=3), c0=50), math.sqrt(3) / 1.1)
    assert ledger(training((0,)), c0=0).price(DELTA).epsilon == 0
    with pytest.raises(UsageError, match="number of samples"):
        ledger(training((0,))).price(DELTA)


def test_training_that_was_kept_counts_once_anything_leaves() -> None:
    kept = [training((0, 1), kept=True), training((0, 1), kept=True)]
    assert ledger(*kept, c0=100, c1=100).price(DELTA).accountant == "nothing released"
    told = ledger(*kept, Event("send_model", "gather", ("delta",), 3, (1,), "free"), c0=100, c1=100)
    assert told.price(DELTA).client == 1
    assert told.price(DELTA).epsilon == pytest.approx(prv((1.1, 0.1, 40)), abs=1e-3)
    assert [(row.mechanism, row.count) for row in told.summary()] == [("dp-sgd", 2), ("free", 1)]


def test_replacing_costs_what_each_release_says() -> None:
    run = ledger(
        gaussian(4, (0,)),
        gaussian(4, (0,), replace=math.sqrt(2)),
        training((0,), z=3.0, batch=None, epochs=1),
        c0=9,
    )
    found = run.price(DELTA, "replace")
    assert found.epsilon == pytest.approx(
        gaussian_epsilon(math.sqrt(4 / 16 + 2 / 16 + 4 / 9), DELTA), rel=1e-8
    )
    assert found.epsilon > run.price(DELTA).epsilon


@pytest.mark.always
def test_replacing_an_example_of_sampled_batches_is_priced_with_what_else_is_released() -> None:
    # a release of z = 4, replaced at twice its sensitivity, and 200 steps of z = 1.1 at q = 0.05
    run = ledger(gaussian(4, (0,)), training((0,), z=1.1, batch=5, epochs=10), c0=100)
    found = run.price(DELTA, "replace")
    # dp-accounting 0.6, as in tests/privacy/dp/test_accounting.py
    assert found.epsilon == pytest.approx(6.65976, abs=0.03)
    assert found.accountant == "PRV"


def test_the_report_has_what_is_exact_and_every_kind_of_release() -> None:
    run = ledger(
        gaussian(4, (0, 1, 2)),
        gaussian(4, (1,)),
        Event("tell", "gather", ("size", "loss"), 2, (1, 2)),
        Event("hold", "gather", ("size",), 2, (8,), kept=True),
        gaussian(4, (1,), reader="lps"),
    )
    assert run.exact() == [("tell", "loss"), ("tell", "size")]
    assert [
        (r.method, r.field, r.mechanism, r.noise_multiplier, r.count, r.reader)
        for r in run.summary()
    ] == [
        ("train", "delta", "gaussian", 4, 2, "server"),
        ("tell", "size", "exact", None, 1, "server"),
        ("tell", "loss", "exact", None, 1, "server"),
        ("train", "delta", "gaussian", 4, 1, "lps"),
    ]


def named(events: Sequence[Event], *names: str, samples: int = 100) -> Ledger:
    return Ledger(list(events), dict.fromkeys(range(len(names)), samples), dict(enumerate(names)))


def told(z: float, ids: Sequence[int], *bits: str, step: int = 1) -> Event:
    return gaussian(z, ids, step=step, digests=bits)


def test_several_runs_on_the_same_clients_cost_what_one_run_of_all_releases_would() -> None:
    one = named([told(4, (0, 1), "a", "b"), told(4, (0, 1), "c", "d", step=2)], "ann", "bob")
    two = named([told(3, (0, 1), "e", "f")], "bob", "cyd")  # other numbers, and another noise
    both = Ledger.union(one, two)
    found = both.price(DELTA)
    assert_mu(both, math.sqrt(2 / 16 + 1 / 9))
    assert found.client is not None and both.names[found.client] == "bob"
    assert_mu(both.of(["ann"]), math.sqrt(2 / 16))
    assert_mu(both.of(["cyd"]), 1 / 3)
    assert both.of([]).price(DELTA).accountant == "nothing released"
    assert_mu(Ledger.union(both, named([told(2, (0,), "g")], "ann")), math.sqrt(2 / 16 + 1 / 4))
    assert [row.count for row in both.summary()] == [2, 1]
    exact = named([Event("train", "sum", ("delta",), 1, (0,))], "cyd")
    assert math.isinf(Ledger.union(both, exact).epsilon)
    assert Ledger.union(both, exact).of(["ann"]).epsilon < math.inf


def test_training_of_each_run_is_priced_by_the_samples_that_it_had() -> None:
    """Of a run that keeps some samples aside they are fewer."""
    one, two = (named([training((0,))], "ann", samples=count) for count in (100, 80))
    found = Ledger.union(one, two).price(DELTA).epsilon
    assert found == pytest.approx(prv((1.1, 0.1, 20), (1.1, 0.125, 16)), abs=1e-3)


def test_a_run_is_counted_once_however_often_its_ledger_is_given() -> None:
    early = named([told(4, (0, 1), "a", "b")], "ann", "bob")
    late = named([*early.events, told(4, (2,), "z")], "ann", "bob", "new")
    other = named([told(4, (0, 1), "x", "y")], "ann", "bob")
    assert Ledger.union(early, late, early).price(DELTA) == late.price(DELTA)
    assert_mu(Ledger.union(early, other), math.sqrt(2 / 16))
    strangers = named(early.events, "eve", "fay")
    assert len(Ledger.union(early, strangers).events) == 2
    # without digests nothing says that these are the same bits
    silent = named([gaussian(4, (0,))], "ann")
    again = named([gaussian(4, (0,))], "ann")
    assert Ledger.union(silent, again).price(DELTA).epsilon > silent.price(DELTA).epsilon
    assert Ledger.union(silent, silent).price(DELTA) == silent.price(DELTA)


def test_what_a_client_kept_in_one_run_does_not_count_because_it_released_in_another() -> None:
    kept = named([training((0,), kept=True)], "ann")
    shown = named([told(4, (0,), "a")], "ann")
    assert Ledger.union(kept, shown).price(DELTA).epsilon == shown.price(DELTA).epsilon


def test_ledgers_that_cannot_be_added_up_are_refused_in_a_sentence() -> None:
    for wrong in ((), (ledger(gaussian(4, (0,))),)):
        with pytest.raises(UsageError) as caught:
            Ledger.union(*wrong)
        assert "\n" not in str(caught.value)


def test_a_ledger_stores_its_unit_and_one_of_an_earlier_version_has_none() -> None:
    stored = plain(Ledger([gaussian(4, (0,))], names={0: "ann"}, unit="example"))
    assert structured(stored, Ledger).unit == "example"
    del stored["unit"]
    assert structured(stored, Ledger).unit == ""
    with pytest.raises(ValueError, match="Ledger"):
        structured({**stored, "unit": "person"}, Ledger)


def of_unit(unit: Any, *events: Event) -> Ledger:
    return replace(named(events, "ann"), unit=unit)


def test_ledgers_of_both_units_do_not_add_up() -> None:
    clients, examples = of_unit("client", told(4, (0,), "a")), of_unit("example", training((0,)))
    with pytest.raises(UsageError, match="join ledgers of one dp_unit"):
        Ledger.union(clients, examples)
    with pytest.raises(UsageError, match="join ledgers of one dp_unit"):
        joint_price([clients.costliest(), examples.costliest()])
    older = of_unit("", told(4, (0,), "b"))
    assert Ledger.union(clients, older).unit == "client"
    assert Ledger.union(clients, older).of("ann").unit == "client"
    assert_mu(Ledger.union(clients, older), math.sqrt(2 / 16))
    # what has no noise has no unit: it costs infinitely much, or nothing, for either
    exact = of_unit("client", Event("train", "sum", ("delta",), 1, (0,)))
    assert math.isinf(Ledger.union(exact, examples).epsilon)
    assert Ledger.union(exact, examples).unit == "example"


def shares(**more: Any) -> Event:
    given: dict[str, Any] = {"sensitivities": (64.0, 4096.0), "variance": 64000.0**2, **more}
    return Event("m", "gather", ("delta",), 1, (0,), "skellam", 1.0, **given)


def test_a_replaced_example_costs_no_less_with_a_sum_besides() -> None:
    train = training((0,), z=1.0, batch=10, epochs=10)
    for delta in (1e-3, 1e-5, 1e-12):
        for relation in ("blank", "replace"):
            alone = ledger(train, c0=100).price(delta, relation).epsilon  # type: ignore[arg-type]
            both = ledger(train, shares(), c0=100).price(delta, relation)  # type: ignore[arg-type]
            assert both.epsilon >= alone


@pytest.mark.parametrize(
    "event",
    [
        gaussian(math.nan, (0,)),
        gaussian(-1.0, (0,)),
        gaussian(1.0, (0,), replace=math.nan),
        gaussian(1.0, (0,), replace=0.0),
        gaussian(1.0, (0,), replace=math.inf),
        training((0,), z=math.nan),
        training((0,), batch=-5),
        training((0,), batch=0),
        training((0,), batch=5e-324),
        training((0,), epochs=-1),
        training((0,), epochs=math.inf),
        shares(variance=0.0),
        shares(variance=1e-310),
        shares(variance=math.nan),
        shares(sensitivities=(1.0,)),
        shares(sensitivities=(-1.0, 1.0)),
        Event("m", "gather", ("x",), 1, (0,), "laplace", 1.0),  # type: ignore[arg-type]
    ],
)
def test_a_release_that_no_mechanism_makes_is_refused_in_a_sentence(event: Event) -> None:
    for events in ([event], [gaussian(1.0, (0,)), event]):
        for relation in ("blank", "replace"):
            with pytest.raises(UsageError) as caught:
                ledger(*events, c0=100).price(DELTA, relation)  # type: ignore[arg-type]
            assert "\n" not in str(caught.value)


def test_only_other_bits_are_another_release() -> None:
    first = told(4, (0, 1, 2), "a", "b", "c")
    recall = Recall([first])
    assert recall.new([first]) == []
    assert recall.new([told(4, (0, 1, 2), "a", "x", "c")]) == [told(4, (1,), "x")]
    assert recall.new([told(4, (0, 1), "a", "b", step=2)]) == [told(4, (0, 1), "a", "b", step=2)]
    assert recall.new([told(4, (2, 3), "c", "d")]) == [told(4, (3,), "d")]
    assert Recall().new([first]) == [first]
    with pytest.raises(ValueError, match="digests"):
        told(4, (0, 1), "a")


def test_a_run_with_one_release_that_no_digest_names_is_not_taken_for_another() -> None:
    events = [told(4, (0,), "a"), gaussian(4, (0,))]
    one, two = named(events, "ann"), named(events, "ann")
    assert len(Ledger.union(one, two).events) == 4


def test_a_repeated_training_counts_again_once_however_much_follows_from_it() -> None:
    alone = training((0,), kept=True)
    first, second = (told(4, (0,), name, step=n) for n, name in ((2, "a"), (3, "b")))
    recall = Recall([alone, first, second])
    assert recall.new([alone]) == []
    other, last = told(4, (0,), "x", step=2), told(4, (0,), "y", step=3)
    assert recall.new([other]) == [replace(alone, again=True), other]
    assert recall.new([last]) == [last]


GRAM = Receipt("gaussian", ("cluster", "row"), 4.0, math.sqrt(2), once="gram a1")
SKETCH = Receipt("gaussian", ("signature",), 4.0, once="signature b2")
USUAL = Receipt("gaussian", ("delta",), 4.0)


def due(paid: PaidOnce, client: int, *receipts: Receipt, step: int = 7) -> tuple[Receipt, ...]:
    """Return what is due of the receipts of a reply to `choose`."""
    return paid.due(client, receipts, "choose", step)


def test_a_release_that_is_repeated_to_the_bit_is_due_until_it_was_recorded() -> None:
    paid = PaidOnce()
    assert due(paid, 0, GRAM, USUAL) == (GRAM, USUAL)
    paid.learn([gaussian(4, (0, 2), field="vectors", once=("gram a1", "gram a1"))])
    # the same fields follow from what was paid for, and what is new in every call costs again
    follows = Receipt("follows", ("cluster", "row"))
    assert due(paid, 0, USUAL, GRAM) == (USUAL, follows)
    assert due(paid, 2, GRAM) == (follows,)


def test_each_client_pays_for_each_release_that_it_repeats() -> None:
    paid = PaidOnce([gaussian(4, (0, 1), once=("gram a1", "signature b2"))])
    assert due(paid, 1, GRAM) == (GRAM,)
    assert due(paid, 0, SKETCH) == (SKETCH,)
    assert due(paid, 0, GRAM, SKETCH) == (Receipt("follows", GRAM.fields), SKETCH)
    assert due(paid, 1, GRAM, SKETCH) == (GRAM, Receipt("follows", SKETCH.fields))
    paid.learn([gaussian(4, (0, 1), once=("gram a1", "gram a1"))])
    assert due(paid, 1, GRAM) == (Receipt("follows", GRAM.fields),)


def test_other_bits_under_the_same_name_are_due() -> None:
    paid = PaidOnce([gaussian(4, (0,), once=("gram a1",))])
    other = Receipt("gaussian", GRAM.fields, 4.0, once="gram c3")
    assert due(paid, 0, other) == (other,)


def test_a_call_that_is_repeated_has_the_receipts_that_it_had() -> None:
    paid = PaidOnce([gaussian(4, (0,), method="choose", step=7, once=("gram a1",))])
    assert due(paid, 0, GRAM, step=7) == (GRAM,)
    assert due(paid, 0, GRAM, step=8) == (Receipt("follows", GRAM.fields),)


def test_what_is_new_in_every_call_is_due_in_every_call() -> None:
    paid = PaidOnce([gaussian(4, (0, 1)), training((0, 1)), gaussian(4, (0,), field="")])
    trained = Receipt("dp-sgd", ("delta",), 1.1, batch=10)
    told = Receipt("public", ("size",))
    for receipts in ((), (USUAL,), (trained, told), (USUAL, USUAL)):
        assert due(paid, 0, *receipts) == receipts


def test_what_follows_from_a_paid_release_pays_for_nothing_itself() -> None:
    # a repetition leaves an event without a name, by which no other client has paid
    free = Event("choose", "gather", ("cluster",), 2, (5,), "free")
    paid = PaidOnce([gaussian(4, (0,), once=("gram a1",)), free])
    assert due(paid, 5, GRAM) == (GRAM,)


# prices of twelve ledgers of one client, each with twelve kinds of releases, to the last bit
PRICES = """
from securecluster.privacy.dp.ledger import Event, Ledger

for k in range(12):
    kinds = [0.5 + 1 / (1 + k + j) for j in range(12)]
    events = [Event("train", "sum", ("delta",), 1, (0,), "gaussian", z) for z in kinds]
    print(Ledger(events).epsilon.hex())
"""


def test_a_price_is_the_same_in_processes_that_order_sets_differently() -> None:
    told = []
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PRICES]
        told.append(subprocess.check_output(command, env=environment, text=True).split())
    assert len(told[0]) == 12
    assert told[0] == told[1]
