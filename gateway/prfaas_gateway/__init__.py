"""The OpenAI API of one policy: relays requests to decode workers and decides where their prompts are prefilled."""
