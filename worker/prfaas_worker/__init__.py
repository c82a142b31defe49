"""The worker: one replica of a model, as a front process (HTTP), an engine process that computes, and its mover."""
