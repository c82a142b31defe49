"""What instances have cached: their event streams followed into the prefix index, and asked for each prompt."""
