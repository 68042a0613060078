"""The script of a bisection: it shows the fault in a new process without Partita, or none is written."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.helpers.processes import run_in_new_process
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import partita
from partita.equivalence.differences import Comparison, Difference
from partita.equivalence.reproduction import Asked, write_reproduction
from partita.errors import OptionError
from partita.policies import BySize
from partita.treatments import Call, Lower

X = torch.linspace(-1, 1, 8).reshape(2, 4)
FIRST_CALL = Comparison((Difference("value", "output", "as a test wants it", "first call"),))


class Chain(nn.Module):
    """Small operators; the second is `exp`."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(torch.exp(torch.tanh(x)).clamp(max=2)))


def _chain() -> partita.Program:
    return partita.Program.of(torch.fx.symbolic_trace(Chain()))


def _run(script: str) -> subprocess.CompletedProcess[str]:
    """The script in a process that cannot import Partita."""
    source = "import runpy, sys; sys.modules['partita'] = None; runpy.run_path(sys.argv[1])"
    return run_in_new_process(source, script, environment={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})


def _output_of(script: str) -> tuple[int, list[str]]:
    run = _run(script)
    return run.returncode, [line.partition(" by up to")[0] for line in run.stdout.splitlines()]


@dataclass(frozen=True)
class Becomes:
    """Replaces the body by a module around it."""

    module: type[nn.Module]
    of: Any = None

    def treat(self, body: GraphModule) -> nn.Module:
        is_meant = self.of is None or any(node.target is self.of for node in body.graph.nodes)
        return self.module(body) if is_meant else body


class _Around(nn.Module):
    def __init__(self, body: GraphModule) -> None:
        super().__init__()
        self.body = body
        self.seen: Tensor | None = None


@dataclass(frozen=True)
class WrongExp:
    """A treatment that is wrong for one operator."""

    def treat(self, body: GraphModule) -> nn.Module:
        for node in body.graph.nodes:
            if node.target is torch.exp:
                node.target = torch.exp2
        body.recompile()
        return body


@dataclass(frozen=True)
class WrongAtInference:
    """A backend that is wrong for one operator, and does not train."""

    name: str = "wrong_at_inference"
    trains: ClassVar[bool] = False

    def refusal(self, node: Node) -> str | None:
        return None

    def compile(self, body: GraphModule, inputs: Sequence[object]) -> Any:
        for node in body.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default):
            node.target = torch.ops.aten.exp2.default
        body.recompile()
        return lambda *args: body(*args)


@dataclass(frozen=True)
class Fails:
    """A backend that fails for one operator."""

    name: str = "fails"

    def refusal(self, node: Node) -> str | None:
        return None

    def compile(self, body: GraphModule, inputs: Sequence[object]) -> Any:
        if any(node.target is torch.exp for node in body.graph.nodes):
            raise ValueError("no code for exp")
        return lambda *args: body(*args)


class _Shifted(_Around):
    def forward(self, *args: Any) -> Any:
        return torch.utils._pytree.tree_map(lambda x: x + 1, self.body(*args))


@pytest.mark.parametrize("source", ["traced", "captured"])
def test_the_script_shows_the_difference_without_partita(tmp_path: Path, source: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    program = partita.capture(model, (X,)) if source == "captured" else _chain()
    treatment = Becomes(_Shifted, torch.ops.aten.linear.default) if source == "captured" else WrongExp()
    script = partita.bisect(partita.plan(program, BySize(parts=3), treatment), (X,)).reproduce(tmp_path / "case")
    status, lines = _output_of(script)
    assert status == 1
    assert lines[0] == "output 0: differs"


@pytest.mark.parametrize("is_under_no_grad", [False, True])
def test_the_script_shows_what_differs_without_gradients_alone(tmp_path: Path, is_under_no_grad: bool) -> None:
    """A backend that does not train runs under no_grad, and its regions run eagerly elsewhere."""
    program = partita.capture(nn.Sequential(nn.Linear(4, 4), Chain()), (X,))
    plan = partita.plan(program, BySize(parts=3), Lower(WrongAtInference()))
    with torch.no_grad() if is_under_no_grad else nullcontext():
        script = partita.bisect(plan, (X,)).reproduce(tmp_path / "case")
    assert _output_of(script) == (1, ["output 0: differs"])


class _WrongForSmall(_Around):
    def forward(self, x: Tensor) -> Any:
        return torch.utils._pytree.tree_map(lambda y: y + 1 if float(x.abs().max()) < 0.9 else y, self.body(x))


class _WrongForOthers(_Around):
    """Right for what it was called with first."""

    def forward(self, x: Tensor) -> Any:
        self.seen = x.detach().clone() if self.seen is None else self.seen
        is_other = not torch.equal(x.detach(), self.seen)
        return torch.utils._pytree.tree_map(lambda y: y + 1 if is_other else y, self.body(x))


@pytest.mark.parametrize(("module", "calls"), [(_WrongForSmall, 1), (_WrongForOthers, 2)])
def test_the_script_shows_what_differs_in_the_second_call_alone(
    tmp_path: Path, module: type[nn.Module], calls: int
) -> None:
    """Other data are smaller."""
    plan = partita.plan(partita.Program.of(torch.fx.symbolic_trace(nn.Tanh())), BySize(parts=1), Becomes(module))
    found = partita.bisect(plan, (X,), gradients=False, no_grad_call=False)
    assert {difference.when for difference in found.comparison.differences} == {"second call, other data"}
    status, lines = _output_of(found.reproduce(tmp_path))
    assert (status, len(torch.load(tmp_path / "inputs.pt", weights_only=False)["calls"])) == (1, calls)
    assert lines[0].startswith("output 0")
    assert ("second call, other data" in lines[0]) == (calls == 2)


class _WrongForThree(_Around):
    def forward(self, *args: Any) -> Any:
        return torch.utils._pytree.tree_map(lambda y: y + 1 if y.shape[0] == 3 else y, self.body(*args))


def test_the_script_shows_what_differs_at_other_sizes_alone(tmp_path: Path) -> None:
    program = partita.capture(Chain(), (X,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    found = partita.bisect(partita.plan(program, BySize(parts=1), Becomes(_WrongForThree)), (X,))
    assert all("= 3" in difference.when for difference in found.comparison.differences)
    assert _output_of(found.reproduce(tmp_path))[1][0] == "output 0: differs"
    assert "one call (with s" in (tmp_path / "reproduce.py").read_text()


class _SlightlyOff(_Around):
    def forward(self, *args: Any) -> Any:
        return torch.utils._pytree.tree_map(lambda y: y + 1e-6, self.body(*args))


@dataclass(frozen=True)
class Lenient(Becomes):
    tolerance: ClassVar[partita.Tolerance] = partita.Tolerance(absolute=1e-3)


def test_the_script_compares_by_the_tolerance_that_was_asked_for(tmp_path: Path) -> None:
    plan = partita.plan(_chain(), BySize(parts=2), Lenient(_SlightlyOff))
    assert partita.bisect(plan, (X,)).blame == "nothing"
    found = partita.bisect(plan, (X,), tolerance=partita.Tolerance(absolute=1e-9))
    assert _output_of(found.reproduce(tmp_path))[1][0] == "output 0: differs"


class _Halves(nn.Module):
    """`mul_` changes what `add` reads, since both halves of its input are one tensor's memory."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        left, whole = torch.narrow(y, 1, 0, 2), torch.clone(x) + 1
        left.mul_(2)
        return torch.add(y, whole)


class _OwnMemory(_Around):
    """Calls the body with copies, and copies back what it mutates."""

    def forward(self, *args: Tensor) -> Any:
        copies = [x.clone() for x in args]
        result = self.body(*copies)
        for x, new in zip(args, copies, strict=True):
            if not torch.equal(x, new):
                x.copy_(new)
        return result


@pytest.mark.parametrize("gradients", [False, True])
def test_inputs_of_the_script_share_memory_as_in_the_model(tmp_path: Path, gradients: bool) -> None:
    program = partita.Program.of(torch.fx.symbolic_trace(_Halves()))
    nodes = tuple(node for node in program.operators() if node.name in ("mul_", "add_1"))
    partition = partita.Partition(program, [partita.Region("one", nodes)])
    x = X.clone().requires_grad_(gradients)
    found = partita.bisect(partita.plan(program, partition, Becomes(_OwnMemory)), (x,), gradients=gradients)
    assert [node.name for node in found.nodes] == ["mul_", "add_1"]
    status, lines = _output_of(found.reproduce(tmp_path))
    assert status == 1
    assert "output 0: differs" in lines


def test_a_failed_compilation_is_what_the_script_says(tmp_path: Path) -> None:
    script = partita.bisect(partita.plan(_chain(), BySize(parts=3), Lower(Fails())), (X,)).reproduce(tmp_path)
    run = _run(script)
    assert run.returncode == 1
    assert "fails failed: " in run.stderr
    assert "no code for exp" in run.stderr


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_no_script_is_written_that_would_show_nothing(tmp_path: Path, backend: str) -> None:
    plan = partita.plan(_chain(), BySize(parts=1), Lower(backend))
    with pytest.raises(OptionError, match=r"no script is written: .* \(nothing differs\)"):
        write_reproduction(plan, Asked((X,), {}), tmp_path / "case", summary="a case", differs=FIRST_CALL)
    assert list(tmp_path.iterdir()) == []


def test_a_difference_of_the_cut_alone_has_no_script(tmp_path: Path) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch._C._set_grad_enabled, (False,))
    graph.output(graph.call_function(torch.exp, (graph.call_function(torch.sin, (x,)),)))
    plan = partita.plan(partita.Program.of(GraphModule({}, graph)), BySize(parts=2), Call())
    options: Any = {"gradients": False, "second_call": False, "no_grad_call": False}
    found = partita.bisect(partita.Plan(plan.partition, plan.treatments, True), (X,), **options)
    with pytest.raises(OptionError, match="no script is written"):
        found.reproduce(tmp_path / "case")


def test_what_a_new_process_does_not_show_is_shown_by_stored_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault of this process' `eager` is not that of torch.compile."""
    eager = type(partita.backends.find_backend("eager"))
    monkeypatch.setattr(eager, "compile", lambda self, body, inputs: WrongExp().treat(body))
    script = partita.bisect(partita.plan(_chain(), BySize(parts=3), Lower("eager")), (X,)).reproduce(tmp_path)
    assert 'stored["found"]' in Path(script).read_text()
    assert _output_of(script)[1][0] == "output 0: differs"


def test_the_script_shows_a_wrong_mutation(tmp_path: Path) -> None:
    class Mutates(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.add(x, 0).add_(1).mul_(2)

    @dataclass(frozen=True)
    class AddsTwice:
        """The result is that of the body; what is left in the input is not."""

        def treat(self, body: GraphModule) -> nn.Module:
            return _AddsTwice(body)

    program = partita.Program.of(torch.fx.symbolic_trace(Mutates()))
    nodes = [node for node in program.graph.nodes if node.name == "add_"]
    region = partita.Partition(program, [partita.Region("one", tuple(nodes))])
    plan = partita.plan(program, region, AddsTwice())
    script = write_reproduction(plan, Asked((X,), {}), tmp_path, summary="a case", differs=FIRST_CALL)
    assert "input 0 after the call: differs by up to 1" in _run(script).stdout


class _AddsTwice(nn.Module):
    def __init__(self, body: GraphModule) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Any:
        found = torch.utils._pytree.tree_map(torch.clone, self.body(x))
        x.add_(1)
        return found


@dataclass(frozen=True)
class _Edited:
    """Inserts a call of `target` after each tanh."""

    target: Any

    def treat(self, body: GraphModule) -> nn.Module:
        for node in body.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default):
            with body.graph.inserting_after(node):
                call = body.graph.call_function(self.target, (node,))
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call, delete_user_cb=lambda user, call=call: user is not call)
        body.recompile()
        return body


class _Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return torch.dropout(torch.tanh(self.layer(x)), 0.5, True) * self.calls


def test_the_script_shows_gradients_that_a_treatment_of_ones_own_loses(tmp_path: Path) -> None:
    program = partita.capture(_Drops(), (X,))
    plan = partita.plan(program, BySize(parts=2), _Edited(torch.ops.aten.detach.default))
    found = partita.bisect(plan, (X,))
    assert [node.name for node in found.nodes] == ["tanh"]
    assert _output_of(found.reproduce(tmp_path)) == (
        1,
        ["requires_grad of output 0: True != False", "gradient of input 0: only eager mode has one"],
    )


@pytest.mark.parametrize("source", ["captured", "module"])
def test_a_script_is_written_without_a_change_of_state_or_random_numbers(tmp_path: Path, source: str) -> None:
    """Random numbers and mutated state are the same on both sides of the script, so that only the fault shows."""
    program = partita.capture(_Drops(), (X,))
    if source == "module":
        program = partita.Program.of(program.module())
    plan = partita.plan(program, BySize(parts=1), _Edited(torch.ops.aten.relu.default))
    generator, state = torch.get_rng_state(), {k: v.clone() for k, v in program.module().state_dict().items()}
    script = write_reproduction(plan, Asked((X,), {}), tmp_path, summary="a case", differs=FIRST_CALL)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, state[name]) for name, value in program.module().state_dict().items())
    status, lines = _output_of(script)
    assert status == 1
    assert "output 0: differs" in lines
    assert not any("calls" in line for line in lines)

    same = partita.plan(program, BySize(parts=1), _Edited(torch.ops.aten.clone.default))
    with pytest.raises(OptionError, match="nothing differs"):
        write_reproduction(same, Asked((X,), {}), tmp_path, summary="a case", differs=FIRST_CALL)
