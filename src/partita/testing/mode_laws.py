"""Laws for wrapped modes: operators in the place of toggles mean the same, wherever a program switches modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from partita import hops
from partita._torch.ambient import read_ambient
from partita._torch.toggles import TOGGLES
from partita.errors import ModeError, TreatmentError
from partita.graphs.fingerprint import fingerprint
from partita.graphs.mode import AMBIENT
from partita.graphs.program import Program
from partita.rewrite import inline
from partita.testing.case import Case
from partita.testing.dump import dump
from partita.testing.laws import LawError
from partita.testing.mode_form_laws import MODE_FORM_LAWS
from partita.testing.mode_oracle import Sight, modes_seen
from partita.testing.mode_settings import idle_operators
from partita.testing.mode_subject import ModeSubject, equal, means_the_same, wrapped
from partita.testing.nested_graphs import bodies_of, graphs_in, text_of

__all__ = ["MODE_LAWS", "check_mode_laws"]


def check_mode_laws(case: Case) -> str | None:
    """Raises where a law is broken; a program that cannot be wrapped, by design, is refused in the words returned."""
    program = Program.of(case.graph_module)
    before = dump(case.graph_module)
    try:
        subject = ModeSubject(case, program, wrapped(program))
    except (ModeError, TreatmentError) as error:
        if not any(words in str(error) for words in _BY_DESIGN):
            raise LawError(f"a nest is refused only by design\n{case!r}\n{type(error).__name__}: {error}") from error
        _hold("the input is unchanged after an error", case, lambda: equal(dump(case.graph_module), before))
        return str(error)
    for title, law in MODE_LAWS.items():
        _hold(title, case, partial(law, subject))
    _hold("the input is unchanged", case, lambda: equal(dump(case.graph_module), before))
    return None


#: Leaving an inference block puts back autocast too, which is in no block; and no operator gives back a caller's mode.
_BY_DESIGN = ("crosses the inference block", "takes the grad mode of the caller inside an inference block")


def _hold(title: str, case: Case, law: Callable[[], None]) -> None:
    try:
        law()
    except Exception as error:
        raise LawError(f"{title}\n{case!r}\n{type(error).__name__}: {error}") from error


def _means_the_same(subject: ModeSubject) -> None:
    means_the_same(subject, subject.wrapped, thoroughly=True)


def _finds_the_same_modes(subject: ModeSubject) -> None:
    """Whoever calls: where the program puts back what it found, callers without gradients too, in turn."""
    takes_grad = subject.wrapped.caller.grad is not None
    others = [name for name in _CALLERS if not (takes_grad and name in _WITHOUT_GRADIENTS)]
    for name, caller in (("gradients only", nullcontext), _in_turn(subject, others)):
        mine, other = subject.case.copy(), subject.case.copy()
        after = wrapped(Program.of(other.graph_module)).graph_module
        with torch.enable_grad(), caller():
            _same_sight(modes_seen(mine, mine.graph_module), modes_seen(other, after, known=subject.names), name)


def _same_sight(before: Sight, after: Sight, caller: str) -> None:
    missing = [name for name in before.modes if name not in after.modes]
    assert not missing, f"{missing} do not run when called under {caller}"
    leaves_flag = _leaves_flag(before, after)
    for name, modes in before.modes.items():
        found = after.modes[name]
        flag = found.autocast_cache if leaves_flag else modes.autocast_cache
        wanted = replace(modes, autocast_depth=found.autocast_depth, autocast_cache=flag)
        assert found == wanted, f"called under {caller}, {name} runs under\n{found}, not under\n{wanted}"
    assert before.raised == after.raised, f"{after.raised} is raised under {caller}, not {before.raised}"
    assert not after.leaks, f"modes are left behind under {caller}"
    equal(after.outputs, before.outputs)
    assert before.state == after.state, f"called under {caller}, another random or other state is left behind"


def _leaves_flag(before: Sight, after: Sight) -> bool:
    """Whether blocks that cross have left the cache flag alone switched, which no operator sets by itself."""
    around = read_ambient().autocast
    bare = [name for name, modes in before.modes.items() if modes.autocast == around]
    return any(before.modes[name].autocast_cache != after.modes[name].autocast_cache for name in bare)


def _switches_by_operators_only(subject: ModeSubject) -> None:
    known = {_joined(node.target) for node in subject.program.index.nodes if node.op == "call_module"}
    for graph in graphs_in(subject.wrapped.graph_module):
        graph.lint()
        left = [node.name for node in graph.nodes if node.op == "call_function" and node.target in TOGGLES]
        assert not left, f"toggles are left: {left}\n{graph}"
        calls = [_joined(node.target) for node in graph.nodes if node.op == "call_module"]
        new = [call for call in calls if not any(call.startswith(name) for name in known)]
        assert not new, f"modules are called that were not: {new}"


def _joined(target: object) -> str:
    """A path as it is called in a body, where it may get a number as well."""
    return str(target).replace(".", "_")


def _sets_nothing_twice(subject: ModeSubject) -> None:
    module = subject.wrapped.graph_module
    idle = idle_operators(module, known=subject.names, grad=subject.wrapped.caller.grad)
    assert not idle, f"operators that set what is set already: {idle}\n{text_of(module)}"


def _inlines_to_the_same(subject: ModeSubject) -> None:
    """Bodies that cannot be inlined, branches for one, are flat again too, but know their caller no more."""
    flat = inline(subject.wrapped)
    flat.graph.lint()
    left = [node.name for graph in graphs_in(flat.graph_module) for node in graph.nodes if node.target in _OPERATORS]
    assert not left, f"operators are left: {left}"
    program = subject.program.rewritten(subject.program.graph_module).under(subject.wrapped.caller)
    program.__dict__["modes"] = replace(program.modes, final=AMBIENT)
    if any(_has_toggles(body) for body in bodies_of(inline(program).graph_module)):
        return
    equal(fingerprint(flat), fingerprint(inline(program)))
    if not any(True for _ in bodies_of(program.graph_module)) and not _calls_graphs(program.graph_module):
        equal(fingerprint(flat), fingerprint(program))


def _has_toggles(body: GraphModule) -> bool:
    return any(node.target in TOGGLES for graph in graphs_in(body) for node in graph.nodes)


def _calls_graphs(module: GraphModule) -> bool:
    calls = module.graph.find_nodes(op="call_module")
    return any(isinstance(module.get_submodule(str(node.target)), GraphModule) for node in calls)


def _wraps_once(subject: ModeSubject) -> None:
    again = wrapped(subject.wrapped)
    equal(text_of(again.graph_module), text_of(subject.wrapped.graph_module))
    equal(fingerprint(again), fingerprint(subject.wrapped))


def _wraps_alike_anywhere(subject: ModeSubject) -> None:
    name, caller = _in_turn(subject, list(_CALLERS))
    elsewhere = wrapped(Program.of(subject.case.graph_module), under=caller())
    same = text_of(subject.wrapped.graph_module) == text_of(elsewhere.graph_module)
    assert same, f"another program is made under {name}"
    equal(fingerprint(elsewhere), fingerprint(subject.wrapped))


def _in_turn(subject: ModeSubject, names: Sequence[str]) -> tuple[str, Callable[[], AbstractContextManager[Any]]]:
    """One of the callers of these names, another one for another program."""
    name = names[len(subject.program.index.nodes) % len(names)]
    return name, _CALLERS[name]


_CALLERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "autocast": partial(torch.autocast, "cpu", torch.float16, cache_enabled=False),
    "inference_mode": torch.inference_mode,
}
_WITHOUT_GRADIENTS = ("no_grad", "inference_mode")
_OPERATORS = (hops.wrap_with_set_grad_enabled, hops.wrap_with_autocast, hops.wrap_with_inference_mode)

MODE_LAWS: dict[str, Callable[[ModeSubject], None]] = {
    "a wrapped program cannot be told from the original": _means_the_same,
    "every operator finds the modes that it found before": _finds_the_same_modes,
    "only operators switch modes": _switches_by_operators_only,
    "no operator sets what is set already": _sets_nothing_twice,
    "inlining undoes wrapping": _inlines_to_the_same,
    "what is wrapped is not wrapped again": _wraps_once,
    "wrapping does not depend on the modes around it": _wraps_alike_anywhere,
    **MODE_FORM_LAWS,
}
