"""Round trips of each protocol: what goes out together counts once.

python -m benchmarks.costs.exchanges

Over a network each round trip waits for a node's next look, so their number, and not that of the
messages, decides how long a small run takes. Ten clients in one process, of which none is lost, and
three rounds. `one_by_one` is what a run would take if no two calls went out together.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from benchmarks.golden import SECAGG, VARIANTS
from benchmarks.grid import script_parser
from benchmarks.table import SEEDED, write
from securecluster import Federation, LabelSwap
from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError
from securecluster.messaging.messages import Call, Response
from securecluster.runs import clients_half
from securecluster.runtime.transport import InProcess

CLIENTS = 10
ROUNDS = 3
COUNTED = ("fedavg", "cfl sketch", "flhc", "srfca loss", "oneshot", "ifca", "signature", "hidden")
WAYS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"mask": "none"},
    "masked": {"mask": "permutation"},
    "secure sums": SECAGG,
    "masked and secure sums": {"mask": "rotation", "aggregation": "secagg"},
    "padded pairs and secure sums": {"aggregation": "secagg", "relevance": "pads"},
}


class Counting(InProcess):
    """Transport to clients in this process that counts round trips.

    Attributes:
        trips: of all calls; those that go out together count once.
        one_by_one: calls.
    """

    trips = 0
    one_by_one = 0

    def exchange(self, call: Call) -> Response:
        """Answer a call, and count it.

        Args:
            call: requests to clients.
        """
        self._count(1)
        return super().exchange(call)

    def exchange_all(self, calls: Sequence[Call]) -> list[Response]:
        """Answer several calls, and count them as one round trip.

        Args:
            calls: requests to clients.
        """
        self._count(len(calls))
        return [InProcess.exchange(self, call) for call in calls]

    def begin(self, call: Call) -> Callable[[], Response]:
        """Return what answers a call, which counts as part of a trip that follows.

        Args:
            call: requests to clients.
        """
        before = self.trips

        def finished() -> Response:
            self._count(1)
            if self.trips > before + 1:  # others have gone out beside it
                type(self).trips -= 1
            return InProcess.exchange(self, call)

        return finished

    def stream(self, call: Call, chunk: int | None = None) -> Iterator[tuple[Call, Response]]:
        """Answer a call, and count it.

        Args:
            call: requests to clients.
            chunk: of clients; one part here.
        """
        yield call, self.exchange(call)

    @classmethod
    def _count(cls, calls: int) -> None:
        cls.trips += 1
        cls.one_by_one += calls


def counted(variant: str, options: Mapping[str, Any], federation: Federation) -> tuple[int, int]:
    """Return the round trips of a run, and the calls.

    Args:
        variant: a name of `VARIANTS`.
        options: hyper-parameters of what protects it.
        federation: the clients and their data.
    """
    protocol, params = VARIANTS[variant]
    small = {"epochs": 1, "model": "mlp-32", "rounds": ROUNDS}
    # who is sampled late would need keys late
    variant_params = {name: value for name, value in params.items() if name != "participation"}
    method = protocol(**{**small, **variant_params, **options})
    Counting.trips = Counting.one_by_one = 0
    with mock.patch.object(clients_half, "InProcess", Counting), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        method.fit(federation, SEEDED)
    return Counting.trips, Counting.one_by_one


def main(argv: Sequence[str] | None = None) -> None:
    """Print and write a row for each protocol and way that work together."""
    script_parser(__doc__).parse_args(argv)
    torch.set_num_threads(1)
    federation = Federation.simulate(
        "digits", scenario=LabelSwap(2), clients=CLIENTS, samples=40, seed=0
    )
    rows: list[dict[str, Any]] = []
    for variant in COUNTED:
        for way, options in WAYS.items():
            try:
                trips, calls = counted(variant, options, federation)
            except (UsageError, TypeError):  # it does not work with the way
                continue
            rows.append({"case": variant, "way": way, "trips": trips, "one_by_one": calls})
            print(rows[-1], flush=True)
    print(write("exchanges", rows))


if __name__ == "__main__":
    main()
