"""Archives that would take time or memory out of proportion to their size, in torch or in an analysis."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.work import calls_during
from tests.program.archives.helpers import Spoilt, X
from tests.program.archives.test_names import graph, sine, value
from torch import Tensor, nn

from partita import Program, plan
from partita.errors import ArchiveError, UntrustedArchiveError
from partita.policies import BySize, Repeats
from partita.program.archives import inspect_archive, load_exported
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
