"""Computes the tables of docs/understand/capacity.md: built-in profiles, lengths that are worth their way, and gains.

Nothing is typed by hand: the figures come from the built-in profiles and from examples/, by the planner itself.
`make reference` writes them, and the test of the reference compares.
"""

from pathlib import Path
from typing import Final

import msgspec

from prfaas.capacity import optimum
from prfaas.capacity.builtin import all_builtins, read_builtin
from prfaas.capacity.profile import cache_bytes, prefill_seconds
from prfaas.capacity.system import System
from prfaas.cli.plan import load
from prfaas.wire.profile import Profile

EXAMPLES: Final = Path(__file__).parents[1] / "examples"
LENGTH_LINKS: Final = (1, 2, 5, 10, 25, 100)
GAIN_LINKS: Final = (5, 10, 25, 100)
"""Gbit/s."""
GAINS: Final = (
    ("paper", 1.0),
    ("kimi-k3", 1.0),
    ("qwen3.5-397b", 1.0),
    ("qwen3.5-397b", 0.5),
    ("kimi-linear-48b", 1.0),
    ("idle-l40s", 1.0),
)
"""Examples, and the share of a cache's bytes that crosses the link."""
LONGEST_TOKENS: Final = 131_072
"""As far as the profiles reach."""
TOOL: Final = "aiconfigurator-core 0.12.0, kernels of "
"""The source of all profiles but those that the page calls assumed, as it says."""
AT_HOME: Final = (
    "kimi-k3-mxfp4-16xh200",
    "kimi-k3-mxfp4-8xb300",
    "qwen3.5-397b-fp8-8xh20-141",
    "qwen3.5-397b-fp8-8xh200",
    "qwen3.5-397b-fp8-8xb200",
    "qwen3.5-35b-bf16-2xh100",
)
"""What may stand in a hub, by the name of its profile."""

Row = tuple[str, ...]


def parts() -> dict[str, tuple[Row, list[Row]]]:
    """Return the head and the rows of each table, by its mark in the page."""
    lengths = ("hub instance", *(f"{rate} Gbit/s" for rate in LENGTH_LINKS))
    gains = ("example", "hub alone", *(f"{rate} Gbit/s" for rate in GAIN_LINKS))
    return {
        "profiles": (("name", "state, MB", "bytes a token", "hardware, and whose kernels"), profile_rows()),
        "lengths": (lengths, length_rows()),
        "gains": (gains, gain_rows()),
    }


def profile_rows() -> list[Row]:
    """Return a row for each model and precision: the hardware that ends the names, by whose kernels were measured."""
    sources: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for one in all_builtins():
        hardware = f"{one.devices}x{one.device}"
        sizes = f"{one.state_bytes / 1e6:.1f}", f"{one.token_bytes:,}"
        kernels = one.source.removeprefix(TOOL).partition(",")[0] if one.basis == "estimated" else "assumed"
        of_model = sources.setdefault((one.name.removesuffix(hardware), *sizes), {})
        of_model.setdefault(kernels, []).append(hardware)
    return [
        (f"`{start}`…", state, token, "; ".join(f"{', '.join(names)} ({kernels})" for kernels, names in found.items()))
        for (start, state, token), found in sources.items()
    ]


def length_rows() -> list[Row]:
    """Return the shortest prompts whose cache crosses an idle link while a hub instance would compute them."""
    profiles = {"the paper's model on 8 x H20": load(EXAMPLES / "paper.yaml").system.hub[0].profile}
    profiles |= {f"`{name}`": read_builtin("name", name).profile() for name in AT_HOME}
    return [
        (name, *(_tokens(shortest(profile, 1e9 * rate)) for rate in LENGTH_LINKS)) for name, profile in profiles.items()
    ]


def shortest(profile: Profile, link_bits_per_second: float) -> int | None:
    """Return the shortest such prompt; None: there is none as long as the profiles reach.

    The time saved is convex in the length. So once it is no longer negative, it stays so, unless it never was.
    """

    def pays(tokens: int) -> bool:
        return 8 * cache_bytes(profile, tokens) / link_bits_per_second <= prefill_seconds(profile, tokens)

    if pays(1):
        return 1
    low, high = 1, LONGEST_TOKENS
    if not pays(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def gain_rows() -> list[Row]:
    """Return what examples serve over the hub alone, and over as many instances in the hub, by link."""
    rows: list[Row] = []
    for name, share in GAINS:
        file = load(EXAMPLES / f"{name}.yaml")
        system, workload = file.system, file.workload
        alone, same = optimum.hub_alone(system), optimum.homogeneous(system)
        bases = [optimum.best(one, workload).lambda_max for one in (alone, same)]
        served = [optimum.best(changed(system, rate, share), workload).lambda_max for rate in GAIN_LINKS]
        cells = [", ".join(f"{one / base - 1:+.0%}" for base in bases) for one in served]
        title = f"[{name}](../../examples/{name}.yaml)" if share == 1 else f"{name}, {share:.0%} of the bytes"
        rows.append((title, f"{bases[0]:.2f}/s", *cells))
    return rows


def changed(system: System, link_gbps: float, share_of_bytes: float) -> System:
    """Return a system with other links, whose offload pools send this share of each cache's bytes."""
    links = [msgspec.structs.replace(link, capacity_mbps=1000 * link_gbps) for link in system.links]
    pools = [msgspec.structs.replace(pool, profile=_smaller(pool.profile, share_of_bytes)) for pool in system.offload]
    return msgspec.structs.replace(system, links=tuple(links), offload=tuple(pools))


def _smaller(profile: Profile, share: float) -> Profile:
    sizes = {"state_bytes": round(share * profile.state_bytes), "token_bytes": round(share * profile.token_bytes)}
    return msgspec.structs.replace(profile, **sizes)


def _tokens(tokens: int | None) -> str:
    return "never" if tokens is None else "all" if tokens == 1 else f"{tokens:,}"
