"""Parameters, buffers, submodules and bodies of higher-order operators in the parts of a split graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from tests.compat.split_helpers import GETITEM, Cut, Draft, every, in_turn, same
from tests.compat.split_models import Tied, check, exported, x4
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

import partita
from partita.policies import ByLabel
from partita.treatments import Call

# State -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", [symbolic_trace, lambda model: exported(model, torch.tensor([1, 2]))])
def test_tied_weights_stay_tied_and_parameters_are_shared(
    cut: Cut, capture: Callable[[nn.Module], GraphModule]
) -> None:
    module = capture(Tied())
    result = cut(module, every(2))
    assert {id(p) for p in result.parameters()} == {id(p) for p in module.parameters()}
    assert {id(b) for b in result.buffers()} == {id(b) for b in module.buffers()}
    check(module, result, torch.tensor([1, 2]))
    result(torch.tensor([1, 2])).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_buffers_that_are_not_saved_stay_so(cut: Cut) -> None:
    module = symbolic_trace(Tied())
    module._non_persistent_buffers_set.add("scale")  # symbolic_trace itself forgets it.
    result = cut(module, every(1))
    assert "scale" not in result.state_dict()
    assert "shift" in result.state_dict()


class Namesakes(nn.Module):
    """Reads buffers that are called like its arguments; torch.export reads them before it names the arguments."""

    def __init__(self) -> None:
        super().__init__()
        for place, name in enumerate(("x", "x_1", "y")):
            self.register_buffer(name, torch.full((4,), place + 2.0))

    def forward(self, x: Tensor, y: Tensor, x_1: Tensor) -> Tensor:
        return (x.sin() * self.x + y * self.y).cos() - x_1 * self.x_1


@pytest.mark.parametrize("step", [1, 2, 100])
def test_an_argument_may_be_called_like_a_buffer_that_is_read_before_it(cut: Cut, step: int) -> None:
    args = tuple(torch.randn(3, 4).unbind())
    module = exported(Namesakes(), *args)
    assert torch.equal(cut(module, every(step))(*args), Namesakes()(*args))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Module()
        self.block.weight = nn.Parameter(torch.ones(4))
        self.block.register_buffer("hidden", torch.ones(4), persistent=False)
        self.block.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.block.inner(x * self.block.weight + self.block.hidden).relu()


def test_dotted_attributes_keep_their_paths_and_persistence(cut: Cut) -> None:
    module = symbolic_trace(Deep())
    module.block._non_persistent_buffers_set.add("hidden")
    for step in (1, 2, 100):
        result = cut(module, every(step))
        assert dict(result.named_parameters())["block.weight"] is module.block.weight
        assert not any(name.endswith("hidden") for name in result.state_dict())
        check(module, result, x4())


def test_plain_tensor_attributes_and_other_constants_arrive(cut: Cut) -> None:
    draft = Draft(scale=2.5, names=("a", "b"))
    draft.root.__dict__["plain"] = torch.full((4,), 7.0)
    x = draft.input("x")
    y = draft.call(torch.mul, x, draft.attr("plain"))
    module = draft.done(draft.call(torch.mul, y, draft.attr("scale")))
    module.__dict__["plain"], module.__dict__["scale"] = torch.full((4,), 7.0), 2.5
    check(module, cut(module, every(1)), x4())


def test_hooks_of_the_module_still_run(cut: Cut) -> None:
    module = symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    seen: list[str] = []
    module.register_forward_pre_hook(lambda *_: seen.append("pre"))
    module.register_forward_hook(lambda *_: seen.append("post"))
    module.get_submodule("0").register_forward_hook(lambda *_: seen.append("child"))
    result = cut(module, every(1))
    result(x4())
    assert seen == ["pre", "child", "post"]
    result.register_forward_hook(lambda *_: seen.append("own"))
    module(x4())
    assert "own" not in seen


def test_a_checkpoint_of_the_original_loads_into_a_native_split_and_back() -> None:
    module = symbolic_trace(Tied())
    plan = partita.plan(partita.Program.of(module), ByLabel(every(2)), Call())
    after = plan.apply(state_names="original").module()
    assert set(after.state_dict()) == set(module.state_dict())
    changed = {key: value + 1 for key, value in module.state_dict().items()}
    after.load_state_dict(changed)
    assert all(torch.equal(module.state_dict()[key], value) for key, value in changed.items())


def test_empty_slots_of_a_module_survive(cut: Cut) -> None:
    class Slotted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = None
            self.linear = nn.Linear(4, 4, bias=False)
            self.register_buffer("cache", None)
            self.register_parameter("gate", None)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).sin()

    module = symbolic_trace(Slotted())
    check(module, cut(module, every(1)), x4())


def test_weights_shared_by_two_paths_are_mutated_once(cut: Cut) -> None:
    shared = nn.BatchNorm1d(4)
    draft = Draft(one=shared, other=shared)
    x = draft.input("x")
    y = draft.module("one", x)
    module = draft.done(draft.module("other", y))
    result = cut(module, in_turn([1, 0]))
    check(module, result, torch.randn(5, 4))
    assert len({id(b) for b in result.buffers()}) == 3


# Bodies of higher-order operators --------------------------------------------------------------------------------


@cache
def branching() -> GraphModule:
    return exported(Branching(), x4())


@cache
def frozen() -> GraphModule:
    return exported(Frozen(), x4())


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + 1
        z = torch.cond(y.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (y,))
        return z * torch.cond(z.sum() > 0, lambda a: a + 1, lambda a: a - 1, (z,))


@pytest.mark.parametrize("step", [2, 100])
def test_bodies_of_cond_move_into_the_part_that_uses_them(cut: Cut, step: int) -> None:
    module = branching()
    result = cut(module, every(step))
    for x in (x4(), -x4()):
        assert same(result(x), module(x))
    bodies = {node for node in result.graph.find_nodes(op="get_attr") if "graph" in str(node.target)}
    assert not any(call.op == "call_module" for body in bodies for call in body.users)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).sin()
        with torch.no_grad():
            z = self.linear(y).cos()
        return y + z


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_a_no_grad_body_of_an_exported_module_keeps_its_meaning(cut: Cut, step: int) -> None:
    module = frozen()
    result = cut(module, every(step))
    check(module, result, x4())
    grads = []
    for each in (module, result):
        module.zero_grad()
        each(x4()).sum().backward()
        grads.append([p.grad.clone() for p in module.parameters()])
    assert same(*grads)


def test_a_body_shared_by_two_parts_is_in_both(cut: Cut) -> None:
    body = symbolic_trace(lambda a: (a.sin(),))
    draft = Draft(body=body)
    x = draft.input("x")
    shared = draft.attr("body")
    wrap = torch.ops.higher_order.wrap_with_set_grad_enabled
    first = draft.call(GETITEM, draft.call(wrap, False, shared, x), 0)
    second = draft.call(GETITEM, draft.call(wrap, False, shared, first), 0)
    module = draft.done(second)
    for labels in ([0, 0, 1, 1], [0, 1, 2, 3], [0, 0, 0, 0]):
        check(module, cut(module, in_turn(labels)), x4().requires_grad_())
