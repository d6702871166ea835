"""The small packaged model, and a default text that shows the roles of its heads.

This module has only file paths and imports neither torch nor transformers. The model card, ``README.md`` in the model's
folder, describes the model, its training data and its heads.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

__all__ = ["TINY", "default_text", "tiny_path"]

TINY: Path = Path(str(resources.files(__name__))) / "tiny"
"""The folder of the packaged model: ``config.json``, float16 weights, tokenizer, model card, loss curve."""

# Written for this purpose. The two functions are nearly the same, so induction heads find many repeated tokens; line
# breaks and brackets are targets of delimiter heads.
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
    """Return the folder of the packaged model, for ``from_pretrained``.

    Returns:
        The folder, which contains the weights.

    Raises:
        FileNotFoundError: the weights are missing, as in a source checkout without a trained model.

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

    About 120 tokens of the packaged model's tokenizer: two short Python functions with the same names, so that
    previous-token, induction, duplicate-token and delimiter heads all have targets.

    Returns:
        Plain text, 12 lines.

    Example:
        >>> default_text().splitlines()[0]
        'def read_lines(path, encoding="utf-8"):'
    """
    return _DEFAULT_TEXT
