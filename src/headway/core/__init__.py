"""Basics that every room may import: errors, files, console, storage, shared types. It imports no other room.

Importing a module of it does not load torch.
"""
