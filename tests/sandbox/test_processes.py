"""A command that fails, hangs or does not exist ends in one error that says which, and leaves no process behind."""

import asyncio
import sys
from pathlib import Path

import pytest

from prfaas.errors import ConfigError, PeerError, UnreachableError
from prfaas_sandbox.processes import TAIL_LINES, Command, at_once, run, run_logged


async def test_output_comes_back_and_input_goes_in():
    assert await run(Command(["cat"]), b"words") == "words"


async def test_environment_and_folder_are_the_commands_own(tmp_path: Path):
    shown = await run(Command(["sh", "-c", "echo $WORD; pwd"], environment={"WORD": "yes"}, folder=tmp_path))
    assert shown.split() == ["yes", str(tmp_path)]


async def test_a_failure_carries_the_programs_last_words_and_its_short_name():
    with pytest.raises(PeerError, match=r"^a lookup: no luck$"):
        await run(Command(["sh", "-c", "echo no luck >&2; exit 3"], shown="a lookup"))


async def test_a_program_that_is_not_there_is_the_users_to_install():
    with pytest.raises(ConfigError, match="no-such-program"):
        await run(Command(["no-such-program", "x"]))


async def test_what_hangs_is_killed(tmp_path: Path):
    pid_file = tmp_path / "pid"
    with pytest.raises(UnreachableError, match=r"did not end within 0 s"):
        await run(Command(["sh", "-c", f"echo $$ >{pid_file}; exec sleep 600"], timeout_seconds=0.3))
    assert not pid_file.exists() or not Path(f"/proc/{pid_file.read_text().strip()}").exists()


async def test_what_is_cancelled_is_killed():
    started = asyncio.Event()

    async def work() -> None:
        await run_logged(Command([sys.executable, "-uc", "import time; print(1); time.sleep(600)"]), log, see)

    def see(_: str) -> None:
        started.set()

    log = Path("/dev/null")
    task = asyncio.create_task(work())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_logged_command_shows_its_lines_and_a_failure_only_the_last(tmp_path: Path):
    log, seen = tmp_path / "log", []
    with pytest.raises(PeerError) as failed:
        await run_logged(Command(["sh", "-c", "seq 100; echo over >&2; exit 1"]), log, seen.append)
    assert seen == log.read_text().splitlines() == [*map(str, range(1, 101)), "over"]
    assert str(failed.value).splitlines()[1:] == seen[-TAIL_LINES:]


async def test_where_one_of_several_tasks_fails_the_others_have_ended_and_its_error_is_raised_as_it_is():
    ended: list[str] = []

    async def wait(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def fail() -> None:
        raise PeerError("no luck")

    async def work() -> None:
        async with at_once() as group:
            group.create_task(wait("task"))
            group.create_task(fail())
            await wait("block")

    with pytest.raises(PeerError, match=r"^no luck$"):
        await work()
    assert sorted(ended) == ["block", "task"]
