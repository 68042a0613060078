"""Inlining in place with `compat.utils.node_inline_`: torch's text where torch is right, and every case right.

Where ours differs on purpose:

| difference | why |
|---|---|
| an attribute that the outer module holds already at that path is not registered a second time | no state is doubled |
| buffers of an inlined body become buffers, not plain attributes | they are state |
| modules read by get_attr keep their own submodules | torch empties them |
| a body with hooks is refused | they would be lost |
"""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compat.split_helpers import Draft, dump, operators, same
from tests.compat.test_split_module_parity import random_graph, with_inputs_called_by_name
from tests.compat.test_utils import X, at, calls, inline_all, targets
from torch import Tensor, nn
from torch._export import utils as theirs
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree

from partita.compat import utils as ours
from partita.errors import BrokenGraphError, MissingTargetError, OptionError, PartitaError


def around(body: nn.Module, write: Callable[[Draft, Node, Node], Any], **state: Any) -> GraphModule:
    """A module with inputs x and y that calls `body`, written by `write`."""
    draft = Draft(body=body, **state)
    x, y = draft.input("x"), draft.input("y")
    return draft.done(write(draft, x, y))


Y = torch.ones(4)


def check_inlined(module: GraphModule, *, left: int = 0) -> GraphModule:
    """Inlines every call of a graph module, one after another; values, names and def-use lists stay right."""
    wanted = module(X, Y)
    bodies = {str(node.target): module.get_submodule(str(node.target)) for node in calls(module)}
    before = {name: dump(body) for name, body in bodies.items() if isinstance(body, GraphModule)}
    for node in calls(module):
        if isinstance(module.get_submodule(str(node.target)), GraphModule):
            assert ours.node_inline_(node) is module
            module.graph.lint()
            assert same(module(X, Y), wanted)
    assert len(calls(module)) == left
    assert {name: dump(bodies[name]) for name in before} == before, "a body was changed"
    again = copy.deepcopy(module)
    assert same(again(X, Y), wanted)
    check_users(module.graph)
    return module


def check_users(graph: Graph) -> None:
    for node in graph.nodes:
        readers = {user for user in graph.nodes if node in user.all_input_nodes}
        assert set(node.users) == readers, node.name


def swap(x: Any, y: Any) -> Any:
    return y, x


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Draft, Node, Node], Any]]] = {
    "plain": (
        lambda: symbolic_trace(lambda x, y: torch.sin(x) + y),
        lambda d, x, y: d.call(torch.neg, d.module("body", x, y)),
    ),
    "returned": (lambda: symbolic_trace(lambda x: torch.sin(x)), lambda d, x, y: d.module("body", x)),
    "items": (
        lambda: symbolic_trace(lambda x, y: (x.sin(), x + y)),
        lambda d, x, y: (
            (made := d.module("body", x, y))
            and (d.call(operator.getitem, made, 1), d.call(torch.neg, d.call(operator.getitem, made, 0)))
        ),
    ),
    "named alike": (
        lambda: symbolic_trace(lambda x, y: torch.sin(x) + torch.sin(y)),
        lambda d, x, y: d.call(torch.add, d.call(torch.sin, y), d.module("body", y, x)),
    ),
    "dead result": (lambda: symbolic_trace(lambda x: torch.sin(x)), lambda d, x, y: (d.module("body", x), y)[1]),
}


@pytest.mark.parametrize("case", CASES)
def test_inlining_gives_the_text_that_torch_gives(case: str) -> None:
    make, write = CASES[case]
    mine, torchs = around(make(), write), around(make(), write)
    told: list[list[tuple[str, str, str]]] = [[], []]
    for module, inline, said in ((mine, ours.node_inline_, told[0]), (torchs, theirs.node_inline_, told[1])):
        with module._set_replace_hook(lambda old, new, user, said=said: said.append((old.name, new, user.name))):
            assert inline(calls(module)[0]) is module
    assert mine.code == torchs.code
    assert [(n.op, n.name) for n in mine.graph.nodes] == [(n.op, n.name) for n in torchs.graph.nodes]
    assert [[u.name for u in n.users] for n in mine.graph.nodes] == [
        [u.name for u in n.users] for n in torchs.graph.nodes
    ]
    assert [name for name, _ in mine.named_modules()] == [name for name, _ in torchs.named_modules()]
    assert told[0] == told[1]


RIGHT: dict[str, tuple[Callable[[], nn.Module], Callable[[Draft, Node, Node], Any]]] = {
    **CASES,
    "its own input": (lambda: symbolic_trace(lambda x: x), lambda d, x, y: d.call(torch.sin, d.module("body", y))),
    "inputs swapped": (
        lambda: symbolic_trace(swap),
        lambda d, x, y: (
            (made := d.module("body", x, y))
            and (d.call(operator.getitem, made, 0), d.call(torch.sin, d.call(operator.getitem, made, 1)))
        ),
    ),
    "one value twice": (
        lambda: symbolic_trace(lambda x: (made := x.sin(), made)[:1] * 2),
        lambda d, x, y: (
            (made := d.module("body", x))
            and d.call(torch.add, d.call(operator.getitem, made, 0), d.call(operator.getitem, made, 1))
        ),
    ),
    "called twice": (
        lambda: symbolic_trace(lambda x, y: torch.sin(x) * y),
        lambda d, x, y: d.module("body", d.module("body", x, y), x),
    ),
    "keywords": (
        lambda: symbolic_trace(lambda x, y: torch.sub(x, y)),
        lambda d, x, y: d.graph.call_module("body", (), {"y": x, "x": y}),
    ),
    "position and keyword": (
        lambda: symbolic_trace(lambda x, y: torch.sub(x, y)),
        lambda d, x, y: d.graph.call_module("body", (y,), {"y": x}),
    ),
    "constants as arguments": (
        lambda: symbolic_trace(lambda x, y: torch.mul(x, y)),
        lambda d, x, y: d.module("body", x, 3),
    ),
    "a whole tuple": (lambda: symbolic_trace(lambda x: (x.sin(), x.cos())), lambda d, x, y: (d.module("body", x), y)),
    "a whole tuple and its items": (
        lambda: symbolic_trace(lambda x: (x.sin(), x.cos())),
        lambda d, x, y: (made := d.module("body", x)) and (made, d.call(operator.getitem, made, -1)),
    ),
    "a tuple read whole": (
        lambda: symbolic_trace(lambda x: (x.sin(), x.cos())),
        lambda d, x, y: d.call(torch.stack, d.module("body", x)),
    ),
    "a slice": (
        lambda: symbolic_trace(lambda x: (x.sin(), x.cos(), x)),
        lambda d, x, y: d.call(torch.stack, d.call(operator.getitem, d.module("body", x), slice(1, None))),
    ),
    "none": (lambda: symbolic_trace(lambda x: None), lambda d, x, y: (d.module("body", x), y)),
    "none among others": (
        lambda: symbolic_trace(lambda x: (x.sin(), None, 3)),
        lambda d, x, y: (
            (made := d.module("body", x)) and [d.call(operator.getitem, made, place) for place in (2, 1, 0)]
        ),
    ),
    "a constant": (lambda: symbolic_trace(lambda x: 2.5), lambda d, x, y: d.call(torch.mul, y, d.module("body", x))),
    "a method of a constant": (
        lambda: symbolic_trace(lambda x: 5),
        lambda d, x, y: (d.method("bit_length", d.module("body", x)), d.call(torch.neg, x)),
    ),
    "nested": (
        lambda: symbolic_trace(lambda x: {"a": (x.sin(), [x.cos(), None]), "b": x}),
        lambda d, x, y: (
            (made := d.module("body", x))
            and (pair := d.call(operator.getitem, made, "a"))
            and (
                d.call(operator.getitem, d.call(operator.getitem, pair, 1), 0),
                d.call(operator.getitem, made, "b"),
                pair,
            )
        ),
    ),
    "a list that is written": (
        lambda: symbolic_trace(lambda x: [x.sin(), x.cos()]),
        lambda d, x, y: (
            (made := d.module("body", x))
            and d.method("append", made, y) is not None
            and (made, d.call(operator.getitem, made, 2))
        ),
    ),
    "an item that is set": (
        lambda: symbolic_trace(lambda x: {"a": x.sin()}),
        lambda d, x, y: (
            (made := d.module("body", x))
            and d.call(operator.setitem, made, "a", y) is not None
            and d.call(operator.getitem, made, "a")
        ),
    ),
    "a list given and written": (
        lambda: symbolic_trace(lambda items: (items.append(items[0]), items)[1]),
        lambda d, x, y: d.module("body", [x, y]),
    ),
    "an index that is computed": (
        lambda: symbolic_trace(lambda x: (x.sin(), x.cos())),
        lambda d, x, y: d.call(operator.getitem, d.module("body", x), d.call(len, (x,))),
    ),
}


@pytest.mark.parametrize("case", RIGHT)
def test_inlining_keeps_values_names_and_the_body(case: str) -> None:
    make, write = RIGHT[case]
    check_inlined(around(make(), write))


@pytest.mark.parametrize(("count", "named"), [(3, {}), (1, {"a": 1}), (2, {"b": 2, "a": None}), (0, {"x": 3})])
def test_rest_arguments_and_defaults_are_bound(count: int, named: dict[str, Any]) -> None:
    graph = Graph()
    x = graph.placeholder("x", default_value=1.5)
    rest, others = graph.placeholder("*rest"), graph.placeholder("**others")
    graph.output((graph.call_function(torch.full, ((2,), 1.0)), x, rest, others))
    body = GraphModule(nn.Module(), graph)
    check_inlined(around(body, lambda d, x, y: d.graph.call_module("body", (x, y, x)[:count], named)))


def test_a_default_stands_for_an_argument_that_is_not_passed() -> None:
    body = symbolic_trace(lambda x, y=2.0: x * y)
    module = check_inlined(around(body, lambda d, x, y: d.module("body", x)))
    assert torch.equal(module(X, Y), X * 2)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 3.0))
        self.register_buffer("saved", torch.full((4,), 5.0))
        self.register_buffer("fleeting", torch.full((4,), 7.0), persistent=False)
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(torch.full((4,), 11.0))
        self.act = nn.Softplus()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x * self.weight + self.saved + self.fleeting * self.inner.weight)


def fleeting_kept(module: GraphModule) -> GraphModule:
    module.register_buffer("fleeting", module.fleeting, persistent=False)
    return module


def test_state_that_a_body_reads_moves_with_it() -> None:
    body = fleeting_kept(symbolic_trace(Scaled()))
    module = check_inlined(around(body, lambda d, x, y: d.module("body", x)), left=1)
    assert sorted(targets(module)) == ["act", "fleeting", "inner.weight", "saved", "weight"]
    assert sorted(module.state_dict()) == ["inner.weight", "saved", "weight"]
    assert module.weight is body.weight
    assert module.inner.weight is body.inner.weight
    assert isinstance(module.weight, nn.Parameter)


def test_a_body_keeps_its_own_state_where_names_are_taken() -> None:
    taken = {
        "weight": nn.Parameter(torch.zeros(4)),
        "inner": nn.Linear(4, 4),
        "act": nn.Tanh(),
        "saved": torch.zeros(4),
    }
    body = fleeting_kept(symbolic_trace(Scaled()))

    def write(draft: Draft, x: Node, y: Node) -> Any:
        own = draft.call(torch.add, draft.attr("weight"), draft.attr("saved"))
        return draft.module("act", draft.call(torch.add, own, draft.module("body", draft.module("inner", x))))

    module = check_inlined(around(body, write, **taken), left=3)
    assert {"submod_1", "submod_2", "submod_3", "submod_4"} <= set(targets(module))
    assert type(module.act) is nn.Tanh


def test_a_plain_tensor_of_a_body_does_not_become_state() -> None:
    body = Graph()
    constant = body.get_attr("constant")
    body.output(body.call_function(torch.add, (body.placeholder("x"), constant)))
    root = GraphModule(nn.Module(), Graph())
    root.constant = torch.ones(4)
    made = GraphModule(root, body)
    made.__dict__["constant"] = made._buffers.pop("constant", made.__dict__.get("constant"))
    module = check_inlined(around(made, lambda d, x, y: d.module("body", x)))
    assert not module.state_dict()
    assert torch.equal(module.constant, torch.ones(4))


def test_a_module_called_in_a_body_is_the_bodys_own() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(x)

    body = symbolic_trace(Calls())
    module = around(body, lambda d, x, y: d.module("act", d.module("body", x)), act=nn.ReLU())
    torchs = copy.deepcopy(module)
    wanted = module(X, Y)
    check_inlined(module, left=2)
    assert not torch.equal(theirs.node_inline_(calls(torchs)[0])(X, Y), wanted), "torch calls the other module"


def test_both_calls_of_one_body_share_its_state() -> None:
    body = fleeting_kept(symbolic_trace(Scaled()))
    module = check_inlined(around(body, lambda d, x, y: d.module("body", d.module("body", x))), left=2)
    assert sorted(module.state_dict()) == ["inner.weight", "saved", "weight"]
    assert len(list(module.parameters())) == 2


def test_a_module_read_by_get_attr_keeps_its_own_modules() -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            def inner(x: Tensor) -> Tensor:
                return torch.cond(x.sum() > 1, lambda x: x + 1, lambda x: x - 1, (x,))

            return torch.cond(x.sum() > 0, inner, lambda x: x.cos(), (x,))

    made = make_fx(Branching(), tracing_mode="symbolic")(X)
    module = check_inlined(around(made, lambda d, x, y: d.module("body", x)))
    assert any("." in name for name, _ in module.named_modules())


def test_whoever_else_holds_the_body_can_still_call_it() -> None:
    body = fleeting_kept(symbolic_trace(Scaled()))
    owner = nn.Sequential(body)
    wanted = owner(X)
    module = around(body, lambda d, x, y: d.module("body", x))
    ours.node_inline_(calls(module)[0])
    assert "body" not in dict(module.named_modules())
    assert torch.equal(owner(X), wanted)
    body.recompile()
    body.graph.lint()
    assert torch.equal(owner(X), wanted)


def test_a_container_that_others_hold_is_not_emptied() -> None:
    block = nn.Module()
    block.body = symbolic_trace(lambda x: torch.sin(x))
    block.other = nn.Tanh()
    draft = Draft()
    x = draft.input("x")
    graph = draft.graph
    graph.output(graph.call_module("block.other", (graph.call_module("block.body", (x,)),)))
    module = GraphModule(nn.Module(), Graph())
    module.block = block
    module.graph = graph
    module.recompile()
    wanted = module(X)
    assert ours.node_inline_(calls(module)[0]) is module
    assert torch.equal(module(X), wanted)
    assert sorted(block._modules) == ["body", "other"]
    assert sorted(module.block._modules) == ["other"]


def test_metadata_goes_with_the_nodes_and_is_not_shared() -> None:
    body = symbolic_trace(lambda x, y: torch.sin(x) + y)
    for node in body.graph.nodes:
        node.meta.update(val=node.name, nested={"origin": [node.name]})
    module = around(body, lambda d, x, y: d.module("body", x, y))
    ours.node_inline_(calls(module)[0])
    sin = next(node for node in module.graph.nodes if node.name == "sin")
    assert sin.meta["nested"] == {"origin": ["sin"]}
    sin.meta["nested"]["origin"].append("edited")
    assert next(node for node in body.graph.nodes if node.name == "sin").meta["nested"] == {"origin": ["sin"]}


def test_a_graph_signature_follows_through_its_hook() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x.sin() + y, x.cos(), x

    exported = torch.export.export(Model(), (X, Y))
    signature = copy.deepcopy(exported.graph_signature)
    names = list(signature.user_outputs)
    split = ours.sequential_split(exported.graph_module, lambda node: node.name in ("add", "cos"))
    outputs = split.graph.output_node().args[0]
    for spec, node in zip(signature.output_specs, outputs, strict=True):  # type: ignore[arg-type]
        spec.arg.name = node.name  # type: ignore[union-attr]
    assert list(signature.user_outputs) != names
    with split._set_replace_hook(signature.get_replace_hook()):
        inline_all(split, ours.node_inline_)
    assert list(signature.user_outputs) == names


def test_hooks_on_new_and_erased_nodes_are_called() -> None:
    module = around(symbolic_trace(lambda x, y: torch.sin(x) + y), lambda d, x, y: d.module("body", x, y))
    made: list[str] = []
    erased: list[str] = []
    module._register_create_node_hook(lambda node: made.append(node.name))
    module._register_erase_node_hook(lambda node: erased.append(node.name))
    ours.node_inline_(calls(module)[0])
    assert (made, erased) == (["sin", "add"], ["body"])


def test_a_body_that_takes_trees_apart_is_bound_by_its_trees() -> None:
    graph = Graph()
    a, b, c = (graph.placeholder(name) for name in ("a", "b", "c"))
    graph.output((graph.call_function(torch.sub, (a, b)), c))
    args = (({"a": 0, "b": 0},), {"c": 0})
    trees = _PyTreeInfo(["first", "c"], pytree.tree_structure(args), pytree.tree_structure({"out": [0, 0]}))
    graph.set_codegen(_PyTreeCodeGen(trees))
    body = GraphModule(nn.Module(), graph)
    module = around(body, lambda d, x, y: d.graph.call_module("body", ({"a": x, "b": y},), {"c": x}))
    assert torch.equal(check_inlined(module)(X, Y)["out"][0], X - Y)
    wrong = around(body, lambda d, x, y: d.graph.call_module("body", ([x, y],), {"c": x}))
    before = dump(wrong)
    with pytest.raises(OptionError, match="do not have the pytree structure"):
        ours.node_inline_(calls(wrong)[0])
    assert dump(wrong) == before


def test_a_part_without_an_output_is_inlined() -> None:
    graph = Graph()
    graph.call_function(torch._C._set_grad_enabled, (False,))
    body = GraphModule(nn.Module(), graph)
    module = around(body, lambda d, x, y: (d.module("body"), d.call(torch.sin, x))[1])
    ours.node_inline_(calls(module)[0])
    with torch.enable_grad():
        assert not module(X.clone().requires_grad_(), Y).requires_grad


def with_hook() -> nn.Module:
    body = symbolic_trace(lambda x: torch.sin(x))
    body.register_forward_hook(lambda module, args, result: result + 1)
    return body


def with_two_outputs() -> nn.Module:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(x)
    body = GraphModule(nn.Module(), graph)
    graph.create_node("output", "output", (x,), name="second")
    return body


def without_its_attribute() -> nn.Module:
    body = symbolic_trace(lambda x: torch.sin(x))
    with body.graph.inserting_before(body.graph.output_node()):
        body.graph.create_node("get_attr", "nowhere")
    return body


def in_wrong_order() -> nn.Module:
    body = symbolic_trace(lambda x: torch.cos(torch.sin(x)))
    sin, cos = operators(body)
    cos.append(sin)
    return body


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, type[Exception], str]] = {
    "no graph": (lambda: nn.Linear(4, 4), ((0,), {}), AttributeError, "Linear has no graph"),
    "hook": (with_hook, ((0,), {}), AssertionError, "hooks"),
    "too many": (
        lambda: symbolic_trace(lambda x: x + 1),
        ((0, 1), {}),
        TypeError,
        "more arguments than its body takes: y",
    ),
    "too few": (lambda: symbolic_trace(lambda x, y: x + y), ((0,), {}), TypeError, "no argument for 'y'"),
    "unknown keyword": (lambda: symbolic_trace(lambda x: x + 1), ((0,), {"z": 1}), TypeError, "z=1"),
    "given twice": (lambda: symbolic_trace(lambda x: x + 1), ((0,), {"x": 1}), TypeError, "x=1"),
    "two outputs": (with_two_outputs, ((0,), {}), AssertionError, "'output', 'second'"),
    "missing attribute": (without_its_attribute, ((0,), {}), MissingTargetError, "nowhere"),
    "wrong order": (in_wrong_order, ((0,), {}), BrokenGraphError, "'cos' reads 'sin'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_inlined_is_refused_and_nothing_changes(case: str) -> None:
    make, (args, kwargs), kind, words = REFUSED[case]
    body = make()
    module = around(body, lambda d, x, y: d.graph.call_module("body", tuple((x, y)[place] for place in args), kwargs))
    before = dump(module)
    with pytest.raises(PartitaError, match=words) as caught:
        ours.node_inline_(calls(module)[0])
    assert isinstance(caught.value, kind)
    assert dump(module) == before
    assert module.body is body


def test_what_is_no_call_is_refused_with_torchs_type() -> None:
    module = around(symbolic_trace(lambda x: torch.sin(x)), lambda d, x, y: d.module("body", x))
    x, *_, output = module.graph.nodes
    for node in (x, output):
        for inline in (ours.node_inline_, theirs.node_inline_):
            with pytest.raises(AssertionError, match=f"expected call_module op, got {node.op}"):
                inline(node)
    orphan = Graph()
    for inline in (ours.node_inline_, theirs.node_inline_):
        with pytest.raises(AssertionError, match="owning_module should not be None"):
            inline(orphan.call_module("body"))
    call = calls(module)[0]
    call.target = "nowhere"
    for inline in (ours.node_inline_, theirs.node_inline_):
        with pytest.raises(AttributeError, match="nowhere"):
            inline(call)
    call.target = "body"
    ours.node_inline_(call)
    with pytest.raises(AssertionError, match="erased or inlined before"):
        ours.node_inline_(call)
    with pytest.raises(AssertionError, match="not by str"):
        ours.node_inline_("body")  # type: ignore[arg-type]


def test_a_module_that_calls_itself_is_not_inlined() -> None:
    module = around(nn.Identity(), lambda d, x, y: d.module("body", x))
    module._modules["body"] = module
    with pytest.raises(AssertionError, match="the module that makes the call"):
        ours.node_inline_(calls(module)[0])


def test_inlining_undoes_splitting_of_generated_graphs() -> None:
    same_text = 0
    for seed in range(40):
        make = with_inputs_called_by_name(lambda s=seed: random_graph(s, size=12))  # type: ignore[misc]
        module = make()
        args = [X + place for place in range(len(module.graph.find_nodes(op="placeholder")))]
        names = [node.name for node in operators(module)]
        marks = at(*random.Random(seed).sample(names, 3))
        mine = inline_all(ours.sequential_split(module, marks), _inline_graphs(ours.node_inline_))
        assert same(mine(*args), module(*args))
        check_users(mine.graph)
        mine.graph.lint()
        try:
            torchs = inline_all(theirs.sequential_split(make(), marks), _inline_graphs(theirs.node_inline_))
            same_text += same(torchs(*args), mine(*args)) and torchs.code == mine.code
        except Exception:
            continue
    assert same_text > 3


def _inline_graphs(inline: Callable[[Node], Any]) -> Callable[[Node], Any]:
    def only_graphs(node: Node) -> Any:
        module: Any = node.graph.owning_module
        return inline(node) if isinstance(module.get_submodule(node.target), GraphModule) else node

    return only_graphs


class Moded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        first = self.linear(x)
        with torch.no_grad():
            self.total.add_(first.sum(0))
            second = first.sin()
            with torch.enable_grad():
                third = second + y
        with torch.autocast("cpu", torch.bfloat16):
            fourth = self.linear(third)
        return {"fourth": fourth, "pair": (third, second)}, x


def test_torchs_own_passes_run_on_these_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    def exported() -> Any:
        torch.manual_seed(0)
        return torch.export.export(Moded(), (torch.ones(2, 4), torch.ones(2, 4)))

    wanted = exported()
    for name in ("replace_set_grad_with_hop_pass", "replace_autocast_with_hop_pass", "replace_with_hop_pass_util"):
        for helper in ours.__all__:
            monkeypatch.setattr(f"torch._export.passes.{name}.{helper}", getattr(ours, helper), raising=False)
    given = exported()
    assert given.graph_signature == wanted.graph_signature
    assert [n.target for n in given.graph.nodes if n.op == "call_function"] == [
        n.target for n in wanted.graph.nodes if n.op == "call_function"
    ]
    args = (torch.ones(2, 4), torch.randn(2, 4))
    assert same(given.module()(*args), wanted.module()(*args))
