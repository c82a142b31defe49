"""Decides where a request is prefilled and decoded, and which prompts leave the hub. Pure: facts to decision."""
