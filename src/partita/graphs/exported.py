"""Exported programs: what one holds beside its graph, and putting it together again around a new graph."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind
from torch.fx import Graph, GraphModule, Node

from partita._torch.export_guards import guards_of, set_guards
from partita._torch.lazy_modules import generate_code
from partita._torch.pause_gc import gc_paused
from partita.errors import SignatureError
from partita.graphs.decomposition import ModeKeepingProgram
from partita.graphs.exported_graph import exported_graph
from partita.graphs.module_signatures import fitting_calls

__all__ = ["ExportRecord", "check_signature", "following"]


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
    #: Conditions on sizes beside the ranges of symbols, as source text.
    guards: Sequence[str] = ()

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
            guards=guards_of(exported),
        )

    def following(self, graph: Graph) -> ExportRecord:
        """The record for a rewritten graph."""
        return replace(self, signature=following(self.signature, graph))

    @gc_paused()
    def around(self, graph_module: GraphModule) -> ModeKeepingProgram:
        """An exported program with a copy of this graph, checked by torch's verifier; tensors are shared."""
        check_signature(graph_module.graph, self.signature)
        graph, attributes = exported_graph(graph_module, taken=self._folders())
        _check_tokens(self.signature, attributes)
        exported = ModeKeepingProgram(
            root=attributes,
            graph=graph,
            graph_signature=_copied(self.signature),
            state_dict=dict(self.state),
            range_constraints=dict(self.ranges),
            module_call_graph=fitting_calls(self.module_calls, graph),
            example_inputs=self.example_inputs,
            constants=dict(self.constants),
            verifiers=list(self.verifiers),
        )
        exported.graph_module.meta.update(graph_module.meta)
        exported.graph_module.training = graph_module.training
        set_guards(exported, self.guards)
        generate_code(attributes.values())  # Dynamo can trace a body, but not how its code is generated.
        return exported

    def _folders(self) -> set[str]:
        """Every part of a path that a module, a parameter, a buffer or a constant of the model has."""
        paths = (*self.state, *self.constants, *(call.fqn for call in self.module_calls))
        return {part for path in paths for part in path.split(".")}


def following(signature: ExportGraphSignature, graph: Graph) -> ExportGraphSignature:
    """The signature for a rewritten graph: a copy in which each output goes by the name of what now gives it."""
    copied = _copied(signature)
    for spec, value in zip(copied.output_specs, _returned(graph), strict=False):
        if isinstance(value, Node) and value.name != _name(spec.arg):
            spec.arg = replace(spec.arg, name=value.name)
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


def _check_tokens(signature: ExportGraphSignature, attributes: Mapping[str, Any]) -> None:
    """Raises where a body holds effects that tokens order: torch cannot take tokens out of a body."""
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
