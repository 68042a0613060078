"""Compiles the regions of Dynamo's graph, each when a run of the cut program on fake tensors reaches it.

The traced values in Dynamo's metadata cannot be the example inputs: they are in their state at the end of the trace (a
mutated tensor may require a gradient by then), and their fake mode is no longer the current one.
"""

from __future__ import annotations

import copy
import logging
import operator
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node

from partita._torch.fake_tensors import forget_memos, runs_fake, shared_fake_mode, to_fake
from partita._torch.fx.lazy_graph_module import generate_code
from partita._torch.fx.structural_hash import body_key
from partita._torch.modes import ambient_kept, read_ambient
from partita.analysis.tolerance import Tolerance
from partita.backends.refusals import aliases_with_own_backward, reshapes_in_place
from partita.errors import OptionError
from partita.lowering.dry_run import memory_of
from partita.plans.progress import Progress
from partita.plans.treatment import (
    Called,
    Site,
    Treatment,
    Treats,
    TreatsAt,
    allows_mixed_modes,
    annotation_suffices,
    stays_eager,
    tolerance_of,
)
from partita.program.program import Program, mutated_positions, tensors_with_hooks
from partita.recompute.operators import restore_rng_in_checkpoints
from partita.rewrite.bodies import copy_mutated_inputs
from partita.torch_compile._torch.backends import (
    adopt_origin,
    own_tracing_context,
    sources_of,
    without_disabling,
)
from partita.torch_compile._torch.direct_calls import Boxed, behind_wrappers
from partita.torch_compile._torch.direct_training import TrainedFunction, trained_directly
from partita.torch_compile.options import Inner
from partita.torch_compile.piece_borders import (
    AliasedMutationError,
    Border,
    Bordered,
    PieceCall,
    count_mutations,
    edges_before,
    may_overlap,
    snapshots_of,
)
from partita.torch_compile.shared_pieces import KnownResults, PieceKey, SharedPieces, WaitingPiece, piece_key
from partita.torch_compile.trained_runs import record_together

log = logging.getLogger(__name__)


def compile_pieces(
    cut: GraphModule,
    root: GraphModule,
    inner: Inner,
    example_inputs: Sequence[Any],
    *,
    shares: bool,
    progress: Progress,
) -> Callable[..., Any]:
    """Runs `cut`, which is Dynamo's graph `root` in parts, with what `inner` compiles in the place of every piece.

    If it `shares`, equal pieces are compiled once.
    """
    compiler = _PieceCompiler(cut, root, inner, shared_fake_mode(example_inputs), shares=shares, progress=progress)
    with ambient_kept():
        compiler.run(*example_inputs, enable_io_processing=False)
        compiler.compile_waiting()
    for call in compiler.calls:
        compiler.add_border(call)
    restore_rng_in_checkpoints(cut)  # What was compiled is no graph module any more.
    _call_directly(cut, {call.name: call for call in compiler.calls})
    generate_code([cut])
    return cut.forward


def _call_directly(cut: GraphModule, calls: Mapping[str, PieceCall]) -> None:
    """Makes attributes of the compiled functions in the place of modules: each call of a module takes microseconds.

    Where nothing else has to be done, what the compiler made is called without what is around it.
    """
    known: dict[int, TrainedFunction | None] = {}
    trained: dict[str, TrainedFunction] = {}
    for node in cut.graph.find_nodes(op="call_module"):
        name, module = str(node.target), cut._modules.get(str(node.target))
        if not isinstance(module, Compiled | Bordered):
            continue
        delattr(cut, name)
        call = calls.get(name)
        vars(cut)[name] = module.forward if isinstance(module, Bordered) else module.function
        if call is None or _returns_dynamic_sizes(node, call):
            continue
        if call.is_trained():
            direct = _trained_directly(module, call, known)
            if direct is None:
                continue
            if isinstance(module, Compiled) or (module.only_removes_gradients() and call.has_one_gradient()):
                vars(cut)[name] = direct.direct()
                if direct.has_one_gradient():
                    trained[name] = direct
            else:
                module.function = direct.direct()
        elif call.needs_backward():
            log.debug("%s trains with the wrappers of AOTAutograd around it", name)
        elif call.is_pure() and isinstance(module, Compiled):
            code = behind_wrappers(module.function, output_count=len(call.outputs))
            if code is not None:
                vars(cut)[name] = _first_call(cut, name, module.function, code)
                node.args = (list(node.args),)
    record_together(cut, trained)
    cut.recompile()


def _trained_directly(
    module: Compiled | Bordered, call: PieceCall, known: dict[int, TrainedFunction | None]
) -> TrainedFunction | None:
    """What can be called without what AOTAutograd has around it, if that has nothing to do; of equal pieces, one."""
    function = module.function
    if id(function) not in known:
        known[id(function)] = trained_directly(function, input_count=len(call.args))
    return known[id(function)]


def _first_call(
    cut: GraphModule, name: str, function: Callable[..., Sequence[Any]], code: Callable[[], Boxed]
) -> Boxed:
    """Calls a compiled function, whose code is called directly from then on."""

    def call(args: list[Any]) -> Sequence[Any]:
        outputs = function(*args)
        # The code lives as long as the function.
        cut.meta.setdefault("partita_functions", {})[name] = function
        vars(cut)[name] = code()
        return outputs

    return call


def _returns_dynamic_sizes(node: Node, call: PieceCall) -> bool:
    """Whether the graph returns a result of a piece that has dynamic sizes, which AOTAutograd marks for Dynamo."""
    sizes = (size for value in call.outputs if isinstance(value, Tensor) for size in value.shape)
    if not any(isinstance(size, torch.SymInt) for size in sizes):
        return False
    items = (user for user in node.users if user.op != "output")
    return any(user.op == "output" for one in (node, *items) for user in one.users)


@final
class _PieceCompiler(Interpreter):
    """Runs the cut program node by node on fake tensors."""

    def __init__(
        self, cut: GraphModule, root: GraphModule, inner: Inner, mode: Any, *, shares: bool, progress: Progress
    ) -> None:
        super().__init__(cut)
        self._cut, self._root, self._inner, self._mode = cut, root, inner, mode
        self.calls: list[PieceCall] = []
        self._pieces = {name: module for name, module in cut.named_children() if isinstance(module, Piece)}
        self._uses_as_strided = any("as_strided" in str(node.target) for node in root.graph.nodes)
        self._codes = {name: piece.code() for name, piece in self._pieces.items()} if shares else {}
        self._shared = SharedPieces(self._codes.values()) if shares else None
        self._progress = progress
        for name, piece in self._pieces.items():
            if piece.is_to_compile():
                progress.expect(name, self._codes.get(name) or name)
        self._sources = dict(zip(cut.graph.find_nodes(op="placeholder"), sources_of(root), strict=True))

    def run_node(self, n: Node) -> Any:
        piece = self._piece(n)
        if piece is None:
            return self._run_outside_pieces(n)
        args = [to_fake(arg, self._mode) for arg in self.fetch_args_kwargs_from_env(n)[0]]
        body = piece.treated
        if not isinstance(body, GraphModule) or piece.stays_eager:  # The treatment has replaced the body, or keeps it.
            self._cut.add_module(str(n.target), body)
            return self._run_piece(n, piece, args).outputs
        reason = piece.uncompiled_because
        if reason is not None or _has_inference_tensors(args):
            self._leave_uncompiled(str(n.target), body, reason or "has inputs made in inference mode")
            return self._run_piece(n, piece, args).outputs
        reason = _why_aliased(piece, args)
        if reason is not None:
            self._leave_uncompiled(str(n.target), body, reason)
            return self._run_piece(n, piece, args).outputs
        needs_backward = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        if needs_backward and (program := Program(body)).once(mutated_positions):
            return self._run_and_compile(n, piece, program, args).outputs
        return self._compile_and_run(n, piece, args).outputs

    def compile_waiting(self) -> None:
        """Compiles the pieces that waited in vain for another one like them; called when all pieces have run."""
        for waiting in () if self._shared is None else self._shared.still_waiting():
            self._compile(waiting.call, waiting.body, waiting.args, waiting.key)

    def add_border(self, call: PieceCall) -> None:
        """Puts a border around a piece whose arguments or outputs are mutated; called when all pieces have run."""
        compiled, piece = self._cut.get_submodule(call.name), self._pieces[call.name]
        if isinstance(compiled, GraphModule):
            return  # It runs uncompiled.
        try:
            border = call.whole_border()
            self._check_copies(border)
        except AliasedMutationError as error:
            if isinstance(compiled, Compiled):
                self._leave_uncompiled(call.name, piece.fresh_body(), str(error))
            return
        if not isinstance(compiled, Compiled):
            border = Border(owned=border.owned)  # The treatment is responsible for what it saves.
        if border != Border():
            self._cut.add_module(call.name, Bordered(compiled, border))

    def _compile_and_run(self, node: Node, piece: Piece, args: list[Any]) -> PieceCall:
        """Compiles a piece, or lets it wait for an equal one with more gradients, and runs it."""
        body, shared = piece.treated, self._shared
        assert isinstance(body, GraphModule)
        code = self._codes.get(str(node.target))
        key = None if shared is None or code is None else piece_key(body, args, code)
        if shared is None or key is None:
            self._compile(node, body, args, None)
            forget_memos(self._mode)
            return self._run_piece(node, piece, args)
        if shared.is_to_wait(code, key):
            call = self._run_once(shared, key, node, piece, args)
            forget_memos(self._mode)
            shared.wait(WaitingPiece(key, node, body, args, call.outputs))
            return call
        self._compile(node, body, args, key)
        forget_memos(self._mode)
        call = self._run_once(shared, key, node, piece, args)
        for waiting in shared.waiting_for(key):
            if waiting.is_served_by(key, call.outputs):
                self._cut.add_module(str(waiting.call.target), self._cut.get_submodule(call.name))
            else:
                self._compile(waiting.call, waiting.body, waiting.args, waiting.key)
        return call

    def _run_and_compile(self, node: Node, piece: Piece, program: Program, args: list[Any]) -> PieceCall:
        """Runs a piece before compiling it, since the arguments it mutates decide how it is compiled."""
        body, mutated = program.graph_module, program.once(mutated_positions)
        piece.keep_graph()
        with runs_fake(self._mode):
            before = [arg.clone() if place in mutated else arg for place, arg in enumerate(args)]
        call = self._run_piece(node, piece, args)
        forget_memos(self._mode)
        try:
            own = call.own_mutations(read_once=_inputs_read_once(program))
            self._check_copies(own)
        except AliasedMutationError as error:
            self._leave_uncompiled(call.name, body, str(error))
            return call
        if own.mutated:
            copy_mutated_inputs(body, own.mutated, without=[place for place, _ in own.returned_args])
        inputs = [before[at] if at in own.mutated else arg for at, arg in enumerate(args)]
        self._compile(node, body, inputs, None if self._shared is None else piece_key(body, inputs))
        self.calls[-1] = call.now_compiled(own)
        return call

    def _run_piece(self, node: Node, piece: Piece, args: list[Any]) -> PieceCall:
        # Dynamo has imported it by now; this module is imported before, where the backend is only named.
        from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts

        before, edges, mutated = snapshots_of(args), edges_before(args), piece.mutated_args()
        ambient = read_ambient()
        with runs_fake(self._mode, as_dynamo=True), own_tracing_context(self._mode):
            outputs = piece.interpreter(PropagateUnbackedSymInts).run(*args)
        count_mutations([args[place] for place in mutated], before=[before[place] for place in mutated])
        casts = any(is_enabled for _, is_enabled, _ in ambient.autocast)
        keeps = read_ambient() == ambient
        modeless = keeps and not ambient.grad and not casts
        call = PieceCall.of(
            str(node.target), args, outputs, before=before, edges=edges, is_modeless=modeless, keeps_modes=keeps
        )
        self.calls.append(call)
        return call

    def _run_once(self, shared: SharedPieces, key: PieceKey, node: Node, piece: Piece, args: list[Any]) -> PieceCall:
        """Runs a piece, unless what it returns is known from an equal one."""
        call = self._run_like(shared.known_results(key), node, args) or self._run_piece(node, piece, args)
        shared.note_call(key, call)
        return call

    def _run_like(self, known: KnownResults | None, node: Node, args: list[Any]) -> PieceCall | None:
        """What a run of an equal piece with equal inputs returns, if that is only new memory; None if it must run.

        Nothing computes gradients of that: graphs that run a backward are not compiled in pieces.
        """
        if known is None:
            return None
        before, edges = snapshots_of(args), edges_before(args)
        with runs_fake(self._mode):
            outputs = known.make(args)
        if outputs is None:
            return None
        modeless, name = known.is_modeless, str(node.target)
        call = PieceCall.of(name, args, outputs, before=before, edges=edges, is_modeless=modeless, keeps_modes=True)
        self.calls.append(call)
        return call

    def _check_copies(self, border: Border) -> None:
        """Raises where a copy would not do: `as_strided` may read memory around the elements of a tensor."""
        if self._uses_as_strided and (border.copied or border.copied_outputs):
            raise AliasedMutationError("has an input or output that is mutated, and the graph uses as_strided")

    def _leave_uncompiled(self, name: str, body: GraphModule, reason: str) -> None:
        log.warning("%s %s; it runs uncompiled", name, reason)
        self._cut.add_module(name, body)

    def _piece(self, node: Node) -> Piece | None:
        return self._pieces.get(str(node.target)) if node.op == "call_module" else None

    def _run_outside_pieces(self, node: Node) -> Any:
        computes = node.op != "placeholder"
        with runs_fake(self._mode, as_dynamo=True) if computes else nullcontext():
            result = to_fake(super().run_node(node), self._mode)
        from torch.fx.experimental.symbolic_shapes import rebind_unbacked

        source = node.args[0] if node.target is operator.getitem else None
        # Unbacked symbols in an item of a piece's output were bound inside the piece.
        if not isinstance(source, Node) or self._piece(source) is None:
            rebind_unbacked(self._mode.shape_env, node, result)
        return result

    def _compile(self, call: Node, body: GraphModule, args: Sequence[Any], key: PieceKey | None) -> None:
        shared = self._shared
        known = None if shared is None or key is None else shared.found(key)
        if known is not None:
            self._cut.add_module(str(call.target), known)
            return
        self._pieces[str(call.target)].keep_graph()
        sources = [self._sources.get(arg) if isinstance(arg, Node) else None for arg in call.args]
        adopt_origin(body, self._root, sources=sources, args=args)
        begin = time.perf_counter()
        try:
            with own_tracing_context(self._mode):
                compiled = self._inner(body, list(args))
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            # Eager mode allows it as long as no backward needs the old value; a compiled piece has one for all.
            reason = "mutates a value that its backward would need"
            self._leave_uncompiled(str(call.target), self._pieces[str(call.target)].fresh_body(), reason)
            return
        if not callable(compiled):
            raise OptionError(
                f"the inner backend {self._inner!r} returned {type(compiled).__name__} for {call.target!r}; "
                "it must return a function that is called like the graph"
            )
        self._progress.note(str(call.target), time.perf_counter() - begin)
        module = compiled if isinstance(compiled, Compiled) else Compiled(compiled)
        self._cut.add_module(str(call.target), module)
        if shared is not None and key is not None:
            shared.add(key, module)


def _inputs_read_once(program: Program) -> tuple[int, ...]:
    """The positions of inputs whose storage only one node of the body reads, such as the statistics of a batch norm."""
    index, storages = program.index, program.calls.storages
    readers: dict[int, set[Node]] = {}
    for i, node in enumerate(index.nodes):
        readers.setdefault(storages.find(i), set()).update(node.users)
    inputs = enumerate(program.graph.find_nodes(op="placeholder"))
    return tuple(place for place, node in inputs if len(readers[storages.find(index.number[node])]) <= 1)


def _why_aliased(piece: Piece, args: Sequence[Any]) -> str | None:
    """Why a piece is not compiled that mutates an argument which overlaps another one; None if there is none.

    AOTAutograd (torch 2.13) makes such arguments anew as views of one of them, and gets the shape or the offset of some
    outputs wrong, under `no_grad` without an error.
    """
    if len({memory_of(arg) for arg in args}) == len(args):
        return None
    pairs = ((place, at) for place in piece.mutated_args() for at in range(len(args)) if at != place)
    found = next(((place, at) for place, at in pairs if may_overlap(args[place], args[at])), None)
    return None if found is None else f"mutates argument {found[0]}, which shares memory with another"


def _has_inference_tensors(args: Sequence[Any]) -> bool:
    """Whether a compiled piece could fail: AOTAutograd (torch 2.13) mutates its inputs outside of inference mode."""
    if torch.is_inference_mode_enabled():
        return False
    return any(arg.is_inference() for arg in args if isinstance(arg, torch.Tensor))


@final
class Piece(nn.Module):
    """A region's body and the result of its treatment: a placeholder until it is compiled, never called."""

    def __init__(
        self, body: GraphModule, treated: nn.Module, uncompiled_because: str | None, *, stays_eager: bool
    ) -> None:
        super().__init__()
        self.stays_eager = stays_eager
        #: Why it must not be compiled.
        self.uncompiled_because = uncompiled_because
        self.body = body
        self.treated = treated
        self._kept_graph: Graph | None = None
        self._mutated_args: tuple[int, ...] | None = None

    @property
    def graph(self) -> Graph:
        """The graph of the body as it was before a compiler got it."""
        return self.body.graph if self._kept_graph is None else self._kept_graph

    def code(self) -> Hashable | None:
        """What is equal for pieces with equal bodies, before a compiler got them; None for one that equals no other."""
        return body_key(self.treated) if isinstance(self.treated, GraphModule) else None

    def is_to_compile(self) -> bool:
        """Whether it is left to the inner backend."""
        return isinstance(self.treated, GraphModule) and not self.stays_eager and self.uncompiled_because is None

    def keep_graph(self) -> None:
        """Keeps a copy of the graph: a compiler owns the graph that it compiles and may change it."""
        if self._kept_graph is None:
            self._kept_graph = copy.deepcopy(self.body.graph)

    def mutated_args(self) -> tuple[int, ...]:
        """The arguments that its operators mutate, as far as their schemas say."""
        if self._mutated_args is None:
            program = Program(self.fresh_body())
            self._mutated_args = () if program.effects.barriers else program.once(mutated_positions)
        return self._mutated_args

    def fresh_body(self) -> GraphModule:
        """The body as it was before a compiler got it."""
        return GraphModule(self.body, self.graph)

    def interpreter(self, kind: type[Interpreter]) -> Interpreter:
        """Runs the body node by node, without generating code for it."""
        return kind(self.body, graph=self.graph)


@final
class Compiled(nn.Module):
    """A compiled function, called as a module."""

    def __init__(self, function: Callable[..., Sequence[Any]]) -> None:
        super().__init__()
        self.function: Callable[..., Sequence[Any]] = without_disabling(function)

    def forward(self, *args: Any) -> Sequence[Any]:
        return self.function(*args)


@final
@dataclass(frozen=True, slots=True)
class DeferredTreatment:
    """A treatment whose result becomes a piece, to be compiled later."""

    treatment: Treatment

    @property
    def tolerance(self) -> Tolerance:
        return tolerance_of(self.treatment)

    @property
    def allows_mixed_modes(self) -> bool:
        return allows_mixed_modes(self.treatment)

    def treat_at(self, body: GraphModule, site: Site) -> Piece:
        treated: nn.Module | Called = body
        if annotation_suffices(self.treatment):
            pass  # The compiler of the piece reads the annotations.
        elif isinstance(self.treatment, TreatsAt):
            treated = self.treatment.treat_at(body, site)
        elif isinstance(self.treatment, Treats):
            treated = self.treatment.treat(body)
        # A piece is compiled as a whole, so it sets its modes itself and needs no operator for that.
        module = body if isinstance(treated, Called) else treated
        return Piece(body, module, _why_uncompiled(body, site), stays_eager=stays_eager(self.treatment))


def _why_uncompiled(body: GraphModule, site: Site) -> str | None:
    """Why a region must not be compiled apart from the rest of the graph; None if it may be."""
    if site.program is None or len(site.region.nodes) == len(site.program.operators()):
        return lost_backward(body)  # One compiled graph has all other gradients, and no tensor that crosses.
    return _reshapes_across(body) or lost_backward(body) or _split_hook(site)


def _reshapes_across(body: GraphModule) -> str | None:
    """Whether a tensor that is reshaped in place shares memory with an input or an output."""
    reshaping = [node for node in body.graph.nodes if _is_or_runs(reshapes_in_place, node, body)]
    if not reshaping:
        return None
    # AOTAutograd (torch 2.13) loses strides and gradients of views of such a tensor.
    inputs, outputs, found = _memory(body, reshaping)
    crosses = not found.isdisjoint(inputs.union(outputs))
    return "reshapes a tensor in place that crosses its border" if crosses else None


def lost_backward(body: GraphModule) -> str | None:
    """Why AOTAutograd (torch 2.13) would lose the backward of an autograd function in a graph; None if it would not.

    It makes anew what aliases an input or another output, by views.
    """
    own = [node for node in body.graph.nodes if _is_or_runs(aliases_with_own_backward, node, body)]
    if not own:
        return None
    inputs, outputs, found = _memory(body, own)
    lost = found.intersection(inputs.union(memory for memory, count in Counter(outputs).items() if count > 1))
    return "has an autograd function whose result shares memory with what crosses its border" if lost else None


def _memory(body: GraphModule, nodes: Iterable[Node]) -> tuple[set[int], list[int], set[int]]:
    """What memory the inputs of a body, its distinct outputs, and these nodes with their arguments have, as numbers."""
    program = Program(body)
    index, storages = program.index, program.calls.storages
    inputs = {storages.find(index.number[node]) for node in body.graph.find_nodes(op="placeholder")}
    outputs = [storages.find(number) for number in dict.fromkeys(index.inputs(len(index) - 1))]
    read = (number for node in nodes for number in (index.number[node], *index.inputs(index.number[node])))
    return inputs, outputs, set(map(storages.find, read))


def _is_or_runs(question: Callable[[Node], bool], node: Node, root: GraphModule) -> bool:
    """Whether the answer for a node is yes, or that for a node in a body that it runs."""
    if node.op not in ("call_function", "call_method"):
        return False
    bodies = (root.get_submodule(str(one.target)) for one in node.all_input_nodes if _is_module(one, root))
    graphs = (one for body in bodies for one in body.modules() if isinstance(one, GraphModule))
    return question(node) or any(question(one) for inner in graphs for one in inner.graph.nodes)


def _is_module(node: Node, root: GraphModule) -> bool:
    return node.op == "get_attr" and str(node.target) in root._modules


def _split_hook(site: Site) -> str | None:
    assert site.program is not None
    nodes = set(site.region.nodes)
    tensors = (one for one in site.program.once(tensors_with_hooks) if one.is_certain)
    hooked = next((one for one in tensors if one.is_divided_by(nodes)), None)
    return None if hooked is None else f"contributes to the gradients that the hook {hooked.hook.name!r} receives"
