"""Compiled once: equal bodies, copies, threads, and programs that were stored."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, is_dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.helpers.core import program_of
from tests.lowering.helpers import Counting, lowered, region_of
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from partita import Program, capture, plan
from partita._torch.fx.lazy_graph_module import GraphRecord
from partita.errors import BackendError
from partita.lowering.config import Lowering
from partita.lowering.lowered import Lowered
from partita.lowering.signature import Signature, TensorSpec
from partita.lowering.stored_layout import STORED
from partita.lowering.variant import Fit
from partita.lowering.variant_cache import Variants
from partita.plans.compilations import Compilations, Failures
from partita.policies import ByLabel, ByMode
from partita.program._torch.guards import InputGuards
from partita.treatments import Lower


def layers(*widths: int, slope: float = 0.1) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.LeakyReLU(slope)) for width in widths))


def by_layer(node: Node) -> str | None:
    return str(node.target).partition(".")[0] if node.op == "call_module" else None


def test_equal_bodies_are_compiled_once() -> None:
    backend = Counting()
    model = layers(4, 4, 4)
    module = plan(program_of(model), ByLabel(by_layer), Lower(backend)).apply().module()
    x = torch.randn(2, 4, requires_grad=True)
    assert torch.equal(module(x), model(x))
    assert len(backend.made) == 1


def test_equal_bodies_of_other_sizes_stay_free_of_symbols() -> None:
    backend = Counting()
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 5))
    module = plan(program_of(model), ByLabel(by_layer), Lower(backend, max_variants=1)).apply().module()
    for _ in range(2):
        module(torch.randn(2, 3))
    assert len(backend.made) == 3
    assert not any(isinstance(size, torch.SymInt) for inputs in backend.made for x in inputs for size in x.shape)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.LeakyReLU(0.1), nn.LeakyReLU(0.2)),
        (nn.Linear(4, 4), nn.Linear(4, 4, bias=False)),
        (nn.Softmax(0), nn.Softmax(1)),
        (nn.Tanh(), nn.Sigmoid()),
    ],
)
def test_bodies_that_differ_are_compiled_apart(one: nn.Module, other: nn.Module) -> None:
    backend = Counting()
    model = nn.Sequential(one, other)
    x = torch.randn(4, 4)
    assert torch.equal(plan(program_of(model), ByLabel(by_layer), Lower(backend)).apply().module()(x), model(x))
    assert len(backend.made) == 2


def test_literals_that_are_equal_but_not_the_same_are_distinguished() -> None:
    backend = Counting()
    x = torch.ones(2, dtype=torch.int64)
    results = [lowered(lambda x, k=k: x * k, Lower(backend))(x).dtype for k in (1, 1.0, True)]
    assert results == [torch.int64, torch.float32, torch.int64]
    assert len(backend.made) == 3


def test_programs_that_are_equal_share_what_was_compiled() -> None:
    backend = Counting()
    one, other = (lowered(layers(4), Lower(backend)) for _ in range(2))
    x = torch.randn(2, 4)
    assert not torch.equal(one(x), other(x)), "each has its own weights"
    assert len(backend.made) == 1


def test_backends_with_other_options_share_nothing() -> None:
    one, other = Counting("one"), Counting("other")
    kept = [lowered(layers(4), Lower(backend)) for backend in (one, other)]
    for module in kept:
        module(torch.randn(2, 4))
    assert (len(one.made), len(other.made)) == (1, 1)


def test_what_failed_for_one_body_is_reported_for_each_that_is_equal() -> None:
    class Failing(Counting):
        def compile(self, body, inputs):
            super().compile(body, inputs)
            raise ZeroDivisionError("no")

    backend = Failing()
    decided = plan(program_of(layers(4, 4)), ByLabel(by_layer), Lower(backend))
    decided.apply().module()(torch.randn(2, 4, requires_grad=True))
    assert [failure.region for failure in decided.failures] == ["part_0", "part_1"]
    assert len(backend.made) == 1


def test_a_copy_has_its_own_state_and_the_same_code() -> None:
    backend = Counting()
    module = lowered(layers(4), Lower(backend))
    x = torch.randn(2, 4)
    expected = module(x)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        next(module.parameters()).zero_()
    assert torch.equal(copied(x), expected)
    assert not torch.equal(module(x), expected)
    assert len(backend.made) == 1
    assert region_of(copied)._variants is region_of(module)._variants


@dataclass(frozen=True)
class Storing:
    """A backend whose functions can be stored: the code is a number."""

    name = "storing"

    def refusal(self, node: Node) -> str | None:
        return None

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Any:
        COMPILED.append(len(inputs))
        return Times(3)

    def save(self, compiled: Any) -> bytes:
        return str(compiled.factor).encode()

    def load(self, data: bytes) -> Any:
        return Times(int(data))


@dataclass
class Times:
    factor: int

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        return (values[0] * self.factor,)


COMPILED: list[int] = []


def test_what_can_be_stored_is_not_compiled_again() -> None:
    COMPILED.clear()
    module = lowered(lambda x: x * 3, Lower(Storing(), dynamic=True))
    module(torch.ones(5))
    loaded = pickle.loads(pickle.dumps(module))
    for size in (5, 6):
        assert torch.equal(loaded(torch.ones(size)), torch.full((size,), 3.0))
    assert len(COMPILED) == 1
    loaded(torch.ones(5, dtype=torch.float64))
    assert len(COMPILED) == 2, "another signature needs another function"


def test_a_pickle_whose_backend_is_not_installed_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(Storing):
        name = "elsewhere"

    Elsewhere.__module__, Elsewhere.__qualname__ = "backend_elsewhere", "Elsewhere"
    package = ModuleType("backend_elsewhere")
    package.Elsewhere = Elsewhere
    with monkeypatch.context() as installed:
        installed.setitem(sys.modules, "backend_elsewhere", package)
        data = pickle.dumps(lowered(lambda x: x * 3, Lower(Elsewhere())))
        assert pickle.loads(data)(torch.ones(1)).item() == 3
    with pytest.raises(
        BackendError, match=r"'elsewhere' \(backend_elsewhere.Elsewhere\), which cannot be imported here"
    ):
        pickle.loads(data)


def test_a_pickle_of_another_version_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    module = lowered(lambda x: x * 3, Lower("aot_eager"))
    with monkeypatch.context() as other:
        other.setattr("partita.lowering.lowered.layout", lambda: "another")
        data = pickle.dumps(module)
    with monkeypatch.context() as earlier:
        earlier.delattr(Lowered, "__reduce__")
        unmarked = pickle.dumps(module)
    for stored in (data, unmarked):
        with pytest.raises(BackendError, match="pickled by another version of Partita"):
            pickle.loads(stored)


#: torch's classes, which pickles hold by the names of their fields: forms of arguments and ranges of symbolic sizes.
NOT_IN_LAYOUT = {"LeafSpec", "TreeSpec", "ValueRanges", "_PyTreeInfo"}
#: Classes without fields by place: `Lowered` (with the layout) and `InputGuards` store attributes by name, `Variants` a
#: call with what the layout covers, and the others nothing.
NOT_BY_PLACE = {Compilations, Failures, InputGuards, Lowered, Variants}


def test_the_layout_covers_all_that_a_pickle_holds() -> None:
    def scaled(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ x.t()).relu_().narrow(0, 0, x.shape[0] // 2)

    x = torch.randn(6, 4)
    program = capture(scaled, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    module = plan(program, ByMode(), Lower(Storing())).apply().module()
    module(x)
    found = {type(value) for value in _stored_values(module)}
    positional = {kind for kind in found if is_dataclass(kind) or hasattr(kind, "_fields")}
    missing = positional - set(STORED)
    assert {kind.__name__ for kind in missing} <= NOT_IN_LAYOUT, missing
    assert all(kind.__module__.startswith("torch.") for kind in missing), missing
    assert {Lowering, Fit, Signature, TensorSpec, GraphRecord} <= positional
    ours = {kind for kind in found - positional if kind.__module__.startswith("partita.")}
    # Each graph module has a class of its own, stored as a call with a record of its graph.
    assert {kind for kind in ours if not issubclass(kind, GraphModule)} <= NOT_BY_PLACE


def _stored_values(module: object) -> list[object]:
    """Every object that a pickle of a module stores by reference to its class."""
    seen: list[object] = []

    class Noting(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            seen.append(value)
            return NotImplemented

    Noting(io.BytesIO()).dump(module)
    return seen


def test_what_cannot_be_stored_is_compiled_again() -> None:
    module = lowered(layers(4), Lower("aot_eager"))
    x = torch.randn(2, 4)
    expected = module(x)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), expected)


def test_what_cannot_be_stored_is_said_when_it_is_saved(caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful(Storing):
        def save(self, compiled: Any) -> bytes:
            raise BackendError("no paper")

    module = lowered(lambda x: x * 3, Lower(Forgetful()))
    with caplog.at_level(logging.WARNING, logger="partita.lowering"):
        module(torch.ones(5))
        assert not caplog.messages
        Variants.__reduce__(region_of(module)._variants)
    assert caplog.messages == ["storing cannot store a function, so it will be compiled again: no paper"]


def test_threads_that_need_the_same_function_wait_for_it() -> None:
    class Slow(Counting):
        def compile(self, body, inputs):
            running.append(1)
            assert len(running) == 1, "two compilations at once"
            time.sleep(0.05)
            made = super().compile(body, inputs)
            running.pop()
            return made

    running: list[int] = []
    backend = Slow()
    module = lowered(layers(4), Lower(backend, dynamic=False))
    together = threading.Barrier(6)

    def call(size: int) -> bool:
        x = torch.randn(size, 4)
        together.wait()
        with torch.no_grad():
            return all(torch.equal(module(x), module.whole.body(x)[0]) for _ in range(20))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(call, (2, 2, 2, 3, 3, 3)))
    assert len(backend.made) == 2


def test_a_call_runs_while_another_compiles() -> None:
    class Blocking(Counting):
        def compile(self, body, inputs):
            if inputs[0].shape[0] == 7:
                started.set()
                assert finish.wait(10)
            return super().compile(body, inputs)

    started, finish = threading.Event(), threading.Event()
    module = lowered(lambda x: x * 2, Lower(Blocking(), dynamic=False))
    module(torch.ones(3))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(module, torch.ones(7))
        assert started.wait(10)
        assert torch.equal(module(torch.ones(3)), torch.full((3,), 2.0))
        finish.set()
        assert torch.equal(waiting.result(10), torch.full((7,), 2.0))


@pytest.mark.usefixtures("quick_collections")
def test_programs_do_not_keep_the_weights_of_others_alive() -> None:
    import gc
    import weakref

    backend = Counting()
    one, other = (lowered(layers(4), Lower(backend)) for _ in range(2))
    x = torch.randn(2, 4)
    one(x), other(x)
    weight = weakref.ref(next(one.parameters()))
    del one
    gc.collect()
    assert weight() is None
    assert torch.isfinite(other(x)).all()


def test_a_program_is_what_it_was_after_lowering() -> None:
    program = program_of(layers(4))
    text = str(program.graph)
    plan(program, ByLabel(by_layer), Lower("aot_eager")).apply().module()(torch.randn(2, 4))
    assert str(program.graph) == text
    assert isinstance(program, Program)
