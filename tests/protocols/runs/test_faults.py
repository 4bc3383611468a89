"""Faults under every protection: lost replies, kills in the middle of a call, and replay.

Which protections work together is what the protocols themselves declare (`combinations`). A run
under faults ends with models, or with one sentence that says what to do; a run that was killed ends
as if it never had been.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import exhaustive, two_clusters, variant
from combinations import (
    COVERING,
    NAMED,
    Cell,
    covering,
    params_of,
    values_of,
    variants_with_one_protection,
)

from securecluster import Federation
from securecluster.errors import SecureClusterError
from securecluster.messaging.messages import Call, Response
from securecluster.messaging.transcript import Transcript
from securecluster.privacy.dp.ledger import CHOICE
from securecluster.protocols import Settings
from securecluster.protocols.conformance import check_frames

SMALL: dict[str, Any] = {"rounds": 3, "epochs": 1, "model": "linear"}
LOSSY = Settings(transcript="full", dropout=0.2)
# variants with protections that are no options of all protocols
OWN_PROTECTIONS = (
    "cfl compress", "cfl sketch average", "flhc 4bit", "flhc sketch", "flhc signature",
    "srfca sealed", "srfca trim", "oneshot noise", "pacfl noise", "signature noise",
    "signature blocks", "oneshot sealed", "oneshot hierarchical", "fedavg momentum",
    "hidden momentum",
)  # fmt: skip
NAMED_CELLS = [(NAMED.get(method, method), values) for method, values in COVERING]
CELLS = NAMED_CELLS + [
    cell for cell in variants_with_one_protection(OWN_PROTECTIONS) if cell not in NAMED_CELLS
]
# every value of every option
USUAL = covering(CELLS, values_of)


@contextmanager
def killed_in(call: int) -> Iterator[None]:
    """Stop a run in one of its calls, as a signal would: replies are there and nobody read them.

    Args:
        call: number of the call, from 0.
    """
    record = Transcript.record
    made = 0

    def counted(self: Transcript, request: Call, response: Response) -> None:
        nonlocal made
        record(self, request, response)
        if made == call:
            raise KeyboardInterrupt
        made += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transcript, "record", counted)
        yield


@dataclass
class Whole:
    """A cell's run with lost replies that nothing stops.

    Args:
        cell: variant and values.
        federation: its clients.
        fitted: the protocol after the run; None if it ended in an error.
        error: the sentence of the error.
    """

    cell: Cell
    federation: Federation
    fitted: Any
    error: str = ""

    def build(self) -> Any:
        """Return the protocol anew."""
        name, values = self.cell
        return variant(name, **{**SMALL, **params_of(values)})

    @property
    def releases_choices(self) -> bool:
        """Return whether clients released choices, whose repetitions no ledger recognises."""
        return any(CHOICE in event.digests for event in self.fitted.ledger_.events)


def run(cell: Cell, federation: Federation, settings: Settings) -> Whole:
    """Run a cell.

    Args:
        cell: variant and values.
        federation: the clients.
        settings: of the run.
    """
    whole = Whole(cell, federation, None)
    try:
        fitted = whole.build().fit(federation, settings)
    except SecureClusterError as error:
        return replace(whole, error=str(error))
    return replace(whole, fitted=fitted)


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(6, 20)


def _name(cell: Cell) -> str:
    """Return the name of a cell: its variant and the values that are not the usual ones."""
    name, values = cell
    return " ".join([name, *values])


@pytest.fixture(
    scope="module",
    params=[cell if cell in USUAL else exhaustive(cell) for cell in CELLS],
    ids=_name,
)
def whole(request: pytest.FixtureRequest, federation: Federation) -> Whole:
    return run(request.param, federation, LOSSY)


@pytest.mark.always
@pytest.mark.few(1)
def test_a_run_that_loses_replies_ends_with_models_or_a_sentence(whole: Whole) -> None:
    other = two_clusters(6, 20, seed=1)  # loses other replies
    for found in (whole, run(whole.cell, other, LOSSY)):
        if found.fitted is None:
            assert "\n" not in found.error
            assert ": " in found.error
            continue
        # who waits for its whole cohort is asked again, so a lost reply need not stay lost
        assert any(entry.lost for entry in found.fitted.transcript_.entries)
        assert len(found.fitted.labels_) == len(found.federation)
        assert found.fitted.client_models_.values.isfinite().all()
        check_frames(found.fitted)


def test_a_run_that_is_killed_in_its_calls_ends_as_if_it_never_had_been(
    whole: Whole, tmp_path: Path
) -> None:
    if whole.fitted is None:
        with pytest.raises(SecureClusterError) as raised:
            whole.build().fit(whole.federation, LOSSY, folder=tmp_path)
        assert str(raised.value) == whole.error
        return
    calls = len(whole.fitted.transcript_.entries)
    # after a kill a run repeats the calls since its last checkpoint, so the second kill is later
    for call in (calls // 3, calls // 3):
        with killed_in(call), pytest.raises(KeyboardInterrupt):
            whole.build().fit(whole.federation, LOSSY, folder=tmp_path)
    resumed = whole.build().fit(whole.federation, LOSSY, folder=tmp_path)
    assert list(resumed.labels_) == list(whole.fitted.labels_)
    price = whole.fitted.ledger_.epsilon
    if whole.releases_choices:
        # Equal choices may come of different noise, so those that are repeated count again.
        assert resumed.ledger_.epsilon >= price
    else:
        assert resumed.ledger_.epsilon == price
    assert torch.equal(resumed.client_models_.values, whole.fitted.client_models_.values)
    assert resumed.history_ == whole.fitted.history_
    assert resumed.server_state_ == whole.fitted.server_state_
    assert resumed.bytes_ == whole.fitted.bytes_


def test_a_server_alone_ends_in_the_same_state(whole: Whole) -> None:
    if whole.fitted is None:
        return
    made = whole.build()
    config = made.config(whole.federation, "float32")
    assert made.replay(whole.fitted.transcript_, config) == whole.fitted.server_state_
