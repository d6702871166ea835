"""What several calls of `headwise.reshape` take, and how each refuses anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headwise import reshape
from headwise.reshape.arguments import check_rows, check_writing
from headwise.reshape.write.verify import Proof

pytestmark = pytest.mark.unchecked
IDS = torch.arange(6)[None]


@pytest.mark.parametrize(
    ("rows", "kind", "text"),
    [
        (IDS, TypeError, "rows are a list of tensors of ids"),
        ("rows", TypeError, "rows are a list of tensors of ids"),
        (3, TypeError, "rows are a list of tensors of ids"),
        ([IDS, [1, 2]], TypeError, "each of rows"),
        ([IDS, IDS[0]], ValueError, r"whole numbers; got torch.int64 \(6,\)"),
        ([IDS, IDS[None]], ValueError, r"whole numbers; got torch.int64 \(1, 1, 6\)"),
        ([IDS, IDS.float()], ValueError, r"whole numbers; got torch.float32 \(1, 6\)"),
        ([IDS, IDS[:, :0]], ValueError, r"whole numbers; got torch.int64 \(1, 0\)"),
        ([IDS], ValueError, "rows are 2 at least, some to fit to and some to check by; got 1"),
    ],
)
def test_rows_of_ids(rows: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        check_rows(rows, 2)
    check_rows([IDS, IDS.int()], 2)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ((3, None), TypeError, "destination is a path, a string or a pathlib.Path; got 3"),
        (("", None), ValueError, "destination: the name is empty; give a file or a folder"),
        (("new", True), TypeError, "proof is a headwise.reshape.Proof, or None to prove nothing; got True"),
    ],
)
def test_where_to_write_and_what_to_prove(arguments: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        check_writing(*arguments)
    check_writing("new", Proof(), progress=None, remark=print)
    with pytest.raises(TypeError, match="remark is a function; got 3"):
        check_writing("new", None, progress=None, remark=3)


def test_what_is_no_plan_of_key_value_heads_is_not_written(tmp_path: Path) -> None:
    for wrong in ("plan", {"counts": {}}, None):
        with pytest.raises(TypeError, match=r"^plan is .*plan_regroup"):
            reshape.write_regrouped(wrong, tmp_path / "new")
    assert not list(tmp_path.iterdir())
