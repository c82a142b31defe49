"""Pure manifests of everything the operator creates, a file a kind."""
