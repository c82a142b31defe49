"""Access to API servers. The rest of the operator calls them through `client.ClusterClient` only."""
