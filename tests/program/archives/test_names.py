"""Archives whose names mean something else in generated code, or call what is no graph of the file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from tests.program.archives.helpers import Spoilt, X
from torch import Tensor, nn

from partita import Program, capture, inline, plan
from partita.errors import ArchiveError, OptionError, UntrustedArchiveError
from partita.policies import ByModule, BySize
from partita.program.archives import inspect_archive, load_exported
from partita.program.archives._torch.symbols import stays_small
from partita.treatments import Call, Recompute


class Small(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archives") / "small.pt2"
    torch.export.save(torch.export.export(Small(), (X,)), path)
    return path


@pytest.mark.parametrize("given", [2.5, None, "text"])
def test_an_argument_that_is_no_tensor_may_be_called_like_a_function_of_python(given: Any, tmp_path: Path) -> None:
    class Filled(nn.Module):
        def forward(self, input: Any, x: Tensor, max: Any = 1.0) -> Tensor:
            return x * max + 1

    program = plan(capture(Filled(), (given, X), {"max": 3.0}), BySize(parts=2), Call()).apply()
    program.save(tmp_path / "ours.pt2")
    torch.export.save(program.exported(), tmp_path / "theirs.pt2")
    for path in (tmp_path / "ours.pt2", tmp_path / "theirs.pt2"):
        loaded = Program.of(path)
        assert torch.equal(loaded.module()(given, X, max=3.0), X * 3.0 + 1)
        loaded.save(tmp_path / "again.pt2")
        assert torch.equal(Program.of(tmp_path / "again.pt2").module()(given, X, max=3.0), X * 3.0 + 1)


def value(name: str) -> Any:
    return {"as_tensor": {"name": name}}


def node(target: str, args: list[Any], *outputs: str, name: str | None = None, hop: bool | None = None) -> Any:
    return {
        "target": target,
        "inputs": [{"name": "", "arg": arg, "kind": 1} for arg in args],
        "outputs": list(map(value, outputs)),
        "metadata": {},
        "is_hop_single_tensor_return": hop,
        "name": name or outputs[0],
    }


def graph(inputs: list[str], nodes: list[Any], outputs: list[str]) -> Any:
    names = {*inputs, *(given["as_tensor"]["name"] for one in nodes for given in one["outputs"])}
    meta = {
        "dtype": 7,
        "sizes": [{"as_int": 6}, {"as_int": 4}],
        "requires_grad": False,
        "device": {"type": "cpu", "index": None},
        "strides": [{"as_int": 4}, {"as_int": 1}],
        "storage_offset": {"as_int": 0},
        "layout": 7,
    }
    return {
        "inputs": list(map(value, inputs)),
        "outputs": list(map(value, outputs)),
        "nodes": nodes,
        "tensor_values": dict.fromkeys(names, meta),
        "sym_int_values": {},
        "sym_bool_values": {},
        "sym_float_values": {},
        "custom_obj_values": {},
        "is_single_tensor_return": False,
    }


def body(name: str, content: Any) -> Any:
    return {"as_graph": {"name": name, "graph": content}}


def sine(given: str, result: str) -> Any:
    made = node("torch.ops.aten.sin.default", [value(given)], result)
    made["inputs"][0]["name"] = "self"
    return made


SINE = graph(["p"], [sine("p", "q")], ["q"])
EMPTY = graph([], [], [])
WRAP, ITE, ITEM = "torch.ops.higher_order.wrap", "torch.sym_ite", "_operator.getitem"
TRUE = {"as_bool": True}


def written(small: Path, path: Path, nodes: list[Any], result: str = "r") -> Path:
    """A program of one input `x` that runs these nodes."""
    spoilt = Spoilt(small)

    def change(program: Any) -> None:
        program["graph_module"]["graph"] = graph(["x"], nodes, [result])
        program["graph_module"]["signature"]["output_specs"] = [{"user_output": {"arg": value(result)}}]

    spoilt.program(change)
    return spoilt.write(path)


def test_a_graph_that_is_wrapped_is_loaded(small: Path, tmp_path: Path) -> None:
    path = written(small, tmp_path / "m.pt2", [node(WRAP, [body("own", SINE), value("x")], "r", hop=False)])
    assert torch.equal(load_exported(path).module()(X), X.sin())


def attribute_of(name: str) -> Any:
    """A graph that gives an attribute of its input, once a value called `self` hides the module."""
    hidden = node(ITE, [TRUE, value("p"), value("p")], "self")
    return graph(["p"], [hidden, node(ITE, [TRUE, body(name, EMPTY), body(name, EMPTY)], "q")], ["q", "self"])


def reaching_for_the_system(canary: Path) -> list[Any]:
    """From a tensor to `os.system`, attribute by attribute, and a call of it."""
    nodes, last = [], "x"
    for place, name in enumerate(("split", "__globals__", "torch", "os", "system")):
        if name == "torch":
            nodes.append(node(ITEM, [value(last), {"as_string": name}], f"v{place}"))
        else:
            args = [body(f"b{place}", attribute_of(name)), value(last)]
            nodes.append(node(WRAP, args, f"v{place}", f"w{place}", name=f"c{place}", hop=False))
        last = f"v{place}"
    return [*nodes, node(WRAP, [value(last), {"as_string": f"touch {canary.name}"}], "called"), sine("x", "r")]


def test_no_way_leads_from_a_tensor_to_the_system(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(small, tmp_path / "m.pt2", reaching_for_the_system(tmp_path / "canary"))
    with pytest.raises(UntrustedArchiveError):
        Program.of(path)
    assert not (tmp_path / "canary").exists()


REFUSED: dict[str, tuple[list[Any], str]] = {
    "a value called self": ([sine("x", "self"), sine("self", "r")], "'self' means something else"),
    "a value called torch": ([sine("x", "torch"), sine("torch", "r")], "'torch' means something else"),
    "a graph called __globals__": ([node(WRAP, [body("__globals__", SINE), value("x")], "r")], "another attribute"),
    "a graph called recompile": ([node(WRAP, [body("recompile", SINE), value("x")], "r")], "another attribute"),
    "a graph called _guards_fn": ([node(WRAP, [body("_guards_fn", SINE), value("x")], "r")], "another attribute"),
    "a graph as a number": ([node(ITE, [TRUE, body("b", SINE), body("b", SINE)], "r")], "it is no number"),
    "a graph as an operand": ([node(WRAP, [body("b", SINE), body("c", SINE)], "r")], "no argument of this kind"),
    "a call of a value": ([node(WRAP, [value("x"), value("x")], "r")], "it calls what is no graph"),
    "a call of an operator": ([node(WRAP, [{"as_operator": "torch.ops.aten.sin.default"}], "r")], "no graph"),
    "an operator that runs graphs": (
        [node("torch.ops.higher_order.out_dtype", [{"as_operator": WRAP}, value("x")], "r")],
        "no single operator",
    ),
    "an item by a text": ([node(ITEM, [value("x"), {"as_string": "torch"}], "r")], "takes no item out of a list"),
    "an item of a tensor": ([node(ITEM, [value("x"), {"as_int": 0}], "r")], "takes no item out of a list"),
    "a level left open": (
        [
            node("torch._functorch.predispatch._vmap_increment_nesting", [{"as_int": 6}, {"as_string": "error"}], "l"),
            sine("x", "r"),
        ],
        "enters a level that the graph does not leave",
    ),
    "a level left twice": (
        [node("torch._functorch.predispatch._vmap_decrement_nesting", [], "l"), sine("x", "r")],
        "leaves a level that was not entered",
    ),
}


def named(target: str, result: str, **given: Any) -> Any:
    """A node whose arguments go by their names in the schema."""
    made = node(target, list(given.values()), result)
    for one, name in zip(made["inputs"], given, strict=True):
        one |= {"name": name, "kind": 2}
    return made


ATEN, PREDISPATCH = "torch.ops.aten.", "torch._functorch.predispatch."
ONE, HUGE = {"as_int": 1}, {"as_int": 2**31 - 1}
CLONE = {"as_operator": f"{ATEN}clone.default"}


def by_name_before_the_operator() -> Any:
    """An operator that calls another, with the argument of that in front of it."""
    made = node("torch.ops.higher_order.auto_functionalized", [HUGE, CLONE], "c")
    made["inputs"][0] |= {"name": "memory_format", "kind": 2}
    return made


REFUSED |= {
    f"an argument of another type, {case}": ([made, sine("x", "r")], words)
    for case, made, words in (
        ("memory format", named(f"{ATEN}clone.default", "c", self=value("x"), memory_format=HUGE), "takes no int"),
        ("dtype", named(f"{ATEN}softmax.int", "c", self=value("x"), dim=ONE, dtype=HUGE), "takes no int for 'dtype'"),
        ("layout", named(f"{ATEN}zeros_like.default", "c", self=value("x"), layout=HUGE), "takes no int for 'layout'"),
        ("device", named(f"{ATEN}zeros_like.default", "c", self=value("x"), device=HUGE), "takes no int for 'device'"),
        (
            "symbolic dtype",
            named(f"{ATEN}softmax.int", "c", self=value("x"), dim=ONE, dtype={"as_sym_int": ONE}),
            "takes no sym int for 'dtype'",
        ),
        ("none", named(f"{ATEN}softmax.int", "c", self=value("x"), dim={"as_none": True}), "takes no none for 'dim'"),
        ("list", named(f"{ATEN}softmax.int", "c", self=value("x"), dim={"as_ints": [1]}), "takes no ints for 'dim'"),
        ("tensor", named(f"{ATEN}sin.default", "c", self={"as_tensors": [{"name": "x"}]}), "takes no tensors"),
        (
            "short list",
            named(f"{ATEN}avg_pool2d.default", "c", self=value("x"), kernel_size={"as_ints": []}),
            "takes no 0 numbers for 'kernel_size', but 2",
        ),
        ("by name to what is called", by_name_before_the_operator(), "takes no int for 'memory_format'"),
        (
            "by place to what is called",
            node("torch.ops.higher_order.with_effects", [value("x"), CLONE, value("x"), HUGE], "c"),
            "takes no int for 'memory_format'",
        ),
        ("batch dimension", named(f"{ATEN}_remove_batch_dim.default", "c", self=value("x")), "does more than compute"),
        (
            "place of a dimension",
            node(f"{PREDISPATCH}_remove_batch_dim", [value("x"), {"as_int": 7}, ONE, {"as_int": -2}], "c"),
            "elsewhere than to the front",
        ),
    )
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_means_more_than_it_says_is_refused(small: Path, tmp_path: Path, case: str) -> None:
    nodes, words = REFUSED[case]
    with pytest.raises(UntrustedArchiveError, match=words):
        load_exported(written(small, tmp_path / "m.pt2", nodes))


def test_arguments_that_torch_turns_into_the_type_of_the_schema_are_loaded(tmp_path: Path) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            pooled = torch.ops.aten.avg_pool2d(x + 1, 2, [])
            halved = torch.ops.aten.upsample_nearest2d.vec(pooled, None, [2, 2])
            summed = halved.sum(1, dtype=torch.float64).clone(memory_format=torch.contiguous_format)
            return torch.ops.aten.add.Tensor(summed, 2, alpha=3).to(torch.device("cpu"), torch.float32)

    x = torch.linspace(-1, 1, 64).reshape(1, 4, 4, 4)
    torch.export.save(torch.export.export(Model(), (x,)), tmp_path / "m.pt2")
    assert torch.equal(load_exported(tmp_path / "m.pt2").module()(x), Model()(x))


@pytest.mark.parametrize("name", ["device", "input", "type", "print", "inf", "args", "x_007", "output"])
def test_other_names_are_just_names(small: Path, tmp_path: Path, name: str) -> None:
    path = written(small, tmp_path / "m.pt2", [sine("x", name), sine(name, "r")])
    loaded = load_exported(path)
    assert torch.equal(loaded.module()(X), X.sin().sin())
    assert name in {one.name for one in loaded.graph.nodes}
    loaded.graph.lint()


def with_weight_called(path: str, folder: Path) -> Path:
    """A linear layer in which another path stands for that of its weight."""
    torch.export.save(torch.export.export(nn.Linear(4, 4), (X,)), folder / "linear.pt2")
    spoilt = Spoilt(folder / "linear.pt2")
    for member in ("models/model.json", "data/weights/model_weights_config.json"):
        spoilt.members[member] = spoilt.members[member].replace(b'"weight"', f'"{path}"'.encode())
    return spoilt.write(folder / "m.pt2")


@pytest.mark.parametrize(
    "path",
    [
        "/elsewhere/outside.weight",
        "_guards_fn",
        "self.weight",
        "training",
        "a._modules",
        "a.training",
        "_in_spec",
        "meta",
    ],
)
def test_paths_that_are_something_else_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(UntrustedArchiveError, match="is no path of a parameter"):
        load_exported(with_weight_called(path, tmp_path))


def test_a_tensor_inside_of_a_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"'bias' is a tensor, and so is 'bias.weight' in it"):
        load_exported(with_weight_called("bias.weight", tmp_path))


@pytest.mark.parametrize("path", ["a\0b", 3])
def test_what_is_no_path_is_refused_in_words(path: Any) -> None:
    with pytest.raises(OptionError, match="an archive is loaded from a path"):
        load_exported(path)


def test_names_that_count_backwards_cost_no_more_than_others(small: Path, tmp_path: Path) -> None:
    """torch.fx starts counting where the last name ended, so that a file could make it count for hours."""

    def work(name: Callable[[int, int], str], count: int) -> int:
        nodes, last = [], "x"
        for place in range(count):
            nodes.append(sine(last, f"n{place}"))
            nodes[-1]["name"] = name(place, count)
            last = f"n{place}"
        return lines_of_create_name(written(small, tmp_path / "m.pt2", [*nodes, sine(last, "r")]))

    plain = work(lambda place, count: f"k_{place}", 100)
    assert work(lambda place, count: f"k_{count - place}" if place % 2 else "k_1", 100) < 1.1 * plain


def lines_of_create_name(path: Path) -> int:
    """How many lines of the function by which torch.fx finds free names a load runs."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line" and frame.f_code.co_name == "create_name"
        return note if frame.f_code.co_name == "create_name" else None

    before = sys.gettrace()
    sys.settrace(note)
    try:
        load_exported(path)
    finally:
        sys.settrace(before)
    return count


def test_a_module_called_self_can_be_cut(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("self", nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            inner: Tensor = self.get_submodule("self")(x)
            return inner.sin()

    model = Model()
    for treatment in (Call(), Recompute()):
        cut = plan(capture(model, (X,)), ByModule("self"), treatment).apply().module()
        assert torch.equal(cut(X), model(X))


# Letters that Python takes for others ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["\uff43ode", "\uff44ouble", "\uff41", "layers.\uff54o_folder"])
def test_paths_that_python_reads_as_others_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(UntrustedArchiveError, match="is no path of a parameter"):
        load_exported(with_weight_called(path, tmp_path))


def test_modules_that_python_reads_as_others_are_refused(small: Path, tmp_path: Path) -> None:
    nodes = [sine("x", "r")]
    nodes[0]["metadata"] = {"nn_module_stack": "L__self__,,M;k,\uff54o_folder,torch.nn.Linear"}
    with pytest.raises(UntrustedArchiveError, match="is another name for Python"):
        load_exported(written(small, tmp_path / "m.pt2", nodes))


@pytest.mark.parametrize("letter", ["\u202e", "\u200b", "\u2066", "\U000e0041", "\ufeff", "\x85"])
def test_modules_that_a_terminal_shows_as_others_are_refused(letter: str, small: Path, tmp_path: Path) -> None:
    nodes = [sine("x", "r")]
    nodes[0]["metadata"] = {"nn_module_stack": f"L__self__,,M;k,a{letter}b,torch.nn.Linear"}
    with pytest.raises(UntrustedArchiveError, match="signs that cannot be printed"):
        load_exported(written(small, tmp_path / "m.pt2", nodes))


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        (";".join(f"k{place},,M" for place in range(102)), "it is in 102 modules"),
        ("L__self__,,M;k,][,M", "is no module"),
        ("L__self__,,M;k,a[,M", "is no module"),
        (f"L__self__,,M;k,{'a' * 1001},M", "is no module"),
        (f"L__self__,,M;k,a,{'a.' * 600}M", "is no module"),
        (f"L__self__,,M;{'k' * 1001},a,M", "is no module"),
    ],
    ids=["deep", "brackets that close first", "brackets that stay open", "long path", "long class", "long key"],
)
def test_modules_that_no_node_is_in_are_refused(small: Path, tmp_path: Path, stack: str, words: str) -> None:
    nodes = [sine("x", "r")]
    nodes[0]["metadata"] = {"nn_module_stack": stack}
    with pytest.raises(ArchiveError, match=words):
        load_exported(written(small, tmp_path / "m.pt2", nodes))


def test_modules_with_brackets_around_commas_are_read(small: Path, tmp_path: Path) -> None:
    nodes = [sine("x", "r")]
    nodes[0]["metadata"] = {"nn_module_stack": "L__self__,,M;k,a[0, 1],N[int, str]"}
    (found,) = load_exported(written(small, tmp_path / "m.pt2", nodes)).graph.find_nodes(
        op="call_function", target=torch.ops.aten.sin.default
    )
    assert found.meta["nn_module_stack"] == {"L__self__": ("", "M"), "k": ("a[0, 1]", "N[int, str]")}


@pytest.mark.parametrize("name", ["\uff54o_folder", "_guards_fn", "validate_inputs", "_in_spec", "code"])
def test_a_module_with_the_name_of_something_else_can_be_cut(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            inner: Tensor = self.get_submodule(name)(x)
            return inner.sin()

    model = Model()
    cut = plan(capture(model, (X,)), ByModule(name), Call()).apply()
    assert torch.equal(cut.module()(X), model(X))


def test_a_checkpoint_takes_no_function_from_a_file(small: Path, tmp_path: Path) -> None:
    checkpoint = node(
        "torch.ops.higher_order.wrap_activation_checkpoint", [body("b", SINE), value("x")], "r", hop=False
    )
    checkpoint["inputs"].append({"name": "context_fn", "arg": value("x"), "kind": 2})
    with pytest.raises(UntrustedArchiveError, match="it is a function that is called"):
        load_exported(written(small, tmp_path / "m.pt2", [checkpoint]))


def test_graphs_inside_of_others_give_no_texts(small: Path, tmp_path: Path) -> None:
    inner = graph(["p"], [], ["p"])
    inner["outputs"] = [{"as_string": "pandas"}, value("p")]
    with pytest.raises(UntrustedArchiveError, match="gives tensors and numbers"):
        load_exported(written(small, tmp_path / "m.pt2", [node(WRAP, [body("b", inner), value("x")], "r", "s")]))


# What no program needs ---------------------------------------------------------------------------------------------


def test_a_tensor_is_no_number(small: Path, tmp_path: Path) -> None:
    number = {"as_sym_int": {"as_name": "x"}}
    with pytest.raises(ArchiveError, match="nothing before it gives a number 'x'"):
        load_exported(written(small, tmp_path / "m.pt2", [node("_operator.add", [number, number], "r")]))


def test_arguments_behind_one_that_is_left_out_go_by_name(small: Path, tmp_path: Path) -> None:
    clamp = node("torch.ops.aten.clamp.default", [value("x"), {"as_float": 0.5}], "r")
    clamp["inputs"][0]["name"], clamp["inputs"][1]["name"] = "self", "max"
    loaded = load_exported(written(small, tmp_path / "m.pt2", [clamp]))
    assert torch.equal(loaded.module()(X), X.clamp(max=0.5))


def test_an_argument_that_is_needed_is_missed(small: Path, tmp_path: Path) -> None:
    added = node("torch.ops.aten.add.Tensor", [value("x")], "r")
    added["inputs"][0]["name"] = "self"
    with pytest.raises(ArchiveError, match=r"aten.add.Tensor is given no 'other'"):
        load_exported(written(small, tmp_path / "m.pt2", [added]))


def spoilt_signature(small: Path, path: Path, change: Callable[[Any], Any]) -> Path:
    spoilt = Spoilt(small)
    spoilt.program(lambda program: change(program["graph_module"]))
    return spoilt.write(path)


def set_two_names(module: Any) -> None:
    module["module_call_graph"][0]["signature"]["forward_arg_names"] = ["x", "x"]


def set_a_name_that_torch_gives(module: Any) -> None:
    leaf, empty = {"type": None, "context": None, "children_spec": []}, {"type": "builtins.tuple", "context": "null"}
    keywords = {"type": "builtins.dict", "context": '["arg_0"]', "children_spec": [leaf]}
    positional = {**empty, "children_spec": [{**empty, "children_spec": []}]}
    signature = module["module_call_graph"][0]["signature"]
    signature["in_spec"] = json.dumps([1, {**empty, "children_spec": [positional, keywords]}])
    signature["forward_arg_names"] = None


def set_another_output(module: Any) -> None:
    module["signature"]["output_specs"] *= 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_two_names, "two of its arguments have one name"),
        (set_a_name_that_torch_gives, "two of its arguments have one name"),
        (set_another_output, "the trees of a call have other numbers of leaves"),
        (lambda module: module.update(module_call_graph=[]), "does not begin with how the program is called"),
    ],
)
def test_calls_that_cannot_be_made_are_refused(small: Path, tmp_path: Path, change: Any, words: str) -> None:
    with pytest.raises(ArchiveError, match=words):
        load_exported(spoilt_signature(small, tmp_path / "m.pt2", change))


class Held(nn.Module):
    """A parameter, a buffer that is saved, one that is not, and a constant, which are the inputs of its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("saved", torch.ones(4))
        self.register_buffer("fleeting", torch.ones(4), persistent=False)
        self.constant = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.saved + self.fleeting + self.constant


def made_saved(inputs: Any) -> None:
    inputs[2]["buffer"]["persistent"] = True


def made_a_buffer(inputs: Any) -> None:
    (given,) = inputs[3].values()
    inputs[3] = {"buffer": {"arg": given["arg"], "buffer_name": "weight", "persistent": True}}


def made_a_parameter(inputs: Any) -> None:
    inputs[0]["parameter"]["parameter_name"] = "constant"


def made_a_token(inputs: Any) -> None:
    (given,) = inputs[3].values()
    inputs[3] = {"token": {"arg": given["arg"]}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (made_saved, "'fleeting' is a parameter or buffer that is saved, and among the constants"),
        (made_a_parameter, "'constant' is a parameter or buffer that is saved, and among the constants"),
        (made_a_buffer, "2 inputs are the tensor 'weight'"),
        (made_a_token, "it has 1 tokens among its inputs, and another number among its outputs"),
    ],
)
def test_signatures_that_contradict_each_other_are_refused(tmp_path: Path, change: Any, words: str) -> None:
    """They were loaded, and `module()` failed inside of torch."""
    torch.export.save(torch.export.export(Held(), (X,)), tmp_path / "held.pt2")
    path = spoilt_signature(
        tmp_path / "held.pt2", tmp_path / "m.pt2", lambda module: change(module["signature"]["input_specs"])
    )
    with pytest.raises(ArchiveError, match=words):
        load_exported(path)
    assert not inspect_archive(path).is_plain


def test_more_mutations_than_any_program_has_are_refused(tmp_path: Path) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return x + self.count

    torch.export.save(torch.export.export(Counter(), (X,)).run_decompositions(), tmp_path / "counter.pt2")

    def change(module: Any) -> None:
        module["signature"]["output_specs"][:1] *= 5_000

    with pytest.raises(ArchiveError, match="5000 outputs of 5001 are mutations"):
        load_exported(spoilt_signature(tmp_path / "counter.pt2", tmp_path / "m.pt2", change))


def test_paths_of_many_modules_are_refused(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(nn.Linear(4, 4), (X,)), tmp_path / "linear.pt2")

    def change(module: Any) -> None:
        first, *others = module["signature"]["input_specs"]
        deep = [".".join([f"a{number}"] + ["a"] * 99) for number in range(20)]
        many = [{"parameter": {**first["parameter"], "parameter_name": path}} for path in deep]
        module["signature"]["input_specs"] = [*many, *others]

    with pytest.raises(ArchiveError, match="21 tensors are in more than 1084 modules"):
        load_exported(spoilt_signature(tmp_path / "linear.pt2", tmp_path / "m.pt2", change))


def test_only_equalities_that_stay_short_are_told_to_torch() -> None:
    first, second = sympy.symbols("u0 u1", integer=True)
    assert stays_small(sympy.Eq(first, 2 * second + 1))
    assert stays_small(first < second * second * second)
    assert not stays_small(sympy.Eq(first, second * second))
    assert not stays_small(sympy.And(first > 0, sympy.Eq(first, sympy.Max(second, 7) + 1)))


def test_names_that_take_long_to_normalize_are_refused(small: Path, tmp_path: Path) -> None:
    long = "a" + "\u0344" * 600 + "\u0f73" * 600
    with pytest.raises(UntrustedArchiveError, match="is no name of Python"):
        load_exported(written(small, tmp_path / "m.pt2", [sine("x", long), sine(long, "r")]))


def test_lists_that_are_far_longer_than_a_graph_needs_are_refused(small: Path, tmp_path: Path) -> None:
    many = node(WRAP, [body("own", SINE), value("x"), {"as_ints": [0] * 200_000}], "r", hop=False)
    with pytest.raises(ArchiveError, match="more values in lists, inputs and results than a program of its size"):
        load_exported(written(small, tmp_path / "m.pt2", [many]))


def test_no_parameter_is_an_attribute_of_a_graph(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                still = x.sin()
            return still * self.weight

    torch.export.save(torch.export.export(Model(), (X,)), tmp_path / "model.pt2")
    spoilt = Spoilt(tmp_path / "model.pt2")
    name = next(one.name for one in load_exported(tmp_path / "model.pt2").graph.nodes if one.name.startswith("submod"))
    for member in ("models/model.json", "data/weights/model_weights_config.json"):
        path = f'"{name}.graph.eliminate_dead_code"'.encode()
        spoilt.members[member] = spoilt.members[member].replace(b'"weight"', path)
    with pytest.raises(UntrustedArchiveError, match="the graph has such a body"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


def test_keys_without_children_are_refused(tmp_path: Path) -> None:
    class Keyed(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"a": x.sin()}

    torch.export.save(torch.export.export(Keyed(), (X,)), tmp_path / "keyed.pt2")

    def change(module: Any) -> None:
        signature = module["module_call_graph"][0]["signature"]
        signature["out_spec"] = signature["out_spec"].replace('[\\"a\\"]', '[\\"a\\", \\"b\\"]')

    with pytest.raises(ArchiveError, match="it has 2 keys and 1 children"):
        load_exported(spoilt_signature(tmp_path / "keyed.pt2", tmp_path / "m.pt2", change))


def test_the_call_of_a_program_names_no_nodes(small: Path, tmp_path: Path) -> None:
    wrapped = node(WRAP, [body("b", SINE), value("x")], "r", name="wrap", hop=False)
    path = written(small, tmp_path / "wrapped.pt2", [wrapped])

    def change(module: Any) -> None:
        signature = module["module_call_graph"][0]["signature"]
        signature["inputs"], signature["outputs"] = [value("x")], [value("r")]

    program = Program.of(spoilt_signature(path, tmp_path / "m.pt2", change))
    assert torch.equal(inline(program).exported().module()(X), X.sin())


@pytest.mark.parametrize(
    ("container", "context", "words"),
    [
        ("builtins.dict", '["a", "a"]', "two of its keys are equal"),
        ("builtins.dict", "[1, true]", "two of its keys are equal"),
        ("collections.OrderedDict", '["a", "a"]', "two of its keys are equal"),
        ("collections.deque", "1", "it holds at most 1 items and has 2 children"),
        ("torch.fx.immutable_collections.immutable_dict", '["a"]', "it has 1 keys and 2 children"),
        ("torch.fx.immutable_collections.immutable_dict", '["a", "a"]', "two of its keys are equal"),
        ("torch.fx.immutable_collections.immutable_dict", "5", "is no list"),
        ("torch.fx.immutable_collections.immutable_dict", f"[1, {1 << 64}]", "is no integer of 64 bits"),
    ],
)
def test_containers_that_cannot_hold_their_children_are_refused(
    container: str, context: str, words: str, tmp_path: Path
) -> None:
    class Pair(nn.Module):
        def forward(self, pair: dict[str, Tensor]) -> Tensor:
            return pair["a"] + pair["b"]

    torch.export.save(torch.export.export(Pair(), ({"a": X, "b": X},)), tmp_path / "pair.pt2")

    def change(module: Any) -> None:
        signature = module["module_call_graph"][0]["signature"]
        tree = json.loads(signature["in_spec"])
        pair = tree[1]["children_spec"][0]["children_spec"][0]
        pair.update(type=container, context=context)
        signature["in_spec"] = json.dumps(tree)

    with pytest.raises(ArchiveError, match=words):
        load_exported(spoilt_signature(tmp_path / "pair.pt2", tmp_path / "m.pt2", change))


def test_an_enum_that_is_imported_after_a_refusal_is_found(small: Path, tmp_path: Path) -> None:
    def change(module: Any) -> None:
        signature = module["module_call_graph"][0]["signature"]
        tree = json.loads(signature["out_spec"])
        key = {"__enum__": True, "fqn": f"{__name__}:Late", "name": "A"}
        tree[1] = {"type": "builtins.dict", "context": json.dumps([key]), "children_spec": [tree[1]]}
        signature["out_spec"] = json.dumps(tree)

    path = spoilt_signature(small, tmp_path / "m.pt2", change)
    with pytest.raises(ArchiveError, match="is no Enum that is imported here"):
        load_exported(path)
    late = Enum("Late", {"A": 1}, module=__name__)
    assert list(Program.of(path).module()(X)) == [late.A]


def test_roots_of_sizes_and_their_bits_load(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.shape[0] ** -0.5 + (x.shape[0] & 3)

    rows = torch.export.Dim("rows", min=2, max=100)
    program = torch.export.export(Scaled(), (X,), dynamic_shapes=({0: rows},))
    torch.export.save(program, tmp_path / "m.pt2")
    loaded = load_exported(tmp_path / "m.pt2").module()
    for x in (X, X[:5]):
        torch.testing.assert_close(loaded(x), Scaled()(x))


def sharing(small: Path, path: Path, *, levels: int) -> Path:
    """A program in which each level calls the next one twice, once by its name alone."""

    def called(body: Any) -> Any:
        return {"as_graph": {"name": "b", "graph": body}}

    empty = graph([], [], [])
    sine = node("torch.ops.aten.sin.default", [value("x")], "y")
    sine["inputs"][0]["name"] = "self"
    body = {**graph(["x"], [sine], ["y"]), "is_single_tensor_return": True}
    for _ in range(levels):
        wrap, grad = "torch.ops.higher_order.wrap_with_set_grad_enabled", {"as_bool": True}
        calls = [
            node(wrap, [grad, called(empty), value("x")], "y", hop=True),
            node(wrap, [grad, called(body), value("y")], "z", hop=True),
        ]
        body = {**graph(["x"], calls, ["z"]), "is_single_tensor_return": True}

    def change(program: Any) -> None:
        program["graph_module"]["graph"] = {**program["graph_module"]["graph"], **_renamed(body, program)}

    spoilt = Spoilt(small)
    spoilt.program(change)
    return spoilt.write(path)


@pytest.mark.parametrize("levels", [12, 30])
def test_bodies_that_share_others_stand_for_a_bounded_number_of_nodes(levels: int, small: Path, tmp_path: Path) -> None:
    """Thirty levels would be a billion calls, and twelve take minutes to print in a plan."""
    with pytest.raises(ArchiveError, match=r"stand for more than \d+ nodes"):
        load_exported(sharing(small, tmp_path / "m.pt2", levels=levels))


def test_bodies_that_are_shared_stand_for_a_bounded_amount_of_metadata(small: Path, tmp_path: Path) -> None:
    layer = graph(["p"], [sine("p", "q")], ["q"])
    layer["nodes"][0]["metadata"] = {"custom": json.dumps({"stage": ["word"] * 50_000})}
    bodies = [body("layer", EMPTY)] * 1_999 + [body("layer", layer)]
    calls = [node(WRAP, [each, value("x")], f"r{at}", hop=False) for at, each in enumerate(bodies)]
    with pytest.raises(ArchiveError, match=r"stand for more than \d+ nodes"):
        load_exported(written(small, tmp_path / "m.pt2", calls, "r0"))


def test_bodies_may_share_others(small: Path, tmp_path: Path) -> None:
    y = X
    for _ in range(16):
        y = y.sin()
    assert torch.equal(load_exported(sharing(small, tmp_path / "m.pt2", levels=4)).module()(X), y)


def test_many_equal_layers_share_a_body(small: Path, tmp_path: Path) -> None:
    """The bound on bodies that share others is none on one body of many calls."""
    layer = graph(["p"], [sine(f"q{at - 1}" if at else "p", f"q{at}") for at in range(100)], ["q99"])
    bodies = [body("layer", EMPTY)] * 99 + [body("layer", layer)]
    calls = [
        node(WRAP, [held, value(f"y{at - 1}" if at else "x")], f"y{at}", hop=False) for at, held in enumerate(bodies)
    ]
    assert len(load_exported(written(small, tmp_path / "m.pt2", calls, "y99")).graph.nodes) > 100


def wrapped(inner: Any, result: dict[str, Any]) -> Any:
    """A program that returns the result of a body."""
    call = node(
        "torch.ops.higher_order.wrap_with_set_grad_enabled", [{"as_bool": False}, body("b", inner), value("x")], "y"
    )
    return {**graph(["x"], [{**call, **result}], ["y"]), "is_single_tensor_return": False}


def sine_in_body(*, is_single: bool) -> Any:
    return {**graph(["a"], [sine("a", "b")], ["b"]), "is_single_tensor_return": is_single}


@pytest.mark.parametrize("is_single", [True, False])
@pytest.mark.parametrize("said", [True, False, None])
def test_a_call_gives_what_its_graph_gives(is_single: bool, said: bool | None, small: Path, tmp_path: Path) -> None:
    """If the file says nothing, the graph decides; a call of another kind would be a program that nobody can export."""
    spoilt, content = Spoilt(small), wrapped(sine_in_body(is_single=is_single), {"is_hop_single_tensor_return": said})

    def change(program: Any) -> None:
        program["graph_module"]["graph"] = content
        outputs = [{"user_output": {"arg": given}} for given in content["outputs"]]
        program["graph_module"]["signature"]["output_specs"] = outputs

    spoilt.program(change)
    path = spoilt.write(tmp_path / "m.pt2")
    if said is not None and said != is_single:
        with pytest.raises(ArchiveError, match="the graph that it runs has other results"):
            load_exported(path)
    else:
        torch.testing.assert_close(inline(Program.of(path)).exported().module()(X), X.sin())


@pytest.mark.parametrize("returned", [{"as_int": 1}, {"as_none": True}])
def test_a_call_gives_no_tensor_if_its_graph_gives_none(returned: Any, small: Path, tmp_path: Path) -> None:
    inner = {**graph(["a"], [sine("a", "b")], ["b"]), "outputs": [returned], "is_single_tensor_return": False}
    spoilt = Spoilt(small)
    spoilt.program(
        lambda program: program["graph_module"].update(graph=wrapped(inner, {"is_hop_single_tensor_return": False}))
    )
    with pytest.raises(ArchiveError, match="the graph that it runs has other results"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


@pytest.mark.parametrize(
    ("target", "outputs"),
    [
        ("torch.ops.aten.sin.default", [value("r"), value("other")]),
        ("torch.ops.aten.sin.default", [{"as_tensors": [{"name": "r"}]}]),
        ("torch.ops.aten.max.dim", [value("r")]),
        ("torch.ops.aten.max.dim", [{"as_none": True}]),
        ("torch.ops.aten.unbind.int", [value("r")]),
        ("torch.ops.aten.unbind.int", [value("r"), {"as_none": True}]),
        ("torch.ops.aten.sym_numel.default", [value("r")]),
        ("torch.ops.aten._assert_tensor_metadata.default", [value("r")]),
        ("_operator.mul", [value("r")]),
    ],
)
def test_an_operator_has_the_results_of_its_schema(target: str, outputs: Any, small: Path, tmp_path: Path) -> None:
    """Others load, but cannot be saved again: torch's serializer fails with an error about itself."""
    call = {**node(target, [], "r"), "outputs": outputs}
    given = {
        "sin": {"self": value("x")},
        "max": {"self": value("x"), "dim": {"as_int": 0}},
        "unbind": {"self": value("x")},
    }
    arguments = given.get(target.split(".")[-2], {"a" if "assert" in target else "self": value("x")})
    if target == "_operator.mul":
        arguments = {"a": {"as_int": 2}, "b": {"as_int": 3}}
    call["inputs"] = [{"name": name, "arg": argument, "kind": 1} for name, argument in arguments.items()]
    spoilt = Spoilt(small)

    def change(program: Any) -> None:
        content = graph(["x", "r", "other", "y"], [], ["y"])
        program["graph_module"]["graph"] = {**content, "inputs": [value("x")], "nodes": [call, sine("x", "y")]}
        program["graph_module"]["signature"]["output_specs"] = [{"user_output": {"arg": value("y")}}]

    spoilt.program(change)
    with pytest.raises(ArchiveError, match="has other results"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


def test_a_call_without_a_result_has_a_name_of_python(small: Path, tmp_path: Path) -> None:
    """It is loaded again once it was saved."""
    spoilt = Spoilt(small)
    check = {
        **node("torch.ops.aten._assert_tensor_metadata.default", [value("x")], "c"),
        "outputs": [{"as_none": True}],
    }
    check["inputs"][0]["name"] = "a"
    spoilt.program(lambda program: program["graph_module"]["graph"]["nodes"].insert(0, check))
    program = Program.of(spoilt.write(tmp_path / "m.pt2"))
    assert all(one.name.isidentifier() for one in program.graph.nodes)
    program.save(tmp_path / "again.pt2")
    assert len(load_exported(tmp_path / "again.pt2").graph.nodes) == 4


def test_a_long_place_is_shortened_in_messages(small: Path, tmp_path: Path) -> None:
    inner = sine_in_body(is_single=True)
    for _ in range(30):
        content = wrapped(inner, {"is_hop_single_tensor_return": True})
        inner = {**content, "is_single_tensor_return": True}
    text = json.dumps(content).replace("torch.ops.aten.sin.default", "torch.ops.aten.from_file.default")
    spoilt = Spoilt(small)
    spoilt.program(lambda program: program["graph_module"].update(graph=json.loads(text)))
    with pytest.raises(UntrustedArchiveError, match=r"nodes\[0\].target: 'torch.ops.aten.from_file.default' does more"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


def _renamed(body: Any, program: Any) -> Any:
    """The nodes and values of a body, as those of the whole program, with its output."""
    before = program["graph_module"]["graph"]
    (output,) = before["outputs"]
    last = body["nodes"][-1]
    named = {**last, "name": output["as_tensor"]["name"], "outputs": [output]}
    values = {**body["tensor_values"], **before["tensor_values"]}
    return {"nodes": [*body["nodes"][:-1], named], "tensor_values": values}
