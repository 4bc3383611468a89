"""What every protocol must keep, as functions that take a way to make one.

Each raises AssertionError, or the error of the mistake, where a protocol does not keep it.
`make(mask=…, rounds=…)` returns a protocol with these hyper-parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import DOUBLE, FULL, interrupt_after, serve, serve_nodes

from securecluster import Federation
from securecluster.core.serialization import pack, unpack
from securecluster.messaging import wire
from securecluster.messaging.messages import AUTHORITY_CALL, RELAY, Call, Rows, Shared, reply_header
from securecluster.protocols import Settings
from securecluster.protocols.common.client import ClientState
from securecluster.protocols.common.fresh_replay import replay_in_new_process
from securecluster.runtime.endpoint import KEY_METHODS, release_of

Make = Callable[..., Any]
SPREAD = {"rounds": 4, "participation": 0.6}


@dataclass
class Example:
    """One run of a protocol, with dropouts and a full transcript, that several checks read."""

    make: Callable[[], Any]  # the protocol anew, with the same hyper-parameters
    federation: Federation
    settings: Settings
    fitted: Any


def example(make: Make, federation: Federation, **params: Any) -> Example:
    """Fit a protocol once for `check_frames`, `check_replay`, `check_repeats`, `check_resume`."""
    anew = partial(make, **{"rounds": 4, **params})
    settings = Settings(transcript="full", dropout=0.2)
    return Example(anew, federation, settings, anew().fit(federation, settings))


def check_frames(fitted: Any) -> None:
    """Check that the recorded numbers of bytes are the lengths of the encoded frames."""
    total = {"up": 0, "down": 0}
    for position, entry in enumerate(fitted.transcript_.entries):
        call, answer = fitted.transcript_.content(position)
        query, reply = fitted.message_types(call.method)
        up = [0] * len(call.to)  # a client that does not reply sends nothing
        for row, client in enumerate(answer.ids):
            k = call.to.index(client)
            header = reply_header(call.header(k))
            frame = wire.encode(header, answer.reply, row)
            assert wire.decode(frame, reply)[0] == header
            up[k] = len(frame)
        down = [len(wire.encode(call.header(k), call.query, k)) for k in range(len(call.to))]
        frame = wire.encode(call.header(0), call.query, 0)
        assert wire.decode(frame, query)[0] == call.header(0)
        if entry.verb == RELAY:  # to the server above, so that queries go up
            assert (tuple(up), tuple(down)) == (tuple(entry.down), tuple(entry.up))
            continue
        assert (tuple(down), tuple(up)) == (tuple(entry.down), tuple(entry.up))
        if entry.verb == AUTHORITY_CALL:  # counted between servers
            continue
        total["up"] += sum(up)
        total["down"] += sum(down)
    assert total == {k: fitted.bytes_[k] for k in total}
    assert total["up"] > 0


def check_replay(run: Example, new_process: bool = False) -> None:
    """Check that the server alone, against a transcript, ends in the same state bit for bit.

    Args:
        new_process: whether it also runs in a new process, to which no patch of a test reaches.
    """
    made = run.make()
    config = made.config(run.federation, "float32")
    assert made.replay(run.fitted.transcript_, config) == run.fitted.server_state_
    if new_process:
        replay_in_new_process(run.fitted)


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
    made = make(rounds=3, **params)
    state, nodes = serve_nodes(made, federation)
    together = made.fit(federation, DOUBLE).client_models_.values
    apart = torch.cat([made.final_models(node.client, state).values for node in nodes])
    torch.testing.assert_close(apart, together, rtol=0, atol=1e-9)


def check_repeats(run: Example) -> None:
    """Check that the same seed gives the same run."""
    again = run.make().fit(run.federation, run.settings)
    assert torch.equal(again.client_models_.values, run.fitted.client_models_.values)
    assert again.history_ == run.fitted.history_


def check_resume(run: Example, folder: Path) -> None:
    """Check that a run that is stopped after its first and its third round ends as if it never had
    been.
    """
    federation, settings, whole = run.federation, run.settings, run.fitted
    for stop in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            run.make().fit(federation, settings, folder=folder, report=interrupt_after(stop))
    resumed = run.make().fit(federation, settings, folder=folder)
    assert torch.equal(resumed.client_models_.values, whole.client_models_.values)
    assert resumed.history_ == whole.history_
    assert resumed.bytes_ == whole.bytes_
    assert resumed.server_state_ == whole.server_state_
    assert resumed.transcript_.entries == whole.transcript_.entries
    # as after a kill just before the end
    again = run.make().fit(federation, settings, folder=folder)
    assert again.server_state_ == whole.server_state_
    assert torch.equal(again.client_models_.values, whole.client_models_.values)
    assert again.bytes_ == whole.bytes_


def check_everyone_catches_up(make: Make, federation: Federation, **params: Any) -> None:
    """Check that a client that misses rounds, the last one too, ends with its cluster's model."""
    made = make(rounds=5, **params)

    def lost(call: Call) -> set[int]:
        trains = call.method in ("train", "contribute")
        return {2} if call.round in (2, 3, 5) and trains else set()

    served = serve(made, federation, lost, Settings())
    state, models = served.state, served.endpoint.client.models.values
    same = [i for i in served.net.clients if state.labels[i] == state.labels[2]]
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
        fitted = make(**{"rounds": 4, **params}, mask=mask).fit(run, DOUBLE)
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


def events_written(fitted: Any) -> Counter[Any]:
    """Return (method, field, round, client) of everything that the ledger has an event for."""
    return Counter(
        (e.method, f, e.round, i) for e in fitted.ledger_.events for f in e.fields for i in e.ids
    )


def check_priced(make: Make, federation: Federation, **params: Any) -> None:
    """Check that every private field writes an event, and that with noise none of them is exact."""
    fitted = make(rounds=3, **params).fit(federation, FULL)
    assert events_written(fitted) == events_owed(fitted)
    assert fitted.ledger_.exact() == []
    assert 0 < fitted.ledger_.price(1e-5).epsilon < float("inf")


def check_protocol(
    make: Make,
    federation: Federation,
    newcomers: Federation,
    mask: str,
    folder: Path,
    **noise: Any,
) -> None:
    """Run every check on a protocol under one mask.

    Args:
        make: makes the protocol from hyper-parameters.
        federation: clients with known clusters.
        newcomers: clients of the same kinds.
        mask: name of a mask.
        folder: empty, for runs that are stopped and resumed.
        noise: hyper-parameters by which no release is exact.
    """
    run = example(make, federation, mask=mask)
    check_frames(run.fitted)
    check_replay(run, new_process=True)
    check_repeats(run)
    check_resume(run, folder)
    check_masked_round(make, federation, mask)
    check_nodes(make, federation, mask=mask)
    check_everyone_catches_up(make, federation, mask=mask)
    check_free_replies(make, federation, mask=mask)
    check_newcomers(make, federation, newcomers, ("none", mask))
    for placement in ("local", "central"):
        check_priced(make, federation, mask=mask, placement=placement, **noise)
