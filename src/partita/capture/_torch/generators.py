"""Random number generators that are arguments of a model, which torch.export reads as constants."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind


def read_generators_from_inputs(exported: ExportedProgram) -> None:
    """Makes random operators use the generators that are passed to each call.

    torch.export (2.13) makes a constant of a generator that is an argument: each call uses the one of the trace.
    """
    inputs = {node.name: node for node in exported.graph.find_nodes(op="placeholder")}
    specs = exported.graph_signature.input_specs
    passed = {
        _address(generator): inputs[spec.arg.name]
        for spec in specs
        if spec.kind is InputKind.USER_INPUT
        and isinstance(generator := inputs[spec.arg.name].meta.get("val"), torch.Generator)
    }
    for spec in [spec for spec in specs if spec.kind is InputKind.CUSTOM_OBJ]:
        constant = exported.constants.get(str(spec.target))
        source = passed.get(_address(constant)) if isinstance(constant, torch.Generator) else None
        if source is not None:
            node = inputs[spec.arg.name]
            node.replace_all_uses_with(source)
            exported.graph.erase_node(node)
            specs.remove(spec)
            del exported.constants[str(spec.target)]
    exported.graph_module.recompile()


def _address(generator: Any) -> int:
    """Distinguishes generators: the constant of an export is another Python object for the same one."""
    return int(generator._cdata)
