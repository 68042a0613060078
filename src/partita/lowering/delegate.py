"""`Delegate`, the treatment that has a backend compile a region now, and carries the stored function in the program."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NoReturn, final

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from partita._plain_help import PlainHelp
from partita._torch.compile_context import compiler_scope
from partita._torch.expressions import Expression, Operation, Read, Symbol, evaluator, parsed, printed, substituted
from partita._torch.fake_tensors import shared_fake_mode, to_fake
from partita._torch.fx.graph_writer import GraphWriter
from partita._torch.fx.lazy_graph_module import lazy_module
from partita._torch.operator_schemas import SYM_SIZE
from partita._torch.symbolic_shapes import hint_of, symbol_of, symbolic_expression, symbols_in, write_number
from partita.analysis.modes import Mode as GraphMode
from partita.analysis.nodes import common_stack, returned_by, value_of
from partita.analysis.tolerance import Tolerance
from partita.backends._torch.fake_inputs import FakeInputs
from partita.backends.backend import (
    Backend,
    backend_names,
    find_backend,
    takes_symbols,
    tolerance_of,
    wants_constants,
)
from partita.backends.delegates import DelegateSpec, Number, TensorForm, can_store, version_of
from partita.errors import BackendError, LoweringError, OptionError
from partita.hops.delegate import DELEGATE
from partita.lowering._torch.bodies import body_for_compiler
from partita.lowering._torch.containers import LEAF
from partita.lowering._torch.dry_run import unchecked_call
from partita.lowering._torch.guards import conditions_of, symbolic_places
from partita.lowering.config import effects_by_name
from partita.lowering.constants import holding, state_inputs
from partita.lowering.lower import scope_of, title_of
from partita.lowering.variant_cache import timed
from partita.plans.compilations import CompiledBody
from partita.plans.treatment import Called, Site
from partita.program._torch.guards import functions_of_conditions
from partita.program.dry_run_refusals import refusal_of_numbers
from partita.program.exported import FOLDED
from partita.program.program import Program
from partita.rewrite.bodies import bare_body
from partita.rewrite.operator_calls import owned_inputs


@final
@dataclass(frozen=True, slots=True)
class Delegate(metaclass=PlainHelp):
    """Has `backend` compile the body when the plan is applied, for the sizes that were traced, and stores the function.

    The region becomes one call of the operator `partita::delegate`, which carries the bytes that `backend.save`
    returned, so that an exported program can hold it. For inference: no gradients flow through it. A region that cannot
    be compiled or stored is a `LoweringError`.
    """

    backend: str | Backend = "aot_inductor"

    #: A function is compiled for one mode.
    allows_mixed_modes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        found = find_backend(self.backend)
        if not can_store(found):
            raise OptionError(f"backend {found.name!r} has no `save` and `load`, so its functions cannot be stored")
        if found.name not in backend_names():
            raise OptionError(
                f"a file refers to a backend by its name, and no backend called {found.name!r} is installed; "
                "register it with partita.backends.register_backend, or give its package an entry point"
            )

    @property
    def tolerance(self) -> Tolerance:
        """That of the backend."""
        return tolerance_of(find_backend(self.backend))

    def treat_at(self, body: GraphModule, site: Site) -> Called:
        backend = find_backend(self.backend)
        program = Program(body, caller=site.caller)
        bare = bare_body(program)
        region = _Region(site, bare.module, backend, bare.mode)
        region.check()
        if not region.outputs:  # Sizes alone, of which there is nothing to compile.
            return Called(body, inlined=True)
        scope = scope_of(bare.mode)
        with torch.no_grad():
            (spec, data), seconds = timed(
                lambda: region.compiled() if scope is None else scope.call(lambda _: region.compiled(), ()),
                title=title_of(site),
                backend=backend.name,
            )
        inputs = region.described_inputs(spec)
        site.compilations.add(CompiledBody(region.name, backend.name, inputs, gradients=False, seconds=seconds))
        return Called(region.calling(spec, data), inlined=True)


@final
class _Region:
    """One region while it is compiled: its inputs as fakes, and what its function takes and returns."""

    def __init__(self, site: Site, body: GraphModule, backend: Backend, mode: GraphMode) -> None:
        self.name, self.body, self.backend, self.mode = site.region.name, body, backend, mode
        self.site = site
        self.constants = self._constants() if wants_constants(backend) else {}
        self.inputs = body.graph.find_nodes(op="placeholder")
        #: The inputs of the compiled function.
        self.variable = [node for node in self.inputs if node.name not in self.constants]
        returned = returned_by(body.graph)
        #: Sizes among the results, which are computed beside the compiled function.
        self.sizes = [one for one in returned if isinstance(one, Node) and isinstance(value_of(one), torch.SymInt)]
        self.outputs: Sequence[Any] = [one for one in returned if one not in self.sizes]
        #: The nodes that only these sizes need, in reverse order.
        self.beside = _needed_only_by_sizes(body.graph)

    def check(self) -> None:
        """Raises where the region does more than compute tensors and sizes from tensors and integers."""
        for node in self.body.graph.nodes:
            is_asked = node.op.startswith("call_") and node.name not in self.beside
            reason = self.backend.refusal(node) if is_asked else None
            if reason is not None:
                self._fail(f"{self.backend.name} refuses {node.name!r}: {reason}")
        checks = {node.name for node in self.body.graph.nodes if _is_assertion(node)}
        effectful = _visible_effects(Program(self.body)) - checks
        if effectful:
            names = ", ".join(map(repr, sorted(effectful)))
            self._fail(f"{names}: a delegate has no effects; leave them outside of the region")
        unchecked = unchecked_call(self.body)
        if unchecked is not None:
            self._fail(
                f"{unchecked!r} may read outside of its tensor or divide by zero, which compiled code does not check"
            )
        too_large = refusal_of_numbers(self.body)  # A compiler computes it, for ever or until memory is full.
        if too_large is not None:
            self._fail(too_large)
        for node in self.variable:
            if not isinstance(value_of(node), Tensor | torch.SymInt | int):
                self._fail(f"input {node.name!r} was traced as {value_of(node)!r}, which is no tensor and no integer")
        for value in self.outputs:
            if not isinstance(value, Node) or not isinstance(value_of(value), Tensor):
                self._fail(
                    f"it returns {value!r}, which was traced neither as a tensor nor as a size; leave what computes it "
                    "outside of the region"
                )
        mutated = self.site.region.surroundings().mutations.names_mutated_outside(self.site.region.nodes)
        written = [node.name for node in self.outputs if node.name in mutated]
        if written:
            names = ", ".join(map(repr, written))
            self._fail(f"{names}: it is mutated after the region, and a delegate returns results of its own")

    def compiled(self) -> tuple[DelegateSpec, bytes]:
        """What the function takes and returns, and the stored function."""
        places = self._places()
        with compiler_scope():
            fakes = FakeInputs()
            symbols = {name: fakes.size(hint, name) for name, (_, hint) in places.items()}
            inputs = [fakes.like(value_of(node), partial(_with, symbols)) for node in self.variable]
            known = symbolic_places(inputs)
            body = self._body()
            held = {at: self.constants[one.name] for at, one in enumerate(self.inputs) if one.name in self.constants}
            try:
                function = self.backend.compile(holding(body, held) if held else body, inputs)
                data = self.backend.save(function)  # type: ignore[attr-defined]
            except Exception as error:
                self._fail(f"{self.backend.name} cannot compile or store it: {error}", error)
            conditions = conditions_of(known, fakes.env) or ()
        if not isinstance(data, bytes):
            self._fail(f"`save` of {self.backend.name} returned {type(data).__name__}, which is not bytes")
        values = [value_of(node) for node in self.variable]
        forms = [_form(value) if isinstance(value, Tensor) else _text(value) for value in values]
        spec = DelegateSpec(
            region=self.name,
            backend=self.backend.name,
            version=version_of(self.backend),
            inputs=tuple(forms),
            outputs=tuple(_form(value_of(node)) for node in self.outputs),
            symbols={name: place for name, (place, _) in places.items()},
            autocast=tuple((one.device, _dtype_name(one.dtype), one.enabled) for one in self.mode.autocast),
            conditions=_texts(_on_symbols(condition, forms) for condition in conditions),
        )
        try:
            return DelegateSpec.of(spec.text()), data
        except BackendError as error:
            self._fail(str(error), error)

    def _body(self) -> GraphModule:
        """What the backend compiles: the body without the sizes that it returns, and what only these need."""
        outputs = [(node.name, ()) for node in self.outputs]
        body = body_for_compiler(self.body, (), inputs=(LEAF,) * len(self.inputs), outputs=outputs)
        copies = {node.name: node for node in body.graph.nodes}
        for name in self.beside:
            body.graph.erase_node(copies[name])
        if self.beside:
            body.recompile()
        return body

    def described_inputs(self, spec: DelegateSpec) -> tuple[str, ...]:
        """The inputs that are no parameters or buffers, in words."""
        places = state_inputs(self.body, self.site.region)
        state = {self.inputs[place].name for place in places}
        pairs = zip(self.variable, spec.inputs, strict=True)
        return tuple(_described(form) for node, form in pairs if node.name not in state)

    def calling(self, spec: DelegateSpec, data: bytes) -> GraphModule:
        """A module with the inputs and outputs of the body that calls the operator, and holds the stored function."""
        writer, env = GraphWriter(), dict[Node, Node]()
        writer.names.reserve(node.name for node in self.body.graph.nodes)
        for node in self.inputs:
            env[node] = writer.copy(node, env.__getitem__, name=node.name)
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        held = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else nothing
        blob = writer.write("get_attr", "delegate", name=writer.names.fresh(f"{self.name}_delegate"))
        blob.meta["val"] = to_fake(held, shared_fake_mode([value_of(node) for node in self.inputs]))
        tensors = [env[node] for node in self.variable if isinstance(value_of(node), Tensor)]
        numbers = [env[node] for node in self.variable if not isinstance(value_of(node), Tensor)]
        arguments = (blob, spec.text(), tensors, numbers)
        call = writer.write("call_function", DELEGATE, arguments, name=writer.names.fresh(self.name))
        call.meta["val"] = [value_of(node) for node in self.outputs]
        call.meta[FOLDED] = tuple(self.constants)
        stack = common_stack([node for node in self.body.graph.nodes if node.op.startswith("call_")])
        for made in (blob, call) if stack else ():
            made.meta["nn_module_stack"] = dict(stack)
        for at, node in enumerate(self.outputs):
            env[node] = writer.write("call_function", operator.getitem, (call, at), name=node.name)
            writer.copy_meta(node, env[node])
        self._write_sizes(writer, env)
        output = self.body.graph.output_node()
        writer.copy(output, env.__getitem__, name=output.name)
        module = lazy_module(writer.close(), training=False, is_part=True)
        module.register_buffer("delegate", held)
        return module

    def _write_sizes(self, writer: GraphWriter, env: dict[Node, Node]) -> None:
        """Computes the sizes that the region returns from those of its inputs."""
        wanted = {symbol for node in self.sizes for symbol in symbols_in(value_of(node))}
        read: dict[Any, Node] = {}
        for node, axis, number in self._numbers():
            symbol = symbol_of(number)
            if symbol not in wanted or symbol in read:
                continue
            read[symbol] = env[node]
            if axis >= 0:
                read[symbol] = writer.write(
                    "call_function", SYM_SIZE, (env[node], axis), name=writer.names.fresh(f"{node.name}_size")
                )
                read[symbol].meta["val"] = number
        for node in self.sizes:
            written = write_number(value_of(node), read)
            if not isinstance(written, Node):
                self._fail(f"it returns {node.name!r}, which was traced as {value_of(node)} and is not dynamic")
            written.meta["val"] = value_of(node)
            env[node] = written

    def _constants(self) -> dict[str, Tensor]:
        """The parameters and buffers among the inputs, by name."""
        held = {node.name: tensor for node, tensor in owned_inputs(self.site.region.surroundings()).items()}
        names = [node.name for node in self.body.graph.find_nodes(op="placeholder")]
        wanted = (names[place] for place in state_inputs(self.body, self.site.region))
        return {name: held[name] for name in wanted if name in held}

    def _places(self) -> dict[str, tuple[tuple[int, int], int]]:
        """For each symbol the input and axis where it is read, and the number that it was traced with."""
        found: dict[str, tuple[tuple[int, int], int]] = {}
        places = {node: at for at, node in enumerate(self.variable)}
        for node, axis, number in self._numbers():
            symbol = symbol_of(number)
            if symbol is not None:
                found.setdefault(str(symbol), ((places[node], axis), hint_of(number)))
        values = map(value_of, (*self.variable, *self.outputs, *self.sizes))
        used = {str(symbol) for value in values for symbol in symbols_in(value)}
        if used - found.keys():
            self._fail_without(used - found.keys())
        if found and not takes_symbols(self.backend):
            self._fail(f"{self.backend.name} takes plain sizes only; capture the program without dynamic shapes")
        return found

    def _fail_without(self, unread: set[str]) -> NoReturn:
        """Says which sizes cannot be read: they are in no input, or in derived sizes such as `2*s0` only."""
        names = ", ".join(sorted(unread))
        for node, _, number in self._numbers():
            if not unread.isdisjoint(map(str, symbols_in(number))):
                self._fail(
                    f"of its inputs only {node.name!r} has {names}, in {number}, and a size is read where it is one "
                    "symbol; capture that input with a Dim of its own in place of a derived one, or take in the "
                    "operators that the size comes from"
                )
        self._fail(f"the sizes {names} are of no input; take in the operators that they come from")

    def _numbers(self) -> Iterator[tuple[Node, int, Any]]:
        """The sizes of the inputs that vary, each with its axis, and inputs that are numbers, with -1."""
        for node in self.variable:
            value = value_of(node)
            for axis, number in enumerate(value.shape) if isinstance(value, Tensor) else [(-1, value)]:
                yield node, axis, number

    def _fail(self, why: str, error: Exception | None = None) -> NoReturn:
        raise LoweringError(f"region {self.name!r} cannot be delegated: {why}") from error


def _needed_only_by_sizes(graph: Graph) -> dict[str, None]:
    """The names of the nodes that compute sizes for the output alone, in reverse order."""
    found: dict[Node, None] = {}
    output = graph.output_node()
    for node in reversed(graph.nodes):
        is_size = node.op == "call_function" and isinstance(value_of(node), torch.SymInt)
        if is_size and all(user is output or user in found for user in node.users):
            found[node] = None
    return {node.name: None for node in found}


def _visible_effects(body: Program) -> set[str]:
    """The names of the nodes whose effects show outside: mutations of tensors that the body has made do not."""
    number, calls = body.index.number, body.calls
    found = set()
    for name, effects in effects_by_name(body).items():
        mutated = calls.mutated.get(number[body.node(name)], frozenset())
        inputs = body.graph.find_nodes(op="placeholder") if mutated else ()
        is_inside = not any(calls.storages.find(number[node]) in mutated for node in inputs)
        is_inside = is_inside and not any(True for _ in calls.storages.tensors_in(mutated))
        if not is_inside or replace(effects, mutates=()).is_effectful:
            found.add(name)
    return found


def _is_assertion(node: Node) -> bool:
    """Whether it only checks metadata, as the operator itself does, or a number."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name in ("aten::_assert_tensor_metadata", "aten::_assert_scalar")


def _form(value: Tensor) -> TensorForm:
    sizes, strides = tuple(map(_text, value.shape)), tuple(map(_text, value.stride()))
    return TensorForm(_dtype_name(value.dtype) or "", str(value.device), sizes, strides)


def _described(form: TensorForm | Number) -> str:
    if isinstance(form, TensorForm):
        device = "" if form.device == "cpu" else f" on {form.device}"
        return f"{form.dtype}[{', '.join(map(_described, form.sizes))}]{device}"
    return str(form) if isinstance(form, int) else "*"


def _dtype_name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _text(number: Any) -> Number:
    return printed(symbolic_expression(number.node.expr)) if isinstance(number, torch.SymInt) else int(number)


def _with(symbols: Mapping[str, Any], number: Any) -> Any:
    """The same expression in other symbols."""
    if not isinstance(number, torch.SymInt):
        return number
    placed = symbolic_expression(number.node.expr, {name: Read(place) for place, name in enumerate(symbols)})
    return evaluator(placed, functions_of_conditions())(list(symbols.values()))


def _texts(conditions: Iterable[Expression]) -> tuple[str, ...]:
    """The conditions as text, each once, without those that say that a size is itself."""
    kept = (one for one in conditions if not isinstance(one, Operation) or one.operands[:1] != one.operands[1:])
    return tuple(dict.fromkeys(map(printed, kept)))


def _on_symbols(condition: Expression, forms: Sequence[TensorForm | Number]) -> Expression:
    """A condition on inputs as one on symbols."""

    def known(part: Symbol | Read) -> Expression:
        assert isinstance(part, Read)
        assert isinstance(part.input, int)
        number = forms[part.input]
        if isinstance(number, TensorForm):
            assert part.axis is not None
            number = (number.sizes if part.query == "size" else number.strides)[part.axis]
        return number if isinstance(number, int) else parsed(number)

    return substituted(condition, known)
