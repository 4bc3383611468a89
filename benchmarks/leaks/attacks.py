"""Measure what every registered attack achieves on protocols, without and with protections.

python -m benchmarks.leaks.attacks [--data digits mnist]
    [--protocols cfl …] [--minutes 60]
python -m benchmarks.leaks.attacks --references

A cell is an attack on one run: a data set, a protocol, a protection and an adversary. Only
combinations that a protocol runs are cells. `signature` has class blocks, and `signature-sketches`
is the same protocol with sketches of gradients. Two protocols are left out: nsim takes positions,
not images, and clients of local release nothing. Audits of ε, which need canaries, are
`benchmarks.leaks.worlds`, and sums over rounds, which need changing members, are
`benchmarks.leaks.sums_over_rounds`. `score` has the 95 % interval `low` to `high`, if any; `chance`
is what the same guess reaches against truths with shuffled subjects, `chance_low` to `chance_high`;
`unprotected` is the score on the run without protection. Attacks that are registered later are
further cells: the same command adds them.

Two scenes keep attacks apart that need different runs. Most attacks read three rounds of 16
clients with 40 samples each, in two clusters that swap labels, with full batches and a softmax
regression. Gradient inversion reads one step of 12 clients with one sample each, of a small network
with sigmoids.

`--references` measures known answers of single attacks instead: DLG on 20 digits, label counts of
one step, what eigenvectors tell, clusters of hidden from two runs, and the bounds of the one-run
audit that its theorem gives.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.grid import as_told, parser_of, read_options
from benchmarks.sheet import DONE, Cell, Row, Sheet, distinct, figure
from benchmarks.table import RESULTS
from securecluster import Dirichlet, Federation, LabelSwap, Pathological
from securecluster.attacks.base import Guess, Scorer, Truth
from securecluster.attacks.dp_audit import one_run_epsilon
from securecluster.attacks.experiments import tapped
from securecluster.attacks.gradient_inversion import DeepLeakage
from securecluster.attacks.hidden_sums import HiddenCluster
from securecluster.attacks.image_quality import ShareRecognised
from securecluster.attacks.label_counts import LabelCounts
from securecluster.attacks.registry import attack_named, attack_names
from securecluster.attacks.scoring import BETTER, CHANCE, UNDECIDED, Score, score
from securecluster.attacks.subspaces import MeanImage, SubspaceComposition, SubspaceMembership
from securecluster.attacks.views import knowledge_of, truth_of, view_of
from securecluster.audits.run_audit import Adversary, finding_of
from securecluster.clustering.metrics import agreement
from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError
from securecluster.protocols import ClusteringProtocol, FedAvg, Hidden, OneShot, Settings
from securecluster.protocols.registry import PROTOCOLS, protocol_class

DATA = ("digits", "mnist")
PLAIN = "plain"
Parameters = dict[str, Any]
PROTECTIONS: dict[str, Parameters] = {
    PLAIN: {},
    "permutation": {"mask": "permutation"},
    "rotation": {"mask": "rotation"},
    "secagg": {"aggregation": "secagg"},
    # clients add it; three rounds cost ε = 9 to 10 for a client's data at δ = 1e-5
    "noise": {"clip": 1.0, "noise": 1.0},
    "example noise": {"clip": 1.0, "target_epsilon": 2.0, "dp_unit": "example"},
}
# protocols for which alone there is a protection
ONLY = {"example noise": ("signature", "signature-sketches")}
# further settings of protocols, each with the name of a column
VARIANTS = {"signature-sketches": "signature"}
# the whole run costs this much for a client's data
PRICED: Parameters = {"noise": 0.0, "target_epsilon": 2.0}
# what the protections need besides in single protocols
ALSO: dict[tuple[str, str], Parameters] = {
    ("oneshot", "secagg"): {"relevance": "pads", "sealed": True},
    ("oneshot", "noise"): {"gram_noise": 1.0},
    # these protect single samples by default, and the others whole clients
    ("pacfl", "noise"): {"gram_noise": 1.0, "dp_unit": "client"},
    ("rdpcfl", "noise"): {"dp_unit": "client"},
    ("srfca", "secagg"): {"relevance": "pads", "sealed": True},
    ("signature", "noise"): {**PRICED, "dp_unit": "client"},
    ("signature-sketches", "noise"): {**PRICED, "dp_unit": "client"},
    ("hidden", "noise"): {**PRICED, "placement": "distributed", "aggregation": "secagg"},
    ("cfl", "secagg"): {"sketch": 64},
    ("flhc", "secagg"): {"sketch": 64},
}
# hyper-parameters that do not protect, of single protocols
OWN: dict[str, Parameters] = {
    "flhc": {"pre_rounds": 1},
    "oneshot": {"tasks": 2, "sealed": False},
    "srfca": {"local_rounds": 1, "refine": 1},
    "ifca": {"k": 2, "starts": 1},
    "pacfl": {"k": 2},
    "clove": {"k": 2},
    "cflgp": {"k": 2},
    "flux": {"pre_rounds": 1, "k": 2},
    "rdpcfl": {"k": 2},
    "local-kmeans": {"k": 2, "local_rounds": 1},
    "random": {"k": 2},
    "finetune": {"tune_rounds": 1},
    "signature": {"k": 2, "signature_blocks": "blocks"},
    "signature-sketches": {"k": 2, "signature_blocks": "plain"},
    "hidden": {"k": 2, "aggregation": "plain"},
}
LEFT_OUT = frozenset({"local", "nsim"})
COMPARED = (*(name for name in PROTOCOLS if name not in LEFT_OUT), *VARIANTS)
SERVER = "server"
# attacks with benchmarks of their own: `worlds` and `sums_over_rounds`
ELSEWHERE = ("dp-audit", "sums-over-rounds")
# attacks that nobody makes without a client's help
COLLUDERS = {"mask-known-plaintext": (0,)}
SETTINGS = Settings(transcript="full", threads=1, keys_from_seed=True)
COLOURS = {BETTER: "#e2a6a0", UNDECIDED: "#eadca6", CHANCE: "#b5d3ac", "": "#efefef"}


@dataclass(frozen=True)
class Scene:
    """Runs that some attacks are made on.

    Args:
        clients: number of clients.
        samples: training samples of each.
        rounds: of the protocol.
        model: its network.
    """

    clients: int
    samples: int
    rounds: int
    model: str


SCENES = {"rounds": Scene(16, 40, 3, "linear"), "one sample": Scene(12, 1, 1, "sigmoids")}


def scene_of(attack: str) -> str:
    """Return the name of the scene that an attack is made on.

    Args:
        attack: its name.
    """
    return "one sample" if attack.startswith("gradient-inversion") else "rounds"


def protocol_of(name: str, protection: str, scene: Scene, shape: tuple[int, ...]) -> Any:
    """Return the protocol of a cell.

    Args:
        name: of the protocol.
        protection: one of `PROTECTIONS`.
        scene: of the attack.
        shape: of a sample.
    """
    model: Any = scene.model
    if scene.model == "sigmoids":
        model = sigmoids(int(np.prod(shape)))
    params: Parameters = {
        "rounds": scene.rounds,
        "epochs": 1,
        "batch_size": scene.samples,
        "model": model,
        "mask": "none",
        **OWN.get(name, {}),
        **PROTECTIONS[protection],
        **ALSO.get((name, protection), {}),
    }
    if "pre_rounds" in params:
        params["pre_rounds"] = min(params["pre_rounds"], scene.rounds - 1)
    return as_told(protocol_class(VARIANTS.get(name, name)), params)


def sigmoids(inputs: int) -> torch.nn.Module:
    """Return a network of one hidden layer of 32 sigmoids, with weights of a fixed generator.

    L-BFGS needs a loss that is smooth in the sample, which ReLU's is not.

    Args:
        inputs: numbers in a sample.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.nn.Linear(inputs, 32)
    outputs = torch.nn.Linear(32, 10)
    network = torch.nn.Sequential(torch.nn.Flatten(), hidden, torch.nn.Sigmoid(), outputs)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.uniform_(-0.3, 0.3, generator=generator)
    return network


@lru_cache(maxsize=2)
def federation_of(data: str, scene_name: str, seed: int) -> Federation:
    """Return the clients of a scene.

    Args:
        data: name of the data set.
        scene_name: one of `SCENES`.
        seed: of the data.
    """
    scene = SCENES[scene_name]
    scenario: Any = Dirichlet(alpha=1.0)
    if scene.samples > 1:
        scenario = Dirichlet(alpha=0.5) + LabelSwap(clusters=2)
    return Federation.simulate(
        data, scenario=scenario, clients=scene.clients, samples=scene.samples, seed=seed
    )


@lru_cache(maxsize=1)
def run_of(data: str, scene_name: str, seed: int, protocol: str, protection: str) -> Any:
    """Return a fitted protocol and its replies before protection.

    Args:
        data: name of the data set.
        scene_name: one of `SCENES`.
        seed: of the data and the run.
        protocol: its name.
        protection: one of `PROTECTIONS`.
    """
    federation = federation_of(data, scene_name, seed)
    made = protocol_of(protocol, protection, SCENES[scene_name], federation.shape)
    return tapped(made, federation, SETTINGS)


@lru_cache
def runs(data: str, scene_name: str, protocol: str, protection: str) -> bool:
    """Return whether a protocol runs with a protection.

    Args:
        data: name of the data set.
        scene_name: one of `SCENES`.
        protocol: its name.
        protection: one of `PROTECTIONS`.
    """
    if protocol not in ONLY.get(protection, (protocol,)):
        return False
    scene = SCENES[scene_name]
    try:
        made: ClusteringProtocol = protocol_of(protocol, protection, scene, (1,))
        made.check(scene.clients)
    except UsageError:
        return False
    return True


def cells(data: Sequence[str], seeds: int = 1, protocols: Sequence[str] = COMPARED) -> list[Cell]:
    """Return all cells, those of one run after each other and a protocol's plain run first.

    Args:
        data: names of data sets.
        seeds: how many, from 0 on.
        protocols: names of protocols.
    """
    grid: list[Cell] = []
    for name in data:
        for seed in range(seeds):
            for scene in SCENES:
                grid += _cells_of_scene(name, seed, scene, protocols)
    return grid


def _cells_of_scene(data: str, seed: int, scene: str, protocols: Sequence[str]) -> list[Cell]:
    """Return the cells of one data set, seed and scene."""
    attacks = []
    for attack in attack_names():
        if scene_of(attack) == scene and not attack.startswith(ELSEWHERE):
            attacks.append(attack)
    grid: list[Cell] = []
    for protocol in protocols:
        for protection in PROTECTIONS:
            if not runs(data, scene, protocol, protection):
                continue
            for attack in attacks:
                grid.append(
                    {
                        "data": data,
                        "scene": scene,
                        "protocol": protocol,
                        "protection": protection,
                        "attack": attack,
                        "seed": seed,
                    }
                )
    return grid


def measure(sheet: Sheet, cell: Cell) -> dict[str, Any]:
    """Attack one run.

    Args:
        sheet: with the cell of the same attack on the plain run.
        cell: one of `cells`.
    """
    attack = attack_named(cell["attack"])
    scene = (cell["data"], cell["scene"], cell["seed"])
    federation = federation_of(*scene)
    fitted, taps = run_of(*scene, cell["protocol"], cell["protection"])
    colluding = COLLUDERS.get(cell["attack"], ())
    names = [SERVER, *(f"client {number}" for number in colluding)]
    adversary = Adversary((SERVER, *colluding), colluding, " and ".join(names))
    finding = finding_of(attack, fitted, federation, adversary, taps)
    results: dict[str, Any] = {"adversary": adversary.text}
    if finding.score is None:
        return {**results, "verdict": "", "reason": finding.reason}
    measured_score = finding.score
    results["metric"] = measured_score.metric
    results["better"] = "higher" if measured_score.higher else "lower"
    results |= score_columns(measured_score)
    results["unprotected"] = results["score"]
    if cell["protection"] != PLAIN:
        (plain,) = sheet.expect([{**cell, "protection": PLAIN}])
        results["unprotected"] = plain.get("score") or None
    results["verdict"] = finding.outcome
    results["beaten"] = finding.outcome == BETTER
    return results


def score_columns(measured: Score) -> dict[str, Any]:
    """Return a score and what chance reaches, each with its interval, as columns of a row.

    Args:
        measured: the score of one attack.
    """
    chance = measured.chance_interval
    low: float | str = ""
    high: float | str = ""
    # a score without spread, one that all clients share, or a bound, has no interval
    if measured.interval:
        low = round(measured.interval.low, 4)
        high = round(measured.interval.high, 4)
    return {
        "score": round(measured.value, 4),
        "low": low,
        "high": high,
        "chance": round(measured.chance, 4),
        "chance_low": round(chance.low, 4),
        "chance_high": round(chance.high, 4),
    }


def draw(sheet: Sheet, rows: Sequence[Row], data: str) -> Path | None:
    """Draw attacks by protocols and protections, coloured by verdict, with the scores in them.

    Args:
        sheet: to write the picture beside.
        rows: of the sheet.
        data: name of the data set.

    Returns:
        The path; None where no attack applied.
    """
    of_data = [row for row in rows if row["data"] == data]
    scored = [row for row in of_data if row.get("score")]
    if not scored:
        return None
    attacks = distinct(scored, "attack")
    done = [row for row in of_data if row["status"] == DONE]
    columns = list(dict.fromkeys((row["protocol"], row["protection"]) for row in done))
    width = 2.6 + 0.36 * len(columns)
    height = 1.6 + 0.34 * len(attacks)
    picture, axes = figure(width, height)
    axis = axes[0][0]
    rows_by_cell = {(row["attack"], row["protocol"], row["protection"]): row for row in scored}
    for y, attack in enumerate(attacks):
        for x, column in enumerate(columns):
            row = rows_by_cell.get((attack, *column), {})
            colour = COLOURS[row.get("verdict", "")]
            axis.add_patch(_square(x, y, colour))
            if row:
                text = _shown(float(row["score"]))
                axis.text(x, y, text, ha="center", va="center", fontsize=6)
    names = [" ".join(column) for column in columns]
    axis.set_xticks(range(len(columns)), names, rotation=90)
    axis.set_yticks(range(len(attacks)), attacks)
    axis.tick_params(length=0, labelsize=7)
    axis.set_xlim(-0.5, len(columns) - 0.5)
    axis.set_ylim(len(attacks) - 0.5, -0.5)
    for side in axis.spines.values():
        side.set_visible(False)
    handles = [_square(0, 0, colour) for colour in COLOURS.values()]
    labels = [verdict or "not applicable" for verdict in COLOURS]
    picture.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=7, frameon=False)
    return sheet.save(picture, data)


def _shown(value: float) -> str:
    """Return a score in few characters."""
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}"


def _square(x: float, y: float, colour: str) -> Any:
    """Return a cell of the picture."""
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.47, y - 0.45), 0.94, 0.9, color=colour)


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, and draw.

    Args:
        argv: the arguments; those of the command line by default.
    """
    parser = parser_of(__doc__, seeds=1, minutes=60.0)
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--protocols", nargs="+", choices=COMPARED, default=list(COMPARED))
    parser.add_argument(
        "--references", action="store_true", help="known answers of single attacks instead"
    )
    chosen = read_options(parser, argv)
    if chosen.references:
        return references(chosen)
    sheet = Sheet("attacks", RESULTS)
    requested = cells(chosen.data, chosen.seeds, chosen.protocols)
    sheet.fill(requested, lambda cell: measure(sheet, cell), chosen.minutes)
    rows = sheet.expect(cells(chosen.data, chosen.seeds))
    for data in chosen.data:
        draw(sheet, rows, data)
    return sheet.path


# --- known answers ---

ALIKE = Dirichlet(alpha=100.0)


def references(chosen: argparse.Namespace) -> Path:
    """Measure the known answers that are missing.

    Args:
        chosen: the options.
    """
    sheet = Sheet("attack_references", RESULTS)
    requested: list[Cell] = [{"reference": name} for name in REFERENCES]
    sheet.fill(requested, lambda cell: REFERENCES[cell["reference"]](), chosen.minutes)
    return sheet.path


def _answer(expected: str, value: float, note: str = "") -> dict[str, Any]:
    """Return a row of the references."""
    return {"expected": expected, "found": round(value, 4), "note": note}


def _one_step(federation: Federation, model: Any, dtype: str) -> Any:
    """Return one full-batch step of FedAvg without protection."""
    protocol = FedAvg(rounds=1, epochs=1, batch_size=1000, model=model, mask="none")
    return protocol.fit(
        federation, Settings(transcript="full", threads=1, dtype=dtype, keys_from_seed=True)
    )


@lru_cache(maxsize=1)
def _leaked() -> tuple[Guess, Truth]:
    """Return what DLG makes of one step of 20 clients with one digit each, and the truth."""
    federation = Federation.simulate(
        "digits", scenario=Dirichlet(alpha=1.0), clients=20, samples=1, seed=0
    )
    fitted = _one_step(federation, sigmoids(64), "float64")
    view = view_of(fitted)
    attack = DeepLeakage(steps=150, restarts=1)
    guess = attack.run(view, knowledge_of(fitted))
    return guess, truth_of(fitted, federation, view)


def _digits_recognised() -> dict[str, Any]:
    """Return how many of 20 digits DLG recovers with more than 30 dB."""
    guess, truth = _leaked()
    units = ShareRecognised().units(guess, truth)
    return _answer("20", float(units.sum()), "digits of 20 with a PSNR above 30 dB")


def _digits_psnr() -> dict[str, Any]:
    """Return the PSNR of these."""
    guess, truth = _leaked()
    return _answer(
        "98 or more",
        score(DeepLeakage.scorer, guess, truth).value,
        "mean PSNR in dB, which counts up to 200",
    )


def _misplaced_labels() -> dict[str, Any]:
    """Return how many of 240 labels of one full-batch step are misplaced."""
    federation = Federation.simulate(
        "digits", scenario=Dirichlet(alpha=1.0), clients=8, samples=30, seed=0
    )
    fitted = _one_step(federation, "mlp-32", "float32")
    guess = LabelCounts().run(view_of(fitted), knowledge_of(fitted))
    wrong = 0
    for client, counts in guess.values.items():
        labels = federation.shards[client].y
        differences = counts - np.bincount(labels, minlength=10)
        # a misplaced label is missing in one class and too many in another
        wrong += int(np.abs(differences).sum()) // 2
    return _answer("0", wrong, "misplaced labels of 240, 8 clients with 30 samples each")


def _subspaces(
    attack: Any, samples: int, vectors: int, expected: str, scenario: Any = ALIKE
) -> dict[str, Any]:
    """Return what clients' eigenvectors tell.

    Args:
        attack: on these.
        samples: of each client.
        vectors: number of eigenvectors.
        expected: the score that is known.
        scenario: of the clients. Where all have all classes, a record's class tells nothing of its
            owner.
    """
    federation = Federation.simulate(
        "digits", scenario=scenario, clients=10, samples=samples, seed=0
    )
    other = Federation.simulate("digits", scenario=ALIKE, clients=5, samples=16, seed=9)
    protocol = OneShot(
        rounds=1, epochs=1, model="linear", tasks=2, mask="none", sealed=False, vectors=vectors
    )
    fitted = protocol.fit(federation, SETTINGS)
    shards = [*federation.shards, *other.shards]
    x = np.concatenate([shard.x for shard in shards])
    y = np.concatenate([shard.y for shard in shards])
    view = view_of(fitted)
    knowledge = knowledge_of(fitted, federation, (), (x, y))
    guess = attack.run(view, knowledge)
    scorer: Scorer = attack.scorer
    truth = truth_of(fitted, federation, view)
    measured = score(scorer, guess, truth)
    note = f"{measured.metric}; {samples} samples, {vectors} vectors, 10 clients"
    return _answer(expected, measured.value, note)


def _hidden_clusters(noise: Parameters, expected: str) -> dict[str, Any]:
    """Return the share of clients of `hidden` whose cluster two runs tell.

    Args:
        noise: options of the noise, which a trusted server adds.
        expected: the share that is known; "chance" for that of shuffled clients.
    """
    federation = Federation.simulate(
        "mnist", scenario=LabelSwap(clusters=4), clients=200, samples=100, seed=0
    )
    protocol = Hidden(
        rounds=1,
        epochs=1,
        batch_size=100,
        model="linear",
        mask="none",
        aggregation="plain",
        **noise,
    )
    fitted, taps = tapped(protocol, federation, SETTINGS)
    adversary = Adversary((SERVER,), (), SERVER)
    measured = finding_of(HiddenCluster(), fitted, federation, adversary, taps).score
    assert measured is not None
    if expected == "chance":
        chance = measured.chance_interval
        expected = f"{chance.low:.2f} to {chance.high:.2f}"
    ari = agreement(federation.truth or (), fitted.labels_.tolist())["ari"]
    clients = f"{measured.units} of 200 clients of MNIST"
    note = f"{measured.metric}, for {clients}; ARI of the clusters {ari:.2f}"
    return _answer(expected, measured.value, note)


def _bound(canaries: int, guesses: int, correct: int, delta: float) -> dict[str, Any]:
    """Return the bound of the one-run audit for a number of right guesses, at p = 0.05."""
    published = {100: "3.4930", 900: "2.0206", 95: "2.1652"}[correct]
    note = f"ε: {correct} of {guesses} guesses about {canaries} canaries right, δ = {delta:g}"
    return _answer(published, one_run_epsilon(canaries, guesses, correct, delta), note)


REFERENCES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "DLG: digits recovered": _digits_recognised,
    "DLG: PSNR": _digits_psnr,
    "label counts": _misplaced_labels,
    "membership, 8 samples": lambda: _subspaces(SubspaceMembership(), 8, 5, "0.99"),
    "membership, 135 samples": lambda: _subspaces(SubspaceMembership(), 135, 10, "0.59"),
    "classes": lambda: _subspaces(SubspaceComposition(), 8, 5, "0.99", Pathological()),
    "mean image": lambda: _subspaces(MeanImage(), 40, 5, "0.9998"),
    "clusters of hidden, without noise": lambda: _hidden_clusters({}, "1"),
    "clusters of hidden, ε = 1": lambda: _hidden_clusters(
        {"clip": 1.0, "target_epsilon": 1.0, "placement": "central"}, "chance"
    ),
    "clusters of hidden, ε = 2": lambda: _hidden_clusters(
        {"clip": 1.0, "target_epsilon": 2.0, "placement": "central"}, "chance"
    ),
    "one run, all right": lambda: _bound(100, 100, 100, 0.0),
    "one run, 90 % right": lambda: _bound(1000, 1000, 900, 1e-5),
    "one run, few guesses": lambda: _bound(1000, 100, 95, 1e-5),
}


if __name__ == "__main__":
    print(main())
