"""A tokenizer on a few texts, in a process of its own; `tokens.py` runs this file, and stops it in time.

Reads from stdin a line of JSON, ``{"texts": [...], "decode": false}``, and behind it a tokenizer.json. Writes a line of
JSON: how many tokens each text has (``counts``), or what went wrong (``unreadable``: with the file; ``failed``: with a
text). Nothing but the standard library and tokenizers is imported, so it starts in a few hundredths of a second.
"""

import json
import sys

GROWTH = 20
"""Characters that rules may make of one; the most in Unicode's own forms are 18, of U+FDFA."""


def limit(seconds: int, size: int) -> None:
    """At most so much time of the processor and so much memory, where the system allows such limits."""
    try:
        import resource
    except ImportError:  # Windows: the timeout of the parent process is the limit
        return
    for kind, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, size), (resource.RLIMIT_CORE, 0)):
        try:
            resource.setrlimit(kind, (most, most))
        except (ValueError, OSError):  # a smaller limit is there already, or macOS, which takes none for memory
            continue


def answer(request: bytes) -> dict[str, object]:
    """The answer (JSON) to a request, the bytes of stdin."""
    from tokenizers import Tokenizer

    header, source = request.split(b"\n", 1)
    task = json.loads(header)
    step = "unreadable"
    counts = []
    try:
        tokenizer = Tokenizer.from_buffer(source)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        step = "failed"
        for text in task["texts"]:
            long = len(tokenizer.normalizer.normalize_str(text)) if tokenizer.normalizer else 0
            if long > GROWTH * (len(text) + 100):
                raise ValueError(f"its rules make {long:,} characters of them")
            ids = tokenizer.encode(text).ids
            if task["decode"]:
                for i in ids:
                    tokenizer.decode([i], skip_special_tokens=False)
            counts.append(len(ids))
    except BaseException as error:  # a panic of the library is no Exception
        return {step: str(error) or type(error).__name__}
    return {"counts": counts}


if __name__ == "__main__":
    limit(int(sys.argv[2]), int(sys.argv[3]))
    sys.path.append(sys.argv[1])
    sys.stdout.write(json.dumps(answer(sys.stdin.buffer.read())))
