"""CUDA graphs of lowered regions: the kernels of a call are recorded once for its sizes, then replayed.

A replay reads and writes fixed memory. Parameters, buffers and inputs that the user declares static are read, and
mutated, where they are, so that a recording is for their addresses. All other tensors are copied into fixed memory
before a replay, and results out of it afterwards: what a caller gets is never overwritten.

Since nothing stays in the fixed memory between two replays, all recordings of a plan share it. They run one after the
other, in whatever thread and on whatever stream they are called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, final
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.fx import GraphModule, Node

from partita._torch.tensors import may_repeat_elements, unexpanded
from partita.analysis.effects.terms import Effects
from partita.errors import OptionError
from partita.lowering.config import Lowering
from partita.lowering.constants import is_state
from partita.lowering.signature import Call, Signature, TensorSpec, ValueSpec
from partita.lowering.variant import Cause, Variant
from partita.plans.compilations import Compilations
from partita.program.program import Program
from partita.regions import Region
from partita.rewrite.operator_calls import owned_inputs

log = logging.getLogger(__name__)

#: How many recordings a region keeps for one function; calls of further sizes run without.
MOST_RECORDINGS = 256


def static_inputs(body: GraphModule, region: Region, names: Sequence[str]) -> tuple[int, ...]:
    """The inputs of a region's body that stay where they are: state of modules, and inputs of the program by name."""
    program = region.surroundings()
    owned, chosen = owned_inputs(program), set(_named_inputs(program, names))
    static = {node.name for node in region.inputs() if node in owned or node in chosen or is_state(node, program)}
    return tuple(place for place, node in enumerate(body.graph.find_nodes(op="placeholder")) if node.name in static)


def assertions_in(body: GraphModule) -> frozenset[str]:
    """The nodes that only check something.

    Metadata are the same in every replay of a recording, and a check on the device is a kernel.
    """
    calls = body.graph.nodes
    return frozenset(node.name for node in calls if node.op == "call_function" and _asserts(node.target))


def _asserts(target: Any) -> bool:
    if str(target).startswith(("aten._assert", "aten.sym_constrain_range")):
        return True
    return getattr(target, "__module__", None) == "torch" and str(target.__name__).startswith(("_assert", "_check"))


def _named_inputs(program: Program, names: Sequence[str]) -> Iterator[Node]:
    # Dynamo calls the argument `ids` of a frame `l_ids_`.
    inputs = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    for name in names:
        found = inputs.get(name) or inputs.get(f"l_{name}_")
        if found is not None:
            yield found
        elif program.frame is None:
            raise OptionError(f"static_inputs names {name!r}, and the inputs of the program are {', '.join(inputs)}")
        else:  # It may be an input of another frame of the model.
            log.info("static_inputs names %r, which is no input of this graph: %s", name, ", ".join(inputs))


@final
class CudaGraphs:
    """The recordings of one region."""

    def __init__(self, lowering: Lowering) -> None:
        self._memory = _memory_of(lowering.compilations)
        #: They live as long as the functions that are recorded; None for those that cannot be.
        self._of_variants: WeakKeyDictionary[Variant, Recordings | None] = WeakKeyDictionary()

    def of(self, variant: Variant, call: Call, mutated: Sequence[int], lowering: Lowering) -> Recordings | None:
        """The recordings of the function that serves a call; None if there can be none, for a reason that is logged."""
        if variant not in self._of_variants:
            assert lowering.cuda_graphs is not None
            state = range(len(call.values) - len(call.slots), len(call.values))
            static = {*call.places_of(lowering.cuda_graphs.static_inputs), *state}
            static.update(place for place, value in enumerate(call.values) if isinstance(value, nn.Parameter))
            reason = refusal(variant, lowering, static=static, mutated=mutated)
            if reason is not None:
                self._memory.report(lowering.title, reason)
            sizes = lowering.cuda_graphs.sizes
            self._of_variants[variant] = (
                None
                if reason is not None
                else Recordings(variant, lowering.title, sizes, static=static, mutated=mutated, memory=self._memory)
            )
        return self._of_variants[variant]

    def __len__(self) -> int:
        return sum(len(known) for known in self._of_variants.values() if known is not None)


def refusal(variant: Variant, lowering: Lowering, *, static: set[int], mutated: Sequence[int]) -> str | None:
    """Why calls of a function cannot be recorded; None if they can."""
    signature, dry_run = variant.fit.signature, variant.dry_run
    elsewhere = off_gpu(signature)
    if elsewhere is not None:
        return elsewhere
    if signature.needs_gradients:
        return "a backward may follow; call it under torch.no_grad()"
    asserted = frozenset() if lowering.cuda_graphs is None else lowering.cuda_graphs.assertions
    effects = ((name, found) for name, found in lowering.effects.items() if name not in asserted)
    lost = next((name for name, found in effects if _happens_once(found)), None)
    if lost is not None:
        return f"{lost!r} has a side effect or uses random numbers, which a replay would not repeat"
    numbers = {place for place, spec in enumerate(signature.specs) if _is_number(spec)}
    tensors = (place for place in mutated if isinstance(signature.specs[place], TensorSpec))
    copied = [place for place in tensors if place not in static or place in numbers]
    if copied:
        return f"it mutates its input {copied[0]}, and would mutate a copy; see static_inputs"
    if variant.constants is not None:
        return "its backend compiles weights in"
    if dry_run is None or len(dry_run.unaliased) < len(dry_run.tensors):
        return "its outputs may share memory with each other or with inputs, and would be copies"
    return None


def off_gpu(signature: Signature) -> str | None:
    """Where the inputs of a call are, if they are not on one GPU."""
    devices = {spec.device for spec in signature.specs if isinstance(spec, TensorSpec) and not _is_number(spec)}
    if len(devices) == 1 and next(iter(devices)).type == "cuda":
        return None
    found = "" if torch.cuda.is_available() else "; torch finds none here"
    return f"its inputs are on {', '.join(sorted(map(str, devices))) or 'no device'}, not on one GPU{found}"


def _is_number(spec: ValueSpec) -> bool:
    """Whether an input is a number for kernels, by value; Dynamo makes tensors on the CPU of floats."""
    return not isinstance(spec, TensorSpec) or (spec.device.type == "cpu" and not spec.sizes)


def _happens_once(effects: Effects) -> bool:
    """Whether a call does something that is lost in a replay, which only repeats kernels; mutations are not."""
    return effects.uses_rng or effects.impure or effects.communicates or effects.unknown or effects.fences


@final
class Recordings:
    """The recordings of one function in one region, by dynamic sizes, numbers, and addresses of what is static."""

    def __init__(
        self,
        variant: Variant,
        title: str,
        sizes: Sequence[int] | None,
        *,
        static: set[int],
        mutated: Sequence[int] = (),
        memory: FixedMemory,
    ) -> None:
        self._title, self._memory = title, memory
        self._sizes = None if sizes is None else frozenset(sizes)
        self._mutated = tuple(mutated)
        numbers = [place for place, spec in enumerate(variant.fit.signature.specs) if _is_number(spec)]
        self._numbers = tuple(numbers)
        self._static = tuple(sorted(static.difference(numbers)))
        self._dynamic = tuple(_dynamic_places(variant))
        self._known: dict[Hashable, Recording] = {}
        self._made = 0
        self._is_closed = False

    def run(self, variant: Variant, inputs: Sequence[Any]) -> Sequence[Any]:
        """The outputs of the function; of a replay where there is a recording of such a call."""
        function = variant.function
        assert function is not None
        if torch.cuda.is_current_stream_capturing() or not self._is_chosen(inputs):
            return function(*inputs)
        key = self._key(inputs)
        with self._memory.lock:  # One call at a time has the fixed memory.
            known = self._known.get(key)
            if known is not None:
                replayed = known.replay(inputs)
                self._count_mutations(inputs)
                return replayed
        outputs = function(*inputs)
        if not self._is_closed:
            with self._memory.lock:
                self._add(key, function, inputs)
        return outputs

    def __len__(self) -> int:
        return len(self._known)

    def _is_chosen(self, inputs: Sequence[Any]) -> bool:
        if self._sizes is None:
            return True
        return all(inputs[place].shape[axis] in self._sizes for place, axes in self._dynamic for axis in axes)

    def _key(self, inputs: Sequence[Any]) -> Hashable:
        shapes = [(inputs[place].shape, inputs[place].stride()) for place, _ in self._dynamic]
        numbers = [_exact(inputs[place]) for place in self._numbers]
        return (*shapes, *numbers, *[inputs[place].data_ptr() for place in self._static])

    def _add(self, key: Hashable, function: Callable[..., Sequence[Any]], inputs: Sequence[Any]) -> None:
        if key in self._known or self._is_closed:
            return  # By another thread.
        if len(self._known) >= MOST_RECORDINGS:
            self._known.clear()  # Static tensors may have moved, and recordings for their old addresses be of no use.
        try:
            self._known[key] = Recording.of(function, inputs, self._static, self._memory)
        except Exception as error:
            self._is_closed = True
            self._memory.report(self._title, f"recording failed: {Cause.of(error).reason}")
            return
        self._made += 1
        log.info("recorded a CUDA graph of %s, %d in all", self._title, len(self._known))
        if self._made >= 2 * MOST_RECORDINGS:
            self._is_closed = True
            reason = f"it has been recorded {self._made} times; choose sizes, pass numbers as tensors, keep weights"
            self._memory.report(self._title, f"{reason} where they are")

    def _count_mutations(self, inputs: Sequence[Any]) -> None:
        """Makes mutations of a replay visible to autograd, as those of a call are."""
        for place in self._mutated:
            if isinstance(inputs[place], Tensor) and not inputs[place].is_inference():
                increment_version(inputs[place])


def _exact(number: Any) -> Hashable:
    """A number, or a tensor with one, as text: 0.0 equals -0.0, and nan does not equal itself."""
    return repr(number.item() if isinstance(number, Tensor) else number)


def _dynamic_places(variant: Variant) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The tensors with dynamic sizes or strides, and their dynamic axes."""
    for place, known in enumerate(variant.fit.dimensions):
        if known is not None and (None in known[0] or None in known[1]):
            yield place, tuple(axis for axis, size in enumerate(known[0]) if size is None)


@final
class FixedMemory:
    """The memory of all recordings of a plan: a pool of torch's allocator, used by one replay at a time."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._handle: Any = None
        self._recordings: WeakSet[Recording] = WeakSet()
        self._capture_streams: dict[torch.device, Any] = {}
        self._last_streams: dict[torch.device, Any] = {}
        self._reported: set[str] = set()

    def capture(self, graph: Any, device: torch.device) -> Any:
        """Records into a CUDA graph what runs inside."""
        if not self._recordings:
            # torch gives up a pool with its last graph, and refuses to use it again.
            self._handle = torch.cuda.graph_pool_handle()
        # Memory of a pool belongs to a stream, and the default one of torch to the first device that it was used on.
        if device not in self._capture_streams:
            self._capture_streams[device] = torch.cuda.Stream(device)
        stream = self._capture_streams[device]
        # Errors of other threads, which may allocate memory meanwhile, are theirs.
        return torch.cuda.graph(graph, pool=self._handle, stream=stream, capture_error_mode="thread_local")

    def keep(self, recording: Recording) -> None:
        """Keeps the pool as long as the recording lives."""
        self._recordings.add(recording)

    def wait_for_others(self, device: torch.device) -> None:
        """Lets the current stream wait for the last replay, if that was on another one."""
        stream = torch.cuda.current_stream(device)
        last = self._last_streams.get(device)
        if last is not None and last != stream:
            stream.wait_stream(last)
        self._last_streams[device] = stream

    def report(self, title: str, reason: str) -> None:
        """Logs why something is not recorded; a reason that many regions have is a warning once."""
        level = logging.DEBUG if reason in self._reported else logging.WARNING
        self._reported.add(reason)
        log.log(level, "no CUDA graph of %s: %s", title, reason)


def _memory_of(compilations: Compilations) -> FixedMemory:
    with _LOCK:
        return _MEMORY.setdefault(compilations, FixedMemory())


#: By the list of what was compiled, which the regions of a plan have in common.
_MEMORY: WeakKeyDictionary[Compilations, FixedMemory] = WeakKeyDictionary()
_LOCK = Lock()


@final
@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Recording:
    """A CUDA graph, the fixed memory that it reads and writes, and the outputs that are no tensors."""

    graph: Any
    memory: FixedMemory
    device: torch.device
    #: The places of inputs that are copied, and where to.
    places: tuple[int, ...]
    inputs: tuple[Tensor, ...]
    #: The outputs; tensors are in the fixed memory.
    outputs: tuple[Any, ...]

    @classmethod
    def of(
        cls, function: Callable[..., Sequence[Any]], inputs: Sequence[Any], static: Sequence[int], memory: FixedMemory
    ) -> Recording:
        """Records a call with inputs like these; the caller has called the function before, so that it is warm."""
        tensors = [place for place, value in enumerate(inputs) if isinstance(value, Tensor) and value.is_cuda]
        places = [place for place in tensors if place not in static]
        device = inputs[tensors[0]].device
        graph = torch.cuda.CUDAGraph()
        given = list(inputs)
        with torch.cuda.device(device), _no_autocast_cache(), memory.capture(graph, device):
            for place in places:
                given[place] = _like(inputs[place])
            outputs = function(*given)
        # Only names of the memory are kept: the next recording may use it for something else.
        copied = tuple(_unowned(unexpanded(given[place])) for place in places)
        results = tuple(_unowned(output) if isinstance(output, Tensor) else output for output in outputs)
        recording = cls(graph, memory, device, tuple(places), copied, results)
        memory.keep(recording)
        return recording

    def replay(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs for these inputs, in memory of their own."""
        self.memory.wait_for_others(self.device)
        _copy_all(self.inputs, [unexpanded(inputs[place]) for place in self.places])
        self.graph.replay()
        tensors = [output for output in self.outputs if isinstance(output, Tensor)]
        copies = [_like(tensor) for tensor in tensors]
        _copy_all([unexpanded(copy) for copy in copies], [unexpanded(tensor) for tensor in tensors])
        left = iter(copies)
        return [next(left) if isinstance(output, Tensor) else output for output in self.outputs]


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target, in one kernel where torch can."""
    if targets:
        torch.ops.aten._foreach_copy_.default(list(targets), list(sources))


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Has casts of weights recorded, not taken from the cache, whose memory is gone in the next call."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _like(tensor: Tensor) -> Tensor:
    """New memory with the same strides, for which a function may be specialized."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_() if tensor.requires_grad else made


def _unowned(tensor: Tensor) -> Tensor:
    """A tensor in the same memory that does not keep it allocated."""
    once = unexpanded(tensor)
    if may_repeat_elements(once.shape, once.stride()):
        raise ValueError("a tensor has elements that overlap")
    if tensor.numel() == 0:
        return tensor
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in axes)
    memory = torch.as_tensor(_Memory(tensor.data_ptr(), elements * tensor.element_size()), device=tensor.device)
    found = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    assert found.data_ptr() == tensor.data_ptr(), "torch has copied memory that it was to name"
    return found


@final
class _Memory:
    """Bytes on a GPU, in the form that libraries share them in."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }
