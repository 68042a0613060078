"""Storing: compiled bodies as bytes that only load where their code can run."""

from __future__ import annotations

import json
import pickle
import platform

import torch

from partita.backends.calling import Calling
from partita.errors import BackendError

__all__ = ["restored", "stored"]

_MAGIC = b"partita compiled body\n"


def stored(backend: str, calling: Calling, code: bytes) -> bytes:
    """The code of a compiled body and how to call it, under a line that says where it can run."""
    header = json.dumps({"backend": backend, **_here()}).encode()
    return _MAGIC + header + b"\n" + pickle.dumps((calling, code))


def restored(backend: str, data: bytes) -> tuple[Calling, bytes]:
    """What `stored` was given; what follows the header is only looked at if it fits."""
    header, _, content = data.removeprefix(_MAGIC).partition(b"\n")
    try:
        found = json.loads(header) if data.startswith(_MAGIC) else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BackendError(f"these {len(data)} bytes are no compiled body; give {backend} what its `save` gave")
    wanted = {"backend": backend, **_here()}
    differences = [
        f"{key} {found.get(key)!r}, here {value!r}" for key, value in wanted.items() if found.get(key) != value
    ]
    if differences:
        raise BackendError(f"the code was compiled for something else: {'; '.join(differences)}; compile it again here")
    try:
        calling, code = pickle.loads(content)
    except Exception as error:
        raise BackendError(f"the compiled body is damaged: {error}; compile it again") from error
    return calling, code


def _here() -> dict[str, str]:
    """What native code depends on."""
    return {
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }
