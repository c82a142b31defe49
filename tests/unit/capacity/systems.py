"""Systems to plan: the paper's, read from its file, a lab with idle GPUs, and arbitrary ones."""

from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from prfaas.capacity import planfile
from prfaas.capacity.planfile import PlanFile
from prfaas.capacity.system import HubPool, LinkCapacity, OffloadPool, System
from prfaas.capacity.workload import Workload
from prfaas.wire.profile import Profile

PAPER_FILE = Path(__file__).parents[3] / "examples" / "paper.yaml"


def paper_document() -> dict[str, Any]:
    return yaml.safe_load(PAPER_FILE.read_text())


def no_traces(path: str) -> list[tuple[int, int]]:
    raise AssertionError(path)


def paper() -> PlanFile:
    return planfile.read(paper_document(), no_traces)


def lab(mbps: float = 10_000, **hub: float) -> PlanFile:
    """Four pairs of H100 serve Qwen3.5-35B-A3B, and eight pairs of L40S are idle behind a link.

    The prefills are aiconfigurator's estimates. `hub` replaces fields of the hub.
    """
    caches = {8_192: 221.04, 32_768: 701.04, 131_072: 2621.04}
    seconds = {"l40s": (0.390, 1.588, 8.752), "h100": (0.0936, 0.352, 1.992)}
    profiles = {
        name: {
            "points": [
                {"tokens": tokens, "seconds": one, "cacheMib": mib}
                for (tokens, mib), one in zip(caches.items(), times, strict=True)
            ]
        }
        for name, times in seconds.items()
    }
    document = {
        "workload": {
            "lognormal": {"mu": 9.5, "sigma": 1.0, "minTokens": 128, "maxTokens": 131_072},
            "outputTokens": 400,
        },
        "slo": {"tpotMillis": 25},
        "profiles": profiles,
        "links": [{"name": "campus", "capacityMbps": mbps}],
        "offloadPools": [{"name": "idle", "profile": "l40s", "instances": 8, "link": "campus"}],
        "hub": [{"name": "home", "profile": "h100", "instances": 4, "maxBatch": 48, "stepMillis": 15, **hub}],
    }
    return planfile.read(document, no_traces)


profiles = st.builds(
    Profile,
    state_bytes=st.integers(0, 10**9),
    token_bytes=st.integers(1, 10**6),
    fixed_seconds=st.floats(0, 5),
    token_seconds=st.floats(1e-7, 1e-2),
    squared_seconds=st.floats(0, 1e-8),
)


@st.composite
def systems(draw: st.DrawFn, offload: bool = True) -> System:
    """Systems that can serve: the hub has an instance to decode, and one to prefill where nothing else does."""
    links = [
        LinkCapacity(name=f"link-{i}", capacity_mbps=draw(st.floats(1, 1e6))) for i in range(draw(st.integers(1, 2)))
    ]
    pools = [
        OffloadPool(
            name=f"offload-{i}",
            profile=draw(profiles),
            instances=draw(st.integers(1, 20)),
            link=links[draw(st.integers(0, len(links) - 1))].name,
        )
        for i in range(draw(st.integers(1, 3)) if offload else 0)
    ]
    hub = [
        HubPool(
            name=f"hub-{i}",
            profile=draw(profiles),
            instances=draw(st.integers(2, 6)),
            max_batch=draw(st.integers(1, 64)),
            step_seconds=draw(st.floats(1e-3, 0.2)),
            min_decode=draw(st.integers(0, 1)),
            min_prefill=draw(st.integers(0, 1)),
        )
        for i in range(draw(st.integers(1, 2)))
    ]
    return System(links=tuple(links), offload=tuple(pools), hub=tuple(hub), output_tokens=draw(st.floats(1, 5_000)))


workloads = st.dictionaries(st.integers(1, 200_000), st.floats(0.01, 100), min_size=1, max_size=12).map(
    lambda weights: Workload(sorted(weights), [weights[length] for length in sorted(weights)])
)
