"""Makes an evaluation of a folder of runs. Each run is simulated, too, which takes a fraction of a second."""

import os
import platform
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from random import Random

from prfaas.cli.evaluation.content import Evaluation
from prfaas.errors import ConfigError
from prfaas.evaluate.case import Case
from prfaas.evaluate.expected import simulated_run
from prfaas.evaluate.record import RunKey, read_runs
from prfaas.evaluate.summary import summarise


def evaluation_of(
    case: Case, folder: Path, command: str, asked: Iterable[RunKey] = (), limit_seconds: float | None = None
) -> Evaluation:
    """Return what a folder's runs say. Raises ConfigError if it cannot be read, or without a limit of P90 TTFT."""
    try:
        files = [(path.name, path.read_bytes()) for path in sorted(folder.glob("*.json"))]
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error}") from error
    runs, unread = read_runs(files, case.digest)
    simulated = partial(simulated_run, case, new_rng=Random)
    return Evaluation(
        case=case,
        runs=tuple(runs),
        summary=summarise(case.file, runs, simulated, limit_seconds, asked),
        unread=tuple(unread),
        command=command,
        machine=f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}",
    )
