"""Models whose attention is in code of their own are switched, loaded, copied, compiled and exported as any other."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from hf_folders import written
from hf_models import token_ids
from hf_plain_models import PLAIN, plain
from hf_seam_models import BY_NAME, ROWS, SeamRow, model_of, names, run, truth_of

import headwise
import headwise.hf as hf
from headwise.hf.loading import model as loading
from headwise.hf.models import own_attention as seams
from headwise.hf.models.architectures import OUTSIDE, OWN_ATTENTION
from headwise.hf.models.own_attention import family_of
from headwise.hf.models.support import attention_modules
from headwise.hf.own_code import recorded_ops as steps


def test_a_model_is_switched_and_switched_back() -> None:
    for row in ROWS:
        model = truth_of(row)
        model = copy.deepcopy(model)
        before = run(model).logits
        with mock.patch.object(steps, "attend", side_effect=AssertionError("not on headwise")):
            assert torch.equal(run(model).logits, before)
        model.set_attn_implementation("headwise")
        assert model.config._attn_implementation == "headwise"
        if family_of(type(model)) is None:  # GPT-J and CodeGen are on the interface since transformers 5.24
            continue
        with mock.patch.object(steps, "attend", side_effect=KeyError("here")), pytest.raises(KeyError, match="here"):
            run(model)
        model.set_attn_implementation(row.truth)
        assert torch.equal(run(model).logits, before), "bit for bit"


def test_between_names_of_transformers_nothing_has_changed() -> None:
    """transformers does not switch such a model, and says so in its log."""
    model = copy.deepcopy(truth_of(BY_NAME["GPT-Neo"]))
    model.set_attn_implementation("flash_attention_2")
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("headwise")
    model.set_attn_implementation("flash_attention_2")
    assert model.config._attn_implementation == "headwise", "its modules were built for eager"


def test_a_class_is_prepared_once() -> None:
    model = model_of(BY_NAME["Bloom"])
    cls = type(next(iter(attention_modules(model).values())))
    before = cls.__call__
    copy.deepcopy(model).set_attn_implementation("headwise")
    assert cls.__call__ is before


def test_a_cache_of_the_longest_text_by_default() -> None:
    assert hf.make_cache(model_of(BY_NAME["MPT"])).layers[0].max_length == 61


@names(tuple(BY_NAME[name] for name in ("Bloom", "MPT", "Falcon ALiBi", "DeBERTa-v3", "MPNet")))
def test_a_folder_is_loaded_and_looked_at(row: SeamRow, tmp_path: Path) -> None:
    loaded = hf.load(written(row, tmp_path))  # type: ignore[arg-type]
    assert loaded.kind == row.kind and type(loaded.model).__name__ == row.model
    with torch.no_grad():
        assert torch.equal(loaded.model(token_ids()).logits, row.build()(token_ids()).logits)
    ids, _ = loaded.encode("a b, c. d! a b, c.")
    record = headwise.look.at(loaded.model, ids, repeats=None)
    assert len(record.heads) == 2 * row.heads and record.kind == row.kind


def test_kinds_of_plain_code() -> None:
    kinds = {
        "roformer": "encoder",
        "xlm": "encoder",
        "xlnet": "encoder",
        "xglm": "decoder",
        "gpt_neox_japanese": "decoder",
    }
    for family, kind in kinds.items():
        assert loading._kind(plain(family)[0]) == kind, family


def test_a_copy_and_a_pickle_run_as_the_model_does() -> None:
    for name in ("Bloom", "DeBERTa-v3"):
        model = model_of(BY_NAME[name])
        before = run(model).logits
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with hf.probe(twin) as seen:
                assert torch.equal(run(twin).logits, before)
            assert len(seen.calls) == 2
            twin.set_attn_implementation("eager")
            assert model.config._attn_implementation == "headwise"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's tracer does it
@pytest.mark.unchecked  # the compiler cannot trace the checker's wrapping at a first call
def test_compiled_code_calls_such_a_module_as_it_is() -> None:
    row = BY_NAME["Bloom"]
    model = SeamRow(row.name, row.model, row.config, row.sizes | dict(n_layer=1)).build("headwise")
    before = run(model).logits
    model.transformer.h[0].compile(backend="eager")
    torch.testing.assert_close(run(model).logits, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["MPT", "DeBERTa-v3"])
def test_such_a_model_is_exported(name: str) -> None:
    row = BY_NAME[name]
    layers = {"n_layers": 1} if name == "MPT" else {"num_hidden_layers": 1}
    model = SeamRow(row.name, row.model, row.config, row.sizes | layers).build("headwise")
    model.config.use_cache = False
    with torch.no_grad():
        exported = torch.export.export(model, (token_ids(),), strict=False).module()
        torch.testing.assert_close(exported(token_ids()).logits, model(token_ids()).logits, rtol=1e-5, atol=1e-5)


def test_the_table_names_what_transformers_has() -> None:
    """Every family is of the tests, is on no interface, and is not said to be outside."""
    tested = {family_of(type(truth_of(row))) for row in ROWS} | PLAIN.keys()
    assert tested - {None} == OWN_ATTENTION.keys()
    assert not OWN_ATTENTION.keys() & {name.replace("-", "_") for name in OUTSIDE}


def test_a_class_that_has_changed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later transformers may rename what a row names: then the model is outside, as any other."""
    known = (seams._family, seams._is_as_known)
    monkeypatch.setitem(OWN_ATTENTION, "rembert", {"RemBertSelfAttention": {"a_method_that_is_gone": "no_positions"}})
    for answers in known:
        answers.cache_clear()
    try:
        with pytest.raises(hf.ModelError, match=r"RemBertModel \(model_type 'rembert'\) is not on transformers'"):
            transformers.RemBertModel._from_config(transformers.RemBertConfig(), attn_implementation="headwise")
    finally:
        monkeypatch.undo()
        for answers in known:
            answers.cache_clear()
