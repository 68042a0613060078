"""A captured module refuses another training flag than its own; `TrainEval` has both variants, with shared state."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import partita
from partita import TrainEval
from partita.errors import CaptureError, OptionError
from partita.policies import BySize
from partita.treatments import Call, Lower, Mode, Recompute

TREATMENTS = [Call(), Mode(), Lower("eager"), Lower("aot_eager"), Recompute()]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 4))


def _variant(model: nn.Module, treatment: Any, *, training: bool) -> nn.Module:
    program = partita.capture(model.train(training), (torch.randn(3, 4),))
    return partita.plan(program, BySize(parts=2), treatment).apply().module()


def _both(model: nn.Module, treatment: Any = None) -> TrainEval:
    treatment = treatment or Call()
    return TrainEval(_variant(model, treatment, training=True), _variant(model, treatment, training=False))


@pytest.mark.parametrize("treatment", TREATMENTS, ids=repr)
@pytest.mark.parametrize("training", [False, True])
def test_another_flag_is_refused_in_words_and_the_same_is_accepted(treatment: Any, training: bool) -> None:
    module = _variant(_model(), treatment, training=training)
    assert module.training is training
    with pytest.raises(CaptureError, match=r"captured in (training|evaluation) mode.*partita\.TrainEval"):
        module.train(not training)
    assert module.training is training
    assert module.train(training) is module
    nn.Sequential(module).train(training)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_copies_know_their_flag(copied: Any) -> None:
    module = copied(_variant(_model(), Call(), training=True))
    with pytest.raises(CaptureError, match="captured in training mode"):
        module.eval()


def test_a_model_with_different_flags_can_be_set_to_neither() -> None:
    model = _model()
    model[1].eval()
    module = partita.capture(model, (torch.randn(3, 4),)).module()
    for mode in (True, False):
        with pytest.raises(CaptureError, match="some modules in training mode and others not"):
            module.train(mode)


def test_a_function_has_no_flag() -> None:
    module = partita.capture(lambda x: x.sin(), (torch.randn(3),)).module()
    assert torch.equal(module.eval()(torch.ones(3)), torch.ones(3).sin())
    module.train()


def test_the_flags_of_an_export_by_torch_are_not_known() -> None:
    exported = torch.export.export(_model(), (torch.randn(3, 4),))
    with pytest.raises(CaptureError, match="flags that are not known"):
        partita.Program.of(exported).module().eval()


def test_a_graph_module_with_leaf_modules_switches_them() -> None:
    program = partita.Program.of(torch.fx.symbolic_trace(_model()))
    module = partita.plan(program, BySize(parts=2), Call()).apply().module()
    x = torch.randn(3, 4)
    assert torch.equal(module.eval()(x), module(x))


# Both variants ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("treatment", TREATMENTS, ids=repr)
def test_training_and_evaluation_are_those_of_the_model(treatment: Any) -> None:
    model, reference = _model(), _model()
    module = _both(model, treatment)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (module, reference)]
    x = torch.randn(3, 4)
    for _ in range(2):
        losses = []
        for one, optimizer in zip((module, reference), optimizers, strict=True):
            one.train()
            torch.manual_seed(1)
            optimizer.zero_grad()
            loss = one(x).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        assert torch.equal(module.eval()(x), reference.eval()(x))
    for name, tensor in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def _moved(module: TrainEval) -> TrainEval:
    return module.double().float()


def _copied(module: TrainEval) -> TrainEval:
    return copy.deepcopy(module)


def _pickled(module: TrainEval) -> TrainEval:
    found: TrainEval = pickle.loads(pickle.dumps(module))
    return found


def _saved(module: TrainEval) -> TrainEval:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    found: TrainEval = torch.load(file, weights_only=False)
    return found


def _assigned(module: TrainEval) -> TrainEval:
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.load_state_dict(state, assign=True)
    return module


@pytest.mark.parametrize("changed", [_moved, _copied, _pickled, _saved, _assigned])
def test_the_variants_share_their_state_whatever_happens(changed: Any) -> None:
    module = changed(_both(_model()))
    x = torch.randn(3, 4) * 3 + 1
    before = module.eval()(x)
    module.train()(x)  # Updates the statistics of the batch norm, which evaluation reads.
    assert not torch.equal(module.eval()(x), before)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert not module.eval()(x).any()
    assert not module.train()(x).any()


def test_the_state_dict_has_the_names_of_the_training_variant() -> None:
    module, other = _both(_model()), _both(_model())
    assert list(module.state_dict()) == list(module.training_variant.state_dict())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(0.5)
    holder, other_holder = nn.ModuleDict({"inner": module}), nn.ModuleDict({"inner": other})
    assert list(holder.state_dict()) == [f"inner.{name}" for name in module.state_dict()]
    holder.load_state_dict(other_holder.state_dict())
    for mode in (True, False):
        assert all((parameter == 0.5).all() for parameter in holder.train(mode).parameters())
    missing = dict(list(module.state_dict().items())[1:])
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict(missing)


class _Scaled(nn.Module):
    """Buffers of all kinds, and tied weights; the variants have different names after a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)) * self.scale
        found: torch.Tensor = self.second(x.sin() if self.training else x.cos().exp())
        return found


def _scaled(treatment: Any) -> tuple[nn.Module, TrainEval]:
    model, variants = _Scaled(), []
    for training, parts in ((True, 2), (False, 3)):
        program = partita.capture(model.train(training), (torch.randn(3, 4),))
        cut = partita.plan(program, BySize(parts=parts), treatment).apply(state_names="split")
        variants.append(cut.module())
    return model, TrainEval(*variants)


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in another module"])
def test_what_is_missing_or_does_not_fit_is_named_once(*, inside: bool) -> None:
    _, module = _scaled(Call())
    names = list(module.state_dict())
    holder = nn.ModuleDict({"left": module, "evaluation_variant": _scaled(Call())[1]}) if inside else module
    state, prefix = holder.state_dict(), "left." if inside else ""
    missing, odd = prefix + names[0], prefix + names[1]
    del state[missing]
    found = holder.load_state_dict({**state, f"{prefix}more": torch.ones(1)}, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == ([missing], [f"{prefix}more"])
    with pytest.raises(RuntimeError) as caught:
        holder.load_state_dict({**state, odd: torch.ones(9, 9, 9)})
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 2
    assert f'"{missing}"' in lines[0]
    assert f"size mismatch for {odd}:" in lines[1]
    empty = holder.load_state_dict({}, strict=False)
    assert empty.missing_keys == list(holder.state_dict())


class _Versioned(nn.Linear):
    """Takes down which version the state has that it is given."""

    _version = 3

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.versions: list[object] = []

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.versions.append(metadata.get("version"))
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class _Leaves(torch.fx.Tracer):
    def is_leaf_module(self, module: nn.Module, _: str) -> bool:
        return isinstance(module, _Versioned)


def test_the_versions_of_modules_are_known_by_the_names_of_the_training_variant() -> None:
    model = nn.Sequential(_Versioned(), _Versioned())
    program = partita.Program.of(torch.fx.GraphModule(model, _Leaves().trace(model)), pure=[_Versioned])
    training, evaluation = (partita.plan(program, BySize(parts=2), Call()).apply().module() for _ in range(2))
    module = TrainEval(training, evaluation)
    training.load_state_dict(copy.deepcopy(module.state_dict()))
    module.load_state_dict(copy.deepcopy(training.state_dict()))
    module.load_state_dict(copy.deepcopy(module.state_dict()))
    inside = nn.Sequential(module)
    inside.load_state_dict(copy.deepcopy(inside.state_dict()))
    # Both variants hold the modules of the model, so each of the last three loads is seen twice.
    assert [each.versions for each in model] == [[3] * 7] * 2


def test_a_buffer_that_is_not_saved_is_unexpected_by_its_own_name() -> None:
    _, module = _scaled(Call())
    found = module.load_state_dict({**module.state_dict(), "scale": torch.ones(4)}, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == ([], ["scale"])


@pytest.mark.parametrize("treatment", TREATMENTS, ids=repr)
@pytest.mark.parametrize("convert", [nn.Module.double, lambda module: module.to(torch.float64)], ids=["double", "to"])
def test_converted_variants_share_with_the_model(convert: Any, treatment: Any) -> None:
    torch.manual_seed(0)
    model, module = _scaled(treatment)
    x = torch.randn(3, 4)
    module.train()(x), module.eval()(x)  # What is compiled for one dtype must not run for another.
    convert(module)
    state = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for variant in (module.training_variant, module.evaluation_variant):
        assert {id(tensor) for tensor in (*variant.parameters(), *variant.buffers())} == state
    assert {tensor.dtype for tensor in model.buffers()} == {torch.float64, torch.int64}
    x = x.double()
    for training in (True, False, True):
        module.train(training)
        expected = copy.deepcopy(model).train(training)(x)
        torch.testing.assert_close(module(x), expected)
    assert model.norm.num_batches_tracked == 3


def test_what_cannot_take_the_place_of_a_buffer_replaces_it_in_both_variants() -> None:
    _, module = _scaled(Call())
    module.to("meta")
    training, evaluation = module.training_variant, module.evaluation_variant
    assert {id(buffer) for buffer in training.buffers()} == {id(buffer) for buffer in evaluation.buffers()}
    assert all(buffer.is_meta for buffer in training.buffers())


def test_a_functional_call_replaces_the_state_of_the_variant_that_runs() -> None:
    module, x = _variant(_model(), Recompute(), training=False), torch.randn(3, 4)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in module.named_parameters()}
    assert not functional_call(module, zeros, (x,)).any()


def _called_with(module: nn.Module, state: dict[str, Any], x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    """The result of a call with copies of this state, and the gradients of the copies."""
    torch.manual_seed(0)
    own = {name: value.detach().clone().requires_grad_(value.requires_grad) for name, value in state.items()}
    result = functional_call(module, own, (x,))
    (result * torch.arange(4)).sum().backward()
    return result, [value.grad for value in own.values() if value.requires_grad]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "model", [_model(), nn.Linear(4, 4), nn.BatchNorm1d(4)], ids=lambda model: type(model).__name__
)
def test_a_functional_call_replaces_the_state_of_both_variants(model: nn.Module, training: bool) -> None:
    module, x = _both(model).train(training), torch.randn(3, 4)
    others = {
        name: torch.rand_like(tensor).requires_grad_(isinstance(tensor, nn.Parameter))
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if tensor.is_floating_point()
    }
    names = dict(zip(module.state_dict(), model.state_dict(), strict=True))
    before = copy.deepcopy(module.state_dict())
    result, gradients = _called_with(module, others, x)
    expected, expected_gradients = _called_with(
        model.train(training), {names[name]: value for name, value in others.items()}, x
    )
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(gradients, expected_gradients)
    # What a batch norm mutates in training are the tensors that it was given, and its own count.
    after = {name: value for name, value in module.state_dict().items() if value.is_floating_point()}
    torch.testing.assert_close(after, {name: before[name] for name in after})


@pytest.mark.parametrize("replace", ["parametrized", "set"])
def test_a_weight_that_is_replaced_is_replaced_in_both_variants(replace: str) -> None:
    class Zero(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 0

    module, x = _both(nn.Sequential(nn.Linear(4, 4, bias=False))), torch.randn(3, 4)
    ((name, weight),) = module.named_parameters()
    owner, key = module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    if replace == "parametrized":
        nn.utils.parametrize.register_parametrization(owner, key, Zero())
    else:
        setattr(owner, key, nn.Parameter(torch.zeros_like(weight)))
    assert not module.train()(x).any()
    assert not module.eval()(x).any()
    assert not copy.deepcopy(module)(x).any()


def test_programs_are_taken_as_well_as_modules() -> None:
    model, x = _model(), (torch.randn(3, 4),)
    module = TrainEval(partita.capture(model.train(), x), partita.capture(model.eval(), x))
    assert torch.equal(module.eval()(*x), model.eval()(*x))


def test_variants_of_two_models_are_refused() -> None:
    one, other = _variant(_model(), Call(), training=True), _variant(_model(), Call(), training=False)
    with pytest.raises(OptionError, match="capture both from one model"):
        TrainEval(one, other)
    with pytest.raises(OptionError, match="a program or a module, not int"):
        TrainEval(one, 3)  # type: ignore[arg-type]


def test_variants_in_the_wrong_order_are_refused() -> None:
    model = _model()
    training, evaluation = (_variant(model, Call(), training=mode) for mode in (True, False))
    with pytest.raises(CaptureError, match="captured in evaluation mode"):
        TrainEval(evaluation, training)


def test_distributed_checkpoints_name_the_state_as_the_state_dict_does() -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(3, 4)
    both = TrainEval(partita.capture(model.train(), (x,)), partita.capture(model.eval(), (x,)))
    assert [name for name, _ in both.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert dict(both.named_buffers()).keys() == dict(model.named_buffers()).keys()
    state = get_model_state_dict(both)
    assert state.keys() == model.state_dict().keys()
    set_model_state_dict(both, {name: value * 0 for name, value in state.items()})
    assert not model[0].weight.any()
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = both.missing
