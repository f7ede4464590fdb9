"""The model registry: versions of named models with their evidence, aliases with a gate, cards, mirrors, signatures.

It reads run directories and exports, and writes the registry that `headway.models.versions` describes and reads.
"""
