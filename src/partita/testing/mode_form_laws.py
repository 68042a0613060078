"""Laws for the other forms of a wrapped program: by torch's operators and passes, copied, saved, without dead code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from io import BytesIO

import torch
from torch.fx import GraphModule

from partita import hops
from partita._torch.toggles import TOGGLES
from partita.compat.replace_autocast_with_hop_pass import replace_autocast_with_hop_pass
from partita.compat.replace_set_grad_with_hop_pass import replace_set_grad_with_hop_pass
from partita.equivalence import compare
from partita.errors import PartitaError
from partita.graphs.program import Program
from partita.graphs.summation import summation_tolerance
from partita.plans import plan
from partita.policies import ByMode
from partita.testing.mode_subject import ModeSubject, means_the_same, wrapped
from partita.testing.nested_graphs import bodies_of, graphs_in
from partita.treatments import Mode

__all__ = ["MODE_FORM_LAWS"]


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
