"""`python -m tools.ci gate system quiet`: run stages of the tests and end with a verdict.

All stages run unless `gate` is red, so that one run shows everything. The last lines are a table, what failed, what
passed only at its second try, and the total. Ends with 0 if all is green, 1 if something is red, 130 after Ctrl-C.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Final

from tools.ci.run import STAGES, make, read_counts, run_stage
from tools.ci.verdict import Failure, StageResult, summarize

EXAMPLE: Final = "example: python -m tools.ci gate system quiet"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.ci", description=__doc__, epilog=EXAMPLE)
    parser.add_argument("stages", nargs="+", choices=tuple(STAGES), metavar="STAGE", help=", ".join(STAGES))
    chosen = parser.parse_args(arguments).stages
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results: list[StageResult] = []
    flaky: list[Failure] = []
    try:
        for name in chosen:
            print(f"\n===== stage {name} =====", flush=True)
            results.append(run(name, flaky))
            if name == "gate" and not results[-1].is_green:
                break
    except KeyboardInterrupt:
        print("\nInterrupted: there is no verdict", file=sys.stderr)
        return 130
    print("\n" + "\n".join(summarize(results, flaky, read_counts())), flush=True)
    return 0 if all(one.is_green for one in results) else 1


def run(name: str, flaky: list[Failure]) -> StageResult:
    """Run what has to be made before a stage, then the stage; add to `flaky` what passed only at its second try."""
    broken = make(STAGES[name].before) if STAGES[name].before else ""
    if broken and name != "gate":
        return StageResult(name, 0.0, broken=broken)
    result, forgiven = run_stage(name, len(flaky))
    flaky += forgiven
    return result._replace(broken=result.broken or broken)


if __name__ == "__main__":
    sys.exit(main())
