"""HTTP headers between client, gateway and worker. The gateway never rewrites a body: all it adds travels here.

Request headers are set by the gateway for a decode worker; response headers are set by the decode worker once the first
token exists and relayed by the gateway, which adds its own decision.
"""

from typing import Final

REQUEST_ID: Final = "x-request-id"

# gateway -> decode worker
PREFILL_URL: Final = "x-prfaas-prefill-url"
"""API address of the prefill instance, `http://host:port`. Absent: the decode worker prefills the prompt itself."""

# decode worker -> gateway -> client
PROMPT_TOKENS: Final = "x-prfaas-prompt-tokens"
CACHED_TOKENS: Final = "x-prfaas-cached-tokens"
KV_BYTES: Final = "x-prfaas-kv-bytes"
"""Cache bytes that this request received from another instance; 0 when it prefilled itself."""
QUEUE_SECONDS: Final = "x-prfaas-queue-seconds"
"""From the request's arrival at the engine to its admission, seconds with six decimals."""
PREFILL_SECONDS: Final = "x-prfaas-prefill-seconds"
"""Compute time of the prefill where it ran, seconds with six decimals."""
TRANSFER_SECONDS: Final = "x-prfaas-transfer-seconds"
"""From the first to the last byte of cache received, seconds; 0 without a transfer."""
FIRST_BYTE_SECONDS: Final = "x-prfaas-first-byte-seconds"
"""From the start of the remote prefill's compute to its first cache byte sent, seconds; 0 without a transfer."""

# gateway -> client
DECISION: Final = "x-prfaas-decision"  # offload | local
PREFILL_CLUSTER: Final = "x-prfaas-prefill-cluster"  # where the prefill that counted ran: a MemberCluster's name or hub
PREFILL_INSTANCE: Final = "x-prfaas-prefill-instance"
DECODE_INSTANCE: Final = "x-prfaas-decode-instance"
OUTCOME: Final = "x-prfaas-outcome"  # ok | fallback (offload failed, prefilled locally)
THRESHOLD_TOKENS: Final = "x-prfaas-threshold-tokens"  # the threshold this request was judged by

# Error codes in an OpenAI-style error body that the gateway acts on.
CODE_PREFILL_FAILED: Final = "prefill_failed"
"""HTTP 502 from a decode worker: the prefill instance or the link failed before any token; safe to send again."""
CODE_OVERLOADED: Final = "overloaded"  # HTTP 503
