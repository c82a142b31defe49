"""The live page at /ui, what this gateway knows, for people: static files without a build step, and one document."""
