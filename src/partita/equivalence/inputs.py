"""The inputs of one call, copied where it may mutate them and aliased as the arguments; other sizes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from partita._torch.pytrees import Tree, flatten, keywords_of
from partita._torch.symbolic_shapes import symbol_of, symbols_in
from partita.analysis.nodes import value_of
from partita.equivalence.objects import Held, carry_attributes, held_in
from partita.equivalence.other_data import fill_with_other_data, has_data
from partita.equivalence.state import storage_key, storage_of

#: A note on an argument of the call with other data.
SAME_DATA = "second call: {} has the same data as the first, since {}"

_STEPS: tuple[Callable[[int], int], ...] = (lambda size: size + 1, lambda size: 2 * size, lambda size: size - 1)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of one call: all tensors, those that are not copies, and the leaves that collect gradients."""

    args: tuple[object, ...]
    kwargs: dict[str, object]
    tensors: tuple[tuple[str, Tensor], ...]
    passed_on: tuple[tuple[str, Tensor], ...]
    leaves: tuple[tuple[str, Tensor], ...]
    #: What could not be copied although it may be mutated, or has the same data where it should have other data.
    notes: tuple[str, ...] = ()
    #: The numbers of the leaves that have other data, those of one storage together.
    other: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Arguments:
    """The caller's arguments, from which the inputs of every call are made."""

    tree: Tree

    def matches(self, placeholders: Sequence[Node]) -> bool:
        """Whether the placeholders stand for the leaves one by one, keywords included if they come in that order."""
        passed = [path.split("]")[1] + "]" for path in self.tree.paths if not path.startswith("[0]")]
        keywords = [f"[{name!r}]" for name in keywords_of(placeholders[0].graph)] if placeholders and passed else []
        return list(dict.fromkeys(passed)) == keywords and len(placeholders) == len(self.tree.leaves)

    def inputs(
        self,
        *,
        mutated: frozenset[int],
        state: frozenset[int],
        other_data: bool = False,
        kept: frozenset[int] = frozenset(),
    ) -> Inputs:
        """Inputs for one call: copies of those `mutated` or for other data, else the arguments themselves.

        Memory that inputs share with `state` is not copied: the snapshot of the state restores it. The leaves `kept`
        have the same data in any case.
        """
        objects = held_in(self.tree.leaves)
        made = _Made(self.tree, objects)
        copied = mutated | {n for held in objects if held.number in mutated for n in made.inside[held.number]}
        for numbers in _groups(made.leaves, state):
            if other_data or not copied.isdisjoint(numbers):
                made.copy(numbers)
                if other_data and kept.isdisjoint(numbers):
                    made.fill(numbers)
            else:
                made.pass_on(numbers)
        may_change = frozenset(range(len(made.leaves))) if other_data else mutated
        notes = tuple(made.copy_objects(objects, may_change))
        if other_data:
            notes += tuple(made.same_data(kept, state))
        args, kwargs = self.tree.rebuilt(made.leaves[: len(self.tree.leaves)])
        tensors = {number: leaf for number, leaf in enumerate(made.leaves) if isinstance(leaf, Tensor)}
        return Inputs(
            args=args,
            kwargs=kwargs,
            tensors=made.named(tensors),
            passed_on=made.named({number: tensors[number] for number in made.passed_on}),
            leaves=made.named(made.gradients),
            notes=notes,
            other=tuple(made.other),
        )

    def names(self, numbers: Iterable[int]) -> list[str]:
        """What leaves are called, those inside objects included."""
        paths = _Made(self.tree, held_in(self.tree.leaves)).paths
        return [input_name(paths[number]) for number in numbers]


def arguments_of(args: Sequence[object], kwargs: Mapping[str, object] | None) -> Arguments:
    """The arguments of a call."""
    return Arguments(flatten((tuple(args), dict(kwargs or {}))))


def input_name(path: str) -> str:
    """`input[0]` for the path of a positional argument, `input['mask']` for that of a keyword."""
    return "input" + path[path.index("]") + 1 :]


def resized(arguments: Arguments, placeholders: Sequence[Node]) -> Iterator[tuple[str, Arguments]]:
    """Arguments with every dynamic size changed, in several ways, each with a description such as `s0 = 5`.

    Which sizes the program accepts is not known: the caller tries them in turn. Sizes that cannot be computed, or that
    make an argument far larger than the caller's, are omitted.
    """
    if not arguments.matches(placeholders):
        return
    values = [value_of(node) for node in placeholders]
    sizes = _sizes(values, arguments.tree.leaves)
    for step in _STEPS if sizes else ():
        others = {symbol: max(step(size), 1) for symbol, size in sizes.items()}
        try:
            leaves = [_other(leaf, value, others) for leaf, value in zip(arguments.tree.leaves, values, strict=True)]
        except (ArithmeticError, TypeError, ValueError):  # As for a size of 6 // (s0 - 5), at s0 = 5.
            continue
        description = ", ".join(f"{symbol} = {size}" for symbol, size in others.items())
        yield description, Arguments(replace(arguments.tree, leaves=tuple(leaves)))


def _groups(leaves: Sequence[object], state: frozenset[int]) -> list[list[int]]:
    """The numbers of the tensors and generators, those of one storage together."""
    groups: defaultdict[object, list[int]] = defaultdict(list)
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Generator):
            groups[id(leaf)].append(number)
        elif isinstance(leaf, Tensor):
            key = storage_key(leaf)
            if key is None or key not in state:
                groups[("memory", key) if key is not None else id(leaf)].append(number)
    return list(groups.values())


class _Made:
    """The leaves of one call while they are being made, followed by the tensors and generators inside of objects."""

    def __init__(self, tree: Tree, objects: Sequence[Held]) -> None:
        self.leaves = list(tree.leaves)
        self.paths = list(tree.paths)
        self.gradients: dict[int, Tensor] = {}
        self.passed_on: list[int] = []
        #: The numbers of leaves that got other data, those of one storage together.
        self.other: list[tuple[int, ...]] = []
        #: By the number of each object the numbers of what is inside.
        self.inside: dict[int, range] = {}
        for held in objects:
            self.inside[held.number] = range(len(self.leaves), len(self.leaves) + len(held.inside))
            self.leaves += [part for _, part in held.inside]
            self.paths += [tree.paths[held.number] + path for path, _ in held.inside]

    def named(self, tensors: Mapping[int, Tensor]) -> tuple[tuple[str, Tensor], ...]:
        return tuple((input_name(self.paths[number]), tensor) for number, tensor in tensors.items())

    def copy_objects(self, objects: Sequence[Held], mutated: frozenset[int]) -> Iterator[str]:
        """Copies objects that may be mutated, or hold copies; says what could not be copied."""
        memo: dict[int, object] = {}
        for held in objects:
            parts = [self.leaves[number] for number in self.inside[held.number]]
            may_be_mutated = held.number in mutated
            if not may_be_mutated and all(new is old for new, (_, old) in zip(parts, held.inside, strict=True)):
                continue
            name = input_name(self.paths[held.number])
            shared = [(name + path, value) for path, value in held.shared]
            try:
                self.leaves[held.number] = held.copied(parts, memo)
            except Exception:  # Whatever the object's own code raises.
                shared = [(name, held.value)]
                self._share(held)
            for where, value in shared if may_be_mutated else ():
                yield (
                    f"{where}, a {type(value).__name__}, is not copied: both programs get the same one, and what they "
                    "change in it is neither compared nor restored"
                )

    def _share(self, held: Held) -> None:
        """Leaves an object as it is, with the tensors that it holds."""
        for number, (_, part) in zip(self.inside[held.number], held.inside, strict=True):
            self.leaves[number] = part
            self.gradients.pop(number, None)

    def fill(self, numbers: Sequence[int]) -> None:
        """Fills tensors of one storage with other data."""
        kept = fill_with_other_data([self.leaves[number] for number in numbers])
        other = [number for number in numbers if all(self.leaves[number] is not leaf for leaf in kept)]
        if any(has_data(self.leaves[number]) for number in other):
            self.other.append(tuple(other))

    def same_data(self, kept: frozenset[int], state: frozenset[int]) -> Iterator[str]:
        """Says which tensors have the same data although they are not `kept`."""
        other = kept.union(*self.other)
        for number, leaf in enumerate(self.leaves):
            if number not in other and has_data(leaf):
                is_state = isinstance(leaf, Tensor) and storage_key(leaf) in state
                why = "its memory is state" if is_state else "no other values are known to be valid"
                yield SAME_DATA.format(input_name(self.paths[number]), why)

    def pass_on(self, numbers: Sequence[int]) -> None:
        """The tensors themselves, but detached from their autograd graph."""
        seen: dict[int, Tensor] = {}
        for number in numbers:
            leaf = self.leaves[number]
            if isinstance(leaf, Tensor):
                if leaf.grad_fn is not None and id(leaf) not in seen:
                    seen[id(leaf)] = leaf.detach().requires_grad_()
                    carry_attributes(leaf, seen[id(leaf)])
                passed = self.leaves[number] = seen.get(id(leaf), leaf)
                self.passed_on.append(number)
                if passed.requires_grad:
                    self.gradients[number] = passed

    def copy(self, numbers: Sequence[int]) -> None:
        """Copies of the tensors in one new storage, with the same offsets and strides."""
        originals = [self.leaves[number] for number in numbers]
        tensors = {id(leaf): leaf for leaf in originals if isinstance(leaf, Tensor)}
        if not tensors:
            generators = {id(leaf): leaf.clone_state() for leaf in originals if isinstance(leaf, torch.Generator)}
            for number, leaf in zip(numbers, originals, strict=True):
                self.leaves[number] = generators[id(leaf)]
            return
        copies = dict(zip(tensors, _copies(list(tensors.values())), strict=True))
        for number, leaf in zip(numbers, originals, strict=True):
            self.leaves[number], source = copies[id(leaf)]
            if source is not None:
                self.gradients[number] = source


def _copies(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
    """Copies of tensors of one storage, each with the leaf that collects its gradient."""
    storage = storage_of(tensors[0])
    if storage is None or not all(map(_is_ordinary, tensors)):
        alone = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
        for tensor, other in zip(tensors, alone, strict=True):
            carry_attributes(tensor, other)
        return [(copy, copy if copy.requires_grad else None) for copy in alone]
    copied = storage.clone()
    if any(tensor.grad_fn is not None for tensor in tensors) and len({tensor.dtype for tensor in tensors}) == 1:
        return _inside_a_graph(tensors, copied)
    laid = [_laid_out(tensor, copied).requires_grad_(tensor.requires_grad) for tensor in tensors]
    return [(copy, copy if copy.requires_grad else None) for copy in laid]


def _is_ordinary(tensor: Tensor) -> bool:
    """Whether a tensor is all said by its storage, offset, sizes and strides."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_nested and not tensor.is_quantized


def _inside_a_graph(tensors: Sequence[Tensor], storage: torch.UntypedStorage) -> list[tuple[Tensor, Tensor | None]]:
    """Copies that are not leaves: those may be mutated, unlike a leaf that requires grad."""
    first = tensors[0]
    whole = torch.empty(0, dtype=first.dtype, device=first.device)
    leaf = whole.set_(storage, 0, (storage.nbytes() // first.element_size(),), (1,)).requires_grad_()
    with torch.enable_grad():
        base = leaf.clone()
        views = [base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()) for tensor in tensors]
    return [
        (view, leaf) if tensor.requires_grad else (view.detach(), None)
        for tensor, view in zip(tensors, views, strict=True)
    ]


def _laid_out(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_conj():
        copy = copy.conj()
    return copy


def _sizes(values: Sequence[Any], leaves: Sequence[object]) -> dict[Any, int]:
    """The symbols that are an input or a size by themselves, and their values in the arguments."""
    sizes: dict[Any, int] = {}
    for value, leaf in zip(values, leaves, strict=True):
        pairs: Sequence[tuple[Any, Any]] = [(value, leaf)]
        if isinstance(value, Tensor) and isinstance(leaf, Tensor):
            pairs = list(zip(value.shape, leaf.shape, strict=False))
        for size, actual in pairs:
            symbol = symbol_of(size)
            if symbol is not None and type(actual) is int:
                sizes.setdefault(symbol, actual)
    return sizes


#: How many times as many elements as the caller's an argument may have, and how many it may have in any case.
_MOST_TIMES, _FEW_ELEMENTS = 64, 2**16


def _other(leaf: object, value: Any, sizes: Mapping[Any, int]) -> object:
    if isinstance(value, Tensor) and isinstance(leaf, Tensor) and symbols_in(value):
        shape = [_evaluated(size, sizes) for size in value.shape]
        most = max(_MOST_TIMES * leaf.numel(), _FEW_ELEMENTS)
        # Each axis is stretched by itself, so the others do not make up for a large one.
        if len(shape) != leaf.ndim or min(shape, default=0) < 0 or math.prod(max(size, 1) for size in shape) > most:
            raise ValueError(f"sizes {shape} are no other sizes of an argument with sizes {tuple(leaf.shape)}")
        if any(had == 0 < size for had, size in zip(leaf.shape, shape, strict=True)):
            raise ValueError(f"an argument with sizes {tuple(leaf.shape)} has no elements to repeat")
        return _stretched(leaf, shape)
    return _evaluated(value, sizes) if isinstance(value, torch.SymInt) else leaf


def _evaluated(size: Any, sizes: Mapping[Any, int]) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    # sympy sorts all that it is given, and a program may have a symbol for each of its inputs.
    return int(expression.subs({symbol: sizes[symbol] for symbol in expression.free_symbols if symbol in sizes}))


def _stretched(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """The tensor truncated or repeated along each axis, its axes in the same order in memory."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    other = tensor.detach().permute(order)
    for axis, source in enumerate(order):
        if tensor.shape[source] != sizes[source]:
            places = torch.arange(sizes[source], device=tensor.device) % max(tensor.shape[source], 1)
            other = other.index_select(axis, places)
    back = sorted(range(tensor.ndim), key=order.__getitem__)
    return other.contiguous().permute(back).requires_grad_(tensor.requires_grad)
