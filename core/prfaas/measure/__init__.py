"""Measures a running server as its clients see it: what to send, what the answers say, and the profile they make."""
