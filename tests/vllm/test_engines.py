"""The engines that other tests stand on: what they answer, how they end, and that nothing is left of them."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prfaas_worker.assets import model_directory

from ..waiting import assert_freed
from .conftest import MODEL
from .engines import Engine, EngineHost, reference_of

ROOT = Path(__file__).parents[2]
# Started by a test as pytest would start it, with its own process to be killed.
SESSION = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.vllm.engines import EngineHost
host = EngineHost(*map(Path, sys.argv[2:5]))
print("started", flush=True)
time.sleep(600)
"""


def prompt_of(count: int) -> list[int]:
    return [random.Random(count).randrange(256) for _ in range(count)]


@pytest.fixture(scope="module")
def other(engine_host: EngineHost) -> Engine:
    return engine_host.start("other").wait_ready()


@pytest.mark.parametrize("length", [5, 127, 128, 600])
def test_two_engines_agree_to_the_last_bit(reference_engine: Engine, other: Engine, length: int):
    first, second = (reference_of(one, prompt_of(length), 8) for one in (reference_engine, other))
    assert first == second
    assert len(first.tokens) == len(first.logprobs) == 8
    assert len(first.prompt) == length + 1


def test_nothing_is_left_of_a_session_that_is_killed(vllm_python: Path, tmp_path: Path):
    """The host is pid 1 of a namespace, so engines and servers end with it."""
    arguments = [ROOT, vllm_python, tmp_path, model_directory(MODEL)]
    command = [sys.executable, "-c", SESSION, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as session:
        try:
            assert session.stdout.readline() == "started\n"
            assert processes_with(str(tmp_path))
        finally:
            session.send_signal(signal.SIGKILL)
    assert_freed(lambda: not processes_with(str(tmp_path)), lambda: f"{processes_with(str(tmp_path))} end")


def processes_with(open_file: str) -> list[int]:
    """Processes that have a file below a folder open: an engine holds its log."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(one.readlink()).startswith(open_file) for one in (process / "fd").iterdir()):
                found.append(int(process.name))
        except OSError:
            continue  # it has ended, or is another user's
    return found
