"""`compat.regional_inductor`, and lowering by annotation in Partita's own words."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.selecting import slow_but
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import output_code
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx._graph_pickler import GraphPickler
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import annotate, preserve_node_meta

import partita
from partita import Program
from partita.backends import AotEager, Inductor
from partita.compat import regional_inductor as _marked_regions
from partita.compat.regional_inductor import regional_inductor
from partita.errors import OptionError
from partita.lowering.lowered import Lowered
from partita.policies import ByAnnotation
from partita.treatments import Call, Lower

FAST = {"inductor_configs": {"max_autotune": False}}
SMALL = {"inductor_configs": {"epilogue_fusion": False, "max_autotune": False}}


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> None:
    torch.compiler.reset()


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions are traced and not compiled: the results are those of eager mode to the bit, in little time."""
    monkeypatch.setattr(_marked_regions, "Inductor", lambda options: AotEager())


quick = pytest.mark.usefixtures("_no_compiler")
can_be_kept = pytest.mark.skipif(
    not hasattr(output_code, "RegionalOutputCode"), reason="this torch cannot keep a graph with compiled regions"
)


def marked(value: object = 0) -> Any:
    return annotate({"compile_with_inductor": value})


def regions(gm: GraphModule) -> dict[str, list[str]]:
    """The nodes of each lowered region by name."""
    found = {name: child for name, child in gm.named_children() if isinstance(child, Lowered)}
    return {
        name: [node.name for node in child.body.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
        for name, child in found.items()
    }


def traced(function: Callable[..., Any], *args: Any) -> GraphModule:
    """The forward graph of AOTAutograd, which no compiler has had."""
    taken: list[GraphModule] = []

    def take(gm: GraphModule, inputs: Sequence[Any]) -> GraphModule:
        taken.append(copy.deepcopy(gm))
        return gm

    torch.compile(function, backend=aot_autograd(fw_compiler=take), fullgraph=True)(*args)
    return taken[0]


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    backend = aot_autograd(fw_compiler=regional_inductor, bw_compiler=regional_inductor)
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def waves(x: Tensor, weight: Tensor) -> Tensor:
    with marked(FAST):
        hidden = (x @ weight).sin()
    hidden = torch.cumsum(hidden, 0)
    with marked(FAST):
        hidden = (hidden @ weight).sin()
    return hidden.sum()


# What users count on ----------------------------------------------------------------------------------------------


def test_adjacent_regions_with_different_options_are_compiled_apart() -> None:
    def model(x: Tensor) -> Tensor:
        with marked(FAST):
            x = x.sin().cos()
        with marked(SMALL):
            x = x.exp().tan()
        with marked(dict(reversed(SMALL.items()))):
            return x.tanh()

    gm = regional_inductor(traced(model, torch.randn(4)))
    assert regions(gm) == {"inductor_region_0": ["sin", "cos"], "inductor_region_1": ["exp", "tan", "tanh"]}
    assert gm.inductor_region_0._variants.compiler == Inductor(FAST["inductor_configs"])
    assert gm.inductor_region_1._variants.compiler == Inductor(SMALL["inductor_configs"])


@quick
def test_regions_around_a_write_that_is_not_marked_stay_apart() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    before = graph.call_function(torch.ops.aten.sin.default, (x,))
    graph.call_function(torch.ops.aten.add_.Tensor, (x, 1))
    after = graph.call_function(torch.ops.aten.cos.default, (x,))
    graph.output((before, after))
    gm = GraphModule(nn.Module(), graph)
    for node in (before, after):
        node.meta["custom"] = {"compile_with_inductor": 0}
    assert list(regions(regional_inductor(gm)).values()) == [["sin_default"], ["cos_default"]]
    x = torch.randn(4)
    expected = (x.sin(), (x + 1).cos())
    assert all(map(torch.equal, gm(x), expected))


def test_inductor_compiles_forward_and_backward() -> None:
    x, weight = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    call = compiled(waves)
    for _ in range(2):
        (found,) = torch.autograd.grad(call(x, weight), weight)
        (expected,) = torch.autograd.grad(waves(x, weight), weight)
        torch.testing.assert_close(found, expected)


@quick
def test_equal_regions_are_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    def model(x: Tensor) -> Tensor:
        for _ in range(3):
            with marked():
                x = x.sin().cos().exp() * 3.25
            x = torch.cumsum(x, 0)
        return x

    gm, x = regional_inductor(traced(model, torch.randn(4))), torch.randn(4)
    with caplog.at_level(logging.INFO, "partita.lowering"):
        assert torch.equal(gm(x)[0], model(x))
    assert len(regions(gm)) == 3
    assert len([record for record in caplog.records if record.getMessage().startswith("compiling")]) == 1


# Inside AOTAutograd -----------------------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_model_with_marked_regions_trains_as_in_eager_mode(dynamic: bool) -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    call = compiled(waves, dynamic=dynamic)
    for rows in (4, 4, 6):
        x = torch.randn(rows, 4)
        found, expected = call(x, weight), waves(x, weight)
        assert torch.equal(found, expected)
        assert torch.equal(*[torch.autograd.grad(result, weight)[0] for result in (found, expected)])


@quick
def test_regions_are_compiled_in_the_first_call_although_aotautograd_looks_on(caplog: pytest.LogCaptureFixture) -> None:
    def model(x: Tensor, weight: Tensor) -> Tensor:
        with marked():
            x = (x @ weight).sin() * 7.125  # No other test has such a region, so that none is shared.
        return torch.cumsum(x, 0).sum()

    call, weight = compiled(model), torch.randn(4, 4, requires_grad=True)
    counts = []
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO, "partita.lowering"):
            call(torch.randn(4, 4), weight).backward()
        counts.append(len([record for record in caplog.records if record.getMessage().startswith("compiled")]))
    assert counts == [2, 0], "the forward and the backward have a region each"


@quick
def test_marks_reach_the_backward_graph() -> None:
    taken: list[dict[str, list[str]]] = []

    def compiler(gm: GraphModule, inputs: Sequence[Any]) -> GraphModule:
        result = regional_inductor(gm, *inputs)
        assert result is gm
        taken.append(regions(gm))
        return result

    weight = torch.randn(4, 4, requires_grad=True)
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    torch.compile(waves, backend=backend, fullgraph=True)(torch.randn(4, 4), weight).backward()
    forward, backward = taken
    assert len(forward) == 2
    assert len(backward) == 2
    assert not any("cumsum" in name for names in (*forward.values(), *backward.values()) for name in names)


@quick
def test_random_numbers_and_writes_are_those_of_eager_mode() -> None:
    def model(x: Tensor, seen: Tensor) -> Tensor:
        with marked():
            x = nn.functional.dropout(x.sin())
        seen.add_(x.detach().mean())
        with marked():
            return (x * seen).exp()

    call, x = compiled(model), torch.randn(16, requires_grad=True)
    seen, expected_seen = torch.zeros(()), torch.zeros(())
    for seed in (0, 1):
        torch.manual_seed(seed)
        found = call(x, seen)
        torch.manual_seed(seed)
        expected = model(x, expected_seen)
        assert torch.equal(found, expected)
        assert torch.equal(seen, expected_seen)
        assert torch.equal(*[torch.autograd.grad(result.sum(), x)[0] for result in (found, expected)])


# Bodies of operators ----------------------------------------------------------------------------------------------


def hot(x: Tensor) -> Tensor:
    with marked():
        x = x.sin().cos()
    return x.exp()


def cold(x: Tensor) -> Tensor:
    return x.tan()


def branching(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, hot, cold, (x,)) + 1


@quick
def test_regions_in_branches_are_lowered() -> None:
    x = torch.randn(4).abs()
    gm = regional_inductor(traced(branching, x))
    assert regions(gm) == {}
    assert regions(gm.true_graph_0) == {"inductor_region_0": ["sin", "cos"]}
    assert regions(gm.false_graph_0) == {}
    assert torch.equal(gm(x)[0], branching(x))
    assert torch.equal(gm(-x)[0], branching(-x))
    call = compiled(branching)
    for value in (x, x, -x):
        assert torch.equal(call(value), branching(value))


@quick
def test_an_operator_that_is_marked_is_lowered_with_its_bodies() -> None:
    def model(x: Tensor) -> Tensor:
        with marked():
            return branching(x)

    x = torch.randn(4).abs()
    gm = regional_inductor(traced(model, x))
    (names,) = regions(gm).values()
    assert "cond" in names
    for value in (x, -x):
        assert torch.equal(gm(value)[0], branching(value))


# What is marked, and how the result is called ---------------------------------------------------------------------


@quick
def test_a_named_region_keeps_to_itself() -> None:
    def model(x: Tensor) -> Tensor:
        with marked({"inductor_region": "first"}):
            x = x.sin()
        with marked({"inductor_region": "second"}):
            x = x.cos()
        with marked():
            x = x.exp()
        with marked("whatever"):
            return x.tan()

    gm = regional_inductor(traced(model, torch.randn(4)))
    assert list(regions(gm).values()) == [["sin"], ["cos"], ["exp", "tan"]]


@quick
def test_the_result_takes_its_inputs_one_by_one_or_in_a_list_that_it_empties() -> None:
    x, y = torch.randn(4), torch.randn(4)

    def model(x: Tensor, y: Tensor) -> Tensor:
        with marked():
            return x.sin() * y

    gm = regional_inductor(traced(model, x, y))
    inputs = [x, y]
    assert torch.equal(gm(inputs)[0], model(x, y))
    assert inputs == []
    assert torch.equal(gm(x, y)[0], model(x, y))


@quick
def test_an_exported_module_keeps_its_calling_convention() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, more: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"out": x.sin() * more["y"].cos()}

    x, more = torch.randn(4), {"y": torch.randn(4)}
    gm = torch.export.export(Model(), (x, more)).module()
    for node in gm.graph.nodes:
        node.meta["custom"] = {"compile_with_inductor": None}
    regional_inductor(gm)
    assert list(regions(gm).values()) == [["sin", "cos", "mul"]]
    assert torch.equal(gm(x, more)["out"], x.sin() * more["y"].cos())


def test_a_graph_without_marks_stays_as_it_is() -> None:
    gm = traced(cold, torch.randn(4))
    graph, code = gm.graph, gm.code
    assert regional_inductor(gm, torch.randn(4)) is gm
    assert gm.graph is graph
    assert gm.code == code


@quick
def test_a_second_run_changes_nothing() -> None:
    gm = regional_inductor(traced(hot, torch.randn(4)))
    graph = gm.graph
    assert regional_inductor(gm).graph is graph


def test_an_unknown_option_is_named_and_nothing_is_changed() -> None:
    def model(x: Tensor) -> Tensor:
        with marked(FAST):
            x = torch.cond(x.sum() > 0, cold, cold, (x,)).sin()
        with marked({"inductor_configs": {"max_autotunes": True}}):
            return x.cos()

    gm = traced(model, torch.randn(4))
    graph = gm.graph
    with pytest.raises(ValueError, match=r"Invalid inductor config key.*max_autotunes") as raised:
        regional_inductor(gm)
    assert isinstance(raised.value, OptionError)
    assert gm.graph is graph
    assert regions(gm) == {}


def sines(*annotations: object) -> GraphModule:
    """A chain of sines with an annotation each."""
    graph = Graph()
    x = graph.placeholder("x")
    for annotation in annotations:
        x = graph.call_function(torch.ops.aten.sin.default, (x,))
        x.meta["custom"] = {"compile_with_inductor": annotation}
    graph.output(x)
    return GraphModule(nn.Module(), graph)


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        ({"inductor_configs": 3}, r"annotation of 'sin\w*' has the 'inductor_configs' 3; give a mapping"),
        ({"inductor_configs": {3: True, "max_autotune": False}}, r"annotation of 'sin\w*': options are a mapping"),
        ({"inductor_region": ["a"]}, r"annotation of 'sin\w*' calls its 'inductor_region' \['a'\].* give it a name"),
    ],
)
def test_an_annotation_that_makes_no_sense_is_named_with_its_node(annotation: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        regional_inductor(sines(annotation))


class CountedReads(Mapping[str, object]):
    """An annotation that counts how often it is read."""

    def __init__(self, region: str) -> None:
        self.region, self.reads = region, 0

    def __getitem__(self, key: str) -> object:
        self.reads += 1
        return {"inductor_region": self.region}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(("inductor_region",))

    def __len__(self) -> int:
        return 1


@quick
def test_an_annotation_is_read_a_few_times_however_many_regions_there_are() -> None:
    annotations = [CountedReads(f"region {place // 2}") for place in range(80)]
    assert len(_marked_regions.MarkedRegions(sines(*annotations)).partition) == 40
    assert max(annotation.reads for annotation in annotations) < 10


def test_what_inductor_refuses_runs_between_marked_regions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Inductor, "refusal", lambda self, node: "no cosine" if node.name == "cos" else None)

    def model(x: Tensor) -> Tensor:
        with marked():
            return x.sin().cos().exp()

    with caplog.at_level(logging.WARNING, "partita.compat"):
        gm = regional_inductor(traced(model, torch.randn(4)))
    assert list(regions(gm).values()) == [["sin"], ["exp"]]
    assert "cos is marked with 'compile_with_inductor' and runs eagerly: refused by inductor: no cosine" in caplog.text


def test_only_graph_modules_are_taken() -> None:
    with pytest.raises(OptionError, match="not Linear"):
        regional_inductor(nn.Linear(2, 2))  # type: ignore[arg-type]


# Kept by AOTAutograd, pickled, compiled ahead of time -----------------------------------------------------------------


@torch.compiler.nested_compile_region
def nested(x: Tensor) -> Tensor:
    with marked():
        return x.sin()


def scaled(x: Tensor) -> Tensor:
    with marked():
        x = x.sin() * 2.5
    return x.cos()


def twice_nested(x: Tensor) -> Tensor:
    return nested(nested(x + 1) + 1).sigmoid()


def kept() -> Any:
    return torch._functorch.config.patch(force_autograd_cache=True)


def pickled(gm: GraphModule, inputs: Sequence[Any]) -> Any:
    """A compiler whose result has been through a pickle."""
    data = GraphPickler.dumps(regional_inductor(gm, *inputs))
    mode = detect_fake_mode(inputs)
    assert mode is not None
    with tracing(TracingContext(mode)):
        result: Any = GraphPickler.loads(data, mode)
        getattr(result, "_graph_module", result).recompile()
    return result


@can_be_kept
@quick
@pytest.mark.parametrize(
    ("model", "dynamic", "is_kept"),
    slow_but(
        product([scaled, branching, twice_nested], [False, True], [False, True]),
        *((scaled, dynamic, is_kept) for dynamic in (False, True) for is_kept in (False, True)),
        (branching, True, True),
        (twice_nested, False, False),
    ),
)
def test_what_torchs_pickler_gives_back_trains_as_before(
    model: Callable[[Tensor], Tensor], dynamic: bool, is_kept: bool
) -> None:
    backend = aot_autograd(fw_compiler=pickled, bw_compiler=pickled)
    call = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    with torch._functorch.config.patch(force_autograd_cache=is_kept):
        for size in (4, 4, 6):
            x = torch.randn(size, requires_grad=True)
            found, expected = call(x), model(x)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(*[torch.autograd.grad(result.sum(), x)[0] for result in (found, expected)])


@can_be_kept
@quick
def test_a_region_that_torchs_pickler_gave_back_can_run_its_body() -> None:
    gm = regional_inductor(traced(scaled, torch.randn(4)))
    loaded: Any = GraphPickler.loads(GraphPickler.dumps(gm), FakeTensorMode(shape_env=ShapeEnv()))
    (region,) = (child for child in loaded.children() if isinstance(child, Lowered))
    x = torch.randn(4)
    (found,) = region.body(x)
    assert torch.equal(found, x.sin() * 2.5)


@can_be_kept
def test_what_is_kept_is_compiled_at_once_and_not_again(caplog: pytest.LogCaptureFixture) -> None:
    def model(x: Tensor, weight: Tensor) -> Tensor:
        with marked():
            x = (x @ weight).sin() * 9.375  # No other test has such a region, so that none is shared.
        return torch.cumsum(x, 0).sum()

    counts = []

    def compiler(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        with caplog.at_level(logging.INFO, "partita.lowering"):
            result = regional_inductor(gm, *inputs)
        counts.append(sum(record.getMessage().startswith("compiled") for record in caplog.records))
        assert isinstance(result, output_code.RegionalOutputCode)
        return result

    call = torch.compile(model, backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler), fullgraph=True)
    weight = torch.randn(4, 4, requires_grad=True)
    with kept(), torch.autocast("cpu", enabled=False), caplog.at_level(logging.INFO, "partita.lowering"):
        call(torch.randn(4, 4), weight).backward()
    assert counts == [1, 2]
    assert sum(record.getMessage().startswith("compiled") for record in caplog.records) == 2


@can_be_kept
@quick
def test_a_region_of_sizes_that_depend_on_data_is_kept_too() -> None:
    def model(x: Tensor) -> Tensor:
        found = x.nonzero()
        with marked():
            return (found * 2).sum() + 1.5

    x = torch.tensor([1.0, 0.0, 2.0])
    with kept(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert torch.equal(compiled(model)(x), model(x))


@quick
@can_be_kept
def test_what_is_kept_can_be_stored_under_a_fake_mode_and_trains_where_it_is_called_with_gradients() -> None:
    mode, x = FakeTensorMode(), torch.randn(4, requires_grad=True)
    with kept(), mode, preserve_node_meta():
        fake = mode.from_tensor(x)
        result: Any = regional_inductor(make_fx(scaled)(fake), fake)
    result.prepare_for_serialization()
    assert result._graph_module is None
    result.post_compile([fake], output_code.CompiledFxGraphConstants(), {"is_backward": False})
    with mode:
        assert result([fake]).shape == (4,)
    found = result([x])
    assert torch.equal(found, scaled(x))
    assert torch.equal(*[torch.autograd.grad(each.sum(), x)[0] for each in (found, scaled(x))])


@can_be_kept
def test_a_model_is_compiled_ahead_of_time_and_loaded_without_compiling_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, weight = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    with (
        torch._dynamo.config.patch(enable_aot_compile=True),
        torch._functorch.config.patch(bundled_autograd_cache=True, force_autograd_cache=True),
    ):
        made = compiled(waves).aot_compile(((x, weight), {}))
        made.save_compiled_function(str(tmp_path / "waves.pt"))
    with caplog.at_level(logging.INFO, "partita.lowering"):
        with open(tmp_path / "waves.pt", "rb") as file:
            loaded: Any = torch.compiler.load_compiled_function(file)
        (found,) = torch.autograd.grad(loaded(x, weight), weight)
    (expected,) = torch.autograd.grad(waves(x, weight), weight)
    torch.testing.assert_close(found, expected)
    assert not [record for record in caplog.records if record.name.startswith("partita")]


# The same natively ------------------------------------------------------------------------------------------------


def annotated(values: dict[str, object]) -> Program:
    """A chain of operators, annotated by name as `annotate` would."""

    def chain(x: Tensor) -> Tensor:
        return x.sin().cos().exp().tan()

    gm = torch.fx.symbolic_trace(chain)
    for node in gm.graph.nodes:
        if node.name in values:
            node.meta["custom"] = {"compile_with_inductor": values[node.name]}
    return Program.of(gm)


def test_a_function_of_the_region_chooses_its_options() -> None:
    def options(region: partita.Region) -> Lower:
        return Lower(Inductor(dict(region.label)["inductor_configs"]))

    program = annotated({"sin": FAST, "cos": SMALL, "tan": SMALL})
    plan = partita.plan(program, ByAnnotation("compile_with_inductor"), options)
    assert [[node.name for node in region.nodes] for region in plan.partition] == [["sin"], ["cos"], ["tan"]]
    assert plan.treatments == tuple(Lower(Inductor(value["inductor_configs"])) for value in (FAST, SMALL, SMALL))
    assert plan.explain("exp") == "exp: outside every region: it has no annotation 'compile_with_inductor'"


def test_names_in_the_annotation_choose_among_treatments() -> None:
    program = annotated({"sin": "fused", "cos": "fused", "exp": "plain"})
    treatments = {"fused": Lower("aot_eager", strict=True), "plain": Call()}
    lowered = partita.plan(program, ByAnnotation("compile_with_inductor"), treatments).apply()
    x = torch.randn(4)
    partita.verify(program, lowered, (x,))
    assert regions(lowered.graph_module) == {"fused": ["sin", "cos"]}
