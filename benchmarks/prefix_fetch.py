"""What fetching a prefix from another instance is worth, against computing it again.

    prfaas bench prefix_fetch [--file FILE] [--seeds N] [--load SHARE] [--trace FILE]

The paper's case in the simulator, with bursts, and with prompts of which half go on from earlier ones (or a published
trace, which brings its own prefixes). Both runs meet the same requests; the rival never fetches. Virtual time: other
work on the machine changes nothing.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Annotated
from unittest.mock import patch

import msgspec
import typer
from benchmarks.report import Figure, run

from prfaas.cli.simulate import SimulatedLoad
from prfaas.simulate.outcome import Result
from prfaas.simulate.scenario import PolicyName
from prfaas.simulate.setup import planned

PAPER = Path(__file__).parents[1] / "examples" / "simulate.yaml"
NEVER = patch("prfaas.routing.decide.prefix_source", lambda *_: None)


def results(served: SimulatedLoad, load: float, seeds: int, policy: PolicyName) -> list[Result]:
    """Serve the same load once a seed."""
    rate_per_second = load * planned(served.file, "static")[1].lambda_max
    found: list[Result] = []
    for seed in range(1, 1 + seeds):
        served.setup = msgspec.structs.replace(served.setup, seed=seed, prefix_share=0.0 if served.trace else 0.5)
        found.append(served.run(policy, rate_per_second))
    return found


def figures(
    file: Path = PAPER,
    trace: Annotated[Path | None, typer.Option(help="Serve this trace; seeds then change nothing.")] = None,
    seeds: int = 5,
    load: Annotated[float, typer.Option(help="Share of what the plan carries.")] = 0.6,
) -> Iterator[Figure]:
    """Compare mean and P90 of the time to first token."""
    served = SimulatedLoad(file, trace, None)
    seeds = 1 if trace else seeds
    for policy in ("threshold", "price"):
        fetched = results(served, load, seeds, policy)
        with NEVER:
            computed = results(served, load, seeds, policy)
        for name in ("mean", "p90"):
            value, rival = (mean(getattr(one.ttft_seconds, name) for one in runs) for runs in (fetched, computed))
            yield Figure(
                name=f"{policy}: {name} TTFT", value=value, unit="s", rival="prefixes computed again", rival_value=rival
            )


if __name__ == "__main__":
    run("prefix_fetch", __doc__, figures)
