"""The charts as Helm renders them, without a cluster; Helm is the one that the project pins."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas_sandbox.tools import ensure_tools

CHARTS = Path(__file__).parents[2] / "charts"
HELM_TIMEOUT_SECONDS = 90

Manifest = dict[str, Any]


class HelmError(Exception):
    """Helm refused; the text is what the user reads."""


@pytest.fixture(scope="session")
def helm() -> Callable[..., str]:
    """Return a function that runs helm and returns what it prints."""
    program = ensure_tools(lambda _: None)["helm"]

    def run(*arguments: str | Path) -> str:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=HELM_TIMEOUT_SECONDS, check=False
        )
        if done.returncode != 0:
            raise HelmError(done.stderr)
        return done.stdout

    return run


@pytest.fixture(scope="session")
def render(helm: Callable[..., str]) -> Callable[..., list[Manifest]]:
    """Return a function from a chart's name and helm options to its objects, in namespace `here`."""

    def objects(chart: str, *options: str) -> list[Manifest]:
        text = helm("template", "release", CHARTS / chart, "--namespace", "here", *options)
        return [document for document in yaml.safe_load_all(text) if document]

    return objects


@pytest.fixture(scope="session")
def hub(render: Callable[..., list[Manifest]]) -> list[Manifest]:
    """Return the chart prfaas with its default values."""
    return render("prfaas")


@pytest.fixture(scope="session")
def member(render: Callable[..., list[Manifest]]) -> list[Manifest]:
    """Return the chart prfaas-member with its default values."""
    return render("prfaas-member")
