"""The sandbox is a separate distribution: neither the wheel nor the images that users install hold it."""

import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def read(path: str) -> dict:
    return tomllib.loads((ROOT / path).read_text())


def test_the_wheel_of_prfaas_holds_no_sandbox():
    project = read("pyproject.toml")
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {Path(package).name for package in packages} == {
        "prfaas", "prfaas_operator", "prfaas_gateway", "prfaas_scheduler", "prfaas_transfer",
        "prfaas_vllm", "prfaas_worker",
    }  # fmt: skip
    assert "prfaas_sandbox" not in str(project["project"])
    assert all(not list((ROOT / package).rglob("prfaas_sandbox*")) for package in packages)


def test_nothing_that_is_installed_needs_the_sandbox():
    assert "sandbox" not in read("pyproject.toml")["project"]["optional-dependencies"]
    copied = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("COPY")]
    assert not [line for line in copied if "sandbox" in line]


@pytest.mark.parametrize("command", ["demo", "kind", "sandbox"])
def test_its_commands_are_its_own_distributions(command):
    registered = read("sandbox/pyproject.toml")["project"]["entry-points"]["prfaas.commands"]
    (point,) = entry_points(group="prfaas.commands", name=command)
    assert (point.dist.name, point.value) == ("prfaas-sandbox", registered[command])


def test_both_distributions_have_one_version():
    assert read("pyproject.toml")["project"]["version"] == read("sandbox/pyproject.toml")["project"]["version"]


def test_the_lock_binds_what_the_sandbox_needs_and_names_no_index():
    lock = (ROOT / "requirements.lock.txt").read_text()
    needed = [need.split(">=")[0] for need in read("sandbox/pyproject.toml")["project"]["dependencies"]]
    assert [name for name in needed if f"\n{name}==" not in f"\n{lock}"] == ["prfaas"]
    assert "--index-url" not in lock
    assert "://" not in "".join(line for line in lock.splitlines() if not line.lstrip().startswith("#"))
