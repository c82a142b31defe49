"""Joins the adapters of a table's engines into one query, whose elements a label `figure` tells apart.

One query, so that all figures belong to one moment. Each engine's facts are asked of its own pools only. The label
`namespace` separates two installations under one Prometheus. It is matched where the table knows the namespace of every
cluster, and where targets have that label.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from prfaas.names import HUB
from prfaas.wire.routes import RoutingTable
from prfaas_scheduler.engines import LINK, MISMATCHES, queries_of
from prfaas_scheduler.prometheus import FIGURE_LABEL

_SELECTOR: Final = re.compile(
    r"""[a-zA-Z_:][a-zA-Z0-9_:]*\s*(?:\{(?:[^{}"']|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')*\}|(?=\[))"""
)


def short_query(table: RoutingTable, window_seconds: int) -> str:
    """Return the one query of every short interval: links, queues and prefills."""
    window = f"{window_seconds}s"
    clusters = _in_clusters(table, [HUB, *(one.name for one in table.clusters)])
    link = f"{clusters}, {matcher('peer', [HUB, ''])}"
    parts = [_filled(LINK, {"$window": window, "$link": link, "$in": clusters})]
    if pools := sorted({one.pool for one in table.instances}):
        parts.append(_filled(MISMATCHES, {"$at": f"{clusters}, {matcher('pool', pools)}"}))
    for engine, pools in _pools_by_engine(table).items():
        parts.append(_filled(queries_of(engine).short, {"$at": f"{clusters}, {matcher('pool', pools)}"}))
    return _joined(parts)


def long_query(table: RoutingTable, window_seconds: int) -> str:
    """Return the one query of a summary."""
    parts: list[Mapping[str, str]] = []
    for engine, pools in _pools_by_engine(table).items():
        decoding = {one.pool for one in table.instances if one.role == "decode" and one.engine == engine}
        # Instances that two pools share carry one pool's name, whatever their role is.
        decode = f'{_in_clusters(table, [HUB])}, {matcher("pool", sorted(decoding))}, role!="prefill"'
        own = {"$decode": decode, "$pools": f"{_namespace(table)}{matcher('pool', pools)}"}
        parts.append(_filled(queries_of(engine).long, {**own, "$window": f"{window_seconds}s"}))
    return _joined(parts)


def sample_time_query(query: str) -> str:
    """Return a query for the time of the newest sample that a user's query reads; empty where it names no metric."""
    found = dict.fromkeys(match.group(0).strip() for match in _SELECTOR.finditer(query))
    return f"max({' or '.join(f'timestamp({selector})' for selector in found)})" if found else ""


def matcher(label: str, values: Sequence[str]) -> str:
    """Return a PromQL matcher of exactly these values, whatever characters they hold."""
    pattern = "|".join(re.escape(value) for value in values)
    # PromQL matches whole values, so the pattern needs no anchors; a string's backslashes are escaped once more.
    escaped = pattern.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{label}=~"{escaped}"'


def _in_clusters(table: RoutingTable, clusters: Sequence[str]) -> str:
    return _namespace(table) + matcher("cluster", clusters)


def _namespace(table: RoutingTable) -> str:
    """Return the matcher of the policy's namespaces, or nothing where one is not known."""
    namespaces = {table.namespace, *(one.namespace for one in table.clusters)}
    return "" if "" in namespaces else f"{matcher('namespace', [*sorted(namespaces), ''])}, "


def _pools_by_engine(table: RoutingTable) -> dict[str, list[str]]:
    pools: dict[str, set[str]] = {}
    for one in table.instances:
        pools.setdefault(one.engine, set()).add(one.pool)
    return {engine: sorted(found) for engine, found in sorted(pools.items())}


def _filled(expressions: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Return the expressions with their placeholders replaced; none is the beginning of another."""
    filled = dict(expressions)
    for placeholder, value in values.items():
        filled = {name: text.replace(placeholder, value) for name, text in filled.items()}
    return filled


def _joined(parts: Iterable[Mapping[str, str]]) -> str:
    # A source label that nobody has is empty, and matches the empty pattern: so `label_replace` only adds a label.
    named = [
        f'label_replace({text}, "{FIGURE_LABEL}", "{name}", "", "")' for one in parts for name, text in one.items()
    ]
    # `or` drops elements whose labels stand on its left already, hence a label for each figure.
    return " or ".join(named)
