"""Which Secrets no pool may read: a pool's author chooses the image, and so reads whatever its pods mount.

The kubeconfigs of members open other clusters, and the authority makes certificates of every cluster. They lie in the
namespace of the hub's pools, so a template that names one is refused, wherever its pool runs: what looks like another
cluster may be the same namespace by another way. Names decide, not labels: a pool may be there before the Secret.
"""

import re
from collections.abc import Collection, Iterator
from typing import Final

from prfaas import names
from prfaas.api.template import PodTemplate
from prfaas_operator.errors import ForbiddenSecretError

RESERVED: Final = re.compile(
    rf"{names.AUTHORITY_SECRET}|{names.TLS_SECRET}|prfaas-.*-issued|.*{names.KUBECONFIG_SECRET_SUFFIX}"
)
"""The authority, the clusters' certificates, those of an issuer, and what `prfaas cluster join` makes."""


def check(template: PodTemplate, kubeconfigs: Collection[str]) -> None:
    """Refuse a template that would read what is not its author's; `kubeconfigs` are Secrets that MemberClusters name.

    Raises:
        ForbiddenSecretError: the template names such a Secret; the message says which and where.

    """
    for name, where in _read_by(template):
        if name in kubeconfigs or RESERVED.fullmatch(name):
            raise ForbiddenSecretError(
                f"Secret {name} is the operator's own and no pool may read it: remove it from {where}, "
                "or give a Secret of yours another name"
            )


def _read_by(template: PodTemplate) -> Iterator[tuple[str, str]]:
    """Yield every Secret that a pod of the template would read, and the field that names it."""
    for volume in template.volumes:
        if volume.secret is not None:
            yield volume.secret.secret_name, f"template.volumes[{volume.name}]"
    for variable in template.env:
        if variable.value_from is not None and variable.value_from.secret_key_ref is not None:
            yield variable.value_from.secret_key_ref.name, f"template.env[{variable.name}]"
