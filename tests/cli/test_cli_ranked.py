"""`headwise prune` ranks heads on a picture, a sound, or a text and its target; what their loss is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import test_cli_media
import torch
import transformers
from command_line import CliRunner
from hf_folders import quiet
from seen_folders import SIZES

from headwise import cli, hf, look, reshape
from headwise.cli.options import media
from headwise.look.interventions import losses as reading

pytestmark = pytest.mark.unchecked
folder, trusted = test_cli_media.folder, test_cli_media.trusted  # fixtures


@pytest.fixture(scope="module")
def classifier(folder: Path) -> str:
    """The model of pictures with a head that tells five classes."""
    torch.manual_seed(1)
    config = transformers.ViTConfig(**SIZES, image_size=20, patch_size=4, num_labels=5)
    quiet(lambda: transformers.ViTForImageClassification(config).save_pretrained(folder / "classifier"))
    settings = (folder / "vit" / "preprocessor_config.json").read_bytes()
    (folder / "classifier" / "preprocessor_config.json").write_bytes(settings)
    return str(folder / "classifier")


def least(name: str, by: str, **read: Any) -> dict[str, list[int]]:
    """The head of each layer that matters least, from the functions of the library."""
    loaded = hf.load(name, any_input=True)
    values = hf.prepared(loaded, **read).values
    if by == "redundancy":
        twins = look.redundancy(loaded.model, values).heads
        scores = reshape.by_twins(((t.layer, t.head), t.output, t.output_of) for t in twins)
    else:
        scores = look.importance(loaded.model, values, by=by).scores(by)
    with hf.checkpoint(Path(name)) as source:
        plan = reshape.plan_prune(source, keep_fraction=0.67, scores=reshape.by_call(scores), zero=True)
    assert all(len(heads) == 1 for heads in plan.gone.values())
    return plan.gone


def prune(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli.app, ["prune", *arguments, "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_heads_are_ranked_on_a_picture_a_sound_and_a_target(folder: Path, classifier: str) -> None:
    image, sound = media.read_image(str(folder / "p.png")), media.read_sound(str(folder / "s.wav"))
    words = {"text": "the cat sat on the mat", "target": "the dog lay by the door"}
    cases: list[tuple[str, str, list[str], str, dict[str, Any]]] = [
        (classifier, "importance", ["--image", f"{folder}/p.png"], "gradient", {"image": image}),
        (classifier, "ablation", ["--image", f"{folder}/p.png"], "zero", {"image": image}),
        ("vit", "redundancy", ["--image", f"{folder}/p.png"], "redundancy", {"image": image}),
        ("whisper", "importance", ["--audio", f"{folder}/s.wav"], "gradient", {"sound": sound}),
        ("t5", "importance", ["--text", words["text"], "--target", words["target"]], "gradient", words),
    ]
    for name, by, options, criterion, read in cases:
        report = prune(str(folder / name), "--by", by, "--keep-fraction", "0.67", "--zero", "--dry-run", *options)
        assert report["gone"] == least(str(folder / name), criterion, **read), (name, by)


def test_what_is_lost_is_the_next_word_or_what_the_model_says_itself(folder: Path, classifier: str) -> None:
    loaded = hf.load(folder / "t5", any_input=True)
    values = hf.prepared(loaded, "the cat sat on the mat", target="the dog lay by the door").values
    result = look.importance(loaded.model, values, by="zero")
    said, target = loaded.model(**values).logits.detach()[0, :-1], values["decoder_input_ids"][0, 1:]
    assert result.loss == pytest.approx(float(torch.nn.functional.cross_entropy(said, target)), rel=1e-5)
    assert result.tokens == values["input_ids"].shape[1] and len(result.heads) == 9
    loaded = hf.load(classifier, any_input=True)
    values = hf.prepared(loaded, image=media.read_image(str(folder / "p.png"))).values
    said = loaded.model(**values).logits.detach()
    expected = float(torch.nn.functional.cross_entropy(said, said.argmax(-1)))
    assert look.importance(loaded.model, values).loss == pytest.approx(expected, rel=1e-5)
    patches = {"pixel_values": torch.zeros(6, 5)}  # as Qwen2-VL has them: rows are patches, and copies none
    assert reading.Reading((), torch.zeros(1, 1), call=values).many and not reading.Reading((), said, call=patches).many


def test_an_encoder_decoder_is_pruned_and_reconstructed_on_a_text(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the cat sat on the mat and the dog lay by the door " * 40)
    wish = ["--keep-fraction", "0.67", "--file", str(tmp_path / "text"), "--reconstruct", "--dry-run"]
    report = prune(str(folder / "t5"), *wish)
    assert set(report["gone"]) == {"encoder.0", "0", "cross.0"} and 0 < report["losses"]["recovered"] < 99


def test_what_heads_cannot_be_ranked_on_is_told_in_one_line(folder: Path) -> None:
    picture = ["--image", f"{folder}/p.png"]
    cases: list[tuple[str, list[str], str]] = [
        ("vit", [], "reads 'pixel_values'; give --image FILE"),
        ("whisper", [], "reads 'input_features'; give --audio FILE"),
        ("vit", picture, "what ViTModel gives has no logits"),
        ("bert", picture, "does not read a picture"),
        ("t5", ["--target", " "], "--target: the text is empty"),
        (
            "vit",
            [*picture, "--reconstruct", "--text", "a b"],
            "--reconstruct works only with texts; give it without --image",
        ),
        ("vit", [*picture, "--corpus", "."], "--corpus works only with texts; give it without --image"),
    ]
    for name, options, text in cases:
        wish = ["--keep-fraction", "0.67", "--zero", "--dry-run"]
        result = CliRunner().invoke(cli.app, ["prune", f"{folder}/{name}", *wish, *options])
        assert result.exit_code == 2 and text in result.output, (name, options, result.output)
        assert result.output.startswith("headwise: ") and result.output.count("\n") == 1
