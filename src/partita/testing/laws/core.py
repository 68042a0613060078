"""The laws that hold for any program and any regions over it, checked on one generated case at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any

import torch
from torch.fx import GraphModule, Node

from partita._torch.symbolic_shapes import SYMBOLIC
from partita._torch.toggles import EXIT_INFERENCE
from partita.analysis.nodes import value_of
from partita.compat.split_module import split_module
from partita.equivalence import compare
from partita.errors import CycleError
from partita.plans import plan
from partita.policies import ByLabel
from partita.program.fingerprint import fingerprint
from partita.program.program import Program, summation_tolerance
from partita.regions import Partition
from partita.rewrite import gather, inline
from partita.testing.generator.build import dump
from partita.testing.generator.draft import Case
from partita.testing.generator.regions import Labels
from partita.treatments import Call

#: Options of a comparison: a single call of each program.
ONE_CALL = {"second_call": False, "no_grad_call": False, "other_shapes": False}


class LawError(AssertionError):
    """A law does not hold for a case; the message says how to build the case."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """A program, a legal partition of it, and the program with the partition applied."""

    case: Case
    program: Program
    partition: Partition
    after: Program


def check_laws(case: Case, labels: Labels) -> bool:
    """Raises where a law is broken; returns whether the labels were a legal partition at all."""
    program = Program.of(case.graph_module)
    before = dump(case.graph_module)
    try:
        partition = ByLabel(lambda node: labels.get(node.name))(program)
    except CycleError:
        hold("the input is unchanged after an error", case, lambda: equal(dump(case.graph_module), before), labels)
        return False
    subject = _Subject(case, program, partition, plan(program, partition, Call()).apply())
    for title, check in LAWS.items():
        hold(title, case, partial(check, subject), labels)
    hold("the input is unchanged", case, lambda: equal(dump(case.graph_module), before), labels)
    return True


def hold(title: str, case: Case, check: Callable[[], None], labels: Labels | None = None) -> None:
    """Raises `LawError` if the check raises for this case."""
    chosen = {name: label for name, label in (labels or {}).items() if label is not None}
    with law(title, repr(case), *(() if labels is None else (f"labels = {chosen}",))):
        check()


@contextmanager
def law(title: str, *case: object) -> Iterator[None]:
    """Raises `LawError` if the block raises, with what says how to build the case."""
    try:
        yield
    except Exception as error:
        raise LawError("\n".join((title, *map(str, case), f"{type(error).__name__}: {error}"))) from error


def _means_the_same(subject: _Subject) -> None:
    check_equivalent(subject.program, subject.after, subject.case)


def check_equivalent(before: Program, after: Program, case: Case, **options: Any) -> None:
    """Raises where a comparison with these options finds a difference."""
    comparison = compare(before, after, case.args, case.kwargs, **options)
    assert comparison.equal, str(comparison)


def _gathers_to_the_same(subject: _Subject) -> None:
    equal(fingerprint(gather(subject.partition)), fingerprint(subject.program))


def _inlines_to_the_same(subject: _Subject) -> None:
    before = {node.target for node in subject.program.index.nodes if node.op == "call_module"}
    calls = [node for node in subject.after.index.nodes if node.op == "call_module" and node.target not in before]
    inlined = inline(subject.after, [call.name for call in calls])
    inlined.graph.lint()
    equal(fingerprint(inlined), fingerprint(subject.program))


def _gathered_means_the_same(subject: _Subject) -> None:
    gathered = gather(subject.partition)
    gathered.graph.lint()
    _verify_quickly(subject, gathered)


def _is_well_formed(subject: _Subject) -> None:
    module = subject.after.module()
    module.graph.lint()
    for name, child in module.named_children():
        if isinstance(child, GraphModule):
            child.graph.lint()
            kinds = [node.op for node in child.graph.nodes]
            inputs = kinds.count("placeholder")
            assert kinds[:inputs] == ["placeholder"] * inputs, f"{name}: placeholders do not come first"
            for node in child.graph.nodes:
                assert node.op != "placeholder" or node.users or _is_symbolic(node), f"{name}: unused input {node.name}"


def _copies_and_pickles(subject: _Subject) -> None:
    for program in copies_of(subject.after, subject.case.graph_module):
        _verify_quickly(subject, program)


def copies_of(program: Program, original: GraphModule) -> Iterator[Program]:
    """The program copied and, unless the original cannot be saved either, saved and loaded."""
    module, keys, tolerance = program.module(), program.state_keys, program.tolerance
    yield Program(copy.deepcopy(module), state_keys=keys, tolerance=tolerance)
    try:
        torch.save(original, BytesIO())
    except Exception:  # Exported modules, for one, cannot be saved.
        return
    file = BytesIO()
    torch.save(module, file)
    file.seek(0)
    yield Program(torch.load(file, weights_only=False), state_keys=keys, tolerance=tolerance)


def _can_be_cut_again(subject: _Subject) -> None:
    again = plan(subject.after, ByLabel(lambda node: node.name if node.op == "call_module" else None), Call())
    _verify_quickly(subject, again.apply())


def _survives_dead_code_elimination(subject: _Subject) -> None:
    """Unless it breaks the original too: torch deletes method calls that mutate, and exits of inference blocks."""
    if subject.after.graph.find_nodes(op="call_function", target=EXIT_INFERENCE):
        return
    original = copy.deepcopy(subject.case.graph_module)
    eliminate_dead_code(original)
    if not compare(subject.program, original, subject.case.args, subject.case.kwargs).equal:
        return
    after = plan(subject.program, subject.partition, Call()).apply()
    module = after.module()
    eliminate_dead_code(module)
    _verify_quickly(subject, Program(module, tolerance=after.tolerance))


def _splits_by_torchs_names(subject: _Subject) -> None:
    owner, number = subject.partition.owner, subject.program.index.number

    def part(node: Node) -> int:
        place = owner[number[node]]
        return place if place >= 0 else len(subject.partition) + number[node]

    after = split_module(subject.case.graph_module, None, part)
    _verify_quickly(subject, Program(after, tolerance=summation_tolerance(subject.program)))


def eliminate_dead_code(module: GraphModule) -> None:
    """Runs torch's dead code elimination, in place."""
    module.graph.eliminate_dead_code()
    module.recompile()


def _verify_quickly(subject: _Subject, after: Program) -> None:
    """Compares one call; programs that raise the same type of exception are equal."""
    check_equivalent(subject.program, after, subject.case, **ONE_CALL)


def equal(found: object, wanted: object) -> None:
    """Raises unless the two are equal."""
    assert found == wanted, f"{found} is not {wanted}"


def _is_symbolic(node: Node) -> bool:
    return isinstance(value_of(node), SYMBOLIC)


LAWS: dict[str, Callable[[_Subject], None]] = {
    "an applied partition is equivalent to the original": _means_the_same,
    "the result is well formed": _is_well_formed,
    "gathering keeps the fingerprint": _gathers_to_the_same,
    "a gathered program is equivalent to the original": _gathered_means_the_same,
    "inlining undoes outlining": _inlines_to_the_same,
    "the result can be copied and pickled": _copies_and_pickles,
    "the result can be cut again": _can_be_cut_again,
    "dead code elimination keeps the result": _survives_dead_code_elimination,
    "the same cut under torch's names": _splits_by_torchs_names,
}
