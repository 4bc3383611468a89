"""Record small runs of every protocol under every protection, and compare them with earlier ones.

python -m benchmarks.golden --out FILE        before a change of structure
python -m benchmarks.golden --compare FILE    after it, on the same machine
python -m benchmarks.golden --reference       on any machine

A case is a protocol with one way to protect it that it works with. Its record has the labels, a
digest of the models, the scores, ε, frame bytes by message, and the tensor bytes of every call. Of
the ways that a protocol refuses, one of each reason is a case, whose record is the sentence. A
change of structure leaves all of it as it is, to the last bit. A way that is refused from now on is
missing, and one that is not is new, so either differs. Frames contain the names of messages'
fields, so a new name changes their lengths, and nothing else.

Noise and keys follow the configuration's hash, which contains names of hyper-parameters. Noise also
follows the names of messages' fields, and dropouts those of methods. A record would change with
these names. So the hash is the same for every run here, and noise and dropouts follow the call's
number alone.

Processors round sums of floats differently, so digests and scores of two machines do not compare.
The reference, `benchmarks/results/golden.csv`, has what does: labels, numbers of calls, releases
and bytes, which are counted, ε, which follows from the counts, and the norm of all models to three
digits. Noise follows the bits of the row that it is added to, so another rounding draws other
noise: of a run with noise the reference has ε alone, which is compared where each client made as
many noised releases. `--write-reference` writes it anew, where a change of numbers is meant.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import hashlib
import json
import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.grid import script_parser
from benchmarks.table import RESULTS
from securecluster import Federation, LabelSwap
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.privacy.dp.ledger import Event
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.protocols import (
    CFL,
    CFLGP,
    FLHC,
    FLUX,
    IFCA,
    MRMTL,
    NSIM,
    PACFL,
    RDPCFL,
    SRFCA,
    CLoVE,
    FedAvg,
    FineTune,
    Hidden,
    Local,
    LocalKMeans,
    OneShot,
    RandomClusters,
    Settings,
    Signature,
)
from securecluster.protocols.nsim import synthetic_users
from securecluster.protocols.nsim.pair_network import PairNetworkConfig
from securecluster.protocols.nsim.similarity_model import Fitted, fit

Parameters = Mapping[str, Any]
Record = dict[str, Any]

REFERENCE = RESULTS / "golden.csv"
SMALL: Parameters = {"rounds": 4, "epochs": 1, "model": "mlp-32"}
CLIENTS = 6
IMAGE = (1, 8, 8)  # shape of a digit


def walks(form: Any, users: int, draw: np.random.Generator) -> list[Any]:
    """Return synthetic users for NSIM, whose data are images of digits.

    Args:
        form: of the data, unused.
        users: how many.
        draw: of samples and labels.
    """
    synthetic = []
    for k in range(users):
        images = draw.random((20, *IMAGE)).astype(np.float32)
        labels = draw.integers(k % 9, 10, 20)
        synthetic.append((images, labels))
    return synthetic


# bounds that updates keep in every round (Sattler et al. 2019, eq. 39), so CFL splits soon
SPLIT: Parameters = {"criterion": "absolute", "eps1": 100.0, "eps2": 1e-6, "gamma_max": 0.0}
SYNTHETIC: Parameters = {
    "rounds": 3,
    "local_rounds": 1,
    "synthetic": 8,
    "walks": walks,
    "radius": 0.0,
    "layer": "last",
    "eps": 1.0,
}
VARIANTS: Mapping[str, tuple[type, Parameters]] = {
    "cfl": (CFL, SPLIT),
    "cfl relative": (CFL, {"rounds": 8}),
    "cfl fallback": (CFL, {**SPLIT, "fallback": 0.3}),
    "cfl gradient": (CFL, {**SPLIT, "similarity": "gradient"}),
    "cfl sketch": (CFL, {**SPLIT, "sketch": 64, "clusterer": "average"}),
    "flhc": (FLHC, {"pre_rounds": 1}),
    "flhc compressed": (FLHC, {"pre_rounds": 1, "sketch": 64, "compress": "8bit"}),
    "srfca loss": (SRFCA, {"local_rounds": 1, "refine": 1}),
    "srfca l2": (SRFCA, {"local_rounds": 1, "refine": 1, "distance": "l2", "trim": 0.2}),
    "oneshot": (OneShot, {"tasks": 2}),
    "oneshot hierarchical": (OneShot, {"tasks": 2, "gps_every": 2}),
    "nsim": (NSIM, SYNTHETIC),
    "ifca": (IFCA, {"k": 2, "starts": 2, "start_rounds": 1, "rounds": 5}),
    "signature": (Signature, {}),
    "clove": (CLoVE, {"k": 2}),
    "cflgp": (CFLGP, {"k": 2}),
    "pacfl": (PACFL, {}),
    "rdpcfl": (RDPCFL, {"k": 2}),
    "flux": (FLUX, {"pre_rounds": 1, "k": 2}),
    "hidden": (Hidden, {"k": 2, "aggregation": "plain"}),
    "local-kmeans": (LocalKMeans, {"k": 2, "local_rounds": 1}),
    "random": (RandomClusters, {"k": 2}),
    "fedavg": (FedAvg, {"participation": 0.6}),
    "finetune": (FineTune, {"tune_rounds": 1}),
    "local": (Local, {}),
    "mrmtl": (MRMTL, {}),
}
NOISE: Parameters = {"clip": 1.0, "noise": 0.7, "dp_unit": "client"}
NOISED_CLIENTS: Parameters = {"mask": "permutation", **NOISE}
SECAGG: Parameters = {"mask": "none", "aggregation": "secagg"}
# of every variant
MASKS_AND_NOISE: Mapping[str, Parameters] = {
    "plain": {"mask": "none"},
    "masked": {"mask": "permutation"},
    "rotated": {"mask": "rotation"},
    "noised clients": NOISED_CLIENTS,
    "noised centrally": {**NOISED_CLIENTS, "placement": "central"},
    "noised examples": {**NOISED_CLIENTS, "dp_unit": "example"},
}
# of one variant of each protocol, or of two that other protections work with
OTHER_PROTECTIONS: Mapping[str, Parameters] = {
    "secagg": SECAGG,
    "secagg rotated": {**SECAGG, "mask": "rotation"},
    "secagg noised clients": {**SECAGG, **NOISE, "placement": "local"},
    "secagg noised in shares": {**SECAGG, **NOISE, "placement": "distributed"},
    "pads": {"mask": "none", "relevance": "pads"},
    "pads and secagg": {**SECAGG, "relevance": "pads"},
    "ckks pairs": {"mask": "none", "relevance": "ckks"},
    "sealed": {"mask": "permutation", "sealed": True},
    "signatures": {"mask": "none", "signature": "gradient"},
    "signatures masked": {"mask": "rotation", "signature": "gradient"},
    "signatures noised": {**NOISED_CLIENTS, "signature": "gradient", "signature_noise": 0.7},
    "signatures and secagg": {**SECAGG, "signature": "gradient"},
    "compressed": {"mask": "permutation", "compress": "8bit"},
    "momentum kept": {"mask": "permutation", "momentum": 0.5, "keep_momentum": True},
}
WIDELY_PROTECTED = (
    "cfl relative",
    "cfl sketch",
    "flhc",
    "srfca loss",
    "srfca l2",
    "oneshot",
    "nsim",
    "ifca",
    "signature",
    "clove",
    "cflgp",
    "pacfl",
    "rdpcfl",
    "flux",
    "hidden",
    "local-kmeans",
    "random",
    "fedavg",
    "finetune",
    "local",
    "mrmtl",
)
# of the cases that a protocol refuses: one of each reason
REFUSED = (
    "cfl relative, secagg",  # single updates are compared
    "cfl relative, secagg noised in shares",  # a client also sends something by itself
    "cfl relative, pads",  # no reply in pairs
    "cfl sketch, signatures",  # sketches are of updates
    "srfca loss, pads",  # pairs that leave again in sums
    "srfca loss, momentum kept",  # momentum of another model
    "srfca l2, rotated",  # coordinates that are trimmed apart
    "srfca l2, secagg",  # single models are compared
    "srfca l2, pads",  # pairs are of losses
    "srfca l2, sealed",  # weights are compared
    "ifca, secagg noised clients",  # counts without noise
    "clove, secagg",  # clusters anew in every round
    "rdpcfl, secagg",
    "pacfl, signatures",  # signatures of its own
    "hidden, noised examples",  # sums protect whole clients
)

# of digits' numbers, or the bits of these: the task of a variant, with the way that protects it
TASKS: Sequence[tuple[str, str, str]] = (
    ("fedavg", "plain", "regression"),
    ("cfl", "masked", "regression:huber"),
    ("srfca loss", "masked", "regression:absolute"),
    ("ifca", "noised clients", "regression"),
    ("fedavg", "noised examples", "regression"),
    ("fedavg", "plain", "multilabel"),
)
# a variant with options of local training, and the way that protects it
TRAINING: Mapping[str, Parameters] = {
    "class weights": {"class_weight": [f"{digit}={1 + digit / 9}" for digit in range(10)]},
    "terms and schedule": {"lr_schedule": "cosine", "proximal": 0.1, "weight_decay": 0.01},
    "local layers": {"local_layers": ["3"], "accumulate": 2},
}
TRAINED: Sequence[tuple[str, str, str]] = (
    ("fedavg", "plain", "class weights"),
    ("fedavg", "noised examples", "class weights"),
    ("cfl", "masked", "terms and schedule"),
    ("ifca", "noised clients", "terms and schedule"),
    ("flhc", "masked", "local layers"),
    ("fedavg", "noised clients", "local layers"),
)
LABELS = "labels"  # the task of the other cases
NOISED = "noised"  # in the names of ways with noise


@dataclass(frozen=True)
class Case:
    """One protocol with one way to protect it.

    Args:
        variant: a name of `VARIANTS`.
        way: what protects it.
        protection: hyper-parameters of the way.
        task: what clients learn.
    """

    variant: str
    way: str
    protection: Parameters
    task: str = LABELS

    @property
    def name(self) -> str:
        """Return the name in records and in the reference."""
        task = "" if self.task == LABELS else f", {self.task}"
        return f"{self.variant}, {self.way}{task}"

    @property
    def params(self) -> dict[str, Any]:
        """Return the protocol's hyper-parameters."""
        protocol, variant_params = VARIANTS[self.variant]
        params = {**SMALL, **variant_params, **self.protection}
        # Gram matrices, which one-shot clustering releases, have a noise multiplier of their own.
        if "noise" in self.protection and "gram_noise" in _options(protocol):
            params["gram_noise"] = 0.7
        return params

    @property
    def has_options(self) -> bool:
        """Return whether the protocol has all options of the way."""
        protocol, _ = VARIANTS[self.variant]
        return _options(protocol).issuperset(self.params)

    def build(self) -> Any:
        """Return the protocol.

        Raises:
            UsageError: it does not work with the way.
        """
        protocol, _ = VARIANTS[self.variant]
        return protocol(**self.params)

    @property
    def refusal(self) -> str | None:
        """Return why the protocol does not work with the way; None where it does."""
        try:
            self.build().check(CLIENTS)
        except UsageError as error:
            return str(error)
        return None


def _options(protocol: type) -> set[str]:
    """Return the names of a protocol's hyper-parameters."""
    return {option.name for option in dataclasses.fields(protocol)}


def cases() -> Iterator[Case]:
    """Yield every case: what works, and of what is refused one of each reason."""
    for case in combinations():
        if case.refusal is None or case.name in REFUSED:
            yield case
    for variant, way, task in TASKS:
        yield Case(variant, way, MASKS_AND_NOISE[way], task)
    for variant, way, training in TRAINED:
        protection = {**MASKS_AND_NOISE[way], **TRAINING[training]}
        yield Case(variant, f"{way}, {training}", protection)


def combinations() -> Iterator[Case]:
    """Yield every variant with every way that it has the options of."""
    for variant in VARIANTS:
        ways = dict(MASKS_AND_NOISE)
        if variant in WIDELY_PROTECTED:
            ways.update(OTHER_PROTECTIONS)
        for way, protection in ways.items():
            case = Case(variant, way, protection)
            if case.has_options:
                yield case


def record(fitted: Any) -> Record:
    """Return the results of a run as JSON values.

    Args:
        fitted: a protocol whose run recorded a full transcript.
    """
    models = fitted.client_models_.values.cpu().numpy()
    ledger = fitted.ledger_
    calls = []
    for position in range(len(fitted.transcript_.entries)):
        call, answer = fitted.transcript_.content(position)
        query_bytes = _tensor_bytes(call.query)
        reply_bytes = _tensor_bytes(answer.reply)
        calls.append([len(call.to), query_bytes, reply_bytes])
    sent = fitted.bytes_
    return {
        "labels": [int(label) for label in fitted.labels_],
        # equal digests mean equal bits
        "models": hashlib.sha256(models.tobytes()).hexdigest(),
        "norm": float(np.linalg.norm(models.astype(np.float64))),
        "scores": [float(score) for score in fitted.scores_],
        "epsilon": float(ledger.epsilon),
        "events": len(ledger.events),
        "noised": _noised_events(ledger.events),
        "calls": calls,
        "bytes": {direction: sent[direction] for direction in ("up", "down", "servers")},
        "frames": sent["by_message"],
    }


def _noised_events(events: Sequence[Event]) -> list[int]:
    """Return how many events with noise each client has, the largest number first."""
    noised = [event for event in events if event.noise_multiplier is not None]
    counts = Counter(client for event in noised for client in event.ids)
    return sorted(counts.values(), reverse=True)


def _tensor_bytes(value: Any) -> int:
    """Return the bytes of all tensors in a message.

    Args:
        value: a message, one of its fields, or an item of a field.
    """
    if isinstance(value, torch.Tensor):
        return int(value.numel() * value.element_size())
    items: list[Any] = []
    if dataclasses.is_dataclass(value):
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        items = list(value.values())
    elif isinstance(value, tuple | list):
        items = list(value)
    return sum(_tensor_bytes(item) for item in items)


def measure(chosen: Sequence[Case]) -> dict[str, Record]:
    """Return the records of some cases, by name.

    Args:
        chosen: the cases.
    """
    clients = {task: federation(task) for task in {case.task for case in chosen}}
    settings = Settings(transcript="full", dropout=0.1, keys_from_seed=True)
    _leave_names_out_of_draws()
    _train_pair_networks_briefly()
    records: dict[str, Record] = {}
    for case in chosen:
        try:
            fitted = case.build().fit(clients[case.task], settings)
        except UsageError as error:
            records[case.name] = {"refused": str(error)}
        else:
            records[case.name] = record(fitted)
    return records


def federation(task: str) -> Federation:
    """Return the clients and what they learn of digits.

    Args:
        task: `LABELS`, or one of `TASKS`.
    """
    digits = Federation.simulate(
        "digits", scenario=LabelSwap(2), clients=CLIENTS, samples=40, seed=0
    )
    if task == LABELS:
        return digits

    def targets(labels: Any) -> Any:
        bits = labels[:, None] >> np.arange(4) & 1
        return bits if task == "multilabel" else labels / 9

    names = digits.names
    shards = digits.shards
    train = {name: (s.x, targets(s.y)) for name, s in zip(names, shards, strict=True)}
    test = {name: (s.x_test, targets(s.y_test)) for name, s in zip(names, shards, strict=True)}
    return Federation.from_arrays(train, test=test, objective=task, seed=0)


def _leave_names_out_of_draws() -> None:
    """Make draws independent of names in the code, for the rest of this process.

    The configuration's hash is fixed, noise is drawn without the names of fields, and dropouts
    without those of methods.
    """
    # every module that imported the function has a reference of its own
    for name, module in list(sys.modules.items()):
        if name.startswith("securecluster") and hasattr(module, "config_hash"):
            module.config_hash = lambda config: "0" * 32  # type: ignore[attr-defined]
    key = Randomness.key

    # the classes themselves are changed, since every run makes instances of its own
    def without_method(self: Randomness, *path: str | int) -> bytes:
        # the fourth item of a dropout's path is the method's name
        if path[2:3] == ("dropout",):
            return key(self, *path[:3], *path[4:])
        return key(self, *path)

    Randomness.key = without_method  # type: ignore[method-assign]
    seed = NoiseStreams.seed

    def without_field(
        self: NoiseStreams, client: int, purpose: str, step: int, about: bytes = b""
    ) -> bytes:
        return seed(self, client, "", step, about)

    NoiseStreams.seed = without_field  # type: ignore[method-assign]


def _train_pair_networks_briefly() -> None:
    """Let NSIM's estimator make three steps, for the rest of this process.

    Its usual training takes longer than all other runs together.
    """

    def fit_briefly(
        rows: Any, true: Any, draws: Any, grid: Any = None, networks: int = 1
    ) -> Fitted:
        return fit(rows, true, draws, grid=(PairNetworkConfig(steps=3),), networks=1)

    synthetic_users.fit = fit_briefly  # type: ignore[attr-defined, assignment]


def differences(before: Mapping[str, Record], after: Mapping[str, Record]) -> list[str]:
    """Return a line for each case whose records differ.

    Args:
        before: the earlier record of each case, by name.
        after: the later record of each case, by name.
    """
    lines = []
    for name in _in_order(before, after):
        if name not in before or name not in after:
            lines.append(f"{name}: in one record only")
            continue
        earlier = before[name]
        later = after[name]
        changed = [
            column
            for column in _in_order(earlier, later)
            if earlier.get(column) != later.get(column)
        ]
        if changed:
            listed = ", ".join(changed)
            lines.append(f"{name}: {listed}")
    return lines


def _in_order(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the keys of two mappings, those of the first one first."""
    return list(dict.fromkeys([*before, *after]))


def _equal(text: str, other: str) -> bool:
    """Return whether two values of the reference have the same text."""
    return text == other


def _close(text: str, other: str, tolerance: float) -> bool:
    """Return whether two numbers of the reference differ by at most a relative tolerance."""
    if not text or not other:
        return text == other
    return math.isclose(float(text), float(other), rel_tol=tolerance)


# columns of the reference, and when two values are the same on two machines
COLUMNS: Mapping[str, Callable[[str, str], bool]] = {
    "case": _equal,
    "labels": _equal,
    "calls": _equal,
    "events": _equal,
    "up": _equal,
    "down": _equal,
    "servers": _equal,
    # the search for ε ends within a relative 1e-9
    "epsilon": partial(_close, tolerance=1e-8),
    # many times the rounding of a few steps in float32, and of the grid of encrypted sums
    "norm": partial(_close, tolerance=1e-3),
    "refused": _equal,
}


def facts(name: str, case_record: Record) -> dict[str, str]:
    """Return the line of a case in the reference.

    Args:
        name: of the case.
        case_record: its record.
    """
    line = dict.fromkeys(COLUMNS, "")
    line["case"] = name
    if "refused" in case_record:
        line["refused"] = case_record["refused"]
        return line
    line["epsilon"] = f"{case_record['epsilon']:.9g}"
    if NOISED in name:
        line["events"] = " ".join(map(str, case_record["noised"])) or "0"
        return line
    line["events"] = str(case_record["events"])
    line["labels"] = " ".join(map(str, case_record["labels"]))
    line["calls"] = str(len(case_record["calls"]))
    for direction, count in case_record["bytes"].items():
        line[direction] = str(count)
    line["norm"] = f"{case_record['norm']:.5g}"
    return line


def read_reference(path: Path) -> dict[str, dict[str, str]]:
    """Return the lines of a reference, by case.

    Args:
        path: of the file.
    """
    with path.open(newline="") as stream:
        return {line["case"]: line for line in csv.DictReader(stream)}


def write_reference(path: Path, lines: Sequence[Mapping[str, str]]) -> None:
    """Write the lines of all cases.

    Args:
        path: of the file.
        lines: as `facts` returns them.
    """
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(COLUMNS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def other_facts(
    before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """Return a line for each case that is not as in the reference, with the values that differ.

    Args:
        before: lines of the reference, by case.
        after: lines of this run, by case.
    """
    differing = []
    for name in _in_order(before, after):
        if name not in before or name not in after:
            differing.append(f"{name}: in one of them only")
            continue
        earlier_line = before[name]
        later_line = after[name]
        events = {earlier_line["events"], later_line["events"]}
        # releases follow the clusters, and these the noise; but a run makes some, or makes none
        follows_chance = NOISED in name and len(events) > 1 and not events & {"", "0"}
        changed = []
        for column, same in COLUMNS.items():
            earlier = earlier_line[column]
            later = later_line[column]
            if follows_chance and column in ("events", "epsilon"):
                continue
            if not same(earlier, later):
                changed.append(f"{column} {earlier or '-'} -> {later or '-'}")
        if changed:
            listed = "; ".join(changed)
            differing.append(f"{name}: {listed}")
    return differing


def _command_line(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = script_parser(__doc__)
    parser.add_argument("--out", type=Path, help="file to write all records to")
    parser.add_argument("--compare", type=Path, help="file with records of the same machine")
    parser.add_argument(
        "--reference",
        type=Path,
        nargs="?",
        const=REFERENCE,
        help=f"file with what is equal on all machines ({REFERENCE})",
    )
    parser.add_argument(
        "--write-reference", type=Path, nargs="?", const=REFERENCE, help="write that file anew"
    )
    parser.add_argument("--only", default="", help="run only cases whose names contain this text")
    options = parser.parse_args(argv)
    if not (options.out or options.compare or options.reference or options.write_reference):
        parser.error("give --out, --compare, --reference or --write-reference")
    if options.write_reference and options.only:
        parser.error("a reference has all cases: leave --only out")
    if not any(options.only in case.name for case in cases()):
        parser.error(f"no case has {options.only!r} in its name")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Record or compare, and return the exit status: 1 where anything differs."""
    options = _command_line(argv)
    warnings.simplefilter("ignore")
    # sums of floats depend on the number of threads
    torch.set_num_threads(1)
    chosen = [case for case in cases() if options.only in case.name]
    records = measure(chosen)
    lines = {name: facts(name, case_record) for name, case_record in records.items()}
    refused = sum("refused" in case_record for case_record in records.values())
    seconds = time.process_time()
    print(f"{len(records)} cases, {refused} of them refused; {seconds:.0f} processor seconds")
    changed: list[str] = []
    if options.compare:
        earlier = json.loads(options.compare.read_text())
        earlier = {
            name: case_record for name, case_record in earlier.items() if options.only in name
        }
        changed += differences(earlier, records)
    if options.reference:
        expected = read_reference(options.reference)
        expected = {name: line for name, line in expected.items() if options.only in name}
        changed += other_facts(expected, lines)
    if options.out:
        options.out.write_text(json.dumps(records, indent=1) + "\n")
    if options.write_reference:
        write_reference(options.write_reference, list(lines.values()))
    if options.compare or options.reference:
        print("\n".join(changed) or "nothing differs")
    return int(bool(changed))


if __name__ == "__main__":
    raise SystemExit(main())
