"""Recompute for compilers: marks that grow in the order of regions, and compiled programs that save less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from tests.helpers.selecting import slow_but
from tests.hops.helpers import printed_by_new_process
from tests.recompute.helpers import Network, captured, recomputed, rows, trained
from tests.recompute.operators.helpers import assert_bitwise
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

import partita
from partita import Program
from partita.policies import ByLabel, ByModule, BySize
from partita.testing.captured import Mixer
from partita.torch_compile.backend import backend, digest_of_marks
from partita.treatments import Call, KeepEverything, KeepNodes, KeepNothing, KeepOperators, Recompute

AGAIN, SAVED = CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE
LINEAR = KeepOperators("aten.linear", torch.nn.functional.linear)


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> None:
    torch.compiler.reset()


# Marks --------------------------------------------------------------------------------------------------------------


def _numbers(program: Program) -> list[int]:
    """The number of each marked node, in the order of the graph."""
    return [node.meta["ac_graph_id"] for node in program.graph.nodes if "ac_graph_id" in node.meta]


def test_marks_say_what_is_saved_and_what_is_computed_again() -> None:
    program = captured()
    marked = recomputed(KeepNodes("linear"), program).annotate()
    block = {node.name: node.meta.get("recompute") for node in marked.graph.nodes if node.op == "call_function"}
    expected = {"linear": SAVED, "gelu": AGAIN, "dropout": AGAIN, "linear_1": AGAIN, "mul": SAVED, "add": None}
    assert {name: block[name] for name in expected} == expected
    assert not _numbers(program)
    partita.verify(program, marked, (), {"x": rows()})


def test_numbers_grow_in_the_order_in_which_regions_run_and_from_plan_to_plan() -> None:
    program = captured()
    first, second = (_numbers(recomputed(KeepNothing(), program).annotate()) for _ in range(2))
    for numbers in (first, second):
        assert numbers == sorted(numbers)
        assert len(set(numbers)) == 3
    assert max(first) < min(second)


def test_numbers_follow_the_order_of_execution_and_not_of_names() -> None:
    program = partita.capture(lambda x: x.sin().exp().cos().tanh(), (torch.ones(3),))
    labels = {"sin": "z", "exp": "z", "cos": "a", "tanh": "a"}
    marked = partita.plan(program, ByLabel(lambda node: labels.get(node.name)), Recompute()).annotate()
    numbers = _numbers(marked)
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == 2


def test_marks_that_mean_the_same_have_the_same_digest() -> None:
    program = captured()
    digests = [digest_of_marks(recomputed(keep, program).marks()) for keep in (KeepNothing(), KeepNothing(), LINEAR)]
    assert digests[0] == digests[1] != digests[2]


# torch.compile of what was applied ----------------------------------------------------------------------------------


def _compiled(call: Callable[..., Any], inner: str) -> Any:
    return torch.compile(call, backend=inner, fullgraph=True)


_KEEPS = (KeepNothing(), LINEAR, KeepEverything())


@pytest.mark.parametrize(
    ("keep", "inner"),
    slow_but(product(_KEEPS, ("eager", "aot_eager")), *product(_KEEPS, ("aot_eager",)), (LINEAR, "eager")),
)
def test_the_applied_program_compiles_and_trains_alike(keep: Any, inner: str) -> None:
    module, plain = recomputed(keep).apply().module(), captured().module()
    found, expected = (trained(made, _compiled(made, inner)) for made in (module, plain))
    assert_bitwise(found, expected)


def _saved_bytes(loss: Tensor) -> int:
    """What a compiled graph saves for its backward, each memory once; random states, of some kilobytes, left out."""
    saved = [tensor for tensor in loss.grad_fn.saved_tensors if tensor.is_floating_point()]  # type: ignore[union-attr]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in saved}
    return sum(storage.nbytes() for storage in storages.values())


def test_the_compiled_program_saves_less_and_what_is_kept() -> None:
    sizes = [
        _saved_bytes(_compiled(program.module(), "aot_eager")(x=rows().detach()))
        for program in (captured(), *(recomputed(keep).apply() for keep in (LINEAR, KeepNothing())))
    ]
    assert sizes[0] > sizes[1] > sizes[2]


# The backend --------------------------------------------------------------------------------------------------------


def _by_backend(model: Any, treatment: Any, inner: Any = "aot_eager", policy: Any = None) -> Any:
    options = {"policy": policy or ByModule("blocks.*"), "treatment": treatment, "inner": inner}
    return torch.compile(model, backend=backend, fullgraph=True, options=options)


@pytest.mark.parametrize("keep", [KeepNothing(), LINEAR], ids=["nothing", "linear"])
def test_the_backend_trains_alike_and_saves_less(keep: Any) -> None:
    model, twin = Network(), Network()
    compiled, plain = _by_backend(model, Recompute(keep)), _compiled(twin, "aot_eager")
    assert _saved_bytes(compiled(rows().detach())) < _saved_bytes(plain(rows().detach()))
    assert_bitwise(trained(model, compiled), trained(twin, plain))


def test_the_backend_finds_the_entry_point_and_compiles_the_graph_whole() -> None:
    given: list[GraphModule] = []

    def inner(graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        given.append(graph)
        return lookup_backend("aot_eager")(graph, list(example_inputs))

    options = {"policy": ByModule("blocks.*"), "treatment": Recompute(LINEAR), "inner": inner}
    model, twin = Network(), Network()
    compiled = torch.compile(model, backend="partita", fullgraph=True, options=options)
    assert_bitwise(trained(model, compiled), trained(twin, _compiled(twin, "aot_eager")))
    (graph,) = given
    assert not graph.graph.find_nodes(op="call_module")
    assert len({node.meta["ac_graph_id"] for node in graph.graph.nodes if "ac_graph_id" in node.meta}) == 3


def test_another_policy_is_another_compilation() -> None:
    sizes = []
    for keep in (KeepNothing(), LINEAR, KeepNothing()):
        torch.compiler.reset()
        sizes.append(_saved_bytes(_by_backend(Network(), Recompute(keep))(rows().detach())))
    assert sizes[0] == sizes[2] < sizes[1]


def test_where_some_regions_are_called_the_backend_cuts() -> None:
    def treatment(region: Any) -> Any:
        return Recompute() if region.name == "blocks_1" else Call()

    model, twin = Network(), Network()
    found = trained(model, _by_backend(model, treatment, "eager"))
    assert_bitwise(found, trained(twin, _compiled(twin, "eager")))


def test_regions_that_draw_and_write_are_right_when_compiled() -> None:
    def train(model: Mixer, call: Any) -> list[Tensor]:
        torch.manual_seed(0)
        losses = []
        for _ in range(3):
            loss = call(torch.linspace(-1, 1, 24).reshape(4, 6)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        return [*losses, *(parameter.grad for parameter in model.parameters()), *model.buffers()]

    torch.manual_seed(0)
    model = Mixer()
    twin = Mixer()
    twin.load_state_dict(model.state_dict())
    found = train(model, _by_backend(model, Recompute(), policy=BySize(parts=2)))
    assert_bitwise(found, train(twin, _compiled(twin, "aot_eager")))


_CACHED = """
import torch
from tests.recompute.helpers import Network, rows, trained
from tests.recompute.test_compiled import LINEAR, _by_backend, _saved_bytes
from partita.treatments import KeepNothing, Recompute
from torch._dynamo.utils import counters
sizes, losses = [], []
with torch._functorch.config.patch(enable_autograd_cache=True), torch._inductor.config.patch(fx_graph_cache=True):
    for keep in (KeepNothing(), LINEAR, KeepNothing(), LINEAR):
        torch.compiler.reset()
        model = Network()
        compiled = _by_backend(model, Recompute(keep), "inductor")
        sizes.append(_saved_bytes(compiled(rows().detach())))
        losses.append([loss.item() for loss in trained(model, compiled)[:3]])
assert sizes[0] == sizes[2] < sizes[1] == sizes[3], sizes
assert losses[0] == losses[2] and losses[1] == losses[3], losses
print(counters["aot_autograd"]["autograd_cache_hit"] >= 2)
"""


@pytest.mark.slow
def test_a_cache_of_compiled_graphs_tells_policies_apart(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert printed_by_new_process(_CACHED) == "True\n"


@pytest.mark.parametrize("is_trained_before", [False, True])
def test_a_model_that_draws_is_called_under_no_grad_inside_torch_compile(is_trained_before: bool) -> None:
    torch.compiler.reset()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 8))
    options = {"inner": "aot_eager", "treatment": Recompute()}
    compiled = torch.compile(model, backend="partita", options=options)
    if is_trained_before:
        compiled(rows()).sum().backward()
    with torch.no_grad():
        torch.manual_seed(0)
        found = compiled(rows())
        torch.manual_seed(0)
        assert torch.equal(found, model(rows()))
