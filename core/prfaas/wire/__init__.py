"""Every message and frame that crosses a process boundary, typed (msgspec). No I/O: shells bring and take bytes."""
