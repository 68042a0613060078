"""A replacement for `torch.distributed._spmd.partial_lower`, which torch has removed.

It lowers what a backend supports, in place, and runs the rest eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.fx import GraphModule, Node

from partita._torch.gc_pause import gc_paused
from partita._torch.nn_modules import StandsForBody
from partita.analysis.modes import Mode
from partita.analysis.nodes import find
from partita.backends.backend import Backend, find_backend
from partita.compat._fused_groups import checked_module, free_names
from partita.compat._lower_in_place import commit, prepare
from partita.errors import CallbackError, OptionError
from partita.lowering.lower import Lower
from partita.plans.report import excluded
from partita.policies.by_capability import ByCapability
from partita.policies.legalize import Piece, assignable, call_user_function, legal_partition, unassigned
from partita.program.program import Program
from partita.regions import Partition, Region

__all__ = ["MIN_ATEN_OPS_TO_LOWER", "partial_lower"]


#: Fewer operators than this are not worth a call of compiled code.
MIN_ATEN_OPS_TO_LOWER = 10

#: Operators that torch's partial lowering refused for every backend: fused Adam, and its step counters.
_FUSED_ADAM = frozenset(
    (
        torch.ops.aten._fused_adam.default,
        torch.ops.aten._fused_adam_.default,
        torch.ops.aten._foreach_add.Scalar,
        torch.ops.aten._foreach_add_.Scalar,
    )
)

log = logging.getLogger(__name__)


@gc_paused()
def partial_lower(
    gm: GraphModule,
    node_predicate: Callable[[Node], bool] = lambda node: True,
    subgraph_predicate: Callable[[list[Node]], bool] = lambda nodes: True,
    dumper: Callable[[str], str] = lambda subgraph: "subgraph",
    *,
    contiguous: bool = True,
    backend: str | Backend = "inductor",
    strict: bool = False,
) -> GraphModule:
    """`gm` itself, in which what the backend and the predicates accept is compiled when it is first called.

    Contiguous runs of accepted nodes become submodules `subgraph_<i>`, or, with `contiguous=False`, the fewest groups
    that may run at once. One with fewer than `MIN_ATEN_OPS_TO_LOWER` operators of ATen stays as it is. `dumper` gets
    each subgraph as text and returns the tag that its call carries and a profiler shows. What cannot be compiled runs
    eagerly, with a warning, and is listed in `gm.meta["partita_lowering"].failures`; with `strict`, `LoweringError` is
    raised. Works in place: all of it is done, or nothing.
    """
    program = Program.of(_checked(gm, node_predicate=node_predicate, subgraph_predicate=subgraph_predicate))
    if not callable(dumper):
        raise OptionError(f"dumper is called with the text of a subgraph and returns a tag; {dumper!r} is no function")
    compiler = find_backend(backend)
    refusal = _refusal(gm, compiler, node_predicate)
    find_regions = _contiguous_runs if contiguous else _groups
    partition = find_regions(program, refusal, subgraph_predicate)

    def lower(region: Region, body: GraphModule) -> Lower:
        return Lower(compiler, strict=strict, tag=_tag(dumper, region, body))

    if len(partition):
        commit(
            [prepare(partition, free_names(gm, "subgraph_", len(partition)), lower, is_tagged=True)], edits_graphs=True
        )
    return gm


def _checked(gm: object, **predicates: object) -> GraphModule:
    for name, predicate in predicates.items():
        if not callable(predicate):
            raise OptionError(f"{name} is a function that says whether to lower, not {predicate!r}")
    return checked_module(gm, "what is lowered in place is")


def _refusal(gm: GraphModule, backend: Backend, node_predicate: Callable[[Node], bool]) -> Callable[[Node], str | None]:
    def refusal(node: Node) -> str | None:
        if node.op == "call_module" and isinstance(find(gm, str(node.target)), StandsForBody):
            return "it is lowered already"
        if node.op == "call_function" and node.target in _FUSED_ADAM:
            return "fused adam is not supported yet"
        reason = call_user_function(backend.refusal, node, node=node, role=f"refusal of backend {backend.name!r}")
        if reason is None and not call_user_function(node_predicate, node, node=node, role="node predicate"):
            return "user predicate"
        return reason

    return refusal


def _contiguous_runs(
    program: Program, refusal: Callable[[Node], str | None], subgraph_predicate: Callable[[list[Node]], bool]
) -> Partition:
    """A partition with a region for each run of accepted nodes between two refused ones, in graph order."""
    runs = [run for run in _runs(program, refusal) if _is_worthwhile(run, subgraph_predicate)]
    places, can_be_assigned = unassigned(program), frozenset(assignable(program))
    for place, run in enumerate(runs):
        for node in run:
            number = program.index.number[node]
            if number in can_be_assigned:
                places[number] = place
    return legal_partition(program, places, [Piece(f"subgraph_{place}") for place in range(len(runs))])


def _groups(
    program: Program, refusal: Callable[[Node], str | None], subgraph_predicate: Callable[[list[Node]], bool]
) -> Partition:
    def worthwhile(region: Region) -> bool:
        return _is_worthwhile(region.nodes, subgraph_predicate)

    partition = ByCapability(refusal, worthwhile=worthwhile)(program)
    for reason in excluded(partition) if log.isEnabledFor(logging.INFO) else ():
        log.info("partial_lower: %s", reason)
    return partition


def _is_worthwhile(nodes: Sequence[Node], subgraph_predicate: Callable[[list[Node]], bool]) -> bool:
    if not call_user_function(subgraph_predicate, list(nodes), node=nodes[0], role="subgraph predicate"):
        return False
    return sum(str(node.target).startswith("aten.") for node in nodes) >= MIN_ATEN_OPS_TO_LOWER


def _tag(dumper: Callable[[str], str], region: Region, body: GraphModule) -> str:
    tag = call_user_function(dumper, str(body.graph), node=region.nodes[0], role="dumper")
    if not isinstance(tag, str):
        raise CallbackError(f"the dumper returned {tag!r}; it must return a tag, which is text; nothing was changed")
    return tag


def _runs(program: Program, refusal: Callable[[Node], str | None]) -> list[list[Node]]:
    """The runs, each in one mode, with their attributes; `refusal` is called once per node, in graph order.

    Mode toggles are not queried: a toggle that changes the mode ends a run.
    """
    runs: list[list[Node]] = [[]]
    mode: Mode | None = None
    for node, at in _nodes_with_modes(program):
        reason = refusal(node)
        if reason is None and None not in (mode, at) and at != mode:
            _break(runs, node, f"it runs under {at}, and what is before it under {mode}")
            mode = at
        if reason is None:
            runs[-1].append(node)
            mode = at if mode is None else mode
        else:
            _break(runs, node, reason)
            mode = None
    return [run for run in runs if _holds_operator(run)]


def _nodes_with_modes(program: Program) -> Iterator[tuple[Node, Mode | None]]:
    """The nodes except inputs, output and toggles; the mode is None for what does the same in every mode."""
    modes, scalars = program.modes, program.symbolic_scalars
    for number, node in enumerate(program.index.nodes):
        if node.op in ("placeholder", "output") or number in modes.toggles:
            continue
        has_mode = node.op != "get_attr" and number not in scalars
        yield node, modes.at(number) if has_mode else None


def _break(runs: list[list[Node]], node: Node, reason: str) -> None:
    if _holds_operator(runs[-1]):
        log.warning("partial_lower: graph break at %s. Reason: %s", node, reason)
    runs.append([])


def _holds_operator(run: Sequence[Node]) -> bool:
    return any(node.op != "get_attr" for node in run)
