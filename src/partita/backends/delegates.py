"""Stored functions of backends, as the operator `partita::delegate` runs them.

The bytes are data of the program. What the function takes and returns is a JSON text, an argument of the operator,
which is checked before anything runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any, NoReturn, TypeAlias, final
from weakref import ref

import torch
from torch import Tensor

from partita._torch.dry_runs import refusal_of_device
from partita._torch.expressions import (
    Evaluator,
    Expression,
    ExpressionError,
    Operation,
    Read,
    Symbol,
    evaluator,
    parsed,
    substituted,
)
from partita._torch.modes import in_forward_mode
from partita._torch.tensors import may_repeat_elements
from partita.backends.backend import Backend, Compiled, find_backend
from partita.errors import BackendError, OptionError
from partita.program._torch.guards import functions_of_conditions
from partita.program.exported import file_of

#: The version of the JSON text; another one is refused.
FORMAT = 1

#: A number, or an expression in the symbols of a delegate.
Number: TypeAlias = int | str


@final
@dataclass(frozen=True, slots=True)
class TensorForm:
    """The metadata of an input or output: sizes and strides are numbers or expressions in symbols."""

    dtype: str
    device: str
    sizes: tuple[Number, ...]
    strides: tuple[Number, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise BackendError(f"{self.dtype!r} is no dtype")
        return found


@final
@dataclass(frozen=True)
class DelegateSpec:
    """What a stored function is: of which region and backend, what it takes and returns, and when it may be called.

    `symbols` are the places of sizes: the number of an input, and an axis of it, or -1 where the input is a number.
    """

    region: str
    backend: str
    version: str
    inputs: tuple[TensorForm | Number, ...]
    outputs: tuple[TensorForm, ...]
    symbols: Mapping[str, tuple[int, int]]
    conditions: tuple[str, ...]
    #: The autocast blocks around the region: device type, dtype, enabled.
    autocast: tuple[tuple[str, str | None, bool], ...] = ()

    def text(self) -> str:
        """The JSON text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)

    @classmethod
    def of(cls, text: str) -> DelegateSpec:
        """The specification in a text; raises `BackendError` where it is none."""
        try:
            read = json.loads(text)
            if read.pop("format") != FORMAT:
                raise BackendError(f"its format is not {FORMAT}; it was written by another version of Partita")
            forms = [one if type(one) in (int, str) else _form(one) for one in read.pop("inputs")]
            symbols = {str(name): (int(at), int(axis)) for name, (at, axis) in read.pop("symbols").items()}
            outputs, conditions = tuple(map(_form, read.pop("outputs"))), tuple(map(str, read.pop("conditions")))
            autocast = tuple(_block(*block) for block in read.pop("autocast"))
            names = {name: str(read.pop(name)) for name in ("region", "backend", "version")}
            spec = cls(
                **names,
                inputs=tuple(forms),
                outputs=outputs,
                symbols=symbols,
                conditions=conditions,
                autocast=autocast,
            )
            _ = spec.checks, spec.shapes, spec.numbers
        except BackendError as error:
            raise BackendError(f"a delegate cannot be read: {error}") from None
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
            raise BackendError(f"a delegate cannot be read: {type(error).__name__}: {error}") from None
        if read:
            raise BackendError(f"a delegate cannot be read: it has unknown entries {sorted(read)}")
        return spec

    def is_for(self, inputs: Sequence[Any], numbers: Sequence[Any]) -> bool:
        """Whether the sizes of inputs satisfy the conditions under which the function was compiled."""
        return all(self._computed(self.checks, inputs)) and self._computed(self.numbers, inputs) == list(numbers)

    @cached_property
    def checks(self) -> tuple[Evaluator, ...]:
        """The conditions, as computed from the inputs."""
        return tuple(self._evaluator(condition) for condition in self.conditions)

    @cached_property
    def shapes(self) -> tuple[tuple[list[Evaluator], list[Evaluator]], ...]:
        """How the sizes and strides of each tensor are computed from the inputs; inputs first, then outputs."""
        forms = (*self.tensors, *self.outputs)
        both = [
            ([self._evaluator(one) for one in form.sizes], [self._evaluator(one) for one in form.strides])
            for form in forms
        ]
        return tuple(both)

    @cached_property
    def tensors(self) -> tuple[TensorForm, ...]:
        """The inputs that are tensors."""
        return tuple(form for form in self.inputs if isinstance(form, TensorForm))

    @cached_property
    def numbers(self) -> tuple[Evaluator, ...]:
        """The inputs that are numbers, as computed from all inputs."""
        return tuple(self._evaluator(form) for form in self.inputs if not isinstance(form, TensorForm))

    def shape(self, place: int, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The sizes and strides of a tensor, inputs first, for these inputs."""
        sizes, strides = self.shapes[place]
        return self._computed(sizes, inputs), self._computed(strides, inputs)

    def _computed(self, evaluators: Sequence[Evaluator], inputs: Sequence[Any]) -> list[Any]:
        try:
            return [compute(inputs) for compute in evaluators]
        except (ArithmeticError, IndexError, TypeError, ValueError) as error:
            raise BackendError(f"region {self.region!r}: a size of its specification has no value: {error}") from error

    def _evaluator(self, number: Number) -> Evaluator:
        if isinstance(number, int):
            return lambda inputs: number
        expression = parsed(number, letters=2_000, operations=100)
        _check_functions(expression)
        return evaluator(substituted(expression, self._place), functions_of_conditions())

    def _place(self, part: Symbol | Read) -> Expression:
        if not isinstance(part, Symbol) or part.name not in self.symbols:
            raise ExpressionError(f"{part!r} is no symbol of it")
        at, axis = self.symbols[part.name]
        if not 0 <= at < len(self.inputs) or isinstance(self.inputs[at], TensorForm) is (axis < 0):
            raise ExpressionError(f"{part.name!r} is at no input")
        return Read(at) if axis < 0 else Read(at, "size", axis)


def _check_functions(expression: Expression) -> None:
    """Raises for a function whose result may be out of proportion, such as a power."""
    if isinstance(expression, Operation):
        if expression.name not in _FUNCTIONS:
            raise ExpressionError(f"{expression.name!r} has no place in a size")
        for operand in expression.operands:
            _check_functions(operand)


_FUNCTIONS = frozenset(
    (
        *("+", "-", "*", "//", "%", "neg", "max", "min", "==", "!=", "<", "<=", ">", ">=", "and", "or", "not"),
        *("torch.sym_max", "torch.sym_min", "Mod", "PythonMod", "FloorDiv", "Max", "Min"),
    )
)
#: The most axes of a tensor.
_MOST_AXES = 64


def _block(device: object, dtype: object, enabled: object) -> tuple[str, str | None, bool]:
    if not isinstance(device, str) or not isinstance(enabled, bool) or not isinstance(dtype, str | None):
        raise BackendError(f"{(device, dtype, enabled)} is no autocast block")
    if dtype is not None and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise BackendError(f"{dtype!r} is no dtype")
    return device, dtype, enabled


def _form(read: Any) -> TensorForm:
    form = TensorForm(
        str(read.pop("dtype")), str(read.pop("device")), *(tuple(read.pop(key)) for key in ("sizes", "strides"))
    )
    numbers = (*form.sizes, *form.strides)
    is_plain = all(type(one) is str or (type(one) is int and one >= 0) for one in numbers)
    if read or len(form.sizes) != len(form.strides) or len(form.sizes) > _MOST_AXES or not is_plain:
        raise BackendError(f"{str(form)[:200]} is no metadata of a tensor")
    why = refusal_of_device(torch.device(form.device))
    if why is not None:
        raise BackendError(why)
    _ = form.torch_dtype
    return form


def backend_of(spec: DelegateSpec) -> Backend:
    """The backend that runs a delegate; raises where it is missing."""
    try:
        found = find_backend(spec.backend)
    except OptionError:
        raise BackendError(
            f"region {spec.region!r} was compiled by the backend {spec.backend!r}, which is not installed here; "
            "install the package that has it, or register it with partita.backends.register_backend"
        ) from None
    if not can_store(found):
        raise BackendError(f"region {spec.region!r} needs the backend {spec.backend!r}, which has no `load`")
    if not _reads_version(found, spec.version):
        raise BackendError(
            f"region {spec.region!r} was stored by version {spec.version!r} of the backend {spec.backend!r}, and here "
            f"is version {version_of(found)!r}, which does not read it; install that version, or delegate the original "
            "program again"
        )
    return found


def _reads_version(backend: Backend, version: str) -> bool:
    """Whether `load` takes what another version has stored: only the same, unless the backend says otherwise."""
    if not version or not version_of(backend) or version == version_of(backend):
        return True
    reads = getattr(backend, "reads_version", None)
    return callable(reads) and bool(reads(version))


def can_store(backend: Backend) -> bool:
    """Whether the functions of a backend can be stored as bytes."""
    return callable(getattr(backend, "save", None)) and callable(getattr(backend, "load", None))


# The operator ----------------------------------------------------------------------------------------------------

_spec_of = lru_cache(maxsize=1024)(DelegateSpec.of)


@final
class _Loaded:
    """The functions of blobs, as long as these live."""

    def __init__(self) -> None:
        self._functions: dict[tuple[int, str], tuple[ref[Tensor], int, Compiled]] = {}
        self._lock = Lock()

    def function(self, spec: DelegateSpec, blob: Tensor) -> Compiled:
        """The function that a backend has stored in a blob, loaded at its first call."""
        key = id(blob), spec.backend
        known = self._functions.get(key)
        if known is not None and known[0]() is blob and known[1] == blob.data_ptr():
            return known[2]
        with self._lock:
            other = self._functions.get(key)
            if other is not None and other is not known:
                return other[2]  # Another thread has loaded it.
            function = _load(spec, blob)
            gone = ref(blob, lambda _: self._functions.pop(key, None))
            self._functions[key] = (gone, blob.data_ptr(), function)
        return function


def _load(spec: DelegateSpec, blob: Tensor) -> Compiled:
    backend: Any = backend_of(spec)
    if blob.dtype is not torch.uint8 or blob.dim() != 1:
        raise BackendError(f"region {spec.region!r}: what is stored are no bytes")
    data = blob.detach().cpu().contiguous().numpy().tobytes()
    try:
        found = backend.load(data)
    except Exception as error:
        raise BackendError(
            f"region {spec.region!r}{_of_file(blob)}: {spec.backend} cannot load what it has stored (version "
            f"{spec.version!r}; here {version_of(backend)!r}): {error}"
        ) from error
    if not callable(found):
        raise BackendError(
            f"region {spec.region!r}{_of_file(blob)}: `load` of {spec.backend} returned {found!r}, which is not "
            "callable"
        )
    return found  # type: ignore[no-any-return]


def _of_file(blob: Tensor) -> str:
    file = file_of(blob)
    return "" if file is None else f" of the file {file!r}"


def version_of(backend: object) -> str:
    """The version that a backend declares, if it does."""
    return str(getattr(backend, "version", ""))


_LOADED = _Loaded()


def _combined(spec: DelegateSpec, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> list[Any]:
    if (len(tensors), len(numbers)) != (len(spec.tensors), len(spec.numbers)):
        raise BackendError(
            f"region {spec.region!r} takes {len(spec.tensors)} tensors and {len(spec.numbers)} numbers, not "
            f"{len(tensors)} and {len(numbers)}"
        )
    left = [iter(numbers), iter(tensors)]
    return [next(left[isinstance(form, TensorForm)]) for form in spec.inputs]


def run(blob: Tensor, spec: str, tensors: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
    """Runs a stored function, after a check that it was compiled for such inputs."""
    found = _spec_of(spec)
    inputs = _combined(found, tensors, numbers)
    for form, tensor in zip(found.tensors, tensors, strict=True):
        if tensor.dtype is not form.torch_dtype or tensor.dim() != len(form.sizes):
            raise BackendError(
                f"region {found.region!r} was compiled for {form.dtype} with {len(form.sizes)} axes, not for "
                f"{str(tensor.dtype).removeprefix('torch.')} with {tensor.dim()}"
            )
    for place, tensor in enumerate(tensors):
        if list(tensor.shape) != found.shape(place, inputs)[0]:
            raise BackendError(f"region {found.region!r} was not compiled for an input of shape {tuple(tensor.shape)}")
    if not found.is_for(inputs, numbers):
        raise BackendError(
            f"region {found.region!r} was not compiled for these sizes; it holds where {', '.join(found.conditions)}"
        )
    laid_out = [_input_laid_out(found, tensor, found.shape(place, inputs)[1]) for place, tensor in enumerate(tensors)]
    _check_modes(found, tensors)
    function = _LOADED.function(found, blob)
    with torch.no_grad(), ExitStack() as modes:
        for device, dtype, enabled in found.autocast:
            modes.enter_context(torch.autocast(device, None if dtype is None else getattr(torch, dtype), enabled))
        outputs = function(*_combined(found, laid_out, numbers))
    return _checked(found, outputs, laid_out, len(tensors), inputs)


def _check_modes(spec: DelegateSpec, tensors: Sequence[Tensor]) -> None:
    """Raises in modes that eager mode would follow, and a stored function cannot."""
    known = {device for device, _, _ in spec.autocast}
    for device in {tensor.device.type for tensor in tensors} - known:
        if torch.is_autocast_enabled(device):
            raise BackendError(
                f"region {spec.region!r} was compiled without autocast on {device}; call the program outside of it, or "
                "put the block into the model"
            )
    if in_forward_mode():
        raise BackendError(f"region {spec.region!r} is a delegate, through which no tangents flow")


def _checked(
    spec: DelegateSpec, outputs: Any, tensors: Sequence[Tensor], first: int, inputs: Sequence[Any]
) -> list[Tensor]:
    """The outputs in memory of their own, with the layout that was traced."""
    if not isinstance(outputs, tuple | list) or len(outputs) != len(spec.outputs):
        raise BackendError(f"region {spec.region!r}: {spec.backend} does not return {len(spec.outputs)} outputs")
    memories = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    made = []
    for place, (output, form) in enumerate(zip(outputs, spec.outputs, strict=True)):
        sizes, strides = spec.shape(first + place, inputs)
        if not isinstance(output, Tensor) or output.dtype is not form.torch_dtype or list(output.shape) != sizes:
            raise BackendError(f"region {spec.region!r}: {spec.backend} does not return {form} as output {place}")
        memory = output.untyped_storage().data_ptr()
        made.append(_laid_out(output.clone() if memory in memories else output, strides))
        memories.add(memory)
    return made


def _input_laid_out(spec: DelegateSpec, tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """The same for an input, whose elements need not be equal where those of the traced one share memory."""
    if not _has_strides(tensor, strides) and may_repeat_elements(tensor.shape, strides):
        raise BackendError(
            f"region {spec.region!r} was compiled for an input of strides {tuple(strides)}, whose elements share "
            f"memory, and not for strides {tensor.stride()}; capture the program with a contiguous one"
        )
    return _laid_out(tensor, strides)


def _laid_out(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """The tensor with these strides; a copy where it has others along axes of more than one element.

    Elements that share memory in that layout, as those of an expanded tensor do, must be equal.
    """
    if _has_strides(tensor, strides):
        return tensor
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    written = made
    for axis, stride in enumerate(strides):
        if stride == 0 and tensor.shape[axis] > 1:
            tensor, written = tensor.narrow(axis, 0, 1), written.narrow(axis, 0, 1)
    if not may_repeat_elements(tensor.shape, strides):
        written.copy_(tensor)
        return made
    # torch refuses to copy into windows that overlap: each element is written by its place in memory.
    extent = made.untyped_storage().nbytes() // made.element_size()
    places = torch.arange(extent, device=made.device).as_strided(tensor.shape, strides).reshape(-1)
    made.as_strided((extent,), (1,)).index_put_((places,), tensor.reshape(-1))
    return made


def _has_strides(tensor: Tensor, strides: Sequence[int]) -> bool:
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(size <= 1 or own == wanted for size, own, wanted in pairs)


def run_fake(blob: Tensor, spec: str, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> list[Tensor]:
    """Tensors like the outputs, for fake inputs."""
    found = _spec_of(spec)
    inputs = _combined(found, tensors, numbers)
    made = []
    for place, form in enumerate(found.outputs):
        sizes, strides = found.shape(len(tensors) + place, inputs)
        made.append(torch.empty_strided(sizes, strides, dtype=form.torch_dtype, device=torch.device(form.device)))
    return made


def refuse_gradients(spec: str) -> NoReturn:
    """What the backward of the operator does."""
    region = _spec_of(spec).region
    raise BackendError(
        f"region {region!r} is a delegate, through which no gradients flow; call the program under no_grad"
    )


def refusal_of_spec(text: str) -> str | None:
    """Why a file with this text cannot be loaded here; None if it can."""
    try:
        backend_of(DelegateSpec.of(text))
    except BackendError as error:
        return str(error)
    return None
