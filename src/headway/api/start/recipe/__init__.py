"""A whole config for a folder of text: what is there, what this machine can do, and what follows."""
