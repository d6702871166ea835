"""Annotation from a spaCy ``Doc``, without an import of spaCy."""

from __future__ import annotations

from typing import Any

from ...shapes.arguments import shown
from .words import Document, Mention, Sentence, Word

CLUSTERS = "coref_clusters"
"""The prefix of the span groups in which spaCy's coreference component stores its clusters."""


def from_spacy(doc: Any, *, name: str = "") -> Document:
    """Return the words, word classes, relations and mentions of a spaCy ``Doc``, sentence by sentence.

    Relations keep the names that the user's model gives them (those of spaCy's English models are not Universal
    Dependencies: dobj, pobj, prep); ``ROOT`` becomes "root". Mentions are the spans of the groups ``coref_clusters_1``
    and so on, if the pipeline has a coreference component.

    Args:
        doc: a ``spacy.tokens.Doc``, or an object with the same attributes: ``text``, ``sents``, ``spans``, and tokens
            with ``i``, ``text``, ``idx``, ``head``, ``dep_``, ``pos_`` and ``is_space``.
        name: the name of the document.

    Raises:
        TypeError: `doc` is not a spaCy Doc.
        ValueError: no sentence boundaries: the pipeline has neither a parser nor a sentencizer.
    """
    try:
        sentences = [list(sentence) for sentence in doc.sents]
    except AttributeError:
        raise TypeError(f"from_spacy takes a spaCy Doc; got {shown(doc)}; call the pipeline first: nlp(text)") from None
    except ValueError as error:
        raise ValueError(
            f"the spaCy Doc has no sentence boundaries ({str(error).splitlines()[0]}); add a parser or a sentencizer "
            "to the pipeline"
        ) from None
    sentences = [kept for tokens in sentences if (kept := [token for token in tokens if not token.is_space])]
    starts = [tokens[0].idx for tokens in sentences] + [len(doc.text)]
    groups = (getattr(doc, "spans", None) or {}).items()
    clusters = [(str(key), span) for key, spans in groups if str(key).startswith(CLUSTERS) for span in spans]
    return Document(
        tuple(_sentence(doc, tokens, after, clusters) for tokens, after in zip(sentences, starts[1:], strict=True)),
        name,
    )


def _sentence(doc: Any, tokens: list[Any], after: int, clusters: list[tuple[str, Any]]) -> Sentence:
    """Return one sentence; `after` is the start of the next one, `clusters` are (entity, span) of every mention."""
    start, end = tokens[0].idx, tokens[-1].idx + len(tokens[-1].text)
    index = {token.i: n for n, token in enumerate(tokens)}
    words = tuple(
        Word(
            token.text,
            token.idx - start,
            token.idx - start + len(token.text),
            token.pos_,
            None if token.head.i == token.i else index.get(token.head.i),
            "root" if token.dep_ == "ROOT" else token.dep_,
        )
        for token in tokens
    )
    places = ((entity, tuple(index[i] for i in range(span.start, span.end) if i in index)) for entity, span in clusters)
    mentions = sorted((Mention(entity, at) for entity, at in places if at), key=lambda m: (m.first, -m.last))
    return Sentence(doc.text[start:end], words, tuple(mentions), {}, doc.text[end:after])
