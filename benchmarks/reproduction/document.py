"""docs/reproduction.md: the tables with what has to be said of them."""

from collections.abc import Sequence

from benchmarks.reproduction import published
from benchmarks.reproduction.rows import Section, table

HEAD = """# What was published, and what comes out here

    prfaas bench reproduction --write       # regenerates this page and its pictures

Every figure of the paper (arXiv:2604.15039) that a model or a simulator can say something of, beside both. *Model* is
the equations of [docs/capacity.md](capacity.md) on published profiles; *simulated* is requests served one by one by
[the simulator](simulation.md), which knows no equation. Nothing here was measured on H200 or H20.
"""

PLAINLY = """## What does not reproduce

- **Tables 3 and 5 are measurements** on 8 H200 with SGLang 0.5.9. Nothing here can take them again; they are inputs.
  What can be said of Table 3 stands at the end: a cache's size, which a public configuration tells, and Φ_kv give the
  time that a prefill took, and those times are sane.
- **The H20 profile is not published.** Ours is two coefficients chosen to come nearest to four figures of Table 6. The
  homogeneous column and Θ_pd-p show that those figures agree with each other, to 1-3 %, and are no independent check.
- **The homogeneous column contradicts itself by 4 %**: Θ of 2.11 and a mean prefill of 4.44 s on 9 instances cannot
  both hold.
- **+15 % at equal cost** rests on prices that are not published. Ours, 2 to 1, are what the claim itself implies.
- **Ring's 4.5 and 36** need a rival that is not named; with the nearest one that we find they come out as 4.4 and 35.6.
- **TTFT of the two systems with offload** is 2-3 % short of what was published, for a reason that is not in the paper.
- **The egress** of the case study is 5 % low, for a reason that follows from Table 5 (below).
"""

IMPLIED = """## Table 3: what it implies

Φ_kv in Gbit/s as published, and the seconds of a prefill that follow from it: cache / Φ_kv, with caches of public
configurations in bf16: Qwen3-235B 94 layers of 4 key/value heads of 128, MiniMax-M2.5 62 layers of 8, Kimi Linear 48B
8,064 bytes a token and 43.4 MB of states. Of the other three no size is assumed.
"""

CACHES = {
    "Kimi Linear": (43_400_000, 8_064),
    "MiniMax-M2.5": (0, 62 * 2 * 8 * 128 * 2),
    "Qwen3-235B": (0, 94 * 2 * 4 * 128 * 2),
}
"""Bytes of states, and bytes a token."""


def implied_seconds(model: str, place: int) -> float | None:
    """Return the prefill's seconds that follow from a cell of Table 3; None where no cache size is known."""
    if model not in CACHES:
        return None
    state_bytes, token_bytes = CACHES[model]
    cache_bits = 8 * (state_bytes + token_bytes * published.LENGTHS[place])
    return cache_bits / published.PHI_GBPS[model][place] / 1e9


def table_3() -> str:
    """Return Table 3 with implied seconds, as Markdown."""
    lines = [["", *(f"{tokens // 1024}K" for tokens in published.LENGTHS)], ["---", *["---:"] * 4]]
    for model, cells in published.PHI_GBPS.items():
        seconds = [implied_seconds(model, place) for place in range(len(cells))]
        shown = [f"{phi:.2f}" + (f" ({one:.2f} s)" if one else "") for phi, one in zip(cells, seconds, strict=True)]
        lines.append([model, *shown])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def document(sections: Sequence[Section]) -> str:
    """Return the whole page."""
    parts = [HEAD, PLAINLY, PICTURES]
    for one in sections:
        texts = [f"## {one.title}", one.intro, table(one.rows), one.after]
        parts.append("\n\n".join(text for text in texts if text) + "\n")
    parts.append(f"{IMPLIED}\n{table_3()}\n")
    return "\n".join(parts)


PICTURES = """![Λ_max and times of the three systems](reproduction/table-6.svg)
![Φ_kv by length](reproduction/phi.svg)
"""
