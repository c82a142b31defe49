"""Emulated workers keep the contract of engines, alone and in pairs, inside TLS and while roles change. They take their
profile's time or say that they do not, and need no torch."""

import datetime
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest

from prfaas import identity
from prfaas.capacity.builtin import read_builtin
from prfaas.capacity.profile import prefill_seconds
from prfaas.cli.contract.calls import CheckedEngine, Running
from prfaas.cli.contract.checks import ALONE, PAIR, EnginePair, text_of
from prfaas.names import WORKER_DATA_PORT
from prfaas.wire import headers
from prfaas.wire.engine import Role

from ..unit.tls.mounts import Mount
from ..unit.worker.conftest import launched
from ..waiting import NotInTime, assert_prompt, eventually
from .bench import Bench, listener
from .conftest import benches, ready

pytestmark = pytest.mark.system

PROFILE: Final = "qwen3.5-397b-fp8-8xh200"
SCALE: Final = 256
CLUSTERS: Final = ("eu", "hub")
FLAGS: Final = ("--emulate", PROFILE, "--cache-scale", str(SCALE), "--cache-mib", "64", "--max-context", "65536")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with benches(tmp_path_factory.mktemp("emulated"), *FLAGS) as found:
        yield found


@pytest.mark.parametrize("claim", ALONE)
def test_an_emulated_worker_keeps_what_is_asked_of_an_engine(emulated: Bench, claim: str):
    assert ALONE[claim](emulated.destination.engine)


@pytest.mark.parametrize("claim", PAIR)
def test_two_emulated_workers_keep_what_is_asked_of_a_pair(emulated: Bench, claim: str):
    assert PAIR[claim](emulated.pair())


def test_a_cache_crosses_with_the_scaled_bytes_of_its_profile(emulated: Bench):
    profile = read_builtin("", PROFILE)
    answer = emulated.pair().hand_off(text_of(20_001))[1].answer()
    wanted = (profile.state_bytes + 20_000 * profile.token_bytes) / SCALE
    assert int(answer.headers[headers.KV_BYTES]) == pytest.approx(wanted, rel=0.01)


def test_a_cache_crosses_inside_tls_from_the_cluster_that_was_named_alone(tmp_path: Path):
    until = identity.valid_for(datetime.datetime.now(datetime.UTC), 1)
    authority = identity.make_authority("one", until)
    mounts = {name: Mount(tmp_path / name).put(identity.issue(authority, name, until), authority) for name in CLUSTERS}
    with launched(tmp_path) as launch:
        workers = [
            launch(f"of-{name}", "--cluster", name, "--tls-dir", str(mounts[name].path), *FLAGS) for name in CLUSTERS
        ]
        source, destination = (one.engine for one in ready(*workers, tls_dir=mounts["hub"].path))
        pair, prompt = EnginePair(source, destination, WORKER_DATA_PORT), text_of(20_001)
        for cluster in ("us", "eu"):
            named = msgspec.structs.replace(pair.name_transfer(), cluster=cluster)
            answer = pair.hand_off(prompt, named, cache_salt=cluster)[1].answer()
            pair.require_same(answer, prompt, is_fetched=cluster == "eu")
    profile = read_builtin("", PROFILE)
    wanted = (profile.state_bytes + 20_000 * profile.token_bytes) / SCALE
    assert int(answer.headers[headers.KV_BYTES]) == pytest.approx(wanted, rel=0.01)


def test_a_destination_gives_no_memory_to_prompts_that_its_source_has_not_begun(emulated: Bench):
    pair, waiting = emulated.pair(), list[float]()
    legs = [leg for _ in range(5) for leg in pair.hand_off(text_of(30_000), max_tokens=1)]

    def are_answered() -> bool:
        waiting.append(pair.destination.metrics()["prfaas_requests_waiting"])
        return all(leg.is_answered() for leg in legs)

    eventually(are_answered, "the legs are answered")
    if max(waiting) < 3:  # the source begins with two at once at most, and a busy machine may look too late
        raise NotInTime(f"at most {max(waiting):g} of five prompts waited for their source")
    assert all(leg.answer().has_fetched for leg in legs[1::2])
    pair.wait_idle()


def put_role(engine: CheckedEngine, role: Role) -> None:
    asked = urllib.request.Request(f"{engine.url}/v1/role", msgspec.json.encode({"role": role}), method="PUT")
    with urllib.request.urlopen(asked) as answer:
        assert msgspec.json.decode(answer.read()) == {"role": role}


def test_a_role_that_changes_loses_no_request_and_changes_no_answer(emulated: Bench):
    engine, prompts = emulated.destination.engine, [text_of(5000) for _ in range(4)]
    wanted = [engine.ask(prompt=prompt, max_tokens=150).choice["text"] for prompt in prompts]
    running: list[Running] = []

    def changes(role: Role) -> bool:
        """Change the role; return whether all requests run or wait then, which on a busy machine may have ended."""
        begun = [engine.begin(prompt=prompt, max_tokens=150, cache_salt=role) for prompt in prompts]
        running.extend(begun)
        engine.wait_busy(begun[0])
        put_role(engine, role)
        return not any(one.is_answered() for one in begun)

    roles: tuple[Role, ...] = ("prefill", "decode", "mixed")
    for role in roles:
        eventually(lambda role=role: changes(role), "a role changes before any request ends")
    assert [one.answer().choice["text"] for one in running] == wanted * (len(running) // len(wanted))
    assert len(set(wanted)) == len(prompts)
    engine.wait_idle()


def test_an_engine_whose_machine_is_too_slow_says_so(tmp_path: Path):
    """Steps of five microseconds end late on any machine."""
    with launched(tmp_path) as launch:
        (worker,) = ready(launch("quick", *FLAGS, "--stretch", "0.001"))
        assert worker.engine.metrics()["prfaas_emulation_too_slow"] == 0, "no step was late yet"
        worker.engine.ask(prompt=text_of(100), max_tokens=200)
        assert worker.engine.metrics()["prfaas_emulation_too_slow"] == 1


def test_a_worker_says_that_it_is_emulated(emulated: Bench):
    engine, profile = emulated.source.engine, read_builtin("", PROFILE)
    with urllib.request.urlopen(f"{engine.url}/v1/profile") as answer:
        said = msgspec.json.decode(answer.read())
    assert said["emulated"] == PROFILE
    assert said["token_bytes"] == profile.token_bytes / SCALE
    assert said["prefill"]["max_tokens"] >= 32_768
    assert said["prefill"]["token_seconds"] == pytest.approx(profile.profile().token_seconds, rel=0.05)
    assert engine.metrics()["prfaas_emulated"] == 1


def status_of(process: int, file: str, field: str) -> int:
    """Return a number of a file of /proc."""
    lines = Path(f"/proc/{process}/{file}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def test_an_emulated_worker_loads_no_torch_and_is_small(emulated: Bench):
    mover = listener(*emulated.source.address)
    engine = status_of(mover, "status", "PPid")
    family = [status_of(engine, "status", "PPid"), engine, mover]
    assert [one for one in family if "torch" in Path(f"/proc/{one}/maps").read_text()] == []
    resident = [status_of(one, "status", "VmRSS") / 1024 for one in family]
    shares = [status_of(one, "smaps_rollup", "Pss") / 1024 for one in family]
    print("MiB of front, engine and mover:", *map(round, resident), "with their shares of shared pages:", sum(shares))
    assert sum(shares) < 4096 / 24


@pytest.mark.quiet
@pytest.mark.parametrize("tokens", [4000, 32_000])
def test_the_first_token_comes_when_the_profile_says(emulated: Bench, tokens: int):
    profile, pair = read_builtin("", PROFILE), emulated.pair()
    wanted = prefill_seconds(profile.profile(), tokens) + profile.decode_steps[0].seconds
    pair.hand_off(text_of(100), max_tokens=1)[1].answer()
    pair.wait_idle()
    began = time.monotonic()
    answer = pair.hand_off(text_of(tokens + 1), max_tokens=1)[1].answer()
    seconds = time.monotonic() - began
    assert answer.has_fetched
    assert seconds > 0.999 * wanted
    assert_prompt(seconds, wanted + 0.05, f"the first token behind {tokens} tokens that were prefilled elsewhere")
