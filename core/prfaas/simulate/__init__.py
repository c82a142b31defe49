"""A discrete-event simulator: the live system's own decisions over pools, links and caches that cost no hardware."""
