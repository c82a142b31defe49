"""Tool calls: formats of answers, and what a chat request says of tools."""
