"""The OpenAI front door of one policy: relays requests to decode workers and says where the prompt is prefilled."""
