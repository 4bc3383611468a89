"""The server's half runs on an object that never met the clients, and replays in a new process."""

from __future__ import annotations

import pytest
from cases import FULL, two_clusters
from peeking import (
    Misspells,
    ReadsLeaks,
    ReadsLeaksQuietly,
    ReadsTruth,
    ReadsTruthOfNewcomers,
)
from sixth import Sixth

from securecluster import Federation
from securecluster.errors import ReplayError, UsageError
from securecluster.protocols import FedAvg
from securecluster.protocols.common.fresh_replay import replay_in_new_process

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
        fitted.predict(two_clusters(clients=2, samples=20, seed=5))


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
    server = fitted.as_server()
    assert vars(server).keys() == fitted.get_params().keys()
    # predict and replay take those that the run had
    assert fitted.set_params(rounds=7).with_fitted_params().as_server().rounds == 1


def test_a_missing_attribute_of_another_object_is_no_leak(four_clients: Federation) -> None:
    with pytest.raises(AttributeError, match="'ServerChannel' object has no attribute 'fed'"):
        Misspells(**SMALL).fit(four_clients)


@pytest.mark.parametrize(
    ("protocol", "sentence"),
    [
        (
            ReadsLeaks,
            r"server's half of ReadsLeaks fails in a new process \(KeyError: 0\): it used",
        ),
        (ReadsLeaksQuietly, "final state of ReadsLeaksQuietly's server differs in a new process: "),
    ],
)
def test_a_variable_that_clients_fill_is_empty_in_a_new_process(
    protocol: type[FedAvg], sentence: str, four_clients: Federation
) -> None:
    fitted = protocol(**SMALL).fit(four_clients, FULL)
    # a replay in this process finds the variable as it was left
    config = fitted.config(four_clients, "float32")
    assert fitted.replay(fitted.transcript_, config) == fitted.server_state_
    with pytest.raises(ReplayError, match=sentence):
        replay_in_new_process(fitted)


@pytest.mark.usefixtures("own_secrets")
def test_a_new_process_repeats_a_run_with_a_secret_of_its_own(four_clients: Federation) -> None:
    noise = {"clip": 1.0, "noise": 1.0, "placement": "central"}
    for made in (Sixth(**SMALL), FedAvg(**SMALL, **noise)):
        fitted = made.fit(four_clients, FULL)
        assert replay_in_new_process(fitted) is None


def test_a_class_that_no_new_process_can_import_is_left_out_with_a_reason(
    four_clients: Federation,
) -> None:
    class Inner(FedAvg):
        """In a function."""

    reason = replay_in_new_process(Inner(**SMALL).fit(four_clients, FULL))
    assert reason is not None
    assert "Inner cannot be sent to a new process" in reason
    Inner.__module__ = "__main__"
    reason = replay_in_new_process(Inner(**SMALL).fit(four_clients, FULL))
    assert reason == "Inner is defined in a script: move it to a module"
