"""HTTP headers between client, gateway and worker.

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

# gateway -> worker
PLACES: Final = "x-prfaas-places"
"""The other clusters whose cached bytes may serve the request, each by its place (`routes.Cluster`), with spaces
between. Without it none may inside TLS, and all without."""
UNKNOWN_PLACE: Final = "*"
"""Among the places: bytes of which nobody knows where they were made may serve, too, as nothing is forbidden."""

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
"""From the remote prefill's announcement to its first cache byte sent, seconds; 0 without a transfer."""

TTFT_SECONDS: Final = "x-prfaas-ttft-seconds"
"""The parts of the time to the first token, as `trace.write_parts` does. The gateway adds its own to a worker's."""

TRANSFER_ID: Final = "x-prfaas-transfer-id"
"""The transfer that brought the prefill, as 32 hex digits; several prompts' are separated by commas. Absent without a
transfer."""

LOST_TRANSFER: Final = "x-prfaas-lost-transfer"
"""The transfer of a hand-off whose cache did not come, so that the prompt was computed here; behind it UNREACHABLE if
the source or the link to it died. Absent without one."""
UNREACHABLE: Final = "unreachable"

# gateway -> client
DECISION: Final = "x-prfaas-decision"  # offload | local
PREFILL_CLUSTER: Final = "x-prfaas-prefill-cluster"
"""Where the prefill succeeded: a MemberCluster's name or hub."""
PREFILL_INSTANCE: Final = "x-prfaas-prefill-instance"
DECODE_INSTANCE: Final = "x-prfaas-decode-instance"
OUTCOME: Final = "x-prfaas-outcome"  # ok | fallback (offload failed, prefilled locally)
THRESHOLD_TOKENS: Final = "x-prfaas-threshold-tokens"  # the threshold that decided about this request

# Error codes in an OpenAI-style error body of a worker.
CODE_OVERLOADED: Final = "overloaded"  # HTTP 503
CODE_NO_CERTIFICATE: Final = "client_certificate_required"  # HTTP 401
CODE_NOT_ALLOWED: Final = "not_allowed"  # HTTP 403: a certificate without the right
CODE_PREFIX_NOT_FOUND: Final = "prefix_not_found"
"""HTTP 404 to a source's leg: no prefix of this length is cached here."""
