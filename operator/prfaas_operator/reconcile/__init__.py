"""One reconcile per object, idempotent: observe -> plan -> apply -> status, woken by events and by time."""
