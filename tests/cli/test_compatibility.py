"""What works with what: every combination runs, or is refused with a choice that works."""

from __future__ import annotations

import re
from itertools import combinations

import cases
import pytest
from combinations import COVERING, NAMED, RUNNING, params_of

from securecluster import Federation
from securecluster.cli import compatibility
from securecluster.cli.compatibility import OPTIONS, Values, build, cells, methods, refusal
from securecluster.cli.main import main

# values of options as the reasons name them
CHOICES = re.compile(r"(aggregation|relevance|placement) (plain|secagg|local)")
OTHERS = {
    "--sketch 256": {"sketch": 256},
    "distance loss": {"distance": "loss"},
    "noise 0": {"noise": 0.0},
    "dp_unit client": {"dp_unit": "client"},
}


def suggestions(reason: str) -> list[dict[str, object]]:
    """Hyper-parameters of each choice that a reason names."""
    found: list[dict[str, object]] = [{name: value} for name, value in CHOICES.findall(reason)]
    found += [params for text, params in OTHERS.items() if text in reason]
    return found


def leads_to_a_run(protocol: object, depth: int = len(OPTIONS)) -> bool:
    """Whether following what refusals name ends with a protocol that passes its check."""
    made = protocol
    try:
        made.check(compatibility.CLIENTS)  # type: ignore[attr-defined]
    except compatibility.UsageError as error:
        if depth == 0:
            return False
        params = made.get_params()  # type: ignore[attr-defined]
        changed = [type(made)(**{**params, **change}) for change in suggestions(str(error))]
        return any(leads_to_a_run(other, depth - 1) for other in changed)
    return True


@pytest.mark.parametrize("method", methods())
def test_what_is_refused_names_a_choice_that_works(method: str) -> None:
    for values in cells():
        reason = refusal(method, values)
        if reason is None:
            continue
        assert "\n" not in reason
        assert suggestions(reason), reason
        assert leads_to_a_run(build(method, values)), (values, reason)


REST = [cases.exhaustive(*cell) for cell in RUNNING if cell not in COVERING]


@pytest.fixture(scope="module")
def federation() -> Federation:
    return cases.two_clusters(6, 20)


@pytest.mark.few(3)
@pytest.mark.parametrize(("method", "values"), [*COVERING, *REST])
def test_what_is_not_refused_runs(
    method: str, values: Values, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases.stub_pair_network(monkeypatch)
    params = {"rounds": 2, "epochs": 1, "model": "linear", **params_of(values)}
    fitted = cases.variant(NAMED.get(method, method), **params).fit(federation)
    assert len(fitted.labels_) == len(federation)
    assert fitted.client_models_.values.isfinite().all()


def test_the_table_is_printed_from_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--privacy"]) == 0
    text = capsys.readouterr().out
    count = len(RUNNING)
    total = len(methods()) * len(list(cells()))
    assert f"{count:,} of {total:,} combinations" in re.sub(r"\s+", " ", text)
    assert main(["list", "--more"]) == 2
    assert "--privacy" in capsys.readouterr().err


def test_what_a_value_needs_is_named() -> None:
    assert compatibility.works_with("cfl", "aggregation", "secagg") == "no"
    assert compatibility.works_with("cfl --sketch 256", "aggregation", "secagg") == "yes"
    assert compatibility.works_with("fedavg", "noise", "distributed") == "with aggregation secagg"


def test_only_the_smallest_combinations_are_listed_for_a_reason() -> None:
    for method in methods():
        listed = compatibility.refusals(method)
        for one, other in combinations(listed, 2):
            larger = one.values.items() < other.values.items()
            assert not (larger and one.reason == other.reason)
