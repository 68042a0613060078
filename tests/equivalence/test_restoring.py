"""A comparison leaves state, inputs, gradients, random state and modes as it found them, and copies little."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import checkpoint

from partita import Program
from partita.equivalence import compare, verify


class Careless(nn.Module):
    """Writes everything that it can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(3))
        self.plain = torch.zeros(3)
        self.caches = [torch.zeros(3)]
        self.calls = 0

    def forward(self, x: Tensor, items: list[Any]) -> Tensor:
        self.calls += 1
        self.plain += 1
        self.caches[0].add_(1)
        self.caches.append(x)
        self.count = self.count + self.weight.detach()
        self.last = x
        items.append(self.calls)
        x.mul_(2)
        torch.rand(1)
        random.random()
        torch.set_grad_enabled(False)
        torch.autocast("cpu").__enter__()
        return self.weight * x


def modes() -> tuple[object, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()


def test_everything_is_as_it_was() -> None:
    model, x, items = Careless(), torch.ones(3), [1]
    model.weight.grad = gradient = torch.full((3,), 7.0)
    count, plain, cache = model.count, model.plain, model.caches[0]
    seed, python_seed, ambient = torch.get_rng_state(), random.getstate(), modes()
    assert verify(model, model, (x, items)).equal
    assert model.weight.grad is gradient
    assert gradient.tolist() == [7.0] * 3
    assert model.count is count
    assert model.plain is plain
    assert model.caches == [cache]
    assert not hasattr(model, "last")
    assert model.calls == 0
    assert all(tensor.tolist() == [0.0] * 3 for tensor in (count, plain, cache))
    assert x.tolist() == [1.0] * 3
    assert items == [1]
    assert torch.equal(seed, torch.get_rng_state())
    assert python_seed == random.getstate()
    assert modes() == ambient


def test_everything_is_as_it_was_after_an_exception() -> None:
    class Refusing(Careless):
        def forward(self, x: Tensor, items: list[Any]) -> Tensor:
            super().forward(x, items)
            raise ValueError("no")

    model, x, ambient = Refusing(), torch.ones(3), modes()
    assert compare(model, model, (x, [])).equal
    assert modes() == ambient
    assert model.plain.tolist() == [0.0] * 3
    assert x.tolist() == [1.0] * 3


def test_a_buffer_that_joins_a_graph_leaves_it_again() -> None:
    class Joining(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("cache", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.cache.add_(self.weight * x)
            return self.cache.sum()

    model = Joining()
    assert verify(model, model, (torch.ones(3),)).notes == ()
    assert not model.cache.requires_grad
    assert model.cache.tolist() == [0.0] * 3


def test_leaves_in_a_closure_keep_their_gradient_field() -> None:
    weight = torch.ones(3, requires_grad=True)
    comparison = compare(lambda x: x * weight, lambda x: x * weight.detach(), (torch.ones(3),))
    assert weight.grad is None
    assert {difference.kind for difference in comparison.differences} == {"requires_grad", "gradient"}


def test_the_same_tensor_passed_twice_stays_one() -> None:
    def together(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    def apart(x: Tensor, y: Tensor) -> Tensor:
        seen = y * 2
        x.add_(1)
        return seen

    x = torch.ones(3)
    assert verify(together, together, (x, x)).equal
    assert {difference.kind for difference in compare(together, apart, (x, x)).differences} == {"value"}
    assert compare(together, apart, (x, x.clone())).equal
    assert not compare(together, apart, (x[:2], x[1:])).equal
    assert x.tolist() == [1.0] * 3


def test_an_input_inside_a_graph_can_be_mutated() -> None:
    leaf = torch.ones(3, requires_grad=True)
    x = leaf * 2

    def written(y: Tensor) -> Tensor:
        return y.mul_(3).sum()

    assert verify(written, written, (x,)).notes == ()
    assert x.tolist() == [2.0] * 3
    assert leaf.grad is None
    x.sum().backward()
    different = compare(written, lambda y: y.mul_(3).detach().sum(), (x.detach().requires_grad_() * 1,)).differences
    assert {"requires_grad"} <= {difference.kind for difference in different}


def test_strides_of_inputs_are_kept() -> None:
    def strides(x: Tensor) -> tuple[int, ...]:
        assert x.stride() == (1, 4)
        return x.stride()

    assert verify(strides, strides, (torch.ones(3, 4).t(),)).notes == ()


def test_expanded_inputs_are_accepted() -> None:
    function = torch.sum
    assert verify(function, function, (torch.ones(1, 3).expand(4, 3),)).notes == ()


def test_a_parameter_passed_as_input_stays_that_parameter() -> None:
    model = nn.Linear(3, 3)

    def shares(x: Tensor) -> bool:
        return x.data_ptr() == model.weight.data_ptr()

    model.forward = shares
    assert model(model.weight)
    assert verify(model, model, (model.weight,)).equal


def test_generators_passed_as_inputs_do_not_advance() -> None:
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()

    def once(source: torch.Generator) -> Tensor:
        return torch.rand(2, generator=source)

    def twice(source: torch.Generator) -> Tensor:
        drawn = torch.rand(2, generator=source)
        torch.rand(2, generator=source)
        return drawn

    assert verify(once, once, (generator,)).equal
    assert not compare(once, twice, (generator,)).equal
    assert torch.equal(state, generator.get_state())


def test_the_ambient_autocast_reaches_both_programs() -> None:
    model = nn.Linear(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        comparison = verify(model, model, (torch.ones(2, 3),))
        assert torch.is_autocast_enabled("cpu")
    assert comparison.notes == ()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_comparison_can_be_made_under_any_grad_mode(mode: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with mode():
        found = modes()
        assert verify(model, model, (torch.randn(4, 3),)).equal
        assert modes() == found
    assert model[1].num_batches_tracked == 0


def test_reentrant_checkpoints_get_their_gradients() -> None:
    model = nn.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    assert verify(model, lambda y: checkpoint(model, y, use_reentrant=True), (x,)).notes == ()


def test_a_mask_regenerated_in_backward_is_found() -> None:
    def whole(x: Tensor) -> Tensor:
        return torch.dropout(x, 0.5, train=True)

    def again(x: Tensor) -> Any:
        return checkpoint(whole, x, use_reentrant=False, preserve_rng_state=False)

    x = torch.ones(64, requires_grad=True)
    kinds = {difference.kind for difference in compare(whole, again, (x,), second_call=False).differences}
    assert kinds == {"random state", "gradient"}


def test_hooks_are_called() -> None:
    model = nn.Linear(3, 3)
    hooked = nn.Sequential(model)
    hooked.register_forward_hook(lambda module, args, output: output + 1)
    assert not compare(nn.Sequential(model), hooked, (torch.ones(2, 3),)).equal


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn),
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.arange(4).to(torch.uint16).reshape(2, 2),
        torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        torch.empty(0, 3),
        torch.ones(5).unfold(0, 3, 1),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["sparse", "csr", "float8", "conjugate", "uint16", "quantized", "empty", "overlapping", "jagged", "nested"],
)
def test_unusual_tensors_can_be_compared(value: Tensor) -> None:
    def given_back(x: Tensor) -> Tensor:
        return x

    assert verify(given_back, given_back, (value,)).notes == ()
    assert not compare(given_back, lambda x: 1, (value,)).equal


class WritesView(nn.Module):
    """Writes a value with gradients into a buffer that is a view, as buffers from a file are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("total", torch.zeros(4)[:3])

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(self.weight * x)
        return self.total * self.weight


def test_a_view_that_was_mutated_with_gradients_is_cut_off_and_stays_itself() -> None:
    model = WritesView()
    total, base = model.total, model.total._base
    found = verify(model, model, (torch.ones(3),))
    assert (found.calls, found.raised) == (3, 0)
    assert model.total is total
    assert total._base is base
    assert base is not None
    assert base.grad_fn is None
    assert total.grad_fn is None
    assert total.tolist() == [0.0] * 3
    model(torch.ones(3)).sum().backward()
    assert total.tolist() == [1.0] * 3


def test_a_view_compares_with_a_buffer_of_its_own() -> None:
    one, other = WritesView(), WritesView()
    other.total = torch.zeros(3)
    assert verify(one, other, (torch.ones(3),)).equal


class Moves(nn.Module):
    """Puts other memory, with equal values, into its parameter, its buffer or its input, if it is told to."""

    def __init__(self, what: str = "") -> None:
        super().__init__()
        self.what, self.weight = what, nn.Parameter(torch.ones(3))
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        result = self.weight * x + self.total
        moved = {"parameter 'weight'": self.weight, "buffer 'total'": self.total, "input[0]": x}.get(self.what)
        if moved is not None:
            moved.data = moved.data.clone()
        return result


@pytest.mark.parametrize("what", ["parameter 'weight'", "buffer 'total'", "input[0]"])
@pytest.mark.parametrize("original", [True, False])
def test_data_that_is_replaced_is_seen_and_put_back(what: str, original: bool) -> None:
    before, after = Moves(what if original else ""), Moves("" if original else what)
    after.weight = before.weight
    x = torch.ones(3)
    memory = [tensor.data_ptr() for tensor in (before.weight, before.total, after.total, x)]
    found = compare(before, after, (x,)).differences
    assert [(one.kind, one.where) for one in found] == [("identity", what)]
    assert memory == [tensor.data_ptr() for tensor in (before.weight, before.total, after.total, x)]
    assert compare(Moves(what), Moves(what), (x,)).equal


def test_data_that_is_replaced_by_what_was_declared_pure_is_put_back_too() -> None:
    def moving(value: Tensor) -> Tensor:
        value.data = value.data * 2
        return value

    def given(function: Any) -> Program:
        graph = Graph()
        x = graph.placeholder("x")
        graph.output(graph.call_function(torch.mul, (graph.call_function(function, (x,)), 1)))
        return Program.of(GraphModule(nn.Module(), graph), pure=[function])

    x = torch.ones(3)
    memory = x.data_ptr()
    found = compare(given(torch.clone), given(moving), (x,)).differences
    assert ("undeclared mutation", "input[0]") in {(one.kind, one.where) for one in found}
    assert (x.data_ptr(), x.tolist()) == (memory, [1.0] * 3)


class _Switching(nn.Module):
    """Leaves its layer in evaluation if it is told to."""

    def __init__(self, *, switches: bool) -> None:
        super().__init__()
        self.layer, self.switches = nn.Dropout(0.0), switches

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        self.layer.train(not self.switches)
        return result


@pytest.mark.parametrize("original", [True, False])
def test_training_flags_that_are_left_changed_are_seen_and_put_back(original: bool) -> None:
    before, after = _Switching(switches=original), _Switching(switches=not original)
    found = compare(before, after, (torch.randn(3),)).differences
    assert [(difference.kind, difference.where) for difference in found] == [("setting", "Dropout after the call")]
    assert before.layer.training
    assert after.layer.training
    same = _Switching(switches=True)
    compiled = torch.compile(copy.deepcopy(same), backend="eager")
    assert compare(same, compiled, (torch.randn(3),)).equal


def test_random_numbers_of_numpy_are_seen_and_put_back() -> None:
    numpy = pytest.importorskip("numpy")

    def draws(x: Tensor) -> Tensor:
        numpy.random.rand()
        return x * 2

    before = str(numpy.random.get_state())
    found = compare(lambda x: x * 2, draws, (torch.randn(3),)).differences
    assert "NumPy's random after the call" in {difference.where for difference in found}
    assert str(numpy.random.get_state()) == before


class Drawing(nn.Module):
    """Draws a factor from a generator of its own, and perhaps a number for nothing."""

    def __init__(self, generator: Any, spare: int = 0) -> None:
        super().__init__()
        self.generator, self.spare = generator, spare

    def forward(self, x: Tensor) -> Tensor:
        factor = float(self.generator.random())
        for _ in range(self.spare):
            self.generator.random()
        return x * factor


@pytest.mark.parametrize("kind", ["Random", "default_rng", "RandomState"])
def test_generators_that_a_module_holds_start_anew_for_each_program(kind: str) -> None:
    numpy = pytest.importorskip("numpy")
    generator = random.Random(3) if kind == "Random" else getattr(numpy.random, kind)(3)
    untouched = random.Random(3) if kind == "Random" else getattr(numpy.random, kind)(3)
    model = Drawing(generator)
    verify(model, model, (torch.randn(3),))
    assert not compare(model, Drawing(generator, spare=1), (torch.randn(3),)).equal
    assert generator.random() == untouched.random()


def test_settings_that_a_backward_leaves_changed_are_seen_and_put_back() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            torch.set_default_dtype(torch.float64)
            random.random()
            return gradient * 2

    state = random.getstate()
    found = compare(lambda x: x * 2, Doubled.apply, (torch.randn(3, requires_grad=True),)).differences
    assert {"default dtype after backward", "Python's random after backward"} <= {one.where for one in found}
    assert torch.get_default_dtype() is torch.float32
    assert random.getstate() == state


@pytest.mark.parametrize("bit", ["conjugate", "negative"])
def test_values_that_differ_in_one_bit_are_distinguished(bit: str) -> None:
    def lazily(x: Tensor) -> Tensor:
        conjugated = torch.complex(x, x).conj()
        return conjugated if bit == "conjugate" else conjugated.imag

    def at_once(x: Tensor) -> Tensor:
        return lazily(x).resolve_conj().resolve_neg()

    found = compare(lazily, at_once, (torch.randn(3),)).differences
    assert bit in {difference.kind for difference in found}
