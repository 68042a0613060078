"""Reports: how long one takes to write, how large it is, and how long a browser takes to open it."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.fx import GraphModule

import partita
from benchmarks.graphs import build
from benchmarks.rows import Row, at_most
from benchmarks.scales import Scale
from benchmarks.timing import CPU, clocked
from partita.policies import BySize
from partita.treatments import Call

__all__ = ["rows"]

_SMALL, _LARGE = 5_000, 50_000
_PART = 100


def rows(scale: Scale) -> Iterator[Row]:
    """Graphs of equal blocks with values and modules on every node, one region for each hundred nodes."""
    sizes = (_SMALL, _LARGE) if has_targets(scale) else (500, 1_000)
    taken: dict[int, float] = {}
    with TemporaryDirectory() as folder:
        for nodes in sizes:
            path = Path(folder) / f"{nodes}.html"
            module = _with_metadata(build("blocks", nodes))
            plan = partita.plan(partita.Program.of(module), BySize(parts=nodes // _PART), Call())
            gc.collect()
            (taken[nodes],) = clocked(lambda plan=plan, path=path: partita.report(plan).save(path), CPU)
            yield from _written(nodes, taken, path.stat().st_size / 1e6)
            yield from _opened(nodes, path)


def has_targets(scale: Scale) -> bool:
    """Whether the sizes are those that the targets are about."""
    return scale.layers > 0


def _written(nodes: int, taken: dict[int, float], megabytes: float) -> Iterator[Row]:
    first = next(iter(taken))
    yield Row(
        section="report, written",
        case=f"blocks {nodes:,}, {nodes // _PART} regions",
        unit="s",
        ours=taken[nodes],
        beside="" if nodes == first else f"ours at {first:,}",
        other=None if nodes == first else taken[first],
        reading="seconds",
        value=taken[nodes],
        target=at_most(10) if nodes == _LARGE else None,
    )
    yield Row(
        section="report, size",
        case=f"blocks {nodes:,}, {nodes // _PART} regions",
        unit="MB",
        ours=megabytes,
        reading="MB",
        value=megabytes,
        target=at_most(20) if nodes == _LARGE else None,
    )


def _opened(nodes: int, path: Path) -> Iterator[Row]:
    """From the start of loading until the graph is drawn, by the browser's clock."""
    chromium = os.environ.get("PARTITA_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None or find_spec("playwright") is None:
        return
    from playwright.sync_api import sync_playwright

    script = """async () => {
        while (!window.partita.view.wasShown) await new Promise(requestAnimationFrame);
        return performance.now() / 1000;
    }"""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--headless", "--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page()
        page.goto(path.as_uri())
        seconds = page.evaluate(script)
        browser.close()
    yield Row(
        section="report, opened in a browser",
        case=f"blocks {nodes:,}, {nodes // _PART} regions",
        unit="s",
        ours=seconds,
        reading="seconds",
        value=seconds,
        target=at_most(3) if nodes == _SMALL else None,
    )


def _with_metadata(module: GraphModule) -> GraphModule:
    value = torch.empty(8, 64, device="meta")
    for place, node in enumerate(module.graph.nodes):
        layer = f"layers.{place // _PART}"
        inner = f"{layer}.{'attention' if place % _PART < _PART // 2 else 'mlp'}"
        node.meta["val"] = value
        node.meta["nn_module_stack"] = {"": ("", "Model"), layer: (layer, "Layer"), inner: (inner, "Part")}
    return module
