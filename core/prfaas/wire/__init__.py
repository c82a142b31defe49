"""Every message and frame that crosses a process boundary, typed (msgspec). No I/O: shells bring bytes and take bytes."""
