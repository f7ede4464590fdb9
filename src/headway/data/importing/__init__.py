"""Token stores of other projects, made into Headway's: Megatron, nanoGPT and llm.c, datatrove."""
