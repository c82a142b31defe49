"""Codecs of data frames: how a payload's bytes on the wire differ from those of the tensors they stand for.

A frame names its codec, so a source may change it from frame to frame. What they do is in docs/compression.md; the
worker has the arithmetic.
"""

from enum import IntEnum


class Codec(IntEnum):
    """What a frame's payload went through; the value is the one on the wire."""

    NONE = 0
    LOSSLESS = 1
    """Byte planes, those that shrink through zstd: the tensors come out bit by bit."""
    INT8 = 2
    """Attention rows as 8-bit integers with a scale for each channel: the tensors come out within a bound."""

    @property
    def is_exact(self) -> bool:
        """Whether tensors come out bit by bit; rows that did not never enter a prefix cache."""
        return self is not Codec.INT8
