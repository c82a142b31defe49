"""MemberCluster: computes its conditions from its Secret, its API server's answer and its pools.

It also decides which Secrets no pool may read, and which ones prfaas may use. A pool's author chooses the image, and so
reads everything that its pods mount. The kubeconfigs of members open other clusters, an authority makes certificates
of every cluster, and API keys are their clients'. They lie in the namespace of the hub's pools, so a template that
names one is refused in every cluster. Another cluster may be the same namespace reached by another address. Names come
first, because a pool may exist before the Secret; the schemas give new kubeconfigs and API keys no other names. Then
comes the content: older kubeconfigs have other names, and so have the authorities of issuers.

What a MemberCluster or a policy names is used only with a label: else whoever may write these objects would use every
Secret of the namespace through the operator.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from prfaas import identity, names
from prfaas.api import MemberCluster, PrefillPool
from prfaas.api.template import PodTemplate
from prfaas.conditions import rfc3339
from prfaas.errors import PrfaasError
from prfaas_operator.errors import ClusterUnreachableError, ForbiddenSecretError, reason_of
from prfaas_operator.plan.certificates_read import content
from prfaas_operator.plan.conditions import DELETING, REACHABLE, READY, REVOKED, ConditionState, no, yes
from prfaas_operator.plan.credentials import TokenFacts, parse_kubeconfig
from prfaas_operator.plan.ownership import has_labels

MADE_BY_JOIN: Final = "prfaas-cli"
"""Value of the label `managed-by` on what `prfaas cluster join` makes."""
CONTACT_TIME_STEP: Final = timedelta(minutes=1)


class Contact(NamedTuple):
    """The result of the last contact with a member's API server, and its token.

    `error` None: the server answered. `token` None: the credential is no token, or does not expire.
    """

    server_version: str = ""
    error: PrfaasError | None = None
    token: TokenFacts | None = None


def users_of(cluster: str, pools: Iterable[PrefillPool]) -> tuple[str, ...]:
    """Return the names of the pools that use a member cluster, in order."""
    return tuple(sorted(pool.metadata.name for pool in pools if pool.spec.cluster_name == cluster))


def secret_is_needed(secret: str, kubeconfigs: Mapping[str, str], in_use: Collection[str]) -> bool:
    """Return true if a kubeconfig Secret must stay, because a pool runs in a cluster that it reaches.

    `kubeconfigs` are the Secrets by cluster, `in_use` the clusters that pools name.
    """
    return any(cluster in in_use for cluster, named in kubeconfigs.items() if named == secret)


def conditions(cluster: MemberCluster, contact: Contact, users: tuple[str, ...]) -> Mapping[str, ConditionState]:
    """Return the conditions Reachable and Ready.

    A credential or permission problem leaves the server reachable. A problem before the first call (no Secret, a
    refused kubeconfig) leaves Reachable unknown.
    """
    ready = _deleting(users) if cluster.metadata.deletion_timestamp else _ready(cluster, contact)
    return {REACHABLE: _reachable(contact), READY: ready}


def _reachable(contact: Contact) -> ConditionState:
    error = contact.error
    if error is None:
        return yes("Answered", f"the API server answered, version {contact.server_version}")
    if isinstance(error, ClusterUnreachableError):
        return no(error.reason, str(error))
    if reason_of(error) in {"Forbidden", "Unauthorized", "TokenExpired"}:
        return yes("Answered", "the API server answered, but refused the call; see the condition Ready")
    return ConditionState("Unknown", reason_of(error), "not contacted; see the condition Ready")


def _ready(cluster: MemberCluster, contact: Contact) -> ConditionState:
    if cluster.spec.revoked:
        return no(REVOKED, f"cut off; `prfaas cluster join {cluster.metadata.name}` admits it again")
    if contact.error is not None:
        return no(reason_of(contact.error), str(contact.error))
    return yes("AllReady", f"pools can run in namespace {cluster.spec.namespace} of {cluster.metadata.name}")


def _deleting(users: tuple[str, ...]) -> ConditionState:
    if users:
        return no("InUse", f"stays until no PrefillPool names it; delete {', '.join(users)} first")
    return no(DELETING, "no pool needs this cluster any more")


def contact_time(known: str | None, now: datetime) -> str:
    """Return the lastContactTime after an answer: it changes once a minute, so that probes cause no writes.

    A time in the future came from a wrong clock and is replaced.
    """
    if known and abs(now - datetime.fromisoformat(known)) < CONTACT_TIME_STEP:
        return known
    return rfc3339(now)


def admitted_time(cluster: MemberCluster, now: datetime) -> str | None:
    """Return the admittedTime: it stays until the cluster is revoked, and one that is admitted again gets another."""
    return None if cluster.spec.revoked else cluster.status.admitted_time or rfc3339(now)


def place_of(cluster: MemberCluster) -> str:
    """Return what the cached bytes of a cluster are known by, another thing each time that it is admitted.

    Until its status has the time, its generation stands for that: a revocation and a return each make another one.
    """
    return f"{cluster.metadata.name}@{cluster.status.admitted_time or cluster.metadata.generation}"


RESERVED: Final = re.compile(
    rf"{names.AUTHORITY_SECRET}|{names.TLS_SECRET}|{names.GATEWAY_TLS_SECRET}|prfaas-.*-issued"
    rf"|.*{names.KUBECONFIG_SECRET_SUFFIX}|.*{names.API_KEYS_SECRET_SUFFIX}"
)
"""The authority, the clusters' certificates, those of an issuer, kubeconfigs of members, and API keys of gateways."""


def check_secrets(template: PodTemplate) -> None:
    """Refuse a template that reads a Secret of the operator or of a gateway.

    Raises ForbiddenSecretError: the template names such a Secret; the message has the Secret and the field.
    """
    for name, where in read_by(template):
        if RESERVED.fullmatch(name):
            raise ForbiddenSecretError(
                f"Secret {name} is the operator's or a gateway's, and no pool may read it: remove it from {where}, "
                "or give a Secret of yours another name"
            )


SERVICE_ACCOUNT_TOKEN: Final = "kubernetes.io/service-account-token"  # noqa: S105  # a type
AUTHORITIES: Final = ((names.TLS_CERT, names.TLS_KEY), (names.TLS_TRUSTED, names.AUTHORITY_KEY))
"""Entries with an authority's certificate and key: of cert-manager and of the operator, and of `prfaas certs init`."""


def check_content(secret: Mapping[str, Any], where: str, kubeconfigs: Collection[tuple[str, str]]) -> None:
    """Refuse a Secret, which the field `where` of a template names, for what is in it.

    `kubeconfigs` are the Secrets that MemberClusters name, each with its key. One that holds no kubeconfig stays its
    owner's: whoever names a Secret takes it from no pool.

    Raises ForbiddenSecretError: it opens a cluster or gateways, or signs certificates.
    """
    name, what = secret["metadata"]["name"], ""
    if any(_is_given(secret, use) for use in (names.KUBECONFIG_SECRET, names.API_KEYS_SECRET)):
        what = "is given to prfaas by its label"
    elif any(_opens_a_cluster(secret, key) for named, key in kubeconfigs if named == name):
        what = "holds the kubeconfig of a MemberCluster"
    elif secret.get("type") == SERVICE_ACCOUNT_TOKEN:
        what = "holds a service account's token"
    elif any(content(secret, key) and identity.is_authority(content(secret, signer)) for signer, key in AUTHORITIES):
        what = "holds the key of a certificate authority"
    if what:
        raise ForbiddenSecretError(f"Secret {name} {what}, and no pool may read it: remove it from {where}")


def _opens_a_cluster(secret: Mapping[str, Any], key: str) -> bool:
    try:
        parse_kubeconfig(content(secret, key))
    except PrfaasError:
        return False
    return True


def read_by(template: PodTemplate) -> Iterator[tuple[str, str]]:
    """Yield every Secret that a pod of the template would read, and the field that names it."""
    for volume in template.volumes:
        if volume.secret is not None:
            yield volume.secret.secret_name, f"template.volumes[{volume.name}]"
    for variable in template.env:
        if variable.value_from is not None and variable.value_from.secret_key_ref is not None:
            yield variable.value_from.secret_key_ref.name, f"template.env[{variable.name}]"
    for reference in template.image_pull_secrets:
        yield reference.name, "template.imagePullSecrets"


def check_given(secret: Mapping[str, Any], use: str) -> None:
    """Refuse a Secret that is not for prfaas to use; `use` is the label's value.

    Raises ForbiddenSecretError: its owner did not label it so. API keys need their name, too: by it no pool reads them.
    """
    name = secret["metadata"]["name"]
    if use == names.API_KEYS_SECRET and not name.endswith(names.API_KEYS_SECRET_SUFFIX):
        raise ForbiddenSecretError(
            f"Secret {name} is not named NAME{names.API_KEYS_SECRET_SUFFIX}, and gateways use no other: copy it to "
            f"such a name with the label {names.LABEL_SECRET}={use}, and name the copy in gateway.apiKeysSecretRef"
        )
    if not _is_given(secret, use):
        label = f"{names.LABEL_SECRET}={use}"
        raise ForbiddenSecretError(
            f"Secret {name} is not labelled {label}, and prfaas uses no other; if it was made for this, "
            f"run `kubectl label secret {name} {label}`"
        )


def _is_given(secret: Mapping[str, Any], use: str) -> bool:
    """Return true if a Secret's owner gave it to prfaas. A former `prfaas cluster join` wrote no label for that."""
    labels = secret["metadata"].get("labels") or {}
    by_join = {names.LABEL_MANAGED_BY: MADE_BY_JOIN}
    if use == names.KUBECONFIG_SECRET and names.LABEL_SECRET not in labels and has_labels(secret, by_join):
        return True
    return has_labels(secret, {names.LABEL_SECRET: use})
