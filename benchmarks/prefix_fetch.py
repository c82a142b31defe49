"""What fetching a prefix from another instance is worth, against computing it again.

    prfaas bench prefix_fetch [--file FILE] [--seeds N] [--load SHARE] [--trace FILE]

The paper's case in the simulator, with bursts, and with prompts of which half go on from earlier ones (or a published
trace, which brings its own prefixes). Both runs meet the same requests; the rival never fetches. Virtual time: other
work on the machine changes nothing.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from unittest.mock import patch

import msgspec
from benchmarks.report import Figure, run

from prfaas.cli.simulate import SimulatedLoad
from prfaas.simulate.outcome import Result
from prfaas.simulate.scenario import PolicyName
from prfaas.simulate.setup import planned

PAPER = Path(__file__).parents[1] / "examples" / "simulate.yaml"
NEVER = patch("prfaas.routing.decide.prefix_source", lambda *_: None)


def results(given: argparse.Namespace, policy: PolicyName) -> list[Result]:
    """Serve the same load once a seed."""
    load = SimulatedLoad(given.file, given.trace, None)
    rate_per_second = given.load * planned(load.file, "static")[1].lambda_max
    found: list[Result] = []
    for seed in range(1, 2 if given.trace else 1 + given.seeds):
        load.setup = msgspec.structs.replace(load.setup, seed=seed, prefix_share=0.0 if given.trace else 0.5)
        found.append(load.run(policy, rate_per_second))
    return found


def figures(given: argparse.Namespace) -> Iterator[Figure]:
    """Compare mean and P90 of the time to first token."""
    for policy in ("threshold", "price"):
        fetched = results(given, policy)
        with NEVER:
            computed = results(given, policy)
        for name in ("mean", "p90"):
            value, rival = (mean(getattr(one.ttft_seconds, name) for one in runs) for runs in (fetched, computed))
            yield Figure(
                name=f"{policy}: {name} TTFT", value=value, unit="s", rival="prefixes computed again", rival_value=rival
            )


def flags(parser: argparse.ArgumentParser) -> None:
    """Add what this benchmark is told."""
    parser.add_argument("--file", type=Path, default=PAPER)
    parser.add_argument("--trace", type=Path, help="serve this trace; seeds then change nothing")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--load", type=float, default=0.6, help="share of what the plan carries")


if __name__ == "__main__":
    run("prefix_fetch", __doc__ or "", figures, flags)
