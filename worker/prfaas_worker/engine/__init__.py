"""The engine process: one model, a step loop, and what it tells its mover of caches. It knows token ids, never text."""
