"""The operator of prfaas: turns custom resources in the hub into pods of two or more clusters, and into routing tables.

handlers    kopf wiring: which event wakes which object
reconcile/  one reconcile per object: observe -> plan -> apply -> status
plan/       pure decisions over typed facts
render/     pure manifests, a file a kind
clusters/   the only importer of the Kubernetes client
"""
