"""The default run over seeds: exact recovery, accuracy before and after beside FedAvg and local
training, bytes.

python -m securecluster.benchmarks.seeds [number of seeds, 10]
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from securecluster import Federation, Iid
from securecluster.benchmarks.table import write
from securecluster.messaging import wire
from securecluster.messaging.messages import reply_header
from securecluster.protocols import CFL, ClusteringProtocol, FedAvg, Local, Settings


def encoded_bytes(fitted: ClusteringProtocol) -> int:
    """The length of every frame of the run, encoded for real."""
    total = 0
    for position in range(len(fitted.transcript_.entries)):
        call, answer = fitted.transcript_.content(position)
        for k in range(len(call.to)):
            total += len(wire.encode(call.header(k), call.query, k))
            if call.to[k] in answer.ids:
                total += len(
                    wire.encode(
                        reply_header(call.header(k)), answer.reply, answer.ids.index(call.to[k])
                    )
                )
    return total


def row(seed: int) -> dict[str, Any]:
    """One seed."""
    federation = Federation.simulate("digits", seed=seed)
    cfl = CFL().fit(federation, Settings(transcript="full"))
    assert cfl.agreement_ is not None
    splits = [line["round"] for line in cfl.history_ if line["splits"]]
    before = next((line["accuracy"] for line in cfl.history_ if line["splits"]), None)
    iid = CFL().fit(Federation.simulate("digits", scenario=Iid(), seed=seed))
    return {
        "seed": seed,
        "exact": cfl.agreement_["exact"],
        "ari": round(cfl.agreement_["ari"], 4),
        "splits": " ".join(map(str, splits)),
        "before": None if before is None else round(before, 4),
        "after": round(float(np.mean(cfl.scores_)), 4),
        "fedavg": round(float(np.mean(FedAvg().fit(federation).scores_)), 4),
        "local": round(float(np.mean(Local().fit(federation).scores_)), 4),
        "clusters_iid": len(set(iid.labels_)),
        "bytes_up": cfl.bytes_["up"],
        "bytes_down": cfl.bytes_["down"],
        "bytes_encoded": encoded_bytes(cfl),
        "bytes_per_round": (cfl.bytes_["up"] + cfl.bytes_["down"]) // cfl.rounds,
    }


def main(seeds: int = 10) -> None:
    """Print and write the table."""
    rows = []
    for seed in range(seeds):
        rows.append(row(seed))
        print(rows[-1], flush=True)
    for column in ("before", "after", "fedavg", "local"):
        values = np.array([r[column] for r in rows if r[column] is not None], dtype=float)
        print(
            f"{column:<7} mean {values.mean():.4f}  min {values.min():.4f}  max {values.max():.4f}"
        )
    equal = sum(r["bytes_up"] + r["bytes_down"] == r["bytes_encoded"] for r in rows)
    print(f"exact {sum(r['exact'] for r in rows)} of {seeds}; frames as long as counted in {equal}")
    print(write("seeds", rows))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
