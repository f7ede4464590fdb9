"""Setup before the first step: requirements, precision, compilation, proofs and trials."""
