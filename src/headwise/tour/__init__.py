"""Tour: an interactive HTML page that runs a model and teaches multi-head attention.

- `weights` reads a checkpoint without torch: config, tokenizer and its numbers, which enter the page unchanged.
- `facts` collects facts that the page cites and cannot compute: shapes of well-known models by `headwise.plan`, losses
  measured on text that is not in the page, and the training curve of the packaged model's heads.
- `mathml` sets the formulas.
- `page` joins prose (`chapter`), claims (`claims.json`), scripts (`js`), style and data under a content security
  policy, like a report.

The page makes no network requests. The scripts are included in this order: `js/engine` computes, `js/page` holds the
state and draws, `js/sections` has one file per section.
"""

from .page import render
from .weights import TourCheckpoint, read

__all__ = ["TourCheckpoint", "read", "render"]
