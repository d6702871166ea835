"""Tables of a plan for a terminal, and of several plans side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..model.layer import AttentionLayer
from ..model.model import Model
from ..shape import short
from ..units import figures, show, show_bytes, show_seconds
from .chart import bars, check_plans, labels
from .printed import number_table

if TYPE_CHECKING:
    from rich.table import Table

    from ..costs.plan_data import ContextCost, PlanData

SYMBOLS = {"q_proj": "W_Q", "k_proj": "W_K", "v_proj": "W_V", "o_proj": "W_O", "q_down": "W_DQ", "kv_down": "W_DKV"}
NONE = "-"
AS_OTHERS = "as MHA, 8 KV heads, 1 KV head"


def tables(plan: PlanData) -> Iterator[Any]:
    """Yield the tables, the chart and the notes of one plan, in order."""
    from rich.text import Text

    yield overview([plan])
    yield projections(plan)
    yield from (_floor_table(cost) for cost in plan.contexts if cost.floors)
    if plan.planned is not None:
        yield savings(plan, plan.planned)
    if not plan.model.is_encoder:
        yield Text(bars(plan))
    yield Text(remarks(plan))


def side_by_side(plans: Sequence[PlanData]) -> Any:
    """Return the overview of several plans, then each plan's savings by a heads plan and step times at given speeds.

    The remarks of each plan follow; Rich prints the result.

    Raises:
        TypeError: not a list of plans.
        ValueError: an empty list, or plans of different contexts or batches, which cannot be compared.

    Example:
        >>> from headwise import plan
        >>> table = plan.side_by_side([plan.of("gpt-3"), plan.of("gpt-3", kv_dtype="fp8")])
    """
    from rich.console import Group
    from rich.text import Text

    check_plans(plans)
    _check_alike(plans)
    named = list(zip(labels(plans), plans, strict=True))
    own = []
    for name, plan in named:
        tables = [] if plan.planned is None else [savings(plan, plan.planned)]
        tables += [_floor_table(cost) for cost in plan.contexts if cost.floors and cost.floors[0].seconds is not None]
        for table in tables:
            table.title = Text(f"{name}: {table.title}")
        own += tables
    return Group(overview(plans), *own, *(Text(f"{name}: {remarks(plan)}") for name, plan in named))


def _check_alike(plans: Sequence[PlanData]) -> None:
    """Raise ValueError if the plans have different contexts or batches."""
    first = plans[0]
    for plan in plans:
        pairs = {"contexts": [[cost.context for cost in one.contexts] for one in (first, plan)]}
        pairs["batch"] = [[one.batch] for one in (first, plan)]
        for what, (one, other) in pairs.items():
            if one != other:
                shown = [", ".join(map(str, numbers)) for numbers in (one, other)]
                raise ValueError(
                    f"plans side by side need the same {what}; {first.name} has {shown[0]} and {plan.name} {shown[1]}"
                )


def remarks(plan: PlanData) -> str:
    """Return the notes that a reader needs in addition to the numbers."""
    lines = [f"exact: every count equals that of the model in transformers ({plan.model.model_type})"]
    if plan.notes:
        lines = [f"not counted or unknown: {note}" for note in plan.notes]
    if plan.card:
        lines.append(f"card: {plan.card}")
    if any(part.copies > 1 for part in plan.model.others):
        lines.append(
            "experts read: the different ones that a batch is expected to use in a layer if the router chooses "
            'uniformly, E (1 - (1 - k / E)^batch); "active parameters per token" counts those of one token'
        )
    return "\n".join(lines)


# --- one column per plan ----------------------------------------------------------------------------------------------


def overview(plans: Sequence[PlanData]) -> Table:
    """Return a table of sizes, parameters, cache and FLOPs, with a column for each plan."""
    from rich.table import Table
    from rich.text import Text

    table = Table("", title="What attention costs")
    for name in labels(plans):
        table.add_column(Text(name))
    one_dtype = len({plan.kv_dtype for plan in plans}) == 1
    columns = [_facts(plan, one_dtype=one_dtype) for plan in plans]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(Text(column.get(name, NONE)) for column in columns))
    first = plans[0]
    for i, cost in enumerate(first.contexts):
        table.add_section()
        rows = [_context_facts(plan, plan.contexts[i]) for plan in plans]
        table.add_row(f"at {cost.context:,} tokens" + (f", batch {first.batch}" if first.batch > 1 else ""))
        for name in rows[0]:
            table.add_row(f"  {name}", *(Text(row[name]) for row in rows))
    return table


def _facts(plan: PlanData, *, one_dtype: bool) -> dict[str, str]:
    model, rooms = plan.model, plan.parameters()
    share = rooms["attention"] / rooms["total"]
    first = model.layers[0]
    return {
        "kind": plan.kind,
        "d_model": f"{model.d_model:,}",
        "attention layers": _layer_counts(model.layers),
        "heads, kv heads": _spread(f"{layer.num_heads}, {layer.num_kv_heads}" for layer in model.layers),
        "d_k, d_v": f"{first.head_dim}, {first.value_dim}",
        **_state_facts(model),
        **_key_facts(model),
        "attention parameters": f"{rooms['attention']:,} ({share:.1%} of the model)",
        "  per layer": _spread(f"{layer.parameter_count():,}" for layer in model.layers),
        "all parameters": f"{rooms['total']:,}" + ("" if plan.exact else " (see the notes)"),
        "  active parameters per token": f"{model.active_parameters():,}",
        **_beside(plan),
        "weights": f"{show_bytes(model.stored_bytes())}"
        + (f", {8 * model.weight_bytes}-bit" if model.packing is None else f", {model.packing.method}"),
        "heads in total": f"{plan.attention_computations:,}",
        f"cache per token ({plan.kv_dtype})" if one_dtype else "cache per token": f"{plan.bytes_per_token:,} B",
    }


def _beside(plan: PlanData) -> dict[str, str]:
    """Return the rows of towers, with their parameters and the cost of an image, and of layers for further tokens."""
    rows = {}
    for tower in plan.model.towers:
        cost, first = tower.flops(), tower.layers[0]
        once = "" if cost is None else f"; {tower.tokens:,} tokens, {show(cost, 'FLOP')} each"
        rows[f"  of which {tower.name.removesuffix('_config')}"] = (
            f"{tower.parameter_count():,}: {len(tower.layers)} layers of {first.num_heads} heads{once}"
        )
    further = plan.further()
    if further is not None:
        rows["layers for further tokens"] = (
            f"{further['layers']}: {further['parameters']:,} more, cache per token {further['bytes_per_token']:,} B"
        )
    return rows


def _state_facts(model: Model) -> dict[str, str]:
    """Return the row of the layers with a state, if there are any."""
    if not model.states:
        return {}
    count, one = len(model.states), model.states[0]
    size = show_bytes(one.bytes(model.weight_bytes))
    return {"layers with a state": f"{count} {one.kind}, {size} each for a text of any length"}


def _key_facts(model: Model) -> dict[str, str]:
    """Return the rows of sparse attention, and of layers that read the keys and values of others."""
    rows = {}
    sparse = [layer.indexer for layer in model.layers if layer.indexer is not None]
    if sparse:
        one, own = sparse[0], sum(not indexer.shared for indexer in sparse)
        rows["sparse attention"] = (
            f"{one.top_k:,} keys per query, chosen by {own} indexers of {one.heads} heads of {one.dim}"
        )
    compressed = [layer.compressor for layer in model.layers if layer.compressor is not None]
    for rate in sorted({one.rate for one in compressed}):
        alike = [one for one in compressed if one.rate == rate]
        top = alike[0].indexer
        rows[f"a key for {rate} tokens"] = f"{len(alike)} layers, " + (
            "all attended"
            if top is None
            else f"{top.top_k:,} per query, chosen by indexers of {top.heads} heads of {top.dim}"
        )
    readers = sum(layer.keys_of is not None for layer in model.layers)
    if readers:
        rows["layers without own keys"] = f"{readers}; they read the cache of earlier layers"
    return rows


def _context_facts(plan: PlanData, cost: ContextCost) -> dict[str, str]:
    gqa = NONE if cost.as_gqa8_bytes is None else show_bytes(cost.as_gqa8_bytes)
    if plan.model.is_encoder:
        cache = {"cache held": "none: it reads the whole text in one pass", "cache reserved": NONE, AS_OTHERS: NONE}
    else:
        cache = {
            "cache held": show_bytes(cost.cache_bytes)
            + (f" and {show_bytes(cost.state_bytes)} of states" if cost.state_bytes else ""),
            "cache reserved": f"{show_bytes(cost.reserved_bytes)} without window savings",
            AS_OTHERS: f"{show_bytes(cost.as_mha_bytes)}, {gqa}, {show_bytes(cost.as_mqa_bytes)}",
        }
    decode = NONE
    if cost.decode is not None:
        decode = f"{show(cost.decode.total, 'FLOP')}, attention {show(cost.decode.attention, 'FLOP')}"
        decode += f", indexers {show(cost.decode.indexer, 'FLOP')}" if cost.decode.indexer else ""
    if cost.decode_expanded is not None:
        decode += f"; with recomputed keys and values {show(cost.decode_expanded.total, 'FLOP')}"
    return {
        **cache,
        "prefill": f"{show(cost.prefill.total, 'FLOP')}, attention {show(cost.prefill.attention, 'FLOP')}"
        + (f", indexers {show(cost.prefill.indexer, 'FLOP')}" if cost.prefill.indexer else "")
        + (
            f" ({show(cost.prefill.dense, 'FLOP')} without its mask)"
            if cost.prefill.dense > cost.prefill.attention
            else ""
        ),
        "one decoded token": decode,
        "eager attention weights": f"{show_bytes(cost.eager_bytes)} per layer; fused {show_bytes(cost.kernel_bytes)}",
    }


def _layer_counts(layers: Sequence[AttentionLayer]) -> str:
    roles = dict.fromkeys(layer.role for layer in layers)
    counts = [f"{sum(layer.role == role for layer in layers)} {role}" for role in roles]
    return counts[0].split()[0] if len(counts) == 1 else ", ".join(counts)


def _spread(values: Any) -> str:
    """Return the value that all layers share, or the first few different values."""
    different = list(dict.fromkeys(values))
    return "; ".join(different[:3]) + ("; ..." if len(different) > 3 else "")


# --- other tables -----------------------------------------------------------------------------------------------------


def projections(plan: PlanData) -> Table:
    """Return a table of the parameters of each projection, per layer and in total; biases count with their matrix."""
    table = number_table("Projections", ("parameters", "per layer", "in all layers"), left=("parameters",))
    names = dict.fromkeys(name for layer in plan.model.layers for name in layer.parameter_counts())
    for name in names:
        counts = [layer.parameter_counts().get(name, 0) for layer in plan.model.layers]
        shown = f"{SYMBOLS[name]}  {name}" if name in SYMBOLS else name
        table.add_row(shown, _spread(f"{count:,}" for count in counts), f"{sum(counts):,}")
    return table


def _floor_table(cost: ContextCost) -> Table:
    speeds, mixture = cost.floors[0].seconds is not None, cost.floors[0].experts is not None
    headers = ["batch", *(["experts read"] if mixture else []), "read per step", "computed per step", "FLOP per byte"]
    headers += ["least time", "most tokens/s", "limited by"] if speeds else []
    table = number_table(f"One decoding step at {cost.context:,} tokens", headers, left=("limited by",))
    for floor in cost.floors:
        row = [str(floor.batch), *([] if floor.experts is None else [figures(floor.experts, 4)])]
        row += [show_bytes(floor.bytes), show(floor.flops, "FLOP"), figures(floor.intensity)]
        if floor.seconds is not None and floor.tokens_per_second is not None:
            row += [show_seconds(floor.seconds), figures(floor.tokens_per_second), floor.binds]
        table.add_row(*row)
    return table


def savings(plan: PlanData, planned: PlanData) -> Table:
    """Return a table of the numbers before and after a heads plan."""
    columns = ("heads plan", "before", "after", "saved")
    table = number_table("What the heads plan saves", columns, left=("heads plan",))
    whole, rest = plan.parameters(), planned.parameters()
    _saving(table, "attention parameters", whole["attention"], rest["attention"], "{:,}".format)
    _saving(table, "all parameters", whole["total"], rest["total"], "{:,}".format)
    _saving(table, "heads in total", plan.attention_computations, planned.attention_computations, "{:,}".format)
    _saving(table, "cache per token", plan.bytes_per_token, planned.bytes_per_token, "{:,} B".format)
    for before, after in zip(plan.contexts, planned.contexts, strict=True):
        at = f"at {before.context:,}: "
        _saving(table, at + "cache", before.cache_bytes, after.cache_bytes, show_bytes)
        _saving(table, at + "prefill", before.prefill.total, after.prefill.total, lambda n: show(n, "FLOP"))
        if before.decode is not None and after.decode is not None:
            _saving(table, at + "one token", before.decode.total, after.decode.total, lambda n: show(n, "FLOP"))
    return table


def _saving(table: Table, name: str, before: int, after: int, show: Any) -> None:
    table.add_row(name, show(before), show(after), f"{1 - after / before:.1%}" if before else NONE)


def card_list(known: dict[str, Any]) -> Any:
    """Return the built-in cards with their notes, and the architectures, from the result of `known`; Rich prints it.

    Raises TypeError for anything else.

    Example:
        >>> from headwise import plan
        >>> listed = plan.card_list(plan.known())
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not isinstance(known, dict) or not {"cards", "architectures"} <= set(known):
        raise TypeError(f"give the result of headwise.plan.known(); got {short(known)}")
    table = Table("card", "model", "facts that common texts state differently", title="Built-in cards")
    for name, card in known["cards"].items():
        table.add_row(name, card["title"], card.get("note", ""))
    line = f"{len(known['architectures'])} architectures of configs are known: {', '.join(known['architectures'])}"
    return Group(table, Text(line))
