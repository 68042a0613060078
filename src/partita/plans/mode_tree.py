"""The regions of a program by mode, as a printable tree with the operators of each."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from partita._plain_help import PlainHelp
from partita._torch.symbolic_shapes import SYMBOLIC
from partita.analysis.nodes import bodies_read, value_of
from partita.analysis.projections import is_projection
from partita.program.program import Program
from partita.rewrite.inline import inline
from partita.rewrite.mode_nodes import runs_body, setting_of
from partita.rewrite.wrap_modes import wrap_modes


@final
@dataclass(frozen=True, slots=True)
class ModeTree(metaclass=PlainHelp):
    """What one region sets, the names of all operators in it, in order, and the regions nested in it."""

    sets: str
    operators: tuple[str, ...]
    regions: tuple[ModeTree, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.sets}: {_summary(self.operators)}"
        for count, region in enumerate(self.regions, 1):
            first, *others = region._lines()
            yield f"+- {first}"
            yield from (f"{'|  ' if count < len(self.regions) else '   '}{line}" for line in others)


def mode_tree(program: Program | GraphModule | ExportedProgram) -> ModeTree:
    """The tree of the modes that a program sets, by toggles or by operators.

    The root stands for the modes that the program is called under. Reading an item or a size is no operator here.
    """
    return _tree("the caller's modes", wrap_modes(inline(Program.of(program))).graph_module)


def _tree(sets: str, module: GraphModule) -> ModeTree:
    operators: list[str] = []
    regions: list[ModeTree] = []
    mutated: dict[Node, bool] = {}
    for node in module.graph.nodes:
        setting = setting_of(node)
        inner = [_tree(str(setting), body) for _, body in bodies_read(module, node.all_input_nodes)]
        if setting is not None:
            regions += inner
        else:
            # An operator that runs a body without setting a mode, a `cond` say, is transparent.
            regions += [region for tree in inner for region in tree.regions]
            if runs_body(node) is None and _is_operator(node, module, mutated):
                operators.append(node.name)
        operators += [name for tree in inner for name in tree.operators]
    return ModeTree(sets, tuple(operators), tuple(regions))


def _is_operator(node: Node, module: GraphModule, mutated: dict[Node, bool]) -> bool:
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    return not (_takes_result(node) or is_projection(node, module, mutated) or isinstance(value_of(node), SYMBOLIC))


def _takes_result(node: Node) -> bool:
    """Whether a node takes an item out of the result of a body, in a graph without traced values too."""
    return node.target is operator.getitem and any(runs_body(made) is not None for made in node.all_input_nodes)


def _summary(names: tuple[str, ...]) -> str:
    if not names:
        return "no operators"
    ends = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
    return f"{len(names)} {'operator' if len(names) == 1 else 'operators'}, {ends}"
