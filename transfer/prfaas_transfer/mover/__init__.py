"""The mover: a process that carries an engine's caches, so that bulk bytes never take the engine's interpreter lock."""
