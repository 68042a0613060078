"""Dropout while a body is traced: as plain torch does it, or refused where a trace would lose it.

Functionalization (torch 2.13) takes the output of `torch.dropout(x, p, train=False)` for memory of its own, so that a
write to it would not reach `x`. A trace draws random numbers to drop everything (p=1), plain torch multiplies by zero.
The decompositions of recurrent networks (torch 2.13) leave dropout between layers out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from partita.errors import BackendError

__all__ = ["IdleDropout", "LostDropout", "drops_all", "loses_dropout"]


class IdleDropout(TorchFunctionMode):
    """Gives back the input of a dropout that is told not to train, and its product with zero where all is dropped."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        flag = _TRAINING.get(func)
        if flag is not None:
            given = _DEFAULTS.get(func, {}) | dict(zip(("input", "p", flag, "inplace"), args, strict=False)) | named
            if given.get(flag) is False and "input" in given:
                return given["input"]
            if given.get(flag) is True and drops_all(given.get("p")) and not given.get("inplace") and "input" in given:
                return given["input"] * given["input"].new_zeros(())
        return func(*args, **named)


#: The functions, and what their third argument is called.
_TRAINING = {
    functional.dropout: "training",
    torch.dropout: "train",
    torch.ops.aten.dropout: "train",
    torch.ops.aten.dropout.default: "train",
}
_DEFAULTS = {functional.dropout: {"p": 0.5, "training": True}}


def drops_all(p: Any) -> bool:
    """Whether nothing is left of a tensor after dropout with this probability; nothing is asked of symbols."""
    return isinstance(p, int | float) and p == 1


class LostDropout(TorchFunctionMode):
    """Raises a `BackendError` at a call whose dropout a trace would lose."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if loses_dropout(func, args, named):
            raise BackendError(f"{_name(func)} drops values in training, and a trace would lose that")
        return func(*args, **named)


def loses_dropout(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a trace of this call drops nothing where plain torch does; what nodes stand for counts as true."""
    name = _name(target)
    if name in _RECURRENT:
        given = _recurrent_arguments(name, args, kwargs)
        several, dropout, train = (given.get(key) for key in ("num_layers", "dropout", "train"))
        return _may_exceed(several, 1) and _may_exceed(dropout, 0) and (isinstance(train, Node) or bool(train))
    if name == "native_dropout":
        # Its kernels take None for True, its decomposition for False.
        given = dict(zip(("input", "p", "train"), args, strict=False)) | dict(kwargs)
        return given.get("train") is None
    return False


_RECURRENT = frozenset(("gru", "rnn_relu", "rnn_tanh"))


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", "")).partition(".")[0]


def _recurrent_arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a recurrent network by name: of packed sequences, or of tensors."""
    packet = getattr(torch.ops.aten, name)
    # Only packed sequences have their weights, which are a list, behind three tensors.
    packed = "batch_sizes" in kwargs or (len(args) > 3 and isinstance(args[3], list | tuple))
    names = (argument.name for argument in (packet.data if packed else packet.input)._schema.arguments)
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _may_exceed(value: Any, bound: float) -> bool:
    return isinstance(value, Node) or (isinstance(value, int | float) and value > bound)
