"""No request of any run is longer than what an agent takes, and an agent takes not much more."""

from __future__ import annotations

from typing import Any

import cases
import pytest
from combinations import COVERING, NAMED, params_of

from securecluster import Federation, Settings
from securecluster.cli.compatibility import Values
from securecluster.messaging.messages import AUTHORITY_CALL, RELAY
from securecluster.parties.frame_bounds import (
    HEADER,
    HEADER_PER_CLIENT,
    largest_authority_request,
    largest_request,
)
from securecluster.protocols import FedAvg

CLIENTS = 6
SMALLER_HEADER = 8_000  # bytes: what these runs' frames have beside their tensors


@pytest.fixture(scope="module")
def federation() -> Federation:
    return cases.two_clusters(CLIENTS, 20)


def longest(fitted: Any) -> tuple[int, int]:
    """Return the bytes of the longest request to a client, and to a key authority."""
    of_clients, of_authority = [0], [0]
    for entry in fitted.transcript_.entries:
        if entry.verb == AUTHORITY_CALL:
            of_authority += entry.down
        elif entry.verb != RELAY:
            of_clients += entry.down
    return max(of_clients), max(of_authority)


@pytest.mark.few(8)
@pytest.mark.parametrize(("method", "values"), COVERING)
def test_every_request_of_a_run_is_within_its_bound(
    method: str, values: Values, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases.stub_pair_network(monkeypatch)
    params = {"rounds": 2, "epochs": 1, "model": "linear", **params_of(values)}
    made = cases.variant(NAMED.get(method, method), **params)
    fitted = made.fit(federation, Settings(transcript="sizes"))
    to_client, to_authority = longest(fitted)
    config = fitted.kept_.learned.config
    bound = largest_request(made, config)
    assert to_client <= bound - HEADER - HEADER_PER_CLIENT * CLIENTS + SMALLER_HEADER
    assert to_authority <= largest_authority_request(made, config) - HEADER
    # models of 650 numbers: what somebody would send to fill an agent's memory
    assert bound < 20 << 20


def test_a_larger_model_makes_longer_requests(federation: Federation) -> None:
    bounds = []
    for model in ("linear", "mlp-200"):
        made = FedAvg(rounds=1, model=model)
        bounds.append(largest_request(made, made.config(federation, "float32")))
    numbers = 64 * 200 + 200 + 200 * 10 + 10
    assert bounds[1] - bounds[0] > 4 * (numbers - 650)
