"""Dry runs: to plan and to print a program takes little and changes nothing, whatever its arguments are."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.core import program_of
from tests.helpers.processes import run_in_new_process
from tests.helpers.work import calls_during
from torch import Tensor, nn
from torch._functorch import predispatch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, Node
from torch.library import _scoped_library
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from partita import Program, dissolve, plan
from partita._torch.dry_runs import refusal_of_call
from partita.errors import ModeError
from partita.policies import BySize
from partita.program.flops import Flops
from partita.program.saved_tensors import NodeDryRuns, saved_tensors_of
from partita.treatments import Call, KeepAtMost, KeepExpensive, Recompute

aten = torch.ops.aten
TREATMENTS = (Call(), Recompute(), Recompute(KeepExpensive(1e-9)), Recompute(KeepAtMost(10**9)))


def fake(*shape: int) -> Tensor:
    with FakeTensorMode():
        return torch.empty(shape)


def traced(graph: Graph, value: Any, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call in a graph, of which a tracer has noted this value."""
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = value
    return node


def program_with(write: Callable[[Graph, Node], Any]) -> Program:
    """x @ x with what `write` puts before it."""
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = fake(4, 4)
    write(graph, x)
    graph.output(traced(graph, fake(4, 4), aten.mm.default, x, x))
    return program_of(graph)


def printed(program: Program) -> list[str]:
    """The program as it prints under treatments that ask for different things."""
    return [str(plan(program, BySize(parts=1), treatment)) for treatment in TREATMENTS]


class Seen(TorchDispatchMode):
    """The operators that anybody runs."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_factory_makes_no_memory() -> None:
    program = program_with(lambda graph, _: traced(graph, fake(3), aten.ones.default, [3]))
    with Seen() as seen:
        printed(program)
    assert "aten.ones.default" not in seen.operators


def test_printing_leaves_the_random_state() -> None:
    program = program_with(lambda graph, _: traced(graph, fake(4), aten.rand.default, [4]))
    before = torch.get_rng_state()
    printed(program)
    assert torch.equal(torch.get_rng_state(), before)


def test_printing_opens_no_level_of_a_transform() -> None:
    def write(graph: Graph, _: Node) -> None:
        for size in range(5):
            traced(graph, 1, predispatch._vmap_increment_nesting, 6 + size, "error")
        for _ in range(5):
            traced(graph, 1, predispatch._vmap_decrement_nesting)

    program = program_with(write)
    printed(program)
    assert torch._C._functorch.peek_interpreter_stack() is None


def test_a_number_is_not_computed_to_count() -> None:
    powers: list[int] = []

    class Loud(int):
        def __pow__(self, other: int, modulo: int | None = None) -> int:
            powers.append(other)
            return 1

    program = program_with(lambda graph, _: traced(graph, 1, operator.pow, Loud(3), 2**31))
    printed(program)
    assert powers == []


@pytest.mark.parametrize(
    "write",
    [
        lambda graph, _: traced(graph, 1, operator.pow, 3, 2**31),
        lambda graph, _: traced(graph, 1, operator.lshift, 3, 2**40),
        lambda graph, _: traced(graph, 1, operator.mul, [3], 2**40),
        lambda graph, _: _squares(graph, 60),
    ],
    ids=["power", "shift", "list", "squares"],
)
def test_numbers_without_end_are_not_computed(write: Callable[[Graph, Node], Any]) -> None:
    reason = saved_tensors_of(program_with(write)).reason
    assert reason is not None
    assert "is not tried" in reason


def _squares(graph: Graph, count: int) -> None:
    number = traced(graph, 9, aten.sym_size.int, next(iter(graph.nodes)), 0)
    for _ in range(count):
        number = traced(graph, 9, operator.mul, number, number)


def test_numbers_of_sizes_are_computed() -> None:
    def write(graph: Graph, x: Node) -> None:
        size = traced(graph, 4, aten.sym_size.int, x, 0)
        square = traced(graph, 16, operator.pow, size, 2)
        traced(graph, fake(16), aten.view.default, x, [square])

    assert saved_tensors_of(program_with(write)).reason is None


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.mean.dim, ([0, 1],)),
        (aten.avg_pool2d.default, ([2, 2], [])),
        (aten.max_pool2d.default, ([2], [])),
        (aten.sum.dim_IntList, ([0],)),
    ],
)
def test_lists_that_torch_takes_are_taken(target: Any, args: tuple[Any, ...]) -> None:
    def write(graph: Graph, x: Node) -> None:
        image = traced(graph, fake(1, 4, 4), aten.unsqueeze.default, x, 0)
        traced(graph, target(torch.ones(1, 4, 4), *args), target, image, *args)

    program = program_with(write)
    assert saved_tensors_of(program).reason is None


def test_a_recurrent_network_over_no_end_of_steps_is_not_run() -> None:
    def write(graph: Graph, x: Node) -> None:
        steps = graph.placeholder("steps")
        steps.meta["val"] = fake(2**31, 1, 4)
        state = traced(graph, fake(1, 1, 4), aten.ones.default, [1, 1, 4])
        gates = traced(graph, fake(12, 4), aten.cat.default, [x, x, x])
        results = (steps.meta["val"], state.meta["val"])
        traced(graph, results, aten.gru.input, steps, state, [gates, gates], *_GRU_OPTIONS)

    program = program_with(write)
    assert Flops().of(_calling(program, aten.gru.input)) == 2 * 2**31 * (12 * 4 + 12 * 4)
    reason = saved_tensors_of(program).reason
    assert reason is not None
    assert "more operators than a dry run may call" in reason


_GRU_OPTIONS = (False, 1, 0.0, True, False, False)


def _calling(program: Program, target: Any) -> Node:
    return next(node for node in program.index.nodes if node.target is target)


@pytest.mark.parametrize(("target", "rest"), [(aten.unbind.int, ()), (aten.split.Tensor, (1,))])
def test_a_tensor_is_not_cut_into_no_end_of_pieces(target: Any, rest: tuple[Any, ...]) -> None:
    def write(graph: Graph, _: Node) -> None:
        wide = graph.placeholder("wide")
        wide.meta["val"] = fake(2**31)
        traced(graph, [fake(1)], target, wide, *rest)

    program = program_with(write)
    assert saved_tensors_of(program).reason is not None
    assert NodeDryRuns().flops_until_saved(_calling(program, target)) is None


def test_arguments_that_crash_torch_are_not_passed_to_it() -> None:
    # In a process of its own, which would die.
    code = """
from tests._torch.test_dry_runs import aten, fake, printed, program_with, traced
for target, args, kwargs in (
    (aten.clone.default, (), {"memory_format": 2**63 - 1}),
    (aten.softmax.int, (1, 2**31 - 1), {}),
):
    def write(graph, x):
        odd = traced(graph, fake(4, 4), target, x, *args, **kwargs)
        product = traced(graph, fake(4, 4), aten.mm.default, x, odd)
        traced(graph, fake(4, 4), target, product, *args, **kwargs)
    print(len(printed(program_with(write))))
"""
    done = run_in_new_process(code)
    assert (done.returncode, done.stdout.split()) == (0, ["4", "4"]), done.stderr


def test_an_operator_of_another_library_is_not_run() -> None:
    ran: list[str] = []
    with _scoped_library("partita_dry", "FRAGMENT") as library:
        for name, key in (("composite", "CompositeImplicitAutograd"), ("whole", "CompositeExplicitAutograd")):
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, lambda x, name=name: [ran.append(name), x @ x][1], key)

        def write(graph: Graph, x: Node) -> None:
            for name in ("composite", "whole"):
                traced(graph, fake(4, 4), getattr(torch.ops.partita_dry, name).default, x)

        printed(program_with(write))
    assert ran == []


def test_an_operator_of_another_library_is_counted_by_its_own_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    with _scoped_library("partita_dry", "FRAGMENT") as library:
        library.define("counted(Tensor x) -> Tensor")
        target = torch.ops.partita_dry.counted
        monkeypatch.setitem(flop_registry, target, lambda x, *, out_val: 7 * x.shape[0] * out_val.shape[1])
        program = program_with(lambda graph, x: traced(graph, fake(4, 5), target.default, x))
        assert Flops().of(_calling(program, target.default)) == 7 * 4 * 5


def test_an_operator_with_a_fake_kernel_is_still_reported() -> None:
    @torch.library.custom_op("partita_dry::faked", mutates_args=())
    def faked(x: Tensor) -> Tensor:
        raise AssertionError("it is run")

    faked.register_fake(torch.empty_like)
    program = program_with(lambda graph, x: traced(graph, fake(4, 4), torch.ops.partita_dry.faked.default, x))
    assert saved_tensors_of(program).reason is None


def _under_autocast(write: Callable[[Graph, Node], Any]) -> Program:
    def block(graph: Graph, x: Node) -> None:
        entered = graph.call_function(_enter_autocast, ("cpu", torch.bfloat16, True, False))
        write(graph, x)
        graph.call_function(_exit_autocast, (entered,))

    return program_with(block)


def test_autocast_is_not_dissolved_over_no_end_of_steps() -> None:
    def write(graph: Graph, x: Node) -> None:
        value = fake(2**31, 1, 4)
        steps, state = traced(graph, value, aten.alias.default, x), traced(graph, fake(1, 1, 4), aten.alias.default, x)
        gates = traced(graph, fake(12, 4), aten.cat.default, [x, x, x])
        traced(graph, (value, fake(1, 1, 4)), aten.gru.input, steps, state, [gates, gates], *_GRU_OPTIONS)

    with pytest.raises(ModeError, match=r"gru_input.* more operators than a dry run may call; switch autocast off"):
        dissolve(_under_autocast(write))


def test_autocast_is_not_dissolved_with_arguments_that_crash_torch() -> None:
    program = _under_autocast(lambda graph, x: traced(graph, fake(4, 4), aten.sum.dim_IntList, x, [1], dtype=2**31 - 1))
    with pytest.raises(ModeError, match=r"sum_dim_int_list.* is not tried .*dtype is no dtype"):
        dissolve(program)


@pytest.mark.parametrize("treatment", [Call(), Recompute()], ids=repr)
def test_what_is_printed_for_items_grows_with_their_number(treatment: Any) -> None:
    def work(count: int) -> int:
        def write(graph: Graph, x: Node) -> None:
            pieces = traced(graph, [fake(1, 4) for _ in range(count)], aten.split.Tensor, x, 1)
            for place in range(count):
                traced(graph, fake(1, 4), aten.sin.default, traced(graph, fake(1, 4), operator.getitem, pieces, place))

        found = plan(program_with(write), BySize(parts=3), treatment)
        return calls_during(str, found)

    assert work(800) < 5 * work(200)


PRODUCTS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.linear.default, ((2, 3, 4), (5, 4), (5,))),
    (aten.matmul.default, ((4,), (4,))),
    (aten.matmul.default, ((2, 3, 4), (4, 5))),
    (aten.matmul.default, ((2, 3, 4), (4,))),
    (aten.conv1d.default, ((2, 3, 8), (4, 3, 3))),
    (aten.conv2d.padding, ((2, 3, 8, 8), (4, 3, 3, 3), None, [1, 1], "same")),
    (aten.conv_transpose2d.input, ((2, 3, 8, 8), (3, 4, 3, 3))),
    (aten.bilinear.default, ((2, 3), (2, 4), (5, 3, 4), None)),
    (aten.einsum.default, ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)])),
    (aten.linalg_multi_dot.default, ([(2, 3), (3, 4), (4, 5)],)),
    (aten.tensordot.default, ((2, 3, 4), (4, 3, 5), [1, 2], [1, 0])),
    (aten.inner.default, ((2, 4), (3, 4))),
    (aten.scaled_dot_product_attention.default, ((2, 3, 4, 8), (2, 3, 4, 8), (2, 3, 4, 8))),
    (aten.gru_cell.default, ((2, 3), (2, 4), (12, 3), (12, 4))),
    (aten.convolution.default, ((2, 3, 8), (4, 3, 3), None, [1], [0], [1], False, [0], 1)),
    (aten.addmm.default, ((2, 5), (2, 4), (4, 5))),
    (torch.addmm, ((2, 5), (2, 4), (4, 5))),
    (torch.conv1d, ((2, 3, 8), (4, 3, 3))),
    (operator.matmul, ((2, 3), (3, 4))),
    (nn.functional.linear, ((2, 3, 4), (5, 4))),
    (nn.functional.scaled_dot_product_attention, ((2, 3, 4, 8), (2, 3, 4, 8), (2, 3, 4, 8))),
    (aten.gru.input, ((7, 2, 3), (1, 2, 4), [(12, 3), (12, 4), (12,), (12,)], True, 1, 0.0, False, False, False)),
    (aten.sin.default, ((2, 3),)),
]


@pytest.mark.parametrize(("target", "args"), PRODUCTS, ids=[f"{place}" for place in range(len(PRODUCTS))])
def test_flops_are_those_of_torchs_counter(target: Any, args: tuple[Any, ...]) -> None:
    graph = Graph()

    def tensor(given: Any, make: Callable[[tuple[int, ...]], Any]) -> Any:
        if isinstance(given, list) and isinstance(given[0], tuple):
            return [make(shape) for shape in given]
        return make(given) if isinstance(given, tuple) else given

    def placeholder(shape: tuple[int, ...]) -> Node:
        node = graph.placeholder("x")
        node.meta["val"] = fake(*shape)
        return node

    with FlopCounterMode(display=False) as counter:
        result = target(*(tensor(given, lambda shape: torch.empty(shape, device="meta")) for given in args))
    node = traced(graph, result, target, *(tensor(given, placeholder) for given in args))
    assert Flops().of(node) == counter.get_total_flops()


def test_products_of_many_factors_are_not_put_in_order() -> None:
    """The best order takes cubic time, and a file can name many such products."""
    factor, product = torch.ones(2, 2), torch.ops.aten.linalg_multi_dot.default
    assert refusal_of_call(product, ([factor] * 101,), {}) == "it reads 101 values"
    assert refusal_of_call(product, ([factor] * 50,), {}) is None


@pytest.mark.parametrize(
    ("operator", "arguments", "reason"),
    [
        (torch.ops.aten.combinations.default, (torch.ones(1), 65_000), "r is 65000"),
        (torch.ops.aten.tensor_split.sections, (torch.ones(4), 10**9), "sections is 1000000000"),
        (torch.ops.aten.round.decimals, (torch.ones(1),), None),
        (torch.ops.aten.expand.default, (torch.ones(1), [1] * 70), "size is a list of 70"),
        (torch.ops.aten.expand.default, (torch.ones(1), [1] * 64), None),
    ],
)
def test_calls_whose_results_are_out_of_proportion_are_refused(operator: Any, arguments: Any, reason: Any) -> None:
    assert refusal_of_call(operator, arguments, {}) == reason
    if operator is torch.ops.aten.round.decimals:
        assert refusal_of_call(operator, arguments, {"decimals": -(10**18)}) == "decimals is -1000000000000000000"


@pytest.mark.parametrize(
    ("operator", "shapes"),
    [
        (torch.ops.aten.histogramdd.int_bins, [(1, 10**8)]),
        (torch.ops.aten.conv_tbc.default, [(3, 2, 2), (10**8, 2, 2)]),
        (torch.ops.aten.conv_tbc_backward.default, [(3, 2, 2), (3, 2, 2), (10**8, 2, 2)]),
        (torch.ops.aten.bilinear.default, [(2, 3), (2, 4), (10**8, 3, 4)]),
        (torch.ops.aten._trilinear.default, [(10**8, 2)] * 3),
    ],
)
def test_kernels_that_loop_over_a_long_axis_are_not_tried(operator: Any, shapes: list[tuple[int, ...]]) -> None:
    """They run for hours on tensors without memory, and no other operator is called that could be counted."""
    long = [torch.empty(shape, device="meta") for shape in shapes]
    short = [torch.empty([min(size, 3) for size in shape], device="meta") for shape in shapes]
    assert "with an axis of 100000000, over which it loops" in str(refusal_of_call(operator, long, {}))
    assert refusal_of_call(operator, short, {}) is None
