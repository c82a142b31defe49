"""HTTP headers between client, gateway and worker. The gateway never rewrites a body: it adds only headers.

The gateway sets request headers for a decode worker. The decode worker sets response headers once the first token
exists; the gateway relays them and adds its own decision.
"""

from typing import Final

REQUEST_ID: Final = "x-request-id"

# client -> gateway; preferences.py reads and writes them, docs/use/gateway.md tells users
DATACENTERS: Final = "x-prfaas-datacenters"  # prefer eu-west, eu-north; forbid us
OFFLOAD: Final = "x-prfaas-offload"  # auto | never | always
DEADLINE_SECONDS: Final = "x-prfaas-deadline-seconds"
"""Seconds from the request's arrival to its last byte. To a worker: the rest of them when the leg starts."""

# gateway -> decode worker
PREFILL_URL: Final = "x-prfaas-prefill-url"
"""API address of the prefill instance, `http://host:port`. Absent: the decode worker prefills the prompt itself."""
PREFIX_URL: Final = "x-prfaas-prefix-url"
"""Likewise, of an instance with more of the prompt cached, to fetch it there; after a failure it is computed."""
PREFIX_CLUSTER: Final = "x-prfaas-prefix-cluster"
"""The required cluster of PREFIX_URL's instance, by its certificate."""

RESUMABLE: Final = "x-prfaas-resumable-2"
"""Requests a stream that another worker can resume, and fixes its seed and its time; see prfaas.wire.resume. On the
answer: the stream is resumable, and this is the fingerprint of the model that began it. The number is that of the
comments' form. A peer that knows another form ignores the header, and the stream has no comments.
"""
RESUME: Final = "x-prfaas-resume"
"""Resumes an answer: this many first bytes of the body are the Resume document, the rest is the original body."""

DATA_RANK: Final = "x-data-parallel-rank"
"""vLLM's own header, to an instance of several data-parallel ranks: the rank that serves the request."""

# decode worker -> gateway -> client
PROMPT_TOKENS: Final = "x-prfaas-prompt-tokens"
CACHED_TOKENS: Final = "x-prfaas-cached-tokens"
KV_BYTES: Final = "x-prfaas-kv-bytes"
"""Cache bytes that this request received from other instances, for a prefix or for all; 0 without any."""
QUEUE_SECONDS: Final = "x-prfaas-queue-seconds"
"""From the request's arrival at the engine to its admission, seconds with six decimals."""
PREFILL_SECONDS: Final = "x-prfaas-prefill-seconds"
"""Compute time of the prefill where it ran, seconds with six decimals."""
TRANSFER_SECONDS: Final = "x-prfaas-transfer-seconds"
"""From the first to the last byte of cache received, seconds; 0 without a transfer."""
FIRST_BYTE_SECONDS: Final = "x-prfaas-first-byte-seconds"
"""From the start of the remote prefill's compute to its first cache byte sent, seconds; 0 without a transfer."""

TRANSFER_ID: Final = "x-prfaas-transfer-id"
"""The transfer that brought the prefill, as 32 hex digits; several prompts' are separated by commas. Also on an error
that ended one. Absent without a transfer."""

# gateway -> client
DECISION: Final = "x-prfaas-decision"  # offload | local
PREFILL_CLUSTER: Final = "x-prfaas-prefill-cluster"
"""Where the prefill succeeded: a MemberCluster's name or hub. To the decode worker: PREFILL_URL's required cluster."""
PREFILL_INSTANCE: Final = "x-prfaas-prefill-instance"
DECODE_INSTANCE: Final = "x-prfaas-decode-instance"
OUTCOME: Final = "x-prfaas-outcome"  # ok | fallback (offload failed, prefilled locally)
THRESHOLD_TOKENS: Final = "x-prfaas-threshold-tokens"  # the threshold that decided about this request

# Error codes in an OpenAI-style error body that the gateway acts on.
CODE_PREFILL_FAILED: Final = "prefill_failed"
"""HTTP 502 from a decode worker: the prefill instance or the link failed before any token; safe to retry."""
CODE_RESUME_REFUSED: Final = "resume_refused"
"""HTTP 409 from a decode worker: it cannot resume this answer; another worker may, this one never will."""
CODE_OVERLOADED: Final = "overloaded"  # HTTP 503
CODE_PREFIX_NOT_FOUND: Final = "prefix_not_found"
"""HTTP 404 between workers: no longer prefix than the caller's is cached here."""
