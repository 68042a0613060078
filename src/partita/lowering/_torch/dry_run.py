"""A dry run of a body on fake inputs, and the views among its outputs that are recomputed outside of compiled code."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Interpreter, Node

from partita._torch.dry_runs import is_torchs
from partita._torch.fx.graph_writer import GraphWriter, input_nodes
from partita._torch.fx.lazy_graph_module import lazy_module
from partita._torch.operator_schemas import is_higher_order, storage_key
from partita._torch.symbolic_shapes import is_known, is_unbacked, symbols_in
from partita.analysis.effects.terms import PURE, Effects, nodes_in, nodes_in_slots
from partita.lowering._torch.bodies import Stateless, out_of_place
from partita.lowering._torch.containers import read_leaves


@final
class BodyRun(NamedTuple):
    """The result of each node of a body; `fresh` are its leaves before any mutation, with the keys that read them."""

    results: dict[Node, Any]
    fresh: dict[Node, list[tuple[tuple[Any, ...], Any]]]
    #: Whether the body left gradients enabled or disabled otherwise than it found them.
    switched_gradients: bool
    #: The ids of tensors that a later node reshapes in place: `v.t_()`, `v.unsqueeze_(0)`.
    reshaped: frozenset[int] = frozenset()
    #: The names of nodes that mutate a tensor whose strides their form that does not mutate would not keep.
    loses_strides: frozenset[str] = frozenset()
    #: The name of the first node that gives a tensor other memory: `v.set_(w)`.
    moves: str | None = None

    def has_changed(self, node: Node) -> bool:
        """Whether a list or dict among the results of the node was mutated since."""
        now = list(read_leaves(self.results[node]))
        then = self.fresh[node]
        return len(now) != len(then) or any(
            old_keys != keys or old is not leaf for (old_keys, old), (keys, leaf) in zip(then, now, strict=True)
        )


class InvalidCallError(Exception):
    """The body raises for such a call, or may do so, so that it must run eagerly."""


def run_on_fakes(body: GraphModule, inputs: Sequence[Any], mode: Any, effects: Mapping[str, Effects]) -> BodyRun:
    """The result of each node of `body` for fake inputs; `effects` are those of its nodes, by name."""
    from torch._guards import TracingContext, tracing

    # Without the Python dispatcher: its decompositions copy where eager mode returns its input.
    found = torch.is_grad_enabled()
    with (
        tracing(TracingContext(mode)),
        mode.shape_env.ignore_fresh_unbacked_symbols(),
        mode,
        torch.set_grad_enabled(found),
    ):
        interpreter = _RecordingInterpreter(body, effects)
        interpreter.run(*inputs)
        left = torch.is_grad_enabled()
    reshaped, loses_strides = frozenset(interpreter.reshaped), frozenset(interpreter.loses_strides)
    return BodyRun(interpreter.env, interpreter.fresh, found is not left, reshaped, loses_strides, interpreter.moves)


class _RecordingInterpreter(Interpreter):
    """Records the leaves of each result before any mutation, and which tensors are reshaped in place."""

    def __init__(self, body: GraphModule, effects: Mapping[str, Effects]) -> None:
        super().__init__(body, garbage_collect_values=False)
        self._effects = effects
        self.fresh: dict[Node, list[tuple[tuple[Any, ...], Any]]] = {}
        self.reshaped: set[int] = set()
        self.loses_strides: set[str] = set()
        self.moves: str | None = None

    def run_node(self, n: Node) -> Any:
        if isinstance(n.target, HigherOrderOperator):
            self._check_bodies(n)
        self._check_numbers(n)
        arguments = [leaf for read in n.all_input_nodes for _, leaf in read_leaves(self.env[read])]
        before, memory = list(map(_layout, arguments)), list(map(_memory, arguments))
        self._check_mutated(n)
        if self._loses_strides(n):
            self.loses_strides.add(n.name)
        try:
            result = super().run_node(n)
        except Exception as error:
            if _is_unsupported(error) or not (n.op == "call_method" or is_torchs(n.target)):
                raise
            raise InvalidCallError(f"{n.name!r} raises {type(error).__name__}: {error}") from error
        self.fresh[n] = list(read_leaves(result))
        self.reshaped.update(id(leaf) for leaf, then in zip(arguments, before, strict=True) if _layout(leaf) != then)
        if self.moves is None and list(map(_memory, arguments)) != memory:
            self.moves = n.name
        return result

    def _check_bodies(self, node: Node) -> None:
        """Raises where the body of an operator does what is checked here only for the nodes of the region."""
        for read in node.all_input_nodes:
            body = self.env.get(read)
            found = unchecked_call(body) if isinstance(body, GraphModule) else None
            if found is not None:
                raise InvalidCallError(
                    f"{found!r}, in the body of {node.name!r}, may read outside of its tensor or divide by zero"
                )

    def _check_numbers(self, node: Node) -> None:
        """Raises where a call reads outside of its tensor, or divides by zero, or may: only eager mode checks that."""
        name = _called_name(node)
        part = next((part for part in _CHECKS if part in name), None)
        if part is None:
            return
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        schema = getattr(node.target, "_schema", None)
        names = _OF_FUNCTIONS.get(part, ()) if schema is None else [argument.name for argument in schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if not _CHECKS[part](given.get("self", given.get("input")), given):
            fault = "divide an integer by zero" if part in _DIVISIONS else "read outside of its tensor"
            raise InvalidCallError(f"{node.name!r} may {fault}, which compiled code does not check")

    def _loses_strides(self, node: Node) -> bool:
        """Whether a mutation, computed as a new tensor, would get other strides than those of the mutated one.

        AOTAutograd (torch 2.13) computes it so, and continues with the new tensor: `masked_fill_`, `cumsum_`, `addmm_`.
        """
        form = out_of_place(node)
        value = self.env.get(node.args[0]) if form is not None and isinstance(node.args[0], Node) else None
        if form is None or not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_contiguous():
            return False
        if self._effects.get(node.name, PURE).uses_rng:
            return False
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        try:
            with torch.no_grad():
                made = getattr(self, form.op)(form.target, args, kwargs)
            is_new = isinstance(made, Tensor) and made.shape == value.shape and storage_key(made) != storage_key(value)
            return is_new and _order_of_axes(made) != _order_of_axes(value)
        except Exception:
            return False  # The mutation raises too, or there is no such form.

    def _check_mutated(self, node: Node) -> None:
        """Raises where a call mutates an expanded tensor: eager mode refuses that, and fake tensors do not."""
        for read in self._mutated(node):
            for _, leaf in read_leaves(self.env[read]):
                if isinstance(leaf, Tensor) and leaf.layout is torch.strided and _shares_elements(leaf):
                    raise InvalidCallError(f"{node.name!r} mutates a tensor whose elements share memory")

    def _mutated(self, node: Node) -> Iterator[Node]:
        """What a call may mutate: arguments, and the state of a module with effects, which is passed to it first."""
        effects = self._effects.get(node.name)
        if effects is None:
            return iter(())
        if node.op != "call_module":
            return nodes_in_slots(node, effects.mutates)
        called = self.fetch_attr(str(node.target))
        assert isinstance(called, Stateless)
        return nodes_in((node.args, node.kwargs) if effects.mutates else node.args[: len(called.slots)])


def unchecked_call(module: GraphModule) -> str | None:
    """A call in a module, at any depth, whose numbers only eager mode checks; None if there is none."""
    for inner in module.modules():
        for node in inner.graph.nodes if isinstance(inner, GraphModule) else ():
            name = _called_name(node)
            scales = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, float)]
            is_position_computed = name.startswith("aten.select") and any(
                isinstance(arg, Node) for arg in node.args[2:]
            )
            if any(part in name for part in _UNCHECKED) or ("upsample_" in name and scales) or is_position_computed:
                return str(node.name)
            if _truncates(name, node.kwargs):  # Whatever the metadata says of its dtype, which a file may write.
                return str(node.name)
    return None


def _called_name(node: Node) -> str:
    """The name of the function or method that a node calls; empty for others."""
    return str(node.target) if node.op in ("call_function", "call_method") else ""


#: Parts of the names of operators whose positions Inductor does not check.
_UNCHECKED = ("as_strided", "_unsafe_masked_index", "_unsafe_index", "quantize_per_channel.default")


def _fit_scales(source: Any, given: Mapping[str, Any]) -> bool:
    """Whether the scales of an enlargement, if it has any, are those of its sizes."""
    scales = [value for name, value in given.items() if name.startswith("scale") and value is not None]
    flat = [scale for value in scales for scale in (value if isinstance(value, tuple | list) else (value,))]
    sizes = given.get("output_size")
    if not isinstance(source, Tensor) or not flat or sizes is None:
        return True
    pairs = zip(source.shape[-len(flat) :], sizes[-len(flat) :], flat, strict=False)
    return len(sizes) >= len(flat) and all(_is_scaled(before, after, scale) for before, after, scale in pairs)


def _is_within(source: Any, given: Mapping[str, Any]) -> bool:
    """Whether a view by strides stays in the memory of its tensor; not where a number is not known."""
    sizes, strides, offset = (given.get(name) for name in ("size", "stride", "storage_offset"))
    if not isinstance(source, Tensor) or not isinstance(sizes, tuple | list) or not isinstance(strides, tuple | list):
        return False
    offset = source.storage_offset() if offset is None else offset
    numbers = (*sizes, *strides, offset, source.untyped_storage().nbytes())
    if any(type(number) is not int or number < 0 for number in numbers) or len(sizes) != len(strides):
        return False
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return 0 in sizes or bool((last + 1) * source.element_size() <= source.untyped_storage().nbytes())


def _is_selected_within(source: Any, given: Mapping[str, Any]) -> bool:
    """Whether an index that is read from data stays in the tensor: Inductor (torch 2.13) asserts nothing of it."""
    index, axis = given.get("index"), given.get("dim")
    unknown = [one for one in (index if isinstance(index, tuple | list) else (index,)) if _is_read(one)]
    if (
        not unknown
        or not isinstance(source, Tensor)
        or not isinstance(axis, int)
        or not isinstance(index, torch.SymInt)
    ):
        return not unknown
    size = source.shape[axis]
    return is_known(index < size) and is_known(index >= -size)


def _is_read(number: Any) -> bool:
    return isinstance(number, torch.SymInt) and any(map(is_unbacked, symbols_in(number)))


def _fit_channels(source: Any, given: Mapping[str, Any]) -> bool:
    """Whether there is one scale and one zero point for each channel: neither the fake kernel nor Inductor looks."""
    axis, tables = given.get("axis"), [given.get(name) for name in ("scales", "zero_points")]
    if not isinstance(source, Tensor) or not isinstance(axis, int) or not -source.dim() <= axis < source.dim():
        return False
    found = [table.shape for table in tables if isinstance(table, Tensor)]
    return all(len(shape) == 1 and is_known(shape[0] == source.shape[axis]) for shape in found)


#: Parts of the names of divisions; others of them have results that are no integers, or are checked.
_DIVISIONS = ("prims.div", "div")


def _truncates(name: str, keywords: Mapping[str, Any]) -> bool:
    """Whether a call divides integers as C++ does, where a division by zero ends the process (Inductor, torch 2.13)."""
    return "prims.div" in name or ("div" in name and keywords.get("rounding_mode") == "trunc")


def _is_divided_safely(source: Any, given: Mapping[str, Any]) -> bool:
    """Whether a division without remainder has no integers, or a divisor that is known not to be 0 or -1."""
    divisor = given.get("other")
    if any(isinstance(one, float) or (isinstance(one, Tensor) and _is_fraction(one)) for one in (source, divisor)):
        return True
    return type(divisor) is int and divisor not in (0, -1)


def _is_fraction(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


#: Parts of the names of operators of whose numbers compiled code checks nothing, and what does.
_CHECKS: Mapping[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    **dict.fromkeys(_UNCHECKED, lambda source, given: False),
    "as_strided": _is_within,
    "upsample_": _fit_scales,
    "quantize_per_channel.default": _fit_channels,
    "select": _is_selected_within,
    "getitem": _is_selected_within,
    "prims.div": _is_divided_safely,
    "div": lambda source, given: given.get("rounding_mode") != "trunc" or _is_divided_safely(source, given),
}
#: The parameters of functions and methods that have no schema.
_OF_FUNCTIONS = {
    "as_strided": ("input", "size", "stride", "storage_offset"),
    "select": ("input", "dim", "index"),
    "getitem": ("input", "index"),
    "div": ("input", "other"),
}


def _is_scaled(before: Any, after: Any, scale: Any) -> bool:
    """Whether a size is another one times a scale, rounded down, whatever its symbols are."""
    if type(before) is int and type(after) is int:
        return bool(-1e-6 < before * scale - after < 1)
    if not isinstance(before, torch.SymInt) or not isinstance(after, torch.SymInt) or scale != int(scale):
        return False
    difference: Any = after.node.expr - int(scale) * before.node.expr
    return str(difference.expand()) == "0"


def _shares_elements(tensor: Tensor) -> bool:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(
        isinstance(stride, int) and stride == 0 and not (type(size) is int and size < 2) for size, stride in pairs
    )


def _is_unsupported(error: Exception) -> bool:
    """Whether an operator cannot run on fake tensors, or only for known values; the body itself may be able to run."""
    homes = ("torch._subclasses", "torch.fx.experimental.symbolic_shapes")
    return isinstance(error, NotImplementedError) or type(error).__module__.startswith(homes)


def _order_of_axes(tensor: Tensor) -> list[int]:
    """The axes from the largest stride to the smallest, without those along which there is nothing to step."""
    axes = [axis for axis, size in enumerate(tensor.shape) if size != 1]
    strides = tensor.stride()
    return sorted(axes, key=lambda axis: strides[axis], reverse=True)


def _memory(value: Any) -> int | None:
    return storage_key(value) if isinstance(value, Tensor) else None


def _layout(value: Any) -> object:
    """The layout of a tensor in memory, as text: a comparison of symbols would add guards."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested:
        return None
    return str((value.shape, value.stride(), value.storage_offset()))


# Outputs that are views of inputs or other outputs, recomputed outside of compiled code. A view that eager mode makes
# has the `grad_fn`, the version counter and the flags that the body's own would have. AOTAutograd (torch 2.13)
# regenerates views from metadata, and loses some of that.


#: A node and the keys by which a leaf is read from its result.
Reading: TypeAlias = tuple[Node, tuple[Any, ...]]


@final
@dataclass(slots=True)
class Readable:
    """What can be computed outside of compiled code, from the values of the `roots`."""

    roots: Sequence[Node]
    #: How each tensor is read, by its id: from a root, or from a step.
    readings: dict[int, Reading] = field(default_factory=dict)
    #: The nodes that are recomputed, in the order of the body: views of roots, or sizes of such.
    steps: dict[Node, None] = field(default_factory=dict)
    #: Nodes that return an existing tensor, and nodes that return constants.
    same: dict[Node, Reading] = field(default_factory=dict)
    constants: dict[Node, Any] = field(default_factory=dict)
    #: Nodes that return a number which only the body knows, as one read from memory that may be mutated since.
    numbers: dict[Node, None] = field(default_factory=dict)

    def reading_of(self, value: Any) -> Reading | None:
        """How this tensor object is read; None where only compiled code has it."""
        return self.readings.get(id(value)) if isinstance(value, Tensor) else None


def readable_from(roots: Sequence[Node], run: BodyRun, is_quiet: Callable[[Node], bool]) -> Readable:
    """The results of a run of the body that can be computed from `roots`.

    Nodes that are not quiet have side effects, so they cannot run twice. A list that was mutated is read as it was when
    it was made; an item that is read later is known by its identity, not by its place. Tensors that were reshaped in
    place are left to the compiled code: a recomputed view would have the first shape.
    """
    results = run.results
    found = Readable(roots)
    for root in roots:
        if isinstance(results[root], Tensor) and id(results[root]) not in run.reshaped:
            found.readings.setdefault(id(results[root]), (root, ()))
    memory = {storage_key(results[node]) for node, _ in found.readings.values()}
    whole = {root for root in roots if id(results[root]) not in run.reshaped}
    for node, value in results.items():
        if node in whole or node.op in ("placeholder", "output"):
            continue
        reading = found.reading_of(value)
        if reading is not None:
            found.same[node] = reading
            whole.add(node)
            continue
        runs_again = node.op in ("call_function", "call_method") and is_quiet(node) and not is_higher_order(node.target)
        is_known = runs_again and all(read in whole for read in input_nodes(node)) and not _reads_contents(node, run)
        if is_known and _are_in(memory, run.fresh[node]):
            found.steps[node] = None
            kept = [(keys, leaf) for keys, leaf in run.fresh[node] if id(leaf) not in run.reshaped]
            for keys, leaf in kept:
                found.readings.setdefault(id(leaf), (node, keys))
            if not run.has_changed(node) and len(kept) == len(run.fresh[node]):
                whole.add(node)
        elif runs_again and _is_constant(value):
            found.constants[node] = value
            whole.add(node)
        elif isinstance(value, torch.SymInt):
            found.numbers[node] = None
            whole.add(node)
    return found


def numbers_for(readable: Readable, readings: Sequence[Reading]) -> list[Node]:
    """The nodes whose numbers are needed to read these leaves."""
    needed = _needed(readable, [node for node, _ in readings])
    return [node for node in readable.numbers if node in needed]


def views_module(readable: Readable, readings: Sequence[Reading]) -> GraphModule:
    """A module that computes these leaves, each a view of a root, from the roots and the numbers for them."""
    needed = _needed(readable, [node for node, _ in readings])
    writer = GraphWriter()
    writer.names.reserve(node.name for node in needed)
    env: dict[Node, Any] = dict(readable.constants)
    for root in (*readable.roots, *numbers_for(readable, readings)):
        env[root] = writer.write("placeholder", root.name, name=root.name)

    def read(node: Node, keys: Iterable[Any] = ()) -> Any:
        if node in readable.same:
            return read(*readable.same[node])
        leaf = env[node]
        for key in keys:
            leaf = writer.write("call_function", operator.getitem, (leaf, key), name=writer.names.fresh("item"))
        return leaf

    for node in readable.steps:
        if node in needed:
            env[node] = writer.copy(node, read, name=node.name)
    leaves = tuple(read(*reading) for reading in readings)
    writer.write("output", "output", (leaves,), name=writer.names.fresh("output"))
    return lazy_module(writer.close(), training=False)


def _are_in(memory: set[int], leaves: Iterable[tuple[Any, Any]]) -> bool:
    return all(storage_key(leaf) in memory for _, leaf in leaves if isinstance(leaf, Tensor))


def _reads_contents(node: Node, run: BodyRun) -> bool:
    """Whether a number, or the offset of a view, is read from a tensor's memory; fakes have a new symbol for it."""
    arguments = [run.results[read] for read in input_nodes(node)]
    tensors = sum(isinstance(value, Tensor) for value in arguments)
    known = {symbol for value in arguments for symbol in symbols_in(value)}
    if tensors <= 1 and any(map(is_unbacked, known)):
        return False  # New symbols then follow from known numbers.
    found = (symbol for _, leaf in run.fresh[node] for symbol in symbols_in(leaf))
    return any(is_unbacked(symbol) and symbol not in known for symbol in found)


def _is_constant(value: Any) -> bool:
    """Whether a value is the same for all calls that a compiled function serves, as sizes without symbols are."""
    if isinstance(value, tuple | list):
        return all(map(_is_constant, value))
    return value is None or type(value) in _CONSTANTS


_CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _needed(readable: Readable, wanted: Iterable[Node]) -> set[Node]:
    """The nodes from the roots to the wanted ones."""
    found: set[Node] = set(readable.roots)
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node in readable.same:
            waiting.append(readable.same[node][0])
        elif node in readable.numbers:
            found.add(node)
        elif node not in found and node in readable.steps:
            found.add(node)
            waiting += input_nodes(node)
    return found
