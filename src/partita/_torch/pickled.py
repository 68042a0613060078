"""Pickles that torch.save wrote: what they name, found without running them, and how they are loaded without code."""

from __future__ import annotations

import io
import pickletools
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from dataclasses import dataclass
from typing import Any

import torch
from torch import _weights_only_unpickler as weights_only

__all__ = ["PickleContents", "contents_of_pickle", "load_plain"]


@dataclass(frozen=True, slots=True)
class PickleContents:
    """The classes and functions that a pickle names, and what keeps torch's weights-only loader from taking it."""

    globals: tuple[str, ...]
    faults: tuple[str, ...]


def contents_of_pickle(data: bytes) -> PickleContents:
    """What a file of torch.save holds, read from its opcodes."""
    try:
        stream = _stream(data)
    except (zipfile.BadZipFile, ValueError, KeyError, OSError, RuntimeError, NotImplementedError) as error:
        return PickleContents((), (f"it is no file of torch.save: {error}",))
    named: dict[str, None] = {}
    faults: dict[str, None] = {}
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            if opcode.name in ("GLOBAL", "INST"):
                named[_full_name(str(argument))] = None
            if opcode.name not in _KNOWN_OPCODES:
                faults[f"it uses the opcode {opcode.name}, by which pickles reach any function"] = None
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        faults[f"it is no whole pickle: {error}"] = None
    allowed = {*weights_only._get_allowed_globals(), *weights_only._get_user_allowed_globals()}
    strange = [name for name in named if name not in allowed]
    if strange:
        told = f"it names {', '.join(strange)}, which torch's weights-only loader does not take"
        faults[f"{told}; a class that you know is allowed by torch.serialization.add_safe_globals"] = None
    return PickleContents(tuple(sorted(named)), tuple(faults))


def load_plain(data: bytes) -> Any:
    """What a file of torch.save holds, by the loader that calls nothing but what rebuilds tensors."""
    return torch.load(io.BytesIO(data), weights_only=True)


def _stream(data: bytes) -> bytes:
    """The pickle itself, which torch.save writes into a zip file."""
    with zipfile.ZipFile(io.BytesIO(data)) as inner:
        found = [info for info in inner.infolist() if info.filename.partition("/")[2] == "data.pkl"]
        if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED:
            raise ValueError("it has no pickle of its own, or more than one")
        return inner.read(found[0])


def _full_name(argument: str) -> str:
    """The name behind a GLOBAL opcode as the loader spells it; old names of Python 2 are taken for the new ones."""
    module, _, name = argument.partition(" ")
    return ".".join(NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name)))


#: What the weights-only loader understands: REDUCE and BUILD act on known classes only, and names come as GLOBAL.
_OPCODES = """
    PROTO STOP MARK GLOBAL NEWOBJ REDUCE BUILD APPEND APPENDS SETITEM SETITEMS TUPLE TUPLE1 TUPLE2 TUPLE3 NONE NEWTRUE
    NEWFALSE EMPTY_TUPLE EMPTY_LIST EMPTY_DICT EMPTY_SET BINPERSID BININT BININT1 BININT2 BINFLOAT BINUNICODE
    SHORT_BINSTRING LONG1 BINGET LONG_BINGET BINPUT LONG_BINPUT
"""
_KNOWN_OPCODES = frozenset(_OPCODES.split())
