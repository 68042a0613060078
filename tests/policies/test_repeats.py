"""Repeats: equal blocks get equal bodies, near-equal ones are told apart, and every distinct body is compiled once."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tests.helpers.selecting import slow_but
from tests.helpers.work import calls_during
from tests.lowering.helpers import Counting
from tests.policies.helpers import dynamo, exported, program_of
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import partita
from partita import Partition, Program
from partita._torch.fx.structural_hash import body_key
from partita.errors import OptionError
from partita.policies import BySize, InForward, Repeats
from partita.regions.equal_bodies import body_numbers
from partita.solvers.repeats import cover
from partita.testing import Case, captured_programs, programs
from partita.treatments import Call, Lower


class Block(nn.Module):
    def __init__(self, width: int = 4, *, dropout: float = 0.0, scale: float = 2.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout, self.scale = dropout, scale

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.gelu(self.up(self.norm(x))) * self.scale
        return x + functional.dropout(self.down(inner), self.dropout)


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.head, self.tail = nn.Linear(4, 4), nn.Linear(4, 3)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x).relu()
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.tail(x.tanh())
        return result


def _stack(count: int = 24) -> Stack:
    torch.manual_seed(0)
    return Stack(*(Block() for _ in range(count)))


def _x() -> Tensor:
    return torch.linspace(-1, 1, 8).reshape(2, 4)


def _labels(partition: Partition) -> list[Any]:
    return [region.label for region in partition]


def _made(model: nn.Module) -> GraphModule:
    """Without module stacks."""
    return make_fx(model, tracing_mode="real")(_x())


def _captured(model: nn.Module) -> Program:
    return partita.capture(model, (_x(),))


def _exported_program(model: nn.Module) -> Program:
    return Program.of(torch.export.export(model, (_x(),)))


def _symbolic(model: nn.Module) -> Program:
    return Program.of(torch.fx.symbolic_trace(model))


TRACERS: list[Callable[[nn.Module], Any]] = [_captured, exported, _exported_program, dynamo, _made, _symbolic]


@pytest.mark.parametrize("trace", TRACERS, ids=lambda trace: trace.__name__)
def test_equal_blocks_are_found_in_the_graphs_of_every_tracer(trace: Callable[[nn.Module], Any]) -> None:
    program = Program.of(trace(_stack()))
    plan = partita.plan(program, Repeats(), Call())
    assert _labels(plan.partition) == ["part_0", *["repeat_0"] * 24, "part_1"]
    assert [region.name for region in plan.partition][:3] == ["part_0", "repeat_0_0", "repeat_0_1"]
    assert not [node for node in plan.partition.reasons if node.target != "_guards_fn"]


def test_the_bodies_of_a_plan_are_printed() -> None:
    plan = partita.plan(_captured(_stack()), Repeats(), Call())
    assert list(map(str, plan.bodies())) == [
        "part_0: 1 call of 2 nodes",
        "repeat_0: 24 calls of 7 nodes",
        "part_1: 1 call of 2 nodes",
    ]
    assert plan.bodies()[1].regions[:2] == ("repeat_0_0", "repeat_0_1")
    # Other policies may find equal bodies too, under names of their own.
    pieces = partita.plan(plan.program, BySize(operators=1), Call()).bodies()
    assert {body.calls for body in pieces} >= {24}


def test_what_lies_between_can_be_left_outside() -> None:
    partition = Repeats(between=False)(_captured(_stack()))
    assert _labels(partition) == ["repeat_0"] * 24
    assert Counter(partition.reasons.values()) == {"it is in no repeat": 4}


def test_every_distinct_body_is_compiled_once() -> None:
    backend = Counting()
    program = _captured(_stack())
    plan = partita.plan(program, Repeats(), Lower(backend, strict=True))
    module = plan.apply().module()
    with torch.no_grad():
        assert torch.equal(module(_x()), program.module()(_x()))
    assert len(backend.made) == len(plan.bodies()) == 3


def test_lowered_repeats_train() -> None:
    model = _stack(4)
    x = _x().requires_grad_()
    program = partita.capture(model, (x,))
    lowered = partita.plan(program, Repeats(), Lower("aot_eager", strict=True)).apply()
    partita.verify(program, lowered, (x,))


class _Changed(nn.Module):
    """A block that may differ from the others in one thing."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))
        self.change = change
        if change == "tied":
            self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        if self.change == "no_grad":
            with torch.no_grad():
                inner = self.second(self.first(x).relu())
        else:
            inner = self.second(self.first(x).relu())
        if self.change == "mutates":
            self.count.add_(1)
        if self.change == "stride":
            inner = inner.t().contiguous().t()
        return x + (inner + self.count).tanh()


@pytest.mark.parametrize("change", ["tied", "no_grad", "mutates", "stride"])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_one_block_that_differs_is_told_apart(change: str, at: int) -> None:
    model = Stack(*(_Changed(change if place == at else "") for place in range(5)))
    program = _captured(model)
    partition = Repeats()(program)
    _check_blocks(partition, program, model, different=at)


@pytest.mark.parametrize("trace", TRACERS, ids=lambda trace: trace.__name__)
def test_a_tied_weight_is_told_apart_in_the_graphs_of_every_tracer(trace: Callable[[nn.Module], Any]) -> None:
    model = Stack(*(_Changed("tied" if place == 2 else "") for place in range(6)))
    assert sorted(Counter(_labels(Repeats()(Program.of(trace(model))))).values()) == [1, 1, 1, 5]


@pytest.mark.parametrize("policy", [Repeats(passes_numbers=False), Repeats()])
@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"scale": 3.0}], ids=str)
def test_other_constants_are_told_apart(options: dict[str, float], policy: Repeats) -> None:
    model = Stack(*(Block(**(options if place == 2 else {})) for place in range(5)))  # type: ignore[arg-type]
    program = _captured(model)
    if "scale" in options and policy.passes_numbers:
        assert Counter(_labels(policy(program)))["repeat_0"] == 5
    else:
        _check_blocks(policy(program), program, model, different=2)


def _drop_path(x: Tensor, keep: float) -> Tensor:
    return x.div(keep) * torch.floor(keep + torch.rand(x.shape[0], 1))


def _rms(x: Tensor, number: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + number)


class _Numbered(nn.Module):
    """A block with a number of its own, used as said."""

    def __init__(self, number: float, use: Callable[[Tensor, Any], Tensor], *, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.number, self.use, self.dtype = number, use, dtype

    def forward(self, x: Tensor) -> Tensor:
        inner = self.down(self.up(x).relu().tanh())
        used = self.use(inner if self.dtype is None else inner.to(self.dtype), self.number).to(x.dtype)
        return (x + used).cos()


def _numbered(
    use: Callable[[Tensor, Any], Tensor], *, numbers: Iterable[float] | None = None, dtype: torch.dtype | None = None
) -> Stack:
    torch.manual_seed(0)
    return Stack(*(_Numbered(number, use, dtype=dtype) for number in numbers or [1 / (at + 2) for at in range(6)]))


@pytest.mark.parametrize(
    "use",
    [
        lambda x, number: x * number,
        lambda x, number: x / number,
        lambda x, number: number - x,
        lambda x, number: x.clone().mul_(number).add_(number),
        lambda x, number: (number * x.bfloat16()).float(),
        _drop_path,
        _rms,
    ],
    ids=["factor", "quotient", "difference", "in place", "half precision", "drop path", "epsilon"],
)
@pytest.mark.parametrize("trace", slow_but(TRACERS[:-1], _captured, dynamo), ids=lambda trace: trace.__name__)
def test_numbers_in_which_blocks_differ_are_inputs_of_one_body(
    trace: Callable[[nn.Module], Any], use: Callable[[Tensor, Any], Tensor]
) -> None:
    model = _numbered(use)
    program = Program.of(trace(model))
    plan = partita.plan(program, Repeats(), Call())
    assert max(Counter(_labels(plan.partition)).values()) == 6
    assert max(Counter(_labels(Repeats(passes_numbers=False)(program))).values()) < 6
    if trace is not dynamo:  # Its graph has weights as inputs; it is run where torch.compile is tested.
        partita.verify(program, plan.apply(), (_x(),))


@pytest.mark.parametrize(
    ("use", "dtype"),
    [
        (lambda x, number: x * number, torch.int64),
        (lambda x, number: x + x.mean() * number, None),
        (lambda x, number: torch.add(x, x.tanh(), alpha=number), None),
        (lambda x, number: functional.leaky_relu(x, number), None),
        (lambda x, number: x.clamp(max=number), None),
        (lambda x, number: functional.layer_norm(x, (4,), eps=number), None),
        (lambda x, number: x * number, torch.complex64),
    ],
    ids=["integers", "no dimensions", "alpha", "slope", "bound", "epsilon of a norm", "complex"],
)
def test_other_numbers_make_bodies_different(use: Callable[[Tensor, Any], Tensor], dtype: torch.dtype | None) -> None:
    program = _captured(_numbered(use, dtype=dtype))
    partition = Repeats()(program)
    assert not partition.constants
    assert _labels(partition) == _labels(Repeats(passes_numbers=False)(program))


def test_a_number_may_be_an_integer_in_some_blocks() -> None:
    partition = Repeats()(_captured(_numbered(operator.mul, numbers=[1, 0.5, 2, 3.0, -0.0, 7])))
    assert Counter(_labels(partition))["repeat_0"] == 6


def test_numbers_that_are_the_same_in_all_blocks_stay_in_the_body() -> None:
    model = _numbered(lambda x, number: (x * number + 0.5) / 3)
    program = _captured(model)
    plan = partita.plan(program, Repeats(), Call())
    (body,) = (body for body in plan.bodies() if body.calls > 1)
    assert body.numbers == ("mul",)
    assert str(body) == f"repeat_0: 6 calls of {body.nodes} nodes, each with its own number in mul"
    assert str(body) in str(plan)
    numbers = [node.args[1] for node in plan.apply().graph_module.repeat_0_0.graph.nodes if len(node.args) == 2]
    assert numbers.count(0.5) == numbers.count(3) == 1
    assert not [number for number in numbers if number in (1 / 2, 1 / 3) and number != 0.5]


def test_programs_without_such_numbers_are_cut_as_ever() -> None:
    for program in (_captured(_stack()), _captured(_numbered(operator.mul, numbers=[0.5] * 6))):
        partition, exact = Repeats()(program), Repeats(passes_numbers=False)(program)
        assert not partition.constants
        assert [region.nodes for region in partition] == [region.nodes for region in exact]


def test_numbers_are_passed_only_where_that_saves_more() -> None:
    """Pairs of blocks with two factors repeat as they are, but each block by itself saves more."""
    assert Repeats()(_captured(_numbered(operator.mul, numbers=[0.5, 2.5] * 3))).constants
    assert not Repeats(min_size=100)(_captured(_numbered(operator.mul))).constants


def test_numbers_that_differ_inside_of_a_block_cost_no_second_search(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    monkeypatch.setattr(
        "partita.policies.repeats.cover", lambda items, **options: searches.append(items) or cover(items, **options)
    )
    many = _captured(_numbered(lambda x, number: x * number * 0.25, numbers=[0.5] * 12))
    assert Counter(_labels(Repeats()(many)))["repeat_0"] == 12
    assert len(searches) == 1
    few = _captured(_numbered(lambda x, number: x * number * 0.25, numbers=[0.5] * 4))
    assert Counter(_labels(Repeats()(few)))["repeat_0"] == 4
    assert len(searches) == 3


def test_blocks_with_numbers_of_their_own_are_compiled_once() -> None:
    backend, model = Counting(), _numbered(_drop_path)
    x = _x().requires_grad_()
    program = partita.capture(model, (x,))
    lowered = partita.plan(program, Repeats(), Lower(backend, strict=True)).apply()
    partita.verify(program, lowered, (x,))
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    before = len(backend.made)
    assert torch.equal(lowered.module()(x), expected)
    assert len(backend.made) == before


def test_the_backward_of_a_joint_graph_shares_its_numbers() -> None:
    program = partita.capture_joint(_numbered(operator.mul), (_x().requires_grad_(),))
    assert program.joint is not None
    partition = Repeats()(program)
    backward = set(program.joint.backward)
    passed = [node in backward for node in partition.constant_nodes()]
    assert passed.count(True) >= 5
    assert passed.count(False) >= 5
    state = [dict(_numbered(operator.mul).named_parameters())[name].detach() for name in program.joint.state]
    applied = partita.plan(program, Repeats(), Call()).apply()
    partita.verify(program, applied, (*state, _x(), torch.ones(2, 3)), gradients=False)


def _check_blocks(partition: Partition, program: Program, model: Stack, *, different: int) -> None:
    """The other blocks are found, and no region that holds a node of the block at `different` repeats."""
    held = {region: {path for node in region.nodes if (path := _block_of(node)) is not None} for region in partition}
    repeated = [held[region] for region in partition if str(region.label).startswith("repeat")]
    whole = {f"blocks.{at}" for at in range(len(model.blocks)) if at != different}
    assert whole <= set().union(*repeated)
    sizes = Counter(path for node in program.operators() if (path := _block_of(node)) is not None)
    inside = [region for region in partition if f"blocks.{different}" in held[region]]
    assert not any(
        str(region.label).startswith("repeat") and len(region) >= sizes[f"blocks.{different}"] for region in inside
    )
    bodies = dict(zip(partition.regions, body_numbers(partition), strict=True))
    same = {
        bodies[region] for region in partition if whole & held[region] and f"blocks.{different}" not in held[region]
    }
    assert same.isdisjoint(bodies[region] for region in inside if len(region) > 1) or len(inside) > 1


def _block_of(node: Node) -> str | None:
    stack = node.meta.get("nn_module_stack") or {}
    return next((path for path, _ in stack.values() if path.startswith("blocks.") and path.count(".") == 1), None)


def test_a_hook_makes_a_called_module_unlike_others() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Tanh()) for _ in range(6)))
    model[3][0].register_forward_hook(lambda module, args, result: result * 2)
    program = _symbolic(model)
    partition = Repeats()(program)
    # The hook may do anything to what it gets, so that the block before it has another body, too.
    labels = {str(node.target)[0]: region.label for region in partition for node in region.nodes}
    assert [labels[str(at)] for at in range(6)] == ["repeat_0", "repeat_0", "part_0", "part_1", "repeat_0", "repeat_0"]


def test_a_module_in_another_training_mode_is_unlike_others() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Tanh()) for _ in range(6)))
    model[2][1].eval()
    partition = Repeats()(_symbolic(model))
    assert next(region for region in partition if "2.1" in {n.target for n in region.nodes}).label == "part_0"


def test_modules_with_other_shapes_are_unlike_others() -> None:
    class Scaled(nn.Module):
        def __init__(self, shape: tuple[int, ...]) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(shape))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    model = nn.Sequential(
        *(nn.Sequential(Scaled((1, 4) if at == 2 else (4,)), nn.Tanh(), nn.ReLU()) for at in range(6))
    )
    graph = torch.fx.Tracer()
    graph.is_leaf_module = lambda module, path: not isinstance(module, nn.Sequential)  # type: ignore[method-assign]
    program = Program.of(GraphModule(model, graph.trace(model)))
    partition = Repeats()(program)
    assert next(region for region in partition if "2.0" in {n.target for n in region.nodes}).label == "part_0"


def test_symbols_count_up_to_renaming() -> None:
    class Chooses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(6):
                chosen = x.nonzero().float()
                x = x + (chosen.sum() / 3).tanh() * x.cos() + chosen.mean().sin()
            return x

    program = partita.capture(Chooses(), (torch.ones(5),))
    symbols = {
        str(node.meta["val"].shape[0]) for node in program.operators() if node.target is torch.ops.aten.nonzero.default
    }
    assert len(symbols) == 6
    # Every block has assertions with its symbol in their messages, between which lie equal runs.
    repeats = [region for region in Repeats()(program) if region.label == "repeat_0"]
    assert len(repeats) >= 5
    assert all(torch.ops.aten.nonzero.default in {node.target for node in region.nodes} for region in repeats)


def test_dynamic_sizes_are_found_and_verified() -> None:
    model, batch = _stack(6), torch.export.Dim("batch", min=2, max=64)
    module = torch.export.export(model, (_x(),), dynamic_shapes=({0: batch},)).module()
    assert isinstance(module, GraphModule)
    plan = partita.plan(Program.of(module), Repeats(), Lower("aot_eager", strict=True))
    assert Counter(_labels(plan.partition))["repeat_0"] == 6
    rows = torch.randn(7, 4)
    with torch.no_grad():
        assert torch.equal(plan.apply().module()(rows), module(rows))


def test_values_that_are_computed_once_may_be_read_by_every_block() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            mask, angle = (x > 0).float(), x.cos()
            for linear in self.linears:
                x = (linear(x) * mask).relu() + x * angle
            return x

    assert Counter(_labels(Repeats()(_captured(Shared()))))["repeat_0"] == 8


def test_a_value_of_one_block_that_is_returned_makes_it_another_body() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(6))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            kept = x
            for at, block in enumerate(self.blocks):
                inner = block.norm(x)
                kept = inner if at == 2 else kept
                x = x + functional.gelu(block.up(inner)) @ block.up.weight
            return x, kept

    partition = Repeats()(_captured(Returns()))
    assert Counter(_labels(partition))["repeat_0"] == 5


def test_a_joint_graph_repeats_forward_and_backward() -> None:
    program = partita.capture_joint(_stack(8), (_x().requires_grad_(),))
    assert program.joint is not None
    partition = Repeats()(program)
    backward = set(program.joint.backward)
    sides = [{node in backward for node in region.nodes} for region in partition]
    assert all(len(side) == 1 for side in sides)
    for side in (False, True):
        repeats = Counter(region.label for region, found in zip(partition, sides, strict=True) if found == {side})
        assert max(repeats.values()) >= 7
    state = [dict(_stack(8).named_parameters())[name].detach() for name in program.joint.state]
    args = (*state, _x(), torch.ones(2, 3))
    applied = partita.plan(program, Repeats(), Call()).apply()
    partita.verify(program, applied, args, gradients=False)


def test_the_forward_of_a_joint_graph_alone_has_repeats() -> None:
    program = partita.capture_joint(_stack(8), (_x().requires_grad_(),))
    assert Counter(_labels(InForward(Repeats())(program)))["repeat_0"] >= 7


def test_regions_hold_one_mode_where_the_treatment_needs_that() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for linear in self.linears:
                with torch.no_grad():
                    scale = x.square().mean().sqrt() + 1
                x = linear(x / scale).relu() + x
            return x

    program, x = _captured(Mixed()), _x().requires_grad_()
    assert len(set(_labels(Repeats()(program)))) == 1
    plan = partita.plan(program, Repeats(), Lower("aot_eager", strict=True))
    assert sorted(body.calls for body in plan.bodies()) == [6, 6]
    partita.verify(program, plan.apply(), (x,))
    assert _labels(Repeats(modes_apart=True)(program)) == _labels(plan.partition)


def test_programs_without_repeats_are_one_region() -> None:
    program = _captured(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.LayerNorm(3)))
    assert _labels(Repeats()(program)) == ["part_0"]
    assert _labels(Repeats(between=False)(program)) == []


def test_empty_programs_and_single_operators() -> None:
    assert _labels(Repeats()(program_of(lambda graph: graph.placeholder("x")))) == []
    assert partita.plan(program_of(lambda graph: graph.placeholder("x")), Repeats(), Call()).bodies() == ()

    def single(graph: Graph) -> Node:
        return graph.call_function(torch.relu, (graph.placeholder("x"),))

    assert _labels(Repeats()(program_of(single))) == ["part_0"]


def test_items_of_containers_stay_with_their_producer() -> None:
    def write(graph: Graph) -> Node:
        x = graph.placeholder("x")
        for _ in range(5):
            pair = graph.call_function(torch.chunk, (x, 2))
            one, other = (graph.call_function(operator.getitem, (pair, at)) for at in range(2))
            x = graph.call_function(torch.cat, ([graph.call_function(torch.sin, (other,)), one],))
        return x

    program = program_of(write)
    plan = partita.plan(program, Repeats(), Call())
    assert _labels(plan.partition) == ["repeat_0"] * 5
    partita.verify(program, plan.apply(), (torch.randn(4),))


@pytest.mark.parametrize(
    "options", [{"min_size": 0}, {"min_size": True}, {"min_size": 2.0}, {"between": 1}, {"modes_apart": "yes"}], ids=str
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Repeats(**options)


@pytest.mark.models
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_layers_of_language_models_are_found(kind: str) -> None:
    model, ids = _language_model(kind), torch.arange(6).reshape(1, 6)
    program = partita.capture(model, (ids,))
    plan = partita.plan(program, Repeats(), Call())
    assert sorted(body.calls for body in plan.bodies()) == [1, 1, 6]
    layers = [{_layer_of(node) for node in region.nodes} for region in plan.partition if region.label == "repeat_0"]
    assert layers == [{str(at)} for at in range(6)]
    partita.verify(program, plan.apply(), (ids,), other_shapes=False)


@pytest.mark.models
@pytest.mark.parametrize("kind", slow_but(["gpt2", "llama", "bert"], "bert"))
def test_layers_of_joint_graphs_of_language_models_are_found(kind: str) -> None:
    program = partita.capture_joint(_language_model(kind), (torch.arange(6).reshape(1, 6),))
    bodies = partita.plan(program, Repeats(), Call()).bodies()
    operators = len(program.operators())
    assert sorted(body.calls for body in bodies)[-2] >= 5
    # What is compiled is less than half of all.
    assert sum(body.nodes for body in bodies) < 0.45 * operators


class _Result(nn.Module):
    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = getattr(self.model(ids), self.name)
        return result


def _language_model(kind: str) -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 6, "n_head": 2, "n_positions": 32}
        config = hf.GPT2Config(vocab_size=32, bos_token_id=0, eos_token_id=0, use_cache=False, **sizes)
        return _Result(hf.GPT2LMHeadModel(config), "logits").eval()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2}
    if kind == "llama":
        config = hf.LlamaConfig(vocab_size=32, max_position_embeddings=32, use_cache=False, **sizes)
        return _Result(hf.LlamaForCausalLM(config), "logits").eval()
    return _Result(hf.BertModel(hf.BertConfig(vocab_size=32, **sizes)), "last_hidden_state").eval()


def _layer_of(node: Node) -> str | None:
    paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    found = (part for path in paths for part in path.split(".") if part.isdigit())
    return next(found, None)


@given(programs())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_random_programs_mean_the_same(case: Case) -> None:
    _check_case(case)


@given(captured_programs())
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None)
def test_captured_programs_mean_the_same(case: Case) -> None:
    _check_case(case)


def _check_case(case: Case) -> None:
    program = Program.of(case.graph_module)
    plan = partita.plan(program, Repeats(min_size=1), Call())
    partita.verify(program, plan.apply(), case.args, case.kwargs)
    _check_bodies(plan)


def test_equal_labels_mean_equal_code() -> None:
    for model in (_stack(6), Stack(*(_Changed("mutates" if at % 2 else "tied") for at in range(8)))):
        _check_bodies(partita.plan(_captured(model), Repeats(), Call()))


def _check_bodies(plan: partita.Plan) -> None:
    """Regions of one label have bodies with one key, by which `Lower` shares what it compiles."""
    module = plan.apply().graph_module
    keys: dict[object, object] = {}
    for region in plan.partition:
        body = module._modules.get(region.name)
        key = body_key(body) if isinstance(body, GraphModule) else None
        if key is not None:
            assert keys.setdefault(region.label, key) == key


@pytest.mark.parametrize("width", slow_but([1, 7, 60], 7))
def test_work_grows_in_proportion(width: int) -> None:
    def program(size: int) -> Program:
        def write(graph: Graph) -> Node:
            first = x = graph.placeholder("x")
            functions = (torch.relu, torch.tanh, torch.neg, torch.abs)
            for at in range(size):
                if at % width == width - 1:
                    x = first = graph.call_function(torch.add, (x, first))
                else:
                    x = graph.call_function(functions[at % width % 4], (x,))
            return x

        return program_of(write)

    small, large = program(2_000), program(16_000)
    assert calls_during(Repeats(), large) < 12 * calls_during(Repeats(), small)


def test_repeats_inside_torch_compile_are_compiled_once() -> None:
    backend, model = Counting(), _stack(6)
    torch.compiler.reset()
    compiled = torch.compile(
        model, backend="partita", options={"policy": Repeats(), "treatment": Lower(backend, strict=True)}
    )
    assert torch.allclose(compiled(_x()), model(_x()))
    assert len(backend.made) == 3
