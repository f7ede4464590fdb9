"""Models: the native decoder, its loss and costs.

In folders: its `layers`, its `sharding`, its checkpoints of Hugging Face (`huggingface`), and in `hub` the models that
transformers computes. Doors: `build`, `facts`, `conformance.check_model`. It imports `config` and `core` only.
"""
