"""What instances and links can carry: measured profiles, and what follows from them. Pure functions and no clock."""
