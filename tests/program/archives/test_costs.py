"""Archives that would take time or memory out of proportion to their size, in torch or in an analysis."""

from __future__ import annotations

import gc
import json
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.processes import run_in_new_process
from tests.helpers.work import calls_during, steps_during
from tests.program.archives.helpers import Spoilt, X
from tests.program.archives.test_names import body, graph, node, sine, value
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from partita import Program, compare, plan
from partita._torch.dry_runs import Allowance, refusal_of_call
from partita.errors import ArchiveError, RegionError, UntrustedArchiveError
from partita.plans import Site
from partita.policies import ByAnnotation, BySize, Repeats
from partita.program import structure
from partita.program._torch.saved_tensors import allocated_tensors, flops_until_saved
from partita.program.archives import inspect_archive, load_exported
from partita.program.archives._torch.graph import GraphReader
from partita.program.archives._torch.symbols import Symbols
from partita.program.archives.data import Data
from partita.regions import borders
from partita.regions.equal_bodies import shareable_bodies
from partita.treatments import Call, Recompute


class Small(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archives") / "small.pt2"
    torch.export.save(torch.export.export(Small(), (X,)), path)
    return path


def written(small: Path, path: Path, content: Any) -> Path:
    """A program with this graph."""
    spoilt = Spoilt(small)

    def change(program: Any) -> None:
        program["graph_module"]["graph"] = content
        program["graph_module"]["signature"]["output_specs"] = [
            {"user_output": {"arg": given}} for given in content["outputs"]
        ]

    spoilt.program(change)
    return spoilt.write(path)


def call(target: str, result: str, **arguments: Any) -> Any:
    made = {**sine("x", result), "target": f"torch.ops.aten.{target}"}
    made["inputs"] = [{"name": name, "arg": given, "kind": 1} for name, given in arguments.items()]
    return made


@pytest.mark.parametrize("count", [10, 10_001])
def test_a_call_has_a_bounded_number_of_results(count: int, small: Path, tmp_path: Path) -> None:
    """torch's serializer looks at all of them for each of them."""
    names = [f"r{place}" for place in range(count)]
    split = call("split.Tensor", "r", self=value("x"), split_size={"as_int": 1})
    nodes = [{**split, "outputs": [{"as_tensors": [{"name": name} for name in names]}]}]
    content = {**graph(["x", *names], [], ["r0"]), "inputs": [value("x")], "nodes": nodes}
    path = written(small, tmp_path / "m.pt2", content)
    if count == 10:
        assert len(load_exported(path).graph.nodes) == 13
    else:
        with pytest.raises(ArchiveError, match="a call has 10001 results"):
            load_exported(path)


@pytest.mark.parametrize(
    "metadata",
    [
        {"custom": json.dumps({"stage": ["word"] * 25_000})},
        {"nn_module_stack": ";".join(f"k{at},{'a' * 900},C{at}" for at in range(100))},
    ],
)
def test_results_of_a_call_repeat_a_bounded_amount_of_metadata(
    metadata: dict[str, str], small: Path, tmp_path: Path
) -> None:
    """A printed program has it at each of them: a file of a megabyte took more memory than there is."""
    for count in (10, 9_000):
        names = [f"r{place}" for place in range(count)]
        split = call("split.Tensor", "r", self=value("x"), split_size={"as_int": 1})
        outputs = [{"as_tensors": [{"name": name} for name in names]}]
        nodes = [{**split, "outputs": outputs, "metadata": metadata}]
        content = {**graph(["x", *names], [], ["r0"]), "inputs": [value("x")], "nodes": nodes}
        path = written(small, tmp_path / f"m{count}.pt2", content)
        if count == 10:
            assert len(load_exported(path).graph.nodes) == 13
    with pytest.raises(ArchiveError, match="more values in lists, inputs and results than a program"):
        load_exported(path)


def test_tensors_are_in_modules_with_a_bounded_number_beside_them(tmp_path: Path) -> None:
    """torch looks at all modules beside that of a tensor when it makes a module of the program."""
    torch.export.save(torch.export.export(nn.Linear(4, 4), (X,)), tmp_path / "linear.pt2")
    spoilt = Spoilt(tmp_path / "linear.pt2")

    def change(program: Any) -> None:
        first, *others = program["graph_module"]["signature"]["input_specs"]
        paths = [f"layers.a{number}.b.w" for number in range(10_001)]
        many = [{"parameter": {**first["parameter"], "parameter_name": path}} for path in paths]
        program["graph_module"]["signature"]["input_specs"] = [*many, *others]

    spoilt.program(change)
    with pytest.raises(ArchiveError, match="10002 tensors are in modules with too many others beside them"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


def annotated(small: Path, path: Path, annotations: list[str]) -> Path:
    """A chain of sines with these annotations, as JSON."""
    nodes = [
        {**sine(f"a{at}", f"a{at + 1}"), "metadata": {"custom": written}} for at, written in enumerate(annotations)
    ]
    content = graph(["a0"], nodes, [f"a{len(annotations)}"])
    spoilt = Spoilt(written(small, path, content))
    spoilt.program(lambda program: program["graph_module"]["signature"].update(input_specs=[_input("a0")]))
    return spoilt.write(path)


def _input(name: str) -> Any:
    return {"user_input": {"arg": value(name)}}


def test_annotations_are_nested_a_few_deep(small: Path, tmp_path: Path) -> None:
    """What copies or compares them recurses."""
    deep = '{"a":' * 30 + "1" + "}" * 30
    assert len(load_exported(annotated(small, tmp_path / "m.pt2", [deep])).graph.nodes) == 3
    with pytest.raises(ArchiveError, match="nested more than 40 deep"):
        load_exported(annotated(small, tmp_path / "m.pt2", ['{"a":' * 50 + "1" + "}" * 50]))


#: Annotations that all differ; Python's hash is the same for many of the integers.
DIFFERENT = {
    "words": '{{"stage": "s{0}"}}',
    "integers": '{{"stage": {1}}}',
    "lists": '{{"stage": [1, {{"a": {0}}}]}}',
}


@pytest.mark.parametrize("kind", sorted(DIFFERENT))
def test_regions_that_differ_in_annotations_are_not_compared_with_each_other(
    kind: str, small: Path, tmp_path: Path
) -> None:
    def work(count: int) -> int:
        texts = [DIFFERENT[kind].format(at, at * (2**61 - 1)) for at in range(count)]
        program = Program.of(annotated(small, tmp_path / "m.pt2", texts))
        partition = plan(program, Repeats(), Call()).partition
        assert len(partition) == count // 2
        assert shareable_bodies(partition) == list(range(count // 2))
        return calls_during(shareable_bodies, partition)

    assert work(240) < 5 * work(60)


def test_regions_with_equal_annotations_share_a_body(small: Path, tmp_path: Path) -> None:
    texts = ['{"a": 1}', '{"b": [0.5, "w"]}', '{"a": true}', '{"b": [0.5, "w"]}', '{"a": 1.0}', '{"b": [0.5, "v"]}']
    program = Program.of(annotated(small, tmp_path / "m.pt2", texts))
    partition = plan(program, Repeats(), Call()).partition
    assert [len(region.nodes) for region in partition] == [2, 2, 2]
    assert shareable_bodies(partition) == [0, 0, 2]
    assert math.isclose(plan(program, Repeats(), Call()).apply().module()(X).sum(), _sines(X, 6).sum())


def _sines(x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = x.sin()
    return x


def test_a_plan_of_views_of_views_prints_without_a_dry_run(small: Path, tmp_path: Path) -> None:
    """A fake view holds all those that it is a view of, so that ten thousand take gigabytes (torch 2.13)."""
    views = [
        call("view.default", f"a{at + 1}", self=value(f"a{at}"), size={"as_ints": [6, 4]}) if at else sine("x", "a1")
        for at in range(300)
    ]
    path = written(small, tmp_path / "m.pt2", graph(["x"], views, ["a300"]))
    assert "a view of more than 100 views" in str(plan(Program.of(path), BySize(parts=2), Recompute()))


@pytest.mark.parametrize("text", ["a\nimport os", "a\rb", "a\0b", "a\u2028b"])
def test_a_string_of_an_allowed_operator_has_one_line(text: str, tmp_path: Path) -> None:
    """Inductor writes the arguments of a node into a comment of the code that it generates."""

    @torch.library.custom_op("partita_tests::in_words", mutates_args=())
    def in_words(x: Tensor, words: str) -> Tensor:
        return x.sin()

    in_words.register_fake(lambda x, words: torch.empty_like(x))

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return in_words(x, "any words: 'quoted', {braced}")

    torch.export.save(torch.export.export(Model(), (X,)), tmp_path / "m.pt2")
    assert load_exported(tmp_path / "m.pt2", operators=["partita_tests"]).graph.nodes
    spoilt = Spoilt(tmp_path / "m.pt2")
    spoilt.text("any words: 'quoted', {braced}", text)
    with pytest.raises(UntrustedArchiveError, match="has line breaks, which end a comment"):
        load_exported(spoilt.write(tmp_path / "m.pt2"), operators=["partita_tests"])


def test_a_long_name_is_shortened_in_messages(small: Path, tmp_path: Path) -> None:
    path = Spoilt(small).write(tmp_path / "m.pt2")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{Spoilt(small).root}/{'a' * 60_000}", json.dumps({}))
    assert len(str(inspect_archive(path))) < 5_000
    with pytest.raises(UntrustedArchiveError, match=r"aaa\.\.\.") as caught:
        load_exported(path)
    assert len(str(caught.value)) < 3_000


UNUSED = "torch._functorch.predispatch._unwrap_for_grad"


@pytest.mark.parametrize(
    ("count", "arguments", "results"),
    [
        (320, [], [{"as_none": True}] * 64),
        (2_200, [{"as_ints": [1] * 64}], [{"as_none": True}]),
        (2_200, [{"as_int_lists": [[]] * 64}], [{"as_none": True}]),
    ],
    ids=["results", "numbers", "lists"],
)
def test_a_text_stands_for_values_in_proportion_to_its_length(
    count: int, arguments: list[Any], results: list[Any], small: Path, tmp_path: Path
) -> None:
    """Each takes a kilobyte or more while code is generated, and two bytes or fourteen in the file."""
    nodes = [{**node(UNUSED, arguments, "r"), "outputs": results} for _ in range(count)]
    with pytest.raises(ArchiveError, match="more values in lists, inputs and results than a program of its size"):
        load_exported(written(small, tmp_path / "m.pt2", {**graph(["x"], [], ["x"]), "nodes": nodes}))
    few = {**graph(["x"], [], ["x"]), "nodes": nodes[: count // 3]}
    assert load_exported(written(small, tmp_path / "m.pt2", few)).graph.nodes


class Counted:
    """A value in a graph of a file that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return isinstance(other, Counted)

    __hash__ = None  # type: ignore[assignment]


def test_a_graph_that_many_calls_share_is_compared_once() -> None:
    """The first call and the last one have it, and those between have none."""
    wrap = "torch.ops.higher_order.wrap"
    first, last = ({**graph(["p"], [sine("p", "q")], ["q"]), "unread": Counted()} for _ in range(2))
    graphs = [first, *[graph([], [], []) for _ in range(30)], last]
    nodes = [node(wrap, [body("own", one), value("x")], f"r{at}", hop=False) for at, one in enumerate(graphs)]
    reader = GraphReader(Symbols(None), ())
    _, read = reader.read(Data(graph(["x"], nodes, ["r0"])), {})
    assert len(read.nodes) > 90
    assert Counted.compared == 1


def test_inputs_that_are_known_numbers_make_no_environment_each(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[ShapeEnv]()
    make = ShapeEnv.__init__

    def count(env: ShapeEnv, *args: Any, **options: Any) -> None:
        made.append(env)
        make(env, *args, **options)

    monkeypatch.setattr(ShapeEnv, "__init__", count)
    inner = graph(["p"], [sine("p", "q")], ["q"])
    inner["inputs"] += [{"as_sym_int": {"as_name": f"n{at}"}} for at in range(30)]
    inner["sym_int_values"] = {f"n{at}": {"as_int": at} for at in range(30)}
    wrap = node("torch.ops.higher_order.wrap", [body("own", inner), value("x")], "r", hop=False)
    program = Program.of(written(small, tmp_path / "m.pt2", graph(["x"], [wrap], ["r"])))
    plan(program, BySize(parts=1), Call()).apply()
    assert len(made) < 10


# Values of a file that have the same hash in Python, so that a table of them takes quadratic time.


def same_hash(count: int) -> list[tuple[int, ...]]:
    """Tuples of integers below 2**61 with the same hash: the second number is solved for."""
    first, second, seed, size = 11400714785074694791, 14029467366897019727, 2870177450012600261, 1 << 64

    def mixed(state: int, lane: int) -> int:
        added = (state + lane * second) % size
        return ((added << 31 | added >> 33) % size) * first % size

    begin = mixed(seed, 0)
    inverse, wanted, found, tried = pow(second, -1, size), mixed(begin, 1) + 7 * second, list[tuple[int, ...]](), 0
    while len(found) < count:
        tried += 1
        solved = (wanted - mixed(begin, tried)) * inverse % size
        found += [(0, tried, solved)] if solved < 2**61 - 1 else []
    assert len(set(map(hash, found))) == 1
    return found


def test_keys_of_dicts_have_64_bits(small: Path, tmp_path: Path) -> None:
    """The hashes of all multiples of 2**61 - 1 are equal."""
    spoilt = Spoilt(small)

    def change(program: Any) -> None:
        leaf = {"type": None, "context": None, "children_spec": []}
        keys = json.dumps([at * (2**61 - 1) for at in range(10)])
        tree = {"type": "builtins.dict", "context": keys, "children_spec": [leaf] * 10}
        program["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = json.dumps([1, tree])

    spoilt.program(change)
    with pytest.raises(ArchiveError, match="is no integer of 64 bits"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


def test_layouts_of_weights_are_not_compared_with_each_other(small: Path, tmp_path: Path) -> None:
    def work(count: int) -> int:
        spoilt = Spoilt(small)
        spoilt.members["data/weights/weight_0"] = bytes(16)
        meta = {**graph(["x"], [], [])["tensor_values"]["x"], "strides": [{"as_int": 1}] * 3}
        entries = {
            f"w{at}": {
                "path_name": "weight_0",
                "is_param": False,
                "use_pickle": False,
                "tensor_meta": {**meta, "sizes": [{"as_int": size} for size in sizes]},
            }
            for at, sizes in enumerate(same_hash(count))
        }
        spoilt.json("data/weights/model_weights_config.json", lambda config: config.update(config=entries))
        return calls_during(load_exported, spoilt.write(tmp_path / "m.pt2"))

    work(1)
    assert work(240) - work(120) < 3 * (work(120) - work(60))


def test_conditions_with_the_same_hash_are_not_compared_with_each_other(small: Path, tmp_path: Path) -> None:
    def work(count: int) -> int:
        spoilt = Spoilt(small)
        texts = [f"max({', '.join(map(str, numbers))}) != L['x'].size()[0]" for numbers in same_hash(count)]
        spoilt.program(lambda program: program.update(guards_code=texts))
        program = load_exported(spoilt.write(tmp_path / "m.pt2"))
        return calls_during(program.module)

    assert grows_in_proportion(work)


def test_sizes_with_the_same_hash_have_keys_with_different_ones() -> None:
    traced = Graph()
    for at, sizes in enumerate(same_hash(20)):
        traced.placeholder(f"x{at}").meta["val"] = torch.empty_strided(sizes, (1, 1, 1), device="meta")
    traced.output(())
    reader = structure._Reader(Program.of(GraphModule(nn.Module(), traced)))
    assert len(set(reader.structure().letters)) == 21
    assert len(set(map(hash, reader._known))) == 20


class Number(int):
    """Counts how often one is compared; all have the same hash, as the multiples of 2**61 - 1 have."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Number.compared += 1
        return isinstance(other, int) and int(self) == int(other)

    def __hash__(self) -> int:
        return 0


def test_annotations_with_the_same_hash_are_not_compared_with_each_other() -> None:
    module = chain(["x"], [(SIN, (f"a{at - 1}" if at else "x",)) for at in range(60)])
    for at, one in enumerate(module.graph.find_nodes(op="call_function", target=SIN)):
        one.meta["custom"] = {"stage": Number(at // 2)}
    Number.compared = 0
    assert len(ByAnnotation("stage")(Program.of(module))) == 30
    assert Number.compared < 200


# Many regions, and many values that each of them may have to do with.


def chain(inputs: list[str], calls: list[tuple[Any, tuple[str, ...]]]) -> GraphModule:
    """A graph of these calls on inputs and on results, which are called `a0`, `a1` and so on."""
    made = Graph()
    known = {name: made.placeholder(name) for name in inputs}
    for at, (target, names) in enumerate(calls):
        known[f"a{at}"] = made.call_function(target, tuple(known[name] for name in names))
    made.output(known[f"a{len(calls) - 1}"])
    return GraphModule(nn.Module(), made)


def grows_in_proportion(work: Callable[[int], int]) -> bool:
    """Whether four times as much takes about four times as long, apart from what every call takes."""
    work(20)
    few, more, many = work(20), work(40), work(160)
    return many - more < 8 * (more - few)


ADD, SIN, SIN_ = torch.ops.aten.add.Tensor, torch.ops.aten.sin.default, torch.ops.aten.sin_.default


def mutated_views(count: int) -> Program:
    """Many views of one input, each of which is mutated."""
    views = [(torch.ops.aten.view_as.default, ("x", "x"))] * count
    return Program.of(chain(["x"], [*views, *((SIN_, (f"a{at}",)) for at in range(count))]))


def test_marks_of_many_regions_take_time_in_proportion() -> None:
    def work(count: int) -> int:
        return calls_during(plan(mutated_views(count), BySize(operators=1), Recompute()).annotate)

    assert grows_in_proportion(work)


def test_many_inputs_of_which_one_is_mutated_take_time_in_proportion() -> None:
    """Another input may be the same tensor."""

    def work(count: int) -> int:
        names = [f"x{at}" for at in range(count)]
        sums = [(ADD, ("x1", name)) for name in names]
        program = Program.of(chain(names, [(SIN_, ("x0",)), *sums, (SIN_, ("x0",))]))
        regions = BySize(operators=1)(program).regions
        assert [Recompute().sharing_key(Site(region, program)) for region in regions[1:3]] == [None, None]
        return steps_during(lambda: [Recompute().sharing_key(Site(region, program)) for region in regions])

    assert grows_in_proportion(work)


def test_mutations_inside_of_a_region_are_looked_up_once() -> None:
    def work(count: int) -> int:
        program = mutated_views(count)
        views, writes = program.operators()[:count], program.operators()[count:]
        assert len(program.mutations.later_mutators(views, writes[:-1])) == count - 1
        return steps_during(program.mutations.later_mutators, views, writes)

    assert grows_in_proportion(work)


def test_statistics_that_many_nodes_read_are_looked_up_once() -> None:
    norm = torch.ops.aten.batch_norm.default

    def work(count: int) -> int:
        made = Graph()
        x, mean = made.placeholder("x"), made.placeholder("mean")
        for _ in range(count):
            last = made.call_function(ADD, (x, mean))
        for _ in range(count):
            last = made.call_function(norm, (x, None, None, mean, mean, True, 0.1, 1e-5, False))
        made.output(last)
        program = Program.of(GraphModule(nn.Module(), made))
        norms = program.operators()[count:]
        assert not program.mutations.statistics_read_outside(norms)
        return steps_during(program.mutations.statistics_read_outside, norms)

    assert grows_in_proportion(work)


def scalars(small: Path, path: Path, count: int) -> Path:
    """A chain of symbolic floats, and a chain of sums that all read the last of them."""
    size = {"as_expr": {"expr_str": "Symbol('s0', positive=True, integer=True)", "hint": {"as_int": 6}}}
    number = {"as_expr": {"expr_str": "ToFloat(Symbol('s0', positive=True, integer=True))", "hint": None}}
    rows = {**call("sym_size.int", "rows", self=value("x"), dim={"as_int": 0}), "outputs": [named("int", "rows")]}
    floats = [
        {
            **sine("x", f"f{at}"),
            "target": "_operator.add" if at else "torch.sym_float",
            "inputs": [
                {"name": "", "arg": given, "kind": 1}
                for given in ([named("float", f"f{at - 1}"), {"as_float": 0.0}] if at else [named("int", "rows")])
            ],
            "outputs": [named("float", f"f{at}")],
        }
        for at in range(count)
    ]
    sums = [
        call("add.Scalar", f"a{at + 1}", self=value(f"a{at}" if at else "x"), other=named("float", f"f{count - 1}"))
        for at in range(count)
    ]
    content = graph(["x"], sums, [f"a{count}"])
    content["nodes"] = [rows, *floats, *sums]
    content["sym_int_values"] = {"rows": size}
    content["sym_float_values"] = {f"f{at}": number for at in range(count)}
    for meta in content["tensor_values"].values():
        meta["sizes"] = [size, {"as_int": 4}]
    return written(small, path, content)


def named(kind: str, name: str) -> Any:
    return {f"as_sym_{kind}": {"as_name": name}}


def test_regions_compute_a_bounded_number_of_scalars_for_themselves(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program.of(scalars(small, tmp_path / "m.pt2", 5))
    assert plan(program, BySize(operators=1), Call()).apply().exported()
    monkeypatch.setattr(borders, "_MOST_COPIES", 10)
    monkeypatch.setattr(borders, "_COPIES_OF_NODE", 0)
    with pytest.raises(RegionError, match=r"5 regions would compute 'f2'.* make fewer regions"):
        plan(program, BySize(operators=1), Call())


#: Calls by which torch 2.13 ends the process, also on tensors without memory, and what they read.
ENDING = {
    "no heads": (
        torch.ops.aten._scaled_dot_product_attention_math.default,
        (torch.Size((1, 4, 4, 4)), torch.Size((1, 0, 4, 4)), torch.Size((1, 0, 4, 4))),
        {"enable_gqa": True},
    ),
    "half a step": (torch.ops.aten.range.step, (0, 1.0, 0.5), {"dtype": torch.int64}),
    "no gates": (torch.ops.aten.gru_cell.default, (*[torch.Size((2, 4))] * 2, *[torch.Size((4, 4))] * 2), {}),
    "too few gates": (
        torch.ops.aten.gru.input,
        (
            torch.Size((3, 2, 4)),
            torch.Size((1, 2, 1)),
            [torch.Size((4, 4)), torch.Size((4, 1))],
            False,
            1,
            0.0,
            False,
            False,
            False,
        ),
        {},
    ),
    "sizes of batches": (
        torch.ops.aten.lstm.data,
        (
            torch.Size((6, 4)),
            torch.Size((3,)),
            [torch.Size((1, 3, 1))] * 2,
            [torch.Size((4, 4)), torch.Size((4, 1))],
            False,
            1,
            0.0,
            False,
            False,
        ),
        {},
    ),
}


def on_meta(value: Any) -> Any:
    if isinstance(value, torch.Size):
        return torch.empty(value, device="meta")
    return list(map(on_meta, value)) if isinstance(value, list) else value


@pytest.mark.parametrize("case", sorted(ENDING))
def test_calls_by_which_torch_ends_the_process_are_not_tried(case: str) -> None:
    target, args, kwargs = ENDING[case]
    assert "would end the process" in str(refusal_of_call(target, list(map(on_meta, args)), kwargs))


def test_recurrent_networks_attention_and_ranges_are_tried() -> None:
    size, layer = torch.Size, [torch.Size((12, 4)), torch.Size((12, 4)), torch.Size((12,)), torch.Size((12,))]
    gru = [size((3, 2, 4)), size((2, 2, 4)), layer * 2, True, 1, 0.0, False, True, False]
    assert refusal_of_call(torch.ops.aten.gru.input, list(map(on_meta, gru)), {}) is None
    heads = [size((1, 4, 4, 4)), size((1, 2, 4, 4)), size((1, 2, 4, 4))]
    attention = torch.ops.aten.scaled_dot_product_attention.default
    assert refusal_of_call(attention, list(map(on_meta, heads)), {"enable_gqa": True}) is None
    assert refusal_of_call(torch.ops.aten.range.step, (0, 8, 2), {"dtype": torch.int64}) is None


@pytest.mark.parametrize("case", sorted(ENDING))
@pytest.mark.parametrize("given", [None, 1, 0.5, True, 1j])
def test_numbers_in_place_of_tensors_are_judged_without_an_error(case: str, given: Any) -> None:
    target, args, kwargs = ENDING[case]
    replaced = [given if isinstance(one, torch.Size | list) else one for one in args]
    assert isinstance(refusal_of_call(target, replaced, kwargs), str | None)
    others = [on_meta(one) if isinstance(one, torch.Size | list) else given for one in args]
    assert isinstance(refusal_of_call(target, others, kwargs), str | None)


def test_attention_without_heads_is_planned(small: Path, tmp_path: Path) -> None:
    """It is the count of its FLOPs that would end the process."""
    attention = {
        **call(
            "_scaled_dot_product_attention_math.default",
            "r",
            query=value("q"),
            key=value("k"),
            value=value("k"),
            enable_gqa={"as_bool": True},
        ),
        "outputs": [value("r"), value("weights")],
    }
    sizes = {"q": [1, 4, 4, 4], "k": [1, 0, 4, 4]}
    zeros = [call("zeros.default", name, size={"as_ints": size}) for name, size in sizes.items()]
    content = json.loads(json.dumps(graph(["x"], [*zeros, attention], ["r"])))
    for name, size in sizes.items():
        content["tensor_values"][name].update(
            sizes=[{"as_int": one} for one in size], strides=[{"as_int": one} for one in (16, 16, 4, 1)]
        )
    path = written(small, tmp_path / "m.pt2", content)
    code = (
        "import sys, partita\n"
        "from partita.policies import BySize\n"
        "from partita.treatments import Call\n"
        "print(len(partita.plan(partita.Program.of(sys.argv[1]), BySize(parts=1), Call()).partition.regions))\n"
    )
    assert run_in_new_process(code, path).stdout.split() == ["1"]


@pytest.mark.parametrize("target", ["__upsample_bilinear.scale_list", "__interpolate.scale_list"])
def test_functions_of_torchscript_are_no_operators(target: str, small: Path, tmp_path: Path) -> None:
    """Their fake kernels read past the end of an empty list."""
    scaled = call(target, "r", input=value("x"), scale_factor={"as_floats": []})
    with pytest.raises(UntrustedArchiveError, match="does more than compute on tensors"):
        load_exported(written(small, tmp_path / "m.pt2", graph(["x"], [scaled], ["r"])))


def test_bits_are_combined_by_operators(tmp_path: Path) -> None:
    class Bits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.aten.__and__.Tensor(x, x)

    torch.export.save(torch.export.export(Bits(), (torch.ones(2, dtype=torch.int64),)), tmp_path / "m.pt2")
    assert load_exported(tmp_path / "m.pt2")


#: More memory than any machine has.
HUGE = 2**46


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (torch.ops.aten.ones_like.default, ()),
        (torch.ops.aten.new_ones.default, ([HUGE],)),
        (torch.ops.aten.to.device, (torch.device("cpu"), torch.float64)),
        (torch.ops.aten.to.other, (0.0,)),
        (torch.ops.prims.device_put.default, (torch.device("cpu"),)),
    ],
    ids=str,
)
def test_a_dry_run_makes_no_tensor_on_the_device_that_a_call_names(target: Any, args: Any) -> None:
    given = torch.empty(HUGE, device="meta")
    takes_device = any(one.name == "device" for one in target._schema.arguments) and torch.device("cpu") not in args
    kwargs = {"device": torch.device("cpu")} if takes_device else {}
    assert isinstance(
        flops_until_saved("call_function", target, (given, *args), kwargs, allowance=Allowance(100)), int | None
    )


def test_what_keeping_costs_is_measured_without_a_change_of_traced_values() -> None:
    """If torch fails while it resizes `out`, using that tensor again ends the process (torch 2.13)."""
    with FakeTensorMode():
        out, left, right = torch.empty(3), torch.empty(2, 2**58, 1), torch.empty(2, 1, 64)
    found = allocated_tensors(torch.ops.aten.linalg_matmul.out, (left, right), {"out": out}, allowance=Allowance(100))
    assert found is None
    assert out.shape == (3,)


@pytest.mark.parametrize(
    "size",
    [
        "Mul(Integer(10000000000), Pow(Symbol('s0', positive=True, integer=True), Integer(4)))",
        "FloorDiv(Integer(6), Add(Symbol('s0', positive=True, integer=True), Integer(-7)))",
    ],
)
def test_programs_are_compared_on_no_sizes_that_take_all_memory_or_are_none(
    size: str, small: Path, tmp_path: Path
) -> None:
    content = json.loads(json.dumps(graph(["x"], [sine("x", "r")], ["r"])))
    sizes = [
        {"as_expr": {"expr_str": text, "hint": {"as_int": hint}}}
        for text, hint in (("Symbol('s0', positive=True, integer=True)", 6), (size, 4))
    ]
    for held in content["tensor_values"].values():
        held["sizes"] = sizes
    spoilt = Spoilt(written(small, tmp_path / "m.pt2", content))
    spoilt.program(lambda saved: saved.update(range_constraints={"s0": {"min_val": 2, "max_val": 64}}))
    program = Program.of(spoilt.write(tmp_path / "m.pt2"))
    comparison = compare(program, plan(program, BySize(parts=1), Call()).apply(), (X,))
    assert comparison.equal
    assert "Guard failed" in comparison.notes[0]


def test_code_of_a_graph_is_generated_once_and_no_garbage_is_looked_for_meanwhile(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated = list[bool]()
    recompile = GraphModule.recompile

    def counted(module: GraphModule) -> Any:
        generated.append(gc.isenabled())
        return recompile(module)

    monkeypatch.setattr(GraphModule, "recompile", counted)
    load_exported(small)
    assert generated == [False]
    assert gc.isenabled()


def test_a_program_of_which_no_code_can_be_made_is_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would give a program that cannot be called, and a warning."""
    recompile, given = GraphModule.recompile, list[GraphModule]()

    def refused(module: GraphModule) -> Any:
        given.append(module)
        if len(given) == 1:
            raise SyntaxError("too many parentheses")
        return recompile(module)

    monkeypatch.setattr(GraphModule, "recompile", refused)
    with pytest.raises(ArchiveError, match="Unable to execute the generated python source code"):
        load_exported(small)


def test_a_quotient_that_is_rounded_up_is_charged_for_what_it_adds() -> None:
    """Twenty nested sizes of fifty such quotients each kept `Program.of` busy for a minute, at a charge of a second."""

    def work(quotient: str) -> int:
        symbols, size = Symbols(None), "s0"
        for _ in range(12):
            size = quotient.format(size)
        symbols.integer(Data({"as_expr": {"expr_str": size, "hint": None}}))
        return symbols._work

    assert work("CeilDiv({}, 3)") >= work("FloorDiv({} + 2, 3)") / 2
    assert work("CeilDiv({}, 3)") > 2 * work("FloorDiv({}, 3)")
