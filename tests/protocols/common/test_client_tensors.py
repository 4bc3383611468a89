"""Tensors that a client's class declares: rows by position, checkpoints, and authors' mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import DOUBLE, two_clusters

from securecluster.core.serialization import pack, unpack
from securecluster.errors import UsageError
from securecluster.parties.client_state import ClientState
from securecluster.parties.endpoints import build_client
from securecluster.protocols import IFCA, FedAvg
from securecluster.protocols.authoring import ClientTensor, SumClient

FEDERATION = two_clusters(clients=4, samples=20)


class KeepingClient(SumClient):
    """Clients that keep four things."""

    start = ClientTensor("dimension", start="model")
    pairs = ClientTensor(3, 2)
    _calls = ClientTensor(dtype="int64", start=7)
    digest = ClientTensor(32, dtype="uint8")


class Keeping(FedAvg):
    """FedAvg of these clients."""

    client = KeepingClient


def endpoint(client: type[SumClient] = KeepingClient) -> Any:
    made = type("Made", (Keeping,), {"client": client})(model="linear", rounds=1)
    return build_client(made, FEDERATION, DOUBLE)


def test_rows_begin_as_declared() -> None:
    client = endpoint().client
    assert torch.equal(client.start.values, client.cohort.start.repeat(4, 1))
    assert torch.equal(client.pairs.values, torch.zeros(4, 3, 2, dtype=torch.float64))
    assert client._calls.values.tolist() == [7] * 4
    assert client._calls.values.dtype == torch.int64
    assert torch.equal(client.digest.values, torch.zeros(4, 32, dtype=torch.uint8))


def test_a_tuple_of_positions_names_clients_and_not_axes() -> None:
    client = endpoint().client
    client.pairs[1, 3] = torch.ones(2, 3, 2)
    assert client.pairs.values.sum(dim=(1, 2)).tolist() == [0, 6, 0, 6]
    assert client.pairs[(1, 3)].shape == (2, 3, 2)
    assert client.pairs[2].shape == (3, 2)
    client._calls[0] = 9
    assert client._calls[(0, 1)].tolist() == [9, 7]
    client._calls[0, 2] = [1, 2]
    assert client._calls.values.tolist() == [1, 7, 2, 7]


def test_an_index_of_columns_is_refused_in_one_sentence() -> None:
    client = endpoint().client
    with pytest.raises(UsageError, match=r"by clients alone, as rows\[positions\]"):
        client.pairs[[0, 1], :1] = 1


def test_rows_of_several_clients_are_a_copy() -> None:
    client = endpoint().client
    client.pairs[(0, 1)].add_(1)
    assert not client.pairs.values.any()


def test_objects_of_one_class_share_no_rows() -> None:
    one, other = endpoint().client, endpoint().client
    one.pairs[0] = 1.0
    assert not other.pairs.values.any()


def test_checkpoints_have_the_rows_under_their_names() -> None:
    one, other = endpoint(), endpoint()
    one.client.pairs[2] = 5.0
    one.client._calls[1] = 1
    state = unpack(pack(one.client.state(one.keys.secrets)), ClientState)
    assert {"start", "pairs", "calls", "had"} <= set(state.extra)
    other.client.restore(state)
    assert torch.equal(other.client.pairs.values, one.client.pairs.values)
    assert other.client._calls.values.tolist() == [7, 1, 7, 7]
    # a copy of the checkpoint, which later calls do not change
    other.client.pairs.values.fill_(3.0)
    assert state.extra["pairs"].max() == 5


@pytest.mark.parametrize(
    ("made", "name", "kept", "rows"),
    [
        (FedAvg(), "_unshared", [1, 3], [False, True, False, True]),
        (IFCA(k=2), "_last_call", [[2, 9, 1]], [[0, 0], [0, 0], [9, 1], [0, 0]]),
        (IFCA(k=2), "_trained_in", [[3, 0], [1, 5]], [-1, 5, -1, 0]),
    ],
)
def test_checkpoints_of_versions_that_kept_rows_of_some_clients_are_restored(
    made: Any, name: str, kept: list[Any], rows: list[Any]
) -> None:
    client = build_client(made.set_params(model="linear"), FEDERATION, DOUBLE).client
    memory = dict(client.memory())
    memory[name.lstrip("_")] = torch.tensor(kept)
    client.recall(memory)
    assert getattr(client, name).values.tolist() == rows


def test_what_a_version_did_not_keep_begins_as_declared() -> None:
    client = endpoint().client
    client._calls[1] = 1
    memory = dict(client.memory())
    del memory["calls"]
    client.recall(memory)
    assert client._calls.values.tolist() == [7] * 4


def test_all_rows_are_replaced_by_rows_of_their_shape_only() -> None:
    client = endpoint().client
    rows = torch.ones(4, 3, 2)
    client.pairs = rows
    rows.zero_()
    assert client.pairs.values.min() == 1
    with pytest.raises(UsageError, match=r"has a row for each client.*\[context.positions\]"):
        client.pairs = torch.ones(2, 3, 2)


def test_a_tensor_hides_nothing_of_a_base() -> None:
    with pytest.raises(UsageError, match="something that SumClient has: give the tensor another"):
        type("Hiding", (SumClient,), {"train_locally": ClientTensor()})


def test_what_a_base_sets_is_no_tensor() -> None:
    with pytest.raises(UsageError, match="was set to a bool: give it rows, or another name"):
        endpoint(type("Twice", (SumClient,), {"_weighted": ClientTensor()}))


def test_other_state_of_that_name_is_refused() -> None:
    # a base declares its counts of averages under this name
    made = endpoint(type("Twice", (SumClient,), {"__had": ClientTensor()}))
    with pytest.raises(UsageError, match="something else under the name 'had'"):
        made.client.state(made.keys.secrets)


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        (ClientTensor("width"), "a size 'width': give whole numbers, or 'dimension'"),
        (ClientTensor(start="zeros"), "begins with 'zeros', which is neither a number nor 'model'"),
    ],
)
def test_a_declaration_that_says_nothing_is_refused(tensor: ClientTensor, sentence: str) -> None:
    client = endpoint(type("Mistaken", (SumClient,), {"kept": tensor})).client
    with pytest.raises(UsageError, match=sentence):
        _ = client.kept


def test_a_dtype_that_rows_do_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match="int32"):
        ClientTensor(dtype="int32")
