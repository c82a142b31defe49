"""The scheduler sidecar: Prometheus in, threshold out to the gateway of its pod, status out to the policy."""
