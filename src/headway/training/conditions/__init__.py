"""Conditions that a run needs around it: each is one small module that reads something and says when it is not well."""
