"""Results of a run as objects of pandas, which is loaded when one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from securecluster.core.optional_packages import need
from securecluster.errors import unknown
from securecluster.results.scores import score_rows

if TYPE_CHECKING:
    from securecluster.results.fitted_state import Fitted

# of an event of the ledger: what its price follows from
PRICED = ("mechanism", "noise_multiplier", "kept")


def frame_of(fitted: Fitted, what: str) -> Any:
    """Return a part of a result as a Series or a DataFrame.

    Args:
        fitted: the result.
        what: as in `Fitted.to_frame`.

    Raises:
        UsageError: another word, or pandas is not installed.
    """
    makers = {
        "labels": _labels,
        "history": _history,
        "bytes": _bytes,
        "ledger": _ledger,
        "scores": _scores,
    }
    if what not in makers:
        raise unknown("frame", what, makers)
    return makers[what](fitted, need("pandas"))


def _labels(fitted: Fitted, pandas: Any) -> Any:
    """Return each client's cluster by its name."""
    names = pandas.Index(fitted.kept_.learned.names, name="client")
    return pandas.Series(fitted.labels_, index=names, name="cluster")


def _scores(fitted: Fitted, pandas: Any) -> Any:
    """Return a row for each client, with its cluster and the scores on its test samples."""
    rows = score_rows(fitted.kept_, fitted.network_.objective)
    return pandas.DataFrame(rows).set_index("client")


def _history(fitted: Fitted, pandas: Any) -> Any:
    """Return a row for each round."""
    frame = pandas.DataFrame(fitted.history_)
    return frame.set_index("round") if len(frame) else frame


def _bytes(fitted: Fitted, pandas: Any) -> Any:
    """Return a row for each message, with 0 where none was sent."""
    sent = pandas.DataFrame.from_dict(fitted.bytes_["by_message"], orient="index")
    directions = ["up", "down", "servers"]
    return sent.reindex(columns=directions).fillna(0).astype("int64").rename_axis("message")


def _ledger(fitted: Fitted, pandas: Any) -> Any:
    """Return a row for each field that each client released."""
    ledger = fitted.ledger_
    columns = ("round", "method", "fields", "verb", "reader", *PRICED)
    rows = []
    for event in ledger.events:
        values = [getattr(event, column) for column in columns]
        rows += [[ledger.names[client], *values] for client in event.ids]
    frame = pandas.DataFrame(rows, columns=["client", *columns])
    return frame.assign(fields=frame["fields"].map(", ".join))
