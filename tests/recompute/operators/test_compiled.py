"""Checkpoint operators under torch.compile: no graph break, values and gradients of the plain program, less saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.recompute.operators.helpers import Block, assert_bitwise, every_operator, square, step
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from partita import recompute
from partita.errors import OptionError

every_backend = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> None:
    torch.compiler.reset()


def _plainly(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for name in ("context_fn", "preserve_rng_state"):
        kwargs.pop(name, None)
    return body(*args, **kwargs)


def _drop(x: Tensor) -> Tensor:
    return functional.dropout(x, 0.5, True)


def _whole(function: Callable[..., Any], backend: str = "aot_eager") -> Any:
    return torch.compile(function, backend=backend, fullgraph=True)


def _saved(result: Tensor) -> list[int]:
    """How many numbers each tensor has that a compiled graph saves for its backward."""
    return sorted(saved.numel() for saved in result.grad_fn.saved_tensors)  # type: ignore[union-attr]


class Model(nn.Module):
    """Blocks in series, the second one nested in a region of its own that keeps a product."""

    def __init__(self, run: Any, kept: Any) -> None:
        super().__init__()
        self.run, self.kept = run, kept
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([Block(), Block()])

    def nested(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, None]:
        hidden = self.kept(torch.mm, self.run(self.blocks[1], x), self.blocks[0].up.weight.t())
        return _drop(hidden).sin() * scale, None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.run(self.blocks[0], x, scale=0.5)
        return self.run(self.nested, hidden, scale=x.mean())[0].cos()


@every_operator
@every_backend
def test_training_with_dropout_is_that_of_the_plain_program(operator: Any, backend: str) -> None:
    def train(model: Model) -> list[Tensor | None]:
        x, compiled = square(), _whole(model, backend)
        return [value for _ in range(2) for value in step(compiled, [x, *model.parameters()], x)]

    assert_bitwise(train(Model(operator, recompute.keep)), train(Model(_plainly, _plainly)))


@every_operator
def test_a_compiled_region_saves_what_it_is_given_and_what_is_kept(operator: Any) -> None:
    def run(call: Any, kept: Any, x: Tensor, w: Tensor) -> Tensor:
        return call(lambda a: kept(torch.mm, a.sin(), w).cos().exp().tanh(), x).sum()

    x, w = square(), torch.ones(4, 3, requires_grad=True)
    plain = _saved(_whole(partial(run, _plainly, _plainly))(x, w))
    kept = _saved(_whole(partial(run, operator, recompute.keep))(x, w))
    nothing = _saved(_whole(partial(run, operator, _plainly))(x, w))
    assert nothing == [12, 16]
    assert kept == [12, 12, 16]
    assert len(plain) > len(kept)


@every_operator
def test_a_context_function_decides_what_is_saved(operator: Any) -> None:
    context_fn = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def f(x: Tensor, w: Tensor) -> Tensor:
        return operator(lambda a: (a.sin() @ w).cos().exp().tanh(), x, context_fn=context_fn).sum()

    assert _saved(_whole(f)(square(), torch.ones(4, 3, requires_grad=True))) == [12, 12, 16]


@every_operator
@every_backend
def test_operands_and_results_of_any_kind_pass_without_a_break(operator: Any, backend: str) -> None:
    def body(pair: Any, *, named: Any) -> Any:
        return {"y": pair[0] * named["k"], "rest": [pair[1], None]}, named["x"].sin()

    def f(x: Tensor) -> Any:
        return operator(body, (x, 2.0), named={"k": 3, "x": x}, preserve_rng_state=True)

    x = square()
    found, sine = _whole(f, backend)(x)
    assert found["rest"] == [2.0, None]
    assert_bitwise(tree_leaves([found["y"], sine]), [x * 3, x.sin()])


@every_operator
def test_graphs_that_call_the_operators_compile(operator: Any) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(operator, (graph.get_attr("body"), x)))
    body = symbolic_trace(lambda a: functional.dropout(a.sin(), 0.5, True).exp())
    program, x = GraphModule({"body": body}, graph), square()
    assert_bitwise(step(_whole(program), [x], x), step(_whole(body), [x], x))


def test_an_exported_program_with_regions_compiles() -> None:
    def exported(run: Any) -> nn.Module:
        return torch.export.export(Model(run, _plainly), (square().detach(),), strict=False).module()

    x = square()
    found, expected = exported(recompute.wrap_activation_checkpoint), exported(_plainly)
    assert_bitwise(step(_whole(found), [x], x), step(_whole(expected), [x], x))


@every_operator
def test_a_graph_break_inside_a_region_keeps_the_meaning(operator: Any) -> None:
    def body(x: Tensor) -> Tensor:
        hidden = _drop(x @ x)
        torch._dynamo.graph_break()
        return hidden.sin() @ x

    def f(run: Any, x: Tensor) -> Tensor:
        return run(body, x.exp()) + 1

    x = square()
    found = step(torch.compile(partial(f, operator), backend="eager"), [x], x)
    assert_bitwise(found, step(partial(f, _plainly), [x], x))


@every_operator
def test_a_region_whose_buffers_are_written_compiles(operator: Any) -> None:
    class Normed(nn.Module):
        def __init__(self, run: Any) -> None:
            super().__init__()
            self.run, self.norm = run, nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.run(self.norm, x).sin()

    def train(model: Normed, backend: str) -> list[Tensor | None]:
        compiled, x = torch.compile(model, backend=backend), square()
        found = [value for _ in range(2) for value in step(compiled, [x], x)]
        return [*found, *model.buffers()]

    assert_bitwise(train(Normed(operator), "aot_eager"), train(Normed(_plainly), "aot_eager"))


@every_operator
def test_a_body_that_cannot_be_called_is_refused_when_compiled(operator: Any) -> None:
    with pytest.raises((OptionError, torch._dynamo.exc.TorchDynamoException)):
        torch.compile(lambda x: operator(x), backend="eager")(square())


def test_inductor_trains_like_the_plain_compiled_program() -> None:
    def run(call: Any, kept: Any, x: Tensor, w: Tensor) -> Tensor:
        return call(lambda a: _drop(kept(torch.mm, a.sin(), w)).cos().exp(), x).sum()

    x, w = square(), square()
    found, expected = (
        step(_whole(partial(run, *calls), "inductor"), [x, w], x, w)
        for calls in ((recompute.wrap_activation_checkpoint, recompute.keep), (_plainly, _plainly))
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
