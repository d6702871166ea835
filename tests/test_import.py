"""`import headwise` is light, and the planner needs no torch: both looked at in a fresh interpreter."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"
HEAVY = (
    "transformers tokenizers huggingface_hub jinja2 typer rich pandas pyarrow onnx matplotlib beartype "
    "headwise.hf headwise.report headwise.cli headwise.models"
)


def imported_by(code: str, names: str) -> list[str]:
    """Which of the names are imported, in a fresh interpreter, after the code has run."""
    code = textwrap.dedent(code) + f"\nimport sys; print(*[name for name in {names.split()!r} if name in sys.modules])"
    command = [sys.executable, "-W", "error", "-c", f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_import_is_light() -> None:
    assert imported_by("import headwise", "headwise torch " + HEAVY) == ["headwise"]


def test_running_attention_needs_nothing_heavy_either() -> None:
    code = "import headwise, torch; x = torch.randn(1, 2, 3, 4); headwise.attention(x, x, x, mask=headwise.causal())"
    assert imported_by(code, HEAVY) == []


@pytest.mark.parametrize("name", ["rich", "jinja2", "headwise.models"])
def test_a_heavy_import_would_be_seen(name: str) -> None:
    assert imported_by(f"import headwise, {name}", HEAVY).count(name) == 1


@pytest.mark.parametrize("room", ["plan", "models"])
def test_what_stands_alone_needs_no_torch(room: str) -> None:
    assert imported_by(f"import headwise.{room}", "torch numpy") == []


def test_torch_would_be_seen() -> None:
    assert imported_by("import headwise.shapes", "torch") == ["torch"]
