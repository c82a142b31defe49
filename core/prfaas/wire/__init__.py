"""Every message and frame that crosses a process boundary, typed (msgspec). No I/O: the callers move the bytes."""
