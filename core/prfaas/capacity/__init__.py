"""Computes what instances and links can carry, from measured profiles. Pure functions and no clock."""
