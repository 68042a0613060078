"""Laws for repeats: whatever equal blocks share, and near-equal ones do not, the program is as the original."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from partita._torch.fx.structural_hash import body_key
from partita.analysis.tolerance import EXACT, Tolerance
from partita.backends import find_backend
from partita.backends.backend import tolerance_of
from partita.equivalence import Comparison, compare
from partita.errors import TreatmentError
from partita.plans import Plan, plan
from partita.policies import Repeats
from partita.program.program import Program, summation_tolerance
from partita.testing.generator.near_repeats import NearRepeats, near_repeats
from partita.testing.laws.core import law
from partita.testing.laws.treatments import is_allowed
from partita.torch_compile import backend
from partita.treatments import Call, Lower, Mode, Recompute, Treatment

#: One exported program in so many is saved and loaded.
_SAVED = 5
#: In double precision, for what differs by rounding in single precision.
_PRECISE = Tolerance(relative=1e-9, absolute=1e-9)


def check_repeats_laws(case: NearRepeats) -> bool:
    """Raises where a program whose equal blocks call one body differs from the original; whether any did."""
    treatment: Treatment = (Call(), Call(), Recompute(), Mode())[case.seed % 4]
    program = case.program()
    planned = plan(program, Repeats(min_size=1 + case.seed % 3), treatment)
    try:
        after = planned.apply()
    except TreatmentError:  # What cannot be recomputed is refused.
        planned = plan(program, planned.partition, Call())
        after = planned.apply()
    with law("blocks that share a body are equivalent to the original", repr(case), planned):
        _check_equal(program, after, case)
        _check_bodies(planned, after)
        _check_copies(after)
        if after.export is not None and case.seed % _SAVED == 0:
            for loaded in _loaded(after):
                _check_equal(program, loaded, case)
    return len(_distinct(after.graph_module)) < len(_called(after.graph_module))


def check_lowered_repeats_law(case: NearRepeats, backend: str) -> Plan:
    """Raises where a program whose blocks share compiled functions differs from the original; else the plan."""
    program = case.program()
    planned = plan(program, Repeats(min_size=1 + case.seed % 3), Lower(backend))
    with law(f"blocks that share functions of {backend} are equivalent to the original", repr(case), planned):
        found = _compared(program, planned.apply(), case)
        if not _is_rounding_of_lowered(found, case, backend):
            _check_allowed(found)
    return planned


def check_compiled_repeats_law(case: NearRepeats, inner: str) -> None:
    """Raises where the model differs once the torch.compile backend has compiled its equal blocks once."""
    torch.compiler.reset()
    options: dict[str, Any] = {"inner": inner}
    if case.seed % 2:
        options["policy"] = Repeats(min_size=1 + case.seed % 3)
    if case.seed % 3 == 2:
        options["treatment"] = Recompute()
    compiled = torch.compile(case.model, backend=backend, options=options)
    tolerance = tolerance_of(find_backend(inner)) | _rounding(case)
    with ExitStack() as stack:
        stack.callback(torch.compiler.reset)
        stack.enter_context(law(f"a model compiled by {inner} in pieces is equivalent to it", repr(case)))
        for _ in range(2):  # From the second call on, pieces are called directly.
            found = compare(case.model, compiled, case.args, tolerance=tolerance, other_shapes=False)
            if _is_refused_by(inner, case, found) or _is_rounding(found, case, options):
                return
            _check_allowed(found)


def _is_refused_by(inner: str, case: NearRepeats, found: Comparison) -> bool:
    """Whether the compiler by itself refuses the model, as it does where autograd refuses its backward."""
    if not any(one.kind == "exception" and one.where == "the call" for one in found.differences):
        return False
    torch.compiler.reset()
    try:
        torch.compile(copy.deepcopy(case.model), backend=inner)(*case.args)
    except RuntimeError:
        return True
    return False


def _is_rounding(found: Comparison, case: NearRepeats, options: dict[str, Any]) -> bool:
    """Whether numbers of the compiled model differ in single precision, and nothing else, and are equal in double."""
    if not _may_be_rounding(found, case):
        return False
    precise = near_repeats(case.seed, dtype=torch.float64)
    torch.compiler.reset()
    compiled = torch.compile(precise.model, backend=backend, options=options)
    again = compare(precise.model, compiled, precise.args, tolerance=_PRECISE, other_shapes=False)
    return again.equal and not again.raised


def _is_rounding_of_lowered(found: Comparison, case: NearRepeats, backend: str) -> bool:
    """The same for a program whose blocks are lowered."""
    if not _may_be_rounding(found, case):
        return False
    precise = near_repeats(case.seed, dtype=torch.float64)
    program = precise.program()
    after = plan(program, Repeats(min_size=1 + case.seed % 3), Lower(backend)).apply()
    again = compare(program, after, precise.args, tolerance=_PRECISE)
    return again.equal and not again.raised


#: The kinds of differences that rounding makes.
_OF_NUMBERS = frozenset(("value", "gradient"))


def _may_be_rounding(found: Comparison, case: NearRepeats) -> bool:
    """Whether numbers differ, and nothing else, where double precision makes a difference: not under autocast.

    A cut adds the gradients of a value that several pieces read in another order, and norms of nearly equal numbers
    magnify that.
    """
    has_autocast = any(name == "autocast" for _, name in case.differences)
    return bool(found.differences) and not has_autocast and all(one.kind in _OF_NUMBERS for one in found.differences)


def _check_equal(program: Program, after: Program | nn.Module, case: NearRepeats) -> None:
    _check_allowed(_compared(program, after, case))


def _compared(program: Program, after: Program | nn.Module, case: NearRepeats) -> Comparison:
    is_program = isinstance(after, Program)
    tolerance = after.tolerance | summation_tolerance(program) if isinstance(after, Program) else EXACT
    # torch.export.load makes two weights of a tied one, each with a part of the gradient.
    return compare(program, after, case.args, tolerance=tolerance, gradients=is_program)


def _check_allowed(found: Comparison) -> None:
    # Where autograd refuses the backward of the original, a treatment may refuse it in other words, or have one.
    left = [one for one in found.differences if not is_allowed(one, found, counted=True, other_errors=True)]
    assert not left, str(found)


def _rounding(case: NearRepeats) -> Any:
    return summation_tolerance(Program.of(torch.fx.symbolic_trace(case.model)))


def _check_bodies(planned: Plan, after: Program) -> None:
    """Bodies that are shared are equal if each region has its own, and the state has the same names."""
    apart = planned.apply(share_bodies=False)
    shared: dict[int, list[str]] = {}
    for name in _called(after.graph_module):
        shared.setdefault(id(after.graph_module.get_submodule(name)), []).append(name)
    for names in shared.values():
        keys = [body_key(_graph(apart.graph_module, name)) for name in names]
        assert len(names) == 1 or (keys[0] is not None and keys.count(keys[0]) == len(keys)), f"{names} differ"
    assert list(after.module().state_dict()) == list(apart.module().state_dict()), "names of state differ"


def _check_copies(after: Program) -> None:
    module = after.module()
    assert len(_distinct(copy.deepcopy(module))) == len(_distinct(module)), "a copy shares less"


def _loaded(after: Program) -> Iterator[Program | nn.Module]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "program.pt2")
        after.save(path)
        loaded = Program.of(path)
        assert len(_distinct(loaded.graph_module)) == len(_distinct(after.exported().graph_module)), (
            "a file shares less"
        )
        yield loaded
        yield torch.export.load(path).module()


def _called(module: GraphModule) -> list[str]:
    """The names of the bodies that calls of a program read."""
    reads = (node for node in module.graph.nodes if node.op in ("call_module", "get_attr"))
    names = dict.fromkeys(str(node.target) for node in reads)
    return [name for name in names if isinstance(module._modules.get(name), GraphModule)]


def _distinct(module: GraphModule) -> set[int]:
    return {id(module.get_submodule(name)) for name in _called(module)}


def _graph(module: GraphModule, name: str) -> GraphModule:
    found = module.get_submodule(name)
    assert isinstance(found, GraphModule)
    return found
