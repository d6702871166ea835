"""Cache against context: bars for a terminal, lines as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from . import costs
from .shape import short
from .units import show_bytes

if TYPE_CHECKING:
    from .plan_data import PlanData

FIRST, BAR = 1024, 48
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 78, 190, 34, 44
COLOURS = ("#4053d3", "#b51d14", "#00b25d", "#ddb310", "#00beff", "#fb49b0")


def check_plans(plans: object) -> None:
    """Raise TypeError for anything but a list of plans."""
    if not isinstance(plans, (list, tuple)) or not all(hasattr(plan, "contexts") for plan in plans):
        raise TypeError(f"give a list of plans, as headwise.plan.of makes them; got {short(plans)}")
    if not plans:
        raise ValueError("give at least one plan, as headwise.plan.of makes them; got none")


def labels(plans: Sequence[PlanData], most: int | None = None) -> list[str]:
    """What tells plans apart: their names, and the dtype and batch where these differ; names are cut to fit `most`."""
    dtypes, batches = ({getattr(plan, name) for plan in plans} for name in ("kv_dtype", "batch"))
    names = []
    for plan in plans:
        apart = [plan.kv_dtype] * (len(dtypes) > 1) + [f"batch {plan.batch}"] * (len(batches) > 1)
        end = "".join(f", {word}" for word in apart)
        names.append((plan.name if most is None else plan.name[: max(8, most - len(end))]) + end)
    return names


def lengths(plans: Sequence[PlanData]) -> list[int]:
    """Powers of two from 1024 up to the largest context asked for, which is the last."""
    last = max(cost.context for plan in plans for cost in plan.contexts)
    lengths = [FIRST << i for i in range(40) if FIRST << i < last]
    return [*lengths, last]


def cache_at(plan: PlanData, context: int, *, windowed: bool = True) -> int:
    """Bytes of the batch's cache, scales included."""
    number, scale = costs.bytes_of(plan.kv_dtype)
    return costs.cache_bytes(plan.model, context, number, batch=plan.batch, windowed=windowed, scale_bytes=scale)


def bars(plan: PlanData) -> str:
    """A bar for each context: ``#`` is in use, ``.`` would be reserved beside it."""
    rows = [(n, cache_at(plan, n), cache_at(plan, n, windowed=False)) for n in lengths([plan])]
    most = max(reserved for *_, reserved in rows)
    lines = ["cache against context (# held" + (", . reserved without windows)" if rows[-1][1] < most else ")")]
    for context, used, reserved in rows:
        full, light = (math.ceil(BAR * size / most) for size in (used, reserved))
        lines.append(f"{context:>11,}  {'#' * full + '.' * (light - full):<{BAR}}  {show_bytes(used)}")
    return "\n".join(lines)


def svg(plans: Sequence[PlanData]) -> str:
    """The caches of plans against context, both axes logarithmic; dashed where windows are not used.

    Raises:
        TypeError: no list of plans.
        ValueError: none of the plans keeps a cache.

    Example:
        >>> from headwise.plan import of
        >>> svg([of("gpt-3")]).split()[0]
        '<svg'
    """
    check_plans(plans)
    drawn = [plan for plan in plans if not plan.model.is_encoder]
    if not drawn:
        raise ValueError("an encoder keeps no cache, so there is nothing to draw")
    places = lengths(drawn)
    sizes = [cache_at(plan, n, windowed=w) for plan in drawn for n in places for w in (True, False)]
    low, high = math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes)))
    span = math.log2(places[-1]) - math.log2(places[0]) or 1.0

    def at(context: int, size: int) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (math.log2(context) - math.log2(places[0])) / span
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log2(size) - low) / max(1, high - low)
        return f"{x:.1f},{y:.1f}"

    body = [*_axes(places, low, high, at)]
    names = labels(drawn, most=24)
    for i, plan in enumerate(drawn):
        colour = COLOURS[i % len(COLOURS)]
        for windowed in (False, True):
            points = " ".join(at(n, cache_at(plan, n, windowed=windowed)) for n in places)
            dash = "" if windowed else ' stroke-dasharray="4 4"'
            body.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        body.append(_label(WIDTH - RIGHT + 12, TOP + 18 * i + 8, names[i], colour))
    body.append(_label(WIDTH - RIGHT + 12, TOP + 18 * len(drawn) + 8, "dashed: reserved", "#777"))
    body.append(_label(LEFT, 18, _title(drawn), "#333", size=14))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" role="img"><title>{escape(_title(drawn))}</title>'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(body)}</svg>'
    )


def _title(plans: Sequence[PlanData]) -> str:
    """With the dtype and the batch that all plans have."""
    dtypes, batches = {plan.kv_dtype for plan in plans}, {plan.batch for plan in plans}
    shared = [*dtypes] * (len(dtypes) == 1) + [f"batch {batch}" for batch in batches] * (len(batches) == 1)
    return "Key-value cache against context" + (f" ({', '.join(shared)})" if shared else "")


def _axes(places: list[int], low: int, high: int, at: object) -> list[str]:
    assert callable(at)
    marks = []
    for context in places:
        x, _ = at(context, 2**low).split(",")
        marks.append(f'<path d="M{x} {TOP}V{HEIGHT - BOTTOM}" stroke="#eee"/>')
        marks.append(_label(float(x), HEIGHT - BOTTOM + 18, _tokens(context), "#555", anchor="middle"))
    for power in range(low, high + 1, max(1, (high - low) // 7)):
        _, y = at(places[0], 2**power).split(",")
        marks.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#eee"/>')
        marks.append(_label(LEFT - 8, float(y) + 4, show_bytes(2**power), "#555", anchor="end"))
    return [*marks, _label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "tokens of context", "#555", anchor="middle")]


def _label(x: float, y: float, text: str, colour: str, *, anchor: str = "start", size: int = 12) -> str:
    placed = f'x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {placed}>{escape(text)}</text>"


def _tokens(count: int) -> str:
    if count % 1024 == 0:
        return f"{count // 1024}K" if count < 1024**2 else f"{count / 1024**2:g}M"
    return f"{count:,}"
