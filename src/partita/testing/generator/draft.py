"""A generated program, and its graph under construction: every node runs as it is added, so the program runs too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from partita._torch.modes import read_ambient, restore_autocast
from partita._torch.toggles import ENTER_AUTOCAST, ENTER_INFERENCE, EXIT_AUTOCAST, EXIT_INFERENCE
from partita.testing.generator.recipe import Picks
from partita.testing.generator.state import ATTRIBUTES, State


@final
@dataclass(frozen=True, slots=True)
class Case:
    """A program that runs on its arguments, its traits, and an expression that builds it again."""

    graph_module: GraphModule
    args: tuple[object, ...]
    kwargs: dict[str, object]
    traits: tuple[str, ...] = ()
    origin: str = ""

    def copy(self) -> Case:
        """The same case with its own state and arguments, for a run that may mutate them; aliasing is kept."""
        graph_module, args, kwargs = deepcopy((self.graph_module, self.args, self.kwargs))
        restore_persistence(graph_module, self.graph_module)
        return replace(self, graph_module=graph_module, args=args, kwargs=kwargs)

    def run(self) -> object:
        """What the program returns; its arguments and state may be mutated."""
        return self.graph_module(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        return f"<Case {self.origin}\n{self.graph_module.graph}>"


def restore_persistence(copied: GraphModule, original: nn.Module) -> None:
    """Makes the same buffers non-persistent as in the original: torch 2.13 registers all buffers of a graph module."""
    kept = original.state_dict()
    for name, buffer in copied.named_buffers(remove_duplicate=False):
        if name not in kept:
            owner, _, leaf = name.rpartition(".")
            copied.get_submodule(owner).register_buffer(leaf, buffer, persistent=False)


_ODD_NAMES = ("submod_0", "self_1", "add_1", "getitem", "submod_1_0", "output_1", "cache", "l_self_x_")


def on_default_device() -> dict[str, torch.device]:
    """What makes a tensor where all others are; nothing on the CPU.

    torch 2.13 forgets the default device inside of bodies that it compiles.
    """
    device = torch.get_default_device()
    return {} if device.type == "cpu" else {"device": device}


class UnfitError(Exception):
    """A step does not fit at its place, so it is skipped."""


@final
@dataclass(frozen=True, slots=True)
class OpenBlock:
    """A block that was entered: the function that exits it, and its argument, a handle or the grad mode."""

    leave: Callable[[Any], object]
    handle: Node | bool


@final
class Draft:
    """A graph and, for each of its nodes, the value it had when it ran."""

    def __init__(self, graph: Graph, state: State, *, odd_names: int = 0, keeps_leaves: bool = False) -> None:
        self.graph = graph
        self.state = state
        self.values: dict[Node, Any] = {}
        self.open: list[OpenBlock] = []
        self.inputs: list[Node] = []
        self._odd_names = odd_names
        self._saved: dict[int, Tensor] = {}
        self._owned: set[int] = set()
        self._keeps_leaves = keeps_leaves
        self._leaves: set[int] = set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Runs nodes inside the block as in a call: grad on, no other mode, the same random numbers."""
        hooks = saved_tensors_hooks(self._record_saved, lambda nothing: nothing)
        found = read_ambient()
        with torch.enable_grad(), hooks:
            torch.default_generator.manual_seed(0)
            try:
                yield
            finally:
                for block in reversed(self.open):
                    if block.leave is EXIT_INFERENCE and isinstance(block.handle, Node):
                        block.leave(self.values[block.handle])
                # Blocks that were exited in another order than entered leave modes behind.
                restore_autocast(found)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A call of a function."""
        return self._add("call_function", target, target, args, kwargs)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Node:
        """A call of a method of the first argument."""
        return self._add(
            "call_method", name, lambda owner, *rest, **named: getattr(owner, name)(*rest, **named), args, kwargs
        )

    def apply(self, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Node:
        """A call of a function, or of the method of this name."""
        return self.method(target, *args, **kwargs) if isinstance(target, str) else self.call(target, *args, **kwargs)

    def module(self, entry: str, *args: Any, **kwargs: Any) -> Node:
        """A call of a module of the state."""
        self.state.need(entry)
        return self._add("call_module", entry, self.state.root.get_submodule(entry), args, kwargs)

    def attribute(self, path: str) -> Node:
        """A read of a parameter, a buffer or a module of the state."""
        self.state.need(ATTRIBUTES.get(path, path))
        value: Any = self.state.root
        for part in path.split("."):
            value = getattr(value, part)
        if isinstance(value, Tensor):
            self._owned.add(_storage(value))
            self._record_leaf(value)
        return self._add("get_attr", path, lambda: value, (), {})

    def enter(self, toggle: Any, *args: Any, deepest: int, **kwargs: Any) -> None:
        """Enters a block, unless `deepest` blocks are open."""
        if len(self.open) >= deepest:
            raise UnfitError("enough blocks are open")
        self.open.append(OpenBlock(EXITS[toggle], self.call(toggle, *args, **kwargs)))

    def receive(self, node: Node, value: object) -> None:
        """Adds a placeholder and its value."""
        self.values[node] = value
        self.inputs.append(node)
        if isinstance(value, Tensor):
            self._record_leaf(value)

    def hide(self, node: Node) -> None:
        """Excludes the value of `node` from later steps."""
        del self.values[node]

    def tensor(self, pick: int, suits: Callable[[Tensor], bool] = lambda value: True) -> Node:
        """A floating-point tensor that suits, counted back from the newest."""
        return self.choose(pick, self.tensors(suits))

    def matrix(self, pick: int) -> Node:
        """A tensor of the shape that modules take."""
        return self.tensor(pick, lambda value: value.shape == (4, 6))

    def like(self, node: Node, pick: int) -> Node:
        """A tensor of the same shape as `node`, perhaps `node` itself."""
        shape = self.values[node].shape
        return self.tensor(pick, lambda value: value.shape == shape)

    def mutable(self, pick: int) -> Node:
        """A tensor that may be mutated, since its storage is not saved for backward."""
        return self.tensor(pick, self.may_mutate)

    def may_mutate(self, value: Tensor) -> bool:
        """Whether the storage of `value` holds nothing that is saved for backward, and no leaf that must be kept."""
        # Inside of a block autocast goes on with the cast that a leaf had before: the page on limits has more.
        keeps_leaves = self._keeps_leaves or any(block.leave is EXIT_AUTOCAST for block in self.open)
        return _storage(value) not in self._saved and not (keeps_leaves and _storage(value) in self._leaves)

    def outlives_call(self, node: Node) -> bool:
        """Whether the tensor belongs to the state, so that no gradient may flow into it from one call to the next."""
        return _storage(self.values[node]) in self._owned

    def tensors(self, suits: Callable[[Tensor], bool] = lambda value: True) -> list[Node]:
        """All floating-point tensors that suit, in graph order."""
        return [n for n, v in self.values.items() if isinstance(v, Tensor) and v.is_floating_point() and suits(v)]

    def valued(self, *types: type) -> list[Node]:
        """All nodes whose value is of exactly one of these types, in graph order."""
        return [node for node, value in self.values.items() if type(value) in types]

    def choose(self, pick: int, nodes: list[Node]) -> Node:
        """One of `nodes`, counted back from the newest."""
        if not nodes:
            raise UnfitError("nothing suits")
        return nodes[-1 - pick % len(nodes)]

    def _add(
        self, op: str, target: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Node:
        lookup = self.values.__getitem__
        try:
            value = run(*map_arg(args, lookup), **map_arg(kwargs, lookup))
        except (RuntimeError, TypeError, ValueError, IndexError) as refusal:
            raise UnfitError(f"{op} {target}: {refusal}") from refusal
        node = self.graph.create_node(op, target, args, kwargs, name=self._odd_name())
        self.values[node] = value
        return node

    def _record_leaf(self, value: Tensor) -> None:
        if value.requires_grad:
            self._leaves.add(_storage(value))

    def _odd_name(self) -> str | None:
        if not self._odd_names or len(self.values) % (self._odd_names + 1):
            return None
        return _ODD_NAMES[len(self.values) % len(_ODD_NAMES)]

    def _record_saved(self, saved: Tensor) -> None:
        # Kept alive, so that no later tensor can have the same address.
        self._saved[_storage(saved)] = saved.detach()


#: The function that exits a block, by the one that enters it.
EXITS: Mapping[Any, Callable[[Any], object]] = {ENTER_AUTOCAST: EXIT_AUTOCAST, ENTER_INFERENCE: EXIT_INFERENCE}

#: What each kind of step adds to a draft.
Steps: TypeAlias = Mapping[str, Callable[[Draft, Picks], object]]


def _storage(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
