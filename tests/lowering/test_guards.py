"""Input checks of lowered programs: what the program was captured for, as the program itself checks, in copies too."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.helpers.processes import run_in_new_process
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

from partita import Program, capture, plan
from partita.policies import BySize
from partita.treatments import Call, Lower, Recompute

BACKENDS = ["eager", "aot_eager"]


class Halves(nn.Module):
    """Asks for an even number of rows; what is captured holds one of two branches."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0) / x.shape[0] if x.shape[0] % 2 == 0 else x.sum(0) * 100


def more(x: Tensor, y: Tensor) -> Tensor:
    return x.sum() + y.sum() if x.shape[0] < y.shape[0] else x.sum() - y.sum()


def scaled(x: Tensor, k: int) -> Tensor:
    return x.sum(0) * k if x.shape[0] > 3 else x.sum(0) * 0


def rows(count: int) -> Tensor:
    return torch.ones(count, 2)


def halves() -> Program:
    return capture(Halves(), (rows(4),), dynamic_shapes=({0: Dim.AUTO},))


def lowered(program: Program, backend: str = "eager") -> GraphModule:
    return plan(program, BySize(parts=1), Lower(backend)).apply().module()


def refusal(module: Callable[..., Any], *args: Any) -> str:
    """What the guards say to these arguments."""
    with pytest.raises(AssertionError, match="Guard failed") as raised:
        module(*args)
    return str(raised.value)


def copies(module: GraphModule) -> dict[str, nn.Module]:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return {
        "itself": module,
        "copied": copy.deepcopy(module),
        "pickled": pickle.loads(pickle.dumps(module)),
        "saved": torch.load(file, weights_only=False),
        "pickled twice": pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(module)))),
    }


@pytest.mark.parametrize("treatment", [Lower("eager"), Lower("aot_eager"), Call(), Recompute()], ids=str)
def test_conditions_on_sizes_are_checked_whatever_the_treatment(treatment: Any) -> None:
    program = halves()
    module = plan(program, BySize(parts=1), treatment).apply().module()
    for count in (4, 6):
        assert torch.equal(module(rows(count)), Halves()(rows(count)))
    assert refusal(module, rows(5)) == refusal(program.module(), rows(5)) == "Guard failed: x.size()[0] % 2 == 0"


@pytest.mark.parametrize("backend", BACKENDS)
def test_conditions_that_compare_two_inputs_are_checked(backend: str) -> None:
    program = capture(more, (rows(2), rows(4)), dynamic_shapes=({0: Dim.AUTO}, {0: Dim.AUTO}))
    module = lowered(program, backend)
    assert torch.equal(module(rows(3), rows(4)), more(rows(3), rows(4)))
    assert refusal(module, rows(5), rows(3)) == refusal(program.module(), rows(5), rows(3))


def _from_file(folder: Path) -> Program:
    torch.export.save(halves().exported(), folder / "halves.pt2")
    return Program.of(folder / "halves.pt2")


def _without_examples(_: Path) -> Program:
    exported = halves().exported()
    exported.example_inputs = None
    return Program.of(exported)


SOURCES: dict[str, Callable[[Path], Program]] = {
    "torch.export": lambda _: Program.of(
        torch.export.export(Halves(), (rows(4),), dynamic_shapes=({0: Dim.AUTO},)),
    ),
    "exported": lambda _: Program.of(halves().exported()),
    "module": lambda _: Program.of(halves().module()),
    "file": _from_file,
    "without examples": _without_examples,
    "decomposed": lambda _: Program.of(halves().exported().run_decompositions()),
    "decomposed file": lambda folder: Program.of(_from_file(folder).exported().run_decompositions()),
    "lowered": lambda _: Program.of(lowered(halves())),
    "traced": lambda _: Program.of(torch.fx.symbolic_trace(lowered(halves()))),
}


@pytest.mark.parametrize("source", SOURCES)
def test_conditions_on_sizes_are_checked_wherever_a_program_comes_from(source: str, tmp_path: Path) -> None:
    module = lowered(SOURCES[source](tmp_path))
    assert torch.equal(module(rows(6)), Halves()(rows(6)))
    assert refusal(module, rows(5)) == "Guard failed: x.size()[0] % 2 == 0"


@pytest.mark.parametrize("fullgraph", [False, True])
def test_conditions_on_sizes_are_checked_inside_torch_compile(fullgraph: bool) -> None:
    torch.compiler.reset()
    module = torch.compile(lowered(halves()), backend="eager", fullgraph=fullgraph)
    for count in (4, 6):
        assert torch.equal(module(rows(count)), Halves()(rows(count)))
    with pytest.raises(Exception, match=r"Guard failed: x.size\(\)\[0\] % 2 == 0"):
        module(rows(5))


def test_conditions_that_cannot_be_traced_are_called_by_what_is_traced() -> None:
    program = capture(lambda x: x.reshape(-1, 2, 3) * 2, (torch.ones(8, 3),), dynamic_shapes=({0: Dim.AUTO},))
    traced = torch.fx.symbolic_trace(lowered(program))
    assert traced(torch.ones(6, 3)).shape == (3, 2, 3)
    for module in (traced, copy.deepcopy(traced)):
        assert refusal(module, torch.ones(7, 3)) == refusal(program.module(), torch.ones(7, 3))


def test_eliminating_dead_code_keeps_the_checks() -> None:
    module = lowered(halves())
    module.graph.eliminate_dead_code()
    module.recompile()
    refusal(module, rows(5))


SHAPES: dict[str, Any] = {"fixed": None, "range": ({0: Dim("n", min=4, max=8)}, None)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_copies_check_what_the_program_checks(shapes: str, backend: str) -> None:
    program = capture(scaled, (rows(4), 10), dynamic_shapes=SHAPES[shapes])
    for name, module in copies(lowered(program, backend)).items():
        assert torch.equal(module(rows(4), 10), scaled(rows(4), 10)), name
        for arguments in ((rows(2), 10), (rows(9), 10), (rows(4), 3)):
            assert refusal(module, *arguments) == refusal(program.module(), *arguments), name
        with pytest.raises(ValueError, match="tree spec"):
            module(rows(4))


def test_copies_check_conditions_on_sizes() -> None:
    for name, module in copies(lowered(halves())).items():
        assert torch.equal(module(rows(6)), Halves()(rows(6))), name
        assert refusal(module, rows(5)) == "Guard failed: x.size()[0] % 2 == 0", name


def test_a_copy_that_is_traced_checks_its_inputs() -> None:
    torch.compiler.reset()
    module = torch.compile(pickle.loads(pickle.dumps(lowered(halves()))), backend="eager", fullgraph=True)
    assert torch.equal(module(rows(6)), Halves()(rows(6)))
    with pytest.raises(Exception, match="Guard failed"):
        module(rows(5))


IN_A_NEW_PROCESS = """
import sys, torch
module = torch.load(sys.argv[1], weights_only=False)
with torch.no_grad():
    print(module(torch.ones(4, 2), 10).tolist())
    for arguments in ((torch.ones(2, 2), 10), (torch.ones(4, 2), 3)):
        try:
            print(module(*arguments).tolist())
        except AssertionError as error:
            print(error)
"""


@pytest.mark.parametrize(
    "backend", ["aot_eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("inductor", "aot_inductor"))]
)
def test_another_process_checks_what_the_program_checks(backend: str, tmp_path: Path) -> None:
    module = lowered(capture(scaled, (rows(4), 10)), backend)
    with torch.no_grad():
        module(rows(4), 10)
    torch.save(module, tmp_path / "module.pt")
    finished = run_in_new_process(IN_A_NEW_PROCESS, tmp_path / "module.pt")
    assert finished.stdout.splitlines() == [
        "[40.0, 40.0]",
        "Guard failed: x.size()[0] == 4",
        "Guard failed: k == 10",
    ], finished.stderr


class Pair(NamedTuple):
    x: Tensor
    xy: Tensor


def _sum(values: Any) -> Tensor:
    return sum((value.sum() for value in torch.utils._pytree.tree_leaves(values)), torch.zeros(()))


CONTAINERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "dict": (lambda d: _sum(d), ({"b": rows(3), "a": [rows(4)]},), ({"b": rows(3), "a": [rows(5)]},)),
    "names that begin alike": (lambda p: _sum(p), (Pair(rows(3), rows(4)),), (Pair(rows(3), rows(5)),)),
    "any number of arguments": (lambda *xs: _sum(xs), (rows(3), rows(4)), (rows(3), rows(5))),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_tensors_in_containers_are_checked(kind: str) -> None:
    function, fitting, other = CONTAINERS[kind]
    for name, module in copies(lowered(capture(function, fitting))).items():
        assert torch.equal(module(*fitting), function(*fitting)), name
        assert refusal(module, *other).endswith(".size()[0] == 4"), name


def test_keywords_are_checked_in_any_order() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, *, a: Tensor, b: Tensor) -> Tensor:
            return x + a.sum() + 2 * b.sum()

    module = lowered(capture(Model(), (rows(2),), {"b": rows(3), "a": rows(4)}))
    assert torch.equal(module(rows(2), a=rows(4), b=rows(3)), Model()(rows(2), a=rows(4), b=rows(3)))
    with pytest.raises(AssertionError, match=r"b\.size\(\)\[0\] == 3"):
        module(rows(2), a=rows(4), b=rows(4))


@pytest.mark.parametrize(
    ("constant", "others"),
    [
        (2, [3, 2.0, True]),
        (True, [False, 1]),
        (0.5, [0.25]),
        (float("nan"), [0.0]),
        (float("-inf"), [float("inf")]),
        ("it's", ["its"]),
        ('"\n', ['"']),
        (None, [3]),
    ],
    ids=repr,
)
def test_constants_are_checked_with_their_types(constant: object, others: list[object]) -> None:
    program = capture(lambda x, k: x * (k if isinstance(k, int | float) else len(str(k))), (rows(2), constant))
    for name, module in copies(lowered(program)).items():
        module(rows(2), constant)
        for other in others:
            assert "k" in refusal(module, rows(2), other), name


def test_tensors_of_other_rank_are_refused() -> None:
    for name, module in copies(lowered(capture(lambda x: x * 2, (rows(2),)))).items():
        for other in (torch.ones(2), torch.ones(2, 2, 1)):
            assert refusal(module, other) == "Guard failed: x.dim() == 2", name


def test_sizes_have_the_form_that_they_were_captured_in() -> None:
    n = Dim("n", min=3, max=10)
    program = capture(lambda x: x * 2, (rows(7),), dynamic_shapes=({0: 3 * n - 2},))
    for name, module in copies(lowered(program)).items():
        assert torch.equal(module(rows(10)), rows(10) * 2), name
        assert refusal(module, rows(11)) == "Guard failed: x.size()[0] % 3 == 1", name
        assert refusal(module, rows(31)) == "Guard failed: x.size()[0] <= 28", name


def test_checks_are_no_part_of_a_region_and_no_barrier() -> None:
    again = plan(Program.of(lowered(halves())), BySize(parts=1), Call())
    assert "it checks the inputs of the program" in again.summary()
    assert not again.program.effects.barriers
    refusal(again.apply().module(), rows(5))


def test_a_program_without_inputs_needs_no_checks() -> None:
    module = lowered(capture(lambda: torch.ones(2) * 3, ()))
    assert torch.equal(module(), torch.full((2,), 3.0))
