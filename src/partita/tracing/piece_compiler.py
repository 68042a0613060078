"""Compiling pieces: a run of the cut program on fake tensors, in which each piece is compiled when its turn comes.

The traced values in Dynamo's metadata cannot be the example inputs: they are as the end of the trace left them (a
tensor that was written may require a gradient since), and their fake mode is no longer the one in force.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts, rebind_unbacked

from partita._torch.dynamo import own_tracing_context
from partita._torch.dynamo_fakes import ambient_kept, forget_memos, runs_fake, shared_fake_mode, to_fake
from partita._torch.dynamo_origin import adopt_origin, sources_of
from partita.errors import OptionError
from partita.tracing.backend_options import Inner
from partita.tracing.owned_outputs import OwnedOutputs, PieceCall
from partita.tracing.pieces import Compiled, Piece

__all__ = ["compile_pieces"]

log = logging.getLogger(__name__)


def compile_pieces(cut: GraphModule, root: GraphModule, inner: Inner, example_inputs: Sequence[Any]) -> None:
    """Puts what `inner` makes of it in the place of every piece of `cut`, which is Dynamo's graph `root` in parts."""
    compiler = _PieceCompiler(cut, root, inner, shared_fake_mode(example_inputs))
    with ambient_kept():
        compiler.run(*example_inputs, enable_io_processing=False)
    for call in compiler.calls:
        compiled = cut.get_submodule(call.name)
        if call.was_written_since() and not isinstance(compiled, GraphModule):
            cut.add_module(call.name, OwnedOutputs(compiled, call.owned()))


@final
class _PieceCompiler(Interpreter):
    """Runs the cut program node by node on fakes."""

    def __init__(self, cut: GraphModule, root: GraphModule, inner: Inner, mode: Any) -> None:
        super().__init__(cut)
        self._cut, self._root, self._inner, self._mode = cut, root, inner, mode
        self.calls: list[PieceCall] = []
        self._sources = dict(zip(cut.graph.find_nodes(op="placeholder"), sources_of(root), strict=True))

    def run_node(self, n: Node) -> Any:
        piece = self._piece(n)
        if piece is None:
            return self._run_alone(n)
        args = [to_fake(arg, self._mode) for arg in self.fetch_args_kwargs_from_env(n)[0]]
        self._cut.add_module(str(n.target), self._compiled(n, piece.treated, args))
        forget_memos(self._mode)
        with runs_fake(self._mode, as_dynamo=True), own_tracing_context(self._mode):
            outputs = piece.interpreter(PropagateUnbackedSymInts).run(*args)
        self.calls.append(PieceCall.of(str(n.target), args, outputs))
        return outputs

    def _piece(self, node: Node) -> Piece | None:
        module = self.submodules.get(str(node.target)) if node.op == "call_module" else None
        return module if isinstance(module, Piece) else None

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

    def _compiled(self, call: Node, treated: nn.Module, args: list[Any]) -> nn.Module:
        if not isinstance(treated, GraphModule):
            return treated  # The treatment has decided what runs.
        if _holds_inference_tensors(args):
            log.info("%s takes tensors made in an inference block, so it runs as it is", call.target)
            return treated
        sources = [self._sources.get(arg) if isinstance(arg, Node) else None for arg in call.args]
        adopt_origin(treated, self._root, sources=sources, args=args)
        with own_tracing_context(self._mode):
            compiled = self._inner(treated, args)
        if not callable(compiled):
            raise OptionError(
                f"the inner backend {self._inner!r} gave {type(compiled).__name__} for {call.target!r}; "
                "it must give a function that is called like the graph"
            )
        return compiled if isinstance(compiled, nn.Module) else Compiled(compiled)


def _holds_inference_tensors(args: Sequence[Any]) -> bool:
    """Whether a compiled piece could fail: AOTAutograd (torch 2.13) writes to its inputs after the block is left."""
    if torch.is_inference_mode_enabled():
        return False
    return any(arg.is_inference() for arg in args if isinstance(arg, torch.Tensor))
