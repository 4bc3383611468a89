"""The pages docs/add-a-*.md: their code runs as it stands, and does what they say."""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from securecluster.attacks import registry as attack_registry
from securecluster.audits import claim_checks
from securecluster.cli.main import main
from securecluster.core import installed_packages
from securecluster.data.datasets import PARTS as DATA_SETS
from securecluster.errors import FrameError, UsageError
from securecluster.messaging import wire
from securecluster.messaging.messages import Call, reply_header
from securecluster.parties.derived import call_types
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.privacy.masking import masks
from securecluster.privacy.pipeline import Kind
from securecluster.protections.registry import AGGREGATIONS
from securecluster.protocols import CFL, SRFCA, Settings, registry

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
READER = SimpleNamespace(**runpy.run_path(str(ROOT / ".ci" / "readme.py")))
Page = Callable[[str], Any]


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """Take away at the end what pages register."""
    given = dict(attack_registry.PARTS.kept)
    names, info, makers = list(masks.MASKS), dict(masks.INFO), dict(masks._MAKERS)
    entrywise, sums = set(masks.ENTRYWISE), dict(AGGREGATIONS)
    paths = os.environ.get(DATA_SETS.variable, "")
    yield
    masks.MASKS[:] = names
    tables: list[tuple[Any, dict[str, Any]]] = [
        (masks.INFO, info),
        (masks._MAKERS, makers),
        (AGGREGATIONS, sums),
        (attack_registry.PARTS.kept, given),
    ]
    for table, before in tables:
        table.clear()
        table.update(before)
    masks.ENTRYWISE.intersection_update(entrywise)
    sys.modules.pop("securecluster.cli.templates.sign_flips", None)
    os.environ[DATA_SETS.variable] = paths


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The module that a page's code makes, run once in a folder of its own, which is `home`."""
    ran: dict[str, Any] = {}

    def module_of(name: str) -> Any:
        if name not in ran:
            document = DOCS / f"{name}.md"
            module = READER.session(document)
            module.home = tmp_path_factory.mktemp(name)
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(module.home)
                for block in READER.blocks(document):
                    # .ci/readme.py runs those of the shell
                    if block.language == "python":
                        READER.run_python(document, block.text, module)
            ran[name] = module
        return ran[name]

    return module_of


def test_the_new_protection_lacks_nothing_and_leads_to_the_models_of_plain_sums(page: Page) -> None:
    names = page("add-a-protection")
    assert names.lacks(names.Halving()) == []
    plain, halved = names.plain.client_models_.values, names.halved.client_models_.values
    torch.testing.assert_close(plain, halved, rtol=0, atol=1e-6)
    assert isinstance(AGGREGATIONS["halved"], names.Halving)


def test_a_run_with_the_new_mask_recovers_the_models_of_one_without(page: Page) -> None:
    names = page("add-a-mask")
    masked, plain = names.masked.client_models_.values, names.plain.client_models_.values
    # without a mask one delta since the start is sent, which rounds once less
    torch.testing.assert_close(masked, plain, rtol=0, atol=1e-6)
    assert names.masked.mask == "sign-flips"
    assert names.masked.bytes_["up"] > names.plain.bytes_["up"]  # the key agreement's


def test_the_new_mask_is_described(page: Page) -> None:
    assert page("add-a-mask").masked.mask_info().hides == "the signs of coordinates"


def test_an_entrywise_mask_is_taken_where_only_these_are(page: Page) -> None:
    page("add-a-mask")
    SRFCA(trim=0.2, mask="sign-flips").check(6)
    with pytest.raises(UsageError, match="rotation"):
        SRFCA(trim=0.2, mask="rotation").check(6)


def test_a_mask_of_a_name_that_is_taken_is_refused() -> None:
    info = masks.MaskInfo("its values", "obfuscation")
    with pytest.raises(UsageError, match="give yours another name"):
        masks.register("rotation", lambda dimension: masks.Permutation(), info)
    assert masks.INFO["rotation"] is not info


def test_the_new_data_set_has_a_name_once_its_path_was_given(
    page: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    names = page("add-a-data-set")
    assert names.federation.data == "wine" and names.fitted.accuracy_.mean() > 0.8
    assert main(["list"]) == 0
    assert "mobility, wine" in capsys.readouterr().out


def test_the_new_mechanism_enters_the_ledger_and_epsilon(page: Page) -> None:
    fitted = page("add-a-mechanism").fitted
    (row,) = [row for row in fitted.ledger_.summary() if row.mechanism != "free"]
    assert (row.mechanism, row.noise_multiplier, row.count) == ("gaussian", 2.0, 3)
    # three releases with z = 2 are one with z = 2/√3
    expected = gaussian_epsilon(np.sqrt(3) / 2, 1e-5)
    assert fitted.ledger_.price(1e-5).epsilon == pytest.approx(expected, rel=1e-3)


def test_the_new_mechanism_bounds_rows_and_half_its_noise_fails_the_audit(page: Page) -> None:
    names = page("add-a-mechanism")
    clip = names.CoordinateClip(0.5)
    rows = torch.tensor([[9.0, -9.0, 0.1, float("nan")], [float("inf"), 1.0, 1.0, 1.0]])
    clipped = clip.forward(rows, 0)
    assert torch.linalg.vector_norm(clipped, dim=1).max() <= 0.5
    assert clipped[0, 2] == rows[0, 2] and clipped[0, 3] == 0
    assert names.audited_mu(0.5) <= names.claimed_mu < names.audited_mu(0.25)


def test_the_new_transport_carries_a_run(page: Page) -> None:
    names = page("add-a-transport")
    batch = CFL(rounds=2, epochs=1).fit(names.federation)
    assert names.state.labels == batch.labels_.tolist()
    assert names.transcript.totals()["up"] == batch.bytes_["up"] > 0
    rows = torch.cat([node.client.models.values for node in names.nodes])
    torch.testing.assert_close(rows, batch.client_models_.values, rtol=0, atol=1e-5)


class End:
    """The server's end of a pipe that gives one frame, or none."""

    def __init__(self, frame: bytes | None) -> None:
        self.frame = frame

    def send_bytes(self, data: bytes) -> None:
        pass

    def poll(self, timeout: float) -> bool:
        return self.frame is not None

    def recv_bytes(self) -> bytes:
        assert self.frame is not None
        return self.frame


def test_the_new_transport_leaves_out_who_is_silent_and_refuses_late_replies(page: Page) -> None:
    names = page("add-a-transport")
    call, answer = first_call(names)

    def types(name: str) -> type:
        return call_types(names.cfl, name)[1]

    silent = names.Pipes({i: End(None) for i in call.to}, types)
    assert silent.exchange(call).ids == ()
    late = names.Pipes({i: End(answer) for i in call.to}, types)
    with pytest.raises(FrameError, match="answered another request"):
        late.exchange(call)


def first_call(names: Any) -> tuple[Call, bytes]:
    """Return the run's first call, and a frame that answers another one."""
    call, response = names.transcript.content(0)
    _, other = names.transcript.content(1)
    assert response.ids and other.ids
    later, _ = names.transcript.content(1)
    header = reply_header(later.header(0))
    return call, wire.encode(header, response.reply, 0)


def test_the_new_fields_are_in_the_reports(page: Page) -> None:
    names = page("add-a-report-field")
    assert sum(names.result["cluster_sizes"]) == 6
    lines = (names.home / "reporting" / "history.jsonl").read_text().splitlines()
    assert all(0 <= json.loads(line)["median_real"] <= 1 for line in lines) and len(lines) == 2
    uncovered = names.result["privacy"]["uncovered_files"]
    assert len(uncovered) == 1  # without noise nothing is claimed that a file could lack
    assert names.result["protocol"] == "reporting-cfl"


def test_a_field_of_the_observer_is_named_as_what_epsilon_does_not_cover(page: Page) -> None:
    names = page("add-a-report-field")
    noisy = names.ReportingCFL(rounds=2, epochs=1, clip=1.0, noise=1.0)
    noisy.fit(names.federation, folder=names.home / "noisy")
    result = json.loads((names.home / "noisy" / "result.json").read_text())
    assert any("median_real" in text for text in result["privacy"]["uncovered_files"])


def test_replay_compares_the_new_field(
    page: Page, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = page("add-a-report-field")
    folder = names.home / "replayed"
    settings = Settings(transcript="full")
    names.ReportingCFL(rounds=1, epochs=1).fit(names.federation, settings, folder=folder)
    point = EntryPoint("reporting-cfl", "add_a_report_field:ReportingCFL", registry.GROUP)
    monkeypatch.setattr(installed_packages, "points", lambda group: [point])
    assert main(["replay", str(folder)]) == 0
    other = {"cluster_sizes": [1]}
    monkeypatch.setattr(names.ReportingCFL, "report_fields", lambda self, state: other)
    assert main(["replay", str(folder)]) != 0
    assert "differs from the replay in its cluster_sizes" in capsys.readouterr().err


def test_a_standard_field_keeps_its_meaning(page: Page, tmp_path: Path) -> None:
    names = page("add-a-report-field")

    class Overriding(names.ReportingCFL):  # type: ignore[name-defined,misc]
        name = "overriding"

        def report_fields(self, state: Any) -> dict[str, Any]:
            return {"protocol": "forged"}

    Overriding(rounds=1, epochs=1).fit(names.federation, folder=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["protocol"] == "overriding"


def test_a_registered_stage_is_a_mask(page: Page) -> None:
    page("add-a-mask")
    (stage,) = masks.build("sign-flips", 8)
    assert (stage.kind, stage.name) == (Kind.MASK, "sign-flips")


def test_an_attack_of_ones_own_sees_through_the_mask(page: Page) -> None:
    names = page("add-an-attack")
    for score in names.scores.values():
        assert score.beats_chance and score.value > score.chance
    assert names.of_means.beats_chance
    # a mask keeps inner products, up to rounding
    assert names.scores["permutation"].value == names.scores["none"].value


def test_an_attack_of_ones_own_is_one_of_an_audits(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = page("add-an-attack")
    point = EntryPoint("neighbours", "add_an_attack:Neighbours", attack_registry.GROUP)
    monkeypatch.setattr(installed_packages, "points", lambda group: [point])
    assert attack_registry.attack_names()[-1] == "neighbours"
    assert type(attack_registry.attack_named("neighbours")) is names.Neighbours


def test_an_attack_of_ones_own_says_that_a_run_has_no_true_clusters(page: Page) -> None:
    names = page("add-an-attack")
    clients = {
        name: (shard.x, shard.y)
        for name, shard in zip(names.federation.names, names.federation.shards, strict=True)
    }
    own = names.Federation.from_arrays(clients, classes=10, seed=0)
    assert own.truth is None
    fitted = names.CFL(rounds=1, model="linear").fit(own, names.Settings(transcript="full"))
    view = names.view_of(fitted)
    truth = names.truth_of(fitted, own, view)
    found = names.evaluate(names.Neighbours(), view, names.knowledge_of(fitted), truth)
    assert found == "not applicable: it needs true clusters, which this run does not have"


def test_an_audit_from_python_has_what_failed_and_what_is_broken(page: Page) -> None:
    names = page("audit")
    first, second = names.results.findings[names.RUN]
    assert (first.held, second.verdict) == (("a mask",), "not tried")
    assert names.results.failed == [] and names.results.broken == []


def test_a_claim_of_the_page_is_declared_and_another_one_is_broken(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = page("add-an-attack")
    assert names.check_claim(names.masked).failure.startswith(
        "'A mask hides whose updates are alike' is broken: with mask='permutation' neighbours is"
    )
    point = EntryPoint("neighbours-in-sums", "add_an_attack:IN_SUMS", claim_checks.GROUP)
    monkeypatch.setattr(installed_packages, "points", lambda group: [point])
    assert claim_checks.claim_names() == ["neighbours-in-sums"]
    checked = names.check_claim("neighbours-in-sums")
    assert checked.claim is names.IN_SUMS and checked.holds


def test_malicious_clients_of_the_page_do_harm(page: Page) -> None:
    names = page("add-an-attack")
    assert len(names.malicious) == 3
    assert list(names.impacts) == list(names.BEHAVIOURS)
    assert {found.clusters for found in names.impacts.values()} != {1}


class Cell(NamedTuple):
    """A cell of code of a notebook: its source, and the text that is stored below it."""

    source: str
    printed: str


def code_cells(name: str) -> list[Cell]:
    """Return the cells of code of a notebook in docs."""
    found = []
    for cell in json.loads((DOCS / f"{name}.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            streams = [output for output in cell["outputs"] if output["output_type"] == "stream"]
            printed = "".join("".join(stream["text"]) for stream in streams)
            found.append(Cell("".join(cell["source"]), printed))
    return found


def imported_names(source: str) -> Iterator[tuple[str, str]]:
    """Yield the modules of the package that code imports from, and the names it takes there."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("securecluster"):
            yield from ((str(node.module), alias.name) for alias in node.names)


@pytest.mark.parametrize("name", sorted(path.stem for path in DOCS.glob("*.ipynb")))
def test_every_name_that_a_notebook_imports_is_there(name: str) -> None:
    # also of notebooks that run only where Flower is installed
    for cell in code_cells(name):
        for module, own in imported_names(cell.source):
            if not hasattr(importlib.import_module(module), own):
                importlib.import_module(f"{module}.{own}")


def words(text: str) -> list[str]:
    """Return the words of a text with # in place of numbers, whose digits may differ."""
    return re.sub(r"-?\d+(\.\d+)?(e[-+]?\d+)?|\binf\b", "#", text).split()


@pytest.fixture
def notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., SimpleNamespace]:
    """Runs a notebook in a folder of its own, also a shorter one, and returns its names.

    What each cell prints must be what is stored below it, but for the digits of numbers.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")

    def names_of(name: str, long: str = "", short: str = "") -> SimpleNamespace:
        module = READER.session(Path(f"{name}.ipynb"))
        assert any(long in cell.source for cell in code_cells(name))
        for cell in code_cells(name):
            source = cell.source.replace(long, short) if long else cell.source
            READER.run_python(Path(f"{name}.ipynb"), source, module)
            assert words(capsys.readouterr().out) == words(cell.printed), cell.source
        return SimpleNamespace(**vars(module))

    return names_of


Notebook = Callable[..., SimpleNamespace]


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_have_outputs_and_no_errors_and_are_in_the_readme(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert kinds and "error" not in kinds
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert f"](docs/{path.name})" in (ROOT / "README.md").read_text()


def test_the_notebook_of_an_audit_has_an_attack_that_fails_and_two_that_win(
    notebook: Notebook, tmp_path: Path
) -> None:
    names = notebook("audit")
    assert names.verdicts == {
        "label-counts": ("at chance", "better than chance"),
        "linkage": ("visible", "better than chance"),
        "label-distributions": ("visible", "better than chance"),
    }
    assert (tmp_path / "audit.html").read_text().startswith("<!DOCTYPE html>")


def test_the_notebook_of_a_server_answers_as_the_run_does_and_ends_it(notebook: Notebook) -> None:
    pytest.importorskip("pandas")
    names = notebook("serve")
    assert names.server.returncode is not None
    assert names.answers["Aachen"] == names.answers["Cork"] != names.answers["Bern"]


def test_the_notebook_of_a_sweep_ends_in_a_figure(notebook: Notebook, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    names = notebook("noise", "seeds=5", "seeds=1")
    assert set(names.runs["status"]) == {"done"} and len(names.runs) == 8
    ari = names.scores["ari"]
    compared = "flhc:signature=gradient"
    assert ari["signature", 2.0] >= ari["signature", 1.0]
    assert ari["signature", math.inf] == ari[compared, math.inf] == 1.0
    assert names.axes.get_xlabel() == "ε of a run for one example, at δ = 1e-05"
    assert (tmp_path / "noise.pdf").read_bytes().startswith(b"%PDF")
    names.plt.close("all")


def test_the_notebook_of_a_table_finds_the_hospitals_and_predicts_text(notebook: Notebook) -> None:
    pytest.importorskip("pandas")
    names = notebook("pipeline")
    labels = names.cfl.to_frame("labels")
    harmed = labels[["Aachen", "Cork", "Fano"]]
    assert len(set(harmed)) == 1 and len(set(labels)) == 2
    assert set(labels.drop(harmed.index)) != set(harmed)
    assert names.cfl.accuracy_.mean() > names.one_model.accuracy_.mean() + 0.1
    rule = names.newest["dose"] + names.newest["age"] > 0
    assert list(names.newest["in Aachen"] == "sick") == list(rule)
    assert isinstance(names.module, names.Network)


@pytest.mark.exhaustive
def test_the_notebook_goes_from_a_project_of_flower_to_an_audited_run(notebook: Notebook) -> None:
    pytest.importorskip("flwr", reason="needs the extra flower")
    names = notebook("flower")
    assert names.ran.returncode == 0, names.ran.stdout[-3000:] + names.ran.stderr[-3000:]
    assert (
        names.verdicts["secure-sum-conformance"]
        == "at chance: secure sums held: without it alone the attack succeeds"
    )
    assert names.verdicts["linkage"].startswith("not tried")
    twin = names.results.findings["unprotected"]
    assert {finding.outcome for finding in twin} == {"better than chance"}


@pytest.mark.exhaustive
def test_the_notebook_records_and_attacks_an_app_of_flower(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs the extra flower")
    code = [cell.source for cell in code_cells("audit-flower")]
    code.append("import json; Path('verdicts.json').write_text(json.dumps(verdicts))")
    # a process of its own, as a notebook has: Flower's workers get the functions of its main module
    command = [sys.executable, "-c", "\n\n".join(code)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    verdicts = json.loads((tmp_path / "verdicts.json").read_text())
    assert verdicts.keys() == {"linkage", "label-counts", "membership-loss-threshold"}
    assert verdicts["linkage"] == "visible"
    assert (tmp_path / "audit.html").read_text().startswith("<!DOCTYPE html>")


def test_the_page_on_plans_has_a_forecast_for_each_protocol_and_epsilon(page: Page) -> None:
    names = page("plan")
    lines = [(line.protocol, line.epsilon) for line in names.outlook.forecasts]
    assert lines == [("fedavg", 4), ("fedavg", 16), ("signature", 4), ("signature", 16)]
    labels = {panel.get_xlabel() for panel in names.figure.axes} - {""}
    assert labels == {f"ε of a run for one {unit}, at δ = 1e-05" for unit in ("client", "example")}


def test_the_page_on_sweeps_makes_a_line_per_run(page: Page) -> None:
    pytest.importorskip("pandas")
    runs = page("sweep").runs
    label = "cfl:rounds=2,model=linear,clip=1.0,sketch=64"
    assert list(runs.variant) == ["fedavg", label] * 4
    assert set(runs.status) == {"done"}


def test_clients_of_scikit_learn_find_their_clusters(page: Page) -> None:
    names = page("other-frameworks")
    assert names.signature.agreement_["ari"] == 1.0 and names.signature.scores_.mean() > 0.8
    assert names.signature.aggregation == "secagg" and names.signature.mask == "permutation"
    assert (names.weights.shape, names.biases.shape) == ((10, 64), (10,))


def test_clients_of_jax_find_their_clusters(page: Page) -> None:
    pytest.importorskip("jax", reason="JAX is not installed: pip install jax")
    names = page("other-frameworks")
    assert names.ifca.agreement_["ari"] == 1.0 and names.ifca.scores_.mean() > 0.8
