"""Tour: one HTML page in which a model runs, and multi-head attention is learned by doing.

- `weights` reads a checkpoint without torch: config, tokenizer and its numbers, which enter the page as they are.
- `facts` collects what the page cites and cannot compute itself: shapes of well-known models by `headwise.plan`, losses
  that were measured with text of which the page holds none, how the packaged model's heads formed.
- `page` joins prose (`chapter`), claims (`claims.json`), scripts (`js`), style and data under a content security
  policy, as a report does.

The page fetches nothing. The scripts are read in this order: `js/engine` computes, `js/page` holds the state and draws,
`js/sections` has one file a section.
"""

from .page import render
from .weights import TourCheckpoint, read

__all__ = ["TourCheckpoint", "read", "render"]
