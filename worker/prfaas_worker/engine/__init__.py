"""The engine process: one model, a step loop, and the threads that move caches. It knows token ids, never text."""
