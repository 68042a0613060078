"""Exported programs: what one holds beside its graph, and putting it together again around a new graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import Graph, GraphModule, Node

from partita.errors import SignatureError

__all__ = ["ExportRecord", "check_signature", "following"]


def _as_it_is(program: Any) -> Any:
    return program


@final
@dataclass(frozen=True, slots=True)
class ExportRecord:
    """Everything of an exported program but its graph; shared by all programs that are made from it."""

    signature: ExportGraphSignature
    state: Mapping[str, Any]
    constants: Mapping[str, Any]
    ranges: Mapping[Any, Any]
    module_calls: Sequence[Any]
    example_inputs: Any
    verifiers: Sequence[Any]
    #: Writes a program down as torch.export wants it; whoever switches modes in a graph by toggles gives one.
    finish: Callable[[Any], Any] = _as_it_is
    #: The class of the exported program that is made.
    kind: type[ExportedProgram] = ExportedProgram

    @classmethod
    def of(cls, exported: ExportedProgram) -> ExportRecord:
        """The record of an exported program whose signature fits its graph."""
        check_signature(exported.graph, exported.graph_signature)
        return cls(
            exported.graph_signature,
            exported.state_dict,
            exported.constants,
            exported.range_constraints,
            exported.module_call_graph,
            exported.example_inputs,
            exported.verifiers,
        )

    def following(self, graph: Graph) -> ExportRecord:
        """The record for a rewritten graph."""
        return replace(self, signature=following(self.signature, graph))

    def around(self, graph_module: GraphModule) -> ExportedProgram:
        """An exported program with this graph, checked by torch's verifier; tensors are shared."""
        check_signature(graph_module.graph, self.signature)
        return self.kind(
            root=graph_module,
            graph=graph_module.graph,
            graph_signature=_copied(self.signature),
            state_dict=dict(self.state),
            range_constraints=dict(self.ranges),
            module_call_graph=copy.deepcopy(list(self.module_calls)),
            example_inputs=self.example_inputs,
            constants=dict(self.constants),
            verifiers=list(self.verifiers),
        )


def following(signature: ExportGraphSignature, graph: Graph) -> ExportGraphSignature:
    """The signature for a rewritten graph: a copy in which each output goes by the name of what now gives it."""
    copied = _copied(signature)
    for spec, value in zip(copied.output_specs, _returned(graph), strict=False):
        if isinstance(value, Node) and value.name != _name(spec.arg):
            spec.arg = replace(spec.arg, name=value.name)  # type: ignore[type-var]
    return copied


def check_signature(graph: Graph, signature: ExportGraphSignature) -> None:
    """Raises where the inputs and outputs that a signature names are not those of the graph, in this order."""
    inputs = [node.name for node in graph.find_nodes(op="placeholder")]
    _check_names("inputs", inputs, [_name(spec.arg) for spec in signature.input_specs])
    outputs = [value.name if isinstance(value, Node) else None for value in _returned(graph)]
    named = [_name(spec.arg) for spec in signature.output_specs]
    constants = [at for at, given in enumerate(outputs) if given is None and at < len(named)]
    for at in constants:
        named[at] = None
    _check_names("outputs", outputs, named)


def _returned(graph: Graph) -> Sequence[Any]:
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0] if output.args else ()
    return returned if isinstance(returned, tuple | list) else (returned,)


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
    """The node that an argument of a signature names; constants name none."""
    return getattr(argument, "name", None)


def _copied(signature: ExportGraphSignature) -> ExportGraphSignature:
    """A signature of its own, since torch's passes rename entries in place; constants in it are shared."""
    return ExportGraphSignature(
        input_specs=[replace(spec, arg=copy.copy(spec.arg)) for spec in signature.input_specs],
        output_specs=[replace(spec, arg=copy.copy(spec.arg)) for spec in signature.output_specs],
    )
