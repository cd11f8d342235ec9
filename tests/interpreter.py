"""An executable that stands for that of Python, and forks a process with torch and PyG imported.

For programs that start programs by the name of their interpreter, as scripts, shells and
``torchrun`` do. Those that are started by another option than ``-c``, ``-m`` or ``-u`` get a fresh
one. What else is told apart by a fresh one alone is said in ``tests.forks``.

A client sends its words, folder, variables and standard streams, and ends as the program does. When
it is killed, so is the program, and all that this has started and not put into another session.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

import torch

from tests import forks
from tests.cli.commands import environment

CLIENT = """\
#!{executable} -IS
import json, os, signal, socket, sys, time

words = sys.argv[1:]
if words[:1] == ["-u"]:
    words = words[1:]
if not words or words[0].startswith("-") and words[0] not in ("-c", "-m"):
    os.execv({executable!r}, [{executable!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
while server.connect_ex({address!r}):
    time.sleep(0.02)
request = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [b"%016d" % len(request)], [0, 1, 2])
server.sendall(request)
code = int(server.recv(16) or 1)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextmanager
def interpreter(variables: Mapping[str, str]) -> Iterator[Path]:
    """The executable, for as long as it is needed; its name is that of Python.

    Args:
        variables: of the environment of the process that forks; programs have their client's.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        address, executable = str(folder / "socket"), folder / "python"
        executable.write_text(CLIENT.format(executable=sys.executable, address=address))
        executable.chmod(0o755)
        given = {"folder": folder, "variables": variables, "out": folder / "log"}
        process = forks.begin(_serve, address, str(executable), **given)
        try:
            yield executable
        finally:
            process.kill()
            process.join()


def python(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """``python words...``, and all that it starts by its own interpreter."""
    given = environment(**variables)
    with interpreter(given) as executable:
        return subprocess.run(
            [executable, *words],
            cwd=cwd,
            env=given,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            check=False,
        )


def _serve(address: str, executable: str) -> None:
    sys.executable = executable
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that attend
        parent = multiprocessing.parent_process()
        assert parent is not None
        while parent.sentinel not in wait([listener, parent.sentinel]):
            client, _ = listener.accept()
            with client:
                if os.fork() == 0:
                    listener.close()
                    _attend(client)


def _attend(client: socket.socket) -> NoReturn:
    """Run the program of a client, and tell it how this ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, *_ = socket.recv_fds(client, 16, 3)
    words, folder, variables = json.loads(_received(client, int(size)))
    program = os.fork()
    if program == 0:
        client.close()
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has put another there
        os.chdir(folder)
        if "OMP_NUM_THREADS" in variables:  # which torch has read already
            torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
        forks.become(words, variables)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(program)
    readable: list[Any] = select.select([ended, client], [], [])[0]
    if ended not in readable:  # the client has gone
        os.killpg(program, signal.SIGKILL)
    _, status = os.waitpid(program, 0)
    if ended in readable:
        client.sendall(b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _received(client: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = client.recv(size - len(parts))
        if not part:
            raise EOFError("the client has gone")
        parts += part
    return parts
