"""Every text of a saved program, checked by what torch will do with it.

The rules are by field of torch's schema. A text in a field without a rule is a fault, so that what a newer schema adds
is refused until somebody has looked at it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from partita._torch.pt2_operators import operator_fault
from partita.graphs.archives.expressions import expression_fault, guard_fault
from partita.graphs.archives.texts import (
    Fault,
    free_fault,
    literal_fault,
    module_stack_fault,
    name_fault,
    path_fault,
)
from partita.graphs.archives.trees import input_tree_fault, tree_fault

__all__ = ["ProgramTexts", "texts_of"]


@dataclass
class ProgramTexts:
    """What a saved program names, and the faults in its texts, each with the text."""

    operators: dict[str, None] = field(default_factory=dict)
    custom_objects: dict[str, None] = field(default_factory=dict)
    expressions: int = 0
    guards: int = 0
    faults: dict[tuple[str, str, str], None] = field(default_factory=dict)


def texts_of(program: Any) -> ProgramTexts:
    """The texts of a program, or of the list of its tensors, as an object of torch's schema."""
    found = ProgramTexts()
    for path, text in _texts(program, type(program).__name__):
        _check(found, path, text)
    return found


def _check(found: ProgramTexts, path: str, text: Any) -> None:
    rule = _RULES.get(path)
    if rule is None:
        why = f"nothing is known of {path}, in which it stands"
    elif not isinstance(text, str):
        why = f"{path} is a text, and not {type(text).__name__}"
    else:
        why = rule(text) or ""
    if why:
        found.faults[path, str(text)[:200], why] = None
    if path in _OPERATORS:
        found.operators[str(text)] = None
    elif path in _CUSTOM_OBJECTS:
        found.custom_objects[str(text)] = None
    found.expressions += path == "SymExpr.expr_str"
    found.guards += path == "ExportedProgram.guards_code"


def _texts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every text with the field of the schema that it stands in; keys of mappings under a name of their own."""
    if dataclasses.is_dataclass(value):
        yield from _texts_of_fields(value, path)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{path}.keys", key
            own = f"{path}[{key}]"
            yield from _texts(item, own if own in _RULES else f"{path}.values")
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, path)
    elif value is not None and (path in _RULES or not isinstance(value, bool | int | float)):
        yield path, value


def _texts_of_fields(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    name = type(value).__name__
    if hasattr(type(value), "create"):  # A union: one field is set, and asking for another raises.
        owner = "Input" if path in _INPUTS else name
        yield from _texts(value.value, f"{owner}.{value.type}")
        return
    for each in dataclasses.fields(value):
        yield from _texts(getattr(value, each.name), f"{name}.{each.name}")


#: Constants among the inputs are compared with what is passed, in code that torch generates.
_INPUTS = frozenset(("Graph.inputs", "UserInputSpec.arg", "InputToConstantInputSpec.value"))
_OPERATORS = frozenset(("Node.target", "Argument.as_operator"))
_CUSTOM_OBJECTS = frozenset(("CustomObjArgument.class_fqn",))
_RULES: dict[str, Fault] = {
    **dict.fromkeys(
        (
            *(f"{kind}Argument.name" for kind in ("Tensor", "Token", "Graph", "CustomObj", "Named")),
            *(f"Sym{kind}Argument.as_name" for kind in ("Int", "Float", "Bool")),
            *(f"Graph.{kind}_values.keys" for kind in ("tensor", "sym_int", "sym_float", "sym_bool", "custom_obj")),
            *("Node.name", "Device.type", "InputToConstantInputSpec.name", "ModuleCallSignature.forward_arg_names"),
            *("NamedTupleDef.field_names", "PayloadMeta.path_name", "ExportedProgram.verifiers"),
        ),
        name_fault,
    ),
    **dict.fromkeys(
        (
            *("InputToParameterSpec.parameter_name", "InputToBufferSpec.buffer_name"),
            *("InputToTensorConstantSpec.tensor_constant_name", "InputToCustomObjSpec.custom_obj_name"),
            *("BufferMutationSpec.buffer_name", "ParameterMutationSpec.parameter_name"),
            *("GradientToParameterSpec.parameter_name", "GradientToUserInputSpec.user_input_name"),
            *("UserInputMutationSpec.user_input_name", "ModuleCallEntry.fqn", "PayloadConfig.config.keys"),
        ),
        path_fault,
    ),
    **dict.fromkeys(
        (
            *("Input.as_string", "Input.as_strings", "ConstantValue.as_string", "CustomObjArgument.class_fqn"),
            *("Argument.as_string_to_argument.keys", "GraphModule.treespec_namedtuple_fields.keys"),
            *("ExportedProgram.opset_version.keys", "Node.metadata.keys", "GraphModule.metadata.keys"),
        ),
        literal_fault,
    ),
    **dict.fromkeys(
        (
            *("Argument.as_string", "Argument.as_strings", "Node.metadata.values", "GraphModule.metadata.values"),
            "ExportedProgram.torch_version",
        ),
        free_fault,
    ),
    **dict.fromkeys(_OPERATORS, operator_fault),
    "Node.metadata[nn_module_stack]": module_stack_fault,
    "SymExpr.expr_str": expression_fault,
    "ExportedProgram.guards_code": guard_fault,
    # torch counts up to the number in the name of a symbol, which expressions bound.
    "ExportedProgram.range_constraints.keys": expression_fault,
    "ModuleCallSignature.in_spec": input_tree_fault,
    "ModuleCallSignature.out_spec": tree_fault,
}
