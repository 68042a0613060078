"""Regions with equal bodies call one module, with their own inputs; whatever would change by that is not shared."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node, Tracer
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn import functional

import partita
from partita import Program
from partita.backends import AotEager
from partita.errors import RegionError
from partita.plans.plan import plan_applied_to_make
from partita.policies import ByModule, Repeats
from partita.treatments import Call, Lower, Mark, Mode, Recompute


class Block(nn.Module):
    def __init__(self, *, scale: float = 2.0, eps: float = 1e-5, frozen: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, eps=eps)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale, self.frozen = scale, frozen

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.frozen):
            inner = functional.gelu(self.up(self.norm(x))) * self.scale
        result: Tensor = x + self.down(inner)
        return result


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(x.tanh())
        return result


def _stack(count: int = 6, **settings: Any) -> Stack:
    torch.manual_seed(0)
    return Stack(*(Block(**settings) for _ in range(count)))


ARGS = (torch.linspace(-1, 1, 12).reshape(3, 4),)


class _Expanding(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


def _expanded(model: nn.Module) -> Program:
    return Program.of(GraphModule(model, _Expanding().trace(model)))


def _captured(model: nn.Module) -> Program:
    return partita.capture(model, ARGS)


def _bodies(module: nn.Module) -> int:
    return len({id(child) for child in module.modules() if isinstance(child, GraphModule)}) - 1


def _with_values(model: nn.Module) -> Program:
    program = _expanded(model)
    FakeTensorProp(program.graph_module, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*ARGS)
    return program


@pytest.mark.parametrize("program_of", [_captured, _expanded])
def test_equal_blocks_are_one_module_under_the_names_of_all(program_of: Callable[[nn.Module], Program]) -> None:
    model = _stack()
    program = program_of(model)
    after = partita.plan(program, Repeats(min_size=3), Call()).apply()
    module = after.module()
    assert _bodies(after.graph_module) == 3
    assert all(module.get_submodule(f"repeat_0_{at}") is module.get_submodule("repeat_0_0") for at in range(6))
    assert list(module.state_dict()) == list(program.module().state_dict())
    partita.verify(model, after, ARGS)


@pytest.mark.parametrize("treatment", [Recompute(), Mode()])
def test_blocks_that_are_recomputed_or_set_modes_are_one_module(treatment: Any) -> None:
    model = _stack(frozen=True)
    apart = partita.plan(_captured(model), Repeats(min_size=3), treatment).apply(share_bodies=False)
    after = partita.plan(_captured(model), Repeats(min_size=3), treatment).apply()
    assert _bodies(after.graph_module) < _bodies(apart.graph_module) / 2
    assert _bodies(after.exported().graph_module) == _bodies(after.module()) < 8
    partita.verify(model, after, ARGS)


def test_each_region_has_its_own_module_on_request() -> None:
    after = partita.plan(_captured(_stack()), Repeats(min_size=3), Call()).apply(share_bodies=False)
    assert _bodies(after.graph_module) == 8


@pytest.mark.parametrize("program_of", [_captured, _expanded])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_and_pickles_keep_the_sharing(program_of: Callable[[nn.Module], Program], copied: Any) -> None:
    model = _stack()
    after = partita.plan(program_of(model), Repeats(min_size=3), Call()).apply()
    made = copied(after.module())
    assert _bodies(made) == _bodies(after.module())
    assert torch.equal(made(*ARGS), model(*ARGS))


@pytest.mark.parametrize("odd", [{"eps": 1e-3}, {"scale": True}, {"frozen": True}])
def test_a_block_with_another_constant_has_its_own_body(odd: dict[str, Any]) -> None:
    model = Stack(Block(), Block(**odd), Block(), Block())
    plan = partita.plan(_captured(model), Repeats(min_size=3), Call())
    module = plan.apply().module()
    odd_call = next(region for region in plan.partition if any("blocks_1" in str(node.args) for node in region.nodes))
    others = [body for name, body in module.named_children() if name != odd_call.name]
    assert module.get_submodule(odd_call.name) not in others
    assert odd_call.label != plan.partition.regions[-2].label
    partita.verify(model, plan.apply(), ARGS)


@pytest.mark.parametrize("odd", [{"scale": 3.0}, {"scale": 2}])
@pytest.mark.parametrize("passes_numbers", [True, False])
def test_a_block_with_another_factor_shares_a_body_that_gets_it(odd: dict[str, Any], *, passes_numbers: bool) -> None:
    model = Stack(Block(), Block(**odd), Block(), Block())
    policy = Repeats(min_size=3, passes_numbers=passes_numbers)
    after = partita.plan(_captured(model), policy, Call()).apply()
    assert (_bodies(after.graph_module) == 3) == passes_numbers
    partita.verify(model, after, ARGS)


def _factors() -> Stack:
    torch.manual_seed(0)
    return Stack(*(Block(scale=1 / (at + 2)) for at in range(4)))


@pytest.mark.parametrize("program_of", [_captured, _with_values])
def test_numbers_that_are_passed_are_no_state(program_of: Callable[[nn.Module], Program]) -> None:
    model = _factors()
    program = program_of(model)
    after = partita.plan(program, Repeats(min_size=3), Call()).apply()
    module = after.module()
    assert list(module.state_dict()) == list(program.module().state_dict())
    assert [name for name, _ in module.named_buffers()] == [name for name, _ in program.module().named_buffers()]
    module.to(torch.bfloat16)
    numbers = [value for name, value in vars(module).items() if name.endswith("_number")]
    assert [(value.dtype, value.dim()) for value in numbers] == [(torch.float64, 0)] * 4
    expected = copy.deepcopy(model).to(torch.bfloat16)(ARGS[0].bfloat16())
    assert torch.equal(module(ARGS[0].bfloat16()), expected)


@pytest.mark.parametrize("program_of", [_captured, _with_values])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_and_pickles_have_the_numbers(program_of: Callable[[nn.Module], Program], copied: Any) -> None:
    model = _factors()
    after = partita.plan(program_of(model), Repeats(min_size=3), Call()).apply()
    made = copied(after.module())
    assert _bodies(made) == _bodies(after.module())
    assert torch.equal(made(*ARGS), model(*ARGS))


def test_a_file_holds_the_numbers_beside_one_body(tmp_path: Path) -> None:
    model, path = _factors(), tmp_path / "model.pt2"
    program = _captured(model)
    after = partita.plan(program, Repeats(min_size=3), Call()).apply()
    assert len(after.exported().constants) == 4
    after.save(path)
    loaded = Program.of(path)
    partita.verify(program, loaded, ARGS)
    assert torch.equal(torch.export.load(path).module()(*ARGS), model(*ARGS))
    assert _bodies(loaded.graph_module) == _bodies(after.exported().graph_module)


@pytest.mark.parametrize("program_of", [_captured, _with_values])
def test_numbers_take_no_names_of_state(program_of: Callable[[nn.Module], Program]) -> None:
    model = _Adding(_factors())
    after = partita.plan(program_of(model), Repeats(min_size=3), Call()).apply()
    assert "mul_number" in after.module().state_dict()
    partita.verify(model, after, ARGS)


class _Adding(nn.Module):
    """Adds a buffer with the name that a number would get."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mul_number", torch.full((3,), 5.0))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.model(x) + self.mul_number
        return result


@pytest.mark.parametrize("treatment", [Recompute(), Mode(), Lower("aot_eager", strict=True)], ids=str)
@pytest.mark.parametrize("program_of", [_captured, _with_values])
def test_every_treatment_gets_the_numbers(treatment: Any, program_of: Callable[[nn.Module], Program]) -> None:
    model = _factors()
    after = partita.plan(program_of(model), Repeats(min_size=3), treatment).apply()
    partita.verify(model, after, ARGS)


def test_a_program_that_passes_numbers_is_inlined_and_cut_again() -> None:
    model = _factors()
    after = partita.plan(_with_values(model), Repeats(min_size=3), Call()).apply()
    again = partita.plan(partita.inline(after), Repeats(min_size=3), Call())
    assert not again.partition.constants
    assert {body.calls for body in again.bodies()} >= {4}
    partita.verify(model, again.apply(), ARGS)


def test_marks_are_those_of_a_plan_without_passed_numbers() -> None:
    program = _captured(_factors())
    annotated = partita.plan(program, Repeats(min_size=3), Mark("here", value=True)).annotate()
    assert [node.args[1] for node in annotated.graph.nodes if "mul" in node.name] == [1 / 2, 1 / 3, 1 / 4, 1 / 5]


def test_other_regions_of_the_same_program_get_the_numbers_of_their_nodes() -> None:
    partition = Repeats(min_size=3)(_captured(_factors()))
    kept = partition.of_other_regions([region for region in partition if region.label == "repeat_0"][:2])
    assert kept.constant_nodes() == partition.constant_nodes()[:2]
    with pytest.raises(RegionError, match="has no number that can be passed"):
        partition.passing_numbers([partition.regions[1].nodes[0]])


def test_the_fault_of_a_region_that_gets_a_number_is_found() -> None:
    plan = partita.plan(_captured(_factors()), Repeats(min_size=3), Lower(_Wrong(), strict=True))
    found = partita.bisect(plan, ARGS)
    # The last block alone is wrong, by its factor.
    assert found.blame == "region"
    assert [region.name for region in found.regions] == ["repeat_0_3"]
    assert [node.name for node in found.nodes] == ["mul_3"]


@dataclass(frozen=True)
class _Wrong:
    """Takes a number that is passed for 0.5, unless it is above 0.25."""

    name = "wrong"

    def refusal(self, node: Node) -> str | None:
        return None

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Any:
        made = AotEager().compile(body, inputs)
        half = torch.tensor(0.5, dtype=torch.float64)
        return lambda *args: made(*(half if arg.dtype is torch.float64 and arg < 0.25 else arg for arg in args))


def test_a_program_knows_the_plan_with_its_numbers() -> None:
    plan = partita.plan(_captured(_factors()), Repeats(min_size=3), Call())
    found = plan_applied_to_make(plan.apply())
    assert found is not None
    assert found.bodies() == plan.bodies()
    assert found.partition.constant_nodes() == plan.partition.constant_nodes() != ()


@pytest.mark.parametrize("odd", [{"eps": 1e-3}, {"scale": 2}, {"scale": True}])
def test_functions_are_not_shared_by_blocks_with_other_constants(odd: dict[str, Any]) -> None:
    model = Stack(Block(), Block(**odd), Block(), Block())
    partita.verify(model, partita.plan(_captured(model), Repeats(min_size=3), Lower("eager")).apply(), ARGS)


def test_marks_with_the_name_of_the_region_keep_bodies_apart() -> None:
    program = _captured(_stack())
    marked = partita.plan(program, Repeats(min_size=3), Mark("stage")).annotate()
    after = partita.plan(marked, Repeats(min_size=3), Call()).apply()
    assert _bodies(after.graph_module) == 8
    body = after.graph_module.get_submodule("repeat_0_3")
    assert isinstance(body, GraphModule)
    operators = [node for node in body.graph.nodes if node.op == "call_function" and "aten" in str(node.target)]
    assert {node.meta["stage"] for node in operators} == {"repeat_0_3"}


def _holding_itself(times: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["same"] = [value] * times
    return value


def _nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value, value]
    return value


@pytest.mark.parametrize("value", [_holding_itself(1), _holding_itself(2), _nested(400)], ids=["once", "twice", "deep"])
def test_marks_may_hold_themselves(value: Any) -> None:
    program = _captured(_stack(3))
    for node in program.graph.nodes:
        node.meta["mine"] = value
    applied = partita.plan(program, Repeats(), Call()).apply()
    assert _bodies(applied.graph_module) == _bodies(
        partita.plan(_captured(_stack(3)), Repeats(), Call()).apply().graph_module
    )
    assert torch.equal(applied.module()(*ARGS), _stack(3)(*ARGS))


def test_blocks_with_other_treatments_have_their_own_bodies() -> None:
    plan = partita.plan(
        _captured(_stack(4)),
        Repeats(min_size=3),
        lambda region: Recompute() if region.name in ("repeat_0_1", "repeat_0_2") else Call(),
    )
    module = plan.apply().graph_module
    assert module.repeat_0_0 is module.repeat_0_3
    assert module.repeat_0_1 is module.repeat_0_2
    assert module.repeat_0_0 is not module.repeat_0_1


def test_called_modules_stay_in_the_region_that_calls_them() -> None:
    model = _stack(3)
    plan = partita.plan(torch.fx.symbolic_trace(model), Repeats(min_size=3), Call())
    after = plan.apply()
    assert _bodies(after.graph_module) == len(plan.partition)
    assert all("blocks_1" not in name for name in after.graph_module.get_submodule("repeat_0_2").state_dict())
    partita.verify(model, after, ARGS)


def test_blocks_on_other_dynamic_sizes_have_their_own_bodies() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            for one, other in zip(self.layers[:3], self.layers[3:], strict=True):
                x, y = one(x).tanh(), other(y).tanh()
            return x, y

    model, args = Pair(), (torch.ones(3, 4), torch.ones(5, 4))
    rows = [torch.export.Dim(name, min=2, max=9) for name in ("a", "b")]
    program = partita.capture(model, args, dynamic_shapes=({0: rows[0]}, {0: rows[1]}))
    after = partita.plan(program, ByModule("layers.*"), Call()).apply()
    parts = [after.graph_module.get_submodule(f"layers_{at}") for at in range(6)]
    assert parts[1] is parts[2]
    assert parts[4] is parts[5]
    assert parts[1] is not parts[4]
    partita.verify(model, after, args)


def test_a_plan_prints_its_distinct_bodies() -> None:
    plan = partita.plan(_captured(_stack()), Repeats(min_size=3), Call())
    assert "bodies: 3 distinct; repeat_0: 6 calls of 6 nodes; 2 more" in str(plan)
    assert "bodies:" not in str(partita.plan(_captured(_stack(1)), Repeats(min_size=3), Call()))
