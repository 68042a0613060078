"""A program: a graph module or an exported program, with its analyses computed lazily and cached."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress
from typing import Any, NamedTuple, Never, TypeAlias, TypeVar, cast, final

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from partita._html import html_facts
from partita._plain_help import PlainHelp
from partita._torch.fx.structural_hash import propagate_annotations
from partita.analysis.effects.calls import CallEffects, tensors_of
from partita.analysis.effects.graph import GraphEffects, HookedTensor, effects_of_graph, hooked_tensors
from partita.analysis.effects.terms import Effects
from partita.analysis.index import Index, index_of_edited
from partita.analysis.modes import AMBIENT, Autocast, Mode, Modes, check_bodies, modes_of
from partita.analysis.mutation import Mutations, mutations_of
from partita.analysis.nodes import Neighbours, bodies_read, modules_in, neighbours_of, value_of
from partita.analysis.projections import projections_of
from partita.analysis.symbols import symbolic_scalars_of
from partita.analysis.tolerance import EXACT, Tolerance
from partita.errors import OptionError, UnknownNodeError
from partita.near_names import near_names
from partita.program.exported import ExportRecord
from partita.program.joint import Joint, checked_count, joint_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StateKeys:
    """The original path of each moved module, one map per rewrite, the newest first."""

    rewrites: tuple[Mapping[str, str], ...] = ()

    def original(self, key: str) -> str:
        """The name that `key` of this program has in the original."""
        for moved in self.rewrites:
            key = _before(key, moved)
        return key

    def then(self, moved: Mapping[str, str]) -> StateKeys:
        """The keys after another rewrite, where `moved` maps each new path of a module to its former path."""
        return StateKeys((moved, *self.rewrites)) if moved else self

    def of_paths(self, paths: Iterable[str]) -> StateKeys:
        """The same keys for modules at these paths only, folded into one rewrite."""
        moved = {path: self.original(path) for path in paths}
        return StateKeys(({path: old for path, old in moved.items() if path != old},)) if self.rewrites else self

    def to_original(self, state: Mapping[str, T]) -> dict[str, T]:
        """A state dict of this program under the original names, with the versions of its modules."""
        versions = _versions(state)
        # A module that moved to a name takes it from what had it.
        paths = sorted(versions, key=lambda path: self.original(path) != path)
        renamed = {self.original(key): value for key, value in state.items()}
        return _with_versions(renamed, {self.original(path): versions[path] for path in paths})

    def from_original(self, state: Mapping[str, T], keys: Iterable[str]) -> dict[str, T]:
        """A state dict of the original under the names of this program; entries that match none of `keys` are kept."""
        found = {key: state[self.original(key)] for key in keys if self.original(key) in state}
        used = {self.original(key) for key in found}
        renamed = {**found, **{key: value for key, value in state.items() if key not in used}}
        versions = _versions(state)
        paths = {path: self.original(path) for key in found for path in _folders(key)} if versions else {}
        moved = {path: versions[original] for path, original in paths.items() if original in versions}
        return _with_versions(renamed, {**versions, **moved})


def _versions(state: Mapping[str, object]) -> Mapping[str, object]:
    """The versions of the modules that a state dict was saved from, by path; torch keeps them in an attribute."""
    return getattr(state, "_metadata", None) or {}


def _with_versions(state: dict[str, T], versions: Mapping[str, object]) -> dict[str, T]:
    """The state with the versions, by which modules know whether to convert it when they load it."""
    if not versions:
        return state
    result: Any = OrderedDict(state)
    result._metadata = OrderedDict(versions)
    return cast("dict[str, T]", result)


def _folders(key: str) -> Iterator[str]:
    """The paths of the modules around a parameter or buffer, the innermost first."""
    while key := key.rpartition(".")[0]:
        yield key


def _before(key: str, moved: Mapping[str, str]) -> str:
    path, rest = key, ""
    while path:
        if path in moved:
            return moved[path] + rest
        path, _, last = path.rpartition(".")
        rest = f".{last}{rest}"
    return key


#: The keys of a program that was not rewritten.
UNMOVED = StateKeys()


@final
class Program(metaclass=PlainHelp):
    """A graph with its state and its calling convention; build one with `Program.of`.

    Example::

        program = partita.Program.of(torch.fx.symbolic_trace(model))
        program = partita.Program.of(torch.export.export(model, (x,)))
        program.save("model.pt2")
        program = partita.Program.of("model.pt2")  # read as data: nothing in the file is run
        print([node.name for node in program.operators()])
        y = program.module()(x)

    A program is immutable: every rewrite returns a new one that shares the parameters and buffers. Its analyses are
    cached, so edit a graph before you make a program of it, not after.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        *,
        pure: Iterable[Callable[..., Any]] = (),
        state_keys: StateKeys = UNMOVED,
        tolerance: Tolerance = EXACT,
        caller: Mode = AMBIENT,
        export: ExportRecord | None = None,
        forward_outputs: int | None = None,
        is_forward: bool = False,
        frame: Frame | None = None,
        index: Index | None = None,
        body_of: Program | None = None,
    ) -> None:
        self._graph_module = graph_module
        if index is not None:
            self.index = index
        self._pure = _trusted(pure)
        self._state_keys = state_keys
        self._tolerance = tolerance
        self._caller = caller
        self._export = export
        self._forward_outputs = forward_outputs
        self._is_forward = is_forward
        self._frame = frame
        #: A program checks the modes of its bodies at any depth, so they need not check theirs again.
        self._is_body = body_of is not None
        #: The effects of calling each body; a program shares the table with its bodies.
        self._known_modules: dict[nn.Module, Effects] = {} if body_of is None else body_of._known_modules
        self._analyses: dict[Callable[[Program], Any], Any] = {}
        #: What made this program of another one, if that was recorded.
        self._origin: object = None

    @classmethod
    def of(
        cls,
        source: Program | GraphModule | ExportedProgram | str | os.PathLike[str],
        *,
        pure: Iterable[Callable[..., Any]] = (),
        trusted: bool = False,
        operators: Collection[str] = (),
        forward_outputs: int | None = None,
    ) -> Program:
        """The program that `source` holds: a graph module, an exported program, or the path of a saved one.

        Functions in `pure` are assumed to have no side effects. A file is read as data, and may name operators of torch
        and those in `operators`, by namespace or as `namespace::name`; `trusted` lets torch load one that can run code
        while it is read. With `forward_outputs`, a graph module is the joint graph of a forward, which returns that
        many of its outputs, and a backward, which returns the others.
        """
        if forward_outputs is not None:
            return cls._of_joint(source, checked_count(forward_outputs), pure)
        if isinstance(source, Program):
            return source.rewritten(source.graph_module, pure=pure) if _trusted(pure) - source.pure else source
        if isinstance(source, str | os.PathLike):
            # Most programs are not read from files, and the reader is large.
            from partita.program.archives import load_exported

            source = load_exported(source, trusted=trusted, operators=operators)
        if isinstance(source, ExportedProgram):
            return cls(source.graph_module, pure=pure, export=ExportRecord.of(source))
        if not isinstance(source, GraphModule):
            raise OptionError(
                f"a program is made from a torch.fx.GraphModule or a torch.export.ExportedProgram, not from "
                f"{type(source).__name__}; capture a model first, with partita.capture(model, args)"
            )
        return cls(source, pure=pure)

    @classmethod
    def _of_joint(cls, source: object, forward_outputs: int, pure: Iterable[Callable[..., Any]]) -> Program:
        if not isinstance(source, GraphModule):
            raise OptionError(
                f"a joint graph is a torch.fx.GraphModule, not a {type(source).__name__}; omit forward_outputs, "
                "or trace a model with partita.capture_joint(model, args)"
            )
        program = cls(source, pure=pure, forward_outputs=forward_outputs)
        assert program.joint is not None  # Raises unless the graph is a joint graph.
        return program

    def rewritten(
        self,
        graph_module: GraphModule,
        *,
        pure: Iterable[Callable[..., Any]] = (),
        state_keys: StateKeys | None = None,
        tolerance: Tolerance = EXACT,
        knows_bodies: bool = False,
    ) -> Program:
        """This program with another graph: `tolerance` is what that adds.

        With `knows_bodies`, the bodies are unchanged, and their known effects are reused.
        """
        propagate_annotations(self._graph_module, graph_module)
        made = Program(
            graph_module,
            pure=self.pure | _trusted(pure),
            state_keys=self.state_keys if state_keys is None else state_keys,
            tolerance=self.tolerance | tolerance,
            caller=self.caller,
            export=None if self.export is None else self.export.following(graph_module.graph),
            forward_outputs=self._forward_outputs,
            is_forward=self.is_forward,
            frame=self.frame,
            body_of=self if self._is_body else None,
        )
        if knows_bodies and not made.pure - self.pure:
            made._known_modules = self._known_modules
        return made

    def under(self, caller: Mode) -> Program:
        """The same program, called under `caller`."""
        if caller == self.caller:
            return self
        view = self.rewritten(self._graph_module)
        view._caller = caller
        return view

    def body(self, graph_module: GraphModule, caller: Mode = AMBIENT) -> Program:
        """One of the bodies that this program runs, called under `caller`, as a program of its own.

        Nested bodies were checked together with those of this program, and are not checked again.
        """
        _ = self.modes  # Raises if a body at any depth does not restore a mode.
        return Program(graph_module, pure=self.pure, caller=caller, body_of=self)

    @property
    def graph(self) -> Graph:
        """The graph, which must not be changed."""
        return self._graph_module.graph

    @property
    def graph_module(self) -> GraphModule:
        """The module that owns the graph and its state."""
        return self._graph_module

    @property
    def export(self) -> ExportRecord | None:
        """What an exported program holds beside its graph, its signature say; None for a graph module."""
        return self._export

    @property
    def pure(self) -> frozenset[Callable[..., Any]]:
        """What is assumed to have no side effects: functions, modules and classes of modules."""
        return self._pure

    @property
    def caller(self) -> Mode:
        """What is known of the modes that the program is called under; `modes` are relative to it."""
        return self._caller

    @property
    def frame(self) -> Frame | None:
        """Where the graph is in a model that Dynamo traces frame by frame; None for the graph of a whole model."""
        return self._frame

    @property
    def is_forward(self) -> bool:
        """Whether it is the forward of a joint graph, taken out of it."""
        return self._is_forward

    def module(self) -> GraphModule:
        """The program as a module that is called like the original."""
        return self._graph_module if self.export is None else self._exported_module

    @cached_property
    def _exported_module(self) -> GraphModule:
        from partita.dissolve.dissolve import exported_module

        return exported_module(self)

    def exported(self) -> ExportedProgram:
        """The program as torch.export has it, checked by torch's verifier; it shares the parameters and buffers."""
        # Rewrites build on programs, and this is a rewrite: the only import that points up.
        from partita.dissolve.dissolve import exported_program

        return exported_program(self)

    def save(self, path: str | os.PathLike[str], *, extra_files: Mapping[str, Any] | None = None) -> None:
        """Writes the exported program to a `.pt2` file, as `torch.export.save` does, and each shared body once.

        `torch.export.load` and `Program.of` read it.
        """
        # torch's serializer takes long to import, and few programs are saved.
        from partita.program.archives._torch.writing import save_exported

        save_exported(self.exported(), path, extra_files=extra_files)

    def decomposed(
        self, table: dict[Any, Callable[..., Any]] | None = None, *, decompose_custom_triton_ops: bool = False
    ) -> ExportedProgram:
        """The exported program decomposed by the table; modes, which torch would drop, are dissolved first."""
        from partita.dissolve.dissolve import decomposed_program

        return decomposed_program(self, table, decompose_custom_triton_ops=decompose_custom_triton_ops)

    @cached_property
    def index(self) -> Index:
        """The nodes by number, their place in graph order, and the data edges between them."""
        return Index(self.graph)

    @cached_property
    def joint(self) -> Joint | None:
        """The forward, the backward and the saved values of a joint graph; None for other graphs."""
        if self._forward_outputs is None:
            return None
        return joint_of(self.index, self._graph_module, self._forward_outputs)

    @cached_property
    def modes(self) -> Modes:
        """The grad, inference and autocast state that each node runs under."""
        index = self.index
        found = modes_of(index, self.caller)
        if not self._is_body:
            check_bodies(index, self._graph_module, found, grad=self.caller.grad)
        return found.with_projections(self.projections)

    @cached_property
    def projections(self) -> Mapping[int, int]:
        """The nodes that only take an item out of a container, in graph order, and that container, by number."""
        return projections_of(self.index, self._graph_module)

    @cached_property
    def symbolic_scalars(self) -> frozenset[int]:
        """The nodes that compute a truth value or a float from symbolic numbers alone, by number."""
        return symbolic_scalars_of(self.index)

    @cached_property
    def calls(self) -> CallEffects:
        """The effects of every call, and which values share memory."""
        return CallEffects(self._graph_module, self.pure, index=self.index, known_modules=self._known_modules)

    @cached_property
    def effects(self) -> GraphEffects:
        """The order that side effects impose beyond data flow."""
        return effects_of_graph(self.calls)

    @cached_property
    def mutations(self) -> Mutations:
        """Which values are mutated, by which nodes."""
        return mutations_of(self.calls)

    def once(self, analysis: Callable[[Program], T]) -> T:
        """What `analysis` returns for this program, computed at the first request and kept with it."""
        if analysis not in self._analyses:
            self._analyses[analysis] = analysis(self)
        found: T = self._analyses[analysis]
        return found

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.index.nodes}

    def operators(self) -> list[Node]:
        """The nodes that compute, in graph order: all but inputs, attributes and the output."""
        computes = bytearray(b"\1") * len(self.index)
        for op in ("placeholder", "get_attr", "output"):
            for node in self.graph.find_nodes(op=op, sort=False):
                computes[self.index.number[node]] = False
        return list(compress(self.index.nodes, computes))

    def node(self, name: str) -> Node:
        """The node called `name`."""
        found = self._by_name.get(name)
        if found is not None:
            return found
        near = near_names(name, self._by_name)
        hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
        raise UnknownNodeError(f"no node is called {name!r}{hint}")

    @property
    def tolerance(self) -> Tolerance:
        """How far the treatments that made this program may have changed its numbers."""
        return self._tolerance

    @property
    def state_keys(self) -> StateKeys:
        """How the names in the state dict relate to those of the program that this one was made from."""
        return self._state_keys

    def original_state(self) -> dict[str, Any]:
        """The state dict under the names that it had before any rewrite."""
        return self.state_keys.to_original(self.module().state_dict())

    def load_original_state(self, state: Mapping[str, Any]) -> None:
        """Loads a state dict, a checkpoint say, that uses the names from before any rewrite."""
        module = self.module()
        module.load_state_dict(self.state_keys.from_original(state, module.state_dict()))

    def __reduce__(self) -> Never:
        raise OptionError(
            "a program is neither pickled nor copied: save an exported one with torch.export.save(program.exported(), "
            "path), and pickle or copy the module() of one that was made from a graph module"
        )

    def _repr_html_(self) -> str:
        count = Counter(str(node.target) for node in self.operators() if node.op == "call_function")
        kind = "joint graph" if self._forward_outputs is not None else "graph module"
        return html_facts(
            {
                "program": "exported program" if self.export is not None else kind,
                "nodes": f"{len(self.index):,}",
                "inputs": f"{len(self.graph.find_nodes(op='placeholder', sort=False)):,}",
                "operators": f"{len(self.operators()):,}",
                "most frequent": ", ".join(f"{name} {number:,}" for name, number in count.most_common(6)),
            }
        )

    def __repr__(self) -> str:
        return f"Program({type(self._graph_module).__name__}, {len(self.index)} nodes)"


def program_being_edited(graph_module: GraphModule) -> Program:
    """The program of a graph that may lack its output node or be out of topological order."""
    return Program(graph_module, index=index_of_edited(graph_module.graph))


def _trusted(pure: Iterable[Callable[..., Any]]) -> frozenset[Callable[..., Any]]:
    if callable(pure) or isinstance(pure, str):
        raise OptionError(f"`pure` is a collection of functions, modules or classes of modules; give pure=[{pure!r}]")
    found = frozenset(pure)
    odd = [entry for entry in found if not callable(entry)]
    if odd:
        raise OptionError(f"`pure` takes functions, modules or classes of modules themselves, not {odd[0]!r}")
    return found


@final
class Frame(NamedTuple):
    """A Python frame that Dynamo traced into a graph of its own.

    Graph breaks, hooks that are not traced and `layer.compile()` make several frames of a model.
    """

    #: The class of the module whose `forward` runs in the frame; None where that is unknown.
    type: type[nn.Module] | None = None
    #: The paths of that module in the modules that were running around it, in the outermost one first.
    paths: tuple[str, ...] = ()
    #: The autocast that it was traced under, and is called under: Dynamo guards on it.
    autocast: tuple[Autocast, ...] = ()


def set_origin(program: Program, origin: object) -> Program:
    """The same program, which knows what it was made by."""
    program._origin = origin
    return program


def origin_of(program: Program) -> object:
    """What `set_origin` recorded; None if nothing."""
    return program._origin


# Analyses that features share; ask for them by `Program.once`.


def neighbours(program: Program) -> Neighbours:
    """The predecessors and successors of each node, by data or by effects."""
    return neighbours_of(chain(program.index.edges(), program.effects.edges()))


def effect_neighbours(program: Program) -> Neighbours:
    """The predecessors and successors of each node by effects alone."""
    return neighbours_of(program.effects.edges())


def counted_operators(program: Program) -> frozenset[int]:
    """The nodes that count wherever operators are counted, by number: those that compute a value or have an effect.

    Inputs, attributes, the output and mode toggles do not count; nor does what only takes an item out of a container,
    or computes a truth value or a float from sizes alone, since it runs wherever it is read.
    """
    without = program.modes.toggles | program.projections.keys() | program.symbolic_scalars
    numbers = (program.index.number[node] for node in program.operators())
    return frozenset(number for number in numbers if number not in without)


def mutated_positions(program: Program) -> tuple[int, ...]:
    """The positions of inputs that are mutated; all of them if an unknown function is called."""
    mutated = {program.index.nodes[number] for number in program.effects.mutated_inputs}
    return tuple(place for place, node in enumerate(program.graph.find_nodes(op="placeholder")) if node in mutated)


def tensors_with_hooks(program: Program) -> tuple[HookedTensor, ...]:
    """The tensors on which nodes register hooks, or may do so."""
    return hooked_tensors(program.calls)


#: The effect successors of each node.
EffectSuccessors: TypeAlias = Mapping[Node, Sequence[Node]]


def effect_successors(program: Program) -> EffectSuccessors:
    """The nodes that must stay after each node although no data flows between them."""
    nodes = program.index.nodes
    successors: dict[Node, list[Node]] = {}
    for before, after in program.effects.edges():
        successors.setdefault(nodes[before], []).append(nodes[after])
    return successors


def summation_tolerance(program: Program) -> Tolerance:
    """How far sums of gradients may change when operators are reordered, or a weight is cast once more.

    It is the rounding error of the coarsest dtype that the program is known to add. The tolerance of a body belongs to
    the program that runs it.
    """
    if program._is_body:
        return EXACT
    dtypes = {*_cast_dtypes(program), *_known_dtypes(program)}
    # A block may name a dtype that autocast does not support; torch reports that when it runs.
    eps = (torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
    return Tolerance(rounding=max(eps, default=torch.finfo(torch.float64).eps))


def uses_autocast(program: Program) -> bool:
    """Whether any node runs under autocast, which caches the cast of a weight for a block: a cut casts it again."""
    return any(True for _ in _cast_dtypes(program))


def _cast_dtypes(program: Program) -> Iterator[torch.dtype]:
    for mode in set(program.modes.by_number or ()):
        for autocast in mode.autocast:
            if autocast.enabled:
                yield torch.bfloat16 if autocast.dtype is None else autocast.dtype
    yield from _cast_dtypes_of_operators(program.graph_module)


def _cast_dtypes_of_operators(root: GraphModule) -> Iterator[torch.dtype]:
    """Those of operators that run a body under autocast, as programs in files have the blocks, in bodies too."""
    graphs = (module for module in modules_in(root) if isinstance(module, GraphModule))
    reads = (read for one in graphs for read, _ in bodies_read(one, one.graph.find_nodes(op="get_attr", sort=False)))
    for user in (user for read in reads for user in read.users):
        if str(user.target) in _RUNS_UNDER_AUTOCAST:
            given = {**dict(zip(("device_type", "dtype", "enabled"), user.args, strict=False)), **user.kwargs}
            dtype = given.get("dtype")
            if given.get("enabled") is True:
                yield dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


_RUNS_UNDER_AUTOCAST = ("partita_autocast", "wrap_with_autocast")


def _known_dtypes(program: Program) -> Iterator[torch.dtype]:
    values = [value_of(node) for node in program.index.nodes]
    for tensor in (*values, *tensors_of(program.graph_module)):
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            yield tensor.dtype
