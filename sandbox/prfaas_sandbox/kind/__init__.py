"""Two kind clusters in Docker, with prfaas installed as real container images. `make kind` begins here."""
