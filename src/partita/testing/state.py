"""State: the parameters, buffers and modules that generated programs may own, each installed when first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import final

import torch
from torch import Tensor, nn

from partita.testing.mode_bodies import MODE_BODIES
from partita.testing.modules import (
    Fork,
    Meter,
    grad_enabling_body,
    nested_module,
    pure_body,
    replacing_body,
    writing_body,
)

__all__ = ["ATTRIBUTES", "BUFFERS", "State", "forget", "ramp"]


def ramp(*shape: int, phase: float = 0.0) -> Tensor:
    """Small values that differ from one another and need no random numbers."""
    size = 1
    for length in shape:
        size *= length
    return (torch.arange(size, dtype=torch.float32) * 0.7 + phase).sin().mul(0.5).reshape(shape)


@final
class State:
    """A root module that grows as its entries are needed; `used` says how to grow an equal one."""

    def __init__(self, *, training: bool, used: Iterable[str] = ()) -> None:
        self.root = nn.Module()
        self.root.train(training)
        self.used: list[str] = []
        for entry in used:
            self.need(entry)

    def need(self, entry: str) -> None:
        """Installs an entry and what it shares storage with, unless they are there."""
        if entry in self.used:
            return
        for other in _NEEDS.get(entry, ()):
            self.need(other)
        self.used.append(entry)
        # A tensor made in inference mode could never take part in training, whoever made it.
        with torch.inference_mode(False):
            _ENTRIES[entry](self.root)


def forget(root: nn.Module, used: Iterable[str]) -> None:
    """Makes the buffers that should be so non-persistent again: `GraphModule` registers all as persistent."""
    for entry in used:
        value = getattr(root, entry, None) if entry in _NON_PERSISTENT else None
        if isinstance(value, Tensor):
            root.register_buffer(entry, value, persistent=False)


def _parameter(*shape: int, phase: float, trained: bool = True) -> nn.Parameter:
    return nn.Parameter(ramp(*shape, phase=phase), requires_grad=trained)


def _part(root: nn.Module, name: str) -> nn.Module:
    part = getattr(root, name, None)
    if not isinstance(part, nn.Module):
        part = nn.Module()
        setattr(root, name, part)
    return part


def _module(name: str, make: Callable[[], nn.Module], *, frozen: bool = False) -> Callable[[nn.Module], None]:
    def install(root: nn.Module) -> None:
        module = make()
        with torch.no_grad():
            for phase, parameter in enumerate(module.parameters()):
                parameter.copy_(ramp(*parameter.shape, phase=phase))
        module.train(root.training and not frozen)
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            owner = _part(owner, part)
        setattr(owner, leaf, module)

    return install


def _install_tied(root: nn.Module) -> None:
    _part(root, "tied").weight = root.weight


_ENTRIES: Mapping[str, Callable[[nn.Module], None]] = {
    "weight": lambda root: setattr(root, "weight", _parameter(6, 6, phase=1.0)),
    "bias": lambda root: setattr(root, "bias", _parameter(6, phase=2.0)),
    "frozen": lambda root: setattr(root, "frozen", _parameter(4, 6, phase=3.0, trained=False)),
    "tied": _install_tied,
    "encoder.scale": lambda root: setattr(_part(root, "encoder"), "scale", _parameter(6, phase=4.0)),
    "encoder.shift": lambda root: _part(root, "encoder").register_buffer("shift", ramp(4, 6, phase=5.0)),
    "cache": lambda root: root.register_buffer("cache", ramp(4, 6, phase=6.0), persistent=False),
    "cache_row": lambda root: root.register_buffer("cache_row", root.get_buffer("cache")[1]),
    "twin": lambda root: root.register_buffer("twin", root.get_buffer("encoder.shift")),
    "linear": _module("linear", lambda: nn.Linear(6, 6)),
    "blocks.0.linear": _module("blocks.0.linear", lambda: nn.Linear(6, 6, bias=False)),
    "blocks_0_linear": _module("blocks_0_linear", lambda: nn.Linear(6, 6)),
    "outer.part": _module("outer.part", lambda: nn.Linear(6, 6)),
    "outer_part.body": _module("outer_part.body", pure_body),
    "embedding": _module("embedding", lambda: nn.Embedding(6, 6, max_norm=0.5)),
    "generator": lambda root: setattr(root, "generator", torch.Generator().manual_seed(7)),
    "relu": _module("relu", lambda: nn.ReLU(inplace=True)),
    "dropout": _module("dropout", lambda: nn.Dropout(0.5)),
    "norm": _module("norm", lambda: nn.LayerNorm(6)),
    "batch": _module("batch", lambda: nn.BatchNorm1d(6)),
    "frozen_batch": _module("frozen_batch", lambda: nn.BatchNorm1d(6), frozen=True),
    "lstm": _module("lstm", lambda: nn.LSTM(6, 6)),
    "meter": _module("meter", Meter),
    "fork": _module("fork", Fork),
    "submod_0": _module("submod_0", lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh())),
    "nested": _module("nested", nested_module),
    "body": _module("body", pure_body),
    "writing_body": _module("writing_body", writing_body),
    "replacing_body": _module("replacing_body", replacing_body),
    "leaving_grad_on": _module("leaving_grad_on", grad_enabling_body),
    **{name: _module(name, make) for name, make in MODE_BODIES.items()},
}

_NEEDS = {"tied": ("weight",), "cache_row": ("cache",), "twin": ("encoder.shift",)}
_NON_PERSISTENT = ("cache",)

#: Attributes that a program may read, with the entry that brings each of them.
ATTRIBUTES: Mapping[str, str] = {
    "weight": "weight",
    "tied.weight": "tied",
    "bias": "bias",
    "frozen": "frozen",
    "encoder.scale": "encoder.scale",
    "linear.weight": "linear",
    "batch.running_mean": "batch",
    "encoder.shift": "encoder.shift",
    "cache": "cache",
    "cache_row": "cache_row",
    "twin": "twin",
}

#: Those of them that a program may write.
BUFFERS = ("cache", "encoder.shift", "cache_row", "twin", "batch.running_mean")
