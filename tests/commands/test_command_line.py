"""What the command line says: help texts, the list of protocols, and mistakes in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from securecluster.cli.main import main
from securecluster.commands import command_line, options
from securecluster.commands.command_line import SHOWN, Section
from securecluster.core import installed_packages
from securecluster.errors import UsageError, in_python
from securecluster.protocols import registry
from securecluster.protocols.registry import MODELS, PROTOCOLS, protocol_class

SMALL = ["--clients", "6", "--samples", "20", "--rounds", "2", "--epochs", "1", "--model", "linear"]
Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Return a function of a command that returns its exit code, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize("columns", ["80", "200"])
def test_help_of_a_protocol_describes_25_options_in_full_and_names_all(
    name: str, columns: str, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    code, text, _ = said("run", name, "--help")
    assert code == 0
    lines = text.splitlines()
    assert max(map(len, lines)) <= min(100, int(columns)) and "…" not in text
    described, named = text.split("\nmore options")
    assert len(re.findall("^  --", described, re.MULTILINE)) <= SHOWN and "--batch-size" in named
    for section in options.of_protocol(protocol_class(name)).values():
        for option in fields(section.kind):
            flag = f"--{option.name.replace('_', '-')}"
            offered = re.search(rf"{flag}[ ,\n]", text) is not None
            assert offered == (option.name not in section.hidden), flag
    everything = said("run", name, "--help-all")[1]
    assert len(everything.splitlines()) > len(lines)
    assert "…" not in everything and "default: 40" in everything
    assert len(re.findall("^  --", everything, re.MULTILINE)) <= 60


def test_types_are_words(said: Said) -> None:
    for command in (["run", "cfl"], ["compare", "cfl", "ifca"], ["sweep", "cfl"]):
        text = said(*command, "--help-all")[1]
        assert not re.search(r"\{|\bINT\b|\bSTR\b|\bFLOAT\b|\bNone\b", text)
    assert "--rounds INTEGER" in text and "--noise NUMBER ..." in text and "--out PATH" in text


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("run", "usage: securecluster run PROTOCOL"),
        ("compare", "usage: securecluster compare PROTOCOLS"),
        ("sweep", "usage: securecluster sweep PROTOCOLS"),
        ("resume", "--retry"),
        ("replay", "usage: securecluster replay DIR"),
        ("report", "--bundle PATH"),
        ("audit", "--as NAME"),
        ("check", "--masks NAME ..."),
        ("node", "init|serve|ledger"),
        ("node serve", "--app NAME"),
        ("flower-init", "usage: securecluster flower-init DIR"),
        ("list", "--privacy"),
    ],
)
def test_each_command_has_help_of_its_own(command: str, words: str, said: Said) -> None:
    for flag in ("--help", "-h"):
        code, text, errors = said(*command.split(), flag)
        assert code == 0 and not errors
        assert words in text and len(text.splitlines()) <= 60


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("run", "run takes a protocol first: securecluster run cfl"),
        ("report", "report takes the run folder first"),
        ("node", "node takes what to do and a folder"),
        ("run CFL", "did you mean 'cfl'?"),
        ("CFL", "did you mean 'run cfl'?"),
        ("help", "did you mean '--help'?"),
        ("List", "did you mean 'list'?"),
        ("run cfl --round 3", "unknown option '--round': did you mean '--rounds'?"),
        ("run cfl --rounds ten", "--rounds takes a whole number, not 'ten'"),
        ("run cfl --lr fast", "--lr takes a number, not 'fast'"),
        ("run cfl --rounds", "--rounds: expected one argument"),
        ("run cfl --no-rounds", "unknown option '--no-rounds'"),
        ("run cfl -rounds 5", "unknown option '-rounds': did you mean '--rounds'?"),
        ("run cfl \u2014rounds 5", "did you mean '--rounds'?"),
        ("run cfl fedavg", "run takes one protocol: compare runs several"),
        ("run mine/own.py:Own", "names no module: stand in its folder"),
        ("report . --format pdf", "unknown option '--format': choose one of"),
        ("run cfl here", "these words belong to no option: here"),
        ("sweep cfl --noise 0,0.1,1 --clip 1", "--noise takes a number or several, with blanks"),
        ("run cfl --lr -1", "--lr = -1.0 cannot train: --lr is a positive number, --epochs, steps"),
        ("run fedavg --target-epsilon 1 --noise 2 --clip 1", "--noise and --target-epsilon both"),
        ("run fedavg --epsilon 0", "--target-epsilon = 0.0 is not possible"),
        ("run cfl --aggregation secagg", "take --signature gradient, or take --aggregation plain"),
        ("run ifca --k 0", "--k = 0 clusters cannot be made"),
        ("run cfl --model resnet", "unknown --model 'resnet': did you mean 'resnet9'?"),
        ("run cfl --seed -1", "--seed = -1 is not possible"),
        ("sweep cfl --noise 0 --seed -1", "--seed = -1 is not possible"),
        ("sweep cfl:sketc=64 --noise 0 --clip 1", "did you mean 'sketch'?"),
        ("replay . too", "these words belong to no option: too"),
        ("list protocols", "these words belong to no option: protocols"),
    ],
)
def test_a_mistake_is_one_sentence_with_options_as_they_are_typed(
    arguments: str, sentence: str, said: Said
) -> None:
    code, text, errors = said(*arguments.split())
    assert (code, text) == (2, "")
    assert sentence in errors and errors.count("\n") == 1


@dataclass(frozen=True)
class Example:
    """Options of all types."""

    needed: int
    number: float | None = 0.5
    either: int | str | None = None
    several: tuple[float, ...] | None = None
    names: tuple[str, ...] = ("a", "b")
    switch: bool = True
    path: Path | None = None


def example(*arguments: str) -> Example:
    """Return the options of a command line."""
    sections = {"example": Section("example", Example)}
    found: Example = command_line.parsed("command", arguments, "", sections).example
    return found


def test_values_have_the_types_of_their_fields() -> None:
    assert example("--needed", "3") == Example(3)
    assert example("--needed=-3", "--number", "None").number is None
    assert example("--needed", "3", "--number", "1e-3").number == 1e-3
    assert example("--needed", "3", "--either", "7").either == 7
    assert example("--needed", "3", "--either", "x7").either == "x7"
    made = example(
        "--several", "1", "2.5", "--names", "--no-switch", "--path", "a/b", "--needed", "3"
    )
    assert made == Example(3, several=(1.0, 2.5), names=(), switch=False, path=Path("a/b"))
    assert example("--needed", "3", "--several", "None").several is None
    with pytest.raises(UsageError, match="required: needed"):
        example()


def test_options_may_be_spelled_as_in_python() -> None:
    sections = {"method": Section("", protocol_class("cfl"))}
    made = command_line.parsed("command", ["--batch_size", "7"], "", sections)
    assert made.method.batch_size == 7


def test_the_list_has_a_line_for_each_protocol(said: Said) -> None:
    code, text, _ = said("list")
    lines = text.splitlines()
    assert code == 0 and max(map(len, lines[: len(PROTOCOLS) + 1])) <= 80
    assert [line.split()[0] for line in lines[1 : len(PROTOCOLS) + 1]] == list(PROTOCOLS)
    foreign = text.partition("ForeignModel")[2].partition("\n\n")[0]
    assert max(map(len, foreign.splitlines())) <= 80
    assert re.search(r"^  train, outputs, drawn start   ifca, clove$", foreign, re.MULTILINE)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_list_says_whether_a_protocol_is_given_k(name: str) -> None:
    given = {field.name: field.default for field in fields(protocol_class(name))}
    number = given.get("k", given.get("tasks", "none"))
    words = {"none": "no", None: "may"}
    assert PROTOCOLS[name].k == words.get(number, "yes")


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_list_says_of_what_finds_no_groups(name: str) -> None:
    baselines = ("random", "fedavg", "finetune", "mrmtl", "local")
    assert PROTOCOLS[name].finds.startswith("none") == (name in baselines)
    # a run of `local` alone calls no client for a reply
    assert (PROTOCOLS[name].reads == "nothing") == (name == "local")


def test_the_list_has_the_models_that_there_are() -> None:
    from securecluster.models.architectures import names

    assert sorted(MODELS) == sorted(names())


@pytest.mark.usefixtures("pictures")
def test_a_run_says_what_comes_next(said: Said, tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    text = said("run", "fedavg", *SMALL, "--out", str(folder))[1]
    assert f"everything is in {folder}" in text
    assert f"securecluster report '{folder}' --html" in text
    assert f"securecluster audit '{folder}'" in text
    assert not list(folder.glob("*.png")), "they are drawn by report, or with --pictures"


def test_a_quiet_run_with_noise_says_its_epsilon(said: Said, tmp_path: Path) -> None:
    noisy = ["--clip", "1", "--noise", "2", "--quiet", "--out", str(tmp_path / "noisy")]
    text = said("run", "fedavg", *SMALL, *noisy)[1]
    assert re.fullmatch(r"ε: \d+\.\d+ at δ = 1e-05 .*\n", text)
    assert said("resume", str(tmp_path / "noisy"), "--quiet") == (0, text, "")
    assert said("run", "fedavg", *SMALL, "--quiet", "--out", str(tmp_path / "plain"))[1] == ""


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        ("give the clip norm too (--clip)", "give the clip norm too (clip)"),
        ("compare sketches (--sketch 256) or", "compare sketches (sketch=256) or"),
        ("compressed updates (--model linear), take", "compressed updates (model='linear'), take"),
        ("a rate (--lr 0.2 in place of 0.5)", "a rate (lr=0.2 in place of 0.5)"),
        ("levels: --noise 0 0.1 0.5, or", "levels: noise=[0, 0.1, 0.5], or"),
        ("--batch-size and --lr are positive", "batch_size and lr are positive"),
        ("a file (--data FILE), not", "a file (data=FILE), not"),
        ("securecluster resume a --retry", "securecluster resume a --retry"),
        ("a well-known fact -- such as this", "a well-known fact -- such as this"),
    ],
)
def test_errors_in_python_have_keywords(typed: str, written: str) -> None:
    assert in_python(typed) == written
    assert str(UsageError(typed)) == written


def test_other_packages_protocols_are_listed(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    from importlib.metadata import EntryPoint

    point = EntryPoint("mine", "my_package:Mine", registry.GROUP)
    monkeypatch.setattr(installed_packages, "points", lambda group: [point])
    assert re.search(r"^mine +see my_package:Mine$", said("list")[1], re.MULTILINE)
