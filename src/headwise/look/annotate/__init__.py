"""Annotated text: words with their syntax and coreference, from CoNLL-U or spaCy, and the word of each token.

`read` and `parse` take CoNLL-U, `from_spacy` a parser's document; `ours` are sentences that come with headwise. All
give plain records (`Document`, `Sentence`, `Word`, `Mention`). `aligned` tells which word each token of a model is, and
`passages` makes of documents what `headwise.look.at` reads.
"""

from .conllu import ours, parse, read
from .passages import passages
from .spacy import from_spacy
from .words import Document, Mention, Sentence, Word, aligned

__all__ = ["Document", "Mention", "Sentence", "Word", "aligned", "from_spacy", "ours", "parse", "passages", "read"]
