"""What a client draws follows from its name: no other client, and no order, changes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from securecluster import CFL, FedAvg, Federation, ForeignModel, Settings
from securecluster.audits.run_audit import _draws_alike
from securecluster.cli.main import main
from securecluster.core.client_names import stream_of
from securecluster.core.randomness import Randomness
from securecluster.core.serialization import pack
from securecluster.errors import RunFolderError
from securecluster.messaging import run_number
from securecluster.messaging.messages import Call, Empty, Rows
from securecluster.models.validation import build
from securecluster.nodes.node import Node
from securecluster.nodes.policy import Policy
from securecluster.nodes.proposal import Proposal
from securecluster.parties.endpoints import KeySource, build_client
from securecluster.protocols import FineTune, Local
from securecluster.protocols.conformance.simulation import interrupt_after
from securecluster.protocols.nsim.client import initial_models
from securecluster.reports.finished_run import open_run
from securecluster.runs import simulated_run
from securecluster.runs.simulated_run import Origin
from securecluster.runtime.endpoint import Endpoint, config_hash
from securecluster.runtime.transport import random_dropouts
from securecluster.training.foreign_trainer import TrainingCall
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

# "7" and "007" are two clients on purpose
pytestmark = pytest.mark.filterwarnings("ignore:names of clients differ in case alone")

Pair = tuple[NDArray[np.float32], NDArray[np.int64]]
# as many samples as there are kinds of batches: fewer than one, exactly some, and a rest
SIZES = {"St. Mary": 9, "São Paulo": 40, "7": 23, "007": 57, "0": 40, "ward 3": 101, "2": 31}
INPUTS, CLASSES = 340, 3
ONE_THREAD = Settings(threads=1, transcript="full")


def samples(name: str) -> Pair:
    """A client's own samples, which no other client changes either."""
    draw = np.random.default_rng(list(name.encode()))
    x = draw.normal(size=(SIZES[name], INPUTS)).astype(np.float32)
    return x, np.arange(SIZES[name]) % CLASSES


def hospitals(names: Sequence[str], seed: int = 0) -> Federation:
    return Federation.from_arrays({name: samples(name) for name in names}, classes=3, seed=seed)


ALL = tuple(SIZES)
OTHERS = {
    "one fewer": ALL[:3] + ALL[4:],
    "in reverse": ALL[::-1],
    "few, in another order": ("0", "ward 3", "St. Mary"),
}


def with_dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 24), nn.ReLU(), nn.Dropout(0.5), nn.Linear(24, CLASSES))


def drawing(
    arrays: list[NDArray[Any]], x: NDArray[Any], y: NDArray[Any], call: TrainingCall
) -> list[NDArray[Any]]:
    """Move by draws of the call, by its batches and by its name."""
    (weights,) = arrays
    for rows in call.batches():
        weights = 0.9 * weights + x[rows].mean()
    return [weights + call.generator.normal(size=weights.shape) + len(call.name)]


def foreign() -> ForeignModel:
    return ForeignModel([np.zeros((2, 3))], drawing)


MODELS: dict[str, Callable[[], Any]] = {
    "linear": lambda: "linear",
    "mlp-200": lambda: "mlp-200",  # whose first product would serve all clients of a chunk
    "dropout": with_dropout,
    "foreign": foreign,
}
PLANS: dict[str, dict[str, Any]] = {
    "few steps": {"epochs": 1, "batch_size": 5},
    "all samples": {"batch_size": 1000, "epochs": 3},
    "adam": {"optimizer": "adam", "lr": 0.01, "batch_size": 32},
    "momentum": {"momentum": 0.9, "keep_momentum": True, "batch_size": 7},
}
CASES = [
    (model, plan) for plan in PLANS for model in MODELS if (model, plan) != ("foreign", "momentum")
]


def weights(fitted: Any, name: str) -> list[torch.Tensor]:
    return list(fitted.model_of(name).values())


def differing(first: Any, second: Any, names: Sequence[str]) -> list[str]:
    """The clients whose models are not the same to the last bit."""
    return [
        name
        for name in names
        if not all(map(torch.equal, weights(first, name), weights(second, name)))
    ]


@pytest.mark.few(5)
@pytest.mark.parametrize(("model", "plan"), CASES)
def test_alone_a_client_is_trained_to_the_bit_as_beside_any_others(model: str, plan: str) -> None:
    made = MODELS[model]()

    def fit(names: Sequence[str], threads: int = 1) -> Any:
        protocol = Local(rounds=2, model=made, **PLANS[plan])
        return protocol.fit(hospitals(names), Settings(threads=threads))

    whole = fit(ALL)
    for names in OTHERS.values():
        assert differing(whole, fit(names), names) == []
    if model != "foreign":
        assert differing(whole, fit(ALL[::-1], threads=2), ALL) == []
        assert whole.accuracy_.tolist() == fit(ALL[::-1]).accuracy_.tolist()[::-1]
    other_seed = Local(rounds=2, model=made, **PLANS[plan]).fit(hospitals(ALL, seed=1))
    assert differing(whole, other_seed, ALL) == list(ALL)


def first_updates(names: Sequence[str], **params: Any) -> dict[str, torch.Tensor]:
    """Each client's update of the first round, by its name."""
    protocol = CFL(rounds=1, mask="none", model=with_dropout(), **params)
    fitted = protocol.fit(hospitals(names), ONE_THREAD)
    call, answer = fitted.transcript_.content(0)
    assert call.method == "train" and answer.reply is not None
    rows = answer.reply.delta.values
    return {names[i]: row for i, row in zip(answer.ids, rows, strict=True)}


@pytest.mark.parametrize("params", [{}, {"fallback": 0.3}])
def test_the_first_update_of_a_client_is_that_beside_any_others(params: dict[str, Any]) -> None:
    whole = first_updates(ALL, **params)
    for names in OTHERS.values():
        for name, update in first_updates(names, **params).items():
            torch.testing.assert_close(update, whole[name], rtol=0, atol=1e-6)


def test_tuning_begins_with_draws_of_the_client_alone() -> None:
    made = FineTune(rounds=3, tune_rounds=2, model=with_dropout())
    client = build_client(made, hospitals(ALL), ONE_THREAD).client
    other = build_client(made, hospitals(ALL[::-1]), ONE_THREAD).client
    start = Rows(client.cohort.start.repeat(len(ALL), 1), tuple(range(len(ALL))))
    tuned, turned = (one.tuned(start, 2).values for one in (client, other))
    torch.testing.assert_close(tuned, turned.flip(0), rtol=0, atol=1e-6)


def trainer(federation: Federation, **given: Any) -> LocalTrainer:
    flat = build(with_dropout(), (INPUTS,), CLASSES, Randomness(0), federation.objective)
    return LocalTrainer(federation, flat, Randomness(5), torch.device("cpu"), **given)


def drawn_by(federation: Federation, **given: Any) -> dict[str, Any]:
    """All public draws of each client, by its name."""
    made = trainer(federation, validation_share=0.3, **given)
    plans = (
        LocalTraining(lr=0.1, epochs=2, batch_size=4),
        LocalTraining(lr=0.1, epochs=1, batch_size=4, label_power=0.5),
    )
    keys = made.dropout_keys(range(len(federation)), 3, 5)
    drawn = {}
    for k, name in enumerate(federation.names):
        first = made.first_row(k)
        own = [rows - first for plan in plans for rows in made.batches(k, plan, 3)]
        drawn[name] = (
            made.inputs(k).tolist(),
            [rows.tolist() for rows in own],
            keys[:, k].tolist(),
            made.own_start(k).tolist(),
        )
    return drawn


def test_all_public_draws_follow_the_name() -> None:
    whole = drawn_by(hospitals(ALL))
    for names in OTHERS.values():
        for name, drawn in drawn_by(hospitals(names)).items():
            assert drawn == whole[name]
    # the numbers, by which secrets go, change none of them
    assert drawn_by(hospitals(ALL), numbers=range(50, 57)) == whole
    parts = zip(*whole.values(), strict=True)
    for part in parts:
        assert len({json.dumps(one) for one in part}) == len(ALL)  # each its own


def test_clients_that_are_called_by_positions_draw_what_they_always_drew() -> None:
    federation = hospitals(ALL)
    called = replace(federation, names=tuple(str(k) for k in range(len(ALL))))
    drawn = drawn_by(called)
    for k in range(len(ALL)):
        size = len(federation.shards[k].y)
        aside = Randomness(5).generator("client", k, "aside").permutation(size) < size * 3 // 10
        assert drawn[str(k)][0] == federation.shards[k].x[~aside].tolist()
        left = int((~aside).sum())
        order = Randomness(5).generator("client", k, "batches", 3, 0).permutation(left)
        assert [row for batch in drawn[str(k)][1] for row in batch][:left] == order.tolist()


ALIKE = (
    "7", "07", "007", "7.0", "+7", "-7", "7e0", "0x7", "٧", "７", "7 8", '"7"', "7,", "[7]",
    "seven", "", "0", "00", "-0", "9" * 18, "9" * 19, "9" * 5000, "é", "e\u0301", "É", "\\u00e9",
    "\ud800",
    "null", "client", "a\x00b", "a\\u0000b", "NFC", "\u202eCFN",
)  # fmt: skip


def test_no_two_names_draw_alike() -> None:
    streams = [stream_of(name) for name in ALIKE]
    assert stream_of("7") == 7 and stream_of("007") == "007" and stream_of("0") == 0
    draws = Randomness(0)
    keys = [draws.key("client", stream, "batches") for stream in streams]
    assert len(set(keys)) == len(ALIKE)
    generators = draws.generators(("client",), streams, ("batches",))
    for stream, generator in zip(streams, generators, strict=True):
        alone = draws.generator("client", stream, "batches")
        assert alone.integers(1 << 62) == generator.integers(1 << 62)


def test_replies_are_lost_by_name() -> None:
    lost = random_dropouts(0.5, Randomness(0), ALL)
    turned = random_dropouts(0.5, Randomness(0), ALL[::-1])
    everyone = tuple(range(len(ALL)))
    for step in range(20):
        call = Call("", "train", "gather", 0, step, everyone, Empty(), (1,) * len(everyone))
        assert {ALL[i] for i in lost(call)} == {ALL[::-1][i] for i in turned(call)}


def test_secrets_follow_no_name() -> None:
    federation = hospitals(ALL)
    renamed = replace(federation, names=tuple(f"clinic {k}" for k in range(len(ALL))))
    made = FedAvg(rounds=1, clip=1.0, noise=1.0)
    secrets = KeySource(secrets=Randomness(99))
    first, second = (
        build_client(made, one, ONE_THREAD, key_source=secrets) for one in (federation, renamed)
    )
    noise = [[point.keys.noise(i) for i in range(len(ALL))] for point in (first, second)]
    assert noise[0] == noise[1] and len(set(noise[0])) == len(ALL)
    turned = build_client(made, hospitals(ALL[::-1]), ONE_THREAD, key_source=secrets)
    assert turned.keys.noise(0) == first.keys.noise(0)


def block(made: Any, federation: Federation, position: int, **given: Any) -> Endpoint[Any]:
    """The endpoint of one client of a run, as on a machine of its own."""
    own = federation.select([federation.names[position]])
    config = made.config(federation, "float32")
    return build_client(made, own, ONE_THREAD, agreed=config, numbers=[position], **given)


def test_a_client_on_its_own_machine_draws_as_among_all() -> None:
    federation = hospitals(ALL)
    made = Local(rounds=1, model=with_dropout())
    whole = build_client(made, federation, ONE_THREAD).client.cohort
    for position, name in enumerate(ALL):
        alone = block(made, federation, position, names=[name]).client.cohort
        assert (
            alone.dropout_keys([0], 1, 4).tolist() == whole.dropout_keys([position], 1, 4).tolist()
        )
        if name != "0":  # what a list calls its first client tells it from nobody
            assert block(made, federation, position).client.cohort.names == (name,)
    listed = Federation.from_arrays([samples("ward 3")], classes=3, seed=0)
    config = made.config(federation, "float32")
    point = build_client(made, listed, ONE_THREAD, agreed=config, numbers=[5])
    assert point.client.cohort.names == ("5",)
    joined = build_client(made, listed, ONE_THREAD, joins=config)
    assert joined.client.cohort.names == (str(len(ALL)),)


def test_users_with_own_starts_begin_by_name() -> None:
    models = initial_models(trainer(hospitals(ALL)), "independent")
    turned = initial_models(trainer(hospitals(ALL[::-1])), "independent")
    assert torch.equal(models, turned.flip(0))
    assert len({tuple(row) for row in models.tolist()}) == len(ALL)
    some = initial_models(trainer(hospitals(ALL)), "independent", [4, 2])
    assert torch.equal(some, models[[4, 2]])


# --- runs that an earlier version began ---


def begun_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs begin as in a version whose checkpoints do not say who draws by what."""
    monkeypatch.setattr(
        simulated_run.SimulatedRun,
        "_origin",
        lambda self: Origin(simulated_run.config_hash(self._config), self._program),
    )


@pytest.mark.parametrize("names", [ALL, ("0", "1", "2")])
def test_a_run_that_began_with_other_draws_is_not_gone_on_with(
    names: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = {name: samples(ALL[k]) for k, name in enumerate(names)}
    federation = Federation.from_arrays(pairs, classes=3, seed=0)
    with monkeypatch.context() as before, pytest.raises(KeyboardInterrupt):
        begun_before(before)
        CFL(rounds=3, epochs=1).fit(federation, folder=tmp_path, report=interrupt_after(1))
    made = CFL(rounds=3, epochs=1)
    if names == ALL:
        with pytest.raises(RunFolderError, match="earlier version, whose clients drew batches by"):
            made.fit(federation, folder=tmp_path)
    else:
        assert len(made.fit(federation, folder=tmp_path).history_) == 3
    anew = CFL(rounds=3, epochs=1).fit(federation, folder=tmp_path, force=True)
    assert len(anew.history_) == 3


def without_names(fitted: Any) -> None:
    fitted.kept_.learned.named_draws = False


def test_newcomers_of_an_earlier_run_draw_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []
    plain = LocalTrainer.__init__

    def watched(self: LocalTrainer, federation: Federation, *given: Any, **named: Any) -> None:
        seen.append(federation.names)
        plain(self, federation, *given, **named)

    fitted = CFL(rounds=1, epochs=1).fit(hospitals(ALL[:5]))
    monkeypatch.setattr(LocalTrainer, "__init__", watched)
    fitted.join(hospitals(ALL[5:]))
    assert seen[-1] == ALL[5:]
    without_names(fitted)
    fitted.join(hospitals(ALL[5:]))
    assert seen[-1] == ("5", "6")


def test_an_earlier_run_is_not_repeated_for_an_audit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    table = tmp_path / "table.csv"
    lines = ["site,a,b,label"]
    draw = np.random.default_rng(0)
    for name in ("n", "o", "p", "q"):
        for k in range(12):
            a, b = draw.normal(size=2)
            lines.append(f"{name},{a:.3f},{b:.3f},{k % 2}")
    table.write_text("\n".join(lines))
    columns = ["--client-column", "site", "--label-column", "label"]
    run = ["run", "flhc", "--data", str(table), *columns, "--rounds", "2", "--pre-rounds", "1"]
    run += ["--epochs", "1", "--model", "linear", "--mask", "permutation", "--transcript", "full"]
    assert main([*run, "--out", str(folder), "--quiet"]) == 0
    assert _draws_alike(open_run(folder))
    earlier = rewritten_without_names(folder)
    assert not _draws_alike(open_run(earlier))
    capsys.readouterr()
    assert main(["audit", str(earlier), "--attack", "linkage", "--budget", "60"]) == 0
    assert "drew batches by their positions" in " ".join(capsys.readouterr().out.split())


def rewritten_without_names(folder: Path) -> Path:
    """The folder, as a version wrote it that knew no draws by name."""
    from securecluster.core import manifest
    from securecluster.results import saving as serialization

    path = folder / serialization.LEARNED
    learned = serialization.read_kept(folder).learned
    data = pack(replace(learned, named_draws=False))
    path.write_bytes(data)
    marks = manifest.read(folder)
    marks[serialization.LEARNED] = manifest.Mark.of(data)
    (folder / manifest.NAME).write_bytes(manifest.encode(marks))
    return folder


def test_a_node_goes_on_with_the_draws_of_the_version_that_began_its_run(tmp_path: Path) -> None:
    federation = hospitals(ALL)
    made = Local(rounds=2, model=with_dropout())
    policy = Policy(roster=False)
    node = Node(made, federation.select(["ward 3"]), tmp_path, number=5, policy=policy)
    run = node.agree(Proposal.of(made, federation.facts, "float32", None).packed())
    assert node._living(run).endpoint.client.cohort.names == ("ward 3",)
    # as an earlier version wrote it, whose runs had no numbers
    config = json.loads((tmp_path / f"run-{run}" / "agreed.json").read_text())
    del config[run_number.NAME]
    earlier = config_hash(config)
    folder = tmp_path / f"run-{earlier}"
    folder.mkdir()
    (folder / "agreed.json").write_text(json.dumps(config))
    again = Node(made, federation.select(["ward 3"]), tmp_path, number=5, policy=policy)
    assert again._living(earlier).endpoint.client.cohort.names == ("5",)
