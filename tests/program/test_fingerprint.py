"""Fingerprints: equal for what differs only in legal order and names, different for everything that matters."""

from __future__ import annotations

import operator
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.core import program_of
from torch import nn
from torch.fx import Graph

from partita import Program, fingerprint
from partita._torch.toggles import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD
from partita.testing import random_case

Build = Callable[[Graph, Any], Any]


def unseen(x: torch.Tensor) -> torch.Tensor:
    return x


def printed(build: Build, root: nn.Module | None = None) -> str:
    graph = Graph()
    graph.output(build(graph, graph.placeholder("x")))
    return fingerprint(program_of(graph, root))


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Any:
    return graph.call_function(target, args, kwargs)


def in_order(*names: str) -> Build:
    """Calls of these functions on the input, written in this order, returned in the order of their names."""

    def build(graph: Graph, x: Any) -> Any:
        values = {name: call(graph, getattr(torch, name), x) for name in names}
        return tuple(values[name] for name in sorted(names))

    return build


def test_legal_order_does_not_count() -> None:
    assert printed(in_order("sin", "cos", "exp")) == printed(in_order("exp", "sin", "cos"))


def test_names_do_not_count() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.create_node("call_function", torch.sin, (x,), name="something"))
    assert fingerprint(program_of(graph)) == printed(lambda graph, x: call(graph, torch.sin, x))


def test_the_order_of_random_operators_counts() -> None:
    first = printed(lambda graph, x: (call(graph, torch.rand_like, x), call(graph, torch.randn_like, x)))
    other = printed(lambda graph, x: (call(graph, torch.randn_like, x), call(graph, torch.rand_like, x))[::-1])
    assert first != other


def test_which_of_two_equal_random_operators_is_which_counts() -> None:
    def build(graph: Graph, x: Any) -> list[Any]:
        return [call(graph, torch.rand_like, x), call(graph, torch.rand_like, x)]

    assert printed(build) != printed(lambda graph, x: build(graph, x)[::-1])


def test_a_read_before_a_write_is_not_one_after_it() -> None:
    def before(graph: Graph, x: Any) -> Any:
        sine = call(graph, torch.sin, x)
        return sine, graph.call_method("add_", (x, 1))

    def after(graph: Graph, x: Any) -> Any:
        written = graph.call_method("add_", (x, 1))
        return call(graph, torch.sin, x), written

    assert printed(before) != printed(after)


def under(*toggles: tuple[Any, ...]) -> Build:
    def build(graph: Graph, x: Any) -> Any:
        blocks = [call(graph, *toggle) for toggle in toggles]
        value = call(graph, torch.mm, x, x)
        for (target, *_), block in zip(toggles, blocks, strict=True):
            call(graph, *((EXIT_AUTOCAST, block) if target is ENTER_AUTOCAST else (SET_GRAD, True)))
        return value

    return build


def test_every_mode_counts() -> None:
    modes = [
        under(),
        under((SET_GRAD, False)),
        under((ENTER_AUTOCAST, "cpu", torch.bfloat16, True, None)),
        under((ENTER_AUTOCAST, "cpu", torch.float16, True, None)),
        under((ENTER_AUTOCAST, "cpu", torch.float16, False, None)),
        under((SET_GRAD, False), (ENTER_AUTOCAST, "cpu", torch.bfloat16, True, None)),
    ]
    assert len(set(map(printed, modes))) == len(modes)


def test_how_modes_are_written_does_not_count() -> None:
    twice = under((SET_GRAD, True), (SET_GRAD, False))
    assert printed(twice) == printed(under((SET_GRAD, False)))


def test_the_mode_left_behind_counts() -> None:
    def build(graph: Graph, x: Any) -> Any:
        value = call(graph, torch.sin, x)
        call(graph, SET_GRAD, False)
        return value

    assert printed(build) != printed(lambda graph, x: call(graph, torch.sin, x))


VARIANTS: list[Build] = [
    lambda graph, x: call(graph, torch.add, x, 1),
    lambda graph, x: call(graph, torch.add, x, 1.0),
    lambda graph, x: call(graph, torch.add, x, True),
    lambda graph, x: call(graph, torch.add, x, x),
    lambda graph, x: call(graph, torch.add, 1, x),
    lambda graph, x: call(graph, torch.add, x, 1, alpha=2),
    lambda graph, x: call(graph, torch.sub, x, 1),
    lambda graph, x: call(graph, torch.ops.aten.add.Tensor, x, 1),
    lambda graph, x: call(graph, torch.ops.aten.add.Scalar, x, 1),
    lambda graph, x: graph.call_method("add", (x, 1)),
    lambda graph, x: graph.call_method("to", (x, torch.float16)),
    lambda graph, x: graph.call_method("to", (x, torch.bfloat16)),
    lambda graph, x: graph.call_method("to", (x, "cpu")),
    lambda graph, x: graph.call_method("view", (x, [1, 2])),
    lambda graph, x: graph.call_method("view", (x, (1, 2))),
    lambda graph, x: call(graph, operator.getitem, x, slice(0, 1)),
    lambda graph, x: call(graph, operator.getitem, x, slice(0, 1, 1)),
    lambda graph, x: call(graph, operator.getitem, x, 0),
    lambda graph, x: call(graph, torch.add, x, torch.ones(1)),
    lambda graph, x: call(graph, torch.add, x, torch.zeros(1)),
    lambda graph, x: (x, call(graph, torch.add, x, 1)),
    lambda graph, x: [x, call(graph, torch.add, x, 1)],
    lambda graph, x: {"a": call(graph, torch.add, x, 1)},
    lambda graph, x: {"b": call(graph, torch.add, x, 1)},
    lambda graph, x: call(graph, unseen, x),
]


def test_every_argument_target_and_type_counts() -> None:
    assert len({printed(build) for build in VARIANTS}) == len(VARIANTS)


def test_inputs_count_with_their_order_and_defaults() -> None:
    def taking(*inputs: tuple[str, Any]) -> str:
        graph = Graph()
        nodes = {name: graph.create_node("placeholder", name, args) for name, args in inputs}
        graph.output(tuple(nodes[name] for name in sorted(nodes)))
        return fingerprint(program_of(graph))

    made = [
        taking(("a", ()), ("b", ())),
        taking(("b", ()), ("a", ())),
        taking(("a", ()), ("b", (1,))),
        taking(("a", ())),
    ]
    assert len(set(made)) == len(made)


def test_an_unused_effect_counts_and_is_counted() -> None:
    def drawing(times: int) -> str:
        def build(graph: Graph, x: Any) -> Any:
            for _ in range(times):
                call(graph, torch.rand_like, x)
            return x

        return printed(build)

    assert len({drawing(0), drawing(1), drawing(2)}) == 3


@pytest.mark.parametrize("op", ["call_module", "get_attr"])
def test_which_module_or_attribute_is_named_counts(op: str) -> None:
    root = nn.Module()
    root.a, root.b = nn.ReLU(), nn.ReLU()
    root.register_buffer("c", torch.ones(1))
    root.register_buffer("d", torch.ones(1))

    def naming(target: str) -> str:
        args = (lambda x: (x,)) if op == "call_module" else (lambda x: ())
        return printed(lambda graph, x: graph.create_node(op, target, args(x)), root)

    names = "ab" if op == "call_module" else "cd"
    assert naming(names[0]) != naming(names[1])


def prints(seeds: int) -> str:
    return " ".join(fingerprint(Program.of(random_case(seed).graph_module)) for seed in range(seeds))


@pytest.mark.slow  # By default, the laws compare fingerprints of two processes.
@pytest.mark.parametrize("hash_seed", ["7"])
def test_the_fingerprint_is_the_same_in_every_process(hash_seed: str) -> None:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "from tests.program.test_fingerprint import prints; print(prints(12))"],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(["src", "."])},
    )  # fmt: skip
    assert found.stdout.strip() == prints(12)


def test_programs_with_different_seeds_differ() -> None:
    found = prints(25).split()
    assert len(set(found)) > 20
