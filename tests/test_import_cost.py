"""`import partita` is quick: it brings nothing heavy that `import torch` has not brought, nor does its backend."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch._inductor", "torch._dynamo", "torch.distributed", "transformers", "hypothesis")

_NEWLY_IMPORTED = """
import sys
import torch
before = set(sys.modules)
import partita
import partita.torch_compile
print(*sorted(set(sys.modules) - before), sep="\\n")
"""


def test_importing_partita_and_its_backend_of_torch_compile_brings_nothing_heavy() -> None:
    finished = subprocess.run([sys.executable, "-c", _NEWLY_IMPORTED], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    brought = finished.stdout.split()
    assert {"partita", "partita.torch_compile"} <= {*brought}
    assert [name for name in brought if _is_heavy(name)] == []


def _is_heavy(module_name: str) -> bool:
    return any(module_name == heavy or module_name.startswith(heavy + ".") for heavy in HEAVY)
