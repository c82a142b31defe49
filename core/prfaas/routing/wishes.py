"""How a request's own wishes narrow the facts that it is decided by.

    forbid     clusters in such a datacenter get no prompt of this request, beside those that the policy forbids
    prefer     its datacenters come before those that the policy prefers, among clusters that may serve
    never      the prompt is prefilled in the hub
    always     the threshold is the lowest that the policy allows, `threshold.min`, and prices do not count

Nothing widens: a cluster that the policy forbids, a dead link and mode Disabled stay what they are, and prompts up to
`threshold.min` stay at home. So a decision needs no notion of wishes: it gets other facts.
"""

from msgspec.structs import replace

from prfaas.routing.facts import Facts, Rule
from prfaas.wire.routes import RoutingTable
from prfaas.wire.wishes import NO_WISHES, Wishes, covers


def narrowed(facts: Facts, wishes: Wishes) -> Facts:
    """Return the facts that a request with these wishes is decided by."""
    if wishes == NO_WISHES:
        return facts
    return replace(facts, rule=_rule(facts, wishes), table=_preferring(facts.table, wishes))


def _rule(facts: Facts, wishes: Wishes) -> Rule:
    rule, table = facts.rule, facts.table
    forbidden = {one.name for one in table.clusters if any(covers(name, one.datacenter) for name in wishes.forbid)}
    clusters = frozenset[str]() if wishes.offload == "never" else rule.offload_clusters - forbidden
    if wishes.offload != "always":
        return replace(rule, offload_clusters=clusters)
    threshold_tokens = min(rule.threshold_tokens, table.threshold.min_tokens)
    return replace(rule, offload_clusters=clusters, threshold_tokens=threshold_tokens, prices=())


def _preferring(table: RoutingTable, wishes: Wishes) -> RoutingTable:
    """Return the table with the wished datacenters in front of those that the policy prefers."""
    if not wishes.prefer:
        return table
    wished = [one.datacenter for name in wishes.prefer for one in table.clusters if covers(name, one.datacenter)]
    return replace(table, prefer_datacenters=tuple(dict.fromkeys([*wished, *table.prefer_datacenters])))
