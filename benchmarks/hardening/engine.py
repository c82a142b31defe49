"""An emulated engine that notes how long its step loop computed at most in one step: so long all its streams wait.

    python -m benchmarks.hardening.engine FD OPTIONS

It is a worker's own engine process. What it emulates is a wait, which takes no CPU time. It ends at once when its front
does. So each step that is the longest until then is written when it ends, to a file beside the profile.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import msgspec

from prfaas.util import replace_file
from prfaas_worker.engine import __main__ as process
from prfaas_worker.engine.loop import EngineLoop
from prfaas_worker.options import Options


def longest_step_file(options: Options) -> Path:
    """Return the file that has the seconds."""
    return Path(options.emulate).with_name("longest-step-seconds")


def watched(step: Callable[..., bool], file: Path) -> Callable[..., bool]:
    """Return a step of a loop that is written to the file if it is the longest so far."""
    longest_seconds = 0.0

    def watch(loop: EngineLoop, *, wait: bool) -> bool:
        nonlocal longest_seconds
        began_seconds = time.thread_time()
        had_work = step(loop, wait=wait)
        if (seconds := time.thread_time() - began_seconds) > longest_seconds:
            longest_seconds = seconds
            replace_file(file, str(seconds).encode())
        return had_work

    return watch


def main() -> None:
    file = longest_step_file(msgspec.json.decode(sys.argv[2], type=Options))
    file.write_text("0")
    with patch.object(EngineLoop, "step", watched(EngineLoop.step, file)):
        process.main()


if __name__ == "__main__":
    main()
