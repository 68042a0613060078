"""What a recomputed body is given when it runs again: bit by bit what it was given first, and nothing that leaks."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.plans.helpers import bytes_alive
from tests.recompute.operators.helpers import Counted, assert_bitwise, square, step
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import partita
from partita import recompute
from partita.policies import ByModule, BySize
from partita.treatments import Recompute

_checkpoint = recompute.wrap_activation_checkpoint
aten = torch.ops.aten


def _plain(body: Any, *operands: Any) -> Any:
    return body(*operands)


def _graph(nodes: Callable[..., Any], *names: str) -> GraphModule:
    """A body of operators that `nodes` calls on the inputs of these names."""
    graph = Graph()
    graph.output(nodes(graph.call_function, *map(graph.placeholder, names)))
    return GraphModule({}, graph)


def _recomputed(model: nn.Module) -> nn.Module:
    program = partita.Program.of(symbolic_trace(model))
    return partita.plan(program, BySize(parts=1), Recompute()).apply().module()


# Norms ----------------------------------------------------------------------------------------------------------------


class Instance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.InstanceNorm1d(4, track_running_stats=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x.unsqueeze(0)).squeeze(0)).sin()


class InABody(nn.Module):
    """A norm and a dropout that an operator calls in a body of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = symbolic_trace(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).eval())
        self.linear = nn.Linear(4, 4)


def _in_a_body() -> nn.Module:
    graph = Graph()
    hidden = graph.call_module("linear", (graph.placeholder("x"),))
    operator = torch.ops.higher_order.wrap_with_set_grad_enabled
    graph.output(graph.call_method("sin", (graph.call_function(operator, (True, graph.get_attr("body"), hidden)),)))
    return GraphModule(InABody(), graph).eval()


NORMED: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()),
    "instance": Instance,
    "in a body": _in_a_body,
}


@pytest.mark.parametrize("make", NORMED.values(), ids=NORMED)
def test_a_norm_that_is_set_to_training_after_planning_counts_once(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = make().eval()
    other = copy.deepcopy(plain)
    traced = partita.Program.of(other if isinstance(other, GraphModule) else symbolic_trace(other))
    run = partita.plan(traced, BySize(parts=1), Recompute()).apply().module().train()
    plain.train()
    for x in (square(), square()):
        assert_bitwise(step(run, [x], x), step(plain, [x], x))
    assert_bitwise(list(run.buffers()), list(plain.buffers()))
    assert_bitwise(step(run.eval(), [x], x), step(plain.eval(), [x], x))


# Memory under several tensors -----------------------------------------------------------------------------------------


def _conjugate(call: Any, z: Tensor, conjugate: Tensor, weight: Tensor) -> Any:
    call(aten.mul_.Tensor, (z, 2.0))
    hidden = call(aten.sin.default, (call(aten.mul.Tensor, (conjugate, weight)),))
    return call(aten.real.default, (call(aten.mul.Tensor, (hidden, z)),))


def _negative(call: Any, z: Tensor, negative: Tensor, weight: Tensor) -> Any:
    call(aten.mul_.Tensor, (z, 2.0))
    return call(aten.sin.default, (call(aten.mul.Tensor, (negative, weight)),))


def _integers(call: Any, z: Tensor, integers: Tensor, weight: Tensor) -> Any:
    call(aten.mul_.Tensor, (z, 2.0))
    low = call(aten.bitwise_and.Scalar, (integers, 7))
    return call(aten.sin.default, (call(aten.mul.Tensor, (low, weight)),))


LOOKS: dict[str, tuple[Callable[..., Any], Callable[[Tensor], Tensor]]] = {
    "conjugate": (_conjugate, Tensor.conj),
    "negative": (_negative, lambda z: z.conj().imag),
    "real": (_negative, lambda z: torch.view_as_real(z)[:, 1]),
    "integers": (_integers, lambda z: z.view(torch.int32)[: len(z)]),
}


@pytest.mark.parametrize("wants_gradients", [False, True])
@pytest.mark.parametrize("facts", ["by hand", "planned"])
@pytest.mark.parametrize("look", LOOKS)
def test_what_is_written_may_be_seen_under_other_looks(look: str, facts: str, wants_gradients: bool) -> None:
    nodes, view = LOOKS[look]
    if look == "integers" and wants_gradients:
        pytest.skip("no gradients pass between floats and integers")
    body = _graph(nodes, "z", "view", "weight")
    run: Any = _plain
    if facts == "planned":
        planned = partita.plan(partita.Program.of(body), BySize(parts=1), Recompute()).apply().module()
        run = lambda _, *operands: planned(*operands)  # noqa: E731
    else:
        run = _checkpoint
    source = torch.complex(torch.linspace(-1, 1, 3), torch.linspace(0.5, 2, 3)).requires_grad_(wants_gradients)
    weight = torch.linspace(1, 2, 3).requires_grad_()
    leaves = [weight, source] if wants_gradients else [weight]

    def found(call: Any) -> list[Any]:
        z = source * 1
        return [*step(call, leaves, body, z, view(z), weight), z]

    assert_bitwise(found(run), found(_plain))


def test_a_graph_may_give_its_operand_other_memory() -> None:
    other = torch.linspace(1, 2, 16).reshape(4, 4)
    body = symbolic_trace(lambda x, y, weight: (torch.sin(x + weight), x.set_(y))[0].sin())

    def found(call: Any) -> list[Any]:
        given, weight = torch.ones(4, 4), square()
        return [*step(lambda: call(body, given, other, weight), [weight]), given]

    assert_bitwise(found(_checkpoint), found(_plain))


def test_norms_that_share_their_statistics_write_them_as_plain_ones_do() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    model[2].running_mean = model[0].running_mean
    twin = copy.deepcopy(model)
    run, x = _recomputed(twin), square()
    for _ in range(2):
        assert_bitwise(step(run, [x], x), step(model, [x], x))
    assert_bitwise(list(twin.buffers()), list(model.buffers()))


# Inputs that share memory by chance -----------------------------------------------------------------------------------


class WritesOne(nn.Module):
    """Reads one input, and writes to the other."""

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        hidden = torch.sin(torch.sigmoid(y) * weight)
        x.mul_(2)
        return hidden.sin()


SHARED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "one tensor": lambda base: (base, base),
    "views": lambda base: (base[:4], base[4:]),
    "overlapping": lambda base: (base[:4], base[2:6]),
    "uncounted": lambda base: (base, base.data),
}


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("share", SHARED.values(), ids=SHARED)
def test_inputs_that_share_memory_are_read_as_they_were(share: Callable[..., Any], parts: int) -> None:
    program = partita.Program.of(symbolic_trace(WritesOne()))
    run = partita.plan(program, BySize(parts=parts), Recompute()).apply().module()

    def found(call: Any) -> Tensor:
        x, y = share(torch.linspace(-1, 1, 8))
        weight = torch.ones(len(y), requires_grad=True)
        return torch.autograd.grad(call(x, y, weight).sum(), weight)[0]

    assert torch.equal(found(run), found(WritesOne()))


# Hooks and regions around ---------------------------------------------------------------------------------------------


def _copying() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor)


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("make", [symbolic_trace, lambda body: body], ids=["graph", "function"])
def test_whoever_saves_copies_has_the_values_from_before(make: Any, is_leaf: bool) -> None:
    body = make(lambda x: (x.sin() * x).sin())

    def found(call: Any) -> Tensor:
        leaf = square()
        given = leaf if is_leaf else leaf * 1
        with _copying():
            y = call(body, given)
        with torch.no_grad():
            given.mul_(2)
        return torch.autograd.grad(y.sum(), leaf)[0]

    assert torch.equal(found(_checkpoint), found(_plain))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).sin()


def test_regions_that_write_hold_nothing_inside_a_recomputed_region() -> None:
    x = square(16).detach()
    program = partita.capture(nn.Sequential(*(Normed() for _ in range(4))), (), {"input": x})
    inner = partita.plan(program, ByModule("*"), Recompute()).apply()
    nested, flat = (partita.plan(part, BySize(parts=1), Recompute()) for part in (inner, program))
    held = bytes_alive(flat.apply().module(), {"input": x})
    assert bytes_alive(nested.apply().module(), {"input": x}) == held
    assert bytes_alive(inner.module(), {"input": x}) > 2 * held


def test_nested_regions_that_write_have_the_plain_gradients_and_buffers() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Normed() for _ in range(3))), square(16)
    twin = copy.deepcopy(model)
    inner = partita.plan(partita.capture(twin, (x.detach(),)), ByModule("*"), Recompute()).apply()
    nested = partita.plan(inner, BySize(parts=2), Recompute()).apply().module()
    found = step(nested, [x, *twin.parameters()], x)
    assert_bitwise(found, step(model, [x, *model.parameters()], x))
    assert_bitwise(list(twin.buffers()), list(model.buffers()))


def test_a_selective_checkpoint_inside_a_region_is_given_what_the_region_computes_again() -> None:
    contexts = lambda: create_selective_checkpoint_contexts([aten.sin.default])  # noqa: E731

    def body(a: Tensor) -> Tensor:
        return _checkpoint(lambda b: b.sin().exp(), a.cos() * 2, context_fn=contexts).tanh()

    x = square()
    (expected,) = torch.autograd.grad((x.cos() * 2).sin().exp().tanh().sum(), x)
    assert torch.equal(torch.autograd.grad(_checkpoint(body, x).sum(), x)[0], expected)


def test_offloading_sees_what_a_region_that_writes_holds() -> None:
    x, sizes = square(16).detach(), list[int]()
    program = partita.capture(nn.Sequential(nn.Linear(16, 16), Normed()), (x,))
    run = partita.plan(program, ByModule("1"), Recompute()).apply().module()

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run(x)
    assert sizes.count(256) == 3  # The input of the linear layer, that of the region, and the weight of it.
    assert sizes.count(16) == 5  # Copies of two running statistics, two more weights and a bias.


# What it costs --------------------------------------------------------------------------------------------------------


class _Births(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.storages: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            storage = result.untyped_storage()
            self.storages.append((StorageWeakRef(storage), storage._cdata))
        return result

    def alive(self, module: nn.Module) -> int:
        gc.collect()
        owned = {tensor.untyped_storage()._cdata for tensor in module.parameters()}
        return sum(address not in owned and not storage.expired() for storage, address in self.storages)


LEAKY: dict[str, Callable[[Tensor], Any]] = {
    "operand": lambda h: torch.sin(h.sigmoid_()),
    "written by its result": lambda h: h.mul_(torch.sin(h.sigmoid_())),
    "raises": lambda h: torch.sin(h.sigmoid_()).reshape(7, 7),
}


@pytest.mark.usefixtures("quick_collections")
@pytest.mark.parametrize("facts", ["by hand", "planned"])
@pytest.mark.parametrize("body", LEAKY.values(), ids=LEAKY)
def test_a_region_that_writes_its_input_is_freed_without_a_backward(body: Callable[..., Any], facts: str) -> None:
    linear, traced = nn.Linear(4, 4), symbolic_trace(body)
    planned = partita.plan(partita.Program.of(traced), BySize(parts=1), Recompute()).apply().module()
    run = planned if facts == "planned" else lambda hidden: _checkpoint(traced, hidden)
    x = torch.ones(4, 4)
    with _Births() as births:
        for _ in range(3):
            try:
                run(linear(x))
            except RuntimeError:
                continue
    assert births.alive(linear) == 0


def test_only_what_is_written_is_copied() -> None:
    x = torch.ones(64, 16)
    program = partita.capture(Normed(), (x,))
    run = partita.plan(program, BySize(parts=1), Recompute()).apply().module()

    class Copied(Counted):
        size = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.size += args[0].nbytes if func is aten.clone.default else 0
            return super().__torch_dispatch__(func, types, args, kwargs)

    with Copied() as copied:
        run(x)
    assert copied.size == 8 + 2 * 16 * 4


# Sparse ---------------------------------------------------------------------------------------------------------------


def test_a_sparse_operand_is_given_to_a_region_that_writes() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
            return self.norm(torch.sparse.mm(adjacency, x)).sin()

    plain, x, adjacency = Sparse(), square(), torch.eye(4).to_sparse()
    other = copy.deepcopy(plain)
    by_hand = symbolic_trace(copy.deepcopy(plain))
    expected = step(plain, [x], adjacency, x)
    assert_bitwise(step(_recomputed(other), [x], adjacency, x), expected)
    assert_bitwise(step(_checkpoint, [x], by_hand, adjacency, x), expected)
