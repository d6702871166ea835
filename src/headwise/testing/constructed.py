"""Ground truth for measuring heads: transformers with handmade weights, in which each head does one known job.

Nothing is trained: `constructed` builds a decoder or an encoder, and `constructed_pair` an encoder-decoder, from
`headwise.MultiHeadAttention`, and both return the job of each head. `targets` returns the keys of a job on given ids,
from its definition and not from the weights. `random_model` builds models with random weights.

>>> import headwise
>>> from headwise.testing.constructed import constructed
>>> model, jobs = constructed([["previous-token", "self"], ["induction"]])
>>> jobs
{(0, 0): 'previous-token', (0, 1): 'self', (1, 0): 'induction'}
>>> model(model.sample(23)).shape
torch.Size([1, 23, 61])
>>> seen = headwise.look.at(model, model.sample(23))
>>> [head.role for head in seen.heads]
['previous-token', 'self', 'induction']
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headwise.nn import MultiHeadAttention
from headwise.ops.masks import Mask, causal
from headwise.shapes.arguments import check_counts, shown

from .circuits import BY_TABLE, COPIES, JOBS, NEEDS, WRITES, StreamSlots, Tables, is_job, planted, targets
from .drawn import random_model
from .pictures import Jobs

__all__ = [
    "DECODER", "ENCODER", "JOBS", "NAMES", "PAIR", "Constructed", "ConstructedPair", "Tables", "constructed",
    "constructed_pair", "random_model", "targets",
]  # fmt: skip

Table = dict[tuple[int, int], str]

DECODER: Jobs = (
    (
        "previous-token", "offset-3", "self", "first-token sink", "sink at 3", "delimiter", "broad", "local band",
        "duplicate-token", "idle",
    ),
    ("induction", "retrieval", "copying", "relation by offset", "relation by id", "coreference", "word class"),
)  # fmt: skip
"""One head for each job of a decoder, except those of `NAMES`."""

NAMES: Jobs = (("duplicate name",), ("subject inhibition",), ("name mover",))
"""The circuit that ends "When Mary and John went to the store, John gave a drink to" with Mary (arXiv 2211.00593)."""

ENCODER: Jobs = (
    ("next-token", "offset+3", "previous-token", "[CLS]", "[SEP]", "delimiter", "self", "broad", "local band", "idle"),
    ("duplicate-token", "relation by offset", "relation by id", "coreference", "word class", "copying"),
)
"""One head for each job of an encoder."""

PAIR: tuple[Jobs, Jobs, Jobs] = (
    (("self", "next-token", "broad"),),
    (("previous-token", "first-token sink"),),
    (("alignment", "same token", "first-token sink", "broad"),),
)
"""The jobs of an encoder-decoder: of its encoder, its decoder, and the cross-attentions of the decoder."""

CROSS = ("alignment", "same token", "first-token sink", "delimiter", "copying", "broad", "idle")
"""The jobs that a cross-attention can have."""

MOST_SEED = 2**62

LEAST = 23
"""The minimum number of ids for randomly drawn tables."""


def constructed(
    layers: Jobs | None = None,
    *,
    kind: str = "decoder",
    vocabulary: int = 61,
    places: int = 257,
    tables: Tables | None = None,
    rest: str = "scattered",
    seed: int = 0,
) -> tuple[Constructed, Table]:
    """Build an attention-only transformer, and return it with the job of each head: ``{(layer, head): job}``.

    On a text that begins with ``tables.opener``, which must not occur again, the targets of a job get more than 0.999
    of a query's weight; for a query without targets, its resting position gets as much. Copying heads add 4 to the
    logit of the attended token; the logit of the current token is 1. The unembedding ignores the output of other heads.

    Args:
        layers: The jobs of the heads, one list per layer; `DECODER` or `ENCODER` by default.
        kind: "decoder" (causal) or "encoder".
        vocabulary: Number of token ids.
        places: Maximum length of a text.
        tables: The tables of the jobs; random by default (`Constructed.tables`).
        rest: The resting position of a query without targets: "first", the first token, as in trained models, which
            makes most heads sinks on most texts; or "scattered", a random earlier position for each position, which
            matches no job.
        seed: Random seed for tables and resting positions.

    Raises:
        TypeError: a size is not an int.
        ValueError: a job is unknown, or needs another job that no lower layer has, or a table that is empty.

    Example:
        >>> model, jobs = constructed([["previous-token"], ["induction"]])
        >>> model(torch.tensor([[1, 11, 13, 17, 11, 13]])).argmax(-1)[0, 4:].tolist()   # what followed 11, and 13
        [13, 17]
    """
    _check_sizes(vocabulary, places, tables, rest, seed)
    if not isinstance(kind, str) or kind not in ("decoder", "encoder"):
        raise ValueError(f"kind is 'decoder' or 'encoder', got {shown(kind)}; for both in one: constructed_pair")
    back = kind == "decoder"
    jobs = _as_jobs("layers", (DECODER if back else ENCODER) if layers is None else layers)
    tables = _draw_tables(vocabulary, back, seed) if tables is None else tables
    _check_jobs(jobs, tables, vocabulary, back=back)
    build = _Builder(_layout(jobs, vocabulary, places), tables, rest, seed, back=back)
    model = Constructed(build, jobs)
    return model, {(layer, head): job for layer, row in enumerate(jobs) for head, job in enumerate(row)}


def constructed_pair(
    encoder: Jobs = PAIR[0],
    decoder: Jobs = PAIR[1],
    cross: Jobs = PAIR[2],
    *,
    vocabulary: int = 61,
    places: int = 257,
    tables: Tables | None = None,
    rest: str = "scattered",
    seed: int = 0,
) -> tuple[ConstructedPair, Table]:
    """Build an encoder-decoder, and return it with the job of each head; layers are in the order of the forward pass.

    First come the layers of the encoder; then, for each layer of the decoder, its self-attention and its
    cross-attention. A head with the job "alignment" attends from position i of the decoder to position i of the
    encoder; this is the next token if the decoder reads the encoder's text shifted by a start token.

    Args:
        encoder: The jobs of the encoder's heads, one list per layer.
        decoder: The jobs of the decoder's heads, one list per layer.
        cross: The jobs of the cross-attention heads, one list per layer of the decoder.
        vocabulary: Number of token ids.
        places: Maximum length of a text.
        tables: The tables of the jobs; random by default.
        rest: As for `constructed`.
        seed: Random seed for tables and resting positions.

    Raises:
        TypeError, ValueError: as for `constructed`; or a cross-attention has a job that is not in `CROSS`.

    Example:
        >>> model, jobs = constructed_pair([["self"]], [["previous-token"]], [["alignment", "broad"]])
        >>> jobs
        {(0, 0): 'self', (1, 0): 'previous-token', (2, 0): 'alignment', (2, 1): 'broad'}
    """
    _check_sizes(vocabulary, places, tables, rest, seed)
    lists = [_as_jobs(*of) for of in (("encoder", encoder), ("decoder", decoder), ("cross", cross))]
    tables = _draw_tables(vocabulary, False, seed) if tables is None else tables
    if len(lists[1]) != len(lists[2]):
        raise ValueError(
            f"each layer of the decoder has one cross-attention; got {len(lists[1])} layers and {len(lists[2])} "
            "cross-attentions; give a list of jobs for each"
        )
    for jobs, back in zip(lists, (False, True, False), strict=True):
        _check_jobs(jobs, tables, vocabulary, back=back, among=CROSS if jobs is lists[2] else JOBS)
    layout = _layout([row for jobs in lists for row in jobs], vocabulary, places)
    model = ConstructedPair(layout, tables, rest, seed, lists)
    order = [*lists[0], *(row for both in zip(*lists[1:], strict=True) for row in both)]
    return model, {(layer, head): job for layer, row in enumerate(order) for head, job in enumerate(row)}


class _Builder:
    """A builder of attention modules from jobs, which draws the resting positions once."""

    def __init__(self, layout: StreamSlots, tables: Tables, rest: str, seed: int, *, back: bool) -> None:
        self.layout, self.tables, self.back = layout, tables, back
        draw = torch.Generator().manual_seed(seed)
        P, V = layout.places, layout.vocabulary
        scattered = 1 + (torch.rand(P, generator=draw) * (torch.arange(P) - 1)).long().clamp(min=0)
        scattered[:2] = torch.tensor([0 if back else min(1, P - 1), 0])[: len(scattered)]  # an earlier position, not 0
        self.rest = scattered if rest == "scattered" else torch.zeros(P, dtype=torch.long)
        steps = -torch.randint(2, 17, (V,), generator=draw)
        self.away = steps if rest == "scattered" else torch.full((V,), -2 * P)  # position 0 is nearest to that

    def layers(self, jobs: Jobs) -> nn.ModuleList:
        """Return one module per layer."""
        writers = [job for row in jobs for job in row]
        return nn.ModuleList(
            MultiHeadAttention.from_heads(
                [
                    planted(job, self.layout, self.tables, rest=self.rest, share=1 / writers.count(job), away=self.away)
                    for job in row
                ]
            )
            for row in jobs
        )


class _Ids(nn.Module):
    """The base class of constructed models, with the embedding, the unembedding and sample texts."""

    def __init__(self, layout: StreamSlots, tables: Tables) -> None:
        super().__init__()
        self.tables = tables
        self.embed = nn.Embedding(layout.vocabulary, layout.width)
        self.place = nn.Embedding(layout.places, layout.width)
        self.unembed = nn.Linear(layout.width, layout.vocabulary, bias=False)
        with torch.no_grad():
            self.embed.weight.zero_()[torch.arange(layout.vocabulary), layout.block("token")] = 1
            self.place.weight.zero_()[torch.arange(layout.places), layout.block("place")] = 1
            self.place.weight[:, layout.one] = 1
        self.unembed.weight = self.embed.weight
        self.config = SimpleNamespace(
            vocab_size=layout.vocabulary,
            max_position_embeddings=layout.places,
            bos_token_id=tables.opener,
            eos_token_id=tables.closer,
            decoder_start_token_id=tables.opener,
        )

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the token embedding, whose rows are one-hot."""
        return self.embed

    def get_output_embeddings(self) -> nn.Linear:
        """Return the unembedding, which shares the weight of the token embedding."""
        return self.unembed

    def embedded(self, ids: Tensor) -> Tensor:
        """Embed ids (B, T) as (B, T, width): token, position and the constant."""
        if ids.shape[1] > self.place.num_embeddings:
            raise ValueError(
                f"the text has {ids.shape[1]} tokens, but the model has {self.place.num_embeddings} places; build it "
                "with more: places=..."
            )
        return self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))

    def sample(self, length: int, *, seed: int = 0) -> Int[Tensor, "1 T"]:
        """Return a random text: the opener, then ids of which one in eight is a delimiter; never the closer or 0."""
        check_counts(1, self.place.num_embeddings, length=length)
        check_counts(0, MOST_SEED, seed=seed)
        apart = {0, self.tables.opener, self.tables.closer, *self.tables.delimiters}
        among = torch.tensor([i for i in range(self.embed.num_embeddings) if i not in apart])
        marks = torch.tensor(self.tables.delimiters or among.tolist())
        draw = torch.Generator().manual_seed(seed)
        words, stops = (some[torch.randint(len(some), (1, length), generator=draw)] for some in (among, marks))
        ids = torch.where(torch.rand(1, length, generator=draw) < 1 / 8, stops, words)
        ids[0, 0] = self.tables.opener
        return ids


class Constructed(_Ids):
    """A decoder or an encoder: ``model(ids)`` adds each layer's attention to the residual stream, and returns logits.

    Build one with `constructed`. `layers` are `headwise.MultiHeadAttention` modules, `mask` is their mask, `tables` and
    `jobs` are those of the heads; `config` uses the names of transformers' configs.
    """

    def __init__(self, build: _Builder, jobs: Jobs) -> None:
        super().__init__(build.layout, build.tables)
        self.jobs = jobs
        self.mask: Mask | None = causal() if build.back else None
        self.layers = build.layers(jobs)

    def forward(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T N"]:
        """Return logits (B, T, vocabulary) of ids (B, T)."""
        x = self.embedded(ids)
        for layer in self.layers:
            x = x + layer(x, mask=self.mask)
        return self.unembed(x)

    def sample(self, length: int, *, seed: int = 0) -> Int[Tensor, "1 T"]:
        """Return a random text that begins with the opener; a text for an encoder ends with the closer."""
        ids = super().sample(length, seed=seed)
        if self.mask is None and length > 1:
            ids[0, -1] = self.tables.closer
        return ids

    def targets(self, layer: int, head: int, ids: Int[Tensor, " T"]) -> Tensor:
        """Return the target keys of a head, (T, T) bool: see `headwise.testing.constructed.targets`."""
        check_counts(0, len(self.jobs) - 1, layer=layer)
        check_counts(0, len(self.jobs[layer]) - 1, head=head)
        return targets(self.jobs[layer][head], ids, tables=self.tables, causal=self.mask is not None)


class ConstructedPair(_Ids):
    """An encoder-decoder: ``model(ids, decoder_input_ids)``. Build one with `constructed_pair`."""

    def __init__(self, layout: StreamSlots, tables: Tables, rest: str, seed: int, jobs: Sequence[Jobs]) -> None:
        super().__init__(layout, tables)
        self.jobs = jobs
        ahead, back = (_Builder(layout, tables, rest, seed, back=back) for back in (False, True))
        self.encoder, self.decoder, self.cross = ahead.layers(jobs[0]), back.layers(jobs[1]), ahead.layers(jobs[2])

    def forward(self, ids: Int[Tensor, "B S"], decoder_input_ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T N"]:
        """Return logits (B, T, vocabulary) of the decoder's ids (B, T), with the encoder's ids (B, S)."""
        memory = self.embedded(ids)
        for layer in self.encoder:
            memory = memory + layer(memory)
        x = self.embedded(decoder_input_ids)
        for own, cross in zip(self.decoder, self.cross, strict=True):
            x = x + own(x, mask=causal())
            x = x + cross(x, memory)
        return self.unembed(x)


def _check_sizes(vocabulary: object, places: object, tables: object, rest: object, seed: object) -> None:
    """Check the common arguments of the builders; raise TypeError or ValueError."""
    check_counts(1, vocabulary=vocabulary, places=places)
    check_counts(0, MOST_SEED, seed=seed)
    if tables is not None and not isinstance(tables, Tables):
        raise TypeError(f"tables is a headwise.testing.constructed.Tables or None; got {shown(tables)}")
    if not isinstance(rest, str) or rest not in ("first", "scattered"):
        raise ValueError(f"rest is 'first' or 'scattered', got {shown(rest)}")


def _as_jobs(name: str, layers: object) -> Jobs:
    """Return the lists of jobs, one per layer, as tuples."""
    rule = f"{name} is a list of jobs for each layer, such as [['self', 'broad']]"
    if not isinstance(layers, (list, tuple)):
        raise TypeError(f"{rule}; got {shown(layers)}")
    if not layers or not all(isinstance(row, (list, tuple)) and row for row in layers):
        raise ValueError(f"{rule}; got {shown(layers)}")
    return tuple(tuple(row) for row in layers)


def _check_jobs(jobs: Jobs, tables: Tables, vocabulary: int, *, back: bool, among: Sequence[str] = JOBS) -> None:
    """Check that every job is known, is possible in this model, and has its table and the lower heads that it needs."""
    for layer, row in enumerate(jobs):
        below = {job for lower in jobs[:layer] for job in lower}
        for job in row:
            if not isinstance(job, str) or not is_job(job, among):
                raise ValueError(f"a job is one of {', '.join(among)}; got {shown(job)}")
            if not back and job in (*NEEDS, *NEEDS.values()) and job != "previous-token":
                raise ValueError(
                    f"{job!r} attends only to earlier tokens, so it needs a decoder; build one with kind='decoder'"
                )
            if job in NEEDS and NEEDS[job] not in below:
                raise ValueError(
                    f"{job!r} in layer {layer} reads the output of a {NEEDS[job]!r} head; give a lower layer "
                    "such a head"
                )
            if job in COPIES and layer < len(jobs) - 1:
                raise ValueError(
                    f"{job!r} in layer {layer} writes tokens, which higher layers would take for the text; put it "
                    f"in the last layer, {len(jobs) - 1}"
                )
            if job in BY_TABLE and getattr(tables, BY_TABLE[job]) in ((), {}):
                raise ValueError(f"{job!r} looks up Tables.{BY_TABLE[job]}, which is empty; fill it")
    ids = [tables.opener, tables.closer, *tables.delimiters, *tables.names, *tables.needles, *tables.offsets]
    ids += [i for table in (tables.heads, tables.antecedents) for pair in table.items() for i in pair]
    wrong = [i for i in (*ids, *tables.classes) if not 0 <= i < vocabulary]
    if wrong:
        raise ValueError(
            f"ids of this model are 0 to {vocabulary - 1}; the tables contain {wrong[0]}; give a larger vocabulary"
        )


def _layout(jobs: Jobs, vocabulary: int, places: int) -> StreamSlots:
    """Return the residual stream with the blocks that the jobs read, and one block for outputs that are not read."""
    needed = {NEEDS[job] for row in jobs for job in row if job in NEEDS}
    return StreamSlots(vocabulary, places, (*(block for job, block in WRITES.items() if job in needed), "seen"))


def _draw_tables(vocabulary: int, back: bool, seed: int) -> Tables:
    """Draw random tables, with disjoint ids where needed: 1 is the opener, 2 the closer, 3 and 4 are delimiters."""
    if vocabulary < LEAST:
        raise ValueError(
            f"tables are drawn from at least {LEAST} ids, got vocabulary={vocabulary}; give tables=Tables(...)"
        )
    ids = (torch.randperm(vocabulary - 5, generator=torch.Generator().manual_seed(seed)) + 5).tolist()
    steps = (-2, -3, -5) if back else (-3, 2, 4)
    part = len(ids) // 6
    return Tables(
        delimiters=(3, 4),
        names=tuple(ids[:part]),
        needles=tuple(ids[part : part + max(2, part // 2)]),
        offsets={i: steps[n % 3] for n, i in enumerate(ids[: 3 * part])},
        heads=dict(zip(ids[: 2 * part], ids[2 * part : 4 * part], strict=True)),
        antecedents=dict(zip(ids[4 * part : 5 * part], ids[5 * part : 6 * part], strict=True)),
        classes={i: n % 5 for n, i in enumerate(ids)},
    )
