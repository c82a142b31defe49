"""What LOSSLESS does on this machine, before a real frame went through it: some milliseconds, once a process."""

import statistics
import time
from collections.abc import Callable

import numpy as np

from prfaas.routing.compression import CodecSpeed
from prfaas.wire.codecs import Codec
from prfaas.wire.transfer import TensorLayout
from prfaas_worker.transfer.codecs import decode, encode

TOKENS, CHANNELS = 1024, 512
ROUNDS = 3


def probe() -> CodecSpeed:
    """Measure bfloat16 rows of normal numbers, 1 MiB, in this thread's CPU time: the median of a few rounds."""
    layouts = [TensorLayout("probe", ("token", "channel"), (CHANNELS,), "bfloat16")]
    numbers = np.random.default_rng(0).standard_normal((TOKENS, CHANNELS), dtype=np.float32)
    rows = (numbers.view(np.uint32) >> 16).astype(np.uint16).data.cast("B")
    encoded = encode(Codec.LOSSLESS, layouts, TOKENS, [rows])
    payload = b"".join(encoded.buffers)
    megabits = rows.nbytes * 8 / 1e6
    return CodecSpeed(
        encode_mbps=megabits / _seconds(lambda: encode(Codec.LOSSLESS, layouts, TOKENS, [rows])),
        decode_mbps=megabits / _seconds(lambda: decode(encoded.codec, layouts, TOKENS, payload)),
        ratio=rows.nbytes / len(payload),
    )


def _seconds(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        work()
        taken.append(time.thread_time() - started)
    return statistics.median(taken)
