"""The process node: a node agent that runs a pod's containers as local processes."""
