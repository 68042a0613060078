"""`Delegate`: regions whose compiled functions travel in an exported program."""

from __future__ import annotations

import json
import logging
import operator
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.helpers.selecting import slow_but
from tests.program.archives.helpers import Spoilt
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

import partita
from partita import Program
from partita.backends import Eager, backend, register_backend
from partita.backends.delegates import DelegateSpec
from partita.errors import ArchiveError, BackendError, LoweringError, OptionError, UntrustedArchiveError
from partita.policies import AroundOperators, ByCapability, ByModule, BySize
from partita.treatments import Call, Delegate


@dataclass(frozen=True)
class Pickling:
    """Stores the body itself, as a pickle."""

    name: ClassVar[str] = "pickling"
    version: ClassVar[str] = "7"

    def refusal(self, node: Node) -> str | None:
        return "it is erf" if node.target is torch.ops.aten.erf.default else None

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> GraphModule:
        return body

    def save(self, compiled: GraphModule) -> bytes:
        return pickle.dumps(compiled)

    def load(self, data: bytes) -> Any:
        return pickle.loads(data)


@dataclass(frozen=True)
class Folding(Pickling):
    name: ClassVar[str] = "folding"
    wants_constants: ClassVar[bool] = True
    takes_symbols: ClassVar[bool] = False


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()) + x.erf()


X, ROWS = torch.randn(3, 4), torch.export.Dim("rows", min=2, max=64)
ALLOWED = ["partita::delegate"]
#: What AOTInductor stores and loads is in the tests of that backend.
_QUICK = (("pickling", False), ("pickling", True))


@pytest.fixture(autouse=True)
def _backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_REGISTERED", {})
    register_backend(Pickling())
    register_backend(Folding())


def delegated(model: Any, wanted: Any = "pickling", policy: Any = None, *, dynamic: bool = False) -> Program:
    program = partita.capture(model, (X,), dynamic_shapes=({0: ROWS},) if dynamic else None)
    return partita.plan(program, policy or ByCapability(wanted), Delegate(wanted)).apply()


def calls(program: Program) -> list[Node]:
    return program.graph.find_nodes(op="call_function", target=torch.ops.partita.delegate.default)


@pytest.mark.parametrize(
    ("wanted", "dynamic"),
    slow_but([(name, way) for name in ("pickling", "aot_inductor") for way in (False, True)], *_QUICK),
)
@torch.no_grad()
def test_a_file_with_delegates_is_read_by_both_loaders(wanted: str, dynamic: bool, tmp_path: Path) -> None:
    model = Net()
    after = delegated(model, wanted, dynamic=dynamic)
    assert calls(after)
    partita.verify(model, after, (X,), gradients=False)
    torch.export.save(after.exported(), tmp_path / "m.pt2")
    loaded = [torch.export.load(tmp_path / "m.pt2"), Program.of(tmp_path / "m.pt2", operators=ALLOWED)]
    for program in loaded:
        for x in (X, torch.randn(9, 4)) if dynamic else (X,):
            torch.testing.assert_close(program.module()(x), model(x))


@torch.no_grad()
def test_weights_that_a_backend_folds_are_in_the_file_once(tmp_path: Path) -> None:
    model = Net()
    after = delegated(model, "folding", ByModule("first"))
    torch.export.save(after.exported(), tmp_path / "m.pt2")
    loaded = Program.of(tmp_path / "m.pt2", operators=ALLOWED)
    assert sorted(loaded.exported().state_dict) == ["second.bias", "second.weight"]
    assert torch.equal(loaded.module()(X), model(X))
    model.first.weight.zero_()
    assert not torch.equal(loaded.module()(X), model(X))


@pytest.mark.slow
@torch.no_grad()
def test_a_new_process_runs_the_stored_function_without_a_compiler(tmp_path: Path) -> None:
    model = Net()
    torch.export.save(delegated(model, "aot_inductor").exported(), tmp_path / "m.pt2")
    torch.save((X, model(X)), tmp_path / "values.pt")
    code = """
import torch, partita, torch._inductor.compile_fx as compiler
compiler.compile_fx = compiler.compile_fx_inner = None
x, expected = torch.load("values.pt")
torch.testing.assert_close(torch.export.load("m.pt2").module()(x), expected)
"""
    environment = {"PATH": "/nowhere", "PYTHONPATH": str(Path(partita.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, timeout=300)


def test_a_file_with_delegates_is_code_and_needs_trust(tmp_path: Path) -> None:
    torch.export.save(delegated(Net()).exported(), tmp_path / "m.pt2")
    with pytest.raises(UntrustedArchiveError, match=r"is code that a backend has compiled; .*'partita::delegate'"):
        Program.of(tmp_path / "m.pt2")


@torch.no_grad()
def test_a_missing_backend_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.export.save(delegated(Net()).exported(), tmp_path / "m.pt2")
    monkeypatch.setattr(backend, "_REGISTERED", {})
    message = r"region 'pickling_0' was compiled by the backend 'pickling', which is not installed here"
    with pytest.raises(ArchiveError, match=message):
        Program.of(tmp_path / "m.pt2", operators=ALLOWED)
    with pytest.raises(BackendError, match=message):
        torch.export.load(tmp_path / "m.pt2").module()(X)


class _Newer(Pickling):
    version: ClassVar[str] = "8"


class _ReadsOlder(_Newer):
    def reads_version(self, version: str) -> bool:
        return version == "7"


def _replace_backend(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_REGISTERED", {other.name: other})


@torch.no_grad()
def test_bytes_of_another_version_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.export.save(delegated(Net()).exported(), tmp_path / "m.pt2")
    _replace_backend(_Newer(), monkeypatch)
    message = r"'pickling_0' was stored by version '7' of the backend 'pickling', and here is version '8'"
    with pytest.raises(ArchiveError, match=message):
        Program.of(tmp_path / "m.pt2", operators=ALLOWED)
    with pytest.raises(BackendError, match=message):
        torch.export.load(tmp_path / "m.pt2").module()(X)


@torch.no_grad()
def test_a_backend_may_read_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    torch.export.save(delegated(model).exported(), tmp_path / "m.pt2")
    for other in (_ReadsOlder(), type("Undeclared", (Pickling,), {"version": ""})()):
        _replace_backend(other, monkeypatch)
        assert torch.equal(Program.of(tmp_path / "m.pt2", operators=ALLOWED).module()(X), model(X))


class _CannotLoad(Pickling):
    def load(self, data: bytes) -> Any:
        raise ValueError("not today")


@torch.no_grad()
def test_a_load_that_fails_names_region_backend_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.export.save(delegated(Net()).exported(), tmp_path / "m.pt2")
    _replace_backend(_CannotLoad(), monkeypatch)
    program = Program.of(tmp_path / "m.pt2", operators=ALLOWED)
    with pytest.raises(BackendError, match=r"'pickling_0' of the file '.*m.pt2': pickling cannot load .*: not today"):
        program.module()(X)


def test_compilations_are_logged_and_listed_as_those_of_lower(caplog: pytest.LogCaptureFixture) -> None:
    program = partita.capture(Net(), (X,), dynamic_shapes=({0: ROWS},))
    plan = partita.plan(program, ByCapability("pickling"), Delegate("pickling"))
    with caplog.at_level(logging.INFO, "partita.lowering"):
        plan.apply()
    begin, end = [record.message for record in caplog.records if record.name.startswith("partita")]
    assert begin == "compiling pickling_0 (region 1 of 1) with pickling"
    assert end.startswith("compiled pickling_0 (region 1 of 1) with pickling in ")
    (compiled,) = plan.compilations
    assert (compiled.region, compiled.backend, compiled.gradients) == ("pickling_0", "pickling", False)
    assert compiled.inputs[0] == "float32[*, 4]"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"format": 1', '"format": 2'),
        ('"dtype": "float32"', '"dtype": "load"'),
        ('"sizes": [3, 4]', '"sizes": [3, "s0"]'),
        ('"sizes": [3, 4]', '"sizes": [3, null]'),
        ('"conditions": []', '"conditions": ["__import__(1)"]'),
        ('"version": "7"', '"other": "7"'),
        ('"device": "cpu"', '"device": "nowhere"'),
        ('"symbols": {}', '"symbols": {"s0": [Infinity, 0]}'),
    ],
)
def test_a_spoilt_specification_is_refused(old: str, new: str, tmp_path: Path) -> None:
    torch.export.save(delegated(Net()).exported(), tmp_path / "m.pt2")

    def change(program: Any) -> None:
        for node in program["graph_module"]["graph"]["nodes"]:
            for given in node["inputs"]:
                if given["name"] == "spec":
                    text = given["arg"]["as_string"]
                    assert old in text
                    given["arg"]["as_string"] = text.replace(old, new)

    spoilt = Spoilt(tmp_path / "m.pt2")
    spoilt.program(change)
    with pytest.raises(ArchiveError, match="a delegate cannot be read"):
        Program.of(spoilt.write(tmp_path / "spoilt.pt2"), operators=ALLOWED)


def test_no_gradients_flow_through_a_delegate() -> None:
    result = delegated(Net()).module()(X)
    with pytest.raises(BackendError, match="'pickling_0' is a delegate, through which no gradients flow"):
        result.sum().backward()


@torch.no_grad()
def test_inputs_of_another_layout_are_copied_and_others_refused() -> None:
    program = delegated(nn.Linear(4, 4))
    (call,) = calls(program)
    run, spec = torch.ops.partita.delegate, call.args[1]
    blob, (_, weight, bias) = program.module().pickling_0_delegate, [X, torch.randn(4, 4), torch.randn(4)]
    expected = nn.functional.linear(X, weight, bias)
    (found,) = run(blob, spec, [X.t().contiguous().t(), weight, bias], [])
    assert torch.equal(found, expected)
    with pytest.raises(BackendError, match="compiled for float32 with 2 axes, not for float64 with 2"):
        run(blob, spec, [X.double(), weight, bias], [])
    with pytest.raises(BackendError, match=r"not compiled for an input of shape \(5, 4\)"):
        run(blob, spec, [torch.randn(5, 4), weight, bias], [])
    with pytest.raises(BackendError, match="takes 3 tensors and 0 numbers, not 1 and 0"):
        run(blob, spec, [X], [])


@torch.no_grad()
def test_results_have_memory_of_their_own() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = x * 2
            return x.t(), y, y[0]

    first, second, third = delegated(Views()).module()(X)
    assert torch.equal(first, X.t())
    assert first.stride() == X.t().stride()
    assert torch.equal(second, X * 2)
    assert torch.equal(third, X[0] * 2)
    assert len({one.untyped_storage().data_ptr() for one in (X, first, second, third)}) == 4


@torch.no_grad()
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:1].expand(5, 4),
        lambda x: x[:, 1:2].expand(3, 4).t(),
        lambda x: x.unfold(1, 3, 1),
        lambda x: x.unfold(1, 3, 1)[:, :, None].expand(3, 2, 2, 3),
        lambda x: x[:0, :1].expand(0, 4),
    ],
    ids=["rows", "columns", "windows", "windows and rows", "empty"],
)
def test_a_view_whose_elements_share_memory_is_returned_as_a_copy(view: Callable[[Tensor], Tensor]) -> None:
    [found] = delegated(lambda x: (view(x),)).module()(X)
    assert torch.equal(found, view(X))
    assert found.stride() == view(X).stride()
    assert found.untyped_storage().data_ptr() != X.untyped_storage().data_ptr() or not found.numel()


@torch.no_grad()
def test_an_input_that_was_traced_as_expanded_is_not_read_as_such_if_it_is_not() -> None:
    program = partita.capture(lambda x: x * 2, (X[:1].expand(3, 4),))
    after = partita.plan(program, ByCapability("pickling"), Delegate("pickling")).apply().module()
    other = torch.randn(1, 4).expand(3, 4)
    assert torch.equal(after(other), other * 2)
    with pytest.raises(BackendError, match=r"input of strides \(0, 1\), whose elements share memory"):
        after(X)


def _fills_its_own(x: Tensor) -> Tensor:
    places = torch.tensor([0, 2])
    places.sub_(1).abs_()
    made = x.sin()
    made[0].mul_(2)
    return made.add_(1)[places]


@torch.no_grad()
@pytest.mark.parametrize(
    "function",
    [lambda x: x * torch.tensor(2.0), lambda x: x[torch.tensor([0, 2])], _fills_its_own],
    ids=["literal", "literal index", "in place"],
)
def test_tensors_that_a_region_has_made_may_be_mutated_in_it(function: Callable[[Tensor], Tensor]) -> None:
    after = delegated(function)
    [call] = calls(after)
    assert {node.target for node in after.operators()} == {call.target, operator.getitem}
    module = after.module()
    assert torch.equal(module(X), function(X))
    assert torch.equal(module(X + 1), function(X + 1))


class _Dropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, training=True)


class _Mutated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x).add_(1)

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 4)


class _Failing(Pickling):
    name: ClassVar[str] = "failing"

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> GraphModule:
        raise ValueError("not today")


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: delegated(_Dropout()), "'dropout': a delegate has no effects"),
        (lambda: delegated(lambda x: x.add_(1) * 2), "'add_': a delegate has no effects"),
        (lambda: delegated(lambda x: x[0].add_(1) * 2), "'add_': a delegate has no effects"),
        (lambda: delegated(lambda x: x.sin().normal_()), "'normal_': a delegate has no effects"),
        (lambda: delegated(_Mutated(), policy=ByModule("inside")), "'linear': it is mutated after the region"),
        (lambda: delegated(Net(), policy=ByCapability("eager")), "pickling refuses 'erf': it is erf"),
        (lambda: delegated(nn.Linear(4, 4), "folding", dynamic=True), "folding takes plain sizes only"),
        (lambda: register_backend(_Failing()) or delegated(Net(), "failing"), "cannot compile or store it: not today"),
    ],
)
def test_what_cannot_be_delegated_is_said(attempt: Callable[[], object], message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        attempt()


def _with_a_number(calls: Sequence[tuple[Any, tuple[Any, ...]]]) -> GraphModule:
    """Adds to `x` what a chain of calls gives; "last" is the result of the one before, and all were traced as 3."""
    made = Graph()
    x = number = made.placeholder("x")
    x.meta["val"] = torch.empty(3, 4, device="meta")
    for target, args in calls:
        number = made.call_function(target, tuple(number if one == "last" else one for one in args))
        number.meta["val"] = 3
    added = made.call_function(torch.ops.aten.add.Scalar, (x, number))
    added.meta["val"] = torch.empty(3, 4, device="meta")
    made.output((added,))
    return GraphModule(nn.Module(), made)


@pytest.mark.parametrize(
    "numbers",
    [
        [(operator.pow, (10**18, 10**18))],
        [(operator.lshift, (1, 1 << 40))],
        [(operator.mul, (2**62, 2**62)), *[(operator.mul, ("last", "last"))] * 40],
    ],
    ids=["power", "shift", "squares"],
)
def test_a_number_that_no_memory_holds_is_not_compiled(numbers: Any) -> None:
    program = Program.of(_with_a_number(numbers))
    with pytest.raises(LoweringError, match=r"is not computed: its result may have \d+ bits or more"):
        partita.plan(program, BySize(parts=1), Delegate("pickling")).apply()


def test_a_backend_that_a_file_cannot_name_is_refused() -> None:
    with pytest.raises(OptionError, match="'eager' has no `save` and `load`"):
        Delegate(Eager())

    class Unknown(Pickling):
        name: ClassVar[str] = "unknown"

    with pytest.raises(OptionError, match="no backend called 'unknown' is installed; register it with"):
        Delegate(Unknown())


def test_a_name_is_registered_once() -> None:
    register_backend(Pickling())
    for taken in ("pickling", "inductor"):
        other = type("Other", (Pickling,), {"name": taken})()
        with pytest.raises(OptionError, match=f"another backend is called '{taken}'"):
            register_backend(other)
    with pytest.raises(OptionError, match="is no backend"):
        register_backend("pickling")  # type: ignore[arg-type]


@torch.no_grad()
def test_a_program_with_delegates_is_copied_compiled_and_decomposed() -> None:
    model = Net()
    after = delegated(model, dynamic=True)
    expected, module = model(X), after.module()
    assert torch.equal(pickle.loads(pickle.dumps(module))(X), expected)
    assert torch.equal(torch.compile(module, backend="aot_eager")(X), expected)
    decomposed = after.decomposed()
    assert torch.allclose(decomposed.module()(X), expected)
    assert torch.ops.partita.delegate.default in [node.target for node in decomposed.graph.nodes]


@torch.no_grad()
def test_a_region_in_an_autocast_block_runs_in_it() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.linear(x) + x

    model = Casting()
    after = delegated(model)
    assert '"autocast": [["cpu", "bfloat16", true]]' in str(calls(after)[0].args[1])
    assert torch.equal(after.module()(X), model(X))


@torch.no_grad()
def test_modes_that_a_stored_function_cannot_follow_are_refused() -> None:
    module = delegated(nn.Linear(4, 4)).module()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(BackendError, match="compiled without autocast on cpu"):
        module(X)
    with pytest.raises(BackendError, match="through which no tangents flow"):
        torch.func.jvp(module, (X,), (X,))


@torch.no_grad()
def test_a_delegate_may_convert_and_is_planned_and_unflattened_again() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).to(torch.float64).sin()

    model = Model()
    after = delegated(model)
    again = partita.plan(after, BySize(parts=1), Call()).apply()
    torch.testing.assert_close(again.module()(X), model(X))
    torch.testing.assert_close(torch.export.unflatten(after.exported())(X), model(X))


def test_weights_inside_of_a_delegate_cannot_be_trained() -> None:
    model = nn.Linear(4, 4)
    train = partita.capture(model.train(), (X,))
    evaluation = delegated(model.eval(), "folding")
    with pytest.raises(OptionError, match="are inside of a delegate, and training does not change them there"):
        partita.TrainEval(train, evaluation)


@torch.no_grad()
def _shifted(x: Tensor, y: Tensor) -> Tensor:
    return (x + y[1:]).relu()


def test_a_derived_size_beside_its_symbol_is_delegated(tmp_path: Path) -> None:
    shapes = ({0: ROWS}, {0: ROWS + 1})
    program = partita.capture(_shifted, (X, torch.randn(4, 4)), dynamic_shapes=shapes)
    partita.plan(program, ByCapability("pickling"), Delegate("pickling")).apply().save(tmp_path / "program.pt2")
    loaded = Program.of(tmp_path / "program.pt2", operators=ALLOWED).module()
    x, y = torch.randn(5, 4), torch.randn(6, 4)
    assert torch.equal(loaded(x, y), _shifted(x, y))


def test_a_derived_size_alone_is_refused_in_words() -> None:
    program = partita.capture(lambda x: x.relu().sin(), (torch.randn(8, 4),), dynamic_shapes=({0: 2 * ROWS},))
    with pytest.raises(LoweringError, match=r"only 'x' has s\d+, in 2\*s\d+, .* a Dim of its own"):
        partita.plan(program, ByCapability("pickling"), Delegate("pickling")).apply()


class _Sizes(nn.Module):
    """Its first region returns sizes that the second one reads, and the program returns some."""

    def forward(self, x: Tensor) -> Any:
        rows, flat = x.shape[0], x.relu().flatten()
        return (flat.sin().reshape(2 * rows, -1), flat.new_full((rows + 1,), 2.0), 2 * rows + 1, rows)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_sizes_that_a_region_returns_are_computed_beside_the_stored_function(parts: int, tmp_path: Path) -> None:
    program = partita.capture(_Sizes(), (X,), dynamic_shapes=({0: ROWS},))
    after = partita.plan(program, BySize(parts=parts), Delegate("pickling")).apply()
    after.save(tmp_path / "program.pt2")
    loaded = [Program.of(tmp_path / "program.pt2", operators=ALLOWED).module()]
    loaded.append(torch.export.load(tmp_path / "program.pt2").module())
    for size in (3, 6):
        x = torch.randn(size, 4)
        expected, sizes = _Sizes()(x)[:2], _Sizes()(x)[2:]
        for module in (after.module(), *loaded):
            results = module(x)
            assert all(map(torch.equal, results[:2], expected))
            assert tuple(results[2:]) == sizes


@pytest.mark.models
@pytest.mark.slow
def test_a_language_model_with_dynamic_sizes_is_delegated_around_its_attention(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.PhiConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    model = transformers.PhiForCausalLM(config).eval()
    ids, tokens = torch.randint(0, 64, (2, 8)), torch.export.Dim("tokens", min=2, max=64)
    shapes = {"input_ids": {0: ROWS, 1: tokens}, "use_cache": None}
    program = partita.capture(model, (), {"input_ids": ids, "use_cache": False}, dynamic_shapes=shapes)
    policy = AroundOperators("aten.scaled_dot_product_attention")
    plan = partita.plan(program, policy, lambda region: Call() if region.label == "chosen" else Delegate("pickling"))
    plan.apply().save(tmp_path / "model.pt2")
    loaded = Program.of(tmp_path / "model.pt2", operators=ALLOWED)
    assert len(calls(loaded)) >= 3
    more = torch.randint(0, 64, (3, 11))
    with torch.no_grad():
        for batch in (ids, more):
            expected = model(input_ids=batch, use_cache=False).logits
            assert torch.equal(loaded.module()(input_ids=batch, use_cache=False).logits, expected)


def test_a_backend_is_not_asked_about_sizes_that_it_does_not_compute() -> None:
    seen: list[str] = []

    @dataclass(frozen=True)
    class Asked(Pickling):
        name: ClassVar[str] = "asked"

        def refusal(self, node: Node) -> str | None:
            return "no sizes" if "sym_size" in node.name else None

        def compile(self, body: GraphModule, inputs: Sequence[Any]) -> GraphModule:
            seen.extend(node.name for node in body.graph.nodes)
            return body

    register_backend(Asked())
    program = partita.capture(lambda x: (x.relu(), x.shape[0]), (X,), dynamic_shapes=({0: ROWS},))
    module = partita.plan(program, BySize(parts=1), Delegate("asked")).apply().module()
    assert module(X)[1] == 3
    assert [name for name in seen if "sym_size" in name] == []
    assert seen


@pytest.mark.parametrize("size", ["1 // (3 - 3) + s", "'a' - 1 + s"])
def test_a_size_without_a_value_is_an_error_of_the_region(size: str) -> None:
    program = delegated(nn.Linear(4, 4), dynamic=True)
    (call,) = calls(program)
    text = str(call.args[1]).replace('"sizes": ["s', f'"sizes": ["{size}')
    with pytest.raises(BackendError, match="a size of its specification has no value"):
        DelegateSpec.of(text).shape(0, [X])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sizes": ["9**9**9", 4]}, "has no place in a size"),
        ({"sizes": [1] * 70, "strides": [1] * 70}, "is no metadata of a tensor"),
        ({"sizes": [-1, 4]}, "is no metadata of a tensor"),
        ({"device": "hip"}, "which this build of torch does not support"),
    ],
)
def test_outputs_out_of_proportion_are_refused(change: dict[str, Any], words: str) -> None:
    spec = json.loads(str(calls(delegated(Net()))[0].args[1]))
    spec["outputs"][0].update(change)
    with pytest.raises(BackendError, match=words):
        DelegateSpec.of(json.dumps(spec))
