"""What takes long to make and is kept on this machine: built programs, Go, and environments of Python packages."""
