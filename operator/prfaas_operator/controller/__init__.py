"""The controller runtime around kopf: decides when each object is reconciled, and writes the results."""
