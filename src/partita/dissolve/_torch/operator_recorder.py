"""Records the operators that a call dispatches below autograd and autocast, and their operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from partita._torch.dry_runs import Allowance
from partita._torch.fake_tensors import fake_mode_of
from partita._torch.pytrees import leaves_of, map_leaves, map_tensors, tensors_in
from partita.dissolve._torch.sandbox import TensorMetadata

_CAST = torch.ops.aten._to_copy.default
_DETACH = torch.ops.aten.detach.default


@dataclass(frozen=True, slots=True)
class Label:
    """Identifies a tensor of a recorded call; `text` is the same in every run of the same call."""

    text: str
    serial: int = 0
    #: Whether the tensor is an input of the call.
    is_input: bool = False
    #: The source, where the tensor is only a cast of an input of a call.
    cast_of: Label | None = None

    def __repr__(self) -> str:
        return f"<{self.text}>"


@dataclass(frozen=True, slots=True)
class Step:
    """An operator that ran, with labels in place of tensors."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    #: Of each tensor of the result, in order.
    metadata: tuple[TensorMetadata, ...]
    #: Whether gradients were recorded.
    grad: bool
    #: Everything that must be the same for two steps to compute the same.
    text: str

    @property
    def cast(self) -> Label | None:
        """The result of the step, where it only casts an input of the call."""
        return self.result if isinstance(self.result, Label) and self.result.cast_of is not None else None


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """The steps of a call, and its result with labels in place of tensors, or the error that it raised."""

    steps: tuple[Step, ...]
    result: Any
    metadata: tuple[TensorMetadata, ...]
    error: Exception | None

    def text(self, first: int = 0) -> list[str]:
        """What must be equal for two recorded calls to compute the same, from one step on."""
        raised = "" if self.error is None else type(self.error).__name__
        result = map_leaves(_without_symbol, self.result)
        return [*(step.text for step in self.steps[first:]), repr(result), repr(self.metadata), raised]


def _without_symbol(leaf: Any) -> Any:
    """A number that is read from a tensor is another symbol in each run; it follows from the steps."""
    return type(leaf) if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) else leaf


class OperatorRecorder:
    """Records calls in turn; casts that autocast has cached in earlier ones keep their labels."""

    def __init__(self, allowance: Allowance) -> None:
        self.allowance = allowance
        # By the address of a tensor, not by object: keeping results alive would change what autograd does with them.
        # An address that is reused belongs to a new fake, which gets a new label before it is read.
        self._labels: dict[int, Label] = {}
        self._casts = 0

    def label(self, tensor: Tensor, label: Label) -> None:
        """Sets the label of `tensor` for the next calls."""
        self._labels[tensor._cdata] = label

    def known(self, tensor: Tensor) -> Label:
        """The label of a tensor; a real one among the fakes is a constant that the call has made itself."""
        known = None if fake_mode_of(tensor) is None else self._labels.get(tensor._cdata)
        return known or Label("constant", -1)

    def of(self, call: Callable[[], Any]) -> RecordedCall:
        """Runs `call` and records it."""
        recorder = _Recorder(self)
        result, error = None, None
        with recorder:
            try:
                result = call()
            except Exception as raised:
                error = raised
        labelled = map_tensors(self.known, result)
        steps = _without_unused_detach(recorder.steps, labelled)
        return RecordedCall(tuple(steps), labelled, tuple(map(TensorMetadata.of, tensors_in(result))), error)

    def fresh_cast(self, source: Label, text: str) -> Label:
        """A label for a new cast of `source`."""
        self._casts += 1
        return Label(text, self._casts, cast_of=source)


class _Recorder(TorchDispatchMode):
    """The steps of one call."""

    def __init__(self, recorder: OperatorRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self.steps: list[Step] = []
        self.results = 0
        self.casts: dict[Label, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # Queries for the device of fake tensors.
            return func(*args, **kwargs)
        self.recorder.allowance.spend(func, args, kwargs)
        labels, named = operands = map_tensors(self.recorder.known, (args, kwargs))
        metadata = tuple(map(TensorMetadata.of, tensors_in((args, kwargs))))
        grad = torch.is_grad_enabled()
        text = f"{func} {operands} {metadata} {grad}"
        result = func(*args, **kwargs)
        self._label_results(func, operands, result, read={tensor._cdata for tensor in tensors_in((args, kwargs))})
        made = map_tensors(self.recorder.known, result)
        self.steps.append(
            Step(func, labels, named, made, tuple(map(TensorMetadata.of, tensors_in(result))), grad, text)
        )
        return result

    def _label_results(self, func: Any, operands: Any, result: Any, *, read: set[int]) -> None:
        source = _cast_source(func, *operands)
        for tensor in tensors_in(result):
            if source is not None:
                count = self.casts[source] = self.casts.get(source, 0) + 1
                self.recorder.label(
                    tensor, self.recorder.fresh_cast(source, f"{source.text} as {tensor.dtype} ({count})")
                )
            elif tensor._cdata not in read:
                self.results += 1
                self.recorder.label(tensor, Label(f"result {self.results}"))


def labels_in(value: Any) -> Iterator[Label]:
    """The labels in a value, in order."""
    return (leaf for leaf in leaves_of(value) if isinstance(leaf, Label))


def _cast_source(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Label | None:
    """The input of the call that this step only casts."""
    if target is not _CAST or set(kwargs) != {"dtype"}:
        return None
    source: Label = args[0]
    return source if source.is_input else None


def _without_unused_detach(steps: Iterable[Step], result: Any) -> list[Step]:
    """The steps without unused `detach` calls, by which autograd saves a result."""
    read, kept = set(labels_in(result)), []
    for step in reversed(list(steps)):
        if step.target is _DETACH and step.result not in read:
            continue
        kept.append(step)
        read.update(labels_in((step.args, step.kwargs)))
    return kept[::-1]
