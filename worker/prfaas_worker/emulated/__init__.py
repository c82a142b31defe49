"""An engine that computes nothing: it takes the time that a profile says, and its cache is memory without content."""
