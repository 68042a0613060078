"""A saved program built from data: its graph, signature, calling convention with its pytrees, and guards."""

from __future__ import annotations

import math
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from enum import Enum
from functools import cache
from typing import Any

from torch import Size, SymBool, SymFloat, SymInt, Tensor
from torch._export import verifier
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export import graph_signature as signatures
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree

from partita._torch.expressions import (
    FUNCTIONS,
    Expression,
    ExpressionError,
    InputPath,
    Operation,
    Read,
    Symbol,
    parsed,
    printed,
)
from partita.analysis.nodes import returned_by, value_of
from partita.errors import SignatureError
from partita.program._torch.guards import set_guards
from partita.program.archives._torch.graph import GraphReader, annotations_of, value_name
from partita.program.archives._torch.symbols import Symbols
from partita.program.archives.data import Data
from partita.program.exported import ModeKeepingProgram, check_signature

#: The version of torch's schema that torch 2.11 and later write.
_MAJOR_VERSION = 8
#: A bound on torch's work for mutations: it scans all inputs and outputs for each of them.
_MOST_MUTATIONS = 20_000_000
#: A bound on torch's work for paths: for each tensor it looks at all modules beside those that it is in (torch 2.13).
_MOST_SIBLINGS = 100_000_000
#: The most letters of all conditions together.
_MOST_LETTERS = 400_000
#: The most terms of one condition, if it is multiplied out as torch does it, and a bound on torch's work for all.
_MOST_TERMS, _MOST_WORK = 256, 100_000


class SavedProgram:
    """A program in an archive, as JSON."""

    def __init__(self, text: bytes) -> None:
        self._data = data = Data.of(text)
        self._text_bytes = len(text)
        version = data["schema_version"]
        self.schema_version = f"{version['major'].integer()}.{version['minor'].integer()}"
        self.torch_version = data["torch_version"].message()[:40] if "torch_version" in data.value else "unknown"
        if version["major"].value != _MAJOR_VERSION:
            version.malformed(
                f"it has schema version {self.schema_version}, and {_MAJOR_VERSION}.x is read here; load it with the "
                f"torch that saved it ({self.torch_version})"
            )
        #: Every operator that the program names; filled by `exported`.
        self.operators: dict[str, None] = {}

    def exported(
        self, state: dict[str, Any], constants: dict[str, Any], operators: Collection[str] = ()
    ) -> ExportedProgram:
        """The exported program with these parameters, buffers and constants."""
        data = self._data["graph_module"]
        inputs = [_input_spec(spec) for spec in data["signature"]["input_specs"]]
        outputs = [_output_spec(spec) for spec in data["signature"]["output_specs"]]
        _check_paths([spec.target for spec in inputs if spec.target is not None], data["signature"])
        _check_state(inputs, state, constants, data["signature"])
        names = {place: spec.arg.name for place, spec in enumerate(inputs) if isinstance(spec.arg, ConstantArgument)}
        calls = [_module_call(entry) for entry in data["module_call_graph"]]
        if not calls or calls[0].fqn or calls[0].signature is None:
            data["module_call_graph"].malformed("it does not begin with how the program is called")
        _check_leaves(calls[0].signature, inputs, outputs, data["signature"])
        mutations = sum(spec.target is not None for spec in outputs)
        if mutations * (len(inputs) + len(outputs)) > _MOST_MUTATIONS:
            data["signature"].malformed(f"{mutations} outputs of {len(outputs)} are mutations, which takes too long")
        guards = _conditions(self._data.get("guards_code"))
        symbols = Symbols(self._data.get("range_constraints"), text_bytes=self._text_bytes)
        reader = GraphReader(symbols, operators)
        root, graph = reader.read(data["graph"], names)
        self.operators = reader.met
        _follow_constants(inputs, names, graph)
        for spec in inputs:  # A body is a module with its own attributes.
            if spec.target is not None and spec.target.partition(".")[0] in reader.bodies:
                data["signature"].refuse(f"{spec.target[:100]!r} is no path of a parameter: the graph has such a body")
        annotations = {}
        if (metadata := data.get("metadata")) is not None and (custom := metadata.get("custom")) is not None:
            annotations["custom"] = annotations_of(custom)
        with warnings.catch_warnings():
            # Where the code of a graph is none, torch goes on with a module that cannot be called.
            warnings.filterwarnings("error", "Unable to execute the generated python source code")
            made = ModeKeepingProgram(
                root=root,
                graph=graph,
                graph_signature=signatures.ExportGraphSignature(input_specs=inputs, output_specs=outputs),
                state_dict=state,
                range_constraints=symbols.ranges(),
                module_call_graph=calls,
                example_inputs=None,
                constants=constants,
                verifiers=list(dict.fromkeys(map(_verifier, self._data["verifiers"]))),  # Each walks the whole graph.
            )
        made.graph_module.meta.update(annotations)
        _check_signature(made, data["signature"])
        set_guards(made, guards)
        return made


def _check_signature(made: ExportedProgram, data: Data) -> None:
    """Raises if the signature names other inputs, outputs or tensors than the graph: torch does not look at all."""
    try:
        check_signature(made.graph, made.graph_signature)
    except SignatureError as error:
        data.malformed(str(error))
    values = map(value_of, made.graph.find_nodes(op="placeholder"))
    for value, spec in zip(values, made.graph_signature.input_specs, strict=True):
        _check_kind(value, spec, data)
        held = None if spec.target is None else made.state_dict.get(spec.target, made.constants.get(spec.target))
        if held is not None and (_layout(value) is None or _layout(value) != _layout(held)):
            where = f"{spec.target[:100]!r} is not the tensor that the graph reads"
            data.malformed(f"{where}: {_layout(held)}, and there {_layout(value) or 'symbolic sizes'}")
    for returned, output in zip(returned_by(made.graph), made.graph_signature.output_specs, strict=True):
        _check_kind(value_of(returned) if isinstance(returned, Node) else returned, output, data)


def _check_kind(value: Any, spec: InputSpec | OutputSpec, data: Data) -> None:
    """Raises if an input or an output is a tensor in the signature and a number in the graph, say."""
    kinds = _KINDS.get(type(spec.arg))
    if kinds is not None and not isinstance(value, kinds):
        data.malformed(f"{spec.arg.name[:100]!r} is of the type {type(value).__name__} in the graph")


def _layout(tensor: Tensor) -> tuple[Any, ...] | None:
    """Its dtype, its sizes, and the strides between its elements; None if some are symbolic, which compare slowly."""
    sizes, strides = tuple(tensor.shape), tensor.stride()
    if not all(type(number) is int for number in (*sizes, *strides)):
        return None
    return (
        tensor.dtype,
        sizes,
        tuple(step for size, step in zip(sizes, strides, strict=True) if size > 1 and 0 not in sizes),
    )


#: What a value of the graph is that the signature names as a tensor or a number.
_KINDS: Mapping[type, tuple[type, ...]] = {
    TensorArgument: (Tensor,),
    signatures.SymIntArgument: (int, SymInt),
    signatures.SymFloatArgument: (int, float, SymFloat),
    signatures.SymBoolArgument: (bool, SymBool),
}


def _verifier(dialect: Data) -> Any:
    found = verifier._VerifierMeta._registry.get(dialect.text() or "ATEN")
    return found if found is not None else dialect.malformed(f"nothing here verifies {dialect.value[:40]!r}")


# Signature -------------------------------------------------------------------------------------------------------


def _input_spec(data: Data) -> InputSpec:
    kind, content = data.choice()
    if kind == "user_input":
        return InputSpec(InputKind.USER_INPUT, _argument(content["arg"]), None)
    if kind == "constant_input":
        name = content["name"].name() if content["name"].value else ""
        return InputSpec(InputKind.USER_INPUT, ConstantArgument(name, content["value"].constant()), None)
    name = content["arg"]["name"].name()
    if kind == "token":
        return InputSpec(InputKind.TOKEN, signatures.TokenArgument(name), None)
    if kind not in _STATE_INPUTS:
        data.refuse("no input of this kind is data")
    target = content[f"{kind}_name"].state_path()
    persistent = content["persistent"].boolean() if kind == "buffer" else None
    return InputSpec(_STATE_INPUTS[kind], TensorArgument(name), target, persistent)


def _follow_constants(inputs: list[InputSpec], names: Mapping[int, str], graph: Graph) -> None:
    """Names constant inputs as the graph does: no node is called like a function of Python, as an argument may be."""
    for place, node in enumerate(graph.find_nodes(op="placeholder")):
        if names.get(place):  # torch gives each of them a name.
            inputs[place].arg = replace(inputs[place].arg, name=node.name)


def _check_leaves(call: ModuleCallSignature, inputs: list[InputSpec], outputs: list[OutputSpec], data: Data) -> None:
    """Raises if a call has other numbers of arguments or results than the graph, or the graph loses or makes tokens."""
    arguments = sum(spec.kind is InputKind.USER_INPUT for spec in inputs)
    results = sum(spec.kind in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT) for spec in outputs)
    if (call.in_spec.num_leaves, call.out_spec.num_leaves) != (arguments, results):
        data.malformed(
            f"it has {arguments} inputs and {results} outputs, and the trees of a call have other numbers of leaves"
        )
    tokens = sum(spec.kind is InputKind.TOKEN for spec in inputs)
    if sum(spec.kind is OutputKind.TOKEN for spec in outputs) != tokens:
        data.malformed(f"it has {tokens} tokens among its inputs, and another number among its outputs")


def _check_state(inputs: list[InputSpec], state: Mapping[str, Any], constants: Mapping[str, Any], data: Data) -> None:
    """Raises if an input is a parameter, buffer or constant of which the file has no tensor, or another or two."""
    if twice := min(state.keys() & constants.keys(), default=None):
        data.malformed(f"{twice[:100]!r} is among the weights and among the constants")
    for spec in inputs:
        if spec.target is None:
            continue
        if spec.target not in state and spec.target not in constants:
            data.malformed(f"there is no tensor for {spec.target[:100]!r}")
        if spec.target in constants and (spec.kind is InputKind.PARAMETER or spec.persistent):
            data.malformed(f"{spec.target[:100]!r} is a parameter or buffer that is saved, and among the constants")
    counts = Counter(spec.target for spec in inputs if spec.target is not None)
    if more := next((target for target, count in counts.items() if count > 1), None):
        data.malformed(f"{counts[more]} inputs are the tensor {more[:100]!r}")


def _check_paths(paths: list[str], data: Data) -> None:
    """Raises if a parameter would also have to be a module, or has far too many modules around it."""
    known, owners, most = set(paths), set[str](), 1_000 + 4 * len(paths)
    for path in paths:
        owner = path.rpartition(".")[0]
        while owner and owner not in owners:
            if owner in known:
                data.malformed(f"{owner[:100]!r} is a tensor, and so is {path[:100]!r} in it")
            owners.add(owner)
            owner = owner.rpartition(".")[0]
        if len(owners) > most:  # Looked at early: each is a text, and those of one path are far longer than it.
            data.malformed(f"{len(paths)} tensors are in more than {most} modules, which no program needs")
    beside = Counter(owner.rpartition(".")[0] for owner in owners)
    siblings = {"": 0}
    for owner in sorted(owners, key=len):  # The module around another has a shorter path.
        around = owner.rpartition(".")[0]
        siblings[owner] = siblings[around] + beside[around]
    if sum(siblings[path.rpartition(".")[0]] for path in paths) > _MOST_SIBLINGS:
        data.malformed(f"{len(paths)} tensors are in modules with too many others beside them")


def _output_spec(data: Data) -> OutputSpec:
    kind, content = data.choice()
    if kind == "user_output":
        return OutputSpec(OutputKind.USER_OUTPUT, _argument(content["arg"]), None)
    name = content["arg"]["name"].name()
    if kind == "token":
        return OutputSpec(OutputKind.TOKEN, signatures.TokenArgument(name), None)
    if kind == "loss_output":
        return OutputSpec(OutputKind.LOSS_OUTPUT, TensorArgument(name), None)
    if kind not in _STATE_OUTPUTS:
        data.malformed("no output of this kind is known")
    of, key = _STATE_OUTPUTS[kind]
    target = content[key].name() if key == "user_input_name" else content[key].state_path()
    return OutputSpec(of, TensorArgument(name), target)


def _argument(data: Data) -> Any:
    make = _NAMED_ARGUMENTS.get(data.choice()[0])
    return ConstantArgument(name="", value=data.constant()) if make is None else make(name=value_name(data))


_STATE_INPUTS = {
    "parameter": InputKind.PARAMETER,
    "buffer": InputKind.BUFFER,
    "tensor_constant": InputKind.CONSTANT_TENSOR,
}
_STATE_OUTPUTS = {
    "buffer_mutation": (OutputKind.BUFFER_MUTATION, "buffer_name"),
    "parameter_mutation": (OutputKind.PARAMETER_MUTATION, "parameter_name"),
    "gradient_to_parameter": (OutputKind.GRADIENT_TO_PARAMETER, "parameter_name"),
    "gradient_to_user_input": (OutputKind.GRADIENT_TO_USER_INPUT, "user_input_name"),
    "user_input_mutation": (OutputKind.USER_INPUT_MUTATION, "user_input_name"),
}
_NAMED_ARGUMENTS: Mapping[str, Any] = {
    "as_tensor": TensorArgument,
    "as_sym_int": signatures.SymIntArgument,
    "as_sym_float": signatures.SymFloatArgument,
    "as_sym_bool": signatures.SymBoolArgument,
}


# Calling convention ----------------------------------------------------------------------------------------------


def _module_call(data: Data) -> ModuleCallEntry:
    """The entry of a module by its path; only the model itself keeps its signature."""
    path, signature = data["fqn"].module_path(), data.get("signature")
    if path or signature is None:
        return ModuleCallEntry(path, None)
    in_spec, names = read_tree(signature["in_spec"]), signature.get("forward_arg_names")
    if in_spec.type is not tuple or [part.type for part in in_spec.children()] != [tuple, dict]:
        signature.malformed("the inputs are not those of a call")
    keys = in_spec.children()[1].context
    for key in keys:  # They become parameters of the code that torch.fx generates.
        Data(key, signature, "in_spec").name()
    out_spec, arg_names = read_tree(signature["out_spec"]), None if names is None else [name.name() for name in names]
    positional = [f"arg_{at}" for at in range(in_spec.children()[0].num_children)] if arg_names is None else arg_names
    if len(set(positional)) < len(positional) or (arg_names is None and not set(positional).isdisjoint(keys)):
        signature.malformed("two of its arguments have one name")
    # torch lists no inputs and outputs for the model itself; names of nodes here would outlive the nodes.
    return ModuleCallEntry(path, ModuleCallSignature([], [], in_spec, out_spec, arg_names))


# Conditions ------------------------------------------------------------------------------------------------------


def _conditions(data: Data | None) -> list[str]:
    """The conditions on the inputs; each call checks all of them."""
    if data is not None and sum(len(condition.text()) for condition in data) > _MOST_LETTERS:
        data.malformed(f"its conditions have more than {_MOST_LETTERS} letters")
    work, conditions = 0, list[str]()
    for condition in data or ():
        text, terms = _condition(condition)
        work += math.ceil(terms**1.5)
        if work > _MOST_WORK:
            condition.malformed("the conditions are too many or too complex to check all of them")
        conditions.append(text)
    return conditions


def _condition(data: Data) -> tuple[str, int]:
    """A condition on the inputs, parsed and printed again, and how many terms it has."""
    try:
        condition = parsed(data.text(), letters=4_000, operations=120)
        _check(condition, data)
        return printed(condition), _terms(condition)
    except ExpressionError as error:
        data.refuse(f"{data.value[:100]!r} is no condition: {error}")


def _terms(condition: Expression) -> int:
    """A bound on the terms of an expression that is multiplied out; torch writes a size as a symbol and an offset."""
    if not isinstance(condition, Operation):
        return 2 if isinstance(condition, Read) else 1
    counts = [_terms(operand) for operand in condition.operands] or [1]
    terms = math.prod(counts) if condition.name in ("*", "/", "//", "%") else sum(counts)
    if condition.name == "**":
        terms = counts[0] ** 4
    if terms > _MOST_TERMS:
        raise ExpressionError(f"it has more than {_MOST_TERMS} terms")
    return terms


def _check(condition: Expression, data: Data) -> None:
    """Raises unless it is bounded arithmetic on single numbers of the inputs."""
    match condition:
        case Operation("**", (base, 2 | 3 | 4)) if not isinstance(base, Operation):
            _check(base, data)
        case Operation("round" | "int", (_, _, *_)):
            raise ExpressionError("it rounds to a number of digits")
        case Operation(name, operands, ()) if name in _IN_CONDITIONS:
            for operand in operands:
                _check(operand, data)
        case Operation(name) | Symbol(name):
            raise ExpressionError(f"{name[:40]!r} has no place in it")
        case Read(query="size" | "stride", axis=None) | str():
            raise ExpressionError("it computes with more than single numbers")
        case Read(input=InputPath(keys)):
            for key in keys:
                Data(key, data, "key").plain_text() if isinstance(key, str) else None


_IN_CONDITIONS = frozenset(("and", "or", *FUNCTIONS)) - {
    "**",
    "<<",
    *(name for name in FUNCTIONS if name.startswith("is_")),
}


_DEEPEST = 100


def read_tree(data: Data) -> pytree.TreeSpec:
    """The tree spec in a string of the file; `torch.utils._pytree.treespec_loads` would import what it names."""
    version, *roots = data.nested()
    if version.value != 1 or len(roots) != 1:
        data.malformed("it is no tree of version 1")
    return _tree(roots[0], _DEEPEST)


def _tree(data: Data, depth: int) -> pytree.TreeSpec:
    if depth == 0:
        data.malformed(f"it is nested more than {_DEEPEST} deep")
    children = [_tree(child, depth - 1) for child in data["children_spec"]]
    if data["type"].value is None:
        return pytree.treespec_leaf()
    container = _registered(data["type"])
    context = _CONTEXTS.get(container, _registered_context)(container, data["context"])
    keys = context[1] if container is defaultdict else context if container in _DICTS else children
    keys = context._fields if hasattr(context, "_fields") else keys
    if len(keys) != len(children):
        data.malformed(f"it has {len(keys)} keys and {len(children)} children")
    if keys is not children and len(set(keys)) < len(keys):
        data.malformed("two of its keys are equal")
    if container is deque and context is not None and context < len(children):
        data.malformed(f"it holds at most {context} items and has {len(children)} children")
    return pytree.TreeSpec(container, context, children)


def _registered(data: Data) -> Any:
    name = data.text()
    if name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
        data.refuse("it stands for any container that was registered without a name, and so not to be saved")
    found = {entry.serialized_type_name: kind for kind, entry in pytree.SUPPORTED_SERIALIZED_TYPES.items()}.get(name)
    if found is None:
        data.malformed(f"no container {name[:200]!r} is registered; import the module that registers it first")
    return found


def _keys(_: Any, context: Data) -> list[Any]:
    return [_key(key) for key in context.nested()]


def _key(key: Data) -> Any:
    """A string, a number, or a member of an Enum that is already imported; nothing is called."""
    if isinstance(key.value, str):
        return key.plain_text()
    if key.value is None or isinstance(key.value, bool | float):
        return key.value
    if isinstance(key.value, int):
        return key.integer()  # Of larger ones, any number have the same hash.
    named, member = key["fqn"].text(), key["name"].text()
    try:
        return _enum(named).__members__[member]
    except KeyError:
        return key.refuse(f"{named[:100]!r} is no Enum that is imported here")


@cache
def _enum(named: str) -> type[Enum]:
    """The imported Enum of this name; a KeyError, which the cache forgets, if none is imported yet."""
    waiting, seen = [Enum], set[type[Enum]]()
    while waiting:
        found = waiting.pop()
        if f"{found.__module__}:{found.__qualname__}" == named:
            return found
        fresh = [subclass for subclass in type.__subclasses__(found) if subclass not in seen]
        seen.update(fresh)
        waiting += fresh
    raise KeyError(named)


def _factory_and_keys(_: Any, context: Data) -> list[Any]:
    factory = f"{context['default_factory_module'].text()}.{context['default_factory_name'].text()}"
    if factory not in _FACTORIES:
        context.refuse(f"the factory {factory[:100]!r} of a defaultdict is no plain container or number")
    return [_FACTORIES[factory], [_key(key) for key in context["dict_context"]]]


def _most_items(_: Any, context: Data) -> int | None:
    most = context.nested()
    found = None if most.value is None else most.integer()
    return most.malformed("a deque holds at least one item") if found is not None and found < 1 else found


def _registered_context(container: Any, context: Data) -> Any:
    """The context of a registered class, by the function that was registered with it."""
    if container is namedtuple or hasattr(container, "_fields"):
        found = _registered(context)
        return found if hasattr(found, "_fields") else context.malformed("it is no named tuple")
    from_dumpable = pytree.SUPPORTED_SERIALIZED_TYPES[container].from_dumpable_context
    if from_dumpable is None:
        return context.nested().plain()
    inner = context.nested() if isinstance(context.value, str) and context.value[:1] in ("[", "{") else context
    inner.plain()
    return from_dumpable(context.value)


_FACTORIES: dict[str, type] = {
    **{f"builtins.{kind.__name__}": kind for kind in (list, dict, set, tuple, frozenset, int, float, bool, str)},
    "collections.OrderedDict": OrderedDict,
    "collections.deque": deque,
}
_DICTS = (dict, OrderedDict, immutable_dict)
_CONTEXTS: dict[Any, Callable[[Any, Data], Any]] = {
    **dict.fromkeys((tuple, list, immutable_list, Size), lambda _, context: None),
    **dict.fromkeys(_DICTS, _keys),
    defaultdict: _factory_and_keys,
    deque: _most_items,
}
