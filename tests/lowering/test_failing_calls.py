"""Calls that a compiler fails on: a wrong call is wrong alone, and what fails or changes without end runs eagerly."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from tests.lowering.helpers import Counting, Failing, lowered, plan_of, region_of
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, symbolic_trace

from partita import Plan, Program, capture, plan
from partita.errors import LoweringError
from partita.lowering.variant_cache import LruTable
from partita.policies import BySize
from partita.treatments import Lower


def product(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y).relu()


@pytest.mark.parametrize("strict", [False, True])
def test_a_wrong_call_raises_what_torch_raises_and_spoils_nothing(strict: bool) -> None:
    backend = Counting()
    decided = plan_of(product, Lower(backend, strict=strict))
    module = decided.apply().module()
    for _ in range(5):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            module(torch.randn(2, 3), torch.randn(4, 5))
    x, y = torch.randn(2, 3), torch.randn(3, 5)
    assert torch.equal(module(x, y), product(x, y))
    other = plan_of(product, Lower(backend, strict=strict)).apply().module()
    assert torch.equal(other(x, y), product(x, y))
    assert len(decided.failures) == 0
    assert [list(value.shape) for value in backend.made[-1]] == [[2, 3], [3, 5]], "a wrong call opens no sizes"
    assert region_of(module)._dispatcher.select((x, y)) is not None


def test_a_compiler_that_fails_on_one_size_gets_others() -> None:
    class Picky(Counting):
        def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Any:
            if inputs[0].shape[0] == 3:
                raise ValueError("no threes")
            return super().compile(body, inputs)

    backend = Picky()
    decided = plan_of(lambda x: x.sin(), Lower(backend, dynamic=False))
    module = decided.apply().module()
    for size in (3, 4, 3, 5):
        x = torch.randn(size)
        assert torch.equal(module(x), x.sin())
    assert len(backend.made) == 2
    assert [failure.reason for failure in decided.failures] == ["no threes"]


def test_a_strict_region_writes_nothing_when_its_compiler_fails() -> None:
    def count(total: Tensor) -> Tensor:
        return total.add_(1)

    module = lowered(count, Lower(Failing(), strict=True))
    total = torch.zeros(3)
    with pytest.raises(LoweringError):
        module(total)
    assert torch.equal(total, torch.zeros(3))


def test_lists_that_grow_are_compiled_for_a_bounded_number_of_times() -> None:
    def joined(values: list[Tensor]) -> Tensor:
        return torch.cat(values).relu()

    backend = Counting()
    decided = plan_of(joined, Lower(backend, max_variants=2))
    module = decided.apply().module()
    for length in range(1, 80):
        values = [torch.randn(3) for _ in range(length)]
        assert torch.equal(module(values), joined(values))
    assert len(backend.made) == 8
    assert "compiled 8 times" in decided.failures[0].reason
    assert len(region_of(module)._dispatcher._seen) <= 64


def test_a_table_of_recent_notes_forgets_the_oldest() -> None:
    recent = LruTable[int](most=2)
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        recent.note(key, value)
    assert [recent.get(key) for key in "abc"] == [3, None, 4]
    assert len(recent) == 2


def test_aliases_of_mutated_inputs_are_found_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count of comparisons, since clocks are not to be trusted."""
    from partita.lowering import lowered as choice

    class Key:
        compared = 0

        def __init__(self, number: int) -> None:
            self.number = number

        def __hash__(self) -> int:
            return self.number

        def __eq__(self, other: object) -> bool:
            Key.compared += 1
            return isinstance(other, Key) and other.number == self.number

    monkeypatch.setattr(choice, "memory_of", Key)
    assert not choice._overlap(range(1000), range(500))
    assert choice._overlap([*range(1000), 499], range(500))
    assert not choice._overlap([*range(1000), 500], range(500))
    assert Key.compared < 5000


# What eager mode refuses, compiled code must not do -------------------------------------------------------------------


def _doubles_a_leaf(x: Tensor) -> Tensor:
    x.mul_(2)
    return x.sin()


def _adds_into_another_dtype(x: Tensor) -> Tensor:
    mask = torch.empty_like(x, dtype=torch.bool)
    torch.add(x, x, out=mask)
    return mask


def _mutates_an_expanded_tensor(x: Tensor) -> Tensor:
    wide = x[0].expand(3, 4)
    wide.add_(1)
    return wide * 1


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("function", [_doubles_a_leaf, _adds_into_another_dtype, _mutates_an_expanded_tensor])
def test_what_eager_mode_refuses_is_refused(function: Any, strict: bool) -> None:
    program = Program.of(symbolic_trace(function))
    decided = plan(program, BySize(parts=1), Lower("aot_eager", strict=strict))
    module = decided.apply().module()
    x = torch.ones(2, 4, requires_grad=function is _doubles_a_leaf)
    with pytest.raises(RuntimeError) as expected:
        function(x)
    with pytest.raises(RuntimeError, match=str(expected.value)[:30]):
        module(x)
    assert torch.equal(x.detach(), torch.ones(2, 4))
    assert not decided.failures  # The call was wrong, not the region.


def _lowered_module(called: nn.Module) -> tuple[Plan, Tensor]:
    """A plan that lowers a call of a module, and an input whose rows share memory."""
    program = Program.of(symbolic_trace(nn.Sequential(called)))
    return plan(program, BySize(parts=1), Lower("aot_eager")), torch.randn(1, 4).expand(3, 4)


@pytest.mark.parametrize(
    "called", [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()], ids=lambda one: type(one).__name__
)
def test_a_module_that_does_not_mutate_its_input_is_compiled_for_an_expanded_one(called: nn.Module) -> None:
    decided, expanded = _lowered_module(called)
    torch.manual_seed(0)
    expected = deepcopy(called)(expanded)
    torch.manual_seed(0)
    assert torch.equal(decided.apply().module()(expanded), expected)
    assert len(decided.compilations) == 1
    assert not decided.failures


def test_a_module_that_mutates_an_expanded_input_raises_as_in_eager_mode() -> None:
    decided, expanded = _lowered_module(nn.ReLU(inplace=True))
    with pytest.raises(RuntimeError, match="single memory location"):
        decided.apply().module()(expanded)
    assert not decided.failures  # The call was wrong, not the region.


@pytest.mark.parametrize(("size", "stride", "offset"), [((4, 8), (8, 1), 4), ((2,), (1,), 31), ((3,), (16,), 0)])
def test_a_view_by_strides_stays_in_its_memory(size: Any, stride: Any, offset: int) -> None:
    """Compiled code does not look: it would read whatever lies behind the tensor."""

    def function(x: Tensor) -> Tensor:
        return x.as_strided(size, stride, offset) * 2

    module = plan(Program.of(symbolic_trace(function)), BySize(parts=1), Lower("aot_eager")).apply().module()
    x = torch.ones(32)
    with pytest.raises(RuntimeError, match="out of bounds"):
        function(x)
    with pytest.raises(RuntimeError, match="out of bounds"):
        module(x)


def test_a_view_by_strides_inside_its_memory_is_compiled() -> None:
    program = Program.of(symbolic_trace(lambda x: x.as_strided((2, 8), (16, 2), 1) * 2))
    decided = plan(program, BySize(parts=1), Lower("aot_eager", strict=True))
    x = torch.arange(32.0)
    assert torch.equal(decided.apply().module()(x), x.as_strided((2, 8), (16, 2), 1) * 2)


@pytest.mark.parametrize(("scale", "is_compiled"), [(2.0, True), (None, True), (0.001, False)])
def test_scales_that_do_not_fit_the_sizes_are_left_to_eager_mode(scale: float | None, is_compiled: bool) -> None:
    def enlarge(x: Tensor) -> Tensor:
        return torch.ops.aten.upsample_nearest2d(x, [8, 8], scale, scale)

    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    decided = plan(capture(enlarge, (x,)), BySize(parts=1), Lower("aot_eager"))
    with torch.no_grad():
        assert torch.equal(decided.apply().module()(x), enlarge(x))
    assert ("may read outside of its tensor" in str(decided.failures)) is not is_compiled


def _strided(x: Tensor) -> Tensor:
    return torch.as_strided(x * 1, (64,), (1,)) + 1


def _strided_in_a_body(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: torch.as_strided(x * 1, (64,), (1,)), lambda x: x.new_zeros(64), (x,))


def _masked(x: Tensor) -> Tensor:
    rows = torch.tensor([0, 1000])
    return torch.ops.aten._unsafe_masked_index(x * 1, torch.tensor([True, True]), [rows], 0.0)


@pytest.mark.parametrize("function", [_strided, _strided_in_a_body])
def test_a_view_outside_of_its_memory_is_left_to_eager_mode(function: Any) -> None:
    x = torch.ones(24)
    program = Program.of(torch.export.export(_Called(function), (x,)))
    decided = plan(program, BySize(parts=1), Lower("inductor"))
    with torch.no_grad(), pytest.raises(RuntimeError, match="out of bounds"):
        decided.apply().module()(x)


def test_positions_that_compiled_code_does_not_check_are_left_to_eager_mode() -> None:
    x = torch.arange(24.0)
    program = Program.of(torch.export.export(_Called(_masked), (x,)))
    decided = plan(program, BySize(parts=1), Lower("inductor"))
    with torch.no_grad():
        assert torch.equal(decided.apply().module()(x), _masked(x))
    assert "may read outside of its tensor" in str(decided.failures)


def _truncated(x: Tensor, by: Tensor) -> Tensor:
    return torch.div(x, by, rounding_mode="trunc")


def _truncated_in_a_body(x: Tensor, by: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, _truncated, lambda x, by: x + by, (x, by))


@pytest.mark.parametrize("function", [_truncated, torch.ops.prims.div.default, _truncated_in_a_body])
def test_an_integer_division_by_zero_raises_and_does_not_end_the_process(function: Any) -> None:
    x, by = torch.arange(1, 7), torch.ones(6, dtype=torch.int64)
    decided = plan(Program.of(torch.export.export(_Called(function), (x, by))), BySize(parts=1), Lower("inductor"))
    module = decided.apply().module()
    assert torch.equal(module(x, by), x)
    assert "divi" in str(decided.failures)
    with pytest.raises(RuntimeError, match="ZeroDivision"):
        module(x, by * 0)


@pytest.mark.parametrize("by", [2, 2.5])
def test_a_division_by_a_number_is_compiled(by: float) -> None:
    x = torch.arange(6)
    decided = plan(capture(lambda x: _truncated(x, by), (x,)), BySize(parts=1), Lower("aot_eager", strict=True))
    assert torch.equal(decided.apply().module()(x), _truncated(x, by))


def _selected(x: Tensor, row: Tensor) -> Tensor:
    at: Any = row.item()
    return x.select(0, at) + 1


def _selected_within(x: Tensor, row: Tensor) -> Tensor:
    at: Any = row.item()
    torch._check(at >= 0)
    torch._check(at < 5)
    return x.select(0, at) + 1


def _without_assertions(function: Any, inputs: tuple[Tensor, ...]) -> Program:
    """An exported program as a file may hold it: no assertion says that the index is within the tensor."""
    exported = torch.export.export(_Called(function), inputs)
    for module in exported.graph_module.modules():
        graph = module.graph if isinstance(module, GraphModule) else Graph()
        for node in reversed(graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default)):
            graph.erase_node(node)
    return Program.of(exported)


def test_an_index_that_only_data_say_is_left_to_eager_mode() -> None:
    x = torch.ones(5, 3)
    program = _without_assertions(_selected, (x, torch.tensor(2)))
    decided = plan(program, BySize(parts=1), Lower("inductor"))
    with torch.no_grad(), pytest.raises(IndexError, match="out of range"):
        decided.apply().module()(x, torch.tensor(100_000))


def test_an_index_that_is_asserted_is_compiled() -> None:
    x, row = torch.ones(5, 3), torch.tensor(2)
    program = Program.of(torch.export.export(_Called(_selected_within), (x, row)))
    decided = plan(program, BySize(parts=1), Lower("aot_eager", strict=True))
    assert torch.equal(decided.apply().module()(x, row), x[2] + 1)


def _of_channels(x: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return torch.ops.quantized_decomposed.quantize_per_channel(x, scales, zeros, 0, -128, 127, torch.int8)


def _of_channels_in_a_body(x: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, _of_channels, lambda x, scales, zeros: x.to(torch.int8), (x, scales, zeros))


@pytest.mark.parametrize("function", [_of_channels, _of_channels_in_a_body])
def test_fewer_scales_than_channels_are_left_to_eager_mode(function: Any) -> None:
    """Neither the fake kernel nor Inductor compares their numbers; eager mode does."""
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    inputs = torch.ones(64, 4), torch.ones(2), torch.zeros(2, dtype=torch.int64)
    decided = plan(Program.of(torch.export.export(_Called(function), inputs)), BySize(parts=1), Lower("inductor"))
    with torch.no_grad(), pytest.raises(RuntimeError, match="must match"):
        decided.apply().module()(*inputs)


def test_one_scale_for_each_channel_is_compiled() -> None:
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    inputs = torch.ones(6, 4), torch.ones(6), torch.zeros(6, dtype=torch.int64)
    program = Program.of(torch.export.export(_Called(_of_channels), inputs))
    decided = plan(program, BySize(parts=1), Lower("aot_eager", strict=True))
    assert torch.equal(decided.apply().module()(*inputs), _of_channels(*inputs))


class _Called(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def test_a_method_that_leaves_its_memory_is_left_to_eager_mode() -> None:
    program = Program.of(symbolic_trace(lambda x: (x * 1).as_strided((64,), (1,)) + 1))
    decided = plan(program, BySize(parts=1), Lower("inductor"))
    with torch.no_grad(), pytest.raises(RuntimeError, match="out of bounds"):
        decided.apply().module()(torch.ones(24))
