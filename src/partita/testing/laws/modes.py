"""Laws for modes: a program whose modes are operators, in all of its forms, and one that is exported, mean the same."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from partita import hops
from partita._torch import operator_schemas as torch_operators
from partita._torch.modes import read_ambient
from partita._torch.toggles import TOGGLES
from partita.analysis.modes import AMBIENT
from partita.capture import capture
from partita.compat.replace_autocast_with_hop_pass import replace_autocast_with_hop_pass
from partita.compat.replace_set_grad_with_hop_pass import replace_set_grad_with_hop_pass
from partita.equivalence import compare
from partita.errors import CaptureError, ModeError, PartitaError, TreatmentError
from partita.plans import plan
from partita.policies import ByMode
from partita.program.fingerprint import fingerprint
from partita.program.program import Program, summation_tolerance
from partita.rewrite import inline
from partita.testing.generator.build import dump
from partita.testing.generator.draft import Case
from partita.testing.generator.recipe import Features
from partita.testing.laws.core import LawError, check_equivalent, copies_of, eliminate_dead_code, equal, hold
from partita.testing.laws.mode_oracle import (
    ModeSubject,
    ObservedRun,
    bodies_of,
    bodies_of_call,
    graphs_in,
    means_the_same,
    modes_seen,
    restoring_modes,
    text_of,
    wrapped,
)
from partita.treatments import Mode

#: What torch.export supports: no values that are read, no lists that are mutated, nothing unknown.
EXPORTABLE = Features.only(
    *("overloads", "methods", "keywords", "modules", "attributes", "containers", "sizes", "views", "mutations")
)


def check_mode_laws(case: Case) -> str | None:
    """Raises where a law is broken; returns why a program that cannot be wrapped, by design, is refused."""
    program = Program.of(case.graph_module)
    before = dump(case.graph_module)
    try:
        subject = ModeSubject(case, program, wrapped(program))
    except (ModeError, TreatmentError) as error:
        if not any(words in str(error) for words in _BY_DESIGN):
            raise LawError(f"a nest is refused only by design\n{case!r}\n{type(error).__name__}: {error}") from error
        hold("the input is unchanged after an error", case, lambda: equal(dump(case.graph_module), before))
        return str(error)
    for title, law in MODE_LAWS.items():
        hold(title, case, partial(law, subject))
    hold("the input is unchanged", case, lambda: equal(dump(case.graph_module), before))
    return None


#: Exiting an inference block restores autocast too, which no block expresses; and no operator restores a caller's mode.
_BY_DESIGN = ("crosses the inference block", "takes the grad mode of the caller inside an inference block")


def _means_the_same(subject: ModeSubject) -> None:
    means_the_same(subject, subject.wrapped, thoroughly=True)


def _finds_the_same_modes(subject: ModeSubject) -> None:
    """For several callers in turn; also without gradients where the program restores the grad mode."""
    takes_grad = subject.wrapped.caller.grad is not None
    others = [name for name in _CALLERS if not (takes_grad and name in _WITHOUT_GRADIENTS)]
    for name, caller in (("gradients only", nullcontext), _in_turn(subject, others)):
        mine, other = subject.case.copy(), subject.case.copy()
        after = wrapped(Program.of(other.graph_module)).graph_module
        with torch.enable_grad(), caller():
            _same_run(modes_seen(mine, mine.graph_module), modes_seen(other, after, known=subject.names), name)


def _same_run(before: ObservedRun, after: ObservedRun, caller: str) -> None:
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


def _leaves_flag(before: ObservedRun, after: ObservedRun) -> bool:
    """Whether blocks that cross have left only the cache flag switched, which no operator sets by itself."""
    around = read_ambient().autocast
    bare = [name for name, modes in before.modes.items() if modes.autocast == around]
    return any(before.modes[name].autocast_cache != after.modes[name].autocast_cache for name in bare)


def _switches_by_operators_only(subject: ModeSubject) -> None:
    known = tuple(_joined(node.target) for node in subject.program.index.nodes if node.op == "call_module")
    for graph in graphs_in(subject.wrapped.graph_module):
        graph.lint()
        left = [node.name for node in graph.nodes if node.op == "call_function" and node.target in TOGGLES]
        assert not left, f"toggles are left: {left}\n{graph}"
        new = [node for node in graph.find_nodes(op="call_module") if not _joined(node.target).startswith(known)]
        others = [node.target for node in new if not _is_around_operator(node)]
        assert not others, f"modules are called that were not: {others}"


def _is_around_operator(call: Node) -> bool:
    """Whether a module runs operators for modes, and computes what they cannot return from what they do: numbers."""
    module = call.graph.owning_module
    body = module.get_submodule(str(call.target)) if module is not None else None
    if not isinstance(body, GraphModule):
        return False
    targets = {node.target for node in body.graph.nodes if node.op.startswith("call")}
    others = [target for target in targets if target not in _OPERATORS]
    return len(others) < len(targets) and all(
        getattr(target, "__module__", "") == operator.eq.__module__ for target in others
    )


def _joined(target: object) -> str:
    """A path in the form of names in bodies, which may get a number as well."""
    return str(target).replace(".", "_")


def _sets_nothing_twice(subject: ModeSubject) -> None:
    module = subject.wrapped.graph_module
    redundant = _redundant_operators(module, known=subject.names, grad=subject.wrapped.caller.grad)
    assert not redundant, f"operators that set what is set already: {redundant}\n{text_of(module)}"


def _inlines_to_the_same(subject: ModeSubject) -> None:
    """Bodies that cannot be inlined, such as branches, are flat again too, but have lost the mode of their caller."""
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
    """One of the named callers, chosen by the number of nodes."""
    name = names[len(subject.program.index.nodes) % len(names)]
    return name, _CALLERS[name]


def check_export_laws(case: Case, *, dynamic: bool = False) -> str | None:
    """Raises where a law is broken; returns why a program that cannot be captured is refused.

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
    hold("an exported nest", case, lambda: _check(case, captured))
    return None


def _check(case: Case, captured: Program) -> None:
    after = wrapped(captured)
    for exported in (captured.exported(), after.exported()):
        left = [node for graph in graphs_in(exported.graph_module) for node in graph.nodes if node.target in TOGGLES]
        assert not left, f"toggles are left in the exported program: {left}"
    # Torch's guards may refuse sizes that the model accepts.
    original = restoring_modes(case, AMBIENT)
    # No call under no_grad, since constant grad modes are those of a call with gradients.
    tolerance = summation_tolerance(captured)
    check_equivalent(original, captured, case, tolerance=tolerance, no_grad_call=False, other_shapes=False)
    check_equivalent(captured, after, case, tolerance=summation_tolerance(after), no_grad_call=False)


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
    for program in copies_of(subject.wrapped, subject.case.graph_module):
        means_the_same(subject, program)


def _survives_dead_code_elimination(subject: ModeSubject) -> None:
    """Unless it breaks the original too: torch deletes method calls that mutate, even tensors that are used later."""
    original = copy.deepcopy(subject.restoring.graph_module)
    methods = len(original.graph.find_nodes(op="call_method"))
    eliminate_dead_code(original)
    is_whole = methods == len(original.graph.find_nodes(op="call_method"))
    if not is_whole or not compare(subject.restoring, original, subject.case.args, subject.case.kwargs).equal:
        return
    after = wrapped(subject.program)
    eliminate_dead_code(after.graph_module)
    means_the_same(subject, Program(after.graph_module, tolerance=after.tolerance))


#: What is known to be set: "grad", "inference", "cache", and for each device "cpu enabled" and "cpu dtype".
_Settings = Mapping[str, object]


def _redundant_operators(module: GraphModule, *, known: Collection[str], grad: bool | None) -> list[str]:
    """The calls, except `known` ones, that change nothing for their body, in a program called under this grad mode.

    A body that is run in several places may need an operator in one of them only.
    """
    around: _Settings = {} if grad is None else {"grad": grad}
    changes: dict[Node, list[str | None]] = {}
    for node, path in _new_operators(module, known, around, ""):
        changes.setdefault(node, []).append(path)
    return [paths[0] for paths in changes.values() if paths[0] is not None and None not in paths]


def _new_operators(
    module: GraphModule, known: Collection[str], around: _Settings, path: str
) -> Iterator[tuple[Node, str | None]]:
    """Every call that is not known, once for each path to it, with the path where it changes nothing."""
    for node in module.graph.nodes:
        for place, body in bodies_of_call(module, node):
            inside = {**around, **_settings(node)}
            is_known = f"{path}{node.name}" in known
            if not is_known:
                yield node, f"{path}{node.name}" if inside == around else None
            yield from _new_operators(body, known, inside, f"{path}{node.name}/{place}/" if is_known else path)


def _settings(call: Node) -> _Settings:
    settings_of = _SETTINGS_OF.get(call.target)  # type: ignore[arg-type]
    return settings_of(*call.args) if settings_of else {}


def _of_grad(enabled: bool, *_: Any) -> _Settings:  # noqa: FBT001
    return {"grad": enabled}


def _of_inference(mode: bool, *_: Any) -> _Settings:  # noqa: FBT001
    return {"inference": mode, "grad": not mode}


def _of_autocast(device: str, dtype: object, enabled: bool, cache: bool | None, *_: Any) -> _Settings:  # noqa: FBT001
    settings = {f"{device} enabled": enabled, f"{device} dtype": dtype, "cache": cache}
    return {name: value for name, value in settings.items() if value is not None}


_SETTINGS_OF: Mapping[Callable[..., Any], Callable[..., _Settings]] = {
    hops.wrap_with_set_grad_enabled: _of_grad,
    torch_operators.WRAP_WITH_SET_GRAD_ENABLED: _of_grad,
    hops.wrap_with_inference_mode: _of_inference,
    hops.wrap_with_autocast: _of_autocast,
    torch_operators.WRAP_WITH_AUTOCAST: _of_autocast,
}

_CALLERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "autocast": partial(torch.autocast, "cpu", torch.float16, cache_enabled=False),
    "inference_mode": torch.inference_mode,
}
_WITHOUT_GRADIENTS = ("no_grad", "inference_mode")
_OPERATORS = (hops.wrap_with_set_grad_enabled, hops.wrap_with_autocast, hops.wrap_with_inference_mode)

MODE_LAWS: dict[str, Callable[[ModeSubject], None]] = {
    "a wrapped program is equivalent to the original": _means_the_same,
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
