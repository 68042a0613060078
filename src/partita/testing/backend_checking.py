"""Checking a backend: each law is held against it where it can be, and what is left out is noted."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from partita.backends import Backend
from partita.backends.backend import takes_symbols, tolerance_of, trains
from partita.equivalence import Comparison, compare
from partita.errors import BackendError
from partita.graphs.program import Program
from partita.plans import plan
from partita.policies import ByCapability
from partita.testing.backend_bodies import Body
from partita.testing.backend_calls import CompiledCalls
from partita.testing.backend_report import BackendReport, BrokenLaw
from partita.testing.case import Case
from partita.testing.dump import dump
from partita.treatments import Lower

__all__ = ["BackendChecking"]


@final
class BackendChecking:
    """One backend while it is checked."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.checks = self.compiled = self.lowered = 0
        self.broken: list[BrokenLaw] = []
        self._notes: dict[str, list[str]] = {}

    def report(self) -> BackendReport:
        """What was found."""
        self.hold("something that it takes compiles", "all bodies and programs", self._something_compiles)
        notes = tuple(f"{note}: {', '.join(dict.fromkeys(places))}" for note, places in self._notes.items())
        return BackendReport(self.backend.name, self.checks, tuple(self.broken), notes)

    def note(self, text: str, where: str) -> None:
        """Keeps what was left out, and where."""
        self._notes.setdefault(text, []).append(where)

    def hold(self, law: str, where: str, check: Callable[[], str | None]) -> None:
        """Makes a check, which says what is wrong or gives None."""
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
        """Checks what is compiled of a body, for known sizes and for symbols, and whether it can be stored."""
        module = body.graph_module()
        refused = self.check_refusals(module, body.name)
        if refused:
            self.note(f"left out since it refuses {refused!r}", body.name)
            return
        ways = (False, True) if takes_symbols(self.backend) else (False,)
        for symbols in ways:
            where = f"{body.name}, with symbols for sizes" if symbols else body.name
            calls = CompiledCalls(self.backend, module, symbols=symbols)
            self.hold(body.law, where, lambda calls=calls: self._compared(body, module, calls))  # type: ignore[misc]
            self.hold("compiling disturbs nothing", where, lambda calls=calls: "; ".join(calls.disturbed) or None)  # type: ignore[misc]
            self.hold(_GIVING, where, lambda calls=calls: "; ".join(calls.misgiven) or None)  # type: ignore[misc]
            self.compiled += len(calls.functions)
            for reason in calls.failed:
                self.note(f"it failed with {reason}", where)
        if body.lowered:
            case = Case(module, self._inputs(body, 5), {}, origin=body.name)
            self.hold(_LOWERING, body.name, lambda: self._lowered(case))
        if hasattr(self.backend, "save"):
            self.hold("what is stored comes back", body.name, lambda: self._restored(body, module, calls.functions))

    def check_refusals(self, module: GraphModule, where: str) -> str | None:
        """Asks about every node; gives what the backend refuses, if anything."""
        answers: list[Any] = []

        def ask() -> str | None:
            before = dump(module)
            answers.extend(map(self.backend.refusal, module.graph.nodes))
            again = [self.backend.refusal(node) for node in module.graph.nodes]
            strange = [answer for answer in answers if not _is_answer(answer)]
            if strange:
                return f"a refusal is a reason in one line, or None, not {strange[0]!r}"
            if again != answers:
                return "asked twice, it gives two answers"
            return None if dump(module) == before else "it changes the graph that it is asked about"

        self.hold("it says what it refuses, and always the same", where, ask)
        reasons = [answer for node, answer in zip(module.graph.nodes, answers, strict=False) if _counts(node, answer)]
        return str(reasons[0]) if reasons else None

    def check_program(self, case: Case) -> None:
        """Checks the program with all lowered that the backend takes of it."""
        self.check_refusals(case.graph_module, case.origin)
        self.hold(_LOWERING, case.origin, lambda: self._lowered(case))

    def _compared(self, body: Body, module: GraphModule, calls: CompiledCalls) -> str | None:
        for rows in (5, 7):
            with body.under():
                comparison = self._compare(module, calls, self._inputs(body, rows))
            if not comparison.equal:
                return f"{rows} rows: {_first(comparison)}"
        return None

    def _inputs(self, body: Body, rows: int) -> tuple[Any, ...]:
        """What to call the body with; what does not train is never asked for gradients."""
        inputs = body.inputs(rows)
        if trains(self.backend):
            return inputs
        return tuple(value.detach() if isinstance(value, Tensor) else value for value in inputs)

    def _compare(
        self, before: GraphModule, after: CompiledCalls, args: Sequence[Any], *, no_grad_call: bool = True
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
            except BackendError as error:
                self.note(f"not stored: {error}", body.name)
                continue
            if not isinstance(data, bytes):
                return f"`save` gives bytes, not {type(data).__name__}"
            loaded = CompiledCalls(_Loading(self.backend, data), module)
            with body.under():
                comparison = self._compare(module, loaded, self._inputs(body, 5), no_grad_call=False)
            return None if comparison.equal else _first(comparison)
        return None

    def _lowered(self, case: Case) -> str | None:
        program = Program.of(case.graph_module)
        lowering = plan(program, ByCapability(self.backend), Lower(self.backend))
        after = lowering.apply()
        with torch.set_grad_enabled(trains(self.backend)):
            comparison = compare(program, after, case.args, case.kwargs, gradients=trains(self.backend))
        for failure in lowering.failures:
            self.note(f"it failed with {failure.reason}", f"{failure.region} of {case.origin}")
        self.lowered += len(lowering.partition) - len({failure.region for failure in lowering.failures})
        return None if comparison.equal else str(comparison)

    def _something_compiles(self) -> str | None:
        return None if self.compiled or self.lowered else "it refuses or fails on everything"


_GIVING = "it makes functions that give a tuple or a list, with all outputs of the body"
_LOWERING = "a lowered program cannot be told from the original"


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


def _counts(node: Node, answer: object) -> bool:
    return answer is not None and node.op not in ("placeholder", "output")


def _first(comparison: Comparison) -> str:
    return str(comparison.differences[0])
