"""Report: a look as one self-contained HTML file that opens offline."""

from .disk import check_destination, write
from .page import render

__all__ = ["check_destination", "render", "write"]
