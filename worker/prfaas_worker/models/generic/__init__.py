"""Every hybrid family but Kimi Linear: transformers computes, and its cache stands in our pages and slots.

`families` says which are served, and what is refused before anything is loaded; `checkpoint` loads one; `cache` puts
the cache objects that transformers' models call over our memory; `model` is the engine's `Model`. Importing
transformers takes seconds, so only `load_model` imports the last three, and only for such a checkpoint.
"""
