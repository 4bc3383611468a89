"""`securecluster flower-init`: a project of Flower with a protocol, for the user to fill in."""

from __future__ import annotations

import keyword
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from string import Template

from securecluster.commands import command_line
from securecluster.core import atomic_files
from securecluster.core.number_format import printable
from securecluster.core.stops import output
from securecluster.errors import UsageError

SHIM = Path(__file__).parents[1] / "nodes" / "flower_shim.py"

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "$project"
version = "0.1.0"
description = "A protocol of securecluster over Flower"
license = "Apache-2.0"
dependencies = ["flwr>=1.40,<1.43"]

[tool.hatch.build.targets.wheel]
packages = ["$package"]

[tool.flwr.app]
publisher = "me"

[tool.flwr.app.components]
serverapp = "$package.server_app:server_app"
clientapp = "$package.client_app:client_app"

[tool.flwr.app.config]
clients = 8
seed = 0
out = "$runs/first" # the server's run; a server that was stopped goes on there
classes = $classes        # of the labels
roster = ""         # file with the clients' public keys; without it, their word is taken
key = ""            # file with 32 secret bytes, of a server that adds noise or opens ciphertexts
joins = ""          # numbers on the roster, such as "3 4", of newcomers who join the run in out
scores = false      # ask clients for the scores of their models at the end, which no noise covers
server = ""         # this server's name, as owners of nodes may have it in their policies
seconds = 3600      # that the server waits for the replies to one call
"""

TASK = '''\
"""What runs: the protocol, and each client's data. Both are yours to change."""

from securecluster import CFL, Federation, LabelSwap

protocol = CFL(rounds=3, mask="permutation", sketch=64, aggregation="secagg")


def load(number: int, clients: int) -> Federation:
    """Return the data of one client: here a shard of digits, on a node of yours its own data."""
    scenario = LabelSwap(clusters=2)
    everyone = Federation.simulate("digits", scenario=scenario, clients=clients, samples=60, seed=0)
    return everyone.select([number])
'''

TABLE = '''\
"""What runs: the protocol, and each client's table. Both are yours to change."""

import numpy as np
import pandas as pd
from securecluster import CFL, Federation

protocol = CFL(rounds=3, model="linear", mask="permutation", sketch=8, aggregation="secagg")
CLASSES = ["healthy", "ill"]  # of the label, in this order at all clients
CATEGORIES = {"smoker": ["never", "once", "yes"], "ward": ["a", "b"]}  # of columns of text


def rows_of(number: int) -> pd.DataFrame:
    """Return the rows of one client: made up here, on a node of yours pd.read_csv("table.csv")."""
    draw = np.random.default_rng(number)
    columns = {name: draw.choice(texts, 60) for name, texts in CATEGORIES.items()}
    age = draw.integers(20, 90, 60)
    ill = np.where(age + draw.normal(0, 20, 60) > 55, *reversed(CLASSES))
    return pd.DataFrame({"site": number, "age": age, **columns, "illness": ill})


def load(number: int, clients: int) -> Federation:
    """Return the data of one client; gaps are filled and numbers scaled by its own rows."""
    table = rows_of(number)
    prepared = {"classes": CLASSES, "prepare": CATEGORIES}
    return Federation.from_frame(table, client="site", label="illness", **prepared, seed=0)
'''

SERVER_APP = '''\
"""The server, whose options are in pyproject.toml."""

from securecluster.nodes import flower

from $package.task import protocol

server_app = flower.server_app(protocol)
'''

CLIENT_APP = '''\
"""What Flower ships to the nodes.

A node with an agent (securecluster node serve) gets bytes by its socket, and nothing here imports
torch or securecluster. In a simulation there is none, and the node runs in this process.
"""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from $package import shim

client_app = ClientApp()


def handler(kind):
    """Return the function that answers messages of a kind."""
    to_agent = shim.handler(kind)

    def handle(message: Message, context: Context) -> Message:
        if "socket" in context.node_config:
            return to_agent(message, context)
        from securecluster.nodes import flower

        from $package import task

        return flower.simulated(kind, message, context, task.protocol, task.load)

    return handle


for kind in shim.KINDS:
    client_app.query(kind)(handler(kind))
'''

README = """\
# $project

`$package/task.py` says what runs: the protocol and each client's data. The rest is generated.

In a simulation, with as many nodes as `clients` in pyproject.toml:

    export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
    flwr run . local --stream --federation-config "num-supernodes=8"
    securecluster report $runs/first

On many machines each owner has a node's folder and an agent (`securecluster node init`, `node serve
--app $package.task`), and gives the agent's socket to the SuperNode (docs/flower.md of
securecluster has all commands):

    flower-supernode --superlink HOST:PORT --node-config 'socket="NODE/socket"'
"""


@dataclass(frozen=True)
class FlowerInit:
    """Make a project of Flower that runs a protocol on many machines, for you to fill in."""

    table: bool = False
    """each client has a table with text and categories, and not images"""


def flower_init(argv: list[str]) -> int:
    """Make the folder of a project, and return the exit code.

    Args:
        argv: the folder, then the options.

    Raises:
        UsageError: a folder that is in use, or whose name is no name of a package.
    """
    folders = [argument for argument in argv if not argument.startswith("-")]
    if not command_line.asks_for_help(argv) and folders != argv[:1]:
        raise UsageError("flower-init takes the project's folder: securecluster flower-init DIR")
    options = command_line.of_folder("flower-init", argv[len(folders) :], FlowerInit)
    folder = Path(argv[0])
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty: give another folder")
    project = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    package = project.replace("-", "_")
    if (
        not package.isidentifier()
        or keyword.iskeyword(package)
        or package in sys.builtin_module_names
    ):
        raise UsageError(
            f"{folder.name} is no name of a Python package: give another folder, such as hospitals"
        )
    runs = (folder / "runs").resolve()
    classes = "2 " if options.table else "10"
    words = {"project": project, "package": package, "classes": classes, "runs": runs.as_posix()}
    texts = {
        "pyproject.toml": PYPROJECT,
        "README.md": README,
        f"{package}/__init__.py": "",
        f"{package}/task.py": TABLE if options.table else TASK,
        f"{package}/server_app.py": SERVER_APP,
        f"{package}/client_app.py": CLIENT_APP,
    }
    atomic_files.make_folder(folder / package)
    for name, text in texts.items():
        content = Template(text).substitute(words)
        atomic_files.write_atomic(folder / name, content.encode())
    atomic_files.write_atomic(folder / package / "shim.py", SHIM.read_bytes())
    with output():
        shown = printable(str(folder))
        print(
            f"{shown} is a project of Flower: write your protocol and data into "
            f"{shown}/{package}/task.py; {shown}/README.md says how to run it"
        )
    return 0
