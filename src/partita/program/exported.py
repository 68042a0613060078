"""Exported programs: what one holds beside its graph, and how it is rebuilt around a rewritten graph.

The rebuilt program survives saving, loading and unflattening, and keeps the meaning of its modes when decomposed.
"""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import Graph, GraphModule, Node
from torch.utils.weak import WeakIdKeyDictionary

from partita._torch.fake_tensors import shared_fake_mode, to_fake
from partita._torch.fx.graph_writer import GraphWriter
from partita._torch.fx.lazy_graph_module import exempt_from_dce, generate_code, lazy_module, restore_levels
from partita._torch.gc_pause import gc_paused
from partita.analysis.nodes import ModuleStack, attribute_of, returned_by
from partita.errors import SignatureError
from partita.program._torch.guards import callers_take_guards, check_inputs, guards_of, set_guards


class ModeKeepingProgram(ExportedProgram):
    """An exported program that keeps its modes when decomposed, and whose module checks inputs without generated code.

    `ExportedProgram.run_decompositions` inlines the body of a mode operator and drops the mode: afterwards a weight
    that no_grad had frozen gets gradients (torch 2.13). This class first dissolves modes into casts and `detach`.
    """

    def module(self, check_guards: bool = True) -> GraphModule:  # noqa: FBT001, FBT002  The signature is torch's.
        """The program as a module that is called like the model."""
        module = super().module(check_guards=False)
        assert isinstance(module, GraphModule)
        if check_guards and callers_take_guards():
            check_inputs(module, self)
            module.recompile()
        restore_levels(module)
        return module

    def run_decompositions(
        self,
        decomp_table: dict[Any, Callable[..., Any]] | None = None,
        decompose_custom_triton_ops: bool = False,  # noqa: FBT001, FBT002  The signature is torch's.
    ) -> ExportedProgram:
        """The program decomposed by the table, with `detach` wherever gradients must not flow."""
        from partita.program.program import Program

        return Program.of(self).decomposed(decomp_table, decompose_custom_triton_ops=decompose_custom_triton_ops)


@final
@dataclass(frozen=True, slots=True)
class ExportRecord:
    """An exported program without its graph; shared by all programs derived from it."""

    signature: ExportGraphSignature
    state: Mapping[str, Any]
    constants: Mapping[str, Any]
    ranges: Mapping[Any, Any]
    module_calls: Sequence[Any]
    example_inputs: Any
    verifiers: Sequence[Any]
    #: Conditions on sizes beside the ranges of symbols, as source text.
    guards: Sequence[str] = ()

    @classmethod
    def of(cls, exported: ExportedProgram) -> ExportRecord:
        """The record of an exported program; raises if its signature does not match its graph."""
        check_signature(exported.graph, exported.graph_signature)
        return cls(
            exported.graph_signature,
            exported.state_dict,
            exported.constants,
            exported.range_constraints,
            exported.module_call_graph,
            exported.example_inputs,
            exported.verifiers,
            guards=guards_of(exported),
        )

    def following(self, graph: Graph) -> ExportRecord:
        """The record for a rewritten graph."""
        return replace(self, signature=following(self.signature, graph))

    @gc_paused()
    def around(self, graph_module: GraphModule) -> ModeKeepingProgram:
        """An exported program with a copy of this graph, checked by torch's verifier; tensors are shared."""
        check_signature(graph_module.graph, self.signature)
        paths = (*self.state, *self.constants, *(call.fqn for call in self.module_calls))
        graph, attributes = exported_graph(graph_module, taken={part for path in paths for part in path.split(".")})
        _check_tokens(self.signature, attributes)
        signature, state, constants = _copied(self.signature), dict(self.state), dict(self.constants)
        constants.update(lift_tensors(graph, attributes, signature))
        for path in drop_folded(graph, signature):
            state.pop(path, None), constants.pop(path, None)
        exported = ModeKeepingProgram(
            root=attributes,
            graph=graph,
            graph_signature=signature,
            state_dict=state,
            range_constraints=dict(self.ranges),
            module_call_graph=fitting_calls(self.module_calls, graph),
            example_inputs=self.example_inputs,
            constants=constants,
            verifiers=list(self.verifiers),
        )
        exported.graph_module.meta.update(graph_module.meta)
        exported.graph_module.training = graph_module.training
        set_guards(exported, self.guards)
        generate_code(attributes.values())  # Dynamo can trace a body, but not how its code is generated.
        return exported


def following(signature: ExportGraphSignature, graph: Graph) -> ExportGraphSignature:
    """The signature for a rewritten graph: a copy in which each output is named after the node that now computes it."""
    copied = _copied(signature)
    for spec, value in zip(copied.output_specs, returned_by(graph), strict=False):
        if isinstance(value, Node) and value.name != _name(spec.arg):
            spec.arg = replace(spec.arg, name=value.name)
    return copied


def check_signature(graph: Graph, signature: ExportGraphSignature) -> None:
    """Raises if the inputs or outputs that a signature names are not those of the graph, in order."""
    inputs = [node.name for node in graph.find_nodes(op="placeholder")]
    _check_names("inputs", inputs, [_name(spec.arg) for spec in signature.input_specs])
    outputs = [value.name if isinstance(value, Node) else None for value in returned_by(graph)]
    named = [_name(spec.arg) for spec in signature.output_specs]
    constants = [at for at, name in enumerate(outputs) if name is None and at < len(named)]
    for at in constants:
        named[at] = None
    _check_names("outputs", outputs, named)


def _check_tokens(signature: ExportGraphSignature, attributes: Mapping[str, Any]) -> None:
    """Raises if a body has effects that tokens order: torch cannot thread tokens through a body."""
    tokens = [_name(spec.arg) for spec in signature.input_specs if spec.kind is InputKind.TOKEN]
    bodies = {path: body for path, body in attributes.items() if tokens and isinstance(body, GraphModule)}
    for path, body in bodies.items():
        held = [node.name for node in body.graph.nodes if getattr(node.target, "__name__", "") == "with_effects"]
        if held:
            raise SignatureError(
                f"body {path!r} holds {', '.join(map(repr, held))}, whose effects are ordered by the token "
                f"{tokens[0]!r}, and no token can enter a body; leave these nodes out of the regions, or cut the "
                "program before it is decomposed"
            )


def _check_names(what: str, found: Sequence[str | None], named: Sequence[str | None]) -> None:
    if list(found) == list(named):
        return
    at = next((k for k, (a, b) in enumerate(zip(found, named, strict=False)) if a != b), min(len(found), len(named)))
    ours = repr(found[at]) if at < len(found) else "nothing"
    theirs = repr(named[at]) if at < len(named) else "nothing"
    raise SignatureError(
        f"the signature does not fit the graph: of its {what}, number {at} is {ours} in the graph ({len(found)} in all)"
        f" and {theirs} in the signature ({len(named)} in all); take the signature that came with this graph"
    )


def _name(argument: Any) -> str | None:
    """The node that an argument of a signature names; None for a constant."""
    return getattr(argument, "name", None)


def _copied(signature: ExportGraphSignature) -> ExportGraphSignature:
    """A copy, since torch's passes rename entries in place; constants in it are shared."""
    return ExportGraphSignature(
        input_specs=[replace(spec, arg=copy.copy(spec.arg)) for spec in signature.input_specs],
        output_specs=[replace(spec, arg=copy.copy(spec.arg)) for spec in signature.output_specs],
    )


def lift_tensors(graph: Graph, attributes: dict[str, Any], signature: ExportGraphSignature) -> dict[str, Tensor]:
    """Makes inputs of the tensors that nodes read as attributes, as in every exported program; returns them by name."""
    lifted: dict[str, Tensor] = {}
    reads = [node for node in graph.find_nodes(op="get_attr") if isinstance(attributes[str(node.target)], Tensor)]
    if not reads:
        return lifted
    inputs = graph.find_nodes(op="placeholder")
    mode = shared_fake_mode([node.meta.get("val") for node in inputs])
    own = (InputKind.TOKEN, InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    place = sum(spec.kind in own for spec in signature.input_specs)
    made: dict[str, Node] = {}
    for node in reads:
        target = str(node.target)
        if target not in made:
            lifted[target] = attributes.pop(target)
            with graph.inserting_before(inputs[place] if place < len(inputs) else next(iter(graph.nodes))):
                made[target] = graph.placeholder(f"c_{target}")
            made[target].meta["val"] = to_fake(lifted[target], mode)
            argument = TensorArgument(name=made[target].name)
            signature.input_specs.insert(place + len(made) - 1, InputSpec(InputKind.CONSTANT_TENSOR, argument, target))
        node.replace_all_uses_with(made[target])
        graph.erase_node(node)
    return lifted


#: The key in the metadata of a call for the names of inputs whose values are inside of it.
FOLDED = "partita_folded"


def drop_folded(graph: Graph, signature: ExportGraphSignature) -> list[str]:
    """Removes the parameters and buffers that are inside of calls and that no node reads; returns their paths."""
    folded = {name for node in graph.nodes for name in node.meta.get(FOLDED, ())}
    inputs = graph.find_nodes(op="placeholder") if folded else ()
    gone = {node.name: node for node in inputs if node.name in folded and not node.users}
    specs = [spec for spec in signature.input_specs if _name(spec.arg) in gone]
    for spec in specs:
        signature.input_specs.remove(spec)
        graph.erase_node(gone[str(_name(spec.arg))])
    return [str(spec.target) for spec in specs]


# The graph, named so that saving, loading and unflattening preserve it.


_NUMBER = re.compile(r"_\d+$")


def exported_graph(graph_module: GraphModule, *, taken: Collection[str]) -> tuple[Graph, dict[str, Any]]:
    """A copy of a graph with the same node names, and what its nodes read, by target.

    Bodies are copied too, since `ExportedProgram.module` removes nodes from them. A body is renamed if its name is in
    `taken`, or collides with that of a node: torch.export.load names the node that reads a body after its attribute,
    which would leave two nodes with one name.
    """
    graph, attributes = _Copying().copied(graph_module, taken)
    settle_stacks(graph)
    return graph, attributes


_STACK = "nn_module_stack"


def settle_stacks(graph: Graph) -> None:
    """Keeps the nodes of each call of a module in one run, as `torch.export.unflatten` requires.

    A node that would go back into a call which has ended stays in the call around it; an item goes with its source.
    """
    # Calls are numbered by their parent: keys of whole stacks would take memory quadratic in the depth.
    numbers: dict[tuple[int, tuple[str, Any]], int] = {}
    current: list[int] = []
    ended: set[int] = set()
    for node in graph.nodes:
        source = node.args[0] if node.target is operator.getitem else None
        stack = (source if isinstance(source, Node) else node).meta.get(_STACK) or node.meta.get(_STACK)
        if not stack or node.op in ("placeholder", "output"):
            continue
        calls = tuple(stack.items())
        if calls[0][1][0] != "":  # Nodes that torch adds belong wherever they stand.
            continue
        running, number = list[int](), 0
        for call in calls:
            number = numbers.setdefault((number, call), len(numbers) + 1)
            if number in ended:
                break
            running.append(number)
        ended.update(set(current).difference(running))
        current = running
        node.meta[_STACK] = dict(calls[: len(running)])


class _Copying:
    """Copies graphs; a body that is read twice is copied once."""

    def __init__(self) -> None:
        self.bodies: dict[GraphModule, GraphModule] = {}

    def copied(self, source: GraphModule, taken: Collection[str] = ()) -> tuple[Graph, dict[str, Any]]:
        graph = _copy_of(source.graph)
        unsafe = {*taken, *(_base(node.name) for node in graph.nodes if not _reads(node) and not _calls_body(node))}
        used = set(unsafe)
        names: dict[str, str] = {}
        bodies: dict[GraphModule, str] = {}
        attributes: dict[str, Any] = {}
        for node in filter(_reads, graph.nodes):
            path, value = str(node.target), attribute_of(source, node)
            if isinstance(value, GraphModule) and value in bodies:
                # A body that several calls share has one name, since files hold bodies by name.
                names[path] = bodies[value]
            if path not in names:
                moves = _is_unsafe(path, unsafe) if isinstance(value, GraphModule) else "." in path
                names[path] = _free(node.name, used) if moves else path
                attributes[names[path]] = self._own(value)
                used.add(names[path])
                if isinstance(value, GraphModule):
                    bodies[value] = names[path]
            node.target = names[path]
        return graph, attributes

    def _own(self, value: Any) -> Any:
        if not isinstance(value, GraphModule):
            return value
        if value not in self.bodies:
            graph, attributes = self.copied(value)
            exempt_from_dce(graph)
            made = lazy_module(graph, training=value.training, is_part=True)
            made.meta.update(value.meta)
            for name, attribute in attributes.items():
                setattr(made, name, attribute)
            self.bodies[value] = made
        return self.bodies[value]


def _copy_of(graph: Graph) -> Graph:
    # A deep copy would rename nodes that have the name of a Python builtin, such as `input`.
    writer = GraphWriter.like(graph)
    nodes = list(graph.nodes)
    names = [node.name for node in nodes]
    writer.names.reserve(names)
    writer.copy_run(nodes, {}, names)
    return writer.close()


def _reads(node: Node) -> bool:
    return node.op in ("get_attr", "call_module")


def _calls_body(node: Node) -> bool:
    """Whether a node calls a body; torch.export.load does not preserve the name of such a node."""
    return any(isinstance(value, Node) and value.op == "get_attr" for value in node.args)


def _is_unsafe(path: str, unsafe: Collection[str]) -> bool:
    return "." in path or path in unsafe or _base(path) in unsafe


def _base(name: str) -> str:
    """A name without its numeric suffix, which torch.export.load increments on a collision."""
    return _NUMBER.sub("", name)


def _free(name: str, unsafe: Collection[str]) -> str:
    while _is_unsafe(name, unsafe):
        name += "_"
    return name


# Call signatures of submodules, which `torch.export.unflatten` reads.


def fitting_calls(calls: Sequence[Any], graph: Graph) -> list[Any]:
    """A copy of the module calls, without the signatures that no longer match the graph.

    A region that crosses the boundary of a module hides values that its signature names. The signature of the program
    itself is always kept.
    """
    copied = [replace(call, signature=_copied_call_signature(call.signature)) for call in calls]
    named = [call for call in copied if call.fqn and call.signature is not None]
    if named:
        place = {node.name: at for at, node in enumerate(graph.nodes)}
        inside = _nodes_by_call(graph)
        for call in named:
            if not _fits(call.signature, inside.get(call.fqn, {}), place):
                call.signature = None
    return copied


def _copied_call_signature(signature: Any) -> Any:
    """A copy, since torch's passes rename arguments in place."""
    if signature is None:
        return None
    inputs, outputs = list(map(copy.copy, signature.inputs)), list(map(copy.copy, signature.outputs))
    return replace(signature, inputs=inputs, outputs=outputs)


def _nodes_by_call(graph: Graph) -> dict[str, dict[Node, None]]:
    """The nodes of each module call; repeated calls of a module have the suffix @number."""
    found: dict[str, dict[Node, None]] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        stack: ModuleStack = node.meta.get(_STACK) or {}
        for key, (path, _) in stack.items():
            _, again, number = key.partition("@")
            found.setdefault(f"{path}@{number}" if again else path, {})[node] = None
    return found


def _fits(signature: Any, inside: Mapping[Node, None], place: Mapping[str, int]) -> bool:
    """Whether a signature names every value that enters or leaves these nodes."""
    if not inside:
        return False
    first = place[next(iter(inside)).name]
    inputs, outputs = _names(signature.inputs), _names(signature.outputs)
    read = {node for user in inside for node in user.all_input_nodes if node.op != "placeholder"}
    entering = {node.name for node in read if node not in inside}
    leaving = {node.name for node in inside for user in node.users if user not in inside}
    are_inputs_known = entering <= inputs and all(place.get(name, first) < first for name in inputs)
    return are_inputs_known and leaving <= outputs <= place.keys()


def _names(arguments: Sequence[Any]) -> set[str]:
    """The nodes that a signature names; a constant has a value instead."""
    return {argument.name for argument in arguments if not hasattr(argument, "value")}


def file_of(tensor: Tensor) -> str | None:
    """The file that a constant was loaded from; None where that is unknown."""
    return _FILES.get(tensor)


def with_origin(exported: ExportedProgram, file: Path) -> ExportedProgram:
    """The program, after its constants are noted as those of a file."""
    _FILES.update((value, str(file)) for value in exported.constants.values() if isinstance(value, Tensor))
    return exported


_FILES: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
