"""The demo's results as data: a record for each request, the threshold over time, the failure drill, and the verdict.

The verdict is a pure function, so that the demo's exit code and the tests use the same rules.
"""

from typing import Literal

import msgspec

EngineType = Literal["prfaas", "vllm"]
KILLED = "kill"
"""The act of the requests whose prefill worker is killed."""


UNKNOWN = "?"
"""Where an answer does not say."""


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request as its client saw it. `decision` and `prefilled_in` are the gateway's response headers."""

    id: str
    act: str
    tokens: int = 0
    cached_tokens: int = 0
    decision: str = UNKNOWN
    prefilled_in: str = UNKNOWN
    decoded_by: str = UNKNOWN
    threshold_tokens: int = 0
    kv_bytes: int = 0
    ttft_seconds: float = 0.0
    total_seconds: float = 0.0
    output_tokens: int = 0
    prefill_seconds: float = 0.0
    first_byte_seconds: float = 0.0
    transfer_seconds: float = 0.0
    outcome: str  # ok | fallback | failed: why
    text: str = ""


class ThresholdSample(msgspec.Struct, kw_only=True):
    """The threshold and the link at one moment; seconds since the first sample."""

    seconds: float
    tokens: int
    link_mbps: int
    utilisation_percent: float | None


class SeenTransfer(msgspec.Struct, kw_only=True):
    """The end of a cache's transfer, as its destination logged it."""

    outcome: str  # delivered | failed | cancelled | ...
    payload_bytes: int


class FailureDrill(msgspec.Struct, kw_only=True):
    """The results after the kill of the offload worker that was sending a cache.

    `killed_pod` is empty if the moment had passed; then nothing was killed, and nothing had to recover.
    """

    request: RequestRecord
    transfer: SeenTransfer | None
    killed_pod: str = ""
    recovered_seconds: float = 0.0
    request_after_recovery: RequestRecord | None = None

    @property
    def is_in_the_middle(self) -> bool:
        """Whether the kill broke the transfer when a part of the cache had arrived."""
        broken = self.transfer is not None and self.transfer.outcome == "failed" and self.transfer.payload_bytes > 0
        return broken and self.killed_pod != ""

    @property
    def asks_for_another(self) -> bool:
        """Whether the moment was wrong, and prfaas did nothing wrong."""
        served = self.request.outcome == "ok" or (self.request.outcome == "fallback" and self.killed_pod != "")
        return served and not self.is_in_the_middle


class StreamDrill(msgspec.Struct, kw_only=True):
    """The results after the kill of the decode instance in the middle of a stream, and the same request undisturbed."""

    undisturbed: RequestRecord
    request: RequestRecord
    killed_pod: str
    events_before_kill: int
    outcome: str = ""  # in the gateway's access log, at the answer's end

    @property
    def is_in_the_middle(self) -> bool:
        """Whether another instance went on with the answer."""
        return self.outcome == "resumed" and 0 < self.events_before_kill < self.request.output_tokens

    @property
    def asks_for_another(self) -> bool:
        """Whether the moment was wrong: the gateway had the whole answer before the kill."""
        return not self.is_in_the_middle and self.request.outcome == "ok"

    @property
    def is_same_until_kill(self) -> bool:
        """After it the answer may leave the undisturbed one at a near-tie, as two batches in bf16 do."""
        count = self.events_before_kill  # the model's tokens are bytes
        return self.request.text[:count] == self.undisturbed.text[:count]


class DemoResults(msgspec.Struct, kw_only=True):
    """The content of `.prfaas/demo.json`."""

    engine: EngineType = "prfaas"
    startup_seconds: dict[str, float] = {}
    requests: list[RequestRecord] = []
    threshold: list[ThresholdSample] = []
    threshold_before_narrowing: int = 0
    threshold_narrow_peak: int = 0
    threshold_after_widening: int = 0
    failure_drill: FailureDrill | None = None
    stream_drill: StreamDrill | None = None
    crossed_bytes: int = 0
    total_seconds: float = 0.0
    problems: list[str] = []


def find_problems(results: DemoResults) -> list[str]:
    """Return the problems as sentences; none means that the demo succeeded."""
    drill = results.failure_drill
    after = drill.request_after_recovery if drill else None
    lengths = [record for record in results.requests if record.act == "lengths"]
    crossed = [record for record in lengths if record.decision == "offload" and record.kv_bytes > 0]
    claims = [
        (all(not r.outcome.startswith("failed") for r in results.requests), "a request failed"),
        (all(r.output_tokens > 0 for r in results.requests), "a request got no token"),
        (any(r.decision == "local" for r in lengths), "no short prompt was prefilled in the hub"),
        (bool(crossed), "no long prompt's cache crossed the link"),
        (
            results.threshold_narrow_peak >= 2 * results.threshold_before_narrowing > 0,
            "the threshold did not double on the narrow link: "
            f"{results.threshold_before_narrowing} -> {results.threshold_narrow_peak}",
        ),
        (
            0 < results.threshold_after_widening <= results.threshold_narrow_peak / 2,
            "the threshold did not fall on the widened link: "
            f"{results.threshold_narrow_peak} -> {results.threshold_after_widening}",
        ),
        (drill is not None and drill.is_in_the_middle, "the worker was not killed in the middle of a transfer"),
        (
            after is not None and after.prefilled_in not in (UNKNOWN, "hub"),
            "no prompt was offloaded after the killed worker came back",
        ),
        *(_claims_on_vllm(results) if results.engine == "vllm" else _claims_on_our_workers(drill, crossed)),
    ]
    return [problem for holds, problem in claims if not holds]


def _claims_on_our_workers(drill: FailureDrill | None, crossed: list[RequestRecord]) -> list[tuple[bool, str]]:
    return [
        (
            all(r.first_byte_seconds < r.prefill_seconds / 2 for r in crossed if r.tokens >= 15_000),
            "the cache of a 16K prompt began to cross only in the second half of its prefill",
        ),
        (
            drill is not None and drill.request.decision == "offload" and drill.request.outcome == "fallback",
            "the request whose prefill worker died was not completed by a local prefill",
        ),
    ]


def _claims_on_vllm(results: DemoResults) -> list[tuple[bool, str]]:
    """Return what holds of vLLM, where a destination computes a lost cache itself and the answer continues as it is."""
    drill, stream = results.failure_drill, results.stream_drill
    return [
        (
            drill is not None and drill.request.decision == "offload",
            "the request whose prefill instance died was not offloaded",
        ),
        (stream is not None and stream.is_in_the_middle, "no decode instance was killed in the middle of a stream"),
        (
            stream is not None and stream.request.output_tokens == stream.undisturbed.output_tokens,
            "the stream whose decode instance died is shorter than the undisturbed one",
        ),
        (
            stream is not None and stream.is_same_until_kill,
            "the stream whose decode instance died began with another text than the undisturbed one",
        ),
    ]
