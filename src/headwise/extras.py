"""Errors for missing optional packages, with the extra that installs them. Imports nothing of headwise."""

from __future__ import annotations


class MissingExtra(ImportError):
    """A package of an extra is missing or too old; the message names the extra that installs it."""


def missing_extra(what: str, extra: str, error: ImportError) -> MissingExtra:
    """Return the error for a failed import.

    Args:
        what: the feature that needs the package, as users call it.
        extra: the extra that installs the package.
        error: the error of the import.

    >>> raise missing_extra("headwise.hf", "hf", ModuleNotFoundError("No module", name="transformers"))
    Traceback (most recent call last):
    headwise.extras.MissingExtra: headwise.hf needs transformers, which is not installed; pip install 'headwise[hf]'
    """
    package = (error.name or "a package").split(".")[0]
    if isinstance(error, ModuleNotFoundError) and error.name == package:
        return MissingExtra(f"{what} needs {package}, which is not installed; pip install 'headwise[{extra}]'")
    reason = " ".join(str(error).split())
    return MissingExtra(f"{what} needs another version of {package} ({reason}); pip install -U 'headwise[{extra}]'")
