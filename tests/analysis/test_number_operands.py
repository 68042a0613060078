"""Numbers that a tensor without dimensions can replace: the same bits, dtypes and gradients, and none where not."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch.predispatch import _vmap_increment_nesting
from torch.fx import Graph, Node

from partita.analysis.number_operands import number_operand

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_NUMBERS = (0.1, 1 / 3, 0.5, -0.0, 0, 1, 2, 7, -5, 300, 1e-5, 1e30, 1e-40, 65519.9, 2**24 + 1, 2**53)
_aten: Any = torch.ops.aten
_REPLACED: list[tuple[str, Any, int]] = [
    *(("call_function", target, place) for target in (operator.add, operator.sub, operator.mul) for place in (0, 1)),
    *(
        ("call_function", target, 1)
        for target in (
            operator.truediv,
            operator.iadd,
            operator.isub,
            operator.imul,
            operator.itruediv,
            torch.add,
            torch.sub,
            torch.mul,
            torch.div,
            *(getattr(_aten, name).Tensor for name in ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_")),
            *(getattr(_aten, name).Scalar for name in ("add", "sub", "mul", "div", "rsub")),
        )
    ),
    *(("call_method", f"{name}{end}", 1) for name in ("add", "sub", "mul", "div") for end in ("", "_")),
]


def _id(value: object) -> str:
    """The same in every process: the text of a builtin function has an address."""
    return str(getattr(value, "__name__", value))


def _node(op: str, target: Any, args: tuple[Any, ...], *, x: Any, result: Any = None, **kwargs: Any) -> Node:
    """A call of `target` whose argument "x" is an input with this traced value."""
    graph = Graph()
    read = graph.placeholder("x")
    read.meta["val"] = x
    node = graph.create_node(op, target, tuple(read if value == "x" else value for value in args), kwargs)
    node.meta["val"] = x if result is None else result
    return node


def _inputs(dtype: torch.dtype) -> Iterator[Tensor]:
    torch.manual_seed(0)
    for made in (torch.randn(131) * 3, (torch.randn(17, 5) * 30).t()):
        yield made.to(dtype) if dtype in _FLOATS else (made * 10).abs().to(dtype)


def _run(op: str, target: Any, args: tuple[Any, ...], x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The result, and the gradient of the input; in-place operators get a copy."""
    leaf = x.detach().clone().requires_grad_(x.is_floating_point())
    given = tuple(leaf.clone() if isinstance(value, str) else value for value in args)
    result: Tensor = getattr(given[0], target)(*given[1:]) if op == "call_method" else target(*given)
    if not result.requires_grad:
        return result, None
    weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).reshape(result.shape)
    return result, torch.autograd.grad(result, leaf, weights)[0]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize(("op", "target", "place"), _REPLACED, ids=_id)
def test_a_tensor_in_the_place_of_the_number_gives_the_same_bits(op: str, target: Any, place: int) -> None:
    compared = 0
    for dtype in (*_FLOATS, *_INTEGERS):
        for x in _inputs(dtype):
            for number in _NUMBERS:
                args = ("x", number) if place else (number, "x")
                try:
                    result, gradient = _run(op, target, args, x)
                except RuntimeError:  # Integers are not multiplied by a fraction in place, say.
                    continue
                operand = number_operand(_node(op, target, args, x=x, result=result))
                if operand is None:
                    continue
                replaced: Any = operand.arguments("x", operand.tensor())  # type: ignore[arg-type]
                other, other_gradient = _run(op, operand.target, replaced, x)
                compared += 1
                assert other.dtype == result.dtype, (dtype, number)
                assert torch.equal(_bits(other), _bits(result)), (dtype, number)
                assert (gradient is None) == (other_gradient is None)
                if gradient is not None and other_gradient is not None:
                    assert torch.equal(_bits(other_gradient), _bits(gradient)), (dtype, number)
    assert compared >= 2 * len(_FLOATS) * len(_NUMBERS)


_X = torch.randn(3)


@pytest.mark.parametrize(
    ("target", "args", "x"),
    [
        (operator.mul, ("x", 0.5), torch.arange(3)),  # float32 with the number, float64 with a tensor.
        (operator.truediv, ("x", 2), torch.arange(3)),
        (operator.mul, ("x", 0.5), torch.tensor(2.0)),  # The tensor without dimensions would decide the dtype.
        (operator.mul, ("x", 2), torch.tensor([True])),
        (operator.mul, ("x", 300), torch.arange(3, dtype=torch.int8)),
        (operator.mul, ("x", 2**53 + 1), _X),
        (operator.mul, ("x", True), _X),
        (operator.mul, ("x", 0.5), _X.to(torch.complex64)),
        (operator.mul, ("x", 0.5j), _X),
        (operator.mul, ("x", "x"), _X),
        (operator.truediv, (2.0, "x"), _X),  # It is computed by the reciprocal.
        (operator.pow, ("x", 2), _X),
        (operator.lt, ("x", 0.5), _X),
        (operator.mul, ("x", 0.5), _X.to_sparse()),
        (torch.add, (1.0, "x"), _X),
        (_aten.clamp.default, ("x", 0.5), _X),
        (_aten.select.int, ("x", 0, 1), _X),
    ],
)
def test_a_number_that_a_tensor_cannot_replace_has_no_operand(target: Any, args: tuple[Any, ...], x: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert number_operand(_node("call_function", target, args, x=x)) is None


@pytest.mark.parametrize("kwargs", [{"alpha": 0.5}, {"rounding_mode": "floor"}, {"out": "y"}], ids=str)
def test_a_call_with_further_arguments_has_no_operand(kwargs: dict[str, Any]) -> None:
    assert number_operand(_node("call_function", torch.add, ("x", 2.0), x=_X)) is not None
    assert number_operand(_node("call_function", torch.add, ("x", 2.0), x=_X, **kwargs)) is None


def test_a_value_that_was_not_traced_has_no_operand() -> None:
    graph = Graph()
    assert number_operand(graph.call_function(operator.mul, (graph.placeholder("x"), 2.0))) is None


def test_a_node_inside_a_transform_has_no_operand() -> None:
    """There, a tensor that has dimensions when it is traced may be a batch of tensors without any."""
    node = _node("call_function", operator.mul, ("x", 2.0), x=_X)
    assert number_operand(node) is not None
    with node.graph.inserting_before(node):
        node.graph.call_function(_vmap_increment_nesting, (3, "error"))
    assert number_operand(node) is None


def test_a_tensor_that_gets_its_dimensions_later_has_no_operand() -> None:
    """Dynamo's traced values are those at the end of the trace."""
    node = _node("call_function", operator.mul, ("x", 2.0), x=_X)
    assert number_operand(node) is not None
    (read,) = node.all_input_nodes
    node.graph.call_method("unsqueeze_", (read, 0))
    assert number_operand(node) is None


def test_autograd_can_use_a_tensor_that_was_made_in_inference_mode() -> None:
    operand = number_operand(_node("call_function", operator.mul, ("x", 0.5), x=_X))
    assert operand is not None
    with torch.inference_mode():
        made = operand.tensor()
    x = _X.clone().requires_grad_()
    (x * made).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.5] * 3
