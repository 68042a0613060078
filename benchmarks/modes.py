"""How soon modes become operators, beside torch's passes, and become toggles again."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import partial

from torch._export.passes import replace_autocast_with_hop_pass as torch_autocast
from torch._export.passes import replace_set_grad_with_hop_pass as torch_grad
from torch.fx import GraphModule

from benchmarks.mode_graphs import build_nest, build_with_modes
from benchmarks.rows import Row, at_least, at_most
from benchmarks.scales import Scale
from benchmarks.timing import interleaved, median, within
from partita import Program, inline, mode_tree, plan
from partita.compat import replace_autocast_with_hop_pass as our_autocast
from partita.compat import replace_set_grad_with_hop_pass as our_grad
from partita.policies import ByMode
from partita.treatments import Mode

__all__ = ["rows"]

_PASSES: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "grad": (our_grad.replace_set_grad_with_hop_pass, torch_grad.replace_set_grad_with_hop_pass),
    "autocast": (our_autocast.replace_autocast_with_hop_pass, torch_autocast.replace_autocast_with_hop_pass),
}
#: torch's passes are at least quadratic in the number of toggles, so they are stopped after this many CPU seconds.
_LIMIT_S = 20.0


def rows(scale: Scale) -> Iterator[Row]:
    """Each kind of mode, with few toggles and with many, up to the largest graph; then how ours and nests grow."""
    for kind in _PASSES:
        for share in (0.01, 0.2):
            ours = {}
            for nodes in scale.mode_nodes:
                module = build_with_modes(kind, nodes, share)
                case = f"{kind}, {share:.0%} toggles, {nodes:,}"
                ours[nodes] = yield from _beside_torch(kind, case, nodes, module)
            small, large = scale.mode_nodes[-2], scale.mode_nodes[-1]
            yield Row(
                section="growth of modes as operators",
                case=f"{kind}, {share:.0%} toggles, {large:,}",
                unit="ms",
                ours=ours[large] * 1e3,
                beside=f"ours at {small:,}",
                other=ours[small] * 1e3,
                reading="times as long",
                value=ours[large] / ours[small],
                target=at_most(1.25 * large / small) if small >= 16_000 else None,
            )
    yield from _nests(*scale.nest_depths)


def _nests(small: int, large: int) -> Iterator[Row]:
    """How what is done to a nest of blocks grows with its depth; eight times as deep is ten times as much, n log n."""
    taken = {depth: _nest_taken(depth) for depth in (small, large)}
    for way, times in taken[large].items():
        before, after = median(taken[small][way]), median(times)
        yield Row(
            section=f"growth with the depth of a nest: {way}",
            case=f"autocast, {large:,} blocks",
            unit="ms",
            ours=after * 1e3,
            beside=f"ours at {small:,}",
            other=before * 1e3,
            reading="times as long",
            value=after / before,
            target=at_most(2 * large / small) if small >= 32 else None,
        )


def _nest_taken(depth: int) -> dict[str, list[float]]:
    module = build_nest(depth)
    nested = _wrapped(module)
    return interleaved(
        {
            "plan": lambda: _wrapped(module),
            "inline": lambda: inline(nested),
            "mode_tree": lambda: mode_tree(module),
        },
        repeats=3,
    )


def _beside_torch(kind: str, case: str, nodes: int, module: GraphModule) -> Generator[Row, None, float]:
    our_pass, torch_pass = _PASSES[kind]
    taken = interleaved(
        {
            "compat": lambda: our_pass(module, None),
            "plan": lambda: _wrapped(module),
            "there and back": lambda: inline(_wrapped(module)),
        },
        repeats=3,
    )
    spent, finished = within(_LIMIT_S, partial(torch_pass, module, None)) if nodes <= 16_000 else (None, False)
    for way, times in taken.items():
        yield Row(
            section=f"modes as operators: {way}",
            case=case,
            unit="ms",
            ours=median(times) * 1e3,
            beside=""
            if spent is None
            else "torch's pass"
            if finished
            else f"torch's pass, stopped after {_LIMIT_S:g} s",
            other=None if spent is None else spent * 1e3,
            reading="" if spent is None else "times sooner" if finished else "times sooner at least",
            value=None if spent is None else spent / median(times),
            target=at_least(10) if nodes == 16_000 else None,
        )
    return median(taken["compat"])


def _wrapped(module: GraphModule) -> Program:
    return plan(Program.of(module), ByMode(), Mode()).apply()
