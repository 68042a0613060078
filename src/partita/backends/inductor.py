"""The backends of torch, called without Dynamo: Inductor, AOTInductor and AOTAutograd alone; options and storage."""

from __future__ import annotations

import json
import pickle
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, final

import torch
from torch.fx import GraphModule, Node

from partita._plain_help import PlainHelp
from partita.analysis.tolerance import Tolerance
from partita.backends._torch.compile import (
    compile_ahead,
    compile_with_inductor,
    function_from_bytes,
    function_of_package,
    function_to_bytes,
    package_of,
)
from partita.backends._torch.settings import (
    inductor_options,
    instructions,
    skip_tests_of,
    tested_instructions,
    vectors,
    vectors_of_inductor,
)
from partita.backends._torch.support import check_random_operators
from partita.backends.adapting import CallingConvention, CompiledBody, adapt, adapt_to_tensors
from partita.backends.backend import Compiled
from partita.backends.refusals import refusal_by_inductor, refusal_by_tracing, refusal_of_other_bits
from partita.errors import BackendError, OptionError
from partita.near_names import near_names


@final
@dataclass(frozen=True, slots=True)
class AotEager(metaclass=PlainHelp):
    """Traces with AOTAutograd, as for Inductor, and runs the graphs eagerly; values are bitwise those of eager mode.

    A region that fails here fails in tracing, not in a compiler. Gradients of a value with several uses are
    summed region by region.
    """

    name: ClassVar[str] = "aot_eager"
    tolerance: ClassVar[Tolerance] = Tolerance(rounding=torch.finfo(torch.float64).eps)
    trains: ClassVar[bool] = True
    takes_symbols: ClassVar[bool] = True
    picks_kernels: ClassVar[bool] = True

    def refusal(self, node: Node) -> str | None:
        """Why AOTAutograd cannot trace `node`, or has other bits for it."""
        return refusal_by_tracing(node) or refusal_of_other_bits(node)

    def compile(self, body: GraphModule, inputs: Sequence[object]) -> Compiled:
        """The forward and backward graphs of AOTAutograd, as a function."""
        check_random_operators(body, inputs)
        adapted = adapt(body, inputs)
        function = compile_ahead(body, adapted.inputs)
        return CompiledBody(function, adapted.calling())


#: Inductor adds in other orders and has its own elementary functions: blocks of transformers in float32 are off by 3e-6
#: at most, and by 1e-5 of what is not tiny.
INDUCTOR_TOLERANCE = Tolerance(relative=1e-4, absolute=1e-5, rounding=torch.finfo(torch.float32).eps)


@dataclass(frozen=True, slots=True, init=False)
class _WithOptions(metaclass=PlainHelp):
    """What Inductor and AOTInductor have in common; `options` are those of `torch.compile(options=...)`."""

    options: Options

    tolerance: ClassVar[Tolerance] = INDUCTOR_TOLERANCE
    takes_symbols: ClassVar[bool] = True

    def __init__(self, options: Mapping[str, object] | Options = ()) -> None:
        object.__setattr__(self, "options", checked_options(options))

    def refusal(self, node: Node) -> str | None:
        """Why Inductor does not support `node`."""
        return refusal_by_inductor(node)


@final
@dataclass(frozen=True, slots=True, init=False)
class Inductor(_WithOptions):
    """Compiles forward and backward; `options` are those of `torch.compile(options=...)`.

    Random numbers are eager's own unless the option `fallback_random` is switched off.
    """

    name: ClassVar[str] = "inductor"
    trains: ClassVar[bool] = True

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Inductor's function for the body."""
        options = _options_for(body, inputs, self.options)
        adapted = adapt(body, inputs)
        function = compile_with_inductor(body, adapted.inputs, options)
        return CompiledBody(function, adapted.calling(), vectors=vectors_of_inductor(options))

    def save(self, compiled: Compiled) -> bytes:
        """Inductor's function as bytes, for another process that has a C++ compiler or Inductor's caches."""
        if not isinstance(compiled, CompiledBody):
            raise BackendError(f"inductor stores what it has compiled itself, not a {type(compiled).__name__}")
        code = compiled.stored or function_to_bytes(compiled.function)
        if code is None:
            raise BackendError(
                "inductor can only store bodies whose calls torch has lasting names for, and which give no sizes of "
                "what they compute; compile it again where it is needed, or capture the program with partita.capture, "
                "which leaves nothing but operators in it"
            )
        return stored(self.name, compiled.calling, code, vectors=compiled.vectors)

    def load(self, data: bytes) -> Compiled:
        """A stored function; loading runs code, so load nothing that you do not trust."""
        options = options_for_inductor(self.options)
        vectors = vectors_of_inductor(options)
        calling, code = restored(self.name, data, vectors=vectors)
        skip_tests_of(_header_of(data).get("tested"))
        return CompiledBody(function_from_bytes(code, options), calling, stored=code, vectors=vectors)


@final
@dataclass(frozen=True, slots=True, init=False)
class AotInductor(_WithOptions):
    """Compiles for inference, into a library that needs neither Python nor a compiler; `options` are Inductor's.

    Compiling takes longer than with `Inductor`, since all of it goes through a C++ compiler. A view of an input that
    the body mutates is returned as a copy; `Lower` computes views itself and does not rely on it.
    """

    name: ClassVar[str] = "aot_inductor"
    trains: ClassVar[bool] = False

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Compiled:
        """The function in AOTInductor's package of the body."""
        options = _options_for(body, inputs, self.options)
        adapted = adapt_to_tensors(body, inputs)
        package = package_of(body, adapted.inputs, options)
        return CompiledBody(function_of_package(package), adapted.calling(), stored=package, vectors=vectors())

    def save(self, compiled: Compiled) -> bytes:
        """The package with its calling convention."""
        if not isinstance(compiled, CompiledBody) or compiled.stored is None:
            raise BackendError(f"aot_inductor stores what it has compiled itself, not a {type(compiled).__name__}")
        return stored(self.name, compiled.calling, compiled.stored, vectors=compiled.vectors)

    def load(self, data: bytes) -> Compiled:
        """A stored function; loading runs native code, so load nothing that you do not trust."""
        calling, package = restored(self.name, data, vectors=vectors())
        return CompiledBody(function_of_package(package), calling, stored=package, vectors=vectors())


#: Names and values, sorted by name; lists are tuples.
Options: TypeAlias = tuple[tuple[str, object], ...]


def checked_options(options: Mapping[str, object] | Options) -> Options:
    """The options as sorted pairs, if Inductor knows them all and their values have the right types."""
    if not options:
        return ()
    try:
        named = {name.replace("-", "_"): value for name, value in dict(options).items()}
    except (AttributeError, TypeError, ValueError):
        raise OptionError(f"options are a mapping from names to values, not {options!r}") from None
    known = inductor_options()
    return tuple(sorted((name, _checked(name, value, known)) for name, value in named.items()))


def options_for_inductor(options: Options) -> dict[str, object]:
    """The options for Inductor, with defaults that keep the numerics of eager mode."""
    known = inductor_options() if options else {}
    chosen = {name: [*value] if isinstance(known[name], list) else value for name, value in options}  # type: ignore[misc]
    return {**_EAGER_NUMERICS, **chosen}


def _options_for(body: GraphModule, inputs: Sequence[Any], options: Options) -> dict[str, object]:
    """The options for a body; raises where its random numbers would not be those of eager mode."""
    found = check_random_operators(body, inputs)
    chosen = options_for_inductor(options)
    if found.bernoulli_on_gpu and chosen["fallback_random"]:
        raise BackendError("it generates other random numbers for torch.bernoulli on a GPU than eager mode")
    return {**found.options, **chosen}


def _checked(name: str, value: object, known: Mapping[str, object]) -> object:
    if name not in known:
        near = near_names(name, known)
        hint = f"; did you mean {', '.join(map(repr, near))}?" if near else "; see torch._inductor.config"
        raise OptionError(f"Inductor has no option {name!r}{hint}")
    default = known[name]
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if isinstance(value, list):
        value = tuple(value)
    wanted = tuple if isinstance(default, list) else type(default)
    if isinstance(default, bool | int | float | str | list) and type(value) is not wanted:
        raise OptionError(f"Inductor's option {name!r} is a {type(default).__name__}, not {value!r}")
    try:
        hash(value)
    except TypeError:
        raise OptionError(f"the value {value!r} of option {name!r} is mutable; pass an immutable one") from None
    return value


#: Random numbers from eager's generator, and low-precision values rounded wherever eager rounds them.
_EAGER_NUMERICS = {"fallback_random": True, "emulate_precision_casts": True}


_MAGIC = b"partita compiled body\n"


def stored(backend: str, calling: CallingConvention, code: bytes, *, vectors: str) -> bytes:
    """The code and calling convention of a compiled body, under a header that says where it can run."""
    header = {"backend": backend, **_here(vectors), "instructions": instructions(), "tested": tested_instructions()}
    return _MAGIC + json.dumps(header).encode() + b"\n" + pickle.dumps((calling, code))


def restored(backend: str, data: bytes, *, vectors: str) -> tuple[CallingConvention, bytes]:
    """The arguments of `stored`; what follows the header is only unpickled if the header matches."""
    found, content = _header_of(data), data.removeprefix(_MAGIC).partition(b"\n")[2]
    if not found:
        raise BackendError(f"these {len(data)} bytes are no compiled body; pass {backend} what its `save` returned")
    differences = _differences(found, {"backend": backend, **_here(vectors)})
    if differences:
        raise BackendError(f"the code was compiled for something else: {'; '.join(differences)}; compile it again here")
    try:
        calling, code = pickle.loads(content)
    except Exception as error:
        raise BackendError(f"the compiled body is damaged: {error}; compile it again") from error
    return calling, code


def _header_of(data: bytes) -> dict[str, Any]:
    """Where stored code can run; empty for other data."""
    try:
        found = json.loads(data.removeprefix(_MAGIC).partition(b"\n")[0]) if data.startswith(_MAGIC) else None
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _here(vectors: str) -> dict[str, str]:
    """What must be equal where native code is loaded."""
    return {"torch": torch.__version__, "machine": f"{platform.system()} {platform.machine()}", "vectors": vectors}


def _differences(found: dict[str, object], wanted: dict[str, str]) -> list[str]:
    different = [
        f"{key} {found.get(key)!r}, here {value!r}" for key, value in wanted.items() if found.get(key) != value
    ]
    used, known = found.get("instructions"), frozenset(instructions())
    if not isinstance(used, list):
        return [*different, "unknown instructions"]
    # Inductor lets the C++ compiler use all instructions of the processor.
    missing = [name for name in used if name not in known]
    return [*different, f"instructions that are not here: {', '.join(map(str, missing))}"] if missing else different
