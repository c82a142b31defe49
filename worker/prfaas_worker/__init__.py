"""The worker: one replica of a model, as a front process with the HTTP ports and an engine process that computes."""
