"""`prfaas serve`: its flags (command), what it decides (plan), and the processes that it runs (run)."""
