"""Turns one choice's tokens into the text that may be shown now: whole characters, and nothing past a stop string."""

from collections.abc import Sequence

from prfaas_worker.tokenizer import Tokenizer, Utf8Stream


class TextStream:
    """Text of one choice. Characters that may begin a stop string are held back until it is clear that they do not."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self._tokenizer = tokenizer
        self._stop = stop
        self._decoder = Utf8Stream()
        self._held = ""
        self.stopped = False

    def push(self, token_ids: Sequence[int], *, final: bool) -> str:
        """Add tokens; return the text that is certain now. After a stop string was found nothing more comes."""
        if self.stopped:
            return ""
        data = b"".join(self._tokenizer.token_bytes(token_id) for token_id in token_ids)
        text = self._held + self._decoder.push(data, final=final)
        cuts = [text.index(stop) for stop in self._stop if stop in text]
        if cuts:
            self.stopped = True
            self._held = ""
            return text[: min(cuts)]
        keep = 0 if final else _possible_beginning(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _possible_beginning(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` with which a stop string begins."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
