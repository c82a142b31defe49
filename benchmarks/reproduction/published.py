"""The paper's published figures (arXiv:2604.15039). Table 6 is in examples/paper.yaml, with the system."""

from typing import Final

LENGTHS: Final = (1024, 8192, 32768, 131072)
PHI_GBPS: Final[dict[str, tuple[float, float, float, float]]] = {
    "Kimi Linear": (1.19, 2.29, 3.87, 4.88),
    "MiMo-V2-Flash": (0.82, 2.85, 4.66, 4.71),
    "Qwen3.5-397B": (4.13, 6.28, 8.25, 7.47),
    "Ring-2.5-1T": (7.27, 4.47, 2.59, 1.46),
    "MiniMax-M2.5": (4.94, 32.87, 59.93, 47.82),
    "Qwen3-235B": (4.12, 22.42, 33.35, 21.50),
}
"""Table 3: Phi_kv on 8 H200, by prompt length."""

TABLE_5: Final[dict[int, tuple[float, float, float]]] = {
    1024: (190.8, 0.44, 3.61),
    8192: (308.9, 0.72, 3.59),
    32768: (701.3, 1.84, 3.19),
    131072: (2316.3, 7.40, 2.62),
}
"""MiB of cache, seconds of prefill, and Gbit/s of Phi_kv of the internal 1T hybrid on one instance of 8 H200."""

EGRESS: Final = (
    ("MiniMax-M2.5", 32768, 512, 3.8),
    ("Qwen3-235B", 32768, 512, 2.1),
    ("Ring-2.5-1T", 32768, 512, 0.17),
    ("Ring-2.5-1T", 131072, 10_000, 1.8),
)
"""Model, prompt tokens, GPUs, and the Tbit/s that leave them."""

MEMORY: Final = {"MLA against GQA": 4.5, "one full layer in eight": 8.0, "both": 36.0}
RATIO_OVER_HOMOGENEOUS: Final = 1.54
RATIO_OVER_NAIVE: Final = 1.32
GAIN_AT_EQUAL_COST: Final = 0.15
P90_REDUCTION: Final = 0.64
LONG_TOKENS: Final = 44_000
