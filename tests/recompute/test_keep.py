"""Policies of what is kept: by cost, only what a second run would compute, and by names that must be there."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.recompute.helpers import captured
from tests.recompute.operators.helpers import Block
from torch import Tensor, nn

import partita
from partita import Program, Region
from partita.errors import OptionError, RecomputeError
from partita.plans.memory import saved_bytes_of
from partita.policies import ByLabel, ByModule, BySize
from partita.program.flops import Flops
from partita.program.operator_choice import Chosen
from partita.program.saved_tensors import NodeDryRuns, saved_tensors_of
from partita.recompute.keep import keepable
from partita.testing.captured import Attention, Buffered, Mixer
from partita.treatments import (
    KeepAtMost,
    KeepEverything,
    KeepExpensive,
    KeepNodes,
    KeepNothing,
    KeepOperators,
    Recompute,
)

ROWS, SIZE = 4, 8


class Chain(nn.Module):
    """Two products of which the sine is taken, and one of which nothing is; the widest takes least for its size."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)
        self.last = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.narrow(self.wide(x).sin()).sin()).transpose(0, 1) + 1


def _regions(model: Any, *args: Tensor, parts: int = 1) -> tuple[Program, list[Region]]:
    program = partita.capture(model, args)
    return program, list(partita.plan(program, BySize(parts=parts), Recompute()).partition)


def _kept(keep: Any, model: Any = None) -> list[str]:
    _, (region,) = _regions(Chain() if model is None else model, torch.ones(ROWS, SIZE))
    return [node.name for node in keep(region)]


# By cost ------------------------------------------------------------------------------------------------------------


def test_what_is_expensive_by_its_size_is_kept_but_for_what_is_not_computed_again() -> None:
    # A product of 8 columns takes 16 FLOPs a number, one of 16 columns 32; a number has four bytes.
    assert _kept(KeepExpensive(4.0)) == ["linear", "linear_1"]
    assert _kept(KeepExpensive(5.0)) == ["linear_1"]
    assert _kept(KeepExpensive(8.1)) == []


def test_at_most_so_many_bytes_are_kept_and_the_dearest_first() -> None:
    wide, narrow = ROWS * 2 * SIZE * 4, ROWS * SIZE * 4
    assert _kept(KeepAtMost(0)) == _kept(KeepAtMost(narrow - 1)) == []
    assert _kept(KeepAtMost(narrow)) == _kept(KeepAtMost(wide)) == ["linear_1"]
    assert _kept(KeepAtMost(wide + narrow)) == _kept(KeepAtMost(1 << 30)) == ["linear_1", "linear"]


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda x: x @ x, []),
        (lambda x: (x @ x).t().reshape(-1)[1:] + 1, []),
        (lambda x: (x @ x) * 2.0, []),
        (lambda x: (x @ x).exp(), ["matmul"]),
        (lambda x: (x @ x) * x, ["matmul"]),
        (lambda x: (x @ x) @ x, ["matmul"]),
        (lambda x: (torch.mm(x, x), x.exp())[1], []),
        (lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]), None),
    ],
)
def test_a_result_is_kept_if_something_is_saved_that_is_computed_after_it(function: Any, names: Any) -> None:
    _, (region,) = _regions(function, torch.ones(4, 4))
    found = [node.name for node in KeepExpensive(1e-9)(region)]
    assert found == (["scaled_dot_product_attention"] if names is None else names)


@pytest.mark.parametrize("model", [Attention, Buffered, Mixer, Chain, Block])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_as_much_is_spared_as_by_keeping_all_that_takes_flops(model: type[nn.Module], parts: int) -> None:
    size = SIZE if model is Chain else 4 if model is Block else 6
    program, regions = _regions(model(), torch.randn(4, size), parts=parts)
    saved, flops = saved_tensors_of(program), Flops()
    assert saved.reason is None
    for region in regions:
        ours = saved_bytes_of(region, saved, list(KeepExpensive(1e-9)(region)))
        every = saved_bytes_of(region, saved, list(filter(flops.of, keepable(region))))
        assert ours is not None
        assert every is not None
        assert ours.extra_flops == every.extra_flops
        assert (ours.treated_bytes or 0) <= (every.treated_bytes or 0)


def test_what_was_tried_in_one_region_is_known_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []
    monkeypatch.setattr(NodeDryRuns, "__init__", _counting(NodeDryRuns.__init__, tried))
    plan = partita.plan(captured(), ByModule("blocks.*"), Recompute())
    for region in plan.partition:
        KeepExpensive()(region)
        KeepAtMost(1000)(region)
    assert len(tried) == 1


def _counting(function: Any, calls: list[object]) -> Any:
    def counted(*args: Any) -> None:
        calls.append(args)
        function(*args)

    return counted


# By name ------------------------------------------------------------------------------------------------------------


def test_a_name_of_no_node_is_refused_with_near_ones() -> None:
    plan = partita.plan(captured(), ByModule("blocks.*"), Recompute(KeepNodes("linear", "lineer_2")))
    for act in (plan.apply, plan.saved_memory, plan.marks):
        with pytest.raises(
            RecomputeError, match="no node is called 'lineer_2', so it cannot be kept; did you mean 'linear"
        ):
            act()


def test_a_name_may_be_in_another_region_or_in_none() -> None:
    plan = partita.plan(captured(), ByModule("blocks.*"), Recompute(KeepNodes("linear_2", "mean", "x")))
    assert [[node.name for node in Recompute(plan.treatments[0].keep).kept(region)] for region in plan.partition] == [
        [],
        ["linear_2"],
        [],
    ]


def test_a_name_that_an_edit_brings_is_found() -> None:
    program = captured()
    (region,) = partita.plan(program, ByModule("blocks.0"), Recompute()).partition
    keep = KeepNodes("renamed")
    with pytest.raises(RecomputeError, match="no node is called 'renamed'"):
        keep(region)
    region.nodes[0].name = "renamed"
    assert list(keep(region)) == [region.nodes[0]]


def test_names_are_plain_data() -> None:
    keep = KeepNodes("a", "b")
    assert pickle.loads(pickle.dumps(keep)) == keep == copy.deepcopy(keep) != KeepNodes("a")
    assert repr(keep) == "KeepNodes('a', 'b')"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("aten.linearr", "torch has no operator 'aten.linearr', so it cannot be kept; did you mean 'aten.linear'"),
        ("aten::relu.nope", "torch has no operator 'aten::relu.nope'"),
        ("torch.ops.aten.gellu", "torch has no operator 'torch.ops.aten.gellu'.*'aten.gelu'"),
        ("torch.nn.functional.reluu", "'torch.nn.functional' has no 'reluu'.*'torch.nn.functional.relu'"),
    ],
)
def test_a_name_that_torch_would_have_to_know_is_refused(name: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        KeepOperators("aten.mm", name)


@pytest.mark.parametrize(
    "name",
    [
        *("aten.mm", "aten::mm", "aten.mm.default", "torch.ops.aten.mm", "torch.mm", "torch.Tensor.mm", "mm"),
        *("torch.nn.functional.linear", "torch.nn.Linear", "torch.nn.modules.linear.Linear", "Linear"),
        *("vllm.unified_attention", "torch.ops.vllm.unified_attention", "higher_order.cond", "my_package.my_function"),
    ],
)
def test_a_name_that_somebody_may_have_is_taken(name: str) -> None:
    assert KeepOperators(name).operators == (name,)


def test_many_names_are_looked_up_in_many_regions_in_linear_time() -> None:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    for _ in range(4000):
        node = graph.call_function(torch.ops.aten.sin.default, (node,))
    graph.output(node)
    program = Program.of(torch.fx.GraphModule(nn.Module(), graph))
    labels = {node.name: place // 4 for place, node in enumerate(program.operators())}
    regions = partita.plan(program, ByLabel(lambda node: labels[node.name]), Recompute(KeepNothing())).partition
    looked: list[str] = []

    class Name(str):
        __slots__ = ()

        def __hash__(self) -> int:
            looked.append(self)
            return super().__hash__()

    keep = KeepNodes(*(Name(name) for name in labels))
    looked.clear()
    assert sum(len(list(keep(region))) for region in regions) == 4000
    assert len(looked) <= 8000


@pytest.mark.parametrize("parts", [1, 2])
def test_everything_is_kept_around_results_that_nothing_uses(parts: int) -> None:
    class Unique(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.unique(x.round()).sin() + 1, x.sin()

    x = torch.randn(6, requires_grad=True)
    program = partita.capture(Unique(), (x,))
    after = partita.plan(program, BySize(parts=parts), Recompute(KeepEverything())).apply()
    partita.verify(program, after, (x,), other_shapes=False)


# Items of containers ------------------------------------------------------------------------------------------------


def _sorted(x: Tensor) -> Tensor:
    return (torch.sort(x)[0].sin() * 2).exp()


def _halves(x: Tensor) -> Tensor:
    first, second = (x * 2).chunk(2)
    return (first.sin() * second).exp()


@pytest.mark.parametrize("function", [_sorted, _halves])
@pytest.mark.parametrize("item", ["getitem", "getitem_1"])
def test_an_item_is_kept_with_its_container(function: Any, item: str) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    program = partita.capture(function, (x,))
    if item not in {node.name for node in program.operators()}:
        item = "getitem"
    plan = partita.plan(program, ByLabel(lambda _: "all"), Recompute(KeepNodes(item)))
    partita.verify(program, plan.apply(), (x,))
    assert plan.saved_memory() is not None


def test_a_kept_node_that_reads_a_float_of_a_size_can_be_saved(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() / (x.shape[0] * 0.5)

    args = (torch.randn(4, 3, requires_grad=True),)
    rows = torch.export.Dim("rows", min=2, max=50)
    program = partita.capture(Scaled(), args, dynamic_shapes=({0: rows},))
    after = partita.plan(program, BySize(parts=1), Recompute(KeepEverything())).apply()
    after.save(str(tmp_path / "kept.pt2"))
    partita.verify(program, partita.Program.of(str(tmp_path / "kept.pt2")), args)


def test_a_name_that_no_operator_can_have_is_refused_in_few_letters() -> None:
    with pytest.raises(OptionError, match="no operator has a name of 20005 letters") as caught:
        KeepOperators("aten." + "a." * 10_000)
    assert len(str(caught.value)) < 200


def test_operators_are_looked_up_once_for_all_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    program = partita.capture(nn.Sequential(*(nn.ReLU() for _ in range(20))), (torch.ones(2),))
    made: list[Any] = []
    monkeypatch.setattr(
        sys.modules[KeepOperators.__module__], "Chosen", lambda *given: made.append(given) or Chosen(*given)
    )
    plan = partita.plan(program, BySize(operators=1), Recompute(KeepOperators("aten.relu")))
    str(plan)
    plan.apply()
    assert len(made) == 1
