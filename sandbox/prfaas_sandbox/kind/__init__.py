"""Two kind clusters in Docker, with prfaas as real container images. `make kind` begins here."""
