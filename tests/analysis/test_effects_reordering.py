"""The law of the dependency relation: any order that obeys data and effect edges computes the same."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.helpers.selecting import slow_but
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from partita.analysis.effects.calls import CallEffects
from partita.analysis.effects.graph import effects_of_graph
from partita.analysis.index import Index

A = torch.ops.aten
SIZE = 4


@pytest.mark.parametrize("seeds", slow_but([range(40), range(40, 120)], range(40)))
def test_every_allowed_order_computes_the_same(seeds):
    differing = [seed for seed in seeds if _differs(seed, with_effects=True)]
    assert not differing


@pytest.mark.fuzz
def test_every_allowed_order_of_many_programs_computes_the_same():
    differing = [seed for seed in range(10_000, 13_000) if _differs(seed, with_effects=True)]
    assert not differing


def test_without_effect_edges_most_programs_go_wrong():
    differing = [seed for seed in range(30) if _differs(seed, with_effects=False)]
    assert len(differing) > 20


def _differs(seed: int, *, with_effects: bool, orders: int = 3) -> bool:
    expected = _outcome(seed, None)
    program = Program(seed)
    index = Index(program.module.graph)
    edges = list(index.edges())
    if with_effects:
        edges += effects_of_graph(CallEffects(program.module, index=index)).edges()
    shuffled = (_random_order(len(index), edges, random.Random(seed * 7 + i)) for i in range(orders))
    return any(not _same(expected, _outcome(seed, order)) for order in shuffled)


def _random_order(count: int, edges: Iterable[tuple[int, int]], rng: random.Random) -> list[int]:
    later: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for before, after in edges:
        assert before < after
        later[before].append(after)
        missing[after] += 1
    ready, order = [i for i in range(count) if not missing[i]], []
    while ready:
        i = ready.pop(rng.randrange(len(ready)))
        order.append(i)
        for j in later[i]:
            missing[j] -= 1
            if not missing[j]:
                ready.append(j)
    # The output stays last, as in every graph.
    return [i for i in order if i != count - 1]


def _outcome(seed: int, order: list[int] | None) -> list[Any]:
    """Everything that can be told apart afterwards: values, inputs, state, generators, and what was logged."""
    program = Program(seed)
    nodes = list(program.module.graph.nodes)
    env: dict[Node, Any] = {}
    torch.manual_seed(seed)
    inputs = dict(zip((node for node in nodes if node.op == "placeholder"), program.inputs, strict=True))
    with torch.no_grad():
        for i in order or range(len(nodes) - 1):
            env[nodes[i]] = _run(nodes[i], env, program.module, inputs)
    values = [env[node] for node in nodes[:-1]]
    state = [*program.module.buffers(), *program.module.parameters()]
    return [_tensors(values), state, torch.get_rng_state(), program.module.generator.get_state(), program.log]


def _run(node: Node, env: dict[Node, Any], root: GraphModule, inputs: dict[Node, Any]) -> Any:
    args, kwargs = map_arg(node.args, env.__getitem__), map_arg(node.kwargs, env.__getitem__)
    if node.op == "placeholder":
        return inputs[node]
    if node.op == "get_attr":
        return operator.attrgetter(node.target)(root)
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    target = root.get_submodule(node.target) if node.op == "call_module" else node.target
    return target(*args, **kwargs)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


class Leaf(nn.Module):
    """A module that nobody knows: it rebinds a counter that others read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x + self.count


class Program:
    """A random program of some thirty nodes over tensors of one size, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.log: list[float] = []
        self.graph = Graph()
        root = _root(seed)
        self.values = [self.graph.placeholder(name) for name in ("a", "b", "c")]
        self.makers: list[Callable[[], Node | None]] = [
            *(self.pure, self.view, self.write, self.write, self.write_with_out, self.put, self.draw, self.state),
            *(self.normalise, self.in_place_flag, self.many, self.split, self.body, self.call, self.unknown, self.leaf),
        ]
        quiet = self.rng.random() < 0.7
        makers = self.makers[:-2] if quiet else self.makers
        for _ in range(self.rng.randint(8, 22)):
            made = self.rng.choice(makers)()
            self.values += [] if made is None else [made]
        self.graph.output(self.values[-1])
        self.module = GraphModule(root, self.graph)
        self.module.generator = root.generator
        base = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
        self.inputs = [base.clone(), base if self.rng.random() < 0.5 else base * 2, base]

    def pick(self) -> Node:
        return self.rng.choice(self.values[-8:] + self.values[:3])

    def call_any(self, *forms: tuple[str, Any, tuple[Any, ...], dict[str, Any]]) -> Node:
        return self.graph.create_node(*self.rng.choice(forms))

    def pure(self) -> Node:
        a, b = self.pick(), self.pick()
        return self.call_any(
            ("call_function", torch.sub, (a, b), {}),
            ("call_function", operator.add, (a, b), {}),
            ("call_method", "sin", (a,), {}),
            ("call_function", A.tanh.default, (a,), {}),
            ("call_function", F.relu, (a,), {}),
            ("call_module", "linear", (a,), {}),
        )

    def view(self) -> Node:
        a = self.pick()
        return self.call_any(
            ("call_method", "view", (a, -1), {}),
            ("call_function", A.view.default, (a, [SIZE]), {}),
            ("call_function", operator.getitem, (a, slice(None)), {}),
            ("call_function", torch.reshape, (a, (SIZE,)), {}),
            ("call_function", F.dropout, (a, 0.5, False), {}),
            ("call_method", "float", (a,), {}),
            ("call_function", getattr, (a, "data"), {}),
            ("call_module", "identity", (a,), {}),
            ("call_function", torch.einsum, ("i->i", a), {}),
        )

    def write(self) -> Node:
        a, b = self.pick(), self.pick()
        return self.call_any(
            ("call_method", "add_", (a, 1.0), {}),
            ("call_function", A.mul_.Tensor, (a, 0.5), {}),
            ("call_function", torch.sin_, (a,), {}),
            ("call_function", operator.iadd, (a, b), {}),
            ("call_method", "copy_", (a, b), {}),
            ("call_function", torch.Tensor.neg_, (a,), {}),
        )

    def write_with_out(self) -> Node:
        return self.graph.call_function(torch.add, (self.pick(), self.pick()), {"out": self.pick()})

    def put(self) -> None:
        self.graph.call_function(operator.setitem, (self.pick(), slice(0, 2), self.rng.random()))

    def in_place_flag(self) -> Node:
        a = self.pick()
        return self.call_any(
            ("call_function", F.hardtanh, (a,), {"inplace": True}),
            ("call_module", "relu", (a,), {}),
            ("call_function", F.dropout, (a,), {"inplace": True}),
        )

    def draw(self) -> Node:
        a = self.pick()
        generator = self.graph.get_attr("generator")
        return self.call_any(
            ("call_function", F.dropout, (a, 0.5), {}),
            ("call_function", torch.rand_like, (a,), {}),
            ("call_function", A.bernoulli.p, (a, 0.5), {}),
            ("call_method", "normal_", (a,), {"generator": generator}),
            ("call_function", torch.rand, (SIZE,), {"generator": generator}),
            ("call_module", "dropout", (a,), {}),
        )

    def state(self) -> Node:
        names = ("buffer", "window", "norm.running_mean", "norm.running_var", "linear.bias", "outer.buffer")
        return self.graph.get_attr(self.rng.choice((*names, "leaf.count")))

    def normalise(self) -> Node:
        a = self.pick()
        rows = self.graph.call_method("expand", (a, 3, SIZE))
        mean, variance = self.graph.get_attr("norm.running_mean"), self.graph.get_attr("norm.running_var")
        training = self.rng.random() < 0.7
        normal = self.call_any(
            ("call_module", "norm", (rows,), {}),
            ("call_function", F.batch_norm, (rows, mean, variance), {"training": training}),
            ("call_function", A.batch_norm.default, (rows, None, None, mean, variance, training, 0.1, 1e-5, False), {}),
            ("call_function", torch.native_batch_norm, (rows, None, None, mean, variance, training, 0.1, 1e-5), {}),
        )
        if normal.target is torch.native_batch_norm:
            normal = self.graph.call_function(operator.getitem, (normal, 0))
        return self.graph.call_method("sum", (normal, 0))

    def many(self) -> None:
        self.graph.call_function(torch._foreach_add_, ([self.pick(), self.pick()], 1.0))

    def split(self) -> Node:
        halves = self.graph.call_method("chunk", (self.pick(), 2))
        first = self.graph.call_function(operator.getitem, (halves, 0))
        self.graph.call_method("mul_", (first, 0.5))
        return self.graph.call_function(torch.cat, ([first, first],))

    def body(self) -> Node:
        body = self.graph.get_attr(self.rng.choice(("writing_body", "drawing_body", "outer")))
        hop = torch.ops.higher_order.wrap_with_set_grad_enabled
        result = self.graph.call_function(hop, (False, body, self.pick(), self.pick()))
        return self.graph.call_function(operator.getitem, (result, 0))

    def call(self) -> Node:
        name = self.rng.choice(("writing_body", "drawing_body", "outer"))
        result = self.graph.call_module(name, (self.pick(), self.pick()))
        return self.graph.call_function(operator.getitem, (result, 0))

    def unknown(self) -> Node:
        log = self.log

        def remember(x: Tensor) -> Tensor:
            log.append(float(x.sum()) + float(torch.rand(())))
            return x.mul_(0.5)

        return self.graph.call_function(remember, (self.pick(),))

    def leaf(self) -> Node:
        return self.graph.call_module("leaf", (self.pick(),))


def _root(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    root = nn.Module()
    root.linear, root.identity = nn.Linear(SIZE, SIZE), nn.Identity()
    root.relu, root.dropout = nn.ReLU(inplace=True), nn.Dropout(0.5)
    root.norm, root.leaf = nn.BatchNorm1d(SIZE, affine=False), Leaf()
    root.register_buffer("buffer", torch.randn(SIZE))
    root.register_buffer("window", root.buffer[:])
    root.generator = torch.Generator().manual_seed(seed)
    root.writing_body = _body(lambda g, a, b: (g.call_method("add_", (a, b)), b))
    root.drawing_body = _body(lambda g, a, b: (g.call_function(F.dropout, (a,)), g.call_method("view", (b, -1))))
    root.outer = _body(lambda g, a, b: (g.call_method("add_", (g.get_attr("buffer"), a)), b))
    return root.requires_grad_(False)


def _body(write: Callable[[Graph, Node, Node], tuple[Node, Node]]) -> GraphModule:
    graph, owner = Graph(), nn.Module()
    owner.register_buffer("buffer", torch.zeros(SIZE))
    graph.output(write(graph, graph.placeholder("a"), graph.placeholder("b")))
    return GraphModule(owner, graph)
