"""What a report says that its ε leaves out."""

from __future__ import annotations

from typing import Any

import pytest

from securecluster import Federation
from securecluster.protocols import FedAvg, Local
from securecluster.statements.privacy_section import EXACT, section

SMALL: dict[str, Any] = {"rounds": 1, "epochs": 1, "model": "linear"}


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (FedAvg(**SMALL), True),
        (FedAvg(**SMALL, clip=1.0, noise=1.0), False),
        # nothing was released at all
        (Local(**SMALL), True),
    ],
    ids=["exact", "noise", "nothing"],
)
def test_exact_values_are_called_outside_of_epsilon_where_there_are_some(
    made: Any, said: bool, small: Federation
) -> None:
    told = section(made.fit(small).result_)
    assert (EXACT in told["not_covered"]) is said
