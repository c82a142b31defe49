"""Runs `prfaas verify` in this process, or its own steps alone, and reads what was found."""

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import typer
from typer.testing import CliRunner

from prfaas.cli.contract.checks import EnginePair
from prfaas.cli.verify.command import make_kit, verify
from prfaas.cli.verify.record import VerifiedStep
from prfaas.cli.verify.run import Pace, run_steps
from prfaas.cli.verify.steps import steps_of

APP = typer.Typer()
APP.command()(verify)


class Verified(NamedTuple):
    """How a run ended, and its record."""

    exit_code: int
    record: dict[str, Any]

    def outcomes(self, *wanted: str) -> dict[str, str]:
        """Return what was seen, by claim, of the steps with these outcomes."""
        return {one["claim"]: one["seen"] for one in self.record["steps"] if one["outcome"] in wanted}


def verified(source: str, destination: str, *flags: str, data_port: int = 1) -> Verified:
    """Verify two engines. Raises what the command raises."""
    urls = ("--prefill", source, "--decode", destination, "--data-port", str(data_port))
    result = CliRunner().invoke(APP, [*urls, *flags, "-o", "json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Verified(result.exit_code, json.loads(result.stdout))


def run_own_steps(
    pair: EnginePair,
    most_tokens: int,
    tell: Callable[[VerifiedStep], None] = lambda _: None,
    *,
    but: tuple[str, ...] = (),
) -> list[VerifiedStep]:
    """Run the steps but those of `prfaas contract`, and but those whose claims begin so; return what each found.
    `tell` is called with each as it ends."""
    kit, results = make_kit({"prefill": pair.source, "decode": pair.destination}, pair), list[VerifiedStep]()
    kit.most_tokens = most_tokens
    left_out = ("prefill", "decode", "the pair", *but)
    steps = [one for one in steps_of(kit) if not one.claim.startswith(left_out)]
    run_steps(kit, steps, Pace(0, 0), math.inf, lambda result, _left_seconds: tell(result), results)
    return results
