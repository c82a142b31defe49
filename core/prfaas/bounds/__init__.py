"""Bounds what others send: how much of a server's answer is read, of requests' bodies held, and what requests ask."""
