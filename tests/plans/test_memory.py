"""A plan says what autograd holds for each region without and with recomputation, and which FLOPs that adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tests.helpers.core import text
from tests.plans.helpers import Checkpoint, bytes_alive, bytes_alive_when_recomputed, predicted_when_recomputed
from torch import Tensor, nn
from torch.fx import GraphModule

import partita
from partita import Plan, Program, Region, capture
from partita.errors import OptionError, TreatmentError
from partita.plans.memory import SavedBytes, saved_bytes_of, saved_memory
from partita.policies import ByLabel, BySize
from partita.program.saved_tensors import Origin, SavedTensors, saved_tensors_of
from partita.testing.captured import Attention, Buffered, Casting, Frozen, Mixer
from partita.treatments import Call, KeepEverything, KeepOperators, Recompute


def _input() -> Tensor:
    return torch.randn(4, 6, requires_grad=True)


def _cut(program: Program, labels: Mapping[str, str] | Callable[[str], str | None]) -> Plan:
    choose = labels if callable(labels) else labels.get
    return partita.plan(program, ByLabel(lambda node: choose(node.name)), Checkpoint())


def _holding(function: Callable[..., Any], names: str, *, kept: str = "") -> SavedBytes:
    """What the nodes of these names hold, as one region."""
    program = capture(function, (_input(),))
    region = Region("part", tuple(map(program.node, names.split())))
    found = saved_bytes_of(region, saved_tensors_of(program), tuple(map(program.node, kept.split())))
    assert found is not None
    return found


def _numbers(holding: SavedBytes | None) -> tuple[int | None, int | None, int] | None:
    return None if holding is None else (holding.plain_bytes, holding.treated_bytes, holding.extra_flops)


def _chain(x: Tensor) -> Tensor:
    """Two products of 4 x 6 and 6 x 4, and of 4 x 4 and 4 x 6, with a result that is saved between them."""
    return (x @ x.t()).tanh() @ x.sin()


_PRODUCT = 2 * 4 * 6 * 4


def test_a_recomputed_region_holds_what_goes_into_it() -> None:
    assert _numbers(_holding(_chain, "t matmul tanh sin matmul_1")) == (96 + 64 + 96, 96, _PRODUCT)


def test_what_is_kept_is_held_and_not_computed_again() -> None:
    holding = _holding(_chain, "t matmul tanh sin matmul_1", kept="matmul")
    assert _numbers(holding) == (96 + 64 + 96, 96 + 64, 0)


def test_nodes_after_the_last_that_saves_are_not_computed_again() -> None:
    # A product saves what it reads, before it is computed; a softmax what it gives.
    assert _holding(lambda x: (x @ x.t()) + 1, "t matmul add").extra_flops == 0
    assert _holding(lambda x: (x @ x.t()).softmax(0) + 1, "t matmul softmax add").extra_flops == _PRODUCT
    # What is kept saves as well, but is not computed.
    assert _holding(lambda x: (x @ x.t()).softmax(0), "t matmul softmax", kept="softmax").extra_flops == _PRODUCT


def test_a_region_for_which_nothing_is_saved_is_left_alone() -> None:
    assert _numbers(_holding(lambda x: (x + 1).exp().sum(), "add")) == (0, 0, 0)
    assert _numbers(_holding(lambda x: x.detach().exp().sum() + x.sum(), "exp sum_1")) == (0, 0, 0)


def test_state_is_held_anyway() -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            return x.detach().add(1) @ self.weight

    program = capture(Linear(), (_input(),))
    region = Region("part", (program.node("matmul"),))
    assert _numbers(saved_bytes_of(region, saved_tensors_of(program))) == (96, 96, 0)


def test_items_are_taken_out_where_their_container_is_made() -> None:
    def halves(x: Tensor) -> Tensor:
        first, second = x.sin().unbind(0)[:2], x.cos().split(2)
        return first[0].exp() + second[1].exp().sum()

    program = capture(halves, (_input(),))
    item = next(node for node in program.operators() if node.args[:1] == (program.node("split"),))
    saved = saved_tensors_of(program)
    region = Region("part", (item, program.node("exp_1")))
    found = saved_bytes_of(region, saved)
    assert found is not None
    assert {memory.node for memory in found.treated} == {program.node("cos")}


def test_a_region_that_mutates_its_input_saves_a_copy_from_before() -> None:
    program = capture(Buffered(), (_input(),))
    region = Region("part", tuple(program.operators()))
    found = saved_bytes_of(region, saved_tensors_of(program))
    assert found is not None
    assert sorted(memory.bytes or 0 for memory in found.treated) == [24, 96]
    assert all(memory.origin is not Origin.STATE for memory in found.treated)


def test_memory_of_several_regions_counts_once_in_the_total() -> None:
    program = capture(lambda x: (x.sin().exp(), x.cos().exp()), (_input(),))
    plan = _cut(program, {"sin": "one", "exp": "one", "cos": "two", "exp_1": "two"})
    found = saved_memory(plan.partition, plan.treatments)
    assert list(map(_numbers, found.regions)) == [(192, 96, 0), (192, 96, 0)]
    assert _numbers(found.total) == (3 * 96, 96, 0)


def test_treatments_that_do_not_say_change_nothing_in_the_total() -> None:
    program = capture(lambda x: (x.sin().exp(), x.cos().exp()), (_input(),))
    plan = _cut(program, {"sin": "one", "exp": "one", "cos": "two", "exp_1": "two"})
    found = saved_memory(plan.partition, (Checkpoint(), Call()))
    assert list(map(_numbers, found.regions)) == [(192, 96, 0), None]
    assert _numbers(found.total) == (3 * 96, 2 * 96, 0)


def test_the_table_shows_what_is_held_where_a_treatment_says_it() -> None:
    program = capture(_chain, (_input(),))
    plan = _cut(program, {"t": "one", "matmul": "one", "tanh": "one"})
    assert str(plan) == text(
        """
        region  nodes  in  out  bytes in  bytes out  flops  saved  saved after  recomputed flops  treatment     label
        ------  -----  --  ---  --------  ---------  -----  -----  -----------  ----------------  ------------  -----
        one     3      1   1    96        64         192    160    96           192               Checkpoint()  one
        saved for backward: 256 bytes, 256 after; 192 FLOPs are recomputed
          called under: enable_grad, no autocast
          parameters: 0 bytes; gradients: 0 bytes
          largest recomputed region: one, 160 bytes while its backward runs
        excluded: 2 nodes: its label is None
        """
    )


_AUTOCAST = torch.autocast("cpu", torch.bfloat16)


def test_bytes_are_those_under_the_autocast_that_the_caller_has() -> None:
    program = capture(lambda x: x.sin() @ x.t(), (_input(),))
    plan = _cut(program, {"sin": "one"})
    # The sine saves its input; the product both of its inputs, under autocast as casts.
    assert _numbers(plan.saved_memory().total) == (96 + 96, 96 + 96, 0)
    found = plan.saved_memory(under=_AUTOCAST)
    assert _numbers(found.total) == (96 + 48 + 48, 96 + 48 + 48, 0)
    assert str(found) == text(
        """
        saved for backward: 192 bytes, 192 after; 0 FLOPs are recomputed
          called under: enable_grad, autocast on cpu bfloat16
          parameters: 0 bytes; gradients: 0 bytes
        """
    )


def test_the_modes_of_the_caller_are_entered_from_the_outermost_to_the_innermost() -> None:
    plan = _cut(capture(_chain, (_input(),)), {"t": "one"})
    off = torch.autocast("cpu", enabled=False)
    assert plan.saved_memory(under=(_AUTOCAST, off)).total != plan.saved_memory(under=(off, _AUTOCAST)).total
    found = plan.saved_memory(under=[_AUTOCAST, torch.no_grad()])
    assert _numbers(found.total) == (0, 0, 0)
    assert (found.caller.grad, found.caller.autocast[0].dtype) == (False, torch.bfloat16)


def test_the_modes_in_which_a_plan_is_asked_for_its_bytes_make_no_difference() -> None:
    plan = _cut(capture(_chain, (_input(),)), {"t": "one"})
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        inside = plan.saved_memory(under=_AUTOCAST), plan.saved_memory()
        assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == (False, True)
    assert list(map(str, inside)) == [str(plan.saved_memory(under=_AUTOCAST)), str(plan.saved_memory())]
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("odd", [torch.no_grad, "cpu", None, torch.bfloat16, [torch.profiler.record_function("x")]])
def test_the_modes_of_the_caller_are_contexts_of_modes(odd: Any) -> None:
    plan = _cut(capture(_chain, (_input(),)), {"t": "one"})
    with pytest.raises(OptionError, match=r"`under` takes the modes .* such as torch.autocast"):
        plan.saved_memory(under=odd)


def test_a_graph_that_was_traced_under_autocast_says_how_to_count() -> None:
    graphs: list[GraphModule] = []

    def keep(graph_module: GraphModule, example_inputs: object) -> GraphModule:
        graphs.append(graph_module)
        return graph_module

    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(lambda x: (x @ x.t()).sin(), backend=keep)(_input())
    plan = partita.plan(Program.of(graphs[0]), ByLabel(lambda node: "all"), Checkpoint())
    assert "plan.saved_memory(under=torch.autocast(...))" in str(plan)
    # A recomputed region saves its input; without, the product saves casts of both of its own, and the sine its input.
    assert _numbers(plan.saved_memory(under=_AUTOCAST).total) == (48 + 48 + 32, 96, _PRODUCT)


def test_the_table_has_question_marks_and_a_reason_where_nothing_is_known() -> None:
    plain = Program.of(torch.fx.symbolic_trace(_chain))
    shown = str(_cut(plain, {"t": "one", "matmul": "one"}))
    assert "?      ?            ?" in shown
    assert "saved for backward: not known: input 'x' has no traced value" in shown


def test_the_table_of_other_treatments_has_no_more_columns_than_before() -> None:
    program = capture(_chain, (_input(),))
    assert "saved" not in str(partita.plan(program, ByLabel(lambda node: "all"), Call()))


def test_sizes_that_only_the_data_tells_are_question_marks() -> None:
    program = capture(lambda x: x[x > 0].exp().sin(), (_input(),))
    plan = partita.plan(program, ByLabel(lambda node: "all"), Checkpoint())
    found = saved_memory(plan.partition, plan.treatments)
    assert found.total is not None
    assert (found.total.plain_bytes, found.total.treated_bytes) == (None, 96)
    assert "saved for backward: ? bytes, 96 after" in str(plan)


def test_the_program_is_run_once_for_all_regions() -> None:
    program = capture(Attention(), (_input(),))
    partition = BySize(operators=2)(program)
    saved, asked = saved_tensors_of(program), []

    class Asking(Checkpoint):
        def saved_bytes(self, region: Region, saved: SavedTensors) -> SavedBytes | None:
            asked.append(saved)
            return super().saved_bytes(region, saved)

    found = saved_memory(partition, (Asking(),) * len(partition), saved)
    assert asked == [saved] * len(partition)
    assert None not in found.regions


class _Writing(nn.Module):
    """Writes to a result of its own that was read before."""

    def forward(self, x: Tensor) -> Tensor:
        first = x.sin()
        second = first.exp()
        first.mul_(0.5)
        return (second + first).tanh() * first.cos()


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("model", [Attention, Buffered, Casting, Frozen, Mixer, _Writing])
def test_what_was_predicted_is_alive_with_copies_of_what_is_mutated(model: type[nn.Module], parts: int) -> None:
    torch.manual_seed(0)
    inputs = {"x": _input()}
    program = capture(model(), (), inputs)
    plan = partita.plan(program, BySize(parts=parts), Recompute())
    predicted, _ = predicted_when_recomputed(plan, saved_tensors_of(program))
    assert predicted == bytes_alive(plan.apply().module(), inputs)


class _CastsLast(nn.Module):
    """A cast at the end of an autocast block, and one that another operator follows in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            first = self.linear(x).float().sin()
            last = first.cos().to(torch.float64)
        return last.exp() * first


@pytest.mark.parametrize("keep", [KeepEverything(), KeepOperators("aten.to"), KeepOperators("aten.linear", "aten.to")])
def test_kept_casts_count_where_they_are_not_recomputed(keep: Any) -> None:
    torch.manual_seed(0)
    inputs = {"x": _input()}
    program = capture(_CastsLast(), (), inputs)
    plan = partita.plan(program, ByLabel(lambda node: "all"), Recompute(keep))
    found = plan.saved_memory().total
    assert found is not None
    assert found.treated_bytes == bytes_alive(plan.apply().module(), inputs)


class _Layers(nn.Module):
    """A frozen embedding that is the head as well, a narrow layer and a wide one, and a parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.embedding.weight.requires_grad_(False)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.narrow, self.wide = nn.Linear(6, 6), nn.Linear(6, 12, bias=False)
        self.back = nn.Linear(12, 6, bias=False)
        self.unused = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.narrow(self.embedding(ids)).sin().cos()
        x = self.back(self.wide(x).sin().cos())
        found: Tensor = self.head(x)
        return found


def _layered() -> Plan:
    program = capture(_Layers(), (torch.arange(4),))
    labels = {
        "linear": "narrow",
        "sin": "narrow",
        "cos": "narrow",
        "linear_1": "wide",
        "sin_1": "wide",
        "cos_1": "wide",
    }
    return partita.plan(program, ByLabel(lambda node: labels.get(node.name)), Recompute())


def test_parameters_and_gradients_are_counted_beside_what_is_saved() -> None:
    found = _layered().saved_memory()
    trained = 4 * (6 * 6 + 6 + 6 * 12 + 12 * 6) + 8 * 5
    assert found.gradient_bytes == trained
    assert found.parameter_bytes == trained + 4 * 10 * 6


def test_the_largest_region_is_that_of_which_most_is_alive_once_it_is_recomputed() -> None:
    plan = _layered()
    found = plan.saved_memory()
    # The input of the layer, which is saved, and the inputs of the sine and of the cosine, which are recomputed.
    narrow, wide = (one.recomputing_bytes for one in found.regions if one is not None)
    assert (narrow, wide) == (4 * 4 * (6 + 6 + 6), 4 * 4 * (6 + 12 + 12))
    assert found.largest is plan.partition.regions[1]
    assert found.largest_bytes == wide
    assert str(found) == text(
        """
        saved for backward: 960 bytes, 384 after; 864 FLOPs are recomputed
          called under: enable_grad, no autocast
          parameters: 1,024 bytes; gradients: 784 bytes
          largest recomputed region: wide, 480 bytes while its backward runs
        """
    )


def test_where_nothing_is_recomputed_no_region_is_the_largest() -> None:
    program = capture(_chain, (_input(),))
    for treatment in (Call(), Recompute(KeepEverything())):
        found = partita.plan(program, ByLabel(lambda node: "all"), treatment).saved_memory()
        assert (found.largest, found.largest_bytes) == (None, None)
        assert "largest" not in str(found)


def test_a_region_of_unknown_size_is_the_largest() -> None:
    program = capture(lambda x: x[x > 0].exp().sin(), (_input(),))
    found = partita.plan(program, ByLabel(lambda node: "all"), Checkpoint()).saved_memory()
    assert found.largest is not None
    assert found.largest_bytes is None
    assert "largest recomputed region: all, ? bytes" in str(found)


def test_parameters_are_counted_where_nothing_else_is_known() -> None:
    plain = Program.of(torch.fx.symbolic_trace(nn.Linear(3, 2)))
    found = partita.plan(plain, ByLabel(lambda node: "all"), Checkpoint()).saved_memory()
    assert found.total is None
    assert (found.parameter_bytes, found.gradient_bytes) == (32, 32)


@pytest.mark.parametrize("model", [Attention, Frozen, _Layers])
def test_what_was_predicted_is_alive_once_a_region_is_recomputed(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    inputs = {"ids": torch.arange(4)} if model is _Layers else {"x": _input()}
    plan = partita.plan(capture(model(), (), inputs), ByLabel(lambda node: "all"), Recompute())
    found = plan.saved_memory().largest_bytes
    assert found == bytes_alive_when_recomputed(plan.apply().module(), inputs)


class _Wrong(Checkpoint):
    def __init__(self, answer: Callable[[], Any]) -> None:
        object.__setattr__(self, "answer", answer)

    def saved_bytes(self, region: Region, saved: SavedTensors) -> Any:
        return self.answer()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda: 5, "returned int from `saved_bytes` for region 'all'"),
        (lambda: 1 / 0, "raised ZeroDivisionError in `saved_bytes` for region 'all': division by zero"),
    ],
    ids=["odd answer", "error"],
)
def test_a_treatment_that_answers_wrongly_is_named_and_the_plan_still_prints(
    answer: Callable[[], Any], message: str
) -> None:
    program = capture(_chain, (_input(),))
    plan = partita.plan(program, ByLabel(lambda node: "all"), _Wrong(answer))
    with pytest.raises(TreatmentError, match=message):
        saved_memory(plan.partition, plan.treatments)
    assert message in str(plan)
