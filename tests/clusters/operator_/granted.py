"""Tokens of a member as it would have granted them at another time, signed with its own key.

An API server grants ten minutes at the least, so a test that needs an old one now has no other way.
"""

import base64
import json
import time
from typing import Any

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils

from prfaas_operator.render import service_account

MADE_BY_JOIN = {"app.kubernetes.io/managed-by": service_account.MADE_BY_JOIN}


def unpadded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def dated(world, token: str, issued: int, expires: int) -> str:
    """Return the token as if the member had granted it `issued` seconds from now, until `expires` seconds from now."""
    head, body, _ = token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    now = int(time.time())
    claims |= {"iat": now + issued, "nbf": now + issued, "exp": now + expires}
    signed = f"{head}.{unpadded(json.dumps(claims).encode())}"
    key_file = world.member.cluster.kubeconfig.parent / "pki" / "service-account.key"
    key = serialization.load_pem_private_key(key_file.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    parts = utils.decode_dss_signature(key.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
    return f"{signed}.{unpadded(b''.join(part.to_bytes(32, 'big') for part in parts))}"


def secret_with(
    world, name: str, issued: int, expires: int, labels: dict[str, str], server: str | None = None
) -> dict[str, Any]:
    """Return a Secret with a kubeconfig whose token is dated; see `dated`."""
    document = world.kubeconfig(server)
    user = document["users"][0]["user"]
    user["token"] = dated(world, user["token"], issued, expires)
    body = world.secret(name, document)
    body["metadata"]["labels"] |= labels
    return body
