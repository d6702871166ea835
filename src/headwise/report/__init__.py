"""Report: a look as one self-contained HTML file that opens offline.

- `pack` makes the data of the page: `role_catalog` lists the roles, `numbers` holds every head's scores to four
  digits, `maps` the maps in at most 256 levels, `vectors` queries, keys and values of the first tokens if the look
  has them; `deflate` compresses large data. Each has a budget and drops its finest part first, so that a page is
  below 2 MB for any look, up to some 10,000 heads.
- `escape` is the security boundary: every string of a look (tokens, names, paths) is untrusted. Strings enter the page
  once, as JSON that cannot close its element; the script adds them to the document only as text nodes; and the
  content security policy allows only the two scripts with the listed hashes, and no network requests.
- `comparison` is the page of two looks side by side, `effects_page` that of a patching or an attribution,
  `circuits` that of the heads that read each other.
- `page` joins template, style and scripts, and writes the file atomically.

The maps are drawn on a plain canvas: that takes a screen of script, while any plotting library would be larger than
the data. Axes and charts are drawn by a 51 KB part of D3; see ``vendor/README.md``.
"""

from headwise.files.atomic_file import check_destination, put

from .circuits.circuits_page import render_circuits, write_circuits
from .comparison import render_comparison, write_comparison
from .effects_page import render_effects, write_effects
from .page import check_engine, render, write

__all__ = [
    "check_destination",
    "check_engine",
    "put",
    "render",
    "render_circuits",
    "render_comparison",
    "render_effects",
    "write",
    "write_circuits",
    "write_comparison",
    "write_effects",
]
