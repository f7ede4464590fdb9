"""What is done once before the first step: requirements, arithmetic, compiling, proofs and trials."""
