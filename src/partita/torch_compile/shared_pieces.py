"""Equal pieces of one of Dynamo's graphs: compiled once, called with the inputs of each.

A compiled piece depends on the code of its body and on everything about its inputs but their contents. Weights are
inputs in Dynamo's graphs, so that the layers of a model differ in nothing else.

In training they do differ: the input of the first layer mostly requires no gradient, and that of the others does. A
function that computes more gradients than are needed serves the first layer as well, so it waits for the second one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from partita._torch.fake_tensors import fake_mode_of
from partita._torch.fx.structural_hash import body_key
from partita._torch.modes import read_ambient
from partita._torch.operator_schemas import storage_key
from partita._torch.symbolic_shapes import is_unbacked, renamed_expression, symbols_in
from partita.torch_compile.piece_borders import PieceCall

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PRINTED = (bool, int, float, complex, str, type(None))


class PieceKey(NamedTuple):
    """Equal for pieces that one compiled function serves."""

    #: All but which inputs require a gradient.
    family: Hashable
    requires_grad: tuple[bool, ...]

    def covers(self, other: PieceKey) -> bool:
        """Whether a function for these inputs computes all gradients that the other piece needs."""
        flags = zip(self.requires_grad, other.requires_grad, strict=True)
        return self.family == other.family and all(own or not needed for own, needed in flags)


def piece_key(body: GraphModule, args: Sequence[Any], code: Hashable | None = None) -> PieceKey | None:
    """The key of a piece, whose `code` is the key of its body if that is known; None for one that equals no other.

    The sizes of inputs count as expressions of symbols, not up to renaming: a compiler guards on symbols.
    """
    code = body_key(body) if code is None else code
    if code is None or any(True for _ in (*body.parameters(), *body.buffers())):
        return None
    try:
        inputs = tuple(_described(args))
    except _IncomparableError:
        return None
    # Inductor records CUDA graphs for the addresses of inputs that are marked so.
    marks = (node.meta.get("tensor_dict") or {} for node in body.graph.find_nodes(op="placeholder"))
    static = tuple(mark.get("_dynamo_static_input_type") for mark in marks)
    training = tuple(module.training for module in body.modules())
    flags = tuple(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    return PieceKey((code, inputs, static, read_ambient(), training), flags)


@final
class SharedPieces:
    """What the inner backend has made of the pieces of one graph, and the pieces that wait for one like them."""

    def __init__(self, codes: Iterable[Hashable | None]) -> None:
        #: How many pieces with this code are still to come.
        self._coming = Counter(codes)
        self._made: dict[PieceKey, nn.Module] = {}
        self._waiting: dict[Hashable, list[WaitingPiece]] = {}
        self._results: dict[PieceKey, KnownResults | None] = {}

    def found(self, key: PieceKey) -> nn.Module | None:
        """The function of an equal piece."""
        return self._made.get(key)

    def add(self, key: PieceKey, compiled: nn.Module) -> None:
        self._made[key] = compiled

    def known_results(self, key: PieceKey) -> KnownResults | None:
        """What an equal piece has returned, if that is only new memory."""
        return self._results.get(key)

    def note_call(self, key: PieceKey, call: PieceCall) -> None:
        """Notes what a piece returns; called right after its run, since later nodes may change that in place."""
        if key not in self._results:
            self._results[key] = KnownResults.of(call)

    def is_to_wait(self, code: Hashable | None, key: PieceKey) -> bool:
        """Whether a piece with this code, which has been reached, waits: it is the first of several."""
        self._coming[code] -= 1
        return self._coming[code] > 0 and any(key.requires_grad) and not any(map(key.covers, self._made))

    def wait(self, piece: WaitingPiece) -> None:
        self._waiting.setdefault(piece.key.family, []).append(piece)

    def waiting_for(self, key: PieceKey) -> list[WaitingPiece]:
        """Takes out the pieces that wait for one with this key."""
        return self._waiting.pop(key.family, [])

    def still_waiting(self) -> Iterator[WaitingPiece]:
        for pieces in self._waiting.values():
            yield from pieces


class WaitingPiece(NamedTuple):
    """A piece that has run on fake tensors, and is not compiled."""

    key: PieceKey
    call: Node
    body: GraphModule
    args: Sequence[Any]
    outputs: Sequence[Any]

    def is_served_by(self, key: PieceKey, outputs: Sequence[Any]) -> bool:
        """Whether the function of a piece with this key and these outputs returns what this one returns."""
        return key.covers(self.key) and _requiring(outputs) == _requiring(self.outputs)


@final
class _Computed(torch.autograd.Function):
    """A fake result that autograd takes for one computed from some tensors; no backward of a fake run passes it."""

    @staticmethod
    def forward(_ctx: Any, make: Callable[[], Tensor], *_sources: Tensor) -> Tensor:
        return make()

    @staticmethod
    def backward(_ctx: Any, *_gradients: Any) -> Any:
        raise AssertionError("a fake result of a piece has no backward")


class _NewMemory(NamedTuple):
    """A fake tensor that a piece returns, in memory of its own, as it was when it was returned."""

    key: _TensorKey
    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]
    requires_grad: bool
    #: The arguments that its gradient flows to.
    sources: tuple[int, ...]

    @classmethod
    def of(cls, value: Tensor, sources: Iterable[int]) -> _NewMemory:
        key = _described_tensor(value, 0, 0)
        return cls(key, tuple(value.shape), value.stride(), value.requires_grad, tuple(sorted(sources)))

    def make(self, args: Sequence[Any]) -> Tensor | None:
        """Another one like it, for a call with these arguments; None if it is a part of a larger memory, say."""
        key = self.key

        def new() -> Tensor:
            return torch.empty_strided(self.sizes, self.strides, dtype=key.dtype, device=key.device)

        link: Callable[..., Tensor] = _Computed.apply
        made = link(new, *(args[at] for at in self.sources)) if self.requires_grad else new()
        alike = made.requires_grad == self.requires_grad and _described_tensor(made, 0, 0) == key
        return made if alike else None


class KnownResults(NamedTuple):
    """What a piece returns if that is only new memory, so that a run of an equal piece would say nothing new."""

    outputs: tuple[_NewMemory, ...]
    is_modeless: bool

    @classmethod
    def of(cls, call: PieceCall) -> KnownResults | None:
        """The results of a call that has just run; None if it did something else, or returns what it has created."""
        if not call.returns_only_new_memory() or any(map(_is_unbacked, call.outputs)):
            return None
        links = call.links or (frozenset[int](),) * len(call.outputs)
        pairs = zip(call.outputs, links, strict=True)
        try:
            found = tuple(_NewMemory.of(value, sources) for value, sources in pairs)
        except _IncomparableError:
            return None
        return cls(found, call.is_modeless)

    def make(self, args: Sequence[Any]) -> list[Tensor] | None:
        """The outputs of an equal piece with these arguments; None if it must run."""
        made = [output.make(args) for output in self.outputs]
        return None if any(output is None for output in made) else [one for one in made if one is not None]


def _is_unbacked(value: Any) -> bool:
    """Whether a result is no tensor, or has sizes that a run creates."""
    return not isinstance(value, Tensor) or any(map(is_unbacked, symbols_in(value)))


def _requiring(outputs: Sequence[Any]) -> list[bool]:
    return [isinstance(output, Tensor) and output.requires_grad for output in outputs]


class _IncomparableError(Exception):
    """An input is of a kind that cannot be compared."""


class _TensorKey(NamedTuple):
    """Everything about a fake tensor but its contents, and whether it requires a gradient."""

    #: The first argument that is the same tensor, and the first in the same storage.
    same: int
    storage: int
    is_parameter: bool
    dtype: torch.dtype
    device: torch.device
    #: Only of one that requires a gradient: parameters that require none have functions of their own.
    is_leaf: bool
    is_view: bool
    bits: tuple[bool, bool, bool]
    sizes: tuple[Hashable, ...]
    strides: tuple[Hashable, ...]
    offset: Hashable
    nbytes: Hashable


def _described(args: Sequence[Any]) -> Iterator[Hashable]:
    tensors: dict[int, int] = {}
    storages: dict[Hashable, int] = {}
    for place, arg in enumerate(args):
        if isinstance(arg, Tensor):
            same = tensors.setdefault(id(arg), place)
            yield _described_tensor(arg, same, storages.setdefault(storage_key(arg), place))
        else:
            yield type(arg), _number(arg)


def _described_tensor(tensor: Tensor, same: int, storage: int) -> _TensorKey:
    if fake_mode_of(tensor) is None or tensor.layout is not torch.strided:
        raise _IncomparableError
    return _TensorKey(
        same,
        storage,
        isinstance(tensor, nn.Parameter),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad and tensor.is_leaf,
        tensor._is_view(),
        (tensor.is_conj(), tensor.is_neg(), tensor.is_inference()),
        tuple(map(_number, tensor.shape)),
        tuple(map(_number, tensor.stride())),
        _number(tensor.storage_offset()),
        _number(tensor.untyped_storage().nbytes()),
    )


def _number(value: Any) -> Hashable:
    if isinstance(value, _SYMBOLIC):
        return renamed_expression(value, {})
    if type(value) not in _PRINTED:
        raise _IncomparableError
    return repr(value)
