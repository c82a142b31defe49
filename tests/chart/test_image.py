"""Proves what the Dockerfile claims, by reading it: targets without root, made of what the lock binds.

That they build and run is shown where there is a Docker daemon, on kind.
"""

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from prfaas_operator.render.common import USER_ID

ROOT = Path(__file__).parents[2]
TARGETS = ("operator", "gateway", "worker", "vllm-connector")
FETCHES = re.compile(r"(?:pip install (?!.*--no-deps /dist/)|uv build )[^&|;\n]*")


class Stage(NamedTuple):
    """A stage of the Dockerfile: what it is made from, its name, and its instructions as (word, rest)."""

    base: str
    name: str
    instructions: list[tuple[str, str]]

    def all(self, word: str) -> list[str]:
        return [rest for each, rest in self.instructions if each == word]


def read() -> tuple[dict[str, str], dict[str, Stage]]:
    """Return the global arguments and the stages by name."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages[name] = stage = Stage(base, name, [])
        elif word == "ARG" and stage is None:
            name, _, default = rest.partition("=")
            arguments[name] = default
        elif word and not word.startswith("#") and stage is not None:
            stage.instructions.append((word, rest))
    return arguments, stages


ARGUMENTS, STAGES = read()


def lineage(name: str, torch: str = "pypi") -> list[Stage]:
    """Return the stages that a target consists of, the first one first."""
    stage = STAGES[name]
    base = stage.base.replace("${TORCH}", torch)
    return [*lineage(base, torch), stage] if base in STAGES else [stage]


each_target = pytest.mark.parametrize("target", TARGETS)
each_torch = pytest.mark.parametrize("torch", ["pypi", "debian"])


@each_target
@each_torch
def test_an_image_ends_as_a_numbered_user_who_is_not_root(target, torch):
    users = [user for stage in lineage(target, torch) for user in stage.all("USER")]
    assert users[-1] == f"{USER_ID}:{USER_ID}"
    uid, _, gid = users[-1].partition(":")
    assert int(uid) > 0
    assert int(gid) > 0


@each_target
def test_an_image_stands_on_the_base_that_the_builder_names(target):
    assert lineage(target)[0].base == "${BASE}"
    assert ":" in ARGUMENTS["BASE"], "the default base has a version"
    assert not ARGUMENTS["BASE"].endswith(":latest")


@each_target
def test_an_image_gets_an_environment_and_no_sources(target):
    copied = [rest for stage in lineage(target) for rest in stage.all("COPY")]
    assert len(copied) == 1
    folder = "/prfaas-vllm" if target == "vllm-connector" else "/opt/venv"
    assert re.fullmatch(rf"--from=build-[\w-]+ {folder} {folder}", copied[0])


@each_target
def test_an_image_says_what_it_is_and_keeps_no_secret(target):
    labels = " ".join(label for stage in lineage(target) for label in stage.all("LABEL"))
    assert "org.opencontainers.image.title=" in labels
    assert "org.opencontainers.image.licenses=Apache-2.0" in labels
    words = [word for stage in STAGES.values() for key in ("ENV", "ARG") for word in stage.all(key)]
    assert not [word for word in words if re.search("token|password|secret", word, re.IGNORECASE)]


def test_nothing_is_fetched_but_by_the_lock():
    """Every installation of packages names a lock, whose hashes uv checks, and so does the build of our wheel, which
    installs its backend; nothing is added from an address."""
    instructions = [each for stage in STAGES.values() for each in stage.instructions]
    assert not [rest for word, rest in instructions if word == "ADD"]
    commands = [rest for word, rest in instructions if word == "RUN"]
    assert not [command for command in commands if re.search(r"\b(curl|wget|git clone)\b", command)]
    fetches = [found for command in commands for found in FETCHES.findall(command)]
    assert len(fetches) >= 5
    assert [fetch.split()[:2] for fetch in fetches].count(["uv", "build"]) == 1
    for fetch in fetches:
        assert "--require-hashes" in fetch or "--constraints requirements.lock.txt" in fetch, fetch


def test_a_contributors_environment_is_made_by_the_locks_alone():
    """What builds our own packages was once the newest in the index."""
    recipe = (ROOT / "Makefile").read_text().replace("\\\n", " ").partition("$(STAMP): ")[2].partition("\n\n")[0]
    fetches = [line for line in recipe.splitlines() if re.search("pip (install|sync) ", line)]
    assert ["--editable" in line for line in fetches] == [False, False, True]
    assert all("--require-hashes" in line for line in fetches[:2])
    assert "--build-constraints requirements-build.lock.txt --require-build-hashes" in " ".join(fetches[2].split())


@pytest.mark.parametrize(
    ("lock", "fewest"),
    [("requirements.lock.txt", 50), ("requirements-uv.lock.txt", 1), ("requirements-build.lock.txt", 4)],
)
def test_the_lock_binds_every_package_by_hash(lock: str, fewest: int):
    lines = (ROOT / lock).read_text().splitlines()
    pinned = [number for number, line in enumerate(lines) if re.match(r"[a-z0-9][a-z0-9._-]*==", line)]
    assert len(pinned) >= fewest
    assert all("--hash=sha256:" in lines[number + 1] for number in pinned)


def test_the_lock_names_all_that_images_ask_for():
    """As a constraint it lets in, without a hash, what it does not name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(re.findall(r"--extra (\w+)", (ROOT / "Dockerfile").read_text()))
    assert extras >= {"operator", "gateway", "scheduler", "worker", "otel"}
    asked = [*project["dependencies"], *(one for name in extras for one in project["optional-dependencies"][name])]
    pinned = re.findall(r"(?m)^([a-z0-9._-]+)==", (ROOT / "requirements.lock.txt").read_text())
    assert {re.split("[^a-z0-9._-]", one)[0] for one in asked} <= set(pinned)


def test_packages_of_the_distribution_leave_no_lists_behind():
    commands = [rest for stage in STAGES.values() for rest in stage.all("RUN") if "apt-get install" in rest]
    for command in commands:
        assert "--no-install-recommends" in command
        assert "rm -rf /var/lib/apt/lists/*" in command


def test_the_builder_is_not_sent_what_no_image_is_made_of():
    ignored = set((ROOT / ".dockerignore").read_text().split())
    assert {".git", ".venv", ".prfaas", "tests", "tools", "docs", "**/__pycache__"} <= ignored
    sources = {word for stage in STAGES.values() for copy in stage.all("COPY") for word in copy.split()[:-1]}
    assert not sources & ignored


def test_the_pages_build_the_images_that_charts_name():
    """README.md once built :latest, and the chart named :0.1.0."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    charts = [
        yaml.safe_load((ROOT / "charts" / name / "Chart.yaml").read_text()) for name in ("prfaas", "prfaas-member")
    ]
    built = [
        tag
        for page in ("README.md", "docs/use/install.md")
        for tag in re.findall(r"docker build [^`&]*-t (\S+)", (ROOT / page).read_text())
    ]
    assert len(built) == 5
    assert {chart["appVersion"] for chart in charts} == {version}
    assert {image.partition(":")[2] for image in built} == {version}
