"""A link's counters: our worker's, and those of our connector inside vLLM, which have the same names.

Only bytes that a member's instances send to the hub, or to a peer of unknown name, cross its link. Placeholders: $in
selects the policy's clusters, $link those and the peer, $window the window of rates.
"""

from collections.abc import Mapping
from typing import Final

LINK: Final[Mapping[str, str]] = {
    "sampled_at_seconds": "max by (cluster) (timestamp(prfaas_transfer_sent_bytes_total{$in}))",
    "backlogged_mbps": "sum by (cluster) (rate(prfaas_link_backlogged_bytes_total{$link}[$window])) * 8 / 1e6",
    # The share of time in which at least one instance had data waiting, were they independent: 1 - prod(1 - share).
    # A sum would count time that they share twice, and take the link for narrower than it is.
    "backlogged_fraction": (
        "1 - exp(sum by (cluster) (ln(1 - clamp_max("
        "rate(prfaas_link_backlogged_seconds_total{$link}[$window]), 0.999999))))"
    ),
    # The same over the latest two scrapes.
    "latest_backlogged_mbps": (
        "sum by (cluster) (irate(prfaas_link_backlogged_bytes_total{$link}[$window])) * 8 / 1e6"
    ),
    "latest_backlogged_fraction": (
        "1 - exp(sum by (cluster) (ln(1 - clamp_max("
        "irate(prfaas_link_backlogged_seconds_total{$link}[$window]), 0.999999))))"
    ),
    "unsent_bytes": "sum by (cluster) (prfaas_link_unsent_bytes{$link})",
}
