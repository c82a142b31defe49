"""The flags of `prfaas-operator`."""

from typing import Annotated, NamedTuple

import typer

from prfaas.console import LogFormatOption, port_option
from prfaas.names import OPERATOR_HEALTH_PORT, OPERATOR_METRICS_PORT
from prfaas_operator.plan.certificates import (
    DEFAULT_AUTHORITY_HOURS,
    DEFAULT_CERTIFICATE_HOURS,
    DEFAULT_SETTLE_SECONDS,
    CertificateMode,
    Terms,
    terms_of,
)
from prfaas_operator.plan.credentials import DEFAULT_TOKEN_DAYS

HELP = """Reconcile the prfaas resources of one namespace.

\b
Example:
  prfaas-operator --namespace prfaas --gateway-image registry.example/prfaas/gateway:0.1.0 \\
    --worker-image registry.example/prfaas/worker:0.1.0 \\
    --connector-image registry.example/prfaas/vllm-connector:0.1.0
"""


class OperatorOptions(NamedTuple):
    namespace: Annotated[str, typer.Option(help="Namespace in the hub.")]
    gateway_image: Annotated[str, typer.Option(help="Image of the policies' gateways.")]
    worker_image: Annotated[str, typer.Option(help="Image of our own worker, for pools that name none.")]
    connector_image: Annotated[
        str, typer.Option(help="Image with the connector that pools of vLLM load; see docs/use/engines.md.")
    ]
    host: Annotated[str, typer.Option(help="Address to serve health and metrics on.")] = "127.0.0.1"
    metrics_port: Annotated[int, port_option("Port of /metrics.")] = OPERATOR_METRICS_PORT
    health_port: Annotated[int, port_option("Port of /healthz and /readyz.")] = OPERATOR_HEALTH_PORT
    leader_elect: Annotated[
        bool, typer.Option(help="Work only while this replica holds the Lease prfaas-operator.")
    ] = False
    member_token_days: Annotated[
        int, typer.Option(min=1, max=3650, help="Days that new tokens for member clusters are valid.")
    ] = DEFAULT_TOKEN_DAYS
    certificates: Annotated[CertificateMode, typer.Option(help="Issuer of the clusters' certificates.")] = (
        CertificateMode.OPERATOR
    )
    certificate_issuer: Annotated[
        str, typer.Option(help="With --certificates Issuer: cert-manager's KIND.GROUP/NAME.")
    ] = ""
    trust_domain: Annotated[
        str, typer.Option(help="Trust domain of a new installation's certificates; random if empty, and kept.")
    ] = ""
    certificate_hours: Annotated[
        float, typer.Option(min=0.001, max=876_000, help="Life of a certificate; renewed after two thirds.")
    ] = DEFAULT_CERTIFICATE_HOURS
    authority_hours: Annotated[
        float, typer.Option(min=0.001, max=876_000, help="Life of their authority; replaced after two thirds.")
    ] = DEFAULT_AUTHORITY_HOURS
    certificate_settle_seconds: Annotated[
        float, typer.Option(min=1, help="Longest time until every pod has read a changed Secret.")
    ] = DEFAULT_SETTLE_SECONDS
    gateway_pull_secrets: Annotated[
        str, typer.Option(help="Secrets for pulling the gateways' image, with commas between.")
    ] = ""
    worker_service_accounts: Annotated[
        str, typer.Option(help="Service accounts that pools in the hub may name beside `default`, with commas between.")
    ] = ""
    worker_priority_classes: Annotated[
        str, typer.Option(help="PriorityClasses that pools in the hub may name, with commas between.")
    ] = ""
    log_format: LogFormatOption = "text"

    def certificate_terms(self) -> Terms:
        """Return the terms of certificates. Raises ConfigError: the flags about certificates do not fit together."""
        durations = (self.certificate_hours, self.authority_hours, self.certificate_settle_seconds)
        return terms_of(self.certificates, self.certificate_issuer, *durations, self.trust_domain)


def names_in(text: str) -> tuple[str, ...]:
    """Return the names of a list with commas between."""
    return tuple(filter(None, text.split(",")))
