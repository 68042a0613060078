"""Storing: compiled bodies as bytes that only load where their code can run."""

from __future__ import annotations

import json
import pickle
import platform

import torch

from partita._torch.processor import instructions
from partita.backends.calling import Calling
from partita.errors import BackendError

__all__ = ["restored", "stored"]

_MAGIC = b"partita compiled body\n"


def stored(backend: str, calling: Calling, code: bytes, *, vectors: str) -> bytes:
    """The code of a compiled body and how to call it, under a line that says where it can run."""
    header = {"backend": backend, **_here(vectors), "instructions": instructions()}
    return _MAGIC + json.dumps(header).encode() + b"\n" + pickle.dumps((calling, code))


def restored(backend: str, data: bytes, *, vectors: str) -> tuple[Calling, bytes]:
    """What `stored` was given; what follows the header is only looked at if it fits."""
    header, _, content = data.removeprefix(_MAGIC).partition(b"\n")
    try:
        found = json.loads(header) if data.startswith(_MAGIC) else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BackendError(f"these {len(data)} bytes are no compiled body; give {backend} what its `save` gave")
    differences = _differences(found, {"backend": backend, **_here(vectors)})
    if differences:
        raise BackendError(f"the code was compiled for something else: {'; '.join(differences)}; compile it again here")
    try:
        calling, code = pickle.loads(content)
    except Exception as error:
        raise BackendError(f"the compiled body is damaged: {error}; compile it again") from error
    return calling, code


def _here(vectors: str) -> dict[str, str]:
    """What has to be the same where native code runs."""
    return {
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "vectors": vectors,
    }


def _differences(found: dict[str, object], wanted: dict[str, str]) -> list[str]:
    different = [
        f"{key} {found.get(key)!r}, here {value!r}" for key, value in wanted.items() if found.get(key) != value
    ]
    used, known = found.get("instructions"), frozenset(instructions())
    if not isinstance(used, list):
        return [*different, "unknown instructions"]
    # Inductor has the C++ compiler use whatever the processor offers.
    missing = [name for name in used if name not in known]
    return [*different, f"instructions that are not here: {', '.join(map(str, missing))}"] if missing else different
