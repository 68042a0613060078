"""Backends as values, and what eager, AOTAutograd and Inductor make of a body."""

from __future__ import annotations

import json
import pickle
import sys
from copy import deepcopy
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.helpers import compiled, fake
from tests.helpers.selecting import slow_but
from tests.helpers.torch_versions import IS_OLD
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.cpu_vec_isa import valid_vec_isa_list
from torch.fx import Graph, GraphModule, symbolic_trace

from partita import Tolerance
from partita.backends import AotEager, AotInductor, Eager, Inductor, backend_names, find_backend
from partita.backends._torch import settings
from partita.backends._torch.settings import vectors
from partita.backends.adapting import CallingConvention
from partita.backends.backend import is_backend, takes_symbols, tolerance_of, trains
from partita.backends.inductor import stored
from partita.errors import BackendError, OptionError
from partita.testing import check_backend
from partita.treatments import Delegate

BACKENDS = (Eager(), AotEager(), Inductor(), AotInductor())
COMPILING = (AotEager(), Inductor())


def _named(backend: Any) -> str:
    return str(backend.name)


@pytest.mark.parametrize("backend", BACKENDS, ids=_named)
def test_a_backend_is_found_by_its_name_and_is_a_value(backend: Any) -> None:
    assert backend.name in backend_names()
    assert find_backend(backend.name) == backend
    assert is_backend(backend)
    assert {deepcopy(backend), pickle.loads(pickle.dumps(backend))} == {backend}


def test_backends_say_what_they_do_to_numbers_and_gradients() -> None:
    assert [trains(backend) for backend in BACKENDS] == [True, True, True, False]
    assert all(map(takes_symbols, BACKENDS))
    assert tolerance_of(Eager()) == Tolerance()
    assert (tolerance_of(AotEager()).relative, tolerance_of(AotEager()).absolute) == (0, 0)
    assert tolerance_of(Inductor()) == tolerance_of(AotInductor()) != Tolerance()


@pytest.mark.parametrize("kind", [Inductor, AotInductor])
def test_options_are_sorted_pairs_that_inductor_knows(kind: Any) -> None:
    backend = kind({"max_autotune": True, "epilogue-fusion": False})
    assert backend.options == (("epilogue_fusion", False), ("max_autotune", True))
    assert backend == kind((("max_autotune", True), ("epilogue_fusion", False))) != kind()
    assert pickle.loads(pickle.dumps(backend)) == backend
    assert hash(kind({"cpp.simdlen": None})) == hash(kind({"cpp.simdlen": None}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_autotunes": True}, "no option 'max_autotunes'; did you mean 'max_autotune'"),
        ({"max_autotune": "yes"}, "'max_autotune' is a bool, not 'yes'"),
        ({"coordinate_descent_tuning": 1}, "is a bool, not 1"),
        ({"max_autotune_gemm_backends": ["ATEN"]}, "is a str"),
        ({"_pre_fusion_custom_pass": {}}, "is mutable"),
        ("max_autotune", "a mapping from names to values"),
        ({1: 2}, "a mapping from names to values"),
    ],
)
def test_options_that_inductor_would_ignore_are_refused(options: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Inductor(options)


def test_inductor_keeps_eagers_numbers_unless_told_otherwise() -> None:
    x = (torch.zeros(64),)
    kept = compiled(Inductor(), lambda x: (torch.rand_like(x),), x)
    own = compiled(Inductor({"fallback_random": False}), lambda x: (torch.rand_like(x),), x)
    drawn = []
    for function in (lambda x: (torch.rand_like(x),), kept, own):
        torch.manual_seed(0)
        drawn.append(function(*x)[0])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("name", slow_but(["eager", "aot_eager"], "aot_eager"))
def test_the_bodies_of_the_laws_hold_for_eager_and_aot_eager(name: str) -> None:
    report = check_backend(name, programs=1)
    assert not [note for note in report.notes if "failed" in note and "random_case" not in note]


def test_the_laws_hold_for_inductor_on_a_body() -> None:
    # Inductor of torch 2.11 is wrong about the other one, also when torch.compile calls it.
    report = check_backend("inductor", programs=0, bodies=("several_uses" if IS_OLD else "accumulation",))
    assert not [note for note in report.notes if "failed" in note]


@pytest.mark.slow
def test_the_laws_hold_for_inductor() -> None:
    report = check_backend("inductor", programs=2)
    assert not [note for note in report.notes if "failed" in note and "random_case" not in note]


@pytest.mark.parametrize("backend", COMPILING, ids=_named)
def test_a_backward_can_run_twice(backend: Any) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    function = compiled(backend, lambda x: (torch.exp(torch.sin(x)),), (x,))
    loss = function(x)[0].sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)
    second = torch.autograd.grad(loss, x)
    assert torch.equal(first[0], second[0])


def test_equal_numbers_are_not_taken_for_one() -> None:
    """A size that is 4 now changes; a factor of 4 does not."""
    function = AotEager().compile(
        symbolic_trace(lambda x, factor: (x * factor, x.size(0) + factor)),
        [fake((torch.ones(4, 2),), symbols=True)[0], 4],
    )
    assert [function(torch.ones(size, 2), 4)[1] for size in (4, 6)] == [8, 10]


def test_a_float_that_is_computed_from_sizes_comes_out() -> None:
    def half(x: Tensor) -> tuple[Any, ...]:
        return torch.sin(x), x.size(0) * 0.5, x.dim(), 1.5

    x = torch.ones(3, 2)
    for symbols in (False, True):
        assert tuple(compiled(Inductor(), half, (x,), symbols=symbols)(x)[1:]) == (1.5, 2, 1.5)


def test_a_python_callable_in_a_body_is_traced() -> None:
    layer = nn.BatchNorm1d(4, affine=False)

    def called(mean: Tensor, variance: Tensor, seen: Tensor, x: Tensor) -> Tensor:
        state = {"running_mean": mean, "running_var": variance, "num_batches_tracked": seen}
        return torch.func.functional_call(layer, state, (x,))

    graph = Graph()
    inputs = tuple(graph.placeholder(name) for name in ("mean", "variance", "seen", "x"))
    graph.output((graph.call_function(called, inputs),))
    values = (torch.zeros(4), torch.ones(4), torch.tensor(0), torch.randn(5, 4))
    expected, expected_state = layer(values[-1]), [layer.running_mean, layer.num_batches_tracked]
    function = AotEager().compile(GraphModule(nn.Module(), graph), fake(values, symbols=True))
    assert torch.equal(function(*values)[0], expected)
    assert torch.equal(values[0], expected_state[0])
    assert int(values[2]) == int(expected_state[1]) == 1


def test_what_inductor_made_is_stored_and_loaded() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    backend = Inductor()
    function = compiled(backend, lambda x: (torch.exp(torch.sin(x)), torch.sum(x), 2.5), (x,))
    loaded = backend.load(backend.save(function))
    assert loaded(x)[2] == 2.5
    assert torch.equal(loaded(x)[0], function(x)[0])
    assert torch.equal(*(torch.autograd.grad(made(x)[0].sum(), x)[0] for made in (function, loaded)))
    assert backend.save(loaded) == backend.save(function)


def test_inductor_takes_nothing_from_a_cache_that_another_processor_filled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    valid_vec_isa_list()  # Is found by compiling, and kept in the usual cache.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    hits = []
    for processor in ("one", "another", "one"):
        monkeypatch.setattr(settings, "vectors", lambda processor=processor: processor)
        counters.clear()
        x = torch.ones(3, 2, requires_grad=True)
        compiled(Inductor(), _waves, (x,))(x)[0].sum().backward()
        hits.append(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])
    assert hits[:2] == [0, 0] < hits[1:]


def _waves(x: Tensor) -> tuple[Tensor]:
    return (torch.exp(torch.sin(x)),)


def test_what_was_made_for_other_vectors_is_not_loaded() -> None:
    data = stored("inductor", CallingConvention((), (), 0), b"", vectors="other, 1 bits")
    with pytest.raises(BackendError, match=r"vectors 'other, 1 bits', here '\w+'; compile it again"):
        Inductor().load(data)


@pytest.mark.slow
def test_what_inductor_made_is_loaded_with_the_vectors_that_it_was_made_for() -> None:
    x = torch.randn(40)
    narrow = Inductor({"cpp.simdlen": 1})
    data = narrow.save(compiled(narrow, _waves, (x,)))
    assert torch.allclose(narrow.load(data)(x)[0], _waves(x)[0])
    with pytest.raises(BackendError, match=r"vectors '\w+, 1 bits', here '\w+'; compile it again"):
        Inductor().load(data)


@pytest.mark.parametrize("backend", [Inductor(), AotInductor()], ids=_named)
def test_code_that_uses_more_instructions_than_there_are_is_not_loaded(backend: Any) -> None:
    data = stored(backend.name, CallingConvention((), (), 0), b"", vectors=vectors())
    header = json.loads(data.splitlines()[1])
    header["instructions"].append("avx1024")
    with pytest.raises(BackendError, match="instructions that are not here: avx1024"):
        backend.load(b"\n".join((data.splitlines()[0], json.dumps(header).encode(), b"")))
    del header["instructions"]
    with pytest.raises(BackendError, match="unknown instructions"):
        backend.load(b"\n".join((data.splitlines()[0], json.dumps(header).encode(), b"")))


def test_sizes_of_inputs_are_stored_with_what_inductor_made() -> None:
    backend, aten = Inductor(), torch.ops.aten

    def sized(x: Tensor) -> tuple[Any, ...]:
        rows = aten.sym_size.int(x, 0)
        return aten.sin.default(x), rows, rows * 2, aten.sym_size.int(x, 1)

    function = compiled(backend, sized, (torch.ones(3, 4),), symbols=True)
    loaded = backend.load(backend.save(function))
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        for made in (function, loaded):
            assert [*made(x)[1:]] == [rows, rows * 2, 4]
            assert torch.allclose(made(x)[0], x.sin())


def test_what_cannot_be_stored_is_said() -> None:
    x = (torch.ones(3),)
    with pytest.raises(BackendError, match=r"lasting names.*partita\.capture"):
        Inductor().save(compiled(Inductor(), lambda x: (x.sin(),), x))
    with pytest.raises(BackendError, match="compiled itself"):
        Inductor().save(torch.sin)
    with pytest.raises(BackendError, match="compiled itself"):
        AotInductor().save(compiled(AotEager(), lambda x: (x.sin(),), x))


def test_bytes_from_elsewhere_are_not_loaded() -> None:
    with pytest.raises(BackendError, match="no compiled body"):
        Inductor().load(b"something else")
    data = Inductor().save(compiled(Inductor(), lambda x: (torch.sin(x),), (torch.ones(3),)))
    with pytest.raises(BackendError, match="backend 'inductor', here 'aot_inductor'"):
        AotInductor().load(data)
    with pytest.raises(BackendError, match="damaged"):
        Inductor().load(data[:-100])
    with pytest.raises(BackendError, match="no compiled body"):
        Inductor().load(data[:30])
    with pytest.raises(BackendError, match=r"torch '1\.0', here"):
        Inductor().load(data.replace(torch.__version__.encode(), b"1.0", 1))


def test_installed_packages_are_searched_once_for_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Any] = []
    monkeypatch.setattr(
        sys.modules[find_backend.__module__], "entry_points", lambda **options: searched.append(options) or ()
    )
    monkeypatch.syspath_prepend("nowhere")  # What was found on another path does not count.
    for _ in range(10):
        find_backend("eager")
        Delegate("aot_inductor")
    assert len(searched) == 1


def test_a_backend_that_is_installed_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[EntryPoint] = []
    monkeypatch.setattr(sys.modules[find_backend.__module__], "entry_points", lambda **_: installed)
    monkeypatch.syspath_prepend("nowhere else")
    with pytest.raises(OptionError, match="no backend is called 'later'"):
        find_backend("later")
    installed.append(EntryPoint("later", "partita.backends:Eager", "partita.backends"))
    assert find_backend("later") == Eager()
