"""Deployables run on what their extras install: whatever else stands in this environment is hidden from them."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    "prfaas_operator": ("operator", "otel"),
    "prfaas_gateway": ("gateway", "scheduler", "otel"),
    "prfaas_scheduler": ("gateway", "scheduler", "otel"),
}
"""As the images have them, see Dockerfile. The worker is left out: transformers asks the environment what it has."""
IMPORT_ALL = """
import importlib, pkgutil, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"{name} is not among what the image has", name=name)

HIDDEN = set(sys.argv[2:])
sys.meta_path.insert(0, Hidden())
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
    importlib.import_module(module.name)
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(wanted: list[str]) -> set[str]:
    """Return the distributions that some requirements lead to; markers are taken to hold, extras are followed."""
    found: set[str] = set()
    while wanted:
        name, extras = re.match(r"([\w.-]+)(?:\[([^\]]*)\])?", wanted.pop()).groups()
        key = normal(name) + (f"[{extras}]" if extras else "")
        if key in found:
            continue
        found |= {key, normal(name)}
        try:
            needed = requires(name) or []
        except PackageNotFoundError:  # for another platform
            continue
        chosen = {one.strip() for one in (extras or "").split(",")}
        for line in needed:
            extra = re.search(r"""extra\s*==\s*["']([^"']+)""", line)
            if extra is None or extra[1] in chosen:
                wanted.append(line)
    return found


@pytest.mark.parametrize("package", EXTRAS)
def test_a_deployable_imports_nothing_that_its_image_lacks(package):
    wanted = list(PROJECT["dependencies"])
    for extra in EXTRAS[package]:
        wanted += PROJECT["optional-dependencies"][extra]
    has = closure(wanted) | {"prfaas"}
    hidden = [module for module, owners in packages_distributions().items() if not has & set(map(normal, owners))]
    assert "pytest" in hidden, "else this proves nothing"
    command = [sys.executable, "-c", IMPORT_ALL, package, *hidden]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
