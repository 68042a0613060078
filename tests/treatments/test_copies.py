"""Applied modules are pickled, saved, copied and called with other state, whatever they came from, however treated."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.processes import run_in_new_process
from tests.helpers.selecting import slow_but
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.hooks import RemovableHandle

import partita
from partita import Program
from partita._torch.pytrees import flatten
from partita.errors import MissingTargetError, NotPicklableError
from partita.policies import ByMode, BySize
from partita.treatments import Call, KeepEverything, LeaveEager, Lower, Mode, Recompute

pytestmark = pytest.mark.filterwarnings("ignore")


class _Model(nn.Module):
    """Tied weights, a buffer that no state dict has, one that is mutated, modes, random numbers and a container."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.hidden, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.register_buffer("scale", torch.full((6,), 2.0), persistent=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor) -> dict[str, Any]:
        self.calls.add_(1)
        x = self.norm(self.embedding(ids)) * self.scale
        with torch.no_grad():
            shift = self.hidden(x).sin()
        return {"logits": self.head(self.drop(torch.relu(self.hidden(x + shift)))), "rest": (x, None)}


_IDS = torch.arange(5)
_Traced = tuple[Program, tuple[Any, ...]]


def _by_dynamo(model: nn.Module, *args: Any) -> _Traced:
    found: list[Any] = []

    def take(graph_module: Any, inputs: Any) -> Any:
        found.append((Program.of(graph_module), tuple(inputs)))
        return graph_module

    torch.compiler.reset()
    torch.compile(model, backend=take, fullgraph=True)(*args)
    program, inputs = found[0]
    return program, inputs


_SOURCES: dict[str, Callable[..., _Traced]] = {
    "symbolic_trace": lambda model, *args: (Program.of(torch.fx.symbolic_trace(model)), args),
    "make_fx": lambda model, *args: (Program.of(make_fx(model, pre_dispatch=True)(*args)), args),
    "torch.export": lambda model, *args: (Program.of(torch.export.export(model, args)), args),
    "capture": lambda model, *args: (partita.capture(model, args), args),
    "Dynamo": _by_dynamo,
}
_TREATMENTS: dict[str, Any] = {
    "Call": Call(),
    "aot_eager": Lower("aot_eager"),
    "inductor": Lower("inductor"),
    "Recompute": Recompute(),
    "with results kept": Recompute(KeepEverything()),
    "Mode": Mode(),
    "LeaveEager": LeaveEager(),
}


def _saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    found: nn.Module = torch.load(file, weights_only=False)
    return found


_WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": _saved,
    "deepcopy": copy.deepcopy,
    "copy of a pickle of a copy": lambda module: copy.deepcopy(pickle.loads(pickle.dumps(copy.deepcopy(module)))),
}


def _applied(source: str, treatment: str, model: nn.Module, *args: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    program, inputs = _SOURCES[source](model, *args)
    policy = ByMode() if treatment == "Mode" else BySize(parts=2)
    return partita.plan(program, policy, _TREATMENTS[treatment]).apply().module(), inputs


def _model() -> nn.Module:
    torch.manual_seed(0)
    return _Model()


def _effects(module: nn.Module, args: tuple[Any, ...]) -> list[Any]:
    """Results, gradients of parameters, and buffers after a call; Dynamo's graphs take all of these as inputs."""
    args = tuple(arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args)
    state = [*module.parameters(), *(arg for arg in args if arg.requires_grad)]
    torch.manual_seed(1)
    results = [leaf for leaf in flatten(module(*args)).leaves if isinstance(leaf, Tensor)]
    loss = torch.stack([result.sum() for result in results if result.requires_grad]).sum()
    gradients = torch.autograd.grad(loss, state, allow_unused=True)
    return [*(result.detach() for result in results), *gradients, *(b.clone() for b in (*module.buffers(), *args))]


def _are_equal(found: list[Any], expected: list[Any]) -> bool:
    """Whether all is equal; code of Inductor that is loaded or compiled again rounds as before, too."""
    return len(found) == len(expected) and all(
        (one is None and other is None) or (one is not None and other is not None and torch.equal(one, other))
        for one, other in zip(found, expected, strict=True)
    )


_COMBINATIONS = {f"{source}, {treatment}": (source, treatment) for source, treatment in product(_SOURCES, _TREATMENTS)}
_QUICK = [
    name for name, (source, treatment) in _COMBINATIONS.items() if source == "capture" or treatment == "Recompute"
]

_QUICK_WITHOUT_INDUCTOR = [name for name in _QUICK if "inductor" not in name]


@pytest.mark.parametrize("is_called", [False, True], ids=["before its first call", "called"])
@pytest.mark.parametrize("name", slow_but(_COMBINATIONS, *_QUICK))
def test_a_copy_does_the_same_with_state_of_its_own(name: str, *, is_called: bool) -> None:
    module, args = _applied(*_COMBINATIONS[name], _model(), _IDS)
    if is_called:
        _effects(module, args)
    copies = {way: make(module) for way, make in _WAYS.items()}
    expected = _effects(module, args)
    for way, copied in copies.items():
        assert list(copied.state_dict()) == list(module.state_dict()), way
        assert len(list(copied.parameters())) == len(list(module.parameters())), f"{way} unties weights"
        assert _are_equal(_effects(copied, args), expected), way
        memory = {tensor.untyped_storage().data_ptr() for tensor in (*copied.parameters(), *copied.buffers())}
        own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
        assert memory.isdisjoint(own), way


@pytest.mark.parametrize("name", slow_but(_COMBINATIONS, *_QUICK_WITHOUT_INDUCTOR))
def test_functional_call_uses_the_state_that_it_is_given(name: str) -> None:
    module, args = _applied(*_COMBINATIONS[name], _model(), _IDS)
    _effects(module, args)
    named = dict((*module.named_parameters(), *module.named_buffers()))
    given = {path: tensor.detach() * 1.5 for path, tensor in named.items()}
    twin = copy.deepcopy(module)
    for path, tensor in (*twin.named_parameters(), *twin.named_buffers()):
        tensor.data.copy_(given[path])
    expected, before = _effects(twin, args), {path: tensor.clone() for path, tensor in named.items()}
    torch.manual_seed(1)
    args = tuple(arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args)
    results = flatten(torch.func.functional_call(module, given, args)).leaves
    results = [result.detach() for result in results if isinstance(result, Tensor)]
    assert _are_equal(results, expected[: len(results)])
    assert all(torch.equal(tensor, before[path]) for path, tensor in named.items()), "the module's own state changed"


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.relu(self.first(x)))
        return found


@pytest.mark.parametrize("treatment", [name for name in _TREATMENTS if name != "inductor"])
@pytest.mark.parametrize("source", slow_but([name for name in _SOURCES if name != "Dynamo"], "capture"))
def test_transforms_of_a_functional_call_give_what_they_give_for_the_model(source: str, treatment: str) -> None:
    torch.manual_seed(0)
    model, x = _Small(), torch.randn(4, 6)
    module, _ = _applied(source, treatment, model, x)

    def gradients(called: nn.Module) -> list[Tensor]:
        def loss(state: dict[str, Tensor]) -> Tensor:
            found: Tensor = torch.func.functional_call(called, state, (x,)).sum()
            return found

        state = {path: parameter.detach() for path, parameter in called.named_parameters()}
        several = {path: torch.stack([tensor, 2 * tensor]) for path, tensor in state.items()}
        found = (torch.func.grad(loss)(state), torch.vmap(torch.func.grad(loss))(several))
        return sorted((leaf for one in found for leaf in one.values()), key=lambda leaf: (leaf.shape, leaf.tolist()))

    for one, other in zip(gradients(module), gradients(model), strict=True):
        torch.testing.assert_close(one, other)


_LOADS = """
import sys
import torch

torch.set_num_threads(int(sys.argv[3]))
results = []
for module, args in torch.load(sys.argv[1], weights_only=False):
    torch.manual_seed(1)
    leaves = torch.utils._pytree.tree_leaves(module(*args))
    results.append([leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)])
torch.save(results, sys.argv[2])
"""


@pytest.mark.parametrize(
    "treatments",
    [
        ["Recompute"],
        pytest.param(["Call", "aot_eager", "with results kept", "Mode", "LeaveEager"], marks=pytest.mark.slow),
    ],
)
def test_a_process_that_has_imported_nothing_but_torch_loads_them(treatments: list[str], tmp_path: Path) -> None:
    stored = [_applied(*names, _model(), _IDS) for names in product(_SOURCES, treatments)]
    torch.save(stored, tmp_path / "modules")
    done = run_in_new_process(_LOADS, tmp_path / "modules", tmp_path / "results", torch.get_num_threads())
    assert done.returncode == 0, done.stderr
    for (module, args), found in zip(stored, torch.load(tmp_path / "results"), strict=True):
        assert _are_equal(found, _effects(module, args)[: len(found)])


class _Branching(nn.Module):
    """A branch with a mode and random numbers: nodes that torch loses where it traces a pickled graph again."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        def positive(x: Tensor) -> Tensor:
            with torch.no_grad():
                fixed = self.one(x)
            return fixed + self.other(x) + torch.rand(4, 6)

        found: Tensor = torch.cond(x.sum() > 0, positive, self.other, (x,))
        return found + 1


@pytest.mark.parametrize(
    ("source", "treatment"),
    slow_but(
        product(
            (name for name in _SOURCES if name != "symbolic_trace"), ("Call", "aot_eager", "Recompute", "LeaveEager")
        ),
        ("capture", "aot_eager"),
    ),
)
def test_the_branches_of_a_copy_have_all_their_nodes(source: str, treatment: str) -> None:
    torch.manual_seed(0)
    module, args = _applied(source, treatment, _Branching(), torch.rand(4, 6))
    copies = [make(module) for make in _WAYS.values()]
    expected = _effects(module, args)
    assert not _are_equal(expected, _effects_of_other_numbers(module, args))
    assert all(_are_equal(_effects(copied, args), expected) for copied in copies)


def _effects_of_other_numbers(module: nn.Module, args: tuple[Any, ...]) -> list[Any]:
    torch.manual_seed(2)
    result = module(*args)
    return [leaf for leaf in flatten(result).leaves if isinstance(leaf, Tensor)]


def test_a_function_without_a_name_is_named_when_it_is_pickled() -> None:
    def local(x: Tensor) -> Tensor:
        return x.sin()

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(local, (x,)))
    program = Program.of(torch.fx.GraphModule(nn.Module(), graph), pure=[local])
    module = partita.plan(program, BySize(parts=1), Call()).apply().module()
    with pytest.raises(NotPicklableError, match=r"node 'local' calls .*<locals>.local, which has no name"):
        pickle.dumps(module)
    assert torch.equal(copy.deepcopy(module)(torch.ones(2)), torch.ones(2).sin())


@pytest.mark.parametrize("check_guards", [False, True])
@pytest.mark.parametrize("treatment", [Call(), Lower("eager"), Recompute()], ids=repr)
def test_the_module_of_an_export_by_torch_is_copied_but_not_pickled(treatment: Any, *, check_guards: bool) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)), torch.ones(3, 4)
    exported = torch.export.export(model, (x,))
    program = Program.of(exported.module(check_guards=check_guards))
    module = partita.plan(program, BySize(parts=2), treatment).apply().module()
    torch.manual_seed(0)
    expected = module(x)
    torch.manual_seed(0)
    assert torch.equal(copy.deepcopy(module)(x), expected)
    with pytest.raises(NotPicklableError, match=r"make it of the exported program, Program\.of\(exported\)"):
        pickle.dumps(module)


def test_a_hook_on_a_module_from_another_process_is_called_as_it_was_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = RemovableHandle.next_id
    program = Program.of(torch.export.export(nn.Linear(4, 4), (torch.ones(3, 4),)))
    data = pickle.dumps(partita.plan(program, BySize(parts=1), Call()).apply().module())
    monkeypatch.setattr(RemovableHandle, "next_id", first)  # A new process counts from zero again.
    module, seen = pickle.loads(data), []
    for _ in range(20):
        module.register_forward_hook(lambda *_: seen.append("called"))
    with pytest.raises(AssertionError):
        module(torch.ones(3, 7))
    assert not seen


def test_an_operator_that_is_not_registered_is_named_when_a_module_is_loaded() -> None:
    with torch.library._scoped_library("partita_copies", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        graph.output(graph.call_function(torch.ops.partita_copies.twice.default, (x,)))
        program = Program.of(torch.fx.GraphModule(nn.Module(), graph))
        stored = pickle.dumps(partita.plan(program, BySize(parts=1), Call()).apply().module())
    with pytest.raises(MissingTargetError, match=r"operator partita_copies::twice\.default is not registered"):
        pickle.loads(stored)
