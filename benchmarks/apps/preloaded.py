"""Programs of an interpreter that has imported them: each start of one is a fork.

python -m benchmarks.apps.preloaded SOCKET PROGRAM... [MODULE...]

Flower starts `flwr-clientapp` for each message, whose imports take more processor time than all
that it does then. `stub` makes a program of the same name for the front of PATH, which hands its
arguments and its environment to this process; the fork runs Flower's own code. Names with a dot are
modules to import.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path

STUB = """\
#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as end:
    end.connect({path!r})
    end.sendall(json.dumps([[{name!r}, *sys.argv[1:]], dict(os.environ)]).encode())
    end.shutdown(socket.SHUT_WR)
    end.recv(1)
"""


def stub(path: Path, folder: Path, name: str) -> None:
    """Write the program that hands its arguments to the process at a socket.

    Args:
        path: of the socket.
        folder: for the program, at the front of PATH.
        name: of the program.
    """
    program = folder / name
    program.write_text(STUB.format(python=sys.executable, path=str(path), name=name))
    program.chmod(0o755)


def start(path: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start a program of the process at a socket.

    Args:
        path: of the socket.
        command: name of the program, and its arguments.
        environment: of the program.
    """
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(str(path))
        end.sendall(json.dumps([list(command), dict(environment)]).encode())
        end.shutdown(socket.SHUT_WR)
        end.recv(1)


def received(end: socket.socket) -> bytes:
    """Return all that the other end of a connection sends."""
    data = b""
    while chunk := end.recv(1 << 16):
        data += chunk
    return data


def reap() -> None:
    """Collect children that have ended, whose processor time is then this process's."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def run(program: Callable[[], object], command: list[str], environment: dict[str, str]) -> None:
    """Run a program in this process, and end it."""
    sys.argv = command
    os.environ.clear()
    os.environ.update(environment)
    code: object = 1
    try:
        code = program()
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def main(argv: Sequence[str] | None = None) -> int:
    """Start programs until the process is ended.

    Args:
        argv: the socket, then programs and modules; None takes them from the system.
    """
    path, *names = sys.argv[1:] if argv is None else argv
    programs = {
        one.name: one.load() for one in entry_points(group="console_scripts") if one.name in names
    }
    for name in names:
        if "." in name:
            importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen(1024)
        door.settimeout(0.5)
        while True:
            reap()
            try:
                end, _ = door.accept()
            except TimeoutError:
                continue
            with end:
                end.settimeout(None)
                command, environment = json.loads(received(end))
                if os.fork() == 0:
                    door.close()
                    end.close()
                    run(programs[command[0]], command, environment)


if __name__ == "__main__":
    sys.exit(main())
