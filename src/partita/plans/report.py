"""What a plan prints: the table of regions, the excluded nodes by reason, and why a node is where it is."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from torch.fx import Node

from partita._html import html_table
from partita._plain_help import PlainHelp
from partita.analysis.modes import AMBIENT, Mode
from partita.analysis.nodes import TracedBytes, container_items, find, sum_of_bytes, traced_bytes, value_of
from partita.errors import PartitaError, UnknownNodeError
from partita.plans.memory import ReportsSavedBytes, SavedBytes, SavedMemory, saved_memory, shown_count
from partita.plans.treatment import Treatment
from partita.program.flops import Flops
from partita.program.program import counted_operators, effect_neighbours, neighbours
from partita.regions import Partition, Region
from partita.regions.body_differences import differences
from partita.regions.borders import Crossing, Item
from partita.regions.equal_bodies import body_numbers, may_repeat
from partita.regions.region import ONLY_SWITCHES, Reason, ReasonKind
from partita.solvers.quotient import ALONE, NOWHERE

#: How many operators a line about excluded nodes names.
_SHOWN = 6

_HEAD = ("region", "nodes", "in", "out", "bytes in", "bytes out", "flops")
#: What a number of bytes that is marked by `~` means.
DYNAMIC_BYTES = "~ is at the sizes of the trace; sizes are dynamic, and other calls have others"
_SAVED_HEAD = ("saved", "saved after", "recomputed flops")
_LEAD: Mapping[ReasonKind, str] = {
    "together": "excluded, ",
    "not worthwhile": "not worthwhile: ",
    "excluded": "excluded: ",
}


@final
@dataclass(frozen=True, slots=True)
class Explanation(metaclass=PlainHelp):
    """Why a node is where it is; prints as text.

    `region` is where it runs, or None, and then `reason` says why. `path_in` leads from another region of the same
    label to the node through nodes outside, and `path_out` from the node to another such region: why these are not
    one region. Effects keep it after the nodes in `after` and before those in `before`.
    """

    node: str
    where: str
    region: str | None
    reason: Reason | None
    mode: Mode
    path_in: tuple[str, ...]
    path_out: tuple[str, ...]
    after: tuple[str, ...]
    before: tuple[str, ...]
    remarks: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.node}: {self.where}", *(f"  {remark}" for remark in self.remarks)]
        if self.path_in:
            lines.append(f"  cut from what is before by {' -> '.join(self.path_in)}")
        if self.path_out:
            lines.append(f"  cut from what is after by {' -> '.join(self.path_out)}")
        for what, names in (("after", self.after), ("before", self.before)):
            if names:
                lines.append(f"  stays {what} {', '.join(names)}: memory, random numbers or side effects")
        return "\n".join(lines)


@final
@dataclass(frozen=True, slots=True)
class Excluded(metaclass=PlainHelp):
    """Operators outside every region for one reason; `operators` counts them by what they call."""

    kind: ReasonKind
    by: str
    why: str
    operators: Mapping[str, int]

    @property
    def count(self) -> int:
        return sum(self.operators.values())

    def __str__(self) -> str:
        what = f"refused by {self.by}: {self.why}" if self.kind == "refused" else f"{_LEAD[self.kind]}{self.why}"
        most = Counter(self.operators).most_common()
        names = [f"{name} {count}" for name, count in most[:_SHOWN]]
        rest = sum(count for _, count in most[_SHOWN:])
        if rest:
            names.append(f"others {rest}")
        return f"{self.count} {'node' if self.count == 1 else 'nodes'} {what}: {', '.join(names)}"


@final
@dataclass(frozen=True, slots=True)
class DistinctBody(metaclass=PlainHelp):
    """Regions with equal bodies of so many nodes; `name` is the label that several share, or the name of the first one.

    `numbers` are the nodes of the first region with a number that differs in the others, and so is passed to the body.
    Where an earlier body has the same operators, `like` is its name, and `difference` what differs first, in words.
    """

    name: str
    nodes: int
    regions: tuple[str, ...]
    numbers: tuple[str, ...] = ()
    like: str = ""
    difference: str = ""

    @property
    def calls(self) -> int:
        return len(self.regions)

    def __str__(self) -> str:
        calls = "1 call" if self.calls == 1 else f"{self.calls} calls"
        text = f"{self.name}: {calls} of {self.nodes} {'node' if self.nodes == 1 else 'nodes'}"
        if self.numbers:
            rest = len(self.numbers) - _SHOWN
            shown = ", ".join(self.numbers[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
            text += f", each with its own {'number' if len(self.numbers) == 1 else 'numbers'} in {shown}"
        return f"{text}, like {self.like}, but {self.difference}" if self.difference else text


def distinct_bodies(partition: Partition) -> tuple[DistinctBody, ...]:
    """The distinct bodies in the order of their first regions."""
    callers: dict[int, list[int]] = {}
    for at, body in enumerate(body_numbers(partition)):
        callers.setdefault(body, []).append(at)
    regions = [[partition.regions[at] for at in own] for own in callers.values()]
    labels = Counter(label for own in regions if isinstance(label := own[0].label, str))
    bodies = [_distinct_body(partition, own, labels) for own in regions]
    firsts = {own[0]: body for own, body in zip(callers.values(), bodies, strict=True)}
    found = differences(partition, list(firsts))
    return tuple(
        body if other is None else replace(body, like=firsts[other[0]].name, difference=other[1])
        for body, other in zip(bodies, found, strict=True)
    )


def _distinct_body(partition: Partition, regions: Sequence[Region], labels: Mapping[str, int]) -> DistinctBody:
    """The body of these regions; policies may give one label to regions with different bodies."""
    label, number = regions[0].label, partition.program.index.number
    is_theirs = isinstance(label, str) and labels[label] == 1 and all(region.label == label for region in regions)
    names = tuple(region.name for region in regions)
    numbers = tuple(node.name for node in regions[0].nodes if number[node] in partition.constants)
    name = str(label) if is_theirs and len(regions) > 1 else names[0]
    return DistinctBody(name, partition.operator_count(regions[0]), names, numbers)


def table(partition: Partition, treatments: Sequence[Treatment]) -> str:
    """One row per region in the order in which they will run, then the excluded nodes by reason.

    Where a treatment reports what is saved for backward, three columns show that.
    """
    rows, remarks = _rows_and_remarks(partition, treatments)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, *remarks])


def table_html(partition: Partition, treatments: Sequence[Treatment]) -> str:
    """The same for notebooks."""
    (head, *rows), remarks = _rows_and_remarks(partition, treatments)
    return html_table(head, rows, notes=remarks)


def _rows_and_remarks(partition: Partition, treatments: Sequence[Treatment]) -> tuple[list[tuple[str, ...]], list[str]]:
    """The head and the rows of the table, and the lines after it."""
    saved = reported_memory(partition, treatments)
    rows: list[tuple[str, ...]] = [(*_HEAD, *(_SAVED_HEAD if saved else ()), "treatment", "label")]
    counter, is_dynamic = Flops(), False
    for vertex in partition.order:
        if vertex >= len(partition):
            continue
        region, border = partition.regions[vertex], partition.borders.of_regions[vertex]
        sizes = border_bytes(partition, vertex)
        is_dynamic = is_dynamic or any(size.is_dynamic and size.size is not None for size in sizes)
        rows.append(
            (
                region.name,
                str(partition.operator_count(region)),
                str(len(border.inputs)),
                str(len(border.outputs)),
                *map(str, sizes),
                _flops(region.nodes, counter),
                *(_saved_bytes(saved.regions[vertex], treatments[vertex]) if saved else ()),
                repr(treatments[vertex]),
                "" if region.label is None else str(region.label),
            )
        )
    remarks = [*(saved.lines() if saved else []), *_bodies(partition), *plan_remarks(partition)]
    return rows, [*([DYNAMIC_BYTES] if is_dynamic else []), *remarks]


def excluded(partition: Partition) -> tuple[Excluded, ...]:
    """The operators outside every region, the most frequent reason first."""
    found: dict[tuple[ReasonKind, str, str], Counter[str]] = {}
    for node in _excluded_nodes(partition):
        reason = Reason.of(partition.reasons.get(node, "no reason given"))
        by = reason.by if reason.kind == "refused" else ""
        found.setdefault((reason.kind, by, reason.why), Counter())[called_name(node)] += 1
    groups = [Excluded(*key, dict(operators)) for key, operators in found.items()]
    return tuple(sorted(groups, key=lambda group: -group.count))


def explanation(partition: Partition, treatments: Sequence[Treatment], node: Node) -> Explanation:
    """Where `node` runs, for which reason, under which mode, and which effects order it."""
    program = partition.program
    number = program.index.number.get(node)
    if number is None:
        raise UnknownNodeError(f"{node.name!r} is not a node of this program; take it from `program.graph`")
    region, reason = partition.region_of(node), partition.reasons.get(node)
    nodes, ordered = program.index.nodes, program.once(effect_neighbours)
    return Explanation(
        node=node.name,
        where=_where(partition, treatments, node),
        region=None if region is None else region.name,
        reason=None if region is not None or reason is None else Reason.of(reason),
        mode=program.modes.at(number),
        path_in=_path(partition, number, backwards=True)[::-1],
        path_out=_path(partition, number, backwards=False),
        after=tuple(nodes[other].name for other in ordered.before.get(number, ())),
        before=tuple(nodes[other].name for other in ordered.after.get(number, ())),
        remarks=tuple(_remarks(partition, number)),
    )


def bytes_of_crossings(partition: Partition, crossings: Iterable[Crossing]) -> Iterator[TracedBytes]:
    """The bytes of the tensor that each crossing is, 0 for numbers, at the sizes of the trace."""
    nodes = partition.program.index.nodes
    known: dict[int, tuple[object, ...] | None] = {}  # As many items may cross as a container has.
    for crossing in crossings:
        if isinstance(crossing, int):
            value = _value_or_attribute(nodes[crossing], partition)
            yield TracedBytes(None) if value is None else traced_bytes(value)
        elif isinstance(crossing, Item):
            if crossing.number not in known:
                known[crossing.number] = container_items(nodes[crossing.number])
            items = known[crossing.number]
            yield TracedBytes(0) if items is None else traced_bytes(items[crossing.place])
        else:
            yield TracedBytes(0)


def _value_or_attribute(node: Node, partition: Partition) -> object:
    value: object = value_of(node)
    is_read = value is None and node.op == "get_attr"
    return find(partition.program.graph_module, str(node.target)) if is_read else value


def border_bytes(partition: Partition, at: int) -> tuple[TracedBytes, TracedBytes]:
    """The bytes that cross into a region, by its place in the partition, and those that cross out of it."""
    border = partition.borders.of_regions[at]
    inputs, outputs = (sum_of_bytes(bytes_of_crossings(partition, side)) for side in (border.inputs, border.outputs))
    return inputs, outputs


def _flops(nodes: Sequence[Node], counter: Flops) -> str:
    """The FLOPs of a region; a question mark where values were not traced."""
    if all(value_of(node) is None for node in nodes):
        return "?"
    return f"{counter.total(nodes):,}"


def reported_memory(partition: Partition, treatments: Sequence[Treatment]) -> SavedMemory | None:
    """What the regions save, if a treatment reports it; a plan that cannot be applied can still be printed."""
    if not any(isinstance(treatment, ReportsSavedBytes) for treatment in treatments):
        return None
    try:
        return saved_memory(partition, treatments)
    except PartitaError as error:
        return SavedMemory((None,) * len(partition), reason=str(error))


def _saved_bytes(saved_bytes: SavedBytes | None, treatment: Treatment) -> tuple[str, str, str]:
    """What a region saves; nothing for a treatment that does not report it, question marks where it is not known."""
    if saved_bytes is None:
        return ("?", "?", "?") if isinstance(treatment, ReportsSavedBytes) else ("", "", "")
    return _counts(saved_bytes)


def _counts(saved_bytes: SavedBytes) -> tuple[str, str, str]:
    plain, treated = shown_count(saved_bytes.plain_bytes), shown_count(saved_bytes.treated_bytes)
    return plain, treated, f"{saved_bytes.extra_flops:,}"


def _bodies(partition: Partition) -> list[str]:
    """The bodies that several regions have, those called most first, one that is nearly equal, and how many others."""
    if not may_repeat(partition):
        return []
    bodies = distinct_bodies(partition)
    repeated = sorted((body for body in bodies if body.calls > 1), key=lambda body: -body.calls)
    nearly_equal = [body for body in bodies if body.calls == 1 and body.nodes > 1 and body.difference]
    shown = [str(body) for body in (*repeated[:_SHOWN], *nearly_equal[:1])]
    rest = len(bodies) - len(shown)
    if not shown:
        return []
    return [f"bodies: {len(bodies)} distinct; {'; '.join(shown)}" + (f"; {rest} more" if rest else "")]


def plan_remarks(partition: Partition) -> list[str]:
    """A line for each reason why nodes are excluded, and one about calls with unknown effects."""
    remarks, outside = [], frozenset(_excluded_nodes(partition))
    counted = Counter(reason for node, reason in partition.reasons.items() if node in outside).most_common()
    unexplained = sum(node not in partition.reasons for node in outside)
    for reason, count in (*counted, *([("no reason given", unexplained)] if unexplained else ())):
        remarks.append(f"excluded: {count} {'node' if count == 1 else 'nodes'}: {reason}")
    nodes = partition.program.index.nodes
    barriers = [nodes[number] for number in partition.program.effects.barriers]
    if barriers:
        names = ", ".join(dict.fromkeys(_unknown(node, partition) for node in barriers))
        calls = "call" if len(barriers) == 1 else "calls"
        remarks.append(
            f"barriers: {len(barriers)} {calls} with unknown effects ({names}); where these have none, declare that "
            "with Program.of(..., pure=[...])"
        )
    return remarks


def _unknown(node: Node, partition: Partition) -> str:
    if node.op == "call_module":
        return f"{type(find(partition.program.graph_module, str(node.target))).__name__} at {node.target!r}"
    return str(getattr(node.target, "__name__", node.target))


def _excluded_nodes(partition: Partition) -> Iterator[Node]:
    """The operators outside every region, in graph order."""
    counted = partition.program.once(counted_operators)
    for number, node in enumerate(partition.program.index.nodes):
        if partition.owner[number] == ALONE and number in counted:
            yield node


def called_name(node: Node) -> str:
    """What a node calls, readable."""
    if node.op != "call_function":
        return str(node.target)
    text = str(node.target)
    return text if "<" not in text else str(getattr(node.target, "__name__", text))


def _where(partition: Partition, treatments: Sequence[Treatment], node: Node) -> str:
    number = partition.program.index.number[node]
    owner = partition.owner[number]
    if number in partition.copies:
        names = [repr(partition.regions[at].name) for at in sorted(partition.copies[number])]
        names += ["outside every region"] if owner == ALONE else []
        return f"a number that is computed wherever it is read: {', '.join(names)}"
    if owner >= 0:
        region = partition.regions[owner]
        text = f"in region {region.name!r}, treated by {treatments[owner]!r}"
        if region.label is not None:
            text += f", labelled {region.label!r}"
        if node not in region.nodes and number in partition.program.symbolic_scalars:
            return f"{text}, the only one that reads this number"
        if node not in region.nodes:
            return f"{text}, where the container is made that it takes an item from"
        return text
    if node.op in ("placeholder", "output"):
        return f"{'an input' if node.op == 'placeholder' else 'the output'} of the program; in no region"
    reason = partition.reasons.get(node)
    if reason is None and node.op == "get_attr":
        reason = "attributes are read outside and passed in"
    return f"outside every region{f': {reason}' if reason else ''}"


def _path(partition: Partition, start: int, *, backwards: bool) -> tuple[str, ...]:
    """The shortest path from a node through nodes outside all regions to another region of the same label; or empty.

    Such a path separates the two regions. A breadth-first search.
    """
    owner, both = partition.owner, partition.program.once(neighbours)
    if owner[start] < 0:
        return ()
    label = partition.regions[owner[start]].label
    adjacent = both.before if backwards else both.after
    came_from: dict[int, int] = {start: -1}
    queue = deque([start])
    while queue:
        number = queue.popleft()
        for other in adjacent.get(number, ()):
            if other in came_from or owner[other] == NOWHERE or owner[other] == owner[start]:
                continue
            came_from[other] = number
            if owner[other] < 0:
                queue.append(other)
            elif number != start and partition.regions[owner[other]].label == label:
                return _steps_to(partition, came_from, other)
    return ()


def _steps_to(partition: Partition, came_from: dict[int, int], last: int) -> tuple[str, ...]:
    path = [last]
    while came_from[path[-1]] >= 0:
        path.append(came_from[path[-1]])
    return tuple(partition.program.index.nodes[number].name for number in reversed(path))


def _remarks(partition: Partition, number: int) -> Iterator[str]:
    program = partition.program
    mode = program.modes.at(number)
    if number in program.modes.toggles:
        is_known = partition.reasons.get(program.index.nodes[number]) == ONLY_SWITCHES
        yield f"{'' if is_known else f'{ONLY_SWITCHES}; '}each region sets the mode that its nodes need"
    elif mode != AMBIENT:
        yield f"it runs under {mode}"
    if number in program.effects.barriers:
        yield "its effects are unknown, so nothing with an effect moves past it"
