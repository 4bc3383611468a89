"""The loop that asks, assigns, averages and delivers: what a method's own parts must return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from cases import serve, two_clusters

from securecluster.errors import UsageError
from securecluster.protocols.authoring import (
    GATHER,
    AssignEachRound,
    AssignedModelClient,
    CallContext,
    ModelAverages,
    ModelChoice,
    ModelSetClient,
    Rows,
    TrainingClient,
    answers,
    protocol,
    torch,
)

FEDERATION = two_clusters(clients=6, samples=20)


class OddClient(AssignedModelClient):
    """Clients that choose by their numbers."""

    @answers(GATHER)
    def choose(self, context: CallContext, query: ModelAverages) -> ModelChoice:
        """Return whether the client's number is odd."""
        self.apply_averages(context, query)
        return ModelChoice(Rows(torch.as_tensor([i % 2 for i in context.ids])))


@protocol
class Odd(AssignEachRound):
    """Two clusters, of odd and even numbers."""

    k: int = 2
    """number of models"""

    name: ClassVar[str] = "odd"
    client: ClassVar[type[TrainingClient]] = OddClient
    ask: ClassVar[Any] = OddClient.choose


def made(cls: type[Odd] = Odd, **params: Any) -> Odd:
    return cls(**{"model": "linear", "epochs": 1, "rounds": 2, **params})


def test_a_method_needs_a_question_only() -> None:
    fitted = made().fit(FEDERATION)
    assert fitted.labels_.tolist() == [0, 1] * 3
    assert fitted.join(two_clusters(clients=2, samples=20, seed=1)).shape == (2,)


def test_models_are_means_over_the_clients_that_have_them() -> None:
    served = serve(made(mask="none"), FEDERATION)
    rows = made().observer.final_models(served.endpoint.client, served.state).values
    assert torch.equal(rows[0], rows[2])
    assert torch.equal(rows[1], rows[3])
    assert not torch.equal(rows[0], rows[1])


class KeepsEven(Odd):
    """Clients of even numbers are asked in round 1 alone."""

    def is_asked(self, state: Any, i: int, t: int) -> bool:
        """Return whether this is round 1, or the client's number is odd."""
        return t == 1 or bool(i % 2)


def test_who_is_not_asked_keeps_its_model_and_trains() -> None:
    served = serve(made(KeepsEven, mask="none"), FEDERATION)
    asked, received, trained = [], [], []
    for n in range(len(served.transcript.entries)):
        call, _ = served.transcript.content(n)
        if call.round != 2:
            continue
        for method, found in (
            ("choose", asked), ("receive_models", received), ("contribute", trained)
        ):  # fmt: skip
            found += call.to if call.method == method else []
    assert (asked, received, trained) == ([1, 3, 5], [0, 2, 4], [0, 1, 2, 3, 4, 5])
    assert served.state.labels == [0, 1] * 3


@pytest.mark.parametrize(
    ("models", "sentence"),
    [
        ([0, 1], "assign returns one label for each of 6 clients"),
        ([0, 1, 2, 0, 1, 0], "assign returns model 2: there are 2, numbered from 0"),
        ([0, 1, -1, 0, 1, 0], "number the clusters from 0"),
    ],
    ids=str,
)
def test_what_assign_returns_is_checked(models: list[int], sentence: str) -> None:
    class Mistaken(Odd):
        def assign(self, net: Any, state: Any, replies: Any, t: int) -> Sequence[int]:
            """Return models that are none."""
            return models

    with pytest.raises(UsageError, match=sentence):
        made(Mistaken).fit(FEDERATION)


class NoContribution(ModelSetClient):
    """Clients that train nothing."""

    choose = OddClient.choose
    receive_models = OddClient.receive_models


def test_clients_without_a_contribution_are_refused() -> None:
    class Mistaken(Odd):
        client = NoContribution

    with pytest.raises(UsageError, match="NoContribution has no method contribute"):
        made(Mistaken).fit(FEDERATION)
