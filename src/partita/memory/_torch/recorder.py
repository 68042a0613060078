"""Records what a training step allocates and frees: every operator, every storage, forward and backward.

Real tensors and fake ones are recorded alike: a storage is allocated when an operator returns it, and freed when torch
frees it. What a kernel allocates and frees inside is not seen; on a GPU, what is known of it counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from partita._torch.pytrees import tensors_in
from partita._torch.symbolic_shapes import hint_of
from partita.memory._torch.workspaces import workspace_bytes
from partita.program._torch.saved_tensors import flop_formula

#: Dynamo does not trace this module: it watches what runs.
DYNAMO_SKIPS = True


@final
@dataclass(slots=True)
class Allocation:
    """One storage: its bytes, the operator and the node that made it, and when it was allocated and freed."""

    bytes: int
    operator: str
    node: str
    path: str
    born: int
    #: The number of the operator after which it was freed; None if it is still allocated.
    died: int | None = None
    #: Whether a kernel allocates it inside, and frees it before it returns.
    is_workspace: bool = False


@final
@dataclass(frozen=True, slots=True)
class Ran:
    """One operator that ran: for which node, in which half, and the work that it did."""

    operator: str
    node: str
    path: str
    #: "forward", "recompute" or "backward".
    phase: str
    #: The bytes that are allocated when it returns, without what was never counted.
    allocated: int
    flops: int
    moved_bytes: int
    is_attention: bool


@final
@dataclass(slots=True)
class Record:
    """Everything that was recorded, in order."""

    ran: list[Ran] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    allocated: int = 0
    peak: int = 0

    def alive_at(self, number: int) -> list[Allocation]:
        """What is allocated when operator `number` has returned."""
        return [one for one in self.allocations if one.born <= number and (one.died is None or one.died > number)]


class Recorder(TorchDispatchMode):
    """Records the operators that run inside, and the storages that they return.

    `node` and `path` name the node whose operators run. Without them, names are taken from the operators of `script`,
    an earlier record of the same code, in order.
    """

    def __init__(self, *, script: Sequence[Ran] = (), rounding: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = Record()
        self.node, self.path = "", ""
        self._script, self._next = script, 0
        self._rounding = rounding
        self._known: dict[int, weakref.ref[Any]] = {}
        self._entries: dict[int, Allocation] = {}
        self._never_counted: dict[int, Any] = {}
        #: The node whose operators each autograd function belongs to, by the sequence number of the function.
        self._named: dict[int, tuple[str, str]] = {}

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Does not count the storages of these tensors."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._never_counted[storage._cdata] = storage

    def count(self, tensors: Iterable[Tensor], node: str = "", path: str = "") -> tuple[Allocation, ...]:
        """Counts the storages of these tensors as allocated, those that are not yet."""
        known = len(self.record.allocations)
        for tensor in tensors:
            self._allocate(tensor, "", node, path)
        return tuple(self.record.allocations[known:])

    def storage_of(self, value: object) -> Allocation | None:
        """The storage of a tensor, if it counts."""
        return self._entries.get(value.untyped_storage()._cdata) if isinstance(value, Tensor) else None

    def watch(self, value: object) -> Callable[[], bool]:
        """A function that says whether the storage of a tensor is still allocated."""
        if not isinstance(value, Tensor):
            return bool
        storage = weakref.ref(value.untyped_storage())
        return lambda: storage() is not None

    def note_resized(self) -> None:
        """Counts the bytes that storages have now, where they were resized."""
        for key, reference in self._known.items():
            storage, entry = reference(), self._entries[key]
            size = entry.bytes if storage is None else self._rounded(storage)
            if size != entry.bytes:
                self.record.allocated += size - entry.bytes
                self.record.peak = max(self.record.peak, self.record.allocated)
                entry.bytes = size

    def start_again(self) -> None:
        """Names operators from the beginning of the script again."""
        self._next = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if getattr(func, "namespace", "") == "prim":  # Device queries of fake tensors, which are frequent.
            return result
        node, path, phase = self._place(str(func))
        made = tensors_in(result)
        allocates = [self._allocate(tensor, str(func), node, path) for tensor in made]
        works = any(allocates) or func._schema.is_mutable
        read = tensors_in((args, kwargs)) if works else []
        inside = self._note_workspace(workspace_bytes(func, args, result), str(func), node, path)
        self.record.ran.append(
            Ran(
                str(func),
                node,
                path,
                phase,
                self.record.allocated + inside,
                _flops(func, args, kwargs, result),
                sum(map(_bytes_of, (*read, *made))) if works else 0,
                "attention" in str(func),
            )
        )
        return result

    def _place(self, operator: str) -> tuple[str, str, str]:
        """The node, its path, and the half that an operator runs in."""
        function = torch._C._current_autograd_node()
        if function is not None and not torch.is_grad_enabled():
            return *self._named.get(function._sequence_nr(), ("", "")), "backward"
        if not self.node:
            self._follow(operator)
        node, path = (self.node, self.path) if self.node else self._scripted()
        if function is None:
            # Autograd makes the function of an operator just before it calls the operator's kernel.
            self._named[torch.autograd._get_sequence_nr() - 1] = node, path
        return node, path, "forward" if function is None else "recompute"

    def _follow(self, operator: str) -> None:
        """Goes on to the next operator of this name in the script; a recomputation skips some.

        An operator that does no work, a view or a `detach`, skips none that does: recomputation makes more of these
        than there are in the script.
        """
        skips_work = False
        for place in (*range(self._next, len(self._script)), *range(min(self._next, len(self._script)))):
            ran = self._script[place]
            if ran.operator == operator:
                if ran.moved_bytes or not skips_work:
                    self._next = place + 1
                return
            skips_work = skips_work or ran.moved_bytes > 0

    def _scripted(self) -> tuple[str, str]:
        if not 0 < self._next <= len(self._script):
            return "", ""
        return self._script[self._next - 1].node, self._script[self._next - 1].path

    def _allocate(self, tensor: Tensor, operator: str, node: str, path: str) -> bool:
        """Counts the storage of a tensor; false if it is known."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # Sparse and opaque tensors have none of their own.
            return False
        key = storage._cdata
        if key in self._known or key in self._never_counted:
            return False
        size = self._rounded(storage)
        entry = Allocation(size, operator, node, path, len(self.record.ran))
        record, known, entries = self.record, self._known, self._entries

        def freed(_: object) -> None:
            entry.died = len(record.ran)
            record.allocated -= entry.bytes
            known.pop(key, None)
            entries.pop(key, None)

        known[key] = weakref.ref(storage, freed)
        entries[key] = entry
        record.allocations.append(entry)
        record.allocated += size
        record.peak = max(record.peak, record.allocated)
        return True

    def _note_workspace(self, size: int, operator: str, node: str, path: str) -> int:
        """Counts what a kernel allocates inside as allocated until the operator has returned."""
        if size:
            record, number = self.record, len(self.record.ran)
            found = Allocation(size, f"workspace of {operator}", node, path, number, number + 1, is_workspace=True)
            record.allocations.append(found)
            record.peak = max(record.peak, record.allocated + size)
        return size

    def _rounded(self, storage: Any) -> int:
        return -(-int(hint_of(storage.nbytes())) // self._rounding) * self._rounding


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    formula = flop_formula(func)
    if formula is None:
        return 0
    try:
        return int(hint_of(formula(*args, **kwargs, out_val=result)))
    except Exception:  # A formula may reject arguments with any error; the operator then counts by its bytes.
        return 0


def _bytes_of(tensor: Tensor) -> int:
    return int(hint_of(tensor.numel())) * tensor.element_size()


# Borders of a segment that runs alone: its inputs have a history, and its outputs get gradients, as inside the model.


class _Enter(torch.autograd.Function):
    """Makes an input of a segment, and takes its gradient as the segment before would."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, make: Any, taken: list[Tensor]) -> Any:
        ctx.taken = taken
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.taken.extend(gradients)
        return None, None, None


class _Leave(torch.autograd.Function):
    """Makes the gradients of the outputs of a segment when its backward begins."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Any:
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in outputs]
        ctx.set_materialize_grads(False)
        # Of one type, so that it takes as much beside every segment as beside the whole step.
        return outputs[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def enter(leaf: Tensor, make: Any, taken: list[Tensor]) -> Tensor:
    """What `make` returns, as a tensor with a history; its gradient is appended to `taken`."""
    entered: Tensor = _Enter.apply(leaf, make, taken)  # type: ignore[no-untyped-call]
    return entered


def leave(outputs: Sequence[Tensor]) -> Tensor:
    """A number whose backward gives each of these outputs a new gradient."""
    left: Tensor = _Leave.apply(*outputs)  # type: ignore[no-untyped-call]
    return left


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Inside, the backward runs on this thread, where a recorder sees it."""
    with ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield
