"""Disclosures of a finished run: which fields reached which reader, and which files ε leaves out.

All of it is derived from the ledger's events, the declarations of client methods, the pipeline and
the run's records, so that a report cannot leave out anything that was sent.

What the server did not see is derived from the same list, and not stated by an author. ε covers
files as well as frames: under noise, `models_` and `models.safetensors` hold models made of
releases, and a cluster of one client that trained alone has no shared model (`SumClient.unshared`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from securecluster.core.number_format import enumerated, times
from securecluster.folders.schemas import Field, OverRounds, Privacy
from securecluster.parties.deployment import Deployment
from securecluster.parties.derived import adds_noise
from securecluster.parties.method import Method
from securecluster.privacy import run_secret
from securecluster.privacy.cohorts import RowSpace
from securecluster.privacy.dp.ledger import COSTLESS, Event, Row
from securecluster.privacy.masking.masks import ENTRYWISE
from securecluster.privacy.pipeline import Kind, Pipeline
from securecluster.protections.occupancy import FieldOccupancy
from securecluster.protections.protection import LABELS, MATRIX, SUMS, PairProtection, Protection
from securecluster.results.fitted_state import SHARED, FittedSummary
from securecluster.results.saving import CLIENTS, LEARNED, MODELS
from securecluster.runtime.endpoint import PAIRS, SUM, release_of
from securecluster.runtime.run import LAST
from securecluster.statements.occupancy_words import hidden_in

if TYPE_CHECKING:
    from securecluster.results.fitted import FittedRun

NOISY = ("gaussian", "skellam")  # mechanisms of the ledger
READERS = {
    "server": "the server",
    "lps": "a local parameter server",
    "authority": "the key authority",
    "client": "other clients",
}

CLIENT = "client"  # reader of sealed fields: other clients
IN_CLEAR = "as they are: no mask covers them"

# protections of a run
MASKED = (
    "A mask ({kind}) hides the coordinates of updates from the server. It is obfuscation and no "
    "encryption: it falls when one client tells the server the seed that clients share, and it "
    "leaves what the table says."
)
ENCRYPTED = (
    "Replies are encrypted, and a key authority opens what the server computed from them. Server "
    "and authority must not work together, and a server that breaks the protocol must have no "
    "client on its side, and a roster against it."
)
SUMMED = (
    "Secure sums hide each client's reply among those of a group of clients, of which the server "
    "reads only the sum, as long as it does not collude with all other members of the group. What "
    "one of them alone moves stands in the sum as it is."
)
NOISED = (
    "Noise bounds what the releases reveal together, whatever a reader knows besides. ε is that "
    "bound; noise is added under the placement {placement}."
)
PADDED = (
    "Pads hide what a client contributes to the matrix over pairs of clients: the server reads "
    "only the entries that two clients make together."
)
SEALED_FIELDS = (
    "Some fields are sealed for other clients: the server relays them, and cannot open them. Every "
    "client that receives them reads them."
)
BARE = "Nothing protects the updates in this run: the server reads them as they are."


@dataclass(frozen=True)
class Disclosure:
    """One field of one method's replies, as its reader received it.

    Args:
        method: the client method.
        field: of the method's reply.
        verb: through which the reply was sent.
        reader: "server", "lps" (the client's local parameter server) or "client" (only other
            clients can open it).
        mechanism: of the ledger: "exact", "gaussian", "skellam", "free" or "public".
        derived: True if it was computed from earlier releases alone.
        masked: True if a mask covers it.
        central: True if the server that reads it adds its noise.
        protection: of sums, or of pairs; None where single replies are gathered.
        released: where the protection hides single replies, what is told of them: "sums", "matrix"
            (R, sums of pairs of clients) or "labels"; else empty.
        by_authority: True if a key authority opened what the server computed of it.
    """

    method: str
    field: str
    verb: str
    reader: str
    mechanism: str
    derived: bool
    masked: bool
    central: bool
    protection: Protection | None = None
    released: str = ""
    by_authority: bool = False

    @property
    def name(self) -> str:
        """Return the field and its method."""
        return f"{self.field} of {self.method}"

    @property
    def summed(self) -> bool:
        """Return whether its reader reads sums of it only, over several clients each."""
        return self.released == SUMS

    @property
    def paired(self) -> bool:
        """Return whether its reader reads sums of pairs of clients only."""
        return self.released == MATRIX

    @property
    def noised(self) -> bool:
        """Return whether its reader sees it with noise only."""
        return self.mechanism in NOISY and not self.central

    @property
    def in_exact_sums(self) -> bool:
        """Return whether one client's numbers may stand in sums of it as they are."""
        return self.summed and self.mechanism not in NOISY and self.mechanism not in COSTLESS

    def covered(self, numbers: str) -> str:
        """Return what covers numbers that one client alone moves, where they are not exact.

        Args:
            numbers: what of a single client is not read by itself.
        """
        if self.mechanism in NOISY:
            return f"{numbers}: its noise is in every coordinate, also in one that it alone moves"
        return f"{numbers}, {self._noise()}"

    @property
    def plain(self) -> bool:
        """Return whether its reader sees the exact values.

        These are neither masked nor noised, nor computed from values that were.
        """
        if self.masked or self.noised or self.summed or self.released == LABELS:
            return False
        return self.mechanism not in COSTLESS

    @classmethod
    def read(cls, field: Mapping[str, Any]) -> Disclosure:
        """Return a disclosure that result.json has.

        Args:
            field: an entry of `fields`; older runs have no entries of newer protections.
        """
        names = ("method", "field", "verb", "reader", "mechanism", "derived", "masked", "central")
        released = str(field.get("encrypted", ""))
        if field["summed"]:
            released = SUMS
        elif field.get("paired"):
            released = MATRIX
        entries = {name: field[name] for name in names}
        return cls(**entries, released=released, by_authority=bool(field.get("encrypted")))

    def form(self, masks: str) -> str:
        """Return how its reader has it, for a table.

        Args:
            masks: names of the run's masks.
        """
        forms = []
        if self.summed:
            forms.append("in secure sums only")
        elif self.by_authority:
            forms.append(f"encrypted; the key authority releases {self.released}")
        elif self.paired:
            forms.append("in sums of two clients only")
        if self.reader == CLIENT:
            forms.append("sealed from the server")
        if self.masked:
            forms.append(f"under the {masks}")
        if self.derived or self.mechanism in NOISY:
            forms.append(self._noise())
        return ", ".join(forms) or "as it is"

    def sentence(self, shows: str) -> str:
        """Return what the reader saw of it, in words.

        Args:
            shows: what the run's mask leaves visible.
        """
        senders = "every client"
        if self.reader == "lps":
            senders = "each of its clients"
        protection = self._noise()
        reply = f"{self.field} of {senders} in every {self.method} call, {protection}"
        if self.protection is not None and self.released:
            return self.protection.read(reply, self.released)
        if self.reader == CLIENT:
            return f"{reply}, sealed"
        if self.masked:
            form = f"{reply}: {shows}"
        elif self.noised:
            form = f"{reply}, unmasked"
        else:
            form = f"{reply}, {IN_CLEAR}"
        if self.protection is None:
            return form
        return self.protection.read(form, self.released)

    def as_json(self) -> Field:
        """Return the field as result.json has it."""
        return {
            "method": self.method,
            "field": self.field,
            "verb": self.verb,
            "reader": self.reader,
            "mechanism": self.mechanism,
            "derived": self.derived,
            "masked": self.masked,
            "central": self.central,
            "summed": self.summed,
            "paired": self.paired,
            "encrypted": self.released if self.by_authority else "",
        }

    def _noise(self) -> str:
        """Return in words how noise protects it."""
        if self.derived:
            return "computed only from what had left clients before"
        if self.mechanism == "free":
            return "computed from other releases, noised and priced with one, or public"
        if self.mechanism == "public":
            return "declared public by its protocol"
        if self.mechanism == "exact":
            return "without noise"
        if self.central:
            return "clipped, before the server adds its noise"
        if self.mechanism == "skellam":
            return "with noise of which each client adds a share"
        return "with noise"


def protections(privacy: Privacy) -> list[str]:
    """Return a sentence for each protection of a run, or one that there is none.

    Args:
        privacy: `privacy` of result.json.
    """
    disclosed = [Disclosure.read(field) for field in privacy["fields"]]
    sentences = [MASKED.format(kind=mask["kind"]) for mask in privacy["masks"]]
    if any(field.by_authority for field in disclosed):
        sentences.append(ENCRYPTED)
    if any(field.summed for field in disclosed):
        sentences.append(SUMMED)
    if any(row["noise_multiplier"] for row in privacy["releases"]):
        sentences.append(NOISED.format(placement=privacy["placement"]))
    if any(field.paired for field in disclosed):
        sentences.append(PADDED)
    if any(field.reader == CLIENT for field in disclosed):
        sentences.append(SEALED_FIELDS)
    return sentences or [BARE]


def authority_view(fitted: FittedRun, disclosed: Sequence[Disclosure]) -> list[str]:
    """Return what the key authority saw, and what the protection rests on; empty without one.

    Args:
        fitted: the result of the run.
        disclosed: all disclosures of the run.
    """
    protection: PairProtection = fitted.method.pairs.protection
    return protection.authority_view(_names(field for field in disclosed if field.by_authority))


def disclosures(fitted: FittedRun) -> list[Disclosure]:
    """Return every private field of every reply of a run, in the order of the first such reply.

    Args:
        fitted: the result of the run.
    """
    config = fitted.kept_.learned.config
    protocol = fitted.method
    pipeline = Deployment(protocol, config).pipeline()
    central = fitted.method.privacy.per_client and config["placement"] == "central"
    disclosed: dict[Disclosure, None] = {}  # a set that keeps its order
    for event in fitted.ledger_.events:
        for name in event.fields:
            field = _disclosure(fitted, pipeline, event, name, central)
            disclosed[field] = None
    return list(disclosed)


def _disclosure(
    fitted: FittedRun, pipeline: Pipeline, event: Event, name: str, central: bool
) -> Disclosure:
    """Return one field of an event, with the protection that its method declares.

    Args:
        fitted: the result of the run.
        pipeline: of the run's clients.
        event: of the ledger.
        name: of the field.
        central: True if the server adds the noise of what clients clip.
    """
    protocol = fitted.method
    release = release_of(getattr(fitted.method.client, event.method))
    clipped = name in release.through and pipeline.of(name).clips
    sealed = pipeline.seal is not None and name in release.sealed
    masked = False
    if name in release.through and not sealed:
        stages = pipeline.of(name).stages
        masked = any(stage.kind is Kind.MASK for stage in stages)
    # only clients can open what is sealed, whoever relays it
    reader = CLIENT if sealed else event.reader
    protection = _protection(protocol, event.verb)
    return Disclosure(
        method=event.method,
        field=name,
        verb=event.verb,
        reader=reader,
        mechanism=event.mechanism,
        derived=release.derived,
        masked=masked,
        central=central and clipped and event.mechanism == "gaussian",
        protection=protection,
        released=_released(protocol, event.verb),
        by_authority=event.verb == PAIRS and protocol.pairs.by_authority,
    )


def _protection(protocol: Method, verb: str) -> Protection | None:
    """Return the protection of the replies of a verb; None where single replies are gathered."""
    if verb == SUM:
        of_sums: Protection = protocol.sums.protection
        return of_sums
    if verb == PAIRS:
        of_pairs: Protection = protocol.pairs.protection
        return of_pairs
    return None


def _released(protocol: Method, verb: str) -> str:
    """Return what is told of the replies of a verb where single ones are hidden; else nothing."""
    if verb == SUM and protocol.sums.hide_replies:
        return SUMS
    if verb == PAIRS and protocol.pairs.hide_rows:
        return MATRIX if protocol.pairs.show_sums else LABELS
    return ""


def unseen(fitted: FittedRun, disclosed: Sequence[Disclosure]) -> list[str]:
    """Return what the server did not see, as far as it follows from the disclosures.

    Args:
        fitted: the result of the run.
        disclosed: all disclosures of the run.
    """
    by_server = [
        field
        for field in disclosed
        if field.reader == "server" and field.released not in (SUMS, LABELS)
    ]
    names_read = {field.name for field in by_server}
    paired = [field for field in by_server if field.paired]
    # a field that the server read in another call is not hidden from it
    unread = [field for field in disclosed if field.name not in names_read]
    hidden = [_hidden_from_server(fitted, field) for field in (*paired, *unread)]
    if not by_server and any(field.summed or field.by_authority for field in disclosed):
        return hidden
    if not by_server:
        return ["anything that depends on a client's data", *hidden]
    noised = _names(field for field in by_server if field.noised)
    if noised:
        hidden.append(f"{noised} without noise")
    if any(event.mechanism == "dp-sgd" for event in fitted.ledger_.events):
        hidden.append("what clients' training would have led to without its noise")
    masked = _names(field for field in by_server if field.masked)
    # a part of the model that is sent in the clear may show where the mask put the rest
    if masked and not fitted.method.client.clear:
        hidden.append(f"{fitted.mask_info().hides} in {masked}")
    return hidden or ["nothing is hidden from it: no mask, seal or noise covers what it read"]


def over_rounds(fitted: FittedRun) -> OverRounds:
    """Return what secure sums tell over all rounds: the clients whose rows can be solved for.

    These are the clients whose unit vector is in the row space of the 0/1 matrix of which clients
    were in which sum. Noise, and rows that change from round to round, blur what is solved for;
    the sums of whole cohorts can be solved for in any case.

    Args:
        fitted: the result of the run.
    """
    config = fitted.kept_.learned.config
    clients = int(config["clients"])
    space = RowSpace(clients, fitted.kept_.learned.network.sum_lists)
    solvable = len(space.solvable)
    sentence = (
        f"{solvable} of {clients} clients can be solved for from sums over rounds (independent "
        f"lists of clients: {space.rank}, computed exactly modulo 2^31 - 1)"
    )
    if solvable:
        sentence += (
            ": by linear combinations of sums over other clients a server reads each one's row, "
            "as far as it is the same in every round, and so its cluster or labels where no noise "
            "covers them"
        )
    elif config["cohort_size"] != 0:
        sentence += ": what remains are sums over whole cohorts, which tell their members' average"
    return {"sentence": sentence, "rank": space.rank, "solvable": solvable}


def unprotected(disclosed: Sequence[Disclosure]) -> list[str]:
    """Return what the server read without mask or noise, from which a client's data may follow.

    Args:
        disclosed: all disclosures of the run.
    """
    by_server = [field for field in disclosed if field.reader == "server"]
    plain = _names(field for field in by_server if field.plain and not field.paired)
    paired = _names(field for field in by_server if field.plain and field.paired)
    sentences = []
    if plain:
        sentences.append(
            f"{plain} went without mask or noise: a client's data, or much of them, may follow"
        )
    if paired:
        sentences.append(
            f"the sums of pairs of {paired} went without noise: each tells either part to within "
            "half the difference of the two, and all of it to a server that knows the other"
        )
    return sentences


def figures_of(fitted: FittedRun, field: Disclosure) -> FieldOccupancy | None:
    """Return how many members moved what of a field of sums; None where nobody counted.

    Args:
        fitted: the result of the run.
        field: of the run's disclosures.
    """
    occupancy = fitted.kept_.learned.occupancy
    return None if occupancy is None else occupancy.of(field.method, field.field)


def mixed(fitted: FittedRun, field: Disclosure) -> bool:
    """Return whether a mask that mixes coordinates covers a field.

    Args:
        fitted: the result of the run.
        field: of the run's disclosures.
    """
    return field.masked and fitted.method.mask not in ENTRYWISE


def _hidden_from_server(fitted: FittedRun, field: Disclosure) -> str:
    """Return what the server did not see of a field that it did not read.

    Args:
        fitted: the result of the run.
        field: of the run's disclosures.
    """
    if field.protection is not None and field.released:
        hidden = field.protection.unseen(field.name, field.released)
        if field.in_exact_sums:
            return hidden_in(hidden, figures_of(fitted, field), mixed(fitted, field))
        if field.summed:
            return field.covered(hidden)
        return hidden
    if field.reader == CLIENT:
        return f"{field.name}, which is sealed for other clients"
    return f"{field.name}, which only the client's local parameter server reads"


def _names(fields: Iterable[Disclosure]) -> str:
    """Return the names of some disclosures in their order, each once."""
    names = dict.fromkeys(field.name for field in fields)
    return ", ".join(names)


def free(disclosed: Sequence[Disclosure], rows: Sequence[Row]) -> list[str]:
    """Return why releases that the ledger has for free cost nothing.

    Args:
        disclosed: all disclosures of the run.
        rows: the ledger's summary.
    """
    derived = {field.name for field in disclosed if field.derived}
    reasons = []
    for row in rows:
        if row.mechanism != "free":
            continue
        name = f"{row.field} of {row.method}"
        source = (
            "computed from other releases or from training with noise, noised and priced with "
            "another field, or public"
        )
        if name in derived:
            source = "computed only from what had left clients before"
        # post-processing: a function of releases costs no more than these
        count = times(row.count)
        reasons.append(f"{name}, {count}: {source}, so ε does not grow by it")
    return reasons


def uncovered(fitted: FittedRun) -> list[str]:
    """Return a sentence for everything that the run recorded and that ε does not cover.

    Each begins with the file that contains it.

    Args:
        fitted: the result of the run.
    """
    learned = fitted.kept_.learned
    if fitted.kept_.of_server:
        return _uncovered_at_server(fitted)
    source = f"{run_secret.FILE}: the secret"
    if learned.settings.keys_from_seed:
        source = f"config.json, {LEARNED}: the seed"
    return [
        *_observed(fitted),
        *_transcript(fitted),
        *_models_without_noise(fitted),
        *_own_labels(fitted),
        *_sample_counts(learned),
        f"{source} from which keys, masks and noise of this run follow: for its owner alone",
        "config.json: a digest of all clients' data, by which a guess of all of them can be "
        "checked",
        f"{CLIENTS}: every client's model, without noise where it was trained alone, its keys, and "
        "what its model says of its test samples: for its owner alone",
        f"{LAST}/: the same of clients after the last round, from which more rounds go on: for its "
        "owner alone",
    ]


def _uncovered_at_server(fitted: FittedRun) -> list[str]:
    """Return the sentences on what a server recorded, whose clients are nodes elsewhere."""
    key = []
    if fitted.kept_.key is not None:
        key = [f"{run_secret.FILE}: the server's key, from which its noise follows: for it alone"]
    score_sentences = []
    if not np.isnan(fitted.scores_).all():
        metric = fitted.metric_
        score_sentences = [
            f"result.json, {LEARNED}: {metric} that clients told of their own test samples when "
            "the run had ended, without noise"
        ]
    return [*_transcript(fitted), *score_sentences, *_sample_counts(fitted.kept_.learned), *key]


def _observed(fitted: FittedRun) -> list[str]:
    """Return what the observer computed from test samples, training data and true clusters.

    Args:
        fitted: the result of the run.
    """
    metric = fitted.metric_
    observed = []
    if not np.isnan(fitted.scores_).all():
        files = f"result.json, history.jsonl, {LEARNED} and {metric}.png"
        scores = f"{files}: {metric} on clients' own test samples, without noise"
        if fitted.kept_.learned.baselines:
            scores += ", beside that of an answer by their training targets alone"
        # these models, or layers of them, have no noise either
        training = fitted.method.training
        if fitted.kept_.learned.local or training.tune_rounds or training.local_layers:
            scores += ", also of models that were trained alone"
        observed.append(scores)
    if fitted.agreement_ is not None:
        observed.append(
            "result.json, history.jsonl and pictures: the true clusters and agreement with them, "
            "which no server knows"
        )
    keys = _observed_keys(fitted)
    if keys:
        source = "made of clients' training data or true clusters, without noise"
        observed.append(f"history.jsonl and pictures: {', '.join(keys)}, {source}")
    return observed


def _models_without_noise(fitted: FittedRun) -> list[str]:
    """Return a sentence on the models in the results that one client trained alone, if any."""
    labels = _shown_alone(fitted)
    if not labels:
        return []
    clusters = enumerated("cluster", labels)
    return [f"{MODELS}: the model of {clusters}, which one client trained alone, without noise"]


def _own_labels(fitted: FittedRun) -> list[str]:
    """Return a sentence on the labels of clients that assign themselves, if they do."""
    if fitted.method.observer.server_knows_labels:
        return []
    files = f"result.json, history.jsonl, {LEARNED}, {MODELS} and pictures"
    return [
        f"{files}: each client's cluster, or what follows from it, which the client alone knows, "
        "without noise"
    ]


def _sample_counts(learned: FittedSummary) -> list[str]:
    """Return a sentence on clients' numbers of samples, where a file has them."""
    files = []
    if "sizes" in learned.config or learned.config.get("signature_sizes"):
        files.append("config.json")
    if learned.network.ledger.samples:
        files.append(LEARNED)
    if not files:
        return []
    return [f"{', '.join(files)}: each client's number of samples"]


def _shown_alone(fitted: FittedRun) -> list[int]:
    """Return the clusters whose model in the results one client trained alone, without noise.

    Args:
        fitted: the result of the run.

    Returns:
        Their labels, ascending.
    """
    learned = fitted.kept_.learned
    # such models stay with their clients, or the protocol has a shared model of each cluster
    noisy = adds_noise(fitted.method, learned.config)
    if noisy or SHARED in fitted.kept_.clients.extra:
        return []
    # the results show each cluster by the model of its first client
    first_client: dict[int, int] = {}
    for client, label in enumerate(learned.labels):
        first_client.setdefault(label, client)
    trained_alone = []
    for label, client in first_client.items():
        if client in learned.local:
            trained_alone.append(label)
    return sorted(trained_alone)


def _observed_keys(fitted: FittedRun) -> list[str]:
    """Return the keys of the history that the observer computed from clients' data or the truth.

    Args:
        fitted: the result of the run.

    Returns:
        The keys in alphabetical order, without the metric and ari, which have their own sentences.
    """
    keys: set[str] = set()
    for line in fitted.history_:
        keys.update(name for name, value in line.items() if value is not None)
    return sorted(name for name in keys if name == "gap" or name.endswith("_real"))


def _transcript(fitted: FittedRun) -> list[str]:
    """Return what a transcript shows beyond replies with their noise.

    Args:
        fitted: the result of the run.
    """
    learned = fitted.kept_.learned
    mode = learned.settings.transcript
    if mode == "none":
        return []
    if mode == "sizes":
        return ["transcript/: who was asked and replied in which round, and how many bytes"]
    # frames are recorded as they arrive, before a trusted server adds its noise
    if learned.config["placement"] == "central" and fitted.method.privacy.per_client:
        raw = "the clipped updates that a trusted server reads before it adds noise"
        return [f"transcript/: {raw}, so that no epsilon covers it; it is for its owner alone"]
    return [
        "transcript/: every frame as its reader had it; epsilon covers replies, and not who was "
        "asked and replied in which round"
    ]
