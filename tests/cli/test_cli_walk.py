"""`headwise trace MODEL`: one head of a model on a text, with its own numbers."""

from __future__ import annotations

import json

import pytest
from command_line import CliRunner

import headwise.hf
from headwise import cli, look, models

pytestmark = pytest.mark.unchecked


def test_the_command_walks_through_the_packaged_model() -> None:
    tiny = headwise.hf.load(models.tiny_path())
    ids, tokens = tiny.encode("The cat sat. The cat")
    wanted = look.walk(tiny.model, ids, layer=2, head=1, tokens=tokens, name="headwise tiny")
    run = CliRunner().invoke
    arguments = ["trace", "--text", "The cat sat. The cat", "--layer", "2", "--head", "1"]
    data = json.loads(run(cli.app, [*arguments, "--json"]).stdout)
    assert data == json.loads(json.dumps(wanted.to_dict()))
    shown = run(cli.app, arguments)
    assert shown.exit_code == 0 and "head 2.1" in shown.stdout and "written" in shown.stdout
    for more in (["--d-model", "8"], ["--head", "8"]):
        refused = run(cli.app, [*arguments, *more])
        assert refused.exit_code == 2, refused.output
    assert "are for a MODEL" in run(cli.app, ["trace", "--layer", "1"]).stderr
