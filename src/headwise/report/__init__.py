"""Report: a look as one self-contained HTML file that opens offline.

- `pack` makes the data of the page: `catalogue` lists the roles, `numbers` holds every head's scores to four digits,
  `maps` the maps in at most 256 levels, `vectors` queries, keys and values of the first tokens where the look carries
  them; `squeeze` deflates what is large. Each keeps to a budget and gives up its finest part first, so that a page is
  below 2 MB, whatever the look, up to some 10,000 heads.
- `escape` is the boundary: every string of a look (tokens, names, paths) is taken for hostile. Strings enter the page
  once, as JSON that cannot close its element; the script puts them into the document as text nodes only; and the
  content security policy lets nothing run but the two scripts that it names by hash, and nothing be fetched at all.
- `page` joins template, style and scripts; `disk` writes the file, whole or not at all.

The maps are plain canvas: that takes a screen of script, while any plotting library would outweigh the data. Axes and
charts, which do not, are drawn by a 51 KB part of D3; see ``vendor/README.md``.
"""

from headwise.files.atomic_file import check_destination, put

from .page import check_engine, render
from .save import write

__all__ = ["check_destination", "check_engine", "put", "render", "write"]
