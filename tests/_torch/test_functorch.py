"""Which nodes of a graph are inside a torch.func transform: as the graph is now, and with nothing kept of it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tests.helpers.torch_versions import IS_OLD
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch._functorch.predispatch import _vmap_decrement_nesting, _vmap_increment_nesting
from torch.autograd import forward_ad
from torch.fx import Graph, GraphModule, Node

from partita import Program, capture, plan
from partita._torch.compile_context import compiler_scope
from partita._torch.functorch import is_inside_transform, transforms_found_once
from partita.policies import ByCapability, BySize
from partita.treatments import Call


def vectorized() -> GraphModule:
    """A sine outside, a cosine inside a transform, a tangent inside of two, and an exponential after them."""
    graph = Graph()
    x = graph.call_function(torch.sin, (graph.placeholder("x"),))
    graph.call_function(_vmap_increment_nesting, (3, "error"))
    x = graph.call_function(torch.cos, (x,))
    graph.call_function(_vmap_increment_nesting, (3, "error"))
    x = graph.call_function(torch.tan, (x,))
    graph.call_function(_vmap_decrement_nesting)
    x = graph.call_function(torch.neg, (x,))
    graph.call_function(_vmap_decrement_nesting)
    graph.output(graph.call_function(torch.exp, (x,)))
    return GraphModule(nn.Module(), graph)


def names_inside(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes if is_inside_transform(node) and "nesting" not in node.name]


def test_nodes_between_start_and_end_are_inside() -> None:
    graph = vectorized().graph
    assert names_inside(graph) == ["cos", "tan", "neg"]
    with transforms_found_once(graph):
        assert names_inside(graph) == ["cos", "tan", "neg"]


def test_an_edit_is_seen_at_once() -> None:
    graph = vectorized().graph
    assert names_inside(graph) == ["cos", "tan", "neg"]
    by_name: dict[str, Node] = {node.name: node for node in graph.nodes}
    by_name["neg"].append(by_name["_vmap_increment_nesting"])
    assert names_inside(graph) == ["tan"]


@pytest.mark.usefixtures("quick_collections")
def test_a_graph_that_a_backend_was_asked_about_is_freed() -> None:
    module = vectorized()
    graph, owner = weakref.ref(module.graph), weakref.ref(module)
    assert len(ByCapability("aot_eager")(Program.of(module))) == 2
    del module
    gc.collect()
    assert graph() is None
    assert owner() is None


# A node inside that raises -----------------------------------------------------------------------------------------


class Mapped(nn.Module):
    """Looks rows up inside of vmap, or of two."""

    def __init__(self, *, twice: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 4)
        self.twice = twice

    def forward(self, places: Tensor) -> Tensor:
        look = torch.vmap(self.table) if self.twice else self.table
        return torch.vmap(look)(places).sin()


class PushedForward(nn.Module):
    """The same, behind the start of forward-mode AD."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 4)

    def forward(self, places: Tensor) -> Tensor:
        x = torch.ones(4)
        return torch.func.jvp(lambda value: (self.table(places) * value).sin(), (x,), (x,))[1]


def as_it_is(program: Program, _: Path) -> GraphModule:
    return program.module()


def from_a_file(program: Program, folder: Path) -> GraphModule:
    torch.export.save(program.exported(), folder / "m.pt2")
    return Program.of(folder / "m.pt2").module()


def cut(program: Program, _: Path) -> GraphModule:
    return plan(program, BySize(parts=2), Call()).apply().module()


def cut_as_a_graph(program: Program, _: Path) -> GraphModule:
    """Of a program whose modules wait for their first call."""
    return plan(Program.of(program.module()), BySize(parts=2), Call()).apply().module()


def copied(program: Program, _: Path) -> GraphModule:
    module = copy.deepcopy(program.module())
    module.recompile()
    return module


@pytest.mark.parametrize("made", [as_it_is, from_a_file, cut, cut_as_a_graph, copied])
@pytest.mark.parametrize(
    "model",
    [
        Mapped(),
        Mapped(twice=True),
        pytest.param(PushedForward(), marks=pytest.mark.skipif(IS_OLD, reason="torch 2.11 cannot trace jvp")),
    ],
    ids=["vmap", "two", "jvp"],
)
def test_a_node_that_raises_leaves_no_transform_open(
    model: nn.Module, made: Callable[[Program, Path], GraphModule], tmp_path: Path
) -> None:
    places = torch.zeros(2, 3, dtype=torch.long)
    module = made(capture(model, (places,)), tmp_path)
    before = module(places)
    with pytest.raises(IndexError, match="out of range"):
        module(places + 5)
    assert functorch.get_dynamic_layer_stack_depth() == 0
    assert torch.equal(module(places), before)  # It would raise if forward-mode AD were still on.


def test_a_node_that_raises_leaves_the_transforms_of_its_caller() -> None:
    places = torch.zeros(2, 3, dtype=torch.long)
    module = capture(Mapped(), (places,)).module()

    def caller(x: Tensor) -> Tensor:
        depth = functorch.get_dynamic_layer_stack_depth()
        with pytest.raises(IndexError, match="out of range"):
            module(places + 5)
        assert functorch.get_dynamic_layer_stack_depth() == depth == 1
        return x.sin()

    x = torch.ones(3)
    assert torch.equal(torch.vmap(caller)(x), x.sin())


@pytest.mark.parametrize("raises", [False, True])
def test_a_compiler_that_leaves_a_transform_open_leaves_the_forward_mode_of_its_caller(raises: bool) -> None:
    x = torch.ones(3)
    with forward_ad.dual_level():
        with pytest.raises(ValueError, match="no") if raises else nullcontext(), compiler_scope():
            functorch._vmap_increment_nesting(2, "error")
            if raises:
                raise ValueError("no")
        assert functorch.get_dynamic_layer_stack_depth() == 0
        assert torch.equal(forward_ad.unpack_dual(forward_ad.make_dual(x, x) * 2).tangent, 2 * x)
