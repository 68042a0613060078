"""ByModule: the nodes of one call of a module form one region."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple, final

from torch import nn
from torch.fx import Node

from partita._plain_help import PlainHelp
from partita.analysis.imported_names import imported_class
from partita.analysis.nodes import find
from partita.errors import OptionError
from partita.policies.constraints import check_flags
from partita.policies.legalize import Piece, assignable, call_user_function, legal_partition, unassigned
from partita.policies.matching import Names, check_match
from partita.program.program import Frame, Program
from partita.regions import Partition

#: torch.export writes this where it adds nodes of its own.
_EMPTY_STACK = "_empty_nn_module_stack"

_DYNAMO_SOURCE = re.compile(r"^[LG]\[['\"][^'\"]*['\"]\](\.__closure__\[\d+\]\.cell_contents)?")
#: An item by a text or a number, read in one go: nothing in it can be the beginning of another one.
_ITEM = re.compile(r"\[(?:['\"]([^'\"\]]*)['\"]|([^'\"\[\]]*))\]")


@final
@dataclass(frozen=True, slots=True)
class ByModule(metaclass=PlainHelp):
    """A region for each call of the selected modules, by the `nn_module_stack` that the tracer recorded.

    Example::

        policy = ByModule("0")  # one module by its path
        policy = ByModule("*")  # "layers.*" for all of a list
        policy = ByModule(classes=torch.nn.Linear)
        print([region.name for region in policy(program)])

    `paths` are patterns such as "layers.*" (as in `fnmatch`: a star also matches dots), or a predicate of paths;
    `classes` are module classes or their names; `depth` counts calls from the program inwards. A call must match all
    options that are set; of nested calls that match, the outermost is taken. Where one call cannot run all nodes of a
    module, the largest part that it can run is kept. A program without a match is an error, unless `allow_empty`.

    Inside torch.compile a frame may hold a part of the model: paths are those in the outermost model that is running,
    or else in a module inside of it, or else in the frame.
    """

    paths: str | tuple[str, ...] | Callable[[str], object] = ()
    _: KW_ONLY
    classes: type | str | tuple[type | str, ...] = ()
    depth: int | None = None
    allow_empty: bool = False

    def __post_init__(self) -> None:
        if not callable(self.paths):
            object.__setattr__(self, "paths", _texts(self.paths))
        object.__setattr__(self, "classes", _classes(self.classes))
        check_flags(self, "allow_empty")
        if self.depth is not None and (type(self.depth) is not int or self.depth < 1):
            raise OptionError(f"depth counts calls of modules from 1 on, not {self.depth!r}")
        if not (self.paths or self.classes or self.depth):
            raise OptionError("ByModule needs paths, classes or a depth, for example ByModule('layers.*')")

    def __call__(self, program: Program) -> Partition:
        frame = program.frame or Frame()
        prefixes = frame.paths if self.depth is None else ()
        for prefix in prefixes:
            found = self._partition(program, ModuleCall("", prefix, frame.type or nn.Module))
            if len(found):
                return found
        found = self._partition(program, None)
        if not self.has_match(found):
            check_match(self, program)
        return found

    def names(self, program: Program) -> Names:
        """The patterns and classes, and the paths and classes of modules that are called in the program."""
        texts = () if callable(self.paths) else self.paths
        assert isinstance(self.classes, tuple)
        wanted = (*texts, *(one if isinstance(one, str) else one.__name__ for one in self.classes))
        return Names(wanted, tuple(_paths_in(program)), "call of a module", "modules called in it")

    def has_match(self, partition: Partition) -> bool:
        """Whether there is a region."""
        return len(partition) > 0

    def selects(self, path: str, kind: type) -> bool:
        """Whether a module of this path and class fits the patterns and classes; a function for paths is not called."""
        return (callable(self.paths) or _is_like(path, self.paths)) and self._is_class(kind)

    def _partition(self, program: Program, around: ModuleCall | None) -> Partition:
        """The regions; `around` is the call of the module that runs in the frame, which no node records."""
        assignment, reasons = unassigned(program), dict[Node, str]()
        known: dict[tuple[str, type | str], bool] = {}
        found: dict[tuple[str, ...], int] = {}
        pieces: list[Piece] = []
        for number in assignable(program):
            node = program.index.nodes[number]
            calls = calls_around(node, program.graph_module)
            if around is not None:
                calls = (around, *(call._replace(path=f"{around.path}.{call.path}") for call in calls))
            chosen = self._chosen(calls, node, known)
            if chosen is None:
                reasons[node] = "it runs in no module that the policy selects"
                continue
            key = tuple(call.key for call in calls[: chosen + 1])
            assignment[number] = found.setdefault(key, len(found))
            if assignment[number] == len(pieces):
                pieces.append(Piece(calls[chosen].path, calls[chosen].path))
        return legal_partition(program, assignment, pieces, reasons, only_largest=True)

    def _chosen(
        self, calls: tuple[ModuleCall, ...], node: Node, known: dict[tuple[str, type | str], bool]
    ) -> int | None:
        """The position in `calls` of the outermost one that matches."""
        for at, call in enumerate(calls):
            if self.depth is not None and at != self.depth - 1:
                continue
            key = (call.path, call.type)
            if key not in known:
                known[key] = self._is_path(call.path, node) and self._is_class(call.type)
            if known[key]:
                return at
        return None

    def _is_path(self, path: str, node: Node) -> bool:
        if callable(self.paths):
            return bool(call_user_function(self.paths, path, node=node, role="function for module paths"))
        return _is_like(path, self.paths)

    def _is_class(self, traced: type | str) -> bool:
        if not self.classes:
            return True
        # torch.export records the names of classes, the other tracers the classes.
        found = imported_class(traced) if isinstance(traced, str) else traced
        full_name = traced if isinstance(traced, str) else f"{traced.__module__}.{traced.__qualname__}"
        assert isinstance(self.classes, tuple)
        for wanted in self.classes:
            if isinstance(wanted, str):
                if wanted in (full_name, full_name.rpartition(".")[2]):
                    return True
            elif isinstance(found, type) and issubclass(found, wanted):
                return True
        return False


def _is_like(path: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(path, pattern) for pattern in patterns)


def _texts(paths: object) -> tuple[str, ...]:
    texts = (paths,) if isinstance(paths, str) else paths
    if not isinstance(texts, tuple | list) or not all(isinstance(text, str) and text for text in texts):
        raise OptionError(f"paths are patterns for names of modules, such as 'layers.*', or a function, not {paths!r}")
    return tuple(texts)


def _classes(classes: object) -> tuple[type | str, ...]:
    several = classes if isinstance(classes, tuple | list) else (classes,)
    if not all(isinstance(one, type) or (isinstance(one, str) and one) for one in several):
        raise OptionError(f"classes are module classes or their names, not {classes!r}")
    return tuple(several)


class ModuleCall(NamedTuple):
    """One call of a module: its key distinguishes two calls of one module; the class is a type or its full name."""

    key: str
    path: str
    type: type | str


def calls_around(node: Node, root: nn.Module) -> tuple[ModuleCall, ...]:
    """The calls that `node` runs in, outermost first, without that of the program itself.

    A `call_module` without a recorded stack is in the modules on the path of its target.
    """
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return _calls_by_name(str(node.target), root) if node.op == "call_module" else ()
    return calls_in(stack)


def calls_in(stack: object) -> tuple[ModuleCall, ...]:
    """The calls of modules that a tracer has recorded in the metadata of a node, outermost first."""
    if not isinstance(stack, Mapping):
        return ()
    return tuple(
        ModuleCall(str(key), _plain_path(entry[0]), entry[1])
        for key, entry in stack.items()
        if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str) and _plain_path(entry[0])
    )


def _paths_in(program: Program) -> Iterator[str]:
    """The paths and class names of all modules that are called in a program."""
    frame = program.frame or Frame()
    if frame.paths and frame.type is not None:
        yield from (frame.paths[0], frame.type.__name__)
    prefix = f"{frame.paths[0]}." if frame.paths else ""
    for node in program.operators():
        for call in calls_around(node, program.graph_module):
            yield f"{prefix}{call.path}"
            yield (call.type if isinstance(call.type, str) else call.type.__qualname__).rpartition(".")[2]


def _calls_by_name(target: str, root: nn.Module) -> tuple[ModuleCall, ...]:
    parts = target.split(".")
    paths = (".".join(parts[: count + 1]) for count in range(len(parts)))
    found = ((path, find(root, path)) for path in paths)
    return tuple(
        ModuleCall(path, path, type(module))
        for path, module in found
        if not isinstance(module, nn.ModuleList | nn.ModuleDict)
    )


@lru_cache(maxsize=4096)
def _plain_path(path: str) -> str:
    """The path below the traced module, empty for that itself.

    Dynamo records the source of the module: `L['self'].layers.0`, or `G['models'][0].layers.0`.
    """
    if path.startswith(_EMPTY_STACK):
        return ""
    below = _DYNAMO_SOURCE.sub("", path)
    steps = _ITEM.sub(r".\1\2", below).split(".")
    return ".".join(step for step in steps if step and step != "_modules")
