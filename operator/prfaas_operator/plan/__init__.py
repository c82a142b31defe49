"""Pure decisions of the operator: facts in, what to write out. No calls, no clock."""
