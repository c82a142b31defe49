"""The hybrid cache: pages and state slots, and which sequence or prefix holds them."""
