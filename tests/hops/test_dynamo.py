"""Body operators under torch.compile: no graph break, values and gradients as plain blocks, lazy registration."""

from __future__ import annotations

import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.hops.helpers import CASES, Case, Regions, assert_equal, gradients, run_python, seeded
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from partita import hops, recompute
from partita._torch.modes import read_ambient
from partita.errors import OptionError
from partita.hops._torch import hop_rules as dynamo_operators
from partita.hops._torch.operator import BodyOperator

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def _check_training(case: Case, backend: str, **tolerance: float) -> None:
    x = torch.randn(3, 4)
    ours, theirs = seeded(lambda: Regions(case.call)), seeded(lambda: Regions(case.plainly))
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    before = read_ambient()
    found, expected = compiled(x), theirs(x)
    assert read_ambient() == before
    assert (found.dtype, found.requires_grad) == (expected.dtype, expected.requires_grad)
    torch.testing.assert_close(found, expected, **tolerance)
    mine, others = gradients(compiled, x), gradients(theirs, x)
    assert [grad is None or not grad.any() for grad in mine] == [grad is None for grad in others]
    for grad, other in zip(mine, others, strict=True):
        assert other is None or torch.allclose(grad, other, **tolerance)


@every_case
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_training_equals_the_plain_blocks(case: Case, backend: str) -> None:
    _check_training(case, backend, rtol=0.0 if backend == "eager" else 1e-2, atol=0.0 if backend == "eager" else 1e-3)


@pytest.mark.slow
@every_case
def test_inductor_training_equals_the_plain_blocks(case: Case) -> None:
    _check_training(case, "inductor", rtol=1e-2, atol=1e-2)


@every_case
def test_containers_and_keywords_pass_without_a_break(case: Case) -> None:
    def body(pair: Any, *, named: Any) -> Any:
        return {"y": pair[0] * named["k"], "rest": [pair[1], None]}, (named["x"],)

    def f(x: torch.Tensor) -> Any:
        return case.call(body, (x, 2.0), named={"k": 3, "x": x})

    (found, (given,)), x = torch.compile(f, backend="eager", fullgraph=True)(torch.ones(2)), torch.ones(2)
    assert torch.equal(found["y"], x * 3)
    assert found["rest"] == [2.0, None]
    assert torch.equal(given, x)


@every_case
def test_graph_modules_that_call_the_operators_compile(case: Case) -> None:
    body = nn.Linear(2, 2)
    traced = make_fx(lambda x: case.call(lambda a: body(a) + 1, x) * 2, pre_dispatch=True)(torch.ones(1, 2))
    x = torch.randn(3, 2)
    found = torch.compile(traced, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(found, traced(x), rtol=1e-2, atol=1e-2)
    assert found.requires_grad == traced(x).requires_grad


@every_case
def test_a_graph_break_inside_a_body_keeps_the_meaning(case: Case) -> None:
    def body(x: torch.Tensor) -> Any:
        y = x @ x
        torch._dynamo.graph_break()
        return y @ x, torch.is_grad_enabled()

    def f(run: Any, x: torch.Tensor) -> Any:
        y, grad = run(body, x.sin())
        return y + 1, grad

    x = torch.randn(2, 2, requires_grad=True)
    before = read_ambient()
    found, grad = torch.compile(lambda x: f(case.call, x), backend="eager")(x)
    expected, expected_grad = f(case.plainly, x)
    assert read_ambient() == before
    assert torch.equal(found, expected)
    assert (found.dtype, found.requires_grad, grad) == (expected.dtype, expected.requires_grad, expected_grad)
    compiled_code = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    assert compiled_code(BodyOperator.__call__.__code__) == []
    assert compiled_code(body.__code__) != []


def test_views_and_writes_in_inference_mode_compile() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = x @ w
        y.view(-1).add_(1)
        return y, x.t(), w

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y, view, same = hops.wrap_with_inference_mode(True, body, x, w)
        return y.sin() + view.exp() + same * 2 + x

    def plainly(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y, view, same = body(x, w)
        return y.sin() + view.exp() + same * 2 + x

    x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    found = torch.compile(f, backend="aot_eager", fullgraph=True)(x, w)
    torch.testing.assert_close(found, plainly(x, w))
    ours, theirs = (torch.autograd.grad(y.sum(), (x, w)) for y in (found, plainly(x, w)))
    torch.testing.assert_close(ours, theirs)


def test_dynamo_sees_the_body_and_the_toggles_alone() -> None:
    seen: list[Any] = []

    def backend(graph_module: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(node.target for node in graph_module.graph.nodes if node.op == "call_function")
        return graph_module

    def f(x: torch.Tensor) -> torch.Tensor:
        return hops.wrap_with_autocast("cpu", None, True, None, hops.call, torch.mm, x, x)

    torch.compile(f, backend=backend, fullgraph=True)(torch.ones(2, 2))
    assert [getattr(target, "__name__", target) for target in seen] == ["_enter_autocast", "mm", "_exit_autocast"]


def test_writes_under_no_grad_happen_once_in_a_compiled_step() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def count(self) -> None:
            self.steps.add_(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hops.wrap_with_set_grad_enabled(False, self.count)
            return x * self.steps

    model = Model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_equal([compiled(torch.ones(1)), compiled(torch.ones(1))], [torch.tensor([1.0]), torch.tensor([2.0])])
    assert model.steps == 2


def test_nested_operators_compile_to_the_nested_meaning() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        def in_autocast(a: torch.Tensor) -> torch.Tensor:
            return hops.wrap_with_set_grad_enabled(True, torch.mm, a, a)

        def in_inference(a: torch.Tensor) -> torch.Tensor:
            return hops.wrap_with_autocast("cpu", torch.bfloat16, True, None, in_autocast, a)

        return hops.wrap_with_inference_mode(True, in_inference, x)

    x = torch.randn(2, 2, requires_grad=True)
    for backend in ("eager", "aot_eager"):
        found = torch.compile(f, backend=backend, fullgraph=True)(x)
        assert (found.dtype, found.requires_grad) == (torch.bfloat16, False)
        torch._dynamo.reset()


@pytest.mark.parametrize("mode", [("banana", None, True, None), ("cpu", None, 1, None)])
def test_compiled_calls_refuse_what_eager_calls_refuse(mode: Any) -> None:
    compiled = torch.compile(lambda x: hops.wrap_with_autocast(*mode, torch.sin, x), backend="eager")
    with pytest.raises(OptionError):
        compiled(torch.ones(1))
    flag = torch.compile(lambda x: hops.wrap_with_set_grad_enabled(x > 0, torch.sin, x), backend="eager")
    with pytest.raises(OptionError):
        flag(torch.ones(1))


# Telling Dynamo, which is not imported for it -----------------------------------------------------------------------

_STEP = """
class Model(torch.nn.Module):
    def forward(self, x):
        return hops.wrap_with_set_grad_enabled(False, torch.sin, x)
compiled = torch.compile(Model(), backend="eager", fullgraph=True)
print(compiled(torch.ones(1, requires_grad=True)).requires_grad)
print(type(torch.export.export(Model(), (torch.ones(1),), strict=True)).__name__)
"""


@pytest.mark.parametrize(
    "imports",
    [
        pytest.param("import partita, torch\nfrom partita import hops", marks=pytest.mark.slow),
        "import torch._dynamo\nimport partita, torch\nfrom partita import hops",
        pytest.param("from partita import hops\nimport torch._dynamo", marks=pytest.mark.slow),
        pytest.param(
            "import sys, torch\nfrom partita import hops\nassert 'torch._dynamo' not in sys.modules",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_compiling_works_whatever_was_imported_first(imports: str) -> None:
    assert run_python(imports + _STEP) == "False\nExportedProgram\n"


@pytest.mark.parametrize(
    "imports",
    [
        pytest.param("import torch._dynamo", marks=pytest.mark.slow),
        """
def load():
    import torch._dynamo.variables.higher_order_ops
threads = [threading.Thread(target=load) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
""",
    ],
    ids=["one thread", "several threads"],
)
def test_threads_may_import_dynamo_at_once_and_nothing_stays_behind(imports: str) -> None:
    source = f"""
import importlib.machinery, inspect, sys, threading, torch
from partita import hops, recompute
assert 'torch._dynamo' not in sys.modules
waiting = [finder for finder in sys.meta_path if type(finder).__module__.startswith("partita")]
{imports}
from torch._dynamo.variables import higher_order_ops as told
left = [finder for finder in sys.meta_path if type(finder).__module__.startswith("partita")]
assert isinstance(told.__loader__, importlib.machinery.SourceFileLoader) and told.__spec__.loader is told.__loader__
assert "class TorchHigherOrderOperatorVariable" in inspect.getsource(told)
print(len(waiting), len(left), sum(name.startswith("partita") for name in told._hop_name_to_variable_class))
"""
    # Here Dynamo comes last, the order that the test above leaves to `make test-all`.
    assert run_python(source + _STEP) == "2 0 8\nFalse\nExportedProgram\n"


def test_a_torch_without_the_table_is_left_alone() -> None:
    module = SimpleNamespace(TorchHigherOrderOperatorVariable=object)
    dynamo_operators._register(module, [hops.call])
    assert vars(module) == {"TorchHigherOrderOperatorVariable": object}


def test_importing_again_adds_no_second_finder() -> None:
    before = list(sys.meta_path)
    dynamo_operators.register_with_dynamo([hops.call])
    assert sys.meta_path == before


def test_all_code_that_runs_around_a_body_is_marked_for_dynamo_to_skip() -> None:
    run: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("partita."):
            run.add(name)

    def body(value: Tensor) -> Tensor:
        return torch.dropout(value * 2, 0.5, True).sin()

    calls = (
        lambda x: hops.call(body, x),
        lambda x: hops.wrap(body, x),
        lambda x: hops.wrap_with_set_grad_enabled(False, body, x) + x,
        lambda x: hops.wrap_with_autocast("cpu", torch.bfloat16, True, None, body, x),
        lambda x: hops.wrap_with_inference_mode(False, body, x),
        lambda x: recompute.wrap_activation_checkpoint(body, x),
        lambda x: recompute.tag_activation_checkpoint(lambda y: recompute.keep(body, y).cos(), x),
    )
    for call in calls:
        x = torch.randn(3, requires_grad=True)
        sys.setprofile(note)
        try:
            call(x).sum().backward()
        finally:
            sys.setprofile(None)
    assert {"partita.hops.modes", "partita.recompute.operators"} <= run
    unmarked = {name for name in run if not getattr(sys.modules[name], "DYNAMO_SKIPS", False)}
    assert not unmarked
