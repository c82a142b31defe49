"""Every hybrid family but Kimi Linear: transformers computes, and its cache stands in our pages and slots.

`families` says which are served, and what is refused before anything is loaded; `cache` puts the cache objects that
transformers' models call over our memory; `model` loads a checkpoint and is the engine's `Model`. Importing
transformers takes seconds, so only `load_model` imports the last two, and only for such a checkpoint.
"""
