"""The graph of a saved program, built from data: nodes, arguments and values. Nothing that the file names is called."""

from __future__ import annotations

import cmath
import operator
import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._functorch import predispatch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental import symbolic_shapes

from partita._torch.fx.graph_writer import NAMES_OF_CODE
from partita._torch.operator_schemas import TEXT_CHECKS
from partita._torch.symbolic_shapes import constant_size
from partita.program.archives._torch.operators import (
    LEVELS,
    NAMESPACES,
    SCALAR_FUNCTIONS,
    called_by,
    is_retraced,
    operator_of,
    returns_results_of_body,
)
from partita.program.archives._torch.symbols import Symbols, read_device, read_dtype, stays_small
from partita.program.archives.data import LARGEST_SCALAR, LONGEST_NAME, MOST_DOTS, Data

_DEEPEST = 40
#: The most nodes of a graph, if every call is replaced by the body that it runs, and the most for each that is written:
#: equal layers share one body, but bodies that share others stand for any number of nodes.
_MOST_EXPANDED, _MOST_OF_WRITTEN = 200_000, 256
#: How deep graphs may be nested that torch traces again at each level.
_MOST_RETRACED = 4
#: How an argument is passed.
_POSITIONAL, _KEYWORD = 1, 2
#: Operators that call another have two arguments of their own, one of which is the operator called.
_FIRST_OF_CALLED = 2
#: How many results one call may have: for each of them, torch's serializer looks at all (torch 2.13).
_MOST_RESULTS = 10_000
#: How many letters of metadata count as a value, or a node: a printed program repeats them for each result of a call.
_LETTERS_OF_VALUE = 2_000
#: How many values in a list take as much memory as an input or a result, each of which is a node, and as a body.
_VALUES_OF_NODE, _VALUES_OF_BODY = 6, 32


class GraphReader:
    """Reads one graph; the graphs that its operators run have readers of their own."""

    def __init__(
        self, symbols: Symbols, operators: Collection[str], *, depth: int = _DEEPEST, retraced: int = _MOST_RETRACED
    ) -> None:
        self._symbols = symbols
        self._operators = operators
        self._depth = depth
        self._retraced = retraced
        self._graph = Graph()
        self._root = nn.Module()
        self.bodies: dict[str, Any] = {}
        #: The last graph of each name, for calls that share it.
        self._shared_bodies: dict[str, Data] = {}
        #: How many nodes are written, here and in bodies, and how many there are if every call is replaced by the body
        #: that it runs; of each body, too.
        self.written = self.expanded = 0
        self._expanded_bodies: dict[str, int] = {}
        #: How many levels of graphs that torch traces again each body may still have below it.
        self._levels_left: dict[str, int] = {}
        self._nodes: dict[str, Node] = {}
        self._values: dict[str, tuple[Callable[[Data], Any], Data]] = {}
        #: The preferred names of nodes, which hold unless the file refers to a node by another.
        self._wanted: dict[Node, str] = {}
        self._levels: list[str] = []
        #: Every operator of the graph, as the file spells it.
        self.met: dict[str, None] = {}

    def read(self, data: Data, constant_names: Mapping[int, str]) -> tuple[nn.Module, Graph]:
        """The graph, and a module with the bodies that it runs; constant inputs have these names."""
        pending, self._symbols.pending = self._symbols.pending, set()
        self._shared_bodies = _last_bodies(data["nodes"])
        for table, read in (
            ("tensor_values", self._symbols.tensor),
            ("sym_int_values", self._symbols.integer),
            ("sym_float_values", self._symbols.floating),
            ("sym_bool_values", self._symbols.truth),
        ):
            values = data.get(table)
            self._values |= {key: (read, value) for key, value in values.entries()} if values is not None else {}
        if data.value.get("custom_obj_values"):
            data["custom_obj_values"].refuse("custom objects are rebuilt by code of their own")
        for place, given in enumerate(data["inputs"]):
            self._add_input(given, constant_names.get(place) or f"arg{place}")
        for node in data["nodes"]:
            self._add_node(node)
        self._add_output(data)
        if self._levels:
            data.refuse(f"{self._levels[-1]!r} enters a level that the graph does not leave")
        self._name_nodes()
        self._bind_unbacked(data)
        self._symbols.pending = pending
        return self._root, self._graph

    # Inputs and outputs ------------------------------------------------------------------------------------------

    def _add_input(self, given: Data, constant_name: str) -> None:
        self._symbols.spend(_VALUES_OF_NODE, given)
        kind, _ = given.choice()
        if kind not in NAMED:
            value = given.constant()
            self._create("placeholder", constant_name, wanted=constant_name).meta["val"] = value
            return
        node = self._create("placeholder", value_name(given))
        self._define(given, node)
        if kind == "as_sym_int" and type(node.meta["val"]) is int:
            node.meta["val"] = constant_size(node.meta["val"])

    def _add_output(self, data: Data) -> None:
        for given in data["outputs"]:
            if self._depth < _DEEPEST and given.choice()[0] in ("as_string", "as_strings"):
                given.refuse("a graph inside of another gives tensors and numbers")
        outputs = [self._argument(given) for given in data["outputs"]]
        values = [value.meta["val"] if isinstance(value, Node) else value for value in outputs]
        is_single = data.get("is_single_tensor_return")
        if is_single is None or not is_single.boolean():
            self._graph.output(tuple(outputs)).meta["val"] = tuple(values)
        elif len(outputs) == 1 and isinstance(outputs[0], Node):
            self._graph.output(outputs[0]).meta["val"] = values[0]
        else:
            is_single.malformed("the graph has other outputs than one tensor")

    def _bind_unbacked(self, data: Data) -> None:
        """Records at each node which unbacked symbols it binds."""
        pending = self._symbols.pending
        for node in self._graph.nodes if pending else ():
            value = node.meta.get("val")
            found = value is not None and symbolic_shapes._free_unbacked_symbols_with_path(
                value, (), shape_env=self._symbols.env, pending=pending, simplify=True
            )
            if found:
                node.meta["unbacked_bindings"] = found
        if pending:
            data.malformed(f"no node gives {', '.join(sorted(map(str, pending)))[:200]}")

    # Nodes -------------------------------------------------------------------------------------------------------

    def _add_node(self, data: Data) -> None:
        target, inputs = self._operator(data["target"]), data["inputs"]
        metadata, before = _metadata(data.get("metadata")), len(self._graph.nodes)
        weight = _letters_of(data.get("metadata")) // _LETTERS_OF_VALUE
        self.written += 1 + weight
        self.expanded += 1 + weight
        kwargs: dict[str, Any] = {}
        if isinstance(target, OpOverload):
            args, kwargs = self._of_schema(target, inputs)
        elif data["target"].value in SCALAR_FUNCTIONS:
            args = [self._scalar(given["arg"]) for given in inputs]
        elif target is operator.getitem:
            args = self._of_item(inputs)
        else:
            args, kwargs = self._as_given(target, inputs)
            self._note_level(data["target"])
        for given in (*args, *kwargs.values()):
            if isinstance(given, Node) and given.op == "get_attr":
                given.meta.update(metadata)  # Graphs have no metadata of their own in the file.
        name = data["name"].name() if data.value.get("name") else None
        node = self._create("call_function", target, tuple(args), kwargs, wanted=name)
        self._add_values(node, data, metadata)
        node.meta.update(metadata)
        self._symbols.spend(weight * (len(self._graph.nodes) - before - 1), data)
        self._note_assertion(node)

    def _of_schema(self, target: OpOverload, inputs: Data) -> tuple[list[Any], dict[str, Any]]:
        """The arguments in schema order, by position or by name as in the file."""
        given = {data["name"].text(): data for data in inputs}
        args, kwargs, is_in_order = list[Any](), dict[str, Any](), True
        for argument in target._schema.arguments:
            data = given.pop(argument.name, None)
            if data is None:
                is_in_order = False  # The following arguments are passed by name.
                if not argument.has_default_value():
                    inputs.malformed(f"{target} is given no {argument.name!r}")
                continue
            value, kind = self._of_argument(target, argument, data["arg"]), data.value.get("kind")
            is_required = not argument.has_default_value() and not argument.kwarg_only
            if is_in_order and (kind == _POSITIONAL or (kind != _KEYWORD and is_required)):
                args.append(value)
            else:
                kwargs[argument.name] = value
        if given:
            inputs.malformed(f"{target} has no argument {next(iter(given))[:100]!r}")
        return args, kwargs

    def _of_argument(self, target: OpOverload, argument: Any, given: Data) -> Any:
        """An argument, checked against its schema type: torch itself accepts any integer as a dtype, and crashes."""
        kind, content = given.choice()
        if kind not in _kinds_for(str(argument.real_type)):
            what = "text" if kind in _TEXTS else kind.removeprefix("as_").replace("_", " ")
            given.refuse(f"{target} takes no {what[:40]} for {argument.name!r}")
        if argument.N and isinstance(content.value, list) and not _has_length(argument, len(content.value)):
            given.refuse(f"{target} takes no {len(content.value)} numbers for {argument.name!r}, but {argument.N}")
        if kind == "as_int" and str(argument.real_type) == "number":
            return content.integer(largest=LARGEST_SCALAR)
        if kind == "as_string" and argument.name in ("assert_msg", "msg", "api_name"):
            return content.message()
        if kind == "as_string" and target.namespace not in NAMESPACES:
            text = content.line()  # The user who allowed the operator knows how it handles strings.
            check = TEXT_CHECKS.get((target._schema.name, argument.name))
            reason = None if check is None else check(text)
            return text if reason is None else content.malformed(reason)
        return self._argument(given)

    def _as_given(self, target: Callable[..., Any], inputs: Data) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of an operator without a schema; callables among them are graphs of the file, or operators."""
        bodies, operators = called_by(target)
        args, kwargs = list[Any](), dict[str, Any]()
        by_name, called = list[Data](), None
        for data in inputs:
            place, given = len(args), data["arg"]
            if data.value.get("kind") != _POSITIONAL and data["name"].value != "":
                by_name.append(data)
            elif place in bodies:
                args.append(self._body(_of_kind(given, "as_graph"), self._retraced - is_retraced(target)))
            elif place in operators:
                found = self._operator(_of_kind(given, "as_operator"))
                called = found if isinstance(found, OpOverload) else given.refuse("it is no single operator")
                args.append(called)
            else:
                args.append(self._passed_on(called, place - _FIRST_OF_CALLED, given))
        for data in by_name:  # The operator that receives them is known only now.
            keyword = _keyword(data["name"])
            kwargs[keyword] = self._passed_on(called, keyword, data["arg"])
        if len(args) <= max((*bodies, *operators), default=-1):
            inputs.malformed("what it calls is missing")
        if target is torch.ops.higher_order.invoke_subgraph:
            # Compilers take equal identifiers for equal bodies with equal operands, and check neither (torch 2.13).
            after = 1 if kwargs.pop("identifier", None) is not None else 2
            args[1:after] = [f"call_{next(self._symbols.subgraph_calls)}"]
        if target is predispatch._remove_batch_dim and (kwargs or args[3:] != [0] or type(args[3]) is not int):
            inputs.refuse("it moves a dimension elsewhere than to the front, where torch does not check the place")
        return args, kwargs

    def _passed_on(self, called: OpOverload | None, which: str | int, given: Data) -> Any:
        """An argument of an operator without a schema, which may be forwarded to the operator that it calls."""
        if called is not None:
            for place, argument in enumerate(called._schema.arguments):
                if which in (place, argument.name):
                    return self._of_argument(called, argument, given)
        kind, content = given.choice()
        if kind == "as_tensors":  # torch (2.13) writes symbolic numbers among the operands of a graph like tensors.
            return [self._node(operand["name"], (Tensor, *_NUMBERS)) for operand in content]
        return self._argument(given)

    def _of_item(self, inputs: Data) -> list[Any]:
        """The container and the index of the item."""
        args = [self._argument(given["arg"]) for given in inputs]
        is_container = (
            len(args) == 2 and isinstance(args[0], Node) and isinstance(args[0].meta.get("val"), tuple | list)
        )
        return args if is_container and type(args[1]) is int else inputs.refuse("it takes no item out of a list")

    def _scalar(self, given: Data) -> Any:
        return self._argument(given) if given.choice()[0] in _SCALARS else given.refuse("it is no number")

    def _note_level(self, target: Data) -> None:
        """Checks that the levels of vmap and jvp are properly nested: one left open would outlive a call."""
        name = target.value.rpartition(".")[2]
        if name in LEVELS:
            self._levels.append(name)
        elif name in LEVELS.values() and (not self._levels or LEVELS[self._levels.pop()] != name):
            target.refuse(f"{name!r} leaves a level that was not entered")

    def _note_assertion(self, node: Node) -> None:
        """Passes the assertions of the program to the shape environment."""
        value = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], Node) else None
        if (
            node.target is torch.ops.aten._assert_scalar.default
            and isinstance(value, torch.SymBool)
            and stays_small(value.node.expr)
        ):
            self._symbols.env.guard_or_defer_runtime_assert(value.node.expr, "", node)
        elif node.target is torch.ops.aten.sym_constrain_range_for_size.default and isinstance(value, torch.SymInt):
            self._symbols.env._constrain_range_for_size(value.node.expr)

    # Results -----------------------------------------------------------------------------------------------------

    def _add_values(self, node: Node, data: Data, metadata: Mapping[str, Any]) -> None:
        outputs, is_hop = list(data["outputs"]), isinstance(node.target, HigherOrderOperator)
        returned = self._returned_by_bodies(node) if returns_results_of_body(node.target) else []
        kinds, is_single = [given.choice()[0] for given in outputs], data.value.get("is_hop_single_tensor_return")
        is_tuple = is_hop and (is_single is False or (is_single is None and any(map(_is_list, returned))))
        if kinds == ["as_none"]:
            node.meta["val"] = None
            self._wanted[node] = f"{self._usual_name(node.target)}_unused"
        elif len(kinds) == 1 and kinds[0] in NAMED and not is_tuple:
            self._define(outputs[0], node)
        elif kinds:
            if len(kinds) == 1 and not is_tuple:
                outputs = _listed(outputs[0])
            node.meta["val"] = tuple(self._items(node, outputs, metadata, _DEEPEST))
            self._nodes.setdefault(self._wanted[node], node)
        value = node.meta.get("val")
        if value is not None and not all(_may_be(value, one) for one in returned):
            data["outputs"].malformed("the graph that it runs has other results")
        if not _may_return(node.target, value):
            data["outputs"].malformed(f"{data['target'].value} has other results")

    def _returned_by_bodies(self, node: Node) -> list[Any]:
        """What the graphs return that an operator runs."""
        bodies = [self._root.get_submodule(str(value.target)) for value in node.args if _is_body(value)]
        return [body.graph.output_node().meta["val"] for body in bodies if isinstance(body, GraphModule)]

    def _items(self, node: Node, outputs: list[Data], metadata: Mapping[str, Any], depth: int) -> list[Any]:
        """The values of the items of a result, each with a node that takes it."""
        self._symbols.spend(_VALUES_OF_NODE * len(outputs), outputs[0] if outputs else Data(None))
        if len(outputs) > _MOST_RESULTS:
            outputs[0].malformed(f"a call has {len(outputs)} results, more than {_MOST_RESULTS}, which no call has")
        for place, given in enumerate(outputs):
            kind = given.choice()[0] if depth else given.malformed(f"outputs are nested more than {_DEEPEST} deep")
            name = value_name(given) if kind in NAMED else "as_none" if kind == "as_none" else None
            item = self._create("call_function", operator.getitem, (node, place), wanted=name)
            if kind in NAMED:
                self._define(given, item)
            else:
                parts = None if kind == "as_none" else _listed(given)
                item.meta["val"] = None if parts is None else self._items(item, parts, metadata, depth - 1)
            item.meta.update(metadata)
        return [user.meta["val"] for user in node.users]

    def _create(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        wanted: str | None = None,
    ) -> Node:
        """A node that is named at the end: a file could make the search of torch.fx for free names take very long."""
        node = self._graph.create_node(op, target, args, kwargs, "node")
        self._wanted[node] = wanted or self._usual_name(target)
        return node

    def _usual_name(self, target: Any) -> str:
        return self._graph._target_to_str(target).replace(".", "_")

    def _name_nodes(self) -> None:
        """Names the nodes that the file refers to as in the file, and the others by free names."""
        fixed = {node: name for name, node in self._nodes.items()}
        used, counts = set(self._nodes), dict[str, int]()
        for node in self._graph.nodes:
            name = fixed.get(node)
            if name is None:
                name = wanted = self._wanted.get(node, "output")
                base = _NUMBERED.sub("", wanted)
                while name in used or name in NAMES_OF_CODE:
                    counts[base] = counts.get(base, 0) + 1
                    name = f"{base}_{counts[base]}"
                used.add(name)
            node.name = name
            self._graph._graph_namespace._rename_object(node, name)

    def _define(self, given: Data, node: Node) -> None:
        """Sets the name and the value of a node."""
        name = value_name(given)
        if name in self._nodes or name not in self._values:
            given.malformed(f"{name!r} is given twice" if name in self._nodes else f"nothing is said of {name!r}")
        self._nodes[name] = node
        read, value = self._values[name]
        node.meta["val"] = read(value)

    # Arguments ---------------------------------------------------------------------------------------------------

    def _argument(self, given: Data) -> Any:
        kind, content = given.choice()
        read = _ARGUMENTS.get(kind)
        return read(self, content) if read is not None else given.refuse("no argument of this kind is data")

    def _operator(self, data: Data) -> Callable[..., Any]:
        found = operator_of(data, self._operators)
        self.met[data.value] = None
        return found

    def _node(self, data: Data, kinds: tuple[type, ...]) -> Node:
        found = self._nodes.get(data.text())
        if found is None or not isinstance(found.meta.get("val"), kinds):
            what = "tensor" if Tensor in kinds else "number"
            data.malformed(f"nothing before it gives a {what} {data.value[:100]!r}")
        return found

    def _tensor(self, data: Data) -> Node:
        return self._node(data["name"], (Tensor,))

    def _number(self, data: Data) -> Any:
        """A symbolic number by name, or a plain number."""
        kind, content = data.choice()
        if kind == "as_name":
            return self._node(content, _NUMBERS)
        return self._argument(data) if kind in ("as_int", "as_float", "as_bool") else data.malformed("it is no number")

    def _optional_tensor(self, data: Data) -> Node | None:
        kind, content = data.choice()
        return None if kind == "as_none" else self._tensor(content)

    def _mapping(self, data: Data) -> dict[str, Any]:
        """Options of an operator: numbers and names, which compilers paste into code."""
        found = {}
        for key, value in data.entries():
            kind, content = value.choice()
            found[Data(key, data, "a key").name()] = content.name() if kind == "as_string" else self._argument(value)
        return found

    def _body(self, data: Data, retraced: int) -> Node:
        name, graph = data["name"].attribute(), data["graph"]
        if _is_empty(graph):
            graph = self._shared_bodies.get(name, graph)  # The last call that shares a body has its graph.
        if self._depth == 0:
            data.malformed(f"graphs are nested more than {_DEEPEST} deep")
        if retraced < 0:
            data.malformed(f"branches, loops and the like are nested more than {_MOST_RETRACED} deep")
        if name not in self.bodies:
            self._symbols.spend(_VALUES_OF_BODY, data)
            reader = GraphReader(self._symbols, self._operators, depth=self._depth - 1, retraced=retraced)
            self._root.add_module(name, GraphModule(*reader.read(graph, {})))
            self.written += reader.written
            self._expanded_bodies[name] = reader.expanded
            self._levels_left[name] = retraced
            self.met.update(reader.met)
        elif self.bodies[name] is not graph.value and self.bodies[name] != graph.value:
            data.malformed(f"two graphs are called {name!r}")
        self.bodies[name] = graph.value  # The one that calls without a graph share is compared once.
        if retraced < self._levels_left[name]:
            data.malformed(f"{name!r} runs deeper here than where it was first read; use it there first")
        self.expanded += 1 + self._expanded_bodies[name]
        most = min(_MOST_EXPANDED, _MOST_OF_WRITTEN * self.written)
        if self.expanded > most:
            data.malformed(f"calls of graphs that share bodies stand for more than {most} nodes")
        return self._create("get_attr", name, wanted=name)


def _last_bodies(nodes: Data) -> dict[str, Data]:
    """The graphs in the arguments of nodes, by name; the last one of a name."""
    found = {}
    for node in nodes:
        inputs = node.get("inputs")
        for given in inputs if inputs is not None else ():
            argument = given.get("arg")
            body = argument.get("as_graph") if argument is not None and isinstance(argument.value, dict) else None
            if body is not None and not _is_empty(body["graph"]):
                found[body["name"].attribute()] = body["graph"]
    return found


def _is_empty(graph: Data) -> bool:
    return isinstance(graph.value, dict) and not any(map(graph.value.get, ("inputs", "nodes", "outputs")))


def _is_body(value: Any) -> TypeGuard[Node]:
    return isinstance(value, Node) and value.op == "get_attr"


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple | list)


def _may_be(value: Any, returned: Any) -> bool:
    """Whether a value of a call is of the kind that its graph returns; of several results, the last may be unnamed."""
    if _is_list(value) and _is_list(returned):
        return len(value) <= len(returned) and all(map(_may_be, value, returned))
    return any(isinstance(value, kind) and isinstance(returned, kind) for kind in (Tensor, _NUMBERS, type(None)))


def _may_return(target: Any, value: Any) -> bool:
    """Whether an operator returns such a value, by its schema: torch cannot save a graph in which it does not."""
    if not isinstance(target, OpOverload):
        return target not in SCALAR_FUNCTIONS.values() or isinstance(value, _NUMBERS)
    kinds = [_TYPE.fullmatch(str(one.real_type)) for one in target._schema.returns]
    if len(kinds) > 1:
        return _is_list(value) and len(value) == len(kinds) and all(map(_is_of_type, value, kinds))
    return _is_of_type(value, kinds[0]) if kinds else value is None


def _is_of_type(value: Any, match: re.Match[str] | None) -> bool:
    """Whether a value is of a type of a schema; a result that nothing needs may be missing."""
    if match is None or (value is None and not match[2]):
        return True
    _, is_list, of_optionals, name = match.groups()
    wanted: tuple[type, ...] = (Tensor,) if name == "Tensor" else _NUMBERS
    if not is_list:
        return isinstance(value, wanted)
    return _is_list(value) and all(isinstance(one, wanted) or (of_optionals and one is None) for one in value)


def value_name(given: Data) -> str:
    """The name of a tensor or a symbolic number."""
    kind, content = given.choice()
    return content["name" if kind == "as_tensor" else "as_name"].name()


@cache
def _kinds_for(written: str) -> frozenset[str]:
    """The kinds of values that an argument of a schema type accepts; no strings for an unknown type.

    Numbers convert to tensors, to other kinds of numbers and to lists, as in schemas.
    """
    match = _TYPE.fullmatch(written)
    if match is None:
        return frozenset(_ARGUMENTS) - _TEXTS
    is_optional, is_list, of_optionals, name = match.groups()
    kinds = _TAKEN[name]
    if name == "Tensor" and (is_optional or of_optionals):
        kinds |= {"as_optional_tensor"}
    if is_list:
        kinds = frozenset(f"{one}s" for one in kinds) | (_NUMERALS & kinds)
    return kinds | {"as_none"} if is_optional else kinds


def _has_length(argument: Any, length: int) -> bool:
    """Whether a list has as many numbers as kernels read from it; one is broadcast, and none is the default.

    The strides of a pool default to its kernel size, but its backward declares no default for them.
    """
    is_default = length == 0 and (argument.has_default_value() or argument.name == "stride")
    return is_default or argument.N == 1 or length in (1, argument.N)


def _keyword(name: Data) -> str:
    """A keyword of an operator that runs graphs; functions that it would call are refused."""
    return name.refuse("it is a function that is called") if name.name().endswith("_fn") else name.name()


def _of_kind(given: Data, wanted: str) -> Data:
    kind, content = given.choice()
    return content if kind == wanted else given.refuse("it calls what is no graph of the file")


def _listed(given: Data) -> list[Data]:
    """The items of a list of values of one kind, each as a value of that kind."""
    kind, content = given.choice()
    if kind.removesuffix("s") not in NAMED:
        given.malformed("no output of this kind is known")
    return [Data({kind.removesuffix("s"): part.value}, content, place) for place, part in enumerate(content)]


def _metadata(data: Data | None) -> dict[str, Any]:
    """The modules that a node came from, and annotations; text meant for users is excluded."""
    modules = data.get("nn_module_stack") if data is not None else None
    custom = data.get("custom") if data is not None else None
    entries = modules.text().split(";") if modules is not None and modules.value else ()
    if modules is not None and len(entries) > MOST_DOTS + 1:
        modules.malformed(f"it is in {len(entries)} modules, each in the one before, which no node is")
    found: dict[str, Any] = {"nn_module_stack": dict(_module(Data(entry, modules, "entry")) for entry in entries)}
    return found if custom is None else {**found, "custom": annotations_of(custom)}


def _letters_of(metadata: Data | None) -> int:
    texts = [] if metadata is None else [metadata.value.get(key) for key in ("nn_module_stack", "custom")]
    return sum(len(text) for text in texts if isinstance(text, str))


def annotations_of(custom: Data) -> Any:
    """The annotations of `torch.fx.traceback.annotate`: words and numbers, under keys that no compiler of torch reads.

    Inductor pastes some into code (a stream), and takes options from others, which can name programs to run.
    """
    found = custom.nested()
    for key in _READ_BY_COMPILERS:
        if found.get(key) is not None:
            found.refuse(f"{key!r} is an instruction for a compiler")
    marked = found.get("compile_with_inductor")
    if marked is not None and isinstance(marked.value, dict) and marked.value.get("inductor_configs"):
        marked.refuse("options of a compiler are more than data")
    return found.plain(words=True)


_READ_BY_COMPILERS = ("stream", "fallback_to_eager", "nested_region_config", "_region_activation_memory_budget")


def _module(entry: Data) -> tuple[str, tuple[str, str]]:
    """A key, the path of a module and the name of its class, separated by commas outside of brackets."""
    # Parts of a program are named after the modules that they came from.
    Data(entry.value.replace("L['self']", ""), entry, "entry").normal_text()
    parts = _parts(entry.value)
    if len(parts) != 3 or max(map(len, parts)) > LONGEST_NAME:
        entry.malformed(f"{entry.value[:100]!r} is no module")
    key, path, kind = parts
    return key, (path, kind)


def _parts(text: str) -> list[str]:
    """What commas outside of brackets separate; nothing if brackets do not match."""
    if not _BRACKET.search(text):  # The usual case: a file of a thousand nodes has thousands of such texts.
        return text.split(",")
    commas, depth, least = [-1], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "[(") - (letter in ")]")
        least = min(least, depth)
        if letter == "," and depth == 0:
            commas.append(place)
    return [] if depth or least < 0 else [text[a + 1 : b] for a, b in zip(commas, (*commas[1:], None), strict=True)]


_BRACKET = re.compile(r"[()\[\]]")

Reader = Callable[[GraphReader, Data], Any]


def _each(read: Reader) -> Reader:
    def read_all(reader: GraphReader, data: Data) -> list[Any]:
        parts = list(data)
        reader._symbols.spend(len(parts), data)
        return [read(reader, part) for part in parts]

    return read_all


def _complex(data: Data) -> complex:
    found = complex(data["real"].number(), data["imag"].number())
    # torch.fx generates invalid code for others.
    return found if cmath.isfinite(found) else data.malformed(f"{found} is no complex number that code can hold")


def _chosen(prefix: str, names: str) -> Reader:
    choices = {number: getattr(torch, name) for number, name in enumerate(names.split(), 1)}

    def read(_: GraphReader, data: Data) -> Any:
        found = choices.get(data.integer())
        return found if found is not None else data.malformed(f"{data.value} is the number of no {prefix}")

    return read


#: The kinds of values that have names.
NAMED = frozenset(("as_tensor", "as_sym_int", "as_sym_float", "as_sym_bool"))
_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
_NUMBERED = re.compile(r"_\d+$", re.ASCII)
_SCALARS = frozenset(("as_int", "as_float", "as_bool", "as_sym_int", "as_sym_float", "as_sym_bool"))
_TEXTS = frozenset(("as_string", "as_strings"))
_NUMERALS = _SCALARS | {"as_complex"}
#: The kinds of values that each schema type accepts.
_TAKEN: dict[str, frozenset[str]] = {
    "Tensor": _NUMERALS | {"as_tensor"},
    **dict.fromkeys(("number", "int", "float", "bool", "complex"), _NUMERALS),
    "str": frozenset(("as_string",)),
    "ScalarType": frozenset(("as_scalar_type",)),
    "Layout": frozenset(("as_layout",)),
    "MemoryFormat": frozenset(("as_memory_format",)),
    "Device": frozenset(("as_device",)),
    "Generator": frozenset(),
}
_TYPE = re.compile(rf"(Optional\[)?(List\[)?(Optional\[)?({'|'.join(_TAKEN)})\]*")
_SINGLE: dict[str, Reader] = {
    "as_tensor": GraphReader._tensor,
    "as_optional_tensor": GraphReader._optional_tensor,
    "as_int": lambda _, data: data.integer(),
    "as_float": lambda _, data: data.number(),
    "as_bool": lambda _, data: data.boolean(),
    "as_string": lambda _, data: data.words(),
    "as_sym_int": GraphReader._number,
    "as_sym_float": GraphReader._number,
    "as_sym_bool": GraphReader._number,
}
_ARGUMENTS: dict[str, Reader] = {
    **_SINGLE,
    **{f"{kind}s": _each(read) for kind, read in _SINGLE.items()},
    "as_none": lambda _, data: None,
    "as_nested_tensors": _each(_each(GraphReader._tensor)),
    "as_int_lists": _each(lambda reader, data: tuple(_each(_SINGLE["as_int"])(reader, data))),
    "as_float_lists": _each(_each(_SINGLE["as_float"])),
    "as_complex": lambda _, data: _complex(data),
    "as_scalar_type": lambda _, data: read_dtype(data),
    "as_device": lambda _, data: read_device(data),
    "as_memory_format": _chosen("format", "contiguous_format channels_last channels_last_3d preserve_format"),
    "as_layout": _chosen("layout", "sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc _mkldnn strided"),
    "as_string_to_argument": GraphReader._mapping,
}
