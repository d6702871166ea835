"""Safetensors files that lie: families of changes to one file of a whole checkpoint folder, for `hostile_folders`."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from checkpoint_folders import SHARDS
from hostile import PAYLOADS

Change = Callable[[Path, Path], None]
Case = tuple[str, Change, str]
"""A name, a change that gets the folder and a secret file outside of it, and what the error must say."""

Q = "model.layers.0.self_attn.q_proj.weight"


def with_header(edit: Callable[[dict[str, Any]], Any]) -> Change:
    """The header's table edited; what is returned takes its place."""

    def change(folder: Path, _: Path) -> None:
        path = folder / SHARDS[0]
        whole = path.read_bytes()
        length = struct.unpack("<Q", whole[:8])[0]
        table = json.loads(whole[8 : 8 + length])
        edited = edit(table)
        text = edited if isinstance(edited, str) else json.dumps(table if edited is None else edited)
        path.write_bytes(struct.pack("<Q", len(text.encode())) + text.encode() + whole[8 + length :])

    return change


def with_bytes(edit: Callable[[bytes], bytes]) -> Change:
    def change(folder: Path, _: Path) -> None:
        path = folder / SHARDS[0]
        path.write_bytes(edit(path.read_bytes()))

    return change


def files_of_bytes() -> Iterator[Case]:
    none, off = "no safetensors file", "the download broke off, or bytes were added"
    for name, edit, why in (
        ("nothing", lambda _: b"", none),
        ("7 bytes", lambda whole: whole[:7], none),
        ("8 bytes", lambda whole: whole[:8], none),
        ("no header", lambda whole: bytes(8) + whole[8:], none),
        ("a header of 2^63", lambda whole: struct.pack("<Q", 2**63) + whole[8:], none),
        ("a header of 2^64 - 1", lambda whole: b"\xff" * 8 + whole[8:], none),
        ("a header longer than the file", lambda whole: struct.pack("<Q", len(whole) - 7) + whole[8:], none),
        ("a header of big-endian length", lambda whole: whole[7::-1] + whole[8:], none),
        ("a header of spaces", lambda whole: struct.pack("<Q", 99) + b" " * 999, "not valid JSON"),
        ("a header of zeros", lambda whole: struct.pack("<Q", 99) + bytes(999), "not valid JSON"),
        ("the last byte off", lambda whole: whole[:-1], off),
        ("half", lambda whole: whole[: len(whole) // 2], ""),
        ("the data off", lambda whole: whole[: 8 + struct.unpack("<Q", whole[:8])[0]], off),
        ("a byte more", lambda whole: whole + b"\0", off),
        ("a zip behind", lambda whole: whole + b"PK\x03\x04" + bytes(99), off),
        ("a zip", lambda _: b"PK\x03\x04" + bytes(9999), none),
        ("a pickle", lambda _: pickle.dumps([1.0] * 99), none),
        ("GGUF", lambda _: b"GGUF\x03\0\0\0" + bytes(99), none),
    ):
        yield name, with_bytes(edit), why

    def sparse(folder: Path, _: Path) -> None:
        """Takes no room on the disk, and would in memory."""
        with open(folder / SHARDS[0], "wb") as file:
            file.write(struct.pack("<Q", 3 << 40))
            file.truncate(4 << 40)

    yield "a header of 3 TB that is there", sparse, none


def headers() -> Iterator[Case]:
    for name, edit, why in (
        ("a list", lambda _: "[1]", "contains a JSON list"),
        ("deep", lambda _: '{"a":' * 99_999, "nested too deeply"),
        ("a key twice", lambda t: json.dumps(t)[:-1] + f', "{Q}": {json.dumps(t[Q])}}}', "occurs twice"),
        ("metadata twice", lambda t: json.dumps(t)[:-1] + ', "__metadata__": {}}', "occurs twice"),
        ("a key twice inside", lambda t: json.dumps(t).replace('"shape"', '"dtype"', 1), "occurs twice"),
        ("metadata of numbers", lambda t: t.update(__metadata__={"format": 3}), "its metadata is no table of texts"),
        ("metadata as a list", lambda t: t.update(__metadata__=[]), "its metadata is no table of texts"),
        ("weights of TensorFlow", lambda t: t.update(__metadata__={"format": "tf"}), "written by 'tf', which stores"),
        ("weights of flax", lambda t: t.update(__metadata__={"format": "flax"}), "written by 'flax', which stores"),
        ("a tensor less", lambda t: t.pop(Q) and None, "begins behind bytes of no tensor"),
        ("an infinite shape", lambda t: json.dumps(t).replace("[53, 12]", "[Infinity]"), "Infinity is not a number"),
    ):
        yield name, with_header(edit), why
    for value in (None, 3, [], "F32", {}):
        yield f"an entry {value!r}", with_header(lambda t, value=value: t.update({Q: value})), "has no shape and dtype"  # type: ignore[misc]
    yield from of_one_tensor()


def of_one_tensor() -> Iterator[Case]:
    def part(**values: Any) -> Change:
        return with_header(lambda table: table[Q].update(values))

    for value in (None, 3, [], {}, True):
        yield f"dtype {value!r}", part(dtype=value), "has no shape and dtype"
    for value in ("F8_E4M3", "F8_E5M2", "F4", "E8M0", "C64", "U64", "f32", "", "x" * 999, *PAYLOADS[:1]):
        yield f"dtype {value[:20]!r}", part(dtype=value), "a quantised checkpoint; give the original"
    for value in (
        None,
        3,
        "12",
        {},
        [-1],
        [1.0],
        [True],
        ["12"],
        [[12]],
        [None],
        [2**49],
        [2**40] * 3,
        [0, 2**40, 2**40],
        [0, 2**63],
        [10**40],
        [1] * 17,
    ):
        yield f"shape {str(value)[:30]}", part(shape=value), "has no shape and dtype"
    for value in ([12, 14], [12, 12], [], [0], [0, 2**40], [2**40], [156, 2]):
        yield f"shape {value}", part(shape=value), "has 624 bytes, and "
    for value in (
        None,
        3,
        "0",
        {},
        [],
        [0],
        [0, 624, 0],
        [-1, 623],
        [0.0, 624.0],
        [False, True],
        [None, 624],
        [0, 2**63],
    ):
        yield f"offsets {value}", part(data_offsets=value), "has no data_offsets"
    for value in ([624, 0], [0, 623], [0, 2**60]):
        yield f"offsets {value}", part(data_offsets=value), "bytes, and "
    yield "offsets of another tensor", part(data_offsets=[0, 624]), "overlaps another"
    yield "offsets beyond the file", part(data_offsets=[10**9, 10**9 + 624]), "begins behind bytes of no tensor"
    for value in (
        "",
        "../../x",
        "/etc/passwd",
        "a b",
        "\u00e9",
        "x" * 256,
        "a\0b",
        *PAYLOADS[:3],
        "\x1b[2J",
        "\n",
        "\ud800",
    ):

        def renamed(table: dict[str, Any], value: str = value) -> None:
            table[value] = table.pop(Q)

        yield f"the name {value[:20]!r}", with_header(renamed), "is no name of a tensor"
