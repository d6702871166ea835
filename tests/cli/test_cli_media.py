"""`headwise look --image`, `--audio`, `--target`, `--pair`: files of strangers, options that fit together, runs."""

from __future__ import annotations

import json
import shutil
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import typer
from command_line import CliRunner
from hf_models import VOCAB
from seen_folders import picture, wav, write_seen
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from headwise import cli, hf
from headwise.cli.options import media, texts
from headwise.extras import MissingExtra
from headwise.hf.loading import processor as senses
from headwise.hf.loading import tokenizer as tokens

pytestmark = pytest.mark.unchecked


def png_of(width: int, height: int) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    )


def at(sound: bytearray, place: int, value: bytes) -> bytes:
    sound[place : place + len(value)] = value
    return bytes(sound)


IMAGES: dict[str, tuple[bytes, str]] = {
    "cut": (picture()[:900], "cannot be read as a picture (image file is truncated"),
    "text": (b"hello", "cannot be read as a picture (cannot identify image file); give a complete PNG, JPEG"),
    "empty": (b"", "cannot be read as a picture"),
    "huge": (png_of(100_000, 100_000), "cannot be read as a picture (Image size (10000000000 pixels) exceeds"),
    "large": (png_of(8_000, 7_000), "8,000 x 7,000 pixels, and at most 50 million are supported; scale it down"),
    "a sound": (bytes(wav()), "cannot be read as a picture (cannot identify image file)"),
    "no numbers": (png_of(30, 30), "cannot be read as a picture"),
    "script": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be read as a picture"),
}
SOUNDS: dict[str, tuple[bytes, str]] = {
    "cut": (bytes(wav()[:40]), "cannot be read as sound (fmt chunk and/or data chunk missing); give a WAV file"),
    "a picture": (picture(), "cannot be read as sound (file does not start with RIFF id)"),
    "empty": (b"", "cannot be read as sound (EOFError)"),
    "float": (at(wav(), 20, b"\3"), "cannot be read as sound (unknown format: 3)"),
    "no channels": (at(wav(), 22, b"\0\0"), "cannot be read as sound (bad # of channels)"),
    "no rate": (at(wav(), 24, b"\0\0\0\0"), "the sample rate is 0 per second; convert the sound to 16,000"),
    "odd bits": (at(wav(), 34, b"\x29\0"), "cannot be read as sound (48 bits per sample)"),
    "short": (bytes(wav(b"\1\0" * 9)), "9 samples are too few; give at least 400"),
}


def test_hostile_files_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for read, cases in ((media.read_image, IMAGES), (media.read_sound, SOUNDS)):
        for name, (content, message) in cases.items():
            path = tmp_path / "f"
            path.write_bytes(content)
            with pytest.raises(typer.BadParameter) as caught:
                read(str(path))
            said = caught.value.message
            assert message in said and "\n" not in said and str(path) in said and " at 0x" not in said, (name, said)
        for path, message in (
            ("no/such", "cannot be read (No such file"),
            (str(tmp_path), "Is a directory"),
            ("a\0", "not a file name"),
        ):
            with pytest.raises(typer.BadParameter, match=message.replace("(", r"\(")):
                read(path)
    monkeypatch.setattr(texts, "MAX_FILE", 100)
    (tmp_path / "f").write_bytes(b"0" * 101)
    with pytest.raises(typer.BadParameter, match="more than 0 MB; give a smaller file"):
        media.read_image(str(tmp_path / "f"))


def test_sounds_of_any_width_are_read(tmp_path: Path) -> None:
    path = tmp_path / "s.wav"
    wanted = np.linspace(-1, 0.99, 800)
    forms = {
        1: np.round(wanted * 128 + 128).astype(np.uint8).tobytes(),
        2: np.round(wanted * 2**15).astype("<i2").tobytes(),
        3: b"".join(round(float(x) * 2**23).to_bytes(3, "little", signed=True) for x in wanted),
        4: np.round(wanted * 2**31).astype("<i4").tobytes(),
    }
    for width, data in forms.items():
        path.write_bytes(bytes(wav(data, width=width, rate=8000)))
        numbers, rate = media.read_sound(str(path))
        assert rate == 8000 and numbers.dtype == np.float32 and len(numbers) == 800
        assert np.abs(numbers - wanted).max() <= 0.51 * 2.0 ** (1 - 8 * width) + 1e-7
    left, right = np.full(500, 1000, "<i2"), np.full(500, 3000, "<i2")
    path.write_bytes(bytes(wav(np.stack([left, right], 1).tobytes(), channels=2))[:-3])  # cut within a frame
    numbers, _ = media.read_sound(str(path))
    assert len(numbers) == 499 and np.allclose(numbers, 2000 / 2**15)


def test_without_pillow_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"--image needs .*PIL.* pip install .*'headwise\[look\]'"):
        media.read_image("a.png")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["look", *arguments])


def test_options_that_do_not_fit_together() -> None:
    for beside in ("--image", "--audio", "--target", "--pair"):
        for other in (("--corpus", "x"), ("--sentences", "ours"), ("--needles",), ("--importance",)):
            result = run("m", beside, "a", *other)
            assert result.exit_code == 2 and f"{other[0]} needs a text; give it without" in result.output.replace(
                "\n", " "
            )
    for option in ("--target", "--pair"):
        assert "the text is empty" in run("m", option, " ").output


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizers here are ours: no process of their own is needed to try them."""
    monkeypatch.setattr(tokens, "_rehearse", lambda source, texts, **_: [len(text) for text in texts])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of pictures, sound and texts, a picture and a sound."""
    root = tmp_path_factory.mktemp("seen")
    write_seen(root)
    return root


def looked(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def parts(seen: dict[str, Any]) -> list[tuple[str, list[str]]]:
    kinds = [axis["kind"] for axis in seen["axes"]]
    return [(head["part"], [kinds[n] for n in head["over"]]) for head in seen["heads"] if head["head"] == 0]


def test_a_picture(folder: Path) -> None:
    seen = looked(f"{folder}/vit", "--image", f"{folder}/p.png")
    assert parts(seen) == [("encoder", ["picture", "picture"])] and seen["axes"][0]["grids"] == [[5, 5]]
    seen = looked(f"{folder}/clip", "--image", f"{folder}/p.png", "--text", "a b, c.")
    assert parts(seen) == [("encoder", ["picture"] * 2), ("decoder", ["text"] * 2)]
    assert "".join(seen["tokens"]) == "a b, c." and "induction" in seen["heads"][-1]["scores"]
    seen = looked(f"{folder}/llava", "--image", f"{folder}/p.png", "--text", "a b.")
    assert parts(seen)[1] == ("decoder", ["text and picture"] * 2)
    assert "".join(seen["tokens"]) == "\u25a2" * 25 + "a b." and "mass on the picture" in seen["heads"][-1]["extras"]


def test_a_sound(folder: Path) -> None:
    seen = looked(f"{folder}/wav2vec2", "--audio", f"{folder}/s.wav")
    assert parts(seen) == [("encoder", ["sound", "sound"])] and seen["axes"][0]["length"] == 19
    for target in (["--target", "a b."], []):
        seen = looked(f"{folder}/whisper", "--audio", f"{folder}/s.wav", *target)
        assert parts(seen) == [
            ("encoder", ["sound"] * 2), ("decoder", ["text"] * 2), ("cross", ["text", "sound"]),
        ]  # fmt: skip
        assert seen["tokens"][0] == "(start)" and (not target or "".join(seen["tokens"][1:]) == "a b.")


def test_ids_in_a_config_may_be_lists(folder: Path, tmp_path: Path) -> None:
    """Of some models several tokens end a text."""
    copy, sound = shutil.copytree(folder / "whisper", tmp_path / "whisper"), media.read_sound(f"{folder}/s.wav")
    start, first, *_ = (
        senses.prepared(hf.load(copy, any_input=True), sound=sound).values["decoder_input_ids"][0].tolist()
    )
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"eos_token_id": [1, first]}))
    ended = senses.prepared(hf.load(copy, any_input=True), sound=sound)
    assert ended.values["decoder_input_ids"].tolist() == [[start]]


def test_a_target_and_a_pair(folder: Path) -> None:
    seen = looked(f"{folder}/t5", "--text", "a b, c.", "--target", "d!")
    assert [part for part, _ in parts(seen)] == ["encoder", "decoder", "cross"]
    assert seen["axes"][1]["names"][0] == "(start)" and "".join(seen["axes"][1]["names"][1:]) == "d!"
    assert looked(f"{folder}/t5", "--text", "a b, c.")["axes"] == []
    seen = looked(f"{folder}/bert", "--text", "a b, c.", "--pair", "d! e?")
    assert "".join(seen["tokens"]) == "a b, c.d! e?" and {"first to second", "second to first"} <= set(
        seen["heads"][0]["scores"]
    )


@pytest.mark.parametrize("separator", [0, 1], ids=["a tokenizer that does not say", "one that says"])
def test_which_sentence_a_token_is_of(separator: int, folder: Path, tmp_path: Path) -> None:
    """A tokenizer whose types are all 0 does not say: then the second sentence's own tokens are of it."""
    other = shutil.copytree(folder / "bert", tmp_path / "other")
    made = Tokenizer.from_file(str(other / "tokenizer.json"))
    second = f"$B:{separator} [SEP]:{separator}"
    made.post_processor = TemplateProcessing(pair=f"$A:0 [SEP]:0 {second}", special_tokens=[("[SEP]", 1)])
    made.save(str(other / "tokenizer.json"))
    read = senses.prepared(hf.load(other, any_input=True), "a b, c.", pair="d! e?")
    types, names = read.values["token_type_ids"][0].tolist(), read.tokens["input_ids"]
    first = names.index("[SEP]") + 1
    assert types == [0] * first + [1] * (len(names) - first - 1) + [separator]


def test_what_a_model_does_not_read_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "r.wav").write_bytes(bytes(wav(rate=44_100)))
    (tmp_path / "l.wav").write_bytes(bytes(wav(b"\1\0" * 17_000)))
    image, sound = ("--image", f"{folder}/p.png"), ("--audio", f"{folder}/s.wav")
    other = shutil.copytree(folder / "wav2vec2", tmp_path / "other")
    shutil.copy(folder / "whisper" / "preprocessor_config.json", other)
    cases = [
        ((other, *sound), "(WhisperFeatureExtractor) makes 'input_features', which Wav2Vec2Model does not read"),
        (("vit",), "(ViTModel) reads 'pixel_values'; give --image FILE"),
        (("whisper", "--text", "a"), "reads 'input_features'; give --audio FILE"),
        (("t5", "--text", "a", "--pair", "b"), "does not read a second sentence; it takes input_ids"),
        (("vit", *image, "--text", "a"), "does not read a text; it takes pixel_values"),
        (("vit", *image, *sound), "does not read a sound"),
        (("bert", *image), "(BertModel) does not read a picture"),
        (("bert", "--target", "a"), "does not read a text of its decoder's own"),
        (("wav2vec2", "--audio", f"{tmp_path}/r.wav"), "44,100 numbers a second, and the model takes 16,000"),
        (("whisper", "--audio", f"{tmp_path}/l.wav"), "has 1.1 s, and the model hears 1 s; give a part"),
    ]  # fmt: skip
    for (name, *options), message in cases:
        result = run(str(folder / name), *options)
        assert result.exit_code == 2 and message in result.output, (name, result.output)
        assert result.output.startswith("headwise: ") and result.output.count("\n") == 1


def test_settings_beyond_sense_are_refused(folder: Path) -> None:
    path = folder / "vit" / "preprocessor_config.json"
    before = path.read_text()
    for change, message in (
        ({"size": {"height": 10**9, "width": 20}}, "height of size is 1000000000, beyond what makes sense"),
        ({"image_std": [0.0, 1, 1]}, "image_std is 0.0, beyond what makes sense"),
        ({"n_fft": 10**6}, "n_fft is 1000000, beyond what makes sense"),
        ({"size": {"shortest_edge": 10**6}}, "its processor makes pictures of size {'shortest_edge': 1000000}; give"),
        (None, "no preprocessor_config.json, which says how a picture or a sound becomes numbers"),
    ):
        path.unlink() if change is None else path.write_text(json.dumps(json.loads(before) | change))
        result = run(f"{folder}/vit", "--image", f"{folder}/p.png")
        assert result.exit_code == 2 and message in result.output, result.output
    path.write_text(before)


def test_pictures_are_resized_as_by_transformers_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers' class wants torchvision, headwise does the same by the same settings."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    image = media.read_image(f"{folder}/p.png").resize((37, 23))
    for processor in (
        ViTImageProcessorPil(size={"height": 20, "width": 24}),
        ViTImageProcessorPil(size={"height": 20, "width": 24}, resample=3, do_normalize=False),
        CLIPImageProcessorPil(size={"shortest_edge": 17}, crop_size={"height": 13, "width": 15}),
    ):
        wanted = processor(images=image, return_tensors="pt")["pixel_values"]
        ours = senses.resized(image, json.loads(processor.to_json_string()), "here")
        assert ours.shape == wanted.shape and torch.allclose(ours, wanted, atol=1e-5)
    loaded = hf.load(folder / "vit", any_input=True)
    wanted = hf.prepared(loaded, image=image).values["pixel_values"]

    def missing(*_: object, **__: object) -> None:
        raise ImportError("torchvision")

    monkeypatch.setattr(transformers.AutoImageProcessor, "from_pretrained", missing)
    assert torch.allclose(hf.prepared(loaded, image=image).values["pixel_values"], wanted, atol=1e-5)
    with pytest.raises(hf.ModelError, match="its processor makes pictures of size"):
        senses.resized(image, {"size": {"longest_edge": 7}}, "here")


def test_where_a_picture_stands_in_a_text(folder: Path) -> None:
    loaded = hf.load(folder / "llava", any_input=True)
    image = media.read_image(f"{folder}/p.png")
    first = hf.prepared(loaded, "a b", image=image).values["input_ids"][0].tolist()
    assert first[:25] == [VOCAB - 1] * 25 and VOCAB - 1 not in first[25:]
    loaded.tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    loaded.model.config.image_token_id = loaded.tokenizer.convert_tokens_to_ids("<image>")
    within = hf.prepared(loaded, "a<image> b", image=image)
    ids = within.values["input_ids"][0].tolist()
    assert [n for n, i in enumerate(ids) if i == loaded.model.config.image_token_id] == [*range(1, 26)]
    assert len(within.tokens["input_ids"]) == len(ids)


def test_what_a_decoder_says_itself_is_its_likeliest_word(folder: Path) -> None:
    loaded = hf.load(folder / "whisper", any_input=True)
    made = hf.prepared(loaded, sound=media.read_sound(f"{folder}/s.wav"))
    ids = made.values["decoder_input_ids"]
    with torch.no_grad():
        said = loaded.model(made.values["input_features"], decoder_input_ids=ids).logits.argmax(-1)
    assert ids[0, 1:].tolist() == said[0, :-1].tolist() and 1 < ids.shape[1] <= senses.MOST_SAID
    assert made.seconds == pytest.approx(1.0) and len(made.tokens["decoder_input_ids"]) == ids.shape[1]
