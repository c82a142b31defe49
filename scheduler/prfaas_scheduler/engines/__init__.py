"""Where the facts of the loop stand in Prometheus: one adapter an engine, one for links, and the choice among them."""
