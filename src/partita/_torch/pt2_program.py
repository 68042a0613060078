"""A program in a `.pt2` archive: its texts as objects of torch's schema, and the exported program that they make."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from partita._torch.pickled import load_plain
from partita._torch.pt2_archive import Archive
from partita.errors import ArchiveError

__all__ = ["SavedProgram", "exported_program", "format_fault", "saved_program"]

_ARCHIVE_VERSION = "0"


@dataclass(frozen=True, slots=True)
class SavedProgram:
    """The parsed texts of one program, as objects of torch's schema; making them calls nothing that the file names."""

    name: str
    program: Any
    #: A list of tensors, or None where an old archive keeps them all in one pickle.
    weights: Any
    constants: Any

    @property
    def torch_version(self) -> str:
        return str(self.program.torch_version)

    @property
    def schema_version(self) -> str:
        version = self.program.schema_version
        return f"{version.major}.{version.minor}"

    def schemas(self) -> Iterator[tuple[str, Any]]:
        """Every parsed member with its name."""
        parsed = (
            (self._member, self.program),
            (self._weights_list, self.weights),
            (self._constants_list, self.constants),
        )
        return ((member, schema) for member, schema in parsed if schema is not None)

    def pickles(self, archive: Archive) -> Iterator[tuple[str, bytes]]:
        """Every member of this program that is a pickle."""
        for folder, listed in (("weights", self.weights), ("constants", self.constants)):
            if listed is None:
                yield f"data/{folder}/{self.name}.pt", archive.read_text(f"data/{folder}/{self.name}.pt")
                continue
            for payload in listed.config.values():
                member = f"data/{folder}/{payload.path_name}"
                if payload.use_pickle and not payload.path_name.startswith(("custom_obj_", "opaque_obj_")):
                    yield member, archive.read(member)
        examples = archive.read(self.examples_member) if self.examples_member in archive.sizes else b""
        if examples:
            yield self.examples_member, examples

    @property
    def examples_member(self) -> str:
        return f"data/sample_inputs/{self.name}.pt"

    @property
    def _member(self) -> str:
        return f"models/{self.name}.json"

    @property
    def _weights_list(self) -> str:
        return f"data/weights/{self.name}_weights_config.json"

    @property
    def _constants_list(self) -> str:
        return f"data/constants/{self.name}_constants_config.json"


def format_fault(archive: Archive) -> tuple[str, str] | None:
    """The member that says that this torch cannot read the archive, and why."""
    wanted = {"archive_format": "pt2", "archive_version": _ARCHIVE_VERSION, "byteorder": sys.byteorder}
    for member, value in wanted.items():
        if member in archive.sizes:
            found = archive.read_text(member).decode(errors="replace").strip()
            if found != value:
                return member, f"it says {found[:40]!r}, and only {value!r} can be read here"
    return None


def saved_program(archive: Archive, name: str) -> SavedProgram:
    """The program called `name`, parsed."""
    schema = importlib.import_module("torch._export.serde.schema")
    program = _parsed(archive, f"models/{name}.json", schema.ExportedProgram)
    version, known = program.schema_version, schema.SCHEMA_VERSION
    if version.major != known[0]:
        raise ArchiveError(
            f"models/{name}.json of {archive.path} has schema version {version.major}.{version.minor}, and torch "
            f"{torch.__version__} reads {known[0]}.x; load it with the torch that saved it ({program.torch_version})"
        )
    lists = []
    for folder in ("weights", "constants"):
        is_legacy = f"data/{folder}/{name}.pt" in archive.sizes
        member = f"data/{folder}/{name}_{folder}_config.json"
        lists.append(None if is_legacy else _parsed(archive, member, schema.PayloadConfig))
    return SavedProgram(name, program, *lists)


def exported_program(archive: Archive, saved: SavedProgram) -> ExportedProgram:
    """The program itself, of an archive in which everything was checked; nothing is loaded but tensors."""
    serialize = importlib.import_module("torch._export.serde.serialize")
    try:
        examples = load_plain(archive.read(saved.examples_member)) if archive.sizes.get(saved.examples_member) else None
        state = _tensors(archive, saved.name, "weights", saved.weights)
        constants = _tensors(archive, saved.name, "constants", saved.constants)
        made = serialize.ExportedProgramDeserializer().deserialize(saved.program, state, constants, examples)
    except ArchiveError:
        raise
    except Exception as error:
        raise ArchiveError(
            f"models/{saved.name}.json of {archive.path} is no program that torch {torch.__version__} can make: "
            f"{type(error).__name__}: {_last_line(error)}"
        ) from error
    assert isinstance(made, ExportedProgram)
    return made


def _parsed(archive: Archive, member: str, schema: Any) -> Any:
    serialize = importlib.import_module("torch._export.serde.serialize")
    data = archive.read_text(member)
    try:
        parsed = serialize._bytes_to_dataclass(schema, data)
        _check_types(parsed)
        return parsed
    except Exception as error:
        raise ArchiveError(
            f"{member} of {archive.path} is not what torch writes there: {type(error).__name__}: {_last_line(error)}"
        ) from error


def _check_types(parsed: Any) -> None:
    """torch fills its schema with whatever the file has; what is read here before torch reads it must be right."""
    if hasattr(parsed, "config"):
        payloads = parsed.config.values()
        if not all(isinstance(payload.path_name, str) and isinstance(payload.use_pickle, bool) for payload in payloads):
            raise TypeError("a tensor is not described as tensors are")
    elif not isinstance(parsed.schema_version.major, int):
        raise TypeError("the version is no number")


def _tensors(archive: Archive, name: str, folder: str, listed: Any) -> dict[str, Any]:
    """The tensors of a list by name; those that were one tensor are one again."""
    if listed is None:
        found: dict[str, Any] = load_plain(archive.read(f"data/{folder}/{name}.pt"))
        return found
    flat: dict[str, Tensor] = {}
    made: dict[str, Any] = {}
    tensors = {}
    for key, payload in listed.config.items():
        known = repr((payload.path_name, payload.is_param, payload.tensor_meta))
        if known not in made:
            made[known] = _tensor(archive, f"data/{folder}/{payload.path_name}", payload, flat)
        tensors[key] = made[known]
    return tensors


def _tensor(archive: Archive, member: str, payload: Any, flat: dict[str, Tensor]) -> Any:
    if payload.use_pickle:
        return load_plain(archive.read(member))
    serialize = importlib.import_module("torch._export.serde.serialize")
    meta = payload.tensor_meta
    dtype, device = serialize._SERIALIZE_TO_TORCH_DTYPE[meta.dtype], serialize.deserialize_device(meta.device)
    sizes, strides = ([part.as_int for part in parts] for parts in (meta.sizes, meta.strides))
    if member not in flat:
        data = archive.read_buffer(member)
        flat[member] = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        flat[member] = flat[member].to(device)
    if math.prod(sizes) == 0:
        tensor = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
    else:
        tensor = torch.as_strided(flat[member].view(dtype), sizes, strides, meta.storage_offset.as_int)
    if payload.is_param:
        return torch.nn.Parameter(tensor, requires_grad=meta.requires_grad)
    return tensor.requires_grad_() if meta.requires_grad else tensor


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no more is known"
