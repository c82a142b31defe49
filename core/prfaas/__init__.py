"""prfaas core: the decisions, the custom resources and the wire messages that every part of the system shares.

Everything in `api`, `routing` and `wire` is pure: no sockets, files, clocks, torch or Kubernetes client. I/O lives in
the deployables (operator, gateway, scheduler, worker, sandbox) and in the outer layers `cli` and `kube`.
"""
