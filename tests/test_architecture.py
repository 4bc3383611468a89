"""Rooms import only rooms below them, no module imports itself through others, and the command line
answers without torch.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import securecluster

ROOT = Path(__file__).resolve().parent.parent
FOUNDATION = {"core", "errors"}
MECHANISMS = FOUNDATION | {"messaging", "clustering", "models", "data", "privacy"}
BELOW_PARTIES = MECHANISMS | {"training", "runtime", "protections"}
BELOW_RUNS = BELOW_PARTIES | {"parties", "folders", "results", "statements"}
BELOW_ATTACKS = BELOW_RUNS | {"runs", "protocols.common", "protocols"}
BELOW_REPORTS = BELOW_ATTACKS | {"attacks", "nodes", "figures", "recordings"}
BELOW_CLI = BELOW_REPORTS | {"reports", "commands", "studies", "audits"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "core": {"errors"},
    "messaging": FOUNDATION,
    "clustering": FOUNDATION,
    "models": FOUNDATION,
    "data": FOUNDATION | {"models"},
    "privacy": FOUNDATION | {"messaging"},
    "training": FOUNDATION | {"models", "data", "privacy", "messaging"},
    "runtime": FOUNDATION | {"training", "privacy", "data", "messaging"},
    "protections": FOUNDATION | {"runtime", "privacy", "data", "messaging"},
    "parties": BELOW_PARTIES,
    "folders": BELOW_PARTIES | {"parties"},
    "results": BELOW_PARTIES | {"parties", "folders"},
    "statements": BELOW_PARTIES | {"parties", "folders", "results"},
    "runs": BELOW_RUNS,
    "protocols.common": BELOW_RUNS | {"runs"},
    "protocols": BELOW_RUNS | {"runs", "protocols.common"},
    "attacks": BELOW_ATTACKS,
    "nodes": BELOW_RUNS | {"runs"},
    "figures": FOUNDATION | {"models", "clustering", "folders"},
    "recordings": FOUNDATION | {"messaging"},
    "reports": BELOW_REPORTS,
    "commands": BELOW_REPORTS | {"reports"},
    "studies": BELOW_REPORTS | {"reports", "commands"},
    "audits": BELOW_REPORTS | {"reports", "commands", "studies"},
    "cli": BELOW_CLI,
    "benchmarks": BELOW_CLI | {"cli"},
}
FOLDERS = ("securecluster", "protocols", "attacks", "benchmarks")
INSTALLED_IN_PACKAGE = ("protocols", "attacks")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
FOR_ALL_METHODS = ("authoring", "registry")
GUESTS = "securecluster.protocols.contrib"
FRONT_DOORS = ("securecluster", "securecluster.__main__", "securecluster.plot")


def name_of(path: Path) -> str:
    """Return the module that a file is imported as."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    package = ("securecluster", *parts) if parts[0] in INSTALLED_IN_PACKAGE else parts
    return ".".join(part for part in package if part != "__init__")


SOURCES = {name_of(path): path.read_text() for path in FILES}


def room_of(module: str) -> str | None:
    """Return the room of a module; None of the package's front doors."""
    if module in FRONT_DOORS:
        return None
    parts = module.split(".")
    if parts[0] == "benchmarks":
        return "benchmarks"
    if parts[1] == "protocols" and parts[2:3] == ["common"]:
        return "protocols.common"
    return parts[1]


@functools.cache
def parsed(source: str) -> ast.Module:
    """Return the syntax tree of a source."""
    return ast.parse(source)


def imports(tree: ast.Module, known: Mapping[str, str]) -> Iterator[str]:
    """Yield the modules of the package that a source imports, wherever in it that is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        if isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in known else node.module
        # by its name, such as `importlib.import_module("securecluster.cli.main")`
        if isinstance(node, ast.Call) and "import_module" in _called(node.func):
            names = [part.value for part in node.args if isinstance(part, ast.Constant)]
            yield from (name for name in names if name in known)


def _called(function: ast.expr) -> str:
    """Return the last name of what is called; empty of what has none."""
    return str(getattr(function, "attr", getattr(function, "id", "")))


def runtime_imports(source: str, known: Mapping[str, str]) -> set[str]:
    """Return the modules that are loaded together with a source."""
    body = [
        node
        for node in parsed(source).body
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.If)
    ]
    return set(imports(ast.Module(body, []), known))


def method_of(module: str) -> str | None:
    """Return the method that a module of the room protocols belongs to; None of its front doors."""
    parts = [part for part in module.split(".") if part != "contrib"]
    return parts[2] if len(parts) > 2 and parts[2] not in FOR_ALL_METHODS else None


def offences(sources: Mapping[str, str]) -> list[str]:
    """Return the imports that no room, or no method, may have."""
    found = []
    for module, source in sources.items():
        room = room_of(module)
        if room is None:
            continue
        for other in imports(parsed(source), sources):
            target = room_of(other)
            if target is None:
                continue
            upward = target != room and target not in MAY_IMPORT[room]
            methods = {method_of(module), method_of(other)} - {None}
            siblings = room == target == "protocols" and len(methods) > 1
            if upward or siblings:
                found.append(f"{module} imports {other}")
    return found


def in_cycles(below: Mapping[str, set[str]]) -> list[str]:
    """Return what leads to itself, given what each one needs."""
    left = dict(below)
    while True:
        free = [name for name, others in left.items() if not others & left.keys()]
        if not free:
            return sorted(left)
        for name in free:
            del left[name]


def cycles(sources: Mapping[str, str]) -> list[str]:
    """Return modules that load themselves through others."""
    return in_cycles(
        {module: runtime_imports(source, sources) - {module} for module, source in sources.items()}
    )


def circles(sources: Mapping[str, str]) -> list[str]:
    """Return modules that name themselves through others, in functions or for types alone.

    A package's front door hands names on, and is left out.
    """
    doors = {module for module in sources if any(m.startswith(f"{module}.") for m in sources)}
    needed = {
        module: set(imports(parsed(source), sources)) - {module} - doors
        for module, source in sources.items()
        if module not in doors | set(FRONT_DOORS)
    }
    return in_cycles(needed)


def room_cycles(sources: Mapping[str, str]) -> list[str]:
    """Return rooms that need themselves through others, by imports wherever they stand."""
    below: dict[str, set[str]] = {}
    for module, source in sources.items():
        room = room_of(module)
        if room is not None:
            targets = {room_of(other) for other in imports(parsed(source), sources)}
            below.setdefault(room, set()).update(targets - {None, room})  # type: ignore[arg-type]
    return in_cycles(below)


def test_every_module_lies_in_a_room() -> None:
    assert {room_of(module) for module in SOURCES} - {None} <= MAY_IMPORT.keys()


def test_no_room_takes_the_place_of_a_public_name() -> None:
    assert not MAY_IMPORT.keys() & set(securecluster.__all__)


def test_the_table_of_rooms_has_no_cycle() -> None:
    seen: set[str] = set()
    for room, below in MAY_IMPORT.items():
        assert below <= seen, f"{room} may import a room that stands after it"
        seen.add(room)


@pytest.mark.always
def test_imports_point_down() -> None:
    assert offences(SOURCES) == []


def test_no_module_loads_itself() -> None:
    assert cycles(SOURCES) == []


def test_no_circle_of_files_is_there_even_for_types() -> None:
    assert circles(SOURCES) == []


@pytest.mark.always
def test_no_room_needs_itself() -> None:
    assert room_cycles(SOURCES) == []


def test_the_checks_can_fail() -> None:
    upward = {
        "securecluster.messaging.wire": "from securecluster.runtime.endpoint import Endpoint",
        "securecluster.runtime.endpoint": "",
    }
    assert offences(upward) == [
        "securecluster.messaging.wire imports securecluster.runtime.endpoint"
    ]
    hidden = {
        "securecluster.training.batches": "def f():\n    from securecluster.protocols import cfl",
        "securecluster.protocols": "",
        "securecluster.protocols.cfl": "",
    }
    assert offences(hidden) == [
        "securecluster.training.batches imports securecluster.protocols.cfl"
    ]
    by_name = {
        "securecluster.messaging.transcript": "def f():\n"
        "    importlib.import_module('securecluster.reports.loading')",
        "securecluster.reports.loading": "import securecluster.messaging.transcript",
    }
    assert len(offences(by_name)) == 1
    assert room_cycles(by_name) == ["messaging", "reports"]
    siblings = {
        "securecluster.protocols.cfl.protocol": "from securecluster.protocols.fedavg import FedAvg",
        "securecluster.protocols.fedavg": "",
    }
    assert len(offences(siblings)) == 1
    own = {
        "securecluster.protocols.cfl.protocol": "from securecluster.protocols.cfl.client import "
        "CFLClient",
        "securecluster.protocols.cfl.client": "import securecluster.protocols.cfl.protocol",
    }
    assert offences(own) == []
    assert len(cycles(own)) == 2
    typed = {
        "securecluster.results.fitted": "def f():\n    import securecluster.results.export",
        "securecluster.results.export": "if True:\n    import securecluster.results.fitted",
    }
    assert cycles(typed) == [] and len(circles(typed)) == 2


def test_only_the_command_line_knows_protocols_by_name() -> None:
    below = {m: s for m, s in SOURCES.items() if room_of(m) in BELOW_RUNS | {"runs", "nodes"}}
    assert not [module for module, source in below.items() if "securecluster.protocols" in source]


def guest_offences(sources: Mapping[str, str]) -> list[str]:
    """Return imports of guests beyond the author's interface, and imports of guests by others."""
    found = []
    for module, source in sources.items():
        guest = module.startswith(f"{GUESTS}.")
        own = ".".join(module.split(".")[:4])
        for other in imports(parsed(source), sources):
            is_own = guest and (other == own or other.startswith(f"{own}."))
            foreign = guest and other != "securecluster.protocols.authoring" and not is_own
            of_others = other.startswith(GUESTS) and not guest and room_of(module) != "benchmarks"
            if foreign or of_others:
                found.append(f"{module} imports {other}")
    return found


def test_guests_are_written_against_the_author_s_interface_and_nobody_needs_one() -> None:
    assert len([module for module in SOURCES if module.startswith(f"{GUESTS}.")]) >= 6
    assert guest_offences(SOURCES) == []
    base = "securecluster.protocols.common.base"
    forged = {
        f"{GUESTS}.a": f"import {base}\nfrom securecluster.protocols import authoring as fl",
        f"{GUESTS}.b": f"from {GUESTS} import a",
        base: f"def f():\n    from {GUESTS} import b",
        "securecluster.protocols.authoring": "",
        GUESTS: "",
    }
    assert len(guest_offences(forged)) == 3


MAIN = "from securecluster.cli.main import main\n"
LARGE = "torch scipy sklearn matplotlib pandas"
# what a process does, and the modules that it does not load for it
LIGHT = {
    "help and a refusal": (
        'assert main(["run", "cfl", "--help"]) == 0 and main(["run", "cfl", "--mask", "x"]) == 2',
        LARGE,
    ),
    "refused data": (
        'assert main(["run", "cfl", "--alpha", "1"]) == main(["run", "cfl", "--data", "x"]) == 2',
        "pyarrow PIL datasets pandas sklearn scipy",
    ),
    "the list": (
        'assert main(["list"]) == 0 and main(["--help"]) == 0',
        f"{LARGE} securecluster.protocols.common securecluster.protocols.fedavg",
    ),
    "a default run": (
        'assert main(["run", "cfl", "--rounds", "1", "--quiet"]) == 0 and "torch" in sys.modules',
        "sklearn pandas opacus tenseal",
    ),
    "one protocol": (
        "from securecluster import FedAvg",
        " ".join(f"securecluster.protocols.{name}" for name in ("cfl", "nsim", "oneshot", "srfca")),
    ),
    "protocols": ("import securecluster.protocols", LARGE),
    "the package": ("import securecluster", f"{LARGE} numpy"),
    "pictures": ("import securecluster; securecluster.plot.similarity", "matplotlib"),
}


@pytest.mark.always
@pytest.mark.parametrize("name", LIGHT)
def test_nothing_heavy_is_loaded_before_it_is_needed(name: str, tmp_path: Path) -> None:
    statement, heavy = LIGHT[name]
    load = MAIN if "main(" in statement else ""
    code = (
        f"import sys\n{load}{statement}\nsys.exit(str({set(heavy.split())} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stderr.splitlines()[-1:] == ["set()"], done.stderr
