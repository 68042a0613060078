"""New processes that need not import torch: they are forked from one that has done so, and nothing more."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.multiprocessing

_SERVER = """
import json, os, sys, types
import torch, torch._dynamo, torch.export

for line in sys.stdin:
    told = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

for stream, path in enumerate((os.devnull, told["out"], told["err"])):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), stream)
os.environ.clear()
os.environ.update(told["environment"])
os.chdir(told["folder"])
sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
sys.argv = ["-c", *told["arguments"]]
sys.modules["__main__"] = types.ModuleType("__main__")
exec(compile(told["source"], "<string>", "exec"), vars(sys.modules["__main__"]))
"""


def run_in_new_process(
    source: str, *arguments: object, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What `python -c` does in a process that has imported torch and its tracers, but nothing of Partita.

    What depends on the order of imports, the hash seed or variables that torch reads when it is imported needs a
    process of its own.
    """
    given = [str(argument) for argument in arguments]
    if sys.platform != "linux":
        command = [sys.executable, "-c", source, *given]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    with TemporaryDirectory() as outputs:
        out, err = Path(outputs, "out"), Path(outputs, "err")
        told = {
            "source": source,
            "arguments": given,
            "folder": str(folder or Path.cwd()),
            "environment": dict(os.environ if environment is None else environment),
            "out": str(out),
            "err": str(err),
        }
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(told) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(given, status, out.read_text(), err.read_text())


def run_on_ranks(function: Callable[..., None], *args: object) -> None:
    """Runs a function of a rank and these arguments in two processes that share one import of torch."""
    multiprocessing.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "partita"])
    torch.multiprocessing.start_processes(_run_and_exit, (function, *args), nprocs=2, start_method="forkserver")


def _run_and_exit(rank: int, function: Callable[..., None], *args: object) -> None:
    function(rank, *args)
    # gloo's threads (torch 2.13) may still be there when Python ends, which aborts the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@cache
def _server() -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", _SERVER]
    server = subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(server.communicate)
    return server
