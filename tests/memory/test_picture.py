"""Pictures of timelines: what is drawn is what was predicted, in text, as data and as SVG."""

from __future__ import annotations

import json
import re
import sys
from io import BytesIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from tests.memory.models import RATES, Model

from partita.errors import OptionError
from partita.memory import Moment, Occupant, Picture, Timeline, step_memory

_X, _Y = torch.randn(128, 32), torch.randint(16, (128,))


def _timeline(sizes: list[int], name: str = "block", resident: int = 0) -> Timeline:
    half = len(sizes) // 2
    moments = tuple(
        Moment("forward" if at < half else "backward", f"part_{at // 4}", "aten.mul", f"mul_{at}", name, size)
        for at, size in enumerate(sizes)
    )
    return Timeline(moments, resident, 0, (Occupant(max(sizes, default=0), 1, "part_0", "mul", name, "aten.mul"),))


def _image(picture: Picture, **options: Any) -> dict[str, list[ElementTree.Element]]:
    """The elements of a picture by their class and kind."""
    found: dict[str, list[ElementTree.Element]] = {}
    for element in ElementTree.fromstring(picture.svg(**options)).iter():
        kind = element.tag.rpartition("}")[2]
        found.setdefault(f"{kind} {element.get('class', '')}".strip(), []).append(element)
    return found


def _heights(path: ElementTree.Element) -> list[float]:
    return [float(place) for place in re.findall(r"(?:M[0-9.]+ |V)([0-9.]+)", path.get("d", ""))]


def test_the_highest_points_and_the_budget_are_at_their_places() -> None:
    image = _image(Picture(_timeline([1, 5, 8, 3]), _timeline([1, 5, 10, 3]), 9))
    (planned,), (plain,) = image["path pm-planned"], image["path pm-plain"]
    (budget,), (peak,) = image["line pm-budget"], image["circle pm-over"]
    bottom, top = max(_heights(planned)), min(_heights(plain))

    def bytes_at(y: float) -> float:
        return 10 * (bottom - y) / (bottom - top)

    assert [bytes_at(y) for y in _heights(planned)] == pytest.approx([1, 5, 8, 3, 0], abs=0.05)
    assert [bytes_at(y) for y in _heights(plain)] == pytest.approx([1, 5, 10, 3], abs=0.05)
    assert bytes_at(float(budget.get("y1", 0))) == pytest.approx(9, abs=0.05)
    assert bytes_at(float(peak.get("cy", 0))) == pytest.approx(8, abs=0.05)


def test_everything_is_inside_of_the_image_and_finite() -> None:
    picture = step_memory(Model(), (_X, _Y), rates=RATES).plan(0.7).picture()
    for width in (720, 960):
        image = _image(picture, width=width)
        (root,) = image["svg"]
        height = int(root.get("height", 0))
        assert root.get("viewBox") == f"0 0 {width} {height}"
        for elements in image.values():
            for element in elements:
                across = [float(element.get(name, 0)) for name in ("x", "x1", "x2", "cx")]
                down = [float(element.get(name, 0)) for name in ("y", "y1", "y2", "cy")]
                across += [float(x) for x in re.findall(r"H([0-9.]+)", element.get("d", ""))]
                assert all(0 <= x <= width for x in across)
                assert all(0 <= y <= height for y in (*down, *_heights(element)))
    # Light and dark, without anything from elsewhere.
    assert "prefers-color-scheme: dark" in picture.svg()
    assert "href" not in picture.svg()


def test_a_picture_shows_the_plan() -> None:
    plan = step_memory(Model(), (_X, _Y), rates=RATES).plan(0.7)
    picture = plan.picture()
    peak, occupant = plan.timeline.peak, plan.timeline.occupants[0]
    text, image = picture.text(90), picture.svg()
    for told in (text, image):
        assert f"peak {plan.peak_bytes / 1e3:.3f} kB of {plan.budget_bytes / 1e3:.3f} kB allowed" in told
        assert f"without recomputation {plan.plain_peak_bytes / 1e3:.3f} kB" in told
        assert f"{peak.phase} of {peak.segment}: {peak.node} in {peak.path}" in told
    assert str(occupant) in image
    assert "recompute" in text
    assert str(picture).count("\n") > 10
    assert picture._repr_svg_() == image


def test_a_chart_in_text_keeps_its_width_and_height() -> None:
    sizes = [*range(1, 300), *range(300, 0, -1)]
    for width in (40, 77, 120):
        lines = (
            Picture(_timeline(sizes), _timeline([2 * size for size in sizes]), 700).text(width, height=8).split("\n")
        )
        chart = [line for line in lines if "\u2524" in line or "\u2502" in line]
        assert len(chart) == 8
        assert max(map(len, chart)) == width
        # From 0 to 800: the budget is at 700, the plain step reaches 600, the plan 300.
        firsts = [next(at for at, line in enumerate(chart) if sign in line) for sign in "\u254c\u2591\u2588"]
        assert firsts == [1, 3, 6]
    assert lines[-1].endswith("< backward")


def test_the_chart_shows_the_highest_of_operators_that_share_a_column() -> None:
    sizes = [10] * 5_000
    sizes[1_234] = 1_000
    picture = Picture(_timeline(sizes))
    assert _heights(_image(picture)["path pm-planned"][0])[0] > min(_heights(_image(picture)["path pm-planned"][0]))
    assert "\u2588" in picture.text(60).split("\n")[3]
    assert len(picture.svg()) < 400_000


def test_names_are_escaped() -> None:
    name = 'a<b>&"c\x00\ud800\n'
    picture = Picture(_timeline([1, 2, 3, 4], name), title=name)
    image = _image(picture)
    assert any('a<b>&"c\ufffd\ufffd\ufffd' in (one.text or "") for one in image["text pm-text"])
    assert all(name not in line for line in picture.text(80).split("\n"))
    assert "a<b>&" in picture.text(80)


def test_the_data_are_plain_values() -> None:
    plan = step_memory(Model(), (_X, _Y), rates=RATES).plan(0.7)
    data = json.loads(json.dumps(plan.picture().data()))
    assert data["planned"]["peak_bytes"] == max(row["bytes"] for row in data["planned"]["moments"]) == plan.peak_bytes
    assert data["plain"]["peak_bytes"] == plan.plain_peak_bytes
    assert data["budget_bytes"] == plan.budget_bytes
    moment = data["planned"]["moments"][data["planned"]["peak_at"]]
    assert moment["segment"] == plan.timeline.peak.segment
    assert plan.timeline.rows() == data["planned"]["moments"]


def test_most_that_is_allocated_throughout_moves_the_scale() -> None:
    low = Picture(_timeline([910, 950, 1_000, 920], resident=900))
    assert low.axis.low == 900
    assert Picture(_timeline([100, 950, 1_000, 920], resident=100)).axis.low == 0
    # A budget far above would leave nothing to see.
    assert "budget" not in "".join(str(one.text) for one in _image(Picture(low.planned, None, 10**9))["text pm-small"])


@pytest.mark.parametrize("sizes", [[], [5], [0, 0]])
def test_small_steps_have_pictures_too(sizes: list[int]) -> None:
    picture = Picture(_timeline(sizes), _timeline(sizes), 3)
    assert _image(picture)["svg"]
    assert picture.text(60)
    assert picture.data()["planned"]["peak_bytes"] == max(sizes, default=0)


def test_pictures_are_saved(tmp_path: Path) -> None:
    picture = Picture(_timeline([1, 2, 3, 4]))
    for kind in ("svg", "txt", "json"):
        picture.save(tmp_path / f"step.{kind}")
    assert (tmp_path / "step.svg").read_text(encoding="utf-8") == picture.svg()
    assert json.loads((tmp_path / "step.json").read_text(encoding="utf-8")) == picture.data()
    assert "forward" in (tmp_path / "step.txt").read_text(encoding="utf-8")
    with pytest.raises(OptionError, match=r"\.svg, \.png, \.txt or \.json"):
        picture.save(tmp_path / "step.gif")
    assert not (tmp_path / "step.gif").exists()


def _pixels(image: bytes) -> Any:
    """The rows of pixels of a PNG, as red, green, blue and opacity from 0 to 1."""
    return pytest.importorskip("matplotlib.image").imread(BytesIO(image))


def test_a_png_shows_the_same_heights() -> None:
    around = _timeline([10] * 4)
    low, high = (_pixels(Picture(_timeline([1, size, size, 1]), around).png(800)) for size in (2, 9))
    assert low.shape == high.shape == (400, 800, 4)

    def share_filled(image: Any) -> float:
        middle = image[:, 400, :3]
        return float(((middle[:, 2] - middle[:, 0]) > 0.1).mean())

    assert 0 < 3 * share_filled(low) < share_filled(high)


@pytest.mark.parametrize("sizes", [[], [5], [0, 0], list(range(5000))])
def test_any_step_can_be_a_png(sizes: list[int], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = Picture(_timeline(sizes, name="_$x$", resident=3), _timeline(sizes), 4, title="a $ and a _")
    picture.save(tmp_path / "step.png")
    assert _pixels((tmp_path / "step.png").read_bytes()).shape == (480, 960, 4)


def test_a_png_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OptionError, match=r"partita\[pictures\].*\.svg"):
        Picture(_timeline([1, 2])).save(tmp_path / "step.png")
    assert not (tmp_path / "step.png").exists()


@pytest.mark.parametrize("width", [0, -3, True, 9.5, 39])
def test_sizes_are_whole_numbers(width: Any) -> None:
    for draw in (Picture(_timeline([1, 2])).svg, Picture(_timeline([1, 2])).text):
        with pytest.raises(OptionError, match="width"):
            draw(width)
