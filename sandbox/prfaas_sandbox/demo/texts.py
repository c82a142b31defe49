"""Real text of a wanted length: the language reference that every Python installation carries.

The shipped model reads bytes, so that a text of n ASCII characters is a prompt of about n tokens.
"""

from functools import cache


@cache
def _corpus() -> str:
    """Return Python's help topics as one ASCII text (about 700 KB)."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name].strip() for name in sorted(topics))
    return text.encode("ascii", "ignore").decode("ascii")


def text_of(tokens: int, *, start: int = 0) -> str:
    """Return `tokens` characters of prose, beginning at a paragraph near `start`; equal arguments give equal text."""
    corpus = _corpus()
    begin = corpus.find("\n\n", start % (len(corpus) - tokens - 4096)) + 2
    return corpus[begin : begin + tokens]
