"""What a client refuses, whatever the server asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import torch

from securecluster.core.randomness import Randomness
from securecluster.errors import FrameError, PolicyError, UsageError
from securecluster.messaging.bounds import Real, Upto
from securecluster.messaging.messages import Call, Empty, Rows, Shared
from securecluster.privacy.masking.key_agreement import KeyRing
from securecluster.privacy.pipeline import Pipeline
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import GATHER, PAIRS, Endpoint, answers

CONFIG = "c" * 32


@dataclass(frozen=True, eq=False)
class Two:
    """Two rows per client."""

    masked: Annotated[Rows, Real((Upto("width", 1000),))]
    other: Annotated[Rows, Real((Upto("width", 1000),))]


@dataclass(frozen=True, eq=False)
class Same:
    """Numbers that all frames of a batch share."""

    value: Annotated[Shared, Real((Upto("width", 1000),))]


class Careless:
    """Declares one of the two fields that it sends."""

    @answers(GATHER, through=("masked",))
    def tell(self, context: CallContext, query: Empty) -> Two:
        rows = torch.zeros(len(context.ids), 3)
        return Two(Rows(rows), Rows(rows + 1))

    @answers(GATHER)
    def share(self, context: CallContext, query: Empty) -> Same:
        return Same(Shared(torch.zeros(3)))

    @answers(GATHER, private=False)
    def ready(self, context: CallContext, query: Empty) -> Empty:
        return Empty()


def endpoint() -> Endpoint[Careless]:
    keys = KeyRing(CONFIG, Randomness(0), lambda seed: None)
    return Endpoint(Careless(), [0], CONFIG, Pipeline(), keys)


def call(method: str, config: str = CONFIG) -> Call:
    return Call(config, method, GATHER, 1, 1, (0,), Empty(), (1,))


def test_a_field_beside_a_masked_one_needs_a_declaration_of_its_own() -> None:
    with pytest.raises(PolicyError, match=r"would send other without a mask"):
        endpoint().answer(call("tell"))


def test_numbers_that_frames_share_need_a_declaration_as_well() -> None:
    with pytest.raises(PolicyError, match=r"would send value without a mask"):
        endpoint().answer(call("share"))


def test_rows_of_pairs_have_no_public_fields() -> None:
    with pytest.raises(UsageError, match="names public fields of rows of pairs"):
        answers(PAIRS, private=False, public=("masked",), columns="ids")(Careless.tell)


@pytest.mark.parametrize("digit", range(len(CONFIG)))
def test_configurations_that_differ_in_one_digit_are_other_ones(digit: int) -> None:
    assert endpoint().answer(call("ready")).ids == (0,)
    other = CONFIG[:digit] + "d" + CONFIG[digit + 1 :]
    with pytest.raises(FrameError, match="another configuration"):
        endpoint().answer(call("ready", other))
