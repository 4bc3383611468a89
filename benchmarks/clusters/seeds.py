"""Run CFL's defaults on the digits with several seeds.

python -m benchmarks.clusters.seeds [number of seeds, 10]

Each seed gives one row: whether the true clusters were recovered, the accuracy before the first
split and at the end, the accuracy of FedAvg and of local training on the same clients, and bytes.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from benchmarks.table import SEEDED, write
from securecluster import Federation, Iid
from securecluster.messaging import wire
from securecluster.messaging.messages import reply_header
from securecluster.protocols import CFL, ClusteringProtocol, FedAvg, Local, Settings


def encoded_bytes(fitted: ClusteringProtocol) -> int:
    """Return the length in bytes of every frame of a run, encoded anew.

    Args:
        fitted: a protocol whose run recorded a full transcript.
    """
    length = 0
    for position in range(len(fitted.transcript_.entries)):
        call, answer = fitted.transcript_.content(position)
        for k, client in enumerate(call.to):
            header = call.header(k)
            request = wire.encode(header, call.query, k)
            length += len(request)
            # a client that dropped out was sent the request, and replied nothing
            if client in answer.ids:
                row = answer.ids.index(client)
                reply = wire.encode(reply_header(header), answer.reply, row)
                length += len(reply)
    return length


def mean_score(protocol: ClusteringProtocol, federation: Federation) -> float:
    """Return the clients' mean test accuracy after a protocol's run, to four decimals.

    Args:
        protocol: what is run.
        federation: the clients.
    """
    fitted = protocol.fit(federation, SEEDED)
    return round(float(np.mean(fitted.scores_)), 4)


def row(seed: int) -> dict[str, Any]:
    """Return one seed's line of the table.

    Args:
        seed: of the federation and of all runs on it.
    """
    federation = Federation.simulate("digits", seed=seed)
    # the full transcript is what `encoded_bytes` encodes
    cfl = CFL().fit(federation, Settings(transcript="full", keys_from_seed=True))
    assert cfl.agreement_ is not None
    split_lines = [line for line in cfl.history_ if line["splits"]]
    splits = [str(line["round"]) for line in split_lines]
    # in the round of the first split all clients still have one model
    before = None
    if split_lines:
        before = round(split_lines[0]["accuracy"], 4)
    one_distribution = Federation.simulate("digits", scenario=Iid(), seed=seed)
    # a control without clusters: CFL must not split it
    iid = CFL().fit(one_distribution, SEEDED)
    bytes_up = cfl.bytes_["up"]
    bytes_down = cfl.bytes_["down"]
    return {
        "seed": seed,
        "exact": cfl.agreement_["exact"],
        "ari": round(cfl.agreement_["ari"], 4),
        "splits": " ".join(splits),
        "before": before,
        "after": round(float(np.mean(cfl.scores_)), 4),
        "fedavg": mean_score(FedAvg(), federation),
        "local": mean_score(Local(), federation),
        "clusters_iid": len(set(iid.labels_)),
        "bytes_up": bytes_up,
        "bytes_down": bytes_down,
        "bytes_encoded": encoded_bytes(cfl),
        "bytes_per_round": (bytes_up + bytes_down) // cfl.rounds,
    }


def main(seeds: int = 10) -> None:
    """Print and write the table.

    Args:
        seeds: how many, from 0 on.
    """
    rows = []
    for seed in range(seeds):
        line = row(seed)
        rows.append(line)
        print(line, flush=True)
    for column in ("before", "after", "fedavg", "local"):
        # runs without a split have no accuracy before one
        measured = [line[column] for line in rows if line[column] is not None]
        values = np.array(measured, dtype=float)
        mean = values.mean()
        lowest = values.min()
        highest = values.max()
        print(f"{column:<7} mean {mean:.4f}  min {lowest:.4f}  max {highest:.4f}")
    equal = 0
    for line in rows:
        counted = line["bytes_up"] + line["bytes_down"]
        # a simulation counts the bytes of frames that it does not encode
        equal += counted == line["bytes_encoded"]
    exact = sum(line["exact"] for line in rows)
    print(f"exact {exact} of {seeds}; frames as long as counted in {equal}")
    print(write("seeds", rows))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
