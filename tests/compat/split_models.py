"""Graphs that several tests of splitting cut, and the check that a cut means the same."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from tests.compat.split_helpers import Cut, Draft, ambient, dump, same
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from partita.errors import CycleError


def x4() -> Tensor:
    return torch.arange(1.0, 5.0)


def runs(module: GraphModule, *args: Any, **kwargs: Any) -> Any:
    """The result of a call on copies of the arguments, with the arguments as it left them."""
    given = copy.deepcopy((args, kwargs))
    torch.manual_seed(7)
    return module(*given[0], **given[1]), given


def check(module: GraphModule, result: GraphModule, *args: Any, **kwargs: Any) -> None:
    """Two calls of each, from the same state, give the same values, mutated inputs, state, random state and modes."""
    state = copy.deepcopy(module.state_dict())
    seen = []
    for each in (module, result):
        module.load_state_dict(copy.deepcopy(state))
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            first = runs(each, *args, **kwargs)
            second = runs(each, *args, **kwargs)
            left_behind = ambient()
        seen.append((first, second, dict(copy.deepcopy(module.state_dict())), torch.get_rng_state(), left_behind))
    assert same(*seen)


def residual() -> GraphModule:
    draft = Draft()
    x = draft.input("x")
    a = draft.call(torch.sin, x)
    b = draft.call(torch.cos, a)
    c = draft.call(torch.add, a, b)
    d = draft.call(torch.mul, c, x)
    return draft.done(draft.call(torch.neg, d))


def graded() -> GraphModule:
    """Two operators, three without gradients, two with."""
    draft = Draft()
    x = draft.input("x")
    a = draft.call(torch.sin, x)
    b = draft.call(torch.mul, a, 2.0)
    draft.grad(False)
    c = draft.call(torch.exp, b)
    d = draft.call(torch.mul, c, c)
    draft.grad(True)
    e = draft.call(torch.add, d, b)
    f = draft.call(torch.cos, e)
    return draft.done((f, c))


class Colliding(nn.Module):
    """Children `a.b` and `a_b`, whose paths joined by underscores are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ModuleDict({"b": nn.Linear(4, 4)})
        self.a_b = nn.Linear(4, 4)
        self.a_b_1 = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a_b_1(self.a["b"](self.a_b(x)) + self.a["b"](x))


def refused_or_same(cut: Cut, module: GraphModule, label: Callable[[Node], Any], *args: Any) -> None:
    """Either a result that means the same, or an error that says which parts need each other."""
    before, refused = dump(module), None
    try:
        check(module, cut(module, label), *args)
    except CycleError as error:
        refused = str(error)
    assert refused is None or "cycle exists between partitions!" in refused
    if refused:
        assert dump(module) == before


def autocast_draft() -> GraphModule:
    draft = Draft(weight=nn.Parameter(torch.ones(4, 4)))
    x = draft.input("x")
    weight = draft.attr("weight")
    a = draft.call(torch.matmul, x, weight)
    entered = draft.enter_autocast()
    b = draft.call(torch.matmul, x, weight)
    c = draft.call(torch.matmul, b, weight)
    draft.exit_autocast(entered)
    d = draft.call(torch.matmul, a, weight)
    return draft.done((a, b, c, d))


def inferring() -> GraphModule:
    draft = Draft()
    x = draft.input("x")
    a = draft.call(torch.mul, x, 2.0)
    entered = draft.enter_inference()
    b = draft.call(torch.mul, x, 3.0)
    c = draft.call(torch.mul, b, 3.0)
    draft.exit_inference(entered)
    d = draft.call(torch.mul, a, 4.0)
    return draft.done((a, b, c, d))


def nested_modes() -> GraphModule:
    """Grad off in autocast in inference, each left in another order than it was entered."""
    draft = Draft(weight=nn.Parameter(torch.ones(4, 4)))
    x = draft.input("x")
    weight = draft.attr("weight")
    entered = draft.enter_autocast()
    a = draft.call(torch.matmul, x, weight)
    draft.grad(False)
    b = draft.call(torch.matmul, x, weight)
    off = draft.enter_autocast(None, False)
    c = draft.call(torch.matmul, x, weight)
    draft.grad(True)
    d = draft.call(torch.matmul, x, weight)
    draft.exit_autocast(off)
    e = draft.call(torch.matmul, x, weight)
    inference = draft.enter_inference()
    f = draft.call(torch.matmul, x, weight)
    again = draft.enter_autocast(torch.float16)
    g = draft.call(torch.matmul, x, weight)
    draft.exit_autocast(again)
    draft.exit_inference(inference)
    draft.exit_autocast(entered)
    h = draft.call(torch.matmul, x, weight)
    return draft.done((a, b, c, d, e, f, g, h))


@cache
def reshaping() -> GraphModule:
    return exported(Reshaping(), torch.randn(6, 4), dynamic=({0: torch.export.Dim("batch")},))


@cache
def structured(kind: str) -> GraphModule:
    return exported(Structured(kind), x4(), {"bias": x4() + 1}, scale=x4() + 2)


@cache
def sizes(capture: str) -> GraphModule:
    x = torch.randn(6, 4)
    if capture == "dynamo":
        return dynamo_graph(Sizes(), x)
    if capture == "export":
        return exported(Sizes(), x, dynamic=({0: torch.export.Dim("batch", min=2)},))
    return make_fx(Sizes(), tracing_mode="symbolic")(x)


def exported(model: nn.Module, *args: Any, dynamic: Any = None, **kwargs: Any) -> GraphModule:
    return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic, strict=False).module()


def dynamo_graph(function: Callable[..., Any], x: Tensor, dynamic: bool = True) -> GraphModule:
    """The one graph that Dynamo hands to a backend, with a symbol for the first size of its input."""
    found: list[GraphModule] = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        found.append(module)
        return module.forward

    torch._dynamo.reset()
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    torch.compile(function, backend=backend, fullgraph=True)(x)
    return found[0]


class Reshaping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.relu() + 1
        z = y.view(x.size(0) * 4)
        w = z.sin().view(x.size(0), 4)
        return w + y


class Sizes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        size = x.size()
        a, b = x.chunk(2, dim=1)
        values, indices = a.max(dim=1)
        return b.reshape(size[0], size[1] // 2).sin() + values.unsqueeze(1) + torch.zeros(size).sum() + indices.sum()


@dataclass
class Answer:
    loss: Tensor
    logits: tuple[Tensor, Tensor]


torch.export.register_dataclass(Answer, serialized_type_name="tests.split.Answer")


Pair = namedtuple("Pair", ["left", "right"])


class Structured(nn.Module):
    """Takes and returns what pytrees are for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, more: dict[str, Tensor], *, scale: Tensor) -> Any:
        a = self.linear(x) * scale
        b = a + more["bias"]
        if self.kind == "dict":
            return {"b": b, "a": a, "inner": {"x": x}}
        if self.kind == "dataclass":
            return Answer(loss=a.sum(), logits=(a, b))
        if self.kind == "list":
            return [a, [b, None], 3]
        if self.kind == "namedtuple":
            return Pair(a, Pair(b, x))
        if self.kind == "none":
            return None
        return (a, (b, (x, more["bias"])))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(4), persistent=False)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.shift
        return self.head(x.relu())
