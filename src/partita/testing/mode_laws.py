"""Laws for wrapped modes: operators in the place of toggles mean the same, wherever a program switches modes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from io import BytesIO
from typing import Any

import torch
from torch.fx import GraphModule

from partita import hops
from partita._torch.ambient import read_ambient
from partita._torch.toggles import TOGGLES
from partita.compat.replace_autocast_with_hop_pass import replace_autocast_with_hop_pass
from partita.compat.replace_set_grad_with_hop_pass import replace_set_grad_with_hop_pass
from partita.equivalence import compare
from partita.errors import ModeError, PartitaError
from partita.graphs.fingerprint import fingerprint
from partita.graphs.mode import AMBIENT
from partita.graphs.modes import has_toggles
from partita.graphs.program import Program
from partita.graphs.summation import summation_tolerance
from partita.plans import plan
from partita.policies import ByMode
from partita.rewrite import inline
from partita.testing.case import Case
from partita.testing.dump import dump
from partita.testing.laws import LawError
from partita.testing.mode_oracle import Sight, modes_seen
from partita.testing.mode_settings import idle_operators
from partita.testing.nested_graphs import bodies_of, graphs_in, names_in, text_of
from partita.testing.put_back import putting_back
from partita.treatments import Mode

__all__ = ["MODE_LAWS", "check_mode_laws"]


@dataclass(frozen=True)
class _Subject:
    """A program, its wrapped form, and what the oracle saw of the program."""

    case: Case
    program: Program
    wrapped: Program

    @cached_property
    def calm(self) -> Program:
        """The program, putting back the modes that it would leave behind, as its wrapped form does."""
        return putting_back(self.case, self.wrapped.caller) if self.leaks else self.program

    @cached_property
    def leaks(self) -> bool:
        """Whether a caller with or without gradients finds other modes afterwards, or an exception."""
        return any(
            (sight := self.seen_under(caller)).leaks or sight.raised
            for caller in (torch.enable_grad(), torch.no_grad())
        )

    def seen_under(self, caller: AbstractContextManager[Any]) -> Sight:
        """What the oracle sees of the program."""
        case = self.case.copy()
        with caller:
            return modes_seen(case, case.graph_module)

    @cached_property
    def names(self) -> frozenset[str]:
        """The nodes of the program, those in bodies too."""
        return frozenset(names_in(self.program.graph_module))

    @cached_property
    def has_inference(self) -> bool:
        return any(
            "inference" in str(node.target) for graph in graphs_in(self.program.graph_module) for node in graph.nodes
        )


def check_mode_laws(case: Case) -> str | None:
    """Raises where a law is broken; a program that cannot be wrapped, by design, is refused in the words returned."""
    program = Program.of(case.graph_module)
    before = dump(case.graph_module)
    try:
        wrapped = _wrapped(program)
    except ModeError as error:
        if not any(words in str(error) for words in _BY_DESIGN):
            raise LawError(f"a nest is refused only by design\n{case!r}\n{type(error).__name__}: {error}") from error
        _hold("the input is unchanged after an error", case, lambda: _equal(dump(case.graph_module), before))
        return str(error)
    subject = _Subject(case, program, wrapped)
    for title, law in MODE_LAWS.items():
        _hold(title, case, partial(law, subject))
    _hold("the input is unchanged", case, lambda: _equal(dump(case.graph_module), before))
    return None


#: Torch itself has no meaning for the first that a graph without toggles could have; the second no operator can give.
_BY_DESIGN = ("crosses the inference block", "takes the grad mode of the caller inside an inference block")


def _wrapped(program: Program) -> Program:
    return plan(program, ByMode(), Mode()).apply()


def _hold(title: str, case: Case, law: Callable[[], None]) -> None:
    try:
        law()
    except Exception as error:
        raise LawError(f"{title}\n{case!r}\n{type(error).__name__}: {error}") from error


def _means_the_same(subject: _Subject) -> None:
    comparison = compare(subject.calm, subject.wrapped, subject.case.args, subject.case.kwargs)
    assert comparison.equal, str(comparison)


def _finds_the_same_modes(subject: _Subject) -> None:
    """Whoever calls: where the program puts back what it found, callers without gradients too."""
    for name, caller in _CALLERS.items():
        if name in _WITHOUT_GRADIENTS and subject.wrapped.caller.grad is not None:
            continue
        with torch.enable_grad(), caller():
            mine, other = subject.case.copy(), subject.case.copy()
            before = modes_seen(mine, mine.graph_module)
            after = modes_seen(other, _wrapped(Program.of(other.graph_module)).graph_module, known=subject.names)
            _same_sight(before, after, f"called under {name}")


def _same_sight(before: Sight, after: Sight, when: str) -> None:
    start = read_ambient()
    for name, modes in before.modes.items():
        assert name in after.modes, f"{when}: {name} does not run"
        # Blocks that cross can leave the cache flag alone switched, which no operator sets by itself.
        found = after.modes[name]
        flag = modes.autocast_cache if modes.autocast != start.autocast else found.autocast_cache
        wanted = replace(modes, autocast_depth=found.autocast_depth, autocast_cache=flag)
        assert found == wanted, f"{when}: {name} runs under\n{found}, not under\n{wanted}"
    assert before.raised == after.raised, f"{when}: {after.raised} is raised, not {before.raised}"
    assert not after.leaks, f"{when}: modes are left behind"
    _equal(after.outputs, before.outputs)
    assert before.state == after.state, f"{when}: the random state, or other state, is not the same afterwards"


def _switches_by_operators_only(subject: _Subject) -> None:
    for graph in graphs_in(subject.wrapped.graph_module):
        left = [node.name for node in graph.nodes if node.op == "call_function" and node.target in TOGGLES]
        assert not left, f"toggles are left: {left}\n{graph}"
    before = {node.target for node in subject.program.index.nodes if node.op == "call_module"}
    for graph in graphs_in(subject.wrapped.graph_module):
        new = [node.target for node in graph.nodes if node.op == "call_module" and not _is_of(node.target, before)]
        assert not new, f"modules are called that were not: {new}"
        graph.lint()


def _is_of(target: object, before: set[Any]) -> bool:
    """Whether a module was called before; in a body its path has underscores for dots."""
    known = {str(other).replace(".", "_") for other in before}
    return target in before or any(str(target).startswith(name) for name in known)


def _sets_nothing_twice(subject: _Subject) -> None:
    grad = subject.wrapped.caller.grad
    idle = idle_operators(subject.wrapped.graph_module, known=subject.names, grad=grad)
    assert not idle, f"operators that set what is set already: {idle}\n{text_of(subject.wrapped.graph_module)}"


def _inlines_to_the_same(subject: _Subject) -> None:
    """Bodies that cannot be inlined, branches for one, are flat again too, but know their caller no more."""
    flat = inline(subject.wrapped)
    flat.graph.lint()
    assert not any(node.target in _MODE_OPERATORS for graph in graphs_in(flat.graph_module) for node in graph.nodes)
    if any(has_toggles(graph) for body in bodies_of(inline(subject.program).graph_module) for graph in graphs_in(body)):
        return
    left = subject.program.rewritten(subject.program.graph_module).under(subject.wrapped.caller)
    left.__dict__["modes"] = replace(left.modes, final=AMBIENT)
    _equal(fingerprint(flat), fingerprint(inline(left)))
    if not any(True for _ in bodies_of(left.graph_module)) and not _calls_graphs(left.graph_module):
        _equal(fingerprint(flat), fingerprint(left))


def _calls_graphs(module: GraphModule) -> bool:
    calls = module.graph.find_nodes(op="call_module")
    return any(isinstance(module.get_submodule(str(node.target)), GraphModule) for node in calls)


def _wraps_once(subject: _Subject) -> None:
    again = _wrapped(subject.wrapped)
    _equal(text_of(again.graph_module), text_of(subject.wrapped.graph_module))
    _equal(fingerprint(again), fingerprint(subject.wrapped))


def _wraps_alike_anywhere(subject: _Subject) -> None:
    wanted, text = fingerprint(subject.wrapped), text_of(subject.wrapped.graph_module)
    for name in ("no_grad", "autocast", "inference_mode"):
        with _CALLERS[name]():
            elsewhere = _wrapped(Program.of(subject.case.graph_module))
            assert text == text_of(elsewhere.graph_module), f"another program under {name}"
    _equal(fingerprint(elsewhere), wanted)


def _means_the_same_by_torchs_operators(subject: _Subject) -> None:
    by_torch = plan(subject.program, ByMode(), Mode(operators="torch"))
    targets = {node.target for graph in graphs_in(subject.wrapped.graph_module) for node in graph.nodes}
    if not subject.has_inference:
        _verify_quickly(subject, by_torch.apply())
    elif hops.wrap_with_inference_mode in targets and not _is_in_bodies(subject):
        _refuses(by_torch.apply)


def _is_in_bodies(subject: _Subject) -> bool:
    """Whether the program itself calls operators with bodies, some of which may be for inference."""
    return any(True for _ in bodies_of(subject.program.graph_module))


def _refuses(apply: Callable[[], object]) -> None:
    try:
        apply()
    except PartitaError:
        return
    raise AssertionError("torch has no operator for inference mode, but nothing was refused")


def _means_the_same_by_torchs_passes(subject: _Subject) -> None:
    if subject.has_inference:
        return
    passes = (replace_set_grad_with_hop_pass, replace_autocast_with_hop_pass)
    for order in (passes, passes[::-1]):
        module: GraphModule = subject.case.graph_module
        for replaced in order:
            module, _ = replaced(module, None)
        left = [node.name for graph in graphs_in(module) for node in graph.nodes if node.target in TOGGLES]
        assert not left, f"toggles are left: {left}"
        tolerance = subject.wrapped.tolerance | summation_tolerance(subject.program)
        _verify_quickly(subject, Program(module, tolerance=tolerance))


def _copies_and_pickles(subject: _Subject) -> None:
    module, keys, tolerance = subject.wrapped.module(), subject.wrapped.state_keys, subject.wrapped.tolerance
    _verify_quickly(subject, Program(copy.deepcopy(module), state_keys=keys, tolerance=tolerance))
    try:
        torch.save(subject.case.graph_module, BytesIO())
    except Exception:  # The original cannot be saved at all.
        return
    file = BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    _verify_quickly(subject, Program(loaded, state_keys=keys, tolerance=tolerance))


def _survives_dead_code_elimination(subject: _Subject) -> None:
    """Unless that breaks the original too: torch deletes method calls that write."""
    original = copy.deepcopy(subject.calm.graph_module)
    _eliminate_dead_code(original)
    if not compare(subject.calm, original, subject.case.args, subject.case.kwargs).equal:
        return
    after = _wrapped(subject.program)
    _eliminate_dead_code(after.graph_module)
    _verify_quickly(subject, Program(after.graph_module, tolerance=after.tolerance))


def _eliminate_dead_code(module: GraphModule) -> None:
    module.graph.eliminate_dead_code()
    module.recompile()


def _verify_quickly(subject: _Subject, after: Program) -> None:
    comparison = compare(
        subject.calm, after, subject.case.args, subject.case.kwargs,
        second_call=False, no_grad_call=False, other_shapes=False,
    )  # fmt: skip
    assert comparison.equal, str(comparison)


def _equal(found: object, wanted: object) -> None:
    assert found == wanted, f"{found} is not {wanted}"


_CALLERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no modes of its own": nullcontext,
    "no_grad": torch.no_grad,
    "autocast": partial(torch.autocast, "cpu", torch.float16, cache_enabled=False),
    "inference_mode": torch.inference_mode,
}
_WITHOUT_GRADIENTS = ("no_grad", "inference_mode")
_MODE_OPERATORS = (hops.wrap_with_set_grad_enabled, hops.wrap_with_autocast, hops.wrap_with_inference_mode)

MODE_LAWS: dict[str, Callable[[_Subject], None]] = {
    "a wrapped program cannot be told from the original": _means_the_same,
    "every operator finds the modes that it found before": _finds_the_same_modes,
    "only operators switch modes": _switches_by_operators_only,
    "no operator sets what is set already": _sets_nothing_twice,
    "inlining undoes wrapping": _inlines_to_the_same,
    "what is wrapped is not wrapped again": _wraps_once,
    "wrapping does not depend on the modes around it": _wraps_alike_anywhere,
    "torch's operators mean the same": _means_the_same_by_torchs_operators,
    "torch's passes under our names mean the same": _means_the_same_by_torchs_passes,
    "the wrapped program can be copied and pickled": _copies_and_pickles,
    "dead code elimination keeps the wrapped program": _survives_dead_code_elimination,
}
