"""From a Service to the addresses of the pods behind it. Pure: nothing in the sandbox routes cluster IPs."""

from prfaas.errors import UnreachableError
from prfaas_sandbox.api import Object
from prfaas_sandbox.relay import Target


def endpoints(service: Object, slices: list[Object], port: int | str) -> list[Target]:
    """Return the ready (address, port) pairs behind a port of a Service.

    Args:
        service: the Service.
        slices: its EndpointSlices.
        port: number or name of one of the Service's ports.

    Raises:
        UnreachableError: the Service has no such port.

    """
    ports = service["spec"].get("ports", [])
    wanted = next((each for each in ports if port in (each["port"], each.get("name"))), None)
    if wanted is None:
        offered = ", ".join(str(each["port"]) for each in ports)
        raise UnreachableError(f"Service {service['metadata']['name']} has no port {port}; it has: {offered or 'none'}")
    name = wanted.get("name", "")
    return [
        (address, target["port"])
        for each in slices
        for target in each.get("ports") or []
        if (target.get("name") or "") == name
        for endpoint in each.get("endpoints") or []
        if endpoint.get("conditions", {}).get("ready")
        for address in endpoint["addresses"]
    ]
