"""`check_backend` names the law that a faulty backend breaks, and where."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from partita.errors import OptionError
from partita.testing import LawError, check_backend, random_case
from partita.testing.backend_bodies import BODIES
from partita.testing.backend_check import _ANY_SIZE, _CHANGED, _BackendCheck

Run = Callable[..., Any]


@dataclass(frozen=True)
class Faithful:
    """Runs the body; the faults below are put around that."""

    name: ClassVar[str] = "faulty"

    def refusal(self, node: Node) -> str | None:
        return None

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Run:
        return lambda *given: self.run(body.forward, *given)

    def run(self, body: Run, *given: Any) -> Any:
        return body(*given)


class Fixing(Faithful):
    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Run:
        numbers = [value for value in inputs if isinstance(value, torch.SymInt)]
        numbers += [size for value in inputs if isinstance(value, Tensor) for size in value.shape]
        for number in numbers:
            int(number)
        return super().compile(body, inputs)


class WritesTwice(Faithful):
    def run(self, body: Run, *given: Any) -> Any:
        body(*given)
        return body(*given)


class LosesGradients(Faithful):
    def run(self, body: Run, *given: Any) -> Any:
        with torch.no_grad():
            return body(*given)


class AddsALittle(Faithful):
    def run(self, body: Run, *given: Any) -> Any:
        return [value + 1e-3 if _is_float(value) else value for value in body(*given)]


class Copies(Faithful):
    def run(self, body: Run, *given: Any) -> Any:
        return [value.clone() if isinstance(value, Tensor) else value for value in body(*given)]


class DrawsOnce(Faithful):
    def run(self, body: Run, *given: Any) -> Any:
        torch.rand(1)
        return body(*given)


class KnowsOneSize(Faithful):
    def run(self, body: Run, *given: Any) -> Any:
        return [value[:5] if isinstance(value, Tensor) and value.dim() else value for value in body(*given)]


class MakesTensors(Faithful):
    def run(self, body: Run, *given: Any) -> Any:
        return [torch.tensor(value) if isinstance(value, int | float) else value for value in body(*given)]


class LeavesGradOff(Faithful):
    def run(self, body: Run, *given: Any) -> Any:
        results = body(*given)
        torch.set_grad_enabled(False)
        return results


class GivesOneTensor(Faithful):
    def run(self, body: Run, *given: Any) -> Any:
        return body(*given)[0]


class UnpacksOneOutput(Faithful):
    def run(self, body: Run, *given: Any) -> Any:
        results = body(*given)
        return results[0] if len(results) == 1 else results


class GivesOneMore(Faithful):
    def run(self, body: Run, *given: Any) -> Any:
        return [*body(*given), None]


class MakesNothing(Faithful):
    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Any:
        return None


class LosesShapes(Faithful):
    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Run:
        for node in body.graph.find_nodes(op="call_method", target="t_"):
            body.graph.erase_node(node)
        body.recompile()
        return body.forward


class CompilesInDoubles(Faithful):
    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Run:
        torch.set_default_dtype(torch.float64)
        return body.forward


class CompilesWithGradOff(Faithful):
    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Run:
        torch.set_grad_enabled(False)
        return body.forward


class ChangesItsInputs(Faithful):
    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Run:
        inputs[0].detach_().unsqueeze_(0)
        return body.forward


class RaisesWhenAsked(Faithful):
    def refusal(self, node: Node) -> str | None:
        raise KeyError(node.name)


class AnswersTrue(Faithful):
    def refusal(self, node: Node) -> Any:
        return node.op == "placeholder"


class ChangesItsMind(Faithful):
    asked: ClassVar[list[Node]] = []

    def refusal(self, node: Node) -> str | None:
        self.asked.append(node)
        return f"asked {len(self.asked)} times" if node.op == "output" else None


class WritesOnNodes(Faithful):
    def refusal(self, node: Node) -> str | None:
        node.meta["seen"] = True
        return None


class RefusesAll(Faithful):
    def refusal(self, node: Node) -> str | None:
        return "not today"


class FailsAlways(Faithful):
    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Run:
        raise NotImplementedError("no compiler\nis here")


class StoresText(Faithful):
    def save(self, compiled: Run) -> Any:
        return "text"

    def load(self, data: bytes) -> Run:
        raise AssertionError


class LoadsAnother(Faithful):
    def save(self, compiled: Run) -> bytes:
        return b"anything"

    def load(self, data: bytes) -> Run:
        return lambda *given: [torch.zeros_like(given[0])] * 2


class IsEqualToNothing(Faithful):
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


FAULTS: list[tuple[Any, str, str]] = [
    (WritesTwice(), "accumulation", "what the body mutates is mutated once"),
    (WritesTwice(), "only_a_write", "what the body mutates is mutated once"),
    (LosesGradients(), "several_uses", "gradients flow to every input that requires one"),
    (AddsALittle(), "elementwise", "numbers are right, within the tolerance that it declares"),
    (AddsALittle(), "dtypes", "numbers are right"),
    (Copies(), "views", "outputs alias what they alias in the body"),
    (DrawsOnce(), "random_numbers", "random numbers are those of the seed"),
    (KnowsOneSize(), "computed_sizes", "sizes are those of the call"),
    (MakesTensors(), "plain_outputs", "None, numbers, complex and empty tensors are returned unchanged"),
    (MakesTensors(), "plain_inputs", "plain numbers and None are accepted as inputs"),
    (LeavesGradOff(), "arithmetic", "grad"),
    (GivesOneTensor(), "elementwise", "returns a Tensor where a tuple or a list of outputs belongs"),
    (UnpacksOneOutput(), "one_output", "returns a Tensor where a tuple or a list of outputs belongs"),
    (GivesOneMore(), "one_output", "returns a list of length 2 where one of length 1 belongs"),
    (MakesNothing(), "elementwise", "`compile` returns a function, not None"),
    (LosesShapes(), "reshapes", "a shape that is changed in-place stays changed"),
    (CompilesInDoubles(), "elementwise", "compiling leaves the default dtype switched"),
    (CompilesWithGradOff(), "elementwise", "compiling leaves modes switched"),
    (ChangesItsInputs(), "elementwise", "compiling changes its fake inputs"),
    (RaisesWhenAsked(), "elementwise", "a refusal is a reason, and always the same"),
    (AnswersTrue(), "elementwise", "a reason in one line, or None, not True"),
    (ChangesItsMind(), "elementwise", "queried twice, it gives two answers"),
    (WritesOnNodes(), "elementwise", "it changes the graph of the node"),
    (RefusesAll(), "elementwise", "something that it supports compiles"),
    (FailsAlways(), "elementwise", "it failed with NotImplementedError: no compiler: elementwise"),
    (StoresText(), "elementwise", "`save` returns bytes, not str"),
    (LoadsAnother(), "elementwise", "what is stored can be loaded"),
]


@pytest.mark.parametrize(("backend", "body", "words"), FAULTS, ids=lambda part: type(part).__name__)
def test_a_fault_is_named(backend: Any, body: str, words: str) -> None:
    with pytest.raises(LawError) as caught, torch.enable_grad():
        check_backend(backend, programs=0, bodies=(body,))
    report = str(caught.value)
    assert report.startswith("faulty: ")
    assert words in report
    assert body in report


def test_a_backend_that_is_no_value_is_named() -> None:
    with pytest.raises(LawError, match="its copy is another; make it a frozen dataclass of plain values"):
        check_backend(IsEqualToNothing(), programs=0, bodies=("elementwise",))


def test_a_backend_may_fix_the_numbers_that_it_compiles_for() -> None:
    assert check_backend(Fixing(), programs=0, bodies=("plain_inputs",)).holds


def test_a_faultless_backend_gets_a_report() -> None:
    report = check_backend(Faithful(), programs=2)
    assert report.holds
    assert report.checks > 5 * len(BODIES)
    assert str(report).startswith(f"faulty: all laws hold in {report.checks} checks")


@dataclass(frozen=True)
class Folds(Faithful):
    wants_constants: ClassVar[bool] = True


class FoldsZeros(Folds):
    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Run:
        for held in body.buffers():
            held.zero_()
        return super().compile(body, inputs)


def test_a_body_with_constants_is_for_backends_that_want_them() -> None:
    with pytest.raises(LawError, match="that the body holds have their values\n    constants"):
        check_backend(FoldsZeros(), programs=0, bodies=("constants",))
    checks = [
        check_backend(one, programs=0, bodies=("elementwise", "constants")).checks for one in (Faithful(), Folds())
    ]
    assert checks[0] < checks[1]


@dataclass(frozen=True)
class KeepsWeights(Faithful):
    """Goes on with the weights of its first call."""

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Run:
        first: list[Any] = []

        def run(*given: Any) -> Any:
            first[:] = first or [one.clone() if isinstance(one, torch.nn.Parameter) else one for one in given]
            pairs = zip(given, first, strict=True)
            return body.forward(*(kept if isinstance(now, torch.nn.Parameter) else now for now, kept in pairs))

        return run


@pytest.mark.parametrize(
    ("backend", "words"),
    [(KnowsOneSize(), _ANY_SIZE), (KeepsWeights(), _CHANGED), (Faithful(), None), (Folds(), None)],
    ids=lambda part: type(part).__name__,
)
def test_a_captured_layer_is_called_with_several_sizes_and_changed_weights(backend: Any, words: str | None) -> None:
    checking = _BackendCheck(backend)
    with torch.enable_grad():
        checking.check_captured()
    laws = {broken.law for broken in checking.broken}
    assert words in laws if words else not laws


def test_programs_show_faults_that_no_body_shows() -> None:
    with pytest.raises(LawError, match="is equivalent to the original"):
        check_backend(WritesTwice(), programs=[random_case(seed) for seed in (3, 4, 5, 6)], bodies=())


def test_a_body_about_views_is_lowered_too() -> None:
    """`Lower` makes views itself, so what a backend makes of them does not show what a program gets."""
    bodies = [body.name for body in BODIES if body.lowered]
    assert bodies == ["views", "reshapes"]
    counts = [check_backend(Faithful(), programs=0, bodies=(name,)).checks for name in (*bodies, "elementwise")]
    assert counts[0] == counts[1] == counts[2] + 1


def test_an_unknown_body_is_said() -> None:
    with pytest.raises(OptionError, match="no body is called 'view'; try 'views'"):
        check_backend("eager", programs=0, bodies=("view",))


class OnlyAten(Faithful):
    """Knows the operators of captured programs, and can store nothing."""

    name: ClassVar[str] = "only aten"

    def refusal(self, node: Node) -> str | None:
        is_known = hasattr(node.target, "_schema") or node.target is operator.getitem
        return None if node.op != "call_function" or is_known else "no operator of aten"

    def save(self, compiled: Any) -> bytes:
        raise TypeError("not today")

    def load(self, data: bytes) -> Any:
        raise TypeError("not today")


class OnlyAtenAddsALittle(OnlyAten):
    def run(self, body: Run, *given: Any) -> Any:
        return [value + 1e-3 if _is_float(value) else value for value in body(*given)]


def test_a_backend_that_knows_only_aten_is_checked_on_captured_bodies() -> None:
    report = check_backend(OnlyAten(), programs=1, bodies=["elementwise", "arithmetic", "views"])
    assert report.holds
    assert "not stored: TypeError: not today: elementwise, arithmetic, views" in report.notes
    assert not any("refuses" in note for note in report.notes)
    with pytest.raises(LawError, match="arithmetic, as aten operators"):
        check_backend(OnlyAtenAddsALittle(), programs=0, bodies=["arithmetic"])


class OnlyTwoOperators(OnlyAten):
    """Supports an activation and an addition, and nothing else."""

    def refusal(self, node: Node) -> str | None:
        is_known = str(node.target) in ("aten.relu.default", "aten.add.Tensor")
        return None if node.op != "call_function" or is_known else "not one of the two"


class OneOfTwoIsWrong(OnlyTwoOperators):
    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Run:
        for node in body.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            node.target = torch.ops.aten.silu.default
        body.recompile()
        return super().compile(body, inputs)


class BoundedRelu(OnlyTwoOperators):
    """As wrong as relu6, which shows in large values alone."""

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Run:
        for node in body.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            node.target = torch.ops.aten.relu6.default
        body.recompile()
        return super().compile(body, inputs)


class Refuses(Faithful):
    def refusal(self, node: Node) -> str | None:
        return "nothing" if node.op.startswith("call_") else None


def test_a_backend_of_few_operators_is_checked_on_bodies_of_these() -> None:
    checking = _BackendCheck(OnlyTwoOperators())
    checking.check_body(BODIES[0])
    checking.check_supported()
    report = checking.report()
    assert report.holds, str(report)
    assert report.operators == ("aten.add.Tensor", "aten.relu.default")
    assert "  tried 2 small bodies, 1 refused; 2 operators in them: aten.add.Tensor, aten.relu.default" in str(report)


def test_an_operator_that_is_wrong_is_named_by_itself() -> None:
    checking = _BackendCheck(OneOfTwoIsWrong())
    checking.check_supported()
    places = {broken.where.partition(",")[0] for broken in checking.report().broken}
    assert "aten.relu.default" in places
    assert "aten.add.Tensor" not in places


def test_a_bound_that_only_large_values_reach_is_found() -> None:
    checking = _BackendCheck(BoundedRelu())
    checking.operators.add("relu")  # A body with small values has tried it.
    checking.check_supported()
    report = checking.report()
    assert "aten.relu.default" in {broken.where.partition(",")[0] for broken in report.broken}
    assert str(report).count("each operator that it supports is right") == 1


def test_a_report_says_that_nothing_was_tried() -> None:
    report = check_backend(Refuses(), programs=0, bodies=["elementwise", "views"], raises=False)
    assert not report.holds
    assert (report.bodies, report.refused, report.operators) == (0, 2, ())
    assert "it refuses or fails on everything" in str(report)
    assert "tried no small body, 2 refused" in str(report)


def test_a_report_is_had_as_data() -> None:
    report = check_backend(OnlyAtenAddsALittle(), programs=0, bodies=["arithmetic"], raises=False)
    found = json.loads(json.dumps(report.as_dict()))
    assert (found["backend"], found["holds"]) == ("only aten", False)
    assert found["broken"][0]["where"] == "arithmetic, as aten operators"
