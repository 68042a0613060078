"""A dissolved program is plain operators, and computes what eager torch computes: values, gradients, state."""

from __future__ import annotations

import operator
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dissolve.helpers import Tracing, compare_case
from tests.helpers.core import listing, text
from tests.helpers.selecting import slow_but
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx import Graph, GraphModule
from torch.nn import functional

from partita import Program, capture, dissolve, plan
from partita._torch import toggles
from partita.policies import ByMode
from partita.treatments import Mode

BRAIN, HALF = torch.bfloat16, torch.float16


class Net(nn.Module):
    """A weight, a second one, a buffer, and a function of them and of an input."""

    def __init__(self, function: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(4, 4))
        self.v = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("b", torch.randn(4))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def example() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 4, requires_grad=True)


def dissolved(function: Callable[[Net, Tensor], Any]) -> Program:
    return dissolve(capture(Net(function), (example(),)))


def check(function: Callable[[Net, Tensor], Any]) -> str:
    """Compares with eager torch, bit by bit; the dissolved graph as text."""
    program = dissolved(function)
    assert program.modes.by_number is None
    net, module = Net(function), program.module()
    ours, theirs = [_ran(each) for each in (module, net)]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    return "\n".join(line for line in listing(program).split("\n") if ": input" not in line)


def _ran(module: nn.Module) -> tuple[Any, ...]:
    x = example()
    outputs = torch.utils._pytree.tree_leaves(module(x))
    tracked = [output for output in outputs if output.requires_grad]
    leaves = [x, *module.parameters()]
    gradients: Any = ()
    if tracked:
        gradients = torch.autograd.grad(sum(t.float().sum() for t in tracked), leaves, allow_unused=True)  # type: ignore[arg-type]
    found = [torch.zeros(()) if gradient is None else gradient for gradient in gradients]
    missing = [gradient is None for gradient in gradients]
    state = [tensor.detach().clone() for tensor in module.state_dict().values()]
    return [t.detach() for t in outputs], [t.requires_grad for t in outputs], found, missing, state


# Autocast -----------------------------------------------------------------------------------------------------------


def test_a_weight_is_cast_once_in_a_block() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.autocast("cpu", BRAIN):
            return functional.linear(x * 2, net.w), functional.linear(x * 3, net.w)

    assert check(function) == text("""
        mul = mul.Tensor(x, 2)
        to_dtype = to.dtype(p_w, torch.bfloat16)
        to_dtype_1 = to.dtype(mul, torch.bfloat16)
        linear = linear.default(to_dtype_1, to_dtype)
        mul_1 = mul.Tensor(x, 3)
        to_dtype_2 = to.dtype(mul_1, torch.bfloat16)
        linear_1 = linear.default(to_dtype_2, to_dtype)
        return (linear, linear_1)
    """)


def test_a_weight_is_cast_again_in_the_next_block() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.autocast("cpu", BRAIN):
            y = x @ net.w
        with torch.autocast("cpu", BRAIN):
            return y @ net.w

    assert check(function).count("to.dtype(p_w") == 2


def test_a_weight_is_cast_at_each_use_without_the_cache() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.autocast("cpu", BRAIN, cache_enabled=False):
            return x @ net.w @ net.w

    assert check(function).count("to.dtype(p_w") == 2


def test_a_cast_from_a_block_with_its_cache_is_not_read_in_one_without() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.autocast("cpu", BRAIN):
            y = x @ net.w
            with torch.autocast("cpu", BRAIN, cache_enabled=False):
                y = y @ net.w
            return y @ net.w

    assert check(function).count("to.dtype(p_w") == 2


def test_a_weight_written_in_a_block_is_read_as_it_was_cast() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.autocast("cpu", BRAIN):
            y = x @ net.w
            with torch.no_grad():
                net.w.mul_(2)
            return y, x @ net.w

    assert check(function).count("to.dtype(p_w") == 1


def test_a_cast_made_under_no_grad_still_has_gradients() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.autocast("cpu", BRAIN):
            with torch.no_grad():
                y = x @ net.w
            return y, x @ net.w

    assert check(function).count("to.dtype(p_w") == 1


def test_inference_mode_keeps_no_casts() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.autocast("cpu", BRAIN):
            with torch.inference_mode():
                y = (x @ net.w).float()
            with torch.no_grad():
                net.w.mul_(2)
            return y * 1, x @ net.w

    assert check(function).count("torch.bfloat16") == 4


def test_nested_blocks_cast_as_the_innermost_says() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.autocast("cpu", BRAIN):
            y = x @ net.w
            with torch.autocast("cpu", enabled=False):
                z = x @ net.w
            with torch.autocast("cpu", HALF):
                return y, z, (x * 2) @ net.v

    assert check(function).count("torch.float16") == 2


def test_a_weight_cast_for_an_outer_block_fails_in_an_inner_one_as_in_eager_torch() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.autocast("cpu", BRAIN):
            y = (x * 2) @ net.w
            with torch.autocast("cpu", HALF):
                return (x * y) @ net.w

    for module in (Net(function), dissolved(function).module()):
        with pytest.raises(RuntimeError, match="same dtype"):
            module(example())


def test_operators_that_autocast_leaves_alone_stay() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.autocast("cpu", BRAIN):
            return functional.softmax(x, -1), functional.layer_norm(x, (4,)), x.sum(), x.t() + net.b

    assert "to.dtype" not in check(function)


def test_an_explicit_cast_stays_one_cast() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.autocast("cpu", BRAIN):
            return x.bfloat16()

    assert check(function).count("to.dtype") == 1


def test_attention_stays_one_operator() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.autocast("cpu", BRAIN):
            return functional.scaled_dot_product_attention(x[None], x[None] @ net.w, x[None])

    assert "scaled_dot_product_attention" in check(function)


def test_mixed_arguments_are_promoted_and_losses_are_computed_in_full() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.autocast("cpu", BRAIN):
            y = x @ net.w
            return torch.cat([x, y]), functional.mse_loss(y, y), torch.stack([x, y]), torch.cdist(y, y)

    check(function)


def test_an_operator_that_casts_inside_is_taken_apart() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.autocast("cpu", BRAIN):
            return torch.einsum("ij,kj->ik", x, net.w), torch.tensordot(x, net.w, 1)

    assert "einsum.default" not in check(function)


def test_an_lstm_is_no_kernel_of_this_machine(tmp_path: Path) -> None:
    """With oneDNN, torch traces an LSTM under autocast as one kernel, which a CPU without bfloat16 does not have."""
    weights = [weight.detach() for weight in nn.LSTM(4, 4).parameters()]
    given = [torch.randn(3, 2, 4), torch.zeros(1, 2, 4), torch.zeros(1, 2, 4), *weights]
    graph = Graph()
    x, *rest = [graph.placeholder(name) for name in "xhcabde"]
    handle = graph.call_function(toggles.ENTER_AUTOCAST, ("cpu", BRAIN, True, None))
    lstm = torch.ops.aten.lstm.input
    made = graph.call_function(lstm, (x, rest[:2], rest[2:], True, 1, 0.0, False, False, False))
    items = [graph.call_function(operator.getitem, (made, place)) for place in range(3)]
    graph.call_function(toggles.EXIT_AUTOCAST, (handle,))
    graph.output(tuple(items))
    module = GraphModule(nn.Module(), graph)
    Tracing(module, given).seen()
    found = dissolve(Program.of(module))
    assert {str(node.target) for node in found.operators()} == {
        "aten.to.dtype",
        "aten.lstm.input",
        "<built-in function getitem>",
    }
    assert [node.name for node in found.graph.output_node().all_input_nodes] == [node.name for node in items]
    expected = found.module()(*given)
    assert [value.dtype for value in expected] == [BRAIN] * 3
    with suppress(RuntimeError):  # On such a CPU, autocast itself fails (torch 2.13).
        torch.testing.assert_close(expected, module(*given), rtol=0, atol=0)
    torch.save((found.module(), given, expected), tmp_path / "lstm.pt")
    code = (
        "import sys, torch, partita; module, given, expected = torch.load(sys.argv[1], weights_only=False);"
        "torch.testing.assert_close(module(*given), expected, rtol=0.02, atol=0.02)"
    )
    older = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "default"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "lstm.pt")], check=True, env=older)


def test_what_computes_a_size_has_values_so_that_it_can_be_exported() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.autocast("cpu", BRAIN):
            return torch.einsum("bij,jk->bik", torch.cat([x, x, x[:1]]), net.w)

    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = dissolve(capture(Net(function), (torch.randn(3, 5, 4),), dynamic_shapes=(sizes,)))
    x = torch.randn(4, 7, 4)
    torch.testing.assert_close(program.exported().module()(x), Net(function)(x), rtol=0, atol=0)


def test_sizes_that_are_known_at_run_time_are_computed() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.autocast("cpu", BRAIN):
            return torch.einsum("bij,jk->bik", x, net.w), x @ net.w

    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = dissolve(capture(Net(function), (torch.randn(3, 5, 4),), dynamic_shapes=(sizes,)))
    for shape in ((3, 5, 4), (2, 7, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(program.module()(x), Net(function)(x), rtol=0, atol=0)


def test_a_number_that_is_read_in_a_block_is_returned_as_it_was_read() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", BRAIN):
                product = x @ x
                return product.sum().item(), product

    x = torch.eye(2)
    program = capture(Reads(), (x,))
    expected, _ = Reads()(x)
    for module in (dissolve(program).module(), program.exported().run_decompositions().module()):
        number, product = module(x)
        assert (number, product.dtype) == (expected, BRAIN)


# no_grad and inference mode ---------------------------------------------------------------------------------------


def test_what_carries_gradients_is_detached_once() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.no_grad():
            y = x @ net.w
            z = y * net.w + net.b
        return z * x

    assert check(function) == text("""
        detach_default = detach.default(x)
        detach_default_1 = detach.default(p_w)
        matmul = matmul.default(detach_default, detach_default_1)
        mul = mul.Tensor(matmul, detach_default_1)
        add = add.Tensor(mul, b_b)
        mul_1 = mul.Tensor(add, x)
        return (mul_1,)
    """)


def test_enable_grad_inside_no_grad_reads_what_has_gradients() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.no_grad():
            y = x @ net.w
            with torch.enable_grad():
                z = y @ net.w
        return y, z

    assert "matmul_1 = matmul.default(matmul, p_w)" in check(function)


def test_writes_under_no_grad_leave_the_history_of_what_they_write() -> None:
    def function(net: Net, x: Tensor) -> Any:
        y = x * 2
        with torch.no_grad():
            z = y.add_(net.b)
            y[0].zero_()
        return z + x, y

    assert "return (add, mul)" in check(function)


def test_a_weight_is_written_under_no_grad() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.no_grad():
            net.w.mul_(0.5)
            net.b.copy_(x.mean(0))
        return x @ net.w + net.b

    assert "detach.default(b_b)" not in check(function)


def test_a_buffer_that_took_in_gradients_is_detached() -> None:
    def function(net: Net, x: Tensor) -> Any:
        y = net.b * 1
        y.add_(x[0])
        with torch.no_grad():
            z = y * 2
        return z, y

    assert "detach.default(add_" in check(function)


def test_an_operator_that_returns_its_argument_keeps_the_history() -> None:
    def function(net: Net, x: Tensor) -> Any:
        y = x * 2
        with torch.no_grad():
            z = functional.dropout(y, 0.5, False)
        return z @ net.w

    assert "dropout.default(mul, 0.5, False)" in check(function)


def test_integers_need_no_detach() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.no_grad():
            rows = x.argmax(0)
        return net.w[rows]

    assert "detach" not in check(function)


def test_tangents_end_where_no_grad_was_and_pass_where_modes_are_kept() -> None:
    """No operator stops gradients and lets tangents pass, as no_grad does."""

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = x.sin()
            return scale * x

    x, direction = torch.tensor([1.0, 2.0]), torch.ones(2)
    program = capture(Scaled(), (x,))
    kept = plan(program, ByMode(), Mode()).apply()

    def tangents(module: nn.Module) -> tuple[Tensor, Tensor]:
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(module(forward_ad.make_dual(x, direction))).tangent
        return torch.func.jvp(module, (x,), (direction,))[1], dual

    decomposed = program.exported().run_decompositions()
    for module in (Scaled(), program.module(), kept.module()):
        torch.testing.assert_close(tangents(module), (x.cos() * x + x.sin(),) * 2)
    for module in (dissolve(program).module(), decomposed.module()):
        torch.testing.assert_close(tangents(module), (x.sin(),) * 2)


def test_inference_mode_cuts_gradients_off() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.inference_mode():
            y = x @ net.w
            with torch.enable_grad():
                z = y @ net.v
        return y * 1, z + x

    check(function)


def test_random_numbers_are_drawn_in_the_same_order() -> None:
    def function(net: Net, x: Tensor) -> Any:
        torch.manual_seed(3)
        with torch.no_grad():
            y = functional.dropout(x, 0.5)
        with torch.autocast("cpu", BRAIN):
            return y, functional.dropout(x @ net.w, 0.5), torch.rand_like(x)

    program, net, x = dissolved(function), Net(function), example()
    torch.manual_seed(3)
    ours = program.module()(x)
    torch.testing.assert_close(ours, net(x), rtol=0, atol=0)


def test_training_steps_are_the_same() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.no_grad():
            net.b.mul_(0.9).add_(0.1 * x.mean(0))
        with torch.autocast("cpu", BRAIN):
            y = functional.gelu(x @ net.w) @ net.w
            with torch.no_grad():
                target = torch.softmax(y.float() @ net.v, -1)
        # Of two dtypes, torch 2.11 computes the loss but not its gradient.
        return functional.mse_loss(torch.softmax(y.float() + net.b, -1), target.float())

    def trained(module: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            module(example()).backward()
            optimizer.step()
        return [*module.state_dict().values()]

    torch.testing.assert_close(trained(dissolved(function).module()), trained(Net(function)), rtol=0, atol=0)


@pytest.mark.parametrize("seed", slow_but(range(200), *range(20)))
def test_random_nests_of_modes_mean_what_eager_torch_means(seed: int) -> None:
    compare_case(seed)


@pytest.mark.fuzz
@pytest.mark.parametrize("start", range(1000, 5000, 100))
def test_many_random_nests_of_modes(start: int) -> None:
    for seed in range(start, start + 100):
        compare_case(seed)
