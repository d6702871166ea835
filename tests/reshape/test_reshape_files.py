"""What a written folder says of its files, against the files; and pruning that takes no head away."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_folders import copied, made
from reshape_models import FAMILIES

import headwise.hf as hf
from headwise.reshape import prune_module
from headwise.reshape.write.manifest import MANIFEST, verify
from headwise.reshape.write.writer import Planned, write


def facts(folder: Path) -> dict[str, Any]:
    return {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in folder.iterdir()
        if path.name != MANIFEST
    }


@pytest.mark.parametrize("shards", [1, 2])
def test_the_manifest_lists_sizes_and_hashes_of_the_files_written_and_read(shards: int, tmp_path: Path) -> None:
    source, result = made(tmp_path / "source", shards=shards), tmp_path / "result"
    copied(source, result)
    table = json.loads((result / MANIFEST).read_text())
    read, written = facts(source), facts(result)
    assert table["files"] == written
    assert table["source"] == {name: read[name] for name in table["source"]} and len(table["source"]) >= shards


def test_files_of_more_than_one_piece(tmp_path: Path) -> None:
    """They are read in pieces of 8 MiB: what is written, what is read again, and a byte that changes in each piece."""
    source, result = made(tmp_path / "source"), tmp_path / "result"
    large = torch.arange(5 << 20, dtype=torch.int32)
    plan = [Planned("large", large.dtype, tuple(large.shape), lambda: large)]
    with hf.checkpoint(source) as opened:
        write(result, config=opened.config, tensors=plan, source=opened)
    assert verify(result).to_json() == (result / MANIFEST).read_bytes()
    table = json.loads((result / MANIFEST).read_text())
    assert table["files"] == facts(result)
    weights = result / "model.safetensors"
    size = weights.stat().st_size
    assert size > 20 << 20
    for place in (0, (8 << 20) - 1, 8 << 20, size - 1):
        with open(weights, "r+b") as file:
            file.seek(place)
            [byte] = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(ValueError, match="is not what was written"):
            verify(result)
        with open(weights, "r+b") as file:
            file.seek(place)
            file.write(bytes([byte]))
    verify(result)


@pytest.mark.parametrize("heads", [{}, {0: []}])
def test_to_take_no_head_away_changes_nothing(heads: dict[int, list[int]]) -> None:
    """In memory, of every family, also of those of which no head can go."""
    for name, row in FAMILIES.items():
        model = row.build()
        before = {key: part.clone() for key, part in model.state_dict().items()}
        config = model.config.to_dict()
        prune_module(model, heads, layouts=hf.layouts())
        after = model.state_dict()
        assert before.keys() == after.keys() and model.config.to_dict() == config, name
        assert all(torch.equal(before[key], after[key]) for key in before), name
