"""Writes docs/understand/evaluation.md and its charts from the records of the runs that are published.

    python -m benchmarks.evaluation.published

`records` holds what COMMAND made, each file packed by `xz -9`; its runs take some 18 minutes of two cores. Plan and
simulator are asked again. NOTES are the only words that are written by hand. `prfaas bench evaluation` makes more runs,
with a report for each part.
"""

import lzma
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.evaluation.compared import POLICIES
from benchmarks.evaluation.part import Form, simulator_of

from prfaas.cli.evaluation.content import Evaluation
from prfaas.errors import ConfigError
from prfaas.evaluate.answer import SATURATED_AT
from prfaas.evaluate.case import rate_per_second
from prfaas.evaluate.record import RunKey, read_runs
from prfaas.evaluate.summary import summarise
from prfaas_sandbox.evaluate.campaign import write_document

RECORDS: Final = Path(__file__).parent / "records"
FORM: Final = Form("examples/paper.yaml", 300, 2.0, 128, 20.0)
COMMAND: Final = (
    f"prfaas evaluate -f {FORM.file} --systems threshold,homogeneous,naive --loads {SATURATED_AT:g} "
    f"--requests {FORM.requests} --stretch {FORM.stretch:g} --cache-scale {FORM.cache_scale} "
    f"--limit-seconds {FORM.limit_seconds:g}"
)
NOTES: Final = (
    "Before these runs others were made, and four things failed first.",
    "Caches ended while their decodes were queued. A cache waited 30 s for the instance that decodes. Under overload "
    "that instance had a queue of half a minute, so the cache was gone, and the prompt was computed once more where it "
    "is decoded. That made the queue longer: 26 of 250 requests of PrfaaS-PD, and 114 of 250 of homogeneous. A cache "
    "waits two minutes now, and these runs have no such request.",
    "The most that a system carries was estimated as the sum of what its pools completed. That flattered moving "
    "thresholds by 5 to 12 %: a pool with room completes prompts while others wait for the other pool. Now the fullest "
    "pool counts: what it completes, over its share of the requests.",
    "Under overload the moving threshold of these runs carries 93 % of its plan, and the best threshold that stays "
    "99 %, simulated with six seeds. What relieved a full pool moved the threshold away from its optimum. So PrfaaS-PD "
    "misses 1.3 times naive, in the simulator, too. Since these runs the threshold balances what waits. Simulated so, "
    "it carries 97 % instead of 95 % of what the planned threshold does that stays, and 1.27 instead of 1.24 times "
    "naive.",
    "At a stretch of 1.4 two cores are too slow: steps ended late by more than is allowed, so the run marked itself as "
    "invalid, and gave no figure.",
)
"""What failed before. It changes with the runs."""


def published(records: Path = RECORDS) -> Evaluation:
    """Return the evaluation that the page shows. Raises ConfigError if a run is missing, or gives no figure."""
    case = FORM.case()
    files = [(path.stem, lzma.decompress(path.read_bytes())) for path in sorted(records.glob("*.json.xz"))]
    runs, unread = read_runs(files, case.digest, partial(rate_per_second, case))
    asked = [RunKey(policy, SATURATED_AT, 1) for policy in POLICIES]
    summary = summarise(case.file, runs, simulator_of(case), FORM.limit_seconds, asked)
    failed = [f"{one.name}: {one.why}" for one in (*summary.excluded, *unread)]
    if failed := [*failed, *(f"{key.name}: it is missing" for key in summary.missing)]:
        raise ConfigError(f"{records} gives no whole page ({'; '.join(failed)}): call {COMMAND}, and pack its runs")
    return Evaluation(case=case, runs=tuple(runs), summary=summary, command=COMMAND, notes=NOTES)


if __name__ == "__main__":
    write_document(published(), Path(__file__).parents[2] / "docs/understand")
