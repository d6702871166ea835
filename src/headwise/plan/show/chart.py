"""Charts of cache against context: bars for a terminal, and a figure."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...extras import missing_extra
from ..costs import totals as costs
from ..shape import short
from ..units import show_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..costs.plan_data import PlanData

FIRST, BAR = 1024, 48
COLOURS = ("#4053d3", "#b51d14", "#00b25d", "#ddb310", "#00beff", "#fb49b0")


def check_plans(plans: object) -> None:
    """Raise TypeError for anything but a list of plans, ValueError for an empty list."""
    if not isinstance(plans, (list, tuple)) or not all(hasattr(plan, "contexts") for plan in plans):
        raise TypeError(f"give a list of plans from headwise.plan.of; got {short(plans)}")
    if not plans:
        raise ValueError("give at least one plan from headwise.plan.of; got none")


def labels(plans: Sequence[PlanData], most: int | None = None) -> list[str]:
    """Return labels of plans: names, with dtype and batch if these differ; names are cut to fit `most`."""
    dtypes, batches = ({getattr(plan, name) for plan in plans} for name in ("kv_dtype", "batch"))
    names = []
    for plan in plans:
        apart = [plan.kv_dtype] * (len(dtypes) > 1) + [f"batch {plan.batch}"] * (len(batches) > 1)
        end = "".join(f", {word}" for word in apart)
        names.append((plan.name if most is None else plan.name[: max(8, most - len(end))]) + end)
    return names


def lengths(plans: Sequence[PlanData]) -> list[int]:
    """Return powers of two from 1024 up to the largest requested context, which is last."""
    last = max(cost.context for plan in plans for cost in plan.contexts)
    lengths = [FIRST << i for i in range(40) if FIRST << i < last]
    return [*lengths, last]


def cache_at(plan: PlanData, context: int, *, windowed: bool = True) -> int:
    """Return the cache bytes of the batch, including scales."""
    number, scale = costs.bytes_of(plan.kv_dtype)
    return costs.cache_bytes(plan.model, context, number, batch=plan.batch, windowed=windowed, scale_bytes=scale)


def bars(plan: PlanData) -> str:
    """Return a bar for each context: ``#`` is in use, ``.`` would be reserved in addition."""
    rows = [(n, cache_at(plan, n), cache_at(plan, n, windowed=False)) for n in lengths([plan])]
    most = max(reserved for *_, reserved in rows)
    lines = ["cache against context (# held" + (", . reserved without windows)" if rows[-1][1] < most else ")")]
    for context, used, reserved in rows:
        full, light = (math.ceil(BAR * size / most) for size in (used, reserved))
        lines.append(f"{context:>11,}  {'#' * full + '.' * (light - full):<{BAR}}  {show_bytes(used)}")
    return "\n".join(lines)


def figure(plans: Sequence[PlanData]) -> Figure:
    """Return a Matplotlib figure of the caches of plans against context; dashed lines show them without windows.

    Raises:
        TypeError: not a list of plans.
        ValueError: none of the plans keeps a cache.
        MissingExtra: Matplotlib is not installed.
    """
    check_plans(plans)
    drawn = [plan for plan in plans if not plan.model.is_encoder]
    if not drawn:
        raise ValueError("an encoder keeps no cache, so there is nothing to draw")
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullLocator
    except ImportError as error:
        raise missing_extra("a chart", "look", error) from None
    made = Figure(figsize=(10, 5), layout="constrained")
    axes = made.add_subplot()
    places = lengths(drawn)
    for i, (plan, name) in enumerate(zip(drawn, labels(drawn, most=24), strict=True)):
        colour = COLOURS[i % len(COLOURS)]
        for windowed, style in ((False, "--"), (True, "-")):
            sizes = [cache_at(plan, n, windowed=windowed) for n in places]
            axes.plot(places, sizes, style, color=colour, label=name if windowed else None)
    axes.plot([], [], "--", color="#777", label="dashed: reserved")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = places[:: 1 + len(places) // 12]
    axes.set_xticks(ticks, [_tokens(n) for n in ticks])
    axes.yaxis.set_major_locator(LogLocator(base=2, numticks=8))
    axes.yaxis.set_major_formatter(lambda size, _: show_bytes(round(size)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("tokens of context")
    axes.set_title(_title(drawn), loc="left", fontsize=11, parse_math=False)
    axes.grid(True, color="#eee")
    legend = axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for text in legend.get_texts():
        text.set_parse_math(False)
    return made


def svg(plans: Sequence[PlanData]) -> str:
    """Return the figure of the caches of plans against context as an SVG image; the text is reproducible.

    Raises:
        TypeError: not a list of plans.
        ValueError: none of the plans keeps a cache.
        MissingExtra: Matplotlib is not installed.

    Example:
        >>> from headwise.plan import of
        >>> svg([of("gpt-3")]).split()[0]
        '<svg'
    """
    made = figure(plans)
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "headwise", "svg.fonttype": "none"}):
        made.savefig(file, format="svg", metadata={"Date": None})
    content = file.getvalue()
    return content[content.index("<svg") :]


def _title(plans: Sequence[PlanData]) -> str:
    """Return the title, with the dtype and the batch if all plans share them."""
    dtypes, batches = {plan.kv_dtype for plan in plans}, {plan.batch for plan in plans}
    shared = [*dtypes] * (len(dtypes) == 1) + [f"batch {batch}" for batch in batches] * (len(batches) == 1)
    return "Key-value cache against context" + (f" ({', '.join(shared)})" if shared else "")


def _tokens(count: int) -> str:
    if count % 1024 == 0:
        return f"{count // 1024}K" if count < 1024**2 else f"{count / 1024**2:g}M"
    return f"{count:,}"
