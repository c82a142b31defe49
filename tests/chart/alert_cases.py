"""For each alert, series under which it fires and series under which it is silent, sampled once a minute from 0 s on.
What follows an alert's name is what the case is about.

In promtool's notation: `0+5x30` grows by 5 thirty times, `1x30` stays, `_x30` is not there.
"""

from typing import NamedTuple

DAY = 86_400


class Case(NamedTuple):
    """What an alert sees."""

    fires: dict[str, str]
    silent: dict[str, str]
    minutes: int = 20
    """When it is looked at."""


def one(series: str, fires: str, silent: str, minutes: int = 20) -> Case:
    """Return the case of an alert that reads one series."""
    return Case({series: fires}, {series: silent}, minutes)


def of_total(series: str, bad: str, good: str) -> Case:
    """Return the case of a share: of 100 a minute, 50 bad ones fire and 1 does not."""
    return Case(
        {series.format(bad): "0+50x30", series.format(good): "0+50x30"},
        {series.format(bad): "0+1x30", series.format(good): "0+99x30"},
    )


def by_leader(series: str, fires: str, silent: str) -> Case:
    """Return the case of an alert that reads only the leader: what a standby still tells never fires."""
    leads = {'prfaas_operator_leader{instance="a"}': "1x30", 'prfaas_operator_leader{instance="b"}': "0x30"}
    return Case(
        leads | {series.format("a"): fires, series.format("b"): silent},
        leads | {series.format("a"): silent, series.format("b"): fires},
    )


CASES = {
    "PrfaasOperatorDown": one('up{pod="prfaas-operator-7c-x"}', "0x30", "1x30"),
    "PrfaasOperatorLeaderless": Case(
        {'prfaas_operator_leader{pod="a"}': "0x30", 'prfaas_operator_leader{pod="b"}': "0x30"},
        {'prfaas_operator_leader{pod="a"}': "0x30", 'prfaas_operator_leader{pod="b"}': "1x30"},
    ),
    "PrfaasObjectNotReady": by_leader(
        'prfaas_operator_object_ready{{kind="PrfaaSPolicy",name="kimi",instance="{}"}}', "0x30", "1 0x3 1x30"
    ),
    "PrfaasNotEncrypted": by_leader(
        'prfaas_operator_object_encrypted{{kind="PrfaaSPolicy",name="kimi",instance="{}"}}', "0x30", "1 0x3 1x30"
    ),
    "PrfaasPlacesNotKnown": by_leader(
        'prfaas_operator_policy_places_known{{name="kimi",instance="{}"}}', "0x30", "1 0x3 1x30"
    ),
    "PrfaasReconcileErrors": one(
        'prfaas_operator_reconcile_errors_total{kind="PrefillPool",reason="QuotaExceeded"}', "0+2x60", "0+2x2 4x60", 45
    ),
    "PrfaasMemberUnreachable": by_leader(
        'prfaas_operator_member_contact_age_seconds{{member_cluster="eu",instance="{}"}}', "0+60x30", "3x30"
    ),
    "PrfaasMemberTokenExpires": by_leader(
        'prfaas_operator_member_token_expires_timestamp_seconds{{member_cluster="eu",instance="{}"}}',
        f"{DAY}x30",
        f"{15 * DAY}x30",
    ),
    "PrfaasAuthorityExpires": by_leader(
        'prfaas_operator_authority_expires_timestamp_seconds{{instance="{}"}}', f"{30 * DAY}x30", f"{122 * DAY}x30"
    ),
    "PrfaasCertificateExpires": one(
        'prfaas_certificate_expires_timestamp_seconds{cluster="eu",pool="offload"}', f"{DAY // 4}x30", f"{DAY // 3}x30"
    ),
    "PrfaasClusterCertificateExpires": by_leader(
        'prfaas_operator_certificate_expires_timestamp_seconds{{member_cluster="eu",instance="{}"}}',
        f"{DAY // 4}x30",
        f"{DAY // 3}x30",
    ),
    "PrfaasRequestsFail": of_total(
        'prfaas_gateway_requests_total{{policy="kimi",decision="local",outcome="{}"}}', "failed", "ok"
    ),
    "PrfaasOffloadsFallBack": of_total(
        'prfaas_gateway_requests_total{{policy="kimi",decision="offload",outcome="{}"}}', "fallback", "ok"
    ),
    "PrfaasTransfersFail": of_total(
        'prfaas_transfers_total{{cluster="hub",pool="decode",direction="receive",outcome="{}"}}', "failed", "delivered"
    ),
    "PrfaasLinkDown": one('prfaas_scheduler_link_alive{member_cluster="eu"}', "1 0x30", "1x30"),
    "PrfaasMetricsStale": one('prfaas_scheduler_metrics_stale{policy="kimi"}', "1x30", "1 0x30"),
    "PrfaasQueueGrows": Case(
        {
            'prfaas_requests_waiting{cluster="hub",pool="decode"}': "20x30",
            'prfaas_requests_running{cluster="hub",pool="decode"}': "8x30",
            'prfaas_prefills_waiting{cluster="hub",pool="decode"}': "0x30",
            'prfaas_prefills_running{cluster="hub",pool="decode"}': "0x30",
            'prfaas_requests_running_limit{cluster="hub",pool="decode"}': "8x30",
        },
        # All but one prefill wait for their first step, though most of them have a slot.
        {
            'prfaas_requests_waiting{cluster="eu",pool="far"}': "0x30",
            'prfaas_requests_running{cluster="eu",pool="far"}': "0x30",
            'prfaas_prefills_waiting{cluster="eu",pool="far"}': "10x30",
            'prfaas_prefills_running{cluster="eu",pool="far"}': "1x30",
            'prfaas_requests_running_limit{cluster="eu",pool="far"}': "8x30",
        },
    ),
    "PrfaasQueueGrows of vLLM, whose requests that wait for a cache are the link's": Case(
        {
            'vllm:num_requests_waiting_by_reason{cluster="eu",pool="far",reason="capacity"}': "3x30",
            'vllm:num_requests_running{cluster="eu",pool="far"}': "1x30",
        },
        {
            'vllm:num_requests_waiting_by_reason{cluster="eu",pool="far",reason="capacity"}': "2x30",
            'vllm:num_requests_waiting_by_reason{cluster="eu",pool="far",reason="deferred"}': "50x30",
            'vllm:num_requests_running{cluster="eu",pool="far"}': "1x30",
        },
    ),
}


def as_promtool(rules: str) -> dict:
    """Return all cases as a file of `promtool test rules` for a rule file."""
    return {
        "rule_files": [rules],
        "evaluation_interval": "1m",
        "tests": [
            _test(alert.partition(" ")[0], series, case.minutes, firing)
            for alert, case in CASES.items()
            for series, firing in ((case.fires, 1), (case.silent, 0))
        ],
    }


def _test(alert: str, series: dict[str, str], minutes: int, firing: int) -> dict:
    query = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
    promql_test = {"expr": query, "eval_time": f"{minutes}m", "exp_samples": [{"labels": "{}", "value": firing}]}
    return {
        "name": f"{alert} {'fires' if firing else 'is silent'}",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [promql_test],
    }
