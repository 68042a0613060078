"""What torch does with an exported program after a cut: saves, loads, decomposes, unflattens, exports, compiles it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exported_helpers import CASES, cut, original, reloaded, rows
from tests.exported_runs import Job, differences, differences_in_another_process, trained
from torch.export import ExportedProgram, unflatten
from torch.utils._pytree import tree_leaves

from partita import Program, fingerprint, hops, inline, verify
from partita.graphs.exported import following

pytestmark = pytest.mark.filterwarnings("ignore")

#: A truth value of symbolic numbers crosses a border here, which torch cannot save.
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


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_cut_is_the_program_that_was_saved(name: str) -> None:
    loaded = Program.of(reloaded(cut(original(name), "around layers").exported()))
    assert fingerprint(inline(loaded)) == fingerprint(inline(Program.of(reloaded(original(name)))))
    again = reloaded(loaded.exported())
    assert str(again.graph_signature) == str(original(name).graph_signature)


@pytest.mark.xfail(reason="torch saves no body that takes a truth value")
@pytest.mark.parametrize("name", sorted(WITH_TRUTH_VALUES))
def test_truth_values_of_symbolic_numbers_can_be_saved(name: str) -> None:
    reloaded(cut(original(name), "every operator").exported())


@pytest.mark.parametrize("how", ["every operator", "by module"])
@pytest.mark.parametrize("name", CASES)
def test_an_unflattened_cut_gives_what_the_unflattened_program_gives(name: str, how: str) -> None:
    case = CASES[name]
    expected, found = unflatten(original(name)), unflatten(cut(original(name), how).exported())
    verify(expected, found, case.args(), case.kwargs(), second_call=False, other_shapes=False)


def test_modules_stay_in_their_places_when_unflattened() -> None:
    flat: Any = unflatten(cut(original("twice"), "every operator").exported())
    assert {name for name, _ in flat.block.named_children()} >= {"0", "1", "2"}


DECOMPOSED = ("chain", "repeated", "writes_buffer", "writes_input", "custom", "sizes", "normalised", "structures")


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
@pytest.mark.parametrize("name", ["chain", "structures", "modes", "writes_input", "normalised", "sizes", "twice"])
def test_a_cut_can_be_exported_again(name: str, strict: bool) -> None:
    case = CASES[name]
    after = cut(original(name), "two parts")
    again = torch.export.export(
        after.module(), case.args(), case.kwargs() or None, dynamic_shapes=case.shapes and case.shapes[0], strict=strict
    )
    kept = again.graph.find_nodes(op="call_function", target=hops.call)
    assert len(kept) == (0 if strict else 2)
    verify(after, again.module(), case.args(), case.kwargs(), other_shapes=not strict)


@pytest.mark.parametrize("name", ["chain", "modes", "only_writes", "normalised", "custom", "item"])
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
        torch.testing.assert_close(ours, theirs)
