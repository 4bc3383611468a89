"""What every protocol must keep, as functions that take a way to make one.

Each raises AssertionError, or the error of the mistake, where a protocol does not keep it.
`make(mask=…, rounds=…)` returns a protocol with these hyper-parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from securecluster import Federation
from securecluster.app.plots import curves
from securecluster.core.serialization import pack, unpack
from securecluster.messaging import wire
from securecluster.messaging.messages import RELAY, Call, Rows, Shared, reply_header
from securecluster.protocols import Settings
from securecluster.protocols.common.client import ClientState
from securecluster.protocols.nsim.pair_network import PairNetworkConfig
from securecluster.protocols.nsim.random_walks import Format
from securecluster.protocols.nsim.similarity_model import fit
from securecluster.runtime.endpoint import KEY_METHODS, message_types, release_of
from securecluster.runtime.run import Run
from securecluster.runtime.transport import Framed

Make = Callable[..., Any]
FULL = Settings(transcript="full")
SPREAD = {"rounds": 4, "participation": 0.6}


def digits(form: Format, users: int, draw: np.random.Generator) -> list[Any]:
    """Synthetic users of NSIM, for images of digits."""
    return [
        (draw.random((20, 1, 8, 8)).astype(np.float32), draw.integers(k % 9, 10, 20))
        for k in range(users)
    ]


def make_brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let NSIM's pair network hardly train, and draw no pictures: what they tell matters nowhere
    here.
    """
    from securecluster.protocols.nsim import synthetic_users

    def brief(rows: Any, true: Any, draws: Any, grid: Any = None) -> Any:
        return fit(rows, true, draws, grid=(PairNetworkConfig(steps=3),), networks=1)

    monkeypatch.setattr(synthetic_users, "fit", brief)
    monkeypatch.setattr(curves, "draw", lambda *_: [])


def check_frames(make: Make, federation: Federation, **params: Any) -> None:
    """Check that the bytes that are told are those of the encoded frames."""
    fitted = make(rounds=3, **params).fit(federation, FULL)
    total = {"up": 0, "down": 0}
    for position, entry in enumerate(fitted.transcript_.entries):
        call, answer = fitted.transcript_.content(position)
        query, reply = fitted.message_types(call.method)
        for k in range(len(call.to)):
            down = wire.encode(call.header(k), call.query, k)
            up = wire.encode(reply_header(call.header(k)), answer.reply, k)
            assert (len(down), len(up)) == (entry.down[k], entry.up[k])
            assert wire.decode(down, query)[0] == call.header(k)
            assert wire.decode(up, reply)[0] == reply_header(call.header(k))
            total["up"] += len(up)
            total["down"] += len(down)
    assert total == {k: fitted.bytes_[k] for k in total}
    assert total["up"] > 0


def check_replay(make: Make, federation: Federation, **params: Any) -> None:
    """Check that the server alone, against a transcript, ends in the same state bit for bit."""
    made = make(rounds=4, **params)
    fitted = made.fit(federation, Settings(transcript="full", dropout=0.2))
    assert (
        made.replay(fitted.transcript_, made.config(federation, "float32")) == fitted.server_state_
    )


def check_masked_round(make: Make, federation: Federation, mask: str) -> None:
    """Check that one round under a mask gives the models that it gives without one."""
    made = make(rounds=1, mask=mask)
    masked = made.fit(federation).client_models_.values
    plain = made.set_params(mask="none").fit(federation).client_models_.values
    start = made.build_client(federation, Settings()).client.cohort.start
    assert torch.linalg.norm(masked - plain) <= 1e-6 * torch.linalg.norm(plain - start)


def check_nodes(make: Make, federation: Federation, **params: Any) -> None:
    """Check that nodes with one client each, behind real frames, end with the models of all clients
    in one batch.
    """
    made, settings = make(rounds=3, **params), Settings(dtype="float64")
    nodes = [made.build_client(federation, settings, [i]) for i in range(len(federation))]
    doors = {i: node.answer_frame for i, node in enumerate(nodes)}
    transport = Framed(doors, lambda name: message_types(made.client, name)[1])
    net = made.build_network(transport, made.config(federation, "float64"))
    made.run_server(net, Run(begin=lambda number: setattr(net, "round", number)))
    together = made.fit(federation, settings).client_models_.values
    apart = torch.cat([node.client.models.values for node in nodes])
    torch.testing.assert_close(apart, together, rtol=0, atol=1e-9)


def check_repeats(make: Make, federation: Federation, **params: Any) -> None:
    """Check that the same seed gives the same run."""
    one, two = (make(rounds=3, **params).fit(federation) for _ in range(2))
    assert torch.equal(one.client_models_.values, two.client_models_.values)
    assert one.history_ == two.history_


def check_resume(make: Make, federation: Federation, folder: Path, **params: Any) -> None:
    """Check that a run that is stopped after a round ends as if it never had been."""
    settings = Settings(transcript="full", dropout=0.1)
    whole = make(rounds=4, **params).fit(federation, settings)
    for stop in (1, 3):
        home = folder / str(stop)

        def interrupt(line: dict[str, object], stop: int = stop) -> None:
            if line["round"] == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            make(rounds=4, **params).fit(federation, settings, folder=home, report=interrupt)
        resumed = make(rounds=4, **params).fit(federation, settings, folder=home)
        assert torch.equal(resumed.client_models_.values, whole.client_models_.values)
        assert resumed.history_ == whole.history_
        assert resumed.bytes_ == whole.bytes_
        assert resumed.server_state_ == whole.server_state_
        assert resumed.transcript_.entries == whole.transcript_.entries
        # as after a kill just before the end
        again = make(rounds=4, **params).fit(federation, settings, folder=home)
        assert again.server_state_ == whole.server_state_
        assert torch.equal(again.client_models_.values, whole.client_models_.values)
        assert again.bytes_ == whole.bytes_


def check_everyone_catches_up(make: Make, federation: Federation, **params: Any) -> None:
    """Check that a client that misses rounds, the last one too, ends with its cluster's model."""
    made = make(rounds=5, **params)
    endpoint = made.build_client(federation, Settings())

    def lost(call: Call) -> set[int]:
        trains = call.method in ("train", "contribute")
        return {2} if call.round in (2, 3, 5) and trains else set()

    from securecluster.runtime.transport import InProcess

    net = made.build_network(InProcess(endpoint.answer, lost), made.config(federation, "float32"))
    state = made.run_server(net, Run(begin=lambda number: setattr(net, "round", number)))
    same = [i for i in net.clients if state.labels[i] == state.labels[2]]
    models = endpoint.client.models.values
    assert not state.outbox.lagging_clients()
    assert len(same) > 1
    assert all(torch.equal(models[2], models[i]) for i in same)


def other_data(federation: Federation, seed: int = 1) -> Federation:
    """Return the same clients with random samples, and their labels in another order."""
    draw = np.random.default_rng(seed)
    shards = []
    for shard in federation.shards:
        x = draw.random(shard.x.shape).astype(np.float32)
        shards.append(replace(shard, x=x, y=draw.permutation(shard.y)))
    return replace(federation, shards=tuple(shards))


def is_same(one: Any, other: Any) -> bool:
    """Return whether two replies hold the same numbers."""
    pairs = [(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)]
    return all(_equal(a, b) for a, b in pairs)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Rows):
        return torch.equal(one.values, other.values)
    if isinstance(one, Shared):
        return torch.equal(one.value, other.value)
    return bool(one == other)


def check_free_replies(make: Make, federation: Federation, **params: Any) -> int:
    """Check that what is declared to tell nothing new tells nothing new.

    A reply with private=False is the same from clients with other data who are asked the same from
    the beginning. So is a derived one that is masked, such as a posted model. Any derived reply is
    the same from clients who remember the same and hold other data.

    Returns:
        How many replies were compared.
    """
    made, compared = make(**{**SPREAD, **params}), 0
    fitted = made.fit(federation, FULL)
    own, apart, swapped = (
        made.build_client(known, Settings())
        for known in (federation, other_data(federation), other_data(federation))
    )  # fmt: skip
    for position in range(len(fitted.transcript_.entries)):
        call, told = fitted.transcript_.content(position)
        if told.reply is None or call.verb == RELAY:
            continue
        call = call.select([call.to.index(i) for i in told.ids])
        if call.method not in KEY_METHODS and fields(told.reply):
            release = release_of(getattr(made.client, call.method))
            if release.derived:
                state = unpack(pack(own.client.state(own.keys.secrets)), ClientState)
                swapped.client.restore(state)
                swapped.keys.restore(state.secrets)
                assert is_same(swapped.answer(call).reply, told.reply), (
                    f"{call.method} depends on data: it is not derived"
                )
            again = apart.answer(call).reply
            if not release.private or (release.derived and release.through):
                assert is_same(again, told.reply), (
                    f"{call.method} depends on data: it is private, and not free"
                )
                compared += len(call.to)
        else:
            apart.answer(call)
        own.answer(call)
    return compared


def check_newcomers(
    make: Make, run: Federation, newcomers: Federation, masks: Sequence[str], **params: Any
) -> None:
    """Check that newcomers, and the run's own clients, are clustered alike under every mask."""
    found = {}
    for mask in masks:
        fitted = make(**{"rounds": 4, **params}, mask=mask).fit(run, Settings(dtype="float64"))
        found[mask] = (fitted.labels_.tolist(), fitted.predict(newcomers).tolist())
    first = found[masks[0]]
    assert all(one == first for one in found.values()), found


def events_owed(fitted: Any) -> Counter[Any]:
    """(method, field, round, client) of everything private that the transcript shows to have left
    clients.
    """
    owed: Counter[Any] = Counter()
    for position, entry in enumerate(fitted.transcript_.entries):
        call, answer = fitted.transcript_.content(position)
        target = getattr(fitted.client, call.method, None)
        if target is None or answer.reply is None or not release_of(target).private:
            continue  # a key agreement, a server, or nothing of anyone's data
        names = [
            name for name, value in vars(answer.reply).items() if isinstance(value, Rows | Shared)
        ]
        owed.update((call.method, name, entry.round, i) for name in names for i in answer.ids)
    return owed


def check_priced(make: Make, federation: Federation, **params: Any) -> None:
    """Check that every private field writes an event, and that with noise none of them is exact."""
    fitted = make(rounds=3, **params).fit(federation, FULL)
    written = Counter(
        (e.method, f, e.round, i) for e in fitted.ledger_.events for f in e.fields for i in e.ids
    )
    assert written == events_owed(fitted)
    assert fitted.ledger_.exact() == []
    assert 0 < fitted.ledger_.price(1e-5).epsilon < float("inf")
