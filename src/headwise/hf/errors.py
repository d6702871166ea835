"""The one error of this room."""


class ModelError(ValueError):
    """A model that headwise cannot read or see: one line that tells the rule, the values met and a way out."""


def one_line(error: BaseException) -> str:
    """What another library said, in one short line that no terminal acts on: its text may quote a hostile file."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines else type(error).__name__
    return "".join(letter if letter.isprintable() else "?" for letter in text[:200])
