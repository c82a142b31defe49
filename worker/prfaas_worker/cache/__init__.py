"""The hybrid cache: pages and state slots, and the sequences and prefixes that hold them."""
