"""Access to API servers. Everything else in the operator calls them through `client.ClusterClient`."""
