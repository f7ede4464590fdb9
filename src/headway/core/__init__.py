"""Basics that every room may import: errors, output, shared types, protocols of models. It imports no other room.

In folders: `files`, `storage` (behind URLs), `credentials`, `machine`, `process`, `startup`, and `coordination` of an
attempt's processes. Importing a module of it does not load torch.
"""
