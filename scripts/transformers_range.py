"""Moves the upper end of the range of transformers past the release that is installed.

    pip install --upgrade --no-deps transformers && python scripts/transformers_range.py

Where the installed release lies past the range of pyproject.toml, writes the new end there and the release to
constraints.txt, and prints `version=5.25.0`; else prints nothing. .github/workflows/weekly.yml proposes what it wrote.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RANGE = re.compile(r'("transformers>=[\d.]+,<)(\d+)\.(\d+)"')


def moved(pyproject: str, constraints: str, release: str) -> tuple[str, str] | None:
    """Return both texts for a release past the range, and None for one within it.

    Raises:
        ValueError: pyproject.toml has no range with an upper end.
    """
    found = RANGE.search(pyproject)
    if found is None:
        raise ValueError('pyproject.toml has no "transformers>=A.B,<C.D"')
    major, minor = map(int, release.split(".")[:2])
    if (major, minor) < (int(found[2]), int(found[3])):
        return None
    pyproject = RANGE.sub(rf'\g<1>{major}.{minor + 1}"', pyproject)
    return pyproject, re.sub(r"(?m)^transformers==.*$", f"transformers=={release}", constraints)


def main() -> None:
    files, release = (ROOT / "pyproject.toml", ROOT / "constraints.txt"), version("transformers")
    texts = moved(*(file.read_text("utf8") for file in files), release)
    if texts is None:
        return
    for file, text in zip(files, texts, strict=True):
        file.write_text(text, "utf8")
    print(f"version={release}")


if __name__ == "__main__":
    main()
