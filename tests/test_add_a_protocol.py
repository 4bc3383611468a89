"""The page docs/add-a-protocol.md: its code runs, and mistakes in its template."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from securecluster import Federation, Rotation, SecureClusterError
from securecluster.cli.main import main
from securecluster.cli.new_command import TEMPLATES
from securecluster.core import installed_packages
from securecluster.core.field_docs import _definitions
from securecluster.protocols import conformance

PAGE = Path(__file__).parent.parent / "docs" / "add-a-protocol.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
TEMPLATE = (TEMPLATES / "mean_clusters.py").read_text()
SMALL = ["--clients", "6", "--samples", "30", "--rounds", "2", "--epochs", "1", "--quiet"]


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The page's template, as a file of its own, in a package that declares it."""
    info = tmp_path / "mean-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mean\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[securecluster.protocols]\nmean-clusters = mean_clusters:MeanClusters\n"
    )
    (tmp_path / "mean_clusters.py").write_text(TEMPLATE)
    monkeypatch.syspath_prepend(str(tmp_path))
    installed_packages.points.cache_clear()
    import mean_clusters  # type: ignore[import-not-found]

    yield mean_clusters
    installed_packages.points.cache_clear()
    sys.modules.pop("mean_clusters")


def clients(seed: int, count: int = 8) -> Federation:
    """Clients of two kinds, upright digits and digits that are upside down."""
    return Federation.simulate(
        "digits", scenario=Rotation(clusters=2), clients=count, samples=40, seed=seed
    )


@pytest.mark.always
def test_every_block_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ModuleType("page")  # type hints are looked up in the module of a class
    monkeypatch.setitem(sys.modules, "page", session)
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), session.__dict__)


def test_the_template_works_under_another_mask(template: ModuleType) -> None:
    small = {"model": "linear", "epochs": 1, "k": 2}
    fitted = template.MeanClusters(**small, rounds=1, mask="rotation").fit(clients(0))
    assert fitted.agreement_ is not None and fitted.agreement_["exact"]


def test_the_template_runs_from_the_command_line(
    template: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["run", "mean-clusters", *SMALL, "--k", "2", "--out", str(out)]) == 0
    assert json.loads((out / "result.json").read_text())["protocol"] == "mean-clusters"
    assert main(["resume", str(out)]) == 0
    assert main(["replay", str(out)]) == 0
    main(["run", "mean-clusters", "--help-all"])
    assert "cuts at the largest gap" in " ".join(capsys.readouterr().out.split())


def test_the_template_clusters_by_gradient_signatures(template: ModuleType) -> None:
    gradient = {"k": 2, "signature": "gradient"}
    small = {"model": "linear", "epochs": 1, "rounds": 1}
    fitted = template.MeanClusters(**gradient, **small).fit(clients(0))
    assert fitted.agreement_ is not None and fitted.agreement_["exact"]


@pytest.mark.exhaustive
def test_the_template_by_gradient_signatures_passes_every_check(template: ModuleType) -> None:
    conformance.check(template.MeanClusters, k=2, signature="gradient").require()


# an author's mistakes in the template: a line, what stands there instead, and what the error says
MISTAKES = [
    ('    name: ClassVar[str] = "mean-clusters"\n', "", "MeanClusters has no name: set `name`"),
    ('"mean-clusters"', '"mean clusters!"', "set `name` to letters, digits and hyphens"),
    (
        "class MeanClient(fl.SignatureClient)",
        "class MeanClient",
        "set it to a subclass of TrainingClient",
    ),
    (
        "    client: ClassVar[type[fl.TrainingClient]] = MeanClient\n",
        "",
        "which TrainingClient lacks",
    ),
    ("    signature_method: ClassVar[Any] = MeanClient.send_mean\n", "", "names no signature"),
    ("ClassVar[Any] = MeanClient.send_mean", "ClassVar[Any] = 'send_mean'", "that can be gathered"),
    ("signature_method: ClassVar[Any] =", "signature_method: Any =", "annotate it as ClassVar"),
    ("signature_method: Cl", "signature: Cl", "name the client method `signature_method`"),
    ("    k: int | None = None\n", "    k: int | None\n", "MeanClusters.k has no default"),
    ('    """number of clusters; None cuts at the largest gap"""\n', "", "k has no description"),
    ("    k: int | None = None\n", "    labels_: int | None = None\n", "as results of fit do"),
    ("    k: int | None = None\n", "    fit: int | None = None\n", "has the name of a method of"),
    ("    k: int | None = None\n", "    save: int | None = None\n", "has the name of a method of"),
    ("    k: int | None = None\n", "    privacy: int | None = None\n", "of a group of options"),
    ("    k: int | None = None\n", "    k: list[int] = []\n", "mutable default"),
    ("@fl.protocol\n", "", "declares k and lacks @protocol"),
    ("    def cluster(self,", "    def clusters(self,", "lacks cluster: define cluster(self, sig"),
    ("signatures: torch.Tensor, seed: int)", "signatures: torch.Tensor)", "give it these arg"),
    ("def check(self, clients: int)", "def check(self)", "is called as check(self, clients)"),
    (
        '    @fl.answers(fl.GATHER, through=("mean",), fresh=True)\n',
        "",
        "decorate the method with @ans",
    ),
    ("@fl.answers(fl.GATHER, through", "@fl.answers(fl.SUM, through", "that can be gathered"),
    (
        '@fl.answers(fl.GATHER, through=("mean",), fresh=True)',
        "@fl.answers",
        "write @answers(GATHER, ...)",
    ),
    ('through=("mean",)', 'through="mean"', 'write through=("mean",)'),
    ('through=("mean",)', 'through=("means",)', "names 'means': a SampleMean has mean"),
    ("fresh=True", "fresch=True", "knows no 'fresch'"),
    ('Real(("width",))', 'Real(("wdith",))', "has a bound by 'wdith'"),
    ("Rows(torch.stack(means))", "torch.stack(means)", "put it into Rows"),
    ("Rows(torch.stack(means))", "Rows(torch.stack(means).numpy())", "make it a torch.Tensor"),
    ("Rows(torch.stack(means))", "Rows(torch.stack(means) / 0)", "check these clients' data"),
    ("-> SampleMean:", "-> SampleMeen:", "a class that is not there"),
    ("context: fl.CallContext, query: fl.Empty", "query: fl.Empty", "takes (self, context, query)"),
    ("signatures).double()", "signatures[:3]).double()", "square distance matrix"),
    ("count=self.k)", "count=self.k, height=1.0)", "give one of them"),
    ('"average", count', '"avrage", count', "did you mean 'average'"),
    ('labels, "average")', 'labels, "avrage")', "did you mean 'average'"),
    ("return fl.linkage_clusters(", "fl.linkage_clusters(", "a list of 8 whole numbers"),
    ("return fl.nearest(", "fl.nearest(", "a list of 3 whole numbers"),
    ("return fl.nearest(", "return [7, 7, 7]  # ", "join one of these"),
]


@pytest.mark.parametrize(("old", "new", "sentence"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_in_the_template_is_one_sentence(
    old: str, new: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TEMPLATE.count(old) >= 1
    source = TEMPLATE.replace(old, new)
    (tmp_path / "mistaken.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mistaken", raising=False)
    with pytest.raises(SecureClusterError) as caught:
        module = importlib.import_module("mistaken")
        fitted = module.MeanClusters(k=2, rounds=1, epochs=1, model="linear").fit(clients(0))
        fitted.join(clients(1, 4).select(range(3)))
    sys.modules.pop("mistaken", None)
    _definitions.cache_clear()  # the next test has another module of this name
    message = str(caught.value)
    assert sentence in message
    assert "\n" not in message
