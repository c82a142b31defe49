"""Brings a chart's schema and README in line with its values.yaml, where the comment above a key is its description.

It also writes what the charts need of the records of engines.

    python charts/describe.py          # writes
    python charts/describe.py --check  # says what is out of date

The types stand in values.schema.json; this fills in the descriptions, and the table between two marks in README.md.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from prfaas.engines import ENGINES

CHARTS = ("prfaas", "prfaas-member")
FOLDER = Path(__file__).parent
KEY = re.compile(r"^( *)([A-Za-z][\w./-]*):")
TABLE = re.compile(r"(<!-- values -->\n).*?(<!-- /values -->)", re.DOTALL)
INDENT = 2
ENGINES_HEAD = """\
# Generated from core/prfaas/engines.py by `make charts`. Do not edit.
# By the label prfaas.io/engine of pods: ports that they open beside 8000 and 8001, first and last. Ports that an engine
# chooses for itself are in none of these; see docs/use/engines.md.
"""


def descriptions(text: str) -> dict[str, str]:
    """Return the comment right above each key of a values.yaml, by the key's dotted path."""
    found: dict[str, str] = {}
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        bare = line.strip()
        if bare.startswith("#"):
            comment.append(bare.removeprefix("#").strip())
            continue
        if match := KEY.match(line):
            path = [*path[: len(match[1]) // INDENT], match[2]]
            if comment:
                found[".".join(path)] = " ".join(comment)
        comment = []
    return found


def described(schema: dict[str, Any], texts: dict[str, str], path: str = "") -> dict[str, Any]:
    """Return the schema with the descriptions of the values; what has none in values.yaml keeps its own."""
    properties = {
        key: described(child, texts, f"{path}.{key}".lstrip(".")) for key, child in schema.get("properties", {}).items()
    }
    own = {key: value for key, value in schema.items() if key != "properties"}
    if path in texts:
        own = {"description": texts[path]} | own | {"description": texts[path]}
    return own | ({"properties": properties} if "properties" in schema else {})


def table(values: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """Return the rows of a README table: key, default and description of every value that has a type of its own."""
    rows: list[str] = []
    for key, child in schema.get("properties", {}).items():
        full = f"{path}.{key}".lstrip(".")
        if full == "global":
            continue
        default = (values or {}).get(key)
        if "properties" in child:
            rows += table(default, child, full)
        else:
            rows.append(f"| `{full}` | `{json.dumps(default)}` | {child.get('description', '')} |")
    return rows


def engines_file() -> str:
    """Return what the templates need to know of each engine."""
    found: dict[str, dict[str, Any]] = {}
    for name, one in ENGINES.items():
        ports = [[port.first, port.last] for port in one.all_ports]
        metrics_ports = [[port.first, port.last] for port in one.all_ports if port.has_metrics]
        path = "" if one.metrics_path == "/metrics" else one.metrics_path
        facts = {"ports": ports, "metricsPorts": metrics_ports, "metricsPath": path}
        if known := {key: value for key, value in facts.items() if value}:
            found[name] = known
    return ENGINES_HEAD + yaml.safe_dump(found, sort_keys=False, default_flow_style=None)


def documents(chart: Path) -> dict[Path, str]:
    """Return what the generated files of a chart should be."""
    text = (chart / "values.yaml").read_text()
    schema = described(json.loads((chart / "values.schema.json").read_text()), descriptions(text))
    rows = "\n".join(["| value | default | what |", "|---|---|---|", *table(yaml.safe_load(text), schema)])
    readme = TABLE.sub(lambda match: f"{match[1]}{rows}\n{match[2]}", (chart / "README.md").read_text())
    return {
        chart / "values.schema.json": json.dumps(schema, indent=2) + "\n",
        chart / "README.md": readme,
        chart / "files" / "engines.yaml": engines_file(),
    }


def main() -> int:
    """Write, or with --check tell, what is out of date."""
    stale = 0
    for chart in CHARTS:
        for path, wanted in documents(FOLDER / chart).items():
            if path.exists() and path.read_text() == wanted:
                continue
            stale += 1
            if "--check" in sys.argv:
                print(f"{path} is out of date: run `make charts`")
            else:
                path.write_text(wanted)
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
