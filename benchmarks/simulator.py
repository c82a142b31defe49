"""What a simulated request costs, and what the decisions of the live code are of it.

    prfaas bench simulator [--requests N] [--policy NAME]

The paper's case study at 75 % load, on one core, in CPU seconds, which other work on the machine disturbs little. The
rival is `routing.decide` alone on as many requests: the live code that a simulator of this kind cannot do without.
"""

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Figure, run

from prfaas.cli.simulate import SimulatedLoad
from prfaas.routing.decide import decide
from prfaas.routing.facts import RoutingFacts, rule_in_force
from prfaas.simulate.gateway import routing_table
from prfaas.simulate.scenario import PolicyName
from prfaas.simulate.setup import scenario

PAPER = Path(__file__).parents[1] / "examples" / "simulate.yaml"
REACH_SECONDS = 300.0
REACH_FOR = 1_000_000
DECISIONS = 20_000


def decide_seconds(loaded: SimulatedLoad, policy: str) -> float:
    """Time of one decision on the scenario's own routing table."""
    table = routing_table(scenario(loaded.file, loaded.setup, policy, 1.0))
    rule = rule_in_force(table, None)
    lengths = loaded.file.workload.sample(random.Random(1), DECISIONS)
    in_flight = dict.fromkeys((one.name for one in table.instances), 1)
    started = time.process_time()
    for index, tokens in enumerate(lengths):
        decide(
            RoutingFacts(
                now_seconds=0.0, request_id=str(index), total_tokens=tokens, rule=rule, table=table, in_flight=in_flight
            )
        )
    return (time.process_time() - started) / DECISIONS


def figures(requests: int = REACH_FOR, policy: PolicyName = "threshold") -> Iterator[Figure]:
    loaded = SimulatedLoad(PAPER, None, None, requests=requests)
    each_seconds = decide_seconds(loaded, policy)

    def show(arrived: int) -> None:
        if sys.stderr.isatty() and arrived % 10_000 == 0:
            print(f"\r{arrived:,} of {requests:,}", end="", file=sys.stderr)

    started = time.process_time()
    result = loaded.run(policy, loaded.rate_per_second, show)
    seconds = time.process_time() - started
    yield Figure(
        name=f"CPU of {requests:,} requests, {policy}",
        value=seconds,
        unit="s",
        reach=REACH_SECONDS * requests / REACH_FOR,
        rival="their decisions alone",
        rival_value=each_seconds * requests,
    )
    yield Figure(name="requests that ended", value=float(result.completed + result.refused), unit="", better="higher")
    yield Figure(name="virtual time by CPU time", value=result.seconds / seconds, unit="", better="higher")


if __name__ == "__main__":
    run("simulator", __doc__, figures)
