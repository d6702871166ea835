"""What the passes of a look read and tell: whether a text is read ahead, how random tokens end, which detail counts."""

from __future__ import annotations

import pytest
import torch
from hf_models import BY_NAME
from look_matrices import read_by

import headwise
from headwise import look
from headwise.look.collect.sums import LayerTally


def test_a_text_looks_ahead_where_any_of_its_first_and_its_middle_row_does() -> None:
    """Some models let the first tokens see themselves alone, or the last ones nothing."""
    for rows, kind in (({4}, "encoder"), ({0}, "encoder"), (set(), "decoder")):
        free = torch.tensor([i in rows for i in range(9)])[:, None]
        kept = torch.ones(9, 9).tril().bool() | free

        class One(torch.nn.Module):
            def __init__(self, kept: torch.Tensor = kept) -> None:
                super().__init__()
                self.embed, self.attend = torch.nn.Embedding(11, 12), headwise.MultiHeadAttention(12, 3)
                self.kept = kept

            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                return self.attend(self.embed(ids), mask=headwise.keep(self.kept))

        assert look.at(One(), [1, 2, 3, 5, 8, 1, 3, 4, 2], repeats=None).kind == kind, rows


@pytest.mark.parametrize(("name", "ends"), [("BERT", True), ("GPT-2", False), ("T5", False)])
def test_random_tokens_end_as_the_text_does_for_encoders_alone(name: str, ends: bool) -> None:
    """A decoder reads on, also one beside an encoder."""
    model = BY_NAME[name].build()
    with read_by(model) as passes:
        look.at(model, [3, 9, 5, 11, 4, 8, 7], delimiters=[7])
    assert [row[-1] == 7 for row in passes[1]["input_ids"].tolist()] == [ends] * 6


def test_texts_are_counted_in_the_title() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(11, 12), headwise.MultiHeadAttention(12, 3))
    for count, said in (
        (1, "1 layers x 3 heads, encoder, 3 tokens"),
        (2, "1 layers x 3 heads, encoder, 2 texts, 6 tokens"),
    ):
        assert look.over(model, [[1, 2, 3]] * count, repeats=None, name="mine").title == f"mine: {said}"


def test_of_details_that_as_many_queries_have_the_first_by_name_is_told() -> None:
    """Whatever the order of the texts."""
    for order in (("key 12", "key 10", "key 3"), ("key 3", "key 10", "key 12")):
        tally = LayerTally({"module": "a", "call": 0, "part": "decoder"}, 2)
        for detail in order:
            tally.tell("sink elsewhere", 1, detail, 2 if detail == "key 3" else 4)
        tally.tell("sink elsewhere", 1, "key 3", 1)
        assert tally.detail("sink elsewhere", 1) == "key 10" and tally.detail("sink elsewhere", 0) == ""
