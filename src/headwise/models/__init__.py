"""The small model that ships with the package, and the text that shows its heads.

Neither torch nor transformers is imported here: this room only knows where files lie. What the model is, what it
was trained on and how well its heads do is in the model card, ``README.md`` in the model's folder.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

__all__ = ["TINY", "default_text", "tiny_path"]

TINY: Path = Path(str(resources.files(__name__))) / "tiny"
"""Folder of the packaged model: ``config.json``, float16 weights, tokenizer, model card, loss curve."""

# Written for this purpose. The two functions say nearly the same thing, so a head that looks for what followed last
# time (induction) has much to find; line breaks and brackets give delimiter heads theirs.
_DEFAULT_TEXT = '''\
def read_lines(path, encoding="utf-8"):
    """Return the lines of the file at path."""
    with open(path, encoding=encoding) as file:
        return file.readlines()

def read_words(path, encoding="utf-8"):
    """Return the words of the file at path."""
    with open(path, encoding=encoding) as file:
        return file.read().split()

lines = read_lines("notes.txt")
words = read_words("notes.txt")
'''


def tiny_path() -> Path:
    """Folder of the packaged model, for ``from_pretrained``.

    Returns:
        The folder, checked to hold the weights.

    Raises:
        FileNotFoundError: the weights are not there, as in a source checkout where none were trained yet.

    Example:
        >>> sorted(file.name for file in tiny_path().glob("*.safetensors"))
        ['model.safetensors']
    """
    if not (TINY / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"the packaged model needs model.safetensors, but {TINY} has none: "
            "reinstall headwise, or train it with `python scripts/train_tiny.py --out <that folder>`"
        )
    return TINY


def default_text() -> str:
    """Return the text that ``headwise look`` reads by default.

    About 120 tokens of the packaged model's tokenizer: two short Python functions that repeat each other's names,
    so that previous-token, induction, duplicate-token and delimiter heads each have something to show.

    Returns:
        Plain text, 12 lines.

    Example:
        >>> default_text().splitlines()[0]
        'def read_lines(path, encoding="utf-8"):'
    """
    return _DEFAULT_TEXT
