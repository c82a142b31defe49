"""Pure decisions of the operator, from facts to what is written. No calls, no clock."""
