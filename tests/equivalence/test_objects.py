"""Objects among outputs and arguments are opened, compared, copied and left alone; what cannot be compared is noted."""

from __future__ import annotations

import enum
import threading
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from partita.equivalence import Tolerance, compare


class Kind(enum.Enum):
    SMALL = 1
    LARGE = 2


@dataclass
class Logits:
    first: Any
    second: Any = None


@dataclass
class Loss:
    first: Any
    second: Any = None


@dataclass
class Renamed:
    first: Any
    other: Any = None


class Cache:
    """Keys in layers, as caches of language models hold them."""

    def __init__(self, *layers: Tensor) -> None:
        self.layers = list(layers)
        self.seen = 0

    def append(self, keys: Tensor) -> None:
        self.layers.append(keys)
        self.seen += 1


class Slotted:
    __slots__ = ("__hidden", "shown")

    def __init__(self, shown: object, hidden: object) -> None:
        self.shown = shown
        self.__hidden = hidden


class Ring:
    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.next = [self]


class Tagged(dict[str, Any]):
    pass


def returning(make: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    return lambda x: (x * 1, make(x))


def tagged(x: Tensor, tag: object) -> Tagged:
    found = Tagged(x=x * 1)
    found.tag = tag  # type: ignore[attr-defined]
    return found


VALUES: dict[str, tuple[object, object]] = {
    "dtype": (torch.float32, torch.float64),
    "layout": (torch.strided, torch.sparse_coo),
    "memory format": (torch.contiguous_format, torch.channels_last),
    "device": (torch.device("cpu"), torch.device("meta")),
    "enum member": (Kind.SMALL, Kind.LARGE),
    "class": (int, float),
    "function": (torch.relu, torch.sigmoid),
    "function of Python": (returning, tagged),
    "complex zero": (complex(0.0, 0.0), complex(0.0, -0.0)),
    "number": (1, True),
    "member of a set": ({1}, {True}),
    "member of a nested set": ({(1, 2)}, {(True, 2)}),
    "key": ({1: 2}, {True: 2}),
    "slice": (slice(1), slice(True)),
    "array": (numpy.arange(5000), numpy.where(numpy.arange(5000) == 2500, 0, numpy.arange(5000))),
    "array of texts": (numpy.array(["a"]), numpy.array(["b"])),
    "generator": (numpy.random.default_rng(1), numpy.random.default_rng(2)),
}


@pytest.mark.parametrize("case", VALUES)
def test_values_with_an_equality_are_compared(case: str) -> None:
    x, (one, other) = torch.ones(2), VALUES[case]
    assert not compare(returning(lambda x: one), returning(lambda x: other), (x,)).equal
    found = compare(returning(lambda x: one), returning(lambda x: one), (x,))
    assert (found.equal, found.notes) == (True, ())


OBJECTS: dict[str, tuple[Callable[[Tensor], object], Callable[[Tensor], object], str]] = {
    "class": (lambda x: Logits(x + 1), lambda x: Loss(x + 1), "structure"),
    "name of a field": (lambda x: Logits(x + 1), lambda x: Renamed(x + 1), "structure"),
    "container in a field": (lambda x: Logits([x + 1]), lambda x: Logits((x + 1,)), "structure"),
    "order of keys in a field": (
        lambda x: Logits({"p": x + 1, "q": x + 2}),
        lambda x: Logits({"q": x + 2, "p": x + 1}),
        "structure",
    ),
    "nested class": (lambda x: [Logits(Logits(x + 1))], lambda x: [Logits(Loss(x + 1))], "structure"),
    "object or tensor": (lambda x: Logits(Logits(x + 1)), lambda x: Logits(x + 1), "structure"),
    "tensor in an object": (lambda x: Cache(x + 1), lambda x: Cache(x + 2), "value"),
    "tensor in a slot": (lambda x: Slotted(1, x + 1), lambda x: Slotted(1, x + 2), "value"),
    "tensor in an object that contains itself": (lambda x: Ring(x + 1), lambda x: Ring(x + 2), "value"),
    "tensor in a mapping": (lambda x: UserDict({"a": x + 1}), lambda x: UserDict({"a": x + 2}), "value"),
    "attribute of a dictionary": (lambda x: tagged(x, 1), lambda x: tagged(x, 2), "value"),
    "gradient through an object": (lambda x: Cache(x.sin()), lambda x: Cache(x.sin().detach()), "gradient"),
    "aliasing in an object": (lambda x: Cache(x), lambda x: Cache(x.clone()), "aliasing"),
}


@pytest.mark.parametrize("case", OBJECTS)
def test_objects_are_compared_by_class_and_content(case: str) -> None:
    one, other, kind = OBJECTS[case]
    x = torch.ones(2, requires_grad=True)
    assert kind in {difference.kind for difference in compare(one, other, (x,)).differences}
    found = compare(one, one, (x,))
    assert (found.equal, found.notes) == (True, ())


@pytest.mark.parametrize("make", [object, threading.Lock, lambda: iter([1]), lambda: lambda: 1, nn.ReLU])
def test_what_cannot_be_compared_is_noted(make: Callable[[], object]) -> None:
    found = compare(returning(lambda x: make()), returning(lambda x: make()), (torch.ones(2),))
    assert found.equal
    assert [note.partition(":")[0] for note in found.notes] == ["output[1] was compared by type only"]


def test_an_object_that_is_too_deep_is_noted() -> None:
    def deep(x: Tensor) -> object:
        found: object = x * 1
        for _ in range(100):
            found = Cache(found)  # type: ignore[arg-type]
        return found

    assert any("compared by type only" in note for note in compare(deep, deep, (torch.ones(2),)).notes)


def test_an_argument_that_is_an_object_is_copied_for_each_program() -> None:
    def step(x: Tensor, cache: Cache) -> Tensor:
        cache.append(x * 2)
        return torch.stack(cache.layers).sum(0)

    cache = Cache(torch.ones(2))
    found = compare(step, step, (torch.ones(2), cache))
    assert (found.equal, found.notes) == (True, ())
    assert (len(cache.layers), cache.seen) == (1, 0)


def test_what_a_program_changes_in_an_argument_is_compared_and_undone() -> None:
    def bump(x: Tensor, box: Logits) -> Tensor:
        box.first.add_(1)
        return x * 1

    box = Logits(torch.zeros(2))
    found = compare(bump, lambda x, box: x * 1, (torch.ones(2), box))
    assert [difference.where for difference in found.differences] == ["input[1].first after the call"]
    assert box.first.tolist() == [0.0, 0.0]


def test_an_array_that_is_an_argument_is_copied() -> None:
    def bump(x: Tensor, array: Any) -> Tensor:
        array += 1
        return x * 1

    array = numpy.zeros(2)
    assert not compare(bump, lambda x, array: x * 1, (torch.ones(2), array)).equal
    assert array.tolist() == [0.0, 0.0]


def test_copies_of_objects_share_memory_as_the_arguments_do() -> None:
    def read_through(x: Tensor, box: Logits, cache: Cache) -> Tensor:
        x.add_(1)
        return box.first * 1 + cache.layers[0] + (box.second is cache)

    memory = torch.zeros(4)
    cache = Cache(memory[1:3])
    results: list[list[float]] = []

    def recording(*args: Any) -> Tensor:
        result = read_through(*args)
        results.append(result.tolist())
        return result

    args = (memory, Logits(memory[2:], cache), cache)
    assert compare(recording, recording, args, second_call=False).equal
    assert results == [[3.0, 3.0]] * 4
    assert memory.tolist() == [0.0] * 4


def test_gradients_of_tensors_inside_of_an_argument_are_compared() -> None:
    box = Logits(torch.ones(2, requires_grad=True))
    found = compare(lambda x, box: x * box.first, lambda x, box: x * box.first.detach(), (torch.ones(2), box))
    assert ("gradient", "input[1].first") in {(difference.kind, difference.where) for difference in found.differences}


def test_an_argument_that_cannot_be_copied_is_noted() -> None:
    class Stubborn(Cache):
        def __deepcopy__(self, memo: dict[int, object]) -> Stubborn:
            raise TypeError("no copies")

    def step(x: Tensor, *others: object) -> Tensor:
        return x * 1

    locked = Cache(torch.ones(2))
    locked.lock = threading.Lock()  # type: ignore[attr-defined]
    found = compare(step, step, (torch.ones(2), Stubborn(torch.ones(2)), locked))
    assert found.equal
    assert [note.partition(" is not copied")[0] for note in found.notes if "not copied" in note] == [
        "input[1], a Stubborn,",
        "input[2].lock, a lock,",
    ]


def test_numbers_inside_of_objects_have_the_tolerance() -> None:
    near = Tolerance(relative=1e-6)
    assert compare(lambda x: Logits(x, 1.0), lambda x: Logits(x, 1.0 + 1e-9), (torch.ones(2),), tolerance=near).equal
    assert not compare(lambda x: Logits(x, 1.0), lambda x: Logits(x, 1.0 + 1e-9), (torch.ones(2),)).equal


class Labelled(Tensor):
    """A tensor with attributes."""

    tag: Any


def labelled(value: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        found = (x * 2).as_subclass(Labelled)
        found.tag = value(x)
        return found

    return forward


ATTRIBUTES: dict[str, tuple[Callable[[Tensor], object], Callable[[Tensor], object], tuple[str, str]]] = {
    "value": (lambda x: 1, lambda x: 2, ("value", "output.tag")),
    "type": (lambda x: 1, lambda x: True, ("type", "output.tag")),
    "tensor": (lambda x: x * 1, lambda x: x * 2, ("value", "output.tag")),
    "memory": (lambda x: x, lambda x: x * 1, ("aliasing", "output.tag")),
    "container": (lambda x: [1], lambda x: (1,), ("structure", "output.tag")),
}


@pytest.mark.parametrize("case", ATTRIBUTES)
def test_attributes_of_a_tensor_subclass_are_compared(case: str) -> None:
    one, other, expected = ATTRIBUTES[case]
    found = compare(labelled(one), labelled(other), (torch.rand(3),)).differences
    assert [(difference.kind, difference.where) for difference in found] == [expected]
    assert compare(labelled(one), labelled(one), (torch.rand(3),)).equal


def test_an_attribute_of_a_tensor_subclass_that_is_missing_is_a_difference() -> None:
    found = compare(labelled(lambda x: 1), lambda x: (x * 2).as_subclass(Labelled), (torch.rand(3),)).differences
    assert [str(difference) for difference in found] == [
        "structure of output (first call): Labelled(.tag) != no container"
    ]


def test_an_attribute_of_a_tensor_subclass_without_an_equality_is_noted() -> None:
    made = labelled(lambda x: threading.Lock())
    found = compare(made, made, (torch.rand(3),))
    assert found.notes == ("output.tag was compared by type only: a lock has no equality that can be trusted",)


def test_a_copied_argument_keeps_the_attributes_of_its_subclass() -> None:
    def counts(x: Any, steps: int = 1) -> Tensor:
        x.tag["calls"] += steps
        return x.as_subclass(Tensor) * x.scale

    x: Any = torch.rand(3).as_subclass(Labelled)
    x.tag, x.scale = {"calls": 0}, torch.ones(3, requires_grad=True)
    assert compare(counts, counts, (x,)).equal
    found = compare(counts, lambda x: counts(x, 2), (x,)).differences
    assert [(difference.kind, difference.where) for difference in found] == [
        ("value", "input[0].tag['calls'] after the call")
    ]
    assert x.tag == {"calls": 0}


def test_a_tensor_that_is_its_own_attribute_is_opened_once() -> None:
    def rings(x: Tensor) -> Tensor:
        found = (x * 2).as_subclass(Labelled)
        found.tag = [found]
        return found

    assert compare(rings, rings, (torch.rand(3),)).equal


def replacing(values: Any, key: Any, x: Tensor) -> Tensor:
    values[key] = x + 1
    return x * 2


def filling(values: Any, key: Any, x: Tensor) -> Tensor:
    values[key].copy_(x + 1)
    return x * 2


@pytest.mark.parametrize(
    ("reach", "make", "where"),
    [
        (lambda held: held, lambda x: [x], "input[0][0] after the call"),
        (lambda held: held, lambda x: {0: x}, "input[0][0] after the call"),
        (lambda held: held["a"][1], lambda x: {"a": (1, [x])}, "input[0]['a'][1][0] after the call"),
        (lambda held: held.layers, lambda x: Cache(x), "input[0].layers[0] after the call"),
    ],
    ids=["list", "dict", "nested", "object"],
)
def test_whether_a_tensor_in_an_argument_is_replaced_is_compared(
    reach: Callable[[Any], Any], make: Callable[[Tensor], object], where: str
) -> None:
    def replaces(held: Any, x: Tensor) -> Tensor:
        return replacing(reach(held), 0, x)

    def fills(held: Any, x: Tensor) -> Tensor:
        return filling(reach(held), 0, x)

    args = (make(torch.zeros(3)), torch.rand(3))
    for one, other in ((replaces, fills), (fills, replaces)):
        found = compare(one, other, args).differences
        assert [(difference.kind, difference.where) for difference in found] == [("identity", where)]
    for same in (replaces, fills):
        assert compare(same, same, args).equal


def test_the_memory_of_what_enters_an_argument_is_compared() -> None:
    def enters(held: list[Tensor], x: Tensor, *, copied: bool) -> Tensor:
        held[0] = x.clone() if copied else x
        held.append(x.clone() if copied else x)
        return x * 2

    args = ([torch.zeros(3)], torch.rand(3))
    both = [lambda held, x, copied=copied: enters(held, x, copied=copied) for copied in (False, True)]
    found = compare(*both, args).differences
    places = [("aliasing", "input[0][0] after the call"), ("aliasing", "input[0][1] after the call")]
    assert [(difference.kind, difference.where) for difference in found] == places
