"""The native decoder's Hugging Face checkpoints: `config.json`, weights and folders, without transformers."""
