"""Records one training step of several compiled graphs: which storages pass between calls, and when they are freed.

Nothing that is recorded keeps a tensor alive. What uncompiled code between the calls allocates for itself is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from partita.memory.joint.step import RecordedCall, RecordedStep, RecordedValue

#: Dynamo does not trace this module: it watches what runs.
DYNAMO_SKIPS = True


@final
@dataclass(slots=True)
class _Storage:
    """A storage that a call got or returned."""

    reference: weakref.ref[Any]
    bytes: int
    first: int
    is_parameter: bool
    requires_grad: bool
    gradient_bytes: int
    sizes: list[int] = field(default_factory=list)


_PLAIN = (Tensor, torch.nn.Parameter)


@final
class StepRecorder:
    """The calls of one step as they run, and the bytes of all known storages when each half of a call begins."""

    def __init__(self, device: torch.device | None, allocated: int, *, to_come: int = 0) -> None:
        #: A GPU whose memory is planned; the memory of other devices does not count then.
        self._device = device
        #: What the device had allocated before the step, if it counts that, and what an optimizer will allocate.
        self._allocated, self._to_come = allocated, to_come
        self._freed: dict[int, int] = {}
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._calls: list[tuple[int, tuple[int | None, ...], tuple[int | None, ...]]] = []
        self._moments: list[tuple[int, bool]] = []
        self._storages: list[_Storage] = []
        self._number: dict[int, int] = {}

    def forward_begins(self, part: int, arguments: Iterable[object], model: torch.nn.Module | None) -> None:
        """A call begins; the parameters and buffers of the model around it are allocated, read or not."""
        self._moments.append((len(self._calls), True))
        self._calls.append((part, self._numbers(arguments), ()))
        if model is not None and model not in self._models:
            self._models.add(model)
            # Shards of parameters are part of communication.
            self._numbers(one for one in (*model.parameters(), *model.buffers()) if type(one) in _PLAIN)
        self._note_sizes()

    def forward_ended(self, call: int, results: Iterable[object]) -> None:
        part, arguments, _ = self._calls[call]
        # Results are allocated from the next moment on.
        self._calls[call] = part, arguments, self._numbers(results, first=len(self._moments))

    def backward_begins(self, call: int) -> None:
        self._moments.append((call, False))
        self._note_sizes()

    def freed(self, call: int) -> None:
        """What a call has saved was freed without its backward."""
        self._freed[call] = len(self._moments)

    def finished(self) -> RecordedStep:
        """What was recorded, in numbers."""
        count = len(self._moments)
        values = tuple(
            RecordedValue(
                one.bytes,
                (*(0 for _ in range(one.first)), *one.sizes)[:count],
                min(one.first, count),
                one.is_parameter,
                one.requires_grad,
                one.gradient_bytes,
            )
            for one in self._storages
        )
        known = sum(value.sizes[0] + value.gradient_bytes for value in values if count)
        other = max(self._allocated - known, 0) + self._to_come
        ran = {call for call, is_forward in self._moments if not is_forward}
        calls = (
            RecordedCall(*call, None if number in ran else self._freed.get(number))
            for number, call in enumerate(self._calls)
        )
        return RecordedStep(tuple(calls), tuple(self._moments), values, other)

    def _numbers(self, values: Iterable[object], first: int | None = None) -> tuple[int | None, ...]:
        at = len(self._moments) - 1 if first is None else first
        return tuple(self._number_of(value, at) if isinstance(value, Tensor) else None for value in values)

    def _number_of(self, tensor: Tensor, first: int) -> int | None:
        if self._device is not None and tensor.device != self._device:
            return None
        try:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
        except (NotImplementedError, RuntimeError):  # Sparse and opaque tensors have none of their own.
            return None
        number = self._number.get(key)
        if number is not None:
            known = self._storages[number]
            if known.reference() is storage:
                known.bytes = max(known.bytes, size)
                known.requires_grad |= tensor.requires_grad
                return number
        gradient = tensor.grad if tensor.is_leaf and tensor.requires_grad else None
        self._number[key] = len(self._storages)
        self._storages.append(
            _Storage(
                weakref.ref(storage),
                size,
                first,
                isinstance(tensor, torch.nn.Parameter) or (tensor.is_leaf and tensor.requires_grad),
                tensor.requires_grad,
                0 if gradient is None else gradient.untyped_storage().nbytes(),
            )
        )
        return self._number[key]

    def _note_sizes(self) -> None:
        for one in self._storages:
            storage = one.reference()
            one.sizes.append(0 if storage is None else storage.nbytes())
