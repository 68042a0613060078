"""Adapts bodies to compilers for Dynamo's graphs, and calls to what these compile.

Dynamo passes compilers no plain numbers, in or out, and an input for every symbol. The body of a region has both.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from partita._torch.operator_schemas import SYM_SIZE
from partita._torch.symbolic_shapes import SYMBOLIC
from partita.backends._torch.fake_inputs import place_of_symbol, size_carrier, unnamed_sizes


@final
@dataclass(frozen=True, slots=True)
class Adapted:
    """The inputs for the compiler of an adapted body; the calling convention is known when it has traced the body."""

    inputs: tuple[Any, ...]
    arguments: tuple[Input, ...]
    outputs: tuple[Output, ...]
    arity: int
    recorder: OutputRecorder

    def calling(self) -> CallingConvention:
        """The calling convention of the compiled function; call it after the compiler has traced the body."""
        outputs = tuple(map(self.recorder.resolve, self.outputs))
        return CallingConvention(self.arguments, outputs, self.arity)


def adapt(body: GraphModule, inputs: Sequence[Any]) -> Adapted:
    """Folds constant inputs into the body, removes constant outputs, and adds an input for each unnamed symbol.

    Plain numbers become constants because AOTAutograd would make symbols of them, and unify equal ones: a 4 beside a
    size that happens to be 4 would then have to change with it. Symbols become inputs because torch 2.13
    fails on floats that it computes from a size.
    """
    arguments = _fold_constant_inputs(body, inputs)
    left = [inputs[argument.place] for argument in arguments]
    known = scalars_of_inputs(body, left)
    sizes: list[Input] = []
    for place, axis in unnamed_sizes(left):
        _add_input(body, f"size_{axis}_of_{place}")
        sizes.append(Size(arguments[place].place, axis))
        left.append(left[place].shape[axis])
    recorder = OutputRecorder(as_tensors=False)
    outputs = _fold_constant_outputs(body, recorder, among=scalars_in(body.graph), known=known)
    for node in body.graph.nodes:
        node.type = None  # Compilers ignore it, and as text it keeps torch from pickling, and so from caching.
    body.recompile()
    return Adapted(tuple(left), (*arguments, *sizes), outputs, len(inputs), recorder)


def adapt_to_tensors(body: GraphModule, inputs: Sequence[Any]) -> Adapted:
    """Folds constant inputs into the body, removes constant outputs, and reads integers from sizes of tensors.

    For compilers whose functions take and return nothing but tensors. An integer that is not the size of an input is
    passed as the size of an empty tensor.
    """
    folded = _fold_constant_inputs(body, inputs)
    left = [inputs[argument.place] for argument in folded]
    placeholders = body.graph.find_nodes(op="placeholder")
    arguments: list[Input] = []
    tensors: list[Any] = []
    for node, argument, value in zip(placeholders, folded, left, strict=True):
        found = place_of_symbol(value, left) if isinstance(value, torch.SymInt) else None
        if found is not None:
            _read_from_size(body, node, placeholders[found[0]], found[1])
            body.graph.erase_node(node)
        elif isinstance(value, torch.SymInt):
            _read_from_size(body, node, node, 0)
            tensors.append(size_carrier(value, left))
            arguments.append(Carrier(argument.place))
        else:
            tensors.append(value)
            arguments.append(argument)
    recorder = OutputRecorder(as_tensors=True)
    outputs = _fold_constant_outputs(body, recorder, among=set(body.graph.nodes), known={})
    body.recompile()
    return Adapted(tuple(tensors), tuple(arguments), outputs, len(inputs), recorder)


def _fold_constant_inputs(body: GraphModule, inputs: Sequence[Any]) -> tuple[Argument, ...]:
    left = []
    for place, (node, value) in enumerate(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True)):
        if isinstance(value, (Tensor, *SYMBOLIC)):
            left.append(Argument(place))
            continue
        for user in list(node.users):
            user.replace_input_with(node, value)
        body.graph.erase_node(node)
    return tuple(left)


def _add_input(body: GraphModule, name: str) -> Node:
    last = body.graph.find_nodes(op="placeholder")[-1]
    with body.graph.inserting_after(last):
        return body.graph.placeholder(name)


def _read_from_size(body: GraphModule, number: Node, source: Node, axis: int) -> None:
    """Makes the users of `number` read it from the size of an input instead."""
    last = body.graph.find_nodes(op="placeholder")[-1]
    with body.graph.inserting_after(last):
        size = body.graph.call_function(SYM_SIZE, (source, axis))
    number.replace_all_uses_with(size, delete_user_cb=lambda user: user is not size)


def _fold_constant_outputs(
    body: GraphModule, recorder: OutputRecorder, *, among: set[Node], known: Mapping[Node, Any]
) -> tuple[Output, ...]:
    """Removes outputs that are constants or known, and records those that may turn out to be constants in the trace.

    torch cannot store the function of a body with a recording call, so there is none for a number that is known.
    """
    output = body.graph.output_node()
    results = output.args[0]
    assert isinstance(results, tuple | list)
    outputs: list[Output] = []
    left: list[Node] = []
    for value in results:
        if not isinstance(value, Node):
            outputs.append(Constant(value))
            continue
        if value in known and not isinstance(known[value], SYMBOLIC):
            outputs.append(Constant(known[value]))
            continue
        outputs.append(Result(len(left)))
        if value in among and value not in known:
            with body.graph.inserting_before(output):
                value = body.graph.call_function(recorder.recording_function(), (value, len(left)))
        left.append(value)
    output.args = (tuple(left),)
    return tuple(outputs)


@final
class OutputRecorder:
    """Records which outputs turn out to be constants or numbers while a body is traced.

    With `as_tensors`, the compiler returns numbers as tensors.
    """

    def __init__(self, *, as_tensors: bool) -> None:
        self._as_tensors = as_tensors
        self._constants: dict[int, Constant] = {}
        self._number_types: dict[int, type[int] | type[float] | type[bool]] = {}

    def recording_function(self) -> Callable[[Any, int], Any]:
        """A function for graphs: it records the value of an output, and returns it unless it is a constant."""

        def record(value: Any, place: int) -> Any:
            if isinstance(value, Tensor):
                return value
            for symbolic, number_type in _NUMBER_TYPES:
                if isinstance(value, symbolic):
                    self._number_types[place] = number_type
                    return value
            self._constants[place] = Constant(value)
            return None

        return record

    def resolve(self, output: Output) -> Output:
        """How to read an output, after the trace."""
        if not isinstance(output, Result):
            return output
        number_type = self._number_types.get(output.place)
        if number_type is not None and self._as_tensors:
            return Number(output.place, number_type)
        return self._constants.get(output.place, output)


_NUMBER_TYPES: tuple[tuple[type, type[int] | type[float] | type[bool]], ...] = (
    (torch.SymInt, int),
    (torch.SymFloat, float),
    (torch.SymBool, bool),
)


@final
@dataclass(frozen=True, slots=True)
class Argument:
    """An input of the body, passed unchanged."""

    place: int

    def of(self, values: Sequence[Any]) -> Any:
        return values[self.place]


@final
@dataclass(frozen=True, slots=True)
class Size:
    """A size of an input of the body."""

    place: int
    axis: int

    def of(self, values: Sequence[Any]) -> Any:
        return values[self.place].size(self.axis)


@final
@dataclass(frozen=True, slots=True)
class Carrier:
    """An integer input of the body, passed as the size of an empty tensor to a function that takes tensors only."""

    place: int

    def of(self, values: Sequence[Any]) -> Any:
        return size_carrier(values[self.place])


@final
@dataclass(frozen=True, slots=True)
class Result:
    """A result of the function."""

    place: int

    def of(self, values: Sequence[Any]) -> Any:
        return values[self.place]


@final
@dataclass(frozen=True, slots=True)
class Number:
    """A number that the function returns as a tensor."""

    place: int
    kind: type[int] | type[float] | type[bool]

    def of(self, values: Sequence[Any]) -> Any:
        return self.kind(values[self.place].item())


@final
@dataclass(frozen=True, slots=True)
class Constant:
    """A value that is known at compile time."""

    value: Any

    def of(self, values: Sequence[Any]) -> Any:
        return self.value


Input: TypeAlias = Argument | Size | Carrier
Output: TypeAlias = Result | Number | Constant


@final
@dataclass(frozen=True, slots=True)
class CallingConvention:
    """The arguments of the function and the outputs of the body, in order."""

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    #: How many inputs the body has.
    arity: int

    @property
    def is_identity(self) -> bool:
        """Whether the function takes and returns just what the body does."""
        return self.inputs == tuple(map(Argument, range(self.arity))) and self.returns_unchanged

    @property
    def returns_unchanged(self) -> bool:
        """Whether the function returns just what the body returns."""
        return self.outputs == tuple(map(Result, range(len(self.outputs))))


@final
class CompiledBody:
    """A compiler's function with the calling convention of the body that it was compiled from.

    `stored` is the function as bytes, and `vectors` the vector extension that it was compiled for.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Any]],
        calling: CallingConvention,
        *,
        stored: bytes | None = None,
        vectors: str = "",
    ) -> None:
        self.function, self.calling, self.stored, self.vectors = function, calling, stored, vectors
        self._inputs = None if calling.is_identity else [each.of for each in calling.inputs]
        self._outputs = None if calling.returns_unchanged else [each.of for each in calling.outputs]

    def __call__(self, *args: Any) -> Sequence[Any]:
        if self._inputs is None:
            return self.function(*args)
        results = self.function(*[read(args) for read in self._inputs])
        return results if self._outputs is None else tuple([read(results) for read in self._outputs])


def scalars_in(graph: Graph) -> set[Node]:
    """The nodes that are known to compute a Python number from sizes and other numbers alone."""
    found: set[Node] = set()
    for node in graph.nodes:
        if _reads_number(node) or (_computes(node) and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def scalars_of_inputs(body: GraphModule, inputs: Sequence[Any]) -> dict[Node, Any]:
    """The outputs that follow from the metadata of the inputs alone: sizes, and numbers computed from them."""
    known: dict[Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
    output, scalars = body.graph.output_node(), scalars_in(body.graph)
    runner = Interpreter(body)
    runner.env = known
    for node in _needed_for([node for node in output.all_input_nodes if node in scalars], body.graph):
        is_known = node.target != "item" and known.keys() >= {*node.all_input_nodes}
        if is_known and (_reads_number(node) or (_computes(node) and not _has_tensors(node, known))):
            try:
                known[node] = runner.run_node(node)
            except Exception:
                continue  # The trace of the body will raise it.
    return {node: known[node] for node in output.all_input_nodes if node in known and node.op != "placeholder"}


def _needed_for(nodes: Sequence[Node], graph: Graph) -> list[Node]:
    """The nodes and all that they are computed from, in graph order, without inputs."""
    needed = set(nodes)
    for node in reversed(graph.nodes) if needed else ():
        if node in needed:
            needed.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in needed and node.op != "placeholder"]


def _has_tensors(node: Node, known: Mapping[Node, Any]) -> bool:
    return any(isinstance(known.get(read), Tensor) for read in node.all_input_nodes)


def _reads_number(node: Node) -> bool:
    if node.op == "call_method":
        return node.target in _METHODS
    if node.op != "call_function":
        return False
    return (node.target is getattr and node.args[1] in ("shape", "ndim", "itemsize")) or node.target in _FUNCTIONS


def _computes(node: Node) -> bool:
    """Whether the function computes numbers from numbers; without arguments it may return anything."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    target = node.target
    return getattr(target, "__module__", None) in _MODULES or target in _SYMBOLIC_FUNCTIONS


_METHODS = frozenset(
    ("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "item", "__len__")
)
_FUNCTIONS = (
    builtins.len,
    torch.numel,
    torch.ops.aten.sym_size.int,
    torch.ops.aten.sym_stride.int,
    torch.ops.aten.sym_numel.default,
    torch.ops.aten.sym_storage_offset.default,
)
_MODULES = frozenset((operator.add.__module__, math.sqrt.__module__, builtins.int.__module__))
_SYMBOLIC_FUNCTIONS = tuple(
    getattr(torch, name) for name in ("sym_int", "sym_float", "sym_not", "sym_max", "sym_min", "sym_ite", "sym_sqrt")
    if hasattr(torch, name)
)  # fmt: skip
