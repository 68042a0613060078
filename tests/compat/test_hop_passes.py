"""torch's two passes and ours give the same operators, bodies and signatures wherever torch's result is right.

Where ours differs on purpose:

| difference | why | test |
|---|---|---|
| what takes a single value out of a call has the name of that value | the names of outputs stay | test_names_... |
| modes nested or crossing in any way are kept | torch drops them | test_hop_passes_corrected.py |
| the mode while the pass runs does not matter | the program is called later | test_hop_passes_corrected.py |
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compat.hop_passes_helpers import OURS, THEIRS, Net, described, raw_export, roles
from tests.rewrite.helpers import BRAIN, HALF, assert_same, outcome, tree
from torch import Tensor
from torch._export.passes import replace_autocast_with_hop_pass as torch_autocast
from torch._export.passes import replace_set_grad_with_hop_pass as torch_set_grad
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled
from torch.export import Dim
from torch.fx import GraphModule, Node

from partita._torch.toggles import SET_GRAD
from partita.compat import replace_with_hop_pass_util
from partita.compat import wrap as ours
from partita.compat.utils import node_inline_, nodes_filter, sequential_split
from partita.errors import OptionError, SignatureError
from partita.program.exported import check_signature
from partita.testing.generator.build import dump

pytestmark = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 13),
    reason="the pieces, their numbers and their metadata are those of the passes of torch 2.13",
)

no_grad, enable_grad, autocast = torch.no_grad, torch.enable_grad, torch.autocast
X = torch.linspace(-1, 1, 8).reshape(2, 4)


def one_value(self: Net, x: Tensor) -> Any:
    a = self.first(x)
    with no_grad():
        b = self.second(a)
    return a + b


def several_values(self: Net, x: Tensor) -> Any:
    with no_grad():
        b = self.second(x)
        c = self.first(b)
    return b + c, c * 2, x


def two_regions(self: Net, x: Tensor) -> Any:
    with no_grad():
        b = self.second(x)
    c = self.first(b)
    with no_grad():
        d = self.second(c)
    return d + c


def everything_inside(self: Net, x: Tensor) -> Any:
    with no_grad():
        a = self.second(x)
        return a, a + 1


def returned_from_inside(self: Net, x: Tensor) -> Any:
    with no_grad():
        return self.second(x)


def written_and_read(self: Net, x: Tensor) -> Any:
    with no_grad():
        self.seen.add_(x.sum(0))
    return self.first(x) + self.seen


def gradients_inside(self: Net, x: Tensor) -> Any:
    with no_grad():
        a = self.first(x)
        with enable_grad():
            b = self.second(a)
        c = b + 1
    return c * a


def a_cast(self: Net, x: Tensor) -> Any:
    a = self.first(x)
    with autocast("cpu", dtype=BRAIN):
        b = self.second(a)
    return b + 1


def nested_casts(self: Net, x: Tensor) -> Any:
    with autocast("cpu", dtype=BRAIN):
        a = self.first(x)
        with autocast("cpu", enabled=False):
            b = self.second(a.float())
        c = self.second(b)
    return c + 1


def casts_in_a_row(self: Net, x: Tensor) -> Any:
    with autocast("cpu", dtype=BRAIN):
        a = self.first(x)
    with autocast("cpu", dtype=HALF):
        b = self.first(x)
    self.seen.add_(1)
    return a.float() + b.float() + self.seen


def a_cast_inside(self: Net, x: Tensor) -> Any:
    with no_grad():
        with autocast("cpu", dtype=BRAIN):
            a = self.first(x)
        b = a + 1
    return b.float() + x


def chunks(self: Net, x: Tensor) -> Any:
    a, b = self.first(x).chunk(2, -1)
    with no_grad():
        c, d = a.chunk(2, -1)
    return c + d, b


def constants_returned(self: Net, x: Tensor) -> Any:
    with no_grad():
        c = x.sin()
    return {"c": c, "none": None, "three": 3, "x": x}


def written_input(self: Net, x: Tensor) -> Any:
    with no_grad():
        x.mul_(2)
        y = x + 1
    return self.first(y)


def branches(self: Net, x: Tensor) -> Any:
    def yes(x: Tensor) -> Tensor:
        with no_grad():
            y = x.sin()
        return x * y

    def no(x: Tensor) -> Tensor:
        return x.cos()

    return torch.cond(x.sum() > 0, yes, no, (x,))


RIGHT: list[tuple[str, Callable[..., Any]]] = [
    ("grad", one_value),
    ("grad", several_values),
    ("grad", two_regions),
    ("grad", everything_inside),
    ("grad", returned_from_inside),
    ("grad", written_and_read),
    ("grad", gradients_inside),
    ("grad", chunks),
    ("grad", constants_returned),
    ("grad", written_input),
    ("grad", branches),
    ("autocast", a_cast),
    ("autocast", nested_casts),
    ("autocast", casts_in_a_row),
    ("both", a_cast_inside),
    ("both", nested_casts),
    ("both", two_regions),
]
every_right_case = pytest.mark.parametrize(("name", "does"), RIGHT, ids=[f"{n}-{d.__name__}" for n, d in RIGHT])


@every_right_case
def test_operators_bodies_values_and_signatures_are_torchs(name: str, does: Callable[..., Any]) -> None:
    raw, signature = raw_export(Net(does), X)
    before, names = dump(raw), str(signature)
    module, found = OURS[name](raw, signature)
    assert (dump(raw), str(signature)) == (before, names), "neither the graph nor the signature given is changed"
    theirs, expected = THEIRS[name](copy.deepcopy(raw), copy.deepcopy(signature))
    assert [*described(module)] == [*described(theirs)]
    assert roles(found) == roles(expected)
    assert found is not None
    check_signature(module.graph, found)
    module.graph.lint()


@every_right_case
def test_values_and_gradients_are_those_of_the_model(name: str, does: Callable[..., Any]) -> None:
    model = Net(does)
    raw, signature = raw_export(model, X)
    module, _ = OURS[name](raw, signature)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    lifted = [state[spec.target] for spec in signature.input_specs if spec.target is not None]

    def flat(*leaves: Tensor) -> Any:
        return module(*leaves)

    def plain(*leaves: Tensor) -> Any:
        return raw(*leaves)

    assert_same(outcome(flat, *lifted, X), outcome(plain, *lifted, X))


def test_dynamic_sizes_keep_their_symbols() -> None:
    raw, signature = raw_export(Net(several_values), X, dynamic_shapes={"x": {0: Dim("rows", min=2)}})
    module, found = OURS["grad"](raw, signature)
    theirs, expected = THEIRS["grad"](copy.deepcopy(raw), copy.deepcopy(signature))
    assert [*described(module)] == [*described(theirs)]
    assert roles(found) == roles(expected)


def test_without_a_toggle_of_its_kind_the_same_objects_come_back() -> None:
    for name, does in (("autocast", one_value), ("grad", a_cast), ("both", lambda self, x: self.first(x))):
        raw, signature = raw_export(Net(does), X)
        module, found = OURS[name](raw, signature)
        assert module is raw
        assert found is signature


def test_a_toggle_that_changes_nothing_is_removed_and_its_nodes_stay() -> None:
    def on(self: Net, x: Tensor) -> Any:
        with enable_grad():
            return self.first(x)

    raw, signature = raw_export(Net(on), X)
    module, found = OURS["grad"](raw, signature)
    theirs, expected = THEIRS["grad"](copy.deepcopy(raw), copy.deepcopy(signature))
    assert [*described(module)] == [*described(theirs)]
    assert roles(found) == roles(expected)
    assert "set_grad" not in module.code


def test_names_of_values_stay_and_bodies_are_numbered_by_the_pieces_of_torch() -> None:
    raw, signature = raw_export(Net(two_regions), X)
    module, found = OURS["grad"](raw, signature)
    kept = [node.name for node in raw.graph.nodes if "set_grad" not in node.name]
    assert [node.name for node in module.graph.nodes if node.name in kept] == kept
    assert [name for name, _ in module.named_children()] == ["submod_1", "submod_3"]
    assert found is not None
    assert [spec.arg.name for spec in found.output_specs] == [spec.arg.name for spec in signature.output_specs]


def test_a_call_belongs_to_a_module_that_holds_its_whole_body() -> None:
    for name, does in RIGHT:
        raw, signature = raw_export(Net(does), X)
        module, _ = OURS[name](raw, signature)
        for node in module.graph.nodes:
            if node.target in (wrap_with_set_grad_enabled, wrap_with_autocast):
                (body,) = (given for given in node.all_input_nodes if given.op == "get_attr")
                stack = node.meta["nn_module_stack"]
                assert body.meta["nn_module_stack"] == stack
                inside = (held.meta["nn_module_stack"] for held in getattr(module, body.target).graph.nodes
                          if held.op == "call_function")  # fmt: skip
                assert stack
                assert all([*held.items()][: len(stack)] == [*stack.items()] for held in inside)


def test_a_missing_signature_stays_missing() -> None:
    raw, _ = raw_export(Net(one_value), X)
    module, found = OURS["grad"](raw, None)
    assert found is None
    assert wrap_with_set_grad_enabled in {node.target for node in module.graph.nodes}


@every_right_case
def test_torchs_passes_give_the_same_with_the_helpers_of_compat(
    name: str, does: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, signature = raw_export(Net(does), X)
    theirs, expected = THEIRS[name](copy.deepcopy(raw), copy.deepcopy(signature))
    for module in (torch_set_grad, torch_autocast):
        for helper in replace_with_hop_pass_util.__all__:
            monkeypatch.setattr(module, helper, getattr(replace_with_hop_pass_util, helper))
    before = str(signature)
    mixed, found = THEIRS[name](copy.deepcopy(raw), signature)
    assert str(signature) == before
    assert [*described(mixed)] == [*described(theirs)]
    assert roles(found) == roles(expected)
    assert found is not None
    check_signature(mixed.graph, found)


def regions_of(operator: Any, gm: GraphModule, signature: Any) -> Any:
    """A pass of someone else: what follows a switch of the grad mode, up to the next, becomes a call of `operator`."""

    def is_switch(node: Node) -> bool:
        return node.target is SET_GRAD

    def treat(call: Node) -> None:
        body = call.graph.owning_module.get_submodule(str(call.target))  # type: ignore[union-attr]
        switches = nodes_filter(body.graph.nodes, is_switch)
        if not switches:
            node_inline_(call)
            return
        replace_with_hop_pass_util._replace_with_hop_helper(call, switches[0], operator)
        body.graph.erase_node(switches[0])

    def cut(gm: GraphModule, signature: Any) -> Any:
        if not any(map(is_switch, gm.graph.nodes)):
            return gm, signature
        split = sequential_split(gm, is_switch)
        return replace_with_hop_pass_util._sequential_split_and_maybe_inline_subgraphs_helper(split, signature, treat)

    return replace_with_hop_pass_util._replace_with_hop_pass_helper(gm, signature, cut)


def test_another_operator_is_put_around_regions_in_branches_too() -> None:
    def branch(x: Tensor) -> Tensor:
        with no_grad():
            y = x.sin()
        return y * 2

    def does(self: Net, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, branch, torch.cos, (x,)), self.first(x)

    raw, signature = raw_export(Net(does), X)
    module, found = regions_of(ours.wrap_with_set_grad_enabled, raw, signature)
    assert tree(module).splitlines()[:7] == [
        "sum_1",
        "gt",
        "cond",
        "    no_grad",
        "        sin",
        "    enable_grad",
        "        mul",
    ]
    check_signature(module.graph, found)


def test_a_call_that_cannot_be_replaced_is_refused_by_name() -> None:
    module = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU()))
    (call,) = module.graph.find_nodes(op="call_module")
    with pytest.raises(OptionError, match=f"'{call.name}' calls no graph module"):
        replace_with_hop_pass_util._replace_with_hop_helper(call, call, ours.wrap)
    raw, signature = raw_export(Net(several_values), X)
    split = sequential_split(raw, lambda node: node.target is SET_GRAD)
    signature.output_specs.pop()
    with pytest.raises(SignatureError, match="3 outputs and its signature 2"):
        replace_with_hop_pass_util._sequential_split_and_maybe_inline_subgraphs_helper(split, signature, print)
