"""The prefix index: hash chains over tokens and bytes, and the canonical form of a request. No I/O."""
