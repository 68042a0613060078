"""Observations: all that can be seen of one call once it is over."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from partita._torch.ambient import Ambient
from partita._torch.trees import flatten
from partita._torch.wrapper_tensors import inner_tensors, placements_of
from partita.equivalence.aliasing import Home
from partita.equivalence.ambient import Settings
from partita.equivalence.randomness import RandomState
from partita.equivalence.storages import storage_key

__all__ = ["Moment", "Named", "Observation", "Raised", "TensorRecord", "named_leaves", "record_of"]

#: A leaf or record with the words that say where it was.
Named = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor as it was: its properties, and its values apart from any graph."""

    type: str
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...] | None
    device: torch.device
    layout: torch.layout
    requires_grad: bool
    inference: bool
    #: Whether values are told by a bit that conjugates or negates what lies in memory.
    conjugate: bool
    negative: bool
    value: Tensor
    #: How a DTensor is spread over devices.
    placements: tuple[object, ...] | None = None
    #: The tensors inside one that wraps others, which hold its values.
    inner: tuple[tuple[str, TensorRecord], ...] = ()


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception without its traceback, which would keep the memory of the call alive."""

    type: type[Exception]
    text: str

    def __str__(self) -> str:
        return f"{self.type.__name__}: {self.text.strip().partition(chr(10))[0][:200]}"


@dataclass(frozen=True, slots=True)
class Moment:
    """The modes that something found, the modes, settings and random state that it left; None after an exception."""

    name: str
    found: Ambient
    ambient: Ambient
    settings: Settings
    random: RandomState | None


@dataclass(frozen=True, slots=True)
class Observation:
    """What one call gave, wrote and left behind."""

    raised: Raised | None
    structure: object
    outputs: Named
    input_structure: object
    inputs: Named
    homes: tuple[tuple[str, Home | None], ...]
    moments: tuple[Moment, ...]
    backward_raised: Raised | None = None
    gradients: tuple[tuple[str, TensorRecord | None], ...] = ()
    state: Named = ()
    undeclared: tuple[str, ...] = ()


def record_of(leaf: object, *, restored: frozenset[int] = frozenset()) -> object:
    """What to keep of a leaf; values are copied only if they lie in memory that will be `restored`."""
    if isinstance(leaf, torch.Generator):
        leaf = leaf.get_state()
    if not isinstance(leaf, Tensor):
        return leaf
    value = _rows(leaf.detach()) if leaf.is_nested else leaf.detach()
    strided = leaf.layout is torch.strided and not leaf.is_nested
    held = {name: record_of(inner, restored=restored) for name, inner in inner_tensors(leaf).items()}
    return TensorRecord(
        type=type(leaf).__name__,
        dtype=leaf.dtype,
        shape=value.shape,
        stride=_telling_strides(leaf) if strided else None,
        device=leaf.device,
        layout=leaf.layout,
        requires_grad=leaf.requires_grad,
        inference=leaf.is_inference(),
        conjugate=strided and leaf.is_conj(),
        negative=strided and leaf.is_neg(),
        value=value.clone() if not held and storage_key(leaf) in restored else value,
        placements=placements_of(leaf),
        inner=tuple((name, record) for name, record in held.items() if isinstance(record, TensorRecord)),
    )


def named_leaves(value: object, root: str) -> tuple[tuple[str, object], ...]:
    """The leaves of `value` with their paths after `root`; dataclasses that torch does not know are opened too."""
    tree = flatten(value)
    found: list[tuple[str, object]] = []
    for path, leaf in zip(tree.paths, tree.leaves, strict=True):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                found += named_leaves(getattr(leaf, field.name), f"{root}{path}.{field.name}")
            found.append((f"the type of {root}{path}", type(leaf)))
        else:
            found.append((root + path, leaf))
    return tuple(found)


def _rows(nested: Tensor) -> Tensor:
    """The lengths and the values of a nested tensor's rows in one, since its own shape is a symbol."""
    rows = nested.unbind()
    lengths = torch.tensor([size for row in rows for size in row.shape], device=nested.device)
    return torch.cat([lengths.to(nested.dtype), *(row.flatten() for row in rows)])


def _telling_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides, with 0 along axes of one element or none, where any stride means the same."""
    empty = tensor.numel() == 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(0 if empty or size == 1 else stride for size, stride in pairs)
