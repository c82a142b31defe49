"""What prfaas needs of an engine, checked over HTTP: `prfaas contract`, and the same checks in tests/contract."""
