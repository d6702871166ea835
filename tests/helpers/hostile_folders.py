"""Checkpoint folders that lie, break, point elsewhere or would run code: families of changes to a whole one.

A case is a name, a change, and what the error must say. The change gets the folder, and a secret file outside of it.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from checkpoint_folders import INDEX, SHARDS
from hostile import PAYLOADS
from hostile_headers import Case, Change, Q, files_of_bytes, headers

ONE = "model.safetensors"


class Bomb:
    """A pickle that makes a folder when it is opened."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


# -- config.json ------------------------------------------------------------------------------------------------------


def text_of_config(text: str | bytes) -> Change:
    raw = text if isinstance(text, bytes) else text.encode()
    return lambda folder, _: (folder / "config.json").write_bytes(raw) and None


def fields(**values: Any) -> Change:
    def change(folder: Path, _: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def broken_json() -> Iterator[Case]:
    whole = '{"model_type": "llama", "hidden_size": 12}'
    for name, text, why in (
        ("nothing", "", "not valid JSON"),
        ("half", whole[:-9], "not valid JSON"),
        ("two", whole + whole, "not valid JSON"),
        ("comment", "// x\n" + whole, "not valid JSON"),
        ("single quotes", whole.replace('"', "'"), "not valid JSON"),
        ("list", f"[{whole}]", "contains a JSON list, and an object is needed"),
        ("text", '"llama"', "contains a JSON str"),
        ("number", "3", "contains a JSON int"),
        ("null", "null", "contains a JSON NoneType"),
        ("true", "true", "contains a JSON bool"),
        ("NaN", whole.replace("12", "NaN"), "NaN is not a number"),
        ("-Infinity", whole.replace("12", "-Infinity"), "-Infinity is not a number"),
        ("5000 digits", whole.replace("12", "9" * 5000), "not valid JSON"),
        ("twice", whole.replace('"hidden_size"', '"model_type"'), "the key 'model_type' occurs twice"),
        ("deep lists", "[" * 200_000, "nested too deeply"),
        ("deep tables", '{"a":' * 200_000, "nested too deeply"),
        ("large", '{"a": "' + "x" * (1 << 20) + '"}', "bytes, at most 1048576 are read"),
        ("UTF-16", whole.encode("utf-16"), "not valid JSON"),
        ("Latin-1", b'{"model_type": "\xe9"}', "not valid JSON"),
        ("a byte order mark", b"\xef\xbb\xbf" + whole.encode(), "not valid JSON"),
        ("zeros", bytes(4096), "not valid JSON"),
        ("a pickle", pickle.dumps({"model_type": "llama"}), "not valid JSON"),
        ("an ELF", b"\x7fELF" + bytes(99), "not valid JSON"),
    ):
        yield name, text_of_config(text), why


def lying_configs() -> Iterator[Case]:
    for value in (None, 3, True, [], ["llama"], {}, {"x": "llama"}, ""):
        yield f"model_type {value!r}", fields(model_type=value), "and a name is needed"
    for value in ("evil", "Llama", "llama ", "../llama", "os.system", "x" * 9999, *PAYLOADS[:3], "\x1b[2J", "\ud800"):
        yield f"model_type {value[:20]!r}", fields(model_type=value), "knows no model_type"
    for key in (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_hidden_layers",
        "vocab_size",
    ):
        for value in (0, -1, True, 2.0, "4", 10**30, [3, 0], {"a": 1}):
            yield f"{key} {value!r}", fields(**{key: value}), f"{key} is "
    for value in ({}, [], {"quant_method": "gptq"}, "x"):
        yield f"quantization_config {value!r}", fields(quantization_config=value), "a quantised checkpoint"
    for key in ("dtype", "torch_dtype", "transformers_version"):
        for value in ("float32; import os", "\x1b[31m", "", "x" * 99):
            yield f"{key} {value[:9]!r}", fields(**{key: value}), f"{key} is "
    nested = {"model_type": "evil", "auto_map": {"AutoModel": "evil.Model"}}
    yield (
        "a model inside",
        fields(model_type="gemma3", text_config={}, vision_config=nested),
        "knows no model_type 'evil'",
    )


# -- files that are none, and links -----------------------------------------------------------------------------------


def bound_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # an address has at most 107 letters
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # endless zeros
    except PermissionError:
        path.symlink_to("/dev/zero")


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "folder": lambda path, _: path.mkdir(),
    "pipe": lambda path, _: os.mkfifo(path),
    "socket": lambda path, _: bound_socket(path),
    "device": lambda path, _: device(path),
    "link to a device": lambda path, _: path.symlink_to("/dev/zero"),
    "link outside": lambda path, secret: path.symlink_to(secret),
    "link up": lambda path, secret: path.symlink_to(Path("..", secret.name)),
    "link to nothing": lambda path, _: path.symlink_to("gone"),
    "link to itself": lambda path, _: path.symlink_to(path.name),
    "link into another's blobs": lambda path, secret: path.symlink_to(secret.parent / "blobs" / "secret"),
}
FILES = ("config.json", ONE, INDEX, SHARDS[1], "tokenizer.json", "tokenizer_config.json", "LICENSE")


def no_files() -> Iterator[Case]:
    def change(name: str, kind: str) -> Change:
        def replace(folder: Path, secret: Path) -> None:
            path = folder / name
            path.unlink(missing_ok=True)
            if name == ONE:  # else the index is too many
                (folder / INDEX).unlink()
            KINDS[kind](path, secret)

        return replace

    for name in FILES:
        for kind in KINDS:
            yield f"{name}: {kind}", change(name, kind), name


def missing() -> Iterator[Case]:
    def gone(*names: str) -> Change:
        return lambda folder, _: [(folder / name).unlink() for name in names] and None

    yield "no config", gone("config.json"), "no config.json"
    yield "no index", gone(INDEX), "no model.safetensors and no model.safetensors.index.json"
    for shard in SHARDS:
        yield f"no {shard}", gone(shard), f"the weights file {shard!r} is missing"
    yield "nothing", gone("config.json", INDEX, *SHARDS), "no config.json"

    def pickled(name: str) -> Change:
        def change(folder: Path, _: Path) -> None:
            (folder / INDEX).unlink()
            (folder / name).write_bytes(pickle.dumps(Bomb(folder / "it_ran")))

        return change

    for name in ("pytorch_model.bin", "model.pt", "model.pth", "x.ckpt", "x.pkl", "flax_model.msgpack", "tf_model.h5"):
        yield f"weights in {name}", pickled(name), f"the weights are in {name!r} only"
    for name in (ONE, SHARDS[0]):
        blow = pickled(name)
        if name == ONE:
            yield "a pickle by the name of safetensors", blow, "no safetensors file"

    def adapter(folder: Path, _: Path) -> None:
        (folder / "adapter_config.json").write_text("{}")

    yield "an adapter beside", adapter, "holds an adapter beside the model; merge it first"


# -- the index --------------------------------------------------------------------------------------------------------


def indices() -> Iterator[Case]:
    def table(edit: Callable[[dict[str, Any]], Any]) -> Change:
        def change(folder: Path, _: Path) -> None:
            weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
            edited = edit(weight_map)
            (folder / INDEX).write_text(json.dumps({"weight_map": weight_map if edited is None else edited}))

        return change

    plain = "where a plain *.safetensors name belongs"
    for name in (
        "../secret.safetensors", "/etc/passwd", "/etc/x.safetensors", ".hidden.safetensors", "x.bin", "a\0.safetensors",
        "", "..", "a/b.safetensors", "./" + SHARDS[0], "x.safetensors\n", "\u0430.safetensors", " .safetensors",
        "C:\\x.safetensors", "http://example.invalid/x.safetensors", "x.safetensors.py", *PAYLOADS[:2],
    ):  # fmt: skip
        yield f"a shard {name[:30]!r}", table(lambda t, name=name: t.update(more=name)), plain  # type: ignore[misc]
    long = "x" * 300 + ".safetensors"
    yield "a shard of 312 letters", table(lambda t: t.update(more=long)), "is missing; download it anew"
    yield "a shard too few", table(lambda t: t.update(more="gone.safetensors")), "'gone.safetensors' is missing"
    number = "names 502 weights files, at most 500 are read"
    yield "500 shards more", table(lambda t: t.update({f"x{i}": f"{i}.safetensors" for i in range(500)})), number
    unnamed = f"does not name the tensor {Q!r}"
    yield "a tensor that it does not name", table(lambda t: t.pop(Q) and None), unnamed
    elsewhere = f"{Q!r} should be in {SHARDS[1]!r}, and is not"
    yield "a tensor in the other file", table(lambda t: t.update({Q: SHARDS[1]})), elsewhere
    nowhere = f"'model.more' should be in {SHARDS[0]!r}, and is not"
    yield "a tensor in no file", table(lambda t: t.update({"model.more": SHARDS[0]})), nowhere
    for value in ([], {}, "x", 3, None, {"x": 3}, {"x": [SHARDS[0]]}, {"x": None}):
        yield f"weight_map {value!r}", table(lambda _, value=value: _Null if value is None else value), "no weight_map"  # type: ignore[misc]

    def stray(name: str) -> Change:
        return lambda folder, _: (folder / name).write_bytes((folder / SHARDS[0]).read_bytes()) and None

    yield "a third shard", stray("model-00003-of-00003.safetensors"), "belongs to no index; remove it"
    yield "a shard of another set", stray("model-00001-of-00003.safetensors"), "belongs to no index; remove it"
    yield "a whole file beside", stray(ONE), "holds both model.safetensors and model.safetensors.index.json"

    def of(total: str) -> Change:
        def change(folder: Path, _: Path) -> None:
            text = (folder / INDEX).read_text()
            for i in (1, 2):
                (folder / f"model-0000{i}-of-00002.safetensors").rename(
                    folder / f"model-0000{i}-of-{total}.safetensors"
                )
            (folder / INDEX).write_text(text.replace("of-00002", f"of-{total}"))

        return change

    for total in ("00003", "99999"):
        few = f"names no 'model-00003-of-{total}.safetensors', so tensors are missing"
        yield f"two shards of {total}", of(total), few

    def twice(folder: Path, _: Path) -> None:
        (folder / SHARDS[1]).write_bytes((folder / SHARDS[0]).read_bytes())

    yield "the same shard twice", twice, "stands in two files"


_Null: list[Any] = []


# -- files beside -----------------------------------------------------------------------------------------------------


def files_beside() -> Iterator[Case]:
    def holding(name: str, text: str) -> Change:
        return lambda folder, _: (folder / name).write_text(text) and None

    def long(name: str) -> Change:
        return lambda folder, _: os.truncate(folder / name, 1 << 40)

    for name in ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "processor_config.json"):
        for text, why in (
            ("{", "not valid JSON"),
            ("[]", "contains a JSON list"),
            ('{"a": NaN}', "NaN is not a number"),
            ('{"auto_map": 1, "auto_map": 2}', "occurs twice"),
            ('{"a":' * 99_999, "nested too deeply"),
        ):
            yield f"{name}: {text[:20]}", holding(name, text), why
    yield "a vast tokenizer_config.json", long("tokenizer_config.json"), "bytes, at most 16777216 are read"
    yield "a vast tokenizer.json", long("tokenizer.json"), "bytes, at most 268435456 are read"
    yield "a vast config.json", long("config.json"), "bytes, at most 1048576 are read"
    yield "a vast index", long(INDEX), "bytes, at most 33554432 are read"


FAMILIES: dict[str, list[Case]] = {
    "config.json is broken": [*broken_json()],
    "config.json lies": [*lying_configs()],
    "files that are none": [*no_files()],
    "files that are missing": [*missing()],
    "the index lies": [*indices()],
    "no safetensors": [*files_of_bytes()],
    "headers lie": [*headers()],
    "files beside": [*files_beside()],
}
