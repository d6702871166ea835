"""`import headwise` is light, and the planner needs no torch: both looked at in a fresh interpreter."""

import subprocess
import sys
import textwrap
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
HEAVY = (
    "transformers tokenizers huggingface_hub jinja2 typer rich pandas pyarrow onnx matplotlib beartype "
    "headwise.hf headwise.report headwise.cli headwise.models"
)


def imported_by(*steps: str) -> list[list[str]]:
    """Which of HEAVY, torch and numpy each step newly imports, one after the other, in a fresh interpreter."""
    code = f"""
        import sys
        sys.path.insert(0, {str(SOURCE)!r})
        watched, seen = {[*HEAVY.split(), "torch", "numpy"]!r}, set()
        for step in {steps!r}:
            exec(step)
            print(*[name for name in watched if name in sys.modules and name not in seen])
            seen |= {{*sys.modules}}
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_import_is_light_and_what_is_heavy_is_seen() -> None:
    """The rooms that stand alone need no torch; running attention needs nothing heavy; a heavy import would show."""
    attention = "import torch; x = torch.randn(1, 2, 3, 4); headwise.attention(x, x, x, mask=headwise.causal())"
    steps = ("import headwise", "import headwise.plan", "import headwise.shapes", attention)
    light, plan, shapes, op = imported_by(*steps)
    assert (light, plan, op) == ([], [], [])
    assert "torch" in shapes and not {*shapes} & {*HEAVY.split()}


def test_the_model_alone_needs_no_torch_and_heavy_imports_are_seen() -> None:
    models, rich, jinja = imported_by("import headwise.models", "import rich", "import jinja2")
    assert (models, rich, jinja) == (["headwise.models"], ["rich"], ["jinja2"])
