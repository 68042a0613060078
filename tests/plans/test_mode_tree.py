"""The tree of mode regions says what is nested in what, however the program sets its modes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

import partita
from partita._torch import toggles
from partita.plans import ModeTree
from partita.policies import ByMode, BySize
from partita.treatments import Call, Mode

X = torch.randn(4, 4)


class Nest(nn.Module):
    """An autocast block with two blocks in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                scale = x @ x
            with torch.autocast("cpu", enabled=False):
                hidden = self.layer(x)
            return hidden * scale


NEST = """\
the caller's modes: 3 operators, matmul .. mul
+- autocast on cpu bfloat16: 3 operators, matmul .. mul
   +- no_grad: 1 operator, matmul
   +- no autocast on cpu: 1 operator, linear"""


def test_blocks_are_printed_as_they_are_nested() -> None:
    assert str(partita.mode_tree(partita.capture(Nest(), (X,)))) == NEST


@pytest.mark.parametrize("operators", ["partita", "torch"])
def test_wrapped_programs_have_the_tree_of_flat_ones(operators: str) -> None:
    program = partita.capture(Nest(), (X,))
    wrapped = partita.plan(program, ByMode(), Mode(operators=operators)).apply()  # type: ignore[arg-type]
    assert partita.mode_tree(wrapped) == partita.mode_tree(program)


def test_regions_that_set_nothing_are_seen_through() -> None:
    wrapped = partita.plan(partita.capture(Nest(), (X,)), ByMode(), Mode()).apply()
    cut = partita.plan(wrapped, BySize(parts=1), Call()).apply()
    assert str(partita.mode_tree(cut)) == NEST


def test_bodies_of_other_operators_are_seen_through() -> None:
    def frozen(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.sin()

    def branching(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, frozen, torch.cos, (x,))

    tree = partita.mode_tree(partita.capture(branching, (X,)))
    assert tree.regions == (ModeTree("no_grad", ("sin",)),)
    assert "cos" in tree.operators


def test_sizes_and_items_are_not_counted() -> None:
    def halves(x: Tensor) -> Tensor:
        with torch.no_grad():
            first, second = x.chunk(2)
        return first.reshape(x.shape[0] // 2, -1) + second

    dim = torch.export.Dim("rows", min=2, max=8)
    tree = partita.mode_tree(partita.capture(halves, (X,), dynamic_shapes=({0: 2 * dim},)))
    assert [region.operators for region in tree.regions] == [("chunk",)]
    assert [name for name in tree.operators if "size" in name or "getitem" in name] == []


def test_graphs_without_traced_values_are_counted_alike() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    outer = graph.call_function(toggles.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
    first = graph.call_function(torch.matmul, (x, x), name="first")
    inner = graph.call_function(toggles.ENTER_AUTOCAST, ("cuda", torch.float16, True, None))
    second = graph.call_function(torch.matmul, (first, x), name="second")
    graph.call_function(toggles.EXIT_AUTOCAST, (outer,))
    third = graph.call_function(torch.matmul, (second, x), name="third")
    graph.call_function(toggles.EXIT_AUTOCAST, (inner,))
    graph.output(third)
    assert partita.mode_tree(partita.Program.of(GraphModule({}, graph))) == ModeTree(
        "the caller's modes",
        ("first", "second", "third"),
        (
            ModeTree(
                "autocast on cpu bfloat16",
                ("first", "second"),
                (ModeTree("autocast on cuda float16", ("second",)),),
            ),
            ModeTree("autocast on cuda float16", ("third",)),
        ),
    )


def test_a_program_without_modes_is_a_root_alone() -> None:
    program = partita.Program.of(torch.fx.symbolic_trace(nn.ReLU()))
    assert str(partita.mode_tree(program)) == "the caller's modes: 1 operator, relu"
    empty = partita.Program.of(torch.fx.symbolic_trace(nn.Identity()))
    assert str(partita.mode_tree(empty)) == "the caller's modes: no operators"


def test_a_tree_takes_nothing_from_its_program() -> None:
    program = partita.capture(Nest(), (X,))
    before = program.graph_module.code
    partita.mode_tree(program)
    assert program.graph_module.code == before
