"""The server's half runs on an object that never met the clients."""

from __future__ import annotations

import pytest
from cases import FULL, two_clusters
from peeking import Misspells, ReadsTruth, ReadsTruthOfNewcomers

from securecluster import Federation
from securecluster.errors import UsageError
from securecluster.parties.derived import server_copy
from securecluster.protocols import FedAvg

SMALL = {"rounds": 1, "epochs": 1, "model": "linear"}
SENTENCE = (
    r"the server's half of {} asks for self\.fed, which only an object that met .* net\.agreed"
)


def test_what_was_kept_of_the_federation_is_not_there_in_the_loop(four_clients: Federation) -> None:
    with pytest.raises(UsageError, match=SENTENCE.format("ReadsTruth")) as told:
        ReadsTruth(**SMALL).fit(four_clients)
    assert "\n" not in str(told.value)


def test_what_was_kept_of_the_federation_is_not_there_for_newcomers(
    four_clients: Federation,
) -> None:
    fitted = ReadsTruthOfNewcomers(**SMALL).fit(four_clients)
    with pytest.raises(UsageError, match=SENTENCE.format("ReadsTruthOfNewcomers")):
        fitted.join(two_clusters(clients=2, samples=20, seed=5))


def test_what_was_kept_of_the_federation_is_not_there_in_a_replay(
    four_clients: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as honest:
        honest.setattr(ReadsTruth, "run_server", FedAvg.run_server)
        fitted = ReadsTruth(**SMALL).fit(four_clients, FULL)
        config = fitted.config(four_clients, "float32")
        assert fitted.replay(fitted.transcript_, config) == fitted.server_state_
    with pytest.raises(UsageError, match=SENTENCE.format("ReadsTruth")):
        fitted.replay(fitted.transcript_, config)


def test_a_new_object_has_the_hyper_parameters_of_the_run(four_clients: Federation) -> None:
    fitted = FedAvg(**SMALL).fit(four_clients)
    server = server_copy(fitted)
    assert vars(server).keys() == vars(FedAvg()).keys()
    assert server.get_params() == fitted.get_params()
    # predict and replay take those that the run had
    assert server_copy(fitted.set_params(rounds=7).result_.method).rounds == 1


def test_a_missing_attribute_of_another_object_is_no_leak(four_clients: Federation) -> None:
    with pytest.raises(AttributeError, match="'ServerChannel' object has no attribute 'fed'"):
        Misspells(**SMALL).fit(four_clients)
