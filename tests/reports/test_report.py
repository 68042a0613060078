"""Reports as data: what they say is what the plan says; files are whole, and in the formats of other tools."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from tests.helpers.core import program_of
from tests.helpers.work import calls_during
from tests.reports.plans import HOSTILE, X, Y, around_dropout, captured, chain, hostile, memory_plan, recomputed
from torch import nn
from torch.fx import Graph

import partita
from partita import Plan, Program
from partita.errors import OptionError
from partita.policies import ByLabel, ByModule, BySize, Repeats
from partita.testing import Case, programs
from partita.treatments import Call


def _rows(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The columns of the nodes as a row for each, with texts in the place of numbers."""
    nodes, texts = data["nodes"], data["texts"]
    found = {}
    for at, name in enumerate(nodes["name"]):
        row = {column: values[at] for column, values in nodes.items()}
        row |= {column: texts[row[column]] if row[column] >= 0 else None for column in ("target", "value")}
        found[name] = row
    return found


def test_regions_have_the_numbers_of_the_plans_table() -> None:
    plan = recomputed()
    regions = partita.report(plan).data()["regions"]
    printed = [re.split(r"  +", line) for line in str(plan).splitlines()[2:6]]
    shown = [
        [
            region["name"],
            str(region["nodes"]),
            str(len(region["inputs"])),
            str(len(region["outputs"])),
            *(f"{region[key]:,}" for key in ("bytes_in", "bytes_out", "flops")),
            *(f"{region[key]:,}" for key in ("saved_bytes", "saved_bytes_after", "recomputed_flops")),
            region["treatment"],
            region["label"],
        ]
        for region in regions
    ]
    assert shown == printed


def test_nodes_say_what_they_are_and_where() -> None:
    data = partita.report(around_dropout()).data()
    rows, flags = _rows(data), data["flags"]
    dropout = next(row for name, row in rows.items() if "dropout" in name)
    assert rows["linear"]["value"] == "f32[2, 4]"
    assert rows["linear"]["bytes"] == 32
    assert rows["linear"]["flops"] == 64
    assert data["texts"][data["modules"][rows["linear"]["module"]][0]] == "one"
    assert data["regions"][rows["linear"]["region"]]["label"] == "no_dropout"
    assert dropout["region"] == -1
    assert dropout["flags"] & flags["random numbers"]
    assert data["modes"][dropout["mode"]] == "no_grad"
    assert any(row["flags"] & flags["mutates"] for row in rows.values())
    assert rows["p_one_weight"]["target"] == "one.weight"
    assert rows["p_one_weight"]["flags"] & flags["state"]


def test_every_node_outside_has_its_reason() -> None:
    plan = around_dropout()
    data = partita.report(plan).data()
    reasons = {
        node.name: data["reasons"][number]["text"]
        for node, number in zip(plan.program.graph.nodes, data["nodes"]["reason"], strict=True)
        if number >= 0
    }
    assert reasons == {node.name: str(reason) for node, reason in plan.partition.reasons.items()}
    assert sum(group["count"] for group in data["excluded"]) == sum(group.count for group in plan.excluded())


def test_the_order_has_regions_as_unbroken_runs_and_keeps_dependences() -> None:
    data = partita.report(around_dropout()).data()
    order, place = data["order"], {node: at for at, node in enumerate(data["order"])}
    runs = [data["nodes"]["region"][node] for node in order]
    starts = [one for one, before in zip(runs, [None, *runs], strict=False) if one != before and one >= 0]
    assert sorted(starts) == sorted(set(starts))
    for kind in ("edges", "effect_edges"):
        for before, after in zip(data[kind]["from"], data[kind]["to"], strict=True):
            assert place.get(before, -1) < place.get(after, len(place))


@given(programs())
def test_programs_of_the_generator_are_reported(case: Case) -> None:
    plan = partita.plan(Program.of(case.graph_module), BySize(parts=3), Call())
    report = partita.report(plan)
    data = report.data()
    assert data["nodes"]["name"] == [node.name for node in plan.program.graph.nodes]
    assert [len(region["outputs"]) for region in data["regions"]] == [
        len(border.outputs) for border in plan.partition.borders.of_regions
    ]
    assert json.loads(json_in(report.html())) == data
    assert report.dot().count("subgraph") == len(plan.partition)


def json_in(page: str) -> str:
    """The data of a page, as the browser reads it."""
    return page.split('<script type="application/json" id="data">')[1].split("</script>")[0]


def test_equal_bodies_verification_and_memory_are_told() -> None:
    plan = recomputed()
    comparison = partita.compare(plan.program, plan.apply(), (X, Y), no_grad_call=False, second_call=False)
    data = partita.report(plan, comparison=comparison, memory=memory_plan()).data()
    assert [body["regions"] for body in data["bodies"]] == [[0, 1, 2, 3]]
    assert data["verification"] == {"differences": [], "notes": [], "calls": 1, "raised": 0, "equal": True}
    assert data["memory"]["planned"]["peak_bytes"] == memory_plan().peak_bytes
    assert data["memory"]["plain"]["peak_bytes"] == memory_plan().plain_peak_bytes
    assert data["memory"]["planned"]["moments"]["bytes"] == [one.bytes for one in memory_plan().timeline.moments]


@pytest.mark.parametrize("of", ["picture", "timeline"])
def test_a_picture_or_a_timeline_is_memory_too(of: str) -> None:
    memory = memory_plan().picture() if of == "picture" else memory_plan().timeline
    data = partita.report(recomputed(), memory=memory).data()
    assert data["memory"]["planned"]["peak_bytes"] == memory_plan().peak_bytes


def test_a_report_stays_as_it_was_made() -> None:
    report = partita.report(chain(10, 2))
    report.data()["regions"].clear()
    assert len(report.data()["regions"]) == 2


def test_other_things_are_refused_with_what_to_pass() -> None:
    with pytest.raises(
        OptionError, match=r"a report is on a Plan, as partita\.plan makes it, not on a MemoryPlan; its plan is in"
    ):
        partita.report(memory_plan())  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"`comparison` is what partita\.compare"):
        partita.report(chain(10, 2), comparison=True)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="`memory` is a memory plan"):
        partita.report(chain(10, 2), memory=3)  # type: ignore[arg-type]


def _empty() -> Program:
    graph = Graph()
    graph.output(())
    return program_of(graph)


def _joint() -> Program:
    return partita.capture_joint(nn.Linear(4, 4), (torch.randn(2, 4),))


@pytest.mark.parametrize(
    ("program", "regions"),
    [
        (_empty, 0),
        (lambda: program_of(nn.ReLU()), 1),
        (lambda: program_of(nn.Sequential(nn.ReLU(), nn.Linear(2, 2))), 2),
        (lambda: partita.capture(nn.Linear(2, 2), (torch.randn(2, 2),)), 1),
        (_joint, 2),
    ],
    ids=["empty", "one node", "graph module", "exported", "joint"],
)
def test_programs_of_every_kind_are_reported(program: Any, regions: int) -> None:
    made = program()
    count = len(made.operators())
    label = ByLabel(lambda node: 0) if regions <= 1 else BySize(parts=regions)
    plan = partita.plan(made, label, Call()) if count else partita.plan(made, partita.Partition(made, []), Call())
    data = partita.report(plan).data()
    assert (len(data["nodes"]["name"]), len(data["regions"])) == (len(made.index), regions)
    assert data["kind"] in ("graph module", "exported program", "joint graph")


def test_a_joint_graph_has_halves_and_saved_values() -> None:
    program = _joint()
    data = partita.report(partita.plan(program, BySize(parts=2), Call())).data()
    rows, flags = _rows(data), data["flags"]
    assert program.joint is not None
    for name, nodes in (("forward", program.joint.forward), ("backward", program.joint.backward)):
        assert [node.name for node in nodes] == [key for key, row in rows.items() if row["flags"] & flags[name]]


def test_no_regions_and_three_hundred() -> None:
    program = captured()
    assert partita.report(partita.plan(program, partita.Partition(program, []), Call())).data()["regions"] == []
    assert len(partita.report(chain(1_000, 300)).data()["regions"]) == 300


def _page_of(plan: Plan) -> str:
    return partita.report(plan).html()


def test_the_work_is_linear_in_nodes() -> None:
    counted = []
    for nodes in (1_000, 4_000):
        plan = chain(nodes, nodes // 50)
        counted.append(calls_during(_page_of, plan))
    assert counted[1] < 4.6 * counted[0]


# Files.


def test_the_suffix_says_what_is_written(tmp_path: Path) -> None:
    report = partita.report(recomputed(), memory=memory_plan())
    for name in ("a.html", "a.json", "a.dot", "a.HTM", "a.gv"):
        report.save(tmp_path / name)
    report.save(os.fspath(tmp_path / "b"), format="trace")
    report.save(tmp_path / "step.trace.json")
    assert (tmp_path / "step.trace.json").read_text() == (tmp_path / "b").read_text()
    report.save(tmp_path / "c.json", format="model_explorer")
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "a.json").read_text()) == report.data()
    assert (tmp_path / "a.dot").read_text() == report.dot()
    assert json.loads((tmp_path / "b").read_text()) == report.trace()
    assert json.loads((tmp_path / "c.json").read_text()) == report.model_explorer()


def test_unknown_suffixes_and_formats_name_the_known_ones(tmp_path: Path) -> None:
    report = partita.report(chain(10, 2))
    with pytest.raises(
        OptionError, match=r"saved as \.html, \.htm, \.trace\.json, \.json, \.dot, \.gv, not as 'a\.pdf'"
    ):
        report.save(tmp_path / "a.pdf")
    with pytest.raises(OptionError, match="'html', 'json', 'dot', 'model_explorer', 'trace', not 'pdf'"):
        report.save(tmp_path / "a.html", format="pdf")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.html"
    target.write_text("before")

    def fails(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="full"):
        partita.report(chain(10, 2)).save(target)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert target.read_text() == "before"


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found:
            self.texts.append((self.found[-1][0], data))


def test_hostile_names_add_no_element_and_come_back_from_the_page() -> None:
    plan, comparison = hostile()
    report = partita.report(plan, comparison=comparison)
    page, plain = _Elements(), _Elements()
    page.feed(report.html())
    plain.feed(partita.report(chain(3, 1)).html())
    assert Counter(tag for tag, _ in page.found) == Counter(tag for tag, _ in plain.found)
    embedded = next(text for tag, text in page.texts if tag == "script" and text.startswith("{"))
    assert json.loads(embedded) == report.data()
    assert HOSTILE in report.data()["texts"]


def test_the_page_refers_to_nothing_outside() -> None:
    page = _Elements()
    text = partita.report(recomputed()).html()
    page.feed(text)
    links = [attrs[name] for _, attrs in page.found for name in ("src", "href", "action") if name in attrs]
    policy = next(attrs["content"] or "" for tag, attrs in page.found if attrs.get("http-equiv"))
    assert links == ["#main"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "innerHTML" not in text
    assert "insertAdjacentHTML" not in text


def test_a_notebook_shows_the_page_in_a_sandboxed_frame() -> None:
    plan, comparison = hostile()
    shown = partita.report(plan, comparison=comparison)._repr_html_()
    page = _Elements()
    page.feed(shown)
    ((tag, attributes),) = page.found
    assert tag == "iframe"
    assert attributes["sandbox"] == "allow-scripts"
    assert (attributes["srcdoc"] or "").startswith("<!doctype html>")


def test_assets_are_files_of_the_package_and_in_its_wheel() -> None:
    from importlib.resources import files

    names = {entry.name for entry in files("partita.reports").joinpath("assets").iterdir()}
    assert {"page.html", "report.css", "report.js"} <= names


# Formats of other tools.


def test_dot_has_a_cluster_for_each_region_and_escapes_names() -> None:
    text = partita.report(recomputed()).dot()
    assert text.count("subgraph cluster_") == 4
    assert 'label="blocks_0 (Recompute(keep=KeepNothing()))"' in text
    plan, _ = hostile()
    lines = partita.report(plan).dot().split("\n")
    (line,) = [line for line in lines if "\N{SNOWMAN}" in line]
    quoted = re.fullmatch(r'\s*n\d+ \[label="((?:[^"\\]|\\.)*)"\];', line)
    assert quoted is not None


def test_model_explorer_gets_a_value_and_a_colour_for_each_node() -> None:
    report = partita.report(recomputed())
    found = report.model_explorer()["results"]
    inside = {node.name for region in recomputed().partition for node in region.nodes}
    assert inside <= set(found)
    assert {found[name]["value"] for name in inside} == {f"blocks_{at}" for at in range(4)}
    flops = report.model_explorer(by="flops")
    assert max(entry["value"] for entry in flops["results"].values()) == 2 * 64 * 32 * 128
    assert [stop["stop"] for stop in flops["gradient"]] == [0, 1]
    with pytest.raises(OptionError, match="by one of region, treatment, body, mode, flops, bytes, not by 'colour'"):
        report.model_explorer(by="colour")


def test_a_trace_has_the_bytes_as_a_counter_and_the_phases_as_slices() -> None:
    trace = partita.report(recomputed(), memory=memory_plan()).trace()
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C" and event["pid"] == 1]
    assert [event["args"]["bytes"] for event in counters] == [one.bytes for one in memory_plan().timeline.moments]
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 1 and event["tid"] == 1]
    assert sum(event["dur"] for event in slices) == len(counters)
    assert {event["name"] for event in slices} <= {"forward", "recompute", "backward"}


def test_a_trace_needs_a_timeline() -> None:
    with pytest.raises(OptionError, match="no memory timeline to trace; make it with"):
        partita.report(chain(10, 2)).trace()


@pytest.mark.models
def test_a_gpt2_is_reported() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).eval()
    program = partita.capture(model, (torch.randint(0, 50, (1, 8)),))
    data = partita.report(partita.plan(program, ByModule("transformer.h.*"), Call())).data()
    assert data["title"] == "GPT2LMHeadModel"
    assert [region["label"] for region in data["regions"]] == ["transformer.h.0", "transformer.h.1"]
    paths = {data["texts"][path] for path, _, _ in data["modules"]}
    assert {"transformer.h.0.attn", "transformer.h.1.mlp"} <= paths


def test_numbers_that_are_passed_to_a_region_are_among_its_inputs() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for at in range(4):
                x = (x.sin() * (1 / (at + 2))).cos()
            return x

    data = partita.report(partita.plan(partita.capture(Scaled(), (X,)), Repeats(), Call())).data()
    inputs = [[(place, data["texts"][text]) for _, place, text, _ in region["inputs"]] for region in data["regions"]]
    assert [found[-1] for found in inputs] == [(".args[1]", str(1 / (at + 2))) for at in range(4)]


def test_bodies_that_share_a_label_have_names_of_their_own() -> None:
    program = program_of(nn.Sequential(nn.ReLU(), nn.Tanh(), nn.ReLU()))
    one, two, three = program.operators()
    regions = [partita.Region(f"part_{at}", (node,), "all") for at, node in enumerate((one, two, three))]
    bodies = partita.report(partita.plan(program, partita.Partition(program, regions), Call())).data()["bodies"]
    assert [(body["name"], body["regions"]) for body in bodies] == [("part_0", [0, 2]), ("part_1", [1])]
