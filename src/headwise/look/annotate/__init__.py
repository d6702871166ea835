"""Annotated text: words with their syntax and coreference, from CoNLL-U or spaCy, and the word of each token.

`read` and `parse` take CoNLL-U, `from_spacy` takes a spaCy ``Doc``; `ours` gives the sentences included in headwise.
All return plain records (`Document`, `Sentence`, `Word`, `Mention`). `aligned` maps each token of a model to its word,
and `passages` converts documents to the input of `headwise.look.at`.
"""

from .conllu import ours, parse, read
from .passages import passages
from .spacy import from_spacy
from .words import Document, Mention, Sentence, Word, aligned

__all__ = ["Document", "Mention", "Sentence", "Word", "aligned", "from_spacy", "ours", "parse", "passages", "read"]
