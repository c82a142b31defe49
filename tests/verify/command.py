"""Runs `prfaas verify` in this process, and reads what it found."""

import json
from typing import Any, NamedTuple

import typer
from typer.testing import CliRunner

from prfaas.cli.verify.command import verify

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
