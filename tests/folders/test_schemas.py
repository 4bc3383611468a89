"""Folders of earlier versions: each schema that this version reads has a folder of its own here.

`folders/run-folder-N.zip` is a run folder as a version of schema N wrote it, of FL+HC on digits
with four clients, a mask and keys from the seed. Whoever raises a schema leaves the folder of the
one before where it is, and adds one. `run-folder-3-ray.zip` is the same run with its clients in two
blocks on Ray, which has left since.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from securecluster import Federation, Settings, load
from securecluster.cli.main import main
from securecluster.core import manifest
from securecluster.errors import RunFolderError
from securecluster.folders import run_folder
from securecluster.protocols import FLHC
from securecluster.reports.finished_run import open_run
from securecluster.results import saving as serialization

FOLDERS = Path(__file__).parent / "folders"
ON_RAY = "3-ray"
FLHC_AGAIN = [
    "run", "flhc", "--clients", "4", "--samples", "20", "--pre-rounds", "1", "--epochs", "1",
    "--batch-size", "20", "--model", "linear", "--mask", "permutation", "--keys-from-seed",
]  # fmt: skip


def unpacked(name: object, where: Path) -> Path:
    with zipfile.ZipFile(FOLDERS / f"run-folder-{name}.zip") as archive:
        archive.extractall(where)
    config = json.loads((where / "config.json").read_text())
    assert str(name).startswith(str(config["schema"]))
    return where


@pytest.fixture(params=[*run_folder.READ, ON_RAY])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The run folder of a schema."""
    return unpacked(request.param, tmp_path / "run")


@pytest.fixture
def on_ray(tmp_path: Path) -> Path:
    """The folder of a run on Ray."""
    return unpacked(ON_RAY, tmp_path / "run")


def test_a_version_writes_the_newest_schema_that_it_reads_and_reads_at_most_one_more() -> None:
    for module in (run_folder, serialization):
        assert module.READ[0] == module.SCHEMA
        assert module.READ in ((module.SCHEMA,), (module.SCHEMA, module.SCHEMA - 1))


def test_a_folder_of_an_earlier_version_is_read(
    folder: Path, capsys: pytest.CaptureFixture[str], no_pictures: None
) -> None:
    assert main(["report", str(folder), "--html", "--bundle", str(folder.parent / "b.zip")]) == 0
    printed = capsys.readouterr().out
    assert "round   2/2" in printed and "permutation" in printed
    run = open_run(folder)
    assert run.result["bytes"]["up"] == 40420
    assert run.result["metrics"]["ari"] == 0.0 and run.result["labels"] == [0, 0, 0, 0]
    fitted = load(folder)
    assert isinstance(fitted, FLHC) and (fitted.rounds, fitted.pre_rounds) == (2, 1)
    assert fitted.labels_.tolist() == [0, 0, 0, 0]
    (model,) = fitted.models_
    # the weights as they lie in the file, without this package
    raw = (folder / "models.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for name, values in model.items():
        first, last = header[f"cluster0.{name}"]["data_offsets"]
        stored = np.frombuffer(raw[8 + length :][first:last], "<f4")
        assert stored.tolist() == np.ravel(values).tolist()
    assert list(model) == ["1.weight", "1.bias"]


def test_a_folder_is_audited_by_a_later_version(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(folder), "--attack", "linkage", "--quiet"]) == 0
    table = next(folder.glob("audit-server-of-*.json"))
    (row,) = json.loads(table.read_text())["attacks"]
    assert 0 <= row["run"]["score"]["value"] <= 1


def test_another_schema_is_refused_by_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((folder / "config.json").read_text())
    for schema, sentence in (
        (1, "was written in schema 1, this version reads"),
        (max(run_folder.READ) + 1, f"was written in schema {max(run_folder.READ) + 1}, this"),
        (None, "was written in schema None, this version reads"),
    ):
        data = json.dumps({**config, "schema": schema, "version": "9.9\x1b"}).encode()
        (folder / "config.json").write_bytes(data)
        mark = manifest.encode({"config.json": manifest.Mark.of(data)})
        (folder / ".securecluster").write_bytes(mark)
        for command in ("report", "resume", "audit", "replay"):
            assert main([command, str(folder)]) == 2
            error = capsys.readouterr().err
            assert sentence in error and error.count("\n") == 1
            assert "use the version that wrote it (securecluster 9.9\\x1b)" in error


def test_an_option_that_came_later_has_its_default_and_one_that_went_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = serialization.read_kept
    changes: dict[str, object] = {}

    def changed(path: Path) -> serialization.FittedState:
        found = whole(path)
        for name, value in changes.items():
            found.learned.params.pop(name, None)
            if value is not None:
                found.learned.params[name] = value
        return found

    monkeypatch.setattr(serialization, "read_kept", changed)
    changes["landmarks"] = None  # as if the version that wrote it had no such option
    assert FLHC.load(folder).landmarks is None
    changes["bandwidth"] = 2.0
    with pytest.raises(RunFolderError, match="was saved with bandwidth, which FLHC does not have"):
        FLHC.load(folder)


def test_settings_of_a_run_on_ray_are_those_of_one_process(on_ray: Path) -> None:
    written = json.loads((on_ray / "config.json").read_text())["settings"]
    assert (written.pop("engine"), written.pop("workers")) == ("ray", 2)
    expected = Settings(**written)
    assert Settings(**open_run(on_ray).config["settings"]) == expected
    fitted = load(on_ray)
    assert fitted.kept_.learned.settings == expected
    # the results are those of the run in one process, which has the other folder
    federation = Federation.simulate("digits", clients=4, samples=20, seed=0)
    one = FLHC(**fitted.get_params()).fit(federation, expected)
    np.testing.assert_allclose(one.client_models_.values, fitted.client_models_.values, atol=1e-5)
    assert one.bytes_ == fitted.bytes_


@pytest.mark.parametrize("stopped", [True, False])
def test_a_run_on_ray_is_not_gone_on_with(
    stopped: bool, on_ray: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["resume", str(on_ray)]
    if stopped:  # as a kill before the end leaves it
        for name in ("result.json", "manifest.json"):
            (on_ray / name).unlink()
        (on_ray / "last-round").rename(on_ray / "checkpoint-000009")
    else:
        command = [*FLHC_AGAIN, "--rounds", "3", "--out", str(on_ray)]
    before = {path: path.read_bytes() for path in on_ray.rglob("*.safetensors")}
    assert main([*command, "--quiet"]) == 2
    error = capsys.readouterr().err
    assert "holds a run in blocks on Ray, which has left securecluster" in error
    assert error.count("\n") == 1
    assert before == {path: path.read_bytes() for path in on_ray.rglob("*.safetensors")}
    assert (on_ray / "result.json").exists() != stopped
