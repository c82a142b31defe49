"""Writes what documents have from the code: flags of programs, fields of resources, tables of engines and plans."""

import ast
import enum
import inspect
import itertools
import textwrap
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml
from docs import capacity_tables

from prfaas.api import crd
from prfaas.cli.verify.record import Record as VerifyRecord
from prfaas.engines import ENGINES, EngineRecord
from prfaas_gateway.options import GatewayOptions
from prfaas_operator.options import OperatorOptions
from prfaas_scheduler.engines import queries_of
from prfaas_scheduler.options import SchedulerOptions
from prfaas_worker.options import Options as WorkerOptions

PAGE = Path(__file__).parent / "use" / "reference.md"
PROGRAMS: dict[str, Any] = {
    "prfaas-operator": OperatorOptions,
    "prfaas-gateway": GatewayOptions,
    "prfaas-scheduler": SchedulerOptions,
    "prfaas-worker": WorkerOptions,
}
KUBERNETES_OWN = {"gateway.resources", "gateway.schedulerResources"} | {
    f"template.{one}"
    for one in ("resources", "connectorResources", "tolerations", "volumes", "volumeMounts", "env", "imagePullSecrets")
}
KINDS = ("PrfaaSPolicy", "PrefillPool", "DecodePool", "MemberCluster")
HEAD = """# Reference: flags and fields

`make reference` writes this page from the code, and a test compares the two. Every program also answers `--help`,
and `kubectl explain` shows the fields. [Pools](pools.md) and [the gateway](gateway.md) explain how to use them.
"""
NOTE = """\
Resources, tolerations, volumes, mounts and variables of `template` have fields of Kubernetes' pods. A volume is a
Secret, ConfigMap, PersistentVolumeClaim or emptyDir; claims and mounts are read-only unless `readOnly` is false.
`kubectl explain pfpool.spec.template --recursive` shows all of them.

"""
LIKE_PREFILL_POOL = """\
A DecodePool has the fields of a [PrefillPool](#prefillpool) except {lacking}. These differ, or are its own:

"""
PLAIN = {bool: "on or off", int: "N", float: "N", Path: "PATH", str: "TEXT"}

Row = tuple[str, str, str, str]


def flag_rows(options: Any) -> list[Row]:
    """Return (flag, value, default, help) for each flag of a program."""
    hints = get_type_hints(options, include_extras=True)
    return [
        _flag_row(key, hints[key], parameter.default)
        for key, parameter in inspect.signature(options).parameters.items()
        if get_origin(hints[key]) is Annotated
    ]


def _flag_row(key: str, hint: Any, default: Any) -> Row:
    kind, option = get_args(hint)
    named = [name for name in (option.default, *(option.param_decls or [])) if isinstance(name, str)]
    shown = _shown(default.value if isinstance(default, enum.Enum) else default)
    if isinstance(option.show_default, str):
        shown = option.show_default
    elif default is inspect.Parameter.empty:
        shown = "required"
    return (f"`{[*named, '--' + key.replace('_', '-')][0]}`", option.metavar or _values(kind), shown, option.help)


def _values(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return ", ".join(member.value for member in kind)
    return next(PLAIN[one] for one in (kind, *get_args(kind)) if one in PLAIN)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value in (None, "") or isinstance(value, dict):
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def field_rows(schema: dict[str, Any], path: str = "") -> list[Row]:
    """Return (field, type, default, description) for each field of an object, depth first, without Kubernetes' own."""
    rows: list[Row] = []
    for key, field in schema.get("properties", {}).items():
        full = f"{path}.{key}".lstrip(".")
        default = "required" if key in schema.get("required", ()) else _shown(field.get("default"))
        rows.append((f"`{full}`", _type(field), default, field.get("description", "")))
        if full in KUBERNETES_OWN:
            continue
        rows += field_rows(field, full) + field_rows(field.get("items", {}), f"{full}[]")
    return rows


def _type(field: dict[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(value or '""' for value in field["enum"])
    if "items" in field:
        return f"list of {field['items']['type']}s"
    bounds = [f"{word} {field[key]}" for word, key in (("from", "minimum"), ("to", "maximum")) if key in field]
    return " ".join([field.get("type", "integer or string"), *bounds])


def table(head: str, rows: list[Row]) -> str:
    """Return a table of four columns."""
    lines = [f"| {head} | default | what |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    parts += [f"## {name}\n\n" + table("flag | value", flag_rows(options)) for name, options in PROGRAMS.items()]
    schemas = {one["spec"]["names"]["kind"]: one for one in map(yaml.safe_load, crd.files().values())}
    fields = {
        kind: field_rows(schemas[kind]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"])
        for kind in KINDS
    }
    ours, theirs = fields["PrefillPool"], fields["DecodePool"]
    lacking = [row[0] for row in ours if "." not in row[0] and row[0] not in {other[0] for other in theirs}]
    fields["DecodePool"] = [row for row in theirs if row not in ours]
    notes = {"PrefillPool": NOTE, "DecodePool": LIKE_PREFILL_POOL.format(lacking=" and ".join(lacking))}
    for kind, rows in fields.items():
        parts.append(f"## {kind}\n\n{notes.get(kind, '')}" + table("field of `spec` | type", rows))
    return "\n".join(parts)


ENGINE_COLUMNS = ("engine", "hand-off", "loop", "integrity", "encryption", "resume", "run for real")
CHECKS = {
    "Frame": "a digest a frame, [damaged ones are sent again](../extend/protocol.md)",
    "Request": "a checksum a request, where layouts are equal",
    "Nothing": "none",
}
RESUMES = {
    "DrawnTokens": "token for token",
    "TokenIds": "[by token ids, at another instance](../operate/failover.md#streams-of-vllm)",
    "Nothing": "no: the stream ends with an error event",
}


def engine_rows() -> list[tuple[str, ...]]:
    """Return what each engine does, for users."""
    rows: list[tuple[str, ...]] = []
    for one in ENGINES.values():
        own = f"{one.title}'s own"
        run = [f"*experimental: {one.experimental}*", one.run] if one.experimental else [one.run]
        rows.append(
            (
                f"`{one.name}`",
                one.calls,
                _loop_of(one),
                CHECKS[one.checked] if one.hand_offs else own,
                _encryption_of(one),
                RESUMES[one.resumed_by] if one.hand_offs else own,
                "; ".join(filter(None, run)),
            )
        )
    return rows


def _loop_of(one: EngineRecord) -> str:
    queries = queries_of(one.name)
    is_timed = not {"prompts", "prefill_seconds"}.isdisjoint(queries.short)
    if not one.hand_offs:
        return "no link" if is_timed else "no link, needs `profile`"
    if not is_timed:
        return "needs `profile`"
    return "all of it" if one.link_port else "all but what waits for the link"


def _encryption_of(one: EngineRecord) -> str:
    if not one.is_encrypted:
        return "none"
    return "mutual TLS" if one.checks_callers else "mutual TLS for caches and cache events; TLS for the API"


def port_rows() -> list[tuple[str, ...]]:
    """Return the ports of each engine."""
    rows = [("all", "8000 API and metrics; 8001 caches and cache events, of `prfaas` and `vllm-prfaas`", "8000, 8001")]
    ours = [one.name for one in ENGINES.values() if one.is_ours]
    rows += [(f"`{name}`", "8002 probes and metrics", "8002, to Prometheus") for name in ours]
    for one in ENGINES.values():
        words = [f"{port.first}{' and up' if port.last > port.first else ''}: {port.what}" for port in one.all_ports]
        opened = [
            f"{port.first} to {port.last}" if port.last > port.first else f"{port.first}" for port in one.all_ports
        ]
        if words or one.chosen_ports:
            rows.append((f"`{one.name}`", "; ".join(filter(None, (*words, one.chosen_ports))), ", ".join(opened)))
    return rows


def record_rows() -> list[tuple[str, ...]]:
    """Return the fields of a record with what they mean, as its source says."""
    (record,) = ast.parse(inspect.getsource(EngineRecord)).body
    body = record.body if isinstance(record, ast.ClassDef) else []
    rows: list[tuple[str, ...]] = []
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            rows.append((f"`{ast.unparse(field.target)}`", " ".join(str(text.value.value).split())))
    return rows


RUN_COLUMNS = ("engines", "way", "model", "device", "link", "longest prompt", "verdict", "steps that hold", "day")


def run_rows() -> list[tuple[str, ...]]:
    """Return the recorded runs of `prfaas verify`."""
    paths = sorted((PAGE.parent / "runs").glob("*.json"))
    return [_run_row(msgspec.json.decode(path.read_bytes(), type=VerifyRecord)) for path in paths]


def _run_row(run: VerifyRecord) -> tuple[str, ...]:
    applied = [one for one in run.steps if one.outcome != "left out" or one.is_due]
    holding = sum(one.outcome == "holds" for one in applied)
    labels = " and ".join(dict.fromkeys(one.label for one in run.engines))
    longest = f"{run.figures.prompt_tokens:,} tokens" if run.figures.prompt_tokens else ""
    count = f"{holding} of {len(applied)}"
    return labels, run.way, run.engines[0].model, run.device, run.link, longest, run.verdict, count, run.day


def markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) + "\n"


def fields_of_records() -> str:
    """Return the fields of a record as a sentence."""
    names = ", ".join(name for name, _ in record_rows())
    return textwrap.fill(f"A record says {names}.", 150) + "\n"


def pages() -> dict[Path, str]:
    """Return what all pages should be that are made of the code, or parts of which are."""
    root = PAGE.parents[2]
    parts = {
        root / "docs/use/engines.md": {
            "engines": markdown(ENGINE_COLUMNS, engine_rows()),
            "ports": markdown(("engine", "ports", "opened by the charts for its pods"), port_rows()),
        },
        root / "docs/extend/another-engine.md": {"record": markdown(("field", "what it says"), record_rows())},
        root / "docs/understand/capacity.md": {name: markdown(*rows) for name, rows in capacity_tables.parts().items()},
        root / "docs/use/verify.md": {"runs": markdown(RUN_COLUMNS, run_rows())},
        root / "CONTRIBUTING.md": {"record": fields_of_records()},
    }
    found = {PAGE: page()}
    for path, texts in parts.items():
        found[path] = path.read_text()
        for name, text in texts.items():
            begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
            before, _, rest = found[path].partition(begin)
            found[path] = f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
    return found


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
