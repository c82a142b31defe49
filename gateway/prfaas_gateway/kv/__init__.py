"""The instances' caches: follows their event streams into the prefix index, and looks prompts up."""
