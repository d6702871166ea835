"""The process that runs a tokenizer on a few texts; `tokenizer.py` starts this file with a timeout.

It reads a line of JSON from stdin, ``{"texts": [...], "decode": false}``, followed by a tokenizer.json. It writes a
line of JSON: the number of tokens of each text (``counts``), or an error (``unreadable``: of the file; ``failed``: of a
text). It imports only the standard library and tokenizers, so it starts in a few hundredths of a second.
"""

import json
import sys

GROWTH = 20
"""The most characters that a normalizer may make of one; Unicode's normal forms make at most 18 (of U+FDFA)."""


def limit(seconds: int, size: int) -> None:
    """Limit this process to `seconds` of CPU time and `size` bytes of memory, on systems with such limits."""
    try:
        import resource
    except ImportError:  # On Windows, the timeout of the parent process is the only limit.
        return
    for kind, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, size), (resource.RLIMIT_CORE, 0)):
        try:
            resource.setrlimit(kind, (most, most))
        except (ValueError, OSError):  # A smaller limit is already set, or macOS, which has no memory limit.
            continue


def answer(request: bytes) -> dict[str, object]:
    """Return the answer, as JSON data, to a request (the bytes of stdin)."""
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
    except BaseException as error:  # A panic of the library is not an Exception.
        return {step: str(error) or type(error).__name__}
    return {"counts": counts}


if __name__ == "__main__":
    limit(int(sys.argv[2]), int(sys.argv[3]))
    sys.path.append(sys.argv[1])
    sys.stdout.write(json.dumps(answer(sys.stdin.buffer.read())))
