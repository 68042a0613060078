"""Regions on their way to a compiler."""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts, rebind_unbacked

from partita._torch.fake_sandbox import ambient_kept, forget_memos, runs_fake, shared_fake_mode, to_fake
from partita.analysis.tolerance import Tolerance
from partita.errors import OptionError
from partita.plans.treatment import (
    Called,
    Site,
    Treatment,
    Treats,
    TreatsAt,
    allows_mixed_modes,
    annotation_suffices,
    tolerance_of,
)
from partita.program.body_effects import seen_once, written_inputs
from partita.program.program import Program
from partita.rewrite.bodies import copy_mutated_inputs
from partita.torch_compile._torch.backends import adopt_origin, own_tracing_context, sources_of
from partita.torch_compile.options import Inner
from partita.torch_compile.piece_borders import Border, Bordered, PieceCall, SharedMemoryError, edges_before, look_at

__all__ = ["Waiting", "compile_pieces"]


# Compiling pieces: a run of the cut program on fake tensors, in which each piece is compiled when its turn comes.
#
# The traced values in Dynamo's metadata cannot be the example inputs: they are as the end of the trace left them (a
# tensor that was written may require a gradient since), and their fake mode is no longer the one in force.


log = logging.getLogger(__name__)


def compile_pieces(cut: GraphModule, root: GraphModule, inner: Inner, example_inputs: Sequence[Any]) -> None:
    """Puts what `inner` makes of it in the place of every piece of `cut`, which is Dynamo's graph `root` in parts."""
    compiler = _PieceCompiler(cut, root, inner, shared_fake_mode(example_inputs))
    with ambient_kept():
        compiler.run(*example_inputs, enable_io_processing=False)
    for call in compiler.calls:
        compiler.settle(call)


@final
class _PieceCompiler(Interpreter):
    """Runs the cut program node by node on fakes."""

    def __init__(self, cut: GraphModule, root: GraphModule, inner: Inner, mode: Any) -> None:
        super().__init__(cut)
        self._cut, self._root, self._inner, self._mode = cut, root, inner, mode
        self.calls: list[PieceCall] = []
        self._pieces = {name: module for name, module in cut.named_children() if isinstance(module, Piece)}
        self._reads_by_place = any("as_strided" in str(node.target) for node in root.graph.nodes)
        self._sources = dict(zip(cut.graph.find_nodes(op="placeholder"), sources_of(root), strict=True))

    def run_node(self, n: Node) -> Any:
        piece = self._piece(n)
        if piece is None:
            return self._run_alone(n)
        args = [to_fake(arg, self._mode) for arg in self.fetch_args_kwargs_from_env(n)[0]]
        body = piece.treated
        if not isinstance(body, GraphModule):  # The treatment has decided what runs.
            self._cut.add_module(str(n.target), body)
            return self._run_piece(n, piece, args).outputs
        if piece.left_because is not None or _holds_inference_tensors(args):
            self._leave(str(n.target), body, piece.left_because or "takes tensors made in an inference block")
            return self._run_piece(n, piece, args).outputs
        trained = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        if trained and written_inputs(program := Program(body)):
            return self._run_and_compile(n, piece, program, args).outputs
        self._compile(n, body, args)
        forget_memos(self._mode)
        return self._run_piece(n, piece, args).outputs

    def settle(self, call: PieceCall) -> None:
        """Puts a border around a piece whose arguments or results somebody writes; all have run."""
        compiled, piece = self._cut.get_submodule(call.name), self._pieces[call.name]
        if isinstance(compiled, GraphModule):
            return  # It runs as it is.
        try:
            border = call.whole_border()
            self._check_copies(border)
        except SharedMemoryError as error:
            if isinstance(compiled, Compiled):
                self._leave(call.name, GraphModule(piece.body, piece.graph), str(error))
            return
        if not isinstance(compiled, Compiled):
            border = Border(owned=border.owned)  # What a treatment gave knows what it saves.
        if border != Border():
            self._cut.add_module(call.name, Bordered(compiled, border))

    def _run_and_compile(self, node: Node, piece: Piece, program: Program, args: list[Any]) -> PieceCall:
        """Runs a piece that may write its arguments first, since how it is compiled depends on what it does to them."""
        body, written = program.graph_module, written_inputs(program)
        with runs_fake(self._mode):
            before = [arg.clone() if place in written else arg for place, arg in enumerate(args)]
        call = self._run_piece(node, piece, args)
        forget_memos(self._mode)
        try:
            own = call.own_writes(seen_once=seen_once(program))
            self._check_copies(own)
        except SharedMemoryError as error:
            self._leave(call.name, body, str(error))
            return call
        if own.written:
            copy_mutated_inputs(body, own.written, without=[place for place, _ in own.handed_back])
        self._compile(node, body, [before[at] if at in own.written else arg for at, arg in enumerate(args)])
        self.calls[-1] = call.now_compiled(own)
        return call

    def _run_piece(self, node: Node, piece: Piece, args: list[Any]) -> PieceCall:
        before, edges = look_at(args), edges_before(args)
        with runs_fake(self._mode, as_dynamo=True), own_tracing_context(self._mode):
            outputs = piece.interpreter(PropagateUnbackedSymInts).run(*args)
        self.calls.append(PieceCall.of(str(node.target), args, outputs, before=before, edges=edges))
        return self.calls[-1]

    def _check_copies(self, border: Border) -> None:
        """A copy has the elements of a tensor, not the memory around them, which some node may read by its place."""
        if self._reads_by_place and (border.copied or border.copied_outputs):
            raise SharedMemoryError("takes or gives a tensor that is written, and the graph uses as_strided")

    def _leave(self, name: str, body: GraphModule, reason: str) -> None:
        log.warning("%s %s; it runs as it is, uncompiled", name, reason)
        self._cut.add_module(name, body)

    def _piece(self, node: Node) -> Piece | None:
        return self._pieces.get(str(node.target)) if node.op == "call_module" else None

    def _run_alone(self, node: Node) -> Any:
        with runs_fake(self._mode, as_dynamo=True):
            result = to_fake(super().run_node(node), self._mode)
        if not self._is_output_of_piece(node):
            rebind_unbacked(self._mode.shape_env, node, result)
        return result

    def _is_output_of_piece(self, node: Node) -> bool:
        """Whether `node` takes out what a piece gave; unbacked symbols in it have got their names inside."""
        source = node.args[0] if node.target is operator.getitem else None
        return isinstance(source, Node) and self._piece(source) is not None

    def _compile(self, call: Node, body: GraphModule, args: list[Any]) -> None:
        sources = [self._sources.get(arg) if isinstance(arg, Node) else None for arg in call.args]
        adopt_origin(body, self._root, sources=sources, args=args)
        with own_tracing_context(self._mode):
            compiled = self._inner(body, args)
        if not callable(compiled):
            raise OptionError(
                f"the inner backend {self._inner!r} gave {type(compiled).__name__} for {call.target!r}; "
                "it must give a function that is called like the graph"
            )
        self._cut.add_module(str(call.target), compiled if isinstance(compiled, Compiled) else Compiled(compiled))


def _holds_inference_tensors(args: Sequence[Any]) -> bool:
    """Whether a compiled piece could fail: AOTAutograd (torch 2.13) writes to its inputs after the block is left."""
    if torch.is_inference_mode_enabled():
        return False
    return any(arg.is_inference() for arg in args if isinstance(arg, torch.Tensor))


# Pieces: regions on their way to a compiler, and what stands in their place afterwards.


@final
class Piece(nn.Module):
    """A region's body and what its treatment made of it; it waits for its compiler and is never called."""

    def __init__(self, body: GraphModule, treated: nn.Module, left_because: str | None) -> None:
        super().__init__()
        #: Why no compiler may have it.
        self.left_because = left_because
        self.body = body
        self.treated = treated
        #: Compilers own the graph that they are given and may change it, so its meaning is kept apart.
        self.graph: Graph = copy.deepcopy(body.graph)

    def interpreter(self, kind: type[Interpreter]) -> Interpreter:
        """What runs the body node by node, without generating code for it."""
        return kind(self.body, graph=self.graph)


@final
class Compiled(nn.Module):
    """The function that a compiler gave, called as a module."""

    def __init__(self, function: Callable[..., Sequence[Any]]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any) -> Sequence[Any]:
        return self._function(*args)


@final
@dataclass(frozen=True, slots=True)
class Waiting:
    """A treatment whose result waits as a piece instead of being called."""

    treatment: Treatment

    @property
    def tolerance(self) -> Tolerance:
        return tolerance_of(self.treatment)

    @property
    def allows_mixed_modes(self) -> bool:
        return allows_mixed_modes(self.treatment)

    def treat_at(self, body: GraphModule, site: Site) -> Piece:
        given: nn.Module | Called = body
        if annotation_suffices(self.treatment):
            pass  # The compiler of the piece reads them.
        elif isinstance(self.treatment, TreatsAt):
            given = self.treatment.treat_at(body, site)
        elif isinstance(self.treatment, Treats):
            given = self.treatment.treat(body)
        # A piece is compiled as a whole, so it sets its modes itself and needs no operator for that.
        return Piece(body, body if isinstance(given, Called) else given, _divided_hook(site))


def _divided_hook(site: Site) -> str | None:
    if site.program is None or len(site.region.nodes) == len(site.program.operators()):
        return None  # What is compiled whole has all gradients.
    nodes = set(site.region.nodes)
    tensors = (one for one in site.program.hooked_tensors if one.is_certain)
    hooked = next((one for one in tensors if one.is_divided_by(nodes)), None)
    return None if hooked is None else f"has a share in the gradients that the hook {hooked.hook.name!r} gets"
