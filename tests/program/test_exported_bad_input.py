"""Exported programs that do not fit, treatments that give none, and what is no program: named, with a way out."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

import pytest
import torch
from tests.program.exported_helpers import CASES, Model, case_of, cut, original, rows
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument
from torch.fx import Graph, GraphModule, symbolic_trace

from partita import Program, capture, plan
from partita.errors import CaptureError, OptionError, SignatureError, TreatmentError
from partita.plans.treatment import Called
from partita.policies import ByLabel, BySize
from partita.rewrite.operator_calls import OperatorCall
from partita.treatments import Call, Lower

pytestmark = pytest.mark.filterwarnings("ignore")


def _renamed_output(exported: ExportedProgram) -> None:
    exported.graph_signature.output_specs[0].arg = TensorArgument("nowhere")


def _missing_input(exported: ExportedProgram) -> None:
    exported.graph_signature.input_specs.pop(0)


def _swapped_inputs(exported: ExportedProgram) -> None:
    specs = exported.graph_signature.input_specs
    specs[0], specs[1] = specs[1], specs[0]


def _second_output(exported: ExportedProgram) -> None:
    specs = exported.graph_signature.output_specs
    specs.append(copy.copy(specs[0]))


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (_renamed_output, "outputs, number 0 is 'linear_1' in the graph .* 'nowhere' in the signature"),
        (_missing_input, "inputs, number 0 is 'p_weight' in the graph .* 'p_first_weight' in the signature"),
        (_swapped_inputs, "inputs, number 0 is 'p_weight' in the graph .* 'p_first_weight' in the signature"),
        (_second_output, "outputs, number 1 is nothing in the graph .* 'linear_1' in the signature"),
    ],
)
def test_a_signature_that_does_not_fit_is_named(edit: Any, told: str) -> None:
    exported = CASES["chain"].exported()
    edit(exported)
    with pytest.raises(SignatureError, match=told):
        Program.of(exported)


@dataclass(frozen=True)
class Opaque:
    """A treatment that compiles, say."""

    def treat(self, body: GraphModule) -> nn.Module:
        return nn.Identity()


@dataclass(frozen=True)
class OpaqueCall:
    def treat(self, body: GraphModule) -> Called:
        return Called(nn.Identity(), through=OperatorCall(torch.ops.higher_order.cond))


def test_a_treatment_that_gives_no_graph_makes_a_module_of_the_program() -> None:
    planned = plan(Program.of(original("chain")), BySize(parts=1), Opaque())
    after = planned.apply()
    assert after.export is None
    called = [after.module().get_submodule(str(node.target)) for node in after.graph.find_nodes(op="call_module")]
    assert isinstance(called[-1], nn.Identity)
    assert planned.program.export is not None


def test_the_module_of_a_program_can_be_pickled_and_checks_its_sizes() -> None:
    program = capture(nn.Linear(4, 2), (torch.ones(3, 4),), dynamic_shapes=({0: Dim("rows", max=8)},))
    module = plan(program, BySize(parts=1), Lower("aot_eager")).apply().module()
    again = pickle.loads(pickle.dumps(module))
    assert torch.equal(again(torch.ones(5, 4)), program.module()(torch.ones(5, 4)))
    for checked in (module, again):
        with pytest.raises(AssertionError, match="<= 8"):
            checked(torch.ones(9, 4))
        with pytest.raises(AssertionError, match="== 4"):
            checked(torch.ones(2, 3))


class Kind(Enum):
    LOW = 1
    HIGH = 2


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Name(str, Enum):  # noqa: UP042 - the text of a StrEnum is its value, that of this one is not
    LOW = "a"
    HIGH = "bb"


class Count(int):
    """A number with a class of its own, as NumPy's floats have one."""


def scaled(x: Tensor, by: Any) -> Tensor:
    by = by.value if isinstance(by, Enum) else by
    return x * (len(by) if isinstance(by, str) else by)


@pytest.mark.parametrize(
    ("traced", "others", "told"),
    [
        (0.0, (-0.0, 0), r"by is \+0.0|is float"),
        (-0.0, (0.0,), "by is -0.0"),
        (Kind.LOW, (Kind.HIGH, 1), r"by.name == 'LOW'|type\(by\) is .*Kind"),
        (Level.LOW, (Level.HIGH, 1, 2), r"by.name == 'LOW'|type\(by\) is .*Level"),
        (1, (Level.LOW, True, 2), r"is int|by == 1"),
        (Name.LOW, (Name.HIGH, "a"), r"by.name == 'LOW'|type\(by\) is .*Name"),
        (Count(2), (Count(3), 2), r"by == 2|type\(by\) is .*Count"),
    ],
    ids=repr,
)
def test_a_constant_argument_of_another_value_or_class_is_refused(traced: Any, others: Any, told: str) -> None:
    x = torch.ones(3)
    program = capture(scaled, (x, traced))
    module = plan(program, BySize(parts=1), Lower("eager")).apply().module()
    for checked in (program.module(), module, pickle.loads(pickle.dumps(module))):
        found = checked(x, traced)
        assert torch.equal(found.signbit(), scaled(x, traced).signbit())
        assert torch.equal(found, scaled(x, traced))
        for other in others:
            with pytest.raises(AssertionError, match=told):
                checked(x, other)


@pytest.mark.parametrize("traced", [Kind.LOW, Level.LOW, 0.0], ids=repr)
def test_a_program_with_a_constant_argument_is_traced_again_with_the_same_checks(traced: Any) -> None:
    x = torch.ones(3)
    program = capture(scaled, (x, traced))
    decomposed = program.exported().run_decompositions().module()
    assert torch.equal(decomposed(x, traced), scaled(x, traced))
    again = capture(program.module(), (x, traced)).module()
    assert torch.equal(again(x, traced), scaled(x, traced))
    for other in (Kind.HIGH, Level.HIGH, 2):
        with pytest.raises(CaptureError, match="Guard failed"):
            capture(program.module(), (x, other))


def test_a_call_of_an_operator_without_a_graph_is_refused_with_a_way_out() -> None:
    planned = plan(Program.of(original("chain")), BySize(parts=1), OpaqueCall())
    with pytest.raises(TreatmentError, match=r"Identity for region 'part_0'.*GraphModule, or the module alone"):
        planned.apply()


@pytest.mark.parametrize("source", [nn.Linear(2, 2), None, 3, Graph(), {}, ExportedProgram], ids=str)
def test_what_is_no_program_is_refused_with_a_way_out(source: Any) -> None:
    with pytest.raises(OptionError, match="capture"):
        Program.of(source)


def test_a_graph_module_has_nothing_to_be_exported_by() -> None:
    program = Program.of(symbolic_trace(nn.Linear(2, 2)))
    with pytest.raises(OptionError, match=r"no signature.*partita\.capture"):
        program.exported()
    with pytest.raises(OptionError, match=r"no signature"):
        plan(program, BySize(parts=1), Call()).apply().exported()


def _speaking() -> Callable[[Tensor], Tensor]:
    """An operator whose effects torch keeps in order by tokens."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    @torch.library.custom_op("partita_tests::say", mutates_args=())
    def say(x: Tensor) -> Tensor:
        return x.clone()

    say.register_fake(torch.empty_like)
    _register_effectful_op(torch.ops.partita_tests.say.default, _EffectType.ORDERED)
    return say


def test_effect_tokens_stay_outside_or_are_refused_by_name() -> None:
    say = _speaking()

    def does(m: Model, x: Tensor) -> Tensor:
        return torch.tanh(say(torch.relu(say(m.first(x)))))

    case = case_of(does)
    program = Program.of(case.exported("decomposed"))
    assert program.export is not None
    assert InputKind.TOKEN in {spec.kind for spec in program.export.signature.input_specs}
    apart = plan(program, ByLabel(lambda node: node.name if node.name in ("relu", "tanh") else None), Call()).apply()
    assert torch.equal(apart.module()(rows()), program.module()(rows()))
    with pytest.raises(SignatureError, match=r"'with_effects'.*'token'.*before it is decomposed"):
        cut(program, "one part").exported()
    early = cut(case.exported(), "one part")
    assert torch.equal(early.module()(rows()), program.module()(rows()))


def test_messages_about_inputs_have_no_copies_of_their_long_keys() -> None:
    """Without a bound, a file of a megabyte with a long key around many inputs makes a module of gigabytes."""
    key = "k" * 10_000

    def summed(parts: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        return torch.stack(parts[key]).sum()

    x = torch.ones(3)
    module: Any = capture(summed, ({key: [x] * 4},)).module()
    messages = [message for _, message in module._guards_fn.conditions]
    assert len(messages) >= 4
    assert max(map(len, messages)) < 200
    with pytest.raises(AssertionError, match=r"^Guard failed: parts\['k{60}\.\.\.'\]\[3\]\.size\(\)\[0\] == 3$"):
        module({key: [x, x, x, torch.ones(2)]})
