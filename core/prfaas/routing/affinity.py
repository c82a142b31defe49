"""Which of several instances serves a request, by what is cached there and what stands before it, in one unit: tokens.

    cost = tokens that the instance has still to compute for others
         + tokens of this prompt that are not cached there
         + ANSWER_TOKENS for every request that it decodes

The first two are what has to be computed before this prompt's first token, wherever the instance is as fast as the
others: the least is the earliest. The third is in the same unit because a token decoded takes at least the computing of
a token prefilled, through the same weights: so much is still to be computed for requests under way, as a mean, and what
is to come slows them and this one. Equals are decided by the number of requests, then by the request's id.

Nothing has to be tuned. A prefix of n tokens draws requests to the instance that has it until n tokens more wait there
than elsewhere; the next request goes elsewhere, computes or fetches the prefix, and thereby makes a second place that
has it. So hot prefixes spread over as many instances as their load needs, and rare ones stay where they are.
"""

from collections.abc import Sequence
from typing import Final

import xxhash

from prfaas.routing.facts import Facts
from prfaas.wire.routes import Instance

ANSWER_TOKENS: Final = 343
"""Mean length of an answer in the published conversation trace (Mooncake), of which the gateway cannot know its own."""


def cached_tokens(facts: Facts, instance: Instance) -> int:
    """Return the tokens of the prompt that are cached at an instance; where only clusters are known, in its cluster."""
    if facts.cached_on is None:
        return facts.cached_tokens.get(instance.cluster, 0)
    return min(facts.cached_on.get(instance.name, 0), facts.total_tokens)


def lacking_tokens(facts: Facts, instance: Instance) -> int:
    """Return the tokens of the prompt that are not cached at an instance."""
    return max(0, facts.total_tokens - cached_tokens(facts, instance))


def cost_tokens(facts: Facts, instance: Instance) -> int:
    """Return what a request costs at an instance."""
    decoding = facts.in_flight.get(instance.name, 0) if instance.role == "decode" else 0
    queued = facts.queued_tokens.get(instance.name, 0)
    # Where only clusters are known, their order is decided before this, and inside of one all lack the same.
    lacking = lacking_tokens(facts, instance) if facts.cached_on is not None else 0
    return queued + lacking + ANSWER_TOKENS * decoding


def cheapest(facts: Facts, instances: Sequence[Instance]) -> Instance | None:
    """Return the instance where the request costs least."""
    if len(instances) < 2:
        return instances[0] if instances else None
    costs = [(cost_tokens(facts, one), facts.in_flight.get(one.name, 0)) for one in instances]
    least = min(costs)
    return spread(facts, [one for one, cost in zip(instances, costs, strict=True) if cost == least])


def spread(facts: Facts, equals: Sequence[Instance]) -> Instance | None:
    """Return one of equals by the request's id.

    Taking the first by name would send every request of an idle moment, from every gateway, to one instance. A checksum
    would not do: CRC-32 is linear, so between some names the same one nearly always wins.
    """
    if len(equals) < 2:  # there is no choice
        return equals[0] if equals else None
    return min(equals, key=lambda one: (xxhash.xxh3_64_intdigest(f"{facts.request_id}/{one.name}".encode()), one.name))
