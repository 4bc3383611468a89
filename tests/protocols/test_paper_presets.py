"""Methods as their papers have them: `CFL.paper()` and its kin."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from securecluster import Federation
from securecluster.core.field_docs import field_descriptions
from securecluster.errors import UsageError
from securecluster.protocols import CFL, FLHC, NSIM, SRFCA, OneShot

GIVEN: dict[Any, dict[str, Any]] = {
    CFL: {},
    FLHC: {},
    NSIM: {},
    SRFCA: {"threshold": 1.0},
    OneShot: {"tasks": 3},
}


@pytest.mark.parametrize("method", GIVEN, ids=lambda method: method.name)
def test_what_the_paper_lacks_is_in_a_group_or_set_otherwise(method: Any) -> None:
    paper = method.paper(**GIVEN[method])
    added = {option.name for option in fields(paper.additions)}
    assert added
    for name, text in field_descriptions(method).items():
        if "not in the paper" in text and name not in added | {"batches"}:
            assert getattr(paper, name) != getattr(method(), name), name
    for name, value in type(paper.additions).absent.items():
        assert getattr(paper, name) == value, name


@pytest.mark.parametrize("method", GIVEN, ids=lambda method: method.name)
def test_no_protection_of_ours_is_in_a_paper(method: Any) -> None:
    paper = method.paper(**GIVEN[method])
    assert paper.noise == 0
    assert paper.clip is None
    assert paper.aggregation == "plain"
    assert paper.mask == ("permutation" if method is CFL else "none")  # Sattler et al., V-B
    assert getattr(paper, "signature", "update") == "update"
    assert getattr(paper, "clusterer", "paper") == "paper"
    assert getattr(paper, "landmarks", None) is None


def test_a_study_sets_its_own_values() -> None:
    method = CFL.paper(rounds=3, eps1=0.1)
    assert (method.rounds, method.eps1, method.eps2) == (3, 0.1, 1.6)


@pytest.mark.parametrize(("method", "name"), [(SRFCA, "threshold"), (OneShot, "tasks")])
def test_an_input_of_the_paper_has_to_be_given(method: Any, name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is an input of the paper"):
        method.paper()


@pytest.mark.filterwarnings("ignore::securecluster.errors.SecureClusterWarning")
@pytest.mark.parametrize("method", [CFL, FLHC, SRFCA, OneShot])
def test_the_method_of_a_paper_runs(method: Any, small: Federation) -> None:
    few = {"rounds": 2, "epochs": 1}
    if method is SRFCA:
        few["local_rounds"] = 1
    if method is FLHC:
        few["pre_rounds"] = 1
    fitted = method.paper(**{**GIVEN[method], **few}).fit(small)
    assert len(fitted.labels_) == len(small)
