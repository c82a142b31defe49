"""The operator of prfaas: turns custom resources in the hub into pods of two or more clusters, and into routing tables.

controller/  the runtime around kopf: the hub's store, the reconcile queue and loops, children, statuses and Events
reconcile/   one reconcile per object: observe -> plan -> apply -> status
plan/        pure decisions over typed facts
render/      pure manifests, a file a kind
clusters/    one namespace of one API server, over `prfaas.kube`
preflight/   `prfaas preflight`: what two clusters and their path are fit for, before anything is installed
"""
