"""Bodies made fit for Dynamo-style compilers, and their calls."""

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

from partita._torch.operators.registry import SYM_SIZE
from partita.backends._torch.fake_inputs import SYMBOLIC, place_of_symbol, size_carrier, unnamed_sizes

__all__ = ["Calling", "CompiledBody", "adapt", "adapt_to_tensors"]


# Adapting: changes a body so that compilers built for Dynamo's graphs take it.
#
# Dynamo gives them no plain numbers, in or out, and an input for every symbol. A body of a region has both.


@final
@dataclass(frozen=True, slots=True)
class Adapted:
    """What a compiler is given with an adapted body; how to call what it makes is known when it is done."""

    inputs: tuple[Any, ...]
    given: tuple[Input, ...]
    outputs: tuple[Output, ...]
    arity: int
    notes: Notes

    def calling(self) -> Calling:
        """How to call what the compiler made; asked after it has traced the body."""
        outputs = tuple(map(self.notes.known, self.outputs))
        return Calling(self.given, outputs, self.arity)


def adapt(body: GraphModule, inputs: Sequence[Any]) -> Adapted:
    """Writes plain inputs into the body, takes plain outputs out of it, and adds an input for each unnamed symbol.

    Plain numbers become constants because AOTAutograd would make symbols of them, and take equal ones for one: a 4
    beside a size that happens to be 4 would then have to change with it. Symbols become inputs because torch 2.13
    fails on floats that it computes from a size.
    """
    given = _fold_plain_inputs(body, inputs)
    left = [inputs[argument.place] for argument in given]
    known = scalars_of_inputs(body, left)
    sizes: list[Input] = []
    for place, axis in unnamed_sizes(left):
        _add_input(body, f"size_{axis}_of_{place}")
        sizes.append(Size(given[place].place, axis))
        left.append(left[place].shape[axis])
    notes = Notes(as_tensors=False)
    outputs = _fold_plain_outputs(body, notes, among=scalars_in(body.graph), known=known)
    _drop_annotations(body)
    body.recompile()
    return Adapted(tuple(left), (*given, *sizes), outputs, len(inputs), notes)


def adapt_to_tensors(body: GraphModule, inputs: Sequence[Any]) -> Adapted:
    """Writes plain inputs into the body, takes plain outputs out of it, and reads integers from sizes of tensors.

    For compilers whose functions take and give nothing but tensors. For an integer that is no size of an input, they
    get an empty tensor whose size it is.
    """
    folded = _fold_plain_inputs(body, inputs)
    left = [inputs[argument.place] for argument in folded]
    placeholders = body.graph.find_nodes(op="placeholder")
    given: list[Input] = []
    tensors: list[Any] = []
    for node, argument, value in zip(placeholders, folded, left, strict=True):
        found = place_of_symbol(value, left) if isinstance(value, torch.SymInt) else None
        if found is not None:
            _read_from_size(body, node, placeholders[found[0]], found[1])
            body.graph.erase_node(node)
        elif isinstance(value, torch.SymInt):
            _read_from_size(body, node, node, 0)
            tensors.append(size_carrier(value, left))
            given.append(Carrier(argument.place))
        else:
            tensors.append(value)
            given.append(argument)
    notes = Notes(as_tensors=True)
    outputs = _fold_plain_outputs(body, notes, among=set(body.graph.nodes), known={})
    body.recompile()
    return Adapted(tuple(tensors), tuple(given), outputs, len(inputs), notes)


def _fold_plain_inputs(body: GraphModule, inputs: Sequence[Any]) -> tuple[Argument, ...]:
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


def _fold_plain_outputs(
    body: GraphModule, notes: Notes, *, among: set[Node], known: Mapping[Node, Any]
) -> tuple[Output, ...]:
    """Leaves outputs out that are no nodes, or known, and has it noted what those are that may turn out to be plain.

    torch stores no function of a body with such a note in it, so there is none where the number is known before.
    """
    written = body.graph.output_node()
    given = written.args[0]
    assert isinstance(given, tuple | list)
    outputs: list[Output] = []
    left: list[Node] = []
    for value in given:
        if not isinstance(value, Node):
            outputs.append(Constant(value))
            continue
        if value in known and not isinstance(known[value], SYMBOLIC):
            outputs.append(Constant(known[value]))
            continue
        outputs.append(Result(len(left)))
        if value in among and value not in known:
            with body.graph.inserting_before(written):
                value = body.graph.call_function(notes.noting(), (value, len(left)))
        left.append(value)
    written.args = (tuple(left),)
    return tuple(outputs)


def _drop_annotations(body: GraphModule) -> None:
    """Types of nodes mean nothing to compilers, and as text they keep torch from pickling, and so from caching."""
    for node in body.graph.nodes:
        if node.type is not None:
            node.type = None


# Notes: which outputs of a body turn out to be plain values or numbers while it is traced.


@final
class Notes:
    """What was seen of outputs; `as_tensors` tells that the compiler makes tensors of numbers."""

    def __init__(self, *, as_tensors: bool) -> None:
        self._as_tensors = as_tensors
        self._constants: dict[int, Constant] = {}
        self._kinds: dict[int, type[int] | type[float] | type[bool]] = {}

    def noting(self) -> Callable[[Any, int], Any]:
        """A function for graphs: it notes what it is given for an output, and gives on all but plain values."""

        def note(value: Any, place: int) -> Any:
            if isinstance(value, Tensor):
                return value
            for symbolic, kind in _KINDS:
                if isinstance(value, symbolic):
                    self._kinds[place] = kind
                    return value
            self._constants[place] = Constant(value)
            return None

        return note

    def known(self, output: Output) -> Output:
        """How to read an output, after all that was seen."""
        if not isinstance(output, Result):
            return output
        kind = self._kinds.get(output.place)
        if kind is not None and self._as_tensors:
            return Number(output.place, kind)
        return self._constants.get(output.place, output)


_KINDS: tuple[tuple[type, type[int] | type[float] | type[bool]], ...] = (
    (torch.SymInt, int),
    (torch.SymFloat, float),
    (torch.SymBool, bool),
)


# Calling: how a compiler's function is called in the place of a body that had to be changed for the compiler.


@final
@dataclass(frozen=True, slots=True)
class Argument:
    """An input of the body, passed on."""

    place: int

    def of(self, given: Sequence[Any]) -> Any:
        return given[self.place]


@final
@dataclass(frozen=True, slots=True)
class Size:
    """A size of an input of the body."""

    place: int
    axis: int

    def of(self, given: Sequence[Any]) -> Any:
        return given[self.place].size(self.axis)


@final
@dataclass(frozen=True, slots=True)
class Carrier:
    """An integer that the body is given, as the size of an empty tensor, for a function that takes tensors only."""

    place: int

    def of(self, given: Sequence[Any]) -> Any:
        return size_carrier(given[self.place])


@final
@dataclass(frozen=True, slots=True)
class Result:
    """What the function gives."""

    place: int

    def of(self, given: Sequence[Any]) -> Any:
        return given[self.place]


@final
@dataclass(frozen=True, slots=True)
class Number:
    """A number that the function gives as a tensor."""

    place: int
    kind: type[int] | type[float] | type[bool]

    def of(self, given: Sequence[Any]) -> Any:
        return self.kind(given[self.place].item())


@final
@dataclass(frozen=True, slots=True)
class Constant:
    """A value that was known before."""

    value: Any

    def of(self, given: Sequence[Any]) -> Any:
        return self.value


Input: TypeAlias = Argument | Size | Carrier
Output: TypeAlias = Result | Number | Constant


@final
@dataclass(frozen=True, slots=True)
class Calling:
    """What the function is given, and what the body gives, in order."""

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    #: How many inputs the body has.
    arity: int

    @property
    def passes_on(self) -> bool:
        """Whether the function is called just like the body."""
        return self.inputs == tuple(map(Argument, range(self.arity))) and self.gives_on

    @property
    def gives_on(self) -> bool:
        """Whether the function gives just what the body gives."""
        return self.outputs == tuple(map(Result, range(len(self.outputs))))


@final
class CompiledBody:
    """A compiler's function, called and giving like the body that it was made of.

    `stored` is the function as bytes, and `vectors` names the kind that it was compiled for.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Any]],
        calling: Calling,
        *,
        stored: bytes | None = None,
        vectors: str = "",
    ) -> None:
        self.function, self.calling, self.stored, self.vectors = function, calling, stored, vectors
        self._inputs = None if calling.passes_on else [each.of for each in calling.inputs]
        self._outputs = None if calling.gives_on else [each.of for each in calling.outputs]

    def __call__(self, *given: Any) -> Sequence[Any]:
        if self._inputs is None:
            return self.function(*given)
        results = self.function(*[taken(given) for taken in self._inputs])
        return results if self._outputs is None else tuple([made(results) for made in self._outputs])


# Scalars: nodes of a body that compute a Python number from sizes and other numbers alone.


def scalars_in(graph: Graph) -> set[Node]:
    """The nodes that give numbers; one of which that is unknown is not among them."""
    found: set[Node] = set()
    for node in graph.nodes:
        if _reads_number(node) or (_computes(node) and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def scalars_of_inputs(body: GraphModule, inputs: Sequence[Any]) -> dict[Node, Any]:
    """What the outputs are that follow from the looks of the inputs alone: their sizes, and numbers made of these."""
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
                continue  # Whoever runs the body will say what is wrong.
    return {node: known[node] for node in output.all_input_nodes if node in known and node.op != "placeholder"}


def _needed_for(nodes: Sequence[Node], graph: Graph) -> list[Node]:
    """The nodes and all that they are computed of, in graph order; no inputs."""
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
    """Whether the function makes numbers of numbers; of nothing at all it may make anything."""
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
