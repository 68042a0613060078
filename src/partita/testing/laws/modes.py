"""Laws of modes and exports."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from io import BytesIO
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from partita import hops
from partita._torch.modes import read_ambient
from partita._torch.operators import registry as torch_operators
from partita._torch.toggles import TOGGLES
from partita.analysis.mode import AMBIENT
from partita.capture import capture
from partita.compat.replace_autocast_with_hop_pass import replace_autocast_with_hop_pass
from partita.compat.replace_set_grad_with_hop_pass import replace_set_grad_with_hop_pass
from partita.equivalence import compare
from partita.errors import CaptureError, ModeError, PartitaError, TreatmentError
from partita.plans import plan
from partita.policies import ByMode
from partita.program.fingerprint import fingerprint
from partita.program.program import Program
from partita.program.reordering import summation_tolerance
from partita.rewrite import inline
from partita.testing.generator.build import dump
from partita.testing.generator.draft import Case
from partita.testing.generator.recipe import Features
from partita.testing.laws.core import LawError
from partita.testing.laws.mode_oracle import (
    ModeSubject,
    Sight,
    bodies_of,
    bodies_of_call,
    equal,
    graphs_in,
    means_the_same,
    modes_seen,
    putting_back,
    text_of,
    wrapped,
)
from partita.treatments import Mode

__all__ = ["EXPORTABLE", "MODE_LAWS", "check_export_laws", "check_mode_laws"]


# Laws for exported programs: a captured nest of modes comes out as torch.export has it, and means the same.


#: What torch.export can take: no values that are read, no lists that are written, nothing unknown.
EXPORTABLE = Features.only(
    *("overloads", "methods", "keywords", "modules", "attributes", "containers", "sizes", "views", "writes")
)


def check_export_laws(case: Case, *, dynamic: bool = False) -> str | None:
    """Raises where a law is broken; a program that cannot be captured is refused in the words returned.

    With `dynamic`, the first size of every tensor is a symbol where the program allows that.
    """
    if any(isinstance(module, nn.LSTM) for module in case.graph_module.modules()):
        return "torch 2.13 traces an LSTM under autocast to values of another type"
    own = case.copy()
    sizes = tuple({0: torch.export.Dim.AUTO} if isinstance(value, torch.Tensor) else None for value in own.args)
    try:
        captured = capture(own.graph_module, own.args, own.kwargs, dynamic_shapes=sizes if dynamic else None)
    except CaptureError as error:
        return str(error)
    try:
        _check(case, captured)
    except Exception as error:
        raise LawError(f"an exported nest\n{case!r}\n{type(error).__name__}: {error}") from error
    return None


def _check(case: Case, captured: Program) -> None:
    after = wrapped(captured)
    for exported in (captured.exported(), after.exported()):
        left = [node for graph in graphs_in(exported.graph_module) for node in graph.nodes if node.target in TOGGLES]
        assert not left, f"toggles are left in the exported program: {left}"
    # Torch's guards may refuse sizes that the model takes.
    _same(case, putting_back(case, AMBIENT), captured, other_shapes=False)
    _same(case, captured, after, other_shapes=True)


def _same(case: Case, before: Program, after: Program, *, other_shapes: bool) -> None:
    """A program of constants is captured with gradients on, and means that."""
    comparison = compare(
        before, after, case.args, case.kwargs,
        tolerance=summation_tolerance(after), no_grad_call=False, other_shapes=other_shapes,
    )  # fmt: skip
    assert comparison.equal, str(comparison)


# Laws for the other forms of a wrapped program: by torch's operators and passes, copied, saved, without dead code.


def _means_the_same_by_torchs_operators(subject: ModeSubject) -> None:
    by_torch = plan(subject.program, ByMode(), Mode(operators="torch"))
    targets = {node.target for graph in graphs_in(subject.wrapped.graph_module) for node in graph.nodes}
    if not subject.has_inference:
        means_the_same(subject, by_torch.apply())
    elif hops.wrap_with_inference_mode in targets and not any(True for _ in bodies_of(subject.program.graph_module)):
        _refuses(by_torch.apply)


def _refuses(apply: Callable[[], object]) -> None:
    try:
        apply()
    except PartitaError:
        return
    raise AssertionError("torch has no operator for inference mode, but nothing was refused")


def _means_the_same_by_torchs_passes(subject: ModeSubject) -> None:
    """In both orders; torch has no pass for inference blocks."""
    if subject.has_inference:
        return
    passes = (replace_set_grad_with_hop_pass, replace_autocast_with_hop_pass)
    tolerance = subject.wrapped.tolerance | summation_tolerance(subject.program)
    for order in (passes, passes[::-1]):
        module: GraphModule = subject.case.graph_module
        for replaced in order:
            module, _ = replaced(module, None)
        left = [node.name for graph in graphs_in(module) for node in graph.nodes if node.target in TOGGLES]
        assert not left, f"toggles are left: {left}"
        means_the_same(subject, Program(module, tolerance=tolerance))


def _copies_and_pickles(subject: ModeSubject) -> None:
    module, keys, tolerance = subject.wrapped.module(), subject.wrapped.state_keys, subject.wrapped.tolerance
    means_the_same(subject, Program(copy.deepcopy(module), state_keys=keys, tolerance=tolerance))
    file = BytesIO()
    try:
        torch.save(subject.case.graph_module, BytesIO())
    except Exception:  # The original cannot be saved at all.
        return
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    means_the_same(subject, Program(loaded, state_keys=keys, tolerance=tolerance))


def _survives_dead_code_elimination(subject: ModeSubject) -> None:
    """Unless that breaks the original too: torch deletes method calls that write, whether or not it keeps readers."""
    original = copy.deepcopy(subject.calm.graph_module)
    methods = len(original.graph.find_nodes(op="call_method"))
    _eliminate_dead_code(original)
    is_whole = methods == len(original.graph.find_nodes(op="call_method"))
    if not is_whole or not compare(subject.calm, original, subject.case.args, subject.case.kwargs).equal:
        return
    after = wrapped(subject.program)
    _eliminate_dead_code(after.graph_module)
    means_the_same(subject, Program(after.graph_module, tolerance=after.tolerance))


def _eliminate_dead_code(module: GraphModule) -> None:
    module.graph.eliminate_dead_code()
    module.recompile()


MODE_FORM_LAWS: dict[str, Callable[[ModeSubject], None]] = {
    "torch's operators mean the same": _means_the_same_by_torchs_operators,
    "torch's passes under our names mean the same": _means_the_same_by_torchs_passes,
    "the wrapped program can be copied and pickled": _copies_and_pickles,
    "dead code elimination keeps the wrapped program": _survives_dead_code_elimination,
}


# Laws for wrapped modes: operators in the place of toggles mean the same, wherever a program switches modes.


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


# Operators that set modes, read from a wrapped graph: which of them set nothing that was not set around them.


#: What is known to be set: "grad", "inference", "cache", and for each device "cpu enabled" and "cpu dtype".
_Settings = Mapping[str, object]


def idle_operators(module: GraphModule, *, known: Collection[str], grad: bool | None) -> list[str]:
    """The calls, but for `known` ones, that change nothing for their body, in a program called under this grad mode.

    A body that is run in several places may need an operator in one of them only.
    """
    around: _Settings = {} if grad is None else {"grad": grad}
    changes: dict[Node, list[str | None]] = {}
    for node, idle_at in _new_operators(module, known, around, ""):
        changes.setdefault(node, []).append(idle_at)
    return [idle[0] for idle in changes.values() if idle[0] is not None and None not in idle]


def _new_operators(
    module: GraphModule, known: Collection[str], around: _Settings, path: str
) -> Iterator[tuple[Node, str | None]]:
    """Every call that is not known, once for each way to it, and its path where it changes nothing."""
    for node in module.graph.nodes:
        for place, body in bodies_of_call(module, node):
            inside = {**around, **_settings(node)}
            is_known = f"{path}{node.name}" in known
            if not is_known:
                yield node, f"{path}{node.name}" if inside == around else None
            yield from _new_operators(body, known, inside, f"{path}{node.name}/{place}/" if is_known else path)


def _settings(call: Node) -> _Settings:
    read = _READ.get(call.target)  # type: ignore[arg-type]
    return read(*call.args) if read else {}


def _of_grad(enabled: bool, *_: Any) -> _Settings:  # noqa: FBT001
    return {"grad": enabled}


def _of_inference(mode: bool, *_: Any) -> _Settings:  # noqa: FBT001
    return {"inference": mode, "grad": not mode}


def _of_autocast(device: str, dtype: object, enabled: bool, cache: bool | None, *_: Any) -> _Settings:  # noqa: FBT001
    given = {f"{device} enabled": enabled, f"{device} dtype": dtype, "cache": cache}
    return {name: value for name, value in given.items() if value is not None}


_READ: Mapping[Callable[..., Any], Callable[..., _Settings]] = {
    hops.wrap_with_set_grad_enabled: _of_grad,
    torch_operators.WRAP_WITH_SET_GRAD_ENABLED: _of_grad,
    hops.wrap_with_inference_mode: _of_inference,
    hops.wrap_with_autocast: _of_autocast,
    torch_operators.WRAP_WITH_AUTOCAST: _of_autocast,
}
