"""Access to API servers. Only this package imports the Kubernetes client; everything else sees `api.Cluster`."""
