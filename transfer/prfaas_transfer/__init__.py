"""Moving hybrid caches between instances over TCP: threads with blocking sockets, beside the engine's step loop."""
