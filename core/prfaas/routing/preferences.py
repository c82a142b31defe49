"""Narrows the rule and the table that a request is decided by to its own preferences.

    forbid     clusters in such a datacenter get no prompt of this request, beside those that the policy forbids
    prefer     its datacenters come before those that the policy prefers, among clusters that may serve
    never      the prompt is prefilled in the hub
    always     the threshold is the lowest that the policy allows, `threshold.min`, and prices do not count

Nothing widens: a cluster that the policy forbids, a dead link and mode Disabled stay what they are, and prompts up to
`threshold.min` stay at home. So a decision needs no notion of preferences: it gets other facts.
"""

from msgspec.structs import replace

from prfaas.routing.facts import Rule
from prfaas.wire.preferences import NO_PREFERENCES, Preferences, covers
from prfaas.wire.routes import RoutingTable


def narrowed(rule: Rule, table: RoutingTable, preferences: Preferences) -> tuple[Rule, RoutingTable]:
    """Return the rule and the table that a request with these preferences is decided by."""
    if preferences == NO_PREFERENCES:
        return rule, table
    forbidden = {one.name for one in table.clusters if any(covers(name, one.datacenter) for name in preferences.forbid)}
    clusters = frozenset[str]() if preferences.offload == "never" else rule.offload_clusters - forbidden
    rule = replace(rule, offload_clusters=clusters)
    if preferences.offload == "always":
        rule = replace(rule, threshold_tokens=min(rule.threshold_tokens, table.threshold.min_tokens), prices=())
    return rule, _preferring(table, preferences)


def _preferring(table: RoutingTable, preferences: Preferences) -> RoutingTable:
    """Return the table with the preferred datacenters in front of those that the policy prefers."""
    if not preferences.prefer:
        return table
    preferred = [
        one.datacenter for name in preferences.prefer for one in table.clusters if covers(name, one.datacenter)
    ]
    return replace(table, prefer_datacenters=tuple(dict.fromkeys([*preferred, *table.prefer_datacenters])))
