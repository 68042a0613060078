"""ByCapability: the fewest regions that hold all that a backend accepts, with little traffic between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TypeAlias, final

from torch import nn
from torch.fx import Node

from partita._plain_help import PlainHelp
from partita._torch.gc_pause import gc_paused
from partita.analysis.nodes import bytes_at_hints, bytes_of, value_of
from partita.errors import CallbackError, CycleError, OptionError
from partita.policies.capability import (
    Capability,
    Check,
    Units,
    checked_capabilities,
    name_of,
    units_of,
    waiting_for_symbols,
)
from partita.policies.constraints import (
    Apart,
    Together,
    Worthwhile,
    check_flags,
    checked_together,
    worthwhile_nodes,
)
from partita.policies.legalize import Piece, call_user_function, partition_of, unassigned
from partita.program.flops import Flops
from partita.program.program import Program
from partita.regions import Partition, Region
from partita.regions.region import Reason
from partita.solvers.border_bytes import border_bytes, moved_for_bytes
from partita.solvers.few_parts import (
    Steps,
    connected_parts,
    cut_in_order,
    deep_order,
    few_steps,
    grown_parts,
    kept_parts,
)
from partita.solvers.relation import REFUSED, earliest_levels, latest_levels

#: Up to this many nodes that can move, the earliest levels are tried as a start as well as the latest.
_MANY_FREE = 250_000


@final
@dataclass(frozen=True, slots=True)
class ByCapability(metaclass=PlainHelp):
    """All that is accepted, in the fewest regions that data, effects and modes allow.

    Example::

        from partita.policies import ByCapability

        def my_chip(node):
            return "no kernel for it" if "relu" in node.name else None

        plan = partita.plan(program, ByCapability(my_chip), Lower("aot_eager"))
        plan = partita.plan(program, ByCapability("aot_eager", min_size=2), Lower("aot_eager"))
        print(plan.summary())

    `capabilities` is one capability or several in order of preference: a node goes to the first that accepts it. A
    capability is a function from a node to the reason to refuse it (None to accept it), torch's `OperatorSupport`, a
    backend or its name. For a single one, in one mode, no partition has fewer regions; otherwise there are few. Then
    nodes move so that fewer bytes cross between regions. All of it takes linear time.

    With `connected`, a region holds only nodes that data connects. Regions of fewer than `min_size` operators or
    `min_flops` floating-point operations are excluded, those of more than `max_size` operators are cut.
    `together` names groups of nodes that stay in one region, or outside, and count as one node that data connects; an
    item of a container stands for what makes the container. Inputs, outputs and mode switches are in no region.
    `worthwhile` is called for every region, also for one that results from it: it returns True, False, the reason to
    exclude the region, or the nodes to keep. Regions hold nodes of one mode unless `modes_apart` is False, of one
    device if `devices_apart` is True, and nodes for which the function `apart` returns the same.

    `switch_cost`, a number of bytes or a function of a region that returns it, is what a call of a region costs: one
    that computes fewer bytes of results goes to the next capability that accepts all of it, or is excluded.
    """

    capabilities: Capability | tuple[Capability, ...]
    _: KW_ONLY
    connected: bool = False
    min_size: int = 1
    min_flops: int = 0
    max_size: int | None = None
    together: Together | None = None
    worthwhile: Worthwhile | None = None
    modes_apart: bool = True
    devices_apart: bool = False
    apart: Apart | None = None
    switch_cost: SwitchCost = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "capabilities", checked_capabilities(self.capabilities))
        check_flags(self, "modes_apart", "devices_apart", "connected")
        check_switch_cost(self.switch_cost)
        if self.apart is not None and not callable(self.apart):
            raise OptionError(f"`apart` is a function from a node to what keeps it apart, not {self.apart!r}")
        object.__setattr__(self, "together", checked_together(self.together))
        for name, least in (("min_size", 1), ("min_flops", 0), ("max_size", 1)):
            value = getattr(self, name)
            if (type(value) is not int or value < least) and not (name == "max_size" and value is None):
                raise OptionError(f"{name} is a number from {least} on, not {value!r}")
        if self.max_size is not None and self.max_size < self.min_size:
            raise OptionError(f"no region has at least {self.min_size} and at most {self.max_size} operators")
        if self.worthwhile is not None and not callable(self.worthwhile):
            raise OptionError(f"`worthwhile` is a function of a region, not {self.worthwhile!r}")

    @gc_paused()
    def __call__(self, program: Program) -> Partition:
        assert isinstance(self.capabilities, tuple)
        units = units_of(
            program,
            self.capabilities,
            together=self.together,
            modes_apart=self.modes_apart,
            devices_apart=self.devices_apart,
            apart=self.apart,
        )
        try:
            return self._partition(program, units)
        except CycleError:  # A symbol that crosses a border adds an edge that is unknown before the cut.
            return self._partition(program, waiting_for_symbols(program, units))

    def _partition(self, program: Program, units: Units) -> Partition:
        assert isinstance(self.capabilities, tuple)
        if self.switch_cost:
            switching = Switching(program, self.capabilities, self.switch_cost)
            units = switching.handed_over(units, lambda found: self._units_of_parts(program, found))
        parts, reasons = self._parts(program, units), units.reasons
        if self.max_size is not None or self.worthwhile is not None or self.min_size > 1 or self.min_flops:
            limiter = _Limiter(self, program, units)
            parts = [kept for part in parts for kept in limiter.within_limits(part)]
            reasons = {**reasons, **limiter.reasons}
        part_of = {unit: at for at, part in enumerate(parts) for unit in part.units}
        assignment = unassigned(program)
        for number, unit in enumerate(units.unit_of):
            if unit in part_of:
                assignment[number] = part_of[unit]
        return partition_of(program, assignment, [part.piece for part in parts], reasons)

    def _parts(self, program: Program, units: Units) -> list[Part]:
        """All that is accepted, in parts that are named by the capability, in the order of the calls."""
        assert isinstance(self.capabilities, tuple)
        found = self._units_of_parts(program, units)
        names = [name_of(capability) for capability in self.capabilities]
        by = [names[units.kind_keys[units.kinds[part[0]]][0]] for part in found]
        return [Part(Piece(f"{name}_{at}", name), part) for at, (name, part) in enumerate(zip(by, found, strict=True))]

    def _units_of_parts(self, program: Program, units: Units) -> list[list[int]]:
        by_step = _accepted_units(units, _steps(program, units).levels)
        found = [by_step[step] for step in sorted(by_step)]
        if self.connected:
            found = [piece for part in found for piece in connected_parts(units.relation, part)]
            grown_part_of = grown_parts(units.relation, units.kinds)  # None for some large graphs.
            if grown_part_of is not None:
                found = min([*_accepted_units(units, grown_part_of).values()], found, key=len)
        return found


def _steps(program: Program, units: Units) -> Steps:
    """The fewest steps for one kind, few for several, and then those with fewer bytes across borders."""
    relation, kinds = units.relation, units.kinds
    if len(units.kind_keys) != 1:
        steps = few_steps(relation, kinds)
        return moved_for_bytes(relation, kinds, steps, free=relation.order, sizes=_sizes(program, relation.order))
    early = earliest_levels(relation, kinds)
    count = max((early[unit] for unit in relation.order if kinds[unit] != REFUSED), default=0)
    late = latest_levels(relation, kinds, count)
    free = [unit for unit in relation.order if early[unit] != late[unit]]
    kind_of_step = [REFUSED, *[0] * count]
    if not free:
        return Steps(early, kind_of_step)
    sizes = _sizes(program, relation.order)
    starts = [Steps(late, kind_of_step), Steps(early, kind_of_step)]
    if len(free) > _MANY_FREE:
        return moved_for_bytes(relation, kinds, starts[0], free=free, sizes=sizes)
    found = (moved_for_bytes(relation, kinds, start, free=free, sizes=sizes) for start in starts)
    return min(found, key=lambda steps: border_bytes(relation, kinds, steps.levels, sizes))


def _sizes(program: Program, units: Sequence[int]) -> list[int]:
    """The bytes of each unit's result; one where nothing is known, so that values are counted."""
    sizes, nodes = [1] * len(program.index), program.index.nodes
    for unit in units:
        sizes[unit] = bytes_of(nodes[unit]) or 1
    return sizes


def _accepted_units(units: Units, part_of: Sequence[int]) -> dict[int, list[int]]:
    """The units that are accepted, by the part of each."""
    parts: dict[int, list[int]] = {}
    for unit in units.relation.order:
        if units.kinds[unit] != REFUSED:
            parts.setdefault(part_of[unit], []).append(unit)
    return parts


@dataclass(frozen=True, slots=True)
class Part:
    """What will be a region, and its units in an order in which they can run."""

    piece: Piece
    units: Sequence[int]

    def cut(self, pieces: Iterable[Sequence[int]]) -> list[Part]:
        """A part for each of the pieces, the first of which keeps the name."""
        name = self.piece.name
        return [
            Part(replace(self.piece, name=f"{name}_{at}" if at else name), units) for at, units in enumerate(pieces)
        ]


@final
class _Limiter:
    """Applies the limits of a policy to one part after the other, and keeps the reasons.

    Excluding a region, or cutting it in an order in which its nodes can run, keeps a legal partition legal: they can
    always run one by one where the region ran. So each part is limited by itself.
    """

    def __init__(self, limits: ByCapability, program: Program, units: Units) -> None:
        self.reasons: dict[Node, str] = {}
        self._limits, self._between, self._flops = limits, units.relation, Flops()
        self._all_nodes, self._members = program.index.nodes, units.members()
        self._items = program.projections

    def within_limits(self, part: Part) -> Iterator[Part]:
        for cut in self._cut_to_max_size(part):
            for kept in self._worthwhile_parts(cut):
                why = self._why_too_small(kept.units)
                if not why:
                    yield kept
                    continue
                text = f"its region {kept.piece.name!r} is too small: {why}"
                self._exclude(kept.units, Reason(text, kind="not worthwhile", why=why))

    def _cut_to_max_size(self, part: Part) -> list[Part]:
        max_size = self._limits.max_size
        if max_size is None:
            return [part]
        sizes = {unit: len(self._operators(unit)) for unit in part.units}
        unit = max(sizes, key=sizes.__getitem__)
        if sizes[unit] > max_size:
            raise OptionError(
                f"`together` has a group of {sizes[unit]} operators, which begins at {self._nodes((unit,))[0].name!r}, "
                f"but `max_size` is {max_size}; make the group smaller, or pass max_size={sizes[unit]}"
            )
        if sum(sizes.values()) <= max_size:
            return [part]
        if not self._limits.connected:
            return part.cut(cut_in_order(part.units, sizes, max_size))
        return part.cut(self._connected(cut_in_order(deep_order(self._between, part.units), sizes, max_size)))

    def _worthwhile_parts(self, part: Part) -> Iterator[Part]:
        """The worthwhile parts of a part: those that `worthwhile` accepts, or whose nodes it returned exactly."""
        worthwhile = self._limits.worthwhile
        if worthwhile is None:
            yield part
            return
        waiting = [part]
        while waiting:
            part = waiting.pop()
            kept, is_exact = self._kept(part, worthwhile)
            if len(kept) == len(part.units):
                yield part
                continue
            pieces = self._connected(kept_parts(self._between, part.units, kept))
            if is_exact and len(pieces) == 1:
                yield replace(part, units=pieces[0])
            else:
                waiting += reversed(part.cut(pieces))

    def _kept(self, part: Part, worthwhile: Worthwhile) -> tuple[frozenset[int], bool]:
        """The units that stay, and whether these are exactly the nodes to keep; excludes the others."""
        nodes, name = self._nodes(part.units), part.piece.name
        chosen, why = worthwhile_nodes(worthwhile, Region(name, tuple(nodes), part.piece.label))
        reason = Reason(f"its region {name!r} is not worthwhile: {why}", kind="not worthwhile", why=why)
        kept, is_exact = list[int](), True
        for unit in part.units:
            operators = self._operators(unit)
            missing = next((node for node in operators if node not in chosen), None)
            if missing is None:
                kept.append(unit)
                continue
            self._exclude((unit,), reason)
            text = f"it stays together with {missing.name!r}, which `worthwhile` excludes"
            broken = [node for node in operators if node in chosen]
            self.reasons.update(dict.fromkeys(broken, Reason(text, kind="together", by=missing.name)))
            is_exact = is_exact and not broken
        return frozenset(kept), is_exact

    def _connected(self, pieces: list[list[int]]) -> list[list[int]]:
        if not self._limits.connected:
            return pieces
        return [connected for units in pieces for connected in connected_parts(self._between, units)]

    def _why_too_small(self, units: Sequence[int]) -> str:
        min_size, min_flops = self._limits.min_size, self._limits.min_flops
        operators = sum(len(self._operators(unit)) for unit in units)
        if operators < min_size:
            return f"{operators} of at least {min_size} operators"
        flops = self._flops.total(self._nodes(units)) if min_flops else 0
        return f"{flops} of at least {min_flops} FLOPs" if flops < min_flops else ""

    def _exclude(self, units: Sequence[int], reason: Reason) -> None:
        self.reasons.update(dict.fromkeys(self._nodes(units), reason))

    def _nodes(self, units: Sequence[int]) -> list[Node]:
        """The nodes of some units in graph order."""
        return [self._all_nodes[number] for number in sorted(n for unit in units for n in self._members[unit])]

    def _operators(self, unit: int) -> list[Node]:
        """The nodes of a unit without items of containers, which go where their container is made."""
        return [self._all_nodes[number] for number in self._members[unit] if number not in self._items]


#: What a switch to a region costs, as the bytes of results that it has to compute to be worth it: one number for all,
#: or a function of a region.
SwitchCost: TypeAlias = int | Callable[[Region], int]


def check_switch_cost(cost: object) -> None:
    """Raises unless this is a number of bytes or a function."""
    is_number = type(cost) is int and cost >= 0
    if not is_number and not callable(cost):
        raise OptionError(
            f"`switch_cost` is a number of bytes, or a function of a region that returns it, not {cost!r}"
        )


def _bytes_computed(node: Node) -> int | None:
    """The bytes of a result, for the sizes that symbols were traced with; None where nothing was traced."""
    value = value_of(node)
    return None if value is None else bytes_at_hints(value)


class Switching:
    """Hands over what is not worth a switch, one backend after the other, in the order of preference."""

    def __init__(self, program: Program, capabilities: Sequence[Capability], cost: SwitchCost) -> None:
        self._nodes, self._items = program.index.nodes, program.projections
        submodules: dict[str, nn.Module] = dict(program.graph_module.named_modules(remove_duplicate=False))
        self._checks = [Check.of(one, submodules) for one in capabilities]
        self._cost = cost

    def handed_over(self, units: Units, parts_of: Callable[[Units], list[list[int]]]) -> Units:
        """The units with other kinds; `parts_of` returns the units of each region that they would make."""
        for position in range(len(self._checks)):
            members = units.members()
            kinds, reasons = list(units.kinds), dict(units.reasons)
            keys = list(units.kind_keys)
            for part in parts_of(units):
                accepting, shared = keys[units.kinds[part[0]]]
                if accepting != position:
                    continue
                numbers = sorted(number for unit in part for number in members[unit])
                nodes = [self._nodes[number] for number in numbers]
                operators = [self._nodes[number] for number in numbers if number not in self._items]
                reason = self._why_not_worth_it(Region(self._checks[position].name, tuple(nodes)), operators)
                if reason is None:
                    continue
                later = self._next_accepting(operators, position)
                if later is None:
                    reasons.update(dict.fromkeys(nodes, reason))
                    kind = REFUSED
                else:
                    key = (later, shared)
                    if key not in keys:
                        keys.append(key)
                    kind = keys.index(key)
                for unit in part:
                    kinds[unit] = kind
            units = replace(units, kinds=kinds, kind_keys=keys, reasons=reasons)
        return units

    def _why_not_worth_it(self, region: Region, operators: Sequence[Node]) -> Reason | None:
        found, cost = [_bytes_computed(node) for node in operators], self._cost
        if None in found:
            return None  # What it computes is not known.
        computed = sum(size or 0 for size in found)
        if not isinstance(cost, int):
            cost = call_user_function(cost, region, node=operators[0], role="function `switch_cost`")
            if type(cost) is not int:
                raise CallbackError(f"`switch_cost` returned {cost!r} for a region; return a number of bytes")
        if computed >= cost:
            return None
        why = f"its region computes {computed} bytes, and a switch to {region.name} costs {cost}"
        return Reason(why, kind="not worthwhile", why=why)

    def _next_accepting(self, nodes: Sequence[Node], position: int) -> int | None:
        """The next capability that accepts all of the nodes."""
        later = range(position + 1, len(self._checks))
        accepts = (at for at in later if all(self._checks[at].refusal(node) is None for node in nodes))
        return next(accepts, None)
