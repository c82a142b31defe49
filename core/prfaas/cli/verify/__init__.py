"""`prfaas verify`: proof that two engines of anybody hand requests over without changing an answer."""
