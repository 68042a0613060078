"""Plans inside AOTAutograd and Inductor: regions of a joint graph are computed again as they are marked."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import pytest
import torch
from functorch.compile import aot_function, default_partition, min_cut_rematerialization_partition, nop
from tests.helpers.processes import run_in_new_process
from tests.helpers.selecting import slow_but
from tests.program.joint_helpers import Stack
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

import partita
from partita import Region
from partita.errors import OptionError, RecomputeError, SignatureError
from partita.policies import ByLabel, ByModule, BySize, InForward
from partita.torch_compile import joint_partition
from partita.torch_compile.joint import identity_of
from partita.treatments import Call, KeepEverything, KeepNodes, KeepNothing, KeepOperators, Mark, Recompute

ATEN = torch.ops.aten
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))
WIDTH, DEPTH, ROWS = 8, 4, 16


@dataclass(frozen=True)
class Again:
    """Marks a region so that it is computed again; regions are numbered by the block that they are."""

    calls: ClassVar[list[str]] = []

    def marks(self, region: Region) -> Mapping[str, object]:
        self.calls.append(region.name)
        return {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": 1 + int(region.name.split("_")[-1])}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    Again.calls.clear()
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@dataclass
class Saved:
    """Cuts as torch does, and notes what the forward hands to the backward beside its inputs."""

    cut: Callable[..., tuple[GraphModule, GraphModule]] = min_cut_rematerialization_partition
    bytes: int = 0
    tensors: tuple[str, ...] = ()

    def __call__(self, joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        forward, backward = self.cut(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        returned = forward.graph.output_node().args[0]
        assert isinstance(returned, tuple | list)
        saved = [node for node in returned[num_fwd_outputs:] if isinstance(node, Node) and node.op != "placeholder"]
        tensors = {node.name: node.meta["val"] for node in saved if isinstance(node.meta["val"], Tensor)}
        sizes = [tensor.untyped_storage().nbytes() for tensor in tensors.values()]
        self.bytes = sum(size for size in sizes if isinstance(size, int))
        self.tensors = tuple(tensors)
        return forward, backward


def _step(model: nn.Module, run: Callable[..., Tensor], *args: Tensor) -> list[Tensor]:
    """The loss and the gradients of one step, from one seed."""
    model.zero_grad()
    torch.manual_seed(5)
    loss = run(*args)
    loss.backward()
    return [loss.detach(), *(value.grad.clone() for value in model.parameters() if value.grad is not None)]


def _same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def _aot(model: nn.Module, partition_fn: Callable[..., Any]) -> list[Tensor]:
    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=partition_fn)
    return _step(model, torch.compile(model, backend=backend), X)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_marked_blocks_hold_nothing_but_their_inputs(dropout: float) -> None:
    torch.manual_seed(0)
    model = Stack(dropout=dropout)
    plain, some, all_of_them = Saved(), Saved(), Saved()
    expected = _step(model, model, X)
    assert _same(_aot(model, plain), expected)
    assert _same(_aot(model, joint_partition(ByModule("blocks.[01]"), Again(), then=some)), expected)
    assert _same(_aot(model, joint_partition(ByModule("blocks.?"), Again(), then=all_of_them)), expected)
    assert plain.bytes > some.bytes > all_of_them.bytes
    if not dropout:
        # The input of the first block is an argument, and the last block gives the loss.
        assert all_of_them.bytes == (DEPTH - 1) * ROWS * WIDTH * 4
        assert all_of_them.tensors == ("add", "add_1", "add_2")


@pytest.mark.parametrize(
    ("keep", "names"),
    [
        (KeepNothing(), ("add", "add_1", "add_2")),
        (KeepOperators(ATEN.relu.default), ("relu", "add", "relu_1", "add_1", "relu_2", "add_2", "relu_3")),
    ],
    ids=repr,
)
def test_recomputed_blocks_hold_what_they_keep_and_what_they_give(keep: Any, names: tuple[str, ...]) -> None:
    model, saved = Stack(), Saved()
    found = _aot(model, joint_partition(ByModule("blocks.?"), Recompute(keep), then=saved))
    assert _same(found, _step(model, model, X))
    assert saved.tensors == names


def test_the_default_is_the_min_cut() -> None:
    model, noted = Stack(), Saved()
    expected = _aot(model, joint_partition(ByModule("blocks.?"), Again(), then=noted))
    assert _same(_aot(model, joint_partition(ByModule("blocks.?"), Again())), expected)
    assert noted.cut is min_cut_rematerialization_partition


def test_another_partitioner_gets_the_marked_graph_and_all_options() -> None:
    model, seen = Stack(), dict[str, Any]()

    def look(joint: GraphModule, inputs: Any, **options: Any) -> Any:
        seen.update(options, regions=[node.meta.get("region") for node in joint.graph.nodes])
        return default_partition(joint, inputs, **options)

    found = _aot(model, joint_partition(ByModule("blocks.?"), Mark("region"), then=look))
    assert _same(found, _step(model, model, X))
    assert {"blocks_0", "blocks_1", "blocks_2", "blocks_3"} <= set(seen["regions"])
    assert seen["num_fwd_outputs"] == 1
    assert "static_lifetime_input_indices" in seen


@pytest.mark.parametrize("then", [None, min_cut_rematerialization_partition, default_partition])
def test_asserted_random_numbers_bring_no_random_operator_into_the_backward(then: Any) -> None:
    weight = torch.randn(16, 8, requires_grad=True)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        y = torch.nn.functional.dropout(x * w, 0.5) + torch.rand(8)
        ATEN._assert_tensor_metadata(y, None, None, torch.float32)
        return (y * w).sum()

    partitioner = joint_partition(BySize(parts=1), Mark("region"), then=then)
    result = aot_function(loss, nop, nop, partition_fn=partitioner)(X, weight)
    before = torch.get_rng_state()
    result.backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_function_without_modules_goes_by_labels() -> None:
    weight = torch.randn(8, 8, requires_grad=True)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x @ w).sin().cos().sum()

    torch.autograd.backward(loss(X, weight))
    assert weight.grad is not None
    expected, weight.grad = weight.grad, None
    plain, marked = Saved(), Saved()
    aot_function(loss, nop, nop, partition_fn=plain)(X, weight)
    policy = ByLabel(lambda node: "all_0")  # Labels of the backward, too, were it asked about it.
    aot_function(loss, nop, nop, partition_fn=joint_partition(policy, Again(), then=marked))(X, weight).backward()
    assert torch.equal(weight.grad, expected)
    assert marked.bytes == 0 < plain.bytes


def test_the_forward_of_a_joint_graph_is_its_own_forward() -> None:
    program = partita.capture_joint(Stack(depth=2), (X[:4, None],))
    plain, restricted = (
        joint_partition(policy, Mark("part")).marked(program)
        for policy in (BySize(parts=2), InForward(InForward(BySize(parts=2))))
    )
    marks = [(node.name, node.meta.get("part")) for node in restricted.graph.nodes]
    assert marks == [(node.name, node.meta.get("part")) for node in plain.graph.nodes]
    assert {part for _, part in marks} == {"part_0", "part_1", None}


def test_marks_are_only_on_the_forward() -> None:
    model, seen = Stack(), list[tuple[object, bool]]()

    def look(joint: GraphModule, inputs: Any, **options: Any) -> Any:
        seen.extend((node.meta.get("partitioner_tag"), "region" in node.meta) for node in joint.graph.nodes)
        return default_partition(joint, inputs, **options)

    _aot(model, joint_partition(BySize(parts=2), Mark("region"), then=look))
    assert ("is_forward", True) in seen
    assert ("is_backward", True) not in seen


@pytest.fixture
def cache() -> Iterator[None]:
    """Caches in which nothing is found that was compiled before the test."""
    with torch.compiler.config.patch(cache_key_tag=uuid4().hex):
        yield


def _inductor(model: nn.Module, partitioner: Any = None, **options: Any) -> list[Tensor]:
    torch.compiler.reset()
    chosen = {} if partitioner is None else {"custom_partitioner_fn": partitioner}
    compiled = torch.compile(model, options=chosen or None, **options)
    return _step(model, compiled, X)


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_computes_marked_blocks_again_with_the_same_dropout(dynamic: bool) -> None:
    torch.manual_seed(0)
    model, saved = Stack(depth=2, dropout=0.5), Saved()
    expected = _inductor(model, dynamic=dynamic)
    found = _inductor(model, joint_partition(ByModule("blocks.?"), Again(), then=saved), dynamic=dynamic)
    assert _same(found, expected)
    # Between the blocks, the seeds of both, and the number of rows where that is a symbol.
    assert sorted(name.rstrip("_0123456789") for name in saved.tensors) == ["add", "inductor_seeds_default"]


@pytest.mark.usefixtures("cache")
def test_inductor_compiles_again_for_another_policy_and_not_for_the_same() -> None:
    """And computes marked blocks again with the same dropout."""
    torch.manual_seed(0)
    model = Stack(depth=2, dropout=0.5)
    expected = _inductor(model)

    def asked(paths: str) -> list[str]:
        Again.calls.clear()
        assert _same(_inductor(model, joint_partition(ByModule(paths), Again())), expected)
        return list(Again.calls)

    assert asked("blocks.0") == ["blocks_0"]
    assert asked("blocks.?") == ["blocks_0", "blocks_1"]
    assert asked("blocks.?") == [], "compiled code of the same policy is used again"
    assert asked("blocks.0") == []


@pytest.mark.usefixtures("cache")
def test_a_policy_without_a_lasting_identity_is_called_again() -> None:
    torch.manual_seed(0)
    model = Stack(depth=1)
    for name in ("one_0", "two_0"):
        Again.calls.clear()
        _inductor(model, joint_partition(ByLabel(lambda node, name=name: name), Again()))
        assert Again.calls == [name]


@dataclass(frozen=True)
class Plain:
    """A treatment of plain fields."""

    text: str
    many: tuple[int, ...] = ()

    def marks(self, region: Region) -> Mapping[str, object]:
        return {}


def test_an_identity_hangs_on_all_fields_and_on_nothing_else() -> None:
    policy = ByModule("blocks.*")
    same = joint_partition(ByModule("blocks.*"), Plain("a", (1,)))
    assert joint_partition(policy, Plain("a", (1,))).uuid() == same.uuid()
    others = [
        joint_partition(ByModule("blocks.0"), Plain("a", (1,))),
        joint_partition(ByModule("blocks.*", depth=1), Plain("a", (1,))),
        joint_partition(policy, Plain("b", (1,))),
        joint_partition(policy, Plain("a", (2,))),
        joint_partition(policy, {"a": Plain("a", (1,))}),
        joint_partition(policy, Again()),
        joint_partition(policy, Plain("a", (1,)), then=default_partition),
    ]
    assert len({partitioner.uuid() for partitioner in (same, *others)}) == len(others) + 1


def test_functions_of_others_have_no_identity() -> None:
    assert identity_of(default_partition) is not None
    assert identity_of(test_functions_of_others_have_no_identity) is None
    assert identity_of(ByLabel(lambda node: None)) is None
    assert identity_of({"a": (object(),)}) is None
    assert identity_of(frozenset(("b", "a"))) == identity_of(frozenset(("a", "b")))
    assert identity_of((1, "1")) != identity_of(("1", 1))
    assert identity_of(True) != identity_of(1)
    assert identity_of(CheckpointPolicy.MUST_SAVE) != identity_of(CheckpointPolicy.MUST_RECOMPUTE)
    one, other = (joint_partition(ByLabel(lambda node: None), Plain("a")) for _ in range(2))
    assert one.uuid() == one.uuid() != other.uuid()


MINE = """
from dataclasses import dataclass
from partita import Partition
from partita.torch_compile import joint_partition

@dataclass(frozen=True)
class Nothing:
    def __call__(self, program):
        return Partition(program, ())

@dataclass(frozen=True)
class Mine:
    number: int
    def marks(self, region):
        return {"mine": self.number}

uuid = joint_partition(Nothing(), Mine(1)).uuid()
"""


def test_an_identity_is_the_same_in_another_process_until_the_code_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "partita_test_mine.py"
    file.write_text(MINE)
    done = run_in_new_process(f"import {file.stem}; print({file.stem}.uuid)", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    here = importlib.import_module(file.stem)
    monkeypatch.delitem(sys.modules, file.stem)
    assert here.uuid == done.stdout.strip()
    file.write_text(MINE.replace('"mine"', '"yours, now"'))
    assert importlib.import_module(file.stem).uuid != here.uuid
    monkeypatch.delitem(sys.modules, file.stem)


@pytest.mark.parametrize(
    ("arguments", "then", "message"),
    [
        ((ByModule, Again()), None, "planned by a policy"),
        (("blocks.*", Again()), None, "planned by a policy"),
        ((ByModule("blocks.*"), Again), None, "take a treatment that marks"),
        ((ByModule("blocks.*"), 3), None, "take a treatment that marks"),
        ((ByModule("blocks.*"), Again()), 3, "partitions a joint graph"),
    ],
)
def test_options_are_checked(arguments: Any, then: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        joint_partition(*arguments, then=then)


def test_a_treatment_that_marks_nothing_is_refused() -> None:
    with pytest.raises(Exception, match=r"OptionError: Call\(\) marks nothing"):
        _aot(Stack(), joint_partition(ByModule("blocks.?"), Call()))


def test_marks_on_a_captured_joint_graph_save_what_regions_give_to_the_forward() -> None:
    program, saved = partita.capture_joint(Stack(), (X,)), Saved()
    marked = partita.plan(program, ByModule("blocks.?"), Recompute()).annotate()
    assert marked.joint is not None
    inputs = [node.meta["val"] for node in (*marked.joint.inputs, *marked.joint.tangents)]
    saved(marked.graph_module, inputs, num_fwd_outputs=len(marked.joint.forward_outputs))
    assert saved.tensors == ("add", "add_1", "add_2")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(self.norm(x)).view(2, 8, 2, 4).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return (x + mixed.transpose(1, 2).reshape(2, 8, 8)).sum()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attention()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x.view(2, 8, 8))  # type: ignore[no-any-return]


FLASH = ATEN._scaled_dot_product_flash_attention_for_cpu.default


@pytest.mark.parametrize(
    ("keep", "operator"),
    [
        (KeepOperators(FLASH), FLASH),
        (KeepNodes("getitem_4"), FLASH),
        (KeepOperators(ATEN.native_layer_norm.default), ATEN.native_layer_norm.default),
    ],
    ids=["attention", "an item of attention", "norm"],
)
def test_an_operator_with_several_results_is_kept_whole(keep: Any, operator: Any) -> None:
    model, halves = Blocks(), list[GraphModule]()

    def look(joint: GraphModule, inputs: Any, **options: Any) -> Any:
        halves.extend(min_cut_rematerialization_partition(joint, inputs, **options))
        return tuple(halves)

    found = _aot(model, joint_partition(ByModule("blocks.?"), Recompute(keep), then=look))
    assert _same(found, _step(model, model, X))
    calls = [half.graph.find_nodes(op="call_function", target=operator) for half in halves]
    assert [len(nodes) for nodes in calls] == [1, 0]


def test_a_joint_graph_without_tangents_is_partitioned() -> None:
    def function(x: Tensor, _: Tensor) -> Tensor:
        return x.view(-1).requires_grad_()

    policy = ByLabel(lambda node: "all_0")
    trained = torch.randn(3, requires_grad=True)
    found = aot_function(function, nop, nop, partition_fn=joint_partition(policy, Recompute()))(X.clone(), trained)
    assert found.requires_grad
    assert torch.equal(found, X.view(-1))


def test_gradients_that_no_tangent_leads_to_are_no_joint_graph() -> None:
    traced = partita.capture(lambda x: (x.sin(), x.cos()), (X,)).module()
    with pytest.raises(SignatureError, match="is a tangent"):
        partita.Program.of(traced, forward_outputs=1)


class MutatingBothWays(torch.autograd.Function):
    """Mutates an input and what it saves in the forward, and that again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor) -> Tensor:
        state.mul_(2.0)
        scale = state + 1
        torch._foreach_mul_([scale], [3.0])
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (scale,) = ctx.saved_tensors
        torch._foreach_mul_([scale], [4.0])
        return gradient * scale, None


class MutatingTheSaved(torch.autograd.Function):
    """Reads what it saved before and after the backward mutates it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor) -> Tensor:
        scale = state.clone().add_(1.0)
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (scale,) = ctx.saved_tensors
        before = scale + 1
        scale.mul_(3.0)
        return gradient * before * (scale + 1), None


class MutatingAnInputLate(torch.autograd.Function):
    """Mutates an input in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor) -> Tensor:
        ctx.save_for_backward(state)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (state,) = ctx.saved_tensors
        state.mul_(2.0)
        return gradient * state, None


def _through_a_view(x: Tensor, state: Tensor) -> Tensor:
    product = x * state
    product[0].mul_(2.0)
    return product.sin() * product


def _between_equal_reads(x: Tensor, state: Tensor) -> Tensor:
    before = state.sin()
    state.add_(1.0)
    return x * before * state.sin()


def _copied_over(x: Tensor, state: Tensor) -> Tensor:
    early = x.sin()
    state.copy_(x.detach() * 2)
    return early * state.cos()


def _in_place(x: Tensor, state: Tensor) -> Tensor:
    for _ in range(3):
        x = (x * state).sin().relu_()
    return x


MUTATING: dict[str, Callable[..., Any]] = {
    "both ways": MutatingBothWays.apply,
    "the saved": MutatingTheSaved.apply,
    "an input late": MutatingAnInputLate.apply,
    "through a view": _through_a_view,
    "between equal reads": _between_equal_reads,
    "copied over": _copied_over,
    "in place": _in_place,
}


def _mutating_step(function: Callable[..., Any]) -> list[Tensor]:
    """The result, the gradient and the state of one step."""
    x, state = X.detach().clone().requires_grad_(), X.cos()
    result = function(x, state)
    result.sum().backward()
    assert x.grad is not None
    return [result.detach(), x.grad, state]


def _not_functionalized(function: Callable[..., Any], partitioner: Any) -> Callable[..., Any]:
    return aot_function(  # type: ignore[no-any-return]
        function,
        nop,
        nop,
        partition_fn=partitioner,
        keep_inference_input_mutations=True,
        disable_functionalization=True,
    )


@pytest.mark.parametrize("name", MUTATING)
def test_without_functionalization_a_graph_with_marks_mutates_as_it_did(name: str) -> None:
    function, partitioner = MUTATING[name], joint_partition(ByLabel(lambda node: "all_0"), Mark("region"))
    assert _same(_mutating_step(_not_functionalized(function, partitioner)), _mutating_step(function))


@pytest.mark.filterwarnings("ignore:Trying to unsafely apply AC")
@pytest.mark.parametrize(
    "then", slow_but([None, min_cut_rematerialization_partition, default_partition], None, default_partition)
)
@pytest.mark.parametrize("treatment", [Recompute(), Recompute(KeepEverything()), Mark("region")], ids=repr)
@pytest.mark.parametrize("name", MUTATING)
def test_without_functionalization_gradients_are_right_or_refused(name: str, treatment: Any, then: Any) -> None:
    function, partitioner = MUTATING[name], joint_partition(ByLabel(lambda node: "all_0"), treatment, then=then)
    expected = found = _mutating_step(function)
    with suppress(RecomputeError):
        found = _mutating_step(_not_functionalized(function, partitioner))
    assert _same(found, expected)


def test_a_lost_mutation_is_named() -> None:
    partitioner = joint_partition(ByLabel(lambda node: "all_0"), Recompute())
    with pytest.raises(RecomputeError, match=r"loses the mutation '_foreach_mul__1' .*disable_functionalization=False"):
        _mutating_step(_not_functionalized(MutatingBothWays.apply, partitioner))


def test_functionalized_mutations_of_both_halves_are_partitioned() -> None:
    partitioner = joint_partition(ByLabel(lambda node: "all_0"), Recompute())
    compiled = aot_function(
        MutatingAnInputLate.apply, nop, nop, partition_fn=partitioner, keep_inference_input_mutations=True
    )
    assert _same(_mutating_step(compiled), _mutating_step(MutatingAnInputLate.apply))


# Buffers that the forward updates at its end -------------------------------------------------------------------------


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.full((1,), 0.3))


class _ReadsAfter(_Counts):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.weight * x
        self.count.add_(1)
        return hidden * self.count


class _ReadsBefore(_Counts):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.count.sin()
        hidden = self.weight * x
        self.count.add_(1)
        return hidden * scale


class _ReadsBetween(_Counts):
    def forward(self, x: Tensor) -> Tensor:
        hidden, first = self.weight * x, self.count.view(1).exp()
        self.count.mul_(2)
        second = self.count.cos()
        self.count.mul_(3)
        return hidden.sin() * first * second


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x * self.weight + torch.arange(4.0)).sin() * self.norm.running_mean


@pytest.mark.parametrize("kind", [_ReadsAfter, _ReadsBefore, _ReadsBetween, _Normed])
@pytest.mark.parametrize("treatment", [Recompute(), Recompute(KeepEverything()), Mark("seen")], ids=repr)
@pytest.mark.parametrize("then", [None, default_partition])
def test_nothing_is_recomputed_from_a_buffer_that_the_forward_updates(kind: Any, treatment: Any, then: Any) -> None:
    """torch's min-cut partitioner does so, with wrong gradients (2.13)."""
    torch.compiler.reset()
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model, x = kind(), torch.randn(3, 4)
        compiler = aot_autograd(
            fw_compiler=nop,
            bw_compiler=nop,
            partition_fn=joint_partition(BySize(parts=1), treatment, then=then),
            keep_inference_input_mutations=True,
        )
        (torch.compile(model, backend=compiler) if is_compiled else model)(x).sum().backward()
        found.append(model.weight.grad)
    assert torch.allclose(*found)


def test_a_partitioner_that_ignores_the_marks_is_refused() -> None:
    def unmarked(joint: GraphModule, inputs: Any, **options: Any) -> Any:
        for node in joint.graph.nodes:
            node.meta.pop("recompute", None)
        return min_cut_rematerialization_partition(joint, inputs, **options)

    torch.compiler.reset()
    compiler = aot_autograd(
        fw_compiler=nop,
        bw_compiler=nop,
        partition_fn=joint_partition(BySize(parts=1), Recompute(), then=unmarked),
        keep_inference_input_mutations=True,
    )
    with pytest.raises(Exception, match="saves the input 'primals_3' for backward") as raised:
        torch.compile(_ReadsAfter(), backend=compiler)(torch.ones(1)).backward()
    assert RecomputeError.__name__ in str(raised.value)
