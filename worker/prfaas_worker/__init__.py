"""The worker: one replica of a model, as a front process that speaks HTTP and an engine process that computes."""
