"""Random functions with nested mode blocks: run with torch's own context managers, and as a graph with toggles."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.nn import functional

from partita import Program
from partita._torch import toggles

aten = torch.ops.aten
SIZE = 4


@dataclass(frozen=True)
class Mode:
    """A block: how Python enters it, and the toggles for it."""

    kind: str
    arguments: tuple[Any, ...] = ()

    def entered(self) -> AbstractContextManager[Any]:
        if self.kind == "grad":
            return torch.set_grad_enabled(*self.arguments)
        if self.kind == "inference":
            return torch.inference_mode(*self.arguments)
        device, dtype, enabled, cache = self.arguments
        return torch.autocast(device, dtype, enabled=enabled, cache_enabled=cache)


@dataclass(frozen=True)
class Call:
    """One operator: numbers stand for earlier values, in graph order."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Value:
    """What the value with this number is at run time."""

    number: int


@dataclass(frozen=True)
class Block:
    mode: Mode
    steps: tuple[Any, ...]


Step = Call | Block


class Model(nn.Module):
    """Two inputs, three weights and a buffer, and a recipe for what to do with them."""

    def __init__(self, steps: tuple[Step, ...], outputs: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))
        self.scale = nn.Parameter(torch.randn(SIZE))
        self.kernel = nn.Parameter(torch.randn(1, 1, 3, 3))
        self.low = nn.Parameter(torch.randn(SIZE, SIZE, dtype=torch.bfloat16))
        self.register_buffer("memory", torch.randn(SIZE, SIZE))
        self.steps, self.outputs = steps, outputs
        self.has_empty_promise = False

    def forward(self, x: Tensor, y: Tensor) -> tuple[Any, ...]:
        values: list[Any] = [x, y, self.weight, self.scale, self.kernel, self.low, self.memory]
        self._run(self.steps, values)
        return tuple(value for value in values[-self.outputs :] if isinstance(value, Tensor))

    def _run(self, steps: tuple[Step, ...], values: list[Any]) -> None:
        for step in steps:
            if isinstance(step, Block):
                with step.mode.entered():
                    self._run(step.steps, values)
            else:
                values.append(step.target(*_filled(step.args, values), **_filled(step.kwargs, values)))


def _promises_too_much(value: Any) -> bool:
    """Whether a tensor is a view made under no_grad: it says that it requires gradients, although none ever arrive."""
    try:
        return isinstance(value, Tensor) and value._is_view() and value.requires_grad and value.grad_fn is None
    except RuntimeError:  # It is a view of something that was written since, which torch forbids to ask about.
        return True


def _filled(argument: Any, values: list[Any]) -> Any:
    if isinstance(argument, Value):
        return values[argument.number]
    if isinstance(argument, tuple | list):
        return type(argument)(_filled(item, values) for item in argument)
    if isinstance(argument, dict):
        return {key: _filled(item, values) for key, item in argument.items()}
    return argument


def graph_of(model: Model, example: tuple[Tensor, Tensor]) -> GraphModule:
    """The recipe of a model as a graph with toggles and traced values, over the model's own state."""
    graph = Graph()
    values: list[Any] = [graph.placeholder("x"), graph.placeholder("y")]
    values += [graph.get_attr(name) for name in ("weight", "scale", "kernel", "low", "memory")]
    _write(graph, model.steps, values)
    kept = values[-model.outputs :]
    module = GraphModule(model, graph)
    graph.output(tuple(kept))
    module.recompile()
    seen = Tracing(module, example).seen()
    graph.erase_node(graph.output_node())
    graph.output(tuple(node for node in kept if isinstance(seen[node], Tensor)))
    module.recompile()
    return module


def _write(graph: Graph, steps: tuple[Step, ...], values: list[Any]) -> None:
    for step in steps:
        if isinstance(step, Call):
            values.append(graph.call_function(step.target, _filled(step.args, values), _filled(step.kwargs, values)))
        elif step.mode.kind == "grad":
            before = graph.call_function(toggles.IS_GRAD_ENABLED)
            graph.call_function(toggles.SET_GRAD, step.mode.arguments)
            _write(graph, step.steps, values)
            graph.call_function(toggles.SET_GRAD, (before,))
        else:
            is_autocast = step.mode.kind == "autocast"
            enter = toggles.ENTER_AUTOCAST if is_autocast else toggles.ENTER_INFERENCE
            handle = graph.call_function(enter, step.mode.arguments)
            _write(graph, step.steps, values)
            graph.call_function(toggles.EXIT_AUTOCAST if is_autocast else toggles.EXIT_INFERENCE, (handle,))


class Tracing(Interpreter):
    """Runs a graph on fake tensors and notes the values; inference mode as no_grad, which fakes get along with."""

    def __init__(self, module: GraphModule, example: tuple[Tensor, ...]) -> None:
        super().__init__(module)
        self.example, self.mode = example, FakeTensorMode(allow_non_fake_inputs=True)
        self.fakes: dict[Any, Any] = {}
        self.noted: dict[Node, Any] = {}
        self.grad, self.inference = True, False
        self.outside: list[tuple[bool, bool]] = []

    def seen(self) -> dict[Node, Any]:
        with self.mode:
            self.run(*[self._fake(tensor) for tensor in self.example])
        return self.noted

    def run_node(self, n: Node) -> Any:
        if n.target is toggles.ENTER_INFERENCE:
            self.outside.append((self.grad, self.inference))
            self.grad, self.inference = not n.args[0], bool(n.args[0])
        elif n.target is toggles.EXIT_INFERENCE:
            self.grad, self.inference = self.outside.pop()
        elif n.target is toggles.SET_GRAD:
            self.grad = bool(self.fetch_args_kwargs_from_env(n)[0][0])
        elif n.target is toggles.IS_GRAD_ENABLED:
            return self.grad
        torch.set_grad_enabled(self.grad and not self.inference)
        if n.target in (toggles.ENTER_INFERENCE, toggles.EXIT_INFERENCE, toggles.SET_GRAD):
            return None
        keeps = torch.is_autocast_cache_enabled()
        if n.target not in toggles.TOGGLES:
            torch.set_autocast_cache_enabled(keeps and not self.inference)
        result = self._fake(super().run_node(n)) if n.op == "get_attr" else super().run_node(n)
        if n.target not in toggles.TOGGLES:
            torch.set_autocast_cache_enabled(keeps)
        if n.op not in ("output",) and n.target not in toggles.TOGGLES:
            self.noted[n] = result
            if n.target is not toggles.IS_GRAD_ENABLED:
                n.meta["val"] = result if n.op == "placeholder" else _detached(result)
        return result

    def _fake(self, tensor: Any) -> Any:
        if id(tensor) not in self.fakes:
            self.fakes[id(tensor)] = self.mode.from_tensor(tensor)
        return self.fakes[id(tensor)]


def _detached(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(_detached, value)) if type(value) in (tuple, list) else tuple(map(_detached, value))
    return value.detach() if isinstance(value, Tensor) else value


class Drawing:
    """A random recipe; each step is tried at once on real tensors, and replaced where eager torch raises."""

    def __init__(self, seed: int) -> None:
        self.random, self.seed = Random(seed), seed
        self.y_requires_grad = self.random.random() < 0.5
        self.model = Model((), 0, seed)
        self.values: list[Any] = [*self.example(), *self._state(self.model)]
        self.count = 0
        self.has_empty_promise = False

    def example(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(self.seed + 1)
        x, y = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
        return x.requires_grad_(), y.requires_grad_(self.y_requires_grad)

    def drawn(self, size: int = 14) -> Model:
        steps = self._block(size, depth=0)
        model = Model(steps, min(8, self.count), self.seed)
        model.has_empty_promise = self.has_empty_promise
        return model

    @staticmethod
    def _state(model: Model) -> list[Any]:
        return [model.weight, model.scale, model.kernel, model.low, model.memory]

    def _block(self, size: int, depth: int) -> tuple[Step, ...]:
        steps: list[Step] = []
        for _ in range(self.random.randint(1, size)):
            if depth < 4 and self.random.random() < 0.3:
                mode = self._mode()
                before = len(self.values)
                with mode.entered():
                    inner = self._block(size // 2 + 1, depth + 1)
                assert len(self.values) >= before
                steps.append(Block(mode, inner))
            else:
                steps += self._calls()
        return tuple(steps)

    def _mode(self) -> Mode:
        pick = self.random.random()
        if pick < 0.25:
            return Mode("grad", (False,))
        if pick < 0.35:
            return Mode("grad", (True,))
        if pick < 0.45:
            return Mode("inference", (self.random.random() < 0.8,))
        dtype = self.random.choice([torch.bfloat16, torch.bfloat16, torch.bfloat16, None, torch.float16])
        enabled, cache = self.random.random() < 0.85, self.random.choice([None, None, True, False])
        return Mode("autocast", ("cpu", dtype, enabled, cache))

    def _calls(self) -> list[Call]:
        while True:
            macro = self.random.choice(MACROS)
            before = len(self.values)
            calls: list[Call] = []
            try:
                for call in macro(self):
                    result = call.target(*_filled(call.args, self.values), **_filled(call.kwargs, self.values))
                    if isinstance(result, Tensor):
                        result.requires_grad, result.grad_fn  # noqa: B018  Forbidden views raise here.
                        if not torch.isfinite(result.float()).all() or _is_odd(result):
                            raise ValueError
                    # To ask is to change what autograd does next, so only the trial run is asked.
                    self.has_empty_promise |= _promises_too_much(result)
                    self.values.append(result)
                    calls.append(call)
            except (RuntimeError, ValueError, IndexError, NotImplementedError):
                del self.values[before:]
                continue
            self.count += len(calls)
            return calls

    def square(self) -> Value:
        found = [k for k, value in enumerate(self.values) if _is_square(value)]
        recent = found[-4:] if self.random.random() < 0.5 else found
        return Value(self.random.choice(recent))

    @property
    def last(self) -> Value:
        return Value(len(self.values) - 1)


def _is_odd(tensor: Tensor) -> bool:
    """Whether gradients were written into what inference mode has made, which autograd then forgets about."""
    return tensor.is_inference() and tensor.requires_grad


def _is_square(value: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == (SIZE, SIZE) and value.is_floating_point()


Macro = Callable[[Drawing], Iterator[Call]]
WEIGHT, SCALE, KERNEL, LOW, MEMORY = map(Value, range(2, 7))


def _plain(*targets: Any, arity: int, extra: tuple[Any, ...] = (), **kwargs: Any) -> list[Macro]:
    def macro(target: Any) -> Macro:
        def calls(drawing: Drawing) -> Iterator[Call]:
            yield Call(target, (*(drawing.square() for _ in range(arity)), *extra), kwargs)

        return calls

    return [macro(target) for target in targets]


def _conv(drawing: Drawing) -> Iterator[Call]:
    yield Call(aten.view.default, (drawing.square(), [1, 1, SIZE, SIZE]))
    yield Call(aten.conv2d.default, (drawing.last, KERNEL), {"padding": [1, 1]})
    yield Call(aten.view.default, (drawing.last, [SIZE, SIZE]))


def _attention(drawing: Drawing) -> Iterator[Call]:
    yield Call(aten.unsqueeze.default, (drawing.square(), 0))
    query = drawing.last
    yield Call(aten.unsqueeze.default, (drawing.square(), 0))
    yield Call(functional.scaled_dot_product_attention, (query, drawing.last, drawing.last))
    yield Call(aten.squeeze.dim, (drawing.last, 0))


def _reduction(drawing: Drawing) -> Iterator[Call]:
    target, kwargs = drawing.random.choice(
        [(torch.sum, {"dim": -1, "keepdim": True}), (torch.norm, {"dim": 0, "keepdim": True}), (torch.prod, {"dim": 0})]
    )
    square = drawing.square()
    yield Call(target, (square,), kwargs)
    yield Call(aten.mul.Tensor, (square, drawing.last))


def _cat(drawing: Drawing) -> Iterator[Call]:
    yield Call(torch.cat, ([drawing.square(), drawing.square()],))
    yield Call(aten.slice.Tensor, (drawing.last, 0, 2, 2 + SIZE))


def _item(drawing: Drawing) -> Iterator[Call]:
    yield Call(
        *drawing.random.choice([(aten.split.Tensor, (drawing.square(), 2)), (torch.unbind, (drawing.square(),))])
    )
    yield Call(operator.getitem, (drawing.last, 1))
    yield Call(aten.mul.Tensor, (drawing.square(), 0.5))
    yield Call(aten.mean.default, (Value(len(drawing.values) - 2),))
    yield Call(aten.add.Tensor, (Value(len(drawing.values) - 2), drawing.last))


def _norm_layer(drawing: Drawing) -> Iterator[Call]:
    yield Call(aten.native_layer_norm.default, (drawing.square(), [SIZE], SCALE, SCALE, 1e-5))
    yield Call(operator.getitem, (drawing.last, 0))


def _choice(drawing: Drawing) -> Iterator[Call]:
    yield Call(aten.argmax.default, (drawing.square(), 0))
    yield Call(aten.index.Tensor, (drawing.square(), [drawing.last]))


def _row(drawing: Drawing) -> Iterator[Call]:
    square = drawing.square()
    yield Call(aten.select.int, (square, 0, 1))
    yield Call(drawing.random.choice([aten.mul_.Scalar, aten.add_.Scalar]), (drawing.last, 2))
    yield Call(aten.mul.Tensor, (square, 1.5))


def _assigned(drawing: Drawing) -> Iterator[Call]:
    yield Call(operator.setitem, (drawing.square(), 0, 0.25))


def _write_weight(drawing: Drawing) -> Iterator[Call]:
    yield Call(aten.mul_.Tensor, (drawing.random.choice([WEIGHT, SCALE, LOW, MEMORY]), 0.5))


def _copied_rows(drawing: Drawing) -> Iterator[Call]:
    yield Call(aten.addcmul_.default, (drawing.square(), drawing.square(), drawing.square()))


MACROS: list[Macro] = [
    *_plain(functional.linear, torch.matmul, aten.mm.default, aten.matmul.default, arity=2),
    *_plain(aten.addmm.default, torch.addcmul, aten.baddbmm.default, arity=3),
    # Often, since autocast keeps the casts of weights.
    *(6 * _plain(aten.linear.default, arity=1, extra=(WEIGHT,))),
    *(4 * _plain(functional.linear, arity=1, extra=(WEIGHT, SCALE))),
    *_plain(torch.mm, arity=1, extra=(LOW,)),
    *_plain(functional.softmax, arity=1, dim=-1),
    *_plain(functional.layer_norm, arity=1, extra=((SIZE,), SCALE, SCALE)),
    *_plain(torch.add, aten.mul.Tensor, functional.mse_loss, functional.l1_loss, torch.cdist, arity=2),
    *_plain(functional.gelu, torch.tanh, torch.relu, aten.clone.default, aten.detach.default, arity=1),
    *_plain(aten.mul_.Tensor, aten.add_.Tensor, aten.copy_.default, operator.imul, torch.Tensor.add_, arity=2),
    *_plain(aten.tanh_.default, torch.relu_, aten.zero_.default, arity=1),
    *_plain(aten.t.default, torch.t, aten.contiguous.default, aten.alias.default, arity=1),
    *_plain(aten.view.default, aten.reshape.default, aten.expand.default, arity=1, extra=([SIZE, SIZE],)),
    *_plain(aten.to.dtype, torch.Tensor.to, arity=1, extra=(torch.float32,)),
    *_plain(aten.to.dtype, arity=1, extra=(torch.bfloat16,)),
    *_plain(aten.dropout.default, arity=1, extra=(0.5, False)),
    *_plain(functional.dropout, arity=1, extra=(0.5, True)),
    lambda drawing: iter([Call(torch.einsum, ("ij,kj->ik", drawing.square(), drawing.square()))]),
    lambda drawing: iter([Call(aten.zeros.default, ([SIZE, SIZE],))]),
    *[_conv, _attention, _reduction, _cat, _item, _norm_layer, _choice, _row, _assigned, _copied_rows],
    *(3 * [_write_weight]),
]


@dataclass(frozen=True)
class Outcome:
    """What a call of a model leaves behind."""

    outputs: tuple[Tensor, ...]
    state: tuple[Tensor, ...]
    leaves: tuple[Tensor, ...]
    has_empty_promise: bool = False

    def gradients(self, picked: list[int]) -> tuple[Tensor | None, ...] | str:
        """The gradients of the leaves for these outputs, or the word that backward fails."""
        try:
            loss = sum((self.outputs[k].float() * (k + 1)).sum() for k in picked)
            return torch.autograd.grad(loss, self.leaves, allow_unused=True, retain_graph=True)  # type: ignore[arg-type]
        except RuntimeError as error:
            return "modified" if "has been modified by an inplace operation" in str(error) else "forbidden"


def outcome(module: nn.Module, state: nn.Module, inputs: tuple[Tensor, Tensor]) -> Outcome:
    torch.manual_seed(7)
    held = tuple(dict(state.named_parameters()).values()) + tuple(dict(state.named_buffers()).values())
    leaves = tuple(tensor for tensor in (*inputs, *held) if tensor.requires_grad)
    outputs = module(*inputs)
    return Outcome(outputs, (*inputs, *held), leaves, getattr(module, "has_empty_promise", False))


def compare_case(seed: int) -> str:
    """Compares a random model with its dissolved graph; raises where they differ; returns the kind of case."""
    from partita.dissolve.dissolve import dissolve

    drawing = Drawing(seed)
    model = drawing.drawn()
    try:
        truth = outcome(model, model, drawing.example())
    except RuntimeError:  # What was tried and dropped while drawing may have left casts behind.
        return "eager fails"
    twin = Model(model.steps, model.outputs, seed)
    try:
        graph = graph_of(twin, drawing.example())
    except RuntimeError:  # Fake tensors know no inference mode, where weights may be written with gradients on.
        return "not traced"
    program = dissolve(Program.of(graph))
    assert program.modes.by_number is None
    return compared(truth, outcome(program.module(), twin, drawing.example()))


def compared(truth: Outcome, found: Outcome) -> str:
    """Raises where two outcomes differ; tells what was compared."""
    for name, ours, theirs in (("output", found.outputs, truth.outputs), ("state", found.state, truth.state)):
        for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert a.dtype == b.dtype, (name, k, a.dtype, b.dtype)
            assert _same(a, b), (name, k, a, b)
    for k, (a, b) in enumerate(zip(found.outputs, truth.outputs, strict=True)):
        if a.requires_grad != b.requires_grad:
            assert b.requires_grad, ("requires_grad", k)
            none = truth.gradients([k])
            assert truth.has_empty_promise or none == "forbidden", ("requires_grad", k, none)
            assert isinstance(none, str) or all(g is None for g in none), ("requires_grad", k, none)
    picked = [k for k, tensor in enumerate(found.outputs) if tensor.requires_grad]
    whole = _compared_gradients(truth, found, picked)
    if whole != "gradients":
        for k in picked:
            _compared_gradients(truth, found, [k])
    return whole


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _compared_gradients(truth: Outcome, found: Outcome, picked: list[int]) -> str:
    if not picked:
        return "no gradients"
    ours, theirs = found.gradients(picked), truth.gradients(picked)
    # Eager torch keeps what it needs for gradients that never arrive, and fails where that is written.
    if theirs == "forbidden" or (theirs == "modified" and truth.has_empty_promise):
        return "forbidden"
    if isinstance(theirs, str) or isinstance(ours, str):
        assert ours == theirs, (ours, theirs)
        return "backward fails"
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a is None) == (b is None), ("gradient", k, a, b)
        assert a is None or _same(a, b), ("gradient", k, a, b)
    return "gradients"
