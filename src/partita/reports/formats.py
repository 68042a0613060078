"""A report in the formats of other tools: Graphviz, Model Explorer, Perfetto and Chrome's trace viewer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from partita.errors import OptionError

#: Tints that black text can be read on.
_COLORS = ("#cfe3ff", "#ffe0c2", "#d3f0d6", "#f6d4e4", "#e2dbff", "#fbf0b8", "#cdeff0", "#ecd9c6", "#dde5cf", "#f3d0cd")
_GREY = "#e4e7eb"
_GRADIENT = ("#f4f8fc", "#5b8def")

#: What a value of a node in Model Explorer can say.
NODE_DATA = ("region", "treatment", "body", "mode", "flops", "bytes")


def dot(data: Mapping[str, Any]) -> str:
    """The graph in the language of Graphviz: one cluster for each region, and state left out."""
    nodes, texts = data["nodes"], data["texts"]
    lines = [
        "digraph partita {",
        "  rankdir=TB;",
        '  node [shape=box, style="rounded,filled", fillcolor="#ffffff", fontname="sans-serif", fontsize=10];',
        '  edge [color="#818b98"];',
    ]
    hidden = data["flags"]["state"] | data["flags"]["mode toggle"]
    shown = [not flags & hidden for flags in nodes["flags"]]
    held: dict[int, list[int]] = {}
    for number, region in enumerate(nodes["region"]):
        if shown[number]:
            held.setdefault(max(region, -1), []).append(number)
    for at, region in enumerate(data["regions"]):
        lines += [
            f"  subgraph cluster_{at} {{",
            f"    label={_quoted(_region_label(region))}; style=filled; color={_quoted(_COLORS[at % len(_COLORS)])};",
            *(f"    {_dot_node(nodes, texts, number)}" for number in held.get(at, ())),
            "  }",
        ]
    lines += [f"  {_dot_node(nodes, texts, number)}" for number in held.get(-1, ())]
    edges = zip(data["edges"]["from"], data["edges"]["to"], strict=True)
    lines += [f"  n{before} -> n{after};" for before, after in edges if shown[before] and shown[after]]
    return "\n".join([*lines, "}", ""])


def _region_label(region: Mapping[str, Any]) -> str:
    return f"{region['name']} ({region['treatment']})"


def _dot_node(nodes: Mapping[str, Sequence[Any]], texts: Sequence[str], number: int) -> str:
    target, value = texts[nodes["target"][number]], nodes["value"][number]
    lines = [
        nodes["name"][number],
        target if target != nodes["name"][number] else "",
        texts[value] if value >= 0 else "",
    ]
    return f"n{number} [label={_quoted(chr(10).join(filter(None, lines)))}];"


def _quoted(text: str) -> str:
    """A text as Graphviz reads it: only quotes and backslashes mean something there, and a backslash before an n."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def model_explorer(data: Mapping[str, Any], by: str) -> dict[str, Any]:
    """A value for each node by its name, and a colour or a gradient, as Model Explorer loads data for one graph."""
    if by not in NODE_DATA:
        raise OptionError(f"node data is by one of {', '.join(NODE_DATA)}, not by {by!r}")
    nodes = data["nodes"]
    values = dict(_node_values(data, by))
    if by in ("flops", "bytes"):
        results = {nodes["name"][at]: {"value": value} for at, value in values.items()}
        gradient = [{"stop": stop, "bgColor": color} for stop, color in enumerate(_GRADIENT)]
        return {"results": results, "gradient": gradient}
    kinds = {value: at for at, value in enumerate(dict.fromkeys(values.values()))}
    coloured = {
        nodes["name"][at]: {"value": value, "bgColor": _COLORS[kinds[value] % len(_COLORS)] if value else _GREY}
        for at, value in values.items()
    }
    return {"results": coloured}


def _node_values(data: Mapping[str, Any], by: str) -> Iterator[tuple[int, Any]]:
    nodes, regions = data["nodes"], data["regions"]
    for at, region in enumerate(nodes["region"]):
        if by in ("flops", "bytes"):
            if nodes[by][at] is not None:
                yield at, nodes[by][at]
        elif by == "mode":
            yield at, data["modes"][nodes["mode"][at]]
        elif region >= 0:
            own = regions[region]
            yield at, data["bodies"][own["body"]]["name"] if by == "body" else own["name" if by == "region" else by]


def trace(data: Mapping[str, Any]) -> dict[str, Any]:
    """The memory timeline as events of Chrome's trace format, as Perfetto reads it: an operator takes 1 us."""
    memory = data["memory"]
    if memory is None:
        raise OptionError(
            "this report has no memory timeline to trace; make it with partita.report(plan, memory=...), where memory "
            "is a memory plan, its picture() or its timeline"
        )
    named = [("planned", memory["planned"])]
    if memory["plain"] is not None:
        named.append((memory["plain_name"], memory["plain"]))
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(named, 1):
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        for thread, of in enumerate(("phase", "segment", "operator"), 1):
            events.append({"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": of}})
        events += _events(timeline["moments"], data["texts"], process)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _events(moments: Mapping[str, Sequence[int]], texts: Sequence[str], process: int) -> Iterator[dict[str, Any]]:
    for at, size in enumerate(moments["bytes"]):
        yield {"ph": "C", "pid": process, "ts": at, "name": "allocated bytes", "args": {"bytes": size}}
        name, node, path = (texts[moments[column][at]] for column in ("operator", "node", "path"))
        args = {"node": node, "module": path, "bytes": size}
        yield {"ph": "X", "pid": process, "tid": 3, "ts": at, "dur": 1, "name": name or node or "?", "args": args}
    for thread, column in enumerate(("phase", "segment"), 1):
        # A segment is run twice: forward, and backward later, where recomputation belongs to it.
        runs = moments[column] if thread == 1 else list(zip(moments["segment"], _halves(moments, texts), strict=True))
        start = 0
        for at in range(1, len(runs) + 1):
            if at == len(runs) or runs[at] != runs[start]:
                name = texts[moments[column][start]]
                yield {"ph": "X", "pid": process, "tid": thread, "ts": start, "dur": at - start, "name": name or "?"}
                start = at


def _halves(moments: Mapping[str, Sequence[int]], texts: Sequence[str]) -> list[bool]:
    return [texts[phase] == "forward" for phase in moments["phase"]]


def json_text(data: Any) -> str:
    """The data as JSON of ASCII alone, without spaces."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False)
