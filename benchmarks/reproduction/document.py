"""Writes docs/understand/reproduction.md: the tables and the text around them."""

from collections.abc import Sequence

from benchmarks.reproduction import published
from benchmarks.reproduction.rows import Section, table

HEAD = """# Published figures and ours

    prfaas bench reproduction --write       # regenerates this page and its pictures

This page compares the paper's figures (arXiv:2604.15039) with ours. It has every figure that a model or a simulator can
compute. *Model* applies the equations of [capacity](capacity.md) to published profiles. *Simulated* serves requests one
by one in [the simulator](simulation.md), which uses no equation. Its instances run the schedule of our own worker, not
that of the paper's engine. Nothing here was measured on H200 or H20.
"""

PLAINLY = """## Figures that do not reproduce

- **Tables 3 and 5 are measurements** on 8 H200 with SGLang 0.5.9. They are inputs here and cannot be repeated. The last
  section checks Table 3: its prefill times are plausible.
- **The H20 profile is not published.** Our profile has two coefficients, fitted to four figures of Table 6. The
  homogeneous column and Θ_pd-p show that these four figures agree within 1-3 %. They are no independent check.
- **The homogeneous column contradicts itself by 4 %**: 9 instances cannot have both Θ = 2.11 and a mean prefill of
  4.44 s.
- **+15 % at equal cost** depends on prices that are not published. Our ratio, 2 to 1, follows from the claim itself.
- **Ring's 4.5 and 36** compare with a configuration that the paper does not name.
- **TTFT of the two systems with offload** is 2-3 % below the published one in the model. The paper does not give a
  reason. In the simulation a first token takes a decode step more.
"""

IMPLIED = """## Table 3: the implied prefill times

The table has the published Φ_kv in Gbit/s and, in parentheses, the prefill's seconds: cache / Φ_kv. Cache sizes are
those of public configurations in bf16. Qwen3-235B has 94 layers of 4 key/value heads of 128, and MiniMax-M2.5 has
62 layers of 8. Kimi Linear 48B has 8,064 bytes a token and 43.4 MB of states. Other models' sizes are not assumed.
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
