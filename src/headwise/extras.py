"""What a small install lacks, and which extra brings it. Imports nothing of headwise: every room may import it."""

from __future__ import annotations


class MissingExtra(ImportError):
    """A package that only an extra installs is missing or too old; the text says which extra brings it."""


def missing_extra(what: str, extra: str, error: ImportError) -> MissingExtra:
    """The error to raise where an import failed.

    Args:
        what: what needs the package, as its user names it.
        extra: the extra that installs it.
        error: the failed import.

    >>> raise missing_extra("headwise.hf", "hf", ModuleNotFoundError("No module", name="transformers"))
    Traceback (most recent call last):
    headwise.extras.MissingExtra: headwise.hf needs transformers, which is not installed; pip install 'headwise[hf]'
    """
    package = (error.name or "a package").split(".")[0]
    if isinstance(error, ModuleNotFoundError) and error.name == package:
        return MissingExtra(f"{what} needs {package}, which is not installed; pip install 'headwise[{extra}]'")
    reason = " ".join(str(error).split())
    return MissingExtra(f"{what} needs another version of {package} ({reason}); pip install -U 'headwise[{extra}]'")
