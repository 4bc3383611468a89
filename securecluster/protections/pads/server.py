"""The server's half of padded pairs: it reads R, and no single row.

Two exchanges of keys come before the first call of a run, and a question for the attempt before
each. A client that is lost costs nothing but its own row and column.

A row that was forged shows in sums beyond their range, with whichever clients. The client with most
of them is left out, then that with most of those that are left; of several with as many, all are,
so that nobody has another one left out by a forged number and stays. It is named where it has such
sums with more than half of the others: fewer clients than these cannot make another one look so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, UsageError
from securecluster.messaging.messages import Call, format_ids
from securecluster.protections.key_exchange import KeyRelay
from securecluster.protections.pads.client import NAME, PairsRequest
from securecluster.protections.pair_rows import PAIR, PairRange
from securecluster.runtime.aggregators import Exchange
from securecluster.runtime.pair_aggregators import (
    PairFunctions,
    PairTotal,
    check_replies,
    check_rows,
    positions,
)
from securecluster.runtime.port import TRIES, Connected


class PaddedPairs(Connected):
    """Aggregator for pairs whose server reads sums of pairs.

    Args:
        run: hash of the run's configuration.
        ranges: range of each field of rows.
        functions: functions of R.
    """

    name = NAME
    server_reads_rows = False

    def __init__(self, run: str, ranges: Mapping[str, PairRange], functions: PairFunctions) -> None:
        self._ranges = ranges
        self._functions = functions
        self.keys: KeyRelay = KeyRelay(run.encode(), lambda members, root: lambda client: members)

    def check(self, then: str) -> None:
        """Raise UsageError for a function of R that is not declared.

        Args:
            then: name of the function of R.
        """
        self._functions.check(then)

    def run(self, exchange: Exchange, call: Call, columns: Sequence[int], then: str) -> PairTotal:
        """Read padded rows, add those of each pair, and compute a function of R.

        Args:
            exchange: sends a call, again to clients that do not reply, and returns the replies.
            call: the call to the clients that are ready.
            columns: the clients that a row has numbers of, ascending.
            then: name of the function of R.

        Raises:
            UsageError: fewer than two clients replied whose rows are of use, or clients that do not
                ascend.
            FrameError: rows of another length; or, where that ends the run, a sum that no two
                clients can have.
        """
        if list(columns) != sorted(set(columns)):
            raise UsageError("padded pairs name each client once, in ascending order: ask them so")
        response = exchange(self._attempt(call, columns))
        check_replies(response.ids)
        ((name, field),) = vars(response.reply).items()
        rows = field.values
        check_rows(rows, len(response.ids), len(columns))
        sums = _sums_of_pairs(rows[:, positions(columns, response.ids)])
        retained = self._without_forged(name, sums, response.ids)
        ids = tuple(response.ids[k] for k in retained)
        check_replies(ids)
        relevance = self._relevance(name, sums[retained][:, retained])
        return PairTotal(ids, self._functions.apply(then, relevance), relevance)

    def _attempt(self, call: Call, columns: Sequence[int]) -> Call:
        """Return the call in an attempt that its clients can take part in, without silent ones."""
        text = format_ids(columns)
        attempts: dict[int, int] = {}
        for _ in range(TRIES):
            silent = [client for client in call.to if client not in attempts]
            if not silent:
                break
            response = self.keys.port.to_clients(
                "pair_attempt",
                silent,
                PairsRequest(call.method),
                call=call,
                group=[text] * len(silent),
                members=[len(columns)] * len(silent),
            )
            if response.reply is not None:
                attempt_numbers = response.reply.attempt.values.tolist()
                attempts.update(zip(response.ids, attempt_numbers, strict=True))
        remaining = call.select([k for k, client in enumerate(call.to) if client in attempts])
        return replace(
            remaining,
            members=(len(columns),) * len(remaining.to),
            group=(text,) * len(remaining.to),
            attempt=max(attempts.values(), default=0),
        )

    def _relevance(self, name: str, sums: torch.Tensor) -> torch.Tensor:
        """Return R (r, r) in float64, from the sums of pairs in the ring."""
        pair_range = self._ranges[name]
        relevance = pair_range.fixed_point(name).decode(sums, PAIR, torch.float64) / 2
        relevance.fill_diagonal_(pair_range.itself)
        return relevance

    def _beyond(self, name: str, sums: torch.Tensor) -> torch.Tensor:
        """Return which sums of pairs (r, r) no two clients can have."""
        pair_range = self._ranges[name]
        codec = pair_range.fixed_point(name)
        limit = PAIR * codec.largest
        beyond = (sums < -limit) | (sums > limit)  # two comparisons: the ring's least has no |x|
        halves = codec.decode(sums.masked_fill(beyond, 0), PAIR, torch.float64) / 2
        error = pair_range.error_bound()
        beyond |= (halves < pair_range.low - error) | (halves > pair_range.high + error)
        return beyond.fill_diagonal_(False)

    def _without_forged(self, name: str, sums: torch.Tensor, clients: Sequence[int]) -> list[int]:
        """Return the positions of clients, without those whose rows do not fit others'."""
        beyond = self._beyond(name, sums)
        most_of_the_others = beyond.sum(1) > (len(clients) - 1) / 2
        retained = list(range(len(clients)))
        while beyond[retained][:, retained].any():
            counts = beyond[retained][:, retained].sum(1).tolist()
            worst = [k for k, count in zip(retained, counts, strict=True) if count == max(counts)]
            refusal = FrameError(
                f"{name}: a pair of clients has a sum beyond its range, with client "
                f"{format_ids([clients[k] for k in worst])} most often: a row was forged, or two "
                "clients have other keys of each other"
            )
            self.keys.port.refuse(refusal, [clients[k] for k in worst if most_of_the_others[k]])
            retained = [k for k in retained if k not in worst]
        return retained


def _sums_of_pairs(square: torch.Tensor) -> torch.Tensor:
    """Return the sums (r, r) of the padded numbers of each pair of clients, in the ring."""
    sums = (square + square.T).contiguous()  # wraps, and so the pads of each pair cancel
    return sums.fill_diagonal_(0)
