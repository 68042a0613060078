"""What one kept operator gave and wrote, and how that is given back."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from partita._torch.checkpoint_given import is_trained
from partita._torch.versions import version_of
from partita.errors import RecomputeError

__all__ = ["Cast", "Entry", "cast_by", "gives_new", "tensors_in", "written_by"]


class Cast(Enum):
    """The casts that autocast makes of what needs gradients: it remembers those of leaves."""

    OF_LEAF = auto()
    OF_RESULT = auto()


@final
class Entry:
    """The results of an operator, how often they had been written when the kept part was over, and what it wrote."""

    __slots__ = ("cast", "is_made_again", "operator", "result", "versions", "written")

    def __init__(self, operator: Any, args: Any, result: Any, written: Sequence[Tensor | None]) -> None:
        self.operator = operator
        count = _returned_writes(operator)
        if isinstance(result, Tensor):
            self.result: Any = None if count else _without_history(result)
        else:
            leaves, structure = pytree.tree_flatten(result)
            leaves[:count] = [None] * count
            kept = [_without_history(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self.result = pytree.tree_unflatten(kept, structure)
        #: Copies of what it wrote to, None where that is kept anyway or written once more.
        self.written = list(written)
        self.versions: list[int | None] = []
        self.cast = cast_by(operator, args)
        #: Whether it only stands for an operator that is computed again.
        self.is_made_again = False

    def close(self) -> None:
        """The kept part is over: writes so far belong to it."""
        self.versions = [version_of(leaf) for leaf in tensors_in(self.result)]

    def let_go(self) -> None:
        """The operator runs again."""
        self.is_made_again, self.result = True, None

    def keep(self, result: Tensor) -> None:
        """It does not, after all."""
        self.is_made_again, self.result = False, _without_history(result)

    def given_back(self, written: Sequence[Tensor]) -> Any:
        """What the operator gives; `written` are the tensors that it was to write, and has written now."""
        if self.versions != [version_of(leaf) for leaf in tensors_in(self.result)]:
            raise RecomputeError(
                f"a result of {self.operator} was kept for the backward and then changed in place, so it cannot be "
                "used again; keep something else, or write to a copy"
            )
        for tensor, value in zip(written, self.written, strict=True):
            if value is not None:
                tensor.copy_(value)
        # A new tensor each time: autograd writes its history into what it is given.
        if isinstance(self.result, Tensor):
            return self.result.detach()
        leaves, structure = pytree.tree_flatten(self.result)
        found = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        count = _returned_writes(self.operator)
        found[:count] = written[:count]
        return pytree.tree_unflatten(found, structure)


@cache
def gives_new(func: Any) -> bool:
    """Whether an operator gives something new, which can be kept.

    A view is made again, since it would keep what it looks at, and so are shapes changed in place (`t_`): the tensor
    that stands for what is kept has the shape from before.
    """
    if func in _NOT_KEPT or torch.Tag.inplace_view in getattr(func, "tags", ()):
        return False
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    return not any(result.alias_info is not None and not result.alias_info.is_write for result in returns)


def cast_by(func: Any, args: Any) -> Cast | None:
    """What kind of cast an operator is; None for other operators, and where no gradients are needed."""
    if func is not torch.ops.aten._to_copy.default or not args[0].requires_grad:
        return None
    return Cast.OF_LEAF if is_trained(args[0]) else Cast.OF_RESULT


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operator writes, as far as its schema says."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tensors_in(given)


def tensors_in(result: Any) -> list[Tensor]:
    """The tensors of a tree."""
    if isinstance(result, Tensor):
        return [result]
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def _without_history(tensor: Tensor) -> Tensor:
    """The same memory under another tensor; a write to one counts for both, which below autograd has to be said."""
    if tensor.is_inference():
        return tensor.detach()
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


@cache
def _returned_writes(func: Any) -> int:
    """How many of the first results of an operator are the tensors themselves that it wrote."""
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    return sum(result.alias_info is not None and result.alias_info.is_write for result in returns)


#: What autograd and its hooks call beside the operators of a body, and not equally often in each run.
_NOT_KEPT: frozenset[Any] = frozenset(getattr(checkpoint, "SAC_IGNORED_OPS", ())) | {torch.ops.aten.detach.default}
