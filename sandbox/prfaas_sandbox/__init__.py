"""Two real Kubernetes control planes, process nodes and a shaped link on one machine, without Docker."""
