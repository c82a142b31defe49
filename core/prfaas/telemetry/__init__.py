"""How a request is followed through gateway and workers: one form of log lines, and traces where they are wanted."""
