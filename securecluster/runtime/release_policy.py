"""How the replies of a client method may leave their client, as `answers` declares it."""

from __future__ import annotations

from dataclasses import dataclass

# kind of training that costs nothing, see `ReleasePolicy.trains`
KEPT = "kept"


@dataclass(frozen=True)
class ReleasePolicy:
    """Declaration of how the replies of a client method may leave their client.

    Args:
        via: verbs that the reply may be read through.
        through: fields of the reply that pass through the client's pipeline.
        private: True if the reply depends on the client's data; such replies are recorded in the
            ledger. The others are acknowledgements: every field that they have is named in
            `public`.
        fresh: True if the client keeps none of the tensors in `through`, so that they are masked
            in place.
        sealed: fields that only other clients may read. In runs that seal, they are sealed instead
            of passing through the pipeline's masks.
        derived: True if the reply depends on data only through earlier releases, such as the
            averages that a client received: it is masked like any other, and neither clipped nor
            noised again.
        trains: kind of training behind the reply: "usual" for the client's own plan, "full" for
            one step over all its samples; "kept" for one that costs nothing, since the model never
            leaves its client or an earlier call's training is repeated to the bit; empty if the
            client does not train.
        unmasked: numeric fields that no mask covers, such as losses. Every other one must be in
            `through`.
        columns: for rows of pairs, the field of the query with the ids of the clients that a row
            has numbers of: all of them in order, or those of all but the recipient.
        public: fields of a reply that is not private, of nobody's data. Nothing checks this, so
            ledger, report and audit list them as declared public.
        fixed: True if the rows of all calls count as the same rows, since they follow from the
            client's data and at most from public numbers that the server names: of secure sums of
            such rows a client opens those over one list of clients only. None is True for a method
            whose query is `Empty`, and else False.
        relays: fields of the query in which rows of single clients' replies may reach other
            clients. Every client can undo the run's mask, so these read such rows unless they are
            sealed for somebody else. The server's side refuses other fields that hold such a row.
    """

    via: tuple[str, ...]
    through: tuple[str, ...] = ()
    private: bool = True
    fresh: bool = False
    sealed: tuple[str, ...] = ()
    derived: bool = False
    trains: str = ""
    unmasked: tuple[str, ...] = ()
    columns: str = ""
    public: tuple[str, ...] = ()
    fixed: bool | None = None
    relays: tuple[str, ...] = ()
