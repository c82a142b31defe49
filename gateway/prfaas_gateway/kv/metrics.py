"""What the gateway tells of its prefix index."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge


class KvMetrics:
    """Metrics of the index and its streams; no label names an instance, of which there may be many."""

    def __init__(self, registry: CollectorRegistry):
        self.batches = Counter("prfaas_gateway_kv_batches", "Batches of cache events taken in", registry=registry)
        self.snapshots = Counter("prfaas_gateway_kv_snapshots", "Snapshots of instances' caches", registry=registry)
        self.gaps = Counter("prfaas_gateway_kv_gaps", "Gaps in event streams, which were read again", registry=registry)
        self.matched_tokens = Counter(
            "prfaas_gateway_kv_matched_tokens",
            "Prompt tokens believed cached where they were prefilled",
            registry=registry,
        )
        self.prefixes = Counter(
            "prfaas_gateway_kv_prefixes",
            "Requests sent with another instance to fetch a prefix from",
            registry=registry,
        )
        self.blocks = Gauge("prfaas_gateway_kv_blocks", "Blocks of tokens in the prefix index", registry=registry)
        self.byte_blocks = Gauge("prfaas_gateway_kv_byte_blocks", "Byte blocks that are mapped", registry=registry)
        self.refused_blocks = Gauge(
            "prfaas_gateway_kv_refused_blocks",
            "Blocks left out, beyond an instance's share or without what comes before them",
            registry=registry,
        )
        self.instances = Gauge(
            "prfaas_gateway_kv_instances",
            "Instances by what is heard of their caches: followed, silent (they tell nothing), lost (unreachable)",
            ["state"],
            registry=registry,
        )

    def show(self, blocks: Callable[[], float], byte_blocks: Callable[[], float], refused: Callable[[], float]) -> None:
        """Take these gauges from functions whenever somebody looks."""
        self.blocks.set_function(blocks)
        self.byte_blocks.set_function(byte_blocks)
        self.refused_blocks.set_function(refused)
