"""What crosses the wire where a client or the key authority refuses: a code, and no text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from securecluster import Federation, Iid, errors
from securecluster.errors import (
    BudgetError,
    FrameError,
    LateError,
    OwnerPolicyError,
    PolicyError,
    ProposalError,
    RefusedError,
    RevokedRunError,
    SecureClusterError,
    SecureClusterWarning,
    StaleError,
    TargetError,
    UnforeseenError,
    UnknownRunError,
    UpdateError,
    UsageError,
)
from securecluster.messaging import wire
from securecluster.messaging.messages import Ack, Call, Header, reply_header
from securecluster.messaging.refusals import SENTENCES, code_of
from securecluster.messaging.transcript import Transcript
from securecluster.parties.deployment import Deployment
from securecluster.parties.derived import call_types
from securecluster.parties.endpoints import KeySource, build_client
from securecluster.protocols import FedAvg, OneShot, Settings
from securecluster.runtime.transport import Framed, Recorded

SECRET = "37.25"  # a number of the client's data
CODES = {
    PolicyError: "rule",
    OwnerPolicyError: "policy",
    RevokedRunError: "revoked",
    ProposalError: "proposal",
    StaleError: "stale",
    LateError: "late",
    TargetError: "target",
    FrameError: "frame",
    UnknownRunError: "run",
    UpdateError: "update",
    BudgetError: "budget",
    UnforeseenError: "failed",
    UsageError: "failed",
    ZeroDivisionError: "failed",
}


@cache
def federation() -> Federation:
    return Federation.simulate("digits", scenario=Iid(), clients=3, samples=12, seed=0)


def method(**params: Any) -> FedAvg:
    return FedAvg(**{"model": "linear", "rounds": 1, "epochs": 1, **params})


def node(client: int = 0, simulated: bool = False) -> Any:
    return build_client(
        method(), federation(), Settings(), [client], key_source=KeySource(simulated=simulated)
    )


@cache
def honest() -> Call:
    """Return the first call of a run."""
    fitted = method().fit(federation(), Settings(transcript="full"))
    call, _ = fitted.transcript_.content(0)
    assert call.method == "contribute"
    return call


def reply_type(name: str) -> type:
    return call_types(method(), name)[1]


def failing(error: type[Exception], client: int = 0, simulated: bool = False) -> Any:
    """Return a node whose training fails with a sentence that holds a number of its data."""
    failed = node(client, simulated)

    def train(*positional: Any, **named: Any) -> Any:
        raise error(f"the update of sample {SECRET} is not finite")

    failed.client.cohort.train = train
    return failed


def request(client: int = 0) -> bytes:
    call = honest()
    return wire.encode(call.header(client), call.query, client)


@pytest.mark.parametrize("error", CODES)
def test_the_text_of_an_error_stays_with_the_client(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    frame = failing(error).answer_frame(request())
    assert SECRET.encode() not in frame and b"sample" not in frame
    with pytest.raises(RefusedError) as told:
        wire.decode(frame, reply_type(honest().method))
    assert told.value.code == CODES[error]
    assert SENTENCES[CODES[error]] in str(told.value) and SECRET not in str(told.value)
    assert str(told.value).startswith("client/0 refused contribute of round 1: ")
    # its owner reads all of it
    assert SECRET in caplog.text
    assert ("Traceback" in caplog.text) == (CODES[error] == "failed")


def test_refusals_of_one_reason_are_the_same_bytes_whatever_the_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frames = set()
    for number in ("1", "222222222222"):
        monkeypatch.setitem(globals(), "SECRET", number)
        frames.add(failing(UpdateError).answer_frame(request()))
    assert len(frames) == 1


def test_each_code_is_of_one_reason_and_has_a_sentence_of_its_own() -> None:
    assert set(CODES.values()) == set(SENTENCES)
    assert len(set(SENTENCES.values())) == len(SENTENCES)
    reasons = [code for error, code in CODES.items() if issubclass(error, SecureClusterError)]
    assert sorted(set(reasons)) == sorted(reasons[:-1])  # what nobody foresaw is one reason


def test_every_error_of_the_package_has_a_code() -> None:
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, SecureClusterError):
            made = value("text", "policy") if value is RefusedError else value("text")
            assert code_of(made) in SENTENCES


def test_one_user_who_is_server_and_client_reads_the_sentence_itself() -> None:
    with pytest.raises(UpdateError, match=SECRET):
        failing(UpdateError, simulated=True).answer_frame(request())


@pytest.mark.parametrize("damage", [b"", b"x" * 40])
def test_a_frame_without_a_header_is_refused_to_nobody(damage: bytes) -> None:
    with pytest.raises(RefusedError) as told:
        wire.decode(node().answer_frame(damage), Ack)
    assert told.value.code == "frame"


def test_a_frame_for_another_client_is_not_answered_in_its_name() -> None:
    frame = node().answer_frame(request(client=1))
    assert wire.peek(frame).sender == ""


def exchange(doors: dict[int, Callable[[bytes], bytes]], call: Call, transcript: Any) -> Any:
    return Recorded(Framed(doors, reply_type), transcript).exchange(call)


def test_a_server_is_told_who_refuses_and_its_transcript_has_no_text() -> None:
    transcript = Transcript("full")
    doors = {0: failing(UpdateError).answer_frame}
    with pytest.raises(RefusedError, match=r"^client/0 refused contribute of round 1: its reply"):
        exchange(doors, honest().select([0]), transcript)
    assert transcript.entries == []


def test_a_refusal_in_another_clients_name_is_that_of_who_was_asked() -> None:
    header = reply_header(replace(honest().header(0), recipient="client/2"))
    forged = wire.encode_refusal(header, "policy")
    with pytest.raises(RefusedError, match=r"^client/0 refused"):
        exchange({0: lambda data: forged}, honest().select([0]), Transcript("none"))


def test_who_has_spent_its_budget_takes_part_no_more() -> None:
    doors = {0: node(0).answer_frame, 1: failing(BudgetError, 1).answer_frame}
    with pytest.warns(SecureClusterWarning, match=r"client/1 refused contribute .* budget"):
        response = exchange(doors, honest().select([0, 1]), Transcript("none"))
    assert response.ids == (0,)


def test_a_code_that_does_not_exist_is_a_damaged_frame() -> None:
    header = Header("c" * 32, "contribute", "sum", 1, 1, "client/0", "server", 3)
    with pytest.raises(FrameError, match="code that does not exist"):
        wire.decode(wire.encode_refusal(header, SECRET), Ack)


def test_the_key_authority_says_no_more_to_the_server(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tenseal")
    made = OneShot(rounds=1, epochs=1, model="linear", relevance="ckks", mask="none")
    config = made.config(federation(), "float32")
    authority = Deployment(made, config).authority(simulated=False)
    assert authority is not None

    def decrypt(header: Header, query: Any) -> Any:
        raise PolicyError(f"slot 5 has {SECRET}")

    authority._offer = lambda query: decrypt(None, query)  # type: ignore[assignment,arg-type]
    transcript = made.fit(federation(), Settings(transcript="full")).transcript_
    calls = [transcript.content(k)[0] for k in range(len(transcript.entries))]
    call = next(call for call in calls if call.method == "authority_key")
    frame = authority.answer_frame(wire.encode(call.header(0), call.query))
    assert SECRET.encode() not in frame and SECRET in caplog.text
    with pytest.raises(RefusedError, match=r"^authority refused authority_key .* a rule of"):
        wire.decode(frame, call_types(made, "authority_key")[1])
