"""Runs headwise as `pip install headwise` leaves it, without an extra: in a fresh environment (`python
scripts/bare_install.py`), or in the one of links that `tests/meta/test_bare_install.py` makes.

The op, the module, the caches, the statistics and the planner must work. What needs an extra must name it in one line.
Exit code 1 and the reason otherwise; also where an extra is installed, for then the run proves nothing.
"""

import contextlib
import importlib
import importlib.util
import io
import sys
from collections.abc import Callable

EXTRAS = ("transformers", "safetensors", "tokenizers", "huggingface_hub", "pandas", "conllu", "pyarrow", "matplotlib")


def run_the_op() -> None:
    import torch

    import headwise

    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    mask = headwise.causal() & headwise.window(3)
    assert headwise.attention(q, k, v, mask=mask).shape == (2, 4, 5, 8)
    q.requires_grad_()
    headwise.attention(q, k, v, mask=headwise.causal() | headwise.prefix(2)).sum().backward()
    assert q.grad is not None and bool(q.grad.isfinite().all())
    q = q.detach()
    assert str(headwise.explain(q, k, v, mask=mask))
    assert headwise.weights(q, k, rows=[-1], mask=mask).shape == (2, 4, 1, 7)
    assert headwise.statistics(q, k, mask=mask).entropy.shape == (2, 4, 5)
    headwise.attention(q, k, v, mask=mask, backend="sdpa")


def run_the_module() -> None:
    import torch

    import headwise

    mha = headwise.MultiHeadAttention(24, num_heads=4, num_kv_heads=2).eval()
    x, cache = torch.randn(2, 5, 24), headwise.cache.StaticCache(batch=2, num_kv_heads=2, head_dim=6, capacity=11)
    with torch.no_grad():
        whole = mha(x, mask=headwise.causal())
        steps = [mha(token, cache=cache)[0] for token in x.split(1, dim=1)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    assert "W_O" in str(headwise.trace(mha, x))


def run_the_commands() -> None:
    assert "GQA" in command(["plan", "llama-3-8b"])[1]
    assert command(["trace", "--d-model", "24", "--num-heads", "4"])[0] == 0
    assert command(["--help"])[0] == 0


def see_what_is_missing() -> None:
    from headwise import report
    from headwise.look import Look, annotate, write

    look = Look(model="m", num_layers=0, num_heads=0, length=0, tokens=(), heads=(), kind="", seconds=0.0, version="0")
    expect("headwise.hf needs transformers", "hf", lambda: importlib.import_module("headwise.hf"))
    expect("to_frame() needs pandas", "look", look.to_frame)
    expect("reading CoNLL-U needs conllu", "look", annotate.ours)
    expect("a figure needs matplotlib", "look", look.plot_roles)
    expect("a .parquet file needs pyarrow", "look", lambda: write(look, "heads.parquet"))
    assert str(look) and look.card() and look._repr_html_() and write(look, "heads.csv")
    if importlib.util.find_spec("jinja2") is None:  # torch may have brought it: then reports work
        expect("a report needs jinja2", "look", lambda: report.render(look))
        needs = "a report needs jinja2, which is not installed; pip install 'headwise[look]'"
        assert command(["look", "--text", "a b"]) == (2, "", f"headwise: {needs}\n"), command(["look", "--text", "a b"])
    needs = "headwise look needs huggingface_hub, which is not installed; pip install 'headwise[hf]'"
    ended = command(["look", "--text", "a b", "--json"])
    assert ended == (2, "", f"headwise: {needs}\n"), ended


def command(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line."""
    from headwise.cli import main

    out, err, sys.argv = io.StringIO(), io.StringIO(), ["headwise", *arguments]
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def expect(start: str, extra: str, call: Callable[[], object]) -> None:
    """The call raises an ImportError of one line, which begins with `start` and names the extra."""
    try:
        call()
    except ImportError as error:
        assert str(error) == f"{start}, which is not installed; pip install 'headwise[{extra}]'", str(error)
    else:
        raise AssertionError(f"{start}... was expected, and nothing was raised")


if __name__ == "__main__":
    if extras := [name for name in EXTRAS if importlib.util.find_spec(name)]:
        sys.exit(f"not a bare install: {', '.join(extras)} can be imported")
    for step in (run_the_op, run_the_module, run_the_commands, see_what_is_missing):
        step()
    print("the bare install runs")
