"""The OpenAI API in front of one policy: relays requests to decode workers and chooses where to prefill each prompt."""
