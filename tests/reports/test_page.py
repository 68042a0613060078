"""The page of a report in a real browser: it opens from a file, and is driven by mouse and keys."""

from __future__ import annotations

from operator import getitem
from typing import Any

import pytest
import torch
from tests.helpers.core import program_of
from tests.reports.conftest import Opener
from tests.reports.plans import X, Y, around_dropout, chain, hostile, memory_plan, recomputed
from torch import nn
from torch.fx import Graph, GraphModule

import partita
from partita import Program
from partita.memory import Timeline
from partita.policies import ByModule, BySize
from partita.treatments import Call

#: Where a box is on the page, and what the view draws of it.
_PLACE = """name => {
    const {view} = window.partita;
    const item = view.tree.items.find(item => item.label === name && item.kind !== "root");
    const place = view.placeOf(item), {x, y} = view.canvas.getBoundingClientRect();
    const at = [x + view.left + (place.x + place.width / 2) * view.scale, y + view.top + (place.y + 12) * view.scale];
    return {x: at[0], y: at[1], isOpen: item.isOpen, visible: view.visibleAt(item.start) === item};
}"""

#: How many boxes are drawn, once there are some.
_SHOWN = """async () => {
    while (!window.partita || !window.partita.view.wasShown) await new Promise(requestAnimationFrame);
    return window.partita.view.drawn.boxes;
}"""


def _click(page: Any, name: str) -> None:
    place = page.evaluate(_PLACE, name)
    assert place["visible"] or place["isOpen"]
    page.mouse.click(place["x"], place["y"])


def _selected(page: Any) -> str | None:
    found: str | None = page.evaluate("window.partita.view.selected && window.partita.view.selected.label")
    return found


def _settled(page: Any) -> None:
    """Waits for the next picture."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def _column(page: Any, panel: str, number: int) -> list[str]:
    cells = page.locator(f"#panel-{panel} .scroller tbody tr:not(.spacer) td:nth-child({number})")
    texts: list[str] = cells.all_inner_texts()
    return texts


def test_a_click_opens_a_region_and_another_closes_it(open_report: Opener) -> None:
    page = open_report(partita.report(recomputed()))
    assert page.title() == "Model: Partita report"
    assert page.inner_text("#kind").startswith("exported program, ")
    _click(page, "blocks_1")
    assert page.evaluate(_PLACE, "blocks_1")["isOpen"]
    assert page.inner_text("#details h2") == "blocks_1"
    assert page.evaluate(_PLACE, "gelu_1")["visible"]
    _settled(page)
    _click(page, "gelu_1")
    assert page.inner_text("#details h2") == "gelu_1"
    assert "In region blocks_1, treated by Recompute" in page.inner_text("#details")
    _click(page, "blocks_1")
    assert not page.evaluate(_PLACE, "blocks_1")["isOpen"]


def test_the_details_of_a_region_name_what_crosses_its_border(open_report: Opener) -> None:
    page = open_report(partita.report(recomputed()))
    _click(page, "blocks_1")
    details = page.inner_text("#details")
    assert "add" in details
    assert "f32[64, 32]" in details
    assert "8.19 kB" in details
    assert "6 weights" in details
    assert "EQUAL BODIES 4" in details.upper()


def test_search_finds_nodes_regions_and_operators_by_keys_alone(open_report: Opener) -> None:
    page = open_report(partita.report(recomputed()))
    page.keyboard.press("/")
    page.keyboard.type("gelu_2")
    assert page.get_attribute("#search", "aria-expanded") == "true"
    assert page.get_attribute("#search", "aria-activedescendant") == "match-0"
    page.keyboard.press("Enter")
    assert _selected(page) == "gelu_2"
    assert page.evaluate(_PLACE, "gelu_2")["visible"]
    page.keyboard.press("/")
    page.keyboard.type("aten.gelu")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert _selected(page) == "gelu_1"
    page.keyboard.press("/")
    page.keyboard.type("nothing of this name")
    assert page.inner_text("#results") == "Nothing has this name."
    page.keyboard.press("Escape")
    assert page.locator("#results").is_hidden()


def test_arrows_enter_and_escape_walk_through_the_graph(open_report: Opener) -> None:
    page = open_report(partita.report(recomputed()))
    page.focus("#graph")
    walked = []
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "Enter", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
        walked.append(_selected(page))
    assert walked == ["x", "y", "blocks_0", "blocks_0", "layer_norm", "linear", "blocks_0", "blocks_0"]
    assert page.inner_text("#said") == "region blocks_0, closed"
    page.keyboard.press("Escape")
    assert _selected(page) is None
    before = page.evaluate("window.partita.view.scale")
    page.keyboard.press("+")
    assert page.evaluate("window.partita.view.scale") > before


def test_the_wheel_zooms_where_the_pointer_is_and_dragging_moves(open_report: Opener) -> None:
    page = open_report(partita.report(recomputed()))
    box = page.evaluate(_PLACE, "blocks_2")
    page.mouse.move(box["x"], box["y"])
    page.mouse.wheel(0, -100)
    page.evaluate("async () => { while (!window.partita.view.wasMoved) await new Promise(requestAnimationFrame); }")
    after = page.evaluate(_PLACE, "blocks_2")
    assert (after["x"], after["y"]) == pytest.approx((box["x"], box["y"]), abs=1)
    page.mouse.down()
    page.mouse.move(box["x"] - 50, box["y"] - 30, steps=3)
    page.mouse.up()
    moved = page.evaluate(_PLACE, "blocks_2")
    assert (moved["x"], moved["y"]) == pytest.approx((box["x"] - 50, box["y"] - 30), abs=1)
    assert _selected(page) is None


def test_the_table_sorts_and_filters(open_report: Opener) -> None:
    page = open_report(partita.report(chain(503, 10)))
    page.click("#tab-regions")
    assert _column(page, "regions", 1) == [f"part_{at}" for at in range(10)]
    page.click("#panel-regions th:has-text('nodes') button")
    nodes = [int(text) for text in _column(page, "regions", 2)]
    assert nodes == sorted(nodes, reverse=True)
    assert page.get_attribute("#panel-regions th:has-text('nodes')", "aria-sort") == "descending"
    page.click("#panel-regions th:has-text('region') button")
    page.click("#panel-regions th:has-text('region') button")
    assert _column(page, "regions", 1) == [f"part_{at}" for at in reversed(range(10))]
    page.fill("#panel-regions .filter", "part_3")
    assert _column(page, "regions", 1) == ["part_3"]
    assert page.inner_text("#panel-regions .count") == "1 of 10 regions"
    page.focus("#panel-regions tbody tr")
    page.keyboard.press("Enter")
    assert _selected(page) == "part_3"


def test_only_the_rows_in_sight_are_in_the_page(open_report: Opener) -> None:
    page = open_report(partita.report(chain(1_000, 300)))
    page.click("#tab-regions")
    assert page.locator("#panel-regions .scroller tbody tr").count() < 60
    page.evaluate("document.querySelector('#panel-regions .scroller').scrollTop = 1e6")
    _settled(page)
    assert "part_299" in _column(page, "regions", 1)
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#panel-regions .scroller tbody tr").count() == 300


def test_five_thousand_nodes_are_drawn_as_a_few_boxes(open_report: Opener) -> None:
    page = open_report(partita.report(chain(5_000, 50)))
    assert page.evaluate("document.querySelectorAll('*').length") < 400
    drawn = page.evaluate("window.partita.view.drawn")
    assert 10 < drawn["boxes"] <= 52
    page.evaluate("window.partita.goToRegion(20); window.partita.view.setOpen(window.partita.view.selected, true)")
    _settled(page)
    assert page.evaluate("window.partita.view.drawn.boxes") < 150
    everything = """() => {
        const {view} = window.partita;
        for (const item of view.tree.items) if (item.children) { item.isOpen = true; item.plan = null; }
        view.arrange(view.tree.root);
        view.paint();
        return view.drawn.boxes;
    }"""
    assert page.evaluate(everything) < 1_500  # In sight; all of them are 5,000.


def test_boxes_of_one_group_do_not_overlap(open_report: Opener) -> None:
    page = open_report(partita.report(recomputed()))
    overlapping = """() => {
        const {view} = window.partita, found = [];
        for (const item of view.tree.items) if (item.children) { item.isOpen = true; item.plan = null; }
        view.arrange(view.tree.root);
        for (const {children, label, width, height} of view.tree.items.filter(item => item.children)) {
            children.forEach((one, at) => {
                const isInside = one.x >= 0 && one.y >= 0 && one.x + one.width <= width && one.y + one.height <= height;
                if (!isInside) found.push(label);
                for (const other of children.slice(at + 1)) {
                    const isBeside = one.x + one.width <= other.x || other.x + other.width <= one.x;
                    const isBelow = one.y + one.height <= other.y || other.y + other.height <= one.y;
                    if (!isBeside && !isBelow) found.push([one.label, other.label]);
                }
            });
        }
        return found;
    }"""
    assert page.evaluate(overlapping) == []


def test_every_reason_of_the_plan_is_the_reason_on_the_page(open_report: Opener) -> None:
    plan = around_dropout()
    page = open_report(partita.report(plan))
    names = [node.name for node in plan.program.graph.nodes]
    told = """names => names.map(name => {
        const {data, explain} = window.partita, at = data.nodes.name.indexOf(name), told = explain(at);
        const named = list => list.map(node => data.nodes.name[node]);
        return [named(told.pathIn), named(told.pathOut), named(told.after), named(told.before)];
    })"""
    expected = []
    for name in names:
        known = plan.explanation(name)
        expected.append([list(part) for part in (known.path_in, known.path_out, known.after, known.before)])
    assert page.evaluate(told, names) == expected
    page.click("#tab-outside")
    assert "refused by no_dropout: no random numbers here" in page.inner_text("#panel-outside")
    assert page.inner_text("#tab-outside .badge") == str(sum(group.count for group in plan.excluded())) == "1"


def test_colours_show_modes_effects_and_costs(open_report: Opener) -> None:
    page = open_report(partita.report(around_dropout()))
    legends = {}
    for overlay in page.locator("#overlay option").all():
        name = overlay.get_attribute("value")
        page.select_option("#overlay", name)
        _settled(page)
        legends[name] = page.inner_text("#legend")
    assert list(legends) == ["region", "treatment", "body", "mode", "effects", "flops", "bytes"]
    assert "no_grad" in legends["mode"]
    assert "random numbers" in legends["effects"]
    assert "mutates" in legends["effects"]
    assert "Call()" in legends["treatment"]
    assert "128" in legends["flops"]


def test_the_legend_counts_the_operators_of_a_region_as_the_table_does(open_report: Opener) -> None:
    graph = Graph()
    parts = graph.call_function(torch.chunk, (graph.placeholder("x"), 2))
    graph.output(graph.call_function(torch.add, tuple(graph.call_function(getitem, (parts, at)) for at in (0, 1))))
    page = open_report(partita.report(partita.plan(GraphModule(nn.Module(), graph), BySize(parts=1), Call())))
    for name in ("region", "treatment", "body"):
        page.select_option("#overlay", name)
        _settled(page)
        assert page.inner_text("#legend b") == "2"


def test_modules_group_the_graph_too(open_report: Opener) -> None:
    page = open_report(partita.report(recomputed()))
    page.click("[data-by=module]")
    labels = page.evaluate("window.partita.view.tree.root.children.map(child => child.label)")
    assert labels == ["x", "y", *(f"blocks.{at}" for at in range(4)), "linear_8", "cross_entropy_loss", "output"]
    page.check("#weights")
    _settled(page)
    assert page.evaluate(_PLACE, "p_head_weight") is not None


def test_bodies_memory_and_checks_are_shown(open_report: Opener) -> None:
    plan = recomputed()
    comparison = partita.compare(plan.program, plan.apply(), (X, Y), no_grad_call=False, second_call=False)
    page = open_report(partita.report(plan, comparison=comparison, memory=memory_plan()))
    page.click("#tab-bodies")
    assert _column(page, "bodies", 2) == ["4"]
    page.click("#tab-checks")
    assert "Nothing differs in 1 call." in page.inner_text("#panel-checks")
    page.click("#tab-memory")
    assert page.inner_text("#panel-memory .lead") == memory_plan().picture().headline
    page.focus("#timeline")
    page.keyboard.press("Home")
    assert page.inner_text(".tip").startswith(
        f"{memory_plan().timeline.moments[0].bytes / 1000:.0f} kB after operator 1"
    )
    page.keyboard.press("ArrowLeft")
    assert "operator 1," in page.inner_text(".tip")


def test_the_bodies_say_why_they_are_not_one(open_report: Opener) -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.LayerNorm(4, eps=eps), nn.Linear(4, 4)) for eps in (1e-5, 1e-3)))
    program = partita.capture(blocks, (torch.ones(2, 4),))
    page = open_report(partita.report(partita.plan(program, ByModule("*", depth=1), Call())))
    page.click("#tab-bodies")
    assert _column(page, "bodies", 6) == ["", "like part_0, but eps of layer_norm_1 is 0.001, of layer_norm 1e-05"]


def test_a_timeline_without_operators_is_an_empty_chart(open_report: Opener) -> None:
    page = open_report(partita.report(chain(10, 2), memory=Timeline((), 0, 0, ())))
    page.click("#tab-memory")
    page.focus("#timeline")
    page.keyboard.press("Home")
    assert page.inner_text("#panel-memory .lead") == "peak 0 B"
    assert page.inner_text(".tip") == ""


def test_a_joint_graph_has_a_colour_for_each_half(open_report: Opener) -> None:
    program = partita.capture_joint(torch.nn.Linear(4, 4), (torch.randn(2, 4),))
    page = open_report(partita.report(partita.plan(program, BySize(parts=2), Call())))
    page.select_option("#overlay", "half")
    _settled(page)
    assert {"forward", "backward"} <= set(page.inner_text("#legend").split())
    assert page.inner_text("#kind").startswith("joint graph")


def test_what_is_not_given_is_said(open_report: Opener) -> None:
    page = open_report(partita.report(chain(10, 2)))
    page.click("#tab-memory")
    assert "No timeline was given" in page.inner_text("#panel-memory")
    page.click("#tab-checks")
    assert "No comparison was given" in page.inner_text("#panel-checks")


def test_dark_follows_the_system_and_the_button(open_report: Opener) -> None:
    page = open_report(partita.report(chain(10, 2)), color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.click("#theme")
    assert page.evaluate(background) == "rgb(255, 255, 255)" != dark
    assert page.evaluate("window.partita.view.isDark") is False
    page.click("#theme")
    assert page.evaluate(background) == dark


def test_hostile_names_are_text_everywhere(open_report: Opener) -> None:
    plan, comparison = hostile()
    page = open_report(partita.report(plan, comparison=comparison))
    for tab in ("regions", "bodies", "outside", "checks", "graph"):
        page.click(f"#tab-{tab}")
    for node in range(4):
        page.evaluate("node => window.partita.goToNode(node)", node)
        _settled(page)
    page.evaluate("window.partita.goToRegion(0)")
    page.fill("#search", "<")
    assert "onerror" in page.inner_text("#results")
    for overlay in ("treatment", "body", "region"):
        page.select_option("#overlay", overlay)
        _settled(page)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, b[onclick]").count() == 0


def test_a_name_as_long_as_a_book_is_cut(open_report: Opener) -> None:
    plan = chain(10, 2)
    node = plan.program.operators()[0]
    node.name = "long " * 50_000
    page = open_report(partita.report(partita.plan(Program.of(plan.program.graph_module), BySize(parts=1), Call())))
    page.evaluate("window.partita.goToNode(1)")
    _settled(page)
    assert page.evaluate("window.partita.view.selected.width") < 300


def test_scripts_that_get_into_the_page_are_not_run(open_report: Opener) -> None:
    page = open_report(partita.report(chain(10, 2)))
    tried = """() => {
        const made = document.createElement("div");
        made.setAttribute("onclick", "window.hacked = 1");
        document.body.append(made);
        made.click();
        return window.hacked ?? null;
    }"""
    assert page.evaluate(tried) is None
    _settled(page)
    (said,) = open_report.complaints
    open_report.complaints.clear()
    assert "Content Security Policy" in said


def test_the_frame_of_a_notebook_draws_the_page(open_report: Opener) -> None:
    page = open_report.page
    path = open_report.folder / "report.html"
    path.write_text(f"<!doctype html>{partita.report(chain(10, 2))._repr_html_()}")
    page.goto(path.as_uri())
    (frame,) = page.main_frame.child_frames
    assert frame.evaluate(_SHOWN) > 0
    assert frame.inner_text("#kind") == "graph module, 10 nodes, 2 regions"


@pytest.mark.parametrize("nodes", [0, 1])
def test_a_graph_of_no_or_one_operator_opens(open_report: Opener, nodes: int) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.relu, (x,)) if nodes else ())
    program = program_of(graph)
    policy = BySize(parts=1) if nodes else partita.Partition(program, [])
    page = open_report(partita.report(partita.plan(program, policy, Call())))
    for tab in ("regions", "bodies", "outside", "memory", "checks", "graph"):
        page.click(f"#tab-{tab}")
    assert page.evaluate("window.partita.view.drawn.boxes") == 2 + nodes


def test_a_narrow_window_and_paper_show_everything(open_report: Opener) -> None:
    page = open_report(partita.report(recomputed()), width=420, height=700)
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert all(
        page.locator(f"#panel-{name}").is_visible() for name in ("graph", "regions", "bodies", "outside", "checks")
    )
    assert page.locator("#search").is_hidden()


def test_paper_has_the_whole_graph_and_the_screen_is_as_before_afterwards(open_report: Opener) -> None:
    page = open_report(partita.report(chain(40, 16)), width=900, height=300)
    state = "(() => { const {scale, left, top} = window.partita.view; return [scale, left, top]; })()"
    size = "(() => { const {width, height} = document.getElementById('graph'); return [width, height]; })()"
    drawn, before, pixels = "window.partita.view.drawn.boxes", page.evaluate(state), page.evaluate(size)
    assert page.evaluate(drawn) < 18
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    _settled(page)
    assert page.evaluate(drawn) == 18
    graph, legend = (page.locator(name).bounding_box() for name in ("#graph", "#legend"))
    assert graph is not None
    assert legend is not None
    assert (graph["width"], graph["height"]) == (700, 860)
    assert legend["y"] >= graph["y"] + graph["height"]
    page.emulate_media(media="screen")
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    _settled(page)
    assert (page.evaluate(state), page.evaluate(size)) == (before, pixels)


def test_roles_and_names_are_there_for_screen_readers(open_report: Opener) -> None:
    page = open_report(partita.report(chain(10, 2)))
    assert page.get_by_role("tab").count() == 6
    assert page.get_by_role("tab", selected=True).inner_text() == "Graph"
    page.focus("#tab-graph")
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("tabpanel").get_attribute("id") == "panel-regions"
    unnamed = """() => [...document.querySelectorAll("button, input, select, canvas")].filter(one => one.offsetParent)
        .filter(one => !(one.getAttribute("aria-label") || one.innerText || one.title || one.closest("label")))
        .length"""
    assert page.evaluate(unnamed) == 0
