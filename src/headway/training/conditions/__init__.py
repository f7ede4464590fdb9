"""Conditions that a run needs: each small module reads one of them and warns when it is bad."""
