"""The front process: HTTP, JSON and text. It computes nothing and never loads torch, so streams stay smooth."""
