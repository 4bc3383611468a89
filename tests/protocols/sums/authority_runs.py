"""Runs with a key authority whose parties, and frames to and from it, a test can reach."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from cases import DOUBLE, Served, run_server

from securecluster import Federation
from securecluster.messaging.messages import Call, Response
from securecluster.messaging.transcript import Transcript
from securecluster.parties.deployment import Deployment, build_network
from securecluster.parties.derived import call_types
from securecluster.parties.endpoints import build_client
from securecluster.protections.encryption.authority import KeyAuthority
from securecluster.runtime.transport import Framed, InProcess, Recorded, Transport, WithAuthority


def no_dropout(call: Call) -> set[int]:
    return set()


@dataclasses.dataclass
class Run:
    """A run whose parties, and frames to and from the authority, a test can reach."""

    served: Served
    authority: KeyAuthority
    replies: Callable[[str], type]


def run_with_authority(
    made: Any,
    federation: Federation,
    lost: Callable[[Call], set[int]] = no_dropout,
    meddle: Callable[[Transport], Transport] = lambda inner: inner,
) -> Run:
    """Run a protocol, with a transport around its authority that a test may change."""
    config = made.config(federation, "float64")
    endpoint, authority = (
        build_client(made, federation, DOUBLE),
        Deployment(made, config).authority(),
    )
    transcript = Transcript("full")

    def replies(name: str) -> type:
        return call_types(made, name)[1]

    inner = WithAuthority(InProcess(endpoint.answer, lost), authority.answer_frame, replies)
    net = build_network(made, Recorded(meddle(inner), transcript), config)
    served = Served(run_server(made, net), endpoint, net, transcript)
    return Run(served, authority, replies)


def ask(run: Run, call: Call, **changes: Any) -> Response:
    """Send the authority a request with changes; those of the query by its fields' names."""
    query_fields = {f.name for f in dataclasses.fields(call.query)}
    query = {name: value for name, value in changes.items() if name in query_fields}
    rest = {name: value for name, value in changes.items() if name not in query_fields}
    request = dataclasses.replace(call, query=dataclasses.replace(call.query, **query), **rest)
    return Framed({0: run.authority.answer_frame}, run.replies).exchange(request)
