"""A picture of a timeline as PNG, for documents that take no SVG; drawn by matplotlib, the extra `pictures`."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from partita.errors import OptionError
from partita.memory.budget import shown_bytes
from partita.memory.picture import described, highest_by_column, place_of_peak, shown_round
from partita.memory.timeline import Moment

if TYPE_CHECKING:
    from partita.memory.picture import Picture

_DOTS_PER_INCH = 100
_BLUE, _GREY, _RED, _DARK = "#0969da", "#818b98", "#cf222e", "#59636e"


def drawn(picture: Picture, width: int) -> bytes:
    """The image as a file, that many pixels wide and half as high, with the light scheme of the SVG."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError(
            "a picture is saved as .png by matplotlib, which is not installed: pip install 'partita[pictures]', or "
            "save it as .svg, which needs nothing"
        ) from error
    # Without pyplot, so that neither its list of figures nor the backend of a notebook is touched.
    figure = Figure(figsize=(width / _DOTS_PER_INCH, width / _DOTS_PER_INCH / 2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _draw(axes, picture)
    target = BytesIO()
    figure.savefig(target, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return target.getvalue()


def _draw(axes: Any, picture: Picture) -> None:
    planned, axis = picture.planned, picture.axis
    if picture.plain is not None:
        axes.stairs(*_steps(picture.plain.moments, picture.operators), color=_GREY, label=_plain(picture.plain_name))
    heights, edges = _steps(planned.moments, picture.operators)
    axes.stairs(heights, edges, baseline=axis.low, fill=True, color=_BLUE, alpha=0.22)
    axes.stairs(heights, edges, baseline=axis.low, color=_BLUE, label="planned")
    if planned.resident_bytes > axis.low:
        axes.axhspan(axis.low, planned.resident_bytes, color=_GREY, alpha=0.25, label="allocated throughout")
    budget = picture.budget_bytes
    if budget is not None and axis.low <= budget <= axis.high:
        axes.axhline(budget, color=_RED, linestyle="--", label=f"budget {shown_bytes(budget)}")
    turn = next((at for at, moment in enumerate(planned.moments) if moment.phase != "forward"), None)
    if turn:
        axes.axvline(turn, color=_DARK, linestyle=":", linewidth=1)
    if planned.moments:
        at = place_of_peak(planned)
        moment = planned.moments[at]
        axes.plot([at + 0.5], [moment.bytes], "o", color=_RED, label=_plain(f"peak: {described(moment)}"))
    axes.set_xlim(0, picture.operators)
    axes.set_ylim(axis.low, axis.high)
    axes.set_yticks(axis.marks(), [shown_round(mark) for mark in axis.marks()])
    axes.set_xlabel("operators: forward, then backward")
    axes.set_title(
        _plain(picture.headline if not picture.title else f"{picture.title}\n{picture.headline}"), loc="left"
    )
    axes.grid(visible=True, axis="y", alpha=0.4)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False, fontsize="small")


def _steps(moments: Sequence[Moment], operators: int) -> tuple[list[int], list[float]]:
    """The bytes as steps and where these begin and end; of very many operators, the highest in each column."""
    columns = min(operators, 2000)
    heights = highest_by_column(moments, columns, operators) or [0]
    return heights, [column * operators / columns for column in range(len(heights) + 1)]


def _plain(text: str) -> str:
    """A text that matplotlib does not read as mathematics; a label that begins with an underscore is hidden there."""
    return f" {text}".replace("$", r"\$")
