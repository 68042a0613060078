"""Outlining: each region becomes a body and a call of it, in a new program that shares the state of the old one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from partita._torch.lazy_modules import LazyModule, lazy_module
from partita._torch.pause_gc import gc_paused
from partita.graphs.attributes import attribute_of, find
from partita.graphs.program import Program
from partita.graphs.summation import summation_tolerance, uses_autocast
from partita.graphs.tolerance import EXACT, Tolerance
from partita.regions.partition import Partition
from partita.rewrite.assembly import module_like
from partita.rewrite.bodies import Body, write_body
from partita.rewrite.operator_calls import PLAIN_CALL, call_through
from partita.rewrite.outer_graph import OuterGraph, OutlineStyle, Surroundings, style_for
from partita.rewrite.state import is_persistent, place, share_state
from partita.rewrite.unique_names import unique_names

__all__ = ["OutlineStyle", "Outlined", "Surroundings", "outline", "outlined"]


@dataclass(frozen=True, slots=True)
class Outlined:
    """The new module; for each region its attribute name and body; the old path of every module that moved."""

    graph_module: GraphModule
    names: tuple[str, ...]
    bodies: tuple[LazyModule, ...]
    moved: dict[str, str]
    #: How far gradients may move because nodes run in another order, or in other autocast blocks.
    tolerance: Tolerance


def outline(partition: Partition) -> Program:
    """A new program in which every region is one call of its body; what `Plan.apply` does before any treatment."""
    program, result = partition.program, outlined(partition)
    if program.export is not None:
        call_through(result.graph_module, dict.fromkeys(result.names, PLAIN_CALL))
    keys = program.state_keys.then(result.moved)
    return program.rewritten(result.graph_module, state_keys=keys, tolerance=result.tolerance)


def outlined(
    partition: Partition,
    *,
    names: Sequence[str] | None = None,
    order: Sequence[int] | None = None,
    style: OutlineStyle | None = None,
    surroundings: Surroundings | None = None,
) -> Outlined:
    """A program in which every region is one call.

    `names` are the attributes that hold the bodies; without them, the regions' names, numbered where they are taken.
    `order` may be any order that the partition allows. `surroundings` are the modes that calls and bodies find; without
    them, bodies set all modes themselves.
    """
    program = partition.program
    if names is None:
        names = unique_names([region.name for region in partition], program.graph_module)
    style, order = style or style_for(program), order or partition.order
    surroundings = surroundings or Surroundings.unknown(len(partition), program.modes.final)
    with gc_paused():
        numbers = partition.numbers()
        bodies = [
            write_body(partition, at, held, style.body, base=surroundings.inside[at]) for at, held in enumerate(numbers)
        ]
        outer = OuterGraph(partition, names, style, surroundings)
        graph = outer.write(order, bodies)
        base = module_like(program.graph_module, graph, restores_modes=outer.modes.has_switched)
        parts = dict(zip(names, _modules(partition, bodies, style), strict=True))
        moved = {
            f"{name}.{local}": original
            for name, body in zip(names, bodies, strict=True)
            for local, original in body.targets.items()
        }
        _place_state(program.graph_module, base, parts, moved, keeps_unused=style.keeps_unused_state)
    # What a body may change is told by the program that runs it.
    moves_sums = not program.is_body and (uses_autocast(program) or _is_reordered(partition, numbers, order))
    tolerance = summation_tolerance(program) if moves_sums else EXACT
    return Outlined(base, tuple(names), tuple(parts.values()), moved, tolerance)


def _modules(partition: Partition, bodies: Sequence[Body], style: OutlineStyle) -> list[LazyModule]:
    """A module for each body, with the modules that it calls."""
    restores_grad = style.body.caller_grad is not None
    root, owner = partition.program.graph_module, partition.owner
    impure = {owner[number] for number in partition.program.effects.effectful}
    modules = []
    for at, body in enumerate(bodies):
        module = lazy_module(
            body.graph,
            training=root.training,
            restores_modes=body.switches_modes,
            restores_grad=body.switches_modes and restores_grad,
            is_impure=at in impure,
            is_part=True,
        )
        for local, original in body.targets.items():
            place(module, local, root.get_submodule(original))
        modules.append(module)
    return modules


def _place_state(
    root: GraphModule, base: GraphModule, parts: dict[str, LazyModule], moved: dict[str, str], *, keeps_unused: bool
) -> None:
    """Puts parts and state where the outer graph names them: short paths first, then in graph order, like torch."""
    named = {str(node.target): node for node in base.graph.nodes if node.op in ("get_attr", "call_module")}
    if keeps_unused:
        share_state(root, base, without=frozenset(moved.values()) - named.keys())
    for path, node in sorted(named.items(), key=lambda entry: entry[0].count(".")):
        if path in parts:
            place(base, path, parts[path])
        elif find(base, path) is None:
            place(base, path, attribute_of(root, node), persistent=is_persistent(root, path))


def _is_reordered(partition: Partition, numbers: Sequence[Sequence[int]], order: Sequence[int]) -> bool:
    last = -1
    nodes, scalars = partition.program.index.nodes, partition.program.symbolic_scalars
    for vertex in order:
        found = numbers[vertex] if vertex < len(numbers) else (vertex - len(numbers),)
        held = [number for number in found if number not in scalars] if scalars else found
        if not held or nodes[held[0]].op == "get_attr":
            continue
        if held[0] < last:
            return True
        last = held[-1]
    return False
