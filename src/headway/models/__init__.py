"""Models: the native decoder, its loss and costs, and in `hub` the models of transformers.

Doors: `build`, `facts`, `conformance.check_model`. It imports `config` and `core` only.
"""
