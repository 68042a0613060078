"""State keys: checkpoints go both ways between a model and its parts, however often it is cut."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.helpers.core import cut, program_of
from torch import Tensor, nn
from torch.fx import GraphModule, Tracer

from partita import Program, plan
from partita.errors import OptionError
from partita.policies import ByLabel
from partita.program.program import StateKeys
from partita.rewrite.state import StateNaming


class Model(nn.Module):
    """Nested modules, a tied weight, a parameter of its own, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)])
        self.blocks[2].weight = self.blocks[0].weight
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("fleeting", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks[1](self.blocks[0](x)) * self.scale
        return self.blocks[2](hidden + self.kept + self.fleeting)


LABELS = {"blocks_0": "one", "blocks_1": "one", "mul": "one", "add": "two", "add_1": "two", "blocks_2": "two"}


def split(naming: StateNaming, *, times: int = 1) -> Program:
    program = program_of(Model())
    program = cut(program, LABELS, state_names=naming)
    for _ in range(times - 1):
        program = cut(program, {"one": "outer", "two": "outer"}, state_names=naming)
    return program


def filled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Other values in a state dict, the same for tied entries."""
    return {key: torch.full_like(value, float(sum(map(ord, key.rpartition(".")[2])))) for key, value in state.items()}


def test_split_names_say_where_things_went() -> None:
    keys = set(split("split").module().state_dict())
    assert {"one.blocks_0.weight", "one.blocks_1.running_mean", "two.blocks_2.bias", "scale", "kept"} <= keys
    assert len(keys) == len(Model().state_dict())


@pytest.mark.parametrize("times", [1, 2, 3])
def test_original_names_are_those_of_the_original(times: int) -> None:
    module = split("original", times=times).module()
    assert set(module.state_dict()) == set(Model().state_dict())


@pytest.mark.parametrize("times", [1, 2, 3])
def test_an_old_checkpoint_loads_into_a_split_model_and_back(times: int) -> None:
    old = filled(Model().state_dict())
    module = split("original", times=times).module()
    assert str(module.load_state_dict(old)) == "<All keys matched successfully>"
    saved = module.state_dict()
    assert all(torch.equal(saved[key], old[key]) for key in old)
    fresh = Model()
    fresh.load_state_dict(saved)
    assert all(torch.equal(value, old[key]) for key, value in fresh.state_dict().items())


@pytest.mark.parametrize("times", [1, 2])
def test_the_map_goes_both_ways_whatever_the_naming(times: int) -> None:
    program = split("split", times=times)
    module, keys = program.module(), program.state_keys
    old = filled(Model().state_dict())
    module.load_state_dict(keys.from_original(old, module.state_dict()))
    back = keys.to_original(module.state_dict())
    assert set(back) == set(old)
    assert all(torch.equal(back[key], old[key]) for key in old)


def test_a_strict_load_still_tells_what_is_missing_and_what_is_strange() -> None:
    module = split("original").module()
    old = Model().state_dict()
    del old["blocks.0.bias"]
    with pytest.raises(RuntimeError, match=r'Missing key.*: "blocks\.0\.bias"\.'):
        module.load_state_dict(old)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*strange\.weight"):
        module.load_state_dict({**Model().state_dict(), "strange.weight": torch.ones(1)})
    found = module.load_state_dict({**old, "strange": torch.ones(1)}, strict=False)
    assert found.unexpected_keys == ["strange"]
    assert found.missing_keys == ["blocks.0.bias"]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    "copied", [lambda module: module, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
@pytest.mark.parametrize("inside", [False, True])
def test_what_is_missing_or_does_not_fit_has_the_name_of_the_original(times: int, copied: Any, *, inside: bool) -> None:
    module: nn.Module = copied(split("original", times=times).module())
    original: nn.Module = Model()
    if inside:
        module, original = nn.Sequential(module, nn.Linear(2, 2)), nn.Sequential(original, nn.Linear(2, 2))
    prefix = "0." if inside else ""
    state = {**original.state_dict(), f"{prefix}scale": torch.ones(3), f"{prefix}blocks.1.bias": torch.ones(3)}
    del state[f"{prefix}blocks.2.bias"]
    said = []
    for each in (module, original):
        with pytest.raises(RuntimeError) as error:
            each.load_state_dict(state)
        said.append(sorted(str(error.value).splitlines()[1:]))
    assert said[0] == said[1]
    assert [f"{prefix}blocks.1.bias" in line for line in said[0]].count(True) == 1


def test_a_checkpoint_is_not_changed_by_loading_it() -> None:
    old = Model().state_dict()
    before = {key: value.clone() for key, value in old.items()}
    split("original").module().load_state_dict(old)
    assert list(old) == list(before)
    assert all(torch.equal(old[key], before[key]) for key in before)


def test_names_hold_below_a_prefix() -> None:
    parent, original = nn.Module(), nn.Module()
    parent.model, parent.head = split("original").module(), nn.Linear(2, 2)
    original.model, original.head = Model(), nn.Linear(2, 2)
    assert set(parent.state_dict()) == set(original.state_dict())
    old = filled(original.state_dict())
    assert str(parent.load_state_dict(old)) == "<All keys matched successfully>"
    assert all(torch.equal(value, old[key]) for key, value in parent.state_dict().items())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_keep_the_names(copied: Any) -> None:
    module = copied(split("original").module())
    assert set(module.state_dict()) == set(Model().state_dict())
    old = filled(Model().state_dict())
    module.load_state_dict(old)
    assert torch.equal(module.get_parameter("one.blocks_0.bias"), old["blocks.0.bias"])


def test_a_cut_under_split_names_forgets_the_original_names() -> None:
    program = split("original")
    again = cut(program, {"one": "outer"}, state_names="split")
    assert "outer.one.blocks_0.weight" in again.module().state_dict()
    assert "blocks.0.weight" in program.module().state_dict()


def test_tied_weights_stay_tied() -> None:
    module: Any = split("original").module()
    assert module.one.blocks_0.weight is module.two.blocks_2.weight
    assert len(list(module.parameters())) == len(list(Model().parameters()))


def test_buffers_that_are_not_saved_stay_that_way() -> None:
    for naming in ("split", "original"):
        module = split(naming).module()
        assert "fleeting" in dict(module.named_buffers())
        assert not [key for key in module.state_dict() if "fleeting" in key]


def test_an_optimizer_over_the_original_trains_the_parts() -> None:
    program = program_of(Model())
    after = cut(program, LABELS)
    optimizer = torch.optim.SGD(program.module().parameters(), lr=0.1)
    before = {name: value.clone() for name, value in program.module().named_parameters()}
    after.module()(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()
    assert any(not torch.equal(before[name], value) for name, value in program.module().named_parameters())
    both = [set(map(id, owner.module().parameters())) for owner in (program, after)]
    assert both[0] == both[1]


class Versioned(nn.Linear):
    """A module with extra state and a version, which takes down what it is given."""

    _version = 3
    extra: object = None
    seen: object = None

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.versions: list[object] = []

    def get_extra_state(self) -> Tensor:
        return torch.ones(1)

    def set_extra_state(self, state: object) -> None:
        self.extra = state

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.seen = metadata.get("version")
        self.versions.append(self.seen)
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Leaves(Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return True


def versioned() -> tuple[nn.Module, GraphModule]:
    original = nn.Sequential(Versioned(2, 2))
    module = GraphModule(original, Leaves().trace(original))
    return original, cut(Program.of(module), {"_0": "part"}, state_names="original").module()


@pytest.mark.parametrize("nested", [False, True])
def test_extra_state_and_versions_follow_the_names(nested: bool) -> None:
    original, module = versioned()
    if nested:
        original, module = nn.Sequential(original), nn.Sequential(module)  # type: ignore[assignment]
    saved = module.state_dict()
    assert set(saved) == set(original.state_dict())
    assert saved._metadata.get("0.0" if nested else "0") == {"version": 3}  # type: ignore[attr-defined]
    assert str(module.load_state_dict(original.state_dict())) == "<All keys matched successfully>"
    loaded = next(found for found in module.modules() if isinstance(found, Versioned))
    assert loaded.extra is not None
    # torch hands a child no versions before its hooks have run, so there the module sees none.
    assert loaded.seen == (None if nested else 3)


class Shared(nn.Module):
    """One module under two names, both of which a graph may call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.again = Versioned(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.again(self.first(x))
        return result


def shared() -> GraphModule:
    model = Shared()
    graph = Leaves().trace(model)
    graph.find_nodes(op="call_module")[1].target = "again"  # A tracer knows a module by one name only.
    return GraphModule(model, graph)


@pytest.mark.parametrize("naming", ["split", "original"])
def test_versions_follow_the_names_through_the_map(naming: StateNaming) -> None:
    original = nn.Sequential(Versioned(2, 2), Versioned(2, 2))
    traced = GraphModule(original, Leaves().trace(original))
    after = cut(Program.of(traced), {"_0": "a", "_1": "b"}, state_names=naming)
    checkpoint = copy.deepcopy(original.state_dict())
    after.load_original_state(checkpoint)
    back = after.original_state()
    assert sorted(back) == sorted(checkpoint)
    fresh = nn.Sequential(Versioned(2, 2), Versioned(2, 2))
    fresh.load_state_dict(back)
    # The modules of the program are those of the original.
    assert [each.versions for each in (*original, *fresh)] == [[3]] * 4
    assert type(after.state_keys.to_original(dict(checkpoint))) is dict


@pytest.mark.parametrize("labels", [{"first": "a", "first_1": "a"}, {"first": "a", "first_1": "b"}, {"first_1": "b"}])
def test_a_module_under_two_names_finds_its_version_under_both(labels: dict[str, str]) -> None:
    module = cut(Program.of(shared()), labels, state_names="original").module()
    held = next(found for found in module.modules() if isinstance(found, Versioned))
    held.versions.clear()
    assert str(module.load_state_dict(Shared().state_dict())) == "<All keys matched successfully>"
    assert held.versions == [3, 3]


class InSequence:
    """A treatment that puts the body a level deeper."""

    def treat(self, body: GraphModule) -> nn.Module:
        return nn.Sequential(body)


def test_a_module_under_two_names_keeps_both_inside_what_a_treatment_gives() -> None:
    program = Program.of(shared())
    region = ByLabel(lambda node: "a" if node.op == "call_module" else None)
    after = plan(program, region, InSequence()).apply(state_names="original")
    assert {after.state_keys.original(f"a.0.{name}.weight") for name in ("first", "again")} == {
        "first.weight",
        "again.weight",
    }
    assert set(after.module().state_dict()) == set(Shared().state_dict())


def test_a_moved_name_may_be_an_old_name() -> None:
    keys = StateKeys().then({"part.b": "a", "part.a": "b"}).then({"a": "part"})
    found = [keys.original(key) for key in ("a.b.weight", "a.a.bias", "c.weight", "a")]
    assert found == ["a.weight", "b.bias", "c.weight", "part"]


def test_an_unknown_naming_is_refused() -> None:
    with pytest.raises(OptionError, match='state_names is "split" or "original", not \'torch\''):
        cut(program_of(Model()), LABELS, state_names="torch")  # type: ignore[arg-type]
