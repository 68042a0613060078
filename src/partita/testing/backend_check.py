"""Checks a backend against the laws that hold for any compiler, on small bodies and on whole programs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.export import Dim
from torch.fx import GraphModule, Node, symbolic_trace

from partita._torch.compile_context import compiler_scope
from partita._torch.modes import read_ambient
from partita.backends import Backend, find_backend
from partita.backends._torch.fake_inputs import FakeInputs, strides_of
from partita.backends.backend import takes_symbols, tolerance_of, trains, wants_constants
from partita.capture import capture
from partita.equivalence import Comparison, compare
from partita.errors import OptionError
from partita.lowering._torch.guards import Check, check_from, conditions_of, symbolic_places
from partita.lowering.variant import WrongOutputsError, check_outputs
from partita.near_names import near_names
from partita.plans import Plan, plan
from partita.plans.report import called_name
from partita.policies import ByCapability
from partita.program.program import Program
from partita.testing.backend_bodies import BODIES, Body, CapturedLayer
from partita.testing.generator.build import dump, random_case
from partita.testing.generator.draft import Case
from partita.testing.generator.state import ramp
from partita.testing.laws.core import LawError
from partita.testing.supported_bodies import bodies_of, body_of, supported_operators
from partita.treatments import Lower


def check_backend(
    backend: str | Backend,
    *,
    programs: int | Iterable[Case] = 5,
    bodies: Iterable[str] | None = None,
    raises: bool = True,
) -> BackendReport:
    """Checks the laws on small bodies, all or those named, and on programs.

    Unless bodies are named, there are also some of nothing but operators that the backend supports. The report says how
    many bodies were tried, and which operators were in them.
    A body of torch's functions that the backend refuses is tried once more as aten operators, as `partita.capture`
    writes it. What it refuses then is excluded, and a failure to compile or to store breaks no law as long as something
    compiles: both are in the notes. If a law is broken, it raises `LawError`, whose message is the report, or returns
    the report where `raises` is False.
    """
    found = find_backend(backend)
    cases = [random_case(seed) for seed in range(programs)] if isinstance(programs, int) else list(programs)
    checking = _BackendCheck(found)
    checking.check_value()
    for body in BODIES if bodies is None else map(_named, bodies):
        checking.check_body(body)
    for case in cases:
        checking.check_program(case)
    if bodies is None:
        checking.check_supported()
        checking.check_captured()
    report = checking.report()
    if raises and not report.holds:
        raise LawError(str(report))
    return report


def _named(name: str) -> Body:
    found = {body.name: body for body in BODIES}
    if name in found:
        return found[name]
    near = near_names(name, found) or found
    raise OptionError(f"no body is called {name!r}; try {', '.join(map(repr, near))}")


@final
@dataclass(frozen=True, slots=True)
class BrokenLaw:
    """One law that does not hold, the body or program that shows it, and how."""

    law: str
    where: str
    detail: str

    def __str__(self) -> str:
        return f"{self.law}\n    {self.where}: {self.detail}"


@final
@dataclass(frozen=True, slots=True)
class BackendReport:
    """The number of checks, the broken laws, notes on what was excluded, and what was tried."""

    backend: str
    checks: int
    broken: tuple[BrokenLaw, ...] = ()
    notes: tuple[str, ...] = ()
    #: How many small bodies it compiled, or tried to, and how many it refused.
    bodies: int = 0
    refused: int = 0
    #: What these bodies call, sorted by name.
    operators: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether nothing is broken."""
        return not self.broken

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return {"backend": self.backend, "holds": self.holds, **asdict(self)}

    def __str__(self) -> str:
        laws = list(dict.fromkeys(broken.law for broken in self.broken))
        found = f"{len(laws)} laws broken" if len(laws) > 1 else "1 law broken" if laws else "all laws hold"
        lines = [f"{self.backend}: {found} in {self.checks} checks"]
        for law in laws:
            lines.append(f"  {law}")
            lines += [f"    {broken.where}: {broken.detail}" for broken in self.broken if broken.law == law]
        lines.append(f"  {self._tried()}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _tried(self) -> str:
        refused = f", {self.refused} refused" if self.refused else ""
        if not self.bodies:
            return f"tried no small body{refused}"
        count = len(self.operators)
        shown = ", ".join(self.operators[:_SHOWN]) + (f" and {count - _SHOWN} more" if count > _SHOWN else "")
        bodies = "1 small body" if self.bodies == 1 else f"{self.bodies} small bodies"
        return f"tried {bodies}{refused}; {count} operator{'' if count == 1 else 's'} in them: {shown}"


#: How many operators a report prints.
_SHOWN = 8


@final
class _BackendCheck:
    """One backend while it is checked."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.checks = self.compiled = self.lowered = self.bodies = self.refused = 0
        self.operators: set[str] = set()
        self.broken: list[BrokenLaw] = []
        self._notes: dict[str, list[str]] = {}

    def report(self) -> BackendReport:
        """The report of all checks."""
        wrong = None if self.compiled or self.lowered else "it refuses or fails on everything"
        self.hold("something that it supports compiles", "all bodies and programs", lambda: wrong)
        notes = tuple(f"{note}: {', '.join(dict.fromkeys(places))}" for note, places in self._notes.items())
        operators = tuple(sorted(self.operators))
        return BackendReport(
            self.backend.name, self.checks, tuple(self.broken), notes, self.bodies, self.refused, operators
        )

    def note(self, text: str, where: str) -> None:
        """Records what was excluded, and where."""
        self._notes.setdefault(text, []).append(where)

    def hold(self, law: str, where: str, check: Callable[[], str | None]) -> None:
        """Runs a check, which returns what is wrong, or None."""
        self.checks += 1
        try:
            wrong = check()
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong is not None:
            self.broken.append(BrokenLaw(law, where, wrong))

    def check_value(self) -> None:
        """Checks the backend itself."""
        self.hold("it is a value: equal copies, a hash, a pickle", self.backend.name, lambda: _is_a_value(self.backend))

    def check_body(self, body: Body) -> None:
        """Checks the compiled body, for static and for dynamic sizes, and whether it can be stored."""
        if body.held and not wants_constants(self.backend):
            return
        module, name = body.graph_module(), body.name
        refused = self.check_refusals(module, name)
        operators = _as_operators(body) if refused else None
        if operators is not None:
            module, name = operators, f"{name}, as aten operators"
            refused = self.check_refusals(module, name)
        if refused:
            self.note(f"excluded since it refuses {refused!r}", body.name)
            self.refused += 1
            return
        self.bodies += 1
        for node in module.graph.nodes:
            if node.op in ("call_function", "call_method"):
                self.operators.add(called_name(node))
        ways = (False, True) if takes_symbols(self.backend) else (False,)
        for symbols in ways:
            where = f"{name}, with symbols for sizes" if symbols else name
            calls = _CompiledCalls(self.backend, module, symbols=symbols)
            self.hold(body.law, where, lambda calls=calls: self._compared(body, module, calls))  # type: ignore[misc]
            self.hold("compiling disturbs nothing", where, lambda calls=calls: "; ".join(calls.disturbed) or None)  # type: ignore[misc]
            self.hold(_RETURNING, where, lambda calls=calls: "; ".join(calls.wrong_results) or None)  # type: ignore[misc]
            self.compiled += len(calls.functions)
            for reason in calls.failed:
                self.note(f"{_FAILED} {reason}", where)
        if body.lowered:
            case = Case(module, self._inputs(body, 5), {}, origin=body.name)
            self.hold(_LOWERING, body.name, lambda: self._lowered(case))
        if hasattr(self.backend, "save"):
            self.hold("what is stored can be loaded", body.name, lambda: self._restored(body, module, calls.functions))

    def check_supported(self) -> None:
        """Checks bodies of the operators that it supports, with large values too; where one is wrong, one by one."""
        names = supported_operators(self.backend.refusal)
        known = self._wrong()
        for body in bodies_of(names):
            self.check_body(body)
        if self._wrong() != known:
            for name in names:
                self.check_body(body_of(name))

    def _wrong(self) -> tuple[int, list[str]]:
        """What is broken or has failed so far."""
        return len(self.broken), [note for note in self._notes if note.startswith(_FAILED)]

    def check_refusals(self, module: GraphModule, where: str) -> str | None:
        """Queries the backend for every node; returns its first reason to refuse one, if any."""
        answers: list[Any] = []

        def query() -> str | None:
            before = dump(module)
            answers.extend(map(self.backend.refusal, module.graph.nodes))
            again = [self.backend.refusal(node) for node in module.graph.nodes]
            strange = [answer for answer in answers if not _is_answer(answer)]
            if strange:
                return f"a refusal is a reason in one line, or None, not {strange[0]!r}"
            if again != answers:
                return "queried twice, it gives two answers"
            return None if dump(module) == before else "it changes the graph of the node"

        self.hold("a refusal is a reason, and always the same", where, query)
        pairs = zip(module.graph.nodes, answers, strict=False)
        reasons = [reason for node, reason in pairs if reason is not None and node.op not in ("placeholder", "output")]
        return str(reasons[0]) if reasons else None

    def check_program(self, case: Case) -> None:
        """Checks the program with everything lowered that the backend supports."""
        self.check_refusals(case.graph_module, case.origin)
        self.hold(_LOWERING, case.origin, lambda: self._lowered(case))

    def check_captured(self) -> None:
        """Checks a layer that is captured for any number of rows, and its weights when they have changed."""
        program = capture(CapturedLayer(), (ramp(5, 4),), dynamic_shapes=({0: Dim("rows", min=2)},))
        lowering = plan(program, ByCapability(self.backend), Lower(self.backend))
        after, where = lowering.apply(), "a captured layer"
        for rows in (5, 7):
            self.hold(_ANY_SIZE, f"{where}, {rows} rows", lambda rows=rows: self._equal(program, after, ramp(rows, 4)))  # type: ignore[misc]
        with torch.no_grad():
            for tensor in program.module().state_dict().values():
                tensor.mul_(0.5)
        self.hold(_CHANGED, where, lambda: self._equal(program, after, ramp(7, 4)))
        self._note_failures(lowering, where)

    def _equal(self, program: Program, after: Program, x: Tensor) -> str | None:
        gradients = trains(self.backend)
        with torch.set_grad_enabled(gradients):
            comparison = compare(program, after, (x,), gradients=gradients, other_shapes=False)
        return None if comparison.equal else _first(comparison)

    def _note_failures(self, lowering: Plan, where: str) -> None:
        for failure in lowering.failures:
            self.note(f"{_FAILED} {failure.reason}", f"{failure.region} of {where}")
        self.lowered += len(lowering.partition) - len({failure.region for failure in lowering.failures})

    def _compared(self, body: Body, module: GraphModule, calls: _CompiledCalls) -> str | None:
        for rows in (5, 7):
            with body.under():
                comparison = self._compare(module, calls, self._inputs(body, rows))
            if not comparison.equal:
                return f"{rows} rows: {_first(comparison)}"
        return None

    def _inputs(self, body: Body, rows: int) -> tuple[Any, ...]:
        """The inputs of the body, which require no gradients if the backend does not train."""
        inputs = body.inputs(rows)
        if trains(self.backend):
            return inputs
        return tuple(value.detach() if isinstance(value, Tensor) else value for value in inputs)

    def _compare(
        self, before: GraphModule, after: _CompiledCalls, args: Sequence[Any], *, no_grad_call: bool = True
    ) -> Comparison:
        gradients = trains(self.backend) and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        with torch.set_grad_enabled(gradients):
            return compare(
                before,
                after,
                tuple(args),
                tolerance=tolerance_of(self.backend),
                gradients=gradients,
                no_grad_call=no_grad_call,
                other_shapes=False,
            )

    def _restored(self, body: Body, module: GraphModule, functions: Sequence[Any]) -> str | None:
        backend: Any = self.backend
        for function in functions[:1]:
            try:
                data = backend.save(function)
            except Exception as error:
                self.note(f"not stored: {_one_line(error)}", body.name)
                continue
            if not isinstance(data, bytes):
                return f"`save` returns bytes, not {type(data).__name__}"
            loaded = _CompiledCalls(_Loading(self.backend, data), module)
            with body.under():
                comparison = self._compare(module, loaded, self._inputs(body, 5), no_grad_call=False)
            return None if comparison.equal else _first(comparison)
        return None

    def _lowered(self, case: Case) -> str | None:
        program = Program.of(case.graph_module)
        lowering = plan(program, ByCapability(self.backend), Lower(self.backend))
        if not len(lowering.partition):
            captured = _captured(case)
            program = program if captured is None else captured
            lowering = plan(program, ByCapability(self.backend), Lower(self.backend))
        after = lowering.apply()
        with torch.set_grad_enabled(trains(self.backend)):
            comparison = compare(program, after, case.args, case.kwargs, gradients=trains(self.backend))
        self._note_failures(lowering, case.origin)
        return None if comparison.equal else str(comparison)


def _as_operators(body: Body) -> GraphModule | None:
    """The body as aten operators, for any number of rows; None where it cannot be captured."""
    inputs = body.inputs(5)
    sizes = tuple({0: Dim.AUTO} if isinstance(value, Tensor) and value.dim() else None for value in inputs)
    traced, sizes = symbolic_trace(body.function), (*sizes, *(None for _ in body.held))
    try:
        with body.under():
            program = capture(traced, (*inputs, *body.held), dynamic_shapes=sizes)
            return body.holding(program.graph_module)
    except Exception:  # A body does what a tracer may refuse, with any error.
        return None


def _captured(case: Case) -> Program | None:
    held = case.copy()
    try:
        return capture(held.graph_module, held.args, held.kwargs)
    except Exception:
        return None


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


_FAILED = "it failed with"
_RETURNING = "it makes functions that return a tuple or a list, with all outputs of the body"
_ANY_SIZE = "a captured program serves every size that it was captured for"
_CHANGED = "weights that have changed are read again"
_LOWERING = "a lowered program is equivalent to the original"


@final
class _Loading:
    """A backend that loads instead of compiling."""

    def __init__(self, backend: Any, data: bytes) -> None:
        self._backend, self._data = backend, data
        self.name = backend.name

    def refusal(self, node: Node) -> str | None:
        return None

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Any:
        return self._backend.load(self._data)


def _is_a_value(backend: Backend) -> str | None:
    if not backend.name or not isinstance(backend.name, str):
        return f"its name is {backend.name!r}"
    tolerance_of(backend)
    copies = {"copy": copy.deepcopy(backend), "pickle": pickle.loads(pickle.dumps(backend))}
    for kind, other in copies.items():
        if other != backend or hash(other) != hash(backend):
            return f"its {kind} is another; make it a frozen dataclass of plain values"
    return None


def _is_answer(answer: object) -> bool:
    return answer is None or (isinstance(answer, str) and bool(answer) and "\n" not in answer)


def _first(comparison: Comparison) -> str:
    return str(comparison.differences[0])


@final
@dataclass(frozen=True, slots=True)
class _Made:
    function: Callable[..., Sequence[Any]]
    serves: Check | None


@final
class _CompiledCalls:
    """Compiles `body` for each specialization key and calls the result, with nothing between it and the backend.

    With `symbols`, one function serves all sizes that its guards allow. It is no module, since comparisons restore the
    attributes of modules.
    """

    def __init__(self, backend: Backend, body: GraphModule, *, symbols: bool = False) -> None:
        self._backend, self._body, self._symbols = backend, body, symbols
        self._made: dict[Any, list[_Made]] = {}
        returned = body.graph.output_node().args[0]
        self._count = len(returned) if isinstance(returned, tuple | list) else None
        #: What compiling changed although it should not.
        self.disturbed: dict[str, None] = {}
        #: What is no function, or returns wrong outputs.
        self.wrong_results: dict[str, None] = {}
        #: Why the body itself was called.
        self.failed: dict[str, None] = {}

    @property
    def functions(self) -> list[Callable[..., Sequence[Any]]]:
        """All compiled functions."""
        found = [made.function for variants in self._made.values() for made in variants]
        return [function for function in found if function is not self._body]

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        variants = self._made.setdefault(_specialization_key(inputs, sizes=not self._symbols), [])
        found = next((made for made in variants if made.serves is None or made.serves(inputs)), None)
        if found is None:
            found = self._compiled(inputs)
            variants.append(found)
        outputs = found.function(*inputs)
        try:
            check_outputs(outputs, count=self._count, tensors=())
        except WrongOutputsError as error:
            self.wrong_results[f"a compiled function {error}"] = None
        return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)

    def _compiled(self, inputs: Sequence[Any]) -> _Made:
        body, fakes = copy.deepcopy(self._body), FakeInputs()
        fake_inputs = [_fake(value, place, fakes, symbols=self._symbols) for place, value in enumerate(inputs)]
        places = symbolic_places(fake_inputs)
        with compiler_scope():
            tensors = [value for value in fake_inputs if isinstance(value, Tensor)]
            properties, modes = list(map(_properties, tensors)), read_ambient()
            dtype = torch.get_default_dtype()
            try:
                function = self._backend.compile(body, fake_inputs)
            except Exception as error:
                self.failed[_one_line(error)] = None
                return _Made(self._body, None)
            if read_ambient() != modes:
                self.disturbed["compiling leaves modes switched"] = None
            if torch.get_default_dtype() is not dtype:
                self.disturbed["compiling leaves the default dtype switched"] = None
            if list(map(_properties, tensors)) != properties:
                self.disturbed["compiling changes its fake inputs"] = None
        if not callable(function):
            self.wrong_results[f"`compile` returns a function, not {function!r}"] = None
            return _Made(self._body, None)
        conditions = conditions_of(places, fakes.env)
        return _Made(function, None if conditions is None else check_from(conditions))


def _specialization_key(inputs: Sequence[Any], *, sizes: bool) -> tuple[Any, ...]:
    """What a compiled function is specialized on."""

    def key(value: Any) -> Any:
        if sizes or not isinstance(value, Tensor | int):
            return _properties(value)
        if isinstance(value, Tensor):
            return value.dtype, value.device, value.dim(), value.requires_grad
        return type(value)

    return (read_ambient(), *map(key, inputs))


def _properties(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.device, tuple(value.shape), tuple(value.stride()), value.requires_grad, value.is_leaf
    return type(value), str(value)


def _fake(value: Any, place: int, fakes: FakeInputs, *, symbols: bool) -> Any:
    if not isinstance(value, Tensor):
        return fakes.number(value, place) if symbols and type(value) is int else value
    sizes = tuple(value.shape)
    faked = [fakes.size(size, (place, axis)) if symbols and not axis else size for axis, size in enumerate(sizes)]
    return fakes.tensor(
        faked,
        strides_of(sizes, value.stride(), faked),
        dtype=value.dtype,
        device=value.device,
        requires_grad=value.requires_grad,
        is_leaf=value.is_leaf,
    )
