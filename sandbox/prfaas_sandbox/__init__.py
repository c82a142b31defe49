"""Two real Kubernetes control planes with process nodes and a shaped link on one machine, without Docker."""
