"""`prfaas serve`: what it decides (plan), whom it asks (calls), what it starts (processes), and its life."""
