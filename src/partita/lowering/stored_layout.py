"""How lowered modules are laid out in pickles: a version of Partita reads those of its own layout only."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from hashlib import blake2b
from typing import NoReturn

from partita._torch.expressions import Operation, Read
from partita._torch.fx.lazy_graph_module import RECORDS
from partita.analysis.effects.terms import Effects
from partita.errors import BackendError
from partita.lowering._torch.containers import Container, Leaf
from partita.lowering._torch.guards import GlobalState
from partita.lowering.config import CudaGraphOptions, Lowering, ModeScope
from partita.lowering.constants import Constants
from partita.lowering.dry_run import DryRun
from partita.lowering.signature import Constant, DynamicSizes, Signature, TensorSpec
from partita.lowering.variant import Fit
from partita.lowering.variant_cache import PickledCompiler, Stored

#: The classes whose fields a pickle holds by place.
STORED: tuple[type, ...] = (
    Constant,
    Constants,
    Container,
    CudaGraphOptions,
    DryRun,
    DynamicSizes,
    Effects,
    Fit,
    GlobalState,
    Leaf,
    Lowering,
    ModeScope,
    Operation,
    PickledCompiler,
    Read,
    Signature,
    Stored,
    TensorSpec,
    *RECORDS,
)


@cache
def layout() -> str:
    """A digest of the places and fields of all stored classes."""
    lines = (f"{kind.__module__}.{kind.__qualname__} {_fields(kind)}" for kind in STORED)
    return blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def _fields(kind: type) -> list[str]:
    return [field.name for field in fields(kind)] if is_dataclass(kind) else list(vars(kind)["_fields"])


def check_layout(found: str) -> None:
    """Raises for a pickle of another layout."""
    if found != layout():
        refuse_pickle()


def refuse_pickle() -> NoReturn:
    """Says that a pickle is of another version."""
    raise BackendError(
        "this lowered module was pickled by another version of Partita, which stores lowered modules in another way; "
        "load it with that version, or lower the original program again. A program that Program.save has written, and "
        "the weights in a state_dict, can be read by both"
    )
