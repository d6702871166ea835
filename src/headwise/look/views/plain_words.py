"""Each role in one plain sentence, with an example: for the report's hints and for the page on how to read it."""

from __future__ import annotations

from .palette import relation_words

_SAID = {
    "previous-token": ("looks at the token just before", "at “sat” in “The cat sat” it reads “cat”"),
    "self": ("looks at its own token", "at “cat” it reads “cat”"),
    "next-token": ("looks at the token just after; encoders only", "at “The” in “The cat” it reads “cat”"),
    "local band": (
        "looks at the few tokens around it; a decoder, at those before it and itself",
        "at “sat” in “The cat sat” it reads all three",
    ),
    "far offset": (
        "looks at the token a fixed number of places back",
        "say 12 tokens back, whatever stands there",
    ),
    "first-token sink": (
        "puts its weight on the first token, which says little: the head rests",
        "at every word of a text it reads its first token",
    ),
    "sink elsewhere": ("rests on one token that is not the first", "at every later word it reads one early full stop"),
    "delimiter": (
        "looks at the marks . , ; : ! ? and at line ends that are a token of their own",
        "at “It” in “The cat sat. It” it reads “.”",
    ),
    "punctuation": ("looks at punctuation", "in “yes, he said” it reads “,”"),
    "special tokens": ("looks at tokens that are no text, such as [SEP]", "at every word it reads “[SEP]”"),
    "[SEP]": ("looks at the separator", "at every word it reads “[SEP]”"),
    "full stop": ("looks at full stops", "after “The cat sat.” it reads “.”"),
    "comma": ("looks at commas", "in “yes, he said” it reads “,”"),
    "broad": ("spreads its weight over almost all tokens", "it takes an average of the whole text"),
    "first to second": ("looks from the first sentence of a pair to the second", "at “rains” it reads “Stay in”"),
    "second to first": ("looks from the second sentence of a pair to the first", "at “Stay” it reads “It rains”"),
    "alignment": ("looks at the same token in the other text", "writing “cat” it reads the encoder’s “cat”"),
    "alignment, next": (
        "looks at the token in the other text that comes next",
        "before it writes “cat” it reads the encoder’s “cat”",
    ),
    "duplicate-token": ("looks at earlier copies of its own token", "at the second “cat” it reads the first “cat”"),
    "induction": (
        "looks at what followed when the same token stood before, to copy it",
        "at the second “The” in “The cat sat. The” it reads “cat”, for “cat” may come again",
    ),
    "same word class": ("looks at other words of its word class", "at a noun it reads nouns, at a verb verbs"),
    "coreference": ("looks at an earlier name of the same thing", "at “its” in “The cat saw its tail” it reads “cat”"),
    "name mover": (
        "looks at the name that should come next, and brings it there",
        "at the end of “Mary met John. John thanked” it reads “Mary”",
    ),
    "negative name mover": (
        "looks at the name that should come next, and makes it less likely",
        "at the end of “Mary met John. John thanked” it reads “Mary” and lowers its logit",
    ),
    "name suppressor": (
        "looks at the name that should not come next, and makes it less likely",
        "at the end of “Mary met John. John thanked” it reads “John” and lowers its logit",
    ),
    "name mover by attention": (
        "looks at the name that should come next; the model has no logits that tell whether it copies it",
        "at the end of “Mary met John. John thanked” it reads “Mary”",
    ),
    "retrieval": (
        "looks up what followed a key word far back in a long text",
        "at “code:” it reads the code",
    ),
    "left neighbour": ("looks at the patch of a picture to the left", ""),
    "right neighbour": ("looks at the patch of a picture to the right", ""),
    "upper neighbour": ("looks at the patch of a picture above", ""),
    "lower neighbour": ("looks at the patch of a picture below", ""),
    "surroundings": ("looks at the patches of a picture around its own", ""),
    "same row": ("looks along its row of the patches of a picture", ""),
    "same column": ("looks along its column of the patches of a picture", ""),
    "[CLS] sink": ("rests on [CLS], the token for the whole picture", "at every patch it reads “[CLS]”"),
    "register sink": ("rests on a register, a token without content", "at every patch it reads a register"),
    "patch sink": ("rests on one patch", "at every patch it reads one patch of plain background"),
}


def sentence(name: str) -> str:
    """Return what a head of this role does, in one sentence; empty for unknown roles.

    >>> sentence("previous-token"), sentence("head to obj")
    ('It looks at the token just before.', 'At the verb of a sentence it looks at its object.')
    """
    if name in _SAID:
        return f"It {_SAID[name][0]}."
    words = relation_words(name)
    if words is not None:
        return f"At the {words[0]} of a sentence it looks at its {words[1]}."
    if name.startswith(("offset-", "offset+")):
        return f"It looks at the token {name[7:]} places {'before' if name[6] == '-' else 'after'}."
    return ""


def example(name: str) -> str:
    """Return how the role looks in a sentence; empty for roles without an example."""
    return _SAID[name][1] if name in _SAID else ""
