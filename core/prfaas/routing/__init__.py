"""Where a request is prefilled and decoded, and how long a prompt must be to leave the hub. Pure: facts to decision."""
