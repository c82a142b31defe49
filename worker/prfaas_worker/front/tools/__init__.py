"""Tool calls: formats of answers, and the tools of a chat request."""
