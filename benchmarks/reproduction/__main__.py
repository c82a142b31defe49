"""Compares every published figure with the model's and the simulator's.

    prfaas bench reproduction [--write] [-o json]

--write also writes docs/understand/reproduction.md and its pictures. The simulation uses virtual time: other work on
the machine does not change the figures. It takes about a minute of one core.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from benchmarks.report import Figure, run
from benchmarks.reproduction import sections
from benchmarks.reproduction.document import document

from prfaas.cli.plan import load

ROOT = Path(__file__).parents[2]
PAPER = ROOT / "examples" / "paper.yaml"
PAGE = ROOT / "docs" / "understand" / "reproduction.md"


def figures(
    write: Annotated[bool, typer.Option(help="Also write docs/understand/reproduction.md and its pictures.")] = False,
) -> Iterator[Figure]:
    """Compute everything: our figure is the value, the published one its rival."""
    made = sections.everything(load(PAPER), simulate=True)
    if write:
        from benchmarks.reproduction.plots import plot_all

        PAGE.write_text(document(made), encoding="utf-8")
        plot_all(PAGE.parent / "reproduction", made[0])
    for row in (row for section in made for row in section.rows):
        for kind, value in (("model", row.model), ("simulated", row.simulated)):
            if value is not None:
                name = f"{row.name} ({kind})"
                yield Figure(name=name, value=value, unit="", rival="published", rival_value=row.published)


if __name__ == "__main__":
    run("reproduction", __doc__, figures)
