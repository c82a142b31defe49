"""Follows the instances' cache events into the prefix index, and matches each prompt."""
