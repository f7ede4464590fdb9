"""The remote tier: who owns a place, what is uploaded there, and how it is read back.

Doors: `tier.RemoteTier`, `acquire`, `open`. All requests go through `headway.core.storage`.
"""
