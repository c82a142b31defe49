"""The controller runtime around kopf: which object is reconciled when, by what it is told, and what becomes of it."""
