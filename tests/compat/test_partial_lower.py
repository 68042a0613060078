"""`compat.partial_lower`: what a compiler takes is lowered in place, what it refuses runs as it did."""

from __future__ import annotations

import copy
import io
import logging
import operator
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as distributed
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.selecting import slow_but
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from partita import Program, compare
from partita.compat import partial_lower as module
from partita.compat.partial_lower import partial_lower
from partita.errors import CallbackError, LoweringError, OptionError
from partita.lowering.lowered import Lowered
from partita.program.program import summation_tolerance
from partita.testing.generator.draft import Case
from partita.testing.strategies import programs

LOG = "partita.compat.partial_lower"


@pytest.fixture
def _small_subgraphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_ATEN_OPS_TO_LOWER", 1)


small = pytest.mark.usefixtures("_small_subgraphs")


def but(*names: str) -> Callable[[Node], bool]:
    """A predicate that refuses operators by a part of their names."""
    return lambda node: not any(name in str(node.target) for name in names)


def lower(gm: GraphModule, *predicates: Any, backend: str = "aot_eager", **options: Any) -> GraphModule:
    return partial_lower(gm, *predicates, backend=backend, **options)


def calls(gm: GraphModule) -> list[str]:
    """The operators of the outer graph by name, items of calls left out."""
    return [node.name for node in gm.graph.nodes if _runs(node) and node.target is not operator.getitem]


def _runs(node: Node) -> bool:
    return node.op not in ("placeholder", "get_attr", "output")


def inside(gm: GraphModule) -> list[list[str]]:
    """The nodes of each lowered subgraph by name."""
    found = [child for _, child in gm.named_children() if isinstance(child, Lowered)]
    return [[node.name for node in child.body.graph.nodes if _runs(node)] for child in found]


def waves(x: Tensor, weight: Tensor) -> Tensor:
    """Six operators, one that will be refused, and six more."""
    hidden = torch.cumsum((x @ weight).sin().cos().exp().tanh().neg(), 0)
    return (hidden @ weight).cos().sin().tanh().exp().abs()


def traced(function: Callable[..., Any], *args: Any, **options: Any) -> GraphModule:
    made: GraphModule = make_fx(function, **options)(*args)
    return made


def x_and_weight() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)


def told(caplog: pytest.LogCaptureFixture, logger: str = LOG) -> list[str]:
    """What was logged by `logger`, or by those below it."""
    return [record.getMessage() for record in caplog.records if record.name.startswith(logger)]


# What users count on ----------------------------------------------------------------------------------------------


@small
@pytest.mark.parametrize("contiguous", [True, False])
def test_gradients_flow_through_lowered_regions(contiguous: bool) -> None:
    x, weight = x_and_weight()
    gm = lower(traced(waves, x, weight), but("cumsum"), contiguous=contiguous, strict=True)
    (found,) = torch.autograd.grad(gm(x, weight).sum(), weight)
    (expected,) = torch.autograd.grad(waves(x, weight).sum(), weight)
    assert torch.equal(found, expected)


@small
def test_a_lowered_region_takes_another_shape() -> None:
    x, weight = x_and_weight()
    gm = lower(traced(waves, x, weight), but("cumsum"), strict=True)
    for rows in (4, 7, 2):
        x = torch.randn(rows, 4)
        assert torch.equal(gm(x, weight), waves(x, weight))


@small
def test_a_container_may_be_taken_apart_and_returned_whole() -> None:
    def halves(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        parts = x.sin().split(2)
        return parts[0].cos() + parts[1], parts

    x = torch.randn(4, 4)
    gm = traced(halves, x)
    split = next(node for node in gm.graph.nodes if "split" in node.name)
    output = gm.graph.output_node()
    output.args = ((output.args[0][0], split),)
    gm.recompile()
    total, parts = lower(gm, strict=True)(x)
    assert torch.equal(total, halves(x)[0])
    assert type(parts) is list
    assert all(map(torch.equal, parts, halves(x)[1]))


@small
def test_it_runs_twice_on_one_graph() -> None:
    x, weight = x_and_weight()
    gm = traced(waves, x, weight)
    lower(gm, lambda node: node.name in ("mm", "sin", "cos"))
    assert calls(lower(gm, but("cumsum"))) == ["subgraph_0", "subgraph_1", "cumsum", "subgraph_2"]
    assert inside(gm)[0] == ["mm", "sin", "cos"]
    assert torch.equal(gm(x, weight), waves(x, weight))
    assert calls(lower(gm, but("cumsum"))) == ["subgraph_0", "subgraph_1", "cumsum", "subgraph_2"]


@small
def test_writes_to_inputs_happen_once_for_each_call() -> None:
    def count(seen: Tensor, x: Tensor) -> Tensor:
        seen.add_(1)
        return (seen * x).sin()

    gm = lower(traced(count, torch.zeros(4), torch.ones(4)), strict=True)
    seen, x = torch.zeros(4), torch.randn(4)
    for times in (1.0, 2.0, 3.0):
        assert torch.equal(gm(seen, x), (times * x).sin())
        assert torch.equal(seen, torch.full((4,), times))


@small
def test_random_numbers_follow_the_seed() -> None:
    def noisy(x: Tensor) -> Tensor:
        return nn.functional.dropout(x.sin()) + torch.rand_like(x)

    x = torch.randn(64)
    gm = lower(traced(noisy, x), strict=True)

    def drawn(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(7)
        return [call(x), call(x), torch.rand(3)]

    found = drawn(gm)
    assert not torch.equal(found[0], found[1])
    assert all(map(torch.equal, found, drawn(gm)))
    assert all(map(torch.equal, found, drawn(noisy)))


# What is taken, and what is refused -------------------------------------------------------------------------------


def test_runs_of_ten_operators_become_subgraphs() -> None:
    def model(x: Tensor) -> Tensor:
        for _ in range(5):
            x = x.sin().cos()
        x = torch.cumsum(x, 0)
        for _ in range(3):
            x = x.exp().tanh()
        return x

    gm = lower(make_fx(model)(torch.randn(4)), but("cumsum", "detach"))
    assert module.MIN_ATEN_OPS_TO_LOWER == 10
    assert calls(gm)[:2] == ["subgraph_0", "cumsum"]
    assert len(inside(gm)) == 1
    assert len(inside(gm)[0]) == 10


@small
def test_contiguous_runs_or_the_fewest_groups() -> None:
    def arms(x: Tensor) -> Tensor:
        return x.sin() + torch.cumsum(x, 0) + x.cos() + torch.cumsum(x, 1)

    x = torch.randn(4, 4)
    runs = lower(traced(arms, x), but("cumsum"))
    assert inside(runs) == [["sin"], ["add", "cos", "add_1"], ["add_2"]]
    groups = lower(traced(arms, x), but("cumsum"), contiguous=False)
    assert inside(groups) == [["sin", "add", "cos", "add_1", "add_2"]]
    assert torch.equal(runs(x), arms(x))
    assert torch.equal(groups(x), arms(x))


@small
def test_a_break_in_an_open_run_is_reported_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    gm = traced(lambda x: torch.cumsum(torch.cumsum(x.sin(), 0), 0).cos(), torch.randn(4))
    with caplog.at_level(logging.WARNING, LOG):
        lower(gm, but("cumsum"))
    assert told(caplog) == ["partial_lower: graph break at cumsum. Reason: user predicate"]


@small
def test_what_is_excluded_from_groups_is_reported_by_reason(caplog: pytest.LogCaptureFixture) -> None:
    gm = traced(lambda x: torch.cumsum(torch.cumsum(x.sin(), 0), 0).cos(), torch.randn(4))
    with caplog.at_level(logging.INFO, LOG):
        lower(gm, but("cumsum"), contiguous=False)
    (text,) = told(caplog)
    assert "user predicate: aten.cumsum.default 2" in text


def test_the_predicate_about_subgraphs_is_called_first() -> None:
    seen: list[list[str]] = []

    def predicate(nodes: list[Node]) -> bool:
        seen.append([node.name for node in nodes])
        return "cos" not in seen[-1]

    gm = traced(lambda x: torch.cumsum(x.sin(), 0).cos().exp(), torch.randn(4))
    before = gm.code
    lower(gm, but("cumsum", "detach"), predicate)
    assert seen == [["sin"], ["cos", "exp"]]
    assert gm.code == before


@small
def test_subgraphs_that_the_user_does_not_want_stay_as_they_are() -> None:
    gm = traced(lambda x: torch.cumsum(x.sin(), 0).cos(), torch.randn(4))
    lower(gm, but("cumsum"), lambda nodes: nodes[0].name == "cos")
    assert calls(gm) == ["sin", "cumsum", "subgraph_0"]


@pytest.fixture
def _operator_without_meta() -> Iterator[None]:
    library = torch.library.Library("partita_partial_lower", "FRAGMENT")
    library.define("plain(Tensor x) -> Tensor")
    library.impl("plain", lambda x: x + 1, "CPU")
    yield
    library._destroy()


def _steps(gm: GraphModule, *targets: tuple[Any, ...]) -> GraphModule:
    """A graph that calls the targets, each with its arguments after the last result, between two sines."""
    graph = torch.fx.Graph()
    value: Any = graph.call_function(torch.ops.aten.sin.default, (graph.placeholder("x"),))
    for target, wraps, *args in targets:
        value = graph.call_function(target, ([value] if wraps else value, *args))
        value = graph.call_function(operator.getitem, (value, 0)) if wraps else value
    graph.output(graph.call_function(torch.ops.aten.sin.default, (value,)))
    return GraphModule(gm, graph)


@small
@pytest.mark.usefixtures("_operator_without_meta")
def test_an_operator_without_a_meta_kernel_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    operation = torch.ops.partita_partial_lower.plain.default
    gm, x = _steps(GraphModule({}, torch.fx.Graph()), (operation, False)), torch.randn(4)
    with caplog.at_level(logging.WARNING, LOG):
        lower(gm)
    assert calls(gm) == ["subgraph_0", "plain_default", "subgraph_1"]
    assert "plain" in caplog.text
    assert "meta kernel" in caplog.text
    assert torch.equal(gm(x), (x.sin() + 1).sin())


@small
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_fused_steps_of_adam_and_scalar_additions_of_lists_are_refused(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    gm = _steps(GraphModule({}, torch.fx.Graph()), (torch.ops.aten._foreach_add.Scalar, True, 1.0))
    with caplog.at_level(logging.WARNING, LOG):
        lower(gm, backend=backend)
    assert calls(gm) == ["subgraph_0", "_foreach_add_scalar", "subgraph_1"]
    (text,) = told(caplog)
    assert text.endswith("graph break at _foreach_add_scalar. Reason: fused adam is not supported yet")


@small
def test_a_flatten_is_always_taken() -> None:
    gm = _steps(GraphModule({}, torch.fx.Graph()), (torch.ops.aten.flatten.using_ints, False))
    assert calls(lower(gm, backend="inductor")) == ["subgraph_0"]


# Names, border, tags ----------------------------------------------------------------------------------------------


@small
def test_a_subgraph_has_numbered_inputs_and_its_call_a_tag() -> None:
    x, weight = x_and_weight()
    gm = lower(traced(waves, x, weight), but("cumsum"))
    call = next(node for node in gm.graph.nodes if node.name == "subgraph_0")
    assert (call.op, call.target, call.kwargs) == ("call_module", "subgraph_0", {"tag": "subgraph"})
    body = gm.subgraph_0.body
    assert [node.target for node in body.graph.find_nodes(op="placeholder")] == ["arg_0", "arg_1"]


@small
def test_outputs_take_over_names_and_metadata() -> None:
    x, weight = x_and_weight()
    gm = traced(waves, x, weight, tracing_mode="fake")
    known = {node.name: node.meta["val"] for node in gm.graph.nodes if node.op != "output"}
    lower(gm, but("cumsum"))
    gm.graph.lint()
    items = [node for node in gm.graph.nodes if node.target is operator.getitem]
    assert [node.meta["val"] for node in items] == [known[node.name] for node in items]
    assert all(node.op in ("placeholder", "output") or "val" in node.meta for node in gm.graph.nodes)


@small
def test_only_tensors_cross_and_attributes_are_read_outside() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            first, second = torch.cumsum(x @ self.weight, 0).split(2)
            return torch.cumsum(first, 0) + second.sin()

    model, x = Model(), torch.randn(4, 4)
    gm = torch.export.export(model, (x,)).module()
    lower(gm, but("cumsum"), strict=True)
    assert calls(gm) == ["_guards_fn", "subgraph_0", "cumsum", "subgraph_1", "cumsum_1", "subgraph_2"]
    assert [node.target for node in gm.graph.find_nodes(op="get_attr")] == ["weight"]
    assert inside(gm)[1] == ["split", "getitem", "getitem_1"]
    found = gm(x)
    found.sum().backward()
    expected = model(x)
    assert torch.equal(found, expected)
    assert gm.weight.grad is not None


@small
def test_the_dumper_sees_the_subgraph_and_its_tag_is_in_the_profile() -> None:
    dumped: list[str] = []

    def dumper(subgraph: str) -> str:
        dumped.append(subgraph)
        return f"store/{len(dumped)}"

    x, weight = x_and_weight()
    gm = lower(traced(waves, x, weight), but("cumsum"), lambda nodes: True, dumper)
    assert [("cumsum" in text, "arg_0" in text, "aten.mm" in text) for text in dumped] == [(False, True, True)] * 2
    tags = [node.kwargs["tag"] for node in gm.graph.find_nodes(op="call_module")]
    assert tags == ["store/1", "store/2"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gm(x, weight)
    assert {"store/1", "store/2"} <= {event.key for event in profile.key_averages()}


@small
@pytest.mark.parametrize("contiguous", [True, False])
def test_the_graph_is_edited_and_nodes_outside_of_subgraphs_stay(contiguous: bool) -> None:
    x, weight = x_and_weight()
    gm = traced(waves, x, weight)
    expected, graph = gm(x, weight), gm.graph
    held = [node for node in graph.nodes if not _runs(node) or "cumsum" in str(node.target)]
    facts = [(node.op, node.name, node.target, node.meta.get("val")) for node in held]
    lower(gm, but("cumsum"), contiguous=contiguous)
    assert gm.graph is graph
    assert [node for node in graph.nodes if node in set(held)] == held
    assert [(node.op, node.name, node.target, node.meta.get("val")) for node in held] == facts
    assert {node for node in graph.nodes if node.op == "call_module"}.isdisjoint(held)
    graph.lint()
    assert torch.equal(gm(x, weight), expected)
    assert len({node.name for node in graph.nodes}) == len(graph.nodes)


@small
def test_what_is_found_in_an_edited_graph_is_what_is_there() -> None:
    x, weight = x_and_weight()
    gm = lower(traced(waves, x, weight), but("cumsum"))
    for node in gm.graph.nodes:
        assert node in gm.graph.find_nodes(op=node.op, target=node.target if node.op == "call_function" else None)
        assert all(node in user.all_input_nodes for user in node.users)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[str]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield distributed.group.WORLD.group_name
    distributed.destroy_process_group()


def reduced(group: str) -> Callable[..., Tensor]:
    collectives = torch.ops._c10d_functional

    def step(x: Tensor, weight: Tensor) -> Tensor:
        coming = collectives.all_reduce.default(x.sin() * weight, "sum", group)
        beside = weight.cos().cumsum(0)
        return collectives.wait_tensor.default(coming) + beside

    return step


@small
@pytest.mark.parametrize("backend", slow_but(["aot_eager", "inductor"], "aot_eager"))
@pytest.mark.parametrize(("refused", "left"), [((), 0), (("cumsum",), 0), (("wait_tensor",), 1)])
def test_collectives_and_waiting_for_them_are_lowered(
    group: str, backend: str, refused: tuple[str, ...], left: int
) -> None:
    x, weight = torch.randn(3, 3), torch.randn(3, 3)
    step = reduced(group)
    gm = lower(traced(step, x, weight), but(*refused), backend=backend, strict=True)
    waits = torch.ops._c10d_functional.wait_tensor.default
    assert len(gm.graph.find_nodes(op="call_function", target=waits)) == left
    for _ in range(2):
        torch.testing.assert_close(gm(x, weight), step(x, weight))


# When it compiles, and when it cannot -----------------------------------------------------------------------------


@small
def test_it_compiles_when_first_called_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def own(x: Tensor, weight: Tensor) -> Tensor:
        """Equal subgraphs are compiled once, so this one differs from those of other tests."""
        return waves(x * 0.375, weight) * 0.625

    x, weight = x_and_weight()
    with caplog.at_level(logging.INFO, "partita.lowering"):
        gm = lower(traced(own, x, weight), but("cumsum"))
        assert not told(caplog, "partita.lowering")
        for _ in range(2):
            gm(x, weight)
    first, second, *rest = told(caplog, "partita.lowering")
    assert first == "compiling subgraph_0 (region 1 of 2), tagged 'subgraph', with aot_eager"
    assert second.startswith("compiled subgraph_0 (region 1 of 2), tagged 'subgraph', with aot_eager in ")
    assert len(rest) == 2


@dataclass(frozen=True)
class Failing:
    """A backend that takes everything and then cannot compile it."""

    name: ClassVar[str] = "failing"

    def refusal(self, node: Node) -> str | None:
        return None

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Any:
        raise RuntimeError("out of luck\nand of ideas")


@small
def test_what_cannot_be_compiled_runs_eagerly_or_raises(caplog: pytest.LogCaptureFixture) -> None:
    x, weight = x_and_weight()
    gm = partial_lower(traced(waves, x, weight), but("cumsum"), backend=Failing())
    with caplog.at_level(logging.WARNING, "partita.plans"):
        for _ in range(2):
            assert torch.equal(gm(x, weight), waves(x, weight))
    assert told(caplog, "partita.plans") == [
        "subgraph_0: failing failed: out of luck; it runs eagerly",
        "subgraph_1: failing failed: out of luck; it runs eagerly",
    ]
    assert [failure.region for failure in gm.meta["partita_lowering"].failures] == ["subgraph_0", "subgraph_1"]
    strict = partial_lower(traced(waves, x, weight), but("cumsum"), backend=Failing(), strict=True)
    with pytest.raises(LoweringError, match="out of luck"):
        strict(x, weight)


def _raising(subject: Any) -> Any:
    raise KeyError("no")


@small
@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((_raising,), {}, CallbackError, "node predicate raised KeyError for node 'mm'"),
        ((but("cumsum"), _raising), {}, CallbackError, "subgraph predicate raised KeyError"),
        ((but("cumsum"), bool, _raising), {}, CallbackError, "dumper raised KeyError"),
        ((but("cumsum"), bool, len), {}, CallbackError, "it must return a tag, which is text"),
        ((3,), {}, OptionError, "node_predicate is a function"),
        ((bool, 3), {}, OptionError, "subgraph_predicate is a function"),
        ((bool, bool, 3), {}, OptionError, "dumper is called with"),
        ((), {"backend": "inducter"}, OptionError, "no backend is called 'inducter'"),
    ],
)
def test_it_is_done_or_nothing_is_changed(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    x, weight = x_and_weight()
    gm = traced(waves, x, weight)
    graph, code, children = gm.graph, gm.code, dict(gm.named_children())
    with pytest.raises(error, match=words):
        partial_lower(gm, *arguments, **options)
    assert gm.graph is graph
    assert gm.code == code
    assert dict(gm.named_children()) == children
    assert "partita_lowering" not in gm.meta


def test_only_graph_modules_are_lowered() -> None:
    with pytest.raises(OptionError, match="not Linear"):
        partial_lower(nn.Linear(2, 2))  # type: ignore[arg-type]


# Modes, state, calling conventions --------------------------------------------------------------------------------


def blocks(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A block without gradients and one with autocast."""
    hidden = (x @ weight).sin()
    with torch.no_grad():
        frozen = (hidden @ weight).cos()
    with torch.autocast("cpu", torch.bfloat16):
        cast = hidden @ weight
    return (hidden * frozen).exp(), cast


@small
@pytest.mark.parametrize("contiguous", [True, False])
def test_modes_hold_inside(contiguous: bool) -> None:
    x, weight = x_and_weight()
    gm = lower(traced(blocks, x, weight, pre_dispatch=True), contiguous=contiguous, strict=True)
    assert all(name.startswith("subgraph_") or "_set_grad" in name or "autocast" in name for name in calls(gm))
    (found, cast), (expected, expected_cast) = gm(x, weight), blocks(x, weight)
    assert cast.dtype == torch.bfloat16
    assert torch.equal(cast, expected_cast)
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad(result.sum(), weight)[0] for result in (found, expected)]
    assert torch.equal(*gradients)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@small
def test_a_run_ends_where_the_mode_changes(caplog: pytest.LogCaptureFixture) -> None:
    x, weight = x_and_weight()
    with caplog.at_level(logging.WARNING, LOG):
        gm = lower(traced(blocks, x, weight, pre_dispatch=True))
    assert len(told(caplog)) == len(inside(gm)) - 1
    assert all("Reason: it runs under" in text for text in told(caplog))


class Net(nn.Module):
    """Modules that stay modules when they are traced, one with state that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cumsum(self.norm(self.linear(x)).sin(), 0).cos()


def test_state_keeps_its_names_and_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_ATEN_OPS_TO_LOWER", 0)
    gm = torch.fx.symbolic_trace(Net())
    twin, linear, x = copy.deepcopy(gm), gm.linear, torch.randn(5, 4)
    lower(gm, but("cumsum", "norm"), strict=True)
    lower(gm, but("cumsum"), strict=True)
    assert gm.linear is linear
    assert list(gm.state_dict()) == list(twin.state_dict())
    assert [name for name, _ in gm.named_parameters()] == [name for name, _ in twin.named_parameters()]
    assert torch.equal(gm(x), twin(x))
    assert torch.equal(gm.norm.running_mean, twin.norm.running_mean)
    fresh = torch.fx.symbolic_trace(Net())
    gm.load_state_dict(fresh.state_dict())
    assert torch.equal(gm.eval()(x), fresh.eval()(x))


def test_copies_and_compiled_ones_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_ATEN_OPS_TO_LOWER", 0)
    gm, x = torch.fx.symbolic_trace(Net()).eval(), torch.randn(5, 4)
    expected = gm(x)
    lower(gm, but("cumsum"), strict=True)
    assert torch.equal(copy.deepcopy(gm)(x), expected)
    assert torch.equal(gm(x), expected)
    assert torch.equal(copy.deepcopy(gm)(x), expected)
    assert torch.equal(torch.compile(gm, backend="aot_eager", fullgraph=True)(x), expected)


@small
def test_a_pickle_of_what_make_fx_traced_stays_lowered() -> None:
    """torch unpickles by tracing the code with the tracer of `make_fx`, which goes into called modules."""
    x = torch.randn(4)
    gm = make_fx(lambda x: torch.special.erfcx(x.sin().cos()).exp().tan())(x)
    expected = gm(x)
    lower(gm, but("erfcx"), strict=True)
    file = io.BytesIO()
    torch.save(gm, file)
    file.seek(0)
    for loaded in (pickle.loads(pickle.dumps(gm)), torch.load(file, weights_only=False)):
        assert [node.op for node in loaded.graph.nodes] == [node.op for node in gm.graph.nodes]
        assert inside(loaded) == inside(gm) == [["sin", "cos"], ["exp", "tan"]]
        assert torch.equal(loaded(x), expected)


@small
def test_an_exported_module_is_called_as_before() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, *, more: dict[str, Tensor]) -> dict[str, list[Tensor]]:
            with torch.no_grad():
                scale = more["scale"].sin().cos()
            return {"all": [torch.cumsum(x * scale, 0).exp(), scale.tan()]}

    x, more = torch.randn(4, 4, requires_grad=True), {"scale": torch.randn(4)}
    batch = torch.export.Dim("batch")
    exported = torch.export.export(
        Model(), (x,), {"more": more}, dynamic_shapes={"x": {0: batch}, "more": {"scale": None}}
    )
    gm = lower(exported.module(), but("cumsum"), strict=True)
    for rows in (4, 6):
        x = torch.randn(rows, 4, requires_grad=True)
        found, expected = gm(x, more=more)["all"], Model()(x, more=more)["all"]
        assert all(map(torch.equal, found, expected))
        assert torch.equal(*[torch.autograd.grad(result[0].sum(), x)[0] for result in (found, expected)])


def test_inductor_compiles_what_it_takes() -> None:
    def model(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(3):
            x = ((x @ weight).sin() * 2 + x).tanh()
        return x

    x, weight = x_and_weight()
    gm = partial_lower(traced(model, x, weight), strict=True)
    assert calls(gm) == ["subgraph_0"]
    found, expected = gm(x, weight), model(x, weight)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(result.sum(), weight)[0] for result in (found, expected)]
    torch.testing.assert_close(*gradients)


@given(programs(), st.integers(0, 2**16), st.booleans())
def test_a_lowered_program_means_the_same(case: Case, seed: int, contiguous: bool) -> None:
    gm = case.copy().graph_module
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_ATEN_OPS_TO_LOWER", 0)
        lower(gm, lambda node: (seed >> len(node.name) % 16) % 4, backend="eager", contiguous=contiguous)
    program = Program.of(case.graph_module)
    found = compare(program, Program.of(gm), case.args, case.kwargs, tolerance=summation_tolerance(program))
    assert found.equal, str(found)
