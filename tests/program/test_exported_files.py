"""What torch does with an exported program after a cut: saves, loads, decomposes, unflattens, exports, compiles it."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.processes import run_in_new_process
from tests.helpers.torch_versions import IS_OLD
from tests.program.exported_helpers import CASES, Model, case_of, cut, original, reloaded, rows
from tests.program.exported_runs import Job, differences, differences_in_another_process, trained
from torch import Tensor
from torch.export import ExportedProgram, unflatten
from torch.utils._pytree import tree_leaves

from partita import Program, capture, fingerprint, hops, inline, plan, verify
from partita.policies import ByMode, BySize
from partita.program.exported import following
from partita.treatments import Lower, Mode

pytestmark = pytest.mark.filterwarnings("ignore")

#: A truth value of symbolic numbers would cross a border here, which torch cannot save.
WITH_TRUTH_VALUES = {"item", "nonzero"}
#: Programs that another process loads, and how they are cut.
SAVED = {
    **dict.fromkeys(("structures", "constants", "repeated", "writes_buffer", "only_writes", "tied"), "every operator"),
    **dict.fromkeys(("custom", "writes_input", "keywords", "sizes", "number_input", "normalised"), "every operator"),
    **{"modes": "by mode", "item": "by module", "cond": "two parts", "chain": "around layers"},
}


def test_saved_programs_run_and_train_in_another_process(tmp_path: Path) -> None:
    jobs = []
    for name, how in SAVED.items():
        case = CASES[name]
        # In eager mode, cond goes through a compiler.
        model = case.exported().module() if name == "cond" else case.build()
        jobs.append(Job(f"{name} {how}", cut(original(name), how).exported(), model, case.args(), case.kwargs()))
    assert differences_in_another_process(jobs, tmp_path) == ""


@pytest.mark.parametrize("name", [name for name in CASES if name not in SAVED])
def test_a_loaded_cut_is_the_program_that_was_saved(name: str) -> None:
    loaded = Program.of(reloaded(cut(original(name), "around layers").exported()))
    assert fingerprint(inline(loaded)) == fingerprint(inline(Program.of(reloaded(original(name)))))
    again = reloaded(loaded.exported())
    assert str(again.graph_signature) == str(original(name).graph_signature)


@pytest.mark.parametrize("name", sorted(WITH_TRUTH_VALUES))
def test_truth_values_of_symbolic_numbers_can_be_saved(name: str) -> None:
    reloaded(cut(original(name), "every operator").exported())


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "every operator") for name in CASES if name != "modes"),
        pytest.param(
            "modes",
            "every operator",
            marks=pytest.mark.skipif(IS_OLD, reason="unflatten of torch 2.11 loses a body in a later call"),
        ),
        ("chain", "by module"),
        ("twice", "by module"),
        ("twice", "one part"),
    ],
)
def test_an_unflattened_cut_gives_what_the_unflattened_program_gives(name: str, how: str) -> None:
    case = CASES[name]
    expected, found = unflatten(original(name)), unflatten(cut(original(name), how).exported())
    verify(expected, found, case.args(), case.kwargs(), second_call=False, other_shapes=False)


def nested_writes(m: Model, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            m.count.add_(1)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            m.count.mul_(2)
    with torch.inference_mode():
        m.count.add_(3)
    return m.second(m.first(x)) + m.count


@pytest.mark.parametrize("how", ["by mode", "every operator", "mixed modes"])
def test_bodies_that_only_write_are_loaded_at_any_depth(how: str) -> None:
    case = case_of(nested_writes)
    after = cut(capture(case.build(), case.args()), how)
    verify(case.build(), reloaded(after.exported()).module(), case.args())


_WITHOUT_PARTITA = """
import sys
import torch

module = torch.export.load(sys.argv[1]).module()
found = module(torch.ones(3, 4))
assert "partita" not in sys.modules
print(found.dtype, found.requires_grad, module.count.tolist())
"""


def test_a_program_with_torchs_operators_loads_without_partita(tmp_path: Path) -> None:
    program = capture(CASES["modes"].build(), CASES["modes"].args())
    after = plan(program, ByMode(), Mode(operators="torch")).apply()
    torch.export.save(after.exported(), tmp_path / "model.pt2")
    finished = run_in_new_process(_WITHOUT_PARTITA, tmp_path / "model.pt2")
    assert finished.stdout == "torch.float32 True [1.0, 1.0, 1.0, 1.0]\n", finished.stderr


def test_modules_stay_in_their_places_when_unflattened() -> None:
    flat: Any = unflatten(cut(original("twice"), "every operator").exported())
    assert {name for name, _ in flat.block.named_children()} >= {"0", "1", "2"}


DECOMPOSED = ("repeated", "writes_buffer", "writes_input", "sizes", "normalised")


@pytest.mark.parametrize("name", DECOMPOSED)
def test_decomposing_a_cut_gives_what_decomposing_the_program_gives(name: str) -> None:
    case = CASES[name]
    expected, found = (
        original(name, "decomposed"),
        cut(original(name), "every operator").exported().run_decompositions({}),
    )
    assert [(spec.kind, spec.target) for spec in found.graph_signature.output_specs] == [
        (spec.kind, spec.target) for spec in expected.graph_signature.output_specs
    ]
    assert not any(node.op == "get_attr" for node in found.graph.nodes)
    with torch.no_grad():
        verify(expected.module(), found.module(), case.args(), case.kwargs(), gradients=False)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["structures", "modes", "writes_input", "sizes"])
def test_a_cut_can_be_exported_again(name: str, strict: bool) -> None:
    case = CASES[name]
    after = cut(original(name), "two parts")
    again = torch.export.export(
        after.module(), case.args(), case.kwargs() or None, dynamic_shapes=case.shapes and case.shapes[0], strict=strict
    )
    kept = again.graph.find_nodes(op="call_function", target=hops.call)
    assert len(kept) == (0 if strict else 2)
    verify(after, again.module(), case.args(), case.kwargs(), other_shapes=not strict)


@pytest.mark.parametrize("name", ["chain", "modes", "normalised", "item"])
def test_a_cut_can_be_compiled(name: str) -> None:
    case = CASES[name]
    module = cut(case.exported(), "every operator").module()
    torch.compiler.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    expected = trained(case.exported().module(), case.args(), case.kwargs())
    found = trained(compiled, case.args(), case.kwargs())
    assert differences({name.replace("_orig_mod.", ""): value for name, value in found.items()}, expected) == []


def test_a_signature_follows_outputs_to_new_names() -> None:
    exported = original("chain")
    graph = cut(exported, "one part").graph
    renamed = following(exported.graph_signature, graph)
    assert renamed.user_outputs == exported.graph_signature.user_outputs == ("linear_1",)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["two parts", "by mode"])
@pytest.mark.parametrize("name", ["chain", "writes_buffer", "sizes"])
def test_a_cut_can_be_compiled_ahead_of_time(name: str, how: str, tmp_path: Path) -> None:
    case = CASES[name]
    exported: ExportedProgram = cut(case.exported(), how).exported()
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
        found = torch._inductor.aoti_load_package(package)(rows())
        expected = case.build()(rows())
    for ours, theirs in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(ours, torch.as_tensor(theirs))  # Numbers come out of a package as tensors.


@pytest.mark.parametrize(
    "act",
    [copy.deepcopy, lambda program: program.run_decompositions(), unflatten],
)
def test_copies_of_exported_programs_do_not_warn(act: Any) -> None:
    with warnings.catch_warnings(action="error", category=FutureWarning):
        act(CASES["chain"].exported())


def test_copies_and_pickles_of_lowered_modules_do_not_warn() -> None:
    module = plan(Program.of(original("chain")), BySize(parts=1), Lower("eager")).apply().module()
    with warnings.catch_warnings(action="error", category=FutureWarning):
        copy.deepcopy(module)
        pickle.loads(pickle.dumps(module))
