"""Good calls of what looks at heads, annotates text, and builds models of known heads, for `malformed_calls`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from malformed import PACKAGE, Call
from torch import Tensor

import headwise
from headwise import MultiHeadAttention, look
from headwise.look import annotate
from headwise.testing import constructed

CONLLU = "1\tIt\t_\tPRON\t_\t_\t2\tnsubj\t_\t_\n2\tworks\t_\tVERB\t_\t_\t0\troot\t_\t_\n"


def of(function: Callable[..., Any], /, **arguments: Any) -> Call:
    return function, arguments


PNG = b"\x89PNG\r\n\x1a\n"


class Reader(torch.nn.Module):
    """A model to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = torch.nn.Embedding(97, 12), MultiHeadAttention(12, 3)

    def forward(self, ids: Tensor) -> Any:
        return self.attend(self.embed(ids), mask=headwise.causal())


class Speaker(Reader):
    """A model that names the next token."""

    def forward(self, ids: Tensor) -> Any:
        return super().forward(ids) @ self.embed.weight.T


class Writer(Speaker):
    """A model whose heads add to what its unembedding reads."""

    def __init__(self) -> None:
        super().__init__()
        self.unembed = torch.nn.Linear(12, 97)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        return self.unembed(x + self.attend(x, mask=headwise.causal()))


IDS = [1, 2, 3, 5, 8, 13, 21, 34]


@functools.cache
def seen() -> look.Look:
    return look.at(Reader(), IDS, repeats=None)


def composed() -> look.Circuits:
    return look.Circuits("m", (look.Composition("k", (1, 0), (0, 2), 0.3, 0.1),), {"q": 1, "k": 1, "v": 1}, ())


@functools.cache
def patched() -> look.Patching:
    return look.patch(Speaker(), [2, *IDS[1:]], IDS, look.LogitDifference(5, 7))


@functools.cache
def worth() -> look.Importance:
    return look.importance(Speaker(), IDS)


@functools.cache
def circuits() -> look.Circuits:
    return look.circuits(Speaker(), IDS)


def documents(**arguments: Any) -> list[str]:
    """All of what is read one at a time."""
    return [*look.documents(**arguments)]


def step(done: int, total: int) -> None:
    """What is told of the work as it goes on."""


@functools.cache
def curve() -> look.Curve:
    return look.Curve("m", {"self": 0.5}, (look.Point.of(0, seen(), {"loss": 1.5}),))


def in_a_file(write: Callable[[str], object], path: str) -> str:
    """The path, after writing to it."""
    write(path)
    return path


def watch(**options: Any) -> look.Watch:
    return look.Watch(Reader(), IDS, every=1, repeats=None, **options)


def document() -> annotate.Document:
    return annotate.parse(CONLLU)[0]


def tokenized(text: str, return_offsets_mapping: bool) -> dict[str, Any]:
    return {"input_ids": [1, 2, 3], "offset_mapping": [(0, 0), (0, 2), (2, 8)]}


@functools.cache
def planted() -> constructed.Constructed:
    return constructed.constructed([["self"]], places=7)[0]


LOOK: dict[str, Callable[[], Call]] = {
    "look.at": lambda: of(
        look.at, model=Reader(), ids=IDS, tokens=list("abcdefgh"), delimiters=[2], name="m", map_size=2,
        full_maps=False, repeats=None, progress=lambda done, total: None,
    ),
    "look.at tensor": lambda: of(look.at, model=Reader(), ids=torch.tensor(IDS), repeats=None),
    "Repeats": lambda: of(look.Repeats, sequences=2, length=30, seed=1, vocabulary=[1, 2, 3, 4]),
    "look.at mapping": lambda: of(look.at, model=Reader(), ids={"input_ids": IDS}, repeats=None),
    "Axis": lambda: of(
        look.Axis, kind="picture", length=2, names=("a", "b"), cells=((0, 0, 0), (0, 0, 1)), grids=((1, 2),),
        apart={"[CLS]": (0,)}, label="x",
    ),
    "Axis.from_dict": lambda: of(look.Axis.from_dict, data=look.Axis("text", 3).to_dict()),
    "Picture": lambda: of(look.Picture, kind="picture", width=2, height=1, data=PNG, seconds=1.5),
    "Picture.from_dict": lambda: of(look.Picture.from_dict, data=look.Picture("picture", 2, 1, PNG).to_dict()),
    "HeadMap": lambda: of(look.HeadMap, rows=1, columns=2, data=b"ab"),
    "Look.from_dict": lambda: of(look.Look.from_dict, data=seen().to_dict()),
    "HeadRecord.from_dict": lambda: of(look.HeadRecord.from_dict, data=seen().to_dict()["heads"][0]),
    "Look.with_role": lambda: of(seen().with_role, name="self"),
    "Look.to_dict": lambda: of(seen().to_dict, maps=True),
    "Look.to_json": lambda: of(seen().to_json, maps=True, indent=1),
    "HeadRecord.value": lambda: of(seen().heads[0].value, name="self"),
    "Look.head": lambda: of(seen().head, layer=0, head=1),
    "HeadRecord.score": lambda: of(seen().heads[0].score, name="self"),
    "walk": lambda: of(
        look.walk, model=Reader(), ids=IDS, layer=0, head=1, query=-1, tokens=list("abcdefgh"), name="m"
    ),
    "look.write": lambda: of(look.write, what=seen(), path="written.json"),
    "read": lambda: of(look.read, path=in_a_file(lambda path: look.write(seen(), path), "read.json")),
    "compare": lambda: of(look.compare, a=seen(), b=seen(), kept={0: [0, 1, 2]}),
    "plot_importance": lambda: of(look.plot_importance, importance=worth()),
    "plot_formation": lambda: of(look.plot_formation, curve=curve(), roles=["self"]),
    "Curve.best": lambda: of(curve().best, role="self"),
    "Curve.from_dict": lambda: of(look.Curve.from_dict, data=curve().to_dict()),
    "read_curve": lambda: of(look.read_curve, path=in_a_file(lambda path: watch(path=path).step(0), "c.jsonl")),
    "Watch": lambda: of(
        look.Watch, model=Reader(), ids=IDS, every=3, share=0.1, path="watched.jsonl", delimiters=[2], repeats=None
    ),
    "Watch.step": lambda: of(watch().step, step=3, loss=1.5),
    "Watch.measure": lambda: of(watch().measure, step=3, loss=1.5),
    "over": lambda: of(
        look.over, model=Reader(), texts=[IDS, [5, 3, 2]], words=look.Vocabulary(special=frozenset({1})), name="m",
        batch=7, repeats=None, readings={}, state=None, progress=step,
    ),
    "over state": lambda: of(look.over, model=Reader(), texts=[IDS], repeats=None, state="over.state"),
    "documents": lambda: of(documents, path=str(PACKAGE / "look/annotate/sentences.conllu")),
    "needles": lambda: of(
        look.needles, ids=IDS, vocabulary=[55, 56, 57, 58], count=2, length=3, around=11, seed=1
    ),
    "Vocabulary.of": lambda: of(look.Vocabulary.of, names=["<s>", "a", "."], delimiters=[2], special=[0]),
    "Look.with_extras": lambda: of(seen().with_extras, worth=[[0.5, 0.25, -0.125]]),
    "importance": lambda: of(
        look.importance, model=Speaker(), ids=IDS, by=["gradient", "zero"],
        loss=lambda output, ids: output.float().mean((1, 2)), seed=1, name="m", progress=step,
    ),
    "importance masked": lambda: of(look.importance, model=Speaker(), ids=IDS, by="gradient", mask_id=7, seed=1),
    "Importance.scores": lambda: of(worth().scores, by="gradient"),
    "Importance.table": lambda: of(worth().table, most=2, by="gradient"),
    "ablate": lambda: of(
        look.ablate, model=Speaker(), ids=IDS, heads=[(0, 1)], by="mean",
        loss=lambda output, ids: output.float().mean((1, 2)), seed=1, name="m", progress=step,
    ),
    "ablate masked": lambda: of(look.ablate, model=Speaker(), ids=IDS, heads=[(0, 1)], mask_id=7, decode=str),
    "patch": lambda: of(
        look.patch, model=Speaker(), clean=IDS, corrupted=[2, *IDS[1:]], metric=look.LogitDifference(5, 7),
        heads=[(0, 1)], positions=True, decode=str, name="m", progress=step,
    ),
    "Patching.best": lambda: of(patched().best, most=2),
    "Patching.table": lambda: of(patched().table, most=2),
    "norm_weighted": lambda: of(look.norm_weighted, model=Speaker(), ids=IDS, name="m"),
    "norm_weighted_map": lambda: of(look.norm_weighted_map, model=Speaker(), ids=IDS, layer=0, head=1),
    "NormWeighted.scores": lambda: of(look.norm_weighted(Speaker(), IDS).scores, name="moved"),
    "NormWeighted.table": lambda: of(look.norm_weighted(Speaker(), IDS).table, most=2),
    "attribute": lambda: of(
        look.attribute, model=Writer(), ids=IDS, answer=5, wrong=7, decode=str, name="m"
    ),
    "Attribution.table": lambda: of(look.attribute(Writer(), IDS, 5, 7).table, most=2),
    "circuits": lambda: of(look.circuits, model=Speaker(), ids=IDS, most=2, name="m", progress=step),
    "Circuits.with_roles": lambda: of(circuits().with_roles, look=seen()),
    "Circuits.strongest": lambda: of(circuits().strongest, most=2),
    "Circuits.plot_circuits": lambda: of(circuits().plot_circuits, most=2),
    "Circuits.table": lambda: of(circuits().table, most=2),
    "Circuits.heads_table": lambda: of(circuits().heads_table, most=2),
    "Redundancy.pairs_table": lambda: of(look.redundancy(Speaker(), IDS).pairs_table, most=2),
    "redundancy": lambda: of(
        look.redundancy, model=Speaker(), ids=IDS, threshold=0.25, rows=5, name="m", progress=step
    ),
}  # fmt: skip
ANNOTATE: dict[str, Callable[[], Call]] = {
    "aligned": lambda: of(annotate.aligned, source=document().sentences[0], offsets=[[0, 2], [2, 8]]),
    "parse": lambda: of(annotate.parse, text=CONLLU, name="a text"),
    "annotate.read": lambda: of(annotate.read, path=str(PACKAGE / "look/annotate/sentences.conllu")),
    "passages": lambda: of(annotate.passages, documents=[document()], tokenizer=tokenized, length=40),
}
CONSTRUCTED: dict[str, Callable[[], Call]] = {
    "constructed": lambda: of(
        constructed.constructed, layers=[["self"]], kind="decoder", vocabulary=29, places=7,
        tables=constructed.Tables(), rest="first", seed=1,
    ),
    "constructed_pair": lambda: of(
        constructed.constructed_pair, encoder=[["self"]], decoder=[["self"]], cross=[["broad"]], places=7, seed=1
    ),
    "random_model": lambda: of(constructed.random_model, seed=1, places=7),
    "targets": lambda: of(
        constructed.targets, job="self", ids=torch.tensor([1, 2, 3]), tables=constructed.Tables(), causal=True
    ),
    "Constructed.sample": lambda: of(planted().sample, length=5, seed=1),
    "Constructed.targets": lambda: of(planted().targets, layer=0, head=0, ids=torch.tensor([1, 2, 3])),
}  # fmt: skip
