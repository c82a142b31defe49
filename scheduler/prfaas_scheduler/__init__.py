"""The scheduler sidecar: reads Prometheus, sets the threshold of its pod's gateway, writes the policy's status."""
