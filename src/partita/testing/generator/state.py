"""What generated programs own and call: parameters, buffers, modules, and Python functions that no analysis knows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import final

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from partita._torch.fx.lazy_graph_module import lazy_module
from partita._torch.toggles import SET_GRAD
from partita.testing.generator.mode_bodies import MODE_BODIES


def ramp(*shape: int, phase: float = 0.0) -> Tensor:
    """Small values that differ from one another and need no random numbers."""
    size = 1
    for length in shape:
        size *= length
    return (torch.arange(size, dtype=torch.float32) * 0.7 + phase).sin().mul(0.5).reshape(shape)


@final
class State:
    """A root module whose entries are installed when they are needed; `used` lists them, to build an equal one."""

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
        # A tensor that is created in inference mode could never take part in training.
        with torch.inference_mode(False):
            _ENTRIES[entry](self.root)


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


def halve(x: Tensor) -> Tensor:
    """A new tensor; the function is pure."""
    return torch.tanh(x) * 0.5


def bump(x: Tensor) -> Tensor:
    """The argument itself, mutated, which the name does not tell."""
    return x.add_(0.125)


def note(x: Tensor) -> None:
    """Nothing, but the argument is mutated."""
    x.mul_(0.75)


def jitter(x: Tensor) -> Tensor:
    """The argument plus noise from the default generator."""
    return x + 0.125 * torch.rand_like(x)


def peel(x: Tensor) -> Tensor:
    """A view of the argument."""
    return x.view(x.shape)[..., :2]


def halve_gradient(x: Tensor) -> None:
    """Nothing, but a hook on the argument halves its gradient. Leaves get none: a hook would stay on them."""
    if x.requires_grad and not x.is_leaf:
        x.register_hook(_halved)


def clip_gradient(x: Tensor) -> Tensor:
    """The argument itself, with a hook that clips its gradient."""
    if x.requires_grad and not x.is_leaf:
        x.register_hook(_clipped)
    return x


def _halved(gradient: Tensor | None) -> Tensor | None:
    # Autograd calls hooks with None as well, where a function with several inputs has no gradient for one of them.
    return None if gradient is None else gradient * 0.5


def _clipped(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clamp(-0.25, 0.25)


def branches(x: Tensor) -> dict[str, object]:
    """Containers in containers."""
    return {"whole": x.sin(), "parts": [x.cos(), (x * 0.5, x.neg())]}


def replace_first(pieces: list[Tensor], x: Tensor) -> None:
    """Nothing, but the first item of the list is replaced."""
    pieces[0] = x


class _Meter(nn.Module):
    """Returns its input scaled by a running total, which every call mutates."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.total.mul_(0.5).add_(x.detach().mean().tanh())
        return x * self.total.clone()


class _Fork(nn.Module):
    """Returns a tuple and a dict in one tuple."""

    def forward(self, x: Tensor, *, scale: float = 0.5) -> tuple[Tensor, dict[str, Tensor]]:
        return x * scale, {"left": x.sin(), "right": x.cos()}


def _nested_module() -> GraphModule:
    """A graph module with a parameter, an in-place operator and dropout."""
    root = nn.Module()
    root.linear = nn.Linear(6, 6)
    root.dropout = nn.Dropout(0.25)
    graph = Graph()
    hidden = graph.call_module("linear", (graph.placeholder("x"),))
    hidden = graph.call_method("add_", (hidden, 0.5))
    hidden = graph.call_module("dropout", (hidden,))
    graph.output(graph.call_function(torch.tanh, (hidden,)))
    return GraphModule(root, graph)


def _pure_body() -> GraphModule:
    """A body for a higher-order operator: one operand, two results."""
    graph = Graph()
    x = graph.placeholder("x")
    sine = graph.call_function(torch.ops.aten.sin.default, (x,))
    graph.output((sine, graph.call_function(torch.ops.aten.mul.Tensor, (sine, x))))
    return GraphModule(nn.Module(), graph)


def _writing_body() -> GraphModule:
    """A body that mutates its operand."""
    graph = Graph()
    x = graph.placeholder("x")
    mutated = graph.call_function(torch.ops.aten.mul_.Tensor, (x, 0.5))
    graph.output((graph.call_function(torch.ops.aten.cos.default, (mutated,)),))
    return GraphModule(nn.Module(), graph)


def _replacing_body() -> GraphModule:
    """A body that replaces the first item of a list."""
    graph = Graph()
    graph.call_function(operator.setitem, (graph.placeholder("pieces"), 0, graph.placeholder("x")))
    graph.output(None)
    # Of our own class: torch's graph modules are retraced when they are loaded, where a list cannot be mutated.
    return lazy_module(graph, training=True)


def _grad_enabling_body() -> GraphModule:
    """A body that ends a block without gradients by enabling them, whatever the mode was when it was called.

    It is of our own class, since torch's graph modules are retraced when they are loaded, and lose their toggles.
    """
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(SET_GRAD, (False,))
    factor = graph.call_function(torch.cos, (x,))
    graph.call_function(SET_GRAD, (True,))
    graph.output(graph.call_function(torch.mul, (x, factor)))
    return lazy_module(graph, training=True)


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
    "outer_part.body": _module("outer_part.body", _pure_body),
    "embedding": _module("embedding", lambda: nn.Embedding(6, 6, max_norm=0.5)),
    "generator": lambda root: setattr(root, "generator", torch.Generator(torch.get_default_device()).manual_seed(7)),
    "relu": _module("relu", lambda: nn.ReLU(inplace=True)),
    "dropout": _module("dropout", lambda: nn.Dropout(0.5)),
    "norm": _module("norm", lambda: nn.LayerNorm(6)),
    "batch": _module("batch", lambda: nn.BatchNorm1d(6)),
    "frozen_batch": _module("frozen_batch", lambda: nn.BatchNorm1d(6), frozen=True),
    "lstm": _module("lstm", lambda: nn.LSTM(6, 6)),
    "meter": _module("meter", _Meter),
    "fork": _module("fork", _Fork),
    "submod_0": _module("submod_0", lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh())),
    "nested": _module("nested", _nested_module),
    "body": _module("body", _pure_body),
    "writing_body": _module("writing_body", _writing_body),
    "replacing_body": _module("replacing_body", _replacing_body),
    "leaving_grad_on": _module("leaving_grad_on", _grad_enabling_body),
    **{name: _module(name, make) for name, make in MODE_BODIES.items()},
}

_NEEDS = {"tied": ("weight",), "cache_row": ("cache",), "twin": ("encoder.shift",)}
#: Attributes that a program may read, with the entry that installs each of them.
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

#: Those of them that a program may mutate.
BUFFERS = ("cache", "encoder.shift", "cache_row", "twin", "batch.running_mean")
