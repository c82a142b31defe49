"""What a prompt costs that comes beside streams: by how much it makes their steps longer.

Neither the prompt alone nor the streams alone show it. Chunks beside decodes may be shorter, and kernels slower, but
the weights are read once for both. So a prompt is sent while streams run. Their tokens come as often as before, but for
the steps with a chunk of it. What those take more than as many plain steps do, the prompt adds. The time until its own
first token would hold the rest of a step that was under way, and HTTP.
"""

import statistics
from collections.abc import Sequence
from typing import Final

from prfaas.measure.answers import StreamedAnswer, TokenMark

BEGUN_TOKENS: Final = 12
"""That each stream has had when the prompt is sent."""
_PLAIN_TOKENS: Final = 8
"""At least so many show what a plain step takes."""


def added_seconds(streams: Sequence[StreamedAnswer], prompt: StreamedAnswer) -> float | None:
    """Return the seconds that a prompt, answered by one token, added to the steps of the streams; None if they did not
    run together before it, beside it and after it."""
    begin = max(one.marks[0].seconds for one in streams)
    end = min(one.marks[-1].seconds for one in streams)
    added: list[float] = []
    for one in streams:
        marks = [mark for mark in one.marks if begin <= mark.seconds <= end]
        before = [mark for mark in marks if mark.seconds <= prompt.began_seconds]
        # The first of the others may be of the step that ended the prompt.
        after = [mark for mark in marks if mark.seconds >= prompt.marks[-1].seconds][1:]
        if not before or not after:
            return None
        plain = [_between(side[0], side[-1]) for side in (before, after)]
        if (tokens := sum(one.tokens for one in plain)) < _PLAIN_TOKENS:
            return None
        beside = _between(before[-1], after[0])
        added.append(beside.seconds - beside.tokens * sum(one.seconds for one in plain) / tokens)
    return statistics.median(added)


def _between(first: TokenMark, last: TokenMark) -> TokenMark:
    return TokenMark(last.seconds - first.seconds, last.tokens - first.tokens)
