"""`partita inspect`: what is in a program, and what would stop a cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita_cli.options import AsJson, Imports, Operators, ProgramPath, Trusted, examples
from partita_cli.output import counted, say, say_json, table, title, working
from partita_cli.sources import read_program

if TYPE_CHECKING:
    from torch.fx import Node

    from partita import Program

NEEDS_ARGUMENTS = True
EPILOG = examples(
    "partita inspect model.pt2",
    "partita inspect model.pt2 --json | jq .operators",
)
#: How many kinds of operators, and of other things, are printed; JSON has all.
_SHOWN = 12
#: Upper ends of ranges beyond this are no limits.
_NO_LIMIT = 10**15


def command(
    program: ProgramPath,
    operators: Operators = None,
    imports: Imports = None,
    trusted: Trusted = False,
    json: AsJson = False,
) -> None:
    """Say what is in a program: operators, modes, effects, symbols, parameters, FLOPs, repeated blocks, barriers."""
    found = read_program(program, trusted=trusted, operators=operators, imports=imports)
    with working("analysing"):
        data = facts_of(found, program)
    if json:
        say_json(data)
    else:
        _print(data)


def facts_of(program: Program, path: Path) -> dict[str, Any]:
    """What is known about a program, as plain data.

    Operators are counted where they run: those in the body of a mode block, or of a region that was cut, too.
    """
    from partita import inline
    from partita.plans.report import called_name
    from partita.program.flops import Flops
    from partita.program.program import counted_operators

    calls = _calls_of_bodies(program)
    flat = inline(program) if calls else program
    operators = [flat.index.nodes[number] for number in sorted(flat.once(counted_operators))]
    return {
        "file": str(path),
        "nodes": len(program.index),
        "outer_operators": len(program.once(counted_operators)),
        "operators": dict(Counter(map(called_name, operators)).most_common()),
        "bodies": calls,
        "inputs": _inputs(program),
        "outputs": _outputs(program),
        "state": _state(program),
        "symbols": _symbols(program),
        "modes": _modes(flat, operators),
        "effects": _effects(flat),
        "flops": Flops().total(operators),
        "repeats": _repeats(flat),
        "barriers": _barriers(flat),
    }


def _calls_of_bodies(program: Program) -> dict[str, int]:
    """The operators that run bodies, and how often each is called."""
    from torch.fx import GraphModule

    from partita.plans.report import called_name

    root = program.graph_module
    read = [node for node in program.graph.find_nodes(op="get_attr") if "." not in str(node.target)]
    bodies = [node for node in read if isinstance(getattr(root, str(node.target), None), GraphModule)]
    users = {user: None for node in bodies for user in node.users}
    return dict(Counter(called_name(user) for user in users).most_common())


def _inputs(program: Program) -> list[dict[str, Any]]:
    from torch.export.graph_signature import InputKind

    export = program.export
    kinds = {} if export is None else {one.arg.name: one.kind for one in export.signature.input_specs}
    nodes = program.graph.find_nodes(op="placeholder")
    given = (node for node in nodes if kinds.get(node.name, InputKind.USER_INPUT) is InputKind.USER_INPUT)
    return [{"name": node.name, **_shape(node)} for node in given]


def _outputs(program: Program) -> list[dict[str, Any]]:
    from torch.export.graph_signature import OutputKind

    returned: Any = program.graph.output_node().args[0]
    nodes = list(returned) if isinstance(returned, tuple | list) else [returned]
    kinds = [] if program.export is None else [one.kind for one in program.export.signature.output_specs]
    kinds = kinds if len(kinds) == len(nodes) else [OutputKind.USER_OUTPUT] * len(nodes)
    given = [node for node, kind in zip(nodes, kinds, strict=True) if kind is OutputKind.USER_OUTPUT]
    return [{"name": node.name, **_shape(node)} for node in given if hasattr(node, "op")]


def _shape(node: Node) -> dict[str, Any]:
    from torch import Tensor

    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": [_number(size) for size in value.shape]}
    return {"dtype": type(value).__name__, "shape": None}


def _number(size: Any) -> int | str:
    return size if isinstance(size, int) else str(size)


def _state(program: Program) -> dict[str, dict[str, int]]:
    """How many parameters, buffers and constants there are, and their bytes; a tied tensor counts once."""
    from torch import nn

    from partita.analysis.effects.calls import tensors_of

    export = program.export
    if export is None:
        tensors = list(tensors_of(program.graph_module))
    else:
        tensors = [*export.state.values(), *export.constants.values()]
    distinct = {id(one): one for one in tensors if hasattr(one, "numel")}.values()
    constants = set() if export is None else {id(one) for one in export.constants.values()}
    found = {kind: {"count": 0, "elements": 0, "bytes": 0} for kind in ("parameters", "buffers", "constants")}
    for tensor in distinct:
        kind = "constants" if id(tensor) in constants else "buffers"
        kind = "parameters" if isinstance(tensor, nn.Parameter) else kind
        found[kind]["count"] += 1
        found[kind]["elements"] += tensor.numel()
        found[kind]["bytes"] += tensor.numel() * tensor.element_size()
    return found


def _symbols(program: Program) -> dict[str, str]:
    """The symbols of sizes, with the range of each."""
    ranges = {} if program.export is None else program.export.ranges
    upper = {symbol: "any" if one.upper > _NO_LIMIT else one.upper for symbol, one in ranges.items()}
    return {str(symbol): f"{one.lower} to {upper[symbol]}" for symbol, one in ranges.items()}


def _modes(program: Program, operators: Sequence[Node]) -> dict[str, int]:
    """How many operators run under each mode, beside that of the caller."""
    from partita.analysis.modes import AMBIENT

    if program.modes.by_number is None:
        return {}
    modes = [program.modes.at(program.index.number[node]) for node in operators]
    return {str(mode): count for mode, count in Counter(modes).items() if mode != AMBIENT}


def _effects(program: Program) -> dict[str, Any]:
    effects, nodes = program.effects, program.index.nodes
    mutating = program.mutations.mutating_nodes() if effects.effectful else ()
    known = {*effects.rng_nodes, *effects.barriers, *(program.index.number[program.node(name)] for name in mutating)}
    return {
        "mutations": list(mutating),
        "mutated_inputs": [nodes[number].name for number in effects.mutated_inputs],
        "random": [nodes[number].name for number in effects.rng_nodes if number not in effects.barriers],
        "other": [nodes[number].name for number in sorted(effects.effectful - known)],
    }


def _barriers(program: Program) -> list[dict[str, str]]:
    """The calls of which nothing is known, past which nothing with an effect moves."""
    from partita.plans.report import called_name

    nodes = [program.index.nodes[number] for number in program.effects.barriers]
    return [{"node": node.name, "calls": called_name(node)} for node in nodes]


def _repeats(program: Program) -> list[dict[str, Any]]:
    """The blocks that repeat, most often called first."""
    from partita.plans.report import distinct_bodies
    from partita.policies import Repeats

    bodies = [body for body in distinct_bodies(Repeats()(program)) if body.calls > 1]
    return [
        {"name": body.name, "calls": body.calls, "nodes": body.nodes}
        for body in sorted(bodies, key=lambda body: -body.calls * body.nodes)
    ]


def _print(data: dict[str, Any]) -> None:
    title(data["file"])
    table([(name, text) for name, text in _rows(data)], indent="  ")
    for name, entries in (("inputs", data["inputs"]), ("outputs", data["outputs"])):
        title(f"\n{counted(len(entries), name.removesuffix('s'))}")
        table([(one["name"], one["dtype"], _shape_text(one["shape"])) for one in entries[:_SHOWN]], indent="  ")
        _say_rest(len(entries))
    title(f"\n{counted(len(data['operators']), 'kind')} of operators")
    table([(count, name) for name, count in list(data["operators"].items())[:_SHOWN]], indent="  ")
    _say_rest(len(data["operators"]))
    if data["repeats"]:
        title("\nblocks that repeat")
        shown = data["repeats"][:_SHOWN]
        table([(one["name"], f"{one['calls']} calls", counted(one["nodes"], "node")) for one in shown], indent="  ")
    if data["barriers"]:
        title("\nbarriers: nothing with an effect moves past these calls, whose effects are unknown")
        table([(one["node"], one["calls"]) for one in data["barriers"][:_SHOWN]], indent="  ")
        _say_rest(len(data["barriers"]))
        say("  where they have none, say so in Python: Program.of(..., pure=[...])")


def _rows(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    bodies = ", ".join(f"{count} of {name}" for name, count in data["bodies"].items())
    yield "nodes", f"{data['nodes']:,}" + (f"; calls of bodies: {bodies}" if bodies else "")
    count = sum(data["operators"].values())
    outer = f"; {data['outer_operators']:,} in the graph itself, calls of bodies among them" if bodies else ""
    yield "operators", f"{count:,}{outer}"
    for kind, one in data["state"].items():
        if one["count"]:
            yield kind, f"{one['count']:,} tensors, {one['elements']:,} elements, {one['bytes']:,} bytes"
    yield "flops", f"{data['flops']:,}, of a forward with the sizes that were traced"
    yield "symbols", ", ".join(f"{name} ({range_})" for name, range_ in data["symbols"].items()) or "none: fixed sizes"
    modes = (f"{mode}: {counted(count, 'operator')}" for mode, count in data["modes"].items())
    yield "modes", "; ".join(modes) or "those of the caller throughout"
    effects = data["effects"]
    words = [
        counted(len(effects["mutations"]), "mutation") if effects["mutations"] else "",
        f"of {', '.join(effects['mutated_inputs'][:5])}" if effects["mutated_inputs"] else "",
    ]
    found = [
        " ".join(filter(None, words)),
        counted(len(effects["random"]), "random operator") if effects["random"] else "",
        counted(len(effects["other"]), "other side effect") if effects["other"] else "",
        counted(len(data["barriers"]), "barrier") if data["barriers"] else "",
    ]
    yield "effects", "; ".join(filter(None, found)) or "none"
    yield "barriers", f"{len(data['barriers'])}, see below" if data["barriers"] else "none: nothing stops a cut"


def _shape_text(shape: list[Any] | None) -> str:
    return "" if shape is None else f"[{', '.join(map(str, shape))}]"


def _say_rest(count: int) -> None:
    if count > _SHOWN:
        say(f"  and {count - _SHOWN} more; --json has all of them")
