"""Truth values and symbolic floats are computed where they are read: torch saves no body that takes one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.selecting import slow_but
from tests.program.exported_helpers import CUTS, Case, Model, case_of, cut, reloaded, rows
from torch import Tensor
from torch.export import Dim

from partita import Program, capture, fingerprint, gather, inline, outline, plan, verify
from partita.policies import ByLabel
from partita.treatments import Call

pytestmark = pytest.mark.filterwarnings("ignore")

SHAPES = (({0: Dim("rows", min=2, max=64)},),)


def shared_scale(m: Model, x: Tensor) -> Any:
    scale = x.shape[0] * 0.5
    hidden = m.first(x) * scale
    return m.second(hidden) * scale, hidden + x.shape[0] / 3


def scales_under_modes(m: Model, x: Tensor) -> Any:
    scale = torch.sym_float(x.shape[0]) * 0.5
    half = scale / 2
    with torch.no_grad():
        frozen = m.first(x) * scale
        part = x.shape[0] / 7
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = m.first(x) * half * part
    with torch.no_grad():
        only_a_number = x.shape[0] * 1.5
    free = m.second(x) * scale * part * only_a_number
    with torch.no_grad():
        again = m.first(x) * only_a_number
    return frozen, cast, free, again, part


def scale_of_an_item(m: Model, x: Tensor) -> Any:
    count: Any = (x > 0).sum().item()
    torch._check(count >= 0)
    torch._check(count <= 100)
    with torch.no_grad():
        frozen = m.first(x) * (count / 2)
    return m.second(x) * (count / 2) + frozen, torch.ones(count) * (count / 2)


MODELS: dict[str, Case] = {
    "shared_scale": case_of(shared_scale, shapes=SHAPES),
    "scales_under_modes": case_of(scales_under_modes, shapes=SHAPES),
    "scale_of_an_item": case_of(scale_of_an_item),
}


@pytest.mark.parametrize("how", slow_but(CUTS, "two parts", "every operator", "by mode", "mixed modes"))
@pytest.mark.parametrize("name", MODELS)
def test_programs_whose_floats_cross_borders_are_saved_and_loaded(name: str, how: str) -> None:
    case = MODELS[name]
    program = capture(case.build(), case.args(), dynamic_shapes=case.shapes)
    after = cut(program, how)
    assert fingerprint(inline(after)) == fingerprint(program)
    verify(program, after, case.args())
    verify(program, Program.of(reloaded(after.exported())), case.args())


@pytest.mark.parametrize("name", MODELS)
def test_gathering_writes_a_number_of_several_regions_once(name: str) -> None:
    case = MODELS[name]
    program = capture(case.build(), case.args(), dynamic_shapes=case.shapes)
    gathered = gather(plan(program, *CUTS["two parts"]).partition)
    assert fingerprint(gathered) == fingerprint(program)
    assert names_of_operators(gathered) == names_of_operators(program)
    verify(program, gathered, case.args())


def names_of_operators(program: Program) -> list[str]:
    number, toggles = program.index.number, program.modes.toggles
    return sorted(node.name for node in program.operators() if number[node] not in toggles)


def halves_of_a_size(m: Model, x: Tensor) -> Any:
    """The count that the scale follows from is made in a region which reads the scale as well."""
    count = torch.nonzero(x).shape[0]
    scale = count * 0.5
    return m.first(x) * scale, m.second(x) * scale, scale


def test_a_region_that_makes_and_reads_a_number_needs_no_other() -> None:
    case = case_of(halves_of_a_size)
    program = Program.of(case.exported())
    apart = {"linear_1": "b", "mul_2": "b"}
    policy = ByLabel(lambda node: apart.get(node.name, "a") if node.op == "call_function" else None)
    after = plan(program, policy, Call()).apply()
    assert fingerprint(inline(after)) == fingerprint(program)
    verify(program, Program.of(reloaded(after.exported())), case.args(), other_shapes=False)


def test_a_plan_explains_where_numbers_went() -> None:
    case = MODELS["shared_scale"]
    program = capture(case.build(), case.args(), dynamic_shapes=case.shapes)
    made = plan(program, *CUTS["every operator"])
    names = {node.name: node for node in program.graph.nodes}
    (shared, alone) = (names[name] for name in ("mul", "truediv"))
    assert "computed wherever it is read: 'part_" in made.explain(shared)
    assert "the only one that reads this number" in made.explain(alone)
    assert "no reason given" not in str(made)


def test_numbers_of_a_graph_module_stay_in_the_region_that_names_them() -> None:
    module = MODELS["shared_scale"].exported().module()
    program = Program.of(module)
    scale = program.node("mul")
    partition = ByLabel(lambda node: "scale" if node is scale else None)(program)
    assert partition.region_of(scale) is partition.regions[0]
    verify(program, outline(partition), (rows(),))
