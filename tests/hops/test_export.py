"""Operators with a body in exported programs: kept, saved, loaded elsewhere, decomposed, exported again, trained."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.selecting import slow_but
from tests.hops.helpers import CASES, Case, Regions, assert_equal, gradients, printed_by_new_process, seeded
from torch import nn
from torch.export import Dim, ExportedProgram, export

from partita import hops

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
both_ways = pytest.mark.parametrize("strict", [False, True])


def _exported(case: Case, *, strict: bool) -> ExportedProgram:
    return export(seeded(lambda: Regions(case.call)), (torch.ones(3, 4),), strict=strict)


def _calls(program: ExportedProgram) -> list[str]:
    modules = [child for child in program.graph_module.modules() if isinstance(child, torch.fx.GraphModule)]
    targets = [node.target for module in modules for node in module.graph.nodes if node.op == "call_function"]
    return [target.name() for target in targets if isinstance(target, torch._ops.HigherOrderOperator)]


@every_case
@both_ways
def test_exported_program_trains_as_the_plain_blocks_do(case: Case, strict: bool) -> None:
    x = torch.randn(3, 4)
    exported, plain = _exported(case, strict=strict).module(), seeded(lambda: Regions(case.plainly))
    found, expected = exported(x), plain(x)
    assert torch.equal(found, expected)
    assert (found.dtype, found.requires_grad) == (expected.dtype, expected.requires_grad)
    assert_equal(gradients(exported, x), gradients(plain, x))


@every_case
def test_non_strict_export_keeps_the_call(case: Case) -> None:
    program = _exported(case, strict=False)
    assert _calls(program) == [case.operator.name()]
    call = next(node for node in program.graph.nodes if node.target is case.operator)
    assert call.args[: len(case.mode)] == case.mode


@pytest.mark.parametrize(
    ("case", "strict"),
    slow_but(
        product(CASES.values(), (False, True)), *((case, False) for case in CASES.values()), (CASES["autocast"], True)
    ),
)
def test_decomposition_keeps_values(case: Case, strict: bool) -> None:
    x = torch.randn(3, 4)
    plain = seeded(lambda: Regions(case.plainly))
    with torch.no_grad():
        decomposed = _exported(case, strict=strict).run_decompositions()
        assert "partita" not in str(_calls(decomposed))
        assert torch.allclose(decomposed.module()(x), plain(x), rtol=1e-2, atol=1e-3)


@every_case
def test_exporting_again_keeps_the_call(case: Case) -> None:
    x = torch.randn(3, 4)
    program = _exported(case, strict=False)
    again = export(program.module(), (x,), strict=False)
    assert _calls(again) == _calls(program)
    assert torch.equal(again.module()(x), program.module()(x))
    assert torch.equal(torch.export.unflatten(again)(x), program.module()(x))


def test_saved_programs_load_in_a_process_that_has_imported_partita(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    torch.save(x, tmp_path / "x.pt")
    expected = []
    for name, case in CASES.items():
        torch.export.save(_exported(case, strict=False), tmp_path / f"{name}.pt2")
        plain = seeded(lambda case=case: Regions(case.plainly))
        expected.append((name, plain(x), gradients(plain, x)))
    torch.save(expected, tmp_path / "expected.pt")
    source = f"""
import partita, torch
from tests.hops.helpers import assert_equal, gradients
folder = {str(tmp_path)!r}
x = torch.load(folder + "/x.pt")
for name, y, grads in torch.load(folder + "/expected.pt"):
    module = torch.export.load(folder + "/" + name + ".pt2").module()
    assert torch.equal(module(x), y), name
    assert_equal(gradients(module, x), grads)
print("loaded")
"""
    assert printed_by_new_process(source) == "loaded\n"


class _Nest(nn.Module):
    """Unused mutations, gradients switched on inside blocks that switch them off, and all kinds nested."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def count(self) -> None:
        self.steps.add_(1)

    def track(self, h: torch.Tensor, *, rate: float) -> None:
        self.mean.mul_(1 - rate).add_(h.mean(0), alpha=rate)

    def frozen(self, h: torch.Tensor) -> torch.Tensor:
        def cast(a: torch.Tensor) -> torch.Tensor:
            return hops.wrap_with_autocast("cpu", torch.bfloat16, True, None, self.linear, a)

        return hops.wrap_with_set_grad_enabled(True, cast, h) + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hops.wrap_with_set_grad_enabled(False, self.count)
        h = hops.call(self.linear, x)
        hops.wrap_with_set_grad_enabled(False, self.track, h, rate=0.5)
        return (h + hops.wrap_with_set_grad_enabled(False, self.frozen, h) * self.steps + self.mean).sum()


@both_ways
def test_nests_and_writes_survive_export_saving_and_decomposition(strict: bool, tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    eager = seeded(_Nest)
    rows = Dim("rows", min=2)
    program = export(seeded(_Nest), (torch.ones(5, 4),), dynamic_shapes=({0: rows},), strict=strict)
    torch.export.save(program, tmp_path / "nest.pt2")
    loaded = torch.export.load(tmp_path / "nest.pt2").module()
    expected = [eager(x), eager(x)]
    assert_equal([loaded(x), loaded(x)], expected)
    assert_equal(list(loaded.buffers()), list(eager.buffers()))
    eager, loaded = seeded(_Nest), torch.export.load(tmp_path / "nest.pt2").module()
    assert_equal(gradients(loaded, x), gradients(eager, x))
    with torch.no_grad():
        decomposed = torch.export.load(tmp_path / "nest.pt2").run_decompositions()
        assert sorted(decomposed.graph_signature.buffers_to_mutate.values()) == ["mean", "steps"]
        assert torch.allclose(decomposed.module()(x), expected[0], rtol=1e-2)


def test_keyword_operands_of_a_call_can_be_saved(tmp_path: Path) -> None:
    program = _exported(CASES["call"], strict=False)
    call = next(node for node in program.graph.nodes if node.target is hops.call)
    body = getattr(program.graph_module, call.args[0].target)
    names = [node.target for node in body.graph.nodes if node.op == "placeholder"]
    call.kwargs = {names[-1]: call.args[-1]}
    call.args = call.args[:-1]
    program.graph_module.recompile()
    torch.export.save(program, tmp_path / "keyword.pt2")
    x = torch.randn(3, 4)
    assert torch.equal(torch.export.load(tmp_path / "keyword.pt2").module()(x), program.module()(x))


def test_gradients_switched_on_inside_no_grad_survive_decomposition() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return hops.wrap_with_set_grad_enabled(False, self.inner, x, w) + w

        def inner(self, x: torch.Tensor, w: torch.Tensor) -> Any:
            return hops.wrap_with_set_grad_enabled(True, torch.mm, x, w).clone() + 1

    x, w = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    program = export(Model(), (x, w), strict=False)
    assert torch.equal(program.run_decompositions().module()(x, w), Model()(x, w))
